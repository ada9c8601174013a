"""Check the accelerator at hand: the server end to end, kernels against oracles and against the roofline.

    python benchmarks/check_device.py [--json FILE] [--no-server] [--no-time] [--only NAME ...] [--budget S]

Runs on a TPU, a GPU or a CPU, with whatever jax is installed; it needs the project's folders on the path and,
for the server, its dependencies. Prints one table and exits with 1 when anything is wrong. Under 8 minutes on
an H200; past --budget seconds what is left is left out, and said to be.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PATHS = [str(ROOT), str(ROOT / "checkpoints"), str(ROOT / "server"), str(ROOT / "benchmarks")]
SERVER_NEEDS = (
    "flax",
    "aiohttp",
    "pydantic",
    "prometheus_client",
    "tokenizers",
    "jinja2",
    "yaml",
    "safetensors",
)


def main() -> int:
    args = _arguments()
    sys.path[:0] = PATHS
    os.environ["PYTHONPATH"] = os.pathsep.join([*PATHS, os.environ.get("PYTHONPATH", "")])
    started = time.monotonic()
    server = {} if args.no_server else _server(args)

    import jax
    from device_kernels import Result, Target, measure, verify

    from pallas_kernels.chips import CHIPS, chip_of_device_kind

    device = jax.devices()[0]
    platform = {"cuda": "gpu", "rocm": "gpu"}.get(device.platform, device.platform)
    name = chip_of_device_kind(device.device_kind)
    target = Target(platform, CHIPS[name] if name else None)
    where = f"{platform}, {name or 'no data sheet'}"
    print(f"\n{device.device_kind} x {jax.device_count()} ({where}), jax {jax.__version__}")
    if server:
        print(
            "server: "
            + ", ".join(f"{k} {v:.1f}" if isinstance(v, float) else f"{k} {v}" for k, v in server.items())
        )

    timed = () if args.no_time else measure(target, pool_bytes=args.pool_bytes, names=tuple(args.only))
    checks = (r for r in verify(target) if not args.only or any(n in r.case for n in args.only))
    results: list[Result] = []
    for result in _within(itertools.chain(checks, timed), started + args.budget):
        results.append(result)
        time_text = f"{result.microseconds:10.1f} us" if result.microseconds is not None else " " * 13
        share = f"{result.fraction:6.1%}" if result.fraction is not None else " " * 6
        what = f"{result.operation:16} {result.implementation:11} {result.case:42}"
        print(f"{what} {time_text} {share}  {result.verdict}", flush=True)
    wrong = [r for r in results if not r.verdict.startswith(("ok", "refused"))]
    if "error" in server:
        print(f"server: WRONG: {server['error']}")
    refused = sum(r.verdict.startswith("refused") for r in results)
    spent = time.monotonic() - started
    print(f"{len(results)} checks, {len(wrong)} wrong, {refused} refused, {spent:.0f} s")
    if args.json:
        report = {
            "device": device.device_kind,
            "jax": jax.__version__,
            "server": server,
            "results": [asdict(r) for r in results],
        }
        Path(args.json).write_text(json.dumps(report, indent=1))
    return 1 if wrong or "error" in server else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", help="write the table to this file too")
    parser.add_argument("--no-server", action="store_true", help="kernels only")
    parser.add_argument("--no-time", action="store_true", help="correctness only")
    parser.add_argument("--only", nargs="*", default=[], help="cases whose name contains one of these")
    parser.add_argument("--budget", type=float, default=420.0, help="seconds")
    parser.add_argument("--pool-bytes", type=int, default=1 << 30, help="of the pool that is timed over")
    parser.add_argument("--shape", default="1B", help="the server's model: 1B or tiny")
    parser.add_argument("--clients", type=int, default=32)
    return parser.parse_args()


def _within(results: Iterator[Any], end: float) -> Iterator[Any]:
    for result in results:
        yield result
        if time.monotonic() > end:
            print("out of time: the rest is left out")
            return


def _server(args: argparse.Namespace) -> dict[str, Any]:
    missing = [name for name in SERVER_NEEDS if importlib.util.find_spec(name) is None]
    if missing:
        print(f"server: left out, {', '.join(missing)} not installed")
        return {}
    from device_server import check_server, write_model

    with tempfile.TemporaryDirectory() as directory:
        write_model(Path(directory), args.shape)
        print(f"server: starting it with a random model ({args.shape})", flush=True)
        try:
            return check_server(Path(directory), clients=args.clients, max_tokens=64, wait_s=args.budget / 2)
        except (AssertionError, OSError) as error:
            return {"error": " ".join(str(error).split())[:400]}


if __name__ == "__main__":
    sys.exit(main())
