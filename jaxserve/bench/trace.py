"""The fixed trace: prompts of common English words, and how many tokens to make from each.

It depends on its seed only (the order of the random calls is part of the definition), so that servers and
versions are compared on the same work. Lengths are uniform: 24 to 384 words in, 16 to 128 tokens out.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

WORDS = (
    "time year people way day man thing woman life child world school state family student group country "
    "problem hand part place case week company system program question work government number night point "
    "home water room mother area money story fact month lot right study book eye job word business issue "
    "side kind head house service friend father power hour game line end member law car city community "
    "name president team minute idea kid body information back parent face others level office door "
    "health person art war history party result change morning reason research girl guy moment air "
    "teacher force education"
).split()


@dataclass(frozen=True, slots=True)
class TraceItem:
    """One request: its prompt's text and the number of tokens asked for."""

    prompt: str
    max_tokens: int


def make_trace(
    n: int,
    seed: int = 0,
    words: tuple[int, int] = (24, 384),
    tokens: tuple[int, int] = (16, 128),
    shared_prefix: int = 0,
) -> list[TraceItem]:
    """`n` requests; `words` and `tokens` are inclusive ranges, `shared_prefix` words begin every prompt."""
    rng = random.Random(seed)
    prefix = "".join(f"{rng.choice(WORDS)} " for _ in range(shared_prefix))
    trace = []
    for _ in range(n):
        num_words = rng.randint(*words)
        body = " ".join(rng.choice(WORDS) for _ in range(num_words))
        trace.append(TraceItem(prefix + body, rng.randint(*tokens)))
    return trace


def items_for(trace: list[TraceItem], concurrency: int) -> list[TraceItem]:
    """What one concurrency level runs of a trace: an eighth (at least 4) one at a time, else all."""
    count = len(trace) if concurrency > 1 else max(4, len(trace) // 8)
    return trace[:count]
