"""The engine as a whole on a tiny model: the prefix cache, compilations, bad words, limits, weights."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import jax.monitoring
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxserve import LLM, SamplingParams
from jaxserve.errors import (
    ConfigError,
    ContextLengthError,
    EngineDeadError,
    InvalidRequestError,
    UnsupportedModelError,
)
from jaxserve.models.llama import LlamaForCausalLM, config_from_hf
from tests.jaxserve.tiny import TINY, random_arrays, tiny_llm

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def prompt(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, TINY.vocab_size) for _ in range(length)]


def test_a_prefix_that_100_prompts_share_is_computed_once() -> None:
    prefix = prompt(500)
    prompts = [[*prefix, *prompt(10, seed)] for seed in range(100)]
    args: dict[str, Any] = {"max_model_len": 640, "num_pages": 1000, "max_num_batched_tokens": 128}
    computed = 0
    with tiny_llm(**args) as cached, tiny_llm(**args, enable_prefix_caching=False) as plain:
        execute = cached._engine.runner.execute

        def counting(output: Any) -> Any:
            nonlocal computed
            computed += output.num_tokens
            return execute(output)

        cached._engine.runner.execute = counting  # type: ignore[method-assign]
        outputs = cached.generate(prompts, GREEDY)
        expected = plain.generate(prompts, GREEDY)
        stats = cached.stats()
        cached.check_integrity()
    assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in expected]
    shared = 500 // 8 * 8
    assert stats.prefix_hits == 99 * shared
    assert sorted(o.num_cached_tokens for o in outputs) == [0] + [shared] * 99
    # The prefix once, each prompt's own tail, and every output token but the last.
    assert computed == 510 + 99 * (510 - shared) + 100 * 7


def test_nothing_compiles_after_warm_up_over_500_mixed_requests() -> None:
    compiled: list[str] = []

    def listen(event: str, duration: float, **kwargs: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(event)

    rng = random.Random(3)
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0, "top_p": 0.9, "top_k": 10, "min_p": 0.01},
        {"temperature": 0.5, "presence_penalty": 1.0, "repetition_penalty": 1.1},
        {"logprobs": 5, "prompt_logprobs": 2},
        {"logit_bias": {9: 2.0}, "min_tokens": 3},
    ]
    prompts = [prompt(rng.randint(1, 120), seed) for seed in range(500)]
    params = [SamplingParams(max_tokens=rng.randint(3, 12), seed=i, **rng.choice(kinds)) for i in range(500)]
    with tiny_llm(warmup="full", max_num_seqs=16) as llm:
        before = llm.stats().num_compilations
        assert before > 0
        jax.monitoring.register_event_duration_secs_listener(listen)
        try:
            outputs = llm.generate(prompts, params)
        finally:
            jax.monitoring.unregister_event_duration_listener(listen)
        assert llm.stats().num_compilations == before
        assert llm.stats().pages_used == 0
    assert compiled == []
    assert all(o.finished for o in outputs)


def test_bad_words_of_several_tokens_never_appear() -> None:
    with tiny_llm() as llm:
        free = llm.generate([prompt(20)], SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))[0]
        pair = free.outputs[0].token_ids[5:7]
        triple = free.outputs[0].token_ids[10:13]
        words = {"pair": [pair], "triple": [triple]}
        llm._engine.tokenizer = SimpleNamespace(bad_word_token_ids=words.get)  # type: ignore[assignment]
        try:
            banned = SamplingParams(
                temperature=0, max_tokens=30, ignore_eos=True, bad_words=["pair", "triple"], detokenize=False
            )
            ids = llm.generate([prompt(20)], banned)[0].outputs[0].token_ids
        finally:
            llm._engine.tokenizer = None
    assert ids[:5] == free.outputs[0].token_ids[:5]
    windows = {tuple(ids[i : i + n]) for n in (2, 3) for i in range(len(ids) - n + 1)}
    assert tuple(pair) not in windows
    assert tuple(triple) not in windows


@pytest.mark.parametrize("max_tokens", [1, 5])
def test_min_tokens_and_stop_ids(max_tokens: int) -> None:
    everything = list(range(TINY.vocab_size))
    with tiny_llm() as llm:
        stopped = llm.generate(
            [prompt(9)], SamplingParams(temperature=0, max_tokens=20, stop_token_ids=everything)
        )[0]
        assert (len(stopped.outputs[0].token_ids), stopped.outputs[0].finish_reason) == (1, "stop")
        assert stopped.outputs[0].stop_reason == stopped.outputs[0].token_ids[0]
        some = [i for i in everything if i % 2]
        kept = llm.generate(
            [prompt(9)],
            SamplingParams(
                temperature=0, max_tokens=20, min_tokens=max_tokens, stop_token_ids=some, ignore_eos=True
            ),
        )[0].outputs[0]
    assert all(i % 2 == 0 for i in kept.token_ids[:max_tokens])
    assert len(kept.token_ids) >= max_tokens


@pytest.mark.parametrize("length", [1, 2, 40])
def test_prompt_logprobs_have_an_entry_for_each_prompt_token(length: int) -> None:
    with tiny_llm() as llm:
        output = llm.generate([prompt(length)], SamplingParams(max_tokens=2, prompt_logprobs=2))[0]
        logits = llm.logits(prompt(length)).astype(np.float64)
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    expected = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    for position, entry in enumerate(output.prompt_logprobs[1:], start=1):
        assert entry is not None
        assert entry[prompt(length)[position]].logprob == pytest.approx(
            expected[position - 1, prompt(length)[position]], abs=1e-5
        )
        assert 2 <= len(entry) <= 3
    assert len(output.prompt_logprobs) == length


def test_end_of_sequence_ends_a_request_and_ignore_eos_does_not() -> None:
    only_eos = {"temperature": 0.0, "max_tokens": 6, "logit_bias": {2: 100.0}}
    with tiny_llm() as llm:
        ended, ignored = llm.generate(
            [prompt(5)] * 2, [SamplingParams(**only_eos), SamplingParams(**only_eos, ignore_eos=True)]
        )
    assert (ended.outputs[0].token_ids, ended.outputs[0].finish_reason) == ([2], "stop")
    assert ended.outputs[0].stop_reason is None
    assert (ignored.outputs[0].token_ids, ignored.outputs[0].finish_reason) == ([2] * 6, "length")


def test_max_tokens_beyond_the_context_is_cut_and_a_full_prompt_is_refused() -> None:
    with tiny_llm(max_model_len=64) as llm:
        cut = llm.generate([prompt(60)], SamplingParams(temperature=0, max_tokens=500, ignore_eos=True))[0]
        assert len(cut.outputs[0].token_ids) == 4
        with pytest.raises(ContextLengthError, match="maximum context length is 64 tokens"):
            llm.generate([prompt(64)], GREEDY)


def test_one_bad_request_of_a_batch_starts_nothing() -> None:
    with tiny_llm() as llm:
        with pytest.raises(InvalidRequestError, match=r"\[0, 211\)") as caught:
            llm.generate([prompt(5), [3, 211]], GREEDY)
        assert caught.value.param == "prompt"
        assert llm.stats().num_steps == 0


def test_live_modules_and_named_arrays_are_not_copied() -> None:
    arrays = {name: jnp.asarray(value) for name, value in random_arrays().items()}
    with tiny_llm() as reference:
        expected = reference.logits(prompt(12))
    module = LlamaForCausalLM(TINY, dtype=jnp.dtype(jnp.float32))
    module.embed_tokens.weight.set_value(arrays["model.embed_tokens.weight"])
    with LLM(
        arrays, config=TINY, max_num_seqs=1, max_model_len=64, warmup="none", num_pages=20, page_size=8
    ) as llm:
        np.testing.assert_array_equal(llm.logits(prompt(12)), expected)
        live = llm.named_weights()
        assert set(live) == set(arrays)
        pointers = {n: a.unsafe_buffer_pointer() for n, a in arrays.items()}
        assert {n: a.unsafe_buffer_pointer() for n, a in live.items()} == pointers
    with LLM(
        module, config=TINY, max_num_seqs=1, max_model_len=64, warmup="none", num_pages=20, page_size=8
    ) as llm:
        live_embedding = llm.named_weights()["model.embed_tokens.weight"]
        assert live_embedding.unsafe_buffer_pointer() == pointers["model.embed_tokens.weight"]
        llm.update_weights(arrays)
        np.testing.assert_array_equal(llm.logits(prompt(12)), expected)
        llm.update_weights(nnx.state(module, nnx.Param))
        assert not np.array_equal(llm.logits(prompt(12)), expected)


def test_update_weights_forgets_cached_prefixes() -> None:
    with (
        tiny_llm() as llm,
        LLM(random_arrays(seed=1), config=TINY, max_num_seqs=1, max_model_len=64, warmup="none") as other,
    ):
        llm.generate([prompt(40)], GREEDY)
        llm.update_weights(random_arrays(seed=1))
        after = llm.generate([prompt(40)], GREEDY)[0]
        assert after.num_cached_tokens == 0
        assert after.outputs[0].token_ids == other.generate([prompt(40)], GREEDY)[0].outputs[0].token_ids


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: a.pop("lm_head.weight"), "lm_head.weight is missing"),
        (lambda a: a.update({"model.extra.weight": np.zeros(3)}), "model.extra.weight has no place"),
        (lambda a: a.update({"model.norm.weight": np.zeros(3, np.float32)}), r"norm.weight has shape \(3,\)"),
    ],
)
def test_live_weights_that_do_not_fit_are_refused_by_name(change: Any, message: str) -> None:
    arrays: dict[str, Any] = dict(random_arrays())
    change(arrays)
    with pytest.raises(ConfigError, match=message):
        LLM(arrays, config=TINY)


HF_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "vocab_size": 211,
    "rms_norm_eps": 1e-5,
}


@pytest.mark.parametrize(
    "change",
    [
        {"residual_multiplier": 0.5},
        {"hidden_act": "gelu"},
        {"partial_rotary_factor": 0.5},
        {"rope_scaling": {"type": "su", "factor": 2.0}},
        {"rope_scaling": {"type": "linear", "factor": 2.0, "wobble": 3}},
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
        {"quantization_config": {"quant_method": "gptq"}},
        {"sliding_window": 64},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_config_key_that_changes_the_mathematics_is_refused(change: dict[str, Any]) -> None:
    key = next(iter(change))
    with pytest.raises(UnsupportedModelError, match=f"{key}|rope|partial_rotary"):
        config_from_hf({**HF_CONFIG, **change})


def test_null_and_missing_keys_mean_their_defaults() -> None:
    config = config_from_hf(
        {**HF_CONFIG, "num_key_value_heads": None, "head_dim": None, "rope_scaling": None}
    )
    assert (config.num_kv_heads, config.head_dim, config.rope.theta) == (4, 8, 10000.0)


def test_a_closed_engine_refuses_requests() -> None:
    llm = tiny_llm()
    llm.close()
    llm.close()
    with pytest.raises(EngineDeadError):
        llm.generate([prompt(3)], GREEDY)
