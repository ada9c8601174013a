"""The mesh, and where each array lies on it. One device is a mesh of one."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

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


class HeadSharding(Enum):
    """How attention's heads lie on the devices of the model axis."""

    WHOLE = "whole"  # each device computes all heads and holds the whole pool
    SPLIT = "split"  # each has its own query heads and their key-value heads
    REPEATED = "repeated"  # each has its own query heads and the one key-value head they share with others

    @property
    def axis(self) -> str | None:
        """The mesh axis of query heads and of the pool's heads."""
        return None if self is HeadSharding.WHOLE else MODEL_AXIS

    @property
    def kv_axis(self) -> str | None:
        """The mesh axis of the heads of new keys and values, as k_proj and v_proj make them."""
        return MODEL_AXIS if self is HeadSharding.SPLIT else None


def head_sharding(config: ModelConfig, mesh: Mesh) -> HeadSharding:
    """What the numbers of heads allow; heads that do not divide are whole on each device."""
    num_devices = mesh.shape[MODEL_AXIS]
    if config.num_kv_heads % num_devices == 0:
        return HeadSharding.SPLIT
    # A device's query heads then belong to one key-value head.
    if num_devices % config.num_kv_heads == 0 and config.num_heads % num_devices == 0:
        return HeadSharding.REPEATED
    return HeadSharding.WHOLE


def num_pool_heads(config: ModelConfig, mesh: Mesh) -> int:
    """Key-value heads in the pool, over all devices that share it."""
    if head_sharding(config, mesh) is HeadSharding.REPEATED:
        return mesh.shape[MODEL_AXIS]  # each of the model's as often as devices need it, side by side
    return config.num_kv_heads


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
