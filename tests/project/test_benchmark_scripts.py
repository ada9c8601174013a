"""Scripts of benchmarks/: their help, and what they compute from what they measured."""

from __future__ import annotations

import importlib
import json
import math
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from jaxserve.bench.measure import RequestRecord

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def load(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module(name)


@pytest.mark.parametrize("name", ["peers.py", "quality.py", "guidellm_check.py"])
def test_help_shows_examples(name):
    run = subprocess.run([sys.executable, str(BENCHMARKS / name), "--help"], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert f"python benchmarks/{name}" in run.stdout


def test_divergence_and_perplexity_equal_a_count_by_hand(monkeypatch):
    quality = load("quality", monkeypatch)
    p = [[0.5, 0.25, 0.25], [0.1, 0.2, 0.7], [0.6, 0.3, 0.1]]
    q = [[0.25, 0.5, 0.25], [0.1, 0.2, 0.7], [0.5, 0.4, 0.1]]
    # Logits are log-probabilities up to a constant of the row.
    exact, fast = (np.log(np.float32(x)) + np.float32([[3.0], [-2.0], [0.0]]) for x in (p, q))
    found = quality.Positions.of(exact, fast, [0, 1, 2])
    kl = [sum(a * math.log(a / b) for a, b in zip(x, y, strict=True)) for x, y in zip(p, q, strict=True)]
    assert found.kl == pytest.approx(kl, abs=1e-6)
    assert found.same_top.tolist() == [False, True, True]
    summary = quality.Positions.joined([found, found]).summary()
    assert summary["tokens"] == 6
    assert summary["same_top"] == pytest.approx(2 / 3)
    assert summary["kl_mean"] == pytest.approx(sum(kl) / 3, abs=1e-6)
    assert summary["perplexity_exact"] == pytest.approx((0.25 * 0.7) ** -0.5)  # of ids 1 and 2
    assert summary["perplexity_fast"] == pytest.approx((0.5 * 0.7) ** -0.5)


def session(contestants, output=(2, 2), wall=1.0, error=None):
    records = [
        RequestRecord(2, prompt_tokens=3, output_tokens=n, arrivals=[0.5, 0.5 + wall / 2], error=error)
        for n in output
    ]
    return contestants.Session(5.0, 10**6, 2 * 10**6, {"trace 1": (records, wall)})


def test_the_ratio_is_of_medians_and_its_extremes_are_of_one_repeat(monkeypatch):
    contestants, peers = load("contestants", monkeypatch), load("peers", monkeypatch)
    ours, other = peers.Figures("ours"), peers.Figures("other")
    for mine, theirs in ((1.0, 2.0), (1.0, 4.0), (2.0, 2.0)):  # 4, 4, 2 tok/s and 2, 1, 2
        ours.add(session(contestants, wall=mine))
        other.add(session(contestants, wall=theirs))
    peers.check_tokens([ours, other])
    row = next(line for line in peers.table([ours, other]).splitlines() if line.startswith("| trace 1"))
    assert row.split(" | ")[1:5] == ["6 / 4", "4.0", "2.0", "2.00 (1.00 to 4.00)"]


def test_other_work_than_asked_for_is_an_error(monkeypatch):
    contestants, peers = load("contestants", monkeypatch), load("peers", monkeypatch)
    with pytest.raises(RuntimeError, match="1 short"):
        peers.Figures("x").add(session(contestants, output=(2, 1)))
    with pytest.raises(RuntimeError, match=r"2 failed.*refused"):
        peers.Figures("x").add(session(contestants, error="refused"))
    one, two = peers.Figures("one"), peers.Figures("two")
    one.add(session(contestants))
    two.add(session(contestants, output=(2, 2, 2)))
    with pytest.raises(RuntimeError, match="one counts"):
        peers.check_tokens([one, two])


def test_a_peer_runs_no_level_that_would_find_its_prompts_in_a_cache(monkeypatch):
    peers = load("peers", monkeypatch)
    first, second = (peers.levels_of("prefix", concurrency, 8, 0).items for concurrency in (1, 8))
    assert len(first) == 4
    assert len(second) == 8
    prefixes = {item.prompt[:200] for item in (*first, *second)}
    assert len(prefixes) == 2  # one a level


def test_figures_of_guidellm_get_our_names(monkeypatch):
    check = load("guidellm_check", monkeypatch)

    def request(start: float, prompt: str, made: int) -> dict:
        body = {"prompt": prompt, "max_tokens": 4}
        return {
            "request_start_time": start,
            "request_args": json.dumps({"body": body}),
            "output_tokens": made,
            "total_tokens": made + 10,
        }

    ranks = {"successful": {"percentiles": {"p50": 7.0, "p99": 9.0}}}
    benchmark = {
        "duration": 2.0,
        "requests": {"successful": [request(2.0, "later", 3), request(1.0, "first", 4)]},
        "metrics": {
            "request_totals": {"total": 3, "errored": 1, "incomplete": 0},
            "time_to_first_token_ms": ranks,
            "inter_token_latency_ms": ranks,
        },
    }
    assert [item.prompt for item in check.prompts_of(benchmark)] == ["first", "later"]
    summary = check.theirs("8", benchmark)
    assert (summary.requests, summary.failed, summary.short) == (3, 1, 1)
    assert (summary.output_rate, summary.total_rate) == (3.5, 13.5)
    assert (summary.ttft_p50, summary.tpot_p99) == (7.0, 9.0)
