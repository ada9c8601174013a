"""Buckets and the table of programs."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import jax
import pytest

from jaxserve.batch import Bucket
from jaxserve.compilation import ProgramTable, bucket_ladders, use_compilation_cache
from jaxserve.errors import ConfigError


@pytest.mark.parametrize(
    ("seqs", "tokens"), [(1, 1), (1, 16), (4, 64), (32, 512), (48, 100), (256, 2048), (64, 16)]
)
@pytest.mark.parametrize("padding_is_cheap", [False, True])
def test_the_ladders_hold_every_batch_the_scheduler_can_make(
    seqs: int, tokens: int, padding_is_cheap: bool
) -> None:
    decode, mixed = bucket_ladders(seqs, tokens, padding_is_cheap=padding_is_cheap)
    buckets = decode + mixed
    for rows in range(1, min(seqs, tokens) + 1):
        assert any(b.holds(rows, rows, True) for b in decode)
        assert any(b.holds(tokens, rows, False) for b in mixed)
    assert len(buckets) == len(set(buckets)) <= (8 if padding_is_cheap else 24)
    assert all(b.num_tokens == b.num_rows for b in decode)


class Compiler:
    """Compiles a bucket to its own name; background compilations wait to be let through."""

    def __init__(self) -> None:
        self.done: list[Bucket] = []
        self.gate = threading.Event()
        self.error: Exception | None = None

    def __call__(self, bucket: Bucket) -> Any:
        if threading.current_thread() is not threading.main_thread():
            assert self.gate.wait(30)
            if self.error is not None:
                raise self.error
        self.done.append(bucket)
        return lambda: bucket


SMALL, MIDDLE, WIDE = Bucket(1, 1, True), Bucket(16, 4, False), Bucket(64, 8, False)


def test_a_wider_program_serves_at_once_while_the_tight_one_compiles() -> None:
    compiler = Compiler()
    table = ProgramTable([WIDE, SMALL, MIDDLE], compiler)
    table.compile_now(WIDE)
    assert table.choose(10, 2, False)[0] == WIDE
    assert table.choose(10, 2, False)[0] == WIDE
    assert compiler.done == [WIDE]
    compiler.gate.set()
    table.wait()
    assert table.choose(10, 2, False)[0] == MIDDLE
    assert compiler.done == [WIDE, MIDDLE]
    assert table.num_compilations == 2
    table.close()


def test_only_what_nothing_compiled_can_hold_is_waited_for() -> None:
    compiler = Compiler()
    table = ProgramTable([WIDE, SMALL, MIDDLE], compiler)
    table.compile_now(SMALL)
    assert table.choose(3, 2, False)[0] == MIDDLE
    assert table.choose(1, 1, True)[0] == SMALL
    assert compiler.done == [SMALL, MIDDLE]


def test_each_program_is_offered_for_a_first_run_once_unless_a_batch_ran_it() -> None:
    table = ProgramTable([WIDE, SMALL, MIDDLE], Compiler())
    for bucket in (SMALL, WIDE):
        table.compile_now(bucket)
    table.choose(1, 1, True)
    unused = table.take_unused()
    assert unused is not None
    assert unused[0] == WIDE
    assert table.take_unused() is None


def test_a_compilation_that_fails_in_the_background_is_raised_to_the_engine() -> None:
    compiler = Compiler()
    compiler.error = RuntimeError("out of memory")
    table = ProgramTable([WIDE, MIDDLE], compiler)
    table.compile_now(WIDE)
    table.choose(10, 2, False)
    compiler.gate.set()
    with pytest.raises(RuntimeError, match="out of memory"):
        table.wait()
    with pytest.raises(RuntimeError, match="out of memory"):
        table.choose(10, 2, False)
    table.close()


def test_an_interpreter_that_ends_waits_for_the_compilation_under_way() -> None:
    """Without it the process crashes: XLA's code runs on while the interpreter is taken down."""
    script = """
import time
from jaxserve.batch import Bucket
from jaxserve.compilation import ProgramTable

def compile_bucket(bucket):
    time.sleep(0.3)
    print("compiled", bucket.num_tokens, flush=True)

buckets = [Bucket(1, 1, True), Bucket(8, 8, True)]
table = ProgramTable(buckets, compile_bucket)
for bucket in buckets:
    table.request(bucket)
time.sleep(0.1)
raise SystemExit(3)
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (3, "compiled 1\n"), ended.stderr


def test_a_cache_that_others_may_write_is_refused(tmp_path: Path) -> None:
    before = jax.config.values["jax_compilation_cache_dir"]
    jax.config.update("jax_compilation_cache_dir", None)
    tmp_path.chmod(0o777)
    try:
        with pytest.raises(ConfigError, match="writable by others"):
            use_compilation_cache(tmp_path)
    finally:
        jax.config.update("jax_compilation_cache_dir", before)


def test_a_cache_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    before = jax.config.values["jax_compilation_cache_dir"]
    jax.config.update("jax_compilation_cache_dir", None)
    try:
        with pytest.raises(ConfigError, match=r"file/xla cannot be made .*compilation-cache-dir"):
            use_compilation_cache(tmp_path / "file" / "xla")
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
