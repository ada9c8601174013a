"""Browsers: a preflight for every route, and headers on whatever comes back."""

import pytest
from conftest import running
from fake_engine import FakeEngine
from test_access import routes_of

from jaxserve.errors import ConfigError
from jaxserve_server.config import ServerConfig

ORIGIN = "https://a.example"
ASKED = "authorization, content-type, x-stainless-lang"


@pytest.fixture
async def api():
    config = ServerConfig(api_key=("k",), allowed_origins=(ORIGIN, "http://localhost:3000"))
    async with running(FakeEngine(), config) as api:
        yield api


def preflight(origin, method="POST"):
    return {
        "Origin": origin,
        "Access-Control-Request-Method": method,
        "Access-Control-Request-Headers": ASKED,
    }


def assert_readable(response, origin=ORIGIN):
    """A page of that origin may read the answer, and no cache gives it to another."""
    assert response.headers["Access-Control-Allow-Origin"] == origin
    exposed = response.headers["Access-Control-Expose-Headers"].lower().split(", ")
    assert {"x-request-id", "retry-after", "x-ratelimit-remaining-tokens"} <= set(exposed)
    assert "Access-Control-Allow-Credentials" not in response.headers
    if origin != "*":
        assert response.headers["Vary"] == "Origin"


async def test_a_preflight_of_every_route_needs_no_key(api):
    for method, path in [*sorted(routes_of(api.http.server.app)), ("POST", "/nothing")]:
        for origin in (ORIGIN, "http://localhost:3000"):
            async with api.http.options(path, headers=preflight(origin, method)) as response:
                assert response.status == 204, path
                assert_readable(response, origin)
                assert response.headers["Access-Control-Allow-Headers"] == ASKED
                assert method in response.headers["Access-Control-Allow-Methods"].split(", ")
                assert await response.read() == b""


@pytest.mark.parametrize(
    "origin",
    [
        "https://b.example",
        "http://a.example",
        "https://a.example:444",
        "https://a.example.evil",
        "null",
        "*",
        "",
    ],
)
async def test_other_origins_are_told_nothing(api, origin):
    async with api.http.options("/v1/completions", headers=preflight(origin)) as response:
        assert response.status == 401
        assert not any(name.startswith("Access-Control") for name in response.headers)
    async with api.http.get("/health", headers={"Origin": origin}) as response:
        assert response.status == 200
        assert "Access-Control-Allow-Origin" not in response.headers
        assert response.headers["Vary"] == "Origin"


async def test_an_options_that_is_no_preflight_is_no_way_in(api):
    async with api.http.options("/v1/completions", headers={"Origin": ORIGIN}) as response:
        assert response.status == 401
    headers = {"Origin": ORIGIN, "Authorization": "Bearer k"}
    async with api.http.options("/v1/completions", headers=headers) as response:
        assert response.status == 405
        assert_readable(response)


async def test_answers_streams_and_errors_carry_the_headers(api):
    headers = {"Origin": ORIGIN, "Authorization": "Bearer k"}
    for status, path, body in [
        (200, "/v1/completions", {"prompt": "hi", "max_tokens": 2}),
        (200, "/v1/completions", {"prompt": "hi", "max_tokens": 2, "stream": True}),
        (400, "/v1/completions", {"prompt": "hi", "temperature": 9}),
        (404, "/v1/chat/completions", {"messages": [], "model": "x"}),
        (404, "/v1/nothing", {}),
        (405, "/v1/models", {}),
    ]:
        async with api.http.post(path, json=body, headers=headers) as response:
            assert response.status in (status, 400), path
            assert_readable(response)
    async with api.http.post("/v1/completions", json={}, headers={"Origin": ORIGIN}) as response:
        assert response.status == 401  # a page must be able to show that its key is wrong
        assert_readable(response)
    async with api.http.get("/health") as response:
        assert response.headers["Vary"] == "Origin"


async def test_a_star_is_every_origin():
    async with running(FakeEngine(), ServerConfig(allowed_origins=("*",))) as api:
        async with api.http.options("/v1/models", headers=preflight("https://any.example")) as response:
            assert response.status == 204
            assert_readable(response, "*")
        async with api.http.get("/v1/models") as response:
            assert_readable(response, "*")


async def test_without_the_flag_nothing_is_said():
    async with running(FakeEngine()) as api:
        async with api.http.options("/v1/models", headers=preflight(ORIGIN)) as response:
            assert response.status == 405
        async with api.http.get("/v1/models", headers={"Origin": ORIGIN}) as response:
            assert not {"Vary", "Access-Control-Allow-Origin"} & set(response.headers)


@pytest.mark.parametrize(
    "origin",
    ["example.org", "https://example.org/", "https://example.org/x", "null", "", "https://Example.org"],
)
def test_what_no_browser_sends_as_an_origin_is_refused_at_the_start(origin):
    with pytest.raises(ConfigError, match="allowed_origins"):
        ServerConfig(allowed_origins=(origin,))


@pytest.mark.parametrize("origin", ["http://localhost:3000", "http://[::1]:80", "capacitor://localhost", "*"])
def test_origins_that_browsers_send_are_taken(origin):
    assert ServerConfig(allowed_origins=(origin,)).allowed_origins == (origin,)
