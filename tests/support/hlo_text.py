"""What a compiled program does to its largest arrays, read from the text of its HLO."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

_HEAD = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) (?:\(.*)?\{$")
_LINE = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = ")
_ARRAY = re.compile(r"\w+\[([\d,]*)\](?:\{([^}]*)\})?")
_CALLED = re.compile(
    r"(?:body|condition|true_computation|false_computation|calls|to_apply)=%?([\w.\-]+)"
)
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
HOST = "S(5)"  # how a layout says that an array is in host memory

# What computes nothing by itself. Of an asynchronous operation, its start is looked at.
_STRUCTURE = {
    "parameter", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "call",
    "optimization-barrier",
}  # fmt: skip
_NO_KERNEL = ("constant", "partition-id", "replica-id", "after-all")
_CALLS = ("while", "conditional", "call")
_IN_PLACE = ("dynamic-update-slice", "scatter")
_TALKS = ("infeed", "outfeed", "send", "recv")
_ROUNDS = re.compile(r'known_trip_count"?:? ?=?\{"?n"?:"?(\d+)')


class Instruction(NamedTuple):
    """One line of a computation."""

    name: str
    kind: str  # the text of its type
    opcode: str
    operands: list[str]
    line: str
    is_root: bool

    @property
    def arrays(self) -> list[tuple[int, bool]]:
        """Elements of each array that it makes, and whether that is in host memory."""
        kind = self.kind
        if self.opcode.endswith("-start") and self.opcode != "copy-start":
            kind = _parts(kind)[1]  # (operands, result, context)
        elif self.opcode == "copy-start":
            kind = _parts(kind)[0]  # (result, operand, context)
        return [
            (math.prod(int(n) for n in shape.split(",") if n), HOST in layout)
            for shape, layout in _ARRAY.findall(kind)
        ]

    @property
    def called(self) -> list[str]:
        """Computations that it names."""
        branches = ",".join(_BRANCHES.findall(self.line)).split(",")
        return _CALLED.findall(self.line) + [x.strip(" %") for x in branches if x]


class Program:
    """A compiled program."""

    def __init__(self, text: str):
        self.computations, self.entry = _read(text)

    def executed(self, stop_at: Callable | None = None) -> Iterator[Instruction]:
        """Instructions that run by themselves: not those inside a fusion or a reduction.

        Nor, with `stop_at`, those inside of what it holds for.
        """
        seen, waiting = set(), [self.entry]
        while waiting:
            name = waiting.pop()
            if name in seen:
                continue
            seen.add(name)
            for one in self.computations[name].values():
                yield one
                if stop_at is not None and stop_at(one):
                    continue
                if one.opcode in _CALLS:
                    waiting += one.called

    def copies(self, elements: int, kernel: str, looped: bool = False) -> list[str]:
        """Lines of operations that make an array of so many elements or more, in any dtype.

        Those that change a few of its rows in place are none: an update or a scatter of an array
        that comes in from outside. Neither is the kernel, whose output may be as large. With
        `looped`, only what is inside of loops and branches is looked at.
        """
        entry = self.computations[self.entry] if looped else {}
        return [
            one.line
            for one in self.executed()
            if one.name not in entry
            and self._computes(one)
            and not self._is_kernel(one, kernel)
            and any(
                size >= elements and not self._in_place(one, at)
                for at, (size, _) in enumerate(one.arrays)
            )
        ]

    def to_host(self) -> tuple[list[str], list[str]]:
        """Lines of operations that make an array in host memory, and of those that update one."""
        copies, updates = [], []
        for one in self.executed():
            if not self._computes(one):
                continue
            for at, (_, on_host) in enumerate(one.arrays):
                if on_host:
                    (updates if self._in_place(one, at) else copies).append(one.line)
        return copies, updates

    def talks(self) -> list[str]:
        """Lines of operations that the host takes part in."""
        return [
            one.line
            for one in self.executed()
            if one.opcode.startswith(_TALKS)
            or (one.opcode == "custom-call" and "callback" in one.line)
        ]

    def waits(self) -> list[str]:
        """Lines of loops and branches that depend on what is known on the device alone.

        Those inside of others are not counted.
        """
        return [one.line for one in self.executed(_open_ended) if _open_ended(one)]

    def launches(self) -> int:
        """How many operations the host launches, one after the other.

        Those in a loop count as often as the loop is known to run, and once where only the device
        knows how often. Of several branches, the one with the most counts.
        """
        return self._launches(self.entry)

    def _launches(self, name: str) -> int:
        count = 0
        for one in self.computations[name].values():
            inside = [self._launches(x) for x in one.called] if one.opcode in _CALLS else []
            if one.opcode == "while":
                rounds = _ROUNDS.search(one.line)
                # The predicate of a loop of known length is not computed.
                count += int(rounds[1]) * max(inside) if rounds else sum(inside)
            elif one.opcode == "conditional":
                count += max(inside)
            else:
                count += sum(inside) + (self._computes(one) and one.opcode not in _NO_KERNEL)
        return count

    def kernels(self, name: str) -> int:
        """How many calls of custom kernels there are."""
        return sum(self._is_kernel(one, name) for one in self.executed())

    def _is_kernel(self, one: Instruction, name: str) -> bool:
        return one.opcode == "custom-call" and name in one.line

    def _computes(self, one: Instruction) -> bool:
        return one.opcode not in _STRUCTURE and not one.opcode.endswith("-done")

    def _in_place(self, one: Instruction, at: int) -> bool:
        """Whether the array number `at` that it makes is one that it was given, a part changed."""
        if one.opcode in _IN_PLACE:
            return True
        if not one.opcode.startswith(("fusion", "async")):
            return False
        inside = self.computations[one.called[0]]
        root = next(x for x in inside.values() if x.is_root)
        if root.opcode == "tuple":
            root = inside[root.operands[at]]
        root = _behind_bitcasts(root, inside)
        if root.opcode not in _IN_PLACE:
            return False
        return _behind_bitcasts(inside[root.operands[0]], inside).opcode == "parameter"


def _open_ended(one: Instruction) -> bool:
    known = one.opcode != "while" or "known_trip_count" in one.line
    return not known or one.opcode == "conditional"


def _behind_bitcasts(one: Instruction, inside: dict[str, Instruction]) -> Instruction:
    while one.opcode == "bitcast":
        one = inside[one.operands[0]]
    return one


def _read(text: str) -> tuple[dict[str, dict[str, Instruction]], str]:
    computations, entry, own = {}, "", {}
    for line in text.splitlines():
        if head := _HEAD.match(line):
            own = computations[head[1]] = {}
            entry = head[1] if line.startswith("ENTRY") else entry
        elif found := _LINE.match(line):
            own[found[1]] = _instruction(found[1], line[found.end() :], line)
    if not entry:
        raise ValueError(f"expected the text of an HLO module, got {text[:80]!r}")
    return computations, entry


def _instruction(name: str, rest: str, line: str) -> Instruction:
    """`rest` is type, opcode, operands in brackets, attributes."""
    size = _closing(rest, 0) + 1 if rest.startswith("(") else rest.index(" ")
    kind, rest = rest[:size], rest[size:].lstrip()
    opcode, _, _ = rest.partition("(")
    inside = rest[len(opcode) + 1 : _closing(rest, len(opcode))]
    operands = [x.split()[-1].lstrip("%") for x in _split(inside) if x.strip()]
    return Instruction(name, kind, opcode, operands, line.strip(), "ROOT " in line[:12])


def _parts(kind: str) -> list[str]:
    """The types of a tuple's parts."""
    return _split(kind[1:-1])


def _split(text: str) -> list[str]:
    """At commas outside of brackets."""
    parts, depth, start = [], 0, 0
    for at, sign in enumerate(text):
        if sign in "([{":
            depth += 1
        elif sign in ")]}":
            depth -= 1
        elif sign == "," and not depth:
            parts.append(text[start:at])
            start = at + 1
    return [*parts, text[start:]]


def _closing(text: str, opening: int) -> int:
    """Where the bracket that opens at `opening` is closed."""
    depth = 0
    for at in range(opening, len(text)):
        depth += {"(": 1, ")": -1}.get(text[at], 0)
        if not depth:
            return at
    raise ValueError(f"a bracket is not closed: {text[:80]!r}")
