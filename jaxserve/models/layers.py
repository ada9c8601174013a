"""Layers shared by the families. Weights are stored [out, in], as checkpoints have them, or packed.

Every parameter carries the mesh axes of its dimensions (`None`: replicated), read by `jaxserve.sharding`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from jaxserve.models.config import ModelConfig
from pallas_kernels.packed_matmul import (
    Activations,
    Gated,
    MLPWeights,
    Normed,
    PackedWeight,
    dequantize_rows,
    packed_matmul,
    packed_mlp,
    written_out,
)

MODEL_AXIS = "model"
T = TypeVar("T")

# Up to this many tokens `W @ x.T` beats `x @ W.T` on CPUs (2-3x at 4 to 32 tokens): XLA then walks the big
# matrix along its rows, once.
_FEW_TOKENS = 32


def matmul_precision(dtype: jnp.dtype) -> jax.lax.Precision:
    """float32 means float32: accelerators otherwise multiply it in bfloat16 passes."""
    return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else jax.lax.Precision.DEFAULT


class LayerWeight:
    """The weight of layer `index` (traced) among those of all layers: stands in for an array in a loop.

    A matrix is never sliced out of a stack, which would copy it, every layer, every step: `with_weights`
    branches to a computation with the right one instead.
    """

    def __init__(self, arrays: Sequence[jax.Array], index: jax.Array) -> None:
        self.arrays = tuple(arrays)
        self.index = index

    def __getitem__(self, key: Any) -> jax.Array | LayerWeight:
        """`weight[...]`, as of a parameter: vectors are small enough to be stacked and sliced."""
        return jnp.stack(self.arrays)[self.index] if self.arrays[0].ndim == 1 else self


class StackedWeight:
    """The weight of layer `index` (traced) in an array that holds those of all layers, [num_layers, ...]."""

    def __init__(self, array: jax.Array, index: jax.Array) -> None:
        self.array = array
        self.index = index

    def __getitem__(self, key: Any) -> jax.Array | StackedWeight:
        """`weight[...]`, as of a parameter: vectors and matrices are sliced out.

        The TPU compiler makes the slice a part of the product that reads it. It cannot where the product is
        a kernel, as that of experts is: their arrays stay whole, and the kernel is told where to read.
        """
        if self.array.ndim > 3:
            return self
        return jax.lax.dynamic_index_in_dim(self.array, self.index, keepdims=False)


Weight = jax.Array | LayerWeight


def with_weights(fn: Callable[..., T], weights: Sequence[Weight], *args: jax.Array) -> T:
    """fn(*weights, *args), where the weights may be those of a traced layer."""
    looped = [w for w in weights if isinstance(w, LayerWeight)]
    if not looped:
        return fn(*weights, *args)
    assert len(looped) == len(weights)
    by_layer = zip(*(w.arrays for w in looped), strict=True)
    branches = [functools.partial(fn, *arrays) for arrays in by_layer]
    return jax.lax.switch(looped[0].index, branches, *args)


def loop_layers(layers: nnx.List, body: Callable[[Any, Any, Any], Any], carry: Any) -> Any:
    """carry = body(layer, i, carry) for each of the (alike) layers, as one loop in the program.

    The body is compiled once and not once a layer: for 30 layers on a CPU 4 s instead of 16 s, at the same
    speed.
    """
    graphdef, state = nnx.split(layers[0])
    treedef = jax.tree.structure(state)
    by_layer = [jax.tree.leaves(nnx.state(layer)) for layer in layers]

    def one(i: jax.Array, carry: Any) -> Any:
        leaves = [LayerWeight(arrays, i) for arrays in zip(*by_layer, strict=True)]
        return body(nnx.merge(graphdef, jax.tree.unflatten(treedef, leaves)), i, carry)

    return jax.lax.fori_loop(0, len(by_layer), one, carry)


def stack_layers(layer: nnx.Module, num_layers: int) -> None:
    """Make each parameter of `layer` [num_layers, ...]: those of all the (alike) layers."""
    for _, param in nnx.iter_graph(layer):
        if isinstance(param, nnx.Param):
            param.set_value(jnp.zeros((num_layers, *param.shape), param.dtype))
            param.set_metadata("mesh_axes", (None, *param.get_metadata("mesh_axes")))


def scan_layers(layers: nnx.Module, body: Callable[[Any, Any, Any], Any], carry: Any) -> Any:
    """`loop_layers` over a module whose parameters are stacked (`stack_layers`)."""
    graphdef, state = nnx.split(layers)
    num_layers = jax.tree.leaves(state)[0].shape[0]

    def one(i: jax.Array, carry: Any) -> Any:
        own = jax.tree.map(lambda a: StackedWeight(a, i), state)
        return body(nnx.merge(graphdef, own), i, carry)

    return jax.lax.fori_loop(0, num_layers, one, carry)


def linear(x: jax.Array, weight: Weight, out_dtype: jnp.dtype | None = None) -> jax.Array:
    """x [num_tokens, in] times weight [out, in] -> [num_tokens, out], accumulated in float32."""
    return with_weights(_dot, [weight], x).astype(out_dtype or x.dtype)


def _dot(weight: jax.Array, x: jax.Array) -> jax.Array:
    """float32 [num_tokens, out]."""
    few = x.shape[0] <= _FEW_TOKENS
    y = jax.lax.dot_general(
        *((weight, x) if few else (x, weight)),
        (((1,), (1,)), ((), ())),
        precision=matmul_precision(x.dtype),
        preferred_element_type=jnp.float32,
    )
    return y.T if few else y


def sharded_param(
    shape: tuple[int, ...], dtype: jnp.dtype, axes: tuple[str | None, ...], *, transposed: bool = False
) -> nnx.Param:
    """A parameter of zeros (its values come from a checkpoint) that knows its mesh axes.

    `transposed`: its last two dimensions are the other way round in files.
    """
    return nnx.Param(jnp.zeros(shape, dtype), mesh_axes=axes, transposed=transposed)


class PackedForm(NamedTuple):
    """How a matrix is kept: float16 scales (and mins), one for 32 inputs."""

    bits: int  # 4 or 8
    has_mins: bool


class PackedMatrix(nnx.Module):
    """A matrix [out, in] of 4 or 8 bits in place of a float parameter: the arrays of a `PackedWeight`.

    `num_layers`: those of all the layers in one, [num_layers, ...]; None: of one.
    """

    def __init__(
        self, size: tuple[int, int], form: PackedForm, chip: str | None, num_layers: int | None = None
    ) -> None:
        self.out_size, self.in_size = size
        self.form = form
        self.chip = chip  # the CPU's instruction set, None without native kernels
        lead = () if num_layers is None else (num_layers,)
        place = (*lead, -(-self.out_size // 16), self.in_size // 32)  # [..., blocks, groups]
        axes = (None,) * (len(place) + 1)
        half = jnp.dtype(jnp.float16)
        self.values = sharded_param((*place, 64 * form.bits), jnp.dtype(jnp.uint8), axes)
        self.scales = sharded_param((*place, 16), half, axes)
        self.mins = sharded_param((*place, 16), half, axes) if form.has_mins else None

    def parts(self) -> list[Any]:
        """The arrays, or what stands for them in a loop over layers."""
        return [part[...] for part in (self.values, self.scales, self.mins) if part is not None]

    def rows(self, rows: jax.Array) -> jax.Array:
        """rows int32 [n] -> float32 [n, in]; of a matrix outside the layers."""
        inside = jnp.clip(rows, 0, self.out_size - 1)
        return dequantize_rows(PackedWeight(*self.parts()), inside)


def with_packed(
    fn: Callable[[list[PackedWeight], jax.Array | None], T], matrices: Sequence[PackedMatrix]
) -> T:
    """fn(weights, layer): of which layer they are, None where they are not stacked."""
    parts = [part for matrix in matrices for part in matrix.parts()]
    layer = None
    if isinstance(parts[0], StackedWeight):  # the kernel is told where to read
        layer, parts = parts[0].index, [part.array for part in parts]

    def run(*arrays: jax.Array) -> T:
        found = iter(arrays)
        weights = [
            PackedWeight(next(found), next(found), next(found) if matrix.form.has_mins else None)
            for matrix in matrices
        ]
        return fn(weights, layer)

    return with_weights(run, parts)


def packed_products(
    x: Activations,
    matrices: Sequence[PackedMatrix],
    num_live: jax.Array | None = None,
    *,
    residual: jax.Array | None = None,
    is_fine: bool | Sequence[bool] = False,
) -> list[jax.Array]:
    """x [num_tokens, in] times each matrix -> [num_tokens, out] each, in one call of the kernel.

    See `packed_matmul` for the other arguments.
    """
    sizes = [matrix.out_size for matrix in matrices]

    def multiply(weights: list[PackedWeight], layer: jax.Array | None) -> list[jax.Array]:
        return packed_matmul(
            x,
            weights,
            sizes,
            layer=layer,
            num_live=num_live,
            residual=residual,
            is_fine=is_fine,
            chip=matrices[0].chip,
        )

    return with_packed(multiply, matrices)


class Linear(nnx.Module):
    """y = x W^T + b. `shard` names the dimension that the model axis splits: "out", "in" or None."""

    weight: nnx.Param | PackedMatrix

    def __init__(
        self, in_size: int, out_size: int, *, bias: bool, dtype: jnp.dtype, shard: str | None
    ) -> None:
        axes = {"out": (MODEL_AXIS, None), "in": (None, MODEL_AXIS), None: (None, None)}[shard]
        self.weight = sharded_param((out_size, in_size), dtype, axes)  # [out, in]
        self.bias = sharded_param((out_size,), dtype, (axes[0],)) if bias else None  # [out]

    def __call__(
        self,
        x: Activations,
        num_live: jax.Array | None = None,
        residual: jax.Array | None = None,
        *,
        is_fine: bool = False,
    ) -> jax.Array:
        """x [num_tokens, in] -> [num_tokens, out], with the residual [num_tokens, out] added."""
        if isinstance(self.weight, PackedMatrix):
            [y] = packed_products(x, [self.weight], num_live, residual=residual, is_fine=is_fine)
        else:
            y = linear(written_out(x), self.weight[...])
            y = y if residual is None else residual + y
        return y if self.bias is None else y + self.bias[...][None, :]


def linears(
    x: Activations,
    layers: Sequence[Linear],
    num_live: jax.Array | None = None,
    *,
    is_fine: Sequence[bool] | None = None,
) -> list[jax.Array]:
    """Some linears of one input x [num_tokens, in]; if all are packed they share a call."""
    fine = is_fine or [False] * len(layers)
    matrices = [layer.weight for layer in layers if isinstance(layer.weight, PackedMatrix)]
    if len(matrices) < len(layers):
        x = written_out(x)
        return [layer(x, num_live, is_fine=own) for layer, own in zip(layers, fine, strict=True)]
    found = packed_products(x, matrices, num_live, is_fine=fine)
    return [
        y if layer.bias is None else y + layer.bias[...][None, :]
        for y, layer in zip(found, layers, strict=True)
    ]


class RMSNorm(nnx.Module):
    """Root mean square norm (Zhang & Sennrich, 2019, arXiv:1910.07467), computed in float32.

    `unit_offset`: as Gemma has it, x is multiplied by 1 + weight before it is rounded to its own type.
    """

    def __init__(self, size: int, eps: float, *, dtype: jnp.dtype, unit_offset: bool = False) -> None:
        self.weight = sharded_param((size,), dtype, (None,))  # [size]
        self.eps = eps
        self.unit_offset = unit_offset

    def before(self, x: jax.Array) -> Activations:
        """x [num_tokens, size] normed, for a product that does it itself if it can."""
        if self.unit_offset or x.dtype != jnp.float32:
            return self(x)
        return Normed(x, self.weight[...], self.eps)

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [..., size] -> the same."""
        x32 = x.astype(jnp.float32)
        variance = jnp.mean(x32 * x32, axis=-1, keepdims=True)
        normed = x32 * jax.lax.rsqrt(variance + self.eps)
        weight = self.weight[...].reshape((1,) * (x.ndim - 1) + (-1,))
        if self.unit_offset:
            return (normed * (1.0 + weight.astype(jnp.float32))).astype(x.dtype)
        return normed.astype(x.dtype) * weight


class Embedding(nnx.Module):
    """Token embeddings, split over the vocabulary; also the output matrix of a tied model."""

    weight: nnx.Param | PackedMatrix

    def __init__(self, vocab_size: int, hidden_size: int, *, dtype: jnp.dtype) -> None:
        self.weight = sharded_param((vocab_size, hidden_size), dtype, (MODEL_AXIS, None))  # [vocab, hidden]
        self.dtype = dtype

    def __call__(self, token_ids: jax.Array) -> jax.Array:
        """int32 [num_tokens] -> [num_tokens, hidden]"""
        if isinstance(self.weight, PackedMatrix):
            return self.weight.rows(token_ids).astype(self.dtype)
        return jnp.take(self.weight[...], token_ids, axis=0, mode="clip")

    def logits(self, hidden: jax.Array, num_live: jax.Array | None = None) -> jax.Array:
        """hidden [num_rows, hidden] -> float32 [num_rows, vocab]"""
        if isinstance(self.weight, PackedMatrix):
            x = hidden.astype(jnp.float32)
            return packed_products(x, [self.weight], num_live, is_fine=True)[0]
        return linear(hidden, self.weight[...], jnp.float32)


class MLP(nnx.Module):
    """down(activation(gate x) * up x) (gated linear units: Shazeer, 2020, arXiv:2002.05202)."""

    def __init__(self, config: ModelConfig, *, dtype: jnp.dtype) -> None:
        h, i, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = Linear(h, i, bias=bias, dtype=dtype, shard="out")
        self.up_proj = Linear(h, i, bias=bias, dtype=dtype, shard="out")
        self.down_proj = Linear(i, h, bias=bias, dtype=dtype, shard="in")
        self.activation = config.activation

    def __call__(
        self, x: Activations, num_live: jax.Array | None = None, residual: jax.Array | None = None
    ) -> jax.Array:
        """x [num_tokens, hidden] -> the same, with the residual added."""
        parts = [self.gate_proj, self.up_proj, self.down_proj]
        matrices = [part.weight for part in parts if isinstance(part.weight, PackedMatrix)]
        if len(matrices) == len(parts) and all(part.bias is None for part in parts):

            def compute(weights: list[PackedWeight], layer: jax.Array | None) -> jax.Array:
                return packed_mlp(
                    x,
                    MLPWeights(*weights),
                    matrices[2].out_size,
                    self.activation,
                    layer=layer,
                    num_live=num_live,
                    residual=residual,
                    chip=matrices[2].chip,
                )

            return with_packed(compute, matrices)
        gate, up = linears(x, parts[:2], num_live)
        return self.down_proj(Gated(gate, up, self.activation), num_live, residual)
