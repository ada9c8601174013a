"""Tokens as clients see them: where each begins in the text, its bytes, and log-probabilities in JSON."""

from __future__ import annotations

import codecs
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jaxserve.outputs import Logprob, TokenLogprobs

if TYPE_CHECKING:
    from jaxserve.tokenizer import Tokenizer

FLOOR = -9999.0  # JSON has no -inf
_MAX_CHAR_BYTES = 4  # of one character in UTF-8


class TokenText:
    """The text side of token ids; without a tokenizer every token is `token_id:N` and has no bytes.

    Args:
        tokenizer: None for a checkpoint without one.
        skip_special_tokens: special tokens have no place in the text.
        labels_are_ids: every token is labelled `token_id:N`, which is unique (`return_tokens_as_token_ids`).
    """

    def __init__(
        self, tokenizer: Tokenizer | None, skip_special_tokens: bool, labels_are_ids: bool = False
    ) -> None:
        self._tokenizer = tokenizer
        self._labels_are_ids = labels_are_ids or tokenizer is None
        self._hidden: frozenset[int] = frozenset()
        if tokenizer is not None and skip_special_tokens:
            self._hidden = frozenset(tokenizer.special_ids)

    def text_bytes(self, token_id: int) -> bytes:
        """What the token adds to the text; nothing for a special token that the text leaves out."""
        if self._tokenizer is None or token_id in self._hidden:
            return b""
        return self._tokenizer.token_bytes(token_id)

    def label(self, token_id: int) -> str:
        """The token as a string; `bytes:\\xe2\\x82` where it is only a part of a character."""
        if self._labels_are_ids or self._tokenizer is None:
            return by_id(token_id)
        if token_id in self._tokenizer.special_ids:
            return self._tokenizer.token_str(token_id)
        raw = self._tokenizer.token_bytes(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def chat_entry(self, token_id: int, candidates: TokenLogprobs, top: int) -> dict[str, Any]:
        """One element of `choices[].logprobs.content`."""
        best = sorted((item for item in candidates.items() if item[1].rank <= top), key=lambda kv: kv[1].rank)
        entry = self._chat_token(token_id, candidates[token_id])
        entry["top_logprobs"] = [self._chat_token(other, logprob) for other, logprob in best[:top]]
        return entry

    def _chat_token(self, token_id: int, logprob: Logprob) -> dict[str, Any]:
        raw = list(self.text_bytes(token_id))
        return {"token": self.label(token_id), "logprob": finite(logprob.logprob), "bytes": raw}

    def prompt_json(self, prompt_logprobs: Sequence[TokenLogprobs | None]) -> list[dict[str, Any] | None]:
        """`prompt_logprobs` of the response: {token id: {logprob, rank, decoded_token}} for each position."""
        return [
            None
            if position is None
            else {
                str(token_id): {
                    "logprob": finite(logprob.logprob),
                    "rank": logprob.rank,
                    "decoded_token": self.label(token_id),
                }
                for token_id, logprob in position.items()
            }
            for position in prompt_logprobs
        ]


class TextOffsets:
    """For each token the number of characters before it; the middle of a character counts as its beginning.

    `context` is what stands before the first token: its end may be a part of the first character.
    """

    def __init__(self, token_text: TokenText, context: Sequence[int] = ()) -> None:
        self._token_text = token_text
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        before = b""
        for token_id in reversed(context):
            before = token_text.text_bytes(token_id) + before
            if len(before) >= _MAX_CHAR_BYTES:
                break
        self._decoder.decode(before)
        self._length = 0
        self.offsets: list[int] = []
        self.ends: list[int] = []  # characters that are whole after each token

    def extend(self, token_ids: Sequence[int]) -> str:
        """The characters that these tokens complete."""
        pieces = []
        for token_id in token_ids:
            raw = self._token_text.text_bytes(token_id)
            begin = self._length
            if self._is_inside_character and raw:
                # The token may go on with the character, or show that it was broken and begin after it.
                head = self._decoder.decode(raw[:1])
                begin += len(head) > 1 or (len(head) == 1 and self._is_inside_character)
                text = head + self._decoder.decode(raw[1:])
            else:
                text = self._decoder.decode(raw)
            self._length += len(text)
            self.offsets.append(begin)
            self.ends.append(self._length)
            pieces.append(text)
        return "".join(pieces)

    @property
    def _is_inside_character(self) -> bool:
        return bool(self._decoder.getstate()[0])


def without_end(raw: bytes, num_chars: int) -> bytes:
    """A token's bytes without its last `num_chars` whole characters and what follows them."""
    whole = raw[: codecs.utf_8_decode(raw, "replace", False)[1]]
    kept = whole.decode("utf-8", "surrogateescape")[: -num_chars or None]
    return kept.encode("utf-8", "surrogateescape")


class CompletionLogprobs:
    """Builder of the completions API's four parallel lists."""

    def __init__(self, token_text: TokenText) -> None:
        self._token_text = token_text
        self._lists: dict[str, list[Any]] = {
            "tokens": [],
            "token_logprobs": [],
            "top_logprobs": [],
            "text_offset": [],
        }

    def add(self, token_id: int, candidates: TokenLogprobs | None, offset: int, top: int) -> None:
        """Append one token; `candidates` is None for the first token of an echoed prompt."""
        label = self._token_text.label
        lists = self._lists
        lists["tokens"].append(label(token_id))
        lists["text_offset"].append(offset)
        if candidates is None:
            lists["token_logprobs"].append(None)
            lists["top_logprobs"].append(None)
            return
        lists["token_logprobs"].append(finite(candidates[token_id].logprob))
        shown: dict[str, float] = {}
        for other, logprob in candidates.items():  # the chosen token comes first
            if other == token_id or logprob.rank <= top:
                name = label(other)
                # Two tokens may be the same text, such as `A` and the byte token <0x41>.
                shown[name if name not in shown else by_id(other)] = finite(logprob.logprob)
        lists["top_logprobs"].append(shown)

    def json(self) -> dict[str, list[Any]]:
        return self._lists


def by_id(token_id: int) -> str:
    """The label of a token that no other token has."""
    return f"token_id:{token_id}"


def finite(logprob: float) -> float:
    return max(logprob, FLOOR) if math.isfinite(logprob) else FLOOR
