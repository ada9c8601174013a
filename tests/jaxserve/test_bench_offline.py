"""`jaxserve bench offline`: the trace on an engine that a person can compute, and on the real one."""

from __future__ import annotations

import argparse
import asyncio
import json

import pytest

from jaxserve.bench.measure import RequestRecord, Summary
from jaxserve.bench.offline import main, roofline_table, run_levels, sender
from jaxserve.bench.roofline import Machine, ModelCost
from jaxserve.bench.serve import new_console, progress_bar
from jaxserve.bench.trace import make_trace
from jaxserve.errors import InvalidRequestError
from jaxserve.outputs import CompletionOutput, RequestMetrics, RequestOutput


class CountingEngine:
    """Answers a prompt with as many letters as tokens were asked for, one at a time."""

    def __init__(self):
        self.request_ids: list[str] = []
        self.running = self.most_running = 0

    async def generate(self, prompt, params, request_id):
        if prompt.startswith("bad"):
            raise InvalidRequestError("no such prompt")
        assert params.temperature == 0
        assert params.ignore_eos
        self.request_ids.append(request_id)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        for n in range(1, params.max_tokens + 1):
            await asyncio.sleep(0)
            done = n == params.max_tokens
            choice = CompletionOutput(0, "x" * n, [1] * n, finish_reason="length" if done else None)
            yield RequestOutput(request_id, prompt, [5, 6, 7], [choice], done, RequestMetrics(0.0))
        self.running -= 1


def run(engine, trace, concurrency):
    args = argparse.Namespace(concurrency=concurrency, goodput=None)
    with progress_bar() as bar:
        return asyncio.run(run_levels(sender(engine), trace, args, bar))


def test_every_request_of_every_level_is_recorded():
    engine, trace = CountingEngine(), make_trace(8)
    levels = run(engine, trace, [1, 3])
    assert [summary.requests for summary, _ in levels] == [4, 8]
    for summary, records in levels:
        assert (summary.failed, summary.short) == (0, 0)
        assert [r.output_tokens for r in records] == [item.max_tokens for item in trace[: len(records)]]
        assert all(len(r.arrivals) == r.output_tokens and r.prompt_tokens == 3 for r in records)
    assert engine.most_running == 3
    assert len(set(engine.request_ids)) == 12


def test_a_refused_request_is_a_failure_and_not_the_end():
    trace = [*make_trace(2), *[item.__class__("bad", 4) for item in make_trace(1)]]
    (summary, records), *_ = run(CountingEngine(), trace, [2])
    assert summary.failed == 1
    assert records[-1].error == "InvalidRequestError: no such prompt"


@pytest.mark.parametrize(
    ("matmul", "bound", "by"), [(1e12, "500.0", "arithmetic"), (1e13, "100.0", "reading")]
)
def test_the_fraction_is_of_the_bound_that_binds(capsys, matmul, bound, by):
    machine = Machine("cpu", 2, 1e9, 2e9, 1e9, 1e9, matmul)
    cost = ModelCost(weight_bytes=40_000_000, kv_bytes=0, flops_per_token=10**9)  # 20 ms to read
    record = RequestRecord(11, prompt_tokens=490, output_tokens=11, arrivals=[1.0, 1.5], latency=1.5)
    levels = [(Summary.of(f"{n} at once", [record], 2.0), [record]) for n in (1, 2)]
    new_console().print(roofline_table(machine, cost, levels, [1, 2]))
    one, many = [line for line in capsys.readouterr().out.splitlines() if "at once" in line]
    assert "50.0 ms a token" in one
    assert "40%" in one  # 20 of 50 ms
    assert "2000.0 ms in all" in many
    assert f"{bound} ms" in many  # 500 tokens at 1 or 0.1 ms; 5 steps at 20 ms
    assert by in many
    assert f"{float(bound) / 2000:.0%}" in many


@pytest.mark.real
def test_the_real_engine_is_measured(tmp_path, capsys):
    flags = ["--n", "2", "--concurrency", "2", "--max-num-seqs", "2", "--max-num-batched-tokens", "64"]
    flags += ["--max-model-len", "1024", "--json", str(tmp_path / "out.json")]
    assert main(flags) == 0
    data = json.loads((tmp_path / "out.json").read_text())
    assert data["settings"]["compilations"] == 0
    assert data["levels"][0]["failed"] == data["levels"][0]["short"] == 0
    assert "roofline" in capsys.readouterr().out
