"""`jaxserve generate`: continue texts, to standard output, as they come."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from jaxserve.cli.command import Command, Values
from jaxserve.cli.ending import leave_running
from jaxserve.cli.options import UsageError
from jaxserve.cli.terminal import note, show
from jaxserve.sampling_params import SamplingParams

if TYPE_CHECKING:
    from jaxserve.async_engine import AsyncLLMEngine


_CLOSE_SECONDS = 1.0


def _option(default: Any, text: str, **more: Any) -> Any:
    return field(default=default, metadata={"help": text, **more})


@dataclass(frozen=True)
class SamplingOptions:
    """The sampling flags; None is the model's generation_config, then the default of `SamplingParams`."""

    max_tokens: int = _option(128, "at most this many tokens")
    temperature: float | None = _option(None, "0 is greedy; default: the model's own, else 1")
    top_p: float | None = _option(None, "sample from the likeliest tokens of this total probability")
    top_k: int | None = _option(None, "sample from this many of the likeliest tokens; 0 is all")
    min_p: float | None = _option(None, "leave out tokens less likely than this share of the likeliest")
    repetition_penalty: float | None = _option(None, "above 1: against tokens that have occurred")
    stop: tuple[str, ...] = _option((), "end before this text; repeatable", metavar="TEXT")
    ignore_eos: bool = _option(False, "go on after the end-of-text token")

    def params(self, defaults: Mapping[str, Any]) -> SamplingParams:
        """With `defaults` from the model."""
        chosen = {
            name: defaults[name]
            for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
            if name in defaults
        }
        asked = {name: getattr(self, name) for name in chosen.keys() | _MODEL_FIELDS}
        chosen |= {name: value for name, value in asked.items() if value is not None}
        return SamplingParams(
            max_tokens=self.max_tokens, stop=list(self.stop), ignore_eos=self.ignore_eos, **chosen
        )


_MODEL_FIELDS = frozenset({"temperature", "top_p", "top_k", "min_p", "repetition_penalty"})


@dataclass(frozen=True)
class GenerateOptions(SamplingOptions):
    prompt: tuple[str, ...] = _option(
        (), "the text to continue; - reads standard input; repeatable", aliases=("-p",), metavar="TEXT"
    )


def _groups() -> Mapping[str, type]:
    from jaxserve.engine_args import EngineArgs

    return {"generation": GenerateOptions, "engine": EngineArgs}


def run(values: Values) -> int:
    """All prompts run at once; their texts are printed in order, the first one while it comes."""
    options = values.make(GenerateOptions)
    if not options.prompt:
        raise UsageError("generate needs -p TEXT, or -p - to read standard input")
    prompts = [sys.stdin.read() if prompt == "-" else prompt for prompt in options.prompt]
    with loaded_engine(values) as engine:
        asyncio.run(_generate(engine, prompts, options.params(engine.default_sampling_params)))
    if "profile" in values.given:
        from jaxserve.profiling import how_to_open

        print(how_to_open(values.given["profile"]), file=sys.stderr)
    return 0


@contextmanager
def loaded_engine(values: Values) -> Iterator[AsyncLLMEngine]:
    """The engine that the flags describe, stopped at the end."""
    engine = _load(values)
    closing = threading.Thread(target=engine.shutdown, daemon=True)
    try:
        yield engine
    finally:
        closing.start()
        # A trace that is still being written is what was asked for.
        closing.join(None if "profile" in values.given else _CLOSE_SECONDS)
        leave_running(closing)  # a program that nobody will use may still be compiled in the background


def _load(values: Values) -> AsyncLLMEngine:
    from jaxserve.engine_args import EngineArgs

    args = values.make(EngineArgs)
    start = time.monotonic()
    note(f"loading {args.model} ...", end="\r")
    from jaxserve.async_engine import AsyncLLMEngine

    engine = AsyncLLMEngine.from_engine_args(args, report=_note_mode)
    note(f"loaded {args.model} in {time.monotonic() - start:.1f} s")
    return engine


def _note_mode(line: str) -> None:
    """Of what an engine says while it starts, what explains its speed and its numbers."""
    if line.startswith("mode: "):
        note(line)


async def _generate(engine: AsyncLLMEngine, prompts: Sequence[str], params: SamplingParams) -> None:
    start = time.monotonic()
    num_tokens = 0
    streams = [engine.add_request(prompt, params) for prompt in prompts]
    for number, (prompt, stream) in enumerate(zip(prompts, streams, strict=True), 1):
        if len(prompts) > 1:
            show(f"--- {number} ---\n", style="dim")
        show(prompt, style="dim")
        shown = 0
        async for output in stream:
            choice = output.outputs[0]
            show(choice.text[shown:])
            shown = len(choice.text)
        num_tokens += choice.num_tokens
        show("\n")
    seconds = time.monotonic() - start
    note(f"{num_tokens} tokens in {seconds:.1f} s, {num_tokens / seconds:.1f} tokens/s")


COMMAND = Command(
    name="generate",
    help="continue texts, streaming to standard output",
    examples="""\
  jaxserve generate -p "The capital of France is" --max-tokens 16 --temperature 0
  jaxserve generate org/name -p "First" -p "Second"
  cat story.txt | jaxserve generate -p - --max-tokens 200""",
    run=run,
    groups=_groups,
)
