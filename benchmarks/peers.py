"""jaxserve beside its peers in one run: a table of ratios, memory and starts.

Each repeat runs every system in turn, alone on the machine: it is started, measured and stopped before the
next one starts. Ours is `jaxserve serve`, a process of its own, driven over HTTP; OpenVINO GenAI and
transformers run inside their process, without HTTP. All are greedy, ignore the end of sequence and get the
same prompts and lengths; tokens are counted here, and a difference is an error.

Cases:
  trace   the fixed trace of `jaxserve bench serve` (24 to 384 words, 16 to 128 tokens out), no prefix cache
  long    prompts of about 2,000 tokens, 32 to 64 out, no prefix cache
  prefix  500 shared words and 8 to 64 own ones, 16 to 64 tokens out; prefix cache on in every system
Beside them: seconds from a process's start to its first token, with an empty cache of compiled programs and
with a full one, and resident memory.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from contestants import PEERS, Contestant, Level, Session, jaxserve, peer

from jaxserve.bench.measure import Summary
from jaxserve.bench.serve import int_list
from jaxserve.bench.trace import items_for, make_trace
from jaxserve.engine_args import DEFAULT_MODEL
from jaxserve_checkpoints import resolve_model

CASES = ("trace", "long", "prefix")
EXAMPLES = """\
examples:
  python benchmarks/peers.py                                   OpenVINO GenAI, all cases, three repeats
  python benchmarks/peers.py --case trace --concurrency 8 --repeats 1
  python benchmarks/peers.py --peer openvino --peer transformers --json table.json
  python benchmarks/peers.py --peer llama.cpp --binary build/bin/llama-server
  TORCH=torch==2.13.0+cpu python benchmarks/peers.py --peer transformers     a build without CUDA
  python benchmarks/peers.py --serve-args "--quantization none" --peer openvino-f32"""


def levels_of(case: str, concurrency: int, n: int, seed: int) -> Level:
    """A case's requests. One at a time runs a part of the others', but where a cache would know them."""
    if case == "trace":
        trace = make_trace(n, seed)
    elif case == "long":
        trace = make_trace(max(1, n // 3), seed, words=(1980, 2000), tokens=(32, 64))
    else:  # another prefix at each level: none finds the last one's
        trace = make_trace(
            n, 1000 * (seed + 1) + concurrency, words=(8, 64), tokens=(16, 64), shared_prefix=500
        )
    return Level(f"{case} {concurrency}", concurrency, items_for(trace, concurrency))


@dataclass
class Figures:
    """What one system did over all repeats, by level or by kind of start."""

    name: str
    summaries: dict[str, list[Summary]] = field(default_factory=dict)
    tokens: dict[str, tuple[int, int]] = field(default_factory=dict)  # prompt, output: the same each time
    starts: dict[str, list[float]] = field(default_factory=dict)  # seconds
    rss_loaded: list[int] = field(default_factory=list)  # of starts as users make them
    rss_peak: list[int] = field(default_factory=list)  # after all levels of a session

    def add(self, session: Session) -> None:
        """Raises RuntimeError for a failed request or another number of tokens than before."""
        self.rss_peak.append(session.rss_peak)
        for name, (records, wall) in session.levels.items():
            summary = Summary.of(name, records, wall)
            if summary.failed or summary.short:
                errors = [record.error for record in records if record.error]
                raise RuntimeError(
                    f"{self.name}, {name}: {summary.failed} failed, {summary.short} short {errors[:1]}"
                )
            counts = sum(r.prompt_tokens for r in records), sum(r.output_tokens for r in records)
            if self.tokens.setdefault(name, counts) != counts:
                raise RuntimeError(f"{self.name}, {name}: {counts} tokens after {self.tokens[name]}")
            self.summaries.setdefault(name, []).append(summary)

    def median(self, level: str, what: str) -> float:
        return statistics.median(getattr(summary, what) for summary in self.summaries[level])


def say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}, load {os.getloadavg()[0]:.1f}] {text}", file=sys.stderr, flush=True)


def sessions(args: argparse.Namespace) -> Iterator[tuple[list[Level], bool]]:
    """The levels of each process, and whether its prefix cache is on."""
    for prefix in (False, True):
        levels = [
            levels_of(case, concurrency, args.n, args.seed)
            for case in args.case
            for concurrency in args.concurrency
            if (case == "prefix") == prefix and not (case == "long" and concurrency > 8)
        ]
        if levels:
            yield levels, prefix


def measure(args: argparse.Namespace, contestants: Sequence[Contestant]) -> list[Figures]:
    figures = [Figures(contestant.name) for contestant in contestants]
    with tempfile.TemporaryDirectory() as folder:
        for repeat in range(1, args.repeats + 1):
            for contestant, mine in zip(contestants, figures, strict=True):
                if not args.no_starts:
                    cache = Path(folder) / f"{contestant.name}-{repeat}"
                    cache.mkdir()
                    for kind in ("cold", "warm"):
                        session = contestant.run([], prefix_caching=True, cache=cache, lazy=True)
                        mine.starts.setdefault(kind, []).append(session.first_token)
                        say(f"{repeat}: {contestant.name}, {kind} start: {session.first_token:.1f} s")
                    mine.rss_loaded.append(session.rss_loaded)
                cache = Path(folder) / contestant.name  # programs for measuring are compiled once
                cache.mkdir(exist_ok=True)
                for levels, prefix_caching in sessions(args):
                    session = contestant.run(levels, prefix_caching=prefix_caching, cache=cache, lazy=False)
                    mine.add(session)
                    for level in levels:
                        rate = mine.summaries[level.name][-1].output_rate
                        say(f"{repeat}: {contestant.name}, {level.name} at once: {rate:.1f} output tok/s")
    return figures


def check_tokens(figures: Sequence[Figures]) -> None:
    """Raises RuntimeError unless all systems read and made the same number of tokens."""
    for level, counts in figures[0].tokens.items():
        for other in figures[1:]:
            if other.tokens[level] != counts:
                raise RuntimeError(
                    f"{level}: {figures[0].name} counts {counts} tokens, {other.name} {other.tokens[level]}"
                )


def table(figures: Sequence[Figures]) -> str:
    """Markdown: medians over the repeats; ratios are ours over theirs, with the extremes of one repeat."""
    ours, others = figures[0], figures[1:]
    head = ["case, at once", "tokens in / out", f"{ours.name} tok/s"]
    head += [text for other in others for text in (f"{other.name} tok/s", "ratio (least to most)")]
    head += [f"{each.name} TTFT / TPOT p50 ms" for each in figures]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for level, (tokens_in, tokens_out) in ours.tokens.items():
        rate = ours.median(level, "output_rate")
        row = [level, f"{tokens_in} / {tokens_out}", f"{rate:.1f}"]
        for other in others:
            theirs = other.median(level, "output_rate")
            pairs = [
                a.output_rate / b.output_rate
                for a, b in zip(ours.summaries[level], other.summaries[level], strict=True)
            ]
            row += [f"{theirs:.1f}", f"{rate / theirs:.2f} ({min(pairs):.2f} to {max(pairs):.2f})"]
        row += [
            f"{each.median(level, 'ttft_p50'):.0f} / {each.median(level, 'tpot_p50'):.1f}" for each in figures
        ]
        lines.append("| " + " | ".join(row) + " |")
    rows = [("peak memory while measured, MB", [statistics.median(each.rss_peak) / 1e6 for each in figures])]
    if ours.starts:
        rows = [
            ("first token, cold, s", [statistics.median(each.starts["cold"]) for each in figures]),
            ("first token, warm, s", [statistics.median(each.starts["warm"]) for each in figures]),
            ("memory after a start, MB", [statistics.median(each.rss_loaded) / 1e6 for each in figures]),
            *rows,
        ]
    lines += [
        "",
        "| | " + " | ".join(each.name for each in figures) + " |",
        "|" + "---|" * (len(figures) + 1),
    ]
    lines += [f"| {name} | " + " | ".join(f"{x:,.1f}" for x in values) + " |" for name, values in rows]
    return "\n".join(lines)


def as_json(args: argparse.Namespace, figures: Sequence[Figures]) -> dict[str, Any]:
    versions = {name: importlib.metadata.version(name) for name in ("jaxserve", "jax", "jaxlib")}
    levels = [
        {"system": each.name, "level": level, "tokens": each.tokens[level], "repeat": number}
        | {name: None if value != value else value for name, value in vars_of(summary).items()}
        for each in figures
        for level, summaries in each.summaries.items()
        for number, summary in enumerate(summaries, 1)
    ]
    return {
        "settings": {"model": args.model, "n": args.n, "seed": args.seed, "serve_args": args.serve_args},
        "machine": {
            "processor": platform.machine(),
            "cpus": os.cpu_count(),
            "python": sys.version.split()[0],
        },
        "versions": versions,
        "levels": levels,
        "starts": {each.name: each.starts for each in figures},
        "rss": {each.name: {"loaded": each.rss_loaded, "peak": each.rss_peak} for each in figures},
    }


def vars_of(summary: Summary) -> dict[str, Any]:
    return {name: getattr(summary, name) for name in Summary.__dataclass_fields__ if name != "label"}


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=DEFAULT_MODEL, help=f"a GGUF file or a name ({DEFAULT_MODEL})")
    parser.add_argument("--peer", action="append", choices=PEERS, help="repeatable; default: openvino")
    parser.add_argument("--binary", type=Path, help="llama.cpp's server, for --peer llama.cpp")
    parser.add_argument("--case", action="append", choices=CASES, help="repeatable; default: all")
    parser.add_argument("--concurrency", type=int_list, default=[1, 8, 32], metavar="N,N", help="1,8,32")
    parser.add_argument("--repeats", type=int, default=3, help="3")
    parser.add_argument("--n", type=int, default=48, help="requests; a third for long, an eighth at 1 (48)")
    parser.add_argument("--seed", type=int, default=0, help="0")
    parser.add_argument("--no-starts", action="store_true", help="leave the starts out")
    parser.add_argument("--serve-args", default="", metavar="FLAGS", help="more flags of jaxserve serve")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every repeat's figures")
    return parser


def main() -> int:
    parser = build_parser()
    args = parser.parse_args()
    args.case = args.case or list(CASES)
    model = Path(resolve_model(args.model))
    try:
        others = [peer(name, model, args.binary) for name in args.peer or ["openvino"]]
    except ValueError as error:
        parser.error(str(error))
    if os.getloadavg()[0] > 0.5:
        say("this machine is not quiet: figures will be of little use")
    figures = measure(args, [jaxserve(model, args.serve_args.split()), *others])
    check_tokens(figures)
    if args.json:
        args.json.write_text(json.dumps(as_json(args, figures), indent=1, allow_nan=False) + "\n")
    print(table(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
