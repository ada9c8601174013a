"""Builds, keeps, loads and registers the library of an instruction set."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax

# Instruction set -> the processor's flags that it needs, as Linux names them, and the compiler's switches.
_FLAGS: dict[str, tuple[str, ...]] = {
    "avx512_vnni": (
        "avx2",
        "fma",
        "f16c",
        "avx512f",
        "avx512bw",
        "avx512vl",
        "avx512dq",
        "avx512_vnni",
    ),
    "avx_vnni": ("avx2", "fma", "f16c", "avx_vnni"),
    "avx2": ("avx2", "fma", "f16c"),
}
ISAS = tuple(_FLAGS)  # the best first
_SOURCES = Path(__file__).parent
_HANDLERS = ("jaxserve_packed_matmul", "jaxserve_packed_mlp", "jaxserve_attention")
_LOCK = threading.Lock()


class BuildError(Exception):
    """Why the library of an instruction set cannot be had, in one line."""


def processor_isas() -> tuple[str, ...]:
    """Those of `ISAS` that this processor has."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return ()
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return ()
    lines = (line.split(":", 1)[1] for line in text.splitlines() if line.startswith("flags"))
    flags = set(next(lines, "").split())
    return tuple(isa for isa, needed in _FLAGS.items() if flags.issuperset(needed))


@functools.cache
def find(directory: Path) -> tuple[str | None, str]:
    """The best instruction set whose library is ready, and a line that says so; None and the reason, else.

    directory: where libraries are kept. Compiles at the first call on a machine: some seconds.
    """
    isas = processor_isas()
    if not isas:
        return None, f"no kernels for this processor ({platform.machine()}, none of {', '.join(ISAS)})"
    wrong: dict[str, list[str]] = {}  # a reason -> the instruction sets that it rules out
    for isa in isas:
        try:
            load(isa, directory)
        except (BuildError, OSError) as error:  # OSError: a directory that cannot be written, or not run from
            wrong.setdefault(str(error), []).append(isa)
        else:
            return isa, "; ".join([f"native kernels for {isa}", *_reasons(wrong)])
    return None, "; ".join(_reasons(wrong))


def _reasons(wrong: dict[str, list[str]]) -> list[str]:
    return [f"{', '.join(names)}: {reason}" for reason, names in wrong.items()]


def load(isa: str, directory: Path) -> None:
    """Build the library if need be, load it, and make its kernels known to XLA. Raises BuildError."""
    with _LOCK:
        if isa not in _LOADED:
            path = _built(isa, directory)
            try:
                library = ctypes.CDLL(str(path))
            except OSError:
                path.unlink()  # damaged, or of another system: once more
                library = ctypes.CDLL(str(_built(isa, directory)))
            for handler in _HANDLERS:
                capsule = jax.ffi.pycapsule(getattr(library, handler))
                jax.ffi.register_ffi_target(f"{handler}_{isa}", capsule, platform="cpu")
            _LOADED[isa] = library


_LOADED: dict[str, ctypes.CDLL] = {}


def target(handler: str, isa: str) -> str:
    """The name under which XLA knows a kernel of an instruction set, which has been loaded."""
    if isa not in _LOADED:
        raise RuntimeError(f"the native kernels for {isa} are not loaded")
    return f"{handler}_{isa}"


def _built(isa: str, directory: Path) -> Path:
    compiler = shlex.split(os.environ.get("CXX", ""))  # CXX may bring arguments: "ccache g++"
    compiler = compiler or list(filter(shutil.which, ("c++", "g++", "clang++")))[:1]
    sources = sorted([*_SOURCES.glob("*.cc"), *_SOURCES.glob("*.h")])
    content = b"".join(path.read_bytes() for path in sources)
    digest = hashlib.sha256(content + f"{isa} {jax.__version__} {_command(isa)}".encode()).hexdigest()[:16]
    path = directory / f"{isa}-{digest}.so"
    if path.exists():
        _check_owner(path)
        return path
    if not compiler:
        raise BuildError("no C++ compiler (c++, g++ or clang++) on the PATH")
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check_owner(directory)
    # Written beside and moved: another process may build the same, and half a library is never loaded.
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        made = Path(scratch) / path.name
        units = [source for source in sources if source.suffix == ".cc"]
        objects = [str(made.with_name(f"{unit.stem}.o")) for unit in units]
        compile_only = [*compiler, *_command(isa), f"-I{jax.ffi.include_dir()}", "-c"]
        commands = [[*compile_only, str(unit), "-o", o] for unit, o in zip(units, objects, strict=True)]
        with ThreadPoolExecutor() as pool:  # side by side: this is a part of a cold start
            list(pool.map(_run, commands))
        _run([*compiler, "-shared", "-o", str(made), *objects])
        made.chmod(0o755)  # whatever the umask: the next start refuses what others may write
        with made.open("rb") as file:
            os.fsync(file.fileno())  # half a library would end every later start by a signal
        made.replace(path)
    return path


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]}: {error}") from error
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "error" in line] or ["failed"]
        raise BuildError(f"{command[0]}: {errors[0]}")


def _command(isa: str) -> list[str]:
    switches = [f"-m{flag.replace('avx512_vnni', 'avx512vnni').replace('_', '')}" for flag in _FLAGS[isa]]
    define = f"-DJAXSERVE_{isa.upper()}"
    return [
        "-O3",
        "-std=c++17",
        "-fPIC",
        "-fno-exceptions",  # XLA has none either; a tenth of the time to compile
        "-fno-math-errno",
        "-fvisibility-inlines-hidden",
        "-w",
        define,
        *switches,
    ]


def _check_owner(path: Path) -> None:
    """What lies there is run as code."""
    info = path.stat()
    if hasattr(os, "getuid") and info.st_uid not in (os.getuid(), 0):  # root's: as an image brings it
        raise BuildError(f"{path} belongs to another user")
    if info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise BuildError(f"{path} is writable by others")
