"""`jaxserve bench offline`: the fixed trace on the engine itself, beside what the machine could do at best.

One request at a time is held against the least time per token, many at once against the least time for all
of them (see `roofline`). The machine is measured first, in the same process.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

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
from jaxserve.engine import LLMEngine
from jaxserve.engine_args import DEFAULT_MODEL, EngineArgs
from jaxserve.errors import JaxserveError
from jaxserve.loading import load_engine
from jaxserve.profiling import how_to_open
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
                record.cached_tokens = output.num_cached_tokens or 0
                record.output_tokens = choice.num_tokens
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
    machine: Machine, cost: ModelCost, levels: Sequence[Level], concurrency: Sequence[int]
) -> Table:
    """Each level's fraction of the bound that is named beside it."""
    table = Table(title="roofline", title_justify="left")
    for name in ("load", "measured", "bound", "by", "fraction"):
        table.add_column(name, justify="right")
    for count, (summary, records) in zip(concurrency, levels, strict=True):
        done = [record for record in records if record.error is None]
        if not done:
            continue
        if count == 1:
            context = statistics.mean(r.prompt_tokens + r.output_tokens / 2 for r in done)
            measured, bound = summary.tpot_p50 / 1e3, cost.decode_floor(machine, context)
            what, by = "ms a token", f"reading weights and {context:.0f} positions"
        else:
            arithmetic = cost.arithmetic_floor(machine, done)
            measured, bound = summary.wall, max(arithmetic, cost.memory_floor(machine, done, count))
            what, by = "ms in all", "arithmetic" if bound == arithmetic else "reading weights and positions"
        figures = (f"{measured * 1e3:.1f} {what}", f"{bound * 1e3:.1f} ms", by, f"{bound / measured:.0%}")
        table.add_row(summary.label, *figures)
    return table


def describe(machine: Machine, cost: ModelCost) -> str:
    """The measured machine and the model's cost, in two lines."""
    giga = 1e9
    int8 = machine.matmul * cost.peak_ratio / giga
    return (
        f"{machine.platform}, {machine.threads} threads: reads {machine.read / giga:.1f} GB/s "
        f"(one thread {machine.read_one_thread / giga:.1f}), copies {machine.copy / giga:.1f} GB/s "
        f"(one thread {machine.copy_one_thread / giga:.1f}), "
        f"float32 matmul {machine.matmul / giga:.0f} GFLOP/s"
        + (f", so {int8:.0f} with 8-bit integers" if cost.peak_ratio != 1 else "")
        + f"\nmodel: {cost.weight_bytes / 1e6:.0f} MB of weights a step, {cost.kv_bytes / 1e3:.1f} kB of keys"
        f" and values a position, {cost.flops_per_token / 1e6:.0f} MFLOP a token"
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
    args: argparse.Namespace, loaded: LLMEngine, trace: Sequence[TraceItem]
) -> tuple[list[Level], int]:
    """The levels, and how many programs were compiled while they ran (0 is right)."""
    engine = AsyncLLMEngine(loaded)
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
    # A level runs prompts of the one before it: a cache would find them.
    given.setdefault("enable_prefix_caching", args.shared_prefix > 0)
    # Everything is compiled before the first request: the figures are of a warm engine.
    engine_args = EngineArgs(model=args.model, warmup="full", **given)
    machine = measure_machine()
    engine = load_engine(engine_args)
    cost = ModelCost.of_engine(engine, resolve_model(args.model))
    trace = make_trace(args.n, args.seed, shared_prefix=args.shared_prefix)
    levels, compilations = asyncio.run(_run(args, engine, trace))
    settings = {
        "model": args.model,
        "n": args.n,
        "seed": args.seed,
        "shared_prefix": args.shared_prefix,
        "engine": given,
        "jax": jax.__version__,
        "machine": asdict(machine),
        "cost": asdict(cost),
        "compilations": compilations,
    }
    code = report(args, f"{args.model}, engine alone, jax {jax.__version__}", settings, levels)
    console = new_console()
    console.print(roofline_table(machine, cost, levels, args.concurrency))
    console.print(describe(machine, cost), highlight=False, soft_wrap=True)
    if engine_args.profile:
        console.print(how_to_open(Path(engine_args.profile)), highlight=False, soft_wrap=True)
    if compilations:
        console.print(f"{compilations} programs were compiled during the run: the figures include that time")
    return code
