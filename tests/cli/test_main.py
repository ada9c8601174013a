"""The command's outside: exit codes, error lines, help."""

import gc
import re
import socket
import subprocess
import sys

import pytest

import jaxserve
from jaxserve.cli import doctor, self_test, serve
from jaxserve.cli import main as entry
from jaxserve.cli.main import main
from jaxserve.engine_args import EngineArgs

pytestmark = pytest.mark.usefixtures("no_variables")


@pytest.fixture
def no_variables(monkeypatch):
    import os

    for name in [name for name in os.environ if name.startswith("JAXSERVE_")]:
        monkeypatch.delenv(name)


def error_line(capsys):
    first, *_ = capsys.readouterr().err.splitlines()
    assert first.startswith("jaxserve: error: ")
    return first


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["serve", "--max-modle-len", "5"], "did you mean '--max-model-len'"),
        (["serve", "--port", "x"], "is not an integer"),
        (["serve", "--enable-lora"], "unknown argument '--enable-lora'"),
        (["serve", "--ssl-cert", "x"], "unknown argument"),  # no abbreviations
        (["serve", "--dtype", "float64"], "float32"),
        (["nothing"], "invalid choice"),
        (["bench"], "benchmark"),
        (["bench", "nothing"], "benchmark"),
        (["generate"], "-p TEXT"),
        (["plan"], "--topology"),
        (["plan", "--topology", "v6e:2x2", "--context", "0"], "at least 1"),
        (["plan", "--topology", "v6e:2x2", "--buckets", "some"], "largest, all"),
        (["chat", "--url", "localhost:8000"], "http://"),
        (["serve", "--config", "/nonexistent.yaml"], "/nonexistent.yaml"),
    ],
)
def test_wrong_usage_is_exit_2(capsys, arguments, text):
    assert main(arguments) == 2
    assert text in error_line(capsys)


def test_no_command_shows_the_help(capsys):
    assert main([]) == 2
    assert "serve" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["serve", "generate", "chat", "plan", "models", "doctor"])
def test_every_help_has_an_example(capsys, command):
    with pytest.raises(SystemExit) as end:
        main([command, "--help"])
    assert end.value.code == 0
    assert f"examples:\n  jaxserve {command}" in capsys.readouterr().out


def test_version(capsys):
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"jaxserve {jaxserve.__version__}\n"


@pytest.mark.parametrize("debug", [False, True])
def test_a_failure_is_one_line_and_exit_1(capsys, tmp_path, debug):
    missing = str(tmp_path / "missing.gguf")
    assert main(["generate", missing, "-p", "x", *["--debug"] * debug]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1].startswith("jaxserve: error: ")
    assert missing in lines[-1]
    assert (len(lines) == 1) is not debug


def test_a_wrong_engine_argument_is_exit_1(capsys):
    assert main(["serve", "--max-model-len", "0"]) == 1
    assert "--max-model-len must be" in error_line(capsys)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--max-num-seqs", "0"], "--max-num-seqs must be an integer of at least 1"),
        (["--max-logprobs", "21"], "--max-logprobs must be at most 20"),
        (["--memory-utilization", "2"], "--memory-utilization must be in"),
        (["--port", "70000"], "--port must be in"),
        (["--admin-port", "-1"], "--admin-port must be in"),
        (["--drain-timeout", "-1"], "--drain-timeout must not be negative"),
        (["--step-timeout", "0"], "--step-timeout must be above 0"),
        (["--max-stop-strings", "0"], "--max-stop-strings must be in"),
        (["--allowed-origins", "x"], "--allowed-origins: 'x' is neither"),
        (["--root-path", "x"], "--root-path must begin with /"),
        (["--ssl-keyfile", "x"], "--ssl-keyfile needs --ssl-certfile"),
        (["--ssl-certfile", "/none.pem"], "--ssl-certfile /none.pem: cannot be read: No such file"),
        (["--api-key", ""], "--api-key must not be empty"),
        (["--served-model-name", ""], "--served-model-name must not be empty"),
        (["--api-keys-file", "/none"], "--api-keys-file: /none cannot be read: No such file"),
        (["--otlp-traces-endpoint", "x"], "--otlp-traces-endpoint must be"),
        (["--host", "no-such-host.invalid"], "--host no-such-host.invalid: there is no such host"),
        (["--host", "203.0.113.1"], "cannot listen on 203.0.113.1 port 0: "),
    ],
)
def test_a_wrong_setting_is_one_line_that_names_the_flag_as_typed(capsys, monkeypatch, arguments, message):
    monkeypatch.setattr("jaxserve_server.logs.configure_logging", lambda log_format: None)
    assert main(["serve", *([] if "--port" in arguments else ["--port", "0"]), *arguments]) == 1
    assert f"jaxserve: error: {message}" in error_line(capsys)


@pytest.mark.parametrize("flag", ["--port", "--admin-port"])
def test_a_port_that_is_taken_is_named(capsys, monkeypatch, flag):
    monkeypatch.setattr("jaxserve_server.logs.configure_logging", lambda log_format: None)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", *([] if flag == "--port" else ["--port", "0"]), flag, str(port)]) == 1
    assert error_line(capsys) == f"jaxserve: error: port {port} is taken: choose another with {flag}"


@pytest.fixture
def served(monkeypatch):
    """What `serve` would have started with."""
    import jaxserve_server.serve

    calls = []

    def fake(config, load, names):
        calls.append((config, names))
        return 0

    monkeypatch.setattr(jaxserve_server.serve, "serve", fake)
    monkeypatch.setattr("jaxserve_server.logs.configure_logging", lambda log_format: None)
    return calls


def test_serve_takes_flags_environment_and_file(served, tmp_path, monkeypatch):
    config = tmp_path / "serve.yaml"
    config.write_text("model: org/name\nhost: 0.0.0.0\nport: 1\ndrain-timeout: 5\n")
    monkeypatch.setenv("JAXSERVE_PORT", "2")
    monkeypatch.setenv("JAXSERVE_API_KEY", "a,b")
    monkeypatch.setenv("JAXSERVE_PROMPT", "another command's")
    assert main(["serve", "--config", str(config), "--log-requests"]) == 0
    ((settings, names),) = served
    assert (settings.host, settings.port, settings.drain_timeout) == ("0.0.0.0", 2, 5.0)
    assert settings.api_key == ("a", "b")
    assert settings.log_requests
    assert names == ("org/name",)


def test_serve_names(served):
    main(["serve"])
    main(["serve", "org/name"])
    main(["serve", "org/name", "--served-model-name", "a", "--served-model-name", "b"])
    assert [names for _, names in served] == [("smollm2-135m-instruct",), ("org/name",), ("a", "b")]


@pytest.mark.parametrize(("flags", "most"), [([], 1024), (["--max-queue", "5"], 5)])
def test_the_queue_of_a_server_has_an_end(monkeypatch, flags, most):
    import jaxserve_server.serve
    from jaxserve.async_engine import AsyncLLMEngine

    given = []
    monkeypatch.setattr(jaxserve_server.serve, "serve", lambda config, load, names: load() or 0)
    monkeypatch.setattr("jaxserve_server.logs.configure_logging", lambda log_format: None)
    monkeypatch.setattr(AsyncLLMEngine, "from_engine_args", given.append)
    try:
        assert main(["serve", *flags]) == 0
    finally:
        gc.unfreeze()
    assert [args.max_queue for args in given] == [most]
    assert EngineArgs().max_queue is None


@pytest.mark.parametrize("command", entry.COMMANDS, ids=lambda command: command.name)
def test_the_help_says_what_every_number_counts(command):
    for options in command.options().values():
        for option in options.values():
            shown = option.read("1") if not option.is_switch and option.choices is None else None
            if isinstance(shown, int):
                assert option.shown_as in ("N", "BYTES", "PORT"), option.name
            if isinstance(shown, float):
                assert option.shown_as in ("SECONDS", "FRACTION", "RATIO", "NUMBER"), option.name
            if option.name in ("max_queue", "request_timeout"):
                assert re.search(r"\(default: (1024|no limit)\)", option.described), option.name


def test_generate_notes_the_mode_that_runs_and_why(monkeypatch):
    from jaxserve.async_engine import AsyncLLMEngine
    from jaxserve.cli import generate
    from jaxserve.errors import ConfigError

    def load(args, report):
        report("mode: exact float32: no C++ compiler")
        report("KV pool: 5 pages")
        raise ConfigError("enough")

    noted = []
    monkeypatch.setattr(AsyncLLMEngine, "from_engine_args", load)
    monkeypatch.setattr(generate, "note", lambda text, end="\n": noted.append(text))
    assert main(["generate", "-p", "x"]) != 0
    assert noted[1:] == ["mode: exact float32: no C++ compiler"]  # the first: it loads


def test_a_command_that_fails_unexpectedly_names_the_class(capsys, monkeypatch):
    def fail(values):
        raise KeyError("x")

    command = serve.COMMAND
    monkeypatch.setattr(entry, "COMMANDS", (type(command)("serve", "h", "e", fail),))
    assert main(["serve"]) == 1
    assert error_line(capsys) == "jaxserve: error: KeyError: 'x'"


def test_models_lists_the_tables_of_the_code(capsys):
    assert main(["models"]) == 0
    out = capsys.readouterr().out
    for text in (
        "smollm2-135m-instruct",
        "LlamaForCausalLM",
        "GGUF",
        "safetensors",
        "mosaic_tpu",
        "h200",
        "avx2",
    ):
        assert text in out


def test_doctor_says_ok_and_notices_a_wrong_engine(capsys, monkeypatch):
    assert main(["doctor"]) == 0
    assert "OK: " in capsys.readouterr().out
    monkeypatch.setattr(doctor, "_problems", lambda: iter(["prompt of 5 tokens: differs"]))
    assert main(["doctor"]) == 1
    assert "FAILED" in capsys.readouterr().out


def test_the_self_tests_model_is_causal():
    weights = self_test.random_weights()
    tokens = self_test.greedy(weights, [1, 2, 3], 4)
    assert self_test.greedy(weights, [1, 2, 3, tokens[0]], 3) == tokens[1:]


def test_help_does_not_load_jax():
    code = (
        "import sys; from jaxserve.cli.main import build_parser; build_parser(); print('jax' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "False\n"
