"""The CPU's native kernels beside plain XLA and beside what the machine can do at best.

    python benchmarks/cpu_kernels.py [attention] [matmul]

Shapes are SmolLM2-135M's, all 30 layers in one program. Times are the least of several runs. An attention's
floor is the larger of its bytes of live K and V over the bandwidth and its operations over the float32 matmul
peak, both measured first; small contexts fit the processor's caches, so a figure may beat it. On a machine
with other work the figures are hints.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.bench.roofline import Machine, measure_machine
from pallas_kernels.native import find
from pallas_kernels.packed_matmul import MLPWeights, PackedWeight, pack4, packed_matmul, packed_mlp
from pallas_kernels.ragged_paged_attention import AttentionSpec, Rows, ragged_paged_attention

LAYERS, HEADS, KV_HEADS, HEAD_DIM, PAGE = 30, 9, 3, 64, 16
HIDDEN, INTERMEDIATE = 576, 1536
# (name, sequences, queries of each, tokens of each)
ATTENTION = (
    ("decode 1 x 300", 1, 1, 300),
    ("decode 32 x 300", 32, 1, 300),
    ("decode 1 x 2000", 1, 1, 2000),
    ("prefill 512", 1, 512, 512),
    ("prefill 2048", 1, 2048, 2048),
)
TOKENS = (1, 8, 32, 160, 512)


def best(call: Callable[[], Any], runs: int = 7) -> float:
    """Least seconds of a call that returns when its work is done."""
    call()
    seconds = []
    for _ in range(runs):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def attention_seconds(implementation: str, isa: str, case: tuple[str, int, int, int]) -> float:
    _, num_seqs, queries, context = case
    rng = np.random.default_rng(0)
    pages = -(-context // PAGE)
    shape = (LAYERS, 1 + num_seqs * pages, KV_HEADS, PAGE, 2 * HEAD_DIM)
    pool = jnp.asarray(rng.standard_normal(shape, np.float32))
    q, k, v = (
        jnp.asarray(rng.standard_normal((num_seqs * queries, heads, HEAD_DIM), np.float32))
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    table = 1 + rng.permutation(num_seqs * pages).reshape(num_seqs, pages)
    rows = Rows(
        jnp.full(num_seqs, context, jnp.int32),
        jnp.asarray(table, jnp.int32),
        jnp.arange(num_seqs + 1, dtype=jnp.int32) * queries,
    )
    spec = AttentionSpec(HEAD_DIM**-0.5, v_dim=HEAD_DIM, decode_only=queries == 1)

    def layers(pool: jax.Array, q: jax.Array) -> tuple[jax.Array, jax.Array]:
        def layer(i: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            out, pool = ragged_paged_attention(
                carry[0],
                k,
                v,
                carry[1],
                i,
                rows,
                spec=spec,
                platform="cpu",
                chip=isa,
                implementation=implementation,
            )
            return out, pool

        return jax.lax.fori_loop(0, LAYERS, layer, (q, pool))

    step = jax.jit(layers, donate_argnums=0)
    held = [pool]

    def call() -> None:
        out, held[0] = step(held[0], q)
        out.block_until_ready()

    return best(call)


def attention_floor(machine: Machine, case: tuple[str, int, int, int]) -> float:
    _, num_seqs, queries, context = case
    num_bytes = LAYERS * num_seqs * context * KV_HEADS * 2 * HEAD_DIM * 4
    seen = queries * (2 * context - queries + 1) // 2  # keys, all queries together
    flops = LAYERS * num_seqs * seen * HEADS * 2 * 2 * HEAD_DIM
    return max(num_bytes / machine.bandwidth, flops / machine.matmul)


def matmul_seconds(isa: str, tokens: int) -> tuple[float, float, int]:
    """Seconds of all packed weights of a model, of XLA's with float32 ones, and bytes of the packed."""
    rng = np.random.default_rng(0)
    shapes = [(960, HIDDEN), (HIDDEN, HIDDEN), *[(INTERMEDIATE, HIDDEN)] * 2, (HIDDEN, INTERMEDIATE)]

    def packed(out: int, size: int) -> PackedWeight:
        values = rng.integers(0, 16, (out, size)).astype(np.uint8)
        scales = rng.normal(size=(out, size // 32)).astype(np.float16)
        one = pack4(values, scales, scales)
        return PackedWeight(
            *(jnp.tile(jnp.asarray(a)[None], (LAYERS, 1, 1, 1)) for a in one if a is not None)
        )

    weights = [packed(*shape) for shape in shapes]
    floats = [jnp.asarray(rng.standard_normal((LAYERS, *shape), np.float32)) for shape in shapes]
    xs = [jnp.asarray(rng.standard_normal((tokens, HIDDEN), np.float32)) for _ in range(3)]

    # Each product feeds the next layer's through its first outputs, so that none can be left out.
    def native(xs: list[jax.Array]) -> list[jax.Array]:
        def layer(i: jax.Array, xs: list[jax.Array]) -> list[jax.Array]:
            qkv, out, mlp = xs
            [y] = packed_matmul(qkv, [weights[0]], [960], layer=i, chip=isa)
            [z] = packed_matmul(out, [weights[1]], [HIDDEN], layer=i, chip=isa)
            of_mlp = packed_mlp(mlp, MLPWeights(*weights[2:]), HIDDEN, "silu", layer=i, chip=isa)
            return [x + 1e-6 * y[:, :1] for x, y in zip(xs, (y, z, of_mlp), strict=True)]

        return jax.lax.fori_loop(0, LAYERS, layer, xs)

    def plain(xs: list[jax.Array]) -> list[jax.Array]:
        for i in range(LAYERS):
            qkv, out, mlp = xs
            ys = [(w[i] @ x.T).T for w, x in zip(floats[:4], (qkv, out, mlp, mlp), strict=True)]
            ys[2:] = [(floats[4][i] @ (jax.nn.silu(ys[2]) * ys[3]).T).T]
            xs = [x + 1e-6 * y[:, :1] for x, y in zip(xs, ys, strict=True)]
        return xs

    def seconds_of(fn: Callable[[list[jax.Array]], list[jax.Array]]) -> float:
        run = jax.jit(fn)
        return best(lambda: jax.block_until_ready(run(xs)))

    seconds = [seconds_of(fn) for fn in (native, plain)]
    return seconds[0], seconds[1], sum(a.nbytes for w in weights for a in w if a is not None)


def main(what: list[str]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        start = time.perf_counter()
        isa, reason = find(Path(directory))
        print(f"{reason}, built in {time.perf_counter() - start:.1f} s")
    if isa is None:
        raise SystemExit(1)
    machine = measure_machine(seconds=0.5)
    print(
        f"{machine.threads} threads, {machine.bandwidth / 1e9:.1f} GB/s, {machine.matmul / 1e9:.0f} GFLOP/s"
    )
    if "attention" in what:
        print(f"{'ms':24}{'cpu':>10}{'xla':>10}{'floor':>10}")
        for case in ATTENTION:
            seconds = [attention_seconds(name, isa, case) for name in ("cpu", "xla")]
            seconds.append(attention_floor(machine, case))
            print(f"{case[0]:24}" + "".join(f"{1e3 * s:10.2f}" for s in seconds), flush=True)
    if "matmul" in what:
        print(f"{'ms':24}{'packed':>10}{'float32':>10}{'bytes/bw':>10}")
        for tokens in TOKENS:
            native, plain, num_bytes = matmul_seconds(isa, tokens)
            figures = (native, plain, num_bytes / machine.bandwidth)
            print(f"{tokens:4} tokens".ljust(24) + "".join(f"{1e3 * s:10.2f}" for s in figures), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="*", help="attention, matmul; both by default")
    main(parser.parse_args().what or ["attention", "matmul"])
