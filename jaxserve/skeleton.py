"""A model without values: its structure, its leaves as a step takes them, and where files have them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.models.attention import Layout, Placement
from jaxserve.models.config import ModelConfig
from jaxserve.models.names import Path
from jaxserve.models.registry import Family
from jaxserve.sharding import HeadSharding, head_sharding, param_sharding, platform_of, variable_axes

ROPE_PATH: Path = ("rope_inv_freq",)

# A TPU's products read their matrix in a stack. CPUs and GPUs would copy it out first, every layer, every
# step. Branching to a layer's matrix costs nothing on a CPU, and a pipeline flush on a GPU.
_LAYOUTS: dict[str, Layout] = {"cpu": "looped", "gpu": "unrolled", "tpu": "stacked"}


@dataclass(frozen=True)
class Leaf:
    """One parameter: where it sits in the module, its shape, and where it lies on the mesh."""

    path: Path
    shape: tuple[int, ...]
    dtype: np.dtype
    sharding: NamedSharding
    transposed: bool = False  # its last two dimensions are the other way round in files


@dataclass(frozen=True)
class Row:
    """What is put into a leaf at once: all of it, or one layer of a leaf that holds those of all layers.

    `names` are the tensors it is made of: one, or one for each expert, which are stacked.
    """

    path: Path  # in a module with a list of layers
    layer: int | None  # None: the whole leaf
    names: tuple[str, ...]
    of_experts: bool

    @property
    def label(self) -> str:
        return ".".join(str(part) for part in self.path)


@dataclass(frozen=True)
class ModelSkeleton:
    """A family's module without values: its structure and its leaves in flattening order."""

    family: Family
    config: ModelConfig
    graphdef: Any
    treedef: jax.tree_util.PyTreeDef
    leaves: tuple[Leaf, ...]
    heads: HeadSharding
    max_seq_len: int  # fixes the frequencies of dynamic rope

    @property
    def dtype(self) -> np.dtype:
        """Of weights and activations; the rope's frequencies alone are float32 always."""
        return next(leaf.dtype for leaf in self.leaves if leaf.path != ROPE_PATH)

    @property
    def num_bytes(self) -> int:
        return sum(int(np.prod(leaf.shape)) * leaf.dtype.itemsize for leaf in self.leaves)

    @cached_property
    def rows(self) -> dict[Path, list[Row]]:
        """Of each leaf but the rope's, by the leaf's path; those of a stacked leaf in the layers' order."""
        paths = {leaf.path for leaf in self.leaves}
        names: dict[Path, list[str]] = {}
        experts = set()
        for path, name in self.family.name_table(self.config).items():
            if isinstance(path[-1], int):
                path = path[:-1]
                experts.add(path)
            names.setdefault(path, []).append(name)
        rows: dict[Path, list[Row]] = {}
        for path, found in names.items():
            layer = None if path in paths else int(path[1])
            leaf = path if layer is None else (path[0], *path[2:])
            rows.setdefault(leaf, []).append(Row(path, layer, tuple(found), path in experts))
        return rows

    def file_shape(self, leaf: Leaf, row: Row) -> tuple[int, ...]:
        """The shape that files give each tensor of a row."""
        shape = leaf.shape if row.layer is None else leaf.shape[1:]
        shape = shape[1:] if row.of_experts else shape
        return (*shape[:-2], shape[-1], shape[-2]) if leaf.transposed else shape


def build_skeleton(
    family: Family,
    config: ModelConfig,
    dtype: np.dtype,
    mesh: Mesh,
    max_seq_len: int,
    layout: Layout | None = None,
) -> ModelSkeleton:
    """The module for a mesh. `layout`: see `Placement`; None is what the mesh's platform does best."""
    platform = platform_of(mesh)
    layout = layout or _LAYOUTS[platform]
    placement = Placement(mesh, platform, head_sharding(config, mesh), layout)
    abstract = nnx.eval_shape(lambda: family.module(config, dtype=jnp.dtype(dtype), placement=placement))
    graphdef, state = nnx.split(abstract)
    values, treedef = jax.tree.flatten(state)
    variables = jax.tree.leaves_with_path(state, is_leaf=lambda x: isinstance(x, nnx.Variable))
    leaves = []
    for (key_path, variable), value in zip(variables, values, strict=True):
        path = tuple(key.key for key in key_path)
        sharding = param_sharding(mesh, variable_axes(variable, value.ndim), value.shape)
        transposed = bool(variable.get_metadata().get("transposed"))
        leaves.append(Leaf(path, value.shape, np.dtype(value.dtype), sharding, transposed))
    return ModelSkeleton(family, config, graphdef, treedef, tuple(leaves), placement.heads, max_seq_len)


def row_sharding(leaf: Leaf) -> NamedSharding:
    """Of one layer of a stacked leaf, which the layers' dimension does not split."""
    return NamedSharding(leaf.sharding.mesh, PartitionSpec(*leaf.sharding.spec[1:]))
