"""Tokenizers built from GGUF metadata: the `gpt2` (byte-level BPE) and `llama` (SentencePiece BPE) kinds."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

from jaxserve_checkpoints.errors import CheckpointError
from jaxserve_checkpoints.pretokenizers import PRE_TOKENIZERS
from jaxserve_checkpoints.tokenizers import TokenizerAssets, bos_eos_processor, eos_ids, guarded

# tokenizer.ggml.token_type
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
SPACE = "▁"  # SentencePiece's mark of a space


class _Reader:
    """Typed access to `tokenizer.*` keys of one file."""

    def __init__(self, metadata: Mapping[str, object], path: Path) -> None:
        self.metadata, self.path = metadata, path

    def fail(self, key: str, message: str) -> CheckpointError:
        return CheckpointError(message, file=self.path, item=f"tokenizer.{key}")

    def text(self, key: str) -> str | None:
        value = self.metadata.get(f"tokenizer.{key}")
        if value is not None and not isinstance(value, str):
            raise self.fail(key, "is not text")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.metadata.get(f"tokenizer.{key}", default)
        if not isinstance(value, bool):
            raise self.fail(key, "is not a bool")
        return value

    def strings(self, key: str) -> list[str] | None:
        value = self.metadata.get(f"tokenizer.{key}")
        if value is None:
            return None
        if not isinstance(value, list) or not value:
            raise self.fail(key, "is not an array of strings")
        return value

    def numbers(self, key: str, count: int) -> np.ndarray | None:
        value = self.metadata.get(f"tokenizer.{key}")
        if value is None:
            return None
        if not isinstance(value, np.ndarray) or len(value) != count:
            raise self.fail(key, f"is not an array of {count} numbers, one a token")
        return value

    def token_id(self, key: str, vocab_size: int, default: int | None = None) -> int | None:
        value = self.metadata.get(f"tokenizer.{key}")
        if value is None:
            return default if default is not None and default < vocab_size else None
        if not isinstance(value, int) or isinstance(value, bool):
            raise self.fail(key, "is not a token id")
        if value in (0xFFFFFFFF, -1):  # written by some converters for "none"
            return None
        if not 0 <= value < vocab_size:
            raise self.fail(key, f"{value} is outside the vocabulary of {vocab_size}")
        return value


def end_ids(metadata: Mapping[str, object]) -> list[int]:
    """The ids the metadata names as ends: of sequence, of turn, of message."""
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    values = (metadata.get(f"tokenizer.ggml.{key}") for key in keys)
    return sorted({v for v in values if isinstance(v, int) and not isinstance(v, bool) and 0 <= v < 1 << 31})


def build_tokenizer(metadata: Mapping[str, object], path: Path) -> TokenizerAssets | None:
    """The tokenizer in a GGUF file's metadata, None when it holds none.

    Raises CheckpointError for a kind or a pre-tokenizer that is not known, and for malformed metadata.
    """
    reader = _Reader(metadata, path)
    kind = reader.text("ggml.model")
    if kind in (None, "none", "no_vocab"):
        return None
    if kind not in ("gpt2", "llama"):
        raise reader.fail("ggml.model", f"unknown tokenizer kind {kind!r}; gpt2 and llama are read")
    tokens = reader.strings("ggml.tokens")
    if tokens is None:
        raise reader.fail("ggml.tokens", "is missing")
    tokens = [token or f"[EMPTY_{i}]" for i, token in enumerate(tokens)]
    vocab = {token: i for i, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        twice = next(token for i, token in enumerate(tokens) if vocab[token] != i)
        raise reader.fail("ggml.tokens", f"token {twice!r} appears twice")
    kinds = reader.numbers("ggml.token_type", len(tokens))
    types: list[int] = [NORMAL] * len(tokens) if kinds is None else kinds.tolist()

    is_llama = kind == "llama"
    size = len(tokens)
    ids = {
        "bos_token": reader.token_id("ggml.bos_token_id", size, 1 if is_llama else None),
        "eos_token": reader.token_id("ggml.eos_token_id", size, 2 if is_llama else None),
        "unk_token": reader.token_id("ggml.unknown_token_id", size, 0 if is_llama else None),
        "pad_token": reader.token_id("ggml.padding_token_id", size),
    }
    build = _llama if is_llama else _gpt2
    tokenizer, add_bos_default = guarded(
        path, "tokenizer.ggml", lambda: build(reader, tokens, vocab, types, ids)
    )
    ends = {end for end in end_ids(metadata) if end < size}
    guarded(path, "tokenizer.ggml.tokens", lambda: _add_special(tokenizer, tokens, types, ids, ends))

    def role(name: str, wanted: bool) -> tuple[str, int] | None:
        token = ids[name]
        return (tokens[token], token) if wanted and token is not None else None

    bos = role("bos_token", reader.flag("ggml.add_bos_token", add_bos_default))
    eos = role("eos_token", reader.flag("ggml.add_eos_token", False))
    if bos or eos:
        tokenizer.post_processor = bos_eos_processor(bos, eos)
    return TokenizerAssets(
        tokenizer=tokenizer,
        bos_token_id=ids["bos_token"],
        eos_token_id=ids["eos_token"],
        pad_token_id=ids["pad_token"],
        unk_token_id=ids["unk_token"],
        eos_token_ids=eos_ids(ids["eos_token"], sorted(ends), path),
        chat_template=reader.text("chat_template"),
        special_tokens_map={name: tokens[token] for name, token in ids.items() if token is not None},
    )


def _add_special(
    tokenizer: Tokenizer, tokens: list[str], types: list[int], ids: Mapping[str, int | None], ends: set[int]
) -> None:
    """Mark the tokens that are matched in text before anything else."""
    special = {i for i, kind in enumerate(types) if kind in (CONTROL, UNKNOWN)}
    special |= ends | {i for i in ids.values() if i is not None}
    user = {i for i, kind in enumerate(types) if kind == USER_DEFINED} - special
    tokenizer.add_tokens([AddedToken(tokens[i], normalized=False, special=False) for i in sorted(user)])
    tokenizer.add_special_tokens(
        [AddedToken(tokens[i], normalized=False, special=True) for i in sorted(special)]
    )


def _gpt2(
    reader: _Reader, tokens: list[str], vocab: dict[str, int], types: list[int], ids: Mapping[str, int | None]
) -> tuple[Tokenizer, bool]:
    """Byte-level BPE, and whether BOS is added when the file does not say."""
    name = reader.text("ggml.pre") or "default"
    pre = PRE_TOKENIZERS.get(name)
    if pre is None:
        raise reader.fail("ggml.pre", f"unknown pre-tokenizer {name!r}; known: {', '.join(PRE_TOKENIZERS)}")
    lines = reader.strings("ggml.merges")
    if lines is None:
        raise reader.fail("ggml.merges", "is missing")
    tokenizer = Tokenizer(
        BPE(vocab=vocab, merges=_split_merges(reader, lines, vocab), ignore_merges=pre.ignore_merges)
    )
    if pre.nfc:
        tokenizer.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre.patterns]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, pre.add_bos


def _split_merges(reader: _Reader, lines: list[str], vocab: Mapping[str, int]) -> list[tuple[str, str]]:
    merges = []
    for line in lines:
        # The first character may itself be a space in files that do not write spaces as bytes.
        cut = line.find(" ", 1)
        left, right = line[:cut], line[cut + 1 :]
        if cut < 0 or left not in vocab or right not in vocab or left + right not in vocab:
            raise reader.fail("ggml.merges", f"merge {line!r} names no tokens")
        merges.append((left, right))
    return merges


def _llama(
    reader: _Reader, tokens: list[str], vocab: dict[str, int], types: list[int], ids: Mapping[str, int | None]
) -> tuple[Tokenizer, bool]:
    """SentencePiece BPE with byte fallback, and whether BOS is added when the file does not say."""
    lines = reader.strings("ggml.merges")
    if lines is not None:
        merges = _split_merges(reader, lines, vocab)
    else:
        scores = reader.numbers("ggml.scores", len(tokens))
        if scores is None:
            raise reader.fail("ggml.scores", "is missing, and so are the merges")
        merges = merges_from_scores(tokens, scores, types)
    unknown = ids["unk_token"]
    tokenizer = Tokenizer(
        BPE(
            vocab=vocab,
            merges=merges,
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=BYTE in types,
        )
    )
    marks: list[normalizers.Normalizer] = [normalizers.Replace(" ", SPACE)]
    if reader.flag("ggml.add_space_prefix", True):
        marks.insert(0, normalizers.Prepend(SPACE))
    tokenizer.normalizer = normalizers.Sequence(marks)
    # The space that add_space_prefix puts before a text is kept: a completion is decoded after its prompt,
    # where that space is real.
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return tokenizer, True


def merges_from_scores(tokens: list[str], scores: np.ndarray, types: list[int]) -> list[tuple[str, str]]:
    """SentencePiece's merge order as BPE merges.

    SentencePiece joins the adjacent pair whose join has the best score, so each way to split a token into
    two tokens is a merge, in order of falling score.
    """
    normal = {token: i for i, token in enumerate(tokens) if types[i] in (NORMAL, USER_DEFINED, UNUSED)}
    ranked = []
    for token, i in normal.items():
        for cut in range(1, len(token)):
            left, right = normal.get(token[:cut]), normal.get(token[cut:])
            if left is not None and right is not None:
                ranked.append((-float(scores[i]), i, left, right))
    ranked.sort()
    return [(tokens[left], tokens[right]) for _, _, left, right in ranked]
