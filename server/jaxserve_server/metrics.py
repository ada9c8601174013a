"""Prometheus metrics: `jaxserve_*`, and vLLM's names for those that mean the same there.

Counts and times of requests are observed as outputs pass by; gauges and the engine's own counters are read
from `engine.stats()` when somebody scrapes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, Metric, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4 as CONTENT_TYPE
from prometheus_client.registry import Collector

from jaxserve.outputs import RequestOutput

if TYPE_CHECKING:
    from jaxserve.async_engine import AsyncLLMEngine

__all__ = ["CONTENT_TYPE", "Metrics"]

_OWN = "jaxserve_"
_VLLM = "vllm:"
# Dashboards and autoscalers made for vLLM find these under vLLM's name too (`jaxserve_x` as `vllm:x`).
_SHARED_WITH_VLLM = frozenset(
    "num_requests_running num_requests_waiting kv_cache_usage_perc prompt_tokens generation_tokens "
    "request_success num_preemptions prefix_cache_queries prefix_cache_hits time_to_first_token_seconds "
    "inter_token_latency_seconds e2e_request_latency_seconds request_queue_time_seconds "
    "request_prefill_time_seconds request_decode_time_seconds request_prompt_tokens "
    "request_generation_tokens".split()
)

_LATENCY_BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 10, 20, 40, 80)
_TOKEN_GAP_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5, 5)
_REQUEST_BUCKETS = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
_TOKEN_BUCKETS = tuple(base * 10**power for power in range(6) for base in (1, 2, 5))


class Metrics:
    """All metrics of one server; `observer()` gives each prompt the object that watches its outputs."""

    def __init__(self, model_name: str) -> None:
        self.model_name = model_name
        self.engine: AsyncLLMEngine | None = None  # set when it is loaded
        self._inner = CollectorRegistry()
        self._registry = CollectorRegistry()
        self._registry.register(_Families(self._collect))

        def histogram(name: str, text: str, buckets: Iterable[float]) -> Histogram:
            family = Histogram(
                _OWN + name, text, ["model_name"], buckets=tuple(buckets), registry=self._inner
            )
            return family.labels(model_name)

        self.first_token = histogram(
            "time_to_first_token_seconds", "From arrival to the first token.", _LATENCY_BUCKETS
        )
        self.token_gap = histogram(
            "inter_token_latency_seconds", "Between two tokens of a request.", _TOKEN_GAP_BUCKETS
        )
        self.latency = histogram(
            "e2e_request_latency_seconds", "From arrival to the last token.", _REQUEST_BUCKETS
        )
        self.queue_time = histogram(
            "request_queue_time_seconds", "From arrival to the first step.", _REQUEST_BUCKETS
        )
        self.prefill_time = histogram(
            "request_prefill_time_seconds", "From the first step to the first token.", _REQUEST_BUCKETS
        )
        self.decode_time = histogram(
            "request_decode_time_seconds", "From the first token to the last.", _REQUEST_BUCKETS
        )
        self.prompt_length = histogram("request_prompt_tokens", "Prompt tokens of a request.", _TOKEN_BUCKETS)
        self.output_length = histogram(
            "request_generation_tokens", "Generated tokens of a choice.", _TOKEN_BUCKETS
        )

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(_OWN + name, text, ["model_name", *labels], registry=self._inner)

        self._success = counter("request_success", "Finished choices.", "finished_reason")
        self._rejections = counter("request_rejections", "Requests answered with an error.", "reason")
        self._disconnects = counter("disconnect_aborts", "Requests aborted because their client left.")
        for reason in ("stop", "length", "abort"):
            self._success.labels(model_name, reason)
        self._disconnects.labels(model_name)

    def observer(self) -> RequestObserver:
        return RequestObserver(self)

    def finished(self, reason: str) -> None:
        self._success.labels(self.model_name, reason).inc()

    def rejected(self, reason: str) -> None:
        self._rejections.labels(self.model_name, reason).inc()

    def disconnected(self) -> None:
        self._disconnects.labels(self.model_name).inc()

    def exposition(self) -> bytes:
        """The page that Prometheus scrapes."""
        return generate_latest(self._registry)

    def _collect(self) -> Iterator[Metric]:
        for family in [*self._inner.collect(), *self._engine_families()]:
            yield family
            name = family.name.removeprefix(_OWN)
            if name in _SHARED_WITH_VLLM:
                yield _renamed(family, _VLLM + name)

    def _engine_families(self) -> Iterator[Metric]:
        if self.engine is None:
            return
        stats = self.engine.stats()
        label = [self.model_name]
        gauges = {
            "num_requests_running": (stats.num_running, "Requests that hold pages."),
            "num_requests_waiting": (stats.num_waiting, "Requests that wait to be admitted."),
            "kv_cache_usage_perc": (
                stats.pages_used / max(stats.pages_total, 1),
                "Share of the page pool that requests hold; 1 is all of it.",
            ),
            "step_age_seconds": (stats.last_step_age or 0.0, "How long the step now running has run."),
        }
        for name, (value, text) in gauges.items():
            gauge = GaugeMetricFamily(_OWN + name, text, labels=["model_name"])
            gauge.add_metric(label, value)
            yield gauge
        pages = GaugeMetricFamily(
            _OWN + "pages", "Pages of the pool by state.", labels=["model_name", "state"]
        )
        for state in ("total", "used", "cached", "free"):
            pages.add_metric([*label, state], getattr(stats, f"pages_{state}"))
        yield pages
        counters = {
            "prompt_tokens": (stats.prompt_tokens, "Prompt tokens processed."),
            "generation_tokens": (stats.generation_tokens, "Tokens generated."),
            "num_preemptions": (stats.num_preemptions, "Preemptions for lack of pages."),
            "prefix_cache_queries": (stats.prefix_queries, "Prompt tokens looked up in the prefix cache."),
            "prefix_cache_hits": (stats.prefix_hits, "Prompt tokens found in the prefix cache."),
            "compilations": (stats.num_compilations, "Programs compiled since the start."),
            "steps": (stats.num_steps, "Steps run."),
        }
        for name, (count, text) in counters.items():
            counter = CounterMetricFamily(_OWN + name, text, labels=["model_name"])
            counter.add_metric(label, count)
            yield counter


class RequestObserver:
    """Watches the cumulative outputs of one prompt."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._num_tokens = 0  # of the longest choice
        self._last_token_time: float | None = None
        self._finished: set[int] = set()

    def see(self, output: RequestOutput) -> None:
        times = output.metrics
        num_tokens = max((len(choice.token_ids) for choice in output.outputs), default=0)
        if num_tokens > self._num_tokens and times.last_token_time is not None:
            if self._last_token_time is None:
                first = times.first_token_time or times.last_token_time
                self._metrics.first_token.observe(first - times.arrival_time)
                self._num_tokens, self._last_token_time = 1, first
            gained = num_tokens - self._num_tokens  # more than one where outputs were coalesced
            for _ in range(gained):
                self._metrics.token_gap.observe((times.last_token_time - self._last_token_time) / gained)
            self._num_tokens, self._last_token_time = num_tokens, times.last_token_time
        for choice in output.outputs:
            if choice.finish_reason is not None and choice.index not in self._finished:
                self._finished.add(choice.index)
                self._metrics.finished(choice.finish_reason)
                self._metrics.output_length.observe(len(choice.token_ids))
        if output.finished:
            self._see_end(output)

    def _see_end(self, output: RequestOutput) -> None:
        metrics, times = self._metrics, output.metrics
        metrics.prompt_length.observe(len(output.prompt_token_ids))
        spans = (
            (metrics.queue_time, times.arrival_time, times.first_scheduled_time),
            (metrics.prefill_time, times.first_scheduled_time, times.first_token_time),
            (metrics.decode_time, times.first_token_time, times.last_token_time),
            (metrics.latency, times.arrival_time, times.finished_time),
        )
        for histogram, start, end in spans:
            if start is not None and end is not None:
                histogram.observe(end - start)


class _Families(Collector):
    """A registry's view of a function that makes metric families."""

    def __init__(self, collect: Callable[[], Iterator[Metric]]) -> None:
        self._collect = collect

    def collect(self) -> Iterator[Metric]:
        return self._collect()

    def describe(self) -> Iterable[Metric]:
        return ()  # all names are ours: nothing to check for doubles


def _renamed(family: Metric, name: str) -> Metric:
    """The same family under another name."""
    copy = Metric(name, family.documentation, family.type, family.unit)
    copy.samples = [s._replace(name=name + s.name.removeprefix(family.name)) for s in family.samples]
    return copy
