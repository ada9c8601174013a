"""Prometheus metrics: `jaxserve_*`, and vLLM's names for those that mean the same there.

What concerns the engine is read from its counters when somebody scrapes, which never waits for it; the server
itself counts HTTP requests, refusals and clients that left.

As in vLLM, a request with n choices counts n times, but in `request_params_n` and
`request_max_num_generation_tokens`. Times are intervals of the engine's thread; only those that begin at
"arrival" include the server's part: they begin when the request's head has been read.

Names in vLLM's dashboards that are not offered, because the thing does not exist here: `num_requests_swapped`
and `cpu_cache_usage_perc` (pages never move to the host), `gpu_prefix_cache_hit_rate` (a rate: divide hits by
queries), `external_prefix_cache_*`, `mm_cache_*`, `lora_requests_info`, `spec_decode_*`, `kv_block_*`,
`kv_offload_*` and `nixl_*`, `avg_*_throughput_toks_per_s` (rates of the token counters),
`http_request_size_bytes` and `http_response_size_bytes`.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from typing import TYPE_CHECKING, Literal

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    Metric,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4 as CONTENT_TYPE
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

import jaxserve
from jaxserve.tallies import EngineTallies, Tally

if TYPE_CHECKING:
    from jaxserve.async_engine import AsyncLLMEngine
    from jaxserve.engine import EngineStats

__all__ = ["CONTENT_TYPE", "FIGURES", "Figure", "Metrics"]

_HTTP_SECONDS = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_PAGE_STATES = ("total", "used", "pinned", "cached", "free")
_PROBES = frozenset({"health", "ready", "startup", "metrics", "version"})


@dataclass(frozen=True)
class _View:
    """The engine at one moment."""

    stats: EngineStats
    tallies: EngineTallies
    cache: dict[str, str]


_Value = float | Mapping[str, float] | Tally


@dataclass(frozen=True)
class Figure:
    """One metric of the engine: `jaxserve_<name>`, and `vllm:<name>` for each of `vllm`."""

    kind: Literal["counter", "gauge", "histogram"]
    name: str
    text: str
    read: Callable[[_View], _Value]  # a mapping where there is a label
    vllm: tuple[str, ...] = ()
    label: str | None = None


def _counter(name: str, text: str, read: Callable[[_View], _Value], *vllm: str) -> Figure:
    return Figure("counter", name, text, read, vllm)


def _gauge(name: str, text: str, read: Callable[[_View], _Value], *vllm: str) -> Figure:
    return Figure("gauge", name, text, read, vllm)


def _histogram(name: str, text: str, read: Callable[[EngineTallies], Tally], *vllm: str) -> Figure:
    return Figure("histogram", name, text, lambda view: read(view.tallies), vllm or (name,))


FIGURES = (
    _gauge(
        "num_requests_running",
        "Choices that hold pages and are computed.",
        lambda view: view.stats.num_running,
        "num_requests_running",
    ),
    _gauge(
        "num_requests_waiting",
        "Choices that wait to be admitted, preempted ones included.",
        lambda view: view.stats.num_waiting,
        "num_requests_waiting",
    ),
    Figure(
        "gauge",
        "num_requests_waiting_by_reason",
        "Waiting choices by what they wait for; here it is always capacity.",
        lambda view: {"capacity": view.stats.num_waiting, "deferred": 0},
        ("num_requests_waiting_by_reason",),
        "reason",
    ),
    _gauge(
        "kv_cache_usage_perc",
        "Share of the pages that requests hold, 1 is all; free pages that still cache a prefix do not count.",
        lambda view: view.stats.pages_used / max(view.stats.pages_total, 1),
        "kv_cache_usage_perc",
        "gpu_cache_usage_perc",
    ),
    Figure(
        "gauge",
        "engine_sleep_state",
        "1 for the state that the engine is in; it never sleeps.",
        lambda view: {"awake": 1, "weights_offloaded": 0, "discard_all": 0},
        ("engine_sleep_state",),
        "sleep_state",
    ),
    Figure(
        "gauge",
        "pages",
        "Pages of the pool by state: total = used + pinned + free, and free includes cached.",
        lambda view: {s: getattr(view.stats, f"pages_{s}") for s in _PAGE_STATES},
        (),
        "state",
    ),
    _gauge(
        "step_age_seconds",
        "How long the step now running has run; 0 between steps.",
        lambda view: view.stats.last_step_age or 0.0,
    ),
    _counter(
        "prompt_tokens",
        "Prompt tokens of choices whose prompt has been computed, cached ones included.",
        lambda view: view.tallies.prompt_tokens,
        "prompt_tokens",
    ),
    _counter(
        "prompt_tokens_cached",
        "Those of prompt_tokens that the prefix cache had.",
        lambda view: view.tallies.cached_tokens,
        "prompt_tokens_cached",
    ),
    Figure(
        "counter",
        "prompt_tokens_by_source",
        "prompt_tokens by where their keys and values came from; nothing comes from another instance.",
        lambda view: {
            "local_compute": view.tallies.prompt_tokens - view.tallies.cached_tokens,
            "local_cache_hit": view.tallies.cached_tokens,
            "external_kv_transfer": 0,
        },
        ("prompt_tokens_by_source",),
        "source",
    ),
    _counter(
        "generation_tokens",
        "Tokens generated.",
        lambda view: view.stats.generation_tokens,
        "generation_tokens",
    ),
    Figure(
        "counter",
        "request_success",
        "Choices that ended, by why: abort is a client that left or a timeout, error a failed engine.",
        lambda view: dict(view.tallies.ended),
        ("request_success",),
        "finished_reason",
    ),
    _counter(
        "num_preemptions",
        "Running choices that gave their pages up and were computed anew later.",
        lambda view: view.stats.num_preemptions,
        "num_preemptions",
    ),
    _counter(
        "prefix_cache_queries",
        "Prompt tokens looked up in the prefix cache.",
        lambda view: view.stats.prefix_queries,
        "prefix_cache_queries",
        "gpu_prefix_cache_queries",
    ),
    _counter(
        "prefix_cache_hits",
        "Prompt tokens found in the prefix cache.",
        lambda view: view.stats.prefix_hits,
        "prefix_cache_hits",
        "gpu_prefix_cache_hits",
    ),
    _gauge(
        "prefix_cache_pinned_tokens",
        "Tokens of pinned prefixes that the cache holds; less than at the start while new weights come.",
        lambda view: view.stats.pinned_tokens,
    ),
    _counter(
        "prefix_cache_pinned_hits",
        "Those of prefix_cache_hits that were found in pinned pages.",
        lambda view: view.stats.pinned_hits,
    ),
    _counter("compilations", "Programs compiled since the start.", lambda view: view.stats.num_compilations),
    _counter("steps", "Steps run.", lambda view: view.stats.num_steps),
    _histogram(
        "iteration_tokens_total",
        "Tokens computed in a step, of prompts and outputs; cached ones are not.",
        lambda tallies: tallies.step_tokens,
    ),
    _histogram(
        "time_to_first_token_seconds",
        "From arrival to the first token: tokenising, queue and prefill.",
        lambda tallies: tallies.first_token,
    ),
    _histogram(
        "inter_token_latency_seconds",
        "Between two tokens of a choice, one value per token, whether it is streamed or not.",
        lambda tallies: tallies.token_gap,
        "inter_token_latency_seconds",
        "time_per_output_token_seconds",
    ),
    _histogram(
        "request_time_per_output_token_seconds",
        "Mean time between the tokens of a choice; 0 where there is one token.",
        lambda tallies: tallies.mean_token_gap,
    ),
    _histogram(
        "e2e_request_latency_seconds",
        "From arrival to the end, aborted choices included.",
        lambda tallies: tallies.latency,
    ),
    _histogram(
        "request_queue_time_seconds", "From the queue to the first step.", lambda tallies: tallies.queue
    ),
    _histogram(
        "request_prefill_time_seconds",
        "From the first step to the first token.",
        lambda tallies: tallies.prefill,
    ),
    _histogram(
        "request_decode_time_seconds",
        "From the first token to the last, preemptions included.",
        lambda tallies: tallies.decode,
    ),
    _histogram(
        "request_inference_time_seconds",
        "From the first step to the last token.",
        lambda tallies: tallies.inference,
    ),
    _histogram(
        "request_prompt_tokens", "Prompt tokens of an ended choice.", lambda tallies: tallies.prompt_length
    ),
    _histogram(
        "request_generation_tokens",
        "Generated tokens of an ended choice.",
        lambda tallies: tallies.output_length,
    ),
    _histogram(
        "request_params_max_tokens",
        "max_tokens of an ended choice, where the request gave one.",
        lambda tallies: tallies.max_tokens,
    ),
    _histogram("request_params_n", "n of an ended request.", lambda tallies: tallies.choices),
    _histogram(
        "request_max_num_generation_tokens",
        "Generated tokens of a request's longest choice.",
        lambda tallies: tallies.longest_output,
    ),
)


class Metrics:
    """All metrics of one server."""

    def __init__(self, model_name: str) -> None:
        self.model_name = model_name
        self.engine: AsyncLLMEngine | None = None  # set when it is loaded
        self._inner = CollectorRegistry()
        self._registry = CollectorRegistry()
        self._registry.register(_Families(self._collect))
        ProcessCollector(registry=self._registry)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(name, text, ["model_name", *labels], registry=self._inner)

        self._rejections = counter(
            "jaxserve_request_rejections",
            "Requests answered with an error, by its code or status and the name of the key.",
            "reason",
            "api_key",
        )
        self._disconnects = counter(
            "jaxserve_disconnect_aborts", "HTTP requests that ended because their client left."
        )
        self._disconnects.labels(model_name)
        # As vLLM's HTTP instrumentation names and labels them; probes, /metrics and /version are left out.
        self._http = counter(
            "http_requests",
            "Requests by route, method and class of status; 'disconnected' where the client left first.",
            *("handler", "method", "status"),
        )
        self._http_seconds = Histogram(
            "http_request_duration_seconds",
            "From a request's head to the end of its answer, streams included.",
            ["model_name", "handler", "method"],
            buckets=_HTTP_SECONDS,
            registry=self._inner,
        )

    def rejected(self, reason: str, key_name: str = "") -> None:
        self._rejections.labels(self.model_name, reason, key_name).inc()

    def disconnected(self) -> None:
        self._disconnects.labels(self.model_name).inc()

    def http_ended(self, route: str | None, method: str, status: int | None, seconds: float) -> None:
        """An HTTP request has ended.

        Args:
            route: the pattern that its path matched, never the path; None for no such path.
            method: as the client gave it.
            status: None where the client left before there was one.
            seconds: since its head was read.
        """
        if route is not None and route.rsplit("/", 1)[-1] in _PROBES:
            return
        labels = (self.model_name, route or "none", method if method in _METHODS else "other")
        self._http.labels(*labels, "disconnected" if status is None else f"{status // 100}xx").inc()
        self._http_seconds.labels(*labels).observe(seconds)

    def page(self) -> bytes:
        """What a scraper reads, whatever format it would like best; takes long, so not on the event loop.

        prometheus_client writes `vllm:x` as `vllm_x` in OpenMetrics and in the text format's version 1, so
        that no dashboard would find it.
        """
        return generate_latest(self._registry)

    def _collect(self) -> Iterator[Metric]:
        for family in self._inner.collect():
            # Times of creation nobody reads; they would double the page.
            family.samples = [s for s in family.samples if not s.name.endswith("_created")]
            yield family
        yield _info("jaxserve_build_info", "Versions of this server.", self._labels() | _versions())
        if self.engine is None:
            return
        view = _View(self.engine.stats(), self.engine.tallies, self.engine.cache_info())
        own = self._labels()
        vllm = own | {"engine": "0"}
        for prefix, labels in (("jaxserve_", own), ("vllm:", vllm)):
            yield _info(f"{prefix}cache_config_info", "How the pool is set up.", labels | view.cache)
        for figure in FIGURES:
            value = figure.read(view)
            yield _family(figure, f"jaxserve_{figure.name}", own, value)
            for name in figure.vllm:
                yield _family(figure, f"vllm:{name}", vllm, value)

    def _labels(self) -> dict[str, str]:
        return {"model_name": self.model_name}


@cache
def _versions() -> dict[str, str]:
    return {
        "version": jaxserve.__version__,
        "jax_version": version("jax"),
        "python_version": platform.python_version(),
    }


def _info(name: str, text: str, labels: Mapping[str, str]) -> Metric:
    family = GaugeMetricFamily(name, text, labels=list(labels))
    family.add_metric(list(labels.values()), 1)
    return family


def _family(figure: Figure, name: str, labels: Mapping[str, str], value: _Value) -> Metric:
    names, values = list(labels), list(labels.values())
    if isinstance(value, Tally):
        histogram = HistogramMetricFamily(name, figure.text, labels=names)
        bounds = [*map(floatToGoString, value.bounds), "+Inf"]
        buckets = list(zip(bounds, map(float, value.cumulative()), strict=True))
        histogram.add_metric(values, buckets, value.total)
        return histogram
    family: CounterMetricFamily | GaugeMetricFamily
    of_kind = CounterMetricFamily if figure.kind == "counter" else GaugeMetricFamily
    if isinstance(value, Mapping):
        family = of_kind(name, figure.text, labels=[*names, figure.label or ""])
        for key, number in value.items():
            family.add_metric([*values, key], number)
    else:
        family = of_kind(name, figure.text, labels=names)
        family.add_metric(values, value)
    return family


class _Families(Collector):
    """A registry's view of a function that makes metric families."""

    def __init__(self, collect: Callable[[], Iterator[Metric]]) -> None:
        self._collect = collect

    def collect(self) -> Iterator[Metric]:
        return self._collect()

    def describe(self) -> Iterable[Metric]:
        return ()  # all names are ours: nothing to check for doubles
