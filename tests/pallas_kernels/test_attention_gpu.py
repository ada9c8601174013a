"""The Hopper kernel of ragged paged attention without a GPU: interpreted, against a dense loop in numpy.

The interpreter runs the kernel itself, with its copies, barriers and two warpgroups as threads. It knows no
matrix product with an operand in registers (`accumulate`), so that one is replaced with a plain product of
the same tiles. jax 0.10's interpreter also lacks transposed operands, unions of scratch memory and layouts.
Not shown here: what only hardware does (the products' data layout, memory order, time).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu import core as mosaic_core
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call as interpreter
from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams, force_gpu_interpret_mode
from jax.interpreters import mlir

from pallas_kernels.pool_layout import pool_shape
from pallas_kernels.ragged_paged_attention import gpu_kernel
from pallas_kernels.ragged_paged_attention.cases import Case
from pallas_kernels.ragged_paged_attention.gpu import make_plan, mosaic_gpu_attention
from pallas_kernels.ragged_paged_attention.problem import Problem
from pallas_kernels.ragged_paged_attention.types import AttentionSpec, Rows

BF16 = "bfloat16"
IS_OLD = jax.version.__version_info__ < (0, 11)
# Its threads wait for each other in a busy loop: a minute a case.
two_warpgroups = pytest.mark.skipif(IS_OLD, reason="jax 0.10's interpreter crawls with two warpgroups")
DECODES = (
    Case("decodes", rows=((1, 1), (1, 200), (1, 16), (1, 63)), empty_rows=1, padding_tokens=1, head_dim=64),
    Case("split keys, sinks", rows=((1, 1500), (1, 40)), page_size=32, head_dim=64, sinks=True),
    Case("split window", rows=((1, 1400), (1, 9)), window=700, head_dim=64),
    Case("a window of one token", rows=((1, 33), (1, 130)), window=1, head_dim=64),
    Case(
        "float8, scales, window",
        rows=((1, 70), (1, 40)),
        kv_dtype="float8_e4m3fn",
        scales=True,
        window=5,
        head_dim=64,
    ),
    Case(
        "more heads than rows of a product, the widest window",
        rows=((1, 90),),
        num_q_heads=71,
        num_kv_heads=1,
        head_dim=64,
        window=2**31 - 1,
    ),
)
PREFILLS = (
    Case("values shorter than keys, pages of 8", rows=((7, 40),), head_dim=192, v_dim=128, page_size=8),
    Case("int8, scales, heads of 96", rows=((20, 90),), kv_dtype="int8", scales=True, head_dim=96),
)
SHARED = (  # by two warpgroups
    Case("mixed", rows=((1, 40), (20, 20), (33, 90), (2, 65)), padding_tokens=5, empty_rows=2, head_dim=64),
    Case(
        "a chunk of a long context, more blocks than stages", rows=((33, 400),), page_size=128, head_dim=256
    ),
    Case(
        "window, cap and sinks, three heads a group",
        rows=((1, 150), (50, 300)),
        num_q_heads=9,
        num_kv_heads=3,
        head_dim=64,
        window=40,
        soft_cap=2.0,
        sinks=True,
    ),
    Case(
        "latent rows, the columns of V shared",
        rows=((7, 100), (1, 70)),
        num_q_heads=16,
        num_kv_heads=1,
        head_dim=400,
        v_dim=384,
        latent=True,
    ),
)


def _plain_scores(q_smem: Any, k_smem: Any) -> jax.Array:
    return _plain_product(q_smem[...], k_smem[...].T)


def _plain_accumulate(acc: jax.Array, weights: jax.Array, v_smem: Any) -> jax.Array:
    return acc + _plain_product(weights, v_smem[...])


def _plain_product(a: jax.Array, b: jax.Array) -> jax.Array:
    # A tensor core reads shared memory in the order of copies; for a plain read that takes a fence.
    gpu_kernel.plgpu.commit_smem()
    return jnp.dot(a.astype(jnp.float32), b.astype(jnp.float32))


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(gpu_kernel, "accumulate", _plain_accumulate)
    if IS_OLD:
        monkeypatch.setattr(gpu_kernel, "scores_of", _plain_scores)
        monkeypatch.setattr(gpu_kernel.plgpu, "RefUnion", lambda *groups: groups)
        mlir.register_lowering(mosaic_core.layout_cast_p, lambda ctx, x, **_: [x], platform="cpu")
    with force_gpu_interpret_mode(InterpretGPUParams(detect_races=True)):
        yield
    interpreter.reset_gpu_interpret_mode_state()


def run(
    problem: Problem, *, decode_only: bool = False, with_new: bool = True
) -> tuple[np.ndarray, np.ndarray]:
    """The call as `ragged_paged_attention` makes it: scales are folded into what goes in and comes out."""
    case = problem.case
    group = case.num_q_heads // case.num_kv_heads

    def call(q: Any, k: Any, v: Any, pool: Any, rows: Rows) -> Any:
        k_scale, v_scale = jnp.asarray(problem.scales)
        q = (q * k_scale.repeat(group)[None, :, None]).astype(q.dtype)
        out, pool = mosaic_gpu_attention(
            q,
            k / k_scale[None, :, None] if with_new else None,
            v / v_scale[None, :, None] if with_new and not case.latent else None,
            pool,
            jnp.int32(case.layer),
            rows,
            spec=case.spec(decode_only=decode_only),
            chip="h200",
            window=None if case.window is None else jnp.int32(case.window),
            sinks=None if problem.sinks is None else jnp.asarray(problem.sinks),
        )
        return out * v_scale.repeat(group)[None, :, None], pool

    pool = problem.pool if with_new else problem.written
    out, pool = jax.jit(call)(*map(jnp.asarray, (problem.q, problem.k, problem.v, pool)), problem.rows)
    assert np.isfinite(np.asarray(out, np.float32)).all()  # padding too
    return np.asarray(out), np.asarray(pool)


def problem_of(case: Case) -> Problem:
    if case.kv_dtype == "float32":
        case = Case(**{**case.__dict__, "kv_dtype": BF16})
    problem = Problem(case, dtype=BF16)
    problem.q[problem.num_live :] = 0.0
    if case.window is not None:  # pages that lie before every query's window are gone
        for row, (q_len, kv_len) in enumerate(case.rows):
            since = max(0, kv_len - q_len - case.window + 1)
            problem.page_indices[row, : since // case.page_size] = problem.pool.shape[1] - 1
    return problem


@pytest.mark.parametrize("case", DECODES, ids=lambda case: case.name)
def test_decodes_equal_dense_attention_and_read_live_memory_only(case: Case, interpreted: None) -> None:
    problem = problem_of(case)
    problem.check(*run(problem, decode_only=True), tolerance=2e-2)


@pytest.mark.parametrize("case", PREFILLS, ids=lambda case: case.name)
def test_prompts_equal_dense_attention_and_read_live_memory_only(case: Case, interpreted: None) -> None:
    problem = problem_of(case)
    problem.check(*run(problem), tolerance=2e-2)


@pytest.mark.quick
@two_warpgroups
@pytest.mark.parametrize("case", SHARED, ids=lambda case: case.name)
def test_two_warpgroups_share_the_keys_without_races(case: Case, interpreted: None) -> None:
    problem = problem_of(case)
    problem.check(*run(problem), tolerance=2e-2)


def test_without_new_rows_the_pool_is_read_as_it_is(interpreted: None) -> None:
    problem = problem_of(Case("old", rows=((1, 40), (1, 17)), head_dim=64))
    problem.check(*run(problem, decode_only=True, with_new=False), tolerance=2e-2)


def test_the_cases_above_split_keys_and_share_them_between_warpgroups() -> None:
    def plan_of(case: Case, decode: bool) -> gpu_kernel.Plan:
        problem = problem_of(case)
        arrays = jnp.asarray(problem.q), jnp.asarray(problem.pool), problem.rows
        return make_plan(*arrays, case.spec(), "h200", decode=decode, is_windowed=case.window is not None)

    assert [plan_of(case, True).splits > 1 for case in DECODES] == [False, True, True, False, False, False]
    chunk = plan_of(SHARED[1], False)
    assert SHARED[1].rows[0][1] > chunk.splits * chunk.stages * chunk.block  # a split needs a stage again
    assert {plan_of(case, False).warpgroups for case in PREFILLS} == {1}
    assert [plan_of(case, False).row_groups for case in SHARED] == [2, 2, 2, 1]
    assert [plan_of(case, False).splits > 1 for case in SHARED] == [False, True, False, False]
    assert plan_of(SHARED[-1], True).column_groups == plan_of(SHARED[-1], False).column_groups == 2
    assert plan_of(DECODES[4], True).is_converted
    assert plan_of(PREFILLS[1], False).is_converted


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"q_dtype": "float32"}, "queries of float32"),
        ({"kv_dtype": "float32"}, "pool of float32"),
        ({"k_dim": 72, "v_dim": 72}, "multiples of 16"),
        ({"k_dim": 80, "v_dim": 80, "kv_dtype": "int8"}, "multiples of 32"),
        ({"page_size": 24}, "pages of 24"),
        ({"page_size": 4}, "pages of 4"),
        ({"k_dim": 640, "v_dim": 640, "latent": True}, "V of 640"),
        ({"k_dim": 512, "v_dim": 512}, "do not fit"),
    ],
)
def test_what_the_kernel_does_not_serve_is_refused_with_its_reason(
    change: dict[str, Any], reason: str
) -> None:
    sizes: dict[str, Any] = {
        "q_dtype": BF16,
        "kv_dtype": BF16,
        "k_dim": 64,
        "v_dim": 64,
        "page_size": 16,
        "latent": False,
    } | change
    row_dim = sizes["k_dim"] + (0 if sizes["latent"] else sizes["v_dim"])
    spec = AttentionSpec(1.0, latent_v_dim=sizes["v_dim"] if sizes["latent"] else None, decode_only=True)
    with pytest.raises(NotImplementedError, match=reason):
        mosaic_gpu_attention(
            jnp.zeros((2, 4, sizes["k_dim"]), sizes["q_dtype"]),
            None,
            None,
            jnp.zeros(pool_shape(1, 4, 1, sizes["page_size"], row_dim), sizes["kv_dtype"]),
            0,
            Rows(jnp.zeros(2, jnp.int32), jnp.zeros((2, 2), jnp.int32), jnp.zeros(3, jnp.int32)),
            spec=spec,
            chip="h200",
        )
