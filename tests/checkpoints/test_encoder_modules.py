"""What sentence-transformers' files beside the weights say, and what is wrong with them in one line."""

from __future__ import annotations

import json
import shutil

import pytest

from jaxserve_checkpoints import CheckpointError, open_checkpoint

pytestmark = pytest.mark.quick
TYPE = "sentence_transformers.models."


@pytest.fixture
def directory(goldens, tmp_path):
    for name in ("config.json", "model.safetensors"):
        shutil.copy(goldens / "arch" / "llama_gqa" / name, tmp_path)
    return tmp_path


def entry(kind, path=""):
    return {"idx": 0, "name": "0", "path": path, "type": TYPE + kind}


def test_modules_come_in_order_with_their_configs(directory):
    modules = [entry("Transformer"), entry("Pooling", "1_Pooling"), entry("Normalize", "2_Normalize")]
    (directory / "modules.json").write_text(json.dumps(modules))
    (directory / "1_Pooling").mkdir()
    (directory / "1_Pooling" / "config.json").write_text('{"pooling_mode_lasttoken": true}')
    found = open_checkpoint(directory).encoder_modules()
    assert [module.kind for module in found] == ["Transformer", "Pooling", "Normalize"]
    assert [module.config for module in found] == [{}, {"pooling_mode_lasttoken": True}, {}]
    assert found == open_checkpoint(directory / "model.safetensors").encoder_modules()


def test_without_a_list_there_are_no_modules(directory, goldens):
    assert open_checkpoint(directory).encoder_modules() is None
    assert open_checkpoint(goldens / "gguf" / "f32").encoder_modules() is None


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "{}",
        "[",
        "[[[[",
        '"x"',
        "[1]",
        "[{}]",
        '[{"type": 3}]',
        '[{"type": ""}]',
        json.dumps([{**entry("Pooling"), "path": 3}]),
        json.dumps([entry("Pooling", "../elsewhere")]),
        json.dumps([entry("Pooling", "1_Pooling/../../elsewhere")]),
        json.dumps([entry("Pooling", "/tmp")]),
        json.dumps([entry("Pooling", "C:\\x")]),
        json.dumps([entry("Pooling", "a\0b")]),
        json.dumps([entry("Pooling", "a\nb")]),
        '[{"type": "a", "type": "b"}]',
        "[" * 100_000,
    ],
)
def test_a_malformed_list_is_one_line_that_names_the_file(directory, text):
    (directory / "modules.json").write_text(text)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(directory).encoder_modules()
    assert "modules.json" in str(caught.value)
    assert str(caught.value).isprintable()


def test_a_malformed_config_of_a_module_is_named(directory):
    (directory / "modules.json").write_text(json.dumps([entry("Pooling", "1_Pooling")]))
    (directory / "1_Pooling").mkdir()
    (directory / "1_Pooling" / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"1_Pooling.config\.json: the file is not a JSON object"):
        open_checkpoint(directory).encoder_modules()
