"""Causal attention of ragged queries over a paged KV pool (Kwon et al., 2023, arXiv:2309.06180)."""

from pallas_kernels.ragged_paged_attention.api import ragged_paged_attention
from pallas_kernels.ragged_paged_attention.types import AttentionSpec, Rows

__all__ = ["AttentionSpec", "Rows", "ragged_paged_attention"]
