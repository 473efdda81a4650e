"""Classes that differ only in sizes are written once, with the sizes as arguments.

A drafted class makes other modules by expressions in which `<3>()` stands for an instance of draft
3. Two drafts are of one family if everything but the whole numbers in their expressions is equal,
families of inner classes included. Numbers that differ between the members become arguments of
`__init__`; those that always go together become one.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import nn

from partita.emit.modules import argument_names
from partita.emit.names import class_name, unused, variable
from partita.emit.text import Bracket, Expr, Item, Named, call, docstring, statement

_PLACE = re.compile(r"<(\d+)>\(\)")
_ATTRIBUTE = re.compile(r"(\w+)\W*$")


@dataclass(frozen=True)
class UnnamedClass:
    """A class before it has a name. Members of a family have the same `group` and `forward`."""

    group: str
    title: str
    doc: tuple[str, ...]
    made: tuple[tuple[str, Expr], ...]  # (what stands before, expression) of `__init__`
    signature: Bracket
    forward_doc: str
    body: tuple[str, ...]
    fields: tuple[str, ...] = ()
    tensors: frozenset[str] = frozenset()

    def lines(self, made: Sequence[tuple[str, Expr]], arguments: Sequence[str] = ()) -> list[str]:
        """The class after its first line, with what it makes as it is finally made."""
        lines = docstring(self.doc, 4)
        if self.fields:
            lines += ["", *self.fields]
        if made:
            given = ("self", *(f"{name}: int" for name in arguments))
            init = statement(Bracket("def __init__(", given, ") -> None:"), 4)
            lines += ["", *init, "        super().__init__()"]
        for before, expr in made:
            lines += statement(expr, 8, before=before)
        lines += ["", *statement(self.signature, 4), *docstring([self.forward_doc], 8)]
        return [*lines, *self.body]


def instance(draft: int) -> str:
    """The expression that stands for an instance of a draft."""
    return f"<{draft}>()"


def draft_of(expr: Expr) -> int | None:
    """The draft that an expression is an instance of."""
    match = _PLACE.fullmatch(str(expr))
    return None if match is None else int(match[1])


@dataclass
class _Family:
    name: str
    first: UnnamedClass
    hints: list[tuple[str, str]]  # (attribute, argument) each number is for
    members: list[tuple[int, ...]] = field(default_factory=list)
    docs: set[str] = field(default_factory=set)

    def columns(self) -> dict[int, int]:
        """Number -> the first number that always equals it, for numbers that are not constant."""
        first_place: dict[tuple[int, ...], int] = {}
        chosen = {}
        for place, column in enumerate(zip(*self.members, strict=True)):
            if len(set(column)) > 1:
                chosen[place] = first_place.setdefault(column, place)
        return chosen

    def arguments(self) -> dict[int, str]:
        """The argument for each first number."""
        names: dict[int, str] = {}
        for place in sorted(set(self.columns().values())):
            attribute, hint = self.hints[place]
            plain = variable(hint)
            taken = names.values()
            names[place] = plain if plain not in taken else unused(
                variable(f"{attribute}_{hint}"), taken
            )  # fmt: skip
        return names


class Families:
    """The final classes of drafts; `reserved` are names that other classes have."""

    def __init__(self, drafts: Sequence[UnnamedClass], reserved: set[str]) -> None:
        self.family_of: list[_Family] = []
        self.numbers_of: list[tuple[int, ...]] = []
        families: dict[object, _Family] = {}
        for draft in drafts:
            parts = list(self._parts(draft))
            numbers = tuple(number for number, *_ in parts)
            key = (draft.group, self._shape(draft), str(draft.signature), draft.body)
            if key not in families:
                taken = (*reserved, *(family.name for family in families.values()))
                name = unused(class_name(draft.title), taken, between="")
                hints = [(attribute, hint) for _, attribute, hint in parts]
                families[key] = _Family(name, draft, hints)
            family = families[key]
            family.docs.add(draft.forward_doc)
            if numbers not in family.members:
                family.members.append(numbers)
            self.family_of.append(family)
            self.numbers_of.append(numbers)
        self.families = list(families.values())

    def classes(self) -> Iterator[tuple[str, list[str]]]:
        """(name, lines after the first) of every class."""
        for family in self.families:
            arguments = family.arguments()
            text = {p: arguments[first] for p, first in family.columns().items()}
            made = self._made(family.first, text, family.members[0])
            many = "What it gives for its inputs."
            doc = family.first.forward_doc if len(family.docs) == 1 else many
            shown = replace(family.first, forward_doc=doc)
            yield family.name, shown.lines(made, list(arguments.values()))

    def final(self, draft: UnnamedClass) -> list[tuple[str, Expr]]:
        """What a class outside all families makes, written with the final classes."""
        numbers = tuple(number for number, *_ in self._parts(draft))
        return self._made(draft, {}, numbers)

    # Numbers of an expression, in order.

    def _parts(self, draft: UnnamedClass) -> Iterator[tuple[int, str, str]]:
        """(number, attribute, argument) of every number in a draft, inner classes included."""
        for before, expr in draft.made:
            match = _ATTRIBUTE.search(before)
            attribute = match[1] if match else ""
            for number, hint in self._numbers(expr, "size"):
                yield number, attribute, hint

    def _numbers(self, item: Item, hint: str) -> Iterator[tuple[int, str]]:
        if isinstance(item, Named):
            name = item.name.rstrip("=: ")
            yield from self._numbers(item.value, name if name.isidentifier() else hint)
        elif isinstance(item, Bracket):
            names = _names_of(item.head)
            for place, inner in enumerate(item.items):
                yield from self._numbers(inner, names[place] if place < len(names) else hint)
        elif item.isdecimal():
            yield int(item), hint
        else:
            for match in _PLACE.finditer(item):
                family = self.family_of[int(match[1])]
                hints = [name for _, name in family.hints]
                yield from zip(self.numbers_of[int(match[1])], hints, strict=True)

    def _shape(self, draft: UnnamedClass) -> str:
        """All that makes a draft but its numbers."""
        return "\n".join(f"{before}{self._masked(expr)}" for before, expr in draft.made)

    def _masked(self, item: Item) -> str:
        if isinstance(item, Named):
            return f"{item.name}{self._masked(item.value)}"
        if isinstance(item, Bracket):
            return f"{item.head}{', '.join(map(self._masked, item.items))}{item.tail}"
        if item.isdecimal():
            return "#"
        return _PLACE.sub(lambda match: self.family_of[int(match[1])].name, item)

    # Expressions with the final classes.

    def _made(
        self, draft: UnnamedClass, text: Mapping[int, str], numbers: tuple[int, ...]
    ) -> list[tuple[str, Expr]]:
        shown = [text.get(place, str(number)) for place, number in enumerate(numbers)]
        left = iter(shown)
        return [(before, self._rebuilt(expr, left)) for before, expr in draft.made]

    def _rebuilt(self, item: Expr, left: Iterator[str]) -> Expr:
        if isinstance(item, Bracket):
            items = tuple(self._rebuilt_item(inner, left) for inner in item.items)
            return Bracket(item.head, items, item.tail, item.display)
        if item.isdecimal():
            return next(left)
        if _PLACE.fullmatch(item):
            return self._call(int(item[1:-3]), left)
        return _PLACE.sub(lambda match: str(self._call(int(match[1]), left)), item)

    def _rebuilt_item(self, item: Item, left: Iterator[str]) -> Item:
        if isinstance(item, Named):
            return Named(item.name, self._rebuilt(item.value, left))
        return self._rebuilt(item, left)

    def _call(self, draft: int, left: Iterator[str]) -> Bracket:
        family = self.family_of[draft]
        values = [next(left) for _ in self.numbers_of[draft]]
        return call(family.name, [values[place] for place in family.arguments()])


def _names_of(head: str) -> list[str]:
    """The arguments of the PyTorch layer that a bracket makes."""
    kind = getattr(nn, head.removeprefix("nn.").removesuffix("("), None)
    if head.startswith("nn.") and isinstance(kind, type) and issubclass(kind, nn.Module):
        return argument_names(kind)
    return []
