"""Work that takes longer than the event loop may wait: three bounded pools of threads.

Long inputs have a pool of their own, so a flood of them leaves the short ones' threads alone; so have
answers, which are never refused: what they show has been computed. A thread keeps the event loop running only
while it lets go of the interpreter's lock: what runs here is Python code, or C calls over bounded pieces, or
library calls that release the lock.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from jaxserve.errors import QueueFullError

SHORT_BYTES = 64 * 1024  # decoding and checking that much takes a millisecond or two
_SHORT_THREADS = 4
_LONG_THREADS = 2
_ANSWER_THREADS = 2
_MAX_LONG = 64  # running and waiting ones; each may hold a body of megabytes

P = ParamSpec("P")
T = TypeVar("T")


class _Workers:
    def __init__(self) -> None:
        self._short = ThreadPoolExecutor(_SHORT_THREADS, "short-work")
        self._long = ThreadPoolExecutor(_LONG_THREADS, "long-work")
        self._answers = ThreadPoolExecutor(_ANSWER_THREADS, "answers")
        self._num_long = 0

    async def for_answer(self, fn: Callable[[], T]) -> T:
        context = contextvars.copy_context()
        return await asyncio.get_running_loop().run_in_executor(self._answers, context.run, fn)

    async def run(self, size: int, fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        loop = asyncio.get_running_loop()
        context = contextvars.copy_context()  # log lines of the thread carry the request's id

        def work() -> T:
            return context.run(fn, *args, **kwargs)

        if size <= SHORT_BYTES:
            return await loop.run_in_executor(self._short, work)
        if self._num_long >= _MAX_LONG:
            raise QueueFullError(f"{self._num_long} long inputs are being read; try again later")
        self._num_long += 1
        try:
            return await loop.run_in_executor(self._long, work)
        finally:
            self._num_long -= 1


_workers = _Workers()


async def for_answer(fn: Callable[[], T]) -> T:
    """`fn()` on a thread that is kept for answers, a part of one at a time, so that they take turns."""
    return await _workers.for_answer(fn)


async def off_loop(size: int, fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """`fn(*args, **kwargs)` on a thread; `size` is that of its input in bytes.

    Work that waits for a thread is dropped when its caller is cancelled. Raises QueueFullError when too many
    long inputs are under way.
    """
    return await _workers.run(size, fn, *args, **kwargs)
