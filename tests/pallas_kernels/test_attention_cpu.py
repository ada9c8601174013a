"""What the native attention promises beyond the cases that all implementations share."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from pallas_kernels.ragged_paged_attention import Rows, ragged_paged_attention
from pallas_kernels.ragged_paged_attention.cases import Case
from pallas_kernels.ragged_paged_attention.problem import Problem, make_call

P = PartitionSpec


def _random_case(seed: int) -> Case:
    """Any sizes that fit together: odd heads and pages, chunks of contexts, decodes, empty rows."""
    rng = np.random.default_rng(seed)
    head_dim = int(rng.choice([1, 8, 16, 20, 33, 64, 80, 128]))
    kv_heads, group = int(rng.integers(1, 4)), int(rng.choice([1, 2, 3, 5, 8, 9]))
    rows = []
    for _ in range(rng.integers(1, 6)):
        queries = int(rng.choice([1, 1, 1, 2, 7, 40, 150]))
        rows.append((queries, queries + int(rng.choice([0, 1, 30, 64, 200]))))
    return Case(
        f"random {seed}",
        tuple(rows),
        empty_rows=int(rng.integers(0, 3)),
        padding_tokens=int(rng.integers(0, 9)),
        num_q_heads=kv_heads * group,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        v_dim=int(rng.choice([head_dim, 4, 48])),
        page_size=int(rng.choice([1, 7, 16, 32, 100])),
        window=[None, 1, 17, 64, 100][rng.integers(0, 5)],
        soft_cap=[None, 0.3, 30.0][rng.integers(0, 3)],
        sinks=bool(rng.integers(0, 2)),
        kv_dtype=str(rng.choice(["float32", "bfloat16"])),
    )


@pytest.mark.parametrize("seed", range(12))
def test_any_batch_equals_dense_attention(seed: int, isa: str) -> None:
    problem = Problem(_random_case(seed), seed)
    out, pool = problem.run("cpu", chip=isa)
    problem.check(out, pool, tolerance=4e-6)
    assert not out[problem.num_live :].any()  # padding rows are zeros


def test_queries_in_bfloat16_are_computed_in_float32_and_rounded_once(isa: str) -> None:
    problem = Problem(Case("half", rows=((9, 30), (1, 40)), kv_dtype="bfloat16"), dtype="bfloat16")
    out, pool = problem.run("cpu", chip=isa)
    assert out.dtype == jnp.bfloat16
    problem.check(out, pool, tolerance=2.0**-8)


def test_scores_far_apart_and_soft_caps_of_any_size_stay_exact(isa: str) -> None:
    for case in (
        Case("far", rows=((40, 90), (1, 200)), soft_cap=None),
        Case("capped", rows=((40, 90), (1, 200)), soft_cap=50.0),
    ):
        problem = Problem(case)
        scaled = Problem(case)
        scaled.q = problem.q * 40.0  # scores up to hundreds: most weights vanish
        out, _ = scaled.run("cpu", chip=isa)
        expected, _ = scaled.run("reference")
        np.testing.assert_allclose(out[: scaled.num_live], expected[: scaled.num_live], atol=2e-4)
        assert np.isfinite(out).all()


def _run(problem: Problem, pool: np.ndarray, tokens: slice, rows: Rows, isa: str) -> tuple[Any, Any]:
    out, pool = ragged_paged_attention(
        jnp.asarray(problem.q[tokens]),
        jnp.asarray(problem.k[tokens]),
        jnp.asarray(problem.v[tokens]),
        jnp.asarray(pool),
        problem.case.layer,
        rows,
        spec=problem.case.spec(),
        platform="cpu",
        chip=isa,
        window=problem.case.window,
    )
    return np.asarray(out), np.asarray(pool)


# From two queries on, the bits are the same in any chunks. One alone is added up in another order, but for
# groups of heads that fill registers.
@pytest.mark.parametrize(
    ("num_q_heads", "ends", "tolerance"),
    [(6, (2, 70, 73, 128, 298), 0.0), (6, (1, 2, 70, 299), 2e-6), (24, (1, 2, 70, 128, 299), 0.0)],
    ids=["twos and more", "single queries", "large groups"],
)
@pytest.mark.parametrize("window", [None, 70])
def test_a_prompt_in_chunks_gives_what_a_whole_one_does(
    num_q_heads: int, ends: tuple[int, ...], tolerance: float, window: int | None, isa: str
) -> None:
    length = 300
    case = Case("prompt", rows=((length, length),), head_dim=20, page_size=7, window=window)
    case = replace(case, num_q_heads=num_q_heads)
    problem = Problem(case)
    whole, _ = problem.run("cpu", chip=isa)
    pool, parts = problem.pool, []
    for start, stop in pairwise((0, *ends, length)):
        rows = Rows(
            jnp.array([stop], jnp.int32),
            jnp.asarray(problem.page_indices),
            jnp.array([0, stop - start], jnp.int32),
        )
        part, pool = _run(problem, pool, slice(start, stop), rows, isa)
        parts.append(part)
    np.testing.assert_allclose(np.concatenate(parts), whole, rtol=tolerance, atol=tolerance)


def test_a_sequence_gives_the_same_bits_alone_as_in_a_batch(isa: str) -> None:
    # Alone, the long ones are cut over threads; in the batch they are not.
    case = Case("batch", rows=((1, 2000), (130, 700), *((1, 500),) * 40), num_kv_heads=1, head_dim=64)
    problem = Problem(case)
    together, _ = problem.run("cpu", chip=isa)
    for seq in (0, 1, 7):
        start, stop = problem.cu_q_lens[seq : seq + 2]
        rows = Rows(
            jnp.asarray(problem.kv_lens[seq : seq + 1]),
            jnp.asarray(problem.page_indices[seq : seq + 1]),
            jnp.array([0, stop - start], jnp.int32),
        )
        alone, _ = _run(problem, problem.pool, slice(start, stop), rows, isa)
        np.testing.assert_array_equal(alone, together[start:stop])


def test_the_pool_of_a_loop_over_layers_is_updated_in_place(isa: str) -> None:
    case = Case("layers", rows=((1, 40), (20, 33)), num_layers=6, page_size=16)
    problem = Problem(case)
    call = make_call(case, decode_only=False, platform="cpu", chip=isa, implementation="cpu")
    # The pages of nobody stand for a pool of 64 MiB.
    shape = (6, 1 << 10, *problem.pool.shape[2:])
    pool = jax.ShapeDtypeStruct(shape, jnp.float32)
    arrays = [jnp.asarray(x) for x in (problem.q, problem.k, problem.v)]
    sinks, scales = jnp.zeros(case.num_q_heads), jnp.ones((2, case.num_kv_heads))

    def layers(pool: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
        def layer(i: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            out, pool = call(carry[0], k, v, carry[1], problem.rows, i, sinks, scales)
            return out, pool

        out, pool = jax.lax.fori_loop(0, case.num_layers, layer, (q, pool))
        return out, pool

    compiled = jax.jit(layers, donate_argnums=0).lower(pool, *arrays).compile()
    sizes = ",".join(str(n) for n in shape)
    text = compiled.as_text()
    assert re.search(rf"f32\[{sizes}\]\S* (while|get-tuple-element)\(", text)  # the pool is in there
    assert not re.findall(rf"f32\[{sizes}\]\S* copy\(", text)
    memory = compiled.memory_analysis()
    assert memory.temp_size_in_bytes < 1 << 20
    assert memory.alias_size_in_bytes == 4 * np.prod(shape)


def test_devices_of_a_mesh_attend_with_their_own_heads(isa: str) -> None:
    case = Case("mesh", rows=((1, 40), (20, 33), (3, 3)), num_q_heads=6, num_kv_heads=2, head_dim=16)
    problem = Problem(case)
    mesh = Mesh(np.array(jax.devices()[:2]), ("model",))
    call = make_call(case, decode_only=False, platform="cpu", chip=isa, implementation="cpu")
    heads, pool = P(None, "model"), P(None, None, "model")
    step = jax.shard_map(
        call,
        mesh=mesh,
        in_specs=(heads, heads, heads, pool, Rows(P(), P(), P()), P(), P("model"), P(None, "model")),
        out_specs=(heads, pool),
    )
    arrays = [jnp.asarray(x) for x in (problem.q, problem.k, problem.v, problem.pool)]
    out, written = jax.jit(step)(*arrays, problem.rows, jnp.int32(case.layer), jnp.zeros(6), jnp.ones((2, 2)))
    problem.check(np.asarray(out), np.asarray(written), tolerance=2e-6)


@pytest.mark.parametrize(
    ("kv_len", "queries"),
    [(33, 1), (2, 3)],
    ids=["more tokens than pages hold", "more queries than tokens"],
)
def test_lengths_that_do_not_fit_are_an_error_and_no_wild_read(kv_len: int, queries: int, isa: str) -> None:
    problem = Problem(Case("three", rows=((3, 3),)))
    rows = Rows(
        jnp.array([kv_len], jnp.int32), jnp.ones((1, 2), jnp.int32), jnp.array([0, queries], jnp.int32)
    )
    with pytest.raises(jax.errors.JaxRuntimeError, match="do not fit"):
        _run(problem, problem.pool, slice(0, 3), rows, isa)


def test_auto_takes_xla_for_a_pool_that_the_kernel_does_not_serve(isa: str) -> None:
    problem = Problem(Case("float8", rows=((9, 33),), kv_dtype="float8_e4m3fn", scales=True))
    problem.check(*problem.run("auto", chip=isa), tolerance=2e-6)
