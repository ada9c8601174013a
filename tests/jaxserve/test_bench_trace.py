"""The trace equals that of the reference load generator, whose output the golden file holds."""

import json
from pathlib import Path

import pytest

from jaxserve.bench.trace import items_for, make_trace

GOLDEN = json.loads((Path(__file__).parents[1] / "goldens" / "bench" / "trace.json").read_text())


@pytest.mark.quick
@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda c: f"seed{c['seed']}-prefix{c['shared_prefix']}")
def test_a_seed_gives_the_reference_prompts(case):
    trace = make_trace(
        case["n"], case["seed"], tuple(case["words"]), tuple(case["tokens"]), case["shared_prefix"]
    )
    assert [[item.prompt, item.max_tokens] for item in trace] == case["trace"]


def test_a_longer_trace_begins_with_the_shorter_one():
    assert make_trace(48)[:10] == make_trace(10)


def test_a_shared_prefix_begins_every_prompt():
    prompts = [item.prompt for item in make_trace(5, shared_prefix=50)]
    assert len({" ".join(p.split()[:50]) for p in prompts}) == 1
    assert len(set(prompts)) == 5


@pytest.mark.parametrize(("n", "concurrency", "expected"), [(48, 1, 6), (48, 8, 48), (16, 1, 4), (3, 1, 3)])
def test_one_at_a_time_runs_an_eighth_of_the_trace(n, concurrency, expected):
    assert len(items_for(make_trace(n), concurrency)) == expected
