"""Rotary position embedding (Su et al., 2021, arXiv:2104.09864) and the published ways to stretch it.

The inverse frequencies are computed once on the host and travel with the weights. `dynamic` (NTK-aware)
scaling depends on the sequence length; a paged engine cannot re-rotate keys that are already in the pool,
so the length it uses is fixed for the life of the engine: the engine's `max_model_len`. Where that does not
exceed `max_position_embeddings` the result is exactly the reference's, and a cached prefix stays right
whatever follows it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.errors import ConfigError, UnsupportedModelError

_KNOWN_KEYS: dict[str, frozenset[str]] = {
    # The original length says nothing to the first two; transformers writes it all the same.
    "default": frozenset({"original_max_position_embeddings"}),
    "linear": frozenset({"factor", "original_max_position_embeddings"}),
    "dynamic": frozenset({"factor", "original_max_position_embeddings"}),
    "llama3": frozenset(
        {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}
    ),
    "yarn": frozenset(
        {
            "factor",
            "original_max_position_embeddings",
            "attention_factor",
            "beta_fast",
            "beta_slow",
            "mscale",
            "mscale_all_dim",
            "truncate",
        }
    ),
}


@dataclass(frozen=True)
class RopeConfig:
    """Which frequencies rotate a head."""

    theta: float
    head_dim: int
    max_position_embeddings: int
    rope_type: str = "default"
    parameters: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.rope_type not in _KNOWN_KEYS:
            raise UnsupportedModelError(
                f"rope type {self.rope_type!r} is not supported (known: {', '.join(sorted(_KNOWN_KEYS))})"
            )
        unknown = set(self.parameters) - _KNOWN_KEYS[self.rope_type]
        if unknown:
            raise UnsupportedModelError(
                f"rope type {self.rope_type!r} does not know the key {min(unknown)!r}"
            )
        needed = {"default": (), "llama3": tuple(_KNOWN_KEYS["llama3"])}.get(self.rope_type, ("factor",))
        if self.rope_type == "yarn" and self.parameters.get("original_max_position_embeddings"):
            needed = ()  # the factor follows from the two lengths
        for key in (*needed, *(k for k in ("factor",) if k in self.parameters)):
            if not _is_positive(self.parameters.get(key)):
                raise ConfigError(f"rope type {self.rope_type!r} needs a positive {key!r}")
        if self.head_dim % 2:
            raise UnsupportedModelError(f"rotary embedding needs an even head_dim, got {self.head_dim}")

    def inv_freq(self, seq_len: int | None = None) -> np.ndarray:
        """Inverse frequencies in radians a position, float32 [head_dim / 2].

        `seq_len` matters to `dynamic` alone: the longest sequence that will be rotated with them.
        """
        if self.rope_type == "dynamic":
            return _dynamic(self, seq_len or self.max_position_embeddings)
        base = _base_inv_freq(self.theta, self.head_dim)
        if self.rope_type == "linear":
            return base / np.float32(self.parameters["factor"])
        if self.rope_type == "llama3":
            return _llama3(self, base)
        if self.rope_type == "yarn":
            return _yarn(self, base)
        return base

    @property
    def attention_scaling(self) -> float:
        """What cos and sin are multiplied with (yarn's temperature; 1 elsewhere)."""
        if self.rope_type != "yarn":
            return 1.0
        p = self.parameters
        if p.get("attention_factor") is not None:
            return float(p["attention_factor"])
        factor = _yarn_factor(self)
        if p.get("mscale") and p.get("mscale_all_dim"):
            return _yarn_mscale(factor, p["mscale"]) / _yarn_mscale(factor, p["mscale_all_dim"])
        return _yarn_mscale(factor, 1.0)


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value) and value > 0


def _base_inv_freq(theta: float, head_dim: int) -> np.ndarray:
    exponent = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    return (np.float32(1.0) / np.power(np.float32(theta), exponent)).astype(np.float32)


def _dynamic(rope: RopeConfig, seq_len: int) -> np.ndarray:
    longest = max(seq_len, rope.max_position_embeddings)
    factor = rope.parameters["factor"]
    stretch = (factor * longest / rope.max_position_embeddings) - (factor - 1)
    theta = rope.theta * stretch ** (rope.head_dim / (rope.head_dim - 2))
    return _base_inv_freq(theta, rope.head_dim)


def _llama3(rope: RopeConfig, inv_freq: np.ndarray) -> np.ndarray:
    """Llama 3.1's scaling: long wavelengths are divided by `factor`, short ones kept, a ramp between."""
    p = rope.parameters
    low, high = p["low_freq_factor"], p["high_freq_factor"]
    original = p["original_max_position_embeddings"]
    wavelength = 2 * math.pi / inv_freq
    smooth = (original / wavelength - low) / (high - low)
    ramp = (1 - smooth) * inv_freq / p["factor"] + smooth * inv_freq
    scaled = np.where(wavelength > original / low, inv_freq / p["factor"], inv_freq)
    medium = (wavelength >= original / high) & (wavelength <= original / low)
    return np.where(medium, ramp, scaled).astype(np.float32)


def _yarn_original(rope: RopeConfig) -> int:
    return rope.parameters.get("original_max_position_embeddings") or rope.max_position_embeddings


def _yarn_factor(rope: RopeConfig) -> float:
    """The stated factor; where a file states none, the ratio of the two lengths."""
    return rope.parameters.get("factor") or rope.max_position_embeddings / _yarn_original(rope)


def _yarn_mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _yarn(rope: RopeConfig, inv_freq: np.ndarray) -> np.ndarray:
    """YaRN (Peng et al., 2023, arXiv:2309.00071): interpolate slow rotations, keep fast ones."""
    p, dim = rope.parameters, rope.head_dim
    original = _yarn_original(rope)

    def dim_of(rotations: float) -> float:
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dim_of(p.get("beta_fast") or 32.0), dim_of(p.get("beta_slow") or 1.0)
    if p.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    span = high - low if high != low else 0.001
    ramp = np.clip((np.arange(dim // 2, dtype=np.float32) - low) / span, 0, 1)
    return (inv_freq / np.float32(_yarn_factor(rope)) * ramp + inv_freq * (1 - ramp)).astype(np.float32)


def rope_tables(positions: jax.Array, inv_freq: jax.Array, scaling: float) -> tuple[jax.Array, jax.Array]:
    """cos and sin, float32 [num_tokens, head_dim / 2], of `positions` (int32 [num_tokens])."""
    angle = positions[:, None].astype(jnp.float32) * inv_freq[None, :]
    return jnp.cos(angle) * scaling, jnp.sin(angle) * scaling
