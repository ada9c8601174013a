"""Every implementation of ragged paged attention that a CPU runs, against a dense loop in numpy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.native import ISAS
from pallas_kernels.pool_layout import page_bytes, pool_shape
from pallas_kernels.ragged_paged_attention import AttentionSpec, Rows, ragged_paged_attention
from pallas_kernels.ragged_paged_attention.cases import CASES, Case
from pallas_kernels.ragged_paged_attention.problem import Problem
from pallas_kernels.support import CHIPS, PLATFORMS, SUPPORT, resolve

# (implementation, chip): the native one for each instruction set, the others for any processor.
Way = tuple[str, str | None]
WAYS: list[Way] = [
    (name, isa)
    for name in SUPPORT["ragged_paged_attention"]["cpu"]
    for isa in (ISAS if name in CHIPS else (None,))
]


@pytest.fixture(params=WAYS, ids=lambda way: "-".join(filter(None, way)))
def way(request: pytest.FixtureRequest, load_isa: Callable[[str], str]) -> Way:
    name, isa = request.param
    if isa is not None:
        load_isa(isa)
    return name, isa


def problem_of(case: Case, implementation: str) -> Problem:
    problem = Problem(case)
    if implementation == "reference":
        problem.q[problem.num_live :] = 0.0  # the twin makes no promise for NaN in padding queries
    return problem


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_attention_equals_dense_attention_and_reads_live_memory_only(case: Case, way: Way) -> None:
    implementation, chip = way
    problem = problem_of(case, implementation)
    if implementation == "cpu" and case.kv_dtype.startswith("float8"):
        with pytest.raises(NotImplementedError, match="float8"):
            problem.run(implementation, chip=chip)
        return
    problem.check(*problem.run(implementation, chip=chip), tolerance=2e-6)


@pytest.mark.parametrize("case", [c for c in CASES if c.is_decode], ids=lambda case: case.name)
def test_decode_only_gives_what_the_general_call_gives(case: Case, way: Way) -> None:
    implementation, chip = way
    problem = problem_of(case, implementation)
    out, pool = problem.run(implementation, chip=chip, decode_only=True)
    problem.check(out, pool, tolerance=2e-6)


def test_a_call_without_new_rows_reads_what_is_in_the_pool(way: Way) -> None:
    implementation, chip = way
    problem = problem_of(Case("mixed", rows=((1, 40), (20, 33))), implementation)
    out, pool = ragged_paged_attention(
        jnp.asarray(problem.q),
        None,
        None,
        jnp.asarray(problem.written),
        problem.case.layer,
        problem.rows,
        spec=problem.case.spec(),
        platform="cpu",
        chip=chip,
        implementation=implementation,
    )
    problem.check(np.asarray(out), np.asarray(pool), tolerance=2e-6)


def test_the_oracle_sees_a_query_that_looks_one_token_behind() -> None:
    problem = Problem(Case("late", rows=((37, 38),)))
    problem.kv_lens[0] -= 1
    with pytest.raises(AssertionError):
        problem.check(*problem.run("xla"), tolerance=1e-3)


def test_the_oracle_sees_a_write_to_a_page_of_nobody() -> None:
    problem = Problem(CASES[0])
    out, pool = problem.run("xla")
    pool = pool.copy()
    pool[0, -1, 0, 0, 0] = 1.0
    with pytest.raises(AssertionError):
        problem.check(out, pool, tolerance=1e-3)


def test_an_implementation_that_does_not_serve_a_platform_is_refused_by_name() -> None:
    with pytest.raises(NotImplementedError, match=r"'mosaic'.*cpu.*xla"):
        resolve("ragged_paged_attention", "cpu", "mosaic")
    with pytest.raises(NotImplementedError, match="'abacus'"):
        resolve("ragged_paged_attention", "abacus")
    assert all(resolve("ragged_paged_attention", p) for p in PLATFORMS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": (4, 4)}, "q must be"),
        ({"q": (4, 3, 8)}, "evenly"),
        ({"q": (4, 4, 16)}, "no room"),
        ({"k": (4, 2, 16)}, "k must be"),
        ({"k": None}, "without k"),
        ({"v": (4, 1, 8)}, "v must be"),
        ({"v": None}, "v must be"),
        ({"kv_pool": (1, 4, 2, 2, 16, 8)}, "kv_pool must be"),
        ({"page_indices": (3, 4)}, "page_indices"),
        ({"cu_q_lens": (2,)}, "cu_q_lens"),
        ({"sinks": (2,)}, "sinks"),
        ({"rope": (3, 4)}, "rope"),
        ({"rope": (4, 5)}, "rope"),
    ],
)
def test_shapes_that_do_not_fit_are_named(change: dict[str, Any], message: str) -> None:
    shapes: dict[str, Any] = {
        "q": (4, 4, 8),
        "k": (4, 2, 8),
        "v": (4, 2, 8),
        "kv_pool": (1, 4, 2, 16, 16),
        "kv_lens": (2,),
        "page_indices": (2, 4),
        "cu_q_lens": (3,),
        "sinks": (4,),
        "rope": (4, 4),
    }
    shapes |= change
    ints = ("kv_lens", "page_indices", "cu_q_lens")
    arrays = {
        n: None if s is None else jnp.zeros(s, jnp.int32 if n in ints else jnp.float32)
        for n, s in shapes.items()
    }
    rows = Rows(*(arrays.pop(name) for name in ints))
    arrays["rope"] = (arrays["rope"],) * 2
    with pytest.raises(ValueError, match=message):
        ragged_paged_attention(**arrays, layer=0, rows=rows, spec=AttentionSpec(1.0), platform="cpu")


def test_a_latent_value_is_a_part_of_the_key() -> None:
    q, pool = jnp.zeros((1, 4, 8)), jnp.zeros((1, 2, 1, 8, 16))
    rows = Rows(jnp.ones(1, jnp.int32), jnp.ones((1, 1), jnp.int32), jnp.arange(2, dtype=jnp.int32))
    with pytest.raises(ValueError, match="latent"):
        ragged_paged_attention(
            q, None, None, pool, 0, rows, spec=AttentionSpec(1.0, latent_v_dim=12), platform="cpu"
        )


def test_page_bytes_is_the_size_of_a_page_of_all_layers() -> None:
    shape = pool_shape(3, 7, 2, 16, 128)
    pool = np.zeros(shape, np.float16)
    assert page_bytes(3, 2, 16, 128, np.dtype(np.float16)) == pool[:, 1].nbytes
