"""Prefixes that stay in the cache: from files to token ids, and whether the pool has room for them.

A text file is encoded as the beginning of a completion's prompt is. A `.json` file is a list of messages, and
its prefix is what every conversation shares that begins with them: with the model's chat template, up to the
next message's content.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING

from jaxserve.errors import ConfigError, InvalidRequestError
from jaxserve.limits import SchedulerConfig
from jaxserve.page_allocator import page_hashes

if TYPE_CHECKING:
    from jaxserve.tokenizer import Tokenizer


@dataclass(frozen=True)
class PinnedPrefix:
    """The beginning that prompts are expected to have."""

    path: str
    token_ids: list[int]


def read_prefixes(paths: Sequence[str], tokenizer: Tokenizer | None) -> list[PinnedPrefix]:
    """Raises ConfigError for a model without tokenizer and for a file that cannot be read or encoded."""
    if paths and tokenizer is None:
        raise ConfigError("pin_prefix: this model has no tokenizer to encode a file with")
    return [PinnedPrefix(path, _read(path, tokenizer)) for path in paths if tokenizer is not None]


def _read(path: str, tokenizer: Tokenizer) -> list[int]:
    try:
        text = Path(path).read_text("utf-8-sig")
        if Path(path).suffix.lower() != ".json":
            return tokenizer.encode(text)
        return _of_conversation(json.loads(text), tokenizer)
    except OSError as error:
        raise ConfigError(f"pin_prefix: {path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"pin_prefix: {path}: is not UTF-8 text: {error.reason}") from error
    except (json.JSONDecodeError, RecursionError) as error:
        raise ConfigError(f"pin_prefix: {path}: is not JSON: {error}") from error
    except InvalidRequestError as error:
        raise ConfigError(f"pin_prefix: {path}: {error}") from error


def _of_conversation(messages: object, tokenizer: Tokenizer) -> list[int]:
    if not isinstance(messages, list) or not messages or not all(isinstance(m, dict) for m in messages):
        raise InvalidRequestError("must be a list of messages", "messages")
    # Templates may put a system message into the next one, or refuse a conversation that ends with it. So two
    # conversations go on with other words, and what they share is the prefix.
    role = "assistant" if messages[-1].get("role") == "user" else "user"
    one, other = (
        tokenizer.apply_chat_template([*messages, {"role": role, "content": content}]) for content in "0x"
    )
    pairs = zip(one, other, strict=False)
    return [token for token, _ in takewhile(lambda pair: pair[0] == pair[1], pairs)]


def check_prefixes(prefixes: Sequence[PinnedPrefix], limits: SchedulerConfig) -> None:
    """Raises ConfigError where they could not be kept, or would leave too little of the pool."""
    if not prefixes:
        return
    size = limits.page_size
    if not limits.enable_prefix_caching:
        raise ConfigError("pin_prefix: prefixes are kept in the prefix cache, which is turned off")
    pages: set[bytes] = set()
    for prefix in prefixes:
        count = len(prefix.token_ids)
        if count < size:
            raise ConfigError(
                f"pin_prefix: {prefix.path}: has {count} tokens, and only whole pages of {size} are kept"
            )
        if count >= limits.max_model_len:
            raise ConfigError(
                f"pin_prefix: {prefix.path}: {count} tokens leave no room in the context of "
                f"{limits.max_model_len}"
            )
        if not limits.enable_chunked_prefill and count >= limits.max_num_batched_tokens:
            raise ConfigError(
                f"pin_prefix: {prefix.path}: {count} tokens do not fit in a step of "
                f"{limits.max_num_batched_tokens} (max_num_batched_tokens), and chunked prefill is turned off"
            )
        pages.update(page_hashes(prefix.token_ids, size, b""))
    left, needed = limits.num_pages - 1 - len(pages), -(-limits.max_model_len // size)
    if left < needed:
        raise ConfigError(
            f"pin_prefix: {len(pages)} pinned pages leave {left} of the pool's {limits.num_pages - 1}, and a "
            f"request of the whole context ({limits.max_model_len} tokens) takes {needed}: make the pool "
            "larger (--kv-cache-memory, --memory-utilization, --num-pages) or the context shorter "
            "(--max-model-len)"
        )


def describe_prefixes(prefixes: Sequence[PinnedPrefix], limits: SchedulerConfig) -> str:
    """What is pinned, in one line."""
    size = limits.page_size
    parts = (f"{p.path} {len(p.token_ids) // size * size} of {len(p.token_ids)} tokens" for p in prefixes)
    return f"pinned prefixes, in whole pages of {size}: {', '.join(parts)}"
