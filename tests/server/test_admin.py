"""The admin listener: what it does, whom it answers, and that the public port does nothing of it."""

import contextlib
import json

import pytest
from aiohttp.test_utils import TestClient, TestServer
from conftest import running
from fake_engine import FakeEngine
from live import live

from jaxserve.loading import cache_directory
from jaxserve_server.admin import create_admin_app
from jaxserve_server.config import ServerConfig
from jaxserve_server.connection import create_runner
from jaxserve_server.state import STATE
from pallas_kernels import native
from pallas_kernels.support import resolve

ACTIONS = [("GET", "/server_info"), ("POST", "/reset_prefix_cache")]
UNBUILT = ["/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/sleep", "/wake_up"]
NOT_YET = ["/v1/responses", "/v1/responses/resp_1", "/v1/messages", "/v1/messages/count_tokens"]
NEVER = ["/v1/score", "/v1/rerank"]


@contextlib.asynccontextmanager
async def admin_of(api):
    app = create_admin_app(api.http.server.app[STATE])
    server = TestServer(app)

    async def make_runner(**_):
        return create_runner(app)

    server._make_runner = make_runner
    async with TestClient(server) as http:
        yield http


async def test_reset_prefix_cache_forgets_what_was_cached():
    async with live("gpt2") as api, admin_of(api) as admin:
        prompt = list(range(20, 60))

        async def cached():
            answer = await api.complete(prompt, max_tokens=1)
            return answer["usage"]["prompt_tokens_details"]["cached_tokens"]

        assert [await cached(), await cached()] == [0, 32]
        async with admin.post("/reset_prefix_cache") as response:
            assert (response.status, await response.json()) == (200, {"status": "ok"})
        assert [await cached(), await cached()] == [0, 32]

        async with admin.get("/server_info") as response:
            info = await response.json()
        engine = info["engine"]
        assert engine["limits"]["page_size"] == 8
        assert engine["platform"] == "cpu"
        chip, _ = native.find(cache_directory() / "native")
        expected = resolve("ragged_paged_attention", "cpu", "auto", chip=chip)  # "cpu", or "xla" without it
        assert engine["attention_implementation"] == expected
        assert len(engine["devices"]) == 1
        assert engine["stats"]["num_steps"] > 0
        assert info["phase"] == "ready"
        assert info["packages"]["jax"]


async def test_server_info_has_no_secrets(tmp_path):
    (tmp_path / "keys").write_text("sk-file name=alice tokens-per-minute=5 cache-salt=salty\n")
    config = ServerConfig(
        api_key=("sk-flag",),
        api_keys_file=str(tmp_path / "keys"),
        request_timeout=5.0,
    )
    headers = {"Authorization": "Bearer sk-flag"}
    async with (
        running(FakeEngine(), config) as api,
        admin_of(api) as admin,
        admin.get("/server_info", headers=headers) as response,
    ):
        assert response.status == 200
        text = await response.text()
    for secret in ("sk-file", "sk-flag", "salty"):
        assert secret not in text
    info = json.loads(text)
    assert info["server"]["request_timeout"] == 5.0
    assert [key["name"] for key in info["keys"]] == ["api-key-1", "alice"]
    assert info["keys"][1]["tokens_per_minute"] == 5
    assert info["keys"][1]["has_cache_salt"] is True


async def test_it_answers_while_the_model_loads():
    async with running(FakeEngine(), load=FakeEngine) as api, admin_of(api) as admin:
        async with admin.get("/server_info") as response:
            info = await response.json()
        assert (info["phase"], info["engine"]) == ("loading", None)
        async with admin.post("/reset_prefix_cache") as response:
            assert response.status == 503
        async with admin.get("/health") as response:
            assert response.status == 200
        async with admin.get("/ready") as response:
            assert response.status == 503


async def test_it_asks_for_a_key_where_the_public_port_does():
    async with running(FakeEngine(), ServerConfig(api_key=("k",))) as api, admin_of(api) as admin:
        for method, path in [*ACTIONS, ("GET", "/metrics"), ("GET", "/version"), ("GET", "/nothing")]:
            async with admin.request(method, path) as response:
                assert response.status == 401, path
            async with admin.request(method, path, headers={"Authorization": "Bearer k"}) as response:
                assert response.status == (404 if path == "/nothing" else 200), path
        for path in ("/health", "/ready", "/startup"):
            async with admin.get(path) as response:
                assert response.status == 200
        assert api.engine.num_resets == 1


async def test_a_tenants_key_is_not_the_operators(tmp_path):
    (tmp_path / "keys").write_text("tenant name=t concurrency=7\noperator admin=yes\n")
    config = ServerConfig(api_key=("flag",), api_keys_file=str(tmp_path / "keys"), metrics_without_key=True)
    async with running(FakeEngine(), config) as api, admin_of(api) as admin:
        for method, path in [*ACTIONS, ("GET", "/version"), ("GET", "/nothing")]:
            for key, status in (("tenant", 403), ("operator", 200), ("flag", 200), ("other", 401)):
                expected = 404 if status == 200 and path == "/nothing" else status
                headers = {"Authorization": f"Bearer {key}"}
                async with admin.request(method, path, headers=headers) as response:
                    assert response.status == expected, (path, key)
                    text = await response.text()
                assert ('"concurrency": 7' in text) == (path == "/server_info" and status == 200)
        for path in ("/metrics", "/health"):
            async with admin.get(path) as response:
                assert response.status == 200
        assert api.engine.num_resets == 2


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Host": "evil.example"},
        {"Host": "evil.example:80"},
        {"Host": "localhost.evil.example"},
    ],
)
async def test_a_web_page_cannot_use_it(headers):
    async with running(FakeEngine()) as api, admin_of(api) as admin:
        async with admin.post("/reset_prefix_cache", headers=headers) as response:
            assert response.status == 403
            assert (await response.json())["error"]["type"] == "permission_error"
        assert api.engine.num_resets == 0


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:9", "[::1]:9", "[::1]", "LOCALHOST:1"])
async def test_programs_of_this_machine_can(host):
    async with running(FakeEngine()) as api, admin_of(api) as admin:
        async with admin.post("/reset_prefix_cache", headers={"Host": host}) as response:
            assert response.status == 200
        assert api.engine.num_resets == 1


async def test_what_is_not_built_says_so():
    async with running(FakeEngine(), ServerConfig(root_path="/llm")) as api, admin_of(api) as admin:
        for path in UNBUILT:
            for http in (api.http, admin):
                async with http.post(path, json={}) as response:
                    assert response.status == 404
                    error = (await response.json())["error"]
                assert "does not support" in error["message"]
        for path in [*NOT_YET, *NEVER, *(path for _, path in ACTIONS)]:
            for prefix in ("", "/llm"):
                async with api.http.post(prefix + path, json={}) as response:
                    assert response.status == 404
                    error = (await response.json())["error"]
                assert error["code"] == "not_supported"
                assert "serve" in error["message"]
                if path in NOT_YET:
                    assert f"serve {path.removesuffix('/resp_1')} yet" in error["message"]
        assert api.engine.num_resets == 0


async def test_what_is_not_built_asks_for_a_key_first():
    async with running(FakeEngine(), ServerConfig(api_key=("k",))) as api:
        for path in (*UNBUILT, *NOT_YET, *NEVER):
            async with api.http.post(path, json={}) as response:
                assert response.status == 401
