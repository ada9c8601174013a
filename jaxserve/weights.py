"""From a checkpoint, a module or named arrays to the flat leaves that a step takes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from jaxserve.errors import ConfigError
from jaxserve.models.config import ModelConfig
from jaxserve.models.registry import Family
from jaxserve.sharding import param_sharding, splits_heads, variable_axes
from jaxserve.step import Weights
from jaxserve_checkpoints import Checkpoint, CheckpointError

Path = tuple[str | int, ...]
ROPE_PATH: Path = ("rope_inv_freq",)
Progress = Callable[[int, int], None]  # tensors done, tensors in all


@dataclass(frozen=True)
class Leaf:
    """One parameter: where it sits in the module, its shape, and where it lies on the mesh."""

    path: Path
    shape: tuple[int, ...]
    dtype: np.dtype
    sharding: NamedSharding


@dataclass(frozen=True)
class ModelSkeleton:
    """A family's module without values: its structure and its leaves in flattening order."""

    family: Family
    config: ModelConfig
    graphdef: Any
    treedef: jax.tree_util.PyTreeDef
    leaves: tuple[Leaf, ...]
    shard_heads: bool
    max_seq_len: int  # fixes the frequencies of dynamic rope

    @property
    def num_bytes(self) -> int:
        return sum(int(np.prod(leaf.shape)) * leaf.dtype.itemsize for leaf in self.leaves)


def build_skeleton(
    family: Family, config: ModelConfig, dtype: np.dtype, mesh: Mesh, max_seq_len: int
) -> ModelSkeleton:
    shard_heads = splits_heads(config, mesh)
    # Branching to a layer's matrix costs nothing on a CPU, and a pipeline flush elsewhere.
    unroll = mesh.devices.flat[0].platform != "cpu"
    abstract = nnx.eval_shape(
        lambda: family.module(config, dtype=jnp.dtype(dtype), shard_heads=shard_heads, unroll=unroll)
    )
    graphdef, state = nnx.split(abstract)
    values, treedef = jax.tree.flatten(state)
    variables = jax.tree.leaves_with_path(state, is_leaf=lambda x: isinstance(x, nnx.Variable))
    leaves = []
    for (key_path, variable), value in zip(variables, values, strict=True):
        path = tuple(key.key for key in key_path)
        sharding = param_sharding(mesh, variable_axes(variable, value.ndim), value.shape)
        leaves.append(Leaf(path, value.shape, np.dtype(value.dtype), sharding))
    return ModelSkeleton(family, config, graphdef, treedef, tuple(leaves), shard_heads, max_seq_len)


def rope_leaf(skeleton: ModelSkeleton, factors: np.ndarray | None, seq_len: int | None = None) -> np.ndarray:
    """Inverse frequencies [head_dim / 2], divided by a GGUF file's own factors when it has them."""
    inv_freq = skeleton.config.rope.inv_freq(seq_len or skeleton.max_seq_len)
    return inv_freq if factors is None else (inv_freq / factors.reshape(-1)).astype(np.float32)


def check_tensors(checkpoint: Checkpoint, skeleton: ModelSkeleton) -> dict[Path, str]:
    """The tensor's name in the file for each parameter; reads headers only.

    Raises CheckpointError, in one line with file and tensor, for one that is missing, left over or misshapen.
    """
    family, config = skeleton.family, skeleton.config
    table = family.name_table(config)
    names = {p: family.gguf_name(n) if checkpoint.format == "gguf" else n for p, n in table.items()}
    wanted = set(names.values())
    missing = sorted(wanted - set(checkpoint.tensors))
    if missing:
        raise CheckpointError(f"{checkpoint.path}: tensor {missing[0]} is missing ({len(missing)} in all)")
    spare = [
        name
        for name in checkpoint.tensors
        if name not in wanted and name != family.gguf_rope_factors and not family.ignored_tensor(name, config)
    ]
    if spare:
        raise CheckpointError(
            f"{checkpoint.path}: tensor {min(spare)} has no place in {config.family} "
            f"({len(spare)} such in all)"
        )
    for leaf in skeleton.leaves:
        if leaf.path == ROPE_PATH:
            continue
        ref = checkpoint.tensors[names[leaf.path]]
        if ref.shape != leaf.shape:
            raise CheckpointError(
                f"{ref.file}: tensor {ref.name} has shape {ref.shape}, expected {leaf.shape}"
            )
    return names


def load_weights(
    checkpoint: Checkpoint, skeleton: ModelSkeleton, progress: Progress | None = None
) -> Weights:
    """Read every tensor to its shard, two at a time. Raises CheckpointError (see `check_tensors`)."""
    family, config = skeleton.family, skeleton.config
    is_gguf = checkpoint.format == "gguf"
    table = family.name_table(config)
    file_names = check_tensors(checkpoint, skeleton)

    def read(leaf: Leaf) -> jax.Array:
        if leaf.path == ROPE_PATH:
            ref = checkpoint.tensors.get(family.gguf_rope_factors or "") if is_gguf else None
            factors = ref.read() if ref is not None else None
            return jax.device_put(rope_leaf(skeleton, factors), leaf.sharding)
        ref = checkpoint.tensors[file_names[leaf.path]]
        value = ref.read()
        if not jnp.issubdtype(value.dtype, jnp.floating):
            raise CheckpointError(f"{ref.file}: tensor {ref.name} holds {value.dtype}, expected floats")
        if is_gguf:
            value = family.from_gguf(table[leaf.path], value, config)
        return jax.device_put(value.astype(leaf.dtype, copy=False), leaf.sharding)

    leaves = []
    with ThreadPoolExecutor(max_workers=2, thread_name_prefix="load") as pool:
        for done, array in enumerate(pool.map(read, skeleton.leaves), start=1):
            leaves.append(array)
            if progress is not None:
                progress(done, len(skeleton.leaves))
    return tuple(leaves)


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
        found = {tuple(k.key for k in path if hasattr(k, "key")): value for path, value in pairs}
    elif isinstance(model, Mapping):
        found = _by_names(model, skeleton)
    else:
        raise ConfigError(
            f"model must be an nnx.Module, an nnx.State or named arrays, got {type(model).__name__}"
        )
    found[ROPE_PATH] = rope_leaf(skeleton, None)
    return tuple(_place(leaf, found) for leaf in skeleton.leaves)


def _by_names(arrays: Mapping[str, Any], skeleton: ModelSkeleton) -> dict[Path, Any]:
    table = skeleton.family.name_table(skeleton.config)
    by_name = {name: path for path, name in table.items()}
    spare = [n for n in arrays if n not in by_name and not skeleton.family.ignored_tensor(n, skeleton.config)]
    if spare:
        raise ConfigError(f"parameter {min(spare)} has no place in {skeleton.config.family}")
    return {by_name[name]: value for name, value in arrays.items() if name in by_name}


def _place(leaf: Leaf, found: Mapping[Path, Any]) -> jax.Array:
    name = ".".join(str(part) for part in leaf.path)
    if leaf.path not in found:
        raise ConfigError(f"parameter {name} is missing")
    value = found[leaf.path]
    if value.shape != leaf.shape:
        raise ConfigError(f"parameter {name} has shape {value.shape}, expected {leaf.shape}")
    if not jnp.issubdtype(value.dtype, jnp.floating):
        raise ConfigError(f"parameter {name} holds {value.dtype}, expected floats")
    if value.dtype != leaf.dtype:
        value = value.astype(leaf.dtype)
    return jax.device_put(value, leaf.sharding)


def named_arrays(weights: Iterable[jax.Array], skeleton: ModelSkeleton) -> dict[str, jax.Array]:
    """Hugging Face tensor names to the live arrays (the inverse of `weights_from` for named arrays)."""
    table = skeleton.family.name_table(skeleton.config)
    pairs: Sequence[tuple[Leaf, jax.Array]] = list(zip(skeleton.leaves, weights, strict=True))
    return {table[leaf.path]: array for leaf, array in pairs if leaf.path != ROPE_PATH}
