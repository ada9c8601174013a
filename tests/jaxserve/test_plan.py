"""Planning: sizes and bounds counted by hand; whole plans for fake devices, and for real compilers."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxserve.batch import Bucket
from jaxserve.engine_args import EngineArgs
from jaxserve.errors import ConfigError
from jaxserve.kv_pool import plan_pool
from jaxserve.models.registry import family_by_name, family_of
from jaxserve.plan.bucket import MemoryExceededError, _exceeded
from jaxserve.plan.checks import failures, implied_collectives
from jaxserve.plan.planning import Target, make_plan
from jaxserve.plan.report import to_json
from jaxserve.plan.step_cost import Bound, step_cost, weights_bytes
from jaxserve.sharding import make_mesh
from jaxserve.skeleton import build_skeleton
from pallas_kernels.aot import CompilerMissingError
from pallas_kernels.chips import chip_by_name
from tests.jaxserve.tiny import TINY

MIB = 1 << 20
# A head of 128, as kernels have it; four of them, for four devices.
SMALL = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
}
SMALL_LAYER = 256 * 128 * (8 + 2 * 4) + 8 * 128 * 256 + 3 * 256 * 512 + 2 * 256
SMALL_PARAMETERS = 3 * SMALL_LAYER + 256 + 2 * 1024 * 256


@pytest.fixture
def small(tmp_path):
    """A directory with nothing but config.json."""
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    return tmp_path


@pytest.fixture
def four_cpus(monkeypatch):
    """Any topology is four of this process's CPU devices with 64 MiB each."""

    def of(cls, topology, tensor_parallel_size):
        mesh = make_mesh(jax.devices()[:4], tensor_parallel_size)
        return cls(topology, chip_by_name("v6e"), mesh, 64 * MIB)

    monkeypatch.setattr(Target, "of", classmethod(of))


def small_args(model: Path, **changes):
    sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "max_model_len": 64, "page_size": 8}
    return EngineArgs(**{"model": str(model), "tensor_parallel_size": 4, **sizes, **changes})


# ---- whole plans on fake devices


def test_the_pool_gets_what_weights_tables_and_temporaries_leave(small, four_cpus):
    args = small_args(small, max_num_seqs=64, max_model_len=4096, dtype="float32")
    plan = make_plan(args, "v6e:2x2", largest_only=True)
    assert plan.fits
    assert plan.pool.num_pages < 64 * 4096 // 8  # memory ends it, not use
    used = plan.weights_bytes + plan.tables_bytes + plan.pool_bytes + plan.temp_bytes
    page = 3 * 8 * 256 * 4  # of one device: layers, tokens, K and V of one head, bytes
    assert 0.85 * 64 * MIB < used <= 0.9 * 64 * MIB
    assert plan.pool_bytes == plan.pool.num_pages * page
    assert plan.tables_bytes == 65 * (4096 + 1024) * 4
    assert [r.bucket for r in plan.reports] == [Bucket(16, 64, False), Bucket(64, 64, True)]


def test_every_bucket_of_the_ladder_is_compiled_when_asked(small, four_cpus):
    told = []
    plan = make_plan(small_args(small), "v6e:2x2", progress=lambda b, i, n: told.append((b, i, n)))
    ladder = [(1, 1, True), (4, 4, True), (16, 4, False)]
    assert [dataclasses.astuple(r.bucket) for r in plan.reports] == ladder
    assert [dataclasses.astuple(b) for b, _, _ in told] == [ladder[-1], *ladder]
    assert [(i, n) for _, i, n in told] == [(0, 4), (1, 4), (2, 4), (3, 4)]


def test_what_does_not_divide_is_not_exchanged(small, four_cpus):
    odd = SMALL | {"vocab_size": 1023, "intermediate_size": 510, "num_hidden_layers": 2}
    (small / "config.json").write_text(json.dumps(odd))
    plan = make_plan(small_args(small), "v6e:2x2", largest_only=True)
    assert plan.collectives() == {"all-reduce": 2, "all-gather": 1} == implied_collectives(plan)


def test_one_device_exchanges_nothing(small, four_cpus):
    plan = make_plan(small_args(small, tensor_parallel_size=1), "v6e:2x2", largest_only=True)
    assert plan.collectives() == {} == implied_collectives(plan)


def test_given_pages_that_do_not_fit_are_compiled_and_refused(small, four_cpus):
    args = small_args(small, num_pages=3000, max_num_seqs=256, max_model_len=4096, dtype="float32")
    plan = make_plan(args, "v6e:2x2", largest_only=True)
    too_much = max(r.total_bytes for r in plan.reports) - 64 * MIB
    assert plan.pool.num_pages == 3000
    assert 0 < too_much <= plan.missing_bytes <= too_much + sum(r.code_bytes for r in plan.reports)
    assert failures(plan) == [f"does not fit by {plan.missing_bytes:,} bytes a device"]


def test_weights_that_do_not_fit_need_no_compiler(small, four_cpus):
    (small / "config.json").write_text(json.dumps(SMALL | {"intermediate_size": 64 * 1024}))
    plan = make_plan(small_args(small, dtype="float32"), "v6e:2x2", progress=pytest.fail)
    tables = 5 * (64 + 1024) * 4
    two_pages = 2 * 3 * 8 * 256 * 4
    assert not plan.fits
    assert plan.missing_bytes == plan.weights_bytes + tables + two_pages - int(64 * MIB * 0.9)
    found = to_json(plan)
    assert (found["fits"], found["pool_pages"], found["decode_ms_bound"]) == (False, 0, None)


def test_exchanges_are_the_implied_ones_and_bounds_those_of_full_steps(small, four_cpus):
    plan = make_plan(small_args(small), "v6e:2x2", largest_only=True, context=40)
    assert plan.collectives() == {"all-reduce": 2 * 3 + 1, "all-gather": 1, "all-to-all": 1}
    assert implied_collectives(plan) == plan.collectives()
    found = to_json(plan)
    assert found["collectives"] == {"all-reduce": 2}
    assert found["collectives_once"] == {"all-reduce": 1, "all-gather": 1, "all-to-all": 1}

    assert (plan.decode.rows, plan.decode.tokens, plan.decode.context) == (4, 4, 40)
    assert (plan.prefill.rows, plan.prefill.tokens, plan.prefill.context) == (1, 16, 16)
    seconds = plan.decode.bound.seconds
    assert found["decode_ms_bound"] == pytest.approx(seconds * 1e3)
    assert found["tokens_per_s_bound"] == pytest.approx(4 / seconds)


@pytest.mark.parametrize("content", ["{", "[]"])
def test_a_broken_config_is_named(tmp_path, four_cpus, content):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"config\.json"):
        make_plan(small_args(tmp_path / "config.json"), "v6e:2x2")


def test_an_unknown_topology_says_what_is_known(small):
    with pytest.raises(ConfigError, match="v6e:2x4, v5e-8, h200"):
        make_plan(small_args(small), "abacus:2x2")


# ---- costs, by hand


def skeleton_of(config, num_devices, dtype=np.float32):
    mesh = make_mesh(jax.devices(), num_devices)
    return build_skeleton(family_by_name(config.family), config, np.dtype(dtype), mesh, 64)


def pool_of(config, num_devices=1):
    return plan_pool(
        config,
        make_mesh(jax.devices(), num_devices),
        dtype=np.dtype(np.float32),
        page_size=8,
        num_pages=9,
        budget_bytes=0,
        max_num_seqs=4,
        max_model_len=64,
    )


def test_weights_of_a_device_are_its_parts():
    config = family_of(SMALL).config_from_hf(SMALL)
    rope = 4 * 64
    assert weights_bytes(skeleton_of(config, 1)) == 4 * SMALL_PARAMETERS + rope
    norms = 4 * (3 * 2 * 256 + 256)
    assert weights_bytes(skeleton_of(config, 4)) == (4 * SMALL_PARAMETERS - norms) // 4 + norms + rope


def test_a_step_s_cost_counted_by_hand():
    config = dataclasses.replace(family_of(SMALL).config_from_hf(SMALL), num_layers=2)
    skeleton, pool = skeleton_of(config, 1), pool_of(config)
    cost = step_cost(skeleton, pool, [1, 3], [10, 3])
    layers = 2 * SMALL_LAYER + 256
    pairs = 10 + (1 + 2 + 3)
    assert cost.flops == 2 * (layers * 4 + 1024 * 256 * 2) + 2 * 2 * pairs * 8 * 256
    weights = 4 * (layers + 1024 * 256) + 4 * 64  # the embedding's table is only looked up
    borders = 2 * 4 * 256 * 4 + 2 * 2 * 1024 * 4
    attention = 2 * (4 * 8 * 256 * 4 + 9 * 4 * 256 * 4 + 4 * 4 * 256 * 8)
    assert cost.num_bytes == weights + borders + attention


@pytest.mark.parametrize("num_devices", [2, 3, 8])
def test_heads_of_a_device_counted_by_hand(num_devices):
    """Two key-value heads of 128 and eight query heads: split over 2 devices, whole on 3, repeated on 8."""
    config = family_of(SMALL).config_from_hf(SMALL | {"num_key_value_heads": 2, "num_hidden_layers": 1})
    cost = step_cost(skeleton_of(config, num_devices), pool_of(config, num_devices), [1], [1001])
    q_heads, kv_heads, kv_products = {2: (4, 1, 1), 3: (8, 2, 2), 8: (1, 1, 2)}[num_devices]
    parts = 1 if num_devices == 3 else num_devices  # of the MLP and the vocabulary, which 3 do not divide
    products = 128 * 256 * (2 * q_heads + 2 * kv_products) + (3 * 256 * 512) // parts
    norms = 3 * 256
    output = 1024 * 256 // parts
    assert cost.flops == 2 * (products + norms + output) + 2 * 1001 * q_heads * 256
    read = 4 * (products + norms + output) + 4 * 64
    border = 2 * 256 * 4 + 2 * 1024 * 4 / num_devices
    attention = q_heads * 256 * 4 + 1000 * kv_heads * 256 * 4 + kv_heads * 256 * 8
    assert cost.num_bytes == read + border + attention


def test_windows_bound_what_a_layer_reads():
    config = dataclasses.replace(TINY, layer_windows=(4, None))
    both = step_cost(skeleton_of(config, 1), pool_of(config), [1], [50])
    none = step_cost(skeleton_of(TINY, 1), pool_of(TINY), [1], [50])
    # One layer of two sees 4 tokens, not 50: in a row of K and V of two heads of 8, in float32.
    assert none.num_bytes - both.num_bytes == 46 * 2 * 16 * 4
    assert none.flops - both.flops == 46 * 2 * 4 * 16


def test_experts_are_read_as_far_as_tokens_reach_them():
    config = dataclasses.replace(
        TINY,
        family="qwen3_moe",
        num_experts=8,
        num_experts_per_token=2,
        moe_intermediate_size=16,
        qk_norm=True,
    )
    skeleton = skeleton_of(config, 1)
    experts = 2 * 8 * 3 * 32 * 16 * 4
    one, many = (step_cost(skeleton, pool_of(config), [1] * rows, [1] * rows).num_bytes for rows in (1, 1000))
    per_row = 2 * 32 * 4 + 2 * 211 * 4 + 2 * (4 * 16 * 4 + 2 * 16 * 8)
    assert many - one == pytest.approx(999 * per_row + experts * (1 - 2 / 8))


def test_a_bound_is_its_slowest_part():
    assert Bound(memory=2.0, arithmetic=1.0, links=0.5).seconds == 2.0
    assert Bound(memory=0.2, arithmetic=0.1, links=0.5).limit == "links"


@pytest.mark.parametrize(
    ("message", "needed", "available"),
    [
        (
            "the total memory required for HLO temporaries (48.12G) exceeds available HBM (31.25G).",
            48.12,
            31.25,
        ),
        ("CompileTimeHbmOom: ... HLO temporaries (512.00M) exceeds available HBM (15.75G). HLO", 0.5, 15.75),
    ],
)
def test_a_compiler_s_refusal_is_read(message, needed, available):
    error = _exceeded(message)
    assert isinstance(error, MemoryExceededError)
    assert (error.needed, error.available) == (int(needed * 2**30), int(available * 2**30))


def test_other_errors_are_not_taken_for_a_refusal():
    assert _exceeded("INTERNAL: Mosaic failed to compile TPU kernel") is None


# ---- real compilers, where they are installed


def real_plan(model, topology, **changes):
    # A pool larger than a TPU's scratch memory, into which the compiler would move a smaller one.
    sizes = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 32768}
    args = EngineArgs(model=str(model), **{**sizes, **changes})
    try:
        return make_plan(args, topology, largest_only=True)
    except CompilerMissingError as error:
        pytest.skip(str(error))


def test_a_small_model_compiles_as_it_should_for_a_tpu_slice(small):
    plan = real_plan(small, "v6e:2x2", tensor_parallel_size=4)
    assert failures(plan) == []
    assert to_json(plan)["collectives"] == {"all-reduce": 2}
    assert plan.pool.num_tokens == 8 * 32768  # as much as eight requests can use
    assert 31 * 2**30 < plan.target.memory_bytes < 32 * 2**30
    assert plan.weights_bytes < 2 * SMALL_PARAMETERS / 4 + 10_000


def test_a_small_model_compiles_as_it_should_for_an_h200(small):
    plan = real_plan(small, "h200")
    assert failures(plan) == []
    assert plan.target.memory_bytes == 141 * 10**9


def test_a_tpu_compiler_s_refusal_becomes_missing_bytes(small):
    deep = SMALL | {"num_hidden_layers": 96, "max_position_embeddings": 131072}
    (small / "config.json").write_text(json.dumps(deep))
    sizes = {"max_num_seqs": 8, "max_model_len": 131072, "page_size": 16, "num_pages": 60_000}
    plan = real_plan(small, "v6e:2x2", tensor_parallel_size=4, **sizes)
    pool = 60_000 * 96 * 16 * 256 * 2  # pages, layers, tokens, K and V of one head, bytes
    assert plan.pool_bytes == pool > plan.target.memory_bytes
    known = pool + plan.weights_bytes + plan.tables_bytes - plan.target.memory_bytes
    assert known <= plan.missing_bytes < known + 300 * MIB  # beside temporaries and programs
