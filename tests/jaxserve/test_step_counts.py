"""What a step costs, by counts that no busy machine changes: programs, steps, transfers, bytes, copies."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest

from jaxserve import LLM, SamplingParams
from jaxserve.batch import COLUMNS, Bucket
from jaxserve.engine import LLMEngine
from jaxserve.plan.hlo import pool_copies
from jaxserve.sampler import Sampled
from tests.jaxserve.tiny import TINY, tiny_llm

ROWS = 8  # as many as TINY_ARGS allow
CONTEXT = 1024
DECODE = Bucket(ROWS, ROWS, True)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with tiny_llm(max_model_len=CONTEXT, num_pages=1025, enable_prefix_caching=False) as llm:
        yield llm


def engine_of(llm: LLM) -> LLMEngine:
    return llm._engine


def run(engine: LLMEngine, max_tokens: int, **params: Any) -> int:
    """Steps that `ROWS` requests of a prompt of 8 tokens take; the engine's own thread is idle meanwhile."""
    before = engine.num_steps
    sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **params)
    for i in range(ROWS):
        engine.add(engine.prepare([3 + i] * 8, sampling, f"{before}-{i}"))
    while engine.has_work:
        engine.step()
    return engine.num_steps - before


def test_a_known_load_takes_its_least_number_of_steps_and_programs(llm: LLM) -> None:
    engine = engine_of(llm)
    # 8 prompts of 8 tokens are the 64 that a step computes; every later token of all rows is one more step.
    assert llm._loop.call(lambda: run(engine, 10)).result() == 10
    engine.runner.programs.wait()
    assert engine.runner.num_compilations == 2  # one for the prompts; one for decoding, beside the steps
    assert llm._loop.call(lambda: run(engine, 5)).result() == 5
    assert engine.runner.num_compilations == 2


class Counts:
    """What crosses between host and device in steps: counted where it crosses."""

    def __init__(self, engine: LLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.to_device: list[int] = []  # host arrays that a call of the step's program takes
        self.to_host: list[str] = []  # the results of a step that were read
        runner = engine.runner
        runner.programs.choose(ROWS, ROWS, True)
        for bucket, program in list(runner.programs._programs.items()):
            monkeypatch.setitem(runner.programs._programs, bucket, self._counted(program))

    def _counted(self, program: Any) -> Any:
        def call(*args: Any) -> Any:
            self.to_device.append(sum(not isinstance(x, jax.Array) for x in jax.tree.leaves(args)))
            pool, tokens, hidden, sampled = program(*args)
            return pool, tokens, hidden, Sampled(*map(self._watched, Sampled._fields, sampled))

        return call

    def _watched(self, name: str, array: jax.Array) -> Any:
        counts = self

        class Watched:
            def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
                counts.to_host.append(name)
                return np.asarray(array, dtype)

        return Watched()


def test_a_step_takes_one_array_from_the_host_and_gives_one_back(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(llm)
    counts = Counts(engine, monkeypatch)
    steps = llm._loop.call(lambda: run(engine, 6)).result()
    assert counts.to_device == [1] * steps
    assert counts.to_host == ["token_ids"] * steps


def test_log_probabilities_are_fetched_where_a_row_wants_them(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(llm)
    counts = Counts(engine, monkeypatch)
    steps = llm._loop.call(lambda: run(engine, 3, logprobs=2)).result()
    assert sorted(set(counts.to_host)) == sorted(Sampled._fields)
    assert len(counts.to_host) <= (len(Sampled._fields) + 1) * steps


def test_what_a_step_uploads_is_bounded_by_its_rows(llm: LLM) -> None:
    runner = engine_of(llm).runner
    packed = runner.packer.empty(DECODE)
    assert packed.nbytes == 4 * ROWS * (COLUMNS + CONTEXT // 8)  # a page has 8 positions


def test_a_decode_step_copies_no_pool_and_needs_little_beside_its_arguments(llm: LLM) -> None:
    runner = engine_of(llm).runner
    compiled = runner._step.lower(DECODE).compile()
    pool = runner._step.kv_pool
    text = compiled.as_text()
    assert text is not None
    assert pool_copies(text, pool.shape) == []
    memory = compiled.memory_analysis()
    assert memory is not None
    pool_bytes = int(np.prod(pool.shape)) * pool.dtype.itemsize
    assert memory.alias_size_in_bytes >= pool_bytes  # the pool is updated in place
    # The widest values of a step: logits, a few at a time; and, where attention is no kernel, the keys and
    # values of two blocks of 64 a row, fetched, taken apart and masked. Neither grows with pool or context.
    logits = 4 * ROWS * TINY.vocab_size
    fetched = 4 * 2 * ROWS * 64 * TINY.num_kv_heads * 2 * TINY.head_dim
    assert memory.temp_size_in_bytes < 4 * logits + 4 * fetched < pool_bytes
