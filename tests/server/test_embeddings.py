"""POST /v1/embeddings: the contract over the fake engine, the numbers over a real one."""

import asyncio
import base64
import io
import json
import logging

import aiohttp
import numpy as np
import openai
import pytest
from conftest import longest_turn, post_blocking, running
from fake_engine import BOS, vector_of
from live import is_idle, live, tiny_args
from test_limits import limited
from test_metrics import scrape
from test_openapi import check, document_of
from test_tracing import traced

from jaxserve import AsyncLLMEngine
from jaxserve.errors import QueueFullError
from jaxserve.pooling import Pooling, PoolingParams
from jaxserve_server.config import ServerConfig

PATH = "/v1/embeddings"


@pytest.fixture
async def client(api):
    async with openai.AsyncOpenAI(base_url=api.base_url, api_key="none", max_retries=0) as client:
        yield client


async def embed(api, given, **body):
    status, answer = await api.post(PATH, input=given, **body)
    assert status == 200, answer
    return answer


async def vectors(api, given, **body):
    """float32 [num_inputs, size]"""
    answer = await embed(api, given, **body)
    assert [item["index"] for item in answer["data"]] == list(range(len(answer["data"])))
    return np.array([item["embedding"] for item in answer["data"]], np.float32)


async def refused(api, param, status=400, **body):
    answered, answer = await api.post(PATH, **{"input": "hi", **body})
    assert answered == status, answer
    assert answer["error"]["param"] == param, answer
    return answer["error"]


async def test_an_answer_has_the_shape_of_openais(api):
    answer = await embed(api, "hi", model="fake")
    assert answer.pop("id").startswith("embd-")
    vector = vector_of([BOS, *b"hi"], 8)
    assert answer == {
        "object": "list",
        "data": [{"object": "embedding", "index": 0, "embedding": [float(x) for x in vector]}],
        "model": "fake",
        "usage": {"prompt_tokens": 3, "total_tokens": 3},
    }


@pytest.mark.parametrize("encoding", ["float", "base64"])
async def test_an_answer_is_what_the_document_says(api, encoding):
    check(await document_of(api), "Embeddings", await embed(api, ["hi", "you"], encoding_format=encoding))


@pytest.mark.parametrize(
    ("given", "ids"),
    [
        ("hi", [[BOS, *b"hi"]]),
        (["hi", "you"], [[BOS, *b"hi"], [BOS, *b"you"]]),
        ([1, 2, 3], [[1, 2, 3]]),
        ([[1, 2, 3], [257]], [[1, 2, 3], [257]]),
    ],
)
async def test_every_kind_of_input_is_taken(api, engine, given, ids):
    found = await vectors(api, given)
    assert [seen[0] for seen in engine.seen] == ids
    np.testing.assert_array_equal(found, [vector_of(i, 8) for i in ids])


async def test_base64_is_little_endian_float32(api):
    plain = await vectors(api, ["hi", "you"])
    packed = (await embed(api, ["hi", "you"], encoding_format="base64"))["data"]
    unpacked = [np.frombuffer(base64.b64decode(item["embedding"]), "<f4") for item in packed]
    np.testing.assert_array_equal(unpacked, plain)


async def test_the_sdk_gets_the_same_numbers_whatever_it_asks_for(client, api, engine):
    expected = await vectors(api, ["hi", "you"])
    for asked in ({}, {"encoding_format": "float"}, {"user": "me"}):
        answer = await client.embeddings.create(model="fake", input=["hi", "you"], **asked)
        np.testing.assert_array_equal(
            np.array([item.embedding for item in answer.data], np.float32), expected
        )
        assert answer.usage.total_tokens == 7
    by_ids = await client.embeddings.create(model="fake", input=[[BOS, *b"hi"], [BOS, *b"you"]])
    np.testing.assert_array_equal(np.array([i.embedding for i in by_ids.data], np.float32), expected)
    short = await client.embeddings.create(model="fake", input="hi", dimensions=3)
    assert len(short.data[0].embedding) == 3
    assert engine.seen[-1][1] == PoolingParams(dimensions=3)
    with pytest.raises(openai.BadRequestError) as caught:
        await client.embeddings.create(model="fake", input="hi", dimensions=9)
    assert caught.value.param == "dimensions"


async def test_nulls_are_as_absent(api):
    optional = "model encoding_format dimensions user add_special_tokens truncate_prompt_tokens priority"
    answer = await embed(api, "hi", **dict.fromkeys(optional.split()))
    assert answer["data"] == (await embed(api, "hi"))["data"]


async def test_fields_reach_the_engine(api, engine):
    await embed(api, ["hi"], priority=-3, cache_salt="s", add_special_tokens=False)
    assert engine.seen == [([*b"hi"], PoolingParams(), {"priority": -3, "cache_salt": "s"})]


async def test_a_long_input_is_cut_where_that_is_asked_for(api, engine):
    await embed(api, [1, 2, 3, 4], truncate_prompt_tokens=2)
    await embed(api, [1, 2, 3, 4], truncate_prompt_tokens=2, truncation_side="right")
    await embed(api, [5] * 600, truncate_prompt_tokens=-1)
    assert [seen[0] for seen in engine.seen] == [[3, 4], [1, 2], [5] * 512]
    error = await refused(api, "input", input=["fine", [5] * 513][1:])
    assert "maximum context length is 512 tokens" in error["message"]
    await refused(api, "input", input=[[1], [5] * 600], truncate_prompt_tokens=513)
    await embed(api, [5] * 512)  # no room for an answer is needed
    assert len(engine.seen) == 4


@pytest.mark.parametrize(
    ("param", "body"),
    [
        *(("input", {"input": given}) for given in ("", [], [""], [[]], ["a", ""], [[1], []], 3, {}, True)),
        *(("input", {"input": given}) for given in ([1, "a"], ["a", 1], [1.5], [True], [[1], "a"], [None])),
        *(("input", {"input": given}) for given in ([-1], [258], [[1], [2**70]], [[[1]]], [["a"]])),
        ("input", {"input": ["a"] * 2049}),
        ("input", {"input": None}),
        ("encoding_format", {"encoding_format": "int8"}),
        ("encoding_format", {"encoding_format": 3}),
        *(("dimensions", {"dimensions": n}) for n in (0, -1, 9, 2**40, 2**70, 0.5, "8", True)),
        *(("truncate_prompt_tokens", {"truncate_prompt_tokens": n}) for n in (0, -2, 1.5, "1")),
        ("add_special_tokens", {"add_special_tokens": 1}),
        ("priority", {"priority": "high"}),
        ("messages", {"messages": [{"role": "user", "content": "hi"}]}),
        ("embed_dtype", {"embed_dtype": "float16"}),
    ],
)
async def test_what_is_wrong_is_named_and_nothing_runs(api, engine, param, body):
    await refused(api, param, **body)
    assert not engine.seen
    assert not engine.streams


async def test_an_unknown_model_is_a_404_and_the_method_a_405(api):
    assert (await refused(api, "model", 404, model="other"))["code"] == "model_not_found"
    async with api.http.get(PATH) as response:
        assert response.status == 405


async def test_a_key_is_needed_where_there_are_keys(engine):
    async with running(engine, ServerConfig(api_key=("k",))) as api:
        await refused(api, None, 401)
        async with api.http.post(PATH, json={"input": "hi"}, headers={"Authorization": "Bearer k"}) as good:
            assert good.status == 200


async def test_a_model_without_a_tokenizer_takes_ids(engine):
    engine.tokenizer = None
    async with running(engine) as api:
        await embed(api, [1, 2])
        await refused(api, "input", input="hi")


async def test_more_inputs_than_the_queue_holds_take_turns(engine):
    engine.max_queue = 5
    async with running(engine) as api:
        found = await vectors(api, [[i] for i in range(64)])
        np.testing.assert_array_equal(found, [vector_of([i], 8) for i in range(64)])


async def test_a_queue_full_of_others_is_a_429(engine):
    engine.max_queue = 0
    async with running(engine) as api, api.http.post(PATH, json={"input": "hi"}) as response:
        assert response.status == 429
        assert response.headers["Retry-After"]
        assert (await response.json())["error"]["code"] == "queue_full"


async def test_a_request_that_is_in_is_never_refused_when_others_take_its_places(engine):
    """After every input another client's request takes its place, and keeps it until it is seen to wait."""
    engine.max_queue = 1
    add_request = engine.add_request
    refusals = 0

    def greedy(*args, **kwargs):
        nonlocal refusals
        try:
            stream = add_request(*args, **kwargs)
        except QueueFullError:
            refusals += engine.streams.pop("other", None) is not None
            raise
        final = stream.final

        async def then_another():
            output = await final()
            engine.streams["other"] = stream
            return output

        stream.final = then_another
        return stream

    engine.add_request = greedy
    async with running(engine) as api:
        found = await vectors(api, [[i] for i in range(5)])
        np.testing.assert_array_equal(found, [vector_of([i], 8) for i in range(5)])
        assert refusals == 4
        async with api.http.post(PATH, json={"input": [[1], [2]]}) as response:
            assert response.status == 429  # the first of the next one
        assert len(engine.seen) == 5


async def test_a_text_that_is_far_too_long_is_refused_before_it_is_encoded(api, engine, monkeypatch):
    def fail(*args, **kwargs):
        raise AssertionError("encoded")

    monkeypatch.setattr("jaxserve.tokenizer._encoded", fail)
    error = await refused(api, "input", input=["x" * 10**6])
    assert "maximum context length is 512 tokens" in error["message"]
    assert error["code"] == "context_length_exceeded"


@pytest.mark.parametrize("count", [1, 300])
async def test_a_client_that_leaves_frees_everything(api, engine, count):
    engine.pause()
    task = asyncio.ensure_future(api.post(PATH, input=[[i % 250] for i in range(count)]))
    while len(engine.streams) < min(count, 256):
        await asyncio.sleep(0.01)
    task.cancel()
    for _ in range(200):
        if not engine.streams:
            break
        await asyncio.sleep(0.01)
    assert not engine.streams
    assert len(engine.aborted) == min(count, 256)
    engine.resume()
    await embed(api, "hi")


async def test_a_dead_engine_is_a_500_then_503(api, engine):
    engine.pause()
    task = asyncio.ensure_future(api.post(PATH, input=["a", "b"]))
    while not engine.streams:
        await asyncio.sleep(0.01)
    engine.die(RuntimeError("broken"))
    status, answer = await task
    assert (status, answer["error"]["code"]) == (500, "engine_dead")
    await refused(api, None, 503)


async def test_draining_waits_for_it(api, engine):
    engine.pause()
    task = asyncio.ensure_future(embed(api, "hi"))
    while not engine.streams:
        await asyncio.sleep(0.01)
    drain = asyncio.ensure_future(api.lifecycle.drain(5))
    await asyncio.sleep(0.05)
    await refused(api, None, 503)
    assert not drain.done()
    engine.resume()
    assert (await task)["data"]
    await drain


async def test_its_log_line_has_counts_and_no_texts(engine, caplog):
    caplog.set_level(logging.INFO, "jaxserve_server.access")
    async with running(engine, ServerConfig(log_requests=True)) as api:
        await embed(api, ["secret", "words"])
    fields = next(record.fields for record in caplog.records if record.name.endswith("access"))
    assert fields["route"] == PATH
    assert fields["prompt_tokens"] == 7 + 6
    assert fields["completion_tokens"] == 0
    assert fields["finish_reasons"] == "stop,stop"
    assert "secret" not in str(fields)


async def test_it_is_one_span_with_its_phases(api):
    trees = traced(api)
    await embed(api, ["hi", "you"], dimensions=4)
    ((root, children),) = trees()
    assert root.name == "embeddings fake"
    assert root.attributes["gen_ai.embeddings.dimension.count"] == 4
    assert root.attributes["gen_ai.usage.input_tokens"] == 7
    assert "gen_ai.request.temperature" not in root.attributes
    assert {name: len(spans) for name, spans in children.items()} == {"queue": 2, "prefill": 2}


async def test_its_tokens_are_charged_to_the_key(tmp_path):
    async with limited(tmp_path, "tokens-per-minute=5") as api:
        headers = {"Authorization": "Bearer sk-a"}
        async with api.http.post(PATH, json={"input": ["hi", "you"]}, headers=headers) as response:
            assert response.status == 200
        async with api.http.post(PATH, json={"input": "hi"}, headers=headers) as response:
            assert response.status == 429
            assert (await response.json())["error"]["code"] == "rate_limit_exceeded"


async def test_one_that_takes_too_long_is_a_504_and_frees_everything(engine):
    engine.pause()
    async with running(engine, ServerConfig(request_timeout=0.2)) as api:
        await refused(api, None, 504)
        assert not engine.streams


async def test_numbers_that_are_not_finite_are_never_sent(api, engine, monkeypatch):
    monkeypatch.setattr("fake_engine.vector_of", lambda ids, size: np.full(size, np.nan, np.float32))
    for encoding in ("float", "base64"):
        status, answer = await api.post(PATH, input="hi", encoding_format=encoding)
        assert status == 500
        assert "finite" not in answer["error"]["message"]
    assert not engine.streams


@pytest.mark.parametrize("encoding", ["float", "base64"])
async def test_the_largest_batch_never_holds_up_the_event_loop(engine, encoding):
    engine.hidden_size = 2048
    async with running(engine) as api:
        await embed(api, "warm")
        body = {"input": [[i % 250] for i in range(2048)], "encoding_format": encoding}
        url = str(api.http.make_url(PATH))
        async with longest_turn() as longest:
            received = await asyncio.to_thread(post_blocking, url, body)
    assert longest() < 0.1
    data = json.loads(received)["data"]
    assert [item["index"] for item in data] == list(range(2048))


async def test_megabytes_of_ids_are_refused_without_an_error_for_each(api):
    body = json.dumps({"input": [*range(200)] * 2000 + ["x"]}).encode()
    headers = {"Content-Type": "application/json"}
    async with api.http.post(PATH, data=io.BytesIO(body), headers=headers) as response:
        error = (await response.json())["error"]
    assert (response.status, error["param"]) == (400, "input")
    assert len(error["message"]) < 200


async def test_a_reader_that_stops_is_cut_off(engine, monkeypatch):
    monkeypatch.setattr("jaxserve_server.large_json.SLOW_READER_SECONDS", 0.3)
    engine.hidden_size = 4096
    async with running(engine) as api:
        async with api.http.post(PATH, json={"input": [[i % 250] for i in range(1000)]}) as response:
            assert response.status == 200
            await asyncio.sleep(1.0)
            assert api.lifecycle._num_active == 0
            with pytest.raises(aiohttp.ClientError):
                await response.read()
        await embed(api, "hi")


# Over a real engine.


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
async def test_a_live_server_gives_the_engines_vectors(kind):
    async with live(kind) as api:
        texts = ["The sea is wide.", "¿Qué?", "水 and 🙂"]
        tokenizer = api.engine.tokenizer
        expected = [await api.engine.embed(tokenizer.encode(text)) for text in texts]
        found = await vectors(api, texts)
        np.testing.assert_allclose(found, expected, atol=1e-6)
        np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, atol=1e-6)
        by_ids = await vectors(api, [tokenizer.encode(text) for text in texts])
        np.testing.assert_allclose(by_ids, found, atol=1e-6)
        short = await vectors(api, texts, dimensions=4)
        scaled = found[:, :4] / np.linalg.norm(found[:, :4], axis=1, keepdims=True)
        np.testing.assert_allclose(short, scaled, atol=1e-6)
        await refused(api, "dimensions", dimensions=found.shape[1] + 1)

        # Beside generation, and with clients that leave.
        alone = await api.complete("The sea", max_tokens=24, temperature=0)
        leaving = [asyncio.ensure_future(embed(api, [texts[i % 3] * 20] * 8)) for i in range(6)]
        answers = asyncio.gather(*(api.complete("The sea", max_tokens=24, temperature=0) for _ in range(4)))
        again = asyncio.gather(*(vectors(api, texts) for _ in range(4)))
        await asyncio.sleep(0.05)
        for task in leaving[::2]:
            task.cancel()
        await asyncio.gather(*leaving, return_exceptions=True)
        assert {answer["choices"][0]["text"] for answer in await answers} == {alone["choices"][0]["text"]}
        for vector in await again:
            np.testing.assert_allclose(vector, found, atol=1e-5)
        assert await is_idle(api.engine)


async def test_metrics_count_prompts_and_their_ends():
    engine = await asyncio.to_thread(AsyncLLMEngine.from_engine_args, tiny_args("gpt2"))
    async with running(engine) as api:
        await embed(api, [[5] * 20, [6] * 30])
        samples = await scrape(api)
    await asyncio.to_thread(engine.shutdown)
    by_name = {name: value for (name, labels), value in samples.items() if not labels}
    assert by_name["jaxserve_prompt_tokens_total"] == by_name["vllm:prompt_tokens_total"] == 50
    assert by_name["jaxserve_generation_tokens_total"] == 0
    reasons = {labels: v for (name, labels), v in samples.items() if name == "vllm:request_success_total"}
    assert sum(reasons.values()) == 2
    assert [v for labels, v in reasons.items() if "stop" in str(labels)] == [2]


async def test_a_checkpoint_that_asks_for_another_pooling_refuses_embeddings_only():
    async with live("gpt2") as api:
        object.__setattr__(api.engine._engine.config, "pooling", Pooling("cls"))
        error = await refused(api, "model")
        assert "'cls'" in error["message"]
        await api.complete("hi", max_tokens=2)
        assert await is_idle(api.engine)


async def test_an_input_that_the_pool_can_never_hold_is_named():
    async with live("gpt2", num_pages=9) as api:  # 64 tokens
        error = await refused(api, "input", input=[[5] * 10, [5] * 65])
        assert "64 tokens" in error["message"]
        assert await is_idle(api.engine)
