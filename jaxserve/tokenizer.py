"""Text to token ids and back, over a `tokenizers.Tokenizer`, with the true bytes of every token.

`token_bytes` is derived from the kind of the tokenizer's decoder:

* byte level (GPT-2, Llama 3, Qwen): every character of a token stands for one byte;
* SentencePiece (Llama 2, Gemma, Mistral): `▁` is a space, `<0xAB>` is the byte AB;
* any other kind (WordPiece, CTC, none): a token has no bytes of its own, its text depends on its neighbours.
  There `token_bytes` is the text of the token decoded alone, and streams use `detokenizer`'s window method.

Special tokens stand for their literal text. Where a run of `<0xAB>` tokens is not valid UTF-8, `tokenizers`
gives one U+FFFD for each byte of the whole run, valid part included; true bytes lose only what is broken.
"""

from __future__ import annotations

import json
import math
import re
import secrets
import threading
from collections.abc import Callable, Sequence
from functools import cached_property
from os.path import commonprefix
from typing import TYPE_CHECKING, Any, Literal

from tokenizers import AddedToken
from tokenizers import Tokenizer as HfTokenizer

from jaxserve.chat_template import ChatTemplate, check_template
from jaxserve.errors import ContextLengthError, InvalidRequestError

if TYPE_CHECKING:
    from jaxserve_checkpoints import TokenizerAssets

# Most token ids that a text may have: a list of more would take a tenth of a second to make, with all other
# threads stopped. No context is as long.
MAX_TOKENS = 1024 * 1024
_SHORT_TEXT = 64 * 1024  # characters: any work on so little is short
_SHORT_IDS = 4096  # decoded within a millisecond
_NORMALISER_SHRINKS = 4  # times at the most: composed characters, full-width letters

DecoderKind = Literal["byte_level", "sentencepiece", "other"]

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")


def _byte_level_table() -> dict[int, int | None]:
    """`str.translate` table from GPT-2's printable stand-ins to code points 0..255.

    Source: `bytes_to_unicode` of openai/gpt-2 `encoder.py`. Printable latin-1 bytes stand for themselves,
    the other 68 are moved to U+0100 and up. Those 68 code points themselves stand for nothing: they map past
    latin-1, so that encoding the result fails and the token is taken literally.
    """
    printable = {
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    }
    table: dict[int, int | None] = {}
    moved = 0
    for byte in range(256):
        if byte not in printable:
            table[byte] = 0xFFFF
            table[256 + moved] = byte
            moved += 1
    return table


_BYTE_LEVEL = _byte_level_table()


def _decoder_kind(tokenizer: HfTokenizer) -> tuple[DecoderKind, str]:
    """The kind of a tokenizer's decoder, and the character that stands for a space (SentencePiece)."""
    if tokenizer.decoder is None:
        return "other", ""
    spec: dict[str, Any] = json.loads(tokenizer.decoder.__getstate__())
    parts = spec["decoders"] if spec["type"] == "Sequence" else [spec]
    types = [part["type"] for part in parts]
    if "ByteLevel" in types and set(types) <= {"ByteLevel", "Fuse"}:
        return "byte_level", ""
    space = ""
    for part in parts:
        match part:
            case {"type": "Metaspace", "replacement": str(mark)}:
                space = mark
            case {"type": "Replace", "pattern": {"String": str(mark)}, "content": " "} if len(mark) == 1:
                space = mark
            case {"type": "ByteFallback" | "Fuse"} | {"type": "Strip", "content": " ", "stop": 0}:
                pass  # Strip drops a leading space where a text begins; a continuation does not begin one
            case _:
                return "other", ""
    return ("sentencepiece", space) if space else ("other", "")


class Tokenizer:
    """A checkpoint's tokenizer and chat template. Safe to use from several threads.

    Args:
        assets: what the checkpoint holds.
        chat_template: Jinja text that replaces the checkpoint's own template.

    Raises:
        ConfigError: `chat_template` does not compile.
    """

    def __init__(self, assets: TokenizerAssets, chat_template: str | None = None) -> None:
        self._hf: HfTokenizer = assets.tokenizer
        # An embedding model's tokenizer.json may cut or pad; here the context limit is the scheduler's
        # business.
        self._hf.no_truncation()
        self._hf.no_padding()
        self.bos_token_id: int | None = assets.bos_token_id
        self.eos_token_id: int | None = assets.eos_token_id
        self.pad_token_id: int | None = assets.pad_token_id
        self.unk_token_id: int | None = assets.unk_token_id
        self.eos_token_ids: tuple[int, ...] = tuple(assets.eos_token_ids)
        added: dict[int, AddedToken] = self._hf.get_added_tokens_decoder()
        self._added_text = {token_id: token.content for token_id, token in added.items()}
        self.special_ids: frozenset[int] = frozenset(i for i, token in added.items() if token.special)
        # With gaps in the ids the count falls short of the largest id; gaps only occur among added tokens.
        self.vocab_size: int = max(self._hf.get_vocab_size(), *(i + 1 for i in added), 0)
        self.decoder_kind, self._space = _decoder_kind(self._hf)
        self._byte_fallback = self.decoder_kind == "sentencepiece"
        # Whether `decode` leaves out a space that a text begins with, because `encode` puts one there.
        self.strips_first_space: bool = (
            self.decoder_kind == "sentencepiece" and self._hf.decoder.decode([f"{self._space}a"]) == "a"
        )
        self._bytes: dict[int, bytes] = {}
        self._strs: dict[int, str] = {}
        self._texts: dict[int, str | None] = {}

        if chat_template is not None:
            check_template(chat_template)
        source = chat_template if chat_template is not None else assets.chat_template
        self.chat_template: str | None = source
        self._chat = ChatTemplate(source, dict(assets.special_tokens_map))
        self._plain = _PlainEncoder(self._hf, {i: self._added_text[i] for i in self.special_ids})

    # Text to ids

    def encode(
        self,
        text: str,
        add_special_tokens: bool = True,
        parse_special: bool = True,
        max_tokens: int = MAX_TOKENS,
    ) -> list[int]:
        """Token ids of `text`.

        Args:
            text: any text.
            add_special_tokens: add BOS and EOS as the model's own policy says. There is never a second BOS:
                where `text` already begins with it, none is added.
            parse_special: the text of a special token in `text` becomes that token; False: it stays text.
            max_tokens: a text that has more is refused, where possible before it is encoded.

        Raises:
            InvalidRequestError: `text` holds lone surrogates, which no UTF-8 text does.
            ContextLengthError: more than `max_tokens`.
        """
        self._check_text(text, max_tokens, "prompt")
        tokenizer = self._hf if parse_special else self._plain.tokenizer
        ids = _encoded(tokenizer, text, add_special_tokens, max_tokens, "prompt")
        return self._one_bos(ids) if add_special_tokens else ids

    def text_offsets(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """For each token of `encode(text, add_special_tokens)` the number of characters of `text` before it.

        They count in `text` as it was given, whatever a normaliser makes of it: a space that the tokenizer
        puts before a text takes no place, a special token that `text` spells takes its own. The middle of a
        character counts as its beginning.
        """
        encoding = self._hf.encode_batch([text], add_special_tokens=add_special_tokens)[0]
        offsets, end = [], 0
        # Spans overlap where tokens share a character, and are empty where a token stands for no text.
        for begin, stop in encoding.offsets:
            offsets.append(min(begin, end) if stop > begin else end)
            end = max(end, stop)
        kept = self._one_bos(encoding.ids) if add_special_tokens else encoding.ids
        return offsets[len(offsets) - len(kept) :]

    def _check_text(self, text: str, max_tokens: int, param: str) -> None:
        """Refuses a text that cannot be encoded, or that surely has more than `max_tokens` tokens."""
        try:
            num_bytes = len(text.encode())
        except UnicodeEncodeError:
            message = "the text holds lone surrogates, which are not characters"
            raise InvalidRequestError(message, param) from None
        if num_bytes > _SHORT_TEXT and num_bytes > max_tokens * self._most_bytes_per_token:
            raise _too_long(None, max_tokens, param)

    @cached_property
    def _most_bytes_per_token(self) -> float:
        """Of given text. Without a limit where a token may take up any length of white space."""
        added = self._hf.get_added_tokens_decoder().values()
        if self.decoder_kind == "other" or any(token.lstrip or token.rstrip for token in added):
            return math.inf
        return _NORMALISER_SHRINKS * max(len(self.token_bytes(i)) for i in range(self.vocab_size))

    def bad_word_token_ids(self, word: str) -> list[list[int]]:
        """Token sequences that spell `word`, inside a text and after a space (as in vLLM).

        Other ways to cut the same text into tokens are not among them.
        """
        bare = self.encode(word.lstrip(), add_special_tokens=False, parse_special=False)
        spaced = self.encode(" " + word.lstrip(), add_special_tokens=False, parse_special=False)
        if not bare:
            return []
        # Where the space is a token of its own, the bare word's tokens come after it anyway.
        return [bare] if spaced[-len(bare) :] == bare else [bare, spaced]

    def _one_bos(self, ids: list[int]) -> list[int]:
        bos = self.bos_token_id
        return ids[1:] if bos is not None and ids[:2] == [bos, bos] else ids

    # Ids to text

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids` as a whole, as `tokenizers` decodes it.

        Raises:
            InvalidRequestError: an id is not a token id of any vocabulary (negative or past 32 bits).
        """
        try:
            if len(ids) <= _SHORT_IDS:
                text: str = self._hf.decode(list(ids), skip_special_tokens=skip_special_tokens)
            else:  # as a batch of one: only batches let other threads run meanwhile
                text = self._hf.decode_batch([list(ids)], skip_special_tokens=skip_special_tokens)[0]
        except OverflowError as error:
            raise InvalidRequestError("token ids must be in the vocabulary", param="tokens") from error
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """True bytes of one token; they may be a part of a character. Empty for an id without a token."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._make_bytes(token_id)
        return known

    def token_str(self, token_id: int) -> str:
        """Text of one token alone, for people: what is not a whole character is U+FFFD."""
        known = self._strs.get(token_id)
        if known is None:
            known = self._strs[token_id] = self.token_bytes(token_id).decode("utf-8", "replace")
        return known

    def token_text(self, token_id: int) -> str | None:
        """Text of one token, or None when its bytes are not whole characters."""
        try:
            return self._texts[token_id]
        except KeyError:
            try:
                text = self.token_bytes(token_id).decode("utf-8")
            except UnicodeDecodeError:
                text = None
            self._texts[token_id] = text
            return text

    def _make_bytes(self, token_id: int) -> bytes:
        if token_id in self.special_ids:
            return self._added_text[token_id].encode()
        if self.decoder_kind == "other":
            return self.decode([token_id], skip_special_tokens=False).encode() if token_id >= 0 else b""
        token: str | None = self._hf.id_to_token(token_id) if token_id >= 0 else None
        if token is None:
            return b""
        if self.decoder_kind == "byte_level":
            if token_id in self._added_text:
                return token.encode()
            try:
                return token.translate(_BYTE_LEVEL).encode("latin-1")
            except UnicodeEncodeError:
                return token.encode()
        match = _BYTE_TOKEN.match(token) if self._byte_fallback else None
        if match:
            return bytes((int(match[1], 16),))
        return token.replace(self._space, " ").encode()

    # Chat

    def render_chat(
        self,
        messages: list[dict[str, Any]],
        /,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **template_kwargs: Any,
    ) -> str:
        """The text of a conversation. Arguments and errors as `apply_chat_template`."""
        return self._chat.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            template_kwargs=template_kwargs,
        )

    def apply_chat_template(
        self,
        messages: list[dict[str, Any]],
        /,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        add_special_tokens: bool = False,
        special_tokens_in_content: bool = False,
        max_tokens: int = MAX_TOKENS,
        **template_kwargs: Any,
    ) -> list[int]:
        """Token ids of a conversation.

        The template writes the BOS (as in transformers, nothing is added to what it wrote). With
        `add_special_tokens` the tokenizer's policy applies too, and still there is exactly one BOS.

        Args:
            messages: as in OpenAI's API; see `chat_template.normalise_messages`.
            add_generation_prompt: end with the opening of an assistant's turn.
            continue_final_message: end inside the last message, without its closing; no generation prompt
                then.
            add_special_tokens: see above.
            special_tokens_in_content: the text of a special token inside a message becomes that token. By
                default it stays text: a user cannot write control tokens.
            max_tokens: as in `encode`.
            template_kwargs: further variables of the template (`tools`, `documents`, `enable_thinking`, ...).

        Raises:
            InvalidRequestError: no template, a wrong message, or the template refuses (with the template's
                message).
            ContextLengthError: more than `max_tokens`.
        """
        guard = None if special_tokens_in_content else self._plain.guard
        text = self._chat.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            template_kwargs=template_kwargs,
            guard=guard,
        )
        self._check_text(text, max_tokens, "messages")
        if self._plain.is_guarded(text):
            aliased = self._plain.aliased(text)
            ids = _encoded(self._plain.tokenizer, aliased, add_special_tokens, max_tokens, "messages")
            ids = self._plain.without_aliases(ids)
        else:
            ids = _encoded(self._hf, text, add_special_tokens, max_tokens, "messages")
        return self._one_bos(ids)


def _too_long(count: int | None, max_tokens: int, param: str) -> ContextLengthError:
    has = f"more than {max_tokens}" if count is None else f"{count}"
    if max_tokens == MAX_TOKENS:
        return ContextLengthError(f"the text has {has} tokens, and at most {max_tokens} are taken", param)
    return ContextLengthError.over(max_tokens, has, param, room=0)


def _encoded(
    tokenizer: HfTokenizer, text: str, add_special_tokens: bool, max_tokens: int, param: str
) -> list[int]:
    """Ids of a text.

    As a batch of one: only batches let other threads run meanwhile, and a long text takes seconds. The fast
    kind leaves out offsets, which nobody reads here. The list of ids is made with the lock held.
    """
    encoding = tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]
    if len(encoding) > max_tokens:
        raise _too_long(len(encoding), max_tokens, param)
    ids: list[int] = encoding.ids
    return ids


def _any_of(texts: set[str]) -> str:
    """A regular expression for the longest of `texts`: a trie, so hundreds of them cost no more than one."""
    groups: dict[str, set[str]] = {}
    for text in texts - {""}:
        groups.setdefault(text[0], set()).add(text)
    branches = []
    for group in groups.values():
        prefix = commonprefix(list(group))  # noqa: RUF071 - of characters indeed
        branches.append(re.escape(prefix) + _any_of({text[len(prefix) :] for text in group}))
    if not branches:
        return ""
    return f"(?:{'|'.join(branches)})" + ("?" if "" in texts else "")


class _PlainEncoder:
    """Encodes text in which some special tokens are meant as plain text.

    A chat's rendered text mixes the template's control tokens with what users wrote. `guard` breaks the
    special tokens in what users wrote with marks; after rendering, those left whole are the template's. They
    are swapped for aliases nobody can guess, the marks are dropped, and the whole text is encoded at once by
    a copy of the tokenizer that knows no special tokens but the aliases: merges and leading spaces come out
    as if the user's text held no special token.
    """

    # A noncharacter: Unicode keeps it for use inside a program, so no text to be exchanged loses it.
    _MARK = "\ufdd0"

    def __init__(self, tokenizer: HfTokenizer, special: dict[int, str]) -> None:
        self._hf = tokenizer
        self._special_ids = {text: token_id for token_id, text in special.items()}
        texts = set(self._special_ids) - {""}
        self._pattern = re.compile(_any_of(texts)) if texts else None
        self._longest = max(map(len, texts), default=0)
        self._nonce = secrets.token_hex(8)
        self._lock = threading.Lock()
        self._copy: HfTokenizer | None = None
        self._alias_ids: dict[int, int] = {}  # of the copy's aliases, to the special tokens' own

    def guard(self, text: str) -> str:
        """`text` with every special token in it broken: no two of its characters stay neighbours."""
        return self._replaced(text, lambda special: self._MARK.join([*special, ""]))

    def _replaced(self, text: str, change: Callable[[str], str]) -> str:
        """`text` with every special token changed.

        In pieces: one search of a long text would stop other threads. A piece is searched with what follows
        it, so that a token over its end is found whole; what is found later begins the next piece.
        """
        if self._pattern is None:
            return text
        if len(text) <= _SHORT_TEXT:
            return self._pattern.sub(lambda match: change(match[0]), text)
        pieces, place = [], 0
        while place < len(text):
            end = place + _SHORT_TEXT
            match = self._pattern.search(text, place, end + self._longest)
            if match is not None and match.start() < end:
                pieces += [text[place : match.start()], change(match[0])]
                place = match.end()
            else:
                pieces.append(text[place:end])
                place = end
        return "".join(pieces)

    def is_guarded(self, text: str) -> bool:
        """Whether some of `text` was broken; without special tokens nothing ever is."""
        return self._pattern is not None and self._MARK in text

    def aliased(self, text: str) -> str:
        """For `tokenizer`: a text whose broken special tokens are text and whose whole ones are tokens."""
        text = self._replaced(text, lambda special: self._alias(self._special_ids[special]))
        return text.replace(self._MARK, "")

    def without_aliases(self, token_ids: list[int]) -> list[int]:
        """What `tokenizer` made of an aliased text, in the model's ids."""
        return [self._alias_ids.get(token_id, token_id) for token_id in token_ids]

    def _alias(self, token_id: int) -> str:
        return f"\ufdd1{self._nonce}:{token_id}\ufdd2"

    @property
    def tokenizer(self) -> HfTokenizer:
        """Takes special tokens as text, but for their aliases.

        Made when first needed: a copy takes some tenths of a second, and few texts need it.
        """
        with self._lock:
            if self._copy is None:
                copy = HfTokenizer.from_str(self._hf.to_str())
                copy.encode_special_tokens = True
                strip = {i: (t.lstrip, t.rstrip) for i, t in self._hf.get_added_tokens_decoder().items()}
                aliases = []
                for token_id in self._special_ids.values():
                    lstrip, rstrip = strip[token_id]
                    aliases.append(
                        AddedToken(self._alias(token_id), lstrip=lstrip, rstrip=rstrip, normalized=False)
                    )
                copy.add_tokens(aliases)
                for token_id in self._special_ids.values():
                    alias_id = copy.token_to_id(self._alias(token_id))
                    assert alias_id is not None
                    self._alias_ids[alias_id] = token_id
                self._copy = copy
            return self._copy
