"""Time the TPU attention kernels with other block sizes, and print the best for `tpu_tuning`.

    python benchmarks/tune_attention.py [--only NAME ...] [--json FILE]

Needs a TPU, and the project installed. Each candidate is the table's entry with one value changed; the
fastest over all shapes wins.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator
from dataclasses import asdict, fields, replace
from pathlib import Path

import jax
from device_kernels import Target, attention_seconds, judge

from pallas_kernels.chips import CHIPS, chip_of_device_kind
from pallas_kernels.ragged_paged_attention import tpu
from pallas_kernels.ragged_paged_attention.cases import REAL_CASES, Case
from pallas_kernels.ragged_paged_attention.tpu_tuning import Tuning, tuning_of

CHANGES = {
    "fetch_bytes": (1 << 18, 1 << 19, 1 << 20, 1 << 21, 1 << 22),
    "decode_keys": (128, 256, 512, 1024),
    "prefill_keys": (128, 256, 512, 1024),
    "query_tile": (128, 256, 512),
    "prefill_rows": (512, 1024, 2048),
}


def candidates(start: Tuning) -> Iterator[Tuning]:
    yield start
    for field in fields(Tuning):
        for value in CHANGES.get(field.name, ()):
            if value != getattr(start, field.name):
                yield replace(start, **{field.name: value})


def _time_all(cases: list[Case], target: Target) -> dict[str, float]:
    """Seconds of each case; what does not compile or run is printed and left out."""
    seconds: dict[str, float] = {}
    for case in cases:

        def run(case: Case = case) -> None:
            seconds[case.name] = attention_seconds(case, "mosaic_tpu", target, 1 << 30)

        verdict = judge(run)
        if verdict != "ok":
            print(f"{case.name}: {verdict}")
    return seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--only", nargs="*", default=["Llama-3", "Gemma-3", "SmolLM2"], help="parts of case names"
    )
    parser.add_argument("--json", help="write all times to this file")
    args = parser.parse_args()
    device = jax.devices()[0]
    name = chip_of_device_kind(device.device_kind)
    if device.platform != "tpu" or name is None:
        print(
            f"needs a TPU with an entry in pallas_kernels.chips, found {device.device_kind}", file=sys.stderr
        )
        return 1
    target = Target("tpu", CHIPS[name])
    cases = [case for case in REAL_CASES if any(part in case.name for part in args.only)]
    times: list[dict[str, object]] = []
    best, best_score = tuning_of(name), math.inf
    for tuning in candidates(tuning_of(name)):
        tpu.tuning_of = lambda chip, tuning=tuning: tuning  # type: ignore[misc]
        seconds = _time_all(cases, target)
        # The geometric mean counts a short call as much as a long one.
        complete = len(seconds) == len(cases)
        score = math.exp(sum(map(math.log, seconds.values())) / len(cases)) if complete else math.inf
        times.append({"tuning": asdict(tuning), "seconds": seconds})
        print(f"{score * 1e6:9.1f} us  {tuning}", flush=True)
        if score < best_score:
            best, best_score = tuning, score
    print(f"best: {name!r}: {best}")
    if args.json:
        Path(args.json).write_text(json.dumps(times, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
