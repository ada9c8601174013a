"""Imports point one way: leaves, then jaxserve, then the server; and the host side knows no jax."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import source_tree
from source_tree import PACKAGES, imports, modules, package_imports, within

ALLOWED = {
    "pallas_kernels": set(),
    "jaxserve_checkpoints": set(),
    "jaxserve": {"pallas_kernels", "jaxserve_checkpoints"},
    "jaxserve_server": {"jaxserve", "jaxserve_checkpoints"},
}
# Composition roots: the command line starts the server, so these may look upwards.
COMPOSITION_ROOTS = ("jaxserve.cli",)
SCHEDULER_SIDE = [
    "jaxserve.errors",
    "jaxserve.outputs",
    "jaxserve.limits",
    "jaxserve.pacing",
    "jaxserve.page_allocator",
    "jaxserve.request",
    "jaxserve.sampling_params",
    "jaxserve.scheduler",
]
DEVICE_LIBRARIES = {"jax", "jaxlib", "flax", "pallas_kernels"}


@pytest.mark.quick
@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_imports_only_what_is_below_it(package):
    upward = [
        str(found)
        for name, path in modules(package).items()
        if not any(within(name, root) for root in COMPOSITION_ROOTS)
        for found in imports(name, path)
        if found.root in PACKAGES and found.root != package and found.root not in ALLOWED[package]
    ]
    assert not upward


def test_the_command_line_imports_the_server_only_inside_functions():
    early = [
        str(found)
        for name, path in modules("jaxserve").items()
        if any(within(name, root) for root in COMPOSITION_ROOTS)
        for found in imports(name, path)
        if found.root == "jaxserve_server" and found.at_top
    ]
    assert not early


def test_the_scheduler_side_and_the_server_never_name_a_device_library():
    jaxserve = modules("jaxserve")
    sources = {name: jaxserve[name] for name in SCHEDULER_SIDE if name in jaxserve}
    sources |= modules("jaxserve_server")
    named = [
        str(found)
        for name, path in sources.items()
        for found in imports(name, path)
        if found.root in DEVICE_LIBRARIES
    ]
    assert not named


def _modules_loaded_by(names: list[str]) -> set[str]:
    paths = [str(path.parent) for path in PACKAGES.values()]
    code = (
        f"import importlib, json, sys\nsys.path[:0] = {paths!r}\n"
        f"for name in {names!r}: importlib.import_module(name)\nprint(json.dumps([*sys.modules]))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=source_tree.ROOT,
    )
    return set(json.loads(run.stdout.splitlines()[-1]))


@pytest.mark.quick
def test_importing_the_scheduler_side_loads_no_jax():
    present = [name for name in SCHEDULER_SIDE if name in modules("jaxserve")]
    assert not _modules_loaded_by(present) & DEVICE_LIBRARIES


def test_no_module_of_the_engine_is_imported_by_importing_the_package():
    assert not _modules_loaded_by(["jaxserve"]) & DEVICE_LIBRARIES


def test_relative_imports_are_read_as_absolute(tmp_path):
    source = tmp_path / "module.py"
    source.write_text(
        "from . import a\nfrom ..b import c\nimport jax.numpy as jnp\n"
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import d\ndef f():\n    import e\n"
    )
    found = imports("top.sub.module", source)
    assert [(i.module, i.at_top) for i in found] == [
        ("top.sub.a", True),
        ("top.b.c", True),
        ("jax.numpy", True),
        ("typing.TYPE_CHECKING", True),
        ("d", False),
        ("e", False),
    ]


def test_every_package_is_looked_at():
    assert all(path.is_dir() for path in PACKAGES.values())
    assert {i.root for package in PACKAGES for i in package_imports(package)} - {"__future__"}
