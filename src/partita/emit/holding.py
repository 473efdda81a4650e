"""What a class holds, under the original names: the lines of its `__init__`, the way to each part.

`layers.3.weight` is reached as `self.layers["3"].weight` where layer 3 is held without layer 0, and
as `self.layers[3].weight` where all are. A name that is no identifier is only ever a quoted string.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from partita.emit.names import is_attribute
from partita.emit.steps import EmittedValue
from partita.emit.text import Bracket, Expr, Named, call, literal, quoted


@dataclass
class ModulePart:
    """A module of the tree: made by `expr`, or a plain holder of parts and tensors."""

    expr: Expr | None = None
    parts: dict[str, "ModulePart"] = field(default_factory=dict)
    tensors: dict[str, EmittedValue] = field(default_factory=dict)

    @property
    def style(self) -> str:
        """How its parts are reached: by attribute, as a list, as a dict, or only by hand."""
        names = [*self.parts, *self.tensors]
        if all(map(is_attribute, names)):
            return "attribute"
        if self.parts and self.tensors:
            return "hand"
        if names == [str(i) for i in range(len(names))]:
            return "list"
        own = dir(torch.nn.ModuleDict if self.parts else torch.nn.ParameterDict)
        parameters = all(value.kind == "parameter" for value in self.tensors.values())
        return "dict" if parameters and not set(own) & set(names) else "hand"


class Holding:
    """The tree of one class; paths are relative to it."""

    def __init__(self) -> None:
        self.root = ModulePart()

    def add_module(self, path: str, expr: Expr) -> bool:
        """Hold a module; False where another one is held there already."""
        part = self._part(path)
        if part.expr is not None and str(part.expr) != str(expr):
            return False
        part.expr = expr
        return True

    def add_tensor(self, path: str, value: EmittedValue) -> None:
        """Hold a parameter or buffer by itself, unless a module held brings it along."""
        parent, _, name = path.rpartition(".")
        self._part(parent).tensors[name] = value

    def _part(self, path: str) -> ModulePart:
        part = self.root
        for name in path.split(".") if path else ():
            part = part.parts.setdefault(name, ModulePart())
        return part

    def settle(self) -> None:
        """Drop what comes with a module that is made whole; then paths are final."""
        _settle(self.root)

    def module(self, path: str) -> str:
        """The expression that reaches a module."""
        text, part = "self", self.root
        for name in path.split("."):
            text = _reach(text, part, name, "_modules", is_root=part is self.root)
            part = part.parts.get(name, ModulePart())
        return text

    def tensor(self, path: str, value: EmittedValue) -> str:
        """The expression that reaches a parameter or buffer."""
        parent, _, name = path.rpartition(".")
        text, part = "self", self.root
        for step in parent.split(".") if parent else ():
            text = _reach(text, part, step, "_modules", is_root=part is self.root)
            part = part.parts.get(step, ModulePart())
        table = "_parameters" if value.kind == "parameter" else "_buffers"
        return _reach(text, part, name, table, is_root=part is self.root)

    def collection(self, paths: Sequence[str]) -> str | None:
        """The list or dict that holds just these modules, in this order."""
        parent = paths[0].rpartition(".")[0]
        part = self.root
        for name in parent.split(".") if parent else ():
            part = part.parts.get(name, ModulePart())
        held = [f"{parent}.{name}" for name in part.parts]
        if part is self.root or part.tensors or held != list(paths):
            return None
        ways = {"list": self.module(parent), "dict": f"{self.module(parent)}.values()"}
        return ways.get(part.style) if part.expr is None else None

    def made(self) -> list[tuple[str, Expr]]:
        """(what stands before, expression) of the statements that make everything held."""
        return list(_made(self.root, "self", is_root=True))


def _settle(part: ModulePart) -> None:
    for child in part.parts.values():
        if child.expr is not None:
            child.parts.clear()
            child.tensors.clear()
        _settle(child)
    for table in (part.parts, part.tensors):
        if all(name.isdigit() for name in table):  # as they are counted, not as they are used
            for name in sorted(table, key=int):
                table[name] = table.pop(name)  # type: ignore[assignment]


def _reach(text: str, part: ModulePart, name: str, table: str, is_root: bool = False) -> str:
    style = "attribute" if part.expr is not None else _style(part, is_root)
    if (style in ("attribute", "hand")) and is_attribute(name):
        return f"{text}.{name}"
    if style == "list":
        return f"{text}[{name}]"
    if style == "dict":
        return f"{text}[{quoted(name)}]"
    return f"{text}.{table}[{quoted(name)}]"


def _style(part: ModulePart, is_root: bool) -> str:
    style = part.style
    return "hand" if is_root and style != "attribute" else style


def _made(part: ModulePart, text: str, is_root: bool = False) -> Iterator[tuple[str, Expr]]:
    """(what stands before, expression) of every statement that fills a part."""
    for name, value in part.tensors.items():
        yield _tensor_made(text, name, value)
    for name, child in part.parts.items():
        yield _module_made(text, name, _maker(child))
        yield from _filled(child, _reach(text, part, name, "_modules", is_root))


def _filled(part: ModulePart, text: str) -> Iterator[tuple[str, Expr]]:
    """What is left to do for a part once it is made."""
    if part.expr is not None:
        return
    if part.style in ("list", "dict"):
        for name, child in part.parts.items():
            yield from _filled(child, _reach(text, part, name, "_modules"))
    else:
        yield from _made(part, text)


def _maker(part: ModulePart) -> Expr:
    if part.expr is not None:
        return part.expr
    return _collection(part, part.style) if part.style in ("list", "dict") else "nn.Module()"


def _collection(part: ModulePart, style: str) -> Expr:
    """A list or dict of modules or parameters, in short where all are the same."""
    kind = "Module" if part.parts else "Parameter"
    made: dict[str, Expr] = {
        **{name: _maker(child) for name, child in part.parts.items()},
        **{name: _parameter(value) for name, value in part.tensors.items()},
    }
    names = list(made)
    same = len(names) > 1 and len({str(expr) for expr in made.values()}) == 1
    first, last = names[0], names[-1]
    one = str(made[first])
    if style == "list":
        if same and len(one) < 60:
            return call(f"nn.{kind}List", [f"[{one} for _ in range({len(names)})]"])
        return _hugged(f"nn.{kind}List(", Bracket("[", tuple(made.values()), "]", display=True))
    in_order = all(n.isdigit() for n in names) and names == [
        str(i) for i in range(int(first), int(last) + 1)
    ]
    if same and in_order and len(one) < 50:
        numbers = f"range({first}, {int(last) + 1})"
        return call(f"nn.{kind}Dict", [f"{{str(i): {one} for i in {numbers}}}"])
    items = tuple(Named(f"{quoted(name)}: ", expr) for name, expr in made.items())
    return _hugged(f"nn.{kind}Dict(", Bracket("{", items, "}", display=True))


def _hugged(head: str, inner: Bracket) -> Bracket:
    return Bracket(head, (inner,))


def _module_made(text: str, name: str, expr: Expr) -> tuple[str, Expr]:
    if is_attribute(name):
        return f"{text}.{name} = ", expr
    return "", call(f"{text}.add_module", [quoted(name), expr])


def _tensor_made(text: str, name: str, value: EmittedValue) -> tuple[str, Expr]:
    if value.kind == "parameter":
        if is_attribute(name):
            return f"{text}.{name} = ", _parameter(value)
        return "", call(f"{text}.register_parameter", [quoted(name), _parameter(value)])
    kept = {} if value.persistent else {"persistent": literal(False)}
    return "", call(f"{text}.register_buffer", [quoted(name), _empty(value)], kept)


def _parameter(value: EmittedValue) -> Expr:
    frozen = {} if _learns(value) else {"requires_grad": literal(False)}
    return call("nn.Parameter", [_empty(value)], frozen)


def _learns(value: EmittedValue) -> bool:
    return value.data is None or value.data.requires_grad


def _empty(value: EmittedValue) -> Expr:
    dtype = value.meta.dtype
    typed = {} if dtype == torch.float32 else {"dtype": literal(dtype)}
    sizes = [literal(int(size)) for size in value.meta.shape]
    return call("torch.empty", sizes or ["()"], typed)
