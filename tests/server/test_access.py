"""Keys: who is let in, where none is needed, and the file that names keys and their limits."""

import base64
import logging

import pytest
from conftest import running
from fake_engine import FakeEngine

from jaxserve.errors import ConfigError
from jaxserve_server.access import find_key, read_keys
from jaxserve_server.config import ServerConfig
from jaxserve_server.errors import ApiError

OPEN = {"/health", "/ready", "/startup"}
METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "PROPFIND"]


def basic(credentials):
    """As a browser sends what its user has typed."""
    return "Basic " + base64.b64encode(credentials.encode()).decode()


def routes_of(app):
    """(method, path) of every route; a variable part of a path is filled in."""
    return {(route.method, _filled(route.resource.canonical)) for route in app.router.routes()}


def _filled(canonical):
    return canonical.replace("{id}", "some/model")


async def test_every_route_but_the_probes_asks_for_a_key():
    async with running(FakeEngine(), ServerConfig(api_key=("secret",), root_path="/llm")) as api:
        paths = {path for _, path in routes_of(api.http.server.app)}
        assert paths >= OPEN | {"/v1/completions", "/llm/v1/models/some/model", "/metrics", "/llm/metrics"}
        for path in [*sorted(paths), "/nothing", "/v1", "/health/", "/llm", "/HEALTH"]:
            for method in METHODS:
                async with api.http.request(method, path) as response:
                    if path.removeprefix("/llm") in OPEN and method in ("GET", "HEAD"):
                        assert response.status == 200
                        continue
                    assert response.status == 401, (method, path)
                    assert response.headers["WWW-Authenticate"] == "Bearer"
                    if method == "HEAD":
                        continue
                    body = await response.json()
                assert body["error"]["code"] == "invalid_api_key"
                assert body["error"]["type"] == "authentication_error"


async def test_metrics_are_open_by_flag_and_nothing_else_is():
    async with running(FakeEngine(), ServerConfig(api_key=("k",), metrics_without_key=True)) as api:
        for path, status in (("/metrics", 200), ("/v1/models", 401), ("/version", 401), ("/metrics/", 401)):
            async with api.http.get(path) as response:
                assert response.status == status, path
        async with api.http.post("/metrics") as response:
            assert response.status == 401


@pytest.mark.parametrize(
    ("header", "status"),
    [
        ("Bearer one", 200),
        ("bearer two", 200),
        ("BEARER three", 200),
        ("Bearer  one", 200),
        ("Bearer four", 401),
        ("Bearer on", 401),
        ("Bearer onee", 401),
        ("Bearer", 401),
        ("Bearer ", 401),
        ("Basic one", 401),
        (basic("me:one"), 200),
        (basic(":two").replace("Basic", "basic"), 200),
        (basic("me:three"), 200),
        (basic("one:"), 401),
        (basic("one"), 401),
        (basic("me:one:"), 401),
        (basic("me:four"), 401),
        (basic("me:one") + "!", 401),
        ("Basic b25", 401),
        ("Basic", 401),
        ("Bearer " + basic("me:one").split()[1], 401),
        ("one", 401),
        ("Bearer one two", 401),
        ("Bearer onë", 401),
    ],
)
async def test_any_of_the_keys_opens(tmp_path, header, status):
    keys = tmp_path / "keys"
    keys.write_text("# comment\n\nthree name=c\n")
    config = ServerConfig(api_key=("one", "two"), api_keys_file=str(keys))
    async with (
        running(FakeEngine(), config) as api,
        api.http.get("/v1/models", headers={"Authorization": header}) as response,
    ):
        assert response.status == status


async def test_only_a_browser_that_opens_a_page_is_asked_for_a_password():
    browser = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
    async with running(FakeEngine(), ServerConfig(api_key=("k",))) as api:
        for path in ("/", "/docs", "/openapi.json", "/v1/models", "/metrics", "/nothing"):
            for headers in (browser, {"Accept": "*/*"}, {"Accept": "application/json"}):
                async with api.http.get(path, headers=headers) as response:
                    assert response.status == 401
                    asked = response.headers.getall("WWW-Authenticate")
                is_asked = path in ("/", "/docs") and headers is browser
                assert asked[0] == "Bearer"
                assert [line.split()[0] for line in asked[1:]] == ["Basic"] * is_asked, (path, headers)
        for path in ("/", "/docs", "/openapi.json", "/v1/models"):
            async with api.http.get(path, headers=browser | {"Authorization": basic("me:k")}) as response:
                assert response.status == 200


@pytest.mark.parametrize(
    "content_type",
    ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", None],
)
async def test_a_page_of_another_site_cannot_post_with_what_the_browser_knows(content_type):
    """A browser asks first (a preflight) before it sends any other type; without one it sends these."""
    headers = {"Authorization": basic("me:k"), "Origin": "https://evil.example"}
    if content_type is not None:
        headers["Content-Type"] = content_type
    skip = () if content_type else ("Content-Type",)
    async with running(FakeEngine(), ServerConfig(api_key=("k",))) as api:
        posts = {path for method, path in routes_of(api.http.server.app) if method == "POST"}
        assert "/v1/completions" in posts
        for path in posts:
            body = b'{"prompt": "hi", "messages": [], "tokens": [1], "input": "hi"}'
            async with api.http.post(path, data=body, headers=headers, skip_auto_headers=skip) as response:
                assert response.status == 400, path
                assert "Content-Type" in (await response.json())["error"]["message"]
        assert api.engine.seen == []
        preflight = {"Origin": "https://evil.example", "Access-Control-Request-Method": "POST"}
        async with api.http.options("/v1/completions", headers=preflight) as response:
            assert response.status == 401
            assert "Access-Control-Allow-Origin" not in response.headers


async def test_a_key_in_another_header_opens_nothing():
    async with running(FakeEngine(), ServerConfig(api_key=("k",))) as api:
        for headers in ({"x-api-key": "k"}, {"api-key": "k"}, {"Cookie": "key=k"}):
            async with api.http.get("/v1/models?api_key=k", headers=headers) as response:
                assert response.status == 401


def test_all_keys_are_compared_whichever_fits(tmp_path, monkeypatch):
    import hmac

    compared = []

    def compare(one, other):
        compared.append((one, other))
        return one == other

    monkeypatch.setattr(hmac, "compare_digest", compare)
    keys = read_keys(ServerConfig(api_key=("a", "bb", "ccc")))
    for given in ("a", "ccc", "none of them"):
        compared.clear()
        try:
            find_key(keys, f"Bearer {given}")
        except ApiError:
            assert given == "none of them"
        assert len(compared) == 3
        assert {len(part) for pair in compared for part in pair} == {32}


def keys_of(tmp_path, text, **config):
    path = tmp_path / "keys.txt"
    path.write_text(text, "utf-8")
    return read_keys(ServerConfig(api_keys_file=str(path), **config))


def test_a_keys_file_gives_names_and_limits(tmp_path):
    first, second, third = keys_of(
        tmp_path,
        "# teams\n\n"
        "sk-1 name=alice requests-per-minute=60\ttokens-per-minute=100000  concurrency=4 cache-salt=a=b #x\n"
        "  sk#2\n",
        api_key=("plain",),
    )
    assert (first.name, first.requests_per_minute, first.concurrency) == ("api-key-1", None, None)
    assert (second.name, second.requests_per_minute, second.tokens_per_minute) == ("alice", 60, 100000)
    assert (second.concurrency, second.cache_salt) == (4, "a=b")
    assert (third.name, third.tokens_per_minute, third.cache_salt) == ("line-4", None, None)
    assert find_key((first, second, third), "Bearer sk#2") is third
    assert "sk-1" not in repr(second)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no key"),
        ("# nothing\n", "holds no key"),
        ("a\nSECRET name 60\n", "line 2: after the key come fields"),
        ("a\nSECRET SECRET2\n", "line 2: after the key come fields"),
        ("SECRET limit=3\n", "line 1: after the key come fields"),
        ("SECRET name=\n", "line 1: name has no value"),
        ("SECRET name=a name=b\n", "line 1: name is given twice"),
        ("SECRET admin=1\n", "line 1: admin must be yes or no"),
        ("SECRET concurrency=0\n", "line 1: concurrency must be a whole number"),
        ("SECRET concurrency=-1\n", "line 1: concurrency must be a whole number"),
        ("SECRET requests-per-minute=1.5\n", "line 1: requests-per-minute must be"),
        ("SECRET tokens-per-minute=١\n", "line 1: tokens-per-minute must be"),
        ("SECRET tokens-per-minute=" + "9" * 5000 + "\n", "line 1: tokens-per-minute must be"),
        ("SECRET\nother\nSECRET\n", "line 3: the same key as"),
        ("SECRET name=a\nother name=a\n", "line 2: the same name as"),
    ],
)
def test_a_keys_file_that_cannot_be_used_says_where_and_never_the_key(tmp_path, text, message):
    with pytest.raises(ConfigError, match=message) as caught:
        keys_of(tmp_path, text)
    assert "keys.txt" in str(caught.value)
    assert "SECRET" not in str(caught.value)
    assert caught.value.__cause__ is None


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_a_keys_file_may_come_from_any_editor(tmp_path, encoding, newline):
    (tmp_path / "keys").write_text(f"one name=a{newline}two{newline}", encoding, newline="")
    keys = read_keys(ServerConfig(api_keys_file=str(tmp_path / "keys")))
    assert [find_key(keys, f"Bearer {key}").name for key in ("one", "two")] == ["a", "line-2"]


def test_who_may_use_the_admin_listener(tmp_path):
    text = "one admin=yes\ntwo admin=no\nthree\n"
    assert [key.is_admin for key in keys_of(tmp_path, text, api_key=("k",))] == [True, True, False, False]
    with pytest.raises(ConfigError, match="--admin-port: no key may use it"):
        keys_of(tmp_path, "two admin=no\nthree\n", admin_port=0)
    assert keys_of(tmp_path, "two admin=no\nthree admin=yes\n", admin_port=0)


def test_a_keys_file_that_cannot_be_read_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        read_keys(ServerConfig(api_keys_file=str(tmp_path / "none")))
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not UTF-8"):
        read_keys(ServerConfig(api_keys_file=str(tmp_path / "binary")))


def test_one_key_twice_is_an_error_of_the_flag_too():
    with pytest.raises(ConfigError, match="--api-key number 2: the same key as --api-key number 1"):
        read_keys(ServerConfig(api_key=("SECRET", "SECRET")))


async def test_the_log_has_the_keys_name_and_never_the_key(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    (tmp_path / "keys").write_text("sk-secret name=alice\n")
    config = ServerConfig(api_keys_file=str(tmp_path / "keys"), log_requests=True)
    async with running(FakeEngine(), config) as api:
        for key in ("sk-secret", "sk-wrong"):
            async with api.http.get("/v1/models", headers={"Authorization": f"Bearer {key}"}) as response:
                await response.read()
    named, unnamed = [r.fields for r in caplog.records if r.name == "jaxserve_server.access"]
    assert (named["api_key"], named["status"]) == ("alice", 200)
    assert "api_key" not in unnamed
    assert unnamed["status"] == 401
    assert "sk-" not in caplog.text


async def test_a_keys_salt_splits_the_prefix_cache(tmp_path):
    (tmp_path / "keys").write_text("one cache-salt=s1\ntwo cache-salt=s2\nthree\n")
    engine = FakeEngine()
    salts = {}
    async with running(engine, ServerConfig(api_keys_file=str(tmp_path / "keys"))) as api:
        for key in ("one", "two", "three"):
            for own in (None, "mine", 'key:["s1", null]', 'key:["s1", "mine"]'):
                body = {"prompt": "hi", "max_tokens": 1, "cache_salt": own}
                headers = {"Authorization": f"Bearer {key}"}
                async with api.http.post("/v1/completions", json=body, headers=headers) as response:
                    assert response.status == 200
                salts[key, own] = engine.seen[-1][2]["cache_salt"]
    assert len(set(salts.values())) == len(salts)  # nobody reaches another's part
    assert salts["three", None] is None
    assert salts["three", "mine"] == "mine"
