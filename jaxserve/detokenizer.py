"""Token ids to text, one at a time, never half a character.

Text is what the tokens' true bytes spell, so it is independent of how the ids arrive: the pieces of `append`
and `flush` join to the text of all ids.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxserve.tokenizer import Tokenizer

_MAX_CHAR_BYTES = 4  # of one character in UTF-8
_CONTEXT_TOKENS = 5  # of the prompt, as context for the window method (as in vLLM)


class IncrementalDetokenizer:
    """The text of one growing sequence.

    A prompt that ends inside a character is context: its last, incomplete bytes are taken up, and the
    character that the first output tokens complete is part of the output. So the text of the prompt without
    those bytes, and the output, join to the text of all ids. A leading space of the first token is kept: a
    continuation does not begin a text.

    Args:
        tokenizer: whose ids come.
        skip_special_tokens: special tokens have no text.
        spaces_between_special_tokens: as in vLLM, only where the decoder itself puts spaces between tokens
            (WordPiece, or no decoder): False leaves out those between two special tokens that follow each
            other. Byte-level and SentencePiece decoders put none, so there both values give the same text.
        prompt_token_ids: what comes before the first id; only its end is looked at.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
        prompt_token_ids: Sequence[int] = (),
    ) -> None:
        skip = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
        self._stream: _ByteStream | _WindowStream
        if tokenizer.decoder_kind == "other":
            self._stream = _WindowStream(tokenizer, skip, spaces_between_special_tokens, prompt_token_ids)
        else:
            self._stream = _ByteStream(tokenizer, skip, prompt_token_ids)

    def append(self, token_id: int) -> str:
        """The text that `token_id` completes; empty while a character is unfinished."""
        return self._stream.append(token_id)

    def flush(self) -> str:
        """At the end: U+FFFD for a character that stayed unfinished, else nothing."""
        return self._stream.flush()


class _ByteStream:
    """Decodes true bytes. Invalid bytes are U+FFFD as in WHATWG's decoder: one for each maximal broken
    part."""

    def __init__(self, tokenizer: Tokenizer, skip: frozenset[int], prompt_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._skip = skip
        self._pending = self._unfinished_tail(prompt_token_ids)

    def _unfinished_tail(self, prompt_token_ids: Sequence[int]) -> bytes:
        tail = b""
        for token_id in reversed(prompt_token_ids):
            if token_id not in self._skip:
                tail = self._tokenizer.token_bytes(token_id) + tail
            if len(tail) >= _MAX_CHAR_BYTES:
                break
        return tail[codecs.utf_8_decode(tail, "replace", False)[1] :]

    def append(self, token_id: int) -> str:
        if token_id in self._skip:
            return ""
        if not self._pending:
            text = self._tokenizer.token_text(token_id)
            if text is not None:
                return text
        data = self._pending + self._tokenizer.token_bytes(token_id)
        text, used = codecs.utf_8_decode(data, "replace", False)
        self._pending = data[used:]
        return text

    def flush(self) -> str:
        text = self._pending.decode("utf-8", "replace")
        self._pending = b""
        return text


class _WindowStream:
    """For decoders where a token's text depends on its neighbours: the difference of two decoded windows.

    The method of text-generation-inference and vLLM: decode the last shown tokens alone, and with the new
    ones; what the second has more is new. A text that ends in U+FFFD may be an unfinished character and
    waits, but for no more tokens than a character has bytes.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        skip: frozenset[int],
        spaces_between_special_tokens: bool,
        prompt_token_ids: Sequence[int],
    ) -> None:
        self._tokenizer = tokenizer
        self._skip = skip
        self._spaces = spaces_between_special_tokens
        self._ids = [i for i in prompt_token_ids[-_CONTEXT_TOKENS:] if i not in skip]
        self._read = len(self._ids)  # ids before this have been shown
        self._last_special = bool(self._ids) and self._ids[-1] in tokenizer.special_ids

    def append(self, token_id: int) -> str:
        if token_id in self._skip:
            return ""
        self._ids.append(token_id)
        special = token_id in self._tokenizer.special_ids
        bare = special and self._last_special and not self._spaces
        self._last_special = special
        shown, text = self._window()
        if text.endswith("\ufffd") and len(self._ids) - self._read < _MAX_CHAR_BYTES:
            return ""
        self._advance()
        return self._tokenizer.token_str(token_id) if bare else text[len(shown) :]

    def flush(self) -> str:
        shown, text = self._window()
        self._advance()
        return text[len(shown) :]

    def _window(self) -> tuple[str, str]:
        decode = self._tokenizer.decode
        shown = decode(self._ids[: self._read], skip_special_tokens=False) if self._read else ""
        return shown, decode(self._ids, skip_special_tokens=False) if self._ids else ""

    def _advance(self) -> None:
        del self._ids[: max(0, self._read - _CONTEXT_TOKENS)]
        self._read = len(self._ids)
