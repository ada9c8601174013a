"""The mesh, and where each array lies on it. One device is a mesh of one."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxserve.errors import ConfigError
from jaxserve.models.config import ModelConfig
from jaxserve.models.layers import MODEL_AXIS

DATA_AXIS = "data"


def make_mesh(devices: Sequence[jax.Device], tensor_parallel_size: int) -> Mesh:
    """Mesh (data = 1, model = tensor_parallel_size) over the first devices.

    Raises ConfigError when there are not enough.
    """
    if tensor_parallel_size < 1 or tensor_parallel_size > len(devices):
        raise ConfigError(
            f"tensor_parallel_size must be between 1 and the number of devices ({len(devices)}), "
            f"got {tensor_parallel_size}"
        )
    grid = np.array(devices[:tensor_parallel_size]).reshape(1, tensor_parallel_size)
    return Mesh(grid, (DATA_AXIS, MODEL_AXIS), axis_types=(AxisType.Auto, AxisType.Auto))


def platform_of(mesh: Mesh) -> str:
    """ "cpu", "gpu" or "tpu": what a program for the mesh is compiled for."""
    platform = mesh.devices.flat[0].platform
    return {"cuda": "gpu", "rocm": "gpu"}.get(platform, platform)


def splits_heads(config: ModelConfig, mesh: Mesh) -> bool:
    """Whether attention is split over the model axis; with heads that do not divide, each device does all."""
    return config.num_kv_heads % mesh.shape[MODEL_AXIS] == 0


def param_sharding(mesh: Mesh, axes: tuple[str | None, ...], shape: tuple[int, ...]) -> NamedSharding:
    """A dimension that its axis does not divide is kept whole."""
    fitting = [
        a if a is not None and n % mesh.shape[a] == 0 else None for a, n in zip(axes, shape, strict=True)
    ]
    return NamedSharding(mesh, PartitionSpec(*fitting))


def variable_axes(variable: nnx.Variable, ndim: int) -> tuple[str | None, ...]:
    """The mesh axes a parameter was declared with; none for foreign modules that declare none."""
    axes = variable.get_metadata().get("mesh_axes")
    return tuple(axes) if axes is not None else (None,) * ndim
