"""`jaxserve bench serve`: the fixed trace against any OpenAI-compatible server.

Closed loop (`--concurrency`): so many requests are always open. Open loop (`--request-rate`): requests arrive
as a Poisson process and nobody waits, which is what shows a server's latency under load.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from functools import partial
from pathlib import Path

import aiohttp
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from jaxserve.bench.client import Target, base_url, new_session, send, served_models
from jaxserve.bench.load import arrival_times, closed_loop, open_loop
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


def new_console() -> Console:
    """Standard output, wide enough for every column where it is not a terminal."""
    return Console(width=None if sys.stdout.isatty() else 160)


def progress_bar() -> Progress:
    """One line a level on stderr, gone when it ends."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


async def _model_name(args: argparse.Namespace, session: aiohttp.ClientSession, url: str) -> str:
    """The model that was named, else the first that is served. Raises aiohttp.ClientError or LookupError."""
    if args.model:
        return args.model
    models = await served_models(session, url)
    if not models:
        raise LookupError(f"{url} lists no model: name one with --model")
    return models[0]


async def _run(args: argparse.Namespace, trace: list[TraceItem], bar: Progress) -> tuple[Target, list[Level]]:
    url = base_url(args.url)
    levels: list[Level] = []
    async with new_session(args.api_key) as session:
        target = Target(url, await _model_name(args, session, url), args.chat, not args.respect_eos)
        request = partial(send, session, target)
        for rate in args.request_rate or ():
            label = f"{rate:g} req/s"
            times = arrival_times(len(trace), rate, args.seed)
            done = partial(bar.advance, bar.add_task(label, total=len(trace)))
            records, wall = await open_loop(request, trace, times, done)
            levels.append((Summary.of(label, records, wall, args.goodput), records))
        for concurrency in () if args.request_rate else args.concurrency:
            label, items = f"{concurrency} at once", items_for(trace, concurrency)
            done = partial(bar.advance, bar.add_task(label, total=len(items)))
            records, wall = await closed_loop(request, items, concurrency, done)
            levels.append((Summary.of(label, records, wall, args.goodput), records))
    return target, levels


def report(args: argparse.Namespace, title: str, settings: dict[str, object], levels: list[Level]) -> int:
    """Print the table, write the files that were asked for. Returns 1 when a request failed."""
    new_console().print(summary_table([summary for summary, _ in levels], title))
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
        with progress_bar() as bar:
            target, levels = asyncio.run(_run(args, trace, bar))
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
