"""Causal attention of ragged queries over a paged KV pool (Kwon et al., 2023, arXiv:2309.06180)."""

from pallas_kernels.ragged_paged_attention.api import ragged_paged_attention
from pallas_kernels.ragged_paged_attention.rope import apply_rope
from pallas_kernels.ragged_paged_attention.types import AttentionSpec, Rows

__all__ = ["AttentionSpec", "Rows", "apply_rope", "ragged_paged_attention"]
