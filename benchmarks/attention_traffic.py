"""Print what the TPU attention kernels move beyond the minimum, by cause, for real models' shapes.

"seen" is the share of the products they form that a query has a use for; the rest is masked.

python benchmarks/attention_traffic.py [--chip v6e]
"""

from __future__ import annotations

import argparse
from dataclasses import replace

from pallas_kernels.chips import chip_by_name
from pallas_kernels.ragged_paged_attention.cases import REAL_CASES
from pallas_kernels.ragged_paged_attention.traffic import tpu_traffic


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--chip", default="v6e")
    chip = chip_by_name(parser.parse_args().chip)
    print(
        "| case | least MB | moved MB | excess | pages | rows written | queries | layout | least us | seen |"
    )
    print("|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|")
    prompts = [
        replace(case, name=case.name.replace("mixed", f"a prompt of {n}"), rows=((n, n),))
        for case in REAL_CASES
        if case.name in ("Llama-3-8B, mixed", "Llama-3-70B on 8, mixed")
        for n in (512, 2048, 8192)
    ]
    for case in (*REAL_CASES, *prompts):
        t = tpu_traffic(case, chip.name)
        parts = (t.pages, t.rows_written, t.queries, t.layout)
        shares = " | ".join(f"{part / t.total:.0%}" for part in parts)
        print(
            f"| {case.name} | {t.least / 1e6:.1f} | {t.total / 1e6:.1f} | {t.excess:.0%} | {shares} | "
            f"{t.least / chip.memory_bandwidth * 1e6:.0f} | {t.least_flops / t.flops:.0%} |"
        )


if __name__ == "__main__":
    main()
