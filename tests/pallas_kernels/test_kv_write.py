"""Writing K and V into pages, against assignments in numpy."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from pallas_kernels.kv_write import write_kv


def test_each_token_lands_in_its_page_and_nothing_else_changes() -> None:
    rng = np.random.default_rng(0)
    pool = rng.standard_normal((3, 6, 2, 2, 4, 8)).astype(np.float32)
    k, v = rng.standard_normal((2, 5, 2, 8)).astype(np.float32)
    pages, offsets = np.array([3, 3, 1, 5, 0], np.int32), np.array([0, 3, 2, 1, 0], np.int32)
    expected = pool.copy()
    for t in range(5):
        expected[1, pages[t], :, 0, offsets[t]] = k[t]
        expected[1, pages[t], :, 1, offsets[t]] = v[t]
    written = write_kv(
        jnp.asarray(pool), 1, jnp.asarray(k), jnp.asarray(v), jnp.asarray(pages), jnp.asarray(offsets)
    )
    np.testing.assert_array_equal(np.asarray(written), expected)


def test_values_are_stored_in_the_pool_s_dtype() -> None:
    pool = jnp.zeros((1, 2, 1, 2, 2, 4), jnp.bfloat16)
    k = jnp.full((1, 1, 4), 1.001)
    written = write_kv(pool, 0, k, k, jnp.array([1]), jnp.array([1]))
    assert written.dtype == jnp.bfloat16
    assert float(written[0, 1, 0, 0, 1, 0]) == 1.0
