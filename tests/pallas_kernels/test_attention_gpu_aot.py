"""The Hopper kernels of ragged paged attention, compiled for an H200 that need not be there."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pallas_kernels.aot import CompilerMissingError, abstract_devices
from pallas_kernels.pool_layout import pool_shape
from pallas_kernels.ragged_paged_attention.gpu import mosaic_gpu_attention
from pallas_kernels.ragged_paged_attention.types import AttentionSpec, Rows

pytestmark = pytest.mark.usefixtures("no_cached_programs")

FLOAT8 = jnp.float8_e4m3fn


@dataclass(frozen=True)
class Shape:
    """A model's heads and a batch's bucket."""

    name: str
    num_q_heads: int
    num_kv_heads: int
    k_dim: int
    v_dim: int
    num_tokens: int = 64
    num_seqs: int = 64
    pages_per_seq: int = 512
    page_size: int = 16
    decode_only: bool = False
    latent: bool = False
    is_windowed: bool = False
    soft_cap: float | None = None
    has_sinks: bool = False
    kv_dtype: Any = jnp.bfloat16

    @property
    def row_dim(self) -> int:
        return self.k_dim if self.latent else self.k_dim + self.v_dim


SHAPES = (
    Shape("Llama 3 8B, decode", 32, 8, 128, 128, decode_only=True),
    Shape("Llama 3 8B, mixed", 32, 8, 128, 128, num_tokens=512, num_seqs=32),
    Shape("Llama 3 8B, float8, pages of 8", 32, 8, 128, 128, page_size=8, decode_only=True, kv_dtype=FLOAT8),
    Shape("SmolLM 135M, mixed, pages of 256", 9, 3, 64, 64, page_size=256, pages_per_seq=16),
    Shape("Gemma 3 12B, window", 16, 8, 256, 256, is_windowed=True, has_sinks=True),
    Shape("one key-value head, soft cap", 71, 1, 64, 64, decode_only=True, soft_cap=50.0),
    Shape("DeepSeek V2, latent rows", 16, 1, 576, 512, page_size=64, decode_only=True, latent=True),
)
_NUM_LAYERS, _NUM_PAGES = 4, 1024


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    try:
        return Mesh(np.array(abstract_devices("h200")), ("x",))
    except CompilerMissingError as error:
        pytest.skip(str(error))


def compiled(shape: Shape, mesh: Mesh) -> Any:
    sharding = NamedSharding(mesh, PartitionSpec())

    def array(*sizes: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=sharding)

    pool = pool_shape(_NUM_LAYERS, _NUM_PAGES, shape.num_kv_heads, shape.page_size, shape.row_dim)
    k = array(shape.num_tokens, shape.num_kv_heads, shape.k_dim, dtype=jnp.bfloat16)
    arguments = (
        array(shape.num_tokens, shape.num_q_heads, shape.k_dim, dtype=jnp.bfloat16),
        k,
        None if shape.latent else array(*k.shape[:2], shape.v_dim, dtype=jnp.bfloat16),
        array(*pool, dtype=shape.kv_dtype),
        array(),
        Rows(array(shape.num_seqs), array(shape.num_seqs, shape.pages_per_seq), array(shape.num_seqs + 1)),
        array() if shape.is_windowed else None,
        array(shape.num_q_heads, dtype=jnp.float32) if shape.has_sinks else None,
    )
    spec = AttentionSpec(
        shape.k_dim**-0.5,
        soft_cap=shape.soft_cap,
        latent_v_dim=shape.v_dim if shape.latent else None,
        decode_only=shape.decode_only,
    )

    def call(q: Any, k: Any, v: Any, pool: Any, layer: Any, rows: Rows, window: Any, sinks: Any) -> Any:
        return mosaic_gpu_attention(
            q, k, v, pool, layer, rows, spec=spec, chip="h200", window=window, sinks=sinks
        )

    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return jax.jit(call, donate_argnums=3).trace(*arguments).lower().compile()


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_kernels_compile_without_spills_and_without_a_second_pool(
    shape: Shape, mesh: Mesh, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    program = compiled(shape, mesh)
    captured = capfd.readouterr()
    spills = re.findall(r"(\d+) bytes spill stores", captured.out + captured.err)
    assert len(spills) == (1 if shape.decode_only else 2)
    assert set(spills) == {"0"}

    pool_elements = _NUM_LAYERS * _NUM_PAGES * shape.num_kv_heads * shape.page_size * shape.row_dim
    pool_bytes = pool_elements * jnp.dtype(shape.kv_dtype).itemsize
    memory = program.memory_analysis()
    assert memory.alias_size_in_bytes >= pool_bytes
    assert memory.temp_size_in_bytes < pool_bytes  # no second pool
