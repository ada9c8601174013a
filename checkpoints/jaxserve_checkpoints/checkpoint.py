"""A checkpoint of any format behind one face: configuration, tensors by name, tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxserve_checkpoints import gguf, gguf_tokenizers, safetensors, sentence_transformers, tokenizers
from jaxserve_checkpoints.errors import CheckpointError
from jaxserve_checkpoints.json_files import read_json, read_optional_json
from jaxserve_checkpoints.sentence_transformers import EncoderModule
from jaxserve_checkpoints.tensors import TensorRef
from jaxserve_checkpoints.tokenizers import TokenizerAssets

INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint; tensors stay on disk until read.

    Attributes:
        path: what was opened.
        format: "safetensors" or "gguf".
        config: config.json as on disk; None for GGUF.
        metadata: the GGUF key/values, arrays decoded when asked for; {} for safetensors.
        tensors: by the names in the file.
        generation_config: generation_config.json or {}; for GGUF the end-of-sequence ids it names.
    """

    path: Path
    format: str
    config: dict[str, Any] | None
    metadata: Mapping[str, object]
    tensors: Mapping[str, TensorRef]
    generation_config: dict[str, Any]

    def tokenizer(self) -> TokenizerAssets | None:
        """The tokenizer, None when the checkpoint holds none. Raises CheckpointError."""
        if self.format == "gguf":
            return gguf_tokenizers.build_tokenizer(self.metadata, self.path)
        return tokenizers.read_tokenizer(self._directory, self.generation_config)

    def encoder_modules(self) -> tuple[EncoderModule, ...] | None:
        """What makes an embedding of its outputs, in order; None where no file says (GGUF has metadata).

        Raises CheckpointError.
        """
        return None if self.format == "gguf" else sentence_transformers.read_modules(self._directory)

    @property
    def _directory(self) -> Path:
        return self.path if self.path.is_dir() else self.path.parent


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open a Hugging Face directory, a .safetensors file or a .gguf file (or a directory that holds one).

    Reads headers and small JSON files only. Raises CheckpointError.
    """
    path = Path(path).expanduser()
    if path.is_dir():
        return _open_directory(path)
    if not path.exists():
        raise CheckpointError("no such file or directory", file=path)
    if path.suffix == ".gguf":
        return _open_gguf(path)
    if path.suffix == ".safetensors":
        return _from_tensors(path, path.parent, safetensors.open_safetensors(path))
    raise CheckpointError("not a directory, .safetensors or .gguf file", file=path)


def _open_gguf(path: Path) -> Checkpoint:
    metadata, tensors = gguf.open_gguf(path)
    ends = gguf_tokenizers.end_ids(metadata)
    return Checkpoint(path, "gguf", None, metadata, tensors, {"eos_token_id": ends} if ends else {})


def _from_tensors(path: Path, directory: Path, tensors: Mapping[str, TensorRef]) -> Checkpoint:
    return Checkpoint(
        path=path,
        format="safetensors",
        config=read_json(directory / "config.json"),
        metadata={},
        tensors=tensors,
        generation_config=read_optional_json(directory / "generation_config.json"),
    )


def _open_directory(path: Path) -> Checkpoint:
    if (path / INDEX).is_file():
        return _from_tensors(path, path, safetensors.open_sharded(path / INDEX))
    if (path / "model.safetensors").is_file():
        return _from_tensors(path, path, safetensors.open_safetensors(path / "model.safetensors"))
    files = sorted(path.glob("*.safetensors"))
    if len(files) > 1:
        raise CheckpointError(f"{len(files)} .safetensors files and no {INDEX}", file=path)
    if files:
        return _from_tensors(path, path, safetensors.open_safetensors(files[0]))
    # Of a split set the first part stands for all.
    ggufs = [f for f in sorted(path.glob("*.gguf")) if not _is_later_part(f)]
    if len(ggufs) > 1:
        raise CheckpointError(f"{len(ggufs)} .gguf files: name the one to open", file=path)
    if ggufs:
        return _open_gguf(ggufs[0])
    for pickled in ("pytorch_model.bin", "pytorch_model.bin.index.json"):
        if (path / pickled).is_file():
            raise CheckpointError(
                "pickled weights are never read: convert to safetensors", file=path / pickled
            )
    raise CheckpointError("holds no .safetensors and no .gguf file", file=path)


def _is_later_part(path: Path) -> bool:
    match = gguf.SPLIT_NAME.fullmatch(path.name)
    return match is not None and int(match["number"]) != 1
