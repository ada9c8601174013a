"""Every implementation of ragged paged attention against a dense loop in numpy.

All memory that must not be read holds NaN: pages of nobody, the rest of a sequence's last page, the entries
of the page table past its last page, and padding queries.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.pool_layout import page_bytes, pool_shape
from pallas_kernels.ragged_paged_attention import ragged_paged_attention
from pallas_kernels.ragged_paged_attention.cases import CASES, Case
from pallas_kernels.support import PLATFORMS, SUPPORT, resolve

IMPLEMENTATIONS = sorted({name for names in SUPPORT["ragged_paged_attention"].values() for name in names})


class Problem:
    """Random inputs of a case, and what the attention of each of its queries must be."""

    def __init__(self, case: Case, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.case = case
        num_rows = len(case.rows) + case.empty_rows
        used = [-(-kv // case.page_size) for _, kv in case.rows]
        num_pages = sum(used) + 4
        shape = pool_shape(case.num_layers, num_pages, case.num_kv_heads, case.page_size, case.head_dim)
        self.pool = np.full(shape, np.nan, np.float32)
        self.pool[:, 0] = 0.0  # padding may read page 0
        free = rng.permutation(np.arange(1, num_pages))
        pages_per_row = max(used) + 2
        self.page_indices = np.full((num_rows, pages_per_row), num_pages - 1, np.int32)
        self.kv_lens = np.zeros(num_rows, np.int32)
        q_lens = np.zeros(num_rows, np.int32)
        self.expected = []
        num_tokens = sum(q for q, _ in case.rows) + case.padding_tokens
        self.q = np.full((num_tokens, case.num_q_heads, case.head_dim), np.nan, np.float32)
        start = 0
        for row, (q_len, kv_len) in enumerate(case.rows):
            pages, free = free[: used[row]], free[used[row] :]
            self.page_indices[row, : used[row]] = pages
            self.kv_lens[row], q_lens[row] = kv_len, q_len
            k, v = rng.standard_normal((2, kv_len, case.num_kv_heads, case.head_dim)).astype(np.float32)
            q = rng.standard_normal((q_len, case.num_q_heads, case.head_dim)).astype(np.float32)
            self.q[start : start + q_len] = q
            start += q_len
            for position in range(kv_len):
                page, offset = pages[position // case.page_size], position % case.page_size
                self.pool[case.layer, page, :, 0, offset] = k[position]
                self.pool[case.layer, page, :, 1, offset] = v[position]
            self.expected.append(dense_attention(q, k, v))
        self.num_live = start
        self.cu_q_lens = np.concatenate([[0], np.cumsum(q_lens)]).astype(np.int32)

    def run(self, implementation: str, *, decode_only: bool = False) -> np.ndarray:
        out = jax.jit(
            ragged_paged_attention, static_argnames=("sm_scale", "decode_only", "platform", "implementation")
        )(
            jnp.asarray(self.q),
            jnp.asarray(self.pool),
            jnp.int32(self.case.layer),
            jnp.asarray(self.kv_lens),
            jnp.asarray(self.page_indices),
            jnp.asarray(self.cu_q_lens),
            sm_scale=self.case.head_dim**-0.5,
            decode_only=decode_only,
            platform="cpu",
            implementation=implementation,
        )
        return np.asarray(out)


def dense_attention(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Causal attention of the last tokens, one query and head at a time, in float64."""
    group = q.shape[1] // k.shape[1]
    out = np.zeros(q.shape)
    for i in range(len(q)):
        seen = len(k) - len(q) + i + 1
        for head in range(q.shape[1]):
            scores = k[:seen, head // group].astype(np.float64) @ q[i, head] * q.shape[2] ** -0.5
            weights = np.exp(scores - scores.max())
            out[i, head] = weights / weights.sum() @ v[:seen, head // group]
    return out


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_attention_equals_dense_attention_and_reads_live_memory_only(case: Case, implementation: str) -> None:
    problem = Problem(case)
    if implementation == "reference":
        problem.q[problem.num_live :] = 0.0  # the twin makes no promise for NaN in padding queries
    out = problem.run(implementation)
    np.testing.assert_allclose(
        out[: problem.num_live], np.concatenate(problem.expected), atol=2e-6, rtol=2e-6
    )


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_decode_only_gives_what_the_general_call_gives(implementation: str) -> None:
    case = Case("decode", rows=((1, 5), (1, 64), (1, 129)), empty_rows=1, padding_tokens=1, page_size=16)
    problem = Problem(case)
    problem.q[problem.num_live :] = 0.0
    out = problem.run(implementation, decode_only=True)
    np.testing.assert_allclose(
        out[: problem.num_live], np.concatenate(problem.expected), atol=2e-6, rtol=2e-6
    )
    assert np.isfinite(out).all()


def test_the_oracle_sees_a_query_that_looks_one_token_ahead() -> None:
    problem = Problem(CASES[0])
    q_len, kv_len = problem.case.rows[0]
    shifted = problem.kv_lens.copy()
    shifted[0] = kv_len - 1
    problem.kv_lens = shifted
    out = problem.run("xla")
    assert not np.allclose(out[:q_len], problem.expected[0], atol=1e-3)


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
        ({"q": (4, 4, 16)}, "head_dim"),
        ({"kv_pool": (1, 4, 2, 16, 8)}, "kv_pool must be"),
        ({"page_indices": (3, 4)}, "page_indices"),
        ({"cu_q_lens": (2,)}, "cu_q_lens"),
    ],
)
def test_shapes_that_do_not_fit_are_named(change: dict[str, tuple[int, ...]], message: str) -> None:
    shapes = {
        "q": (4, 4, 8),
        "kv_pool": (1, 4, 2, 2, 16, 8),
        "kv_lens": (2,),
        "page_indices": (2, 4),
        "cu_q_lens": (3,),
    }
    shapes |= change
    floats = ("q", "kv_pool")
    arrays = {n: jnp.zeros(s, jnp.float32 if n in floats else jnp.int32) for n, s in shapes.items()}
    with pytest.raises(ValueError, match=message):
        ragged_paged_attention(**arrays, layer=0, sm_scale=1.0, platform="cpu")


def test_page_bytes_is_the_size_of_a_page_of_all_layers() -> None:
    shape = pool_shape(3, 7, 2, 16, 64)
    pool = np.zeros(shape, np.float16)
    assert page_bytes(3, 2, 16, 64, np.dtype(np.float16)) == pool[:, 1].nbytes
