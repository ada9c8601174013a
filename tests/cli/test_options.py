"""Flags, environment and file: which value wins, and what is an error."""

import argparse
from dataclasses import dataclass, field
from typing import Literal

import pytest

from jaxserve.cli.options import UsageError, options_of, resolve


@dataclass(frozen=True)
class Settings:
    port: int = field(default=8000, metadata={"help": "the port"})
    ratio: float | None = field(default=None, metadata={"help": "100% or less", "aliases": ("old_ratio",)})
    kind: str = field(default="a", metadata={"help": "a kind", "choices": ("a", "b")})
    mode: Literal["x", "y"] = field(default="x", metadata={"help": "a mode"})
    names: tuple[str, ...] = field(default=(), metadata={"help": "names", "aliases": ("-n",)})
    caching: bool = field(default=True, metadata={"help": "cache"})
    size: int | str = field(default="auto", metadata={"help": "a size"})
    internal: int = 0


OPTIONS = {option.name: option for option in options_of(Settings)}


def parse(*arguments):
    parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
    for option in OPTIONS.values():
        option.add_to(parser.add_argument_group())
    return vars(parser.parse_args(arguments))


def values(*arguments, env=None, config=None, elsewhere=()):
    return resolve(OPTIONS, parse(*arguments), env or {}, config and str(config), elsewhere)


def test_every_kind_of_flag():
    given = values(
        *"--port 1 --ratio 0.5 --kind b --mode y -n u --names v --no-caching --size 7".split(),
    )
    assert given == {
        "port": 1,
        "ratio": 0.5,
        "kind": "b",
        "mode": "y",
        "names": ("u", "v"),
        "caching": False,
        "size": 7,
    }


def test_what_nobody_gives_is_left_to_the_dataclass():
    assert values() == {}
    assert "internal" not in OPTIONS


def test_text_and_numbers_of_a_union():
    assert values("--size", "auto") == {"size": "auto"}


@pytest.mark.parametrize("flag", ["--ratio", "--old-ratio"])
def test_an_alias_is_the_same_flag(flag):
    assert values(flag, "0.25") == {"ratio": 0.25}


def test_flag_before_environment_before_file(tmp_path):
    config = tmp_path / "c.yaml"
    config.write_text("port: 1\nkind: b\nmode: y\nnames: [p, q]\nold-ratio: 0.5\n")
    env = {"JAXSERVE_PORT": "2", "JAXSERVE_KIND": "a", "HOME": "/"}
    assert values("--port", "3", env=env, config=config) == {
        "port": 3,
        "kind": "a",
        "mode": "y",
        "names": ("p", "q"),
        "ratio": 0.5,
    }


@pytest.mark.parametrize(("text", "expected"), [("1", True), ("TRUE", True), ("off", False), ("no", False)])
def test_switches_from_the_environment(text, expected):
    assert values(env={"JAXSERVE_CACHING": text}) == {"caching": expected}


def test_lists_from_the_environment_are_separated_by_commas():
    assert values(env={"JAXSERVE_NAMES": "a, b"}) == {"names": ("a", "b")}


@pytest.mark.parametrize(
    ("env", "text"),
    [
        ({"JAXSERVE_PROT": "1"}, "did you mean 'port'"),
        ({"JAXSERVE_PORT": "x"}, "PORT: 'x' is not an integer"),
        ({"JAXSERVE_RATIO": "x"}, "'x' is not a number"),
        ({"JAXSERVE_KIND": "c"}, "'c' is not one of a, b"),
        ({"JAXSERVE_CACHING": "maybe"}, "not true or false"),
        ({"JAXSERVE_INTERNAL": "1"}, "unknown key"),
    ],
)
def test_a_wrong_variable_is_an_error(env, text):
    with pytest.raises(UsageError, match=text):
        values(env=env)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("ratio: 0.5\nold-ratio: 0.6\n", "ratio is given twice"),
        ("prot: 1", "unknown key 'prot'; did you mean 'port'"),
        ("port: 1.5", "'1.5' is not an integer"),
        ("port: [1]", "single value"),
        ("- port", "must be a mapping"),
        ("a: [", "cannot be read as YAML"),
    ],
)
def test_a_wrong_file_is_an_error_that_names_it(tmp_path, content, text):
    config = tmp_path / "c.yaml"
    config.write_text(content)
    with pytest.raises(UsageError, match=text) as error:
        values(config=config)
    assert str(config) in str(error.value)


def test_a_missing_file_is_an_error(tmp_path):
    with pytest.raises(UsageError, match=r"none\.yaml"):
        values(config=tmp_path / "none.yaml")


def test_other_commands_options_are_passed_over(tmp_path):
    config = tmp_path / "c.yaml"
    config.write_text("elsewhere: 1\n")
    assert values(env={"JAXSERVE_ELSEWHERE": "1"}, config=config, elsewhere={"elsewhere"}) == {}


def test_variables_that_are_no_flags():
    env = {
        "JAXSERVE_CACHE": "/tmp",
        "JAXSERVE_PORT": "tcp://10.0.0.1:8000",
        "JAXSERVE_SERVICE_HOST": "10.0.0.1",
        "JAXSERVE_PORT_8000_TCP_ADDR": "10.0.0.1",
    }
    assert values(env=env) == {}


def test_an_empty_file_gives_nothing(tmp_path):
    config = tmp_path / "c.yaml"
    config.write_text("")
    assert values(config=config) == {}
