"""GET /metrics: what a scraper reads, and that it means what vLLM means by it."""

import asyncio
import platform
import time
from pathlib import Path

import pytest
from conftest import running
from fake_engine import FakeEngine
from live import is_idle, live
from prometheus_client.parser import text_string_to_metric_families

import jaxserve
from jaxserve_server.metrics import FIGURES

DOCUMENT = Path(__file__).parents[2] / "docs" / "observability.md"
SUFFIXES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}


async def scrape(api):
    """{(sample name, labels without model_name and engine): value}"""
    async with api.http.get("/metrics") as response:
        assert response.status == 200
        assert response.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
        text = await response.text()
    samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = dict(sample.labels)
            if not family.name.startswith("process_"):
                assert labels.pop("model_name") == "fake"
            assert labels.pop("engine", "0") == "0"
            samples[sample.name, tuple(sorted(labels.items()))] = sample.value
    return samples


def counted(samples, name, **labels):
    return samples[f"jaxserve_{name}", tuple(sorted(labels.items()))]


async def test_both_names_carry_the_same_values(api):
    await api.complete("hi", max_tokens=3)
    samples = await scrape(api)
    names = {name for name, _ in samples}
    for figure in FIGURES:
        for suffix in SUFFIXES[figure.kind]:
            assert f"jaxserve_{figure.name}{suffix}" in names
            for alias in figure.vllm:
                assert f"vllm:{alias}{suffix}" in names
    own = {}
    for figure in FIGURES:
        for alias in figure.vllm:
            for suffix in SUFFIXES[figure.kind]:
                own[f"vllm:{alias}{suffix}"] = f"jaxserve_{figure.name}{suffix}"
    shared = [key for key in samples if key[0].startswith("vllm:") and key[0] != "vllm:cache_config_info"]
    assert {name for name, _ in shared} == set(own)
    for name, labels in shared:
        assert samples[own[name], labels] == samples[name, labels]


async def test_every_choice_counts_as_in_vllm(api, engine):
    await api.complete(["hi", "you"], n=2, max_tokens=3)
    engine.eos_after = 1
    await api.chat("hi")
    samples = await scrape(api)
    assert counted(samples, "request_success_total", finished_reason="length") == 4
    assert counted(samples, "request_success_total", finished_reason="stop") == 1
    assert counted(samples, "request_success_total", finished_reason="abort") == 0
    assert counted(samples, "request_success_total", finished_reason="error") == 0
    assert counted(samples, "prompt_tokens_total") == 2 * 3 + 2 * 4 + 19
    assert counted(samples, "request_prompt_tokens_sum") == 2 * 3 + 2 * 4 + 19
    assert counted(samples, "request_generation_tokens_sum") == 4 * 3 + 2
    assert counted(samples, "time_to_first_token_seconds_count") == 5
    assert counted(samples, "inter_token_latency_seconds_count") == 4 * 2 + 1
    assert counted(samples, "request_time_per_output_token_seconds_count") == 5
    for name in ("e2e_request_latency", "request_queue_time", "request_prefill_time", "request_decode_time"):
        assert counted(samples, f"{name}_seconds_count") == 5
    assert counted(samples, "request_inference_time_seconds_count") == 5
    # These two once for each prompt.
    assert counted(samples, "request_params_n_count") == 3
    assert counted(samples, "request_params_n_sum") == 2 + 2 + 1
    assert counted(samples, "request_max_num_generation_tokens_sum") == 3 + 3 + 2
    assert counted(samples, "request_params_max_tokens_count") == 4  # the chat gave none
    assert counted(samples, "request_params_max_tokens_sum") == 4 * 3


async def test_gaps_between_tokens_do_not_depend_on_who_reads_them(api):
    """A client that does not stream gets one output, but each of its tokens has a gap of its own."""
    await api.complete("hi", max_tokens=9)
    await api.events("/v1/completions", prompt="hi", max_tokens=9)
    samples = await scrape(api)
    assert counted(samples, "inter_token_latency_seconds_count") == 8 + 8


async def test_latencies_begin_when_the_server_got_the_request(api, engine, monkeypatch):
    """Tokenising is part of the time to the first token, not of the queue."""
    encode = type(engine.tokenizer).encode

    def slow(*args, **kwargs):
        time.sleep(0.12)
        return encode(*args, **kwargs)

    monkeypatch.setattr(type(engine.tokenizer), "encode", slow)
    await api.complete("hi", max_tokens=2)
    samples = await scrape(api)
    assert counted(samples, "time_to_first_token_seconds_sum") > 0.12
    assert counted(samples, "e2e_request_latency_seconds_sum") > 0.12
    assert counted(samples, "request_queue_time_seconds_sum") < 0.1


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_is_an_abort_with_its_tokens_and_times(engine, stream):
    """Whatever the server had read of its output by then."""
    async with running(engine) as api:
        body = {"prompt": "hi", "n": 2, "max_tokens": 100, "stream": stream}
        engine.pause_after = 4
        with pytest.raises(asyncio.TimeoutError):
            async with asyncio.timeout(0.3), api.http.post("/v1/completions", json=body) as response:
                await response.read()
        while engine.streams:
            await asyncio.sleep(0.01)
        samples = await scrape(api)
    assert counted(samples, "request_success_total", finished_reason="abort") == 2
    assert counted(samples, "disconnect_aborts_total") == 1
    assert counted(samples, "request_generation_tokens_sum") == 2 * 4
    assert counted(samples, "inter_token_latency_seconds_count") == 2 * 3
    assert counted(samples, "e2e_request_latency_seconds_count") == 2
    labels = {"handler": "/v1/completions", "method": "POST"}
    if not stream:
        key = "http_requests_total", tuple(sorted({**labels, "status": "disconnected"}.items()))
        assert samples[key] == 1


async def test_the_engines_figures_are_read_at_the_scrape(api, engine):
    engine.counts.num_waiting = 4
    engine.counts.last_step_age = 2.5
    samples = await scrape(api)
    assert counted(samples, "num_requests_waiting") == 4
    assert counted(samples, "num_requests_waiting_by_reason", reason="capacity") == 4
    assert samples["vllm:kv_cache_usage_perc", ()] == samples["vllm:gpu_cache_usage_perc", ()] == 0.25
    assert {s: counted(samples, "pages", state=s) for s in ("total", "used", "pinned", "cached", "free")} == {
        "total": 100,
        "used": 25,
        "pinned": 3,
        "cached": 5,
        "free": 72,
    }
    assert counted(samples, "compilations_total") == 7
    assert counted(samples, "step_age_seconds") == 2.5
    assert samples["vllm:prefix_cache_hits_total", ()] == 10
    assert counted(samples, "prefix_cache_pinned_tokens") == 48
    assert counted(samples, "prefix_cache_pinned_hits_total") == 16
    assert samples["vllm:prefix_cache_queries_total", ()] == 40


async def test_build_and_cache_settings_are_labels(api):
    samples = await scrape(api)
    ((_, build),) = [key for key in samples if key[0] == "jaxserve_build_info"]
    assert dict(build)["version"] == jaxserve.__version__
    assert dict(build)["python_version"] == platform.python_version()
    ((_, cache),) = [key for key in samples if key[0] == "vllm:cache_config_info"]
    assert dict(cache) == {"block_size": "16", "num_gpu_blocks": "100", "cache_dtype": "float32"}


async def test_rejections_are_counted_by_reason(engine):
    async with running(engine) as api:
        await api.post("/v1/completions", prompt="")
        await api.post("/v1/completions", prompt="x", model="other")
        await api.post("/v1/completions", prompt="x" * 600)
        await api.post("/nowhere")
        engine.max_queue = 0
        await api.post("/v1/completions", prompt="a")
        samples = await scrape(api)
    reasons = {"400": 1, "model_not_found": 1, "context_length_exceeded": 1, "queue_full": 1, "404": 1}
    for reason, times in reasons.items():
        assert counted(samples, "request_rejections_total", reason=reason, api_key="") == times, reason


async def test_http_requests_are_counted_by_the_matched_route(api):
    await api.complete("hi", max_tokens=1)
    await api.post("/v1/completions", prompt=-1)
    await api.post("/secret/path")
    async with api.http.request("PROPFIND", "/v1/completions"), api.http.get("/health"):
        pass
    async with api.http.get("/v1/models/fake"):
        pass
    samples = await scrape(api)
    found = {
        tuple(dict(labels).values()): value
        for (name, labels), value in samples.items()
        if name == "http_requests_total"
    }
    assert found == {
        ("/v1/completions", "POST", "2xx"): 1,
        ("/v1/completions", "POST", "4xx"): 1,
        ("none", "POST", "4xx"): 1,
        ("none", "other", "4xx"): 1,
        ("/v1/models/{id}", "GET", "2xx"): 1,
    }
    key = "http_request_duration_seconds_count", (("handler", "/v1/completions"), ("method", "POST"))
    assert samples[key] == 2
    assert not any("secret" in str(key) for key in samples)


@pytest.mark.parametrize(
    "accept",
    [
        "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5,*/*;q=0.1",
        "text/plain;version=1.0.0;escaping=allow-utf-8,*/*;q=0.1",
    ],
)
async def test_names_keep_their_colon_for_every_scraper(api, accept):
    async with api.http.get("/metrics", headers={"Accept": accept}) as response:
        lines = (await response.text()).splitlines()
    assert 'vllm:num_requests_running{engine="0",model_name="fake"} 0.0' in lines


@pytest.mark.parametrize("path", ["/health", "/metrics"])
async def test_probes_and_scrapes_do_not_need_a_loaded_engine(path):
    async with running(FakeEngine(), load=lambda: None) as api, api.http.get(path) as response:
        assert response.status == 200


async def test_the_real_engine_counts_what_it_did():
    """Over a real engine: steps, prefix cache, an aborted request, and the pool's settings."""
    async with live("gpt2") as api:
        prompt = "the quick brown fox jumps over the lazy dog " * 2
        for _ in range(2):  # the second finds the first's pages
            await api.complete(prompt, max_tokens=8, n=2, ignore_eos=True, seed=1)
        tallies, stats = api.engine.tallies, api.engine.stats()
        num_prompt = len(api.engine.tokenizer.encode(prompt))
        assert tallies.ended == {"stop": 0, "length": 4, "abort": 0, "error": 0}
        assert tallies.prompt_tokens == 4 * num_prompt
        assert 2 * (num_prompt // 8 - 1) * 8 <= tallies.cached_tokens == stats.prefix_hits
        assert tallies.step_tokens.cumulative()[-1] == stats.num_steps
        # Every position but the cached ones, and the last token of each choice, is computed once.
        assert tallies.step_tokens.total == 4 * (num_prompt + 8 - 1) - tallies.cached_tokens
        assert tallies.first_token.cumulative()[-1] == 4
        assert tallies.token_gap.cumulative()[-1] == stats.generation_tokens - 4 == 4 * 7
        spans = (tallies.queue, tallies.prefill, tallies.decode)
        assert sum(span.total for span in spans) <= tallies.latency.total

        body = {"prompt": "x", "max_tokens": 400, "ignore_eos": True, "stream": True}
        async with api.http.post("/v1/completions", json=body) as response:
            await response.content.readany()
        assert await is_idle(api.engine)
        assert tallies.ended["abort"] == 1
        assert tallies.latency.cumulative()[-1] == tallies.output_length.cumulative()[-1] == 5
        assert tallies.output_length.total <= api.engine.stats().generation_tokens
        assert tallies.output_length.total > stats.generation_tokens

        # One that leaves while it waits: it has no time in the queue, for that never ended.
        queued = tallies.queue.cumulative()[-1]
        eight = asyncio.create_task(api.complete("x", n=8, max_tokens=400, ignore_eos=True))
        async with asyncio.timeout(30):
            while api.engine.stats().num_running < 8:
                await asyncio.sleep(0.005)
            waiting = asyncio.create_task(api.complete("y"))
            while not api.engine.stats().num_waiting:
                await asyncio.sleep(0.005)
            waiting.cancel()
            while tallies.ended["abort"] != 2:
                await asyncio.sleep(0.005)
        assert tallies.latency.cumulative()[-1] == 6
        assert tallies.queue.cumulative()[-1] == queued
        eight.cancel()
        assert await is_idle(api.engine)
        assert tallies.ended["abort"] == 2 + 8

        assert api.engine.cache_info() == {
            "block_size": "8",
            "num_gpu_blocks": "256",
            "kv_cache_size_tokens": "2048",
            "cache_dtype": "float32",
            "enable_prefix_caching": "True",
            "gpu_memory_utilization": "None",  # its pool was given a number of pages
        }


async def test_a_failed_engine_counts_its_requests_as_errors():
    async with live("gpt2") as api:
        waiting = asyncio.create_task(api.post("/v1/completions", prompt="x", max_tokens=400, n=3))
        while not api.engine.stats().num_running:
            await asyncio.sleep(0.01)

        def fail(*args):
            raise RuntimeError("the device is gone")

        api.engine._engine.runner.execute = fail
        status, _ = await waiting
        assert status == 500
        async with asyncio.timeout(5):
            while api.engine.tallies.ended["error"] != 3:
                await asyncio.sleep(0.01)


def test_the_documents_table_has_every_metric():
    text = DOCUMENT.read_text("utf-8")
    for figure in FIGURES:
        aliases = " ".join(f"`vllm:{name}`" for name in figure.vllm) or "-"
        assert f"| `jaxserve_{figure.name}` | {figure.kind} | {aliases} | {figure.text} |\n" in text
