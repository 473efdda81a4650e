"""The functions at the end of an emitted module: build the stages, run them in turn."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from partita.emit.constants import tensor_expr
from partita.emit.steps import EmittedValue
from partita.emit.text import Bracket, Expr, Named, call, docstring, literal, quoted, statement


def names_tuple(names: Sequence[str]) -> Expr:
    """`("a", "b")`."""
    return Bracket("(", tuple(map(quoted, names)), ")", display=True) if names else "()"


def dict_of(items: Iterable[tuple[str, Expr]]) -> Bracket:
    """`{"a": ..., "b": ...}`."""
    return Bracket("{", tuple(Named(f"{quoted(k)}: ", v) for k, v in items), "}", display=True)


def constants(states: Iterable[EmittedValue]) -> tuple[list[str], list[str]]:
    """Lines that make the tensors no state dict holds, and the names of those only data can say."""
    items, missing = [], []
    for value in states:
        if not value.persistent:
            expr = tensor_expr(value.data)
            if expr is None:
                missing.append(value.names[0])
            else:
                items.append((value.names[0], expr))
    if not items:
        return [], missing
    return [
        "", "", "def _constants() -> dict[str, Tensor]:",
        '    """Tensors of the model that its state dict does not hold."""',
        *statement(dict_of(items), 4, before="return "),
    ], missing  # fmt: skip


@dataclass(frozen=True)
class Builder:
    """`build_stages`: what the classes are called, and what the module above it says."""

    class_names: Sequence[str]
    training: bool
    has_constants: bool
    has_tied: bool
    has_frozen: bool

    def lines(self) -> list[str]:
        """The function."""
        made: Expr = Bracket("[", tuple(f"{n}()" for n in self.class_names), "]", display=True)
        held = "**_constants(), **state_dict" if self.has_constants else "**state_dict"
        key = "first" if self.has_tied else "name"
        alias = ["            first = TIED.get(name, name)"] if self.has_tied else []
        learns = f", requires_grad={key} not in FROZEN" if self.has_frozen else ""
        return [
            "", "", "def build_stages(",
            "    state_dict: dict[str, Tensor], constants: dict[str, Tensor] | None = None",
            ") -> list[nn.Module]:",
            '    """The stages with the weights of the model: its own tensors, not copies.',
            "",
            "    `constants` are tensors of the model that are in no state dict. A weight with",
            "    several names, or in several stages, is one Parameter; what is a Parameter",
            "    already is used as such.",
            '    """',
            '    with torch.device("meta"):',
            *statement(made, 8, before="stages = "),
            f"    known = {{{held}, **(constants or {{}})}}",
            "    for stage in stages:",
            "        parameters = dict(stage.named_parameters(remove_duplicate=False))",
            "        buffers = dict(stage.named_buffers(remove_duplicate=False))",
            "        for name in (*parameters, *buffers):",
            *alias,
            f"            if name in parameters and not isinstance(known[{key}], nn.Parameter):",
            f"                known[{key}] = nn.Parameter(known[{key}]{learns})",
            '            owner, _, leaf = name.rpartition(".")',
            f"            setattr(stage.get_submodule(owner), leaf, known[{key}])",
            f"        stage.train({self.training})",
            "    return stages",
        ]  # fmt: skip


@dataclass(frozen=True)
class Runner:
    """`run_stages`: the wiring as a function that a person can read."""

    names: Mapping[EmittedValue, str]
    inputs: Sequence[EmittedValue]
    stages: Sequence[tuple[Sequence[EmittedValue], Sequence[EmittedValue]]]  # (takes, gives)
    outputs: Sequence[Any]
    out_spec: Any

    def lines(self) -> list[str]:
        """The function."""
        arguments = (f"{self.names[value]}: Tensor" for value in self.inputs)
        signature = Bracket(
            "def run_stages(", ("stages: list[nn.Module]", *arguments), ") -> object:"
        )
        result, is_nested = self._result()
        word = "What the model gives." if is_nested else "What the model gives, flat."
        lines = ["", "", *statement(signature, 0), *docstring([word], 4)]
        for place, (takes, gives) in enumerate(self.stages):
            expr = call(f"stages[{place}]", [self.names[value] for value in takes])
            names = [self.names[value] for value in gives]
            if place == len(self.stages) - 1 and names == [str(result)]:
                return [*lines, *statement(expr, 4, before="return ")]
            lines += _assigned(names, expr)
        return [*lines, *statement(result, 4, before="return ")]

    def _result(self) -> tuple[Expr, bool]:
        """The results in the model's structure; flat, and False, where it has its own types."""
        leaves = [
            self.names[v] if isinstance(v, EmittedValue) else literal(v) for v in self.outputs
        ]
        try:
            return _nested(self.out_spec, iter(leaves)), True
        except TypeError:
            return Bracket("(", tuple(leaves), ")", display=True), False


def _nested(spec: Any, leaves: Any) -> Expr:
    if spec.is_leaf():
        return next(leaves)  # type: ignore[no-any-return]
    parts = [_nested(child, leaves) for child in spec.children()]
    if spec.type is tuple:
        return Bracket("(", tuple(parts), ")", display=True)
    if spec.type is list:
        return Bracket("[", tuple(parts), "]", display=True)
    if spec.type is dict:
        named = (Named(f"{literal(k)}: ", p) for k, p in zip(spec.context, parts, strict=True))
        return Bracket("{", tuple(named), "}", display=True)
    raise TypeError(spec.type)


def _assigned(names: Sequence[str], expr: Expr) -> list[str]:
    """`a, b = expr`; names that are too many for a line are unpacked after it."""
    before = f"{', '.join(names)} = " if names else ""
    if len(before) < 70:
        return statement(expr, 4, before=before)
    lines = statement(expr, 4, before="given = ")
    return [*lines, *(f"    {name} = given[{place}]" for place, name in enumerate(names))]
