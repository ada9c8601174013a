"""The thread that owns an engine, and how others reach it.

Work for the engine is put into an inbox and done between steps; outputs go to each request's sink. What
fails a step ends the engine: every request in flight is told, and nothing more is taken.
"""

from __future__ import annotations

import atexit
import logging
import queue
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Protocol, TypeVar

from jaxserve.engine import LLMEngine, NewRequest
from jaxserve.errors import EngineClosedError, EngineDeadError
from jaxserve.outputs import RequestOutput

log = logging.getLogger("jaxserve")
T = TypeVar("T")


class Sink(Protocol):
    """Where a request's outputs go; called on the engine's thread."""

    final_only: bool  # outputs before the last are not wanted

    def put(self, output: RequestOutput) -> None: ...

    def wake(self) -> None:
        """Tell the reader of what was put."""

    def fail(self, error: BaseException) -> None: ...


def deliver(outputs: Iterable[RequestOutput], sinks: dict[str, Sink]) -> None:
    """Put outputs into the sinks of their requests, by id; those of finished ones are taken out.

    Readers are woken at the end: one that is awake on another thread would take turns with this one for the
    interpreter's lock, an output at a time.
    """
    filled = []
    for output in outputs:
        take = sinks.pop if output.finished else sinks.get
        sink = take(output.request_id, None)
        if sink is not None:
            sink.put(output)
            filled.append(sink)
    for sink in filled:
        sink.wake()


class EngineLoop:
    """Runs `engine.step` on its own thread from `start` to `close`."""

    def __init__(self, engine: LLMEngine) -> None:
        self.engine = engine
        self.error: BaseException | None = None
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._sinks: dict[str, Sink] = {}
        self._stopping = False
        self._num_pending = 0  # submitted, not yet with the scheduler
        self._num_before_add: int | None = None  # with the scheduler when the add now under way began
        self._pending: dict[int, Sink] = {}  # the same by id(sink)
        self._lock = threading.RLock()  # `close` may come from a finalizer, anywhere
        # Wakes an idle engine, so that it uses the time for the new program's first run.
        engine.runner.programs.on_compiled = lambda: self._inbox.put(lambda: None)
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()
        # A thread inside XLA when the interpreter ends would take the process down with it.
        atexit.register(self.close)

    @property
    def is_alive(self) -> bool:
        return self.error is None and not self._stopping

    @property
    def num_unfinished(self) -> int:
        return len(self._sinks) + self._num_pending

    def submit(self, new: NewRequest, sink: Sink) -> None:
        """Queue a request; what comes later goes to the sink. Raises EngineDeadError, QueueFullError."""
        self.submit_all([new], [sink])

    def submit_all(self, news: Sequence[NewRequest], sinks: Sequence[Sink]) -> None:
        """Queue requests, all or none: a queue that is not full takes them all. Errors as `submit`."""
        count = sum(new.params.n for new in news)

        def add() -> None:
            with self._lock:
                self._num_before_add = self._num_scheduled
            try:
                self.engine.add(*news)
            except Exception as error:
                for sink in sinks:
                    sink.fail(error)
            else:
                self._sinks.update((new.request_id, sink) for new, sink in zip(news, sinks, strict=True))
            finally:
                # With the lock, so that at every moment they count exactly once.
                with self._lock:
                    self._num_before_add = None
                    self._num_pending -= count
                    for sink in sinks:
                        del self._pending[id(sink)]

        with self._lock:
            self.check_queue()
            self._num_pending += count
            self._pending.update((id(sink), sink) for sink in sinks)
            self._inbox.put(add)  # before the lock is released: `_end` may be the next to take it

    def check_queue(self) -> None:
        """Raises EngineDeadError, QueueFullError where a request would be refused now."""
        with self._lock:
            self._check_alive()
            before = self._num_before_add
            scheduled = self._num_scheduled if before is None else before
            self.engine.scheduler.config.check_queue(scheduled + self._num_pending)

    @property
    def _num_scheduled(self) -> int:
        return self.engine.scheduler.num_running + self.engine.scheduler.num_waiting

    def abort(self, request_id: str, sink: Sink) -> None:
        """End a request (if `sink` is still its own); its sink gets a last output. Returns at once."""

        def do() -> None:
            if self._sinks.get(request_id) is not sink:
                return
            del self._sinks[request_id]
            output = self.engine.abort(request_id)
            if output is not None:
                sink.put(output)
                sink.wake()

        self._inbox.put(do)

    def call(self, fn: Callable[[], T]) -> Future[T]:
        """Run `fn` on the engine's thread, between steps."""
        future: Future[T] = Future()

        def do() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(fn())
            except BaseException as error:
                future.set_exception(error)

        with self._lock:
            self._check_alive()
            self._inbox.put(do)
        return future

    def close(self) -> None:
        """Stop after the step under way; requests that are left fail with EngineDeadError. Idempotent."""
        with self._lock:
            self._stopping = True
        atexit.unregister(self.close)
        self._inbox.put(lambda: None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def abandon(self, error: BaseException) -> None:
        """Give up an engine whose thread hangs: its requests fail now, as if `error` had ended it."""
        with self._lock:
            self.error = self.error or error
            self._stopping = True
            sinks = [*self._sinks.values(), *self._pending.values()]
        for sink in sinks:
            sink.fail(_stopped(error))

    def _check_alive(self) -> None:
        if self.error is not None:
            raise EngineDeadError(f"the engine has failed: {self.error}") from self.error
        if self._stopping:
            raise EngineClosedError("the engine is closed")

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._take_inbox()
                if self._stopping:
                    break
                deliver(self.engine.step(self._wants_output), self._sinks)
        except BaseException as error:
            log.exception("the engine has failed")
            with self._lock:
                self.error = error
        finally:
            self._end()

    def _wants_output(self, request_id: str) -> bool:
        sink = self._sinks.get(request_id)
        return sink is not None and not sink.final_only

    def _take_inbox(self) -> None:
        """Do what others asked for; wait for it when there is nothing else to do."""
        engine = self.engine
        while True:
            try:
                if engine.has_work:
                    wakeup = engine.scheduler.next_wakeup() if not engine.has_step_under_way else None
                    if wakeup is None:
                        self._inbox.get_nowait()()
                    else:
                        self._inbox.get(timeout=max(0.0, wakeup - engine.clock()))()
                elif self._stopping:
                    return
                elif self._inbox.empty() and engine.use_idle_time():
                    continue
                else:
                    self._inbox.get()()
            except queue.Empty:
                return
            if self._inbox.empty():
                return

    def _end(self) -> None:
        with self._lock:
            self._stopping = True
        error = _stopped(self.error)
        while True:  # commands that came too late: requests among them must not wait for ever
            try:
                self._inbox.get_nowait()()
            except queue.Empty:
                break
            except BaseException as late:
                log.debug("dropped at the end: %s", late)
        for sink in self._sinks.values():
            sink.fail(error)
        self._sinks.clear()
        self.engine.close()


def _stopped(cause: BaseException | None) -> EngineDeadError:
    error = (EngineClosedError if cause is None else EngineDeadError)("the engine has stopped")
    error.__cause__ = cause
    return error
