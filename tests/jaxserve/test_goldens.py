"""Logits and greedy tokens of whole checkpoints against transformers' (see each pack's meta.json)."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxserve import LLM, SamplingParams, loading
from jaxserve.skeleton import build_skeleton
from pallas_kernels.pool_layout import HEAD_AXIS
from tests.jaxserve.tiny import GOLDENS

ARCH = sorted(p.name for p in (GOLDENS / "arch").iterdir())
GGUF = sorted(p.name for p in (GOLDENS / "gguf").iterdir())


def load(path: Path, **engine_args: Any) -> LLM:
    return LLM(
        path,
        max_num_seqs=1,
        max_num_batched_tokens=16,
        max_model_len=96,
        page_size=8,
        warmup="none",
        **engine_args,
    )


def prompts(pack: Path) -> Iterator[tuple[list[int], np.ndarray, list[int] | None]]:
    golden = np.load(pack / "golden.npz")
    for key in sorted(k for k in golden.files if k.startswith("input_ids_")):
        index = key.rsplit("_", 1)[1]
        greedy = golden[f"greedy_{index}"].tolist() if f"greedy_{index}" in golden.files else None
        yield golden[key].tolist(), golden[f"logits_{index}"], greedy


def check(llm: LLM, pack: Path, atol: float, rtol: float = 0.0) -> None:
    for ids, logits, greedy in prompts(pack):
        np.testing.assert_allclose(llm.logits(ids), logits, atol=atol, rtol=rtol)
        if greedy is not None:
            params = SamplingParams(temperature=0, max_tokens=len(greedy), ignore_eos=True)
            assert llm.generate([ids], params)[0].outputs[0].token_ids == greedy
    llm.check_integrity()


@pytest.mark.parametrize("name", ARCH)
def test_safetensors_llama_equals_the_reference(name: str) -> None:
    pack = GOLDENS / "arch" / name
    with load(pack) as llm:
        check(llm, pack, atol=1e-4)


@pytest.mark.parametrize("name", GGUF)
def test_gguf_equals_the_reference(name: str) -> None:
    pack = GOLDENS / "gguf" / name
    tolerance = json.loads((pack / "meta.json").read_text())["tolerance"]["float32"]
    with load(pack / "model.gguf", quantization="none") as llm:
        check(llm, pack, atol=tolerance["logits_atol"], rtol=tolerance["logits_rtol"])


@pytest.mark.parametrize(
    "name", ["llama_rope_llama3", "llama_rope_yarn", "llama_rope_linear", "llama_rope_dynamic"]
)
def test_the_older_config_style_means_the_same(name: str, tmp_path: Path) -> None:
    pack = GOLDENS / "arch" / name
    config = json.loads((pack / "config.json").read_text())
    rope = config.pop("rope_parameters")
    config |= {"rope_theta": rope.pop("rope_theta"), "torch_dtype": config.pop("dtype")}
    config["rope_scaling"] = {"type": rope.pop("rope_type"), **rope}
    (tmp_path / "config.json").write_text(json.dumps(config))
    shutil.copy(pack / "model.safetensors", tmp_path)
    with load(tmp_path) as llm:
        check(llm, pack, atol=1e-4)


def test_a_sharded_bfloat16_checkpoint_equals_its_values_in_float32(tmp_path: Path) -> None:
    """The expected logits are the same engine's on float32 files holding the rounded values."""
    pack = GOLDENS / "arch" / "llama_gqa"
    rounded = {k: v.astype(ml_dtypes.bfloat16) for k, v in load_file(pack / "model.safetensors").items()}
    names = sorted(rounded)
    halves = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    sharded, whole = tmp_path / "sharded", tmp_path / "whole"
    for directory in (sharded, whole):
        directory.mkdir()
        shutil.copy(pack / "config.json", directory)
    for file, part in halves.items():
        save_file({n: rounded[n] for n in part}, sharded / file)
    index = {"weight_map": {n: file for file, part in halves.items() for n in part}}
    (sharded / "model.safetensors.index.json").write_text(json.dumps(index))
    save_file({n: v.astype(np.float32) for n, v in rounded.items()}, whole / "model.safetensors")
    ids = next(prompts(pack))[0]
    with load(sharded) as a, load(whole) as b:
        np.testing.assert_array_equal(a.logits(ids), b.logits(ids))


@pytest.mark.quick
@pytest.mark.parametrize(
    ("name", "num_devices", "kv_heads"),
    [
        ("llama_gqa", 2, 1),
        ("llama_gqa", 3, 2),  # four query heads do not divide: every device computes all
        ("llama_rope_llama3", 2, 1),  # one key-value head, which every device has
        ("llama_rope_llama3", 4, 1),
        ("qwen3", 2, 1),
        ("qwen3_moe", 2, 1),
        ("qwen3_moe", 4, 1),  # two key-value heads, twice each; six experts: every device computes all
        ("gemma3_text", 2, 1),
    ],
)
def test_tensor_parallel_gives_the_same_tokens(name: str, num_devices: int, kv_heads: int) -> None:
    """`kv_heads`: in each device's part of the pool."""
    pack = GOLDENS / "arch" / name
    with load(pack, tensor_parallel_size=num_devices) as llm:
        check(llm, pack, atol=1e-4)
        parts = llm._engine.runner._kv_pool.addressable_shards
        assert [part.data.shape[HEAD_AXIS] for part in parts] == [kv_heads] * num_devices


@pytest.mark.parametrize(
    ("name", "num_devices"),
    [
        ("llama_bias_tied", 1),
        ("llama_rope_llama3", 4),
        ("qwen3", 2),
        ("qwen3_moe", 1),
        ("qwen3_moe", 2),
        ("gemma3_text", 1),
    ],
)
def test_stacked_layers_give_the_same_tokens(
    name: str, num_devices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The layout that accelerators use."""
    monkeypatch.setattr(loading, "build_skeleton", functools.partial(build_skeleton, layout="stacked"))
    pack = GOLDENS / "arch" / name
    with load(pack, tensor_parallel_size=num_devices) as llm:
        check(llm, pack, atol=1e-4)
        named = {n: np.asarray(v) for n, v in llm.named_weights().items()}
        files = load_file(pack / "model.safetensors")
        assert {n for n in files if n in named} == set(named)
        for n, value in named.items():
            np.testing.assert_array_equal(value, files[n])
        ids = next(prompts(pack))[0]
        before = llm.logits(ids)
        llm.update_weights({n: -v if "up_proj" in n else v for n, v in named.items()})
        assert not np.array_equal(llm.logits(ids), before)
        llm.update_weights(named)
        np.testing.assert_array_equal(llm.logits(ids), before)


def test_a_gemma3_with_an_image_encoder_is_served_as_text(tmp_path: Path) -> None:
    pack = GOLDENS / "arch" / "gemma3_text"
    text = json.loads((pack / "config.json").read_text())
    config = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "text_config": text,
        "vision_config": {"hidden_size": 8},
        "mm_tokens_per_image": 4,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    arrays = {f"language_model.{n}": v for n, v in load_file(pack / "model.safetensors").items()}
    arrays["vision_tower.vision_model.post_layernorm.weight"] = np.zeros(8, np.float32)
    save_file(arrays, tmp_path / "model.safetensors")
    with load(tmp_path) as llm:
        check(llm, pack, atol=1e-4)


@pytest.mark.parametrize("name", ["llama_gqa"])
def test_the_twin_attention_gives_the_same_tokens(name: str) -> None:
    pack = GOLDENS / "arch" / name
    with load(pack, attention_implementation="reference") as llm:
        check(llm, pack, atol=1e-4)


@pytest.mark.parametrize("name", ["llama_gqa", "qwen3", "gemma3_text"])
def test_bfloat16_stays_near_the_reference(name: str) -> None:
    pack = GOLDENS / "arch" / name
    limit = json.loads((pack / "meta.json").read_text())["tolerance"]["bfloat16"]
    with load(pack, dtype="bfloat16") as llm:
        for ids, logits, _ in prompts(pack):
            ours = llm.logits(ids).astype(np.float64)
            p, q = (x - np.log(np.exp(x).sum(-1, keepdims=True)) for x in (logits.astype(np.float64), ours))
            assert (np.exp(p) * (p - q)).sum(-1).mean() < limit["mean_kl"]
            assert np.abs(ours - logits).mean() < limit["logits_mean_abs"]


def test_a_float8_pool_stays_near_the_reference() -> None:
    pack = GOLDENS / "arch" / "llama_gqa"
    with load(pack, kv_cache_dtype="float8_e4m3fn") as llm:
        for ids, logits, _ in prompts(pack):
            ours = llm.logits(ids).astype(np.float64)
            p, q = (x - np.log(np.exp(x).sum(-1, keepdims=True)) for x in (logits.astype(np.float64), ours))
            assert 1e-7 < (np.exp(p) * (p - q)).sum(-1).mean() < 1e-2  # not equal: 3 bits of mantissa
