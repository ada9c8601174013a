"""Models whose matrices stay at 4 or 8 bits: close to the exact ones, small, and plain about what runs."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType as Kind
from gguf.quants import quantize
from safetensors.numpy import load_file

from jaxserve import LLM, SamplingParams
from jaxserve.batch import Bucket
from jaxserve.errors import ConfigError
from jaxserve.loading import cache_directory
from jaxserve.models.llama_gguf import gguf_name
from jaxserve_checkpoints import open_checkpoint
from pallas_kernels import native
from tests.jaxserve.tiny import GOLDENS

PROMPT = list(range(3, 15))
FORMATS = ("q4_0", "q4_1", "q8_0")
BIASED = GOLDENS / "arch" / "llama_bias_tied"
UNTIED = GOLDENS / "arch" / "llama_gqa"
Q4_1, Q8_0, F32 = Kind.Q4_1, Kind.Q8_0, Kind.F32


@contextmanager
def engine(model: Any, quantization: str = "auto", **args: Any) -> Iterator[tuple[LLM, list[str]]]:
    """An engine of one program for prompts, and the lines it printed."""
    lines: list[str] = []
    settings = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 32,
        "max_model_len": 64,
        "page_size": 8,
        "warmup": "none",
        "quantization": quantization,
        **args,
    }
    with LLM(model, report=lines.append, **settings) as llm:
        yield llm, lines


@pytest.fixture
def native_kernels() -> None:
    """Skips where this machine cannot have them."""
    isa, reason = native.find(cache_directory() / "native")
    if isa is None:
        if os.environ.get("REQUIRE_COMPILERS"):
            raise AssertionError(reason)
        pytest.skip(reason)


@pytest.fixture
def no_native_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "find", lambda directory: (None, "no C++ compiler on the PATH"))


def divergence(exact: np.ndarray, found: np.ndarray) -> float:
    """Mean KL divergence of rows of logits."""

    def log_softmax(x: np.ndarray) -> np.ndarray:
        x = x.astype(np.float64) - x.max(axis=1, keepdims=True)
        return x - np.log(np.exp(x).sum(axis=1, keepdims=True))

    p, q = log_softmax(exact), log_softmax(found)
    return float((np.exp(p) * (p - q)).sum(axis=1).mean())


def to_gguf(pack: Path, path: Path, kind_of: Callable[[str], Kind], **arrays: np.ndarray) -> Path:
    """A pack's safetensors file as GGUF, each matrix quantised; rows of q and k as they come."""
    config = json.loads((pack / "config.json").read_text())
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_context_length(config["max_position_embeddings"])
    for hf_name, value in {**load_file(pack / "model.safetensors"), **arrays}.items():
        kind = kind_of(hf_name) if value.ndim == 2 else F32
        data = quantize(np.asarray(value, np.float32), kind)
        writer.add_tensor(gguf_name(hf_name), data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def golden(pack: Path) -> tuple[list[int], np.ndarray]:
    arrays = np.load(pack / "golden.npz")
    key = min(k for k in arrays.files if k.startswith("input_ids_"))
    return arrays[key].tolist(), arrays[key.replace("input_ids", "logits")]


@pytest.mark.parametrize("name", FORMATS)
def test_packed_logits_are_near_the_references(name: str, native_kernels: None) -> None:
    pack = GOLDENS / "gguf" / name
    ids, expected = golden(pack)
    with engine(pack / "model.gguf") as (llm, lines):
        assert any(line.startswith("mode: packed") for line in lines), lines
        assert divergence(expected, llm.logits(ids)) < 3e-3
        llm.check_integrity()


@pytest.mark.parametrize("name", FORMATS)
def test_without_native_kernels_the_plain_twin_serves_int8(name: str, no_native_kernels: None) -> None:
    """The file's packed weights are taken as they are, and others quantised."""
    pack = GOLDENS / "gguf" / name
    ids, expected = golden(pack)
    with engine(pack / "model.gguf", "int8") as (llm, lines):
        (mode,) = [line for line in lines if line.startswith("mode:")]
        assert "slow" in mode
        assert "no C++ compiler" in mode
        assert divergence(expected, llm.logits(ids)) < 3e-3


def test_native_kernels_and_the_plain_twin_agree(
    native_kernels: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = GOLDENS / "gguf" / "q4_1" / "model.gguf"
    with engine(path, kv_cache_dtype="float32") as (llm, _):
        fast = llm.logits(PROMPT)
    monkeypatch.setattr(native, "find", lambda directory: (None, "none"))
    with engine(path, "int8") as (llm, _):
        plain = llm.logits(PROMPT)
    # Sums in another order may round an activation of a later layer the other way.
    assert divergence(plain, fast) < 1e-4


@pytest.mark.parametrize("pack", [BIASED, UNTIED], ids=["biased and tied", "untied"])
def test_biases_and_both_kinds_of_heads(pack: Path, tmp_path: Path, native_kernels: None) -> None:
    path = to_gguf(pack, tmp_path / "m.gguf", lambda name: Q8_0 if "embed" in name else Q4_1)
    with engine(path, "none") as (llm, _):
        exact = llm.logits(PROMPT)
    with engine(path) as (llm, lines):
        assert any("packed 4/8-bit" in line for line in lines), lines
        assert divergence(exact, llm.logits(PROMPT)) < 3e-3


def test_rows_of_packed_matrices_are_those_of_the_file(tmp_path: Path, native_kernels: None) -> None:
    """By name, in the order of the exact mode: q and k are reordered in both."""
    path = to_gguf(BIASED, tmp_path / "m.gguf", lambda name: Q8_0 if "embed" in name else Q4_1)
    with engine(path, "none") as (llm, _):
        exact = {name: np.asarray(value) for name, value in llm.named_weights().items()}
    with engine(path) as (llm, _):
        found = llm.named_weights()
        assert set(found) == set(exact)
        for name, value in exact.items():
            np.testing.assert_allclose(np.asarray(found[name]), value, rtol=1e-6, atol=1e-7)


def test_weights_take_the_files_bytes(native_kernels: None) -> None:
    path = GOLDENS / "gguf" / "q4_1" / "model.gguf"
    at_rest = sum(ref.nbytes for ref in open_checkpoint(path).tensors.values())
    with engine(path) as (llm, _):
        weights = llm._engine.runner.weights
        assert sum(array.nbytes for array in weights) == llm._engine.skeleton.num_bytes
        assert llm._engine.skeleton.num_bytes < 1.1 * at_rest


def test_a_request_gets_the_same_tokens_alone_and_in_a_batch(native_kernels: None) -> None:
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, logprobs=1, prompt_logprobs=1)
    prompts = [PROMPT[:n] for n in (1, 4, 12)]
    with engine(GOLDENS / "gguf" / "q4_0" / "model.gguf") as (llm, _):
        alone = [llm.generate([prompt], params)[0].outputs[0] for prompt in prompts]
        batched = [output.outputs[0] for output in llm.generate(prompts, params)]
        assert [a.token_ids for a in alone] == [b.token_ids for b in batched]
        pairs = [(a.cumulative_logprob, b.cumulative_logprob) for a, b in zip(alone, batched, strict=True)]
        for one, other in pairs:
            assert one == pytest.approx(other, abs=1e-3)
        llm.check_integrity()


def test_a_matrix_whose_format_changes_between_layers_is_a_float_one(
    tmp_path: Path, native_kernels: None
) -> None:
    """The others stay packed: layers of their own arrays, branched to."""
    path = to_gguf(UNTIED, tmp_path / "m.gguf", lambda n: Q8_0 if "layers.0.mlp.down_proj" in n else Q4_1)
    with engine(path, "none") as (llm, _):
        exact, num_bytes = llm.logits(PROMPT), llm._engine.skeleton.num_bytes
    with engine(path) as (llm, lines):
        assert any("kept in float32" in line and line.endswith(": down_proj") for line in lines), lines
        assert divergence(exact, llm.logits(PROMPT)) < 3e-3
        assert llm._engine.skeleton.num_bytes < 0.4 * num_bytes


def test_formats_of_the_same_bits_stay_packed_together(tmp_path: Path, native_kernels: None) -> None:
    path = to_gguf(UNTIED, tmp_path / "m.gguf", lambda n: Kind.Q4_0 if "layers.0.mlp" in n else Q4_1)
    with engine(path, "none") as (llm, _):
        exact = llm.logits(PROMPT)
        values = {name: np.asarray(value) for name, value in llm.named_weights().items()}
    with engine(path) as (llm, lines):
        assert not any("kept in" in line for line in lines), lines
        for name, value in llm.named_weights().items():
            np.testing.assert_allclose(np.asarray(value), values[name], rtol=1e-5, atol=1e-6)
        assert divergence(exact, llm.logits(PROMPT)) < 3e-3


def test_a_width_that_is_not_whole_groups_stays_float(native_kernels: None) -> None:
    pack = GOLDENS / "arch" / "gemma3_text"  # hidden 48, so the output projection alone is packed
    ids, expected = golden(pack)
    with engine(pack, "int8") as (llm, lines):
        (kept,) = [line for line in lines if line.startswith("kept in float32")]
        assert "q_proj" in kept
        assert "o_proj" not in kept
        assert divergence(expected, llm.logits(ids)) < 3e-3


@pytest.mark.parametrize("name", ["llama_bias_tied", "llama_gqa", "qwen3_moe"])
def test_floats_are_quantised_at_load(name: str, native_kernels: None) -> None:
    pack = GOLDENS / "arch" / name
    ids, expected = golden(pack)
    with engine(pack, "int8") as (llm, lines):
        assert any(line.startswith("mode: packed 8-bit") for line in lines), lines
        assert divergence(expected, llm.logits(ids)) < 3e-3


def test_live_weights_are_quantised_and_updated(native_kernels: None) -> None:
    config = json.loads((UNTIED / "config.json").read_text())
    arrays = load_file(UNTIED / "model.safetensors")
    ids, expected = golden(UNTIED)
    with engine(arrays, "int8", config=config) as (llm, _):
        first = llm.logits(ids)
        assert divergence(expected, first) < 3e-3
        llm.update_weights({n: -v if "up_proj" in n else v for n, v in arrays.items()})
        assert divergence(expected, llm.logits(ids)) > 3e-2
        llm.update_weights(arrays)
        np.testing.assert_array_equal(llm.logits(ids), first)


def test_updates_of_a_files_packed_weights_are_refused(native_kernels: None) -> None:
    with engine(GOLDENS / "gguf" / "q4_1" / "model.gguf") as (llm, _):
        before = llm.logits(PROMPT)
        arrays = {name: np.asarray(value) for name, value in llm.named_weights().items()}
        with pytest.raises(ConfigError, match="quantization none or int8"):
            llm.update_weights(arrays)
        np.testing.assert_array_equal(llm.logits(PROMPT), before)


def test_values_too_large_for_8_bits_are_named(native_kernels: None) -> None:
    config = json.loads((UNTIED / "config.json").read_text())
    arrays = load_file(UNTIED / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    with (
        pytest.raises(ConfigError, match=r"layers\.1\.mlp\.up_proj.*too large"),
        engine({**arrays, name: np.full_like(arrays[name], 1e9)}, "int8", config=config),
    ):
        pass


def test_auto_says_why_packed_weights_are_expanded(no_native_kernels: None) -> None:
    with engine(GOLDENS / "gguf" / "q4_1" / "model.gguf") as (llm, lines):
        (mode,) = [line for line in lines if line.startswith("mode:")]
        assert mode == "mode: exact float32: packed weights are expanded (no C++ compiler on the PATH)"
        assert llm._engine.skeleton.dtype == np.float32


@pytest.mark.parametrize("name", ["f16", "q4_k"])
def test_files_of_other_formats_are_exact(name: str) -> None:
    with engine(GOLDENS / "gguf" / name / "model.gguf") as (_, lines):
        assert "mode: exact float32" in lines


def test_packed_weights_are_expanded_over_several_devices() -> None:
    with engine(GOLDENS / "gguf" / "q4_1" / "model.gguf", tensor_parallel_size=2) as (llm, lines):
        assert any("one CPU device" in line for line in lines), lines
        ids, expected = golden(GOLDENS / "gguf" / "q4_1")
        np.testing.assert_allclose(llm.logits(ids), expected, atol=1e-2)


def test_int8_over_several_devices_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"quantization: int8 is supported on one CPU device.*cpu x 2"):
        LLM(UNTIED, quantization="int8", tensor_parallel_size=2, warmup="none")


def test_a_step_copies_no_packed_matrix(native_kernels: None) -> None:
    """The layers' loop hands the stacked arrays to the kernel whole."""
    with engine(GOLDENS / "gguf" / "q4_1" / "model.gguf") as (llm, _):
        text = llm._engine.runner._step.lower(Bucket(1, 1, True)).compile().as_text()
        layers = [leaf for leaf in llm._engine.skeleton.leaves if leaf.packed and leaf.path[0] == "layers"]
        smallest = min(int(np.prod(leaf.shape[1:])) for leaf in layers)  # of one layer
    assert "jaxserve_packed_matmul" in text
    moved = re.findall(r"= (?:u8|f16)\[([\d,]+)\]\S* (?:copy|dynamic-slice|fusion|transpose)\(", text)
    assert moved  # the token's row of the embedding
    assert all(np.prod([int(n) for n in shape.split(",")]) < smallest for shape in moved), moved
