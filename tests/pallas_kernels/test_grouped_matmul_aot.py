"""The grouped matmul of published models, compiled for chips that need not be there.

Experts' weights take hundreds of megabytes: nothing may copy them, or grow with rows times experts.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pallas_kernels.aot import CompilerMissingError, abstract_devices
from pallas_kernels.chips import chip_by_name
from pallas_kernels.grouped_matmul import grouped_matmul
from pallas_kernels.grouped_matmul.cases import MODEL_SHAPES, ModelShape

pytestmark = pytest.mark.usefixtures("no_cached_programs")

GATE, DOWN, MIXTRAL = MODEL_SHAPES


def compiled(chip: str, shape: ModelShape, num_rows: int, implementation: str = "auto") -> Any:
    try:
        mesh = Mesh(np.array(abstract_devices(chip)[:1]), ("x",))
    except CompilerMissingError as error:
        pytest.skip(str(error))
    sharding = NamedSharding(mesh, PartitionSpec())

    def array(dtype: Any, *sizes: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=sharding)

    multiply = partial(
        grouped_matmul, platform=chip_by_name(chip).platform, chip=chip, implementation=implementation
    )
    experts = shape.num_experts
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return (
            jax.jit(multiply)
            .trace(
                array(jnp.bfloat16, num_rows, shape.in_features),
                array(jnp.bfloat16, experts, shape.in_features, shape.out_features),
                array(jnp.int32, experts),
            )
            .lower()
            .compile()
        )


def temporary_bytes(program: Any) -> int:
    return program.memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("chip", ["v5e", "v6e", "tpu7x"])
@pytest.mark.parametrize(
    ("shape", "num_rows"), [(GATE, 8), (GATE, 100), (DOWN, 4096), (MIXTRAL, 1024)], ids=str
)
def test_the_tpu_compiler_s_own_kernel_takes_the_matrices_as_they_lie(
    chip: str, shape: ModelShape, num_rows: int
) -> None:
    program = compiled(chip, shape, num_rows)
    assert "ragged-dot" in program.as_text()
    assert 'custom_call_target="tpu_custom_call"' in program.as_text()
    rows = num_rows * (shape.in_features + shape.out_features) * 2
    assert temporary_bytes(program) < 2 * rows + (1 << 20)


@pytest.mark.parametrize(
    ("shape", "num_rows", "most_bytes"),
    # Tiles of 64 rows, or of 128: each expert's last is in part empty.
    [(GATE, 8, 4 << 20), (DOWN, 4096, 64 << 20), (MIXTRAL, 4096, 160 << 20)],
    ids=str,
)
def test_the_hopper_kernel_compiles_and_stays_in_registers(
    shape: ModelShape,
    num_rows: int,
    most_bytes: int,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    program = compiled("h200", shape, num_rows)
    printed = "".join(capfd.readouterr())
    spills = [int(n) for n in re.findall(r"(\d+) bytes spill stores", printed)]
    assert [int(n) for n in re.findall(r"Used (\d+) registers", printed)] == [168]
    assert max(spills) == 0
    assert temporary_bytes(program) < most_bytes


def test_ragged_dot_on_gpu_is_why_there_is_a_kernel() -> None:
    weights = DOWN.num_experts * DOWN.in_features * DOWN.out_features * 2
    assert temporary_bytes(compiled("h200", DOWN, 1024, "xla")) > weights / 2
    assert temporary_bytes(compiled("h200", DOWN, 1024, "xla_loop")) < weights / 20
