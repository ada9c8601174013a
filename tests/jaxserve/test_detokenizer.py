"""Incremental detokenizing: joined pieces equal the whole text, characters are never cut."""

import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as HfTokenizer

from jaxserve.detokenizer import IncrementalDetokenizer
from jaxserve.tokenizer import Tokenizer
from jaxserve_checkpoints import open_checkpoint, resolve_model

GGUF = Path(__file__).parents[1] / "goldens" / "gguf"
TEXTS = [
    "Hello, world!  two spaces\n\ttab",
    "emoji 🙂🧑‍🚀 and flags 🇫🇷",
    "你好，世界。日本語テキスト",
    "naïve café — “quotes”",
    " leading and trailing ",
]


@cache
def hf_tokenizer(pack: str):
    path = (
        resolve_model("smollm2-135m-instruct")
        if pack == "smollm2"
        else GGUF / f"f16_tok_{pack}" / "model.gguf"
    )
    return open_checkpoint(path).tokenizer()


@cache
def tokenizer_of(pack: str) -> Tokenizer:
    return Tokenizer(hf_tokenizer(pack))


def stream(tokenizer: Tokenizer, ids: Sequence[int], prompt: Sequence[int] = (), **options) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, prompt_token_ids=prompt, **options)
    return [*(detokenizer.append(i) for i in ids), detokenizer.flush()]


def word_tokenizer(decoder: object) -> Tokenizer:
    vocab = ["play", "##ing", "now", "[", "<0xF0>"]
    hf = HfTokenizer(models.WordLevel({token: i for i, token in enumerate(vocab)}, unk_token="["))
    if decoder is not None:
        hf.decoder = decoder
    hf.add_special_tokens([AddedToken(f"<{name}>", special=True) for name in "ab"])
    ids = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id"))
    return Tokenizer(
        SimpleNamespace(tokenizer=hf, eos_token_ids=(), chat_template=None, special_tokens_map={}, **ids)
    )


ANY_PACK = ["gpt2", "llama", pytest.param("smollm2", marks=pytest.mark.real)]


@pytest.mark.parametrize("pack", ANY_PACK)
@pytest.mark.parametrize("text", TEXTS)
def test_joined_text_is_the_text(pack, text):
    tokenizer = tokenizer_of(pack)
    ids = tokenizer.encode(text, add_special_tokens=False)
    oracle = hf_tokenizer(pack).tokenizer.decode(ids)
    assert "".join(stream(tokenizer, ids)) == oracle
    assert oracle.strip() == text.strip()


@pytest.mark.parametrize("pack", ["gpt2", pytest.param("smollm2", marks=pytest.mark.real)])
@pytest.mark.parametrize("skip", [True, False])
def test_random_ids_of_a_byte_level_tokenizer_join_to_the_librarys_decode(pack, skip):
    tokenizer, rng = tokenizer_of(pack), random.Random(0)
    for _ in range(200):
        ids = [rng.randrange(tokenizer.vocab_size) for _ in range(rng.randrange(40))]
        oracle = hf_tokenizer(pack).tokenizer.decode(ids, skip_special_tokens=skip)
        assert "".join(stream(tokenizer, ids, skip_special_tokens=skip)) == oracle


def test_random_ids_of_a_sentencepiece_tokenizer_join_to_the_librarys_decode():
    # Without byte tokens all is well-formed; the library spoils whole runs of byte tokens for one bad byte.
    tokenizer, rng = tokenizer_of("llama"), random.Random(0)
    whole = [i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i).isascii() and i > 260]
    chars = [tokenizer.encode(c, add_special_tokens=False)[1:] for c in "🙂你é"]
    for _ in range(200):
        ids = []
        for _ in range(rng.randrange(20)):
            ids += rng.choice(chars) if rng.random() < 0.3 else [rng.choice(whole)]
        assert "".join(stream(tokenizer, ids)) == hf_tokenizer("llama").tokenizer.decode(ids)


@pytest.mark.parametrize("pack", ANY_PACK)
def test_random_byte_tokens_give_valid_text_with_only_the_broken_bytes_replaced(pack):
    tokenizer, rng = tokenizer_of(pack), random.Random(1)
    single = [i for i in range(tokenizer.vocab_size) if len(tokenizer.token_bytes(i)) == 1]
    for _ in range(200):
        ids = [rng.choice(single) for _ in range(30)]
        data = b"".join(map(tokenizer.token_bytes, ids))
        pieces = stream(tokenizer, ids)
        assert "".join(pieces) == data.decode("utf-8", "replace")
        for piece in pieces:
            piece.encode()  # no half of anything


@pytest.mark.parametrize("pack", ["gpt2", "llama"])
def test_a_character_appears_when_its_last_byte_does(pack):
    tokenizer = tokenizer_of(pack)
    ids = [i for i in tokenizer.encode("🙂", add_special_tokens=False) if tokenizer.token_bytes(i) != b" "]
    assert len(ids) > 1
    pieces = stream(tokenizer, ids)
    assert pieces == [""] * (len(ids) - 1) + ["🙂", ""]


@pytest.mark.parametrize("pack", ["gpt2", "llama"])
def test_a_length_limit_inside_a_character_gives_one_replacement(pack):
    tokenizer = tokenizer_of(pack)
    ids = tokenizer.encode("a🙂", add_special_tokens=False)[:-1]
    assert stream(tokenizer, ids)[-1] == "\ufffd"
    assert "".join(stream(tokenizer, ids)).count("\ufffd") == 1


@pytest.mark.parametrize("pack", ["gpt2", "llama"])
@pytest.mark.parametrize("tail", [1, 2, 3])
def test_a_prompt_that_ends_inside_a_character_is_completed(pack, tail):
    tokenizer = tokenizer_of(pack)
    ids = tokenizer.encode("xy 🙂", add_special_tokens=False)
    data = b"".join(map(tokenizer.token_bytes, ids))
    cut = len(ids) - tail
    before = b"".join(map(tokenizer.token_bytes, ids[:cut])).decode("utf-8", "ignore")
    after = "".join(stream(tokenizer, ids[cut:], prompt=ids[:cut]))
    assert before + after == data.decode()
    assert "🙂" in after
    # And where something else follows, the broken part is shown once, as in the text of all ids.
    other = tokenizer.encode("z", add_special_tokens=False)
    whole = b"".join(map(tokenizer.token_bytes, ids[:cut] + other)).decode("utf-8", "replace")
    assert before + "".join(stream(tokenizer, other, prompt=ids[:cut])) == whole


def test_a_prompt_that_ends_with_a_whole_character_leaves_nothing_behind():
    tokenizer = tokenizer_of("gpt2")
    assert stream(tokenizer, [], prompt=tokenizer.encode("🙂")) == [""]


def test_a_sentencepiece_continuation_keeps_its_leading_space():
    vocab = {"<unk>": 0, "▁Hello": 1, "▁world": 2}
    hf = HfTokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    # Llama 2's own decoder: it strips the space where a text begins.
    hf.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    ids = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id"))
    tokenizer = Tokenizer(
        SimpleNamespace(tokenizer=hf, eos_token_ids=(), chat_template=None, special_tokens_map={}, **ids)
    )
    assert tokenizer.decode([1]) + "".join(stream(tokenizer, [2], prompt=[1])) == hf.decode([1, 2])
    assert stream(tokenizer, [2, 2], prompt=[1]) == [" world", " world", ""]


@pytest.mark.parametrize("pack", ["gpt2", "llama"])
def test_special_tokens_have_text_only_when_asked(pack):
    tokenizer = tokenizer_of(pack)
    special = max(tokenizer.special_ids)
    ids = [*tokenizer.encode("ab", add_special_tokens=False), special, special]
    plain = hf_tokenizer(pack).tokenizer.decode(ids[:-2])
    literal = hf_tokenizer(pack).tokenizer.id_to_token(special)
    assert "".join(stream(tokenizer, ids)) == plain
    # Such a decoder puts no spaces between tokens, so there are none to leave out.
    for spaces in (True, False):
        shown = stream(tokenizer, ids, skip_special_tokens=False, spaces_between_special_tokens=spaces)
        assert "".join(shown) == plain + literal * 2


@pytest.mark.parametrize("decoder", [None, decoders.WordPiece(cleanup=False)])
def test_decoders_of_other_kinds_join_to_the_librarys_decode(decoder):
    tokenizer, rng = word_tokenizer(decoder), random.Random(0)
    for _ in range(50):
        ids = [rng.randrange(tokenizer.vocab_size) for _ in range(rng.randrange(1, 12))]
        for skip in (True, False):
            oracle = tokenizer.decode(ids, skip_special_tokens=skip)
            assert "".join(stream(tokenizer, ids, skip_special_tokens=skip)) == oracle
            split = rng.randrange(1, len(ids) + 1)
            before = tokenizer.decode(ids[:split], skip_special_tokens=skip)
            after = stream(tokenizer, ids[split:], prompt=ids[:split], skip_special_tokens=skip)
            if before:
                assert before + "".join(after) == oracle


def test_spaces_between_special_tokens_are_left_out_where_the_decoder_adds_them():
    tokenizer = word_tokenizer(None)
    ids = [0, 5, 6, 2]
    shown = stream(tokenizer, ids, skip_special_tokens=False)
    assert "".join(shown) == "play <a> <b> now"
    shown = stream(tokenizer, ids, skip_special_tokens=False, spaces_between_special_tokens=False)
    assert "".join(shown) == "play <a><b> now"


def test_other_decoders_show_broken_characters_in_the_end():
    # A decoder that falls back to bytes but is no known kind, so the window method serves it.
    decoder = decoders.Sequence([decoders.Replace("a", "b"), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer = word_tokenizer(decoder)
    assert tokenizer.decoder_kind == "other"
    assert stream(tokenizer, [0, 4]) == ["plby", "", "\ufffd"]
    assert "".join(stream(tokenizer, [4] * 9)) == "\ufffd" * 9
