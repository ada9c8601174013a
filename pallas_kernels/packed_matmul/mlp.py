"""`packed_mlp`: a gated MLP in one call, its hidden activations never written out as floats."""

from __future__ import annotations

import functools
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.packed_matmul.activations import Activations, Gated
from pallas_kernels.packed_matmul.api import packed_matmul, validate
from pallas_kernels.packed_matmul.cpu import cpu_packed_mlp
from pallas_kernels.packed_matmul.weight import INPUTS, PackedWeight
from pallas_kernels.support import resolve


class MLPWeights(NamedTuple):
    """Of one layer or of all, as `packed_matmul` takes them."""

    gate: PackedWeight  # [hidden, in]
    up: PackedWeight  # [hidden, in]
    down: PackedWeight  # [out, hidden]

    @property
    def hidden_size(self) -> int:
        return self.down.values.shape[-2] * INPUTS


def packed_mlp(
    x: Activations,
    weights: MLPWeights,
    out_size: int,
    activation: Literal["silu", "gelu_tanh"],
    *,
    layer: int | jax.Array | None = None,
    num_live: int | jax.Array | None = None,
    residual: jax.Array | None = None,
    platform: str = "cpu",
    chip: str | None = None,
    implementation: str = "auto",
) -> jax.Array:
    """down(activation(gate x) * up x) + residual (gated linear units: Shazeer, 2020, arXiv:2002.05202).

    The same as two calls of `packed_matmul`, the second with `Gated` activations, which are rounded as soon
    as they are there.

    Args:
        x: float32 or bfloat16 [num_tokens, in], finite; or what makes it (`Normed`, `Gated`).
        weights: of one layer or of all (stacked).
        out_size: how many outputs `down` has.
        activation: of the gate.
        residual: [num_tokens, out_size], to add; or None.
        layer, num_live, platform, chip, implementation: as of `packed_matmul`.

    Returns:
        [num_tokens, out_size] in x's dtype.

    Raises:
        NotImplementedError: no implementation for the platform, or the named one does not run on the chip.
        ValueError: shapes or dtypes do not fit together.
    """
    first = x if isinstance(x, jax.Array) else x[0]
    hidden = weights.hidden_size
    validate(first, [weights.gate, weights.up], [hidden, hidden], layer)
    validate(jax.ShapeDtypeStruct((first.shape[0], hidden), first.dtype), [weights.down], [out_size], layer)
    if residual is not None and residual.shape != (first.shape[0], out_size):
        raise ValueError(f"a residual {list(residual.shape)} goes with {out_size} outputs of each token")
    name = resolve("packed_matmul", platform, implementation, chip=chip)
    live = jnp.asarray(first.shape[0] if num_live is None else num_live, jnp.int32)
    if name == "cpu":
        assert chip is not None  # `support` names the chips of this one
        y = cpu_packed_mlp(
            x,
            weights,
            out_size,
            activation,
            layer=jnp.asarray(0 if layer is None else layer, jnp.int32),
            num_live=live,
            residual=residual,
            isa=chip,
        )
        return y.astype(first.dtype)
    multiply = functools.partial(
        packed_matmul,
        layer=layer,
        num_live=live,
        platform=platform,
        chip=chip,
        implementation=implementation,
    )
    gate, up = multiply(x, weights[:2], [hidden, hidden])
    return multiply(Gated(gate, up, activation), [weights.down], [out_size], residual=residual)[0]
