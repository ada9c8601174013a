"""The written documentation names every route and field, and its tables are the models'."""

import importlib.util
import re
from pathlib import Path

import pytest

from jaxserve_server.embeddings import EmbeddingBody
from jaxserve_server.openapi import OPERATIONS
from jaxserve_server.protocol import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody

ROOT = Path(__file__).parents[2]
BODIES = (ChatBody, CompletionBody, EmbeddingBody, TokenizeBody, DetokenizeBody)


@pytest.fixture(scope="module")
def make_tables():
    spec = importlib.util.spec_from_file_location("make_tables", ROOT / "docs" / "make_tables.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_tables_are_up_to_date(make_tables):
    for path in make_tables.FILES:
        text = path.read_text("utf-8")
        assert make_tables.updated(text) == text, f"run python docs/make_tables.py: {path.name} is behind"


def test_a_table_that_is_behind_is_rewritten(make_tables):
    text = "<!-- table: detokenize -->\nold\n<!-- end -->\nrest"
    written = make_tables.updated(text)
    assert "`tokens`" in written
    assert "old" not in written
    assert written.endswith("<!-- end -->\nrest")


def test_every_table_is_in_the_documentation(make_tables):
    text = (ROOT / "docs" / "http-api.md").read_text("utf-8")
    assert set(re.findall(r"<!-- table: ([a-z ]+) -->", text)) == set(make_tables.TABLES)


@pytest.mark.parametrize("name", ["README.md", "docs/http-api.md"])
def test_every_route_and_every_field_is_named(name):
    text = (ROOT / name).read_text("utf-8")
    for method, path in OPERATIONS:
        assert f"`{method} {path}`" in text
    for body in BODIES[:3]:
        for field in body.model_fields:
            assert f"`{field}`" in text, field


def test_what_is_ignored_is_named():
    text = (ROOT / "docs" / "http-api.md").read_text("utf-8")
    ignored = text[text.index("### Accepted and ignored") :]
    for body in BODIES:
        for field in body.ignored:
            assert f"`{field}`" in ignored, field
