"""safetensors directories open with the arrays that the safetensors library reads."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxserve_checkpoints import CheckpointError, open_checkpoint

pytestmark = pytest.mark.quick
GOLDENS = Path(__file__).parents[1] / "goldens"
ARCHS = sorted(path.name for path in (GOLDENS / "arch").glob("llama_*"))


@pytest.mark.parametrize("pack", ARCHS)
def test_a_directory_opens_with_its_config_and_every_array(pack):
    checkpoint = open_checkpoint(GOLDENS / "arch" / pack)
    assert checkpoint.format == "safetensors"
    assert checkpoint.config == json.loads((GOLDENS / "arch" / pack / "config.json").read_text())
    assert (dict(checkpoint.metadata), checkpoint.generation_config) == ({}, {})
    expected = load_file(GOLDENS / "arch" / pack / "model.safetensors")
    assert set(checkpoint.tensors) == set(expected)
    for name, array in expected.items():
        ref = checkpoint.tensors[name]
        assert (ref.shape, ref.dtype, ref.nbytes) == (array.shape, array.dtype.name, array.nbytes)
        np.testing.assert_array_equal(ref.read(), array)


DTYPES = [
    *(np.float64, np.float32, np.float16, np.int64, np.int32, np.int16, np.int8),
    *(np.uint64, np.uint32, np.uint16, np.uint8, np.bool_),
    *(ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2),
]
ARRAYS = {np.dtype(t).name: np.arange(6).reshape(2, 3).astype(t) for t in DTYPES}
EDGES = {"scalar": np.array(3, np.float32), "empty": np.zeros((0, 4), np.float32)}


@pytest.fixture
def directory(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def test_every_dtype_is_a_view_of_the_file(directory):
    save_file({**ARRAYS, **EDGES}, directory / "model.safetensors", metadata={"format": "pt"})
    tensors = open_checkpoint(directory).tensors
    for name, array in {**ARRAYS, **EDGES}.items():
        found = tensors[name].read()
        assert (found.dtype, found.shape) == (array.dtype, array.shape)
        np.testing.assert_array_equal(found, array)
        assert not found.flags.writeable
        assert found.size == 0 or np.shares_memory(found, tensors[name].raw())


def test_one_file_opens_with_the_config_beside_it(directory):
    save_file(ARRAYS, directory / "weights.safetensors")
    by_file = open_checkpoint(directory / "weights.safetensors")
    assert set(by_file.tensors) == set(open_checkpoint(directory).tensors) == set(ARRAYS)
    assert by_file.config == {}


@pytest.fixture
def sharded(directory):
    """Two shards and their index: `a`, `b` in the first, `c` in the second."""
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    save_file({"a": np.ones(2, np.float32), "b": np.zeros((1, 2), np.int8)}, directory / first)
    save_file({"c": np.full(3, 7, np.float16)}, directory / second)
    write_index(directory, {"a": first, "b": first, "c": second})
    return directory


def write_index(directory, weight_map):
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_shards_open_as_one(sharded):
    tensors = open_checkpoint(sharded).tensors
    assert list(tensors) == ["a", "b", "c"]
    np.testing.assert_array_equal(tensors["c"].read(), np.full(3, 7, np.float16))
    assert tensors["c"].file.name == "model-00002-of-00002.safetensors"


def refused(path, *parts):
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path)
    message = str(caught.value)
    assert "\n" not in message
    assert all(part in message for part in parts), message


def test_a_missing_shard_names_it_and_a_tensor(sharded):
    (sharded / "model-00002-of-00002.safetensors").unlink()
    refused(sharded, "index.json", "c: its shard model-00002-of-00002.safetensors is missing")


def test_a_tensor_that_is_not_in_its_shard_is_named(sharded):
    write_index(sharded, {"a": "model-00002-of-00002.safetensors"})
    refused(sharded, "index.json", "a: not in its shard model-00002-of-00002.safetensors")


def test_a_tensor_in_two_shards_is_named(sharded):
    save_file(
        {"a": np.ones(2, np.float32), "c": np.ones(1, np.int8)}, sharded / "model-00002-of-00002.safetensors"
    )
    refused(sharded, "a: lies in both")


def test_a_truncated_shard_names_shard_and_tensor(sharded):
    shard = sharded / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    refused(sharded, "model-00002-of-00002.safetensors: c: ")


@pytest.mark.parametrize("shard", ["../x.safetensors", "/etc/passwd", "", "..", 3, None])
def test_a_shard_outside_the_directory_is_refused(sharded, shard):
    write_index(sharded, {"a": shard})
    refused(sharded, "a: shard", "is not a file name")


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"weight_map": 1}', '{"weight_map": {"a": "x", "a": "y"}}']
)
def test_a_malformed_index_is_one_line(sharded, text):
    (sharded / "model.safetensors.index.json").write_text(text)
    refused(sharded, "model.safetensors.index.json")


def test_directories_without_weights_say_what_is_missing(directory):
    refused(directory, "holds no .safetensors and no .gguf file")
    (directory / "pytorch_model.bin").write_bytes(b"x")
    refused(directory, "pytorch_model.bin: pickled weights are never read")


def test_ambiguous_directories_are_refused(directory, goldens):
    for name in ("a.gguf", "b.gguf"):
        shutil.copy(goldens / "gguf" / "q4_0" / "model.gguf", directory / name)
    refused(directory, "2 .gguf files")
    for name in ("a.safetensors", "b.safetensors"):
        save_file(ARRAYS, directory / name)
    refused(directory, "2 .safetensors files and no model.safetensors.index.json")


def test_a_missing_or_malformed_config_is_named(directory):
    save_file(ARRAYS, directory / "model.safetensors")
    (directory / "config.json").write_text('{"a": 1, "a": 2}')
    refused(directory, "config.json: a: appears twice")
    (directory / "config.json").unlink()
    refused(directory, "config.json: No such file")


def test_other_files_are_refused(directory):
    refused(directory / "config.json", "not a directory, .safetensors or .gguf file")
    refused(directory / "absent.gguf", "no such file")
