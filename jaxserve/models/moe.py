"""A mixture of experts: each token goes through the few MLPs that a router picks for it."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

from jaxserve.models.attention import Placement
from jaxserve.models.config import Activation, ModelConfig
from jaxserve.models.layers import (
    MODEL_AXIS,
    Linear,
    StackedWeight,
    linear,
    sharded_param,
    with_weights,
)
from pallas_kernels.grouped_matmul import grouped_matmul
from pallas_kernels.packed_matmul import Activations, Gated, written_out


class Experts(nnx.Module):
    """The experts' matrices, stacked, and [in, out]: what a grouped product reads. Files have them [out, in].

    Over the model axis each device has whole experts, where their number divides.
    """

    def __init__(self, config: ModelConfig, *, dtype: jnp.dtype) -> None:
        e, h, i = config.num_experts, config.hidden_size, config.moe_intermediate_size
        axes = (MODEL_AXIS, None, None)
        self.gate_proj = sharded_param((e, h, i), dtype, axes, transposed=True)  # [experts, hidden, width]
        self.up_proj = sharded_param((e, h, i), dtype, axes, transposed=True)  # [experts, hidden, width]
        self.down_proj = sharded_param((e, i, h), dtype, axes, transposed=True)  # [experts, width, hidden]


class SparseMLP(nnx.Module):
    """sum over a token's top-k experts of probability * expert(x); the router computes in float32."""

    def __init__(self, config: ModelConfig, *, dtype: jnp.dtype, placement: Placement) -> None:
        self.gate = Linear(config.hidden_size, config.num_experts, bias=False, dtype=dtype, shard=None)
        self.experts = Experts(config, dtype=dtype)
        self.num_experts = config.num_experts
        self.top_k = config.num_experts_per_token
        self.norm_topk_prob = config.norm_topk_prob
        self.activation = config.activation
        self.mesh = placement.mesh
        self.platform = placement.platform

    def route(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """x [num_tokens, hidden] -> probabilities float32 and experts int32, [num_tokens, top_k] each."""
        router = self.gate.weight
        assert isinstance(router, nnx.Param)  # small, and what it says decides much: never packed
        logits = linear(x, router[...], jnp.dtype(jnp.float32))  # [num_tokens, num_experts]
        probs, chosen = jax.lax.top_k(jax.nn.softmax(logits, axis=-1), self.top_k)
        if self.norm_topk_prob:
            probs = probs / jnp.sum(probs, axis=-1, keepdims=True)
        return probs, chosen

    def __call__(
        self, x: Activations, num_live: jax.Array | None = None, residual: jax.Array | None = None
    ) -> jax.Array:
        """x [num_tokens, hidden] -> the same, of all rows, with the residual added."""
        y = self._experts_of(written_out(x))
        return y if residual is None else residual + y

    def _experts_of(self, x: jax.Array) -> jax.Array:
        own = self.experts
        weights = [own.gate_proj[...], own.up_proj[...], own.down_proj[...]]
        args = x, *self.route(x)
        stacked = [w for w in weights if isinstance(w, StackedWeight)]
        if stacked:
            return self._compute(stacked[0].index, *(w.array for w in stacked), *args)

        def alone(gate: jax.Array, up: jax.Array, down: jax.Array, *args: jax.Array) -> jax.Array:
            """A layer by itself is a stack of one."""
            return self._compute(jnp.int32(0), gate[None], up[None], down[None], *args)

        return with_weights(alone, weights, *args)

    def _compute(self, layer: jax.Array, *arrays: jax.Array) -> jax.Array:
        """`run_experts` of `layer`, on each device for its own experts."""
        run = functools.partial(
            run_experts, num_experts=self.num_experts, activation=self.activation, platform=self.platform
        )
        mesh = self.mesh
        if mesh is None or mesh.size == 1:
            return run(layer, jnp.int32(0), *arrays)
        splits = self.num_experts % mesh.shape[MODEL_AXIS] == 0

        def local(layer: jax.Array, *arrays: jax.Array) -> jax.Array:
            """This device's experts, for all tokens; the sum over devices is the layer's one all-reduce."""
            if not splits:
                return run(layer, jnp.int32(0), *arrays)
            first = jax.lax.axis_index(MODEL_AXIS) * (self.num_experts // mesh.shape[MODEL_AXIS])
            return jax.lax.psum(run(layer, first, *arrays), MODEL_AXIS)

        experts = P(None, MODEL_AXIS) if splits else P()
        in_specs = (P(), experts, experts, experts, P(), P(), P())
        run_all = jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=P(), check_vma=False)
        return run_all(layer, *arrays)


def run_experts(
    layer: jax.Array,  # int32 []: which of the layers given
    first: jax.Array,  # int32 []: the number of the first expert given
    gate: jax.Array,  # [layers, given, hidden, width]
    up: jax.Array,  # [layers, given, hidden, width]
    down: jax.Array,  # [layers, given, width, hidden]
    x: jax.Array,  # [num_tokens, hidden]
    probs: jax.Array,  # float32 [num_tokens, top_k]
    chosen: jax.Array,  # int32 [num_tokens, top_k]
    *,
    num_experts: int,
    activation: Activation,
    platform: str,
) -> jax.Array:
    """The part of the given experts in the sum, [num_tokens, hidden]; summed in float32."""
    num_tokens, top_k = chosen.shape
    num_layers, given = gate.shape[:2]
    # Counted from the first given expert, so that rows of the given experts sort to the front.
    expert = (chosen.reshape(-1) - first) % num_experts  # [num_tokens * top_k]
    order = jnp.argsort(expert)  # [num_tokens * top_k]
    sizes = jnp.sum(expert[:, None] == jnp.arange(given)[None, :], axis=0, dtype=jnp.int32)  # [given]
    # The experts of other layers are groups without rows: slicing a layer's out would copy them.
    all_sizes = jnp.zeros((num_layers, given), jnp.int32).at[layer].set(sizes).reshape(-1)

    def multiply(rows: jax.Array, weights: jax.Array) -> jax.Array:
        groups = weights.reshape(-1, *weights.shape[2:])  # [layers * given, in, out]
        return grouped_matmul(rows, groups, all_sizes, platform=platform)

    rows = x[order // top_k]  # [num_tokens * top_k, hidden]
    hidden = Gated(multiply(rows, gate), multiply(rows, up), activation).array()
    out = multiply(hidden, down)[jnp.argsort(order)].reshape(num_tokens, top_k, -1)
    # Rows of experts that were not given are zeros.
    return jnp.sum(out.astype(jnp.float32) * probs[:, :, None], axis=1).astype(x.dtype)
