"""The process: socket, engine, signals, and the order in which they end."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import logging
import os
import signal
import socket
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

    Raises what `load_engine` raised, and ConfigError for a bad certificate and for an address that cannot be
    listened on.
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
        if not app[STATE].keys and not _is_loopback(runner):
            logger.warning(
                "%s is open to every machine that reaches it: --api-key or --api-keys-file asks for a key",
                url,
            )
        if config.admin_port is not None:
            await admin.setup()
            await _open(Listener(admin, ADMIN_HOST, config.admin_port), "--admin-port")
            logger.info("admin listener at http://%s:%d", ADMIN_HOST, admin.addresses[0][1])
        logger.info("loading %s; %s answers meanwhile", model_names[0], url)
        loading = asyncio.ensure_future(lifecycle.load())
        if await _first(loading, stopping.wait()) is not loading:
            return 0
        app[STATE].metrics.engine = loading.result()
        logger.info("ready: serving %s at %s/v1; try it at %s/", ", ".join(model_names), url, url)
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
        context = _tls(config.ssl_certfile, config.ssl_keyfile)
    listener = Listener(runner, config.host, config.port, ssl_context=context, backlog=2048)
    await _open(listener, "--port")
    port = runner.addresses[0][1]
    host = f"[{config.host}]" if ":" in config.host else config.host
    return f"{'https' if context else 'http'}://{host}:{port}"


def _tls(certfile: str, keyfile: str | None) -> ssl.SSLContext:
    for flag, path in (("--ssl-certfile", certfile), ("--ssl-keyfile", keyfile)):
        try:
            if path is not None:
                open(path, "rb").close()  # ssl's own error does not say which file it is about
        except OSError as error:
            raise ConfigError(f"{flag} {path}: cannot be read: {error.strerror}") from error
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(certfile, keyfile)
    except ssl.SSLError as error:
        raise ConfigError(f"--ssl-certfile {certfile}: the certificate cannot be used: {error}") from error
    return context


async def _open(listener: Listener, flag: str) -> None:
    """Start to listen; raises ConfigError with what to change."""
    host, port = listener._host, listener._port
    try:
        await listener.start()
    except socket.gaierror as error:
        raise ConfigError(f"--host {host}: there is no such host: {error.strerror}") from error
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(f"port {port} is taken: choose another with {flag}") from error
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise ConfigError(f"cannot listen on {host} port {port}: {reason}") from error


def _is_loopback(runner: web.AppRunner) -> bool:
    """Whether only this machine reaches all addresses that the runner listens on."""
    return all(ipaddress.ip_address(address[0]).is_loopback for address in runner.addresses)


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
