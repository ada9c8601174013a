"""Layers shared by the families. Weights are stored [out, in], as checkpoints have them.

Every parameter carries the mesh axes of its dimensions (`None`: replicated), read by `jaxserve.sharding`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

MODEL_AXIS = "model"

# Up to this many tokens `W @ x.T` beats `x @ W.T` on CPUs (2-3x at 4 to 32 tokens): XLA then walks the big
# matrix along its rows, once.
_FEW_TOKENS = 32


def matmul_precision(dtype: jnp.dtype) -> jax.lax.Precision:
    """float32 means float32: accelerators otherwise multiply it in bfloat16 passes."""
    return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else jax.lax.Precision.DEFAULT


def linear(x: jax.Array, weight: jax.Array, out_dtype: jnp.dtype | None = None) -> jax.Array:
    """x [num_tokens, in] times weight [out, in] -> [num_tokens, out], accumulated in float32."""
    out_dtype = out_dtype or x.dtype
    precision = matmul_precision(x.dtype)
    if x.shape[0] <= _FEW_TOKENS:
        dims = (((1,), (1,)), ((), ()))
        y = jax.lax.dot_general(weight, x, dims, precision=precision, preferred_element_type=jnp.float32)
        return y.T.astype(out_dtype)
    dims = (((1,), (1,)), ((), ()))
    y = jax.lax.dot_general(x, weight, dims, precision=precision, preferred_element_type=jnp.float32)
    return y.astype(out_dtype)


def sharded_param(shape: tuple[int, ...], dtype: jnp.dtype, axes: tuple[str | None, ...]) -> nnx.Param:
    """A parameter of zeros (its values come from a checkpoint) that knows its mesh axes."""
    return nnx.Param(jnp.zeros(shape, dtype), mesh_axes=axes)


class Linear(nnx.Module):
    """y = x W^T + b. `shard` names the dimension that the model axis splits: "out", "in" or None."""

    def __init__(self, in_size: int, out_size: int, *, bias: bool, dtype: jnp.dtype, shard: str | None) -> None:
        axes = {"out": (MODEL_AXIS, None), "in": (None, MODEL_AXIS), None: (None, None)}[shard]
        self.weight = sharded_param((out_size, in_size), dtype, axes)  # [out, in]
        self.bias = sharded_param((out_size,), dtype, (axes[0],)) if bias else None  # [out]

    def __call__(self, x: jax.Array) -> jax.Array:
        y = linear(x, self.weight[...])
        return y if self.bias is None else y + self.bias[...][None, :]


class RMSNorm(nnx.Module):
    """Root mean square norm (Zhang & Sennrich, 2019, arXiv:1910.07467), computed in float32."""

    def __init__(self, size: int, eps: float, *, dtype: jnp.dtype) -> None:
        self.weight = sharded_param((size,), dtype, (None,))  # [size]
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        x32 = x.astype(jnp.float32)
        variance = jnp.mean(x32 * x32, axis=-1, keepdims=True)
        return (x32 * jax.lax.rsqrt(variance + self.eps)).astype(x.dtype) * self.weight[...][None, :]


class Embedding(nnx.Module):
    """Token embeddings, split over the vocabulary; also the output matrix of a tied model."""

    def __init__(self, vocab_size: int, hidden_size: int, *, dtype: jnp.dtype) -> None:
        self.weight = sharded_param((vocab_size, hidden_size), dtype, (MODEL_AXIS, None))  # [vocab, hidden]

    def __call__(self, token_ids: jax.Array) -> jax.Array:
        return jnp.take(self.weight[...], token_ids, axis=0, mode="clip")  # [num_tokens, hidden]

    def logits(self, hidden: jax.Array) -> jax.Array:
        return linear(hidden, self.weight[...], jnp.float32)  # [num_rows, vocab]
