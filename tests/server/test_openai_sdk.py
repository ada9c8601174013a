"""The official client against a live port."""

import openai
import pytest
from conftest import running
from fake_engine import FakeEngine
from test_completions import rule

from jaxserve_server.config import ServerConfig


@pytest.fixture
async def client(api):
    async with openai.AsyncOpenAI(base_url=api.base_url, api_key="none", max_retries=0) as client:
        yield client


async def test_a_completion(client):
    answer = await client.completions.create(model="fake", prompt="hi", max_tokens=4, logprobs=1)
    assert answer.choices[0].text == rule(3, 4)
    assert answer.choices[0].logprobs.tokens == list(rule(3, 4))
    assert answer.usage.total_tokens == 7


async def test_a_chat_and_its_stream(client):
    asked = {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "max_completion_tokens": 9}
    whole = await client.chat.completions.create(**asked, logprobs=True, top_logprobs=1)
    text, usage = "", None
    stream = await client.chat.completions.create(
        **asked, stream=True, stream_options={"include_usage": True}
    )
    async for chunk in stream:
        text += "".join(choice.delta.content or "" for choice in chunk.choices)
        usage = chunk.usage or usage
    assert text == whole.choices[0].message.content == rule(19, 9)
    assert usage == whole.usage
    assert whole.choices[0].logprobs.content[0].top_logprobs[0].token == "t"


async def test_models(client):
    assert [model.id async for model in client.models.list()] == ["fake"]
    assert (await client.models.retrieve("fake")).max_model_len == 512


async def test_errors_are_the_sdks_own(client):
    with pytest.raises(openai.BadRequestError) as bad:
        await client.completions.create(model="fake", prompt="hi", temperature=3)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        await client.completions.create(model="other", prompt="hi")
    async with running(FakeEngine(), ServerConfig(api_key=("k",))) as api:
        async with openai.AsyncOpenAI(base_url=api.base_url, api_key="k") as good:
            await good.models.list()
        async with openai.AsyncOpenAI(base_url=api.base_url, api_key="wrong") as bad_key:
            with pytest.raises(openai.AuthenticationError):
                await bad_key.models.list()


async def test_an_error_in_a_stream_is_raised():
    async with (
        running(FakeEngine(fail_after=2)) as api,
        openai.AsyncOpenAI(base_url=api.base_url, api_key="none") as client,
    ):
        stream = await client.completions.create(model="fake", prompt="hi", max_tokens=9, stream=True)
        with pytest.raises(openai.APIError, match="engine stopped"):
            async for _ in stream:
                pass
