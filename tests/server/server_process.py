"""A server process over the fake engine: `server_process.py DRAIN_SECONDS [fail|slow|die|hang|admin]`."""

import asyncio
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from fake_engine import FakeEngine

from jaxserve_server.config import ServerConfig
from jaxserve_server.logs import configure_logging
from jaxserve_server.serve import serve


class PacedEngine(FakeEngine):
    """Takes a moment for every token."""

    def add_request(self, *args, **kwargs):
        stream = super().add_request(*args, **kwargs)
        step = stream._step

        def paced(request, j):
            time.sleep(0.01)
            step(request, j)

        stream._step = paced
        return stream


def main():
    drain, mode = float(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else ""
    configure_logging("text")

    def load():
        if mode == "fail":
            raise ValueError("no such weights")
        if mode == "slow":
            time.sleep(60)
        loop_running.set()
        return engine

    loop_running = asyncio.Event()
    engine = PacedEngine()
    if mode == "die":
        engine.die(RuntimeError("boom"))
    if mode == "hang":
        engine.counts.last_step_age = 11.0
        engine.pause()
        engine.shutdown = lambda: time.sleep(60)
    try:
        config = ServerConfig(
            port=0,
            drain_timeout=drain,
            step_timeout=10.0,
            admin_port=0 if mode == "admin" else None,
            host="0.0.0.0" if mode.startswith("open") else "127.0.0.1",
            api_key=("k",) if mode == "open-with-key" else (),
        )
        return serve(config, load, ("fake",))
    except ValueError as error:
        print(f"jaxserve: error: {error}", file=sys.stderr)
        return 1


sys.exit(main())
