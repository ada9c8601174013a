"""What a model costs, counted by hand from its config; and that the machine's rates are sane."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jaxserve.bench.roofline import Machine, ModelCost, measure_machine

ARCH = Path(__file__).parents[1] / "goldens" / "arch"


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
    cost = ModelCost.of_checkpoint(ARCH / name)
    assert cost == ModelCost(weights=matmuls + vectors, flops_per_token=2 * matmuls)


def test_the_floor_is_bytes_over_bandwidth_and_the_ceiling_flops_over_peak():
    cost = ModelCost(weights=1000, flops_per_token=1800)
    assert cost.decode_floor(machine(read=2000.0, copy=500.0), bytes_per_weight=4) == 2.0
    assert cost.decode_floor(machine(read=2000.0, copy=4000.0), bytes_per_weight=4) == 1.0
    assert cost.token_rate_ceiling(machine(matmul=3600.0)) == 2.0


def test_rates_of_this_machine_are_positive_and_all_threads_no_slower_than_one():
    rates = measure_machine(num_bytes=1 << 20, matmul_size=64, seconds=0.02)
    assert rates.platform == "cpu"
    assert rates.read >= rates.read_one_thread > 0
    assert rates.copy >= rates.copy_one_thread > 0
    assert rates.matmul > 0
