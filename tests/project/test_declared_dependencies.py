"""Every third-party import of the packages is declared, so that `pip install .` is enough to run them."""

from __future__ import annotations

import sys
import tomllib
from importlib.metadata import packages_distributions

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from source_tree import PACKAGES, ROOT, package_imports

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NOT_WANTED = {"torch", "ray", "transformers", "vllm"}  # heavy, and no part of a JAX engine


def _names(requirements: list[str]) -> set[str]:
    return {canonicalize_name(Requirement(text).name) for text in requirements}


RUN_TIME = _names(PROJECT["dependencies"])
EXTRAS = {n for extra in PROJECT["optional-dependencies"].values() for n in _names(extra)}


def _undeclared(package: str) -> list[str]:
    distributions = packages_distributions()
    wrong = []
    for found in package_imports(package):
        if found.root in PACKAGES or found.root in sys.stdlib_module_names:
            continue
        owners = {canonicalize_name(d) for d in distributions.get(found.root, [found.root])}
        # An import inside a function may need an extra; it then says so when the extra is missing.
        if not owners & (RUN_TIME if found.at_top else RUN_TIME | EXTRAS):
            wrong.append(f"{found} ({', '.join(sorted(owners))})")
    return wrong


@pytest.mark.parametrize("package", PACKAGES)
def test_every_third_party_import_is_declared(package):
    assert not _undeclared(package)


def test_every_declared_dependency_is_used():
    distributions = packages_distributions()
    used = {
        canonicalize_name(d)
        for package in PACKAGES
        for found in package_imports(package)
        for d in distributions.get(found.root, [])
    }
    assert sorted(RUN_TIME - used) == []


def test_the_run_time_needs_no_torch_and_no_ray():
    assert not RUN_TIME & NOT_WANTED
