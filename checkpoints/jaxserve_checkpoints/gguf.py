"""GGUF files: a strict memory-mapped header reader and dequantised tensors.

Format, little endian: magic, u32 version, u64 tensor count, u64 key/value count, the key/values, the
tensor infos, padding to `general.alignment`, the data (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md).
Every count and offset is checked against the bytes that remain before anything is allocated. Block
formats are decoded by gguf-py, the format's own library; three of them can also be had as they are packed.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from jaxserve_checkpoints.errors import CheckpointError
from jaxserve_checkpoints.tensors import PackedLayout, PackedParts, TensorRef, map_file

MAX_DIMS = 4
MAX_NAME_BYTES = 65535
DEFAULT_ALIGNMENT = 32
# Values decoded at a time: the temporaries of a chunk stay in the processor's cache, and small in memory.
CHUNK_VALUES = 1 << 17

STRING, ARRAY, BOOL = 8, 9, 7
SCALARS: dict[int, struct.Struct] = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    BOOL: struct.Struct("<B"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_U32, _U64 = SCALARS[4], SCALARS[10]

# Types whose bytes are the array.
PLAIN: dict[GGMLQuantizationType, np.dtype] = {
    GGMLQuantizationType.F32: np.dtype(np.float32),
    GGMLQuantizationType.F16: np.dtype(np.float16),
    GGMLQuantizationType.BF16: np.dtype(ml_dtypes.bfloat16),
    GGMLQuantizationType.F64: np.dtype(np.float64),
    GGMLQuantizationType.I8: np.dtype(np.int8),
    GGMLQuantizationType.I16: np.dtype(np.int16),
    GGMLQuantizationType.I32: np.dtype(np.int32),
    GGMLQuantizationType.I64: np.dtype(np.int64),
}


class _Cursor:
    """A position in a mapped file that cannot leave it."""

    def __init__(self, path: Path, buffer: mmap.mmap) -> None:
        self.path, self.buffer, self.pos, self.size = path, buffer, 0, len(buffer)

    def fail(self, message: str, item: str | None = None) -> CheckpointError:
        return CheckpointError(message, file=self.path, item=item)

    def skip(self, nbytes: int, what: str) -> int:
        """Step over `nbytes`; returns where they begin."""
        start = self.pos
        if nbytes > self.size - start:
            raise self.fail(f"{nbytes} bytes at {start} lie beyond the file's {self.size} (truncated?)", what)
        self.pos = start + nbytes
        return start

    def scalar(self, kind: struct.Struct, what: str) -> int | float:
        return kind.unpack_from(self.buffer, self.skip(kind.size, what))[0]

    def count(self, kind: struct.Struct, what: str, least_bytes: int) -> int:
        """A count of things that take at least `least_bytes` each in the rest of the file."""
        value = int(self.scalar(kind, what))
        if value * least_bytes > self.size - self.pos:
            raise self.fail(f"{value} entries do not fit the rest of the file (truncated?)", what)
        return value

    def name(self, what: str) -> str:
        length = self.count(_U64, what, 1)
        if not 0 < length <= MAX_NAME_BYTES:
            raise self.fail(f"a name of {length} bytes", what)
        return self.text(self.skip(length, what), length, what)

    def text(self, start: int, length: int, what: str) -> str:
        try:
            return self.buffer[start : start + length].decode("utf-8")
        except UnicodeDecodeError:
            raise self.fail(f"the text at byte {start} is not UTF-8", what) from None


@dataclass(frozen=True)
class _Array:
    """An array value left in the file: element type, count and first byte."""

    kind: int
    count: int
    start: int


class GGUFMetadata(Mapping[str, object]):
    """The key/values of a file: str, int, float, bool; arrays (decoded when asked for) are a list of str,
    or a numpy array [count] that views the file."""

    def __init__(self, cursor: _Cursor, values: dict[str, object]) -> None:
        self._cursor, self._values = cursor, values

    def __getitem__(self, key: str) -> object:
        value = self._values[key]
        return self._decode(key, value) if isinstance(value, _Array) else value

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def _decode(self, key: str, array: _Array) -> object:
        cursor = self._cursor
        if array.kind == BOOL:
            return np.frombuffer(cursor.buffer, np.uint8, array.count, array.start).astype(np.bool_)
        if array.kind != STRING:
            return np.frombuffer(cursor.buffer, SCALARS[array.kind].format, array.count, array.start)
        # open_gguf() has walked the lengths, so every string lies inside the file.
        strings, pos, buffer, unpack = [], array.start, cursor.buffer, _U64.unpack_from
        for _ in range(array.count):
            end = pos + 8 + unpack(buffer, pos)[0]
            try:
                strings.append(buffer[pos + 8 : end].decode("utf-8"))
            except UnicodeDecodeError:
                raise cursor.fail(f"the text at byte {pos + 8} is not UTF-8", key) from None
            pos = end
        return strings


def _array(cursor: _Cursor, key: str) -> _Array:
    kind = int(cursor.scalar(_U32, key))
    if kind != STRING and kind not in SCALARS:
        raise cursor.fail(f"array of unknown or nested type {kind}", key)
    width = 8 if kind == STRING else SCALARS[kind].size
    count = cursor.count(_U64, key, width)
    start = cursor.pos
    if kind != STRING:
        cursor.skip(count * width, key)
        return _Array(kind, count, start)
    pos, last, buffer, unpack = start, cursor.size - 8, cursor.buffer, _U64.unpack_from
    for _ in range(count):
        if pos > last:
            raise cursor.fail("the array's strings lie beyond the file (truncated?)", key)
        pos += 8 + unpack(buffer, pos)[0]
    if pos > cursor.size:
        raise cursor.fail("the array's strings lie beyond the file (truncated?)", key)
    cursor.pos = pos
    return _Array(kind, count, start)


def _value(cursor: _Cursor, key: str) -> object:
    kind = int(cursor.scalar(_U32, key))
    if kind == ARRAY:
        return _array(cursor, key)
    if kind == STRING:
        length = cursor.count(_U64, key, 1)
        return cursor.text(cursor.skip(length, key), length, key)
    if kind not in SCALARS:
        raise cursor.fail(f"unknown value type {kind}", key)
    value = cursor.scalar(SCALARS[kind], key)
    if kind == BOOL:
        if value > 1:
            raise cursor.fail(f"{value} is not a bool", key)
        return bool(value)
    return value


def _key_values(cursor: _Cursor, count: int) -> dict[str, object]:
    values: dict[str, object] = {}
    for i in range(count):
        key = cursor.name(f"key {i}")
        if key in values:
            raise cursor.fail("the key appears twice", key)
        values[key] = _value(cursor, key)
    return values


@dataclass(frozen=True)
class _Info:
    """A tensor's entry in the header; `offset` counts from the data section."""

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    nbytes: int
    offset: int


def _info(cursor: _Cursor, index: int) -> _Info:
    name = cursor.name(f"tensor {index}")
    num_dims = int(cursor.scalar(_U32, name))
    if not 1 <= num_dims <= MAX_DIMS:
        raise cursor.fail(f"{num_dims} dimensions, expected 1 to {MAX_DIMS}", name)
    dims = [int(cursor.scalar(_U64, name)) for _ in range(num_dims)]
    if min(dims) < 1:
        raise cursor.fail(f"a dimension of {dims} is zero", name)
    code = int(cursor.scalar(_U32, name))
    try:
        kind = GGMLQuantizationType(code)
        block_values, block_bytes = GGML_QUANT_SIZES[kind]
    except (ValueError, KeyError):
        raise cursor.fail(f"unknown tensor type {code}", name) from None
    if dims[0] % block_values:
        raise cursor.fail(f"rows of {dims[0]} are not whole {kind.name} blocks of {block_values}", name)
    nbytes = math.prod(dims) // block_values * block_bytes
    # ggml counts dimensions from the fastest; numpy from the slowest.
    return _Info(name, tuple(reversed(dims)), kind, nbytes, int(cursor.scalar(_U64, name)))


def _view(ref: TensorRef) -> np.ndarray:
    return ref.raw().view(np.dtype(ref.dtype)).reshape(ref.shape)


def _dequantize(ref: TensorRef) -> np.ndarray:
    """float32 [*shape] from blocks, a chunk of blocks at a time."""
    kind = GGMLQuantizationType[ref.dtype]
    block_values, block_bytes = GGML_QUANT_SIZES[kind]
    raw = ref.raw()
    values = np.empty(math.prod(ref.shape), np.float32)
    step = max(1, CHUNK_VALUES // block_values)
    with np.errstate(all="ignore"):  # scales at rest may be inf or NaN: that is the tensor's value
        for block in range(0, ref.nbytes // block_bytes, step):
            # One row, because gguf-py loops in Python over groups of 16 rows.
            chunk = raw[block * block_bytes : (block + step) * block_bytes][None]
            try:
                decoded = dequantize(chunk, kind)
            except NotImplementedError:
                raise CheckpointError(
                    f"ggml type {ref.dtype} has no decoder", file=ref.file, item=ref.name
                ) from None
            values[block * block_values : (block + step) * block_values] = decoded[0]
    return values.reshape(ref.shape)


def _blocks(ref: TensorRef, num_halves: int) -> tuple[list[np.ndarray], np.ndarray]:
    """Blocks of 32 elements: their leading half-precision numbers, and the 32-bit words that follow.

    float16 [out, blocks] each, and uint32 [out, blocks, words].
    """
    out, size = ref.shape
    blocks = ref.raw().reshape(out, size // 32, -1)
    halves = np.ascontiguousarray(blocks[..., : 2 * num_halves]).view("<f2")
    words = np.ascontiguousarray(blocks[..., 2 * num_halves :]).view("<u4")
    return [np.ascontiguousarray(halves[..., i]) for i in range(num_halves)], words


def _nibbles(ref: TensorRef, words: np.ndarray) -> np.ndarray:
    """Low nibbles are a block's first 16 elements, high nibbles its last: uint8 [out, in]."""
    values = np.empty((*words.shape[:2], 8), np.uint32)
    np.bitwise_and(words, 0x0F0F0F0F, out=values[..., :4])
    np.bitwise_and(words >> 4, 0x0F0F0F0F, out=values[..., 4:])
    return values.view(np.uint8).reshape(ref.shape)


def _unpack_q4_0(ref: TensorRef) -> PackedParts:
    (scales,), words = _blocks(ref, 1)
    return PackedParts(_nibbles(ref, words), scales, None)


def _unpack_q4_1(ref: TensorRef) -> PackedParts:
    (scales, mins), words = _blocks(ref, 2)
    return PackedParts(_nibbles(ref, words), scales, mins)


def _unpack_q8_0(ref: TensorRef) -> PackedParts:
    (scales,), words = _blocks(ref, 1)
    words ^= 0x80808080  # signed bytes, as offset by 128
    return PackedParts(words.view(np.uint8).reshape(ref.shape), scales, None)


PACKED: dict[GGMLQuantizationType, PackedLayout] = {
    GGMLQuantizationType.Q4_0: PackedLayout(4, False, _unpack_q4_0),
    GGMLQuantizationType.Q4_1: PackedLayout(4, True, _unpack_q4_1),
    GGMLQuantizationType.Q8_0: PackedLayout(8, False, _unpack_q8_0),
}


def _tensors(cursor: _Cursor, infos: list[_Info], alignment: int) -> dict[str, TensorRef]:
    """References to checked places: aligned, inside the file, none overlapping."""
    data_start = -(-cursor.pos // alignment) * alignment
    tensors: dict[str, TensorRef] = {}
    covered = 0
    for info in sorted(infos, key=lambda info: info.offset):
        if info.name in tensors:
            raise cursor.fail("the tensor appears twice", info.name)
        if info.offset % alignment:
            raise cursor.fail(f"offset {info.offset} is not a multiple of {alignment}", info.name)
        if info.offset < covered:
            raise cursor.fail(f"overlaps the tensor before it at offset {info.offset}", info.name)
        covered = info.offset + info.nbytes
        if data_start + covered > cursor.size:
            raise cursor.fail(
                f"its {info.nbytes} bytes at {data_start + info.offset} lie beyond the file's {cursor.size} "
                "(truncated?)",
                info.name,
            )
        plain = PLAIN.get(info.kind)
        tensors[info.name] = TensorRef(
            info.name,
            info.shape,
            info.kind.name if plain is None else plain.name,
            info.nbytes,
            cursor.path,
            cursor.buffer,
            data_start + info.offset,
            _dequantize if plain is None else _view,
            PACKED.get(info.kind) if len(info.shape) == 2 else None,
        )
    return tensors


def _open_one(path: Path) -> tuple[GGUFMetadata, dict[str, TensorRef]]:
    cursor = _Cursor(path, map_file(path))
    magic = cursor.buffer[cursor.skip(4, "magic") : 4]
    if magic != b"GGUF":
        raise cursor.fail("not a GGUF file")
    version = int(cursor.scalar(_U32, "version"))
    if version not in (2, 3):
        raise cursor.fail(f"version {version} (or big endian); 2 and 3 are read", "version")
    num_tensors = cursor.count(_U64, "tensor count", 33)  # name (8+1), dims (4+8), type (4), offset (8)
    num_values = cursor.count(_U64, "key/value count", 14)  # name (8+1), type (4), value (1)
    values = _key_values(cursor, num_values)
    alignment = values.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1) or alignment > 1 << 20:
        raise cursor.fail("is not a power of two up to 2^20", "general.alignment")
    infos = [_info(cursor, i) for i in range(num_tensors)]
    return GGUFMetadata(cursor, values), _tensors(cursor, infos, alignment)


SPLIT_NAME = re.compile(r"(?P<prefix>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


def open_gguf(path: Path) -> tuple[GGUFMetadata, dict[str, TensorRef]]:
    """Metadata and tensors of a file, or of the split set it is a part of (metadata of the first part).

    Reads headers only. Raises CheckpointError naming the file and the key or tensor.
    """
    metadata, tensors = _open_one(path)
    count = metadata.get("split.count", 1)
    if not isinstance(count, int) or count <= 1:
        return metadata, tensors
    match = SPLIT_NAME.fullmatch(path.name)
    if match is None or int(match["count"]) != count:
        raise CheckpointError(
            f"one of {count} parts, but not named NAME-00001-of-{count:05}.gguf",
            file=path,
            item="split.count",
        )
    tensors = {}
    for number in range(1, count + 1):
        part = path.with_name(f"{match['prefix']}-{number:05}-of-{count:05}.gguf")
        part_metadata, part_tensors = _open_one(part)
        if part_metadata.get("split.no") != number - 1 or part_metadata.get("split.count") != count:
            raise CheckpointError("does not agree with the file's name", file=part, item="split.no")
        for name, ref in part_tensors.items():
            if name in tensors:
                raise CheckpointError(f"lies in {tensors[name].file.name} too", file=part, item=name)
            tensors[name] = ref
        if number == 1:
            metadata = part_metadata
    total = metadata.get("split.tensors.count", len(tensors))
    if total != len(tensors):
        raise CheckpointError(
            f"{total} tensors expected, {len(tensors)} found", file=path, item="split.tensors.count"
        )
    return metadata, tensors
