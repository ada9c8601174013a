"""The command line's entry: which subcommand, its values, and how errors look.

Exit codes: 0; 1 with one line `jaxserve: error: ...` (a traceback only with --debug); 2 for wrong usage.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Any, NoReturn

import jaxserve
from jaxserve.cli import chat, doctor, generate, models, plan, serve
from jaxserve.cli.command import Command, Values
from jaxserve.cli.ending import end_process
from jaxserve.cli.options import UsageError, nearest, resolve, with_flag

COMMANDS: tuple[Command, ...] = (
    serve.COMMAND,
    generate.COMMAND,
    chat.COMMAND,
    plan.COMMAND,
    models.COMMAND,
    doctor.COMMAND,
)
BENCHMARKS = {"serve": "load a running server", "offline": "the engine alone, beside the roofline"}


class _Parser(argparse.ArgumentParser):
    def __init__(self, **settings: Any) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **settings)

    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code."""
    code = _run(list(sys.argv[1:] if argv is None else argv))
    end_process(code)
    return code


def _run(arguments: list[str]) -> int:
    debug = "--debug" in arguments
    try:
        return _dispatch(arguments)
    except UsageError as error:
        print(f"jaxserve: error: {error}\nSee jaxserve --help and jaxserve COMMAND --help.", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `jaxserve generate ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if debug:
            traceback.print_exc()
        print(f"jaxserve: error: {describe(error)}", file=sys.stderr)
        return 1


def describe(error: BaseException) -> str:
    """An exception in one line; the class is named where the message alone says little."""
    from jaxserve.errors import ConfigError, JaxserveError
    from jaxserve_checkpoints import CheckpointError

    text = " ".join(str(error).split())
    if isinstance(error, ConfigError):
        text = with_flag(text, _known_options() - {"model"})
    if isinstance(error, JaxserveError | CheckpointError | OSError) and text:
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _dispatch(arguments: list[str]) -> int:
    if arguments[:1] == ["bench"] and arguments[1:2] and arguments[1] in BENCHMARKS:
        # The benchmarks read their own flags.
        benchmark = importlib.import_module(f"jaxserve.bench.{arguments[1]}")
        code: int = benchmark.main(arguments[2:]) or 0
        return code
    parser, subparsers = build_parser()
    namespace, unknown = parser.parse_known_args(arguments)
    if namespace.command is None:
        parser.print_help()
        return 2
    command = next((command for command in COMMANDS if command.name == namespace.command), None)
    if command is None:
        raise UsageError(f"bench needs one of: {', '.join(BENCHMARKS)}")
    if unknown:
        flags = [flag for action in subparsers[command.name]._actions for flag in action.option_strings]
        raise UsageError(f"unknown argument {unknown[0]!r}{nearest(unknown[0].partition('=')[0], flags)}")
    given = vars(namespace)
    options = {name: option for group in command.options().values() for name, option in group.items()}
    known = _known_options() | _COMMON
    values = resolve(
        options, given, os.environ, given.get("config") or os.environ.get("JAXSERVE_CONFIG"), known
    )
    if given.get("model") is not None:
        values["model"] = given["model"]
    return command.run(Values(values, debug=given.get("debug", False)))


def _known_options() -> set[str]:
    """The names and aliases of every command's options."""
    everything = [
        option for command in COMMANDS for group in command.options().values() for option in group.values()
    ]
    return {name for option in everything for name in (option.name, *option.aliases)}


# Known to every command, and no fields of a dataclass.
_COMMON = {"model", "config", "debug"}


def build_parser() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    """The parser and its subcommands' parsers by name."""
    parser = _Parser(
        prog="jaxserve",
        description="A JAX inference engine for large language models.",
        epilog="MODEL is a path, org/name on the Hugging Face hub, or a name that `jaxserve models` lists.\n"
        "Every flag is also a variable JAXSERVE_FLAG_NAME and a key of --config FILE.yaml.",
    )
    parser.add_argument("--version", action="version", version=f"jaxserve {jaxserve.__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND")
    by_name: dict[str, argparse.ArgumentParser] = {}
    for command in COMMANDS:
        sub = subparsers.add_parser(
            command.name,
            help=command.help,
            description=command.help,
            epilog=f"examples:\n{command.examples}",
        )
        if command.takes_model:
            sub.add_argument(
                "model",
                nargs="?",
                default=argparse.SUPPRESS,
                metavar="MODEL",
                help="path, org/name or built-in name",
            )
        for title, options in command.options().items():
            group = sub.add_argument_group(title)
            for name, option in options.items():
                if name != "model":
                    option.add_to(group)
        sub.add_argument("--config", metavar="FILE.yaml", help="a file with flags as keys")
        sub.add_argument("--debug", action="store_true", help="show tracebacks")
        by_name[command.name] = sub
    bench = subparsers.add_parser(
        "bench", help="benchmarks: " + ", ".join(f"bench {name}" for name in BENCHMARKS)
    )
    bench.add_argument(
        "benchmark", choices=BENCHMARKS, help="; ".join(f"{k}: {v}" for k, v in BENCHMARKS.items())
    )
    return parser, by_name


if __name__ == "__main__":
    sys.exit(main())
