"""The TPU kernel for few tokens: scales multiply each group's product, not each weight.

XLA's form multiplies every weight with its scale on the vector unit, and for few tokens that is the longest
part of the call. Here integers are only unpacked on their way to the matrix unit, and num_tokens numbers a
group and channel are scaled. Thousands of cycles for int4 [4096, 14336] in groups of 128, compiled with
libtpu 0.0.42, nothing measured (this kernel: bundles of a step, its loop written out, times steps; XLA: the
compiler's own estimate; last, what reading the weight takes at the data sheet's bandwidth and about 1.5, 1.75
and 2.2 GHz):

    tokens            8          32          64         128         256     memory
    v5e         46 / 98    52 / 132    62 / 135    117 / 162   225 / 250        56
    v6e         25 / 76    32 /  76    37 /  73     64 /  90   121 / 116        32
    tpu7x       25 / 75    31 /  75    37 /  72     64 /  88   120 / 104        18

So it serves up to 128 tokens. Groups of 32 and 64 would fill a fraction of the matrix unit's depth, and one
group has no scales to save: those are XLA's.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.chips import chip_by_name
from pallas_kernels.quantized_matmul.weight import QuantizedWeight

_MAX_TOKENS = 128
_LANES = 128
_MAX_GROUPS = 128  # of a step
_CHUNK = 16  # groups whose products are written out one after the other; a tile of bfloat16 scales
_TOKEN_MULTIPLE = 8

# Output channels of a step, on every chip: 1024 need 4 to 7 % fewer bundles and wait as much longer for the
# first weights, 256 need 6 to 27 % more.
TILE_OUT = 512


def reason_against(x: jax.Array, weight: QuantizedWeight) -> str | None:
    """Why the kernel does not serve a call; None if it does."""
    groups, group_size, _ = weight.values.shape
    if x.dtype != jnp.bfloat16:
        return f"x is {x.dtype.name}: the matrix unit is used in bfloat16"
    if x.shape[0] > _MAX_TOKENS:
        return f"{x.shape[0]} tokens: for more than {_MAX_TOKENS} XLA's form is as good"
    if groups == 1:
        return "one group: XLA's form is as good"
    if group_size % _LANES:
        return f"groups of {group_size} are no multiple of {_LANES} lanes"
    if groups_a_step(groups) is None:
        return f"{groups} groups have no divisor that is a multiple of {_CHUNK} and at most {_MAX_GROUPS}"
    return None


def groups_a_step(groups: int) -> int | None:
    """All, or the most that divide them in whole tiles of bfloat16 scales; None where there are none."""
    if groups <= _MAX_GROUPS:
        return groups
    return next((n for n in range(_MAX_GROUPS, 0, -_CHUNK) if groups % n == 0), None)


def mosaic_tpu_quantized_matmul(
    x: jax.Array, weight: QuantizedWeight, *, chip: str, interpret: Any = False
) -> jax.Array:
    """See `quantized_matmul`; the caller has asked `reason_against`.

    interpret: as `pl.pallas_call` takes it.
    """
    num_tokens = x.shape[0]
    groups, group_size, channels = weight.values.shape
    step = groups_a_step(groups)
    assert step is not None
    tile_out = TILE_OUT
    x = jnp.pad(x, ((0, -num_tokens % _TOKEN_MULTIPLE), (0, 0)))
    per_group = [weight.scales] if weight.zeros is None else [weight.scales, weight.zeros]
    scale_spec = pl.BlockSpec((step, tile_out), lambda n, k: (k, n))
    # Two stages of each block; the rest of what is asked for is the compiler's own.
    bits = jnp.iinfo(weight.values.dtype).bits
    stage = step * group_size * (x.shape[0] * 2 + tile_out * bits // 8) + 4 * len(per_group) * step * tile_out
    limit = min(2 * stage + (16 << 20), chip_by_name(chip).scratch_bytes)
    out = pl.pallas_call(
        functools.partial(_kernel, group_size=group_size),
        grid=(pl.cdiv(channels, tile_out), groups // step),
        in_specs=[
            pl.BlockSpec((x.shape[0], step * group_size), lambda n, k: (0, k)),
            pl.BlockSpec((step, group_size, tile_out), lambda n, k: (k, 0, n)),
            *[scale_spec] * len(per_group),
        ],
        out_specs=pl.BlockSpec((x.shape[0], tile_out), lambda n, k: (0, n)),
        out_shape=jax.ShapeDtypeStruct((x.shape[0], channels), x.dtype),
        scratch_shapes=[pltpu.VMEM((x.shape[0], tile_out), jnp.float32)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=limit
        ),
        interpret=interpret,
    )(x, weight.values, *per_group)
    return out[:num_tokens]


def _kernel(
    x_ref: Any,  # bfloat16 [tokens, step * group_size]
    values_ref: Any,  # [step, group_size, tile_out]
    scales_ref: Any,  # [step, tile_out]
    *refs: Any,  # zeros [step, tile_out] if any; out [tokens, tile_out]; float32 scratch [tokens, tile_out]
    group_size: int,
) -> None:
    *zeros_ref, out_ref, total_ref = refs

    @pl.when(pl.program_id(1) == 0)
    def _() -> None:
        total_ref[...] = jnp.zeros_like(total_ref)

    step = values_ref.shape[0]
    chunk = _CHUNK if step % _CHUNK == 0 else step

    @pl.loop(0, step // chunk)
    def _(i: jax.Array) -> None:
        first = pl.multiple_of(i * chunk, chunk)
        scales = scales_ref[pl.ds(first, chunk), :].astype(jnp.float32)  # [chunk, tile_out]
        zeros = [ref[pl.ds(first, chunk), :].astype(jnp.float32) for ref in zeros_ref]
        total = total_ref[...]
        for j in range(chunk):
            start = pl.multiple_of((first + j) * group_size, group_size)
            x = x_ref[:, pl.ds(start, group_size)]
            w = values_ref[first + j].astype(x.dtype)
            part = jnp.dot(x, w, preferred_element_type=jnp.float32)
            for zero in zeros:
                sums = x.astype(jnp.float32).sum(axis=1, keepdims=True)  # [tokens, 1]
                part = part - sums * zero[j : j + 1]
            total = total + part * scales[j : j + 1]
        total_ref[...] = total

    @pl.when(pl.program_id(1) == pl.num_programs(1) - 1)
    def _() -> None:
        out_ref[...] = total_ref[...].astype(out_ref.dtype)
