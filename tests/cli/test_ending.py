"""How the process ends: with the right code, and never with a crash or a long wait."""

import subprocess
import sys

import pytest

_STUCK = """
import atexit, sys, time
from types import SimpleNamespace
from jaxserve.cli import generate
from jaxserve.cli.main import main

async def work(*_):
    print("worked", flush=True)
    {then}

generate._CLOSE_SECONDS = 0.01
generate._generate = work
engine = SimpleNamespace(shutdown=lambda: time.sleep(600), default_sampling_params={{}})
generate._load = lambda values: engine
atexit.register(print, "the interpreter ended by itself")
sys.exit(main(["generate", "-p", "x"]))
"""


@pytest.mark.parametrize(
    ("then", "code"),
    [("pass", 0), ("raise BrokenPipeError", 1), ("raise ValueError", 1), ("raise KeyboardInterrupt", 130)],
)
def test_an_engine_that_does_not_stop_is_not_waited_for(then, code):
    """The interpreter must not end by itself either: it may crash while a compilation is under way."""
    ended = subprocess.run(
        [sys.executable, "-c", _STUCK.format(then=then)], capture_output=True, text=True, timeout=60
    )
    assert (ended.returncode, ended.stdout) == (code, "worked\n"), ended.stderr
