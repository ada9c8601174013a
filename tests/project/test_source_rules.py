"""Rules that keep the source readable and independent of any one machine."""

from __future__ import annotations

import subprocess

import pytest
from source_tree import PACKAGES, ROOT, modules

MAX_LINES = 500
TEXT = {".py", ".md", ".toml", ".yaml", ".yml", ".sh", ".ipynb", ".cfg", ""}
# Written in halves, so that this file passes its own test.
REGISTRY_HOSTS = [
    f"{host}.{tld}" for host, tld in [("pypi", "org"), ("pythonhosted", "org"), ("huggingface", "co")]
]
UNFINISHED = [f"{word}{colon}" for word in ("TO" + "DO", "FIX" + "ME", "X" * 3) for colon in ("", ":")]


def _project_files():
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    for name in listed.stdout.split("\0"):
        path = ROOT / name
        if name and path.is_file() and path.suffix in TEXT and "goldens" not in path.parts:
            yield path


@pytest.mark.parametrize("package", PACKAGES)
def test_no_file_is_too_long_to_read(package):
    sizes = {str(p.relative_to(ROOT)): len(p.read_text().splitlines()) for p in modules(package).values()}
    assert not {name: n for name, n in sizes.items() if n > MAX_LINES}


def test_no_file_names_a_registry_host():
    named = [
        f"{path.relative_to(ROOT)}: {host}"
        for path in _project_files()
        for host in REGISTRY_HOSTS
        if host in path.read_text()
    ]
    assert not named


def test_nothing_is_left_unfinished():
    marked = [
        f"{path.relative_to(ROOT)}:{number}"
        for package in PACKAGES
        for path in modules(package).values()
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if any(word in line.split() for word in UNFINISHED) or line.strip() == "raise NotImplementedError"
    ]
    assert not marked
