"""docs/clients.md: what stands there runs as it stands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TASKS = Path(__file__).parent / "lm_eval"
PAGE = (ROOT / "docs" / "clients.md").read_text("utf-8")
URL = "http://localhost:8000/v1"

pytestmark = pytest.mark.real


def examples(heading: str) -> list[tuple[str, str]]:
    """(language, code) of the blocks under a heading."""
    (section,) = re.findall(rf"^## {heading}$(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    return re.findall(r"^```(\w+)\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)


def test_every_section_is_run():
    assert re.findall(r"^## (.*)$", PAGE, re.MULTILINE) == [*PYTHON, "llm", "lm-eval"]
    assert len(re.findall(r"^```\w+$", PAGE, re.MULTILINE)) == 8


PYTHON = ["openai", "langchain-openai", "llama-index", "litellm"]


@pytest.mark.parametrize("heading", PYTHON)
def test_python(real, capsys, heading):
    blocks = examples(heading)
    for language, code in blocks:
        assert language == "python"
        assert URL in code
        exec(compile(code.replace(URL, real.base_url), heading, "exec"), {})
        shown = capsys.readouterr().out
        assert "Paris" in shown or shown == "576\n"  # the embedding's length


def shell(code: str, **options) -> str:
    """What a command prints, with the clients' environment first on the path."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path}
    done = subprocess.run(
        ["sh", "-c", code],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        env=environment,
        **options,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_llm(real, tmp_path, monkeypatch):
    (_, settings), (_, command) = examples("llm")
    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path))
    assert shell("llm logs path").startswith(str(tmp_path))
    (tmp_path / "extra-openai-models.yaml").write_text(settings.replace(URL, real.base_url))
    assert "Paris" in shell(command)


def test_lm_eval(real, tmp_path, monkeypatch):
    ((_, command),) = examples("lm-eval")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))
    # The page's task is a download; ours is beside this file.
    command = command.replace(URL, real.base_url)
    command = command.replace("--tasks lambada_openai", f"--include_path {TASKS} --tasks jaxserve_facts")
    shown = shell(command, cwd=TASKS)
    assert re.search(r"jaxserve_facts.*\|acc +\|.*\|0\.\d+\|", shown), shown
    assert real.sent[-1].path == "/v1/completions"
