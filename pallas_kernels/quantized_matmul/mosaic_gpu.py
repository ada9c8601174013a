"""The Hopper kernel (sm_90a, Pallas Mosaic GPU): integers become bfloat16 in registers, for wgmma.

What is computed is y^T = w^T x^T: wgmma takes its left operand from registers, and that is where a weight is
dequantised; its 64 rows are output channels, so that few tokens waste nothing. A warpgroup of its own feeds
the stages by TMA; the others take 64 channels each of the same tokens. Integers are multiplied as they are,
exactly (bfloat16 holds all of int8), each group's sum is scaled in float32, and zero points are a small
product outside. With few tiles the contraction is split over thread blocks, and XLA adds the parts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.chips import chip_by_name
from pallas_kernels.quantized_matmul.weight import QuantizedWeight

WARPGROUP_ROWS = 64
_STEP = 128  # features of a stage
_MAX_TILE_TOKENS = 128
_STAGE_BUDGET = 160 * 1024  # bytes of shared memory; one thread block fills a core's registers
_MIN_STEPS = 4  # of a split: fewer do not pay for adding


@dataclass(frozen=True)
class Plan:
    """What is static in a kernel."""

    group_size: int
    per_channel: bool
    warpgroups: int  # that compute
    tile_tokens: int
    splits: int
    steps: int  # of a split, `_STEP` features each
    stages: int
    out_dtype: Any

    @property
    def tile_out(self) -> int:
        return WARPGROUP_ROWS * self.warpgroups

    @property
    def groups_a_step(self) -> int:
        return max(1, _STEP // self.group_size)

    @property
    def steps_a_group(self) -> int:
        return max(1, self.group_size // _STEP)


def reason_against(x: jax.Array, weight: QuantizedWeight) -> str | None:
    """Why the kernel does not serve a call; None if it does."""
    group_size = weight.values.shape[2]
    if x.dtype != jnp.bfloat16:
        return f"x is {x.dtype.name}: wgmma is used in bfloat16"
    if group_size not in (32, 64) and group_size % _STEP:
        return f"groups of {group_size}: 32, 64 and multiples of {_STEP} fill a stage"
    if x.shape[1] % _STEP:
        return f"{x.shape[1]} features are no multiple of {_STEP}"
    if weight.values.shape[1] % 8:
        return f"{weight.values.shape[1]} channels are no multiple of 8, which TMA needs"
    return None


def make_plan(x: jax.Array, weight: QuantizedWeight, num_cores: int) -> Plan:
    num_tokens, features = x.shape
    groups, channels, group_size = weight.values.shape
    tile_tokens = min(_MAX_TILE_TOKENS, 1 << max(3, (num_tokens - 1).bit_length()))
    # A warpgroup waits for its own product; more of them hide that, where registers allow it.
    warpgroups = 4 if tile_tokens <= 32 else 2
    tile_out = WARPGROUP_ROWS * warpgroups
    num_tiles = -(-num_tokens // tile_tokens) * -(-channels // tile_out)
    steps_total = features // _STEP
    # A split takes whole groups, except of a scale per channel.
    whole = steps_total if groups == 1 else steps_total // max(1, group_size // _STEP)
    splits = 1
    while (
        2 * splits * num_tiles <= num_cores
        and whole % (2 * splits) == 0
        and steps_total // (2 * splits) >= _MIN_STEPS
    ):
        splits *= 2
    bits = jnp.iinfo(weight.values.dtype).bits
    stage = _STEP * (tile_tokens * 2 + tile_out * bits // 8)
    return Plan(
        group_size=min(group_size, features),
        per_channel=groups == 1,
        warpgroups=warpgroups,
        tile_tokens=tile_tokens,
        splits=splits,
        steps=steps_total // splits,
        stages=max(2, min(8, steps_total // splits, _STAGE_BUDGET // stage)),
        out_dtype=jnp.bfloat16 if splits == 1 and weight.zeros is None else jnp.float32,
    )


def mosaic_gpu_quantized_matmul(x: jax.Array, weight: QuantizedWeight, *, chip: str) -> jax.Array:
    """See `quantized_matmul`; the caller has asked `reason_against`."""
    num_tokens = x.shape[0]
    values, scales, zeros = weight
    plan = make_plan(x, weight, chip_by_name(chip).num_cores)
    padded = jnp.pad(x, ((0, -num_tokens % plan.tile_tokens), (0, 0)))
    parts = multiply(padded, values, scales, plan)  # [splits, channels, padded tokens]
    y = parts.astype(jnp.float32).sum(axis=0)[:, :num_tokens].T
    if zeros is not None:
        offsets = scales.astype(jnp.float32) * zeros.astype(jnp.float32)
        sums = x.astype(jnp.float32).reshape(num_tokens, scales.shape[0], -1).sum(axis=-1)
        y = y - jnp.dot(sums, offsets, precision=lax.Precision.HIGHEST)
    return y.astype(x.dtype)


def product(total: jax.Array | None, w: jax.Array, x_smem: Any) -> jax.Array:
    """total (None: zeros) + w x^T, float32 [64, tokens].

    w is bfloat16 [64, k] in registers, x bfloat16 [tokens, k] in shared memory.
    """

    def add(acc: Any) -> None:
        plgpu.wgmma(acc, w, x_smem.transpose((1, 0)))

    if total is not None:
        return pl.run_state(add)(plgpu.ACC.init(total))

    def fresh(acc: Any) -> jax.Array:
        add(acc)
        return acc[...]

    return pl.run_scoped(fresh, plgpu.ACC((w.shape[0], x_smem.shape[0]), jnp.float32))


def multiply(x: jax.Array, values: jax.Array, scales: jax.Array, plan: Plan) -> jax.Array:
    """Parts of (x w)^T without zero points.

    Args:
        x: bfloat16 [tokens, features], whole tiles of tokens.
        values: int4 or int8 [groups, channels, group_size].
        scales: float32 or bfloat16 [groups, channels].

    Returns:
        `plan.out_dtype` [splits, channels, tokens].
    """
    num_tokens, channels = x.shape[0], values.shape[1]
    return plgpu.kernel(
        functools.partial(_kernel, plan=plan),
        out_type=jax.ShapeDtypeStruct((plan.splits, channels, num_tokens), plan.out_dtype),
        scratch_types={
            "out_smem": plgpu.SMEM(
                (plan.warpgroups, WARPGROUP_ROWS, plan.tile_tokens),
                plan.out_dtype,
                transforms=_transforms(plan.tile_tokens, plan.out_dtype),
            ),
            "scale_smem": plgpu.SMEM((plan.warpgroups, WARPGROUP_ROWS), scales.dtype),
            "scale_ready": plgpu.Barrier(num_barriers=plan.warpgroups),
        },
        grid=(pl.cdiv(channels, plan.tile_out), num_tokens // plan.tile_tokens, plan.splits),
        grid_names=("channel", "token", "split"),
        num_threads=plan.warpgroups + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
    )(x, values, scales)


def _transforms(columns: int, dtype: Any) -> tuple[Any, ...]:
    """The tensor cores' tiling of rows of `columns` elements: 8 rows by the widest swizzle that fits."""
    bits = jnp.iinfo(dtype).bits if jnp.issubdtype(dtype, jnp.integer) else jnp.finfo(dtype).bits
    swizzle = next((s for s in (128, 64, 32) if columns * bits // 8 % s == 0), None)
    if swizzle is None:  # rows of 16 bytes: a quarter warp's loads are 128 bytes in a row as they lie
        return ()
    return plgpu.TilingTransform((8, swizzle * 8 // bits)), plgpu.SwizzleTransform(swizzle)


def _kernel(
    x_hbm: Any,  # bfloat16 [tokens, features]
    values_hbm: Any,  # [groups, channels, group_size]
    scales_hbm: Any,  # [groups, channels]
    out_hbm: Any,  # [splits, channels, tokens]
    *,
    out_smem: Any,  # [warpgroups, 64, tile_tokens]
    scale_smem: Any,  # [warpgroups, 64], of a scale per channel
    scale_ready: Any,  # a barrier of each warpgroup
    plan: Plan,
) -> None:
    channel, token, split = (lax.axis_index(name) for name in ("channel", "token", "split"))
    warpgroup = lax.axis_index("warpgroup")
    width = min(plan.group_size, _STEP)  # features of one group in a stage
    layout = plgpu.Layout.WGMMA_UPCAST_4X if values_hbm.dtype == jnp.int4 else plgpu.Layout.WGMMA_UPCAST_2X
    mine = pl.ds(warpgroup * WARPGROUP_ROWS, WARPGROUP_ROWS)

    def dequantised(values_smem: Any, j: int) -> jax.Array:
        """bfloat16 [64, width]: the integers of group j of a stage, unscaled."""
        values = plgpu.layout_cast(values_smem[j, mine], layout)
        if values.dtype == jnp.int4:  # 4 bits are exchanged between threads while they are 4 bits
            return plgpu.layout_cast(values, plgpu.Layout.WGMMA).astype(jnp.bfloat16)
        return plgpu.layout_cast(values.astype(jnp.bfloat16), plgpu.Layout.WGMMA)

    def scaled(total: jax.Array, scale: jax.Array) -> jax.Array:
        """total [64, tile_tokens] times scale [64]."""
        scale = plgpu.layout_cast(scale.astype(jnp.float32), plgpu.Layout.WGMMA.reduce(1))
        return total * lax.broadcast_in_dim(scale, total.shape, [0])

    def step(_: Any, x_smem: Any, values_smem: Any, *rest: Any) -> jax.Array:
        *scales_smem, total = rest
        if plan.per_channel:
            return product(total, dequantised(values_smem, 0), x_smem)
        for j in range(plan.groups_a_step):
            part = product(None, dequantised(values_smem, j), x_smem.at[:, pl.ds(j * width, width)])
            total = total + scaled(part, scales_smem[0][j, mine])
        return total

    def store(total: jax.Array) -> None:
        out_smem[warpgroup] = total.astype(plan.out_dtype)
        plgpu.commit_smem()
        rows = pl.ds(channel * plan.tile_out + warpgroup * WARPGROUP_ROWS, WARPGROUP_ROWS)
        columns = pl.ds(token * plan.tile_tokens, plan.tile_tokens)
        plgpu.copy_smem_to_gmem(out_smem.at[warpgroup], out_hbm.at[split, rows, columns])
        plgpu.wait_smem_to_gmem(0)

    def compute(pipeline: Callable[[jax.Array], jax.Array]) -> None:
        total = jnp.zeros((WARPGROUP_ROWS, plan.tile_tokens), jnp.float32)
        total = plgpu.layout_cast(total, plgpu.Layout.WGMMA)
        if plan.per_channel:
            rows = pl.ds(channel * plan.tile_out + warpgroup * WARPGROUP_ROWS, WARPGROUP_ROWS)
            ready = scale_ready.at[warpgroup]
            plgpu.copy_gmem_to_smem(scales_hbm.at[0, rows], scale_smem.at[warpgroup], ready)
            total = pipeline(total)
            plgpu.barrier_wait(ready)
            store(scaled(total, scale_smem[warpgroup]))
        else:
            store(pipeline(total))

    first = split * plan.steps

    def group_of(i: jax.Array) -> jax.Array:
        """Which block of groups step i takes."""
        return lax.div(first + i, jnp.int32(plan.steps_a_group)) if plan.steps_a_group > 1 else first + i

    def part_of(i: jax.Array) -> jax.Array:
        return lax.rem(first + i, jnp.int32(plan.steps_a_group)) if plan.steps_a_group > 1 else jnp.int32(0)

    specs = [
        plgpu.BlockSpec(
            (plan.tile_tokens, _STEP),
            lambda i: (token, first + i),
            transforms=_transforms(width, x_hbm.dtype),
        ),
        plgpu.BlockSpec(
            (plan.groups_a_step, plan.tile_out, width),
            lambda i: (group_of(i), channel, part_of(i)),
            transforms=_transforms(width, values_hbm.dtype),
        ),
    ]
    operands = [x_hbm, values_hbm]
    if not plan.per_channel:
        specs.append(plgpu.BlockSpec((plan.groups_a_step, plan.tile_out), lambda i: (group_of(i), channel)))
        operands.append(scales_hbm)
    body: Any = step  # jax's annotation leaves the carry out
    plgpu.emit_pipeline_warp_specialized(
        body,
        grid=(plan.steps,),
        memory_registers=40,
        in_specs=specs,
        max_concurrent_steps=plan.stages,
        wg_axis="warpgroup",
        num_compute_wgs=plan.warpgroups,
        compute_context=compute,
    )(*operands)
