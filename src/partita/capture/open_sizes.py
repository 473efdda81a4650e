"""Sizes of the arguments that a captured program may leave open, and for which of them it holds.

`torch.export` follows a model with symbols in the place of sizes and notes every comparison that
the model's code, or PyTorch's, makes of them. Wherever those come out the same, the model does the
same steps; where one does not, nothing is known. PyTorch takes it for granted that such a size is
2 or more: one sample and none are other programs.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from sympy.core.relational import Relational
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

log = logging.getLogger("partita")
Shape = tuple[int, ...]
Place = tuple[int, int]  # which of the flat arguments, and which of its dims
Limits = tuple[int, int]  # the least and the most
MOST = 2**60  # stands for as many as there may be


@dataclass(frozen=True)
class OpenSizes:
    """What holds of the arguments' sizes wherever a program does the same steps.

    `shapes` has those of the arguments in order, a symbol where a size is open; what is no tensor
    has none.
    """

    shapes: tuple[tuple[Any, ...], ...]
    ranges: Mapping[sympy.Symbol, Limits]
    guards: tuple[Any, ...]

    def hold(self, shapes: Sequence[Shape]) -> bool:
        """Does the program do the same steps for arguments of these shapes?"""
        known: dict[Any, sympy.Integer] = {}
        for own, given in zip(self.shapes, shapes, strict=True):
            if len(own) != len(given):
                return False
            for size, number in zip(own, given, strict=True):
                if isinstance(size, sympy.Symbol):
                    known.setdefault(size, sympy.Integer(number))
        pairs = [
            (size, number)
            for own, given in zip(self.shapes, shapes, strict=True)
            for size, number in zip(own, given, strict=True)
        ]
        return (
            all(_value(size, known) == number for size, number in pairs)
            and all(
                low <= known[symbol] <= high
                for symbol, (low, high) in self.ranges.items()
                if symbol in known
            )
            and all(_value(guard, known) == sympy.true for guard in self.guards)
        )

    def limits(self, groups: Mapping[str, Sequence[Place]]) -> dict[str, Limits]:
        """The least and the most of groups of sizes, those of each being one number.

        A group is left out where its sizes are fixed, or more is asked of them than limits tell.
        """
        symbols: dict[Any, sympy.Symbol] = {}
        limits: dict[str, Limits] = {}
        for name, places in groups.items():
            own = {self.shapes[leaf][dim] for leaf, dim in places}
            if all(isinstance(size, sympy.Symbol) for size in own):
                symbols |= dict.fromkeys(own, sympy.Symbol(name, integer=True, positive=True))
                least = max(self.ranges[size][0] for size in own)
                limits[name] = least, min(self.ranges[size][1] for size in own)
        for guard in (guard.xreplace(symbols) for guard in self.guards):
            if not _is_within(guard, limits):
                asked = {str(symbol) for symbol in guard.free_symbols}
                limits = {name: own for name, own in limits.items() if name not in asked}
        return limits


def _is_within(guard: Any, limits: Mapping[str, Limits]) -> bool:
    """Is a comparison true of all numbers within the limits of its symbols?"""
    guard = _from_least(guard, limits)
    if guard == sympy.true:
        return True
    if len(guard.free_symbols) != 1 or not isinstance(guard, Relational):
        return False
    (symbol,) = guard.free_symbols
    difference = sympy.expand(guard.lhs - guard.rhs)
    slope, more = difference.coeff(symbol), difference.subs(symbol, 0)
    if str(symbol) not in limits or difference != slope * symbol + more or slope == 0:
        return False
    least, most = limits[str(symbol)]
    if isinstance(guard, sympy.Ne):
        forbidden = -more / slope
        return not (forbidden.is_integer and 0 <= forbidden <= most - least)
    ends = (guard.subs(symbol, end) for end in (0, most - least))  # of a line that is on one side
    return not isinstance(guard, sympy.Eq) and all(end == sympy.true for end in ends)


def _from_least(guard: Any, limits: Mapping[str, Limits]) -> Any:
    """A comparison of what is added to the least; sympy decides many for numbers from 0 up."""
    added = {
        symbol: limits[str(symbol)][0] + sympy.Symbol(str(symbol), integer=True, nonnegative=True)
        for symbol in guard.free_symbols
        if str(symbol) in limits
    }
    moved = guard.xreplace(added)
    for name in ("Min", "Max"):  # of PyTorch, which leave more open than sympy's
        moved = moved.replace(
            lambda part, name=name: type(part).__name__ == name,
            lambda part, name=name: getattr(sympy, name)(*part.args),
        )
    if isinstance(moved, sympy.Eq) and sympy.expand(moved.lhs - moved.rhs) == 0:
        return sympy.true
    return moved


def _value(size: Any, known: Mapping[Any, Any]) -> Any:
    return size.xreplace(known) if isinstance(size, sympy.Basic) else size


def open_sizes(
    export: Callable[[Any], ExportedProgram], given: Any, places: Sequence[Place]
) -> OpenSizes | None:
    """Where the sizes at some places of the arguments may be others; None if nothing is known.

    `given` are the arguments by position and by name, `export` follows the module with what
    `torch.export` calls dynamic shapes. Only products of open sizes with numbers, and sums of one
    and a number, are followed: a program with others, or with numbers made of sizes, is none.
    """
    leaves, spec = tree_flatten(given)
    wanted = [_wanted(leaf, number, places) for number, leaf in enumerate(leaves)]
    try:
        program = export(tree_unflatten(wanted, spec))
    except Exception:  # the model is followed with numbers then, each size by itself
        log.debug("sizes cannot be left open", exc_info=True)
        return None
    values = [leaf for node in program.graph.nodes for leaf in tree_leaves(node.meta.get("val"))]
    env = _environment(values)
    if env is None or not all(_is_followed(value) for value in values):
        return None
    return OpenSizes(
        _shapes(program, leaves),
        {
            symbol: (_number(limits.lower), _number(limits.upper))
            for symbol, limits in program.range_constraints.items()
        },
        tuple(guard.expr.xreplace(env.replacements) for guard in env.guards),
    )


def _wanted(leaf: Any, number: int, places: Sequence[Place]) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return None
    return {dim: Dim.AUTO if (number, dim) in places else Dim.STATIC for dim in range(leaf.ndim)}


def _environment(values: Sequence[Any]) -> ShapeEnv | None:
    for value in values:
        sizes = value.shape if isinstance(value, torch.Tensor) else (value,)
        for size in sizes:
            if isinstance(size, torch.SymInt):
                return size.node.shape_env  # type: ignore[no-any-return]
    return None


def _is_followed(value: Any) -> bool:
    """Is a value of the program a tensor, or a size, of sizes that code can be written with?"""
    if isinstance(value, torch.SymFloat | torch.SymBool):
        return False
    sizes = value.shape if isinstance(value, torch.Tensor) else (value,)
    return all(_is_plain(size.node.expr) for size in sizes if isinstance(size, torch.SymInt))


def _is_plain(expr: sympy.Expr) -> bool:
    """A number, a product of different symbols and a number, or a symbol and a number added."""
    terms = sympy.Add.make_args(expr)
    factor, product = terms[-1].as_coeff_Mul()
    if len(terms) == 1:
        return product == 1 or all(each.is_Symbol for each in sympy.Mul.make_args(product))
    return len(terms) == 2 and terms[0].is_Integer and factor == 1 and bool(product.is_Symbol)


def _shapes(program: ExportedProgram, leaves: Sequence[Any]) -> tuple[tuple[Any, ...], ...]:
    """The shapes of the arguments as the program has them."""
    by_name = {n.name: n.meta.get("val") for n in program.graph.nodes if n.op == "placeholder"}
    specs = program.graph_signature.input_specs
    given = [by_name.get(spec.arg.name) for spec in specs if spec.kind is InputKind.USER_INPUT]
    return tuple(
        tuple(_expression(size) for size in value.shape) if isinstance(value, torch.Tensor) else ()
        for value, _ in zip(given, leaves, strict=True)
    )


def _number(limit: Any) -> int:
    """A limit that may be infinite, which sympy has two words for."""
    return min(int(limit), MOST) if isinstance(limit, sympy.Integer) else MOST


def _expression(size: Any) -> Any:
    return size.node.expr if isinstance(size, torch.SymInt) else int(size)
