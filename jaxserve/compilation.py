"""Compiled programs: few, lazy, kept on disk, counted.

XLA compiles a program for fixed shapes. A `ProgramTable` holds one program for each bucket: a batch runs in
the tightest compiled bucket that holds it; when only a wider one is there, that one serves at once while the
tight one compiles in the background.
"""

from __future__ import annotations

import atexit
import logging
import math
import os
import queue
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax

from jaxserve.batch import Bucket
from jaxserve.errors import ConfigError

log = logging.getLogger("jaxserve")
Program = Callable[..., Any]


def use_compilation_cache(directory: Path) -> None:
    """Keep compiled programs in `directory` (made 0700), unless the user set a place in jax's own config.

    What lies there is loaded as code. Raises ConfigError when the directory is another user's or
    cannot be made.
    """
    if jax.config.values["jax_compilation_cache_dir"]:
        return
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"compilation cache {directory} cannot be made ({error.strerror}): "
            "set --compilation-cache-dir or JAXSERVE_CACHE"
        ) from error
    info = directory.stat()
    if hasattr(os, "getuid") and info.st_uid != os.getuid():
        raise ConfigError(f"compilation cache {directory} belongs to another user")
    if info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ConfigError(f"compilation cache {directory} is writable by others (chmod 700 it)")
    jax.config.update("jax_compilation_cache_dir", str(directory))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def bucket_ladders(
    max_num_seqs: int, max_num_batched_tokens: int, *, padding_is_cheap: bool = False
) -> tuple[list[Bucket], list[Bucket]]:
    """The buckets of an engine: decode (one token a row) and mixed, each from small to large.

    padding_is_cheap: kernels skip it, so that few sizes do: fewer programs, and a start in less time.
    """
    if padding_is_cheap:
        rows = sorted({*_grow(1, max_num_seqs, 8), min(32, max_num_seqs)})
        mixed = [Bucket(t, min(t, max_num_seqs), False) for t in _grow(64, max_num_batched_tokens, 8)]
    else:
        rows = [1]
        while rows[-1] < max_num_seqs:
            rows.append(min(max(8, rows[-1] * 2), max_num_seqs))
        mixed_rows = [r for r in (8, 64) if r < max_num_seqs] + [max_num_seqs]
        tokens = [16]
        while tokens[-1] < max_num_batched_tokens:
            tokens.append(min(tokens[-1] * (4 if tokens[-1] < 64 else 2), max_num_batched_tokens))
        mixed = [Bucket(t, r, False) for t in tokens for r in mixed_rows if r <= t]
    if not mixed or mixed[-1].num_rows < max_num_seqs:  # more rows than tokens in a step
        mixed.append(Bucket(max_num_batched_tokens, max_num_seqs, False))
    return [Bucket(n, n, True) for n in rows], mixed


def _grow(first: int, last: int, factor: int) -> list[int]:
    """first, first * factor, ... and last."""
    sizes = [min(first, last)]
    while sizes[-1] < last:
        sizes.append(min(sizes[-1] * factor, last))
    return sizes


class ProgramTable:
    """Programs by bucket, compiled on demand. `choose` is called by the engine's thread alone."""

    def __init__(self, buckets: Iterable[Bucket], compile_bucket: Callable[[Bucket], Program]) -> None:
        self.buckets = sorted(buckets, key=_cost)
        self._compile_bucket = compile_bucket
        self._programs: dict[Bucket, Program] = {}
        self._unused: set[Bucket] = set()  # compiled, never run
        self._errors: list[BaseException] = []
        self._wanted: set[Bucket] = set()
        self._queue: queue.SimpleQueue[Bucket | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._idle = threading.Condition()
        self.on_compiled: Callable[[], None] = lambda: None  # called on the background's thread
        self.is_waited_for = False  # whether the engine's thread waits for a compilation right now
        self.waited_until = -math.inf  # when it last did, on `time.monotonic()`
        self.num_compilations = 0
        self.seconds = 0.0  # spent compiling (or loading from the cache on disk)

    def __len__(self) -> int:
        return len(self._programs)

    def choose(self, num_tokens: int, num_rows: int, decode_only: bool) -> tuple[Bucket, Program]:
        """The program for a batch; compiles in the foreground only when nothing compiled holds it."""
        fitting = [b for b in self.buckets if b.holds(num_tokens, num_rows, decode_only)]
        assert fitting, f"no bucket holds {num_tokens} tokens in {num_rows} rows"
        if self._errors:
            raise self._errors[0]
        best = fitting[0]
        for bucket in fitting:
            program = self._programs.get(bucket)
            if program is not None:
                if bucket is not best:
                    self.request(best)
                self._unused.discard(bucket)
                return bucket, program
        with self.foreground():
            program = self.compile_now(best)
        self._unused.discard(best)
        return best, program

    @contextmanager
    def foreground(self) -> Iterator[None]:
        """Around a compilation that the engine's thread waits for: no step has hung meanwhile."""
        self.is_waited_for = True
        try:
            yield
        finally:
            self.waited_until = time.monotonic()
            self.is_waited_for = False

    def take_unused(self) -> tuple[Bucket, Program] | None:
        """A program that has never run, once: its first run is slow and better done while nobody waits."""
        if not self._unused:
            return None
        bucket = self._unused.pop()
        return bucket, self._programs[bucket]

    def compile_now(self, bucket: Bucket) -> Program:
        program = self._programs.get(bucket)
        if program is None:
            started = time.perf_counter()
            program = self._compile_bucket(bucket)
            elapsed = time.perf_counter() - started
            self._programs[bucket] = program
            self._unused.add(bucket)
            self.num_compilations += 1
            self.seconds += elapsed
            kind = "decode" if bucket.decode_only else "mixed"
            log.info(
                "compiled %s step for %d tokens in %d rows (%.1f s)",
                kind,
                bucket.num_tokens,
                bucket.num_rows,
                elapsed,
            )
        return program

    def request(self, bucket: Bucket) -> None:
        """Compile `bucket` in the background, once."""
        with self._idle:
            if bucket in self._wanted or bucket in self._programs:
                return
            self._wanted.add(bucket)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="compile", daemon=True)
                self._thread.start()
                # A thread inside XLA when the interpreter ends would take the process down with it.
                atexit.register(self.close)
        self._queue.put(bucket)

    def wait(self) -> None:
        """Until the background has nothing left to compile; raises what a compilation raised."""
        with self._idle:
            self._idle.wait_for(lambda: not self._wanted)
        if self._errors:
            raise self._errors[0]

    def close(self) -> None:
        """Drop what is queued and let the thread end after the compilation it is in."""
        thread, self._thread = self._thread, None
        if thread is not None:
            atexit.unregister(self.close)
            while True:
                try:
                    self._queue.get_nowait()
                except queue.Empty:
                    break
            self._queue.put(None)
            thread.join()

    def _work(self) -> None:
        while (bucket := self._queue.get()) is not None:
            try:
                self.compile_now(bucket)
            except BaseException as error:  # handed to the engine's thread by `choose`
                self._errors.append(error)
            finally:
                with self._idle:
                    self._wanted.discard(bucket)
                    self._idle.notify_all()
                self.on_compiled()


def _cost(bucket: Bucket) -> tuple[int, int, bool]:
    return bucket.num_tokens, bucket.num_rows, not bucket.decode_only
