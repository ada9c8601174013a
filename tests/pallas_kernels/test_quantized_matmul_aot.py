"""The quantised matmul compiled for chips that need not be there: what is made whole, and what it costs.

The sizes of Llama-3-8B's gate projection, whose weight is 117 MB in bfloat16 and 29 MB in int4.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pallas_kernels.aot import CompilerMissingError, abstract_devices
from pallas_kernels.chips import chip_by_name
from pallas_kernels.quantized_matmul import QuantizedWeight, mosaic_gpu, quantized_matmul
from pallas_kernels.quantized_matmul.cases import REAL_CASES, Case
from pallas_kernels.quantized_matmul.weight import out_is_last

pytestmark = pytest.mark.usefixtures("no_cached_programs")

TPUS = ("v5e", "v6e", "tpu7x")
CASES = {case.name.removeprefix("Llama-3-8B "): case for case in REAL_CASES}
BF16_WEIGHT_BYTES = 4096 * 14336 * 2


def compiled(chip: str, case: Case, multiply: Callable[..., jax.Array]) -> Any:
    """multiply(x, weight), compiled; a case of 16 bits has a plain bfloat16 matrix for its weight."""
    try:
        mesh = Mesh(np.array(abstract_devices(chip)[:1]), ("x",))
    except CompilerMissingError as error:
        pytest.skip(str(error))
    sharding = NamedSharding(mesh, PartitionSpec())

    def array(dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    size = case.group_size or case.in_features
    groups, out = case.in_features // size, case.out_features
    last = out_is_last(chip_by_name(chip).platform)
    shape = (groups, size, out) if last else (groups, out, size)
    scales = array(jnp.bfloat16, groups, out)
    weight: Any = QuantizedWeight(
        array(jnp.int4 if case.bits == 4 else jnp.int8, *shape), scales, scales if case.zeros else None
    )
    if case.bits == 16:
        weight = array(jnp.bfloat16, case.in_features, out)
    x = array(jnp.bfloat16, case.num_tokens, case.in_features)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return jax.jit(multiply).trace(x, weight).lower().compile()


def by_name(chip: str, implementation: str = "auto") -> Callable[..., jax.Array]:
    platform = chip_by_name(chip).platform
    return partial(quantized_matmul, platform=platform, chip=chip, implementation=implementation)


def temporary_bytes(program: Any) -> int:
    return program.memory_analysis().temp_size_in_bytes


def estimated_cycles(program: Any) -> int:
    """Of all of a program's operations, as the TPU compiler reckons."""
    text = program.as_text()
    return sum(map(int, re.findall(r'"estimated_cycles":"(\d+)"', text[text.index("ENTRY") :])))


def dequantise_reshape_dot(x: jax.Array, weight: QuantizedWeight) -> jax.Array:
    """What not to do."""
    dense = weight.values.astype(jnp.float32) * weight.scales.astype(jnp.float32)[:, None]
    return jnp.dot(x, dense.reshape(-1, dense.shape[2]).astype(x.dtype))


def scale_products(x: jax.Array, weight: QuantizedWeight) -> jax.Array:
    """The form that scales each group's product, in XLA."""
    groups = weight.scales.shape[0]
    parts = jnp.einsum(
        "bgk,gkn->bgn",
        x.reshape(x.shape[0], groups, -1),
        weight.values.astype(x.dtype),
        preferred_element_type=jnp.float32,
    )
    return (parts * weight.scales.astype(jnp.float32)[None]).sum(axis=1).astype(x.dtype)


@pytest.mark.parametrize("chip", TPUS)
@pytest.mark.parametrize("name", ["gate int4 g128, 1 tokens", "gate int8 per channel, 32 tokens"])
def test_xla_never_makes_the_weight_whole(chip: str, name: str) -> None:
    assert temporary_bytes(compiled(chip, CASES[name], by_name(chip, "xla"))) < BF16_WEIGHT_BYTES / 100


@pytest.mark.parametrize("chip", TPUS)
def test_dequantising_before_a_reshape_does(chip: str) -> None:
    program = compiled(chip, CASES["gate int4 g128, 32 tokens"], dequantise_reshape_dot)
    assert temporary_bytes(program) >= BF16_WEIGHT_BYTES


@pytest.mark.parametrize("chip", TPUS)
def test_with_many_tokens_xla_costs_about_what_bfloat16_does(chip: str) -> None:
    case = Case("gate, an eighth of its channels", 512, 4096, 1792, 128)
    program = compiled(chip, case, by_name(chip))
    assert temporary_bytes(program) < BF16_WEIGHT_BYTES / 8 / 10
    plain = compiled(chip, Case("", 512, 4096, 1792, None, bits=16), jnp.dot)
    assert 0 < estimated_cycles(program) < 1.6 * estimated_cycles(plain)
    if chip == "v5e":  # slow to compile
        assert estimated_cycles(compiled(chip, case, scale_products)) > 4 * estimated_cycles(plain)


@pytest.mark.parametrize("chip", TPUS)
@pytest.mark.parametrize(
    "case",
    [CASES["gate int4 g128, 32 tokens"], Case("down with zero points", 128, 14336, 4096, 128, zeros=True)],
    ids=lambda case: case.name,
)
def test_with_few_tokens_the_kernel_serves(chip: str, case: Case) -> None:
    program = compiled(chip, case, by_name(chip))
    assert 'custom_call_target="tpu_custom_call"' in program.as_text()
    assert temporary_bytes(program) < BF16_WEIGHT_BYTES / 100


@pytest.mark.parametrize(
    ("case", "most_registers"),
    [
        (CASES["gate int4 g128, 1 tokens"], 96),
        (CASES["gate int4 g128, 32 tokens"], 96),
        (CASES["gate int4 g128, 512 tokens"], 168),
        (CASES["down int4 g128, 32 tokens"], 96),
        (CASES["gate int8 per channel, 32 tokens"], 96),
        (CASES["gate int8 per channel, 512 tokens"], 168),
        (Case("groups of 32 with zero points", 1, 4096, 14336, 32, zeros=True), 96),
        (Case("int8 in groups of 64", 32, 4096, 14336, 64, bits=8), 96),
        (Case("ragged channels", 300, 256, 200, 128), 168),
    ],
    ids=lambda value: value.name if isinstance(value, Case) else "",
)
def test_the_hopper_kernel_compiles_and_stays_in_registers(
    case: Case, most_registers: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    program = compiled("h200", case, by_name("h200", "mosaic_gpu"))
    printed = "".join(capfd.readouterr())
    registers = [int(n) for n in re.findall(r"Used (\d+) registers", printed)]
    spills = [int(n) for n in re.findall(r"(\d+) bytes spill stores", printed)]
    assert registers
    assert max(registers) <= most_registers
    # With one to eight tokens, what jax 0.12 emits spills three registers before its loop.
    assert max(spills) <= 16
    # Parts of the product are all that there is beside the arguments.
    x = jnp.zeros((case.num_tokens, case.in_features), jnp.bfloat16)
    size = case.group_size or case.in_features
    values = np.zeros((case.in_features // size, case.out_features, size), np.int8)
    kind = jnp.int4 if case.bits == 4 else jnp.int8
    weight = QuantizedWeight(jax.ShapeDtypeStruct(values.shape, kind), None, True if case.zeros else None)
    plan = mosaic_gpu.make_plan(x, weight, 132)
    tokens = -(-case.num_tokens // plan.tile_tokens) * plan.tile_tokens
    parts = plan.splits * case.out_features * tokens * jnp.dtype(plan.out_dtype).itemsize
    assert temporary_bytes(program) < 1.2 * parts + (1 << 20)
