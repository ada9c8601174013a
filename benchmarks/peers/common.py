"""What the peers' scripts share. The trace is read from its file: their environments have no jaxserve."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

TRACE_FILE = Path(__file__).parents[2] / "jaxserve" / "bench" / "trace.py"


def load_trace_module() -> ModuleType:
    spec = importlib.util.spec_from_file_location("jaxserve_trace", TRACE_FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def parse_arguments(description: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("model", type=Path, help="a .gguf file")
    parser.add_argument(
        "--concurrency", default="1,8,32", type=lambda text: [int(c) for c in text.split(",")]
    )
    parser.add_argument("--n", type=int, default=48)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def report(name: str, concurrency: int, requests: int, wall: float, output: int, prompt: int) -> None:
    print(
        f"{name} c={concurrency} n={requests} wall={wall:.1f}s "
        f"out={output / wall:.1f} tok/s total={(output + prompt) / wall:.1f} tok/s",
        flush=True,
    )
