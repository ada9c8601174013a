"""guidellm, a public load generator, against `jaxserve serve`; then our own client with the same prompts.

It gets an environment of its own, `.venvs/guidellm`, and the model's tokenizer as a local directory, so it
asks no model hub. Its figures are set beside what the server's own metrics gained meanwhile: two measurements
of one run. Then the client of `jaxserve bench serve` sends the prompts that it made again, at the same
concurrency: the same load, but beside another client's share of the processors, which on two cores makes much
of the difference. The server runs without a prefix cache, which would know the prompts the second time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from contestants import environment, jaxserve
from prometheus_client.parser import text_string_to_metric_families

from jaxserve.bench.client import Target, base_url, new_session, send, served_models
from jaxserve.bench.load import closed_loop
from jaxserve.bench.measure import Summary
from jaxserve.bench.serve import int_list
from jaxserve.bench.trace import TraceItem
from jaxserve.engine_args import DEFAULT_MODEL
from jaxserve_checkpoints import open_checkpoint, resolve_model

EXAMPLES = """\
examples:
  python benchmarks/guidellm_check.py                      starts a server; 1 and 8 at once, 24 requests each
  TORCH=torch==2.13.0+cpu python benchmarks/guidellm_check.py          guidellm needs torch: without CUDA
  python benchmarks/guidellm_check.py --url http://localhost:8000 --concurrency 32 --requests 64"""


def write_tokenizer(model: Path, directory: Path) -> None:
    """The model's tokenizer as transformers' AutoTokenizer reads it. Raises CheckpointError."""
    assets = open_checkpoint(model).tokenizer()
    if assets is None:
        raise SystemExit(f"guidellm_check.py: error: {model} has no tokenizer")
    assets.tokenizer.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **assets.special_tokens_map}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))


def run_guidellm(args: argparse.Namespace, url: str, folder: Path, concurrency: int) -> dict[str, Any]:
    """Its benchmark; `folder` has the tokenizer."""
    python = environment("guidellm", "guidellm", os.environ.get("TORCH", "torch"))
    size = f"prompt_tokens={args.prompt_tokens},output_tokens={args.output_tokens}"
    command = [str(python.parent / "guidellm"), "run", "--disable-console-interactive"]
    command += ["--backend", f"kind=openai_http,target={url},request_format=/v1/completions"]
    command += ["--tokenizer", f"kind=huggingface_auto,model={folder}"]
    command += ["--data", f"kind=synthetic_text,{size}"]
    command += ["--profile", f"kind=concurrent,streams[0]={concurrency}"]
    command += ["--constraint", f"kind=max_requests,count={args.requests}"]
    command += ["--output", f"kind=json,path={folder / 'guidellm.json'}", "--output", "kind=console"]
    print(" ".join(command), file=sys.stderr, flush=True)
    subprocess.run(command, check=True, stdout=sys.stderr, env=os.environ | {"HF_HUB_OFFLINE": "1"})
    benchmarks: list[dict[str, Any]] = json.loads((folder / "guidellm.json").read_text())["benchmarks"]
    return benchmarks[0]


@dataclass(frozen=True)
class Means:
    """Of a run. Milliseconds; of requests, each counted once."""

    requests: int
    output_tokens: int
    ttft: float
    tpot: float


def mean_of_guidellm(benchmark: dict[str, Any]) -> Means:
    def mean(name: str) -> float:
        return float(benchmark["metrics"][name]["successful"]["mean"])

    made = [request["output_tokens"] for request in in_order(benchmark)]
    return Means(len(made), sum(made), mean("time_to_first_token_ms"), mean("inter_token_latency_ms"))


def counters(url: str) -> dict[str, float]:
    """The server's metrics: name -> value, added up over labels."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found[sample.name] = found.get(sample.name, 0.0) + sample.value
    return found


def mean_of_server(before: dict[str, float], after: dict[str, float]) -> Means:
    """What its metrics gained."""

    def gained(name: str) -> float:
        return after[f"vllm:{name}"] - before.get(f"vllm:{name}", 0.0)

    def mean(name: str) -> float:
        return 1e3 * gained(f"{name}_sum") / max(gained(f"{name}_count"), 1.0)

    return Means(
        round(gained("time_to_first_token_seconds_count")),
        round(gained("generation_tokens_total")),
        mean("time_to_first_token_seconds"),
        mean("request_time_per_output_token_seconds"),
    )


def in_order(benchmark: dict[str, Any]) -> list[dict[str, Any]]:
    """The requests that were answered, in the order they were sent."""
    return sorted(benchmark["requests"]["successful"], key=lambda request: request["request_start_time"])


def prompts_of(benchmark: dict[str, Any]) -> list[TraceItem]:
    """What guidellm sent."""
    bodies = [json.loads(request["request_args"])["body"] for request in in_order(benchmark)]
    return [TraceItem(body["prompt"], body["max_tokens"]) for body in bodies]


def theirs(label: str, benchmark: dict[str, Any]) -> Summary:
    """guidellm's figures under our names. Its time_per_output_token counts the first token, ours does not."""
    metrics, wall = benchmark["metrics"], benchmark["duration"]
    totals = metrics["request_totals"]
    made = [request["output_tokens"] for request in in_order(benchmark)]
    wanted = [item.max_tokens for item in prompts_of(benchmark)]
    total = sum(request["total_tokens"] for request in in_order(benchmark))

    def at(name: str, rank: str) -> float:
        return float(metrics[name]["successful"]["percentiles"][rank])

    itl = "inter_token_latency_ms"  # of a request: its mean, which is our TPOT
    return Summary(
        label=label,
        requests=totals["total"],
        failed=totals["errored"] + totals["incomplete"],
        short=sum(have != want for have, want in zip(made, wanted, strict=True)),
        wall=wall,
        output_rate=sum(made) / wall,
        total_rate=total / wall,
        ttft_p50=at("time_to_first_token_ms", "p50"),
        ttft_p99=at("time_to_first_token_ms", "p99"),
        tpot_p50=at(itl, "p50"),
        tpot_p99=at(itl, "p99"),
        itl_p50=math.nan,
        itl_p99=math.nan,
        goodput=None,
    )


async def replay(url: str, items: Sequence[TraceItem], concurrency: int) -> Summary:
    async with new_session() as session:
        target = Target(base_url(url), (await served_models(session, base_url(url)))[0])
        records, wall = await closed_loop(partial(send, session, target), items, concurrency, lambda: None)
    return Summary.of(f"{concurrency}", records, wall)


@dataclass(frozen=True)
class Comparison:
    """Of one concurrency: guidellm's run as it and as the server saw it, and the replay of its prompts."""

    guidellm: Summary
    replay: Summary
    seen_by_guidellm: Means
    seen_by_server: Means


def check(args: argparse.Namespace, url: str, model: Path) -> list[Comparison]:
    found = []
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        write_tokenizer(model, folder)
        for concurrency in args.concurrency:
            before = counters(url)
            benchmark = run_guidellm(args, url, folder, concurrency)
            server = mean_of_server(before, counters(url))
            again = asyncio.run(replay(url, prompts_of(benchmark), concurrency))
            guidellm = theirs(str(concurrency), benchmark)
            found.append(Comparison(guidellm, again, mean_of_guidellm(benchmark), server))
    return found


def tables(found: Sequence[Comparison]) -> str:
    """Markdown: guidellm's figure, ours, and ours over theirs."""
    lines = ["guidellm / the server's metrics of the same run (ratio), means:", ""]
    lines += ["| at once | requests | output tokens | TTFT ms | TPOT ms |", "|---|---|---|---|---|"]
    for one in found:
        a, b = one.seen_by_guidellm, one.seen_by_server
        counts = f"{a.requests} / {b.requests} | {a.output_tokens} / {b.output_tokens}"
        times = [f"{x:.1f} / {y:.1f} ({y / x:.3f})" for x, y in ((a.ttft, b.ttft), (a.tpot, b.tpot))]
        lines.append(f"| {one.guidellm.label} | {counts} | {' | '.join(times)} |")
    columns = ("output_rate", "total_rate", "ttft_p50", "tpot_p50")
    head = ["at once", "requests", "failed", "short"]
    head += ["output tok/s", "total tok/s", "TTFT p50 ms", "TPOT p50 ms"]
    lines += ["", "guidellm / jaxserve bench with the same prompts afterwards (ratio):", ""]
    lines += ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for one in found:
        x, y = one.guidellm, one.replay
        counted = ((x.requests, y.requests), (x.failed, y.failed), (x.short, y.short))
        figures = [(getattr(x, name), getattr(y, name)) for name in columns]
        row = [x.label, *(f"{m} / {n}" for m, n in counted)]
        row += [f"{m:.1f} / {n:.1f} ({n / m:.3f})" for m, n in figures]
        lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=DEFAULT_MODEL, help=f"default: {DEFAULT_MODEL}")
    parser.add_argument("--url", help="a server that runs already, without a prefix cache, with --model")
    parser.add_argument("--concurrency", type=int_list, default=[1, 8], metavar="N,N", help="1,8")
    parser.add_argument("--requests", type=int, default=24, help="for each concurrency (24)")
    parser.add_argument("--prompt-tokens", type=int, default=256, help="256")
    parser.add_argument("--output-tokens", type=int, default=64, help="64")
    parser.add_argument("--serve-args", default="", metavar="FLAGS", help="more flags of jaxserve serve")
    parser.add_argument(
        "--write-tokenizer", type=Path, metavar="DIR", help="write the tokenizer there, and end"
    )
    return parser


def main() -> int:
    args = build_parser().parse_args()
    model = Path(resolve_model(args.model))
    if args.write_tokenizer:
        args.write_tokenizer.mkdir(parents=True, exist_ok=True)
        write_tokenizer(model, args.write_tokenizer)
        return 0
    if args.url:
        found = check(args, args.url.rstrip("/").removesuffix("/v1"), model)
    else:
        server = jaxserve(model, args.serve_args.split())
        with (
            tempfile.TemporaryDirectory() as cache,
            server.running(prefix_caching=False, cache=Path(cache), lazy=False) as (_, url),
        ):
            found = check(args, url, model)
    print(tables(found))
    return 1 if any(run.failed or run.short for one in found for run in (one.guidellm, one.replay)) else 0


if __name__ == "__main__":
    sys.exit(main())
