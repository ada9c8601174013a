"""XLA's own fusion: integers to floats as the product's operand is read.

Group scales multiply the weight elementwise and one einsum contracts over groups and their elements; there is
no reshape between, and the compiler fuses all of it into the product. What was compared by compiling for
v5e, v6e and tpu7x (libtpu 0.0.42; [512, 4096] x int4 [4096, 14336] in groups of 128; the compiler's own
estimate in thousands of cycles for v6e, and temporary bytes):

    this form                                          209         0
    the same product in bfloat16                       218         0
    `bgk,gkn->bgn`, then scale and sum over g         1970         0     with 32 tokens 99, this form 76
    dequantise, reshape, dot                                 117 MB      the weight in bfloat16
    group_size last, else as this form                 666         0

On an H200 XLA writes the weight out in bfloat16 all the same, with a scale per channel too (117 MB, jax
0.10 and 0.12): `mosaic_gpu` is for those.

Fewer tokens than 8 become 8: XLA makes a product with one row into a sum on the vector unit, which it
reckons 6 times as long (412 for one token, 76 for eight).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.quantized_matmul.weight import QuantizedWeight, out_is_last

_TPU_MIN_TOKENS = 8


def xla_quantized_matmul(x: jax.Array, weight: QuantizedWeight, *, platform: str) -> jax.Array:
    """See `quantized_matmul`."""
    num_tokens = x.shape[0]
    if platform == "tpu" and num_tokens < _TPU_MIN_TOKENS:
        x = jnp.pad(x, ((0, _TPU_MIN_TOKENS - num_tokens), (0, 0)))
    values, scales, zeros = weight
    groups = scales.shape[0]
    axis = 1 if out_is_last(platform) else 2  # of group_size in values
    w = values.astype(jnp.float32)
    if zeros is not None:
        w = w - jnp.expand_dims(zeros.astype(jnp.float32), axis)
    per_channel = groups == 1
    if not per_channel:
        w = w * jnp.expand_dims(scales.astype(jnp.float32), axis)
    y = jnp.einsum(  # [num_tokens, out]
        "bgk,gkn->bn" if axis == 1 else "bgk,gnk->bn",
        x.reshape(x.shape[0], groups, -1),
        w.astype(x.dtype),
        preferred_element_type=jnp.float32,
    )
    if per_channel:
        y = y * scales.astype(jnp.float32)
    return y.astype(x.dtype)[:num_tokens]
