"""`jaxserve bench serve`: the fixed trace against any OpenAI-compatible server.

Closed loop (`--concurrency`): so many requests are always open. Open loop (`--request-rate`): requests arrive
as a Poisson process and nobody waits, which is what shows a server's latency under load.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from pathlib import Path

import aiohttp
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from jaxserve.bench.client import (
    Target,
    arrival_times,
    base_url,
    closed_loop,
    new_session,
    open_loop,
    served_models,
)
from jaxserve.bench.measure import (
    Goodput,
    Level,
    Summary,
    missing_plot_library,
    summary_table,
    write_json,
    write_plot,
)
from jaxserve.bench.trace import TraceItem, items_for, make_trace


def int_list(text: str) -> list[int]:
    """`1,8,32`; each at least 1."""
    values = [int(part) for part in text.split(",")]
    if min(values) < 1:
        raise argparse.ArgumentTypeError(f"{text}: each must be at least 1")
    return values


def _rate_list(text: str) -> list[float]:
    values = [float(part) for part in text.split(",")]
    if min(values) <= 0:
        raise argparse.ArgumentTypeError(f"{text}: each must be above 0")
    return values


def _goodput(text: str) -> Goodput:
    try:
        return Goodput.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def add_trace_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of both `serve` and `offline`: the trace, the levels, what becomes of the figures."""
    parser.add_argument("--concurrency", type=int_list, default=[1, 8, 32], metavar="N,N", help="1,8,32")
    parser.add_argument(
        "--n", type=int, default=48, help="requests in the trace; one at a time runs an eighth (48)"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the trace (0)")
    parser.add_argument(
        "--shared-prefix", type=int, default=0, metavar="WORDS", help="words that begin every prompt"
    )
    parser.add_argument(
        "--goodput", type=_goodput, metavar="LIMITS", help="ttft:MS,tpot:MS,e2e:MS to count as good"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write settings, figures and every request")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the latencies (needs matplotlib)")


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="jaxserve bench serve", description=__doc__.splitlines()[0] if __doc__ else ""
    )
    parser.add_argument("--url", required=True, help="the server, for example http://localhost:8000")
    parser.add_argument("--model", help="name in the requests (default: the first the server lists)")
    parser.add_argument(
        "--api-key", default=os.environ.get("OPENAI_API_KEY"), help="default: $OPENAI_API_KEY"
    )
    parser.add_argument("--chat", action="store_true", help="chat completions instead of completions")
    parser.add_argument(
        "--respect-eos", action="store_true", help="do not send ignore_eos, which some servers refuse"
    )
    parser.add_argument(
        "--request-rate",
        type=_rate_list,
        metavar="R,R",
        help="open loop: requests per second, instead of --concurrency",
    )
    add_trace_arguments(parser)
    return parser


def progress_bar(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True)


async def _target(args: argparse.Namespace) -> Target:
    """The target, its model looked up when none was named. Raises aiohttp.ClientError or LookupError."""
    url = base_url(args.url)
    target = Target(url, args.model or "", args.chat, not args.respect_eos, args.api_key)
    if args.model:
        return target
    async with new_session(target) as session:
        models = await served_models(session, url)
    if not models:
        raise LookupError(f"{url} lists no model: name one with --model")
    return Target(url, models[0], args.chat, not args.respect_eos, args.api_key)


async def _run(
    args: argparse.Namespace, trace: list[TraceItem], console: Console
) -> tuple[Target, list[Level]]:
    target = await _target(args)
    levels: list[Level] = []
    with progress_bar(console) as bar:
        for load in args.request_rate or args.concurrency:
            items = trace if args.request_rate else items_for(trace, load)
            label = f"{load:g} req/s" if args.request_rate else f"{load} at once"
            task = bar.add_task(label, total=len(items))

            def done(task=task) -> None:
                bar.advance(task)

            if args.request_rate:
                records, wall = await open_loop(
                    target, items, arrival_times(len(items), load, args.seed), done
                )
            else:
                records, wall = await closed_loop(target, items, load, done)
            levels.append((Summary.of(label, records, wall, args.goodput), records))
    return target, levels


def report(args: argparse.Namespace, title: str, settings: dict[str, object], levels: list[Level]) -> int:
    """Print the table, write the files that were asked for. Returns 1 when a request failed."""
    Console(width=None if sys.stdout.isatty() else 160).print(summary_table([s for s, _ in levels], title))
    if args.json:
        write_json(args.json, settings, levels)
    if args.plot:
        write_plot(args.plot, levels)
    errors = [r.error for _, records in levels for r in records if r.error is not None]
    if errors:
        print(f"jaxserve: error: {len(errors)} requests failed, the first with: {errors[0]}", file=sys.stderr)
    return 1 if errors else 0


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark. Returns 0, or 1 when a request failed or the server cannot be reached."""
    args = build_parser().parse_args(argv)
    if args.plot and (problem := missing_plot_library()):
        print(f"jaxserve: error: {problem}", file=sys.stderr)
        return 1
    trace = make_trace(args.n, args.seed, shared_prefix=args.shared_prefix)
    try:
        target, levels = asyncio.run(_run(args, trace, Console(stderr=True)))
    except (aiohttp.ClientError, LookupError) as error:
        print(f"jaxserve: error: {error}", file=sys.stderr)
        return 1
    settings = {
        "url": target.url,
        "model": target.model,
        "chat": target.chat,
        "n": args.n,
        "seed": args.seed,
        "shared_prefix": args.shared_prefix,
        "open_loop": bool(args.request_rate),
    }
    return report(args, f"{target.model} at {target.url}", settings, levels)
