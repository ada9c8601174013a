"""What a checkpoint says about embeddings, and what is never guessed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxserve.errors import ConfigError, InvalidRequestError
from jaxserve.pooling import LAST, MEAN, PooledPrompt, Pooling, PoolingParams, pooling_of
from jaxserve_checkpoints import Checkpoint, EncoderModule

pytestmark = pytest.mark.quick
NO_FLAGS = dict.fromkeys(
    (
        "pooling_mode_cls_token",
        "pooling_mode_mean_tokens",
        "pooling_mode_max_tokens",
        "pooling_mode_mean_sqrt_len_tokens",
        "pooling_mode_weightedmean_tokens",
        "pooling_mode_lasttoken",
    ),
    False,
)


class Files:
    """Stands for a safetensors checkpoint with these modules."""

    format = "safetensors"

    def __init__(self, modules: list[tuple[str, dict[str, Any]]] | None) -> None:
        self._modules = modules

    def encoder_modules(self) -> tuple[EncoderModule, ...] | None:
        if self._modules is None:
            return None
        return tuple(EncoderModule(kind, Path(f"{kind}/config.json"), c) for kind, c in self._modules)


def read(modules: list[tuple[str, dict[str, Any]]] | None) -> Pooling:
    return pooling_of(Files(modules))  # type: ignore[arg-type]


def pooled_by(config: dict[str, Any], *more: str) -> Pooling:
    return read([("Transformer", {}), ("Pooling", config), *((kind, {}) for kind in more)])


def gguf(**metadata: Any) -> Pooling:
    metadata = {"general.architecture": "llama", **{f"llama.{k}": v for k, v in metadata.items()}}
    return pooling_of(Checkpoint(Path("m.gguf"), "gguf", None, metadata, {}, {}))


def test_a_causal_model_without_a_word_of_embeddings_gives_its_last_token_scaled() -> None:
    assert read(None) == gguf() == Pooling(LAST, normalize=True)


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        ({**NO_FLAGS, "pooling_mode_mean_tokens": True, "word_embedding_dimension": 64}, MEAN),
        ({**NO_FLAGS, "pooling_mode_lasttoken": True, "include_prompt": True}, LAST),
        ({"pooling_mode": "mean"}, MEAN),
        ({"pooling_mode": "lasttoken"}, LAST),
        ({"pooling_mode": ["mean"]}, MEAN),
    ],
)
def test_modules_choose_the_pooling(config: dict[str, Any], kind: str) -> None:
    assert pooled_by(config) == Pooling(kind, normalize=False)
    assert pooled_by(config, "Normalize") == Pooling(kind, normalize=True)
    pooled_by(config).check()


@pytest.mark.parametrize(("number", "kind"), [(1, MEAN), (3, LAST)])
def test_gguf_metadata_chooses_the_pooling(number: int, kind: str) -> None:
    assert gguf(pooling_type=number) == Pooling(kind, normalize=True)


@pytest.mark.parametrize(
    ("pooling", "named"),
    [
        (pooled_by({**NO_FLAGS, "pooling_mode_cls_token": True}), "'cls'"),
        (pooled_by({**NO_FLAGS, "pooling_mode_max_tokens": True}), "'max'"),
        (pooled_by({**NO_FLAGS, "pooling_mode_weightedmean_tokens": True}), "'weightedmean_tokens'"),
        (pooled_by({"pooling_mode": "weightedmean"}), "'weightedmean'"),
        (pooled_by({"pooling_mode_mean_tokens": True, "pooling_mode_lasttoken": True}), r"'mean \+ last"),
        (pooled_by({"pooling_mode": "mean"}, "Dense", "Normalize"), "Dense"),
        (read([("Transformer", {}), ("Normalize", {})]), "Transformer > Normalize"),
        (read([]), "'none'"),
        (gguf(pooling_type=0), "'none'"),
        (gguf(pooling_type=2), "'cls'"),
        (gguf(pooling_type=4), "'rank'"),
        (gguf(pooling_type=99), "'type 99'"),
    ],
)
def test_what_is_not_implemented_is_named(pooling: Pooling, named: str) -> None:
    with pytest.raises(InvalidRequestError, match=named) as caught:
        pooling.check()
    assert caught.value.param == "model"


@pytest.mark.parametrize(
    "config",
    [
        {},
        NO_FLAGS,
        {"pooling_mode": []},
        {"pooling_mode": 3},
        {"pooling_mode": ["mean", 3]},
        {"pooling_mode_mean_tokens": 1},
        {"pooling_mode_mean_tokens": "yes"},
        {"pooling_mode_\n\x1b[31m": 1},
    ],
)
def test_a_config_that_says_nothing_clear_is_one_line(config: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"Pooling.config\.json") as caught:
        pooled_by(config)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("value", ["mean", 1.0, True])
def test_a_gguf_pooling_type_that_is_no_integer_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"llama\.pooling_type"):
        gguf(pooling_type=value)


@pytest.mark.parametrize("dimensions", [0, -1, 0.5, True, "8"])
def test_dimensions_are_checked(dimensions: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        PoolingParams(dimensions=dimensions)
    assert caught.value.param == "dimensions"


def rows(first: int, count: int) -> tuple[int, int, np.ndarray]:
    """Hidden states that are (position, 1, 0, 0), summed."""
    positions = np.arange(first, first + count, dtype=np.float32)
    return first, count, np.array([positions.sum(), count, 0, 0], np.float32)


def test_a_mean_over_chunks_is_that_of_all_positions() -> None:
    pooled = PooledPrompt(Pooling(MEAN, normalize=False), PoolingParams(), 10)
    for first, count in ((0, 4), (4, 5), (9, 1)):
        assert not pooled.is_complete
        pooled.add(*rows(first, count))
    assert pooled.is_complete
    np.testing.assert_array_equal(pooled.vector(), [4.5, 1, 0, 0])


def test_a_prompt_computed_anew_counts_once() -> None:
    pooled = PooledPrompt(Pooling(MEAN, normalize=False), PoolingParams(), 10)
    for first, count in ((0, 4), (4, 5), (0, 7), (7, 3)):
        pooled.add(*rows(first, count))
    np.testing.assert_array_equal(pooled.vector(), [4.5, 1, 0, 0])


def test_a_gap_between_chunks_is_never_averaged_over() -> None:
    pooled = PooledPrompt(Pooling(MEAN), PoolingParams(), 10)
    pooled.add(*rows(0, 4))
    with pytest.raises(AssertionError, match="in order"):
        pooled.add(*rows(5, 5))


def test_fewer_dimensions_are_scaled_again() -> None:
    def vector(pooling: Pooling, dimensions: int | None) -> np.ndarray:
        pooled = PooledPrompt(pooling, PoolingParams(dimensions), 1)
        pooled.add(0, 1, np.array([3, 4, 12, 0], np.float32))
        return pooled.vector()

    np.testing.assert_allclose(vector(Pooling(LAST), None), np.array([3, 4, 12, 0]) / 13, rtol=1e-6)
    np.testing.assert_allclose(vector(Pooling(LAST), 2), [0.6, 0.8], rtol=1e-6)
    np.testing.assert_array_equal(vector(Pooling(LAST, normalize=False), 2), [3, 4])


def test_a_vector_of_zeros_stays_one() -> None:
    pooled = PooledPrompt(Pooling(LAST), PoolingParams(), 1)
    pooled.add(0, 1, np.zeros(4, np.float32))
    np.testing.assert_array_equal(pooled.vector(), np.zeros(4))
