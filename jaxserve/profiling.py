"""`--profile DIR`: a trace of an engine's first steps after it is ready.

The trace holds the engine's thread (events `step`, in it `schedule`, `execute` and `update`), the device's
operations, and XLA's threads. Python's own calls are left out: tracing each would change what is measured.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import jax

from jaxserve.errors import ConfigError

log = logging.getLogger("jaxserve")


def part(name: str) -> AbstractContextManager[object]:
    """Names what runs inside in a trace; costs a microsecond where nothing is traced."""
    return jax.profiler.TraceAnnotation(name)


def how_to_open(directory: Path) -> str:
    """Where the trace is and what shows it, in one line."""
    return (
        f"profile: the trace is in {directory}/plugins/profile: open its .trace.json.gz at ui.perfetto.dev, "
        f"or: pip install xprof && xprof --logdir {directory}"
    )


class StepProfiler:
    """Traces `num_steps` steps from the first one on, once, and says where the trace is.

    It belongs to the engine's thread. Time without work between steps is in the trace as well.

    Args:
        directory: made when it is not there; each trace gets a folder of its own in it.
        num_steps: after so many the trace is written. `close` writes it earlier.
        report: told where the trace is.

    Raises ConfigError, which names `profile`, when the directory cannot be made or written to.
    """

    def __init__(self, directory: Path, num_steps: int, report: Callable[[str], None] = log.info) -> None:
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"profile: cannot make {directory}: {error.strerror}") from error
        if not os.access(directory, os.W_OK | os.X_OK):
            raise ConfigError(f"profile: cannot write to {directory}")
        self._directory = directory
        self._num_left = num_steps
        self._report = report
        self._is_tracing = self._is_done = False

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Around everything an engine does for step `number`."""
        if not self._is_done and not self._is_tracing:
            self._start()
        with jax.profiler.StepTraceAnnotation("step", step_num=number):
            yield
        self._num_left -= 1
        if self._num_left == 0:
            self.close()

    def close(self) -> None:
        """Write the trace if one is being taken; no other begins. Idempotent."""
        self._is_done = True
        if not self._is_tracing:
            return
        self._is_tracing = False
        started = time.perf_counter()
        try:
            jax.profiler.stop_trace()
        except (RuntimeError, OSError) as error:  # a folder that cannot be written, a full disk
            log.error("profile: the trace could not be written: %s", error)
            return
        self._report(
            f"{how_to_open(self._directory)} (writing it took {time.perf_counter() - started:.1f} s)"
        )

    def _start(self) -> None:
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0
        try:
            jax.profiler.start_trace(str(self._directory), profiler_options=options)
        except RuntimeError as error:  # a process has one profiler, and somebody else may use it
            self._is_done = True
            log.error("profile: not started: %s", error)
            return
        self._is_tracing = True
        self._report(f"profile: tracing the next {self._num_left} steps")


class NoProfiler:
    """Only names the steps, so that a profiler from outside shows them."""

    def step(self, number: int) -> AbstractContextManager[object]:
        return jax.profiler.StepTraceAnnotation("step", step_num=number)

    def close(self) -> None:
        pass
