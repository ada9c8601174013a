"""`jaxserve plan`: will a model fit, what does its step compile to, how fast can it be; without hardware."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from jaxserve.cli.command import Command, Values
from jaxserve.cli.options import UsageError
from jaxserve.cli.terminal import console

if TYPE_CHECKING:
    from jaxserve.batch import Bucket
    from jaxserve.plan.planning import Progress


@dataclass(frozen=True)
class PlanOptions:
    topology: str = field(
        default="", metadata={"help": "chips to compile for: v6e:2x4, v5e-8, h200, h200:4, ..."}
    )
    json: bool = field(default=False, metadata={"help": "print one JSON object"})
    buckets: str = field(
        default="largest",
        metadata={
            "help": "steps to compile: the largest decode and mixed one, or all that an engine may run",
            "choices": ("largest", "all"),
        },
    )
    context: int | None = field(
        default=None,
        metadata={"help": "tokens of each request in the decode bound (default: half of the longest)"},
    )


def _groups() -> Mapping[str, type]:
    from jaxserve.engine_args import EngineArgs

    return {"plan": PlanOptions, "engine": EngineArgs}


def run(values: Values) -> int:
    """Print the plan. Exit code 1, with an error line beside it, where the model does not fit."""
    options = values.make(PlanOptions)
    if not options.topology:
        raise UsageError("plan needs --topology, as in --topology v6e:2x4")
    if options.context is not None and options.context < 1:
        raise UsageError(f"--context must be at least 1, got {options.context}")
    # Before jax is imported: nothing runs on a device here, and none may be waited for. The compilers' own
    # logs name no file of ours; what matters of them comes back as an error.
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ.setdefault("TPU_MIN_LOG_LEVEL", "3")
    from jaxserve.engine_args import EngineArgs
    from jaxserve.errors import ConfigError
    from jaxserve.plan.planning import make_plan
    from jaxserve.plan.report import show, to_json, verdict
    from pallas_kernels.aot import CompilerMissingError

    args = values.make(EngineArgs)
    try:
        with _progress() as progress:
            plan = make_plan(
                args,
                options.topology,
                largest_only=options.buckets == "largest",
                context=options.context,
                progress=progress,
            )
    except CompilerMissingError as error:
        raise ConfigError(str(error)) from error
    if options.json:
        print(json.dumps(to_json(plan), indent=2))
    else:
        show(plan, console())
    if not plan.fits:
        print(f"jaxserve: error: {verdict(plan)}", file=sys.stderr)
        return 1
    return 0


@contextmanager
def _progress() -> Iterator[Progress]:
    """A bar on standard error where that is a terminal, else a line for each step."""
    if not sys.stderr.isatty():
        yield lambda bucket, i, n: print(f"{_compiling(bucket, i)} ({i + 1} of {n})", file=sys.stderr)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("reading the model", total=None)

        def update(bucket: Bucket, i: int, n: int) -> None:
            bar.update(task, description=_compiling(bucket, i), completed=i, total=n)

        yield update


def _compiling(bucket: Bucket, i: int) -> str:
    kind = "decode" if bucket.decode_only else "mixed"
    purpose = "" if i else ", to size the pool"
    return f"compiling the {kind} step for {bucket.num_tokens} tokens in {bucket.num_rows} rows{purpose}"


COMMAND = Command(
    name="plan",
    help="will a model fit a topology, what does its step compile to, what can it reach; no hardware needed",
    examples="""\
  jaxserve plan org/name --topology v6e:2x4 -tp 8
  jaxserve plan directory-with-config.json --topology h200 --max-model-len 8192 --json
  jaxserve plan model.gguf --topology v5e:2x2 -tp 4 --buckets all

  MODEL may be a config.json or a directory that holds only that.
  The compilers: pip install '.[aot]' in a clone.
  Exit code 1 where the model does not fit (--json prints its object all the same, with "fits": false).""",
    run=run,
    groups=_groups,
)
