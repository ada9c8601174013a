"""What tokenizer files say about special tokens, and what malformed ones are answered with."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
from gguf import GGUFWriter
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from jaxserve_checkpoints import CheckpointError, open_checkpoint

pytestmark = pytest.mark.quick


@pytest.fixture
def directory(goldens, tmp_path):
    """A Hugging Face directory with a byte-level tokenizer: <s>, </s>, then one token a byte."""
    for name in ("config.json", "model.safetensors"):
        shutil.copy(goldens / "arch" / "llama_gqa" / name, tmp_path)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(["<s>", "</s>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.enable_truncation(3)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def configure(directory, **config):
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return open_checkpoint(directory).tokenizer()


def test_a_checkpoint_without_a_tokenizer_has_none(goldens):
    assert open_checkpoint(goldens / "arch" / "llama_gqa").tokenizer() is None


def test_a_training_time_truncation_does_not_cut_prompts(directory):
    assert len(configure(directory).tokenizer.encode("hello").ids) == 5


@pytest.mark.parametrize("given", ["<s>", {"content": "<s>", "lstrip": False}])
def test_special_tokens_are_read_as_text_or_as_fields(directory, given):
    assets = configure(directory, bos_token=given, eos_token="</s>", pad_token=None)
    assert (assets.bos_token_id, assets.eos_token_id, assets.pad_token_id) == (0, 1, None)
    assert assets.special_tokens_map == {"bos_token": "<s>", "eos_token": "</s>"}


def test_special_tokens_map_fills_in_and_the_config_wins(directory):
    special = {"bos_token": "x", "eos_token": {"content": "</s>"}}
    (directory / "special_tokens_map.json").write_text(json.dumps(special))
    assert configure(directory, bos_token="<s>").special_tokens_map == {
        "bos_token": "<s>",
        "eos_token": "</s>",
    }


@pytest.mark.parametrize(("bos", "eos"), [(True, False), (True, True), (False, True), (None, None)])
def test_add_bos_and_eos_are_the_policy_of_encode(directory, bos, eos):
    assets = configure(directory, bos_token="<s>", eos_token="</s>", add_bos_token=bos, add_eos_token=eos)
    plain = assets.tokenizer.encode("hi", add_special_tokens=False).ids
    assert assets.tokenizer.encode("hi").ids == [0] * bool(bos) + plain + [1] * bool(eos)
    assert assets.tokenizer.decode(assets.tokenizer.encode("hi").ids) == "hi"


def test_eos_ids_are_the_union_with_the_generation_config(directory):
    (directory / "generation_config.json").write_text('{"eos_token_id": [7, 1, 9]}')
    assert configure(directory, eos_token="</s>").eos_token_ids == (1, 7, 9)


def test_a_generation_config_with_a_bad_eos_is_an_error(directory):
    (directory / "generation_config.json").write_text('{"eos_token_id": ["x"]}')
    with pytest.raises(CheckpointError, match=r"generation_config\.json: eos_token_id"):
        configure(directory)


def test_tokens_listed_in_the_config_only_are_added_at_their_ids(directory):
    entry = {"content": "<|end|>", "special": True}
    assets = configure(directory, added_tokens_decoder={"258": entry}, eos_token="<|end|>")
    assert assets.tokenizer.encode("a<|end|>").ids[-1] == assets.eos_token_id == 258
    with pytest.raises(CheckpointError, match=r"<\|end\|>: its id cannot be 999"):
        configure(directory, added_tokens_decoder={"999": entry})


@pytest.mark.parametrize(
    "template", ["T", [{"name": "tool_use", "template": "U"}, {"name": "default", "template": "T"}]]
)
def test_the_default_chat_template_is_found(directory, template):
    assert configure(directory, chat_template=template).chat_template == "T"


def test_a_template_file_comes_before_the_config(directory):
    (directory / "chat_template.jinja").write_text("F")
    assert configure(directory, chat_template="T").chat_template == "F"


@pytest.mark.parametrize("template", [3, [{"name": "tool_use", "template": "U"}]])
def test_a_chat_template_that_is_no_text_is_an_error(directory, template):
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: chat_template"):
        configure(directory, chat_template=template)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"model": 3}', '{"version": "1.0", "model": {"type": "No"}}']
)
def test_a_malformed_tokenizer_file_is_one_line_naming_it(directory, text):
    (directory / "tokenizer.json").write_text(text)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(directory).tokenizer()
    assert "tokenizer.json" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_tokenizer_in_another_format_is_refused_by_name(goldens, tmp_path):
    for name in ("config.json", "model.safetensors"):
        shutil.copy(goldens / "arch" / "llama_gqa" / name, tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"tokenizer\.model: only tokenizer\.json is read"):
        open_checkpoint(tmp_path).tokenizer()


def gguf_tokenizer(path, kind, tokens, types, **keys):
    """The tokenizer of a GGUF file with this metadata, written by gguf-py."""
    writer = GGUFWriter(path, "llama")
    writer.add_tokenizer_model(kind)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    for method, value in keys.items():
        getattr(writer, method)(value)
    writer.add_tensor("w", np.zeros((2, 2), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return open_checkpoint(path).tokenizer()


BYTES = [f"<0x{i:02X}>" for i in range(256)]
LLAMA = ["<unk>", "<s>", "</s>", *BYTES, "▁", "a", "b", "ab", "▁ab", "  "]
LLAMA_TYPES = [2, 3, 3, *[6] * 256, 1, 1, 1, 1, 1, 4]
LLAMA_SCORES = [0.0] * 259 + [-9.0, -9.0, -9.0, -1.0, -2.0, 0.0]


def ids_of(*tokens):
    return [LLAMA.index(token) for token in tokens]


@pytest.mark.parametrize(("prefix", "expected"), [(True, ["▁ab"]), (False, ["ab"]), (None, ["▁ab"])])
def test_llama_kind_adds_its_space_prefix_unless_told_not_to(tmp_path, prefix, expected):
    keys = {} if prefix is None else {"add_add_space_prefix": prefix}
    assets = gguf_tokenizer(
        tmp_path / "t.gguf", "llama", LLAMA, LLAMA_TYPES, add_token_scores=LLAMA_SCORES, **keys
    )
    assert assets.tokenizer.encode("ab", add_special_tokens=False).ids == ids_of(*expected)


def test_llama_kind_matches_user_defined_tokens_and_falls_back_to_bytes(tmp_path):
    assets = gguf_tokenizer(
        tmp_path / "t.gguf",
        "llama",
        LLAMA,
        LLAMA_TYPES,
        add_token_scores=LLAMA_SCORES,
        add_add_space_prefix=False,
        add_add_eos_token=True,
    )
    found = assets.tokenizer.encode("ab  aé</s>")
    assert found.ids == ids_of("<s>", "ab", "  ", "a", "<0xC3>", "<0xA9>", "</s>", "</s>")
    assert assets.tokenizer.decode(found.ids) == "ab  aé"
    assert (assets.bos_token_id, assets.eos_token_id, assets.unk_token_id) == (1, 2, 0)


def test_given_merges_come_before_scores(tmp_path):
    assets = gguf_tokenizer(
        tmp_path / "t.gguf",
        "llama",
        LLAMA,
        LLAMA_TYPES,
        add_token_scores=LLAMA_SCORES,
        add_token_merges=["a b"],
        add_add_bos_token=False,
    )
    assert assets.tokenizer.encode("ab").ids == ids_of("▁", "ab")


ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
GPT2 = ["<|end|>", *ALPHABET, "12", "123", "<|eot|>"]
GPT2_TYPES = [3, *[1] * 258, 3]
GPT2_MERGES = ["1 2", "12 3"]


def gpt2(path, **keys):
    return gguf_tokenizer(path, "gpt2", GPT2, GPT2_TYPES, **{"add_token_merges": GPT2_MERGES, **keys})


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("gpt-2", ["123", "4"]),  # digits stay together
        ("smollm", ["1", "2", "3", "4"]),  # each digit a word
        ("qwen2", ["1", "2", "3", "4"]),
        ("llama-bpe", ["123", "4"]),  # three digits a word
        ("gpt-4o", ["123", "4"]),
    ],
)
def test_the_pre_tokenizer_decides_how_digits_are_split(tmp_path, pre, expected):
    assets = gpt2(tmp_path / "t.gguf", add_tokenizer_pre=pre)
    ids = assets.tokenizer.encode("1234", add_special_tokens=False).ids
    assert [GPT2[i] for i in ids] == expected


def test_an_unknown_pre_tokenizer_is_an_error_naming_it(tmp_path):
    with pytest.raises(CheckpointError, match=r"tokenizer\.ggml\.pre: unknown pre-tokenizer 'martian'"):
        gpt2(tmp_path / "t.gguf", add_tokenizer_pre="martian")


def test_an_unknown_kind_is_an_error_naming_it(tmp_path):
    with pytest.raises(CheckpointError, match="unknown tokenizer kind 'rwkv'"):
        gguf_tokenizer(tmp_path / "t.gguf", "rwkv", GPT2, GPT2_TYPES)


def test_bos_defaults_to_the_pre_tokenizers_family(tmp_path):
    with_bos = gpt2(tmp_path / "a.gguf", add_tokenizer_pre="llama-bpe", add_bos_token_id=0)
    without = gpt2(tmp_path / "b.gguf", add_tokenizer_pre="gpt-2", add_bos_token_id=0)
    assert with_bos.tokenizer.encode("4").ids[0] == 0
    assert without.tokenizer.encode("4").ids[0] != 0


def test_end_of_turn_ends_a_generation_too(tmp_path):
    end_of_turn = len(GPT2) - 1
    assets = gpt2(tmp_path / "t.gguf", add_eos_token_id=0, add_eot_token_id=end_of_turn)
    assert assets.eos_token_ids == (0, end_of_turn)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"add_eos_token_id": 10_000}, "eos_token_id: 10000 is outside the vocabulary"),
        ({"add_token_merges": ["1 9x"]}, "merges: merge '1 9x' names no tokens"),
        ({"add_token_merges": ["12"]}, "names no tokens"),
    ],
)
def test_metadata_that_does_not_fit_the_vocabulary_is_an_error(tmp_path, keys, message):
    with pytest.raises(CheckpointError, match=message):
        gpt2(tmp_path / "t.gguf", **keys)


def test_a_doubled_token_is_an_error_naming_it(tmp_path):
    with pytest.raises(CheckpointError, match="token 'a' appears twice"):
        gguf_tokenizer(tmp_path / "t.gguf", "gpt2", [*GPT2, "a"], [*GPT2_TYPES, 1], add_token_merges=["1 2"])
