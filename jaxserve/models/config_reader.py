"""Reads a model's config so that nothing in it is silently ignored.

Every key must be read by the family's reader or be known to be inert; what is left over changes the
mathematics in a way the family does not implement, and is refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from jaxserve.errors import ConfigError, UnsupportedModelError
from jaxserve.models.rope import RopeConfig

_MISSING: Any = object()


class ConfigReader:
    """Typed access to a config's keys that remembers which were read. null counts as absent."""

    def __init__(self, raw: Mapping[str, Any], *, inert: frozenset[str], source: str = "config.json") -> None:
        self._raw = raw
        self._inert = inert
        self._read: set[str] = set()
        self.source = source

    def get(self, key: str, default: Any = None) -> Any:
        self._read.add(key)
        value = self._raw.get(key)
        return default if value is None else value

    def integer(self, key: str) -> int:
        value = self.optional_integer(key)
        if value is None:
            raise ConfigError(f"{self.source}: {key} is missing")
        return value

    def optional_integer(self, key: str) -> int | None:
        value = self.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{self.source}: {key} must be a positive integer, got {value!r}")
        return value

    def number(self, key: str, default: float = _MISSING) -> float:
        value = self.get(key, default)
        if value is _MISSING:
            raise ConfigError(f"{self.source}: {key} is missing")
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not math.isfinite(value)
            or value <= 0
        ):
            raise ConfigError(f"{self.source}: {key} must be a positive number, got {value!r}")
        return float(value)

    def boolean(self, key: str, default: bool) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise ConfigError(f"{self.source}: {key} must be true or false, got {value!r}")
        return value

    def text(self, key: str, default: str) -> str:
        value = self.get(key, default)
        if not isinstance(value, str):
            raise ConfigError(f"{self.source}: {key} must be a string, got {value!r}")
        return value

    def token_ids(self, key: str) -> tuple[int, ...]:
        """One id or a list of them."""
        value = self.get(key, [])
        ids = value if isinstance(value, list) else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
            raise ConfigError(f"{self.source}: {key} must be a token id or a list of them, got {value!r}")
        return tuple(i for i in ids if i >= 0)

    def require(self, key: str, *allowed: Any, default: Any = None) -> None:
        """The key's value must be one that the family implements."""
        value = self.get(key, default)
        if value not in allowed:
            raise UnsupportedModelError(f"{self.source}: {key} = {value!r} is not supported")

    def finish(self) -> None:
        """Refuse what nobody read. Keys with null, or of generation defaults, say nothing."""
        for key, value in self._raw.items():
            if key not in self._read and key not in self._inert and value is not None:
                raise UnsupportedModelError(
                    f"{self.source}: the key {key!r} = {value!r} is not understood by this model family; "
                    "it may change the result, so the checkpoint is refused"
                )


def read_rope(
    read: ConfigReader, head_dim: int, max_position_embeddings: int, *, default_theta: float
) -> RopeConfig:
    """Both spellings: `rope_parameters` (transformers 5) and `rope_theta` + `rope_scaling` (4)."""
    theta = read.number("rope_theta", default_theta)
    old, new = read.get("rope_scaling", {}), read.get("rope_parameters", {})
    for key, value in (("rope_scaling", old), ("rope_parameters", new)):
        if not isinstance(value, Mapping):
            raise ConfigError(f"{read.source}: {key} must be an object, got {value!r}")
    parameters = {k: v for k, v in {**old, **new}.items() if v is not None}
    theta = parameters.pop("rope_theta", theta)
    if parameters.pop("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedModelError(
            f"{read.source}: partial_rotary_factor is not supported by this model family"
        )
    legacy = parameters.pop("type", "default")
    rope_type = parameters.pop("rope_type", legacy)
    if rope_type == "default" and "factor" in parameters:
        raise UnsupportedModelError(f"{read.source}: a rope factor without a rope type")
    original = read.optional_integer("original_max_position_embeddings")
    if original and rope_type in ("yarn", "llama3", "dynamic"):
        parameters.setdefault("original_max_position_embeddings", original)
    return RopeConfig(
        theta=float(theta),
        head_dim=head_dim,
        max_position_embeddings=max_position_embeddings,
        rope_type=rope_type,
        parameters=parameters,
    )
