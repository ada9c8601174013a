"""Print what the TPU attention kernels move beyond the minimum, by cause, for real models' shapes.

python benchmarks/attention_traffic.py [--chip v6e]
"""

from __future__ import annotations

import argparse

from pallas_kernels.chips import chip_by_name
from pallas_kernels.ragged_paged_attention.cases import REAL_CASES
from pallas_kernels.ragged_paged_attention.traffic import tpu_traffic


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--chip", default="v6e")
    chip = chip_by_name(parser.parse_args().chip)
    print("| case | least MB | moved MB | excess | pages | rows written | queries | layout | least us |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|---:|")
    for case in REAL_CASES:
        t = tpu_traffic(case, chip.name)
        parts = (t.pages, t.rows_written, t.queries, t.layout)
        shares = " | ".join(f"{part / t.total:.0%}" for part in parts)
        print(
            f"| {case.name} | {t.least / 1e6:.1f} | {t.total / 1e6:.1f} | {t.excess:.0%} | {shares} | "
            f"{t.least / chip.memory_bandwidth * 1e6:.0f} |"
        )


if __name__ == "__main__":
    main()
