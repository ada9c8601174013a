"""Compiled HLO, parsed from its text: computations, their instructions, and how often each one runs."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field

_BYTES = {
    "pred": 1, "s4": 0.5, "u4": 0.5, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "s32": 4, "u32": 4, "s64": 8,
    "u64": 8, "bf16": 2, "f16": 2, "f32": 4, "f64": 8, "c64": 8, "c128": 16,
}  # fmt: skip
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,<=]*)\]")
_COMPUTATION = re.compile(r"(ENTRY )?%?([\w.-]+) \(.*\{")
_INSTRUCTION = re.compile(r"\s+(ROOT )?%?([\w.-]+) = ")
_CALLED = re.compile(
    r"\b(?:calls|to_apply|body|condition|true_computation|false_computation|called_computations"
    r"|branch_computations)=\{?((?:%[\w.-]+(?:, )?)+)"
)


@dataclass(frozen=True)
class Array:
    """An array's type, a device's part of it. f8 types of every flavour are a byte."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.dims)

    @property
    def num_bytes(self) -> int:
        width = 1 if self.dtype.startswith("f8") else _BYTES.get(self.dtype, 0)  # tokens and opaques: 0
        return math.ceil(self.size * width)


@dataclass(frozen=True)
class Instruction:
    name: str
    arrays: tuple[Array, ...]  # the result; of a tuple, its leaves in order
    opcode: str
    operands: tuple[str, ...]
    argument: str  # what stands between the parentheses: operands, a constant, a parameter's number
    attributes: str
    is_root: bool

    def called(self) -> list[str]:
        """Names of the computations it mentions."""
        return [
            name for group in _CALLED.findall(self.attributes) for name in re.findall(r"%([\w.-]+)", group)
        ]

    def called_as(self, key: str) -> str | None:
        match = re.search(rf"\b{key}=%([\w.-]+)", self.attributes)
        return match[1] if match else None


@dataclass
class Computation:
    name: str
    instructions: dict[str, Instruction] = field(default_factory=dict)

    @property
    def root(self) -> Instruction:
        return next(i for i in self.instructions.values() if i.is_root)

    def arrays(self, name: str) -> tuple[Array, ...]:
        return self.instructions[name].arrays

    def through(self, name: str) -> Instruction:
        """The instruction that `name` stands for, seen through those that change no value."""
        found = self.instructions[name]
        while found.opcode in ("copy", "bitcast", "copy-done", "copy-start"):
            found = self.instructions[found.operands[0]]
        return found

    def constant(self, name: str) -> int | None:
        found = self.through(name)
        is_integer = found.opcode == "constant" and re.fullmatch(r"-?\d+", found.argument)
        return int(found.argument) if is_integer else None

    def carried(self, name: str) -> int | None:
        """Which element of the computation's own parameter `name` is: a value that a loop carries."""
        found = self.through(name)
        index = re.search(r"\bindex=(\d+)", found.attributes)
        if found.opcode != "get-tuple-element" or index is None:
            return None
        return int(index[1]) if self.through(found.operands[0]).opcode == "parameter" else None


@dataclass
class Module:
    header: str
    computations: dict[str, Computation]
    entry: Computation

    def runs_inside(self, instruction: Instruction) -> list[str]:
        """Names of the computations that an instruction runs; the end of an asynchronous one runs nothing."""
        return [] if instruction.opcode.endswith(("-done", "-update")) else instruction.called()

    def reached(self) -> dict[str, Computation]:
        """Every computation that the entry may run, fusions too, by name."""
        found: dict[str, Computation] = {}
        waiting = [self.entry.name]
        while waiting:
            name = waiting.pop()
            if name not in found:
                found[name] = self.computations[name]
                for instruction in found[name].instructions.values():
                    waiting += self.runs_inside(instruction)
        return found

    def trip_count(self, computation: Computation, loop: Instruction) -> int | None:
        """How often a while loop runs: as the compiler noted it, else from its counter.

        None where the counter's start, step and limit are not constants.
        """
        known = re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.attributes)
        if known:
            return int(known[1])
        condition = self.computations[loop.called_as("condition") or ""]
        body = self.computations[loop.called_as("body") or ""]
        start = computation.through(loop.operands[0])
        compare, end = condition.root, body.root
        if start.opcode != "tuple" or end.opcode != "tuple" or "direction=LT" not in compare.attributes:
            return None

        def constant(where: Computation, name: str) -> int | None:
            """What `name` is in every round: a constant in the loop, or one that the loop was given."""
            i = where.carried(name)
            if i is None:
                return where.constant(name)
            return computation.constant(start.operands[i]) if body.carried(end.operands[i]) == i else None

        counter = condition.carried(compare.operands[0])
        if counter is None:
            return None
        add = body.through(end.operands[counter])
        steps = [constant(body, name) for name in add.operands if body.carried(name) != counter]
        first, limit = computation.constant(start.operands[counter]), constant(condition, compare.operands[1])
        if add.opcode != "add" or len(steps) != 1 or not steps[0] or first is None or limit is None:
            return None
        return max(0, -(-(limit - first) // steps[0]))


def parse(text: str) -> Module:
    """Read `compiled.as_text()`. Raises ValueError for a text without an entry computation."""
    header, _, rest = text.partition("\n")
    computations: dict[str, Computation] = {}
    entry = current = None
    for line in rest.splitlines():
        if match := _INSTRUCTION.match(line):
            assert current is not None
            instruction = _instruction(line[match.end() :], match[2], match[1] is not None)
            current.instructions[instruction.name] = instruction
        elif match := _COMPUTATION.match(line):
            current = computations[match[2]] = Computation(match[2])
            entry = current if match[1] else entry
    if entry is None:
        raise ValueError("not the text of a compiled program: no ENTRY computation")
    return Module(header, computations, entry)


def _instruction(text: str, name: str, is_root: bool) -> Instruction:
    """From `f32[8]{0} add(%a, %b), metadata={...}`, what stands behind the equals sign."""
    end = _closing(text, 0) if text.startswith("(") else text.index(" ")
    shape, rest = text[:end], text[end:].lstrip()
    opcode, _, _ = rest.partition("(")
    close = _closing(rest, len(opcode))
    argument = rest[len(opcode) + 1 : close - 1]
    arrays = tuple(
        Array(dtype, tuple(int(n.removeprefix("<=")) for n in dims.split(",") if n))
        for dtype, dims in _ARRAY.findall(re.sub(r"\{[^{}]*\}", "", shape))
    )
    operands = tuple(re.findall(r"%([\w.-]+)", argument))
    return Instruction(name, arrays, opcode, operands, argument, rest[close:], is_root)


def _closing(text: str, start: int) -> int:
    """Where the parenthesis that opens at `start` has closed."""
    depth = 0
    for i in range(start, len(text)):
        depth += (text[i] == "(") - (text[i] == ")")
        if depth == 0:
            return i + 1
    raise ValueError(f"unbalanced parentheses: {text[:80]}")
