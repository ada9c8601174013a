"""GGUF tensors equal what gguf-py and ggml read from the same files."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest

from jaxserve_checkpoints import CheckpointError, open_checkpoint

pytestmark = pytest.mark.quick
GOLDENS = Path(__file__).parents[1] / "goldens"
PACKS = sorted(path.name for path in (GOLDENS / "gguf").iterdir())


@pytest.mark.parametrize("pack", PACKS)
def test_every_tensor_has_the_golden_shape_type_and_sums(pack):
    meta = json.loads((GOLDENS / "gguf" / pack / "meta.json").read_text())
    tensors = open_checkpoint(GOLDENS / "gguf" / pack / "model.gguf").tensors
    assert set(tensors) == set(meta["dequant_sums"])
    plain = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
    for name, expected in meta["dequant_sums"].items():
        ref = tensors[name]
        assert ref.dtype == plain.get(expected["type"], expected["type"])
        assert list(ref.shape) == expected["shape"]
        values = ref.read().astype(np.float64)
        assert values.shape == ref.shape
        flat = values.ravel()
        sums = flat.sum(), np.abs(flat).sum(), (flat * np.cos(np.arange(flat.size))).sum()
        wanted = expected["sum"], expected["abs_sum"], expected["wsum"]
        np.testing.assert_allclose(sums, wanted, rtol=1e-6, atol=1e-6 * expected["abs_sum"])


@pytest.mark.parametrize("pack", PACKS)
def test_rows_equal_the_golden_rows(pack):
    golden = np.load(GOLDENS / "gguf" / pack / "golden.npz")
    tensors = open_checkpoint(GOLDENS / "gguf" / pack / "model.gguf").tensors
    rows = [key for key in golden if key.startswith("rows/")]
    assert rows
    for key in rows:
        values = tensors[key.removeprefix("rows/")].read().astype(np.float32)
        np.testing.assert_array_equal(values[[0, 1, -1]], golden[key])


def test_metadata_equals_what_gguf_py_reads(goldens):
    path = goldens / "gguf" / "f16_tok_llama" / "model.gguf"
    metadata = open_checkpoint(path).metadata
    reader = gguf.GGUFReader(path)
    expected = {key: f.contents() for key, f in reader.fields.items() if not key.startswith("GGUF.")}
    assert set(metadata) == set(expected)
    for key, value in expected.items():
        found = metadata[key]
        assert (found.tolist() if isinstance(found, np.ndarray) else found) == value


def test_plain_types_view_the_file_and_are_read_only(goldens):
    ref = open_checkpoint(goldens / "gguf" / "bf16" / "model.gguf").tensors["blk.0.attn_q.weight"]
    first, second = ref.read(), ref.read()
    assert np.shares_memory(first, second)
    assert np.shares_memory(first, ref.raw())
    assert not first.flags.writeable


def test_raw_gives_the_blocks_at_rest(goldens):
    path = goldens / "gguf" / "q4_1" / "model.gguf"
    ref = open_checkpoint(path).tensors["blk.0.ffn_up.weight"]
    (expected,) = [t for t in gguf.GGUFReader(path).tensors if t.name == ref.name]
    np.testing.assert_array_equal(ref.raw(), np.asarray(expected.data).ravel())
    assert ref.nbytes == expected.n_bytes


def write_gguf(path, tensors, alignment=32, **metadata):
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_custom_alignment(alignment)
    for key, (method, value) in metadata.items():
        getattr(writer, method)(key.replace("__", "."), value)
    for name, array in tensors.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("alignment", [8, 32, 256])
def test_every_number_type_and_alignment_is_read(tmp_path, alignment):
    arrays = {
        f"t{i}": np.arange(6).astype(dtype).reshape(2, 3)
        for i, dtype in enumerate([np.int8, np.int16, np.int32, np.int64, np.float64, np.float32, np.float16])
    }
    path = tmp_path / "all.gguf"
    metadata = {
        "a__u8": ("add_uint8", 200),
        "a__i64": ("add_int64", -(2**40)),
        "a__f64": ("add_float64", 0.1),
        "a__flags": ("add_array", [True, False]),
        "a__names": ("add_array", ["é", "", "x y"]),
    }
    write_gguf(path, arrays, alignment=alignment, **metadata)
    checkpoint = open_checkpoint(path)
    for name, array in arrays.items():
        np.testing.assert_array_equal(checkpoint.tensors[name].read(), array)
        assert checkpoint.tensors[name].dtype == array.dtype.name
    read = checkpoint.metadata
    assert (read["a.u8"], read["a.i64"], read["a.f64"]) == (200, -(2**40), 0.1)
    assert read["a.names"] == ["é", "", "x y"]
    np.testing.assert_array_equal(read["a.flags"], [True, False])


def test_a_tensor_of_many_chunks_equals_gguf_py(tmp_path):
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 255, (3001, 34), dtype=np.uint8)
    blocks[:, :2] = rng.normal(size=3001).astype(np.float16)[:, None].view(np.uint8)
    path = tmp_path / "large.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    rows = np.tile(blocks.reshape(1, -1), (5, 1))  # 480,160 values in rows of 96,032
    writer.add_tensor("w", rows, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    expected = gguf.dequantize(rows, gguf.GGMLQuantizationType.Q8_0)
    np.testing.assert_array_equal(open_checkpoint(path).tensors["w"].read(), expected)


def test_a_split_set_opens_from_any_part_and_from_its_directory(tmp_path):
    tensors = {f"blk.{i}.w": np.full((4, 8), i, np.float32) for i in range(3)}
    parts = [tmp_path / f"m-{i + 1:05}-of-00003.gguf" for i in range(3)]
    for i, part in enumerate(parts):
        split = {"split__no": ("add_uint16", i), "split__count": ("add_uint16", 3)}
        write_gguf(
            part, {f"blk.{i}.w": tensors[f"blk.{i}.w"]}, **split, split__tensors__count=("add_int32", 3)
        )
    for path in (*parts, tmp_path):
        read = open_checkpoint(path).tensors
        assert set(read) == set(tensors)
        for name, array in tensors.items():
            np.testing.assert_array_equal(read[name].read(), array)
    parts[1].unlink()
    with pytest.raises(CheckpointError, match=r"m-00002-of-00003\.gguf: No such file"):
        open_checkpoint(parts[0])


def test_end_ids_become_the_generation_config(goldens):
    assert open_checkpoint(goldens / "gguf" / "f32" / "model.gguf").generation_config == {"eos_token_id": [2]}
