"""Latency figures and summaries, against figures computed by hand."""

import json
import math
from itertools import pairwise

import pytest

from jaxserve.bench.client import base_url
from jaxserve.bench.load import arrival_times
from jaxserve.bench.measure import Goodput, RequestRecord, Summary, percentile, write_json, write_plot


def record(**changes):
    values = {
        "wanted_tokens": 5,
        "prompt_tokens": 7,
        "output_tokens": 5,
        "arrivals": [0.2, 0.3, 0.6],
        "latency": 0.7,
    }
    return RequestRecord(**values | changes)


def test_latencies_of_one_request():
    r = record()
    assert r.ttft == 0.2
    assert r.tpot == pytest.approx(0.1)  # 0.4 s for the four tokens after the first
    assert r.itl == pytest.approx([0.1, 0.3])


def test_a_request_without_text_has_no_latencies():
    r = record(arrivals=[], output_tokens=0)
    assert (r.ttft, r.tpot, r.itl) == (None, None, [])


def test_percentile_is_the_value_at_a_rank():
    assert percentile([3, 1, 2, 4], 0.5) == 3
    assert percentile([3, 1, 2, 4], 0.99) == 4
    assert math.isnan(percentile([], 0.5))


def test_a_level_counts_only_what_was_answered():
    records = [record(), record(output_tokens=3), record(error="500 no", output_tokens=0, arrivals=[])]
    s = Summary.of("3 at once", records, wall=2.0)
    assert (s.requests, s.failed, s.short) == (3, 1, 1)
    assert s.output_rate == 4.0  # 8 tokens in 2 s
    assert s.total_rate == 11.0  # and 14 of prompts
    assert s.ttft_p50 == pytest.approx(200)
    assert s.goodput is None


def test_goodput_counts_requests_within_every_limit():
    limits = Goodput.parse("ttft:250, tpot:150")
    records = [record(), record(arrivals=[0.3, 0.6]), record(arrivals=[0.1, 0.9]), record(error="late")]
    assert [limits.kept_by(r) for r in records] == [True, False, False, False]
    assert Summary.of("x", records, 2.0, limits).goodput == 0.5


@pytest.mark.parametrize("text", ["ttft", "speed:1", "ttft:x", "ttft:0", "tpot:nan"])
def test_a_wrong_limit_is_refused(text):
    with pytest.raises(ValueError, match=text.partition(":")[2] or text):
        Goodput.parse(text)


def test_the_file_is_plain_json_with_every_request(tmp_path):
    records = [record(error="no", arrivals=[])]
    write_json(tmp_path / "out.json", {"n": 1}, [(Summary.of("x", records, 1.0), records)])
    level = json.loads((tmp_path / "out.json").read_text())["levels"][0]
    assert level["ttft_p50"] is None
    assert level["records"][0]["error"] == "no"


def test_the_plot_is_written(tmp_path):
    records = [record(), record(arrivals=[])]
    write_plot(tmp_path / "out.png", [(Summary.of("x", records, 1.0), records)])
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


def test_arrivals_are_a_poisson_process_that_depends_on_the_seed_only():
    times = arrival_times(4000, rate=5.0, seed=1)
    gaps = [b - a for a, b in pairwise(times)]
    mean = sum(gaps) / len(gaps)
    assert times == arrival_times(4000, rate=5.0, seed=1)
    assert times[0] == 0
    assert mean == pytest.approx(0.2, rel=0.06)
    assert sum((g - mean) ** 2 for g in gaps) / len(gaps) == pytest.approx(mean**2, rel=0.15)


@pytest.mark.parametrize("url", ["http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/"])
def test_the_address_may_be_given_with_or_without_v1(url):
    assert base_url(url) == "http://h:1/v1"
