"""Tokenizers give the ids and texts on which two independent implementations agree."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jaxserve_checkpoints import open_checkpoint, resolve_model

GOLDENS = Path(__file__).parents[1] / "goldens"


def differences(tokenizer, pack):
    """(string, what) where the tokenizer differs from the pack; empty is right."""
    strings = json.loads((pack / "tokenizer.json").read_text())["strings"]
    assert strings
    wrong = []
    for case in strings:
        text = case["text"]
        found = {
            "ids": tokenizer.encode(text, add_special_tokens=False).ids,
            "ids_add_special": tokenizer.encode(text).ids,
        }
        tokenizer.encode_special_tokens = True
        found["ids_special_as_text"] = tokenizer.encode(text, add_special_tokens=False).ids
        tokenizer.encode_special_tokens = False
        if case.get("transformers_decoded_equal", True):  # where its two oracles decode alike
            found["decoded"] = tokenizer.decode(case["ids"], skip_special_tokens=False)
        wrong += [(text, key, value, case[key]) for key, value in found.items() if value != case[key]]
    return wrong


@pytest.mark.quick
@pytest.mark.parametrize("pack", ["f16_tok_gpt2", "f16_tok_llama"])
def test_gguf_tokenizers_equal_the_goldens(pack):
    assets = open_checkpoint(GOLDENS / "gguf" / pack / "model.gguf").tokenizer()
    assert differences(assets.tokenizer, GOLDENS / "gguf" / pack) == []


@pytest.mark.quick
@pytest.mark.parametrize("pack", ["f16_tok_gpt2", "f16_tok_llama"])
def test_a_saved_tokenizer_reads_back_the_same(pack, tmp_path):
    """A GGUF's tokenizer written as tokenizer.json is the same tokenizer in a directory."""
    assets = open_checkpoint(GOLDENS / "gguf" / pack / "model.gguf").tokenizer()
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((GOLDENS / "arch" / "llama_gqa" / name).read_bytes())
    assets.tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(assets.special_tokens_map))
    again = open_checkpoint(tmp_path).tokenizer()
    assert differences(again.tokenizer, GOLDENS / "gguf" / pack) == []
    assert again.special_tokens_map == assets.special_tokens_map
    assert (again.bos_token_id, again.eos_token_ids) == (assets.bos_token_id, assets.eos_token_ids)


@pytest.mark.real
def test_smollm2_equals_the_goldens():
    assets = open_checkpoint(resolve_model("smollm2-135m-instruct", progress=False)).tokenizer()
    assert differences(assets.tokenizer, GOLDENS / "real" / "smollm2") == []
    assert assets.special_tokens_map["eos_token"] == "<|im_end|>"
    assert assets.eos_token_ids == (2,)
    assert "<|im_start|>" in assets.chat_template


@pytest.mark.real
def test_smollm2_has_every_tensor_of_its_architecture():
    checkpoint = open_checkpoint(resolve_model("smollm2-135m-instruct", progress=False))
    assert checkpoint.metadata["llama.block_count"] == 30
    assert len(checkpoint.tensors) == 2 + 30 * 9
    assert checkpoint.tensors["token_embd.weight"].shape == (49152, 576)
    assert checkpoint.tensors["blk.29.ffn_down.weight"].read().shape == (576, 1536)
