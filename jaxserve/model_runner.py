"""Owns what lives on the device: weights, page pool, token and bias tables, compiled programs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.batch import COLUMNS, BatchPacker, Bucket
from jaxserve.compilation import Program, ProgramTable
from jaxserve.kv_pool import PoolSpec
from jaxserve.limits import SchedulerConfig
from jaxserve.logit_bias import bias_row, needs_bias
from jaxserve.outputs import Logprob, TokenLogprobs
from jaxserve.request import Request
from jaxserve.sampler import Sampled
from jaxserve.scheduler import SchedulerOutput
from jaxserve.step import StepSpec, Weights, make_logits, make_pool, make_score
from jaxserve.step_programs import Aval, StepPrograms
from jaxserve.weights import ModelSkeleton

log = logging.getLogger("jaxserve")
_SCORED_AT_ONCE = 32  # rows of one prompt_logprobs program; more rows take more calls


@dataclass
class StepHandle:
    """A step under way. Asking for its results waits for it."""

    output: SchedulerOutput
    sampled: Sampled
    scores: list[tuple[Request, int, int, tuple[jax.Array, ...]]]  # request, first position, count, arrays
    pooled: list[tuple[Request, int, int]]  # request, first position, count
    sums: jax.Array | None  # float32 [num_slots, hidden]: hidden states summed for each of `pooled`

    def tokens(self) -> dict[str, int]:
        """Sampled token ids by request id."""
        ids = np.asarray(self.sampled.token_ids).tolist()
        return {
            item.request.request_id: ids[row]
            for row, item in enumerate(self.output.scheduled)
            if item.samples
        }

    def logprobs(self) -> dict[str, TokenLogprobs]:
        """For requests that asked for them."""
        wanted = [
            (row, item.request)
            for row, item in enumerate(self.output.scheduled)
            if item.samples and item.request.params.logprobs is not None
        ]
        if not wanted:
            return {}
        ids, arrays = np.asarray(self.sampled.token_ids), [np.asarray(a) for a in self.sampled[1:]]
        return {
            r.request_id: _token_logprobs(int(ids[i]), i, arrays, r.params.logprobs or 0) for i, r in wanted
        }

    def prompt_logprobs(self) -> list[tuple[Request, int, list[TokenLogprobs]]]:
        """(request, position of the first token scored, one entry for each following position)."""
        found = []
        for request, first, count, device_arrays in self.scores:
            arrays = [np.asarray(a) for a in device_arrays]
            top = request.params.prompt_logprobs or 0
            entries = [
                _token_logprobs(request.prompt_token_ids[first + i], i, arrays, top) for i in range(count)
            ]
            found.append((request, first, entries))
        return found

    def pooled_sums(self) -> list[tuple[Request, int, int, np.ndarray]]:
        """(request, first position, count, sum of the hidden states there: float32 [hidden])."""
        if self.sums is None:
            return []
        sums = np.asarray(self.sums)
        return [(*part, sums[i]) for i, part in enumerate(self.pooled)]


def _token_logprobs(token_id: int, row: int, arrays: Sequence[np.ndarray], top: int) -> TokenLogprobs:
    logprob, rank, top_ids, top_logprobs = arrays
    entry: TokenLogprobs = {token_id: Logprob(float(logprob[row]), int(rank[row]))}
    for i in range(top):
        if np.isfinite(top_logprobs[row, i]):
            entry.setdefault(int(top_ids[row, i]), Logprob(float(top_logprobs[row, i]), i + 1))
    return entry


def _zeros(aval: Aval) -> jax.Array:
    return jax.jit(lambda: jnp.zeros(aval.shape, aval.dtype), out_shardings=aval.sharding)()


class ModelRunner:
    """Runs scheduled batches. One thread calls it; compilations may run on another."""

    def __init__(
        self, spec: StepSpec, skeleton: ModelSkeleton, pool: PoolSpec, limits: SchedulerConfig
    ) -> None:
        self.spec = spec
        self.skeleton = skeleton
        self.weights: Weights = ()  # the caller's to set, before the first step
        self.pool = pool
        self.limits = limits
        self.vocab_size = skeleton.config.vocab_size
        self.num_slots = limits.max_num_seqs
        self._step = step = StepPrograms(spec, skeleton, pool, limits)
        self.packer = BatchPacker(step.pages_per_seq, self.num_slots)
        self._kv_pool = _zeros(step.kv_pool)
        self._tokens = _zeros(step.tokens)
        self._bias = _zeros(step.bias)
        self._biased: dict[int, Any] = {}  # slot -> what its bias row was made for
        self.programs = ProgramTable(step.buckets, lambda bucket: step.lower(bucket).compile())
        self._helpers: dict[tuple[str, int], Program] = {}
        self.num_helper_compilations = 0
        self._upload_tokens = self._compile_upload(step.tokens)
        self._upload_bias = self._compile_upload(step.bias)

    @property
    def padded_sizes(self) -> list[int]:
        """Numbers of tokens of steps with prompts, where one more costs as much as the next size."""
        if self._step.padding_is_cheap:
            return []
        return sorted({bucket.num_tokens for bucket in self.programs.buckets if not bucket.decode_only})

    @property
    def num_compilations(self) -> int:
        return self.programs.num_compilations + self.num_helper_compilations

    # ---- programs

    def begin_warm_up(self, mode: str) -> None:
        """Let the first programs compile while the weights are still being read: only shapes matter."""
        if mode != "none":
            self.programs.request(self.programs.buckets[-1])
            self.programs.request(self.programs.buckets[0])

    def warm_up(self, mode: str, report: Callable[[str], None]) -> None:
        """Compile before the first request: "full" all, "lazy" what can serve anything, "none" nothing."""
        buckets = self.programs.buckets
        if mode == "none":
            return
        report("compiling, or reading from the cache, the steps for one token and for any batch")
        self.programs.wait()
        if mode == "full":
            for i, bucket in enumerate(buckets, start=1):
                kind = "decode" if bucket.decode_only else "mixed"
                report(f"compiling {kind} step for {bucket.num_tokens} tokens ({i} of {len(buckets)})")
                self.programs.compile_now(bucket)
            for tokens in sorted({b.num_tokens for b in buckets}):
                self._helper("score", tokens)
                self._helper("pool", tokens)
        while self.try_unused_program():
            pass
        if mode == "lazy":
            self.programs.request([b for b in buckets if b.decode_only][-1])

    def try_unused_program(self) -> bool:
        """Run a compiled program for the first time, on tokens of no request; whether there was one.

        XLA's matrix library prepares itself on the first run, which takes a second.
        """
        unused = self.programs.take_unused()
        if unused is None:
            return False
        bucket, program = unused
        packed = self.packer.empty(bucket)
        # One row of several tokens where the bucket allows it, one of one: both kinds of attention run.
        q_lens = [1] if bucket.decode_only else [min(2, bucket.num_tokens), 1][: bucket.num_rows]
        for row, q_len in enumerate(q_lens):
            packed[row, 1:3] = q_len, q_len
        jax.block_until_ready(self._run(program, packed))
        return True

    def _compile_upload(self, table: Aval) -> Program:
        def upload(table: jax.Array, slot: jax.Array, row: jax.Array) -> jax.Array:
            return jax.lax.dynamic_update_slice(table, row[None, :], (slot, jnp.int32(0)))

        program = jax.jit(upload, donate_argnums=0, out_shardings=table.sharding)
        slot, row = self._step.host_aval((), jnp.int32), self._step.host_aval(table.shape[1:], table.dtype)
        return program.lower(table, slot, row).compile()

    def _helper(self, kind: str, num_tokens: int) -> Program:
        """The program that reads a step's hidden states: "score", "pool" or "logits"."""
        key = (kind, num_tokens)
        if key not in self._helpers:
            rows = self._step.host_aval((_SCORED_AT_ONCE,), jnp.int32)
            hidden = self._step.host_aval((num_tokens, self.skeleton.config.hidden_size), self.skeleton.dtype)
            weights = self._step.weights
            function: Callable[..., Any]
            args: tuple[Any, ...]
            if kind == "pool":
                spans = self._step.host_aval((self.num_slots, 2), jnp.int32)
                function, args = make_pool(self.num_slots), (hidden, spans)
            elif kind == "score":
                function, args = make_score(self.spec), (weights, hidden, rows, rows)
            else:
                function, args = make_logits(self.spec), (weights, hidden, rows)
            program = jax.jit(function, out_shardings=self._step.replicated)
            with self.programs.foreground():
                self._helpers[key] = program.lower(*args).compile()
            self.num_helper_compilations += 1
        return self._helpers[key]

    # ---- steps

    def execute(self, output: SchedulerOutput) -> StepHandle:
        """Start a step; returns at once."""
        for item in output.scheduled:
            if item.upload:
                self._put_tokens(item.request)
            if item.upload or item.request.may_need_bias:
                self._put_bias(item.request, item.upload)
        num_rows = len(output.scheduled)
        decode_only = output.num_tokens == num_rows
        bucket, program = self.programs.choose(output.num_tokens, num_rows, decode_only)
        # The step computes logits for its first rows, as many as sample.
        output.scheduled.sort(key=lambda item: not item.samples)
        hidden, sampled = self._run(program, self.packer.pack(output.scheduled, bucket, self._biased))
        scores = self._score(output, bucket, hidden)
        return StepHandle(output, sampled, scores, *self._pool(output, bucket, hidden))

    def _run(self, program: Program, packed: np.ndarray) -> tuple[jax.Array, Sampled]:
        self._kv_pool, self._tokens, hidden, sampled = program(
            self.weights, self._kv_pool, self._tokens, self._bias, packed
        )
        return hidden, sampled

    def _put_tokens(self, request: Request) -> None:
        assert request.slot is not None
        row = np.zeros(self.limits.max_model_len, np.int32)
        row[: request.num_tokens] = request.known_tokens(0, request.num_tokens)
        self._tokens = self._upload_tokens(self._tokens, np.int32(request.slot), row)

    def _put_bias(self, request: Request, is_new: bool) -> None:
        """Keep the request's row of the bias table right for the token this step samples."""
        slot = request.slot
        assert slot is not None
        key = needs_bias(request)
        if is_new:
            self._biased.pop(slot, None)
        if key == self._biased.get(slot):
            return
        if key is None:
            del self._biased[slot]
            return
        self._biased[slot] = key
        self._bias = self._upload_bias(self._bias, np.int32(slot), bias_row(request, key, self.vocab_size))

    def _score(
        self, output: SchedulerOutput, bucket: Bucket, hidden: jax.Array
    ) -> list[tuple[Request, int, int, tuple[jax.Array, ...]]]:
        """Score the prompt tokens that follow each position of this step, for requests that asked."""
        scores: list[tuple[Request, int, int, tuple[jax.Array, ...]]] = []
        if all(item.request.params.prompt_logprobs is None for item in output.scheduled):
            return scores
        offset = 0
        for item in output.scheduled:
            request, start, count = item.request, item.num_computed_tokens, item.num_scheduled_tokens
            if request.params.prompt_logprobs is not None:
                scored = min(start + count, request.num_prompt_tokens - 1) - start
                for done in range(0, max(scored, 0), _SCORED_AT_ONCE):
                    n = min(_SCORED_AT_ONCE, scored - done)
                    rows, targets = np.zeros((2, _SCORED_AT_ONCE), np.int32)
                    rows[:n] = offset + done + np.arange(n)
                    first = start + done + 1
                    targets[:n] = request.prompt_token_ids[first : first + n]
                    program = self._helper("score", bucket.num_tokens)
                    scores.append((request, first, n, program(self.weights, hidden, rows, targets)))
            offset += count
        return scores

    def _pool(
        self, output: SchedulerOutput, bucket: Bucket, hidden: jax.Array
    ) -> tuple[list[tuple[Request, int, int]], jax.Array | None]:
        """Sum the hidden states of this step that go into embeddings."""
        pooled: list[tuple[Request, int, int]] = []
        if all(item.request.pool_from is None for item in output.scheduled):
            return pooled, None
        spans = np.zeros((self.num_slots, 2), np.int32)
        offset = 0
        for item in output.scheduled:
            request, start, count = item.request, item.num_computed_tokens, item.num_scheduled_tokens
            if request.pool_from is not None and start + count > request.pool_from:
                first = max(start, request.pool_from)
                spans[len(pooled)] = offset + first - start, start + count - first
                pooled.append((request, first, start + count - first))
            offset += count
        return pooled, self._helper("pool", bucket.num_tokens)(hidden, spans) if pooled else None

    # ---- beside the scheduler

    def logits(
        self, token_ids: Sequence[int], pages: Sequence[int], weights: Weights | None = None
    ) -> np.ndarray:
        """Raw logits, float32 [num_tokens, vocab], of one sequence whose KV goes to `pages` (lent to it)."""
        weights = self.weights if weights is None else weights
        row = np.zeros(self.limits.max_model_len, np.int32)
        row[: len(token_ids)] = token_ids
        self._tokens = self._upload_tokens(self._tokens, np.int32(self.num_slots), row)
        result = np.empty((len(token_ids), self.vocab_size), np.float32)
        for start in range(0, len(token_ids), self.limits.max_num_batched_tokens):
            count = min(len(token_ids) - start, self.limits.max_num_batched_tokens)
            bucket, program = self.programs.choose(count, 1, count == 1)
            packed = self.packer.empty(bucket)
            packed[0, 1:3] = start + count, count
            packed[0, COLUMNS : COLUMNS + len(pages)] = pages
            self._kv_pool, self._tokens, hidden, _ = program(
                weights, self._kv_pool, self._tokens, self._bias, packed
            )
            # The dummy slot's first token was overwritten by rows that do not sample.
            self._tokens = self._upload_tokens(self._tokens, np.int32(self.num_slots), row)
            for done in range(0, count, _SCORED_AT_ONCE):
                n = min(_SCORED_AT_ONCE, count - done)
                rows = np.zeros(_SCORED_AT_ONCE, np.int32)
                rows[:n] = done + np.arange(n)
                logits = self._helper("logits", bucket.num_tokens)(weights, hidden, rows)
                result[start + done : start + done + n] = np.asarray(logits)[:n]
        return result

    def close(self) -> None:
        """Let go of the device's memory; nothing can run after that."""
        self.programs.close()
        self.weights = ()
        del self._kv_pool, self._tokens, self._bias
