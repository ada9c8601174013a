"""`truncate_prompt_tokens`: a long prompt is cut where the client asked for it, and only there."""

from __future__ import annotations

from typing import Literal, Protocol

from jaxserve.tokenizer import MAX_TOKENS


class Truncating(Protocol):
    """A body with the two fields."""

    truncate_prompt_tokens: int | None
    truncation_side: Literal["left", "right"]


def room_for_prompt(max_model_len: int, token_limit: int | None) -> int:
    """Tokens that a prompt may have: what the answer wants is left free, where the context is longer."""
    wanted = token_limit if token_limit is not None and token_limit < max_model_len else 1
    return max_model_len - wanted


def most_tokens(max_model_len: int, body: Truncating) -> int:
    """Tokens above which a prompt is refused before it is cut: it then costs no more than its counting."""
    return max_model_len if body.truncate_prompt_tokens is None else max(max_model_len, MAX_TOKENS)


def truncated(token_ids: list[int], body: Truncating, room: int) -> list[int]:
    """The part of a prompt that the client wants to keep; `room` tokens for -1, and one at the least."""
    limit = body.truncate_prompt_tokens
    if limit is None:
        return token_ids
    if limit == -1:
        limit = max(room, 1)
    return token_ids[-limit:] if body.truncation_side == "left" else token_ids[:limit]
