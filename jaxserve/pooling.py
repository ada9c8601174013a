"""Embeddings: one vector for a prompt, pooled from the final hidden states of its tokens.

The checkpoint says how: the mean over the prompt's tokens, or the last token, each scaled to length 1 or
not. What else a checkpoint may ask for is refused, never replaced. The sums are made on the device, one for
each chunk of a prompt (`step.make_pool`), and put together here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxserve.errors import ConfigError, EngineDeadError, InvalidRequestError
from jaxserve.outputs import RequestOutput
from jaxserve_checkpoints import Checkpoint, EncoderModule

MEAN, LAST = "mean", "last-token"
_EPSILON = 1e-12  # a vector shorter than this is divided by it (as torch's normalize does)

# `<arch>.pooling_type` of GGUF files: llama.cpp's enum llama_pooling_type.
_GGUF_KINDS = {0: "none", 1: MEAN, 2: "cls", 3: LAST, 4: "rank"}
_FLAG = "pooling_mode_"  # sentence-transformers: one flag for each mode, or `pooling_mode` with the name
_FLAG_NAMES = {"mean_tokens": MEAN, "lasttoken": LAST, "cls_token": "cls", "max_tokens": "max"}


@dataclass(frozen=True, slots=True)
class PoolingParams:
    """What one request for an embedding may choose.

    Raises InvalidRequestError for a value of the wrong type or out of range.
    """

    dimensions: int | None = None  # keep the first ones only (Matryoshka embeddings); None: all

    def __post_init__(self) -> None:
        size = self.dimensions
        if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
            raise InvalidRequestError("dimensions must be an integer of at least 1", "dimensions")

    def validate_for(self, hidden_size: int) -> None:
        """Check what depends on the model. Raises InvalidRequestError."""
        if self.dimensions is not None and self.dimensions > hidden_size:
            raise InvalidRequestError(
                f"dimensions must be at most {hidden_size} with this model, got {self.dimensions}",
                "dimensions",
            )


@dataclass(frozen=True, slots=True)
class Pooling:
    """How a checkpoint's hidden states become a vector.

    The default is that of a causal model whose files say nothing of embeddings (as in vLLM).
    """

    kind: str = LAST  # MEAN, LAST, or what the checkpoint asks for and is not implemented
    normalize: bool = True  # scale the vector to length 1

    def check(self) -> None:
        """Raise InvalidRequestError unless it is implemented."""
        if self.kind not in (MEAN, LAST):
            raise InvalidRequestError(
                f"this model cannot give embeddings here: its checkpoint's pooling is {self.kind[:80]!r}, "
                f"and only {MEAN} and {LAST} are implemented",
                "model",
            )

    def first_position(self, num_prompt_tokens: int) -> int:
        """Where the positions begin that are pooled; they end with the prompt."""
        return 0 if self.kind == MEAN else num_prompt_tokens - 1


class PooledPrompt:
    """The vector of one prompt, as its chunks are computed."""

    def __init__(self, pooling: Pooling, params: PoolingParams, num_prompt_tokens: int) -> None:
        self._pooling = pooling
        self._params = params
        self._first = self._next = pooling.first_position(num_prompt_tokens)
        self._end = num_prompt_tokens
        self._sum: np.ndarray | None = None  # float32 [hidden], of positions [_first, _next)

    def add(self, first: int, count: int, total: np.ndarray) -> None:
        """Take the sum, float32 [hidden], over positions [first, first + count).

        A preempted request computes its prompt anew from the first position: so does the sum.
        """
        if first == self._first:
            self._sum, self._next = np.zeros_like(total), first
        assert first == self._next, "chunks come in order"
        assert self._sum is not None
        self._sum += total
        self._next = first + count

    @property
    def is_complete(self) -> bool:
        return self._next == self._end

    def vector(self) -> np.ndarray:
        """float32 [hidden], or [dimensions] where the request asked for fewer."""
        assert self.is_complete
        assert self._sum is not None
        pooled = self._sum / np.float32(self._end - self._first)
        pooled = pooled[: self._params.dimensions]
        if self._pooling.normalize:
            pooled = pooled / max(np.linalg.norm(pooled), np.float32(_EPSILON))
        return np.ascontiguousarray(pooled, np.float32)


def embedding_of(output: RequestOutput) -> np.ndarray:
    """The vector of a finished request; raises EngineDeadError where it was ended before it had one."""
    if output.embedding is None:
        raise EngineDeadError("the request was ended before its embedding was complete")
    return output.embedding


def pooling_of(checkpoint: Checkpoint) -> Pooling:
    """What a checkpoint says about embeddings.

    Raises ConfigError where it cannot be understood, CheckpointError where a file cannot be read.
    """
    if checkpoint.format == "gguf":
        return _from_gguf(checkpoint.metadata)
    modules = checkpoint.encoder_modules()
    return Pooling() if modules is None else _from_modules(modules)


def _from_gguf(metadata: Mapping[str, Any]) -> Pooling:
    key = f"{metadata.get('general.architecture')}.pooling_type"
    value = metadata.get(key)
    if value is None:
        return Pooling()
    if type(value) is not int:
        raise ConfigError(f"{key} must be an integer, got {str(value)[:64]!r}")
    return Pooling(_GGUF_KINDS.get(value, f"type {value}"))


def _from_modules(modules: Sequence[EncoderModule]) -> Pooling:
    """Of a list that is Transformer, Pooling and perhaps Normalize; anything else is not implemented."""
    kinds = [module.kind for module in modules]
    if kinds[:2] != ["Transformer", "Pooling"] or kinds[2:] not in ([], ["Normalize"]):
        return Pooling(" > ".join(kinds) or "none")
    return Pooling(" + ".join(_modes(modules[1])), normalize="Normalize" in kinds)


def _modes(module: EncoderModule) -> list[str]:
    """The modes that a Pooling module joins; one in nearly all checkpoints."""
    config = module.config
    if config.get("pooling_mode") is not None:
        named = config["pooling_mode"]
        names: Any = [named] if isinstance(named, str) else named
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ConfigError(f"{module.file}: pooling_mode must be a name or a list of names")
        modes = [LAST if name == "lasttoken" else name for name in names]
    else:
        flags = {key.removeprefix(_FLAG): value for key, value in config.items() if key.startswith(_FLAG)}
        wrong = [name for name, value in flags.items() if not isinstance(value, bool)]
        if wrong:
            raise ConfigError(f"{module.file}: {_FLAG + wrong[0]!r} must be true or false")
        modes = [_FLAG_NAMES.get(name, name) for name, value in flags.items() if value]
    if not modes:
        raise ConfigError(f"{module.file}: no pooling mode is chosen")
    return modes
