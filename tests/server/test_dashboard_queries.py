"""Dashboards made for vLLM find their data here.

The queries are those of the panels in vLLM's published Grafana dashboards, of the one that came first
(`model_name="$model_name"`) and of the later ones (`job=~`, `instance=~`, `engine=~`), under older names too.
Each selector is checked against two scrapes of a live server; where Prometheus itself is installed, it
evaluates every query.
"""

import asyncio
import json
import re
import shutil
import sys
import urllib.parse
import urllib.request
from dataclasses import dataclass

import pytest
from live import live
from prometheus_client.parser import text_string_to_metric_families

# What Prometheus adds to each sample, and Grafana's variables.
TARGET = {"job": "jaxserve", "instance": "here"}
OLD = '{model_name="gpt2"}'
NEW = '{job=~"jaxserve|other", model_name=~"gpt2|other", instance=~".+"'
WINDOW = "[15s]"

LATENCIES = (
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "time_per_output_token_seconds",
    "request_time_per_output_token_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "request_inference_time_seconds",
)
LENGTHS = (
    "request_prompt_tokens",
    "request_generation_tokens",
    "request_max_num_generation_tokens",
    "request_params_max_tokens",
    "request_params_n",
    "iteration_tokens_total",
)
GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "gpu_cache_usage_perc")


def _rate(name, more=""):
    """Of all series of `name`, as the later dashboards ask."""
    return f"sum(rate({name}{NEW}{more}}}{WINDOW}))"


def _share(part, whole):
    return f"{part} / ({whole} > 0)"


def _queries():
    """{panel: query}"""
    for name in GAUGES:
        yield f"{name}, first", f"vllm:{name}{OLD}"
        yield f"{name}, by engine", f'max by (instance, engine) (vllm:{name}{NEW}, engine=~"0|1"}})'
    for name in (*LATENCIES, *LENGTHS):
        for quantile in ("0.99", "0.5"):
            rates = f"rate(vllm:{name}_bucket{OLD}{WINDOW})"
            yield f"{name} p{quantile}", f"histogram_quantile({quantile}, sum by (le) ({rates}))"
        yield f"{name} mean", f"rate(vllm:{name}_sum{OLD}{WINDOW}) / rate(vllm:{name}_count{OLD}{WINDOW})"
        yield f"{name} mean of all", _share(_rate(f"vllm:{name}_sum"), _rate(f"vllm:{name}_count"))
        yield f"{name} heatmap", f"sum by (le) (increase(vllm:{name}_bucket{OLD}{WINDOW}))"
    for name, bound in (("time_to_first_token", "1.0"), ("request_time_per_output_token", "0.1")):
        within = _rate(f"vllm:{name}_seconds_bucket", f', le="{bound}"')
        yield f"{name} objective", _share(within, _rate(f"vllm:{name}_seconds_count"))
    for name in ("prompt_tokens_total", "generation_tokens_total"):
        yield f"{name} rate", f"rate(vllm:{name}{OLD}{WINDOW})"
        yield f"{name} by model", f"sum by (model_name) (rate(vllm:{name}{NEW}}}{WINDOW}))"
    ended = "vllm:request_success_total"
    by_reason = f"sum by (finished_reason) (rate({ended}{NEW}}}{WINDOW}))"
    yield "ended by reason", f"sum by (finished_reason) (increase({ended}{OLD}{WINDOW}))"
    yield (
        "share of reasons",
        f"{by_reason} / ignoring (finished_reason) group_left () ({_rate(ended)} > 0)",
    )
    yield "success rate", "1 - " + _share(_rate(ended, ', finished_reason="error"'), _rate(ended))
    for cache in ("vllm:prefix_cache", "vllm:gpu_prefix_cache"):
        yield f"{cache} hits", _share(_rate(f"{cache}_hits_total"), _rate(f"{cache}_queries_total"))
    cached, prompt = "vllm:prompt_tokens_cached_total", "vllm:prompt_tokens_total"
    yield "cached prompt tokens", _share(_rate(cached), _rate(prompt))
    for source in ("local_compute", "local_cache_hit", "external_kv_transfer"):
        more = f', source="{source}"'
        yield f"prompt tokens, {source}", _rate("vllm:prompt_tokens_by_source_total", more)
    for reason in ("capacity", "deferred"):
        selector = f'vllm:num_requests_waiting_by_reason{NEW}, reason="{reason}"}}'
        yield f"waiting, {reason}", f"sum({selector})"
    yield "preemptions", _rate("vllm:num_preemptions_total")
    yield "status", f'2 - (max(vllm:engine_sleep_state{NEW}, sleep_state="awake"}}) == bool 0)'
    yield "pool", f"vllm:cache_config_info{OLD}"
    http = 'http_requests_total{job=~"jaxserve", instance=~".+"}'
    yield "requests by status", f"sum by (status) (rate({http}{WINDOW}))"
    yield "requests by route", f"sum by (handler) (rate({http}{WINDOW}))"
    for part in ("sum", "count"):
        seconds = f'http_request_duration_seconds_{part}{{job=~"jaxserve"}}'
        yield f"duration by route, {part}", f"sum by (handler) (rate({seconds}{WINDOW}))"


QUERIES = dict(_queries())
# Nothing here fails, is preempted, or comes from elsewhere: these rates are zero.
AT_REST = ("preemptions", "prompt tokens, external_kv_transfer")


@dataclass
class Selector:
    """One series selector of a query."""

    name: str
    matchers: list[tuple[str, str, str]]
    is_range: bool

    def samples(self, page):
        """{labels: value} of the page's samples that it selects."""
        return {
            labels: value
            for (name, labels), value in page.items()
            if name == self.name and all(self._fits(dict(labels), *matcher) for matcher in self.matchers)
        }

    @staticmethod
    def _fits(labels, label, operator, wanted):
        found = labels.get(label, "")
        return found == wanted if operator == "=" else re.fullmatch(wanted, found) is not None


def selectors(query):
    for name, matchers, window in re.findall(r"([a-z_:\d]+)\{(.*?)\}(\[\d+s\])?", query):
        yield Selector(name, re.findall(r'(\w+)(=~|=)"(.*?)"', matchers), bool(window))


async def scrape(api):
    """{(name, labels with those of the target): value}"""
    async with api.http.get("/metrics") as response:
        families = text_string_to_metric_families(await response.text())
    return {
        (sample.name, tuple(sorted({**sample.labels, **TARGET}.items()))): sample.value
        for family in families
        for sample in family.samples
    }


async def traffic(api):
    """Some of everything: streams, several choices, stops, a prefix that is cached, a client that leaves."""
    prompt = "the quick brown fox jumps over the lazy dog " * 2
    sampling = {"max_tokens": 6, "temperature": 0}
    await api.complete([prompt, "b"], n=2, ignore_eos=True, **sampling)
    whole = (await api.complete(prompt, ignore_eos=True, **sampling))["choices"][0]["text"]
    await api.complete(prompt, stop=[whole[2]], **sampling)
    await api.events("/v1/completions", prompt=prompt, ignore_eos=True, **sampling)
    await api.chat("hello", max_tokens=3)
    body = {"prompt": "x", "max_tokens": 300, "ignore_eos": True, "stream": True}
    async with api.http.post("/v1/completions", json=body) as response:
        await response.content.readany()


async def test_every_query_of_a_vllm_dashboard_has_data():
    async with live("gpt2") as api:
        await traffic(api)
        first = await scrape(api)
        await traffic(api)
        second = await scrape(api)
    assert len(QUERIES) > 100
    for panel, query in QUERIES.items():
        found = list(selectors(query))
        assert found, panel
        for selector in found:
            samples = selector.samples(second)
            assert samples, (panel, query)
            if selector.name.endswith("_bucket"):
                assert all("le" in dict(labels) for labels in samples)
            if selector.is_range:
                before = selector.samples(first)
                assert samples.keys() >= before.keys() > set()
                gained = [samples[labels] - before.get(labels, 0) for labels in samples]
                assert min(gained) >= 0
                is_still = panel in AT_REST or ("finished_reason", "=", "error") in selector.matchers
                assert (max(gained) > 0) is not is_still, (panel, query)
    ends = {
        dict(labels)["finished_reason"]: value
        for labels, value in Selector("vllm:request_success_total", [], True).samples(second).items()
    }
    assert ends["length"] > 0
    assert ends["stop"] > 0
    assert ends["abort"] > 0
    assert ends["error"] == 0


def ask(url, query):
    with urllib.request.urlopen(f"{url}/api/v1/query?query={urllib.parse.quote(query)}") as response:
        return json.load(response)["data"]["result"]


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="no Prometheus on the PATH")
async def test_prometheus_evaluates_every_query(tmp_path, unused_tcp_port):
    async with live("gpt2") as api:
        target = f"{api.http.host}:{api.http.port}"
        config = tmp_path / "prometheus.yml"
        config.write_text(
            "global: {scrape_interval: 1s}\n"
            f"scrape_configs: [{{job_name: jaxserve, static_configs: [{{targets: ['{target}']}}]}}]\n"
        )
        url = f"http://127.0.0.1:{unused_tcp_port}"
        process = await asyncio.create_subprocess_exec(
            "prometheus",
            f"--config.file={config}",
            f"--storage.tsdb.path={tmp_path / 'data'}",
            f"--web.listen-address=127.0.0.1:{unused_tcp_port}",
            stdout=sys.stderr,
        )
        try:
            await traffic(api)  # labels that a first request makes are there at the first scrape
            await asyncio.sleep(3)
            for _ in range(6):
                await traffic(api)
                await asyncio.sleep(1)
            results = {panel: await asyncio.to_thread(ask, url, query) for panel, query in QUERIES.items()}
        finally:
            process.terminate()
            await process.wait()
    for panel, series in results.items():
        assert series, panel
        values = [float(one["value"][1]) for one in series]
        is_gauge = panel.startswith((*GAUGES, "waiting"))
        assert is_gauge or panel in AT_REST or max(values) > 0, panel
        assert not any(value != value for value in values), panel  # NaN: no traffic
        print(f"{panel}: {len(series)} series, up to {max(values):.6g}")
