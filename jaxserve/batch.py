"""A step's inputs, packed into two host arrays so that little crosses to the device, and their unpacking.

ints  int32   [num_rows, INT_COLUMNS + pages_per_seq]
floats float32 [num_rows, FLOAT_COLUMNS]

Token ids are not among them: the step reads them from the token table on the device, where a prompt was put
when its request got a slot and where every sampled token is put by the step that sampled it. That is what
lets the host schedule a step before it has seen the previous one's tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.sampler import SamplingInputs
from jaxserve.sampling_params import SamplingParams
from jaxserve.scheduler import SchedulerOutput

_INTS = (
    "slot",
    "kv_len",
    "q_len",
    "samples",
    "top_k",
    "seed_high",
    "seed_low",
    "num_prompt",
    "has_bias",
    "logprobs",
)
_FLOATS = ("temperature", "top_p", "min_p", "presence", "frequency", "repetition")
INT_COLUMNS = len(_INTS)
FLOAT_COLUMNS = len(_FLOATS)


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
    """The packed arrays taken apart, on the device."""

    slot: jax.Array  # int32 [num_rows]
    kv_lens: jax.Array  # int32 [num_rows]: tokens after this step
    cu_q_lens: jax.Array  # int32 [num_rows + 1]
    samples: jax.Array  # bool [num_rows]
    page_indices: jax.Array  # int32 [num_rows, pages_per_seq]
    sampling: SamplingInputs


class BatchPacker:
    """Writes scheduled requests into numpy arrays of a bucket's shape."""

    def __init__(self, pages_per_seq: int, num_slots: int) -> None:
        self.pages_per_seq = pages_per_seq
        self.num_slots = num_slots

    def empty(self, bucket: Bucket) -> tuple[np.ndarray, np.ndarray]:
        """ints and floats of rows without tokens, in the dummy slot."""
        ints = np.zeros((bucket.num_rows, INT_COLUMNS + self.pages_per_seq), np.int32)
        floats = np.zeros((bucket.num_rows, FLOAT_COLUMNS), np.float32)
        ints[:, 0] = self.num_slots
        floats[:, 1] = floats[:, 5] = 1.0  # top_p and repetition penalty: off
        return ints, floats

    def pack(
        self, output: SchedulerOutput, bucket: Bucket, biased_slots: set[int]
    ) -> tuple[np.ndarray, np.ndarray]:
        """ints and floats of the step; rows past the scheduled ones are empty."""
        ints, floats = self.empty(bucket)
        for row, item in enumerate(output.scheduled):
            request, params = item.request, item.request.params
            assert request.slot is not None
            seed = request.seed & 0xFFFFFFFFFFFFFFFF
            ints[row, :INT_COLUMNS] = (
                request.slot,
                item.num_computed_tokens + item.num_scheduled_tokens,
                item.num_scheduled_tokens,
                item.samples,
                params.top_k,
                _signed(seed >> 32),
                _signed(seed & 0xFFFFFFFF),
                request.num_prompt_tokens,
                request.slot in biased_slots,
                params.logprobs is not None,
            )
            pages = request.page_ids
            ints[row, INT_COLUMNS : INT_COLUMNS + len(pages)] = pages
            floats[row] = sampling_floats(params)
        return ints, floats


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


def unpack(ints: jax.Array, floats: jax.Array) -> StepInputs:
    """Inside the step: columns to named arrays."""
    column = {name: ints[:, i] for i, name in enumerate(_INTS)}
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
        page_indices=ints[:, INT_COLUMNS:],
        sampling=sampling,
    )
