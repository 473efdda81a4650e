"""Python source laid out as `ruff format` would: 100 columns, brackets broken from the outside in.

An expression is plain text, or a bracket with items. A statement that fits stays on one line. A
call that does not puts its arguments on a line of their own, or one per line with a trailing comma;
a list, tuple or dict goes to one per line at once.
"""

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

WIDTH = 100
_INFIX = re.compile(r" ([-+*/@&|]|[<>=!]=|[<>]) ")


@dataclass(frozen=True)
class Bracket:
    """`head` + items + `tail`: a call `f(...)`, or a display `[...]` when `display`."""

    head: str
    items: tuple["Item", ...]
    tail: str = ")"
    display: bool = False

    def __str__(self) -> str:
        inner = ", ".join(map(str, self.items))
        lone = self.display and self.tail == ")" and len(self.items) == 1
        return f"{self.head}{inner}{',' if lone else ''}{self.tail}"


@dataclass(frozen=True)
class Named:
    """`name=value` or `"key": value` in a bracket."""

    name: str
    value: "Expr"

    def __str__(self) -> str:
        return f"{self.name}{self.value}"


Expr = str | Bracket
Item = Expr | Named


def call(
    function: str, args: Iterable[Expr] = (), kwargs: dict[str, Expr] | None = None
) -> Bracket:
    """`function(args, name=value)`."""
    named = tuple(Named(f"{name}=", value) for name, value in (kwargs or {}).items())
    return Bracket(f"{function}(", (*args, *named))


def statement(expr: Expr, indent: int, before: str = "", after: str = "") -> list[str]:
    """The lines of `before expr after`, broken where they are too long."""
    line = f"{' ' * indent}{before}{expr}{after}"
    if len(line) > WIDTH and isinstance(expr, str) and before and _INFIX.search(expr):
        return [
            f"{' ' * indent}{before}(",
            f"{' ' * (indent + 4)}{expr}",
            f"{' ' * indent}){after}",
        ]
    if len(line) <= WIDTH or isinstance(expr, str) or not expr.items:
        return [line]
    first, last = f"{' ' * indent}{before}{expr.head}", f"{' ' * indent}{expr.tail}{after}"
    inner = indent + 4
    body = ", ".join(map(str, expr.items))
    if not expr.display and inner + len(body) <= WIDTH:
        return [first, f"{' ' * inner}{body}", last]
    if len(expr.items) == 1 and isinstance(expr.items[0], Bracket) and not expr.display:
        return [first, *statement(expr.items[0], inner), last]
    lines = [first]
    for item in expr.items:
        if isinstance(item, Named):
            lines += statement(item.value, inner, before=item.name, after=",")
        else:
            lines += statement(item, inner, after=",")
    return [*lines, last]


def without_parentheses(expr: Expr) -> Expr:
    """An expression whose arguments have no parentheses of their own: `f(x + y)`."""
    if not isinstance(expr, Bracket):
        return expr
    items: list[Item] = []
    for item in expr.items:
        if isinstance(item, Named):
            items.append(Named(item.name, _bare(item.value)))
        else:
            items.append(_bare(item))
    return Bracket(expr.head, tuple(items), expr.tail, expr.display)


def _bare(expr: Expr) -> Expr:
    """An argument without the parentheses around all of it."""
    if isinstance(expr, Bracket):
        return without_parentheses(expr)
    depth = 0
    for place, sign in enumerate(expr):
        depth += (sign in "([{") - (sign in ")]}")
        if depth == 0 and place < len(expr) - 1:
            return expr
    inner = expr[1:-1]
    return inner if expr.startswith("(") and not _is_tuple(inner) else expr


def _is_tuple(text: str) -> bool:
    """Does a comma stand outside of all brackets?"""
    depth = 0
    for sign in text:
        depth += (sign in "([{") - (sign in ")]}")
        if sign == "," and depth == 0:
            return True
    return not text


def returned(names: Sequence[str], indent: int) -> list[str]:
    """`return a, b`, in parentheses where it is too long."""
    line = f"{' ' * indent}return {', '.join(names)}"
    if len(line) <= WIDTH or len(names) < 2:
        return [line]
    return statement(Bracket("(", tuple(names), display=True), indent, before="return ")


def docstring(lines: Sequence[str], indent: int) -> list[str]:
    """A docstring whose text cannot end it, escape from it or overflow the line."""
    pad, room = " " * indent, WIDTH - indent
    safe = [plain(line).rstrip() for line in lines]
    safe[0] = safe[0].lstrip()
    if len(safe) == 1 and len(safe[0]) + 6 <= room:
        return [f'{pad}"""{safe[0]}"""']
    wrapped = [part for line in safe[1:] for part in _wrapped(line, room)]
    head = _wrapped(safe[0], room - 3)
    body = [*(part.lstrip() for part in head[1:]), *wrapped]  # a hang of all lines is none
    return [f'{pad}"""{head[0]}', *(f"{pad}{line}".rstrip() for line in body), f'{pad}"""']


def plain(text: str) -> str:
    """Text without anything that means something in a string or comment of Python."""
    return "".join(c if c.isascii() and c.isprintable() and c not in '\\"' else "?" for c in text)


def _wrapped(line: str, room: int) -> list[str]:
    if len(line) <= room:
        return [line]
    hang = " " * (len(line) - len(line.lstrip()) + 4)
    words, wrapped, current = line.split(" "), [], ""
    for word in words:
        longer = f"{current} {word}" if current else word
        if len(longer) > room and current.strip():
            wrapped.append(current.rstrip())
            longer = hang + word
        current = longer
    wrapped.append(current)
    return [part[:room] for part in wrapped]


def quoted(text: str) -> str:
    """A string literal with the quotes that ruff prefers, whatever the text holds."""
    inner = text.encode("unicode_escape").decode("ascii")
    if '"' in inner and "'" not in inner:
        return f"'{inner}'"
    return '"' + inner.replace('"', '\\"') + '"'


def literal(value: Any) -> Expr:
    """A number, flag, text, dtype or nested list of such, as source."""
    if isinstance(value, bool) or value is None or isinstance(value, int):
        return repr(value)
    if isinstance(value, float):
        return repr(value).replace("e+", "e") if math.isfinite(value) else f'float("{value}")'
    if isinstance(value, complex):
        return repr(value)
    if isinstance(value, str):
        return quoted(value)
    if isinstance(value, torch.dtype | torch.memory_format | torch.layout):
        return repr(value)
    if isinstance(value, torch.device):
        return call("torch.device", [quoted(str(value))])
    if isinstance(value, list):
        return Bracket("[", tuple(literal(item) for item in value), "]", display=True)
    if isinstance(value, tuple):
        return Bracket("(", tuple(literal(item) for item in value), ")", display=True)
    raise TypeError(f"{type(value).__name__} has no literal")
