"""How far the fast mode's logits are from the exact mode's, on ordinary text of this repository.

The same windows of tokens go through the model twice: with `quantization="none"` (exact float32, which equals
the goldens) and as --quantization says. For each position:
  KL          sum of p * (log p - log q) over the vocabulary, p exact and q fast, in nats
  same top    whether both find the same token likeliest
  perplexity  of each mode, of the text's own next tokens within a window
The text is LICENSE, README.md, ARCHITECTURE.md and docs/*.md in equal parts, cut into windows of their own
context; --text takes other files. The result is 1 where mean KL or the share of the same top token is beyond
its limit.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve import LLM
from jaxserve.engine_args import DEFAULT_MODEL

ROOT = Path(__file__).parents[1]
EXAMPLES = """\
examples:
  python benchmarks/quality.py                           the default model, auto against none, 4,096 tokens
  python benchmarks/quality.py --quantization int8
  python benchmarks/quality.py --chunk 1 --tokens 512    one token at a time, as decoding computes them
  python benchmarks/quality.py --model model.gguf --text book.txt --tokens 8192 --window 1024"""


@dataclass
class Positions:
    """What was found at each position; `next_*` where the window has a next token."""

    kl: np.ndarray  # float64 [num_tokens], nats
    same_top: np.ndarray  # bool [num_tokens]
    next_exact: np.ndarray  # float64 [num_tokens - 1], log-probability of the text's next token
    next_fast: np.ndarray

    @classmethod
    def of(cls, exact: np.ndarray, fast: np.ndarray, ids: Sequence[int]) -> Positions:
        """From logits [num_tokens, vocab] of both modes."""
        p, q = log_softmax(exact), log_softmax(fast)
        at = np.arange(len(ids) - 1), np.asarray(ids[1:])
        kl = np.sum(np.exp(p) * (p - q), axis=-1)
        return cls(kl, exact.argmax(-1) == fast.argmax(-1), p[at], q[at])

    @classmethod
    def joined(cls, parts: Sequence[Positions]) -> Positions:
        names = cls.__dataclass_fields__
        return cls(*[np.concatenate([getattr(part, name) for part in parts]) for name in names])

    def summary(self) -> dict[str, float]:
        return {
            "tokens": len(self.kl),
            "kl_mean": float(self.kl.mean()),
            "kl_p50": float(np.quantile(self.kl, 0.5)),
            "kl_p99": float(np.quantile(self.kl, 0.99)),
            "same_top": float(self.same_top.mean()),
            "perplexity_exact": math.exp(-self.next_exact.mean()),
            "perplexity_fast": math.exp(-self.next_fast.mean()),
        }


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """float64 [..., vocab]."""
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def windows(files: Sequence[Path], llm: LLM, window: int, tokens: int) -> Iterator[tuple[str, list[int]]]:
    """(file's name, token ids): windows of each file in turn, until `tokens` are together or all are used."""
    assert llm.tokenizer is not None
    left = {}
    for file in files:
        ids = llm.tokenizer.encode(file.read_text("utf-8"))
        left[file.name] = [ids[at : at + window] for at in range(0, len(ids) - window + 1, window)]
    done = 0
    while done < tokens and any(left.values()):
        for name, pieces in left.items():
            if pieces and done < tokens:
                done += window
                yield name, pieces.pop(0)


def load(args: argparse.Namespace, quantization: str, chunk: int) -> LLM:
    def report(line: str) -> None:
        print(f"  {line}", file=sys.stderr, flush=True)

    print(f"loading {args.model} with quantization {quantization}", file=sys.stderr, flush=True)
    settings = {"max_num_seqs": 1, "max_num_batched_tokens": chunk, "max_model_len": args.window}
    return LLM(args.model, quantization=quantization, warmup="none", report=report, **settings)


def compare(args: argparse.Namespace, files: Sequence[Path]) -> dict[str, Any]:
    """Summaries of all text and of each file."""
    parts: dict[str, list[Positions]] = {}
    with load(args, "none", args.window) as exact, load(args, args.quantization, args.chunk) as fast:
        for number, (name, ids) in enumerate(windows(files, exact, args.window, args.tokens), 1):
            found = Positions.of(exact.logits(ids), fast.logits(ids), ids)
            parts.setdefault(name, []).append(found)
            share = f"KL {found.kl.mean():.2e}, same top token {found.same_top.mean():.1%}"
            print(f"window {number}, {len(ids)} tokens of {name}: {share}", file=sys.stderr, flush=True)
    if not parts:
        raise SystemExit(f"quality.py: error: no file has {args.window} tokens: give a smaller --window")
    everything = Positions.joined([part for several in parts.values() for part in several])
    return {
        "all": everything.summary(),
        "files": {name: Positions.joined(several).summary() for name, several in parts.items()},
    }


def table(result: dict[str, Any]) -> str:
    """Markdown."""
    lines = [
        "| text | tokens | KL mean | KL p50 | KL p99 | same top token | perplexity exact / fast |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, s in {**result["files"], "all": result["all"]}.items():
        lines.append(
            f"| {name} | {s['tokens']} | {s['kl_mean']:.2e} | {s['kl_p50']:.2e} | {s['kl_p99']:.2e} "
            f"| {s['same_top']:.2%} | {s['perplexity_exact']:.3f} / {s['perplexity_fast']:.3f} |"
        )
    return "\n".join(lines)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=DEFAULT_MODEL, help=f"default: {DEFAULT_MODEL}")
    parser.add_argument("--quantization", default="auto", help="the mode to judge: auto, int8 or none (auto)")
    parser.add_argument("--tokens", type=int, default=4096, help="4096")
    parser.add_argument("--window", type=int, default=512, help="tokens of context (512)")
    parser.add_argument("--chunk", type=int, help="tokens that the judged mode computes at once (--window)")
    parser.add_argument("--text", type=Path, action="append", metavar="FILE", help="repeatable")
    parser.add_argument("--max-kl", type=float, default=0.01, help="most mean KL (0.01)")
    parser.add_argument("--min-same-top", type=float, default=0.97, help="least share of positions (0.97)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    return parser


def main() -> int:
    args = build_parser().parse_args()
    args.chunk = args.chunk or args.window
    named = [ROOT / name for name in ("LICENSE", "README.md", "ARCHITECTURE.md")]
    own = [*named, *sorted((ROOT / "docs").glob("*.md"))]
    result = compare(args, args.text or own)
    if args.json:
        settings = {name: str(value) for name, value in vars(args).items() if value is not None}
        args.json.write_text(json.dumps({"settings": settings, **result}, indent=1) + "\n")
    print(table(result))
    everything = result["all"]
    is_good = everything["kl_mean"] <= args.max_kl and everything["same_top"] >= args.min_same_top
    verdict = "within" if is_good else "beyond"
    print(f"{verdict} the limits: mean KL {args.max_kl}, same top token {args.min_same_top:.0%}")
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
