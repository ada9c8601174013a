"""`jaxserve plan` from outside: what it prints, and its exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import jax
import pytest

from jaxserve.cli.main import main
from jaxserve.plan import planning
from jaxserve.plan.planning import Target
from jaxserve.sharding import make_mesh
from pallas_kernels.aot import CompilerMissingError
from pallas_kernels.chips import chip_by_name

MIB = 1 << 20
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}
PINNED = {
    "fits",
    "topology",
    "devices",
    "weights_bytes_per_device",
    "pool_pages",
    "pool_tokens",
    "temp_bytes",
    "pool_copies",
    "collectives",
    "decode_ms_bound",
    "prefill_ms_bound",
    "tokens_per_s_bound",
    "hbm_bytes",
    "jax",
    "compiler",
}


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    for name in [name for name in os.environ if name.startswith("JAXSERVE_")]:
        monkeypatch.delenv(name)
    # Set by the command, and put back.
    for name in ("TF_CPP_MIN_LOG_LEVEL", "TPU_MIN_LOG_LEVEL"):
        monkeypatch.setenv(name, "3")


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    return path


@pytest.fixture
def cpu_of(monkeypatch):
    """Any topology is one of this process's CPU devices, with so much memory."""

    def set_memory(num_bytes):
        def of(cls, topology, tensor_parallel_size):
            mesh = make_mesh(jax.devices(), tensor_parallel_size)
            return cls(topology, chip_by_name("v6e"), mesh, num_bytes)

        monkeypatch.setattr(Target, "of", classmethod(of))

    return set_memory


def plan(config, *more):
    sizes = ["--max-num-seqs", "2", "--max-num-batched-tokens", "16", "--max-model-len", "32"]
    return main(["plan", str(config), "--topology", "v6e", *sizes, *more])


def test_json_has_the_pinned_keys_and_nothing_else_goes_to_standard_output(config, cpu_of, capsys):
    cpu_of(64 * MIB)
    assert plan(config, "--json") == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert found.keys() >= PINNED
    assert (found["fits"], found["devices"], found["hbm_bytes"]) == (True, 1, 64 * MIB)
    assert found["pool_tokens"] == found["pool_pages"] * found["page_size"] == 2 * 32
    assert "compiling the mixed step for 16 tokens in 2 rows" in err


def test_the_verdict_comes_first(config, cpu_of, capsys):
    cpu_of(64 * MIB)
    assert plan(config) == 0
    first, *rest = capsys.readouterr().out.splitlines()
    assert first.startswith("FITS: ")
    assert "a pool of 64 tokens" in first
    assert any("weights" in line for line in rest)


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_what_does_not_fit_is_exit_1_with_the_bytes_that_are_missing(config, cpu_of, capsys, flags):
    cpu_of(MIB // 128)
    assert plan(config, *flags) == 1
    out, err = capsys.readouterr()
    line = err.splitlines()[-1]
    assert line.startswith("jaxserve: error: DOES NOT FIT: ")
    if flags:
        found = json.loads(out)
        assert found["fits"] is False
        assert f"{found['missing_bytes']:,} bytes a device" in line
        assert found["missing_bytes"] > 0
    else:
        assert out.splitlines()[0] == line.removeprefix("jaxserve: error: ")


def test_a_missing_compiler_is_one_line_that_names_the_extra(config, monkeypatch, capsys):
    def missing(topology):
        raise CompilerMissingError(f"cannot compile for {topology} (pip install '.[aot]' in a clone)")

    monkeypatch.setattr(planning, "abstract_devices", missing)
    assert plan(config) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line == "jaxserve: error: cannot compile for v6e (pip install '.[aot]' in a clone)"


def test_an_unknown_topology_is_exit_1(config, capsys):
    assert main(["plan", str(config), "--topology", "abacus"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("jaxserve: error: topology 'abacus' is not known")


def test_no_device_is_looked_for(config):
    """Where JAX_PLATFORMS asks for a device that is not there, planning gets to the compiler all the same."""
    code = "import sys; from jaxserve.cli.main import main; sys.exit(main(sys.argv[1:]))"
    run = subprocess.run(
        # No such slice: refused by the compiler, and for want of one where there is none.
        [sys.executable, "-c", code, "plan", str(config), "--topology", "v6e:3x3"],
        capture_output=True,
        text=True,
        env={**os.environ, "JAX_PLATFORMS": "tpu"},
        check=False,
    )
    assert run.returncode == 1
    (line,) = run.stderr.splitlines()
    assert "v6e:3x3" in line
    assert "cannot be compiled for: INVALID_ARGUMENT" in line or "[aot]" in line
