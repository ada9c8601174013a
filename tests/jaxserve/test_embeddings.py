"""Embeddings from the engine: equal to transformers', whatever else runs, and nothing is left behind."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxserve import LLM, AsyncLLMEngine, PoolingParams, SamplingParams
from jaxserve.engine import LLMEngine
from jaxserve.engine_args import EngineArgs
from jaxserve.errors import ConfigError, ContextLengthError, InvalidRequestError, UnsupportedModelError
from jaxserve.loading import Live, load_engine
from jaxserve.models.registry import family_of
from jaxserve.outputs import RequestOutput
from jaxserve.pooling import LAST, MEAN, Pooling, embedding_of
from jaxserve.step import make_pool
from tests.jaxserve.tiny import GOLDENS, TINY, TINY_ARGS, random_arrays, tiny_llm

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
MODES = {MEAN: "pooling_mode_mean_tokens", LAST: "pooling_mode_lasttoken"}


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, TINY.vocab_size, length).tolist()


def with_modules(pack: Path, directory: Path, mode: str, *, normalize: bool = True) -> Path:
    """A copy of a golden pack that says how it is pooled."""
    for name in ("config.json", "model.safetensors"):
        shutil.copy(pack / name, directory)
    kinds = ["Transformer", "Pooling", *(["Normalize"] if normalize else [])]
    paths = ["", "1_Pooling", "2_Normalize"]
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (kind, path) in enumerate(zip(kinds, paths, strict=False))
    ]
    (directory / "modules.json").write_text(json.dumps(modules))
    (directory / "1_Pooling").mkdir()
    (directory / "1_Pooling" / "config.json").write_text(json.dumps({mode: True}))
    return directory


def load(path: Path, **changes: Any) -> LLM:
    """Prompts of the goldens, 1 to 70 tokens, come in chunks of up to 16, several in a step."""
    args = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
        "max_model_len": 96,
        "page_size": 8,
        "warmup": "none",
    }
    return LLM(path, **{**args, **changes})


def golden(name: str, kind: str, *, normalize: bool) -> tuple[list[list[int]], np.ndarray]:
    """Prompts and their vectors, float32 [num_prompts, hidden]."""
    arrays = np.load(GOLDENS / "embeddings" / f"{name}.npz")
    count = sum(key.startswith("input_ids_") for key in arrays.files)
    vectors = np.stack([arrays[f"{'mean' if kind == MEAN else 'last'}_{i}"] for i in range(count)])
    if normalize:
        vectors = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    return [arrays[f"input_ids_{i}"].tolist() for i in range(count)], vectors


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("kind", [MEAN, LAST])
@pytest.mark.parametrize("name", ["llama_gqa", "qwen3", "gemma3_text"])
def test_embeddings_equal_transformers(name: str, kind: str, normalize: bool, tmp_path: Path) -> None:
    prompts, expected = golden(name, kind, normalize=normalize)
    path = with_modules(GOLDENS / "arch" / name, tmp_path, MODES[kind], normalize=normalize)
    with load(path) as llm:
        found = llm.embed(prompts)
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, expected, atol=1e-5 if normalize else 1e-4, rtol=0)
        llm.check_integrity()
        assert llm.stats().pages_used == 0


@pytest.mark.quick
@pytest.mark.parametrize("kind", [MEAN, LAST])
def test_over_two_devices_they_are_the_same(kind: str, tmp_path: Path) -> None:
    prompts, expected = golden("llama_gqa", kind, normalize=True)
    path = with_modules(GOLDENS / "arch" / "llama_gqa", tmp_path, MODES[kind])
    with load(path, tensor_parallel_size=2) as llm:
        np.testing.assert_allclose(llm.embed(prompts), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", [MEAN, LAST])
def test_in_bfloat16_they_point_the_same_way(kind: str, tmp_path: Path) -> None:
    prompts, expected = golden("qwen3", kind, normalize=True)
    path = with_modules(GOLDENS / "arch" / "qwen3", tmp_path, MODES[kind])
    with load(path, dtype="bfloat16") as llm:
        found = llm.embed(prompts)
    assert found.dtype == np.float32
    cosines = (found * expected).sum(axis=1)
    assert 0.999 < cosines.min() < cosines.max() < 1 - 1e-7  # near, and not the float32 numbers


def test_bfloat16_states_are_summed_in_float32() -> None:
    """In bfloat16 a sum of ones ends at 256."""
    hidden = jnp.ones((1000, 8), jnp.bfloat16).at[:3].set(jnp.nan).at[990:].set(jnp.inf)
    sums = make_pool(3)(hidden, jnp.array([[3, 987], [5, 1], [0, 0]], jnp.int32))
    assert sums.dtype == jnp.float32
    np.testing.assert_array_equal(sums, np.array([[987.0], [1.0], [0.0]]) * np.ones(8))


def sync_engine(kind: str = MEAN, **changes: Any) -> LLMEngine:
    """TINY, to be stepped by the test."""
    engine = load_engine(EngineArgs(**{**TINY_ARGS, **changes}), Live(random_arrays(), TINY, None))
    engine.config = dataclasses.replace(engine.config, pooling=Pooling(kind))
    return engine


def run(engine: LLMEngine, work: dict[str, tuple[list[int], Any]]) -> dict[str, RequestOutput]:
    """Everything at once to its end, the invariants checked at every step."""
    for key, (ids, params) in work.items():
        engine.add(engine.prepare(ids, params, key))
    finished = {}
    while engine.has_work:
        finished.update((output.request_id, output) for output in engine.step() if output.finished)
        engine.scheduler.check_integrity()
    assert engine.stats().pages_used == 0
    assert not engine._pooled
    return finished


@pytest.mark.parametrize("kind", [MEAN, LAST])
def test_a_preempted_prompt_is_not_counted_twice(kind: str) -> None:
    ids = prompt(150)
    alone = sync_engine(kind)
    expected = embedding_of(run(alone, {"e": (ids, PoolingParams())})["e"])
    alone.close()
    # Three answers grow while the long prompt, last in order, comes in by five tokens a step.
    engine = sync_engine(kind, num_pages=25, max_num_batched_tokens=8)
    answers = {
        f"g{i}": (prompt(6, i), SamplingParams(temperature=0, max_tokens=58, ignore_eos=True))
        for i in range(3)
    }
    outputs = run(engine, {**answers, "e": (ids, PoolingParams())})
    engine.close()
    assert outputs["e"].metrics.num_preemptions > 0
    np.testing.assert_allclose(embedding_of(outputs["e"]), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", [MEAN, LAST])
def test_beside_generation_each_gives_what_it_gives_alone(kind: str) -> None:
    embeds = {f"e{i}": (prompt(length, i), PoolingParams()) for i, length in enumerate((1, 7, 70, 130))}
    answers = {f"g{i}": (prompt(length, i), GREEDY) for i, length in enumerate((1, 9, 70, 100))}
    scored = {"s": (prompt(40, 9), GREEDY.replace(prompt_logprobs=1))}
    engine = sync_engine(kind)
    together = run(engine, {**embeds, **answers, **scored})
    for key, request in {**embeds, **answers, **scored}.items():
        engine.scheduler.reset_prefix_cache()
        alone = run(engine, {key: request})[key]
        if key in embeds:
            np.testing.assert_allclose(
                embedding_of(together[key]), embedding_of(alone), atol=1e-5, rtol=0, err_msg=key
            )
            assert together[key].outputs[0].token_ids == []
            assert together[key].outputs[0].finish_reason == "stop"
        else:
            assert together[key].embedding is None
            assert together[key].outputs[0].token_ids == alone.outputs[0].token_ids
    engine.close()


def test_a_mean_takes_no_cached_prefix_and_a_last_token_does() -> None:
    ids = prompt(100)
    for kind, hits in ((MEAN, 0), (LAST, 96)):
        engine = sync_engine(kind)
        first = run(engine, {"a": (ids, PoolingParams())})["a"]
        generated = run(engine, {"g": (ids, GREEDY)})["g"]
        again = run(engine, {"b": (ids, PoolingParams())})["b"]
        assert generated.num_cached_tokens == 96  # what an embedding computed serves generation
        assert again.num_cached_tokens == hits
        np.testing.assert_allclose(embedding_of(again), embedding_of(first), atol=1e-5, rtol=0)
        engine.close()


def test_an_abort_in_the_middle_of_a_prompt_leaves_nothing() -> None:
    engine = sync_engine(max_num_batched_tokens=8)
    engine.add(engine.prepare(prompt(100), PoolingParams(), "e"))
    for _ in range(4):
        assert engine.step() == []
    assert engine.stats().pages_used > 0
    output = engine.abort("e")
    assert output is not None
    assert output.embedding is None
    assert run(engine, {}) == {}
    engine.close()


def test_a_prompt_may_fill_the_context_and_not_more() -> None:
    with tiny_llm() as llm:
        assert llm.embed(prompt(256)).shape == (1, TINY.hidden_size)
        with pytest.raises(ContextLengthError, match="maximum context length is 256 tokens"):
            llm.embed([prompt(10), prompt(257)])
        with pytest.raises(InvalidRequestError, match="empty"):
            llm.embed([[]])
        with pytest.raises(InvalidRequestError, match=r"\[0, 211\)"):
            llm.embed([[211]])
        assert llm.stats().pages_used == 0


def test_dimensions_keep_the_first_numbers_scaled_again() -> None:
    with tiny_llm() as llm:
        prompts = [prompt(5), prompt(20)]
        whole, short = llm.embed(prompts), llm.embed(prompts, PoolingParams(dimensions=8))
        expected = whole[:, :8] / np.linalg.norm(whole[:, :8], axis=1, keepdims=True)
        np.testing.assert_allclose(short, expected, atol=1e-6)
        np.testing.assert_array_equal(llm.embed(prompts, PoolingParams(dimensions=32)), whole)
        with pytest.raises(InvalidRequestError, match="at most 32") as caught:
            llm.embed(prompts, PoolingParams(dimensions=33))
        assert caught.value.param == "dimensions"


def test_many_prompts_come_back_in_order_whatever_their_lengths() -> None:
    prompts = [prompt(1 + 37 * i % 120, i) for i in range(40)]
    with tiny_llm() as llm:
        together = llm.embed(prompts)
        alone = np.concatenate([llm.embed(p) for p in prompts])
        np.testing.assert_allclose(together, alone, atol=1e-5)
        assert llm.embed([]).shape == (0, TINY.hidden_size)
        with pytest.raises(InvalidRequestError, match="PoolingParams"):
            llm.embed(prompts, GREEDY)  # type: ignore[arg-type]


def test_a_checkpoint_of_the_base_class_is_the_same_model(tmp_path: Path) -> None:
    """As embedding models are saved: no `model.` before the names, no output matrix where it is tied."""
    pack = GOLDENS / "arch" / "gemma3_text"
    config = json.loads((pack / "config.json").read_text())
    assert config["tie_word_embeddings"]
    arrays = load_file(pack / "model.safetensors")
    bare = {n.removeprefix("model."): v for n, v in arrays.items() if n != "lm_head.weight"}
    with_modules(pack, tmp_path, MODES[MEAN])
    save_file(bare, tmp_path / "model.safetensors")
    prompts, expected = golden("gemma3_text", MEAN, normalize=True)
    with load(tmp_path) as llm, load(pack) as whole:
        np.testing.assert_allclose(llm.embed(prompts), expected, atol=1e-5, rtol=0)
        np.testing.assert_array_equal(llm.logits(prompts[0]), whole.logits(prompts[0]))


@pytest.mark.quick
def test_the_base_class_of_a_family_is_the_family_and_a_bidirectional_one_is_not() -> None:
    config = json.loads((GOLDENS / "arch" / "qwen3" / "config.json").read_text())
    assert family_of({**config, "architectures": ["Qwen3Model"]}).name == "qwen3"
    assert family_of({**config, "architectures": ["LlamaModel"]}).name == "llama"
    for name in ("Gemma3TextModel", "BertModel", "Model"):
        with pytest.raises(UnsupportedModelError, match=name):
            family_of({"architectures": [name]})
    with pytest.raises(UnsupportedModelError, match="is_causal"):
        family_of(config).config_from_hf({**config, "is_causal": False})


def test_texts_are_embedded_with_their_special_tokens() -> None:
    with load(GOLDENS / "gguf" / "f16_tok_llama" / "model.gguf") as llm:
        assert llm.tokenizer is not None
        texts = ["hello there", "sea"]
        ids = [llm.tokenizer.encode(text) for text in texts]
        np.testing.assert_allclose(llm.embed(texts), llm.embed(ids), atol=1e-6)


def test_what_is_not_implemented_is_refused_and_generation_works(tmp_path: Path) -> None:
    path = with_modules(GOLDENS / "arch" / "llama_gqa", tmp_path, "pooling_mode_cls_token")
    with load(path) as llm:
        with pytest.raises(InvalidRequestError, match="'cls'"):
            llm.embed([[1, 2, 3]])
        assert len(llm.generate([[1, 2, 3]], GREEDY)[0].outputs[0].token_ids) == 12


def test_a_config_that_makes_no_sense_stops_the_loading(tmp_path: Path) -> None:
    path = with_modules(GOLDENS / "arch" / "llama_gqa", tmp_path, "word_embedding_dimension")
    with pytest.raises(ConfigError, match="no pooling mode"):
        load(path)


def test_nothing_compiles_for_embeddings_after_warm_up() -> None:
    with tiny_llm(warmup="full") as llm:
        before = llm.stats().num_compilations
        llm.embed([prompt(length, length) for length in range(1, 100, 7)])
        assert llm.stats().num_compilations == before


async def test_cancelling_frees_the_pages() -> None:
    engine = await asyncio.to_thread(sync_engine, MEAN, max_num_batched_tokens=8)
    asynchronous = AsyncLLMEngine(engine)
    try:
        vector = await asynchronous.embed(prompt(30))
        assert vector.shape == (TINY.hidden_size,)
        tasks = [asyncio.ensure_future(asynchronous.embed(prompt(250, i))) for i in range(20)]
        while not asynchronous.stats().pages_used:
            await asyncio.sleep(0.001)
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert sum(isinstance(r, asyncio.CancelledError) for r in results) > 10
        again = await asynchronous.embed(prompt(30))
        np.testing.assert_allclose(again, vector, atol=1e-5)
        stats = asynchronous.stats()
        assert stats.pages_used == stats.num_running == stats.num_waiting == 0
        assert not engine._pooled
    finally:
        await asyncio.to_thread(asynchronous.shutdown)
