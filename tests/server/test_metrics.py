"""GET /metrics: what a scraper reads."""

import pytest
from conftest import running
from fake_engine import FakeEngine
from prometheus_client.parser import text_string_to_metric_families

SHARED = {
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "prompt_tokens_total",
    "generation_tokens_total",
    "request_success_total",
    "num_preemptions_total",
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
    "time_to_first_token_seconds_count",
    "inter_token_latency_seconds_count",
    "e2e_request_latency_seconds_sum",
    "request_queue_time_seconds_bucket",
    "request_prefill_time_seconds_count",
    "request_decode_time_seconds_count",
    "request_prompt_tokens_sum",
    "request_generation_tokens_sum",
}


async def scrape(api):
    """{(sample name, labels without model_name): value}"""
    async with api.http.get("/metrics") as response:
        assert response.status == 200
        assert response.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
        text = await response.text()
    samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("model_name") == "fake"
            samples[sample.name, tuple(sorted(labels.items()))] = sample.value
    return samples


async def test_both_names_carry_the_same_values(api):
    await api.complete("hi", max_tokens=3)
    samples = await scrape(api)
    names = {name for name, _ in samples}
    for name in SHARED:
        assert {f"jaxserve_{name}", f"vllm:{name}"} <= names
    for (name, labels), value in samples.items():
        if name.startswith("vllm:") and not name.endswith("_created"):
            assert samples["jaxserve_" + name.removeprefix("vllm:"), labels] == value


async def test_requests_are_counted(api, engine):
    await api.complete(["hi", "you"], n=2, max_tokens=3)
    engine.eos_after = 1
    await api.chat("hi")
    samples = await scrape(api)
    assert samples["jaxserve_request_success_total", (("finished_reason", "length"),)] == 4
    assert samples["jaxserve_request_success_total", (("finished_reason", "stop"),)] == 1
    assert samples["jaxserve_request_success_total", (("finished_reason", "abort"),)] == 0
    assert samples["jaxserve_request_prompt_tokens_sum", ()] == 3 + 4 + 19
    assert samples["jaxserve_request_generation_tokens_sum", ()] == 4 * 3 + 2
    assert samples["jaxserve_time_to_first_token_seconds_count", ()] == 3
    assert samples["jaxserve_inter_token_latency_seconds_count", ()] == 2 + 2 + 1
    assert samples["jaxserve_e2e_request_latency_seconds_count", ()] == 3


async def test_the_engines_figures_are_read_at_the_scrape(api, engine):
    engine.counts.num_waiting = 4
    samples = await scrape(api)
    assert samples["jaxserve_num_requests_waiting", ()] == 4
    assert samples["vllm:kv_cache_usage_perc", ()] == 0.25
    assert samples["jaxserve_pages", (("state", "free"),)] == 75
    assert samples["jaxserve_compilations_total", ()] == 7
    assert samples["vllm:prefix_cache_hits_total", ()] == 10


async def test_rejections_are_counted_by_reason(api):
    await api.post("/v1/completions", prompt="")
    await api.post("/v1/completions", prompt="x", model="other")
    samples = await scrape(api)
    assert samples["jaxserve_request_rejections_total", (("reason", "400"),)] == 1
    assert samples["jaxserve_request_rejections_total", (("reason", "model_not_found"),)] == 1


@pytest.mark.parametrize("path", ["/health", "/metrics"])
async def test_probes_and_scrapes_do_not_need_a_loaded_engine(path):
    async with running(FakeEngine(), load=lambda: None) as api, api.http.get(path) as response:
        assert response.status == 200
