"""The TPU kernels of ragged paged attention, compiled for chips that need not be there.

`benchmarks/aot_kernels.py` does all shapes and chips; here are those that differ most, within CI's time.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.plan.hlo import is_pool_aliased, pool_copies
from pallas_kernels.aot import CompilerMissingError, abstract_devices
from pallas_kernels.ragged_paged_attention.cases import REAL_CASES
from pallas_kernels.ragged_paged_attention.problem import abstract_inputs, make_call

pytestmark = [pytest.mark.quick, pytest.mark.usefixtures("no_cached_programs")]
CASES = {case.name: case for case in REAL_CASES}
# (chip, case, most bytes of code). The code was a tenth smaller when this was written: a kernel
# that grows is one whose loops were written out, or whose products became something else. A v6e has no float8
# instructions, and takes many to read them.
PROGRAMS = (
    ("v5e", "Llama-3-8B, decode", 400_000),
    ("v6e", "Llama-3-8B on 8, decode", 240_000),
    ("v6e", "Llama-3-8B, mixed", 2_600_000),
    ("v6e", "an int8 pool in pages of 8, decode", 520_000),
    ("v6e", "a float8 pool, decode", 1_300_000),
    ("v6e", "SmolLM2-135M, decode", 320_000),
    ("v6e", "values shorter, decode", 900_000),
    ("v6e", "DeepSeek latent on 8, mixed", 4_000_000),
    ("tpu7x", "gpt-oss-20b, decode", 440_000),
    ("tpu7x", "Gemma-3-12B, decode", 700_000),
)


def compiled(chip: str, name: str, *, layout_of: str = "tpu") -> tuple[Any, tuple[int, ...]]:
    """The program, and the pool's shape."""
    try:
        mesh = Mesh(np.array(abstract_devices(chip)[:1]), ("x",))
    except CompilerMissingError as error:
        pytest.skip(str(error))
    case = CASES[name]
    avals = abstract_inputs(case, layout_of, NamedSharding(mesh, PartitionSpec()))
    call = make_call(case, decode_only=case.is_decode, platform="tpu", chip=chip)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return jax.jit(call, donate_argnums=3).trace(*avals).lower().compile(), avals[3].shape


@pytest.mark.parametrize(("chip", "name", "most_code"), PROGRAMS, ids=lambda value: str(value))
def test_kernels_compile_and_the_pool_is_neither_copied_nor_kept_twice(
    chip: str, name: str, most_code: int
) -> None:
    program, pool = compiled(chip, name)
    text = program.as_text()
    assert pool_copies(text, pool) == []
    assert is_pool_aliased(text, pool)
    memory = program.memory_analysis()
    assert memory.temp_size_in_bytes < 0.03 * 16 * 2**30  # 3% of the smallest chip's memory
    assert memory.generated_code_size_in_bytes < most_code


def test_the_check_sees_a_pool_that_is_copied() -> None:
    """Rows that do not fill whole lanes (see `pool_layout`): XLA keeps such a pool transposed."""
    program, pool = compiled("v6e", "Phi-3-mini, decode", layout_of="gpu")
    assert pool[-1] == 192
    assert pool_copies(program.as_text(), pool)
