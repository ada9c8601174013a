"""How much the TPU kernels fetch and compute at a time, by chip.

Nobody has measured these yet: they follow from sizes (a copy in flight has to cover the memory's latency, a
product has to fill the matrix unit, buffers have to fit). `benchmarks/tune_attention.py` measures them where
there is a chip.
"""

from __future__ import annotations

from dataclasses import dataclass

from pallas_kernels.ragged_paged_attention.tpu_pages import Blocks
from pallas_kernels.ragged_paged_attention.tpu_prefill import QueryTile


@dataclass(frozen=True)
class Tuning:
    fetch_bytes: int  # of a block of pages: one buffer of two
    decode_keys: int  # of a sub-block
    prefill_keys: int
    query_tile: int  # queries of a work item, at most
    prefill_rows: int  # of a product, at most: queries of a part times heads of a group
    state_bytes: int  # of a work item's queries, running sums and results, at most


_DEFAULT = Tuning(1 << 20, 256, 256, 512, 512, 16 << 20)
TUNINGS: dict[str, Tuning] = {
    "v5e": Tuning(1 << 19, 256, 256, 512, 512, 48 << 20),
    "v5p": _DEFAULT,
    "v6e": Tuning(1 << 20, 256, 256, 512, 512, 48 << 20),
    "tpu7x": Tuning(1 << 21, 256, 256, 512, 512, 16 << 20),
}


def tuning_of(chip: str | None) -> Tuning:
    return TUNINGS.get(chip or "", _DEFAULT)


def choose_blocks(page_bytes: int, page_size: int, pages_per_seq: int, keys: int, tuning: Tuning) -> Blocks:
    """page_bytes: of one page of one layer on one device."""
    per_step = max(1, min(keys // page_size, pages_per_seq))
    steps = max(1, min(tuning.fetch_bytes // (page_bytes * per_step), -(-pages_per_seq // per_step)))
    return Blocks(per_step * steps, per_step)


def choose_query_tile(group: int, query_bytes: int, unit: int, tuning: Tuning) -> QueryTile:
    """A part is a power of two of whole memory tiles of `unit` rows.

    query_bytes: scratch memory that a query takes, all heads.
    """
    most = min(tuning.query_tile, tuning.state_bytes // query_bytes)
    part = unit
    while 2 * part <= min(most, tuning.prefill_rows // group):
        part *= 2
    return QueryTile(part, max(1, most // part))
