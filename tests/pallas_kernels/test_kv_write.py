"""Writing K and V into pages, against assignments in numpy."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from pallas_kernels.kv_write import kv_rows, locate_tokens, write_kv
from pallas_kernels.ragged_paged_attention import Rows


def test_each_token_lands_in_its_page_and_nothing_else_changes() -> None:
    rng = np.random.default_rng(0)
    pool = rng.standard_normal((3, 6, 2, 4, 16)).astype(np.float32)
    k, v = rng.standard_normal((2, 5, 2, 8)).astype(np.float32)
    pages, offsets = np.array([3, 3, 1, 5, 0], np.int32), np.array([0, 3, 2, 1, 0], np.int32)
    expected = pool.copy()
    for t in range(5):
        expected[1, pages[t], :, offsets[t], :8] = k[t]
        expected[1, pages[t], :, offsets[t], 8:] = v[t]
    kv = kv_rows(jnp.asarray(k), jnp.asarray(v), pool.dtype, 16)
    written = write_kv(jnp.asarray(pool), 1, kv, jnp.asarray(pages), jnp.asarray(offsets))
    np.testing.assert_array_equal(np.asarray(written), expected)


def test_tokens_are_located_by_their_position_and_padding_on_page_0() -> None:
    rows = Rows(
        kv_lens=jnp.array([9, 0, 4], jnp.int32),
        page_indices=jnp.array([[3, 5, 7], [9, 9, 9], [8, 9, 9]], jnp.int32),
        cu_q_lens=jnp.array([0, 2, 2, 3], jnp.int32),
    )
    pages, offsets = locate_tokens(rows, 5, 4, decode_only=False)
    assert list(zip(pages.tolist(), offsets.tolist(), strict=True)) == [
        (5, 3),
        (7, 0),
        (8, 3),
        (0, 0),
        (0, 0),
    ]


def test_values_are_stored_in_the_pool_s_dtype_and_clamped_to_it() -> None:
    k = jnp.array([1.001, 1e4, -1e4, 2.5])
    assert kv_rows(k, None, jnp.bfloat16, 4).tolist() == [1.0, 9984.0, -9984.0, 2.5]
    assert kv_rows(k, None, jnp.int8, 4).tolist() == [1, 127, -128, 2]
    assert kv_rows(k, None, jnp.float8_e4m3fn, 4).astype(jnp.float32).tolist() == [1.0, 448.0, -448.0, 2.5]
