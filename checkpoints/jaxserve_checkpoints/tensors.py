"""Memory-mapped files and references to the tensors in them."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxserve_checkpoints.errors import CheckpointError


def map_file(path: Path) -> mmap.mmap:
    """Map `path` read-only. Raises CheckpointError when it is missing, unreadable or empty."""
    try:
        with open(path, "rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except ValueError:  # mmap's answer to an empty file
        raise CheckpointError("the file is empty", file=path) from None
    except OSError as error:
        raise CheckpointError(error.strerror or str(error), file=path) from None


class PackedParts(NamedTuple):
    """A matrix of 4 or 8 bits: element = scale * value + min, one scale for 32 elements of a row.

    Without mins the values are offset by half of their range: scale * (value - 8), or - 128.
    """

    values: np.ndarray  # uint8 [out, in], below 16 where bits are 4
    scales: np.ndarray  # float16 [out, in / 32]; as files have it, inf and NaN too
    mins: np.ndarray | None  # as the scales


@dataclass(frozen=True)
class PackedLayout:
    """How a block-quantised type is taken apart without being expanded."""

    bits: int  # 4 or 8
    has_mins: bool
    unpack: Callable[[TensorRef], PackedParts] = field(repr=False)


@dataclass(frozen=True)
class TensorRef:
    """One tensor of a checkpoint, read when asked for.

    Attributes:
        name: as in the file.
        shape: numpy order, weights are [out, in].
        dtype: numpy's (or ml_dtypes') name of the element type, or ggml's name of a block-quantised type.
        nbytes: size at rest, in bytes.
        file: the file that holds it.
        packing: how `packed` gives it; None for a type, or a shape, that it does not give.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    file: Path
    _buffer: mmap.mmap = field(repr=False, compare=False)
    _offset: int = field(repr=False, compare=False)
    _decode: Callable[[TensorRef], np.ndarray] = field(repr=False, compare=False)
    packing: PackedLayout | None = field(default=None, compare=False)

    def raw(self) -> np.ndarray:
        """The bytes at rest: uint8 [nbytes], a read-only view of the memory map."""
        return np.frombuffer(self._buffer, np.uint8, self.nbytes, self._offset)

    def read(self) -> np.ndarray:
        """The values, [*shape]: float32 for block-quantised types, else the type at rest.

        A read-only view of the memory map where the bytes are the array. Safe to call from several
        threads. Raises CheckpointError for a block format that has no decoder.
        """
        return self._decode(self)

    def release(self) -> None:
        """Give the file's pages back to the system; what is read again later is mapped in again."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self._buffer.madvise(mmap.MADV_DONTNEED)

    def packed(self) -> PackedParts:
        """The tensor's values, scales and mins. Raises ValueError where `packing` is None."""
        if self.packing is None:
            raise ValueError(f"{self.name}: {self.dtype} {self.shape} is not given in packed parts")
        return self.packing.unpack(self)
