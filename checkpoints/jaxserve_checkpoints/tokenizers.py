"""Tokenizer assets of a Hugging Face directory, and what both formats share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from tokenizers import AddedToken, Tokenizer
from tokenizers.processors import PostProcessor, TemplateProcessing

from jaxserve_checkpoints.errors import CheckpointError
from jaxserve_checkpoints.json_files import read_json, read_optional_json

ROLES = ("bos_token", "eos_token", "unk_token", "pad_token")
T = TypeVar("T")


@dataclass(frozen=True)
class TokenizerAssets:
    """A tokenizer and what a server needs beside it.

    Attributes:
        tokenizer: its post-processor adds BOS and EOS by the model's own policy when `encode` is called
            with add_special_tokens=True.
        eos_token_ids: every id that ends a generation, ascending: the tokenizer's and generation_config's.
        chat_template: Jinja text, the "default" one where there are several.
        special_tokens_map: texts by role ("bos_token", ...), the names chat templates use.
    """

    tokenizer: Tokenizer
    bos_token_id: int | None
    eos_token_id: int | None
    pad_token_id: int | None
    unk_token_id: int | None
    eos_token_ids: tuple[int, ...]
    chat_template: str | None
    special_tokens_map: dict[str, str] = field(default_factory=dict)


def guarded(path: Path, item: str, build: Callable[[], T]) -> T:
    """`build()` with whatever the tokenizers library raises turned into a CheckpointError.

    Its errors are plain Exceptions, and its panics derive from BaseException only.
    """
    try:
        return build()
    except CheckpointError:
        raise
    except BaseException as error:
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise CheckpointError(f"cannot build the tokenizer: {error}", file=path, item=item) from None
        raise


def bos_eos_processor(bos: tuple[str, int] | None, eos: tuple[str, int] | None) -> PostProcessor:
    """A post-processor that puts `bos` before and `eos` after a text; each (text, id) or None."""
    before, after = ["BOS"] if bos else [], ["EOS"] if eos else []
    named = [("BOS", bos), ("EOS", eos)]
    # Named pieces rather than the token texts, because the template language gives ":" and "$" a meaning.
    return TemplateProcessing(
        single=[*before, "$A", *after],
        pair=[*before, "$A", *after, *(f"{b}:1" for b in before), "$B:1", *(f"{e}:1" for e in after)],
        special_tokens=[{"id": n, "ids": [t[1]], "tokens": [t[0]]} for n, t in named if t],
    )


def eos_ids(first: int | None, more: object, path: Path) -> tuple[int, ...]:
    """The union of an id and of `more`: an id, a list of ids or None."""
    ids: Iterable[object] = more if isinstance(more, list) else [] if more is None else [more]
    result = set() if first is None else {first}
    for token in ids:
        if not isinstance(token, int) or isinstance(token, bool) or token < 0:
            raise CheckpointError("is not a token id or a list of them", file=path, item="eos_token_id")
        result.add(token)
    return tuple(sorted(result))


def _token_text(value: object) -> str | None:
    """The text of a token given as a string or as an AddedToken's fields."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _chat_template(directory: Path, config: dict[str, Any]) -> str | None:
    file = directory / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(str(error), file=file) from None
    template = config.get("chat_template")
    if template is None:
        template = read_optional_json(directory / "chat_template.json").get("chat_template")
    if isinstance(template, list):
        named = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
        template = named.get("default")
        if template is None:
            raise CheckpointError(
                "lists templates without a default one",
                file=directory / "tokenizer_config.json",
                item="chat_template",
            )
    if template is not None and not isinstance(template, str):
        raise CheckpointError("is not text", file=directory / "tokenizer_config.json", item="chat_template")
    return template


def _add_missing_tokens(tokenizer: Tokenizer, config: dict[str, Any], path: Path) -> None:
    """Older checkpoints list some added tokens in tokenizer_config.json only."""
    listed = config.get("added_tokens_decoder", {})
    if not isinstance(listed, dict):
        raise CheckpointError("is not a JSON object", file=path, item="added_tokens_decoder")
    missing: list[tuple[int, dict[str, Any]]] = []
    for key, entry in listed.items():
        text = _token_text(entry)
        if text is None or not key.isdecimal() or not isinstance(entry, dict):
            raise CheckpointError(f"entry {key} is not a token", file=path, item="added_tokens_decoder")
        if tokenizer.token_to_id(text) is None:
            missing.append((int(key), entry))
    for expected, entry in sorted(missing, key=lambda item: item[0]):
        flags = {k: bool(entry[k]) for k in ("single_word", "lstrip", "rstrip", "normalized") if k in entry}
        special = bool(entry.get("special", False))
        tokenizer.add_tokens([AddedToken(entry["content"], special=special, **flags)])
        if tokenizer.token_to_id(entry["content"]) != expected:
            raise CheckpointError(f"its id cannot be {expected}", file=path, item=entry["content"])


def read_tokenizer(directory: Path, generation_config: Mapping[str, Any]) -> TokenizerAssets | None:
    """The tokenizer of a Hugging Face directory, None when it holds none.

    Reads tokenizer.json, tokenizer_config.json, special_tokens_map.json and the chat template. Raises
    CheckpointError for malformed files and for tokenizers in other formats only.
    """
    path = directory / "tokenizer.json"
    if not path.is_file():
        for other in ("tokenizer.model", "vocab.json", "tiktoken.model", "vocab.txt"):
            if (directory / other).is_file():
                raise CheckpointError(
                    "only tokenizer.json is read: save the tokenizer with transformers' fast tokenizer",
                    file=directory / other,
                )
        return None
    read_json(path)  # the library's own message for broken JSON names neither file nor place
    tokenizer = guarded(path, "tokenizer", lambda: Tokenizer.from_file(str(path)))
    # Truncation and padding belong to training and batching; a server encodes whole prompts.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    config_path = directory / "tokenizer_config.json"
    config = read_optional_json(config_path)
    guarded(config_path, "added_tokens_decoder", lambda: _add_missing_tokens(tokenizer, config, config_path))

    named = {**read_optional_json(directory / "special_tokens_map.json"), **config}
    texts = {role: text for role in ROLES if (text := _token_text(named.get(role))) is not None}
    ids = {role: tokenizer.token_to_id(text) for role, text in texts.items()}

    def role(name: str) -> tuple[str, int] | None:
        token = ids.get(name)
        return None if token is None else (texts[name], token)

    bos, eos = role("bos_token"), role("eos_token")
    guarded(path, "post_processor", lambda: _apply_policy(tokenizer, config, bos, eos))
    return TokenizerAssets(
        tokenizer=tokenizer,
        bos_token_id=ids.get("bos_token"),
        eos_token_id=ids.get("eos_token"),
        pad_token_id=ids.get("pad_token"),
        unk_token_id=ids.get("unk_token"),
        eos_token_ids=eos_ids(
            ids.get("eos_token"), generation_config.get("eos_token_id"), directory / "generation_config.json"
        ),
        chat_template=_chat_template(directory, config),
        special_tokens_map=texts,
    )


def _apply_policy(
    tokenizer: Tokenizer, config: dict[str, Any], bos: tuple[str, int] | None, eos: tuple[str, int] | None
) -> None:
    """Honour add_bos_token and add_eos_token where tokenizer.json's post-processor does not already.

    transformers' Llama tokenizers build their post-processor from these two keys (DeepSeek's files rely on
    it).
    """
    added = tokenizer.encode("", add_special_tokens=True).ids
    has_bos = bos is not None and bos[1] in added[:1]
    has_eos = eos is not None and eos[1] in added[has_bos:]
    wants_bos = bos is not None and config.get("add_bos_token") is True
    wants_eos = eos is not None and config.get("add_eos_token") is True
    if (wants_bos and not has_bos) or (wants_eos and not has_eos):
        tokenizer.post_processor = bos_eos_processor(
            bos if wants_bos or has_bos else None, eos if wants_eos or has_eos else None
        )
