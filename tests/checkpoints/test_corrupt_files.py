"""Corrupt files are answered with one line that names the file; nothing else ever escapes."""

from __future__ import annotations

import json
import struct
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save

from jaxserve_checkpoints import CheckpointError, open_checkpoint

pytestmark = pytest.mark.quick
GOLDENS = Path(__file__).parents[1] / "goldens"
HUGE = [2**63, 2**64 - 1, 2**32, 2**62]


def refused(path, data):
    """The message `data` is refused with, after checking its form and that little memory was taken."""
    path.write_bytes(data)
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError) as caught:
            open_checkpoint(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    message = str(caught.value)
    assert path.name in message
    assert message.isprintable()
    assert peak < 8 << 20
    return message


def read_everything(path):
    """All of a checkpoint that can be read, or the CheckpointError that says why not."""
    try:
        checkpoint = open_checkpoint(path)
        for ref in checkpoint.tensors.values():
            assert ref.read().shape == ref.shape
        for key in checkpoint.metadata:
            _ = checkpoint.metadata[key]
        checkpoint.tokenizer()
    except CheckpointError as error:
        assert str(error).isprintable()  # noqa: PT017 - the absence of any error is fine too


# --- GGUF ---------------------------------------------------------------------------------------------


def text(value):
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def pair(key, kind, value):
    return text(key) + struct.pack("<I", kind) + value


def info(name, dims, kind=0, offset=0):
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def gguf_bytes(pairs=(), infos=(), data=b"", *, counts=None, version=3, alignment=32):
    num_infos, num_pairs = counts or (len(infos), len(pairs))
    head = b"GGUF" + struct.pack("<IQQ", version, num_infos, num_pairs) + b"".join(pairs) + b"".join(infos)
    return head + bytes(-len(head) % alignment) + data


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.gguf"


def test_the_handmade_file_opens(path):
    path.write_bytes(gguf_bytes([pair("k", 8, text("v"))], [info("w", [8, 2])], bytes(64)))
    checkpoint = open_checkpoint(path)
    assert checkpoint.tensors["w"].shape == (2, 8)
    assert checkpoint.metadata["k"] == "v"


def test_truncation_at_every_byte_is_refused(path):
    """Every field, and every place inside it."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["a", "b", "é"])
    writer.add_token_types([1, 1, 3])
    writer.add_uint64("count", 3)
    writer.add_tensor("first", np.ones((2, 4), np.float32))
    writer.add_tensor("second", np.ones((1, 8), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    data = path.read_bytes()
    open_checkpoint(path)
    for length in range(len(data)):
        refused(path, data[:length])


@pytest.mark.parametrize("huge", HUGE)
def test_counts_beyond_the_file_are_refused_before_anything_is_allocated(path, huge):
    size = struct.pack("<Q", huge)
    assert "tensor count" in refused(path, gguf_bytes(counts=(huge, 0)))
    assert "key/value count" in refused(path, gguf_bytes(counts=(0, huge)))
    assert "key 0" in refused(path, gguf_bytes([size + b"k" * 64]))
    assert "k: " in refused(path, gguf_bytes([pair("k", 8, size + b"v" * 64)]))
    for kind in (0, 6, 8, 10):
        array = struct.pack("<IQ", kind, huge) + bytes(64)
        assert "k: " in refused(path, gguf_bytes([pair("k", 9, array)]))
    strings = struct.pack("<IQ", 8, 2) + text("a") + size + bytes(64)
    assert "k: " in refused(path, gguf_bytes([pair("k", 9, strings)]))
    assert "w: " in refused(path, gguf_bytes(infos=[info("w", [huge])], data=bytes(64)))
    assert "w: " in refused(path, gguf_bytes(infos=[info("w", [huge, huge, huge, huge])], data=bytes(64)))
    assert "w: " in refused(path, gguf_bytes(infos=[info("w", [4], offset=huge)], data=bytes(64)))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "the file is empty"),
        (b"GGML" + bytes(20), "not a GGUF file"),
        (gguf_bytes(version=1), "version 1"),
        (gguf_bytes(version=0x03000000), "big endian"),
        (gguf_bytes([pair("", 0, b"\0" * 16)]), "a name of 0 bytes"),
        (gguf_bytes([pair("k", 0, b"\1"), pair("k", 0, b"\1")]), "k: the key appears twice"),
        (gguf_bytes([pair("k", 99, bytes(16))]), "k: unknown value type 99"),
        (gguf_bytes([pair("k", 7, b"\2" + bytes(16))]), "k: 2 is not a bool"),
        (gguf_bytes([pair("k", 9, struct.pack("<IQ", 9, 1) + bytes(64))]), "k: array of unknown or nested"),
        (gguf_bytes([pair("k", 8, struct.pack("<Q", 1) + b"\xff")]), "k: the text at byte"),
        (gguf_bytes([struct.pack("<Q", 1) + b"\xff" + bytes(16)]), "key 0: the text at byte"),
        (
            gguf_bytes([pair("general.alignment", 4, struct.pack("<I", 24))]),
            "general.alignment: is not a power",
        ),
        (
            gguf_bytes([pair("general.alignment", 4, struct.pack("<I", 0))]),
            "general.alignment: is not a power",
        ),
        (gguf_bytes([pair("general.alignment", 8, text("8"))]), "general.alignment: is not a power"),
        (gguf_bytes(infos=[info("w", [])], data=bytes(64)), "w: 0 dimensions"),
        (gguf_bytes(infos=[info("w", [1] * 5)], data=bytes(64)), "w: 5 dimensions"),
        (gguf_bytes(infos=[info("w", [4, 0])], data=bytes(64)), "w: a dimension of [4, 0] is zero"),
        (gguf_bytes(infos=[info("w", [4], kind=4)], data=bytes(64)), "w: unknown tensor type 4"),
        (gguf_bytes(infos=[info("w", [4], kind=2**31)], data=bytes(64)), "w: unknown tensor type"),
        (
            gguf_bytes(infos=[info("w", [31], kind=2)], data=bytes(64)),
            "w: rows of 31 are not whole Q4_0 blocks",
        ),
        (gguf_bytes(infos=[info("w", [4], offset=4)], data=bytes(64)), "w: offset 4 is not a multiple of 32"),
        (
            gguf_bytes(infos=[info("w", [4]), info("w", [4], offset=32)], data=bytes(64)),
            "w: the tensor appears",
        ),
        (gguf_bytes(infos=[info("w", [16]), info("x", [4], offset=32)], data=bytes(64)), "x: overlaps"),
        (gguf_bytes(infos=[info("w", [4]), info("x", [4])], data=bytes(64)), "x: overlaps"),
        (gguf_bytes(infos=[info("w", [17])], data=bytes(64)), "w: its 68 bytes"),
        (gguf_bytes([pair("split.count", 2, struct.pack("<H", 2))]), "split.count: one of 2 parts"),
    ],
)
def test_malformed_gguf_is_refused_with_its_reason(path, data, message):
    assert message in refused(path, data)


def test_names_in_a_file_cannot_forge_lines(path):
    message = refused(path, gguf_bytes(infos=[info("w\nerror: \x1b[31mred", [0])], data=bytes(64)))
    assert "w error:  [31mred: a dimension" in message


def test_a_block_type_without_a_decoder_says_so_when_read(path):
    path.write_bytes(
        gguf_bytes(infos=[info("w", [256], kind=gguf.GGMLQuantizationType.Q8_K)], data=bytes(320))
    )
    ref = open_checkpoint(path).tensors["w"]
    with pytest.raises(CheckpointError, match="w: ggml type Q8_K has no decoder"):
        ref.read()


# --- safetensors --------------------------------------------------------------------------------------


def safetensors_bytes(header, data=b"", length=None):
    head = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(head) if length is None else length) + head + data


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


@pytest.fixture
def weights(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    return tmp_path / "model.safetensors"


def test_truncation_of_safetensors_at_every_byte_is_refused(weights):
    data = save({"a": np.ones(3, np.float32), "b": np.ones((2, 2), np.int8)}, metadata={"format": "pt"})
    for length in range(len(data)):
        refused(weights, data[:length])
    refused(weights, data + b"\0")


@pytest.mark.parametrize("huge", HUGE)
def test_a_header_length_beyond_the_file_is_refused(weights, huge):
    assert f"the header's length {huge}" in refused(weights, safetensors_bytes({}, length=huge))


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"{", "the header is not JSON"),
        (b"\xff\xfe", "the header is not JSON"),
        (b"[" * 100_000, "the header is not JSON"),
        (b"[]", "the header is not a JSON object"),
        (b'{"w": 1' + b"0" * 5000 + b"}", "the header is not JSON"),
        (b'{"w": {}, "w": {}}', "w: appears twice"),
        ({"__metadata__": {"a": 1}}, "__metadata__: is not a map of strings"),
        ({"__metadata__": 3}, "__metadata__: is not a map of strings"),
        ({"w": 3}, "w: needs exactly"),
        ({"w": {"dtype": "F32"}}, "w: needs exactly"),
        ({"w": entry("F33")}, "w: unknown dtype F33"),
        ({"w": {**entry(), "dtype": ["F32"]}}, "w: unknown dtype"),
        ({"w": entry(shape=(-2,))}, "w: shape is not"),
        ({"w": entry(shape=(True, 2))}, "w: shape is not"),
        ({"w": entry(shape=(2.0,))}, "w: shape is not"),
        ({"w": entry(shape=(1,) * 33)}, "w: shape is not"),
        ({"w": entry(offsets=(0, 8, 8))}, "w: data_offsets is not a pair"),
        ({"w": entry(offsets=(-8, 0))}, "w: data_offsets is not a pair"),
        ({"w": entry(offsets=(8, 0))}, "w: data_offsets 8:0 lie outside"),
        ({"w": entry(offsets=(0, 2**63))}, "w: data_offsets 0:9223372036854775808 lie outside"),
        ({"w": entry(shape=(3,))}, "w: F32 [3] takes 12 bytes, data_offsets give 8"),
        ({"w": entry("F64")}, "w: F64 [2] takes 16 bytes"),
        ({"w": entry(shape=(2**63, 2**63))}, "w: F32"),
        ({"v": entry(), "w": entry()}, "w: overlaps"),
        ({"v": entry(), "w": entry(shape=(1,), offsets=(4, 8))}, "w: overlaps"),
        ({"w": entry(shape=(1,), offsets=(4, 8))}, "w: leaves a hole"),
        ({"w": entry(shape=(1,), offsets=(0, 4))}, "4 bytes belong to no tensor"),
    ],
)
def test_malformed_safetensors_is_refused_with_its_reason(weights, header, message):
    assert message in refused(weights, safetensors_bytes(header, bytes(8)))


# --- fuzz ---------------------------------------------------------------------------------------------

flips = st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(1, 255)), min_size=1, max_size=4)
fuzz = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def tokenizer_json():
    """A tokenizer.json of the llama kind."""
    assets = open_checkpoint(GOLDENS / "gguf" / "f16_tok_llama" / "model.gguf").tokenizer()
    return assets.tokenizer.to_str().encode()


def flipped(data, header, places):
    """`data` with bytes of its first `header` changed; half of the places in the first 128 bytes."""
    changed = bytearray(data)
    for i, (where, mask) in enumerate(places):
        changed[int(where * (header if i % 2 else 128))] ^= mask
    return bytes(changed)


@fuzz
@given(places=flips)
@pytest.mark.parametrize("pack", ["f16_tok_gpt2", "q4_1"])
def test_flipped_bytes_of_gguf_only_ever_raise_checkpoint_errors(path, pack, places):
    data = (GOLDENS / "gguf" / pack / "model.gguf").read_bytes()
    path.write_bytes(flipped(data, 12_000, places))
    read_everything(path)


@fuzz
@given(places=flips)
def test_flipped_bytes_of_safetensors_only_ever_raise_checkpoint_errors(weights, places):
    data = (GOLDENS / "arch" / "llama_gqa" / "model.safetensors").read_bytes()
    weights.write_bytes(flipped(data, 2_000, places))
    read_everything(weights)


@fuzz
@given(
    data=st.binary(max_size=200), magic=st.sampled_from([b"", b"GGUF\3\0\0\0", b"GGUF\2\0\0\0\1" + bytes(7)])
)
def test_random_bytes_only_ever_raise_checkpoint_errors(path, weights, data, magic):
    for file in (path, weights):
        file.write_bytes(magic + data)
        read_everything(file)


@fuzz
@given(places=flips)
def test_flipped_bytes_of_a_tokenizer_file_only_ever_raise_checkpoint_errors(weights, tokenizer_json, places):
    weights.write_bytes(save({"a": np.ones(3, np.float32)}))
    (weights.parent / "tokenizer.json").write_bytes(flipped(tokenizer_json, len(tokenizer_json), places))
    read_everything(weights)
