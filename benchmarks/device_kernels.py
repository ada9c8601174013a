"""Kernels on the accelerator at hand: right against their oracles, and how near the roofline they run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.chips import Chip
from pallas_kernels.grouped_matmul import grouped_matmul
from pallas_kernels.grouped_matmul.cases import CASES as GROUPED_CASES
from pallas_kernels.quantized_matmul import QuantizedWeight, dequantize, pack, quantized_matmul
from pallas_kernels.quantized_matmul import cases as quantized_cases
from pallas_kernels.ragged_paged_attention import Rows
from pallas_kernels.ragged_paged_attention import cases as attention_cases
from pallas_kernels.ragged_paged_attention.problem import Problem, abstract_inputs, make_call
from pallas_kernels.roofline import AttentionShape, Cost, attention_cost, matmul_cost
from pallas_kernels.support import SUPPORT, resolve


@dataclass(frozen=True)
class Result:
    """A row of the table; `fraction` is least time over measured time."""

    operation: str
    implementation: str
    case: str
    verdict: str  # "ok", "refused: ..." or "WRONG: ..."
    microseconds: float | None = None
    fraction: float | None = None


@dataclass(frozen=True)
class Target:
    platform: str
    chip: Chip | None

    @property
    def chip_name(self) -> str | None:
        return self.chip.name if self.chip else None

    def implementations(self, operation: str) -> Iterator[str]:
        """Those that can run here, the twin left out."""
        for name in SUPPORT[operation][self.platform]:
            if name == "reference":
                continue
            try:
                yield resolve(operation, self.platform, name, chip=self.chip_name)
            except NotImplementedError:
                continue


def judge(run: Callable[[], None]) -> str:
    """ "ok", or what is wrong in one line."""
    try:
        run()
    except NotImplementedError as error:
        return f"refused: {_one_line(error)}"
    except AssertionError as error:
        return f"WRONG: {_one_line(error)}"
    except Exception as error:  # the compiler's and the driver's, of many kinds: the other cases go on
        return f"FAILED: {type(error).__name__}: {_one_line(error)}"
    return "ok"


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:120]


def verify(target: Target) -> Iterator[Result]:
    """Every operation x implementation x case against its oracle."""
    # 16-bit products on accelerators: their rounding of a weighted mean of normal values.
    dtype, tolerance = ("float32", 1e-5) if target.platform == "cpu" else ("bfloat16", 4e-2)
    for name in target.implementations("ragged_paged_attention"):
        for case in attention_cases.CASES:
            if case.kv_dtype == "float32":
                case = replace(case, kv_dtype=dtype)
            if target.platform == "gpu" and case.head_dim % 16:
                case = replace(case, head_dim=round_up(case.head_dim, 16))

            def attend(case: Any = case, name: str = name) -> None:
                problem = Problem(case, dtype=dtype, platform=target.platform)
                out, pool = problem.run(name, chip=target.chip_name)
                problem.check(out, pool, tolerance=tolerance)

            yield Result("attention", name, case.name, judge(attend))
    for name in target.implementations("quantized_matmul"):
        for quantized in quantized_cases.CASES:

            def multiply(case: Any = quantized, name: str = name) -> None:
                x, weight = _quantized(case, target, jnp.dtype(dtype))
                out = quantized_matmul(
                    x, weight, platform=target.platform, chip=target.chip_name, implementation=name
                )
                dense = np.asarray(dequantize(weight, platform=target.platform), np.float64)
                expected = np.asarray(x, np.float64) @ dense
                np.testing.assert_allclose(
                    np.asarray(out, np.float64), expected, atol=tolerance / 2 * np.abs(expected).max()
                )

            yield Result("quantized matmul", name, quantized.name, judge(multiply))
    for name in target.implementations("grouped_matmul"):
        for grouped in GROUPED_CASES:

            def multiply_groups(case: Any = grouped, name: str = name) -> None:
                rng = np.random.default_rng(0)
                rows = sum(case.sizes) + case.padding_rows
                lhs = jnp.asarray(rng.standard_normal((rows, case.in_features)), dtype)
                shape = (len(case.sizes), case.in_features, case.out_features)
                rhs = jnp.asarray(rng.standard_normal(shape), dtype)
                sizes = jnp.asarray(case.sizes, jnp.int32)
                out = grouped_matmul(lhs, rhs, sizes, platform=target.platform, implementation=name)
                owner = np.repeat(np.arange(len(case.sizes)), case.sizes)
                used, weights = np.asarray(lhs, np.float64)[: len(owner)], np.asarray(rhs, np.float64)[owner]
                expected = np.einsum("ri,rio->ro", used, weights)
                np.testing.assert_allclose(
                    np.asarray(out, np.float64)[: len(owner)], expected, atol=tolerance * 10, rtol=tolerance
                )

            yield Result("grouped matmul", name, grouped.name, judge(multiply_groups))


def round_up(n: int, unit: int) -> int:
    return -(-n // unit) * unit


def _quantized(case: Any, target: Target, dtype: Any) -> tuple[jax.Array, QuantizedWeight]:
    rng = np.random.default_rng(0)
    size = case.group_size or case.in_features
    shape = (case.in_features // size, case.out_features)
    limit = 1 << (case.bits - 1)
    values = rng.integers(-limit, limit, (case.in_features, case.out_features), dtype=np.int8)
    scales = rng.uniform(0.5, 1.5, shape).astype(np.float32) / limit
    zeros = rng.integers(-limit, limit, shape).astype(np.float32) if case.zeros else None
    weight = pack(
        jnp.asarray(values).astype(jnp.int4 if case.bits == 4 else jnp.int8),
        jnp.asarray(scales),
        None if zeros is None else jnp.asarray(zeros),
        platform=target.platform,
    )
    x = jnp.asarray(rng.standard_normal((case.num_tokens, case.in_features)), dtype)
    return x, weight


# ---- time


def median_seconds(step: Callable[[Any], Any], state: Any, *, calls: int = 20, repeats: int = 5) -> float:
    """Seconds of one call, which gets the last one's result: the median of runs of `calls`, warm."""
    state = jax.block_until_ready(step(state))
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        for _ in range(calls):
            state = step(state)
        jax.block_until_ready(state)
        times.append((time.perf_counter() - started) / calls)
    return statistics.median(times)


def measure(target: Target, *, pool_bytes: int, names: tuple[str, ...] = ()) -> Iterator[Result]:
    """Time real models' shapes; `names`: only cases whose name contains one of these."""
    for case in attention_cases.REAL_CASES:
        if names and not any(name in case.name for name in names):
            continue
        for implementation in target.implementations("ragged_paged_attention"):
            seconds: list[float] = []

            def time_it(case: Any = case, name: str = implementation, into: Any = seconds) -> None:
                into.append(attention_seconds(case, name, target, pool_bytes))

            verdict = judge(time_it)
            yield _timed(
                "attention", implementation, case.name, verdict, seconds, _attention_cost(case), target
            )
    for quantized in quantized_cases.REAL_CASES:
        for implementation in target.implementations("quantized_matmul"):
            seconds = []

            def time_matmul(case: Any = quantized, name: str = implementation, into: Any = seconds) -> None:
                x, weight = _quantized(case, target, jnp.bfloat16)

                def step(x: jax.Array, weight: QuantizedWeight) -> jax.Array:
                    out = quantized_matmul(
                        x, weight, platform=target.platform, chip=target.chip_name, implementation=name
                    )
                    # The next call waits for this one.
                    return x + (out[:, :1] * 0).astype(x.dtype)

                compiled = jax.jit(step).lower(x, weight).compile()
                into.append(median_seconds(lambda x: compiled(x, weight), x))

            verdict = judge(time_matmul)
            cost = matmul_cost(
                quantized.num_tokens,
                quantized.in_features,
                quantized.out_features,
                weight_bytes=quantized.bits / 8,
            )
            yield _timed("quantized matmul", implementation, quantized.name, verdict, seconds, cost, target)


def _timed(
    operation: str,
    implementation: str,
    case: str,
    verdict: str,
    seconds: list[float],
    cost: Cost,
    target: Target,
) -> Result:
    if not seconds:
        return Result(operation, implementation, case, verdict)
    fraction = cost.seconds(target.chip) / seconds[0] if target.chip else None
    return Result(operation, implementation, case, verdict, seconds[0] * 1e6, fraction)


def _attention_cost(case: attention_cases.Case) -> Cost:
    kv_bytes = jnp.dtype(case.kv_dtype).itemsize
    shape = AttentionShape(
        case.num_q_heads,
        case.num_kv_heads,
        case.head_dim,
        case.value_dim,
        case.kv_dim,
        q_bytes=4 if kv_bytes == 4 else 2,
        kv_bytes=kv_bytes,
        window=case.window,
    )
    return attention_cost([q for q, _ in case.rows], [kv for _, kv in case.rows], shape)


def attention_seconds(
    case: attention_cases.Case, implementation: str, target: Target, pool_bytes: int
) -> float:
    avals = abstract_inputs(case, target.platform, None, pool_bytes=pool_bytes)
    q, k, v, pool, rows, *_ = avals
    rng = np.random.default_rng(0)
    used = [round_up(kv, case.page_size) // case.page_size for _, kv in case.rows]
    pages = rng.permutation(np.arange(1, pool.shape[1]))
    if sum(used) > len(pages):
        raise NotImplementedError(f"{sum(used)} pages in a pool of {len(pages)}")
    table = np.zeros(rows.page_indices.shape, np.int32)
    for row, count in enumerate(used):
        table[row, :count], pages = pages[:count], pages[count:]
    lens = np.array([kv for _, kv in case.rows], np.int32)
    starts = np.concatenate([[0], np.cumsum([n for n, _ in case.rows])]).astype(np.int32)
    args = (
        *(_random(a, seed) for seed, a in enumerate((q, k, v))),
        Rows(jnp.asarray(lens), jnp.asarray(table), jnp.asarray(starts)),
        jnp.int32(case.layer),
        jnp.zeros(case.num_q_heads),
        jnp.ones((2, case.num_kv_heads)),
    )
    call = make_call(
        case,
        decode_only=case.is_decode,
        platform=target.platform,
        chip=target.chip_name,
        implementation=implementation,
    )

    def step(pool: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array, *rest: Any) -> Any:
        out, pool = call(q, k, v, pool, *rest)
        return pool, out

    jitted = jax.jit(step, donate_argnums=0)
    compiled = jitted.lower(pool, *args).compile()
    return median_seconds(
        lambda state: compiled(state[0], *args), (jax.jit(lambda: jnp.zeros(pool.shape, pool.dtype))(), None)
    )


def _random(aval: Any, seed: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), aval.shape, jnp.float32).astype(aval.dtype)
