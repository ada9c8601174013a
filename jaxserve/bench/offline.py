"""`jaxserve bench offline`: the fixed trace on the engine itself, beside what the machine could do at best.

One request at a time is held against the floor of its time per token, many at once against the ceiling of
the token rate (see `roofline`). The machine is measured first, in the same process.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial

import jax
from rich.progress import Progress
from rich.table import Table

from jaxserve.async_engine import AsyncLLMEngine
from jaxserve.bench.load import Send, closed_loop
from jaxserve.bench.measure import Level, RequestRecord, Summary, missing_plot_library
from jaxserve.bench.roofline import Machine, ModelCost, measure_machine
from jaxserve.bench.serve import add_trace_arguments, new_console, progress_bar, report
from jaxserve.bench.trace import TraceItem, items_for, make_trace
from jaxserve.cli.options import options_of
from jaxserve.engine_args import DEFAULT_MODEL, EngineArgs
from jaxserve.errors import JaxserveError
from jaxserve.sampling_params import SamplingParams
from jaxserve_checkpoints import resolve_model


def sender(engine: AsyncLLMEngine) -> Send:
    """What runs one request of the trace on the engine and records it as a client would."""
    numbers = itertools.count()

    async def send(item: TraceItem) -> RequestRecord:
        params = SamplingParams(temperature=0.0, max_tokens=item.max_tokens, ignore_eos=True)
        record = RequestRecord(wanted_tokens=item.max_tokens)
        start = time.perf_counter()
        length = 0
        try:
            async for output in engine.generate(item.prompt, params, f"bench-{next(numbers)}"):
                choice = output.outputs[0]
                if len(choice.text) > length:
                    length = len(choice.text)
                    record.arrivals.append(time.perf_counter() - start)
                record.prompt_tokens = len(output.prompt_token_ids)
                record.output_tokens = len(choice.token_ids)
        except JaxserveError as error:
            record.error = f"{type(error).__name__}: {error}"
        record.latency = time.perf_counter() - start
        return record

    return send


async def run_levels(
    send: Send, trace: Sequence[TraceItem], args: argparse.Namespace, bar: Progress
) -> list[Level]:
    """Every concurrency level in turn. `args` are those of `add_trace_arguments`."""
    levels: list[Level] = []
    for concurrency in args.concurrency:
        label, items = f"{concurrency} at once", items_for(list(trace), concurrency)
        done = partial(bar.advance, bar.add_task(label, total=len(items)))
        records, wall = await closed_loop(send, items, concurrency, done)
        levels.append((Summary.of(label, records, wall, args.goodput), records))
    return levels


def roofline_table(
    machine: Machine,
    cost: ModelCost,
    bytes_per_weight: int,
    levels: Sequence[Level],
    concurrency: Sequence[int],
) -> Table:
    """Each level's fraction: of the floor for one request at a time, of the ceiling for many."""
    floor = cost.decode_floor(machine, bytes_per_weight)
    ceiling = cost.token_rate_ceiling(machine)
    table = Table(title="roofline", title_justify="left")
    for name in ("load", "measured", "bound", "fraction"):
        table.add_column(name, justify="right")
    for count, (summary, _) in zip(concurrency, levels, strict=True):
        if count == 1:
            measured, bound = (
                f"{summary.tpot_p50:.1f} ms a token",
                f"{floor * 1e3:.1f} ms (weights read once)",
            )
            fraction = floor * 1e3 / summary.tpot_p50
        else:
            measured, bound = f"{summary.total_rate:.1f} tok/s", f"{ceiling:.0f} tok/s (matmul peak)"
            fraction = summary.total_rate / ceiling
        table.add_row(summary.label, measured, bound, f"{fraction:.0%}")
    return table


def describe(machine: Machine, cost: ModelCost, bytes_per_weight: int) -> str:
    """The measured machine and the model's cost, in two lines."""
    giga = 1e9
    return (
        f"{machine.platform}, {machine.threads} threads: reads {machine.read / giga:.1f} GB/s "
        f"(one thread {machine.read_one_thread / giga:.1f}), copies {machine.copy / giga:.1f} GB/s "
        f"(one thread {machine.copy_one_thread / giga:.1f}), "
        f"float32 matmul {machine.matmul / giga:.0f} GFLOP/s\n"
        f"model: {cost.weights * bytes_per_weight / 1e6:.0f} MB of weights a step, "
        f"{cost.flops_per_token / 1e6:.0f} MFLOP a token"
    )


def build_parser() -> tuple[argparse.ArgumentParser, set[str]]:
    """The parser, and which of its values are fields of EngineArgs. Only flags count, not the environment."""
    parser = argparse.ArgumentParser(
        prog="jaxserve bench offline", description=(__doc__ or "").splitlines()[0], allow_abbrev=False
    )
    parser.add_argument(
        "model", nargs="?", default=DEFAULT_MODEL, metavar="MODEL", help=f"default: {DEFAULT_MODEL}"
    )
    add_trace_arguments(parser)
    group = parser.add_argument_group("engine")
    options = options_of(EngineArgs, skip={"model", "seed", "warmup"})
    for option in options:
        option.add_to(group)
    return parser, {option.name for option in options}


async def _run(
    args: argparse.Namespace, engine_args: EngineArgs, trace: Sequence[TraceItem]
) -> tuple[list[Level], int]:
    """The levels, and how many programs were compiled while they ran (0 is right)."""
    engine = AsyncLLMEngine.from_engine_args(engine_args)
    try:
        before = engine.stats().num_compilations
        with progress_bar() as bar:
            levels = await run_levels(sender(engine), trace, args, bar)
        return levels, engine.stats().num_compilations - before
    finally:
        engine.shutdown()


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark. Returns 0, or 1 when a request failed. Raises what loading the model raises."""
    parser, engine_fields = build_parser()
    args = parser.parse_args(argv)
    if args.plot and (problem := missing_plot_library()):
        print(f"jaxserve: error: {problem}", file=sys.stderr)
        return 1
    given = {name: value for name, value in vars(args).items() if name in engine_fields}
    cost = ModelCost.of_checkpoint(resolve_model(args.model))
    machine = measure_machine()
    # Everything is compiled before the first request: the figures are of a warm engine.
    engine_args = EngineArgs(model=args.model, warmup="full", **given)
    expanded = "float32" if engine_args.dtype == "auto" and machine.platform == "cpu" else engine_args.dtype
    bytes_per_weight = 4 if expanded == "float32" else 2
    trace = make_trace(args.n, args.seed, shared_prefix=args.shared_prefix)
    levels, compilations = asyncio.run(_run(args, engine_args, trace))
    settings = {
        "model": args.model,
        "n": args.n,
        "seed": args.seed,
        "shared_prefix": args.shared_prefix,
        "engine": given,
        "jax": jax.__version__,
        "machine": asdict(machine),
        "compilations": compilations,
    }
    code = report(args, f"{args.model}, engine alone, jax {jax.__version__}", settings, levels)
    console = new_console()
    console.print(roofline_table(machine, cost, bytes_per_weight, levels, args.concurrency))
    console.print(describe(machine, cost, bytes_per_weight), highlight=False)
    if compilations:
        console.print(f"{compilations} programs were compiled during the run: the figures include that time")
    return code
