"""Compile every kernel for every real shape, for chips that need not be there, and print what came out.

    python benchmarks/aot_kernels.py [--chips v5e v6e tpu7x h200] [--only NAME ...] [--bundles] [--json FILE]

Needs the compilers (pip install '.[aot]'). Exits with 1 when a shape does not compile, when a pool is
copied or not shared whole, or when a kernel spills more than its prologue. --bundles adds the instruction
bundles of each TPU kernel, from the compiler's dumps (half a gigabyte a program, deleted at once; slow).
"""

from __future__ import annotations

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["MOSAIC_GPU_DUMP_PTXAS"] = "1"

import argparse
import json
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.plan.hlo import is_pool_aliased, pool_copies
from pallas_kernels.aot import abstract_devices
from pallas_kernels.chips import chip_by_name
from pallas_kernels.grouped_matmul import grouped_matmul
from pallas_kernels.grouped_matmul.cases import MODEL_SHAPES
from pallas_kernels.quantized_matmul import QuantizedWeight, quantized_matmul
from pallas_kernels.quantized_matmul.cases import REAL_CASES as QUANTIZED
from pallas_kernels.quantized_matmul.weight import out_is_last
from pallas_kernels.ragged_paged_attention.cases import REAL_CASES as ATTENTION
from pallas_kernels.ragged_paged_attention.problem import abstract_inputs, make_call

_MOST_SPILLED = 16  # bytes: three registers before a loop are no loss


@dataclass(frozen=True)
class Program:
    """Something to compile; `pool` is the index of an argument that is donated."""

    name: str
    call: Callable[..., Any]
    avals: list[Any]
    pool: int | None = None


@dataclass(frozen=True)
class Outcome:
    chip: str
    name: str
    seconds: float
    error: str = ""
    code_bytes: int = 0
    temp_bytes: int = 0
    pool_copies: int = 0
    pool_aliased: bool = True
    registers: tuple[int, ...] = ()
    spilled_bytes: int = 0
    shared_memory: int = 0
    bundles: tuple[tuple[str, int], ...] = ()

    @property
    def verdict(self) -> str:
        if self.error:
            return self.error
        faults = []
        if self.pool_copies:
            faults.append(f"{self.pool_copies} copies of the pool")
        if not self.pool_aliased:
            faults.append("the pool is not shared")
        if self.spilled_bytes > _MOST_SPILLED:
            faults.append(f"{self.spilled_bytes} bytes spilled")
        return ", ".join(faults) or "ok"


def programs(chip: str, sharding: Any) -> Iterator[Program]:
    platform = chip_by_name(chip).platform
    options = {"platform": platform, "chip": chip, "implementation": "auto"}

    def aval(dtype: Any, *shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    for case in ATTENTION:
        call = make_call(case, decode_only=case.is_decode, **options)
        yield Program(f"attention {case.name}", call, abstract_inputs(case, platform, sharding), pool=3)
    for quantized in QUANTIZED:
        size = quantized.group_size or quantized.in_features
        groups, out = quantized.in_features // size, quantized.out_features
        kind = jnp.int4 if quantized.bits == 4 else jnp.int8
        values = aval(kind, *((groups, size, out) if out_is_last(platform) else (groups, out, size)))
        weight = QuantizedWeight(values, aval(jnp.bfloat16, groups, out), None)
        x = aval(jnp.bfloat16, quantized.num_tokens, quantized.in_features)
        yield Program(f"quantized {quantized.name}", partial(quantized_matmul, **options), [x, weight])
    for shape in MODEL_SHAPES:
        for tokens in (32, 512):
            rows = tokens * shape.experts_per_token
            avals = [
                aval(jnp.bfloat16, rows, shape.in_features),
                aval(jnp.bfloat16, shape.num_experts, shape.in_features, shape.out_features),
                aval(jnp.int32, shape.num_experts),
            ]
            call = partial(grouped_matmul, **options)
            yield Program(f"grouped {shape.name}, {tokens} tokens", call, avals)


@contextmanager
def _output() -> Iterator[Callable[[], str]]:
    """What the process, compilers included, writes meanwhile: to standard output and error."""
    sys.stdout.flush()
    with tempfile.TemporaryFile() as file:
        kept = [os.dup(1), os.dup(2)]
        for number in (1, 2):
            os.dup2(file.fileno(), number)
        try:
            yield lambda: (file.seek(0), file.read().decode(errors="replace"))[1]
        finally:
            for number, old in zip((1, 2), kept, strict=True):
                os.dup2(old, number)
                os.close(old)


def compile_one(chip: str, program: Program, mesh: Mesh, dumps: Path | None) -> Outcome:
    started = time.perf_counter()
    donated = () if program.pool is None else (program.pool,)
    with _output() as printed, jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        try:
            jitted = jax.jit(program.call, donate_argnums=donated)
            compiled = jitted.trace(*program.avals).lower().compile()
        except Exception as error:  # a compiler's, of many kinds: the table goes on
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            return Outcome(chip, program.name, time.perf_counter() - started, error=reason)
        text = printed()
    seconds, memory = time.perf_counter() - started, compiled.memory_analysis()
    copies, aliased = 0, True
    if program.pool is not None:
        hlo, dims = compiled.as_text(), program.avals[program.pool].shape
        copies, aliased = len(pool_copies(hlo, dims)), is_pool_aliased(hlo, dims)
    return Outcome(
        chip,
        program.name,
        seconds,
        code_bytes=memory.generated_code_size_in_bytes,
        temp_bytes=memory.temp_size_in_bytes,
        pool_copies=copies,
        pool_aliased=aliased,
        registers=tuple(int(n) for n in re.findall(r"Used (\d+) registers", text)),
        spilled_bytes=max((int(n) for n in re.findall(r"(\d+) bytes spill stores", text)), default=0),
        shared_memory=max((int(n) for n in re.findall(r"(\d+) bytes smem", text)), default=0),
        bundles=_bundles(dumps),
    )


def _bundles(dumps: Path | None) -> tuple[tuple[str, int], ...]:
    """(kernel, instruction bundles) of the last program, and away with its dumps."""
    if dumps is None:
        return ()
    found = {}
    for path in dumps.iterdir():
        match = re.match(r"\d+-(\w+)\.\d+-\d+-schedule-analysis_final_bundles", path.name)
        if match and 'custom_call_target="tpu_custom_call"' in (text := path.read_text()):
            count = re.search(r"total scheduled bundles: +(\d+)", text)
            found[match[1]] = int(count[1]) if count else 0
        path.unlink()
    return tuple(sorted(found.items()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--chips", nargs="*", default=["v5e", "v6e", "tpu7x", "h200"])
    parser.add_argument("--only", nargs="*", default=[], help="programs whose name contains one of these")
    parser.add_argument("--bundles", action="store_true", help="count the instruction bundles of TPU kernels")
    parser.add_argument("--json", help="write the table to this file too")
    args = parser.parse_args()
    dumps = None
    if args.bundles:  # libtpu reads this when it is loaded, which is later
        dumps = Path(tempfile.mkdtemp())
        os.environ["LIBTPU_INIT_ARGS"] = f"--xla_jf_dump_to={dumps}"
    outcomes = []
    print(
        f"jax {jax.__version__}\n| chip | program | s | code kB | temp MB | registers or bundles | verdict |"
    )
    print("|---|---|---:|---:|---:|---|---|")
    for chip in args.chips:
        mesh = Mesh(np.array(abstract_devices(chip)[:1]), ("x",))
        for program in programs(chip, NamedSharding(mesh, PartitionSpec())):
            if args.only and not any(name in program.name for name in args.only):
                continue
            o = compile_one(chip, program, mesh, dumps)
            outcomes.append(o)
            registers = "/".join(map(str, o.registers)) or ", ".join(f"{k} {n}" for k, n in o.bundles)
            print(
                f"| {chip} | {o.name} | {o.seconds:.1f} | {o.code_bytes / 1e3:.0f} "
                f"| {o.temp_bytes / 1e6:.1f} | {registers} | {o.verdict} |",
                flush=True,
            )
    bad = [o for o in outcomes if o.verdict != "ok"]
    print(f"\n{len(outcomes)} compiled, {len(bad)} not as they should be")
    if args.json:
        Path(args.json).write_text(json.dumps([asdict(o) for o in outcomes], indent=1))
    return 1 if bad or not outcomes else 0


if __name__ == "__main__":
    sys.exit(main())
