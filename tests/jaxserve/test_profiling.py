"""`--profile`: a trace that the usual viewers can read, of the steps that were asked for."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import jax
import pytest

from jaxserve import SamplingParams
from jaxserve.errors import ConfigError
from tests.jaxserve.tiny import tiny_llm

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, detokenize=False)


def events(directory: Path) -> list[dict[str, Any]]:
    """Of the one trace under `directory`, in the trace event format."""
    (path,) = directory.glob("plugins/profile/*/*.trace.json.gz")
    with gzip.open(path) as file:
        return [event for event in json.load(file)["traceEvents"] if "name" in event]


def named(found: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    return [event for event in found if event["name"] == name]


def test_the_trace_has_the_steps_that_were_asked_for_and_their_parts(tmp_path):
    lines: list[str] = []
    with tiny_llm(profile=str(tmp_path / "new" / "dir"), profile_steps=5, report=lines.append) as llm:
        llm.generate([[1, 2, 3]], GREEDY)  # 12 steps
        found = events(tmp_path / "new" / "dir")  # written while the engine goes on
        llm.generate([[1, 2, 3]], GREEDY)  # not traced again
    steps = named(found, "step")
    assert sorted(int(event["args"]["step_num"]) for event in steps) == [0, 1, 2, 3, 4]
    assert len(named(found, "schedule")) == len(named(found, "execute")) == 5
    assert len(named(found, "update")) == 4  # the first step has no results to take
    for name in ("schedule", "execute", "update"):
        for event in named(found, name):
            assert any(
                step["tid"] == event["tid"]
                and step["ts"] <= event["ts"]
                and event["ts"] + event["dur"] <= step["ts"] + step["dur"] + 1e-3  # rounding
                for step in steps
            )
    assert list((tmp_path / "new" / "dir").glob("plugins/profile/*/*.xplane.pb"))  # what XProf reads
    assert [line for line in lines if str(tmp_path / "new" / "dir") in line]


def test_an_engine_that_ends_earlier_writes_what_it_has(tmp_path):
    with tiny_llm(profile=str(tmp_path), profile_steps=1000) as llm:
        llm.generate([[1, 2, 3]], GREEDY)
        assert not list(tmp_path.glob("plugins/profile/*/*"))
    assert len(named(events(tmp_path), "step")) >= 12


def test_an_engine_without_requests_writes_no_trace(tmp_path):
    with tiny_llm(profile=str(tmp_path)) as llm:
        llm.check_integrity()  # wakes the engine's thread
    assert not list(tmp_path.iterdir())


def test_a_profiler_that_runs_already_is_left_alone(tmp_path, caplog):
    with jax.profiler.trace(str(tmp_path / "outside")), tiny_llm(profile=str(tmp_path / "own")) as llm:
        (output,) = llm.generate([[1, 2, 3]], GREEDY)
    assert len(output.outputs[0].token_ids) == 12
    assert "profile: not started" in caplog.text
    assert named(events(tmp_path / "outside"), "step")
    assert not list((tmp_path / "own").iterdir())


def test_a_trace_that_cannot_be_written_ends_no_request(tmp_path, caplog, monkeypatch):
    stop = jax.profiler.stop_trace

    def full_disk() -> None:
        stop()  # where this itself fails, JAX keeps the process's profiler occupied
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: no space left")

    monkeypatch.setattr(jax.profiler, "stop_trace", full_disk)
    with tiny_llm(profile=str(tmp_path), profile_steps=2) as llm:
        for _ in range(2):
            (output,) = llm.generate([[1, 2, 3]], GREEDY)
            assert len(output.outputs[0].token_ids) == 12
    assert "profile: the trace could not be written: RESOURCE_EXHAUSTED" in caplog.text


def test_a_directory_that_may_not_be_written_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("jaxserve.profiling.os.access", lambda path, mode: False)
    with pytest.raises(ConfigError, match="profile: cannot write to"):
        tiny_llm(profile=str(tmp_path))


def test_bad_settings_are_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="profile: cannot make"):
        tiny_llm(profile=str(tmp_path / "file" / "below"))
    with pytest.raises(ConfigError, match="profile_steps"):
        tiny_llm(profile=str(tmp_path), profile_steps=0)
