"""Checkpoints that are almost right are refused in one line, before anything is served."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxserve import LLM, SamplingParams
from jaxserve.errors import ConfigError, JaxserveError
from jaxserve_checkpoints import CheckpointError

pytestmark = pytest.mark.quick
SMALL: dict[str, Any] = {
    "warmup": "none",
    "num_pages": 10,
    "page_size": 16,
    "max_model_len": 64,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 16,
}
Q_PROJ = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    source = Path(__file__).parents[1] / "goldens" / "arch" / "llama_gqa"
    for name in ("config.json", "model.safetensors"):
        shutil.copy(source / name, tmp_path)
    return tmp_path


def refusal(directory: Path, **args: Any) -> str:
    with pytest.raises((JaxserveError, CheckpointError)) as caught:
        LLM(directory, **SMALL, **args)
    (line,) = str(caught.value).splitlines()
    return line


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"temperature": "hot"}, "temperature"),
        ({"top_k": -5}, "top_k"),
        ({"top_p": 7}, "top_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"eos_token_id": "x"}, "eos_token_id"),
        ({"eos_token_id": [2, None]}, "eos_token_id"),
    ],
    ids=str,
)
def test_wrong_defaults_are_refused_and_not_put_upon_clients(
    directory: Path, values: dict[str, Any], key: str
) -> None:
    (directory / "generation_config.json").write_text(json.dumps(values))
    line = refusal(directory)
    assert "generation_config" in line
    assert key in line


@pytest.mark.parametrize("eos", [-1, 10**9, [2, 10**9]], ids=str)
def test_an_end_token_outside_the_vocabulary_never_comes(directory: Path, eos: Any) -> None:
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    with LLM(directory, **SMALL) as llm:
        params = SamplingParams(max_tokens=4, min_tokens=3, temperature=0)
        (output,) = llm.generate([5, 6, 7], params)
    assert output.outputs[0].finish_reason == "length"


@pytest.mark.parametrize("given", ["auto", "none", "folder"])
def test_a_generation_config_says_what_ends_a_sequence(directory: Path, tmp_path: Path, given: str) -> None:
    """`none` drops the sampling defaults alone, which a user may dislike; the ends are the model's."""
    folder = directory
    if given == "folder":
        folder, given = tmp_path / "other", str(tmp_path / "other")
        folder.mkdir()
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 9], "top_k": 1}))
    with LLM(directory, **SMALL, generation_config=given) as llm:
        ends = [SamplingParams(max_tokens=4, logit_bias={end: 100.0}) for end in (5, 9)]
        outputs = [llm.generate([6, 7], params)[0].outputs[0] for params in ends]
    assert [(len(output.token_ids), output.finish_reason) for output in outputs] == [(1, "stop")] * 2


def change(directory: Path, edit: Callable[[dict[str, np.ndarray]], object]) -> None:
    arrays = dict(load_file(directory / "model.safetensors"))
    edit(arrays)
    save_file(arrays, directory / "model.safetensors")


@pytest.mark.parametrize(
    "edit",
    [
        lambda a: a.pop(Q_PROJ),
        lambda a: a.update({Q_PROJ: a[Q_PROJ][1:]}),
        lambda a: a.update({Q_PROJ: a[Q_PROJ].astype(np.int32)}),  # such as a quantised file's packed words
        lambda a: a.update({Q_PROJ.replace("q_proj", "r_proj"): a[Q_PROJ]}),
    ],
    ids=["missing", "misshapen", "not floats", "left over"],
)
def test_a_wrong_tensor_is_named_with_its_file(directory: Path, edit: Any) -> None:
    change(directory, edit)
    line = refusal(directory)
    assert str(directory) in line
    assert "model.layers.0.self_attn" in line


@pytest.mark.parametrize("argument", ["tokenizer", "chat_template", "generation_config"])
def test_other_files_that_are_not_there_are_refused(directory: Path, argument: str) -> None:
    assert "nowhere" in refusal(directory, **{argument: str(directory / "nowhere")})


def test_live_weights_are_floats(directory: Path) -> None:
    arrays = dict(load_file(directory / "model.safetensors"))
    arrays[Q_PROJ] = arrays[Q_PROJ].astype(np.int8)
    with pytest.raises(ConfigError, match=r"q_proj.*int8"):
        LLM(arrays, config=json.loads((directory / "config.json").read_text()), **SMALL)


def test_a_template_or_tokenizer_that_cannot_be_used_is_refused(directory: Path) -> None:
    (directory / "template.jinja").write_text("{{ messages }}")
    assert "has no tokenizer" in refusal(directory, chat_template=str(directory / "template.jinja"))
    assert "has no tokenizer" in refusal(directory, tokenizer=str(directory))


@pytest.mark.parametrize(
    ("args", "shown"),
    [
        ({}, "0.05"),  # the default of a CPU
        ({"memory_utilization": 0.01}, "0.01"),
        ({"num_pages": 9}, "None"),  # nothing is a share of anything
        ({"kv_cache_memory": 1 << 20}, "None"),
    ],
)
def test_the_share_of_memory_in_force_is_told(directory: Path, args: dict[str, Any], shown: str) -> None:
    with LLM(str(directory), warmup="none", max_model_len=64, **args) as llm:
        assert llm._engine.cache_info()["gpu_memory_utilization"] == shown
