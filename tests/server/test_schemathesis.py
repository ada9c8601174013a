"""Requests made from the server's own document, right and wrong ones, against the real server.

Each operation gets `EXAMPLES` of them, always the same ones. To look further, with another seed:
`SCHEMATHESIS_EXAMPLES=1000 pytest tests/server/test_schemathesis.py --hypothesis-seed=7`.
"""

import asyncio
import os
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import requests
import schemathesis
from hypothesis import settings
from live import is_idle, live
from schemathesis.specs.openapi.checks import positive_data_acceptance

from jaxserve_server.app import create_app
from jaxserve_server.config import ServerConfig
from jaxserve_server.lifecycle import Lifecycle
from jaxserve_server.openapi import build_document

MORE = os.environ.get("SCHEMATHESIS_EXAMPLES")
EXAMPLES = int(MORE or 100)
CONFIG = ServerConfig(api_key=("key",))
KEY = {"Authorization": "Bearer key"}
MAX_MODEL_LEN = 32  # bounds what a request can generate


def _document():
    """The document as the server makes it; it does not depend on the engine."""
    return build_document(create_app(CONFIG, Lifecycle(lambda: None), ("gpt2",)))


schema = schemathesis.openapi.from_dict(_document())
schema.config.output.sanitization.update(enabled=False)


@dataclass
class Server:
    url: str
    session: requests.Session

    def __init__(self) -> None:
        self._started, self._stop = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))
        self.is_idle_at_end = False

    async def _run(self) -> None:
        try:
            async with live("gpt2", CONFIG, max_model_len=MAX_MODEL_LEN, max_num_batched_tokens=32) as api:
                self.url = str(api.http.make_url("/")).rstrip("/")
                self._started.set()
                await asyncio.to_thread(self._stop.wait)
                self.is_idle_at_end = await is_idle(api.engine)
        finally:
            self._started.set()

    def __enter__(self) -> "Server":
        self._thread.start()
        self._started.wait()
        self.session = requests.Session()
        return self

    def __exit__(self, *_: object) -> None:
        self.session.close()
        self._stop.set()
        self._thread.join()


# Rules that no schema says: between fields, of the model, of the template.
RULES = (
    r"max_tokens may be 0 only with echo",
    r"stream_options needs stream",
    r"give either prompt or messages",
    r"best_of must not be less than n",
    r"(best_of|prompt_logprobs) is not available with stream",
    r"top_logprobs needs logprobs",
    r"min_tokens .* must not exceed max_tokens",
    r"add_generation_prompt and continue_final_message",
    r"every token id must be in 0\.\.399|token id \d+ is out of the vocabulary",
    r"maximum context length is 32 tokens",
    r"the arguments of a tool call",
    r"dimensions must be at most 64 with this model",
    # To a schema 1.0 is an integer.
    r"should be a valid integer|(prompt|input) must be a string, a list of",
)


@schemathesis.check
def valid_data_is_refused_for_a_known_reason(ctx, response, case):
    if case.meta and case.meta.generation.mode.is_positive and response.status_code == 400:
        message = response.json()["error"]["message"]
        assert re.search("|".join(RULES), message), message


@schemathesis.check
def no_stream_ends_with_an_error(ctx, response, case):
    assert b'data: {"error"' not in response.content


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server() as server:
        yield server
        assert server.session.get(f"{server.url}/ready", headers=KEY).status_code == 200
    assert server.is_idle_at_end


@schema.parametrize()
@settings(max_examples=EXAMPLES, derandomize=MORE is None, deadline=None, database=None)
def test_every_answer_is_as_the_document_says(case, server):
    case.call_and_validate(
        base_url=server.url,
        session=server.session,
        headers=KEY,
        timeout=60,
        excluded_checks=[positive_data_acceptance],
        additional_checks=[valid_data_is_refused_for_a_known_reason, no_stream_ends_with_an_error],
    )
