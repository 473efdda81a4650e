"""Sizes that follow the batch and the length, found by capturing a model more than once.

A captured program has numbers for sizes. Captured again with another batch, some of them are other
numbers: those that are a multiple of the batch, or differ from it by a constant, are written as
such. Where anything else differs (an operator, a factor, a table), the model depends on the batch
in a way that sizes alone do not tell, and its numbers stay. The same goes for the length of texts.
Two sizes show what the numbers follow, not that a third takes the same steps: whoever captures says
which do.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch

from partita.capture.torch_program import TensorSpec, TorchInput, TorchProgram
from partita.emit.size import Size
from partita.emit.tables import reach_of

BATCH, LENGTH = "batch", "length"


def planned_for(sizes: Mapping[str, "Recaptured"]) -> str:
    """`Planned for batch 4 and length 6; it takes any.`"""
    told = " and ".join(f"{name} {size.before:,}" for name, size in sizes.items())
    if all(size.least == 1 and size.most is None for size in sizes.values()):
        return f"Planned for {told}; it takes any."
    limits = " and ".join(
        f"a {name} from {size.least:,} {f'to {size.most:,}' if size.most else 'up'}"
        for name, size in sizes.items()
    )
    return f"Planned for {told}; it takes {limits}."


def tables_unknown(sizes: Mapping[str, "Recaptured"]) -> str:
    """`Its tables may reach less far in length.`, where that is not known; else nothing."""
    unknown = [name for name, size in sizes.items() if size.has_tables]
    return f"Its tables may reach less far in {' and '.join(unknown)}." if unknown else ""


@dataclass(frozen=True, slots=True)
class Recaptured:
    """The same model with another batch or length, and which of them it is known to take."""

    record: TorchProgram
    before: int
    after: int
    least: int = 1
    most: int | None = None
    is_open: bool = True  # else nothing is known of others than these two
    has_tables: bool = False  # are there tables that may take less, nobody knows how much?


class _Depends(Exception):  # noqa: N818  never leaves this file: the symbol is given up
    """The program depends on a symbol in a way that sizes do not tell."""

    def __init__(self, symbols: tuple[str, ...]) -> None:
        self.symbols = symbols


def symbolic(
    record: TorchProgram, others: Mapping[str, Recaptured]
) -> tuple[TorchProgram, dict[str, Recaptured]]:
    """The program with sizes in place of the numbers that follow the batch or the length.

    Second, those of the others that are followed.
    """
    known = {
        name: other
        for name, other in others.items()
        if other.is_open and same_steps(record, other.record)
    }
    while known:
        try:
            merged = _merged(record, known)
            return merged, _within_tables(merged, known)
        except _Depends as error:
            known = {name: other for name, other in known.items() if name not in error.symbols}
    return record, {}


def _within_tables(record: TorchProgram, known: Mapping[str, Recaptured]) -> dict[str, Recaptured]:
    """The same, with the most that the tables of the merged program take."""
    reach = reach_of(record)
    within = {}
    for name, other in known.items():
        limits = [each for each in (other.most, reach.most.get(name)) if each is not None]
        unknown = not limits and name in reach.unknown
        within[name] = replace(other, most=min(limits, default=None), has_tables=unknown)
    return within


def same_steps(one: TorchProgram, other: TorchProgram) -> bool:
    """Do two programs call the same operators, under the same names?"""
    return _outline(one) == _outline(other)


def _outline(record: TorchProgram) -> list[tuple[str, Any]]:
    given = [(each.name, each.kind) for each in record.inputs]
    return [*given, *((node.name, node.target) for node in record.nodes)]


def _merged(record: TorchProgram, others: Mapping[str, Recaptured]) -> TorchProgram:
    merge = _Merge(others)
    inputs = []
    for place, given in enumerate(record.inputs):
        same = {name: other.record.inputs[place] for name, other in others.items()}
        if given.data is not None:
            merge.check_data(given, same)
        inputs.append(
            replace(given, value=merge(given.value, {n: each.value for n, each in same.items()}))
        )
    nodes = []
    for place, node in enumerate(record.nodes):
        same_nodes = {name: other.record.nodes[place] for name, other in others.items()}
        changed = {
            part: merge(
                getattr(node, part), {n: getattr(each, part) for n, each in same_nodes.items()}
            )
            for part in ("args", "kwargs", "value")
        }
        nodes.append(replace(node, **changed))
    return replace(record, inputs=tuple(inputs), nodes=tuple(nodes))


class _Merge:
    """Values of one place of the program in all captures, as one."""

    def __init__(self, others: Mapping[str, Recaptured]) -> None:
        self.others = others

    def __call__(self, value: Any, others: Mapping[str, Any]) -> Any:
        if type(value) is int:
            return self._size(value, others)
        if isinstance(value, TensorSpec):
            shapes = {name: each.shape for name, each in others.items()}
            return replace(value, shape=self(value.shape, shapes))
        if isinstance(value, list | tuple):
            self._check(value, {n: o for n, o in others.items() if len(o) != len(value)})
            parts = (self(v, {n: o[i] for n, o in others.items()}) for i, v in enumerate(value))
            return list(parts) if isinstance(value, list) else tuple(parts)
        if isinstance(value, Mapping):
            return {
                key: self(v, {n: o[key] for n, o in others.items()}) for key, v in value.items()
            }
        self._check(value, {n: o for n, o in others.items() if not _equal(value, o)})
        return value

    def _check(self, value: Any, differing: Mapping[str, Any]) -> None:
        if differing:
            raise _Depends(tuple(differing))

    def check_data(self, given: TorchInput, others: Mapping[str, TorchInput]) -> None:
        """What the model holds must be the same, though it may be made anew each time.

        A constant made of a size (`torch.tensor(len(x))`) is another one.
        """
        same = _same_numbers if given.kind == "constant" else _same_form
        self._check(given, {name: o for name, o in others.items() if not same(given.data, o.data)})

    def _size(self, value: int, others: Mapping[str, Any]) -> int:
        differing = tuple(name for name, other in others.items() if other != value)
        if not differing:
            return value
        product = math.prod(self.others[name].before for name in differing)
        if value % product == 0 and all(
            others[name] == value // self.others[name].before * self.others[name].after
            for name in differing
        ):
            return Size(value, differing, value // product)
        if len(differing) == 1:
            (name,) = differing
            more = value - self.others[name].before
            if others[name] == self.others[name].after + more:
                return Size(value, differing, 1, more)
        raise _Depends(differing)


def _same_form(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if one is None or other is None:
        return False
    return one.shape == other.shape and one.dtype == other.dtype


def _same_numbers(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if one is None or other is None or not _same_form(one, other):
        return False
    if "meta" in (one.device.type, other.device.type):
        return one.device == other.device
    return one is other or torch.equal(one.nan_to_num(), other.nan_to_num())


def _equal(one: Any, other: Any) -> bool:
    """Of what is no size: numbers, names, types, and records of these."""
    if type(one) is not type(other):
        return False
    if isinstance(one, float):
        return one == other or (math.isnan(one) and math.isnan(other))
    if is_dataclass(one):
        return all(_equal(getattr(one, f.name), getattr(other, f.name)) for f in fields(one))
    return bool(one == other)
