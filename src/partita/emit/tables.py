"""The most that a model's tables of positions take of a size that its code follows.

A table that the model holds has so many rows. Where they are read by the numbers from 0 to a size
(an `arange`, maybe with a constant added), or sliced to it, that size reaches no further; captures
do not tell, as reading beyond a table is no mistake before the code runs. Where rows are chosen in
another way from as many numbers (clamped distances, running sums of a mask), nothing is known.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from partita.capture.torch_program import Ref, TensorSpec, TorchNode, TorchProgram
from partita.emit.size import Size

_SAME = (
    "view", "reshape", "unsqueeze", "squeeze", "expand", "repeat", "permute", "transpose", "slice",
    "to", "_to_copy", "contiguous", "clone", "alias", "detach", "detach_", "lift_fresh_copy",
)  # fmt: skip
_HELD = ("parameter", "buffer", "constant")


@dataclass(frozen=True)
class TableReach:
    """The most of each size, and the sizes of which tables may take less than anything says."""

    most: Mapping[str, int]
    unknown: frozenset[str]


def reach_of(record: TorchProgram) -> TableReach:
    """What the tables of a program take whose numbers are sizes where they follow one."""
    most: dict[str, int] = {}
    unknown: set[str] = set()
    rows = _TableReads(record)
    for node in record.nodes:
        for size, count, added in rows.read_by(node):
            if size is None:
                unknown.update(rows.made_of(node))
                continue
            (symbol,) = size.symbols
            reach = (count - size.more - added) // size.factor
            most[symbol] = min(reach, most.get(symbol, reach))
    return TableReach(most, frozenset(unknown - most.keys()))


class _TableReads:
    """Which rows of tables the nodes of a program read."""

    def __init__(self, record: TorchProgram) -> None:
        self.nodes = {node.name: node for node in record.nodes}
        self.given = {each.name: each for each in record.inputs}

    def read_by(self, node: TorchNode) -> Iterator[tuple[Size | None, int, int]]:
        """(a size, rows, what is added to it): rows up to size + added are read; None: unknown."""
        arguments = node.arguments
        if node.operation == "slice" and isinstance(arguments["end"], Size):
            shape = self._held(arguments["self"])
            if shape is None or isinstance(count := shape[arguments["dim"]], Size):
                return
            size = arguments["end"]
            if count >= size:  # else all of it is taken, whatever the size
                yield (size if len(size.symbols) == 1 else None), count, 0
        elif node.operation == "embedding":
            shape = self._held(arguments["weight"])
            if shape is None or isinstance(shape[0], Size):
                return
            counted = self._numbers(arguments["indices"])
            if counted is not None:
                size, added = counted
                yield (size if len(size.symbols) == 1 else None), shape[0], added
            elif self.made_of(node):
                yield None, shape[0], 0

    def made_of(self, node: TorchNode) -> set[str]:
        """The sizes up to which numbers are counted, or summed, among what a table is read by."""
        symbols: set[str] = set()
        waiting = [node.arguments.get("indices", node.arguments.get("self"))]
        seen: set[str] = set()
        while waiting:
            ref = waiting.pop()
            if not isinstance(ref, Ref) or ref.name in seen or ref.name not in self.nodes:
                continue
            seen.add(ref.name)
            own = self.nodes[ref.name]
            if own.operation in ("arange", "cumsum") and isinstance(own.value, TensorSpec):
                size = own.value.shape[own.arguments.get("dim", 0)]
                symbols.update(size.symbols if isinstance(size, Size) else ())
            waiting += map(Ref, own.reads)
        return symbols

    def _numbers(self, value: Any) -> tuple[Size, int] | None:
        """The end of the `arange` that a value is, and what was added to it."""
        added = 0
        while isinstance(value, Ref) and value.name in self.nodes:
            node = self.nodes[value.name]
            arguments = node.arguments
            if node.operation == "arange":
                end, step = arguments["end"], arguments.get("step", 1)
                return (end, added) if isinstance(end, Size) and step == 1 else None
            if node.operation == "add":
                if type(arguments["other"]) is not int or arguments.get("alpha", 1) != 1:
                    return None
                added += arguments["other"]
            elif node.operation not in _SAME or not self._keeps(node):
                return None
            value = arguments["self"] if "self" in arguments else arguments["input"]
        return None

    def _keeps(self, node: TorchNode) -> bool:
        """Does it give all that it reads? A slice may not."""
        source = node.arguments.get("self")
        if node.operation != "slice" or not isinstance(source, Ref):
            return True
        read = self.nodes.get(source.name)
        return read is not None and bool(read.value.shape == node.value.shape)

    def _held(self, value: Any) -> tuple[Any, ...] | None:
        """The shape of a tensor that the model holds, or of a part or another view of one."""
        first = value
        while isinstance(value, Ref) and value.name in self.nodes:
            node = self.nodes[value.name]
            if node.operation not in _SAME:
                return None
            value = node.arguments.get("self")
        if not isinstance(value, Ref) or value.name not in self.given:
            return None
        own = self.given[value.name]
        if own.kind not in _HELD:
            return None
        spec = self.nodes[first.name].value if first.name in self.nodes else own.value
        return tuple(spec.shape) if isinstance(spec, TensorSpec) else None
