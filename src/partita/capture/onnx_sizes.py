"""The sizes that an ONNX file leaves open, and the numbers that a MODEL gives them.

    model.onnx@128                                          128 for every size that is not the batch
    model.onnx@sequence_length=1,past_sequence_length=127   by the names that the file has for them
    model.onnx@128,past_sequence_length=0                   one by name, the others 128

A size that stands first in an input is the batch (`--batch`, else 1); where only that is open, the
number after the `@` is the batch. A sum that a file writes as such (Optimum's
`past_sequence_length + sequence_length`) follows its parts. Named sizes may be 0: that is how a
decoder's file says that no keys and values of earlier calls are there.
"""

import ast
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from partita.errors import FileError, ModelError
from partita.suggest import suggest

MOST = 2**31


@dataclass(frozen=True)
class GivenSizes:
    """What stands after the `@`: a number for all, and numbers by name."""

    number: int | None
    by_name: Mapping[str, int]


def parse_sizes(text: str, spec: str) -> GivenSizes:
    """Read what stands after the `@`; empty if nothing does."""
    number: int | None = None
    by_name: dict[str, int] = {}
    for part in text.split(",") if text else ():
        name, equals, value = (each.strip() for each in part.rpartition("="))
        least = 0 if equals else 1
        if not (value.isascii() and value.isdecimal() and least <= int(value) < MOST):
            raise ModelError(
                f"{part!r} after the @",
                fix="a whole number is needed, or NAME=NUMBER for each size, with commas between",
                field=spec,
            )
        if name in by_name or (not equals and number is not None):
            raise ModelError(f"{part!r} after the @ is said twice", fix="say it once", field=spec)
        if equals:
            by_name[name] = int(value)
        else:
            number = int(value)
    return GivenSizes(number, by_name)


@dataclass(frozen=True)
class _OpenSize:
    """A size of an input that the file leaves open."""

    dim: Any
    input: str
    place: int
    is_batch: bool

    @property
    def name(self) -> str:
        return str(self.dim.dim_param)


def fix_sizes(model: Any, batch: int | None, given: GivenSizes) -> None:
    """Give every open size of the inputs a number."""
    dims = _open_dims(model)
    names = {each.name for each in dims if each.name}
    for name in given.by_name.keys() - names:
        raise FileError(
            f"leaves no size {name!r} open", fix=suggest(name, names) if names else "leave it out"
        )
    sizes = dict(given.by_name)
    batch = _batch(dims, batch, given)
    for each in dims:
        if each.is_batch:
            sizes.setdefault(each.name, batch or 1)
    sizes.update(_computed(names, sizes, given.number))
    missing = {each.name: each for each in dims if not each.is_batch and each.name not in sizes}
    if missing and given.number is None:
        raise _left_open(list(missing.values()))
    for each in dims:
        known = batch or 1 if each.is_batch else given.number
        each.dim.dim_value = sizes.get(each.name, known) if each.name else known


def _batch(dims: list[_OpenSize], batch: int | None, given: GivenSizes) -> int | None:
    """The batch, which the number after the @ is where nothing else is open."""
    asked = {
        given.by_name[each.name] for each in dims if each.is_batch and each.name in given.by_name
    }
    if given.number is not None and all(each.is_batch for each in dims):
        if not dims:
            raise FileError(
                f"leaves no size open, and {given.number} is given after the @",
                fix="leave out the @",
            )
        asked.add(given.number)
    for one in sorted(asked - {batch}):
        if batch is not None:
            raise FileError(
                f"leaves only the batch open, and is given two: {one} after the @, and {batch}"
                if given.number is not None
                else f"is given two batches: {one} after the @, and {batch}",
                fix="leave one out",
            )
    return batch if batch is not None else max(asked, default=None)


def _computed(names: set[str], sizes: Mapping[str, int], number: int | None) -> dict[str, int]:
    """The sizes whose names are sums and products of others that are known."""
    computed: dict[str, int] = {}
    for name in sorted(names - sizes.keys()):
        parts = _parts(name)
        if parts is None or parts == {name}:
            continue
        known = {part: sizes.get(part, number) for part in parts}
        if all(value is not None for value in known.values()):
            computed[name] = int(_value(ast.parse(name, mode="eval").body, known))
    return computed


def _parts(name: str) -> set[str] | None:
    """The names in an expression; None if it is none."""
    try:
        tree = ast.parse(name, mode="eval").body
    except (SyntaxError, ValueError):
        return None
    whole = (ast.BinOp, ast.Name, ast.Constant, ast.Load, *OPERATORS)
    if not all(isinstance(node, whole) for node in ast.walk(tree)):
        return None
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


OPERATORS: dict[type[ast.AST], Any] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: max(a - b, 0),
    ast.Mult: lambda a, b: a * b,
    ast.FloorDiv: lambda a, b: a // max(b, 1),
}


def _value(node: ast.expr, known: Mapping[str, int | None]) -> Any:
    if isinstance(node, ast.BinOp):
        return OPERATORS[type(node.op)](_value(node.left, known), _value(node.right, known))
    return known[node.id] if isinstance(node, ast.Name) else getattr(node, "value", 0)


def _left_open(dims: list[_OpenSize]) -> FileError:
    first = dims[0]
    if len(dims) == 1:
        fix = "write it after the name: model.onnx@128"
        open_size = repr(first.name or first.place)
        return FileError(
            f"leaves the size {open_size} open", fix=fix, field=f"input {first.input!r}"
        )
    names = [each.name for each in dims if each.name]
    words = ", ".join(map(repr, names))
    each = ",".join(f"{name}=128" for name in names if _parts(name) == {name})
    return FileError(
        f"leaves the sizes {words} open",
        fix=f"write them after the name: model.onnx@{each}, or one number for all: model.onnx@128",
    )


def _open_dims(model: Any) -> list[_OpenSize]:
    given = {tensor.name for tensor in model.graph.initializer}
    inputs = [value for value in model.graph.input if value.name not in given]
    batches = {
        value.type.tensor_type.shape.dim[0].dim_param
        for value in inputs
        if value.type.tensor_type.shape.dim
    } - {""}
    dims = []
    for value in inputs:
        if not value.type.HasField("tensor_type"):
            raise FileError("is no tensor", fix="export without it", field=f"input {value.name!r}")
        for place, dim in enumerate(value.type.tensor_type.shape.dim):
            if not (dim.HasField("dim_value") and dim.dim_value > 0):
                is_batch = place == 0 or dim.dim_param in batches
                dims.append(_OpenSize(dim, value.name, place, is_batch))
    return dims
