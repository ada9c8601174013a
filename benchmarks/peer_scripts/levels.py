"""What the peers' scripts share: levels of requests come in as JSON, what each request took goes out.

Their environments have no jaxserve. Input: {"warmup": level, "levels": [level]} with
level = {"name", "concurrency", "items": [{"prompt", "max_tokens"}]}.
Output: {"rss_loaded", "rss_peak", "first_answer_at", "levels": [{"name", "wall", "records"}]}; bytes and
seconds. A record has the fields of jaxserve.bench.measure.RequestRecord.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Level = dict[str, Any]
Record = dict[str, Any]


def parse_arguments(description: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("model", type=Path, help="a .gguf file")
    parser.add_argument("work", type=Path, help="JSON with the levels")
    parser.add_argument("results", type=Path, help="JSON to write")
    parser.add_argument("--prefix-caching", action="store_true")
    parser.add_argument("--float32", action="store_true", help="float32 arithmetic and cache")
    parser.add_argument("--cache-dir", help="where compiled models are kept")
    return parser.parse_args()


def new_record(item: dict[str, Any], prompt_tokens: int) -> Record:
    return {
        "wanted_tokens": item["max_tokens"],
        "prompt_tokens": prompt_tokens,
        "output_tokens": 0,
        "arrivals": [],
        "latency": 0.0,
        "error": None,
    }


def memory(key: str) -> int:
    """Bytes of this process: VmRSS now, VmHWM at most so far. 0 where the system does not tell."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


def run_levels(args: argparse.Namespace, run: Callable[[Level], list[Record]]) -> None:
    """Run every level on the loaded model and write what came of them."""
    work = json.loads(args.work.read_text())
    results: dict[str, Any] = {"rss_loaded": memory("VmRSS"), "levels": []}
    run(work["warmup"])
    results["first_answer_at"] = time.time()  # of the wall clock: the parent knows when it started this
    for level in work["levels"]:
        start = time.perf_counter()
        records = run(level)
        wall = time.perf_counter() - start
        results["levels"].append({"name": level["name"], "wall": wall, "records": records})
        print(f"{level['name']}: {wall:.1f} s", flush=True)
    results["rss_peak"] = memory("VmHWM")
    args.results.write_text(json.dumps(results))
