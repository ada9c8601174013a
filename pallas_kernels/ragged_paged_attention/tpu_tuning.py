"""How much the TPU kernels fetch and compute at a time, by chip.

Nobody has measured these yet: they follow from sizes (a copy in flight has to cover the memory's latency, a
product has to fill the matrix unit, buffers have to fit). `benchmarks/tune_attention.py` measures them where
there is a chip.
"""

from __future__ import annotations

from dataclasses import dataclass

from pallas_kernels.ragged_paged_attention.tpu_pages import Blocks


@dataclass(frozen=True)
class Tuning:
    fetch_bytes: int  # of a block of pages: one buffer of two
    decode_keys: int  # of a sub-block
    prefill_keys: int
    query_tile: int  # queries of a work item
    prefill_rows: int  # query tile times heads of a group: rows of a product, at most


_DEFAULT = Tuning(fetch_bytes=1 << 20, decode_keys=256, prefill_keys=256, query_tile=128, prefill_rows=512)
TUNINGS: dict[str, Tuning] = {
    "v5e": Tuning(1 << 19, 256, 256, 128, 512),
    "v5p": _DEFAULT,
    "v6e": _DEFAULT,
    "tpu7x": Tuning(1 << 21, 256, 256, 128, 512),
}


def tuning_of(chip: str | None) -> Tuning:
    return TUNINGS.get(chip or "", _DEFAULT)


def choose_blocks(page_bytes: int, page_size: int, pages_per_seq: int, keys: int, tuning: Tuning) -> Blocks:
    """page_bytes: of one page of one layer on one device."""
    per_step = max(1, min(keys // page_size, pages_per_seq))
    steps = max(1, min(tuning.fetch_bytes // (page_bytes * per_step), -(-pages_per_seq // per_step)))
    return Blocks(per_step * steps, per_step)


def choose_query_tile(group: int, unit: int, tuning: Tuning) -> int:
    """Queries of a work item: whole tiles of `unit` rows."""
    fitting = min(tuning.query_tile, tuning.prefill_rows // group)
    return max(unit, fitting // unit * unit)
