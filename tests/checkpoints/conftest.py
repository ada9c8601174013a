"""What the checkpoint tests share."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def goldens() -> Path:
    """The golden packs: files with the numbers trusted implementations read from them."""
    return Path(__file__).parents[1] / "goldens"
