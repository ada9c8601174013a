"""Families: how their configs are read, and what their programs do over a mesh."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxserve.errors import ConfigError, UnsupportedModelError
from jaxserve.models.attention import Placement
from jaxserve.models.config import ModelConfig
from jaxserve.models.layers import MODEL_AXIS
from jaxserve.models.moe import SparseMLP
from jaxserve.models.registry import family_of, read_model
from jaxserve.sharding import make_mesh
from jaxserve.skeleton import build_skeleton
from jaxserve_checkpoints import Checkpoint
from tests.jaxserve.tiny import GOLDENS, TINY

pytestmark = pytest.mark.quick


def raw(pack: str, **changes: Any) -> dict[str, Any]:
    """A pack's config.json with other values; None takes a key away."""
    config = json.loads((GOLDENS / "arch" / pack / "config.json").read_text()) | changes
    return {k: v for k, v in config.items() if v is not None}


def read(config: dict[str, Any]) -> ModelConfig:
    return family_of(config).config_from_hf(config)


@pytest.mark.parametrize("pack", ["qwen3", "qwen3_moe"])
def test_qwen3_configs_of_both_generations_mean_the_same(pack: str) -> None:
    older = raw(pack, rope_parameters=None, layer_types=None, rope_theta=1e6, torch_dtype="float32")
    assert read(older) == read(raw(pack))


def test_gemma3_configs_of_both_generations_mean_the_same() -> None:
    older = raw(
        "gemma3_text",
        rope_parameters=None,
        layer_types=None,
        _sliding_window_pattern=None,
        sliding_window_pattern=3,
        rope_theta=100000.0,
        rope_scaling={"rope_type": "linear", "factor": 4.0},
        rope_local_base_freq=1000.0,
        cache_implementation="hybrid",
    )
    config = read(older)
    assert config == read(raw("gemma3_text"))
    assert config.layer_windows == (8, 8, None, 8)
    assert config.attention_scale == 24**-0.5


def test_a_published_gemma3_leaves_out_what_is_usual() -> None:
    """The keys that google/gemma-3-12b-it's config.json has; the sizes it lacks are its model card's."""
    config = read(
        {
            "architectures": ["Gemma3ForConditionalGeneration"],
            "boi_token_index": 255999,
            "eoi_token_index": 256000,
            "eos_token_id": [1, 106],
            "image_token_index": 262144,
            "initializer_range": 0.02,
            "mm_tokens_per_image": 256,
            "model_type": "gemma3",
            "text_config": {
                "hidden_size": 3840,
                "intermediate_size": 15360,
                "model_type": "gemma3_text",
                "num_attention_heads": 16,
                "num_hidden_layers": 48,
                "num_key_value_heads": 8,
                "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
                "sliding_window": 1024,
            },
            "torch_dtype": "bfloat16",
            "vision_config": {"hidden_size": 1152},
        }
    )
    assert (config.head_dim, config.vocab_size, config.max_position_embeddings) == (256, 262208, 131072)
    assert config.layer_windows[:6] == (1024,) * 5 + (None,)
    assert config.rope.theta == 1e6
    assert config.rope.parameters == {"factor": 8.0}
    assert config.local_rope is not None
    assert (config.local_rope.theta, config.local_rope.rope_type) == (1e4, "default")
    assert config.eos_token_ids == (1, 106)
    assert config.tie_word_embeddings
    assert 11.7e9 < config.num_parameters < 11.8e9


def test_qwen3_windows_begin_where_the_config_says() -> None:
    used = {"use_sliding_window": True, "sliding_window": 64, "layer_types": None}
    assert read(raw("qwen3", **used, max_window_layers=1)).layer_windows == (None, 64)
    assert read(raw("qwen3", **used, max_window_layers=2)).layer_windows == ()
    assert read(raw("qwen3", use_sliding_window=False, sliding_window=64)).layer_windows == ()
    assert read(raw("qwen3_moe", **used)).layer_windows == (64, 64)


@pytest.mark.parametrize(
    ("pack", "changes"),
    [
        ("qwen3", {"rotary_mode": "odd"}),
        ("qwen3", {"hidden_act": "gelu"}),
        ("qwen3", {"layer_types": ["full_attention", "chunked_attention"]}),
        ("qwen3_moe", {"decoder_sparse_step": 2}),
        ("qwen3_moe", {"mlp_only_layers": [0]}),
        ("qwen3_moe", {"shared_expert_intermediate_size": 8}),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}),
        ("gemma3_text", {"use_bidirectional_attention": True}),
        ("gemma3_text", {"rope_parameters": {"chunked_attention": {"rope_type": "default"}}}),
    ],
    ids=str,
)
def test_what_a_family_does_not_implement_is_refused(pack: str, changes: dict[str, Any]) -> None:
    (key,) = changes
    with pytest.raises(UnsupportedModelError, match="layer type" if key == "layer_types" else key):
        read(raw(pack, **changes))


@pytest.mark.parametrize(
    ("pack", "changes", "word"),
    [
        ("qwen3", {"layer_types": ["full_attention"]}, "layer_types"),
        ("qwen3", {"use_sliding_window": True}, "sliding_window"),
        ("qwen3", {"layer_types": ["full_attention", "sliding_attention"]}, "sliding window"),
        ("qwen3_moe", {"num_experts_per_tok": 7}, "7 experts"),
        ("gemma3_text", {"num_key_value_heads": 3}, "evenly"),
    ],
    ids=str,
)
def test_a_config_that_contradicts_itself_is_refused(pack: str, changes: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        read(raw(pack, **changes))


@pytest.mark.parametrize("pack", ["llama_gqa", "llama_bias_tied", "qwen3", "qwen3_moe", "gemma3_text"])
@pytest.mark.parametrize("layout", ["looped", "stacked"])
def test_parameters_are_counted_as_they_are(pack: str, layout: Any) -> None:
    config = read(raw(pack))
    mesh = make_mesh(jax.devices(), 1)
    skeleton = build_skeleton(family_of(raw(pack)), config, np.dtype("float32"), mesh, 64, layout)
    sizes = {leaf.path: int(np.prod(leaf.shape)) for leaf in skeleton.leaves}
    del sizes["rope_inv_freq",]
    assert sum(sizes.values()) == config.num_parameters


def test_a_token_reads_its_own_experts() -> None:
    config = read(raw("qwen3_moe"))
    idle = config.num_layers * (6 - 2) * 3 * 48 * 24  # four of six experts
    embedding = 192 * 48
    assert config.num_active_parameters == config.num_parameters - idle - embedding


EXPERTS = dataclasses.replace(
    TINY, num_experts=4, num_experts_per_token=2, moe_intermediate_size=24, norm_topk_prob=True
)


def sparse_mlp(num_devices: int, num_experts: int = 4) -> tuple[SparseMLP, Any]:
    """The layer for that many devices, of the same values for any, and the mesh."""
    mesh = make_mesh(jax.devices(), num_devices)
    config = dataclasses.replace(EXPERTS, num_experts=num_experts)
    mlp = SparseMLP(config, dtype=jnp.dtype(jnp.float32), placement=Placement(mesh))
    rng = np.random.default_rng(3)
    for _, param in nnx.iter_graph(mlp):
        if isinstance(param, nnx.Param):
            param.set_value(jnp.asarray(rng.standard_normal(param.shape), jnp.float32) * 0.3)
    return mlp, mesh


def compile_on(mlp: SparseMLP, mesh: Any, num_tokens: int) -> tuple[Any, Any]:
    """The compiled layer with its experts split, and its state."""
    graphdef, state = nnx.split(mlp)
    split = mlp.num_experts % mesh.size == 0
    axes = jax.tree.map(lambda a: P(MODEL_AXIS) if a.ndim == 3 and split else P(), state)
    state = jax.tree.map(lambda a, p: jax.device_put(a, NamedSharding(mesh, p)), state, axes)
    x = jax.device_put(jnp.zeros((num_tokens, TINY.hidden_size)), NamedSharding(mesh, P()))
    run = jax.jit(lambda s, x: nnx.merge(graphdef, s)(x), out_shardings=NamedSharding(mesh, P()))
    return run.lower(state, x).compile(), state


def test_experts_are_those_of_the_definition() -> None:
    """Against a loop over tokens and their experts in numpy."""
    mlp, _ = sparse_mlp(1)
    x = np.random.default_rng(0).standard_normal((5, 32)).astype(np.float32)
    gate, up, down = (
        np.asarray(w[...]) for w in (mlp.experts.gate_proj, mlp.experts.up_proj, mlp.experts.down_proj)
    )
    expected = np.zeros_like(x)
    for t, row in enumerate(x):
        scores = np.asarray(mlp.gate.weight[...]) @ row
        best = np.argsort(-scores)[:2]
        weights = np.exp(scores[best]) / np.exp(scores[best]).sum()  # what normalising leaves of the softmax
        for w, e in zip(weights, best, strict=True):
            gated = row @ gate[e]
            expected[t] += w * ((gated / (1 + np.exp(-gated)) * (row @ up[e])) @ down[e])
    np.testing.assert_allclose(mlp(jnp.asarray(x)), expected, atol=1e-5)


@pytest.mark.parametrize(("num_devices", "num_experts"), [(2, 4), (4, 4), (2, 3)])
def test_experts_over_a_mesh_give_the_same_with_one_all_reduce(num_devices: int, num_experts: int) -> None:
    """Experts that the devices cannot share evenly are computed by each, with no all-reduce."""
    x = jnp.asarray(np.random.default_rng(1).standard_normal((6, 32)), jnp.float32)
    alone, _ = sparse_mlp(1, num_experts)
    mlp, mesh = sparse_mlp(num_devices, num_experts)
    compiled, state = compile_on(mlp, mesh, 6)
    out = compiled(state, jax.device_put(x, NamedSharding(mesh, P())))
    np.testing.assert_allclose(out, alone(x), atol=1e-5)
    text = compiled.as_text()
    assert text.count(" all-reduce(") == (1 if num_experts % num_devices == 0 else 0)
    for other in ("all-gather", "all-to-all", "collective-permute", "reduce-scatter"):
        assert other not in text


@pytest.mark.parametrize("architecture", ["qwen3", "qwen3moe", "gemma3"])
def test_families_without_gguf_names_say_so(architecture: str, tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path, "gguf", None, {"general.architecture": architecture}, {}, {})
    with pytest.raises(UnsupportedModelError, match=rf"{architecture}.*GGUF"):
        read_model(checkpoint)
