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
_CONTEXT_TOKENS = 4  # a character has at most four bytes


class TokenText:
    """The text side of token ids; without a tokenizer every token is `token_id:N` and has no bytes."""

    def __init__(self, tokenizer: Tokenizer | None, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
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
        if self._tokenizer is None:
            return f"token_id:{token_id}"
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
        for token_id in context[-_CONTEXT_TOKENS:]:
            self._decoder.decode(token_text.text_bytes(token_id))
        self._length = 0
        self.offsets: list[int] = []

    @property
    def inside_character(self) -> bool:
        """Whether the tokens so far end inside a character."""
        return bool(self._decoder.getstate()[0])

    def extend(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            self.offsets.append(self._length)
            self._length += len(self._decoder.decode(self._token_text.text_bytes(token_id)))


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
        shown = {
            label(other): finite(logprob.logprob)
            for other, logprob in candidates.items()
            if other == token_id or logprob.rank <= top
        }
        lists["top_logprobs"].append(shown)

    def json(self) -> dict[str, list[Any]]:
        return self._lists


def finite(logprob: float) -> float:
    return max(logprob, FLOOR) if math.isfinite(logprob) else FLOOR
