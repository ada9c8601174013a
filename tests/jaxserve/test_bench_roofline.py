"""What a model costs, counted by hand from its config; and that the machine's rates are sane."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from jaxserve.bench.measure import RequestRecord
from jaxserve.bench.roofline import Machine, ModelCost, measure_machine
from jaxserve.engine_args import EngineArgs
from jaxserve.loading import load_engine

ARCH = Path(__file__).parents[1] / "goldens" / "arch"
FEW = {"warmup": "none", "max_model_len": 64, "max_num_seqs": 2, "num_pages": 9}


def machine(**changes):
    values = dict.fromkeys(("read_one_thread", "read", "copy_one_thread", "copy", "matmul"), 1.0)
    return Machine(platform="cpu", threads=1, **values | changes)


@pytest.mark.parametrize("name", ["llama_gqa", "llama_bias_tied"])
def test_cost_of_a_checkpoint_equals_the_count_from_its_config(name):
    config = json.loads((ARCH / name / "config.json").read_text())
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    head_dim = config.get("head_dim") or hidden // config["num_attention_heads"]
    q, kv = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    layers = config["num_hidden_layers"]
    matmuls = layers * (2 * hidden * q + 2 * hidden * kv + 3 * hidden * inner) + vocab * hidden
    vectors = layers * 2 * hidden + hidden
    if config.get("attention_bias"):
        vectors += layers * (q + 2 * kv + hidden)
    if config.get("mlp_bias"):
        vectors += layers * (2 * inner + hidden)
    frequencies = head_dim // 2  # of the rope, kept beside the weights
    engine = load_engine(EngineArgs(model=str(ARCH / name), quantization="none", dtype="float32", **FEW))
    try:
        cost = ModelCost.of_engine(engine, ARCH / name)
    finally:
        engine.close()
    assert cost == ModelCost(
        weight_bytes=4 * (matmuls + vectors + frequencies),
        kv_bytes=4 * layers * 2 * kv,
        flops_per_token=2 * matmuls,
    )


def test_one_sequence_reads_the_weights_and_its_own_positions_for_each_token():
    cost = ModelCost(weight_bytes=4000, kv_bytes=10, flops_per_token=0)
    assert cost.decode_floor(machine(read=2000.0, copy=500.0), context=0) == 2.0
    assert cost.decode_floor(machine(read=2000.0, copy=4000.0), context=400) == 2.0


def test_many_sequences_share_the_reading_of_weights_and_no_positions():
    cost = ModelCost(weight_bytes=4000, kv_bytes=10, flops_per_token=0)
    records = [RequestRecord(3, prompt_tokens=5, output_tokens=3) for _ in range(2)]
    # Two tokens of each come from decode steps, at 6 and 7 positions: 2 steps, 2 * 13 positions.
    assert cost.memory_floor(machine(read=1000.0), records, 2) == pytest.approx((2 * 4000 + 26 * 10) / 1000)
    assert cost.memory_floor(machine(read=1000.0), records, 1) == pytest.approx((4 * 4000 + 26 * 10) / 1000)


def test_arithmetic_is_of_tokens_that_were_computed_at_the_peak_of_their_kind():
    cost = ModelCost(weight_bytes=0, kv_bytes=0, flops_per_token=1800)
    record = RequestRecord(3, prompt_tokens=5, cached_tokens=4, output_tokens=3)  # 1 of the prompt, 2 made
    assert cost.arithmetic_floor(machine(matmul=1800.0), [record]) == 3.0
    assert replace(cost, peak_ratio=4.0).arithmetic_floor(machine(matmul=1800.0), [record]) == 0.75


def test_rates_of_this_machine_are_positive_and_all_threads_no_slower_than_one():
    rates = measure_machine(num_bytes=1 << 20, matmul_size=64, seconds=0.02)
    assert rates.platform == "cpu"
    assert rates.read >= rates.read_one_thread > 0
    assert rates.copy >= rates.copy_one_thread > 0
    assert rates.matmul > 0
