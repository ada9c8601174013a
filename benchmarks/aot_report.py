"""What the steps of well-known models compile to for TPUs and an H200, checked; needs no accelerator.

    python benchmarks/aot_report.py                      all cases (minutes each)
    python benchmarks/aot_report.py --only llama-3-8b    those whose model or topology has this in its name
    python benchmarks/aot_report.py --json FILE          also write every plan's object
    python benchmarks/aot_report.py --buckets all        every step that an engine may run

Exit code 1 where a step copies the pool, does not share it, exchanges more than the split implies, or needs
3% of memory for temporaries (`jaxserve/plan/checks.py`), or where a model does not fit. Configs are written
from the models' public descriptions; the compilers come with `pip install '.[aot]'`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"  # before jax is imported: nothing runs, all is compiled

from rich.console import Console
from rich.table import Table

from jaxserve.engine_args import EngineArgs
from jaxserve.plan.checks import failures
from jaxserve.plan.planning import Plan, make_plan
from jaxserve.plan.report import to_json

CONFIGS = Path(__file__).parent / "configs"


@dataclass(frozen=True)
class Case:
    model: str
    topology: str
    tensor_parallel_size: int
    max_model_len: int = 8192

    def __str__(self) -> str:
        return f"{self.model} {self.topology} -tp {self.tensor_parallel_size}"


CASES = (
    Case("llama-3-8b", "v6e:2x4", 8),
    Case("llama-3-8b", "v5e:2x2", 4),
    Case("llama-3-8b", "h200", 1),
    Case("qwen3-30b-a3b", "v6e:2x4", 8),
    Case("gemma-3-12b", "v6e:2x4", 8),
    Case("llama-3-70b", "v6e:2x4", 8),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", default="", help="part of a model's or a topology's name")
    parser.add_argument("--json", type=Path, help="file to write")
    parser.add_argument("--buckets", choices=("largest", "all"), default="largest")
    parser.add_argument("--attention-implementation", default="auto")
    options = parser.parse_args()
    table = Table(
        "case", "weights", "pool", "tokens", "temps", "copies", "shared", "a layer", "once",
        "decode", "prefill", "tokens/s",
    )  # fmt: skip
    objects, wrong = [], 0
    for case in CASES:
        if options.only not in str(case):
            continue
        print(f"compiling {case}", file=sys.stderr, flush=True)
        args = EngineArgs(
            model=str(CONFIGS / case.model),
            tensor_parallel_size=case.tensor_parallel_size,
            max_model_len=case.max_model_len,
            attention_implementation=options.attention_implementation,
        )
        plan = make_plan(args, case.topology, largest_only=options.buckets == "largest")
        for line in failures(plan):
            wrong += 1
            print(f"{case}: {line}", file=sys.stderr, flush=True)
        table.add_row(*_row(case, plan))
        objects.append({"case": str(case), "failures": failures(plan), **to_json(plan)})
        if options.json:
            options.json.write_text(json.dumps(objects, indent=2) + "\n")
    Console(width=200).print(table)
    print("all as it should be" if not wrong else f"{wrong} things are wrong")
    return 1 if wrong or not objects else 0


def _row(case: Case, plan: Plan) -> list[str]:
    found = to_json(plan)
    share = found["temp_bytes"] / found["hbm_bytes"]
    bounds = (
        [f"{found[key]:.2f} ms" for key in ("decode_ms_bound", "prefill_ms_bound")]
        if plan.fits
        else ["-", "-"]
    )
    return [
        str(case),
        _gib(found["weights_bytes_per_device"]),
        _gib(found["pool_bytes_per_device"]),
        f"{found['pool_tokens']:,}",
        f"{found['temp_bytes'] / (1 << 20):.0f} MiB = {share:.2%}",
        str(found["pool_copies"]),
        "yes" if found["pool_aliased"] else "NO",
        _counts(found["collectives"]),
        _counts(found["collectives_once"]),
        *bounds,
        f"{found['tokens_per_s_bound']:,.0f}" if plan.fits else "-",
    ]


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 30):.2f} GiB"


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in counts.items()) or "-"


if __name__ == "__main__":
    sys.exit(main())
