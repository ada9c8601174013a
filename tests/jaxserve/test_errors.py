"""The one message that clients of every kind look for."""

from __future__ import annotations

from pathlib import Path

import pytest

import jaxserve
import jaxserve_server
from jaxserve.errors import ContextLengthError

pytestmark = pytest.mark.quick
PHRASE = "maximum context length"


@pytest.mark.parametrize("room", [0, 1])
@pytest.mark.parametrize("why", ["", "what the page pool holds"])
def test_a_prompt_that_is_too_long_is_told_in_the_words_that_clients_know(room: int, why: str) -> None:
    error = ContextLengthError.over(512, "more than 512", "input", room=room, why=why)
    assert f"{PHRASE} is 512 tokens" in str(error)
    assert "more than 512 tokens" in str(error)
    assert ("leaves no room" in str(error)) == bool(room)
    assert why in str(error)
    assert error.param == "input"


def test_the_words_are_written_in_one_place() -> None:
    files = [
        path
        for package in (jaxserve, jaxserve_server)
        for path in Path(package.__path__[0]).rglob("*.py")
        if PHRASE in path.read_text()
    ]
    assert [path.name for path in files] == ["errors.py"]
