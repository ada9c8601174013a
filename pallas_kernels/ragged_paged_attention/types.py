"""What every implementation of ragged paged attention is given beside its arrays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax


class Rows(NamedTuple):
    """The sequences of a batch. Sequence s owns the queries cu_q_lens[s] : cu_q_lens[s + 1]."""

    kv_lens: jax.Array  # int32 [num_seqs]: tokens of each sequence, the new ones included; 0: empty row
    page_indices: jax.Array  # int32 [num_seqs, pages_per_seq]; entries past the last page are never read
    cu_q_lens: jax.Array  # int32 [num_seqs + 1]: cumulative number of queries


@dataclass(frozen=True)
class AttentionSpec:
    """What is static in a call; hashable."""

    sm_scale: float  # scores are multiplied with it, usually head_dim ** -0.5
    soft_cap: float | None = (
        None  # scores become soft_cap * tanh(score / soft_cap) (Gemma 2, arXiv:2408.00118)
    )
    # Length of V; None: what a pool row has after K. A row may be longer than K and V (see `pool_layout`).
    v_dim: int | None = None
    # None: a pool row holds K, then V. A number: the row is K alone, and V its first `latent_v_dim` elements
    # (multi-head latent attention in its absorbed form: DeepSeek-V2, arXiv:2405.04434).
    latent_v_dim: int | None = None
    # Promise: the leading rows have one query each, the rows after them none, and num_tokens == num_seqs.
    decode_only: bool = False

    def v_slice(self, k_dim: int, row_dim: int) -> tuple[int, int]:
        """Where V lies in a pool row: [start, stop)."""
        if self.latent_v_dim is not None:
            return 0, self.latent_v_dim
        return k_dim, row_dim if self.v_dim is None else k_dim + self.v_dim
