"""Weights from modules, named arrays and files, to leaves of one layer or of all."""

from __future__ import annotations

import dataclasses
import json
import weakref
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxserve.errors import ConfigError
from jaxserve.models.attention import Layout, Placement
from jaxserve.models.config import ModelConfig
from jaxserve.models.registry import family_by_name, family_of
from jaxserve.sharding import make_mesh
from jaxserve.skeleton import ROPE_PATH, ModelSkeleton, build_skeleton
from jaxserve.weights import load_weights, named_arrays, weights_from
from jaxserve_checkpoints import Checkpoint, open_checkpoint
from tests.jaxserve.tiny import GOLDENS, TINY

pytestmark = pytest.mark.quick
FLOAT32 = jnp.dtype(jnp.float32)
EXPERTS = dataclasses.replace(
    TINY,
    family="qwen3_moe",
    qk_norm=True,
    num_experts=4,
    num_experts_per_token=2,
    moe_intermediate_size=24,
)


def skeleton_of(config: ModelConfig, layout: Layout, num_devices: int = 1) -> ModelSkeleton:
    mesh = make_mesh(jax.devices(), num_devices)
    return build_skeleton(family_by_name(config.family), config, np.dtype("float32"), mesh, 64, layout)


def random_module(config: ModelConfig, layout: Layout = "unrolled") -> Any:
    module = family_by_name(config.family).module(config, dtype=FLOAT32, placement=Placement(layout=layout))
    rng = np.random.default_rng(0)
    for _, param in nnx.iter_graph(module):
        if isinstance(param, nnx.Param):
            param.set_value(jnp.asarray(rng.standard_normal(param.shape), jnp.float32))
    return module


@pytest.mark.parametrize("config", [TINY, EXPERTS], ids=["llama", "qwen3_moe"])
@pytest.mark.parametrize("layout", ["looped", "stacked"])
@pytest.mark.parametrize("num_devices", [1, 2])
def test_a_module_of_listed_layers_fills_any_layout(
    config: ModelConfig, layout: Layout, num_devices: int
) -> None:
    """What comes out by name is what was put in by attribute, experts the way files have them."""
    module = random_module(config)
    skeleton = skeleton_of(config, layout, num_devices)
    weights = weights_from(module, skeleton)
    for leaf, array in zip(skeleton.leaves, weights, strict=True):
        assert array.shape == leaf.shape
        assert array.sharding.is_equivalent_to(leaf.sharding, array.ndim)
    named = named_arrays(weights, skeleton)
    for i, layer in enumerate(module.layers):
        hf = f"model.layers.{i}"
        np.testing.assert_array_equal(
            named[f"{hf}.self_attn.q_proj.weight"], layer.self_attn.q_proj.weight[...]
        )
        if config.num_experts:
            for e in range(config.num_experts):
                expected = np.asarray(layer.mlp.experts.down_proj[...])[e].T  # files: [hidden, width]
                np.testing.assert_array_equal(named[f"{hf}.mlp.experts.{e}.down_proj.weight"], expected)
    again = weights_from(dict(named), skeleton)
    for one, other in zip(weights, again, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_stacked_module_is_taken_as_it_is() -> None:
    module, skeleton = random_module(TINY, "stacked"), skeleton_of(TINY, "stacked")
    weights = weights_from(module, skeleton)
    paths = [leaf.path for leaf in skeleton.leaves]
    taken = weights[paths.index(("layers", "mlp", "up_proj", "weight"))]
    given = module.layers.mlp.up_proj.weight[...]
    assert taken.unsafe_buffer_pointer() == given.unsafe_buffer_pointer()


@pytest.mark.parametrize("layout", ["looped", "stacked"])
@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda a, n: a.pop(n), "is missing"),
        (lambda a, n: a.update({n: a[n][:, 1:]}), "has shape"),
        (lambda a, n: a.update({n: a[n].astype(np.int32)}), "expected floats"),
        (lambda a, n: a.update({n.replace("1.", "9.", 1): a[n]}), "has no place"),
    ],
    ids=["missing", "misshapen", "not floats", "left over"],
)
def test_an_array_that_does_not_fit_is_named(layout: Layout, edit: Any, words: str) -> None:
    skeleton = skeleton_of(TINY, layout)
    arrays = dict(named_arrays(weights_from(random_module(TINY), skeleton), skeleton))
    edit(arrays, "model.layers.1.mlp.gate_proj.weight")
    with pytest.raises(ConfigError, match=rf"layers\.[19]\.mlp\.gate_proj.*{words}"):
        weights_from(arrays, skeleton)


class Watched(np.ndarray):
    """An array that can be seen to go."""


def watched(checkpoint: Checkpoint) -> tuple[Checkpoint, list[int]]:
    """The checkpoint, and how many tensors that it has read were still in use at each read."""
    alive: weakref.WeakSet[Any] = weakref.WeakSet()
    counts: list[int] = []

    class Token:
        pass

    class Ref:
        def __init__(self, ref: Any) -> None:
            self._ref = ref

        def __getattr__(self, name: str) -> Any:
            return getattr(self._ref, name)

        def read(self) -> np.ndarray:
            value = np.array(self._ref.read()).view(Watched)
            value.token = Token()  # type: ignore[attr-defined]
            alive.add(value.token)  # type: ignore[attr-defined]
            counts.append(len(alive))
            return value

    tensors: Any = {name: Ref(ref) for name, ref in checkpoint.tensors.items()}
    return dataclasses.replace(checkpoint, tensors=tensors), counts


@pytest.mark.parametrize("pack", ["llama_gqa", "qwen3_moe"])
def test_the_host_holds_few_tensors_at_a_time(pack: str) -> None:
    """Two leaves are filled at once, each from one tensor after another."""
    raw = json.loads((GOLDENS / "arch" / pack / "config.json").read_text())
    family = family_of(raw)
    mesh = make_mesh(jax.devices(), 2)
    config = family.config_from_hf(raw)
    skeleton = build_skeleton(family, config, np.dtype("float32"), mesh, 64, "stacked")
    checkpoint, counts = watched(open_checkpoint(Path(GOLDENS / "arch" / pack)))
    progress: list[tuple[int, int]] = []
    weights = load_weights(checkpoint, skeleton, lambda done, total: progress.append((done, total)))
    assert len(counts) == len(checkpoint.tensors) > 20
    assert max(counts) <= 2, max(counts)
    assert progress[-1] == (len(counts), len(counts))
    assert [done for done, _ in progress] == sorted(done for done, _ in progress)
    assert all(w.dtype == leaf.dtype for w, leaf in zip(weights, skeleton.leaves, strict=True))
    assert sum(leaf.path == ROPE_PATH for leaf in skeleton.leaves) == 1
