"""One function written out: a name for every value, a line for every step.

A value is called what the model's own code calls it, or after the layer that makes it
(`naming.py`); a name is free again once its value is used up.
"""

import ast
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from partita.capture.torch_program import TensorSpec
from partita.emit.annotations import annotation, type_of
from partita.emit.calls import CheckpointSegment, Item, ModuleCall, is_again, reads
from partita.emit.names import unused, variable
from partita.emit.naming import CHAINED, MOST_FOLDED, Naming, has_role, made_up, outs_of
from partita.emit.ops import written
from partita.emit.size import Size
from partita.emit.steps import SHAPE_OPS, EmittedValue, OpStep
from partita.emit.text import Bracket, Expr, call, returned, statement, without_parentheses

_METHODS = SHAPE_OPS - {"clone"} | {"mean", "sum", "masked_fill"}
_LONGEST_CHAIN = 50
_WHOLE = (ast.Call, ast.Subscript, ast.Attribute, ast.Name, ast.List, ast.Tuple, ast.Constant)


LEAST_REPEATED = 3  # calls that are written as a loop
# What `helpers.py` writes: the mark of what a light piece runs again, and what puts buffers back.
TOKENS = "tokens"  # batch x length, where the arguments tell the product alone
RUN_AGAIN, COUNTED_ONCE = "RUN_AGAIN", "CountedOnce"


class HolderPaths(Protocol):
    """Where a function finds what its class holds."""

    def state(self, value: EmittedValue) -> str:
        """The attribute that holds a parameter, buffer or constant."""

    def module(self, path: str) -> str:
        """The attribute that holds a module, by its name in the model."""

    def all_of(self, paths: Sequence[str]) -> str | None:
        """The collection of these modules, if they are all that is in it, in its order."""

    def tensor(self) -> str | None:
        """A tensor that the class holds, if any."""

    def unread(self, size: Size) -> None:
        """Nothing here tells what a size follows; if this returns, it is written as a number."""

    def training(self, step: OpStep) -> bool | None:
        """The mode a step ran in if it is the mode of the whole model, else None."""

    def arguments(self, item: ModuleCall, body: "EmittedBody") -> list[Expr] | None:
        """The arguments of a module that is not called `module(x, y)` plainly."""

    def targets(self, item: ModuleCall, body: "EmittedBody") -> str | None:
        """What the result of such a module is unpacked to."""

    def is_unpacked(self, item: ModuleCall) -> bool:
        """Is a module such a one?"""


@dataclass
class _Env:
    """What an expression may ask of the body around it."""

    body: "EmittedBody"
    training: bool | None

    def name(self, value: EmittedValue) -> str:
        return self.body.name(value)

    def tensor(self) -> str | None:
        return self.body.tensor()

    def size(self, size: Size) -> str:
        return self.body.size(size)


@dataclass(frozen=True)
class _FoldedExpr:
    """An expression that waits for the one that it is a part of."""

    value: EmittedValue
    item: Item
    place: int
    expr: Expr


class EmittedBody:
    """The lines of one `forward`."""

    def __init__(
        self, paths: HolderPaths, takes: Sequence[tuple[EmittedValue, str]], indent: int = 8
    ) -> None:
        self.paths = paths
        self.names: dict[EmittedValue, str] = dict(takes)
        self.takes = [value for value, _ in takes]
        self.indent = indent
        self.lines: list[str] = []
        self.last: dict[EmittedValue, int] = {}
        self.place = -1
        self.naming = Naming((), {})
        self.folded: dict[EmittedValue, str] = {}  # values that never get a name, as expressions
        self.sources: dict[EmittedValue, EmittedValue | None] = {}  # what such a one starts from
        self.within: dict[EmittedValue, tuple[EmittedValue, ...]] = {}  # all that it reads
        self.pending: list[_FoldedExpr] = []  # such ones that are not written yet, as they come
        self.functions: list[str] = []  # written for pieces
        self.marks = False
        self.marked = False  # inside of what runs again
        self.sizes = _sizes(takes)  # what of the batch and the length the arguments tell
        self.sizes_used: dict[str, None] = {}

    def write(self, items: Sequence[Item], gives: Sequence[EmittedValue]) -> list[str]:
        """The lines for items, and the return of what is given."""
        for place, item in enumerate(items):
            self.last.update((value, place) for value in reads(item))
        self.last.update((value, 1 << 60) for value in gives)
        self.naming = Naming(items, self.last)
        self.marks = not all(map(is_again, items))  # else whoever calls it marks it
        pad = " " * self.indent
        self._items(items, gives)
        known = [
            f"{pad}{name} = {self.sizes[name]}" for name in self.sizes if name in self.sizes_used
        ]
        return [*known, *self.lines]

    def name(self, value: EmittedValue) -> str:
        """The variable or attribute that holds a value, or the chain of methods so far."""
        if value in self.folded:
            return self.folded[value]
        if value in self.names:  # an argument, though it may be a parameter of another module
            return self.names[value]
        return self.paths.state(value)

    def tensor(self) -> str | None:
        """A tensor that is surely at hand: the first argument, or a value of this moment."""
        for value, name in self.names.items():
            if isinstance(value.meta, TensorSpec) and self._holds(value, name):
                return name
        return self.paths.tensor()

    def size(self, size: Size) -> str:
        """A size in terms of the arguments' sizes, or its number where they do not tell."""
        if all(symbol in self.sizes for symbol in size.symbols):
            self.sizes_used.update(dict.fromkeys(size.symbols))
            return size.text
        if len(size.symbols) > 1 and TOKENS in self.sizes:
            self.sizes_used[TOKENS] = None
            return size.of(TOKENS)
        self.paths.unread(size)
        return str(int(size))

    def _matters(self, value: EmittedValue) -> bool:
        return self.last.get(value, -1) >= self.place or value in self.takes

    def _holds(self, value: EmittedValue, name: str) -> bool:
        newest = [other for other, known in self.names.items() if known == name][-1]
        return newest is value

    def _items(self, items: Sequence[Item], gives: Sequence[EmittedValue]) -> None:
        place = 0
        while place < len(items):
            self.place = place
            if place % 64 == 0:  # names that nobody can mean any more
                self.names = {v: n for v, n in self.names.items() if self._matters(v)}
            self._mark(self.marks and is_again(items[place]))
            calls = self._repeated(items, place)
            place += max(1, len(calls))
            final = gives if place == len(items) else None
            if calls:
                self._loop(calls, final)
            elif not self._fold(items[place - 1], items[place] if final is None else None):
                self._item(items[place - 1], final)
        if not items:
            self._return(gives)

    def _mark(self, again: bool) -> None:
        """Go into, or out of, what is marked to run again."""
        if again and not self.marked:
            self.lines.append(f"{' ' * self.indent}with {RUN_AGAIN}:")
        if again != self.marked:
            self.indent += 4 if again else -4
            self.marked = again

    def _item(self, item: Item, gives: Sequence[EmittedValue] | None) -> None:
        self._settle(item, is_written=True)
        expr = self._expression(item)
        outs = tuple(outs_of(item))
        if isinstance(item, ModuleCall):
            targets = self.paths.targets(item, self) or self._targets(item, outs, is_list=False)
            plain = len(outs) == 1 and targets == self.names[item.gives[0]]
        else:
            is_list = isinstance(item, OpStep) and item.is_list
            targets = self._targets(item, outs, is_list)
            plain = not is_list
        if gives is not None and plain and tuple(gives) == outs:
            self.lines += statement(expr, self.indent, before="return ")
            return
        self.lines += statement(expr, self.indent, before=f"{targets} = " if targets else "")
        if gives is not None:
            self._return(gives)

    def _expression(self, item: Item) -> Expr:
        if isinstance(item, CheckpointSegment):
            return self._checkpointed(item)
        if isinstance(item, ModuleCall):
            arguments = self.paths.arguments(item, self) or [self.name(v) for v in item.takes]
            return without_parentheses(call(self.paths.module(item.path), arguments))
        return without_parentheses(written(item, _Env(self, self.paths.training(item))))

    def _checkpointed(self, piece: CheckpointSegment) -> Expr:
        """The call that runs a piece; unless it is one module, as a function written before it."""
        taken = [v for v in piece.takes if v in self.names]  # else the class holds it
        names = [self.name(value) for value in taken]
        kwargs: dict[str, Expr] = {"use_reentrant": "False"}
        if piece.selective:
            kwargs["context_fn"] = f"{RUN_AGAIN}.contexts"
        elif piece.changes:
            kwargs["context_fn"] = f"{COUNTED_ONCE}(self)"
        only = piece.items[0]
        if isinstance(only, ModuleCall) and len(piece.items) == 1 and only.takes == taken:
            plain = self.paths.arguments(only, self) is None and only.gives == piece.gives
            if plain and not is_again(only):
                return call("checkpoint", [self.paths.module(only.path), *names], kwargs)
        function = unused("piece", (*self.names.values(), *self.functions))
        self.functions.append(function)
        given = [f"{name}: {type_of(value)}" for value, name in zip(taken, names, strict=True)]
        signature = Bracket(f"def {function}(", tuple(given), f") -> {annotation(piece.gives)}:")
        inner = EmittedBody(self.paths, list(zip(taken, names, strict=True)), self.indent + 4)
        body = inner.write(piece.items, piece.gives)
        self.lines += ["", *statement(signature, self.indent), *body, ""]
        return call("checkpoint", [function, *names], kwargs)

    def _repeated(self, items: Sequence[Item], place: int) -> list[ModuleCall]:
        """The calls from here on that run all of a list of modules, each on what the last gave."""
        module_calls: list[ModuleCall] = []
        for item in items[place:]:
            if not isinstance(item, ModuleCall) or not item.takes or len(item.gives) != 1:
                break
            if is_again(item) != is_again(items[place]):
                break
            if module_calls:
                parent, number = _numbered(module_calls[0].path)
                is_next = _numbered(item.path) == (parent, number + len(module_calls))
                (value,) = module_calls[-1].gives
                is_next &= self.last[value] == place + len(module_calls)
                if not is_next or _follows(module_calls, item) is None:
                    break
            module_calls.append(item)
        several = len(module_calls) >= LEAST_REPEATED and _numbered(module_calls[0].path)[1] >= 0
        whole = several and self.paths.all_of([call.path for call in module_calls])
        return module_calls if whole else []

    def _loop(self, calls: Sequence[ModuleCall], gives: Sequence[EmittedValue] | None) -> None:
        """`for block in self.blocks: x = block(x, mask)`."""
        self._settle(calls[0], is_written=True)
        place = _follows(calls[:1], calls[1]) or 0
        taken = self.name(calls[0].takes[place])
        name = self.bind(calls[0], calls[-1].gives[0])
        pad = " " * self.indent
        if name != taken:
            self.lines.append(f"{pad}{name} = {taken}")
        block = unused("block", self.names.values())
        self.lines.append(f"{pad}for {block} in {self.paths.all_of([c.path for c in calls])}:")
        given = [self.name(value) for value in calls[0].takes]
        given[place] = name
        expr = call(block, given)
        self.lines += statement(expr, self.indent + 4, before=f"{name} = ")
        self.place += len(calls) - 1
        if gives is not None:
            self._return(gives)

    def _fold(self, item: Item, following: Item | None) -> bool:
        """Keep what an item makes as an expression within that of its reader, if it has one."""
        if isinstance(item, CheckpointSegment) or following is None:
            return False
        reader, longest = self.naming.reader(self.place), MOST_FOLDED
        if self._is_chained(item, following):
            reader, longest = self.place + 1, _LONGEST_CHAIN
        (value, *others) = outs_of(item) or (None,)
        if reader is None or value is None or others or self._is_unusual(item):
            return False
        self._settle(item, is_written=False)
        given = [v for v in reads(item) if not v.is_state]
        reading = self.naming.items[reader]
        if not isinstance(reading, OpStep) or reading.operator in _METHODS:
            longest = _LONGEST_CHAIN
        expr = self._expression(item)
        text = str(expr)
        if len(text) > longest:
            return False
        self.pending = [each for each in self.pending if each.value not in given]
        is_whole = isinstance(ast.parse(text, mode="eval").body, _WHOLE)
        self.folded[value] = text if is_whole else f"({text})"
        self.pending.append(_FoldedExpr(value, item, self.place, expr))
        first = given[0] if given else None
        self.sources[value] = first if first is None else self.sources.get(first, first)
        self.within[value] = tuple(u for v in given for u in self.within.get(v, (v,)))
        self.last.update((v, max(self.last.get(v, -1), reader)) for v in self.within[value])
        return True

    def _settle(self, item: Item, is_written: bool) -> None:
        """Write what waits for a place in an expression, where an item would come before it.

        Operators stay in their order: the last bit of a gradient hangs on it, and what is drawn.
        """
        consumed = [value for value in reads(item) if value in self.folded]
        waiting = [each.value for each in self.pending]
        kept = len(waiting) - len(consumed)
        in_order = waiting[kept:] == consumed
        early = self.pending if not in_order else self.pending[:kept] if is_written else []
        here = self.place
        for each in early:
            self.place = each.place
            del self.folded[each.value]
            name = self.bind(each.item, each.value)
            self.lines += statement(each.expr, self.indent, before=f"{name} = ")
        self.place = here
        gone = {each.value for each in early} | (set(consumed) if is_written else set())
        self.pending = [each for each in self.pending if each.value not in gone]

    def _is_unusual(self, item: Item) -> bool:
        """Is it a module whose result is unpacked?"""
        return isinstance(item, ModuleCall) and self.paths.is_unpacked(item)

    def _is_chained(self, item: Item, following: Item) -> bool:
        """`x.view(2, 3).transpose(0, 1)`: a method whose result only the next method reads."""
        if not (isinstance(item, OpStep) and isinstance(following, OpStep)) or item.is_list:
            return False
        value = item.outs[0]
        alone = value is not None and [v for v in following.reads() if v is value] == [value]
        if not alone or value is None or self.last[value] != self.place + 1:
            return False
        methods = item.operator in _METHODS and following.operator in _METHODS
        return methods and following.args[0] is value and item.recomputed == following.recomputed

    def _return(self, gives: Sequence[EmittedValue]) -> None:
        if gives:
            self.lines += returned([self.name(value) for value in gives], self.indent)

    def _targets(self, item: Item, outs: Sequence[EmittedValue | None], is_list: bool) -> str:
        if all(out is None for out in outs):
            return ""
        names = ["_" if out is None else self.bind(item, out) for out in outs]
        return f"({names[0]},)" if is_list and len(names) == 1 else ", ".join(names)

    def bind(self, item: Item, out: EmittedValue) -> str:
        """A name for what an item gives, remembered for its readers."""
        live = {name for value, name in self.names.items() if self.last.get(value, -1) > self.place}
        live |= self.sizes.keys()
        name = unused(self._called(item, out, live), live)
        self.names.pop(out, None)
        self.names[out] = name
        return name

    def _called(self, item: Item, out: EmittedValue, live: set[str]) -> str:
        """What the model calls it, what it is made of, or what it is."""
        hint = self.naming.hints.get(out)
        sentence = self.naming.sentences[self.place]
        if hint is not None and sentence is not None and sentence.is_code:
            if hint not in live or self._moved(hint, live, dict(sentence.renamed)):
                return hint
            hint = None
        if hint is not None and has_role(item) and hint not in live:
            return hint
        is_call = isinstance(item, ModuleCall)
        if hint is None and is_call and has_role(item) and made_up(item) not in live:
            return made_up(item)
        old = self._continued(item, live)
        if old is not None:
            return old
        if hint is None and isinstance(item, OpStep) and item.operator in SHAPE_OPS:
            return self._seen_as(item)
        name = hint or made_up(item)
        return name if name not in live else made_up(item)

    def _moved(self, name: str, live: set[str], renamed: dict[str, str]) -> bool:
        """`residual = x`, where the model does so before it makes another `x`."""
        other = renamed.get(name)
        read = {known for v, known in self.names.items() if self.last.get(v, -1) >= self.place}
        if other is None or other in live | read or other == name:
            return False
        holders = [value for value, known in self.names.items() if known == name]
        if any(name in text for text in self.folded.values()):
            return False
        self.lines.append(f"{' ' * self.indent}{other} = {name}")
        self.names.update((value, other) for value in holders)
        live.add(other)
        live.discard(name)
        return True

    def _seen_as(self, step: OpStep) -> str:
        """`ids_view` for another shape of what is still needed."""
        old = self._first(step) or next((v.names[0] for v in step.reads() if v.is_state), None)
        old = None if old is None else variable(old.rpartition(".")[2])
        word = "cast" if step.operator in ("to", "type_as", "float") else "view"
        return word if old is None else f"{old.removesuffix(f'_{word}')}_{word}"

    def _first(self, item: Item) -> str | None:
        """The variable that an item works on first."""
        given = [value for value in reads(item) if not value.is_state]
        first = given[0] if given else None
        first = None if first is None else self.sources.get(first, first)
        return None if first is None else self.names.get(first)

    def _continued(self, item: Item, live: set[str]) -> str | None:
        """The name of the first argument, if the chain goes on and its value is used up."""
        old = self._first(item)
        if old is None or old in live:
            return None
        same = isinstance(item, OpStep) and item.operator in SHAPE_OPS
        return old if same or old in CHAINED else None


def _sizes(takes: Sequence[tuple[EmittedValue, str]]) -> dict[str, str]:
    """Where the batch and the length can be read: `ids.shape[0]`, `x.shape[0] // 4`.

    Their product is told too, if not each of them is.
    """
    told: dict[str, str] = {}
    taken = {name for _, name in takes}
    sizes = [
        (size, f"{name}.shape[{place}]")
        for value, name in takes
        if isinstance(value.meta, TensorSpec)
        for place, size in enumerate(value.meta.shape)
        if isinstance(size, Size)
    ]
    for size, text in sorted(sizes, key=lambda pair: (pair[0].factor, abs(pair[0].more))):
        symbol = TOKENS if len(size.symbols) > 1 else size.symbols[0]
        if symbol not in taken:
            told.setdefault(symbol, _solved(size, text))
    return told


def _solved(size: Size, text: str) -> str:
    """The symbol of a size, from the text that gives the size."""
    if size.more:
        return f"{text} {'-' if size.more > 0 else '+'} {abs(size.more)}"
    return f"{text} // {size.factor}" if size.factor > 1 else text


def _follows(calls: Sequence[ModuleCall], item: ModuleCall) -> int | None:
    """Which argument of a call is what the last one gave, if the others are those of all before."""
    if len(item.takes) != len(calls[0].takes):
        return None
    pairs = list(zip(item.takes, calls[0].takes, strict=True))
    other = [place for place, (one, first) in enumerate(pairs) if one is not first]
    is_chain = len(other) == 1 and item.takes[other[0]] is calls[-1].gives[0]
    same_place = len(calls) < 2 or _follows(calls[:1], calls[1]) == other[0]
    return other[0] if is_chain and same_place else None


def _numbered(path: str) -> tuple[str, int]:
    """`h.3` as ("h", 3); -1 for what has no number."""
    parent, _, name = path.rpartition(".")
    return parent, int(name) if name.isdecimal() and name.isascii() else -1
