"""Real clients against real server processes: one of each kind for the whole run.

The libraries are many and large, so they are in an environment of their own: `make test-clients` makes it,
sets REQUIRE_CLIENTS and runs this folder. Without that variable nothing here is collected; with it a missing
library is an error, and no test is skipped for want of one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.clients.served import Proxy, Served, ServerProcess, tiny_flags

collect_ignore_glob = ["test_*.py"]
if os.environ.get("REQUIRE_CLIENTS"):
    collect_ignore_glob = []
    # Clients look for these, and would talk to somebody else's server or count what is used.
    for _name in ("OPENAI_API_KEY", "OPENAI_BASE_URL", "OPENAI_API_BASE"):
        os.environ.pop(_name, None)
    os.environ |= {
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "LANGSMITH_TRACING": "false",
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
    }


def _serve(*flags: str, key: str = "none") -> Iterator[Served]:
    process = ServerProcess(*flags)
    proxy = Proxy(process.url(), key)
    yield proxy.served
    proxy.stop()
    process.stop()


@pytest.fixture(scope="session")
def _tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    yield from _serve(*tiny_flags(tmp_path_factory.mktemp("tiny")))


@pytest.fixture
def tiny(_tiny: Served) -> Served:
    """A tiny random model behind the name `tiny`; no key."""
    _tiny.sent.clear()
    return _tiny


@pytest.fixture(scope="session")
def _strict(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    flags = tiny_flags(tmp_path_factory.mktemp("strict"))
    yield from _serve(*flags, "--api-key", "right", "--max-num-seqs", "1", "--max-queue", "1", key="right")


@pytest.fixture
def strict(_strict: Served) -> Served:
    """The same model behind the key `right`: one request runs, one waits, the next is told 429."""
    _strict.sent.clear()
    return _strict


@pytest.fixture(scope="session")
def _real() -> Iterator[Served]:
    limits = ("--max-model-len", "2048", "--max-num-seqs", "8", "--max-num-batched-tokens", "256")
    yield from _serve("smollm2-135m-instruct", "--quantization", "none", *limits)


@pytest.fixture
def real(_real: Served) -> Served:
    """The default model in float32."""
    _real.sent.clear()
    return _real
