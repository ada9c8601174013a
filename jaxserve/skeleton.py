"""A model without values: its structure, its leaves as a step takes them, and where files have them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.models.attention import Layout, Placement
from jaxserve.models.config import ModelConfig
from jaxserve.models.layers import PackedForm, PackedMatrix
from jaxserve.models.names import Path
from jaxserve.models.registry import Family
from jaxserve.packing import Packing
from jaxserve.sharding import HeadSharding, head_sharding, param_sharding, platform_of, variable_axes

ROPE_PATH: Path = ("rope_inv_freq",)

# A TPU's products read their matrix in a stack. CPUs and GPUs would copy it out first, every layer, every
# step. Branching to a layer's matrix costs nothing on a CPU, and a pipeline flush on a GPU.
_LAYOUTS: dict[str, Layout] = {"cpu": "looped", "gpu": "unrolled", "tpu": "stacked"}


@dataclass(frozen=True)
class PackedSize:
    """Of a packed matrix, or of one layer's of several."""

    form: PackedForm
    out_size: int
    in_size: int


@dataclass(frozen=True)
class Leaf:
    """One array: where it sits in the module, its shape, and where it lies on the mesh.

    It is a parameter, or one of the arrays that a packed matrix is made of.
    """

    path: Path
    shape: tuple[int, ...]
    dtype: np.dtype
    sharding: NamedSharding
    transposed: bool = False  # its last two dimensions are the other way round in files
    packed: PackedSize | None = None  # of the matrix that it is a part of

    @property
    def parameter(self) -> Path:
        """The path of the parameter."""
        return self.path if self.packed is None else self.path[:-1]


@dataclass(frozen=True)
class Row:
    """What is put into a parameter at once: all of it, or one layer of one that holds those of all layers.

    `names` are the tensors it is made of: one, or one for each expert, which are stacked.
    """

    path: Path  # in a module with a list of layers
    layer: int | None  # None: the whole parameter
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
    dtype: np.dtype  # of activations, and of weights but packed ones and the rope's frequencies (float32)

    @property
    def num_bytes(self) -> int:
        return sum(int(np.prod(leaf.shape)) * leaf.dtype.itemsize for leaf in self.leaves)

    @cached_property
    def rows(self) -> dict[Path, list[Row]]:
        """Of each parameter but the rope's, by its path; those of a stacked one in the layers' order."""
        paths = {leaf.parameter for leaf in self.leaves}
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
        if leaf.packed is not None:
            return leaf.packed.out_size, leaf.packed.in_size
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
    packing: Packing | None = None,
) -> ModelSkeleton:
    """The module for a mesh. `layout`: see `Placement`; None is what the mesh's platform does best."""
    platform = platform_of(mesh)
    layout = layout or (_LAYOUTS[platform] if packing is None else _packed_layout(family, config, packing))
    placement = Placement(mesh, platform, head_sharding(config, mesh), layout)
    packed: dict[Path, PackedSize] = {}

    def make() -> Any:
        module = family.module(config, dtype=jnp.dtype(dtype), placement=placement)
        if packing is not None:
            packed.update(_pack(module, packing))
        return module

    abstract = nnx.eval_shape(make)
    graphdef, state = nnx.split(abstract)
    values, treedef = jax.tree.flatten(state)
    variables = jax.tree.leaves_with_path(state, is_leaf=lambda x: isinstance(x, nnx.Variable))
    leaves = []
    for (key_path, variable), value in zip(variables, values, strict=True):
        path = tuple(key.key for key in key_path)
        sharding = param_sharding(mesh, variable_axes(variable, value.ndim), value.shape)
        transposed = bool(variable.get_metadata().get("transposed"))
        size = packed.get(path[:-1])
        leaves.append(Leaf(path, value.shape, np.dtype(value.dtype), sharding, transposed, size))
    return ModelSkeleton(
        family, config, graphdef, treedef, tuple(leaves), placement.heads, max_seq_len, np.dtype(dtype)
    )


def _packed_layout(family: Family, config: ModelConfig, packing: Packing) -> Layout:
    """Kernels read packed matrices in a stack. A float one would be copied out of it every layer and step."""
    paths = [path for path in family.name_table(config) if path[0] == "layers" and path[-1] != "bias"]
    matrices = {(path[0], *path[2:]) for path in paths if "norm" not in str(path[-2])}
    return "stacked" if matrices <= set(packing.forms) else "looped"


def _pack(module: Any, packing: Packing) -> Iterator[tuple[Path, PackedSize]]:
    """Put packed matrices in the places of float parameters; their paths and sizes."""
    for path, form in packing.forms.items():
        owners: list[tuple[Path, Any]] = [(path[:1], getattr(module, str(path[0])))]
        if isinstance(owners[0][1], nnx.List):
            owners = [((path[0], i), layer) for i, layer in enumerate(owners[0][1])]
        for start, owner in owners:
            linear = reduce(getattr, (str(part) for part in path[1:-1]), owner)
            *layers, out_size, in_size = linear.weight.shape
            linear.weight = PackedMatrix((out_size, in_size), form, packing.chip, *layers)
            yield (*start, *path[1:]), PackedSize(form, out_size, in_size)


def row_sharding(leaf: Leaf) -> NamedSharding:
    """Of one layer of a stacked leaf, which the layers' dimension does not split."""
    return NamedSharding(leaf.sharding.mesh, PartitionSpec(*leaf.sharding.spec[1:]))
