"""safetensors files, one or sharded, checked before anything is allocated.

Format: u64 header length, JSON header {name: {dtype, shape, data_offsets}}, then the data
(https://github.com/huggingface/safetensors#format).
"""

from __future__ import annotations

import math
import mmap
from pathlib import Path

import ml_dtypes
import numpy as np

from jaxserve_checkpoints.errors import CheckpointError, one_line
from jaxserve_checkpoints.json_files import parse_json, read_json
from jaxserve_checkpoints.tensors import TensorRef, map_file

MAX_HEADER_BYTES = 100_000_000  # the format's own limit

DTYPES: dict[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64),
    "U32": np.dtype(np.uint32),
    "U16": np.dtype(np.uint16),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}


def _view(ref: TensorRef) -> np.ndarray:
    return ref.raw().view(np.dtype(ref.dtype)).reshape(ref.shape)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _tensor(
    path: Path, buffer: mmap.mmap, data_start: int, name: str, entry: object
) -> tuple[TensorRef, int, int]:
    """A checked tensor with its begin and end in the data section."""

    def fail(message: str) -> CheckpointError:
        return CheckpointError(message, file=path, item=name)

    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise fail("needs exactly dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise fail(f"unknown dtype {one_line(dtype, 40)}")
    if not isinstance(shape, list) or not all(_is_count(n) for n in shape) or len(shape) > 32:
        raise fail("shape is not a list of at most 32 counts")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_count(n) for n in offsets):
        raise fail("data_offsets is not a pair of counts")
    begin, end = offsets
    available = len(buffer) - data_start
    if not begin <= end <= available:
        raise fail(f"data_offsets {begin}:{end} lie outside the file's {available} data bytes (truncated?)")
    nbytes = math.prod(shape) * DTYPES[dtype].itemsize
    if nbytes != end - begin:
        raise fail(f"{dtype} {shape} takes {nbytes} bytes, data_offsets give {end - begin}")
    ref = TensorRef(name, tuple(shape), DTYPES[dtype].name, nbytes, path, buffer, data_start + begin, _view)
    return ref, begin, end


def open_safetensors(path: Path) -> dict[str, TensorRef]:
    """The tensors of one file. Reads the header only.

    Raises CheckpointError, naming the tensor, when the header is malformed or the data section is not
    exactly covered by the tensors, without overlap.
    """
    buffer = map_file(path)
    size = len(buffer)
    if size < 8:
        raise CheckpointError(f"{size} bytes is too short for a safetensors file", file=path)
    header_bytes = int.from_bytes(buffer[:8], "little")
    if header_bytes > min(MAX_HEADER_BYTES, size - 8):
        raise CheckpointError(
            f"the header's length {header_bytes} exceeds the file or {MAX_HEADER_BYTES} (truncated?)",
            file=path,
        )
    header = parse_json(buffer[8 : 8 + header_bytes], path, "header")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise CheckpointError("is not a map of strings", file=path, item="__metadata__")

    data_start = 8 + header_bytes
    checked = [_tensor(path, buffer, data_start, name, entry) for name, entry in header.items()]
    checked.sort(key=lambda item: item[1:])
    covered = 0
    for ref, begin, end in checked:
        if begin != covered:
            kind = "overlaps the tensor before it" if begin < covered else "leaves a hole before it"
            raise CheckpointError(f"{kind} in the data section", file=path, item=ref.name)
        covered = end
    if covered != size - data_start:
        raise CheckpointError(f"{size - data_start - covered} bytes belong to no tensor", file=path)
    return {ref.name: ref for ref, _, _ in sorted(checked, key=lambda item: item[0].name)}


def open_sharded(index: Path) -> dict[str, TensorRef]:
    """The tensors of a `model.safetensors.index.json`, from the shards beside it.

    Raises CheckpointError for a missing shard, a tensor the map puts where it is not, and a tensor that
    lies in two shards.
    """
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError("is missing or not a JSON object", file=index, item="weight_map")
    shards: dict[str, dict[str, TensorRef]] = {}
    home: dict[str, str] = {}
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or Path(shard).name != shard or shard in ("", ".", ".."):
            raise CheckpointError(f"shard {one_line(shard, 80)!r} is not a file name", file=index, item=name)
        if shard not in shards:
            path = index.parent / shard
            if not path.is_file():
                raise CheckpointError(f"its shard {shard} is missing", file=index, item=name)
            shards[shard] = open_safetensors(path)
            for held in shards[shard]:
                if held in home:
                    raise CheckpointError(f"lies in both {home[held]} and {shard}", file=index, item=held)
                home[held] = shard
        if name not in shards[shard]:
            raise CheckpointError(f"not in its shard {shard}", file=index, item=name)
    return {name: shards[weight_map[name]][name] for name in sorted(weight_map)}
