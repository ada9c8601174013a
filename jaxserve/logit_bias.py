"""A request's row of the bias table: logit_bias, allowed tokens, bad words, and what min_tokens forbids.

One float32 row [vocab] on the device, made on the host when what it stands for changes: when a request gets
its slot, when it passes min_tokens, and, for bad words of several tokens, when the output's end changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxserve.request import Request


class BiasKey(NamedTuple):
    """What a bias row depends on beyond the request's parameters."""

    forbids_stop: bool  # the next token is one of the first min_tokens
    banned: tuple[int, ...]  # tokens that would complete a bad word


def needs_bias(request: Request) -> BiasKey | None:
    """The key of the row that the next sampled token needs; None when it needs none."""
    params = request.params
    num_output = request.num_scheduled_total - request.num_prompt_tokens
    samples_index = num_output - 1 if request.num_in_flight else num_output
    forbids_stop = samples_index < params.min_tokens and bool(request.eos_token_ids or request.stop_token_ids)
    banned = _completes_bad_word(request)
    if forbids_stop or banned or params.logit_bias or params.allowed_token_ids:
        return BiasKey(forbids_stop, banned)
    return None


def _completes_bad_word(request: Request) -> tuple[int, ...]:
    output = request.output_token_ids
    banned = set()
    for word in request.bad_words_token_ids:
        prefix = len(word) - 1
        # The last token first: nearly always it is another, and there may be hundreds of long words.
        if prefix == 0 or (
            prefix <= len(output) and word[-2] == output[-1] and list(word[:-1]) == output[-prefix:]
        ):
            banned.add(word[-1])
    return tuple(sorted(banned))


def bias_row(request: Request, key: BiasKey, vocab_size: int) -> np.ndarray:
    """float32 [vocab]."""
    params = request.params
    row = np.zeros(vocab_size, np.float32)
    if params.allowed_token_ids:
        row.fill(-np.inf)
        row[list(params.allowed_token_ids)] = 0.0
    for token_id, value in (params.logit_bias or {}).items():
        row[token_id] += value
    _forbid(row, key.banned)
    if key.forbids_stop:
        _forbid(row, [i for i in request.eos_token_ids | request.stop_token_ids if i < vocab_size])
    return row


def _forbid(row: np.ndarray, token_ids: Sequence[int]) -> None:
    """Forbid tokens, unless that leaves none: no sampler has an answer to a row of nothing but -inf.

    So a request that allows only its end of sequence gets that before min_tokens, and nothing it has not
    allowed.
    """
    places = list(token_ids)
    before = row[places]
    row[places] = -np.inf
    if row.max() == -np.inf:
        row[places] = before
