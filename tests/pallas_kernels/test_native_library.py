"""Building and finding the native kernels: what is kept, and what is said where they cannot be had."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from pallas_kernels.native import library

pytestmark = pytest.mark.quick


@pytest.fixture
def has_avx2(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(library, "processor_isas", lambda: ("avx2",))
    monkeypatch.setattr(library, "_LOADED", {})
    library.find.cache_clear()
    yield
    library.find.cache_clear()


@pytest.mark.usefixtures("has_avx2")
def test_no_compiler_is_a_reason_and_no_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert library.find(tmp_path) == (
        None,
        "avx2: no C++ compiler (c++, g++ or clang++) on the PATH",
    )


def test_a_reason_that_holds_for_all_is_said_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(library, "processor_isas", lambda: library.ISAS)
    monkeypatch.setattr(library, "_LOADED", {})
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    library.find.cache_clear()
    isa, reason = library.find(tmp_path)
    library.find.cache_clear()
    assert isa is None
    assert reason == f"{', '.join(library.ISAS)}: no C++ compiler (c++, g++ or clang++) on the PATH"


@pytest.mark.usefixtures("has_avx2")
def test_a_compiler_that_fails_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiler = tmp_path / "broken"
    compiler.write_text("#!/bin/sh\necho 'x.cc:1: error: too old' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    isa, reason = library.find(tmp_path / "kept")
    assert isa is None
    assert reason == f"avx2: {compiler}: x.cc:1: error: too old"
    assert list((tmp_path / "kept").iterdir()) == []  # nothing half made is left


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """As CXX: writes an empty file where a compiler writes its own."""
    made = tmp_path / "compiler"
    made.write_text('#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\nrm -f "$2"; : > "$2"\n')
    made.chmod(0o755)
    monkeypatch.setenv("CXX", str(made))
    return made


def test_a_library_built_under_a_loose_umask_is_used_again(compiler: Path, tmp_path: Path) -> None:
    before = os.umask(0o002)  # of many a distribution
    try:
        built = library._built("avx2", tmp_path / "kept")
    finally:
        os.umask(before)
    compiler.unlink()
    assert library._built("avx2", tmp_path / "kept") == built


@pytest.mark.parametrize(("owner", "is_taken"), [(0, True), (1000, True), (1001, False)])
def test_a_library_of_root_or_of_this_user_is_taken(
    owner: int, is_taken: bool, compiler: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    built = library._built("avx2", tmp_path / "kept")
    stat = Path.stat

    def owned(path: Path, **kwargs: bool) -> os.stat_result:
        fields = list(stat(path, **kwargs))
        fields[4] = owner  # st_uid
        return os.stat_result(fields)

    monkeypatch.setattr(Path, "stat", owned)
    monkeypatch.setattr(os, "getuid", lambda: 1000)
    if is_taken:
        assert library._built("avx2", tmp_path / "kept") == built
    else:
        with pytest.raises(library.BuildError, match="another user"):
            library._built("avx2", tmp_path / "kept")


def test_the_compiler_may_have_arguments(
    compiler: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CXX", f"env LC_ALL=C {compiler}")
    assert library._built("avx2", tmp_path / "kept").exists()


@pytest.mark.usefixtures("has_avx2")
def test_a_directory_that_others_write_to_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    isa, reason = library.find(tmp_path)
    assert isa is None
    assert "writable by others" in reason or "no C++ compiler" in reason


def test_a_processor_without_vectors_has_no_kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(library, "processor_isas", tuple)
    library.find.cache_clear()
    isa, reason = library.find(tmp_path)
    library.find.cache_clear()
    assert isa is None
    assert "no kernels for this processor" in reason


def test_every_instruction_set_implies_those_after_it_in_flags() -> None:
    assert library.ISAS[-1] == "avx2"
    flags = library._FLAGS
    assert all(set(flags["avx2"]) <= set(flags[isa]) for isa in library.ISAS)


def test_a_kernel_that_is_not_loaded_has_no_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "_LOADED", {})
    with pytest.raises(RuntimeError, match="not loaded"):
        library.target("jaxserve_packed_matmul", "avx2")


def test_a_damaged_library_is_built_again(isa: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = []

    def build(name: str, directory: Path) -> Path:
        path = directory / f"{name}.so"
        if not path.exists():
            built.append(name)
            path.write_bytes(b"" if len(built) == 1 else source.read_bytes())
        return path

    source = library._built(isa, Path(os.environ["JAX_COMPILATION_CACHE_DIR"]).parent / "native")
    monkeypatch.setattr(library, "_LOADED", {})
    monkeypatch.setattr(library, "_built", build)
    monkeypatch.setattr(library.jax.ffi, "register_ffi_target", lambda *args, **kwargs: None)
    library.load(isa, tmp_path)
    assert built == [isa, isa]
