"""A tensor's packed parts are what gguf-py dequantises, still packed."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType as Kind
from gguf.quants import dequantize, quantize

from jaxserve_checkpoints import PackedParts, TensorRef, open_checkpoint

pytestmark = pytest.mark.quick
KINDS = {"Q4_0": (4, False), "Q4_1": (4, True), "Q8_0": (8, False)}


def tensor(path: Path, kind: str, blocks: np.ndarray) -> TensorRef:
    """blocks: uint8 [out, bytes of a row]"""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("weight", blocks, raw_dtype=Kind[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return open_checkpoint(path).tensors["weight"]


def whole(parts: PackedParts, bits: int) -> np.ndarray:
    """By the formula in the class's text, float32 [out, in]."""
    scales = parts.scales.astype(np.float32).repeat(32, axis=1)
    values = parts.values.astype(np.float32)
    if parts.mins is None:
        return scales * (values - (8 if bits == 4 else 128))
    return scales * values + parts.mins.astype(np.float32).repeat(32, axis=1)


@pytest.mark.parametrize("kind", KINDS)
def test_parts_put_together_are_what_the_formats_own_library_reads(kind: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    blocks = quantize(rng.standard_normal((23, 96)).astype(np.float32), Kind[kind])
    ref = tensor(tmp_path / "a.gguf", kind, blocks)
    assert ref.packing is not None
    assert (ref.packing.bits, ref.packing.has_mins) == KINDS[kind]
    parts = ref.packed()
    assert parts.values.dtype == np.uint8
    assert parts.scales.dtype == np.float16
    assert parts.scales.shape == (23, 3)
    assert parts.values.max() < 1 << ref.packing.bits
    np.testing.assert_array_equal(whole(parts, ref.packing.bits), dequantize(blocks, Kind[kind]))


@pytest.mark.parametrize("kind", KINDS)
def test_any_bytes_have_parts(kind: str, tmp_path: Path) -> None:
    """Scales may be inf, NaN or huge: what stands in the file is what is given."""
    rng = np.random.default_rng(2)
    width = gguf.GGML_QUANT_SIZES[Kind[kind]][1]
    blocks = rng.integers(0, 256, (64, 4 * width), np.uint8)
    blocks[0, 0:2], blocks[1, 0:2] = [0x00, 0x7C], [0x01, 0x7E]  # inf and NaN
    parts = tensor(tmp_path / "a.gguf", kind, blocks).packed()
    assert np.isinf(parts.scales[0, 0])
    assert np.isnan(parts.scales[1, 0])
    with np.errstate(all="ignore"):
        expected = dequantize(blocks, Kind[kind])
        np.testing.assert_array_equal(whole(parts, KINDS[kind][0]), expected)


def test_other_types_have_no_parts(tmp_path: Path) -> None:
    blocks = quantize(np.ones((4, 64), np.float32), Kind.Q5_0)
    ref = tensor(tmp_path / "a.gguf", "Q5_0", blocks)
    assert ref.packing is None
    with pytest.raises(ValueError, match="weight: Q5_0"):
        ref.packed()
