"""What one request took, and what a level of a benchmark amounts to."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.table import Table


@dataclass(slots=True)
class RequestRecord:
    """One request as its client saw it. Seconds from the start; `arrivals` are those of pieces of text."""

    wanted_tokens: int
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of the prompt, where the server tells
    output_tokens: int = 0
    arrivals: list[float] = field(default_factory=list)
    latency: float = 0.0  # from the start to the end of the answer
    error: str | None = None

    @property
    def ttft(self) -> float | None:
        """Time to the first piece of text."""
        return self.arrivals[0] if self.arrivals else None

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first; None with fewer than two."""
        if self.output_tokens < 2 or len(self.arrivals) < 2:
            return None
        return (self.arrivals[-1] - self.arrivals[0]) / (self.output_tokens - 1)

    @property
    def itl(self) -> list[float]:
        """Gaps between pieces of text (a piece may hold several tokens, or none when text is held back)."""
        return [b - a for a, b in pairwise(self.arrivals)]


@dataclass(frozen=True, slots=True)
class Goodput:
    """Limits in seconds that a request must keep to count; None: no limit."""

    ttft: float | None = None
    tpot: float | None = None
    e2e: float | None = None

    @classmethod
    def parse(cls, text: str) -> Goodput:
        """From `ttft:500,tpot:50` (milliseconds). Raises ValueError for anything else."""
        limits: dict[str, float] = {}
        for part in text.split(","):
            name, colon, value = part.strip().partition(":")
            if not colon or name not in cls.__dataclass_fields__:
                raise ValueError(f"{part!r}: expected ttft:MS, tpot:MS or e2e:MS")
            limits[name] = float(value) / 1e3
            if not limits[name] > 0:
                raise ValueError(f"{part!r}: the limit must be above 0")
        return cls(**limits)

    def kept_by(self, record: RequestRecord) -> bool:
        if record.error is not None or record.ttft is None:
            return False
        pairs = [(self.ttft, record.ttft), (self.tpot, record.tpot), (self.e2e, record.latency)]
        return all(limit is None or value is None or value <= limit for limit, value in pairs)


def percentile(values: Sequence[float], fraction: float) -> float:
    """The value at rank floor(fraction * n) of the sorted values; NaN when there is none."""
    if not values:
        return math.nan
    return sorted(values)[min(len(values) - 1, int(fraction * len(values)))]


@dataclass(frozen=True, slots=True)
class Summary:
    """One level. Rates per second of wall time; latencies in milliseconds."""

    label: str
    requests: int
    failed: int
    short: int  # answered with another number of tokens than asked for
    wall: float
    output_rate: float
    total_rate: float
    ttft_p50: float
    ttft_p99: float
    tpot_p50: float
    tpot_p99: float
    itl_p50: float
    itl_p99: float
    goodput: float | None  # requests/s within the limits; None when no limits were given

    @classmethod
    def of(
        cls, label: str, records: Sequence[RequestRecord], wall: float, goodput: Goodput | None = None
    ) -> Summary:
        done = [r for r in records if r.error is None]
        output = sum(r.output_tokens for r in done)
        ttft = [r.ttft * 1e3 for r in done if r.ttft is not None]
        tpot = [r.tpot * 1e3 for r in done if r.tpot is not None]
        itl = [gap * 1e3 for r in done for gap in r.itl]
        return cls(
            label=label,
            requests=len(records),
            failed=len(records) - len(done),
            short=sum(r.output_tokens != r.wanted_tokens for r in done),
            wall=wall,
            output_rate=output / wall,
            total_rate=(output + sum(r.prompt_tokens for r in done)) / wall,
            ttft_p50=percentile(ttft, 0.5),
            ttft_p99=percentile(ttft, 0.99),
            tpot_p50=percentile(tpot, 0.5),
            tpot_p99=percentile(tpot, 0.99),
            itl_p50=percentile(itl, 0.5),
            itl_p99=percentile(itl, 0.99),
            goodput=sum(map(goodput.kept_by, records)) / wall if goodput else None,
        )


_COLUMNS: list[tuple[str, Callable[[Summary], str]]] = [
    ("load", lambda s: s.label),
    ("requests", lambda s: str(s.requests)),
    ("wall s", lambda s: f"{s.wall:.1f}"),
    ("output tok/s", lambda s: f"{s.output_rate:.1f}"),
    ("total tok/s", lambda s: f"{s.total_rate:.1f}"),
    ("TTFT ms p50 / p99", lambda s: f"{s.ttft_p50:.0f} / {s.ttft_p99:.0f}"),
    ("TPOT ms p50 / p99", lambda s: f"{s.tpot_p50:.1f} / {s.tpot_p99:.1f}"),
    ("ITL ms p50 / p99", lambda s: f"{s.itl_p50:.1f} / {s.itl_p99:.1f}"),
    ("failed", lambda s: str(s.failed)),
    ("short", lambda s: str(s.short)),
]


def summary_table(summaries: Sequence[Summary], title: str) -> Table:
    """A table with one row a level; a goodput column when limits were given."""
    columns = list(_COLUMNS)
    if any(s.goodput is not None for s in summaries):
        columns.append(("goodput req/s", lambda s: f"{s.goodput:.2f}"))
    table = Table(title=title, title_justify="left")
    for name, _ in columns:
        table.add_column(name, justify="right")
    for summary in summaries:
        table.add_row(*[text(summary) for _, text in columns])
    return table


Level = tuple[Summary, Sequence[RequestRecord]]


def write_json(path: Path, settings: dict[str, Any], levels: Sequence[Level]) -> None:
    """Settings, summaries and every request's record; figures that do not exist (NaN) become null."""

    def finite(value: Any) -> Any:
        return None if isinstance(value, float) and not math.isfinite(value) else value

    data = {
        "settings": settings,
        "levels": [
            {k: finite(v) for k, v in asdict(summary).items()} | {"records": [asdict(r) for r in records]}
            for summary, records in levels
        ],
    }
    path.write_text(json.dumps(data, indent=1, allow_nan=False) + "\n")


def write_plot(path: Path, levels: Sequence[Level]) -> None:
    """TTFT and TPOT as cumulative distributions, and the output rate of each level. Needs matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.6), layout="constrained")
    first, per_token, rate = figure.subplots(1, 3)
    for summary, records in levels:
        for axes, values in (
            (first, sorted(r.ttft * 1e3 for r in records if r.ttft is not None)),
            (per_token, sorted(r.tpot * 1e3 for r in records if r.tpot is not None)),
        ):
            if values:
                axes.ecdf(values, label=summary.label)
    first.set(title="time to the first token", xlabel="ms", ylabel="share of requests")
    per_token.set(title="time per output token", xlabel="ms")
    first.legend()
    labels = [summary.label for summary, _ in levels]
    rate.bar(labels, [summary.output_rate for summary, _ in levels])
    rate.set(title="output tokens/s")
    figure.savefig(path, dpi=120)


def missing_plot_library() -> str | None:
    """Why `--plot` cannot work here, in one line; None when it can."""
    from importlib.util import find_spec

    if find_spec("matplotlib") is None:
        return "--plot needs matplotlib: pip install '.[notebooks]' in a clone"
    return None
