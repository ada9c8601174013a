"""Reads a model's config so that nothing in it is silently ignored.

Every key must be read by the family's reader or be known to be inert; what is left over changes the
mathematics in a way the family does not implement, and is refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from jaxserve.errors import ConfigError, UnsupportedModelError
from jaxserve.models.rope import RopeConfig

_MISSING: Any = object()

# Keys of config.json that say nothing about the forward pass, in any family.
INERT = frozenset(
    """_name_or_path architectures auto_map attention_dropout bos_token_id eos_token_id pad_token_id
    unk_token_id dtype torch_dtype initializer_range model_type transformers_version
    use_cache vocab_size output_attentions output_hidden_states return_dict
    id2label label2id finetuning_task problem_type task_specific_params tokenizer_class prefix
    chunk_size_feed_forward is_encoder_decoder""".split()
)


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

    def optional_integer(self, key: str, *, minimum: int = 1) -> int | None:
        value = self.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            kind = "a positive integer" if minimum == 1 else f"an integer of at least {minimum}"
            raise ConfigError(f"{self.source}: {key} must be {kind}, got {value!r}")
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

    def mapping(self, key: str) -> Mapping[str, Any]:
        """An object; empty where it is absent."""
        value = self.get(key, {})
        if not isinstance(value, Mapping):
            raise ConfigError(f"{self.source}: {key} must be an object, got {value!r}")
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

    def heads(
        self,
        default_head_dim: int | None = None,
        *,
        hidden: int | None = None,
        num_heads: int | None = None,
        num_kv_heads: int | None = None,
    ) -> tuple[int, int, int, int]:
        """hidden_size, num_attention_heads, num_key_value_heads, head_dim; the arguments are defaults.

        Without a default a head is as long as hidden_size / num_attention_heads, and each head has its own
        keys and values.
        """
        hidden = self.optional_integer("hidden_size") or hidden or self.integer("hidden_size")
        num_heads = self.optional_integer("num_attention_heads") or num_heads
        num_heads = num_heads or self.integer("num_attention_heads")
        num_kv_heads = self.optional_integer("num_key_value_heads") or num_kv_heads or num_heads
        head_dim = self.optional_integer("head_dim") or default_head_dim
        if head_dim is None:
            if hidden % num_heads:
                raise ConfigError(
                    f"{self.source}: hidden_size {hidden} is no multiple of num_attention_heads {num_heads}"
                )
            head_dim = hidden // num_heads
        if num_heads % num_kv_heads:
            raise ConfigError(
                f"{self.source}: {num_heads} heads cannot share {num_kv_heads} key-value heads evenly"
            )
        return hidden, num_heads, num_kv_heads, head_dim

    def finish(self) -> None:
        """Refuse what nobody read. Keys with null, or of generation defaults, say nothing."""
        for key, value in self._raw.items():
            if key not in self._read and key not in self._inert and value is not None:
                raise UnsupportedModelError(
                    f"{self.source}: the key {key!r} = {value!r} is not understood by this model family; "
                    "it may change the result, so the checkpoint is refused"
                )


def require_decoder(read: ConfigReader) -> None:
    """Keys by which a config could ask for more than a causal decoder with plain weights."""
    read.require("is_decoder", True, False, default=True)
    read.require("add_cross_attention", False, default=False)
    read.require("tie_encoder_decoder", False, default=False)
    read.require("quantization_config", None)


def read_rope(
    read: ConfigReader, head_dim: int, max_position_embeddings: int, *, default_theta: float
) -> RopeConfig:
    """Both spellings: `rope_parameters` (transformers 5) and `rope_theta` + `rope_scaling` (4)."""
    theta = read.number("rope_theta", default_theta)
    stated = {**read.mapping("rope_scaling"), **read.mapping("rope_parameters")}
    return rope_from(read, stated, theta, head_dim, max_position_embeddings)


def rope_from(
    read: ConfigReader, stated: Mapping[str, Any], theta: float, head_dim: int, max_position_embeddings: int
) -> RopeConfig:
    """The rope that an object of a config states; `theta` where it states none."""
    parameters = {k: v for k, v in stated.items() if v is not None}
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


def read_layer_windows(
    read: ConfigReader, num_layers: int, window: int | None, is_local: Callable[[int], bool]
) -> tuple[int | None, ...]:
    """Each layer's window, () where no layer has one.

    `layer_types` says which layers are local; `is_local` does where the config has none.
    """
    known = {"full_attention": False, "sliding_attention": True}
    types = read.get("layer_types")
    if types is None:
        local = [is_local(i) for i in range(num_layers)]
    else:
        if not isinstance(types, list) or len(types) != num_layers:
            raise ConfigError(f"{read.source}: layer_types must list {num_layers} layers, got {types!r}")
        for layer_type in types:
            if layer_type not in known:
                raise UnsupportedModelError(f"{read.source}: layer type {layer_type!r} is not supported")
        local = [known[t] for t in types]
    if not any(local):
        return ()
    if window is None:
        raise ConfigError(f"{read.source}: layers have a sliding window whose length is not stated")
    return tuple(window if is_local else None for is_local in local)
