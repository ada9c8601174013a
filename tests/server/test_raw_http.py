"""Bytes that no HTTP library sends: each gets an answer of the one error shape, or a closed line, soon."""

import asyncio
import contextlib
import gc
import json
import os
import re
import sys
import time
from pathlib import Path

import pytest
from conftest import running
from fake_engine import FakeEngine

import jaxserve_server.body
from jaxserve_server.config import ServerConfig

POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
BODY = b'{"prompt": "hi", "max_tokens": 2}'
GOOD = POST + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY
HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


_KNOWS_MEMORY = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memory is read from /proc")


class Answer:
    def __init__(self, raw):
        head, _, self.body = raw.partition(b"\r\n\r\n")
        first, *lines = head.decode().split("\r\n")
        self.status = int(first.split()[1])
        self.headers = {
            name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)
        }

    def error(self):
        """The error, after a look at its shape."""
        assert self.headers["content-type"].startswith("application/json")
        assert self.headers["x-request-id"]
        assert self.headers["server"] == "jaxserve"
        body = json.loads(self.body)
        assert body.keys() == {"error"}
        assert body["error"].keys() == {"message", "type", "param", "code"}
        return body["error"]


@contextlib.asynccontextmanager
async def connected(api):
    """(reader, writer) of a new connection, closed at the end of the block."""
    reader, writer = await asyncio.open_connection(api.http.host, api.http.port)
    try:
        async with asyncio.timeout(10):
            yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def read_answer(reader):
    """One answer, None where the connection ended instead."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(re.search(rb"content-length: (\d+)", head, re.IGNORECASE).group(1))
        return Answer(head + await reader.readexactly(length))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


async def exchange(api, data, *, then_ends=False):
    """Send bytes and read the first answer; `then_ends`: no more comes from this side."""
    async with connected(api) as (reader, writer):
        writer.write(data)
        if then_ends:
            writer.write_eof()
        return await read_answer(reader)


async def is_alive(api):
    answer = await exchange(api, GOOD)
    return answer.status == 200 and json.loads(answer.body)["choices"][0]["text"] == "de"


@pytest.fixture
async def api():
    async with running(FakeEngine(), header_seconds=0.3) as api:
        yield api


REFUSED = {
    "garbage": (b"\x00\x01\x02\xff" * 64 + b"\r\n\r\n", 400),
    "tls": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200), 400),
    "no version": (b"GET /health\r\n\r\n", 400),
    "http 0.9 style": (b"GET /health HTTP/0.9\r\nHost: x\r\n\r\n", 400),
    "http 2 preface": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
    "http 3": (b"GET /health HTTP/3.0\r\nHost: x\r\n\r\n", 400),
    "unknown method": (b"BREW /health HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    "lower-case method": (b"get /health HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    "connect": (b"CONNECT example.org:443 HTTP/1.1\r\nHost: example.org:443\r\n\r\n", 404),
    "trace": (b"TRACE /health HTTP/1.1\r\nHost: x\r\n\r\n", 405),
    "options": (b"OPTIONS /health HTTP/1.1\r\nHost: x\r\n\r\n", 405),
    "options of everything": (b"OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n", 404),
    "upgrade": (
        b"POST /health HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
        b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n",
        405,
    ),
    "no host": (b"GET /health HTTP/1.1\r\n\r\n", 400),
    "two hosts": (b"GET /health HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", 400),
    "illegal host": (b"GET /health HTTP/1.1\r\nHost: a b\r\n\r\n", 400),
    "host with user": (b"GET /health HTTP/1.1\r\nHost: a@b\r\n\r\n", 400),
    "host not utf-8": (b"GET /health HTTP/1.1\r\nHost: \xff\xfe\r\n\r\n", 400),
    "nul in a header": (b"GET /health HTTP/1.1\r\nHost: x\r\nA: b\x00c\r\n\r\n", 400),
    "nul in the target": (b"GET /he\x00alth HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    "space in a header name": (b"GET /health HTTP/1.1\r\nHost: x\r\nA b: c\r\n\r\n", 400),
    "header without a name": (b"GET /health HTTP/1.1\r\nHost: x\r\n: c\r\n\r\n", 400),
    "folded header": (b"GET /health HTTP/1.1\r\nHost: x\r\nA: b\r\n c\r\n\r\n", 400),
    "bare CR": (b"GET /health HTTP/1.1\r\nHost: x\rA: b\r\n\r\n", 400),
    "bad url": (b"GET http://[::1/health HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    "percent escapes of nothing": (b"GET /%ff%fe%00 HTTP/1.1\r\nHost: x\r\n\r\n", 404),
    "unknown expectation": (POST + b"Expect: the unexpected\r\nContent-Length: 2\r\n\r\n{}", 417),
    "length and chunks": (
        POST + b"Content-Length: 6\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /x HTTP/1.1\r\n\r\n",
        400,
    ),
    "two lengths": (POST + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}", 400),
    "negative length": (POST + b"Content-Length: -1\r\n\r\n{}", 400),
    "length with a sign": (POST + b"Content-Length: +2\r\n\r\n{}", 400),
    "length of letters": (POST + b"Content-Length: two\r\n\r\n{}", 400),
    "length over 64 bits": (POST + b"Content-Length: 99999999999999999999999\r\n\r\n{}", 400),
    "length over the cap": (POST + b"Content-Length: 9000000000000000000\r\n\r\n{}", 413),
    "unknown transfer encoding": (POST + b"Transfer-Encoding: gzip\r\n\r\n{}", 400),
    "chunked, not last": (POST + b"Transfer-Encoding: chunked, gzip\r\n\r\n0\r\n\r\n", 400),
    "chunk size of letters": (POST + b"Transfer-Encoding: chunked\r\n\r\nxyz\r\n{}\r\n0\r\n\r\n", 400),
    "chunk longer than its size": (POST + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{}\r\n0\r\n\r\n", 400),
    "chunk size over 64 bits": (POST + b"Transfer-Encoding: chunked\r\n\r\n" + b"f" * 40 + b"\r\n", 400),
    "encoded body": (POST + b"Content-Encoding: gzip\r\nContent-Length: 2\r\n\r\n\x1f\x8b", 400),
    "long url": (b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", 431),
    "long header": (b"GET /health HTTP/1.1\r\nHost: x\r\nA: " + b"b" * 20_000 + b"\r\n\r\n", 431),
    "long header name": (b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"b" * 20_000 + b": a\r\n\r\n", 431),
    "large header": (
        b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"Abcdefgh: " + b"b" * 2_000 + b"\r\n"
        + b"".join(b"A%d: %s\r\n" % (i, b"b" * 2_000) for i in range(8)) + b"\r\n",
        431,
    ),
    "101 headers": (
        b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"".join(b"A%d: b\r\n" % i for i in range(100)) + b"\r\n",
        400,
    ),
    "endless header": (
        b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"A: b\r\n" * 99 + b"B: " + b"b" * 15_900,
        431,
    ),
    "nul in the body": (POST + b"Content-Length: 12\r\n\r\n" + b'{"prompt":"\x00', 400),
    "body not utf-8": (POST + b"Content-Length: 14\r\n\r\n" + b'{"prompt":"\xff"}', 400),
    "deep json": (POST + b"Content-Length: 200000\r\n\r\n" + b"[" * 100_000 + b"]" * 100_000, 400),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
async def test_what_is_not_right_is_refused(api, name):
    data, status = REFUSED[name]
    answer = await exchange(api, data)
    assert answer is not None
    assert answer.status == status, answer.body
    assert "\\x" not in answer.error()["message"]
    assert await is_alive(api)


@pytest.mark.parametrize("name", REFUSED)
async def test_the_same_in_single_bytes_ends_too(api, name):
    """However the bytes are cut, it ends with an error or a closed connection."""
    data, status = REFUSED[name]
    pieces = [data[i : i + 1] for i in range(300)] + [data[300:]]
    async with connected(api) as (reader, writer):
        for piece in pieces:
            writer.write(piece)
            await asyncio.sleep(0)
        answer = await read_answer(reader)
        if answer is not None:
            assert answer.status in (status, 408)
            answer.error()
        assert await is_alive(api)


async def test_100_headers_are_taken(api):
    headers = b"".join(b"A%d: b\r\n" % i for i in range(99))
    answer = await exchange(api, b"GET /health HTTP/1.1\r\nHost: x\r\n" + headers + b"\r\n")
    assert answer.status == 200


@pytest.mark.parametrize("sent", [b"", b"G", HEALTH[:-2], HEALTH + HEALTH[:-2]])
async def test_a_header_that_does_not_end_is_cut_off(api, sent):
    async with connected(api) as (reader, writer):
        writer.write(sent)
        if sent.startswith(HEALTH):
            assert (await read_answer(reader)).status == 200
            writer.write(b"A: b\r\n")
        start = time.monotonic()
        async with asyncio.timeout(10):
            answer = await read_answer(reader)
            assert await reader.read() == b""
        assert 0.2 < time.monotonic() - start < 5
        if sent:
            assert answer.status == 408
            assert answer.error()["code"] == "header_timeout"
        else:
            assert answer is None


async def test_slowloris_is_cut_off_in_the_middle_of_its_header(api):
    async def drip():
        async with connected(api) as (reader, writer):
            answer = asyncio.ensure_future(read_answer(reader))
            writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n")
            for i in range(200):
                writer.write(b"X-%d: y\r\n" % i)
                await asyncio.sleep(0.02)
                if answer.done():
                    break
            return i, await answer

    ends = await asyncio.gather(*(drip() for _ in range(50)))
    assert all(i < 199 for i, _ in ends)
    assert {answer.status for _, answer in ends} == {408}
    assert await is_alive(api)


async def test_an_idle_connection_may_stay_longer_than_a_header_may_take(api):
    async with connected(api) as (reader, writer):
        for _ in range(2):
            writer.write(HEALTH)
            assert (await read_answer(reader)).status == 200
            await asyncio.sleep(0.5)
        writer.write(HEALTH)
        assert (await read_answer(reader)).status == 200


async def test_a_slow_body_is_not_a_slow_header(api):
    async with connected(api) as (reader, writer):
        head, _, body = GOOD.partition(b"\r\n\r\n")
        writer.write(head + b"\r\n\r\n")
        for byte in (body[:10], body[10:]):
            await asyncio.sleep(0.25)
            writer.write(byte)
        assert (await read_answer(reader)).status == 200


async def test_requests_in_one_packet_are_answered_in_order(api):
    async with connected(api) as (reader, writer):
        writer.write(GOOD + HEALTH + GOOD)
        answers = [await read_answer(reader) for _ in range(3)]
        assert [answer.status for answer in answers] == [200, 200, 200]
        writer.write(b"nonsense\r\n\r\n" + HEALTH)
        answer = await read_answer(reader)
        assert (answer.status, answer.error()["code"]) == (400, "invalid_http")
        assert await reader.read() == b""


async def test_a_hundred_requests_in_one_packet(api):
    async with connected(api) as (reader, writer):
        writer.write(HEALTH * 100)
        assert {(await read_answer(reader)).status for _ in range(100)} == {200}


async def test_chunks_that_turn_bad_end_the_request_at_once(api):
    async with connected(api) as (reader, writer):
        writer.write(POST + b'Transfer-Encoding: chunked\r\n\r\n5\r\n{"pro\r\n')
        await asyncio.sleep(0.1)
        start = time.monotonic()
        writer.write(b"nonsense\r\n")
        answer = await read_answer(reader)
        assert answer.status == 400
        answer.error()
        assert time.monotonic() - start < 1
        assert await reader.read() == b""


@pytest.mark.parametrize("how", ["Content-Length: 1000", "Transfer-Encoding: chunked"])
async def test_a_body_that_stops_coming_is_a_408(api, how, monkeypatch):
    monkeypatch.setattr(jaxserve_server.body, "IDLE_SECONDS", 0.3)
    async with connected(api) as (reader, writer):
        writer.write(POST + how.encode() + b"\r\n\r\n1\r\n{\r\n")
        start = time.monotonic()
        answer = await read_answer(reader)
    assert answer.status == 408
    answer.error()
    assert 0.2 < time.monotonic() - start < 5
    assert await is_alive(api)


@pytest.mark.parametrize("end", [b"Content-Length: 10\r\n\r\n{", b"Transfer-Encoding: chunked\r\n\r\n5\r\n{"])
async def test_a_body_that_breaks_off_leaves_nothing(api, end):
    answer = await exchange(api, POST + end, then_ends=True)
    assert answer is None or answer.status == 400
    assert api.engine.streams == {}
    assert await is_alive(api)


async def test_chunks_make_a_body(api):
    chunks = b"".join(b"1;ext=1\r\n" + bytes([byte]) + b"\r\n" for byte in BODY) + b"0\r\nTrailer: x\r\n\r\n"
    answer = await exchange(api, POST + b"Transfer-Encoding: chunked\r\n\r\n" + chunks)
    assert answer.status == 200


async def test_a_client_may_ask_before_it_sends_the_body(api):
    async with connected(api) as (reader, writer):
        head, _, body = GOOD.partition(b"\r\n\r\n")
        writer.write(head + b"\r\nExpect: 100-continue\r\n\r\n")
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(body)
        assert (await read_answer(reader)).status == 200


async def test_head_is_get_without_a_body(api):
    async with connected(api) as (reader, writer):
        writer.write(HEALTH.replace(b"GET", b"HEAD").replace(b"Host", b"Connection: close\r\nHost"))
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 ")
        assert body == b""


async def test_http_1_0_without_a_host(api):
    answer = await exchange(api, b"GET /health HTTP/1.0\r\n\r\n")
    assert answer.status == 200


async def test_a_refusal_is_counted(api):
    await exchange(api, b"nonsense\r\n\r\n")
    async with api.http.get("/metrics") as response:
        page = await response.text()
    assert re.search(r'request_rejections_total\{[^}]*reason="invalid_http"[^}]*} 1\.0', page)


async def flood(api, head, piece, total):
    """Send `total` bytes after `head` as fast as the server takes them; the answer."""
    async with connected(api) as (reader, writer):
        answer = asyncio.ensure_future(read_answer(reader))
        try:
            writer.write(head)
            for _ in range(total // len(piece)):
                writer.write(piece)
                await writer.drain()
        except ConnectionError:
            pass
        return await answer


@_KNOWS_MEMORY
@pytest.mark.parametrize("header", ["Content-Length: 200000000", "Transfer-Encoding: chunked", "endless"])
async def test_a_flood_costs_no_memory(api, header):
    part = b"a" * 65536
    if header == "endless":
        head, piece, statuses = b"GET /health HTTP/1.1\r\nHost: x\r\nA: ", part, {431, None}
    elif header.startswith("Content"):
        head, piece, statuses = POST + header.encode() + b"\r\n\r\n", part, {413, None}
    else:
        piece, statuses = b"10000\r\n" + part + b"\r\n", {413, None}
        head = POST + header.encode() + b"\r\n\r\n"
    assert await is_alive(api)
    gc.collect()
    before = resident_bytes()
    answers = await asyncio.gather(*(flood(api, head, piece, 64 << 20) for _ in range(2)))
    grown = resident_bytes() - before
    assert {answer and answer.status for answer in answers} <= statuses
    for answer in answers:
        if answer is not None:
            answer.error()
    assert grown < 32 << 20
    assert await is_alive(api)


@_KNOWS_MEMORY
async def test_many_connections_with_half_a_header_cost_little(api):
    gc.collect()
    before = resident_bytes()
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(200):
            _, writer = await stack.enter_async_context(connected(api))
            writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\nA: " + b"b" * 15_000)
        await asyncio.sleep(0.05)
        assert resident_bytes() - before < 32 << 20
        assert await is_alive(api)


async def test_without_a_key_nothing_is_read_and_nothing_is_told():
    async with running(FakeEngine(), ServerConfig(api_key=("secret",))) as api:
        answer = await exchange(api, GOOD)
        assert answer.status == 401
        assert answer.error()["code"] == "invalid_api_key"
        answer = await exchange(api, b"nonsense\r\n\r\n")
        assert answer.status == 400
