"""Packed rows against what their requests say, over slots that change hands and page lists that grow."""

from __future__ import annotations

import random

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.batch import BatchPacker, Bucket, unpack
from jaxserve.request import Request
from jaxserve.sampling_params import SamplingParams
from jaxserve.scheduler import ScheduledRequest

pytestmark = pytest.mark.quick
SLOTS, PAGES = 3, 6


def request(number: int, rng: random.Random) -> Request:
    params = SamplingParams(
        temperature=rng.random() + 0.1,
        top_k=rng.randrange(9),
        top_p=rng.random() * 0.9 + 0.1,
        repetition_penalty=rng.choice([1.0, 1.3]),
        logprobs=rng.choice([None, 3]),
    )
    return Request(f"{number}", [1] * rng.randrange(1, 9), params, seed=rng.getrandbits(64))


def test_rows_hold_what_their_requests_say_whoever_had_the_slot_before() -> None:
    rng = random.Random(0)
    packer, bucket = BatchPacker(PAGES, SLOTS), Bucket(8, 4, False)
    owners: dict[int, Request] = {}
    for number in range(60):
        scheduled = []
        for slot in rng.sample(range(SLOTS), rng.randrange(1, SLOTS + 1)):
            is_new = slot not in owners or rng.random() < 0.2
            if is_new:
                owners[slot] = request(number, rng)
                owners[slot].slot = slot
            owner = owners[slot]
            if len(owner.page_ids) < PAGES:
                room = PAGES - len(owner.page_ids)
                owner.page_ids += [rng.randrange(1, 99) for _ in range(rng.randrange(room + 1))]
            computed, count = rng.randrange(20), rng.randrange(1, 3)
            scheduled.append(ScheduledRequest(owner, count, computed, rng.random() < 0.7, is_new))
        scheduled.sort(key=lambda item: not item.samples)
        biased = set(rng.sample(range(SLOTS), 1))
        inputs = unpack(jnp.asarray(packer.pack(scheduled, bucket, biased)))
        sampling, ends = inputs.sampling, np.asarray(inputs.cu_q_lens)
        for row, item in enumerate(scheduled):
            owner, pages = item.request, np.asarray(inputs.page_indices[row]).tolist()
            assert pages == owner.page_ids + [0] * (PAGES - len(owner.page_ids))
            assert int(inputs.slot[row]) == owner.slot
            assert int(inputs.kv_lens[row]) == item.num_computed_tokens + item.num_scheduled_tokens
            assert int(ends[row + 1] - ends[row]) == item.num_scheduled_tokens
            assert bool(inputs.samples[row]) is item.samples
            if not item.samples:  # nothing is asked of the sampler
                assert float(sampling.temperature[row]) == 0
                assert not sampling.has_bias[row]
                assert not sampling.wants_logprobs[row]
                continue
            seed = np.asarray(sampling.seed[row]).tolist()
            assert seed == [owner.seed >> 32, owner.seed & 0xFFFFFFFF]
            assert float(sampling.temperature[row]) == np.float32(owner.params.temperature)
            assert float(sampling.top_p[row]) == np.float32(owner.params.top_p)
            assert float(sampling.repetition_penalty[row]) == np.float32(owner.params.repetition_penalty)
            assert int(sampling.top_k[row]) == owner.params.top_k
            assert int(sampling.num_prompt_tokens[row]) == owner.num_prompt_tokens
            assert bool(sampling.has_bias[row]) is (owner.slot in biased)
            assert bool(sampling.wants_logprobs[row]) is (owner.params.logprobs is not None)
        empty = np.arange(bucket.num_rows) >= len(scheduled)
        assert np.asarray(inputs.slot)[empty].tolist() == [SLOTS] * int(empty.sum())
        assert ends[len(scheduled)] == ends[-1]
        assert not np.asarray(inputs.samples)[empty].any()
