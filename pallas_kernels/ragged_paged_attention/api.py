"""`ragged_paged_attention`: the public function; the implementations live beside it."""

from __future__ import annotations

from typing import Any

import jax

from pallas_kernels.kv_write import kv_rows, locate_tokens, write_kv
from pallas_kernels.ragged_paged_attention import cpu, gpu, tpu
from pallas_kernels.ragged_paged_attention.reference import reference_attention
from pallas_kernels.ragged_paged_attention.rope import apply_rope
from pallas_kernels.ragged_paged_attention.types import AttentionSpec, Rows
from pallas_kernels.ragged_paged_attention.validate import validate
from pallas_kernels.ragged_paged_attention.xla import xla_attention
from pallas_kernels.support import resolve

_TWINS = {"reference": reference_attention, "xla": xla_attention}


def ragged_paged_attention(
    q: jax.Array,
    k: jax.Array | None,
    v: jax.Array | None,
    kv_pool: jax.Array,
    layer: int | jax.Array,
    rows: Rows,
    *,
    spec: AttentionSpec,
    platform: str,
    chip: str | None = None,
    implementation: str = "auto",
    window: int | jax.Array | None = None,
    sinks: jax.Array | None = None,
    kv_scales: tuple[jax.Array, jax.Array] | None = None,
    rope: tuple[jax.Array, jax.Array] | None = None,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """Write the new tokens' K and V, then attend from them; prefill and decode in one call.

    Sequence s owns the queries q[cu_q_lens[s] : cu_q_lens[s + 1]], the last of its kv_lens[s] tokens. Query i
    of them sees every token up to its own, or the last `window` of these. A page that a sequence with two
    or more queries writes may be read by others in the same call; one that a sequence with one query
    writes may not.

    Args:
        q: [num_tokens, num_q_heads, k_dim]; rows from cu_q_lens[-1] on are padding.
        k: [num_tokens, num_kv_heads, k_dim]; None when the pool has them already.
        v: [num_tokens, num_kv_heads, v_dim]; None without k, and in latent form, where it is a part of K.
        kv_pool: [num_layers, num_pages, num_kv_heads, page_size, row_dim]; see `pool_layout`. Donate it.
        layer: which layer's part of the pool.
        rows: lengths and pages of the sequences.
        spec: what is static.
        platform: "cpu", "gpu" or "tpu": the target, never asked of the running process.
        chip: the target's name in `chips`, or a CPU's instruction set (`native.ISAS`), None when native code
            cannot be used; block sizes and what can run depend on it.
        implementation: a name of `support.SUPPORT`, or "auto": the platform's first that serves the case.
        window: int32 [], queries at position p see positions > p - window; None sees all.
        sinks: float32 [num_q_heads], a logit more in each softmax's sum, without a value (gpt-oss).
        kv_scales: float32 [num_kv_heads] each: K and V in the pool times these are the true ones.
        rope: cos and sin, float32 [num_tokens, rotary_dim / 2] each: q and k are rotated by halves before use
            (see `apply_rope`). None: they come as they are used.
        interpret: for tests: how Pallas interprets a TPU kernel where there is no TPU.

    Returns:
        [num_tokens, num_q_heads, v_dim] in q's dtype, whose padding rows are finite and mean nothing; and
        the pool.

    Raises:
        NotImplementedError: the named implementation does not run on the platform, or not this case.
        ValueError: shapes or dtypes do not fit together.
    """
    validate(q, (k, v), kv_pool, rows, spec, sinks, rope)
    name = _choose(q, kv_pool, spec, platform, chip, implementation)
    if rope is not None and name != "cpu":
        q, k = apply_rope(q, *rope), None if k is None else apply_rope(k, *rope)
    dtype, group = q.dtype, q.shape[1] // kv_pool.shape[2]
    if kv_scales is not None:
        k_scale, v_scale = kv_scales
        q = (q * k_scale.repeat(group)[None, :, None]).astype(dtype)
        k = None if k is None else k / k_scale[None, :, None]
        v = None if v is None else v / v_scale[None, :, None]
    options: dict[str, Any] = {"spec": spec, "window": window, "sinks": sinks}
    # [num_tokens, num_kv_heads, row_dim]
    kv = None if k is None or name == "cpu" else kv_rows(k, v, kv_pool.dtype, kv_pool.shape[4])
    if name == "cpu":
        assert chip is not None  # `support` names the chips of this one
        out, kv_pool = cpu.cpu_attention(q, k, v, kv_pool, layer, rows, isa=chip, rope=rope, **options)
    elif name == "mosaic_tpu":
        options |= {"chip": chip, "interpret": interpret}
        out, kv_pool = tpu.mosaic_tpu_attention(q, kv, kv_pool, layer, rows, **options)
    elif name == "mosaic_gpu":
        assert chip is not None  # `support` names the chips of this one
        out, kv_pool = gpu.mosaic_gpu_attention(q, k, v, kv_pool, layer, rows, chip=chip, **options)
    else:
        if kv is not None:
            places = locate_tokens(rows, q.shape[0], kv_pool.shape[3], decode_only=spec.decode_only)
            kv_pool = write_kv(kv_pool, layer, kv, *places)
        out = _TWINS[name](q, kv_pool, layer, rows, **options)
    if kv_scales is not None:
        # In latent form V is a part of K.
        scale = kv_scales[1] if spec.latent_v_dim is None else kv_scales[0]
        out = (out * scale.repeat(group)[None, :, None]).astype(dtype)
    return out, kv_pool


def _choose(
    q: jax.Array,
    kv_pool: jax.Array,
    spec: AttentionSpec,
    platform: str,
    chip: str | None,
    implementation: str,
) -> str:
    name = resolve("ragged_paged_attention", platform, implementation, chip=chip)
    try:
        if name == "mosaic_gpu":
            gpu.check_case(q, kv_pool, spec)
        elif name == "mosaic_tpu":
            tpu.check_case(kv_pool)
        elif name == "cpu":
            cpu.check_case(kv_pool)
    except NotImplementedError:
        if implementation != "auto":
            raise
        return "xla"
    return name
