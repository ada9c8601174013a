"""The server end to end on the accelerator at hand, with a random model of a real model's shape.

Run before this process touches the device: a server is another process, and takes it.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

# Llama-3.2-1B's shape with a small vocabulary, and one that a CPU runs in no time.
SHAPES = {
    "1B": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
    },
    "tiny": {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 8},
}
_VOCAB = 8192


def write_model(directory: Path, shape: str) -> None:
    """config.json and random bfloat16 weights, as Hugging Face lays them out."""
    from safetensors.numpy import save_file

    sizes = SHAPES[shape]
    heads, hidden = sizes["num_attention_heads"], sizes["hidden_size"]
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **sizes,
        "num_key_value_heads": heads // 4,
        "head_dim": 64,
        "vocab_size": _VOCAB,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
    }
    (directory / "config.json").write_text(json.dumps(config))
    rng = np.random.default_rng(0)

    def matrix(rows: int, columns: int) -> np.ndarray:
        return (rng.standard_normal((rows, columns), np.float32) * columns**-0.5).astype(ml_dtypes.bfloat16)

    ones = np.ones(hidden, ml_dtypes.bfloat16)
    tensors = {"model.embed_tokens.weight": matrix(_VOCAB, hidden), "model.norm.weight": ones}
    kv, inner = heads // 4 * 64, sizes["intermediate_size"]
    for i in range(sizes["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        for name, rows, columns in (
            ("self_attn.q_proj", heads * 64, hidden),
            ("self_attn.k_proj", kv, hidden),
            ("self_attn.v_proj", kv, hidden),
            ("self_attn.o_proj", hidden, heads * 64),
            ("mlp.gate_proj", inner, hidden),
            ("mlp.up_proj", inner, hidden),
            ("mlp.down_proj", hidden, inner),
        ):
            tensors[f"{layer}.{name}.weight"] = matrix(rows, columns)
        tensors[f"{layer}.input_layernorm.weight"] = ones
        tensors[f"{layer}.post_attention_layernorm.weight"] = ones
    save_file(tensors, directory / "model.safetensors")


def check_server(directory: Path, *, clients: int, max_tokens: int, wait_s: float) -> dict[str, Any]:
    """Start the server, complete `clients` prompts at once and alone, and say what was seen."""
    port = _free_port()
    command = [sys.executable, "-m", "jaxserve.cli.main", "serve", str(directory), "--port", str(port)]
    command += ["--max-model-len", "2048", "--max-num-seqs", str(clients)]
    log = (directory / "server.log").open("w")
    started = time.perf_counter()
    server = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env={**os.environ})
    try:
        base = f"http://127.0.0.1:{port}"
        _wait_until_ready(server, base, directory / "server.log", wait_s)
        ready = time.perf_counter() - started
        rng = np.random.default_rng(1)
        prompts = [rng.integers(1, _VOCAB, int(n)).tolist() for n in rng.integers(5, 400, clients)]
        first = [_complete(base, directory, p, 4) for p in prompts[:1]]  # compiles what is left
        begun = time.perf_counter()
        with ThreadPoolExecutor(clients) as pool:
            together = list(pool.map(lambda p: _complete(base, directory, p, max_tokens), prompts))
        seconds = time.perf_counter() - begun
        lengths = [answer["usage"]["completion_tokens"] for answer in together]
        again = _complete(base, directory, prompts[0], 4)
        if lengths != [max_tokens] * clients:
            raise AssertionError(f"completion lengths {sorted(set(lengths))} for {max_tokens}")
        if again["choices"][0]["logprobs"]["tokens"] != first[0]["choices"][0]["logprobs"]["tokens"]:
            raise AssertionError("the same greedy request gave other tokens")
        return {"ready_s": ready, "tokens_per_s": sum(lengths) / seconds, "clients": clients}
    finally:
        server.terminate()
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            server.kill()
        log.close()


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def _wait_until_ready(server: subprocess.Popen[bytes], base: str, log: Path, wait_s: float) -> None:
    end = time.monotonic() + wait_s
    while time.monotonic() < end:
        if server.poll() is not None:
            break
        try:
            with urllib.request.urlopen(f"{base}/ready", timeout=2):
                return
        except OSError:
            time.sleep(0.2)
    raise AssertionError(f"the server did not come up: {log.read_text()[-400:]}")


def _complete(base: str, directory: Path, prompt: list[int], max_tokens: int) -> dict[str, Any]:
    body = {
        "model": str(directory),
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": 1,
    }
    request = urllib.request.Request(
        f"{base}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=300) as response:
        answer: dict[str, Any] = json.load(response)
        return answer
