"""The server's life: loading, ready, draining, dead; and the requests that must end before it does."""

from __future__ import annotations

import asyncio
import enum
import faulthandler
import logging
import math
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from jaxserve_server.errors import ApiError

if TYPE_CHECKING:
    from jaxserve.async_engine import AsyncLLMEngine

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.25  # how soon the death of an idle engine is seen
_UNWIND_SECONDS = 3.0  # what handlers get to write their errors after the engine was stopped


class Phase(enum.Enum):
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    DEAD = "dead"


_REFUSALS = {
    Phase.LOADING: "the model is still loading",
    Phase.DRAINING: "the server is shutting down",
    Phase.DEAD: "the engine has stopped",
}


class Lifecycle:
    """Owns the engine from its loading to its shutdown.

    `load_engine` blocks until the engine can serve; it runs in a thread of its own, so that the socket
    answers meanwhile.
    """

    def __init__(self, load_engine: Callable[[], AsyncLLMEngine]) -> None:
        # Whether a thread is inside something that nothing can interrupt (loading, a compilation): an
        # interpreter that ends under it may crash, so the process must end without one.
        self.has_stuck_thread = False
        self._load_engine = load_engine
        self._engine: AsyncLLMEngine | None = None
        self._phase = Phase.LOADING
        self._num_active = 0
        self._idle = asyncio.Event()  # binds to the loop that first waits for it
        self._idle.set()

    @property
    def phase(self) -> Phase:
        if self._engine is not None and self._engine.is_dead and self._phase is Phase.READY:
            self._phase = Phase.DEAD
        return self._phase

    async def load(self) -> AsyncLLMEngine:
        """Load the engine and become ready; raises what the loading raised.

        A daemon thread, not an executor's: an exit while weights load does not wait for it.
        """
        loop = asyncio.get_running_loop()
        loaded: asyncio.Future[AsyncLLMEngine] = loop.create_future()

        def settle(engine: AsyncLLMEngine | None, error: BaseException | None) -> None:
            if loaded.done():  # nobody waits any more
                if engine is not None:
                    engine.shutdown()
            elif error is not None:
                loaded.set_exception(error)
            elif engine is not None:
                loaded.set_result(engine)

        def work() -> None:
            engine, error = None, None
            try:
                engine = self._load_engine()
            except BaseException as caught:
                error = caught
            if not loop.is_closed():
                loop.call_soon_threadsafe(settle, engine, error)

        self.has_stuck_thread = True
        threading.Thread(target=work, name="load-engine", daemon=True).start()
        try:
            self._engine = await loaded
            self.has_stuck_thread = False
        except Exception:
            self.has_stuck_thread = False
            self._phase = Phase.DEAD
            raise
        self._phase = Phase.READY
        return self._engine

    def engine(self) -> AsyncLLMEngine:
        """The engine, for a new request; raises a 503 while it is loading, draining or dead."""
        phase = self.phase
        if phase is not Phase.READY or self._engine is None:
            headers = {"Retry-After": "5"} if phase is not Phase.DEAD else None
            raise ApiError(503, _REFUSALS[phase], code=phase.value, headers=headers)
        return self._engine

    def check_admission(self) -> None:
        """Raises what would refuse any request now, so that nobody reads and encodes its body for nothing.

        A 503 while loading, draining or dead; QueueFullError.
        """
        self.engine().check_queue()

    @contextmanager
    def admitted(self) -> Iterator[AsyncLLMEngine]:
        """The engine for one request, which draining waits for."""
        engine = self.engine()
        self._num_active += 1
        self._idle.clear()
        try:
            yield engine
        finally:
            self._num_active -= 1
            if self._num_active == 0:
                self._idle.set()

    async def died(self, step_timeout: float = math.inf) -> None:
        """Returns when the engine has stopped by itself, or hangs in a step for `step_timeout` seconds."""
        while self.phase is not Phase.DEAD:
            await asyncio.sleep(_POLL_SECONDS)
            if self._phase is Phase.READY and self._engine is not None:
                age = self._engine.stats().last_step_age
                if age is not None and age > step_timeout:
                    self._give_up(self._engine, age)

    def _give_up(self, engine: AsyncLLMEngine, age: float) -> None:
        logger.critical("a step has not ended in %.0f s; where every thread is, is on stderr", age)
        faulthandler.dump_traceback(sys.stderr, all_threads=True)
        engine.abandon(TimeoutError(f"a step has not ended in {age:.0f} s"))

    async def drain(self, timeout: float) -> None:
        """Admit nothing more, let running requests end for `timeout` seconds, then stop the engine.

        Requests that still run then get an error.
        """
        if self._phase is Phase.READY:
            self._phase = Phase.DRAINING
        try:
            await asyncio.wait_for(self._idle.wait(), timeout)
        except TimeoutError:
            logger.warning("%d requests did not end in %g s and are stopped", self._num_active, timeout)
        await self.stop()

    async def stop(self) -> None:
        """Stop the engine; what still runs ends with an error."""
        if self._engine is None:
            return
        # A daemon thread: the engine ends at once, but waits for a compilation in the background, which may
        # take a minute.
        closing = threading.Thread(target=self._engine.shutdown, name="stop-engine", daemon=True)
        closing.start()
        try:
            async with asyncio.timeout(_UNWIND_SECONDS):
                await self._idle.wait()
                while closing.is_alive():
                    await asyncio.sleep(0.02)
        except TimeoutError:
            if self._num_active:
                logger.warning("%d requests are cut off", self._num_active)
        self.has_stuck_thread = closing.is_alive()
