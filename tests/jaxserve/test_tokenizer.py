"""Tokenizer: golden ids and texts, true bytes of tokens, BOS and special tokens."""

import json
import threading
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as HfTokenizer
from tokenizers.processors import ByteLevel, TemplateProcessing

import jaxserve.tokenizer as tokenizer_module
from jaxserve.errors import ConfigError, ContextLengthError, InvalidRequestError
from jaxserve.tokenizer import Tokenizer
from jaxserve_checkpoints import open_checkpoint, resolve_model

GOLDENS = Path(__file__).parents[1] / "goldens"
PACKS = ["f16_tok_gpt2", "f16_tok_llama"]


@cache
def golden_tokenizer(pack: str) -> Tokenizer:
    return Tokenizer(open_checkpoint(GOLDENS / "gguf" / pack / "model.gguf").tokenizer())


@cache
def smollm2() -> Tokenizer:
    return Tokenizer(open_checkpoint(resolve_model("smollm2-135m-instruct")).tokenizer())


def golden_strings(pack: str) -> list[dict]:
    return json.loads((GOLDENS / pack / "tokenizer.json").read_text("utf-8"))["strings"]


def make_tokenizer(
    vocab: list[str],
    decoder: object = None,
    special: tuple[str, ...] = (),
    added: tuple[str, ...] = (),
    template: str | None = None,
) -> Tokenizer:
    """A tokenizer of whole words: enough to decode with."""
    hf = HfTokenizer(models.WordLevel({token: i for i, token in enumerate(vocab)}, unk_token=vocab[0]))
    hf.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if decoder is not None:
        hf.decoder = decoder
    hf.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    hf.add_tokens([AddedToken(token, normalized=False) for token in added])
    ids = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id"))
    assets = SimpleNamespace(
        tokenizer=hf, eos_token_ids=(), chat_template=template, special_tokens_map={}, **ids
    )
    return Tokenizer(assets)


SENTENCEPIECE = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]


def check_golden(tokenizer: Tokenizer, strings: list[dict]) -> None:
    for entry in strings:
        text = entry["text"]
        assert tokenizer.encode(text, add_special_tokens=False) == entry["ids"], text
        assert tokenizer.encode(text) == entry["ids_add_special"], text
        plain = tokenizer.encode(text, add_special_tokens=False, parse_special=False)
        assert plain == entry["ids_special_as_text"], text
        assert tokenizer.decode(entry["ids"], skip_special_tokens=False) == entry["decoded"], text
        assert b"".join(map(tokenizer.token_bytes, entry["ids"])).decode() == entry["decoded"], text


@pytest.mark.parametrize("pack", PACKS)
def test_golden_strings_encode_and_decode(pack):
    check_golden(golden_tokenizer(pack), golden_strings(f"gguf/{pack}"))


@pytest.mark.real
def test_golden_strings_of_the_real_tokenizer():
    check_golden(smollm2(), golden_strings("real/smollm2"))


def test_byte_level_tokens_cover_every_byte_once():
    tokenizer = golden_tokenizer("f16_tok_gpt2")
    tokens = [tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)]
    assert {t for t in tokens if len(t) == 1} == {bytes((b,)) for b in range(256)}
    assert tokenizer.encode("é", add_special_tokens=False)
    assert b"".join(map(tokenizer.token_bytes, tokenizer.encode("é🙂"))) == "é🙂".encode()


def test_sentencepiece_tokens_are_spaces_bytes_and_text():
    tokenizer = make_tokenizer(
        ["<unk>", "▁Hi", "<0xAB>", "<0x0A>", "▁", "a▁b"], decoders.Sequence(SENTENCEPIECE)
    )
    assert [tokenizer.token_bytes(i) for i in range(1, 6)] == [b" Hi", b"\xab", b"\n", b" ", b"a b"]
    assert tokenizer.token_str(2) == "\ufffd"


@pytest.mark.parametrize("decoder", [decoders.ByteLevel(), decoders.Sequence(SENTENCEPIECE)])
def test_special_tokens_are_their_literal_text(decoder):
    tokenizer = make_tokenizer(["a"], decoder, special=("<｜begin▁of▁text｜>", "<|é|>"))
    assert tokenizer.special_ids == {1, 2}
    assert tokenizer.token_bytes(1) == "<｜begin▁of▁text｜>".encode()
    assert tokenizer.token_bytes(2) == "<|é|>".encode()


def test_added_tokens_of_spaces_are_spaces():
    # Gemma adds "▁▁" as an ordinary token; byte-level tokenizers add the spaces themselves.
    assert make_tokenizer(["a"], decoders.Sequence(SENTENCEPIECE), added=("▁▁",)).token_bytes(1) == b"  "
    assert make_tokenizer(["a"], decoders.ByteLevel(), added=("  ", "é")).token_bytes(1) == b"  "
    assert make_tokenizer(["a"], decoders.ByteLevel(), added=("  ", "é")).token_bytes(2) == "é".encode()


@pytest.mark.parametrize("pack", PACKS)
def test_ids_without_a_token_have_no_bytes(pack):
    tokenizer = golden_tokenizer(pack)
    assert tokenizer.token_bytes(tokenizer.vocab_size) == b""
    assert tokenizer.token_bytes(2**31) == tokenizer.token_bytes(-1) == b""
    with pytest.raises(InvalidRequestError, match="vocabulary"):
        tokenizer.decode([-1])


def test_bos_is_added_once():
    tokenizer = golden_tokenizer("f16_tok_llama")
    assert tokenizer.encode("a").count(tokenizer.bos_token_id) == 1
    hf = HfTokenizer(models.WordLevel({"<s>": 0, "a": 1}, unk_token="a"))
    hf.add_special_tokens(["<s>"])
    hf.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    assets = SimpleNamespace(
        tokenizer=hf,
        bos_token_id=0,
        eos_token_id=None,
        pad_token_id=None,
        unk_token_id=None,
        eos_token_ids=(),
        chat_template=None,
        special_tokens_map={"bos_token": "<s>"},
    )
    assert Tokenizer(assets).encode("<s>a") == [0, 1]
    assert Tokenizer(assets).encode("a") == [0, 1]
    assert Tokenizer(assets).encode("<s>a", add_special_tokens=False) == [0, 1]


def test_truncation_and_padding_of_the_file_are_off():
    hf = HfTokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    hf.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    hf.enable_truncation(2)
    hf.enable_padding(length=16)
    ids = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id"))
    assets = SimpleNamespace(tokenizer=hf, eos_token_ids=(), chat_template=None, special_tokens_map={}, **ids)
    assert Tokenizer(assets).encode("a a a a") == [0] * 4


@pytest.mark.parametrize("pack", PACKS)
def test_bad_words_are_spelled_with_and_without_a_space(pack):
    tokenizer = golden_tokenizer(pack)
    sequences = tokenizer.bad_word_token_ids(" world")
    assert tokenizer.encode("world", add_special_tokens=False) in sequences
    spaced = tokenizer.encode("a world", add_special_tokens=False)
    assert any(spaced[-len(ids) :] == ids for ids in sequences)
    assert {tokenizer.decode(ids).strip() for ids in sequences} == {"world"}


def test_lone_surrogates_are_refused():
    with pytest.raises(InvalidRequestError, match="surrogate") as caught:
        golden_tokenizer("f16_tok_gpt2").encode("a\ud83d")
    assert caught.value.param == "prompt"


def test_a_template_of_the_operator_that_does_not_compile_is_a_config_error():
    assets = open_checkpoint(GOLDENS / "gguf" / "f16_tok_gpt2" / "model.gguf").tokenizer()
    with pytest.raises(ConfigError, match="line 1"):
        Tokenizer(assets, "{% for %}")


def test_other_threads_run_while_a_long_text_is_tokenised():
    """An interpreter that stands still would keep a server's probes waiting."""
    text = "the quick brown fox " * 50_000
    worker = threading.Thread(target=smollm2().encode, args=(text,))
    worker.start()
    turns = 0
    while worker.is_alive():
        turns += 1
        worker.join(0.001)
    assert turns > 20


def begins(tokenizer: Tokenizer, text: str, add_special_tokens: bool = True) -> list[tuple[str, int]]:
    """(token's name, where it begins)"""
    ids = tokenizer.encode(text, add_special_tokens)
    offsets = tokenizer.text_offsets(text, add_special_tokens)
    return list(zip(map(tokenizer._hf.id_to_token, ids), offsets, strict=True))


def test_offsets_count_in_the_text_that_was_given():
    tokenizer = golden_tokenizer("f16_tok_llama")
    assert begins(tokenizer, "hello") == [("<s>", 0), ("▁he", 0), ("llo", 2)]
    assert begins(tokenizer, "hello", add_special_tokens=False) == [("▁he", 0), ("llo", 2)]
    assert begins(tokenizer, "<s>a</s>b") == [("<s>", 0), ("▁a", 3), ("</s>", 4), ("▁b", 8)]
    # A character of several tokens: each begins where it begins.
    assert [offset for _, offset in begins(tokenizer, "日é", False)] == [0, 0, 0, 0, 1, 1]


@pytest.mark.parametrize("trims", [True, False])
def test_offsets_of_byte_level_tokens_have_the_space(trims):
    hf = HfTokenizer.from_str(golden_tokenizer("f16_tok_gpt2")._hf.to_str())
    hf.post_processor = ByteLevel(trim_offsets=trims)  # as GPT-2's and Llama 3's
    names = ("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "chat_template")
    assets = SimpleNamespace(tokenizer=hf, eos_token_ids=(), special_tokens_map={}, **dict.fromkeys(names))
    expected = [("he", 0), ("llo", 2), ("Ġ", 5), ("Ġw", 6), ("or", 8), ("ld", 10), ("Ċ", 12)]
    assert begins(Tokenizer(assets), "hello  world\n") == expected


def test_whether_decoding_drops_the_space_that_encoding_puts_first():
    strip = decoders.Strip(" ", 1, 0)
    assert not golden_tokenizer("f16_tok_llama").strips_first_space
    assert not golden_tokenizer("f16_tok_gpt2").strips_first_space
    assert make_tokenizer(["▁a"], decoders.Sequence([*SENTENCEPIECE, strip])).strips_first_space
    assert make_tokenizer(["▁a"], decoders.Metaspace()).strips_first_space
    assert not make_tokenizer(["▁a"], decoders.Metaspace(prepend_scheme="never")).strips_first_space


def test_a_text_with_too_many_tokens_is_refused():
    tokenizer = golden_tokenizer("f16_tok_llama")
    ids = tokenizer.encode("hello there " * 50)
    assert tokenizer.encode("hello there " * 50, max_tokens=len(ids)) == ids
    with pytest.raises(
        ContextLengthError, match=rf"length is {len(ids) - 1} tokens, .* has {len(ids)} tokens"
    ):
        tokenizer.encode("hello there " * 50, max_tokens=len(ids) - 1)


def test_a_text_that_can_never_fit_is_not_even_encoded(monkeypatch):
    tokenizer = Tokenizer(open_checkpoint(GOLDENS / "gguf" / "f16_tok_gpt2" / "model.gguf").tokenizer())
    encoded = []
    encode = tokenizer_module._encoded
    monkeypatch.setattr(tokenizer_module, "_encoded", lambda *args: encoded.append(1) or encode(*args))
    longest = max(len(tokenizer.token_bytes(i)) for i in range(tokenizer.vocab_size))
    with pytest.raises(ContextLengthError, match="more than 2000 tokens"):
        tokenizer.encode("x" * (4 * longest * 2000 + 1), max_tokens=2000)
    assert not encoded
    with pytest.raises(ContextLengthError, match=r"has \d+ tokens"):
        tokenizer.encode("x" * (4 * longest * 2000), max_tokens=2000)
    assert encoded


@pytest.mark.parametrize("fill", ["a", "<", "<|end|", "<|end|>", "x<|end|>y</s>"])
def test_special_tokens_in_long_texts_are_broken_wherever_pieces_end(fill):
    """Oracle: the same in one search."""
    plain = golden_tokenizer("f16_tok_llama")._plain
    for shift in range(9):
        text = "." * shift + fill * (200_000 // len(fill)) + "<s>"
        whole = plain._pattern.sub(lambda match: plain._MARK.join([*match[0], ""]), text)
        assert plain.guard(text) == whole
        assert plain.aliased(plain.guard(text)) == text


def test_many_ids_are_decoded_as_few_are():
    tokenizer = golden_tokenizer("f16_tok_llama")
    ids = tokenizer.encode("hello wörld " * 3000)
    assert len(ids) > 4096
    assert tokenizer.decode(ids) == tokenizer._hf.decode(ids)
    with pytest.raises(InvalidRequestError):
        tokenizer.decode([-1] * 5000)
