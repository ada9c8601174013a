"""From a checkpoint, a module or named arrays to the flat leaves that a step takes."""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding

from jaxserve.errors import ConfigError
from jaxserve.packing import INT8
from jaxserve.skeleton import ROPE_PATH, Leaf, ModelSkeleton, Row, build_skeleton, row_sharding
from jaxserve.step import Weights
from jaxserve_checkpoints import Checkpoint, CheckpointError, TensorRef
from pallas_kernels.packed_matmul import PackedWeight, dequantize, pack, pack4, quantize_int8

__all__ = [
    "ROPE_PATH",
    "ModelSkeleton",
    "build_skeleton",
    "check_tensors",
    "load_weights",
    "named_arrays",
    "rope_leaf",
    "weights_from",
]
Progress = Callable[[int, int], None]  # tensors done, tensors in all


def rope_leaf(skeleton: ModelSkeleton, factors: np.ndarray | None, seq_len: int | None = None) -> np.ndarray:
    """Inverse frequencies [num_ropes, head_dim / 2], divided by a GGUF file's own factors if it has them."""
    length = seq_len or skeleton.max_seq_len
    inv_freq = np.stack([rope.inv_freq(length) for rope in skeleton.config.ropes])
    return inv_freq if factors is None else (inv_freq / factors.reshape(-1)).astype(np.float32)


def check_tensors(checkpoint: Checkpoint, skeleton: ModelSkeleton) -> dict[str, TensorRef]:
    """The file's tensor for each Hugging Face name; reads headers only.

    Raises CheckpointError, in one line with file and tensor, for one that is missing, left over or misshapen.
    """
    family, config = skeleton.family, skeleton.config
    gguf = family.gguf if checkpoint.format == "gguf" else None
    wanted = [name for rows in skeleton.rows.values() for row in rows for name in row.names]
    in_file = {name: gguf.name(name) if gguf is not None else name for name in wanted}
    if gguf is None and "embed_tokens.weight" in checkpoint.tensors:
        # Saved from the class without an output matrix, as embedding models are.
        in_file = {name: name.removeprefix("model.") for name in wanted}
    missing = sorted(set(in_file.values()) - set(checkpoint.tensors))
    if missing:
        raise CheckpointError(f"{checkpoint.path}: tensor {missing[0]} is missing ({len(missing)} in all)")
    known = {*in_file.values(), gguf.rope_factors if gguf is not None else None}
    spare = [n for n in checkpoint.tensors if n not in known and not family.ignored_tensor(n, config)]
    if spare:
        raise CheckpointError(
            f"{checkpoint.path}: tensor {min(spare)} has no place in {config.family} "
            f"({len(spare)} such in all)"
        )
    refs = {name: checkpoint.tensors[n] for name, n in in_file.items()}
    for leaf in skeleton.leaves:
        for row in skeleton.rows.get(leaf.parameter, ()):
            expected = skeleton.file_shape(leaf, row)
            for ref in (refs[name] for name in row.names):
                if ref.shape != expected:
                    raise CheckpointError(
                        f"{ref.file}: tensor {ref.name} has shape {ref.shape}, expected {expected}"
                    )
    return refs


def load_weights(
    checkpoint: Checkpoint, skeleton: ModelSkeleton, progress: Progress | None = None
) -> Weights:
    """Read every tensor to its shard, two parameters at a time. Raises CheckpointError (see `check_tensors`).

    The host holds a tensor of each, or all experts of a layer's.
    """
    refs = check_tensors(checkpoint, skeleton)
    gguf = skeleton.family.gguf if checkpoint.format == "gguf" else None
    lock, done, total = threading.Lock(), 0, len(refs)

    def read(name: str) -> np.ndarray:
        ref = refs[name]
        value = ref.read()
        if not jnp.issubdtype(value.dtype, jnp.floating):
            raise CheckpointError(f"{ref.file}: tensor {ref.name} holds {value.dtype}, expected floats")
        return ordered(name, value)

    def ordered(name: str, value: np.ndarray) -> np.ndarray:
        """A tensor, or the values or scales of its rows, as Hugging Face files order them."""
        return value if gguf is None else gguf.value(name, value, skeleton.config)

    def count(names: Sequence[str]) -> None:
        nonlocal done
        with lock:
            done += len(names)
            if progress is not None:
                progress(done, total)

    def read_packed(leaf: Leaf, row: Row) -> PackedWeight:
        assert leaf.packed is not None
        (name,) = row.names
        ref, form = refs[name], leaf.packed.form
        layout = ref.packing
        if layout is not None and layout.bits == form.bits and layout.has_mins <= form.has_mins:
            values, scales, mins = ref.packed()
            if mins is None and form.has_mins:
                with np.errstate(over="ignore"):
                    mins = -np.float16(1 << (form.bits - 1)) * scales  # exact: a power of two
                if (np.isinf(mins) & np.isfinite(scales)).any():
                    raise CheckpointError(f"{ref.file}: tensor {ref.name} has scales too large for {form}")
            mins = None if mins is None else ordered(name, mins)
            weight = (pack4 if form.bits == 4 else pack)(ordered(name, values), ordered(name, scales), mins)
        else:
            weight = _quantized(read(name))
            if not np.isfinite(weight.scales).all():
                raise CheckpointError(f"{ref.file}: tensor {ref.name} holds values too large for int8")
        count(row.names)
        return weight

    def read_row(leaf: Leaf, row: Row) -> np.ndarray:
        if row.of_experts:
            shape = leaf.shape if row.layer is None else leaf.shape[1:]
            value = np.empty(shape, leaf.dtype)
            for e, name in enumerate(row.names):
                value[e] = _as_leaf(leaf, read(name))
        else:
            value = _as_leaf(leaf, read(row.names[0])).astype(leaf.dtype, copy=False)
        count(row.names)
        return value

    def load(leaves: Sequence[Leaf]) -> list[jax.Array]:
        leaf = leaves[0]
        if leaf.path == ROPE_PATH:
            factors = checkpoint.tensors.get(gguf.rope_factors or "") if gguf is not None else None
            value = rope_leaf(skeleton, None if factors is None else factors.read())
            return [jax.device_put(value, leaf.sharding)]
        rows = skeleton.rows[leaf.parameter]
        if leaf.packed is not None:
            return _fill_packed(leaves, [functools.partial(read_packed, leaf, row) for row in rows])
        return [_fill(leaf, [functools.partial(read_row, leaf, row) for row in rows])]

    with ThreadPoolExecutor(max_workers=2, thread_name_prefix="load") as pool:
        loaded = tuple(itertools.chain.from_iterable(pool.map(load, _by_parameter(skeleton))))
    jax.block_until_ready(loaded)
    # They count as this process's memory until then.
    for ref in {ref.file: ref for ref in refs.values()}.values():
        ref.release()
    return loaded


def _by_parameter(skeleton: ModelSkeleton) -> list[list[Leaf]]:
    """The leaves in order, those of a packed matrix together."""
    return [list(leaves) for _, leaves in itertools.groupby(skeleton.leaves, lambda leaf: leaf.parameter)]


def _quantized(value: np.ndarray) -> PackedWeight:
    """Scales are not finite where values are too large."""
    with np.errstate(all="ignore"):
        return quantize_int8(value)


def _fill_packed(leaves: Sequence[Leaf], rows: Sequence[Callable[[], PackedWeight]]) -> list[jax.Array]:
    """The arrays of a packed matrix, from its one weight or from one for each layer."""
    arrays = {str(leaf.path[-1]): _aligned(leaf.shape, leaf.dtype) for leaf in leaves}
    for i, row in enumerate(rows):
        weight = row()._asdict()
        for name, array in arrays.items():
            array[i if _is_stacked(leaves[0]) else ...] = weight[name]
    return [jax.device_put(arrays[str(leaf.path[-1])], leaf.sharding) for leaf in leaves]


def _aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An empty array on a border of 64 bytes: JAX then uses its memory and makes no copy."""
    num_bytes = int(np.prod(shape)) * dtype.itemsize
    room = np.empty(num_bytes + 64, np.uint8)
    start = -room.ctypes.data % 64
    return room[start : start + num_bytes].view(dtype).reshape(shape)


def _as_leaf(leaf: Leaf, value: Any) -> Any:
    """A tensor as files have it -> as the leaf has it, and back."""
    return value.swapaxes(-1, -2) if leaf.transposed else value


def _fill(leaf: Leaf, rows: Sequence[Callable[[], Any]]) -> jax.Array:
    """A leaf from its one value, or from one for each layer, which are written into it one after another."""
    if len(rows) == 1 and not _is_stacked(leaf):
        return jax.device_put(rows[0](), leaf.sharding)
    zeros, put = _stack_programs(leaf.shape, leaf.dtype, leaf.sharding)
    stack = zeros()
    for i, row in enumerate(rows):
        stack = put(stack, jax.device_put(row(), row_sharding(leaf)), np.int32(i))
        stack.block_until_ready()  # so that the host never holds more than the row under way
    return stack


def _is_stacked(leaf: Leaf) -> bool:
    return leaf.path[0] == "layers" and not isinstance(leaf.path[1], int)


@functools.lru_cache(maxsize=64)
def _stack_programs(
    shape: tuple[int, ...], dtype: np.dtype, sharding: NamedSharding
) -> tuple[Callable[[], jax.Array], Callable[[jax.Array, jax.Array, np.int32], jax.Array]]:
    """Make a stacked leaf, and write layer i of it in place."""

    def put(stack: jax.Array, row: jax.Array, i: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_index_in_dim(stack, row, i, axis=0)

    zeros = jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=sharding)
    return zeros, jax.jit(put, donate_argnums=0, out_shardings=sharding)


def weights_from(model: Any, skeleton: ModelSkeleton) -> Weights:
    """Live weights, without a copy where they already lie as the step wants them.

    `model` is an nnx.Module or nnx.State of the family's structure, or a mapping from Hugging Face tensor
    names to arrays. Raises ConfigError that names the parameter which does not fit.
    """
    if isinstance(model, nnx.Module):
        model = nnx.state(model, nnx.Param)
    if isinstance(model, nnx.State):
        pairs = jax.tree.leaves_with_path(model)
        # A leaf's path ends in the variable's own "value" attribute, which has no `.key`.
        by_path = {tuple(k.key for k in path if hasattr(k, "key")): value for path, value in pairs}

        def find(leaf: Leaf, row: Row) -> Any:
            return by_path.get(row.path)
    elif isinstance(model, Mapping):
        by_path = {}
        known = {name for rows in skeleton.rows.values() for row in rows for name in row.names}
        family, config = skeleton.family, skeleton.config
        spare = [n for n in model if n not in known and not family.ignored_tensor(n, config)]
        if spare:
            raise ConfigError(f"parameter {min(spare)} has no place in {config.family}")

        def find(leaf: Leaf, row: Row) -> Any:
            if any(name not in model for name in row.names):
                return None
            values = [_as_leaf(leaf, model[name]) for name in row.names]
            return jnp.stack(values) if row.of_experts else values[0]
    else:
        raise ConfigError(
            f"model must be an nnx.Module, an nnx.State or named arrays, got {type(model).__name__}"
        )

    def place(leaves: Sequence[Leaf]) -> list[jax.Array]:
        leaf = leaves[0]
        if leaf.path == ROPE_PATH:
            return [jax.device_put(rope_leaf(skeleton, None), leaf.sharding)]
        rows, whole = skeleton.rows[leaf.parameter], by_path.get(leaf.parameter)
        if leaf.packed is not None:
            return _fill_packed(leaves, [functools.partial(row_packed, leaf, row, whole) for row in rows])
        if whole is not None:
            label = ".".join(str(part) for part in leaf.path)
            return [jax.device_put(_checked(skeleton, leaf.shape, label, whole), leaf.sharding)]

        def row_value(row: Row) -> Any:
            shape = leaf.shape if row.layer is None else leaf.shape[1:]
            return _checked(skeleton, shape, row.label, find(leaf, row))

        return [_fill(leaf, [functools.partial(row_value, row) for row in rows])]

    def row_packed(leaf: Leaf, row: Row, whole: Any) -> PackedWeight:
        if leaf.packed is None or leaf.packed.form != INT8:
            raise ConfigError(
                f"parameter {row.label} is kept in the checkpoint's packed form, which live weights do not "
                "have: load with quantization none or int8"
            )
        if whole is not None and row.layer is not None:
            whole = whole[row.layer]
        value = find(leaf, row) if whole is None else whole
        value = _checked(skeleton, skeleton.file_shape(leaf, row), row.label, value)
        weight = _quantized(np.asarray(value, np.float32))
        if not np.isfinite(weight.scales).all():
            raise ConfigError(f"parameter {row.label} holds values too large for int8")
        return weight

    return tuple(itertools.chain.from_iterable(place(leaves) for leaves in _by_parameter(skeleton)))


def _checked(skeleton: ModelSkeleton, shape: tuple[int, ...], label: str, value: Any) -> Any:
    """A live value of the model's type. Raises ConfigError that names the parameter which does not fit."""
    if value is None:
        raise ConfigError(f"parameter {label} is missing")
    if value.shape != shape:
        raise ConfigError(f"parameter {label} has shape {value.shape}, expected {shape}")
    if not jnp.issubdtype(value.dtype, jnp.floating):
        raise ConfigError(f"parameter {label} holds {value.dtype}, expected floats")
    return value if value.dtype == skeleton.dtype else value.astype(skeleton.dtype)


class NamedArrays(Mapping[str, jax.Array]):
    """Hugging Face tensor names to the live arrays.

    Where a leaf holds several tensors, each is sliced out when it is asked for: all at once would take as
    much memory again. So are packed ones, which are dequantised.
    """

    def __init__(self, weights: Weights, skeleton: ModelSkeleton) -> None:
        self._found: dict[str, tuple[list[jax.Array], list[Leaf], tuple[int, ...]]] = {}
        self._dtype = skeleton.dtype
        left = iter(weights)
        for leaves in _by_parameter(skeleton):
            arrays = list(itertools.islice(left, len(leaves)))
            for row in skeleton.rows.get(leaves[0].parameter, ()):
                layer = () if row.layer is None else (row.layer,)
                for e, name in enumerate(row.names):
                    self._found[name] = (arrays, leaves, (*layer, e) if row.of_experts else layer)

    def __getitem__(self, name: str) -> jax.Array:
        arrays, leaves, index = self._found[name]
        own = [array[index] if index else array for array in arrays]
        if (packed := leaves[0].packed) is None:
            return _as_leaf(leaves[0], own[0])
        parts = {str(leaf.path[-1]): array for leaf, array in zip(leaves, own, strict=True)}
        return dequantize(PackedWeight(**parts), packed.out_size).astype(self._dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)


def named_arrays(weights: Weights, skeleton: ModelSkeleton) -> NamedArrays:
    """The live arrays by name (the inverse of `weights_from` for named arrays)."""
    return NamedArrays(weights, skeleton)
