"""A step's inputs, packed into one host array so that little crosses to the device, and their unpacking.

int32 [num_rows, COLUMNS + pages_per_seq]: lengths and parameters, floats by their bits, then the row's pages.
Rows that sample come first.

Token ids are not among them: the step reads them from the token table on the device, where a prompt was put
when its request got a slot and where every sampled token is put by the step that sampled it. That is what
lets the host schedule a step before it has seen the previous one's tokens.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.request import Request
from jaxserve.sampler import SamplingInputs
from jaxserve.sampling_params import SamplingParams
from jaxserve.scheduler import ScheduledRequest

# Those of the step itself first; the others are a request's own and act where a row samples.
_INTS = (
    "slot",
    "kv_len",
    "q_len",
    "samples",
    "has_bias",
    "num_prompt",
    "seed_high",
    "seed_low",
    "top_k",
    "logprobs",
)
_FLOATS = ("temperature", "top_p", "min_p", "presence", "frequency", "repetition")
_STEP_COLUMNS = _INTS.index("num_prompt")
COLUMNS = len(_INTS) + len(_FLOATS)
_PLAIN_FLOATS = np.array([0, 1, 0, 0, 0, 1], np.float32)  # greedy, nothing filtered, nothing penalised


@dataclass(frozen=True, order=True)
class Bucket:
    """A compiled program's shape: it serves any batch that fits in it."""

    num_tokens: int
    num_rows: int
    decode_only: bool  # one token a row, num_tokens == num_rows

    def holds(self, num_tokens: int, num_rows: int, decode_only: bool) -> bool:
        """A decode batch also runs in a mixed program, not the other way round."""
        fits = num_tokens <= self.num_tokens and num_rows <= self.num_rows
        return fits and (decode_only or not self.decode_only)


class StepInputs(NamedTuple):
    """The packed array taken apart, on the device."""

    slot: jax.Array  # int32 [num_rows]
    kv_lens: jax.Array  # int32 [num_rows]: tokens after this step
    cu_q_lens: jax.Array  # int32 [num_rows + 1]
    samples: jax.Array  # bool [num_rows]
    page_indices: jax.Array  # int32 [num_rows, pages_per_seq]
    sampling: SamplingInputs


class BatchPacker:
    """Writes scheduled requests into an array of a bucket's shape.

    What stays the same while a request has its slot is kept; of its pages only new ones are written.
    """

    def __init__(self, pages_per_seq: int, num_slots: int) -> None:
        self.pages_per_seq = pages_per_seq
        self.num_slots = num_slots
        self._plain = np.zeros(COLUMNS + pages_per_seq, np.int32)  # a row without tokens, in the dummy slot
        self._plain[0] = num_slots
        self._plain[len(_INTS) : COLUMNS] = _PLAIN_FLOATS.view(np.int32)
        self._of_slot = np.tile(self._plain, (num_slots, 1))
        self._num_pages = [0] * num_slots  # of each slot, that have been written

    def empty(self, bucket: Bucket) -> np.ndarray:
        """Rows without tokens, in the dummy slot."""
        packed = np.empty((bucket.num_rows, len(self._plain)), np.int32)
        packed[:] = self._plain
        return packed

    def pack(
        self, scheduled: Sequence[ScheduledRequest], bucket: Bucket, biased_slots: Container[int]
    ) -> np.ndarray:
        """The step's array; rows past the scheduled ones, in this order, are empty."""
        slots: list[int] = []
        lens: list[int] = []
        num_sampling = 0
        for item in scheduled:
            request = item.request
            slot, pages = request.slot, request.page_ids
            assert slot is not None
            if item.upload:
                self._begin(slot, request)
            known = self._num_pages[slot]
            if len(pages) > known:
                self._of_slot[slot, COLUMNS + known : COLUMNS + len(pages)] = pages[known:]
                self._num_pages[slot] = len(pages)
            slots.append(slot)
            count = item.num_scheduled_tokens
            lens += (slot, item.num_computed_tokens + count, count, item.samples, slot in biased_slots)
            num_sampling += item.samples
        packed = self.empty(bucket)
        packed[: len(slots)] = self._of_slot.take(slots, axis=0)
        packed[: len(slots), :_STEP_COLUMNS] = np.array(lens, np.int32).reshape(-1, _STEP_COLUMNS)
        # A row that does not sample asks for nothing.
        packed[num_sampling:, _STEP_COLUMNS - 1 : COLUMNS] = self._plain[_STEP_COLUMNS - 1 : COLUMNS]
        return packed

    def _begin(self, slot: int, request: Request) -> None:
        """Write what a slot's new request keeps."""
        params = request.params
        row = self._of_slot[slot]
        row[:] = 0
        seed = request.seed & 0xFFFFFFFFFFFFFFFF
        row[_STEP_COLUMNS : len(_INTS)] = (
            request.num_prompt_tokens,
            _signed(seed >> 32),
            _signed(seed & 0xFFFFFFFF),
            params.top_k,
            params.logprobs is not None,
        )
        row[len(_INTS) : COLUMNS] = np.array(sampling_floats(params), np.float32).view(np.int32)
        self._num_pages[slot] = 0


def sampling_floats(params: SamplingParams) -> tuple[float, ...]:
    return (
        params.temperature,
        params.top_p,
        params.min_p,
        params.presence_penalty,
        params.frequency_penalty,
        # Logits times or over a number beyond these would be no finite float32.
        min(max(params.repetition_penalty, 1e-20), 1e20),
    )


def _signed(half: int) -> int:
    return half - (1 << 32) if half >= 1 << 31 else half


def unpack(packed: jax.Array) -> StepInputs:
    """Inside the step: columns to named arrays."""
    column = {name: packed[:, i] for i, name in enumerate(_INTS)}
    floats = jax.lax.bitcast_convert_type(packed[:, len(_INTS) : COLUMNS], jnp.float32)
    real = {name: floats[:, i] for i, name in enumerate(_FLOATS)}
    q_lens = column["q_len"]
    cu_q_lens = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(q_lens, dtype=jnp.int32)])
    seed = jnp.stack([column["seed_high"], column["seed_low"]], axis=1)
    sampling = SamplingInputs(
        temperature=real["temperature"],
        top_p=real["top_p"],
        min_p=real["min_p"],
        presence_penalty=real["presence"],
        frequency_penalty=real["frequency"],
        repetition_penalty=real["repetition"],
        top_k=column["top_k"],
        seed=jax.lax.bitcast_convert_type(seed, jnp.uint32),
        position=column["kv_len"],  # the new token's index
        num_prompt_tokens=column["num_prompt"],
        has_bias=column["has_bias"] != 0,
        wants_logprobs=column["logprobs"] != 0,
    )
    return StepInputs(
        slot=column["slot"],
        kv_lens=column["kv_len"],
        cu_q_lens=cu_q_lens,
        samples=column["samples"] != 0,
        page_indices=packed[:, COLUMNS:],
        sampling=sampling,
    )
