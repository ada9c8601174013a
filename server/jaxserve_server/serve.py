"""The process: socket, engine, signals, and the order in which they end."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import ssl
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from aiohttp import web

from jaxserve.errors import ConfigError
from jaxserve_server.admin import HOST as ADMIN_HOST
from jaxserve_server.admin import create_admin_app
from jaxserve_server.app import create_app
from jaxserve_server.config import ServerConfig
from jaxserve_server.connection import Listener, create_runner
from jaxserve_server.lifecycle import Lifecycle
from jaxserve_server.state import STATE

if TYPE_CHECKING:
    from jaxserve.async_engine import AsyncLLMEngine

logger = logging.getLogger(__name__)

# A dead engine's server stays up this long, so that clients read their errors and probes see the 503.
_DEAD_SECONDS = 3.0


def serve(
    config: ServerConfig, load_engine: Callable[[], AsyncLLMEngine], model_names: tuple[str, ...]
) -> int:
    """Serve until a signal or the engine's death; returns the exit code.

    Raises what `load_engine` raised, ConfigError for a bad certificate, and OSError where the port is taken.
    """
    lifecycle = Lifecycle(load_engine)
    code = asyncio.run(_serve(config, lifecycle, model_names))
    if lifecycle.has_stuck_thread:
        logging.shutdown()
        sys.stdout.flush()
        os._exit(code)
    return code


async def _serve(config: ServerConfig, lifecycle: Lifecycle, model_names: tuple[str, ...]) -> int:
    app = create_app(config, lifecycle, model_names)
    runner, admin = create_runner(app), create_runner(create_admin_app(app[STATE]))
    await runner.setup()
    stopping = _stop_on_signals()
    try:
        url = await _listen(runner, config)
        if config.admin_port is not None:
            await admin.setup()
            await Listener(admin, ADMIN_HOST, config.admin_port).start()
            logger.info("admin listener at http://%s:%d", ADMIN_HOST, admin.addresses[0][1])
        logger.info("loading %s; %s answers meanwhile", model_names[0], url)
        loading = asyncio.ensure_future(lifecycle.load())
        if await _first(loading, stopping.wait()) is not loading:
            return 0
        app[STATE].metrics.engine = loading.result()
        logger.info("ready: serving %s at %s/v1", ", ".join(model_names), url)
        died = asyncio.ensure_future(lifecycle.died(config.step_timeout))
        if await _first(died, stopping.wait()) is died:
            logger.critical("the engine has stopped", exc_info=loading.result().error)
            await asyncio.sleep(_DEAD_SECONDS)
            await lifecycle.stop()
            return 1
        logger.info("shutting down: running requests have %g s to finish", config.drain_timeout)
        await lifecycle.drain(config.drain_timeout)
        logger.info("stopped")
        return 0
    finally:
        await runner.cleanup()
        await admin.cleanup()


def _stop_on_signals() -> asyncio.Event:
    """An event that the first SIGTERM or SIGINT sets; the second ends the process at once."""
    stopping = asyncio.Event()

    def on_signal(number: int) -> None:
        if stopping.is_set():
            os._exit(128 + number)
        stopping.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    return stopping


async def _listen(runner: web.AppRunner, config: ServerConfig) -> str:
    """Open the socket; returns the URL."""
    context = None
    if config.ssl_certfile is not None:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        try:
            context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"the certificate cannot be used: {error}") from error
    await Listener(runner, config.host, config.port, ssl_context=context, backlog=2048).start()
    port = runner.addresses[0][1]
    host = f"[{config.host}]" if ":" in config.host else config.host
    return f"{'https' if context else 'http'}://{host}:{port}"


async def _first(*awaitables: Awaitable[Any]) -> asyncio.Future[Any]:
    """The first to be done; the others are cancelled. An exception of the first is raised."""
    tasks = [asyncio.ensure_future(awaitable) for awaitable in awaitables]
    done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in pending:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
    first = next(task for task in tasks if task in done)
    first.result()
    return first
