"""What a compiled step does that it should not: talk between devices, copy the pool, leave it unshared.

Read from the program's own text, since cost analyses count a loop's body once and a kernel hardly at all.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass

from jaxserve.plan.hlo_text import Array, Computation, Instruction, Module, parse

_KINDS = (
    "all-reduce",
    "all-gather",
    "all-to-all",
    "reduce-scatter",
    "collective-permute",
    "collective-broadcast",
    "ragged-all-to-all",
)
# These hand a value on, or their results are counted where they are made.
_NO_NEW_VALUE = frozenset(
    """parameter get-tuple-element tuple bitcast while conditional call optimization-barrier constant
    copy-done async-done async-update add-dependency after-all""".split()
)
# These write into their first operand. Where the compiler could not, it has put a copy before them.
_IN_PLACE = ("dynamic-update-slice", "scatter")


@dataclass(frozen=True)
class Collective:
    """One kind of exchange: how often one step runs it, and the bytes that one device puts on its links."""

    kind: str
    count: int
    num_bytes: int  # of the operands, all runs together
    link_bytes: float  # sent by each device when done in a ring
    is_lower_bound: bool  # some of them run in a loop of unknown length, which counts once


def collectives(text: str | Module) -> list[Collective]:
    """By kind. A loop's body counts as often as the loop runs; of a conditional, the branch that has most."""
    module = parse(text) if isinstance(text, str) else text
    tally = _tally(module, module.entry)
    return [tally[kind] for kind in sorted(tally)]


def _tally(module: Module, computation: Computation) -> dict[str, Collective]:
    """What one run of a computation exchanges."""
    total: dict[str, Collective] = {}

    def add(found: dict[str, Collective], times: int = 1, at_least: bool = False) -> None:
        for kind, c in found.items():
            old = total.get(kind, Collective(kind, 0, 0, 0.0, False))
            total[kind] = Collective(
                kind,
                old.count + times * c.count,
                old.num_bytes + times * c.num_bytes,
                old.link_bytes + times * c.link_bytes,
                old.is_lower_bound or c.is_lower_bound or at_least,
            )

    for instruction in computation.instructions.values():
        inside = [_tally(module, module.computations[name]) for name in module.runs_inside(instruction)]
        if instruction.opcode == "while":
            trips = module.trip_count(computation, instruction)
            for found in inside:
                add(found, 1 if trips is None else trips, at_least=trips is None)
        elif instruction.opcode == "conditional":
            every = [c for found in inside for c in found.values()]
            kinds = {c.kind for c in every}
            add({k: max((c for c in every if c.kind == k), key=lambda c: c.num_bytes) for k in kinds})
        else:
            for found in inside:
                add(found)
        kind = instruction.opcode.removesuffix("-start")
        if kind in _KINDS:
            add({kind: _collective(module, computation, instruction, kind)})
    return total


def _collective(module: Module, computation: Computation, instruction: Instruction, kind: str) -> Collective:
    size = sum(a.num_bytes for name in instruction.operands for a in computation.arrays(name))
    if kind == "all-reduce":  # its operands may be wider than what it gives
        size = min(size, sum(array.num_bytes for _, array in _results(computation, instruction)))
    return Collective(kind, 1, size, _link_bytes(kind, size, _group_size(instruction, module)), False)


def _group_size(instruction: Instruction, module: Module) -> int:
    """Devices that exchange with one another."""
    text = instruction.attributes
    if match := re.search(r"replica_groups=\{\{([\d,]+)\}", text):
        return len(match[1].split(","))
    if match := re.search(r"replica_groups=\[\d+,(\d+)\]", text):
        return int(match[1])
    if match := re.search(r"replica_groups=\w+\[([^\]]*)\]\s*\{([^}]*)\}", text):
        sizes = dict(re.findall(r"'([^']+)'=(\d+)", match[1]))
        return math.prod(int(sizes[axis]) for axis in re.findall(r"'([^']+)'", match[2]))
    partitions = re.search(r"num_partitions=(\d+)", module.header)
    return int(partitions[1]) if partitions else 1


def _link_bytes(kind: str, size: int, group: int) -> float:
    """What a device must send: `size` are the bytes of its operand."""
    if kind == "all-reduce":
        return 2 * size * (group - 1) / group
    if kind == "all-gather":
        return size * (group - 1)
    if kind in ("reduce-scatter", "all-to-all", "ragged-all-to-all"):
        return size * (group - 1) / group
    return size


def pool_copies(text: str | Module, pool_dims: tuple[int, ...]) -> list[str]:
    """Instructions that make a value as large as the pool, or as one layer of it, in place of updating it.

    `pool_dims` are those of one device's part, the layers first. Whatever has as many elements counts,
    in whatever dtype and shape.
    """
    module = parse(text) if isinstance(text, str) else text
    sizes = {math.prod(pool_dims), math.prod(pool_dims[1:])}
    found = []
    for computation in _unfused(module):
        for instruction in computation.instructions.values():
            large = [i for i, array in _results(computation, instruction) if array.size in sizes]
            if large and _makes_new(module, instruction, large):
                found.append(instruction.name)
    return found


def _unfused(module: Module) -> list[Computation]:
    """Computations whose instructions have results in memory: all but the insides of fusions."""
    inside = {
        name
        for computation in module.computations.values()
        for instruction in computation.instructions.values()
        if instruction.opcode in ("fusion", "reduce", "scatter", "sort", "reduce-window", "map", "all-reduce")
        for name in instruction.called()
    }
    return [computation for name, computation in module.reached().items() if name not in inside]


def _results(computation: Computation, instruction: Instruction) -> list[tuple[int, Array]]:
    """The arrays it gives, with their places; the start of an asynchronous one names its operands first."""
    skip = 0
    if instruction.opcode.endswith("-start"):
        skip = sum(len(computation.arrays(name)) for name in instruction.operands)
    return list(enumerate(instruction.arrays))[skip:]


def _makes_new(module: Module, instruction: Instruction, places: list[int]) -> bool:
    if instruction.opcode in _NO_NEW_VALUE or instruction.opcode in _IN_PLACE:
        return False
    shared = _shared_outputs(instruction)
    root = None
    if instruction.opcode == "fusion":
        fused = module.computations[instruction.called_as("calls") or ""]
        root = fused.root
    for place in places:
        if place in shared:
            continue
        if root is None:
            return True
        made = fused.instructions[root.operands[place]] if root.opcode == "tuple" else root
        if not _updates_parameter(fused, made):
            return True
    return False


def _shared_outputs(instruction: Instruction) -> set[int]:
    """Places of results that share memory with an operand, as a kernel or a fusion declares it."""
    match = re.search(r"output_to_operand_aliasing=\{(.*?\))\}", instruction.attributes)
    if match is None:
        return set()
    return {int(place or 0) for place in re.findall(r"\{(\d*)\}: \(", match[1])}


def _updates_parameter(fused: Computation, made: Instruction) -> bool:
    """Whether a fusion's result is its own operand, or that operand with something written into it."""
    while made.opcode == "bitcast":
        made = fused.instructions[made.operands[0]]
    if made.opcode == "parameter":
        return True
    if made.opcode not in _IN_PLACE:
        return False
    return _updates_parameter(fused, fused.instructions[made.operands[0]])


def aliased_parameters(text: str | Module) -> dict[tuple[int, ...], int]:
    """Place of an output -> number of the donated parameter whose memory it takes over."""
    module = parse(text) if isinstance(text, str) else text
    match = re.search(r"input_output_alias=\{(.*?\)) \}", module.header)
    pairs = re.findall(r"\{([\d, ]*)\}: \((\d+),", match[1]) if match else []
    return {tuple(int(n) for n in re.findall(r"\d+", place)): int(number) for place, number in pairs}


def is_pool_aliased(text: str | Module, pool_dims: tuple[int, ...]) -> bool:
    """Whether a donated parameter of the pool's shape comes back in its own memory."""
    module = parse(text) if isinstance(text, str) else text
    entry = module.entry.instructions.values()
    parameters = {i.argument: i.arrays for i in entry if i.opcode == "parameter"}
    return any(
        parameters[str(number)][0].dims == tuple(pool_dims) for number in aliased_parameters(module).values()
    )


def custom_calls(text: str | Module) -> dict[str, int]:
    """Target -> how many such calls the program holds: kernels, libraries, the compiler's own helpers."""
    module = parse(text) if isinstance(text, str) else text
    found: Counter[str] = Counter()
    for computation in module.reached().values():
        for instruction in computation.instructions.values():
            target = re.search(r'custom_call_target="([^"]*)"', instruction.attributes)
            if instruction.opcode == "custom-call" and target:
                found[target[1]] += 1
    return dict(found)
