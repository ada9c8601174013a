"""HTTPS: the same server; a client that does not speak TLS, or does not finish its greeting, is cut off."""

import asyncio
import contextlib
import re
import shutil
import ssl
import subprocess
import time

import pytest
from conftest import running
from fake_engine import FakeEngine

from jaxserve.errors import ConfigError
from jaxserve_server import connection, serve
from jaxserve_server.config import ServerConfig

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """(certificate file, key file)"""
    folder = tmp_path_factory.mktemp("tls")
    names = str(folder / "cert.pem"), str(folder / "key.pem")
    command = "openssl req -x509 -newkey rsa:2048 -nodes -days 1 -subj /CN=localhost"
    extra = ["-addext", "subjectAltName=DNS:localhost", "-out", names[0], "-keyout", names[1]]
    subprocess.run([*command.split(), *extra], check=True, capture_output=True)
    return names


@pytest.fixture
async def port(certificate, monkeypatch):
    """Of a server that takes TLS only."""
    monkeypatch.setattr(connection, "HEADER_SECONDS", 0.5)
    config = ServerConfig(port=0, ssl_certfile=certificate[0], ssl_keyfile=certificate[1])
    async with running(FakeEngine(), config) as api:
        runner = connection.create_runner(api.http.server.app)
        await runner.setup()
        url = await serve._listen(runner, config)
        assert url.startswith("https://127.0.0.1:")
        yield int(url.rpartition(":")[2])
        await runner.cleanup()


async def ask(port, context):
    reader, writer = await asyncio.open_connection(
        "127.0.0.1", port, ssl=context, server_hostname="localhost" if context else None
    )
    writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    try:
        return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.close()


async def test_it_answers_over_tls_and_only_so(port, certificate):
    context = ssl.create_default_context(cafile=certificate[0])
    assert (await ask(port, context)).startswith(b"HTTP/1.1 200 ")
    assert await ask(port, None) == b""
    assert (await ask(port, context)).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("sent", [b"", b"\x16\x03\x01"])
async def test_a_greeting_that_does_not_end_is_cut_off(port, sent):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(sent)
    start = time.monotonic()
    async with asyncio.timeout(10):
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""
    assert 0.3 < time.monotonic() - start < 5
    writer.close()


async def test_a_certificate_that_cannot_be_used_is_one_error(tmp_path, certificate):
    (tmp_path / "bad.pem").write_text("nothing")
    bad, none = str(tmp_path / "bad.pem"), str(tmp_path / "none.pem")
    cases = [
        (bad, None, f"--ssl-certfile {bad}: the certificate cannot be used"),
        (certificate[0], None, f"--ssl-certfile {certificate[0]}: the certificate cannot be used"),
        (none, None, f"--ssl-certfile {none}: cannot be read: No such file"),
        (certificate[0], none, f"--ssl-keyfile {none}: cannot be read: No such file"),
    ]
    for certfile, keyfile, message in cases:
        config = ServerConfig(port=0, ssl_certfile=certfile, ssl_keyfile=keyfile)
        async with running(FakeEngine()) as api:
            with pytest.raises(ConfigError, match=re.escape(message)):
                await serve._listen(connection.create_runner(api.http.server.app), config)
