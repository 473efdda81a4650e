"""One function written out: a name for every value, a line for every step.

Names are chosen as people do: what goes through a chain of layers stays `x`, a side branch gets the
name of the layer that makes it, and a name is free again once its value is used up.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from partita.capture.torch_program import TensorSpec
from partita.emit.annotations import annotation, type_of
from partita.emit.calls import CheckpointSegment, Item, ModuleCall, is_again, reads
from partita.emit.names import POOL, unused, variable
from partita.emit.ops import written
from partita.emit.steps import EmittedValue, OpStep
from partita.emit.symbolic import Size
from partita.emit.text import Bracket, Expr, call, returned, statement

_DULL = re.compile(
    r"(conv|fc|linear|lin|bn|norm|ln|layer|block|act|relu|gelu|drop|dropout|pool|proj|features|h|net"
    r"|body|main|model|transformer|encoder|decoder|layernorm|embedding|softmax)[\d_]*"
)
_SHAPE_OPS = {
    "view", "reshape", "transpose", "permute", "unsqueeze", "squeeze", "expand", "contiguous", "to",
    "flatten", "unflatten", "clone", "select", "slice", "t", "type_as", "float",
}  # fmt: skip

_METHODS = _SHAPE_OPS - {"clone"} | {"mean", "sum", "masked_fill"}
_LONGEST_CHAIN = 50


LEAST_REPEATED = 3  # calls that are written as a loop
# What `helpers.py` writes: the mark of what a light piece runs again, and what puts buffers back.
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

    def training(self, step: OpStep) -> bool | None:
        """The mode a step ran in if it is the mode of the whole model, else None."""

    def arguments(self, item: ModuleCall, body: "EmittedBody") -> list[Expr] | None:
        """The arguments of a module that is not called `module(x, y)` plainly."""

    def targets(self, item: ModuleCall, body: "EmittedBody") -> str | None:
        """What the result of such a module is unpacked to."""


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
        self.chained: tuple[EmittedValue | None, str] = (None, "")  # a value that never gets a name
        self.source: EmittedValue | None = None  # what the chain starts from
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
        self.marks = not all(map(is_again, items))  # else whoever calls it marks it
        pad = " " * self.indent
        self._items(items, gives)
        known = [
            f"{pad}{name} = {self.sizes[name]}" for name in self.sizes if name in self.sizes_used
        ]
        return [*known, *self.lines]

    def name(self, value: EmittedValue) -> str:
        """The variable or attribute that holds a value, or the chain of methods so far."""
        if value is self.chained[0]:
            return self.chained[1]
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
        if not all(symbol in self.sizes for symbol in size.symbols):
            return str(int(size))
        self.sizes_used.update(dict.fromkeys(size.symbols))
        return size.text

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
            elif not self._chain(items[place - 1], items[place] if final is None else None):
                self._item(items[place - 1], final)
                self.chained = (None, "")
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
        outs: tuple[EmittedValue | None, ...]
        if isinstance(item, CheckpointSegment):
            expr: Expr = self._checkpointed(item)
            outs = tuple(item.gives)
            targets = self._targets(item, outs, is_list=False)
            plain = True
        elif isinstance(item, ModuleCall):
            arguments = self.paths.arguments(item, self) or [self.name(v) for v in item.takes]
            expr = call(self.paths.module(item.path), arguments)
            outs = tuple(item.gives)
            targets = self.paths.targets(item, self) or self._targets(item, outs, is_list=False)
            plain = len(outs) == 1 and targets == self.names[item.gives[0]]
        else:
            expr = written(item, _Env(self, self.paths.training(item)))
            outs = item.outs
            targets = self._targets(item, outs, item.is_list)
            plain = not item.is_list
        if gives is not None and plain and tuple(gives) == outs:
            self.lines += statement(expr, self.indent, before="return ")
            return
        self.lines += statement(expr, self.indent, before=f"{targets} = " if targets else "")
        if gives is not None:
            self._return(gives)

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
            if not isinstance(item, ModuleCall) or len(item.takes) != 1 or len(item.gives) != 1:
                break
            if is_again(item) != is_again(items[place]):
                break
            if module_calls:
                (value,) = module_calls[-1].gives
                is_next = item.takes == [value] and self.last[value] == place + len(module_calls)
                if not is_next or _numbered(item.path) != (
                    _numbered(module_calls[0].path)[0],
                    _numbered(module_calls[0].path)[1] + len(module_calls),
                ):
                    break
            module_calls.append(item)
        several = len(module_calls) >= LEAST_REPEATED and _numbered(module_calls[0].path)[1] >= 0
        whole = several and self.paths.all_of([call.path for call in module_calls])
        return module_calls if whole else []

    def _loop(self, calls: Sequence[ModuleCall], gives: Sequence[EmittedValue] | None) -> None:
        """`for block in self.blocks: x = block(x)`."""
        taken = self.name(calls[0].takes[0])
        name = self.bind(calls[0], calls[-1].gives[0])
        pad = " " * self.indent
        if name != taken:
            self.lines.append(f"{pad}{name} = {taken}")
        block = unused("block", self.names.values())
        self.lines.append(f"{pad}for {block} in {self.paths.all_of([c.path for c in calls])}:")
        self.lines.append(f"{pad}    {name} = {block}({name})")
        self.place += len(calls) - 1
        if gives is not None:
            self._return(gives)

    def _chain(self, item: Item, following: Item | None) -> bool:
        """`x.view(2, 3).transpose(0, 1)`: a method whose result only the next method reads."""
        if not (isinstance(item, OpStep) and isinstance(following, OpStep)) or item.is_list:
            return False
        if item.recomputed != following.recomputed:
            return False
        value = item.outs[0]
        alone = value is not None and [v for v in following.reads() if v is value] == [value]
        last = alone and value is not None and self.last[value] == self.place + 1
        if not last or following.args[0] is not value or following.operator not in _METHODS:
            return False
        text = str(written(item, _Env(self, self.paths.training(item))))
        if item.operator not in _METHODS or len(text) > _LONGEST_CHAIN:
            return False
        if self.chained[0] is None:
            self.source = next((v for v in item.reads() if not v.is_state), None)
        self.chained = (value, text)
        return True

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
        name = self._continued(item, live) or unused(self._fresh(item, live), live)
        self.names.pop(out, None)
        self.names[out] = name
        return name

    def _continued(self, item: Item, live: set[str]) -> str | None:
        """The name of the first argument, if the chain goes on and its value is used up."""
        given = [value for value in reads(item) if not value.is_state]
        first = given[0] if given else None
        if first is not None and first is self.chained[0]:
            first = self.source
        old = None if first is None else self.names.get(first)
        if old is None or old in live:
            return None
        same = isinstance(item, OpStep) and item.operator in _SHAPE_OPS
        return old if same or old.split("_")[0] in POOL else None

    def _fresh(self, item: Item, live: set[str]) -> str:
        if isinstance(item, ModuleCall):
            own = [part for part in item.path.split(".") if not part.isdigit()]
            if own and not _DULL.fullmatch(own[-1].lower()):
                return variable(own[-1])
        free = next((name for name in POOL if name not in live), None)
        if free is None and isinstance(item, OpStep):  # rather than x_2
            return variable(item.operator)
        return free or POOL[0]


def _sizes(takes: Sequence[tuple[EmittedValue, str]]) -> dict[str, str]:
    """Where the batch and the length can be read: `ids.shape[0]`."""
    told: dict[str, str] = {}
    taken = {name for _, name in takes}
    for value, name in takes:
        shape = value.meta.shape if isinstance(value.meta, TensorSpec) else ()
        for place, size in enumerate(shape):
            plain = isinstance(size, Size) and size.factor == 1 and not size.more
            if plain and len(size.symbols) == 1 and size.symbols[0] not in taken:
                told.setdefault(size.symbols[0], f"{name}.shape[{place}]")
    return told


def _numbered(path: str) -> tuple[str, int]:
    """`h.3` as ("h", 3); -1 for what has no number."""
    parent, _, name = path.rpartition(".")
    return parent, int(name) if name.isdecimal() and name.isascii() else -1
