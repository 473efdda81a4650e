"""Classes written out: a module's parts in `__init__`, what it does in `forward`.

Modules that do the same get one class: of twelve equal transformer blocks one is written.
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import nn

from partita.capture.torch_program import TensorSpec
from partita.emit.annotations import annotation, type_of
from partita.emit.body import EmittedBody
from partita.emit.calls import Item, ModuleCall, called, is_own
from partita.emit.families import UnnamedClass, draft_of, instance
from partita.emit.holding import Holding
from partita.emit.layers import RecurrentCall, layer, recurrent, sequence
from partita.emit.names import POOL, unused, variable
from partita.emit.naming import argument_name
from partita.emit.size import Size
from partita.emit.steps import EmittedValue, OpStep
from partita.emit.text import Bracket, Expr


class NotAlike(Exception):  # noqa: N818  never leaves the package: it asks for another try
    """The module at `path` is written out: its calls differ, or others reach into it."""

    def __init__(self, path: str) -> None:
        self.path = path


@dataclass
class Classes:
    """The classes written so far, and the model they come from."""

    model: nn.Module
    drafts: list[UnnamedClass] = field(default_factory=list)
    made: dict[str, Expr] = field(default_factory=dict)  # path -> what makes the module there
    asked: dict[ModuleCall, Expr] = field(default_factory=dict)
    unread: dict[str, None] = field(default_factory=dict)  # symbols whose sizes stay numbers

    def maker(self, item: ModuleCall) -> Expr:
        """The expression that makes a called module: PyTorch's own, or a class written for it."""
        if item in self.asked:
            return self.asked[item]
        module = self.model.get_submodule(item.path)
        if item.is_divided and type(module) is nn.Sequential:
            raise NotAlike(item.path)  # its parts have no names to write a class with
        own = self._own(item, module) or instance(self._drafted(item, module))
        self.asked[item] = own
        known = self.made.setdefault(item.path, own)
        if str(known) != str(own):
            raise NotAlike(item.path)
        return own

    def _own(self, item: ModuleCall, module: nn.Module) -> Expr | None:
        """What makes one of PyTorch's layers, or a sequence of modules."""
        if item.is_divided:
            return None
        bracket = layer(item, module)
        if bracket is None and type(module) is nn.Sequential:
            for inner in item.items:
                if isinstance(inner, ModuleCall):
                    self.maker(inner)
            bracket = sequence(item, module, self.made)
        return bracket

    def _drafted(self, item: ModuleCall, module: nn.Module) -> int:
        """The number of the draft of a module's class; equal modules share one."""
        paths = ClassPaths(self, item.path, item.items, item.gives)
        title = _title(item.path, module)
        names = _argument_names(item.path, module, item.takes)
        draft = drafted(
            paths, item.items, list(zip(item.takes, names, strict=True)), item.gives,
            title=title,
            group="" if type(module) is nn.Module else f"{type(module)} {title}",
            doc=[f"The model's {title}."],
            forward_doc=f"{shapes(item.takes)} to {shapes(item.gives)}.",
        )  # fmt: skip
        if draft not in self.drafts:
            self.drafts.append(draft)
        return self.drafts.index(draft)

    def holds(self, expr: Expr, module: nn.Module, tensor: str) -> bool:
        """True if a made module has the tensor of that name in it."""
        number = draft_of(expr)
        if number is not None:
            return tensor in self.drafts[number].tensors
        return tensor in dict(module.named_parameters(remove_duplicate=False)) or tensor in dict(
            module.named_buffers(remove_duplicate=False)
        )


class ClassPaths:
    """Where the forward of one class finds the modules and tensors of the model at `prefix`."""

    def __init__(
        self, classes: Classes, prefix: str, items: Sequence[Item], gives: Sequence[EmittedValue]
    ) -> None:
        self.classes = classes
        self.prefix = prefix
        self.holding = Holding()
        self.modules: dict[str, Expr] = {}
        loose: dict[EmittedValue, None] = {}
        for item in called(items):
            if isinstance(item, ModuleCall):
                self._hold(item)
                loose.update((v, None) for v in item.takes if self._is_mine(v))
            else:
                loose.update((v, None) for v in item.reads() if self._is_mine(v))
        loose.update((v, None) for v in gives if self._is_mine(v))
        self.loose = {value: self._path(value) for value in loose}
        for value, path in self.loose.items():
            self._check(path)
            self.holding.add_tensor(path, value)
        self.holding.settle()
        self.tensors = self._all_tensors()

    def unread(self, size: Size) -> None:
        """Nothing here tells what a size follows: a module is written where it is called instead.

        A stage of which nobody can tell has the number.
        """
        if self.prefix:
            raise NotAlike(self.prefix)
        self.classes.unread.update(dict.fromkeys(size.symbols[-1:]))

    def _hold(self, item: ModuleCall) -> None:
        expr = self.classes.maker(item)
        path = self._relative(item.path)
        self.modules[path] = expr
        self.holding.add_module(path, expr)

    def _is_mine(self, value: EmittedValue) -> bool:
        return value.is_state and (not self.prefix or is_own(value, self.prefix))

    def _relative(self, path: str) -> str:
        return path.removeprefix(f"{self.prefix}.") if self.prefix else path

    def _path(self, value: EmittedValue) -> str:
        """The shortest way to a tensor: a name within a module that is held anyway, else any."""
        start = f"{self.prefix}." if self.prefix else ""
        names = [name.removeprefix(start) for name in value.names if name.startswith(start)]
        inside = [name for name in names if name.rpartition(".")[0] in self.modules]
        return (inside or names)[0]

    def _check(self, path: str) -> None:
        """A tensor within a module that is made whole must be there."""
        for outer, expr in self.modules.items():
            if path.startswith(f"{outer}."):
                whole = f"{self.prefix}.{outer}" if self.prefix else outer
                module = self.classes.model.get_submodule(whole)
                if not self.classes.holds(expr, module, path.removeprefix(f"{outer}.")):
                    raise NotAlike(whole)

    def _all_tensors(self) -> list[str]:
        tensors = list(self.loose.values())
        for path, expr in self.modules.items():
            whole = f"{self.prefix}.{path}" if self.prefix else path
            module = self.classes.model.get_submodule(whole)
            named = (*module.named_parameters(remove_duplicate=False), *module.named_buffers())
            tensors += [f"{path}.{n}" for n, _ in named if self.classes.holds(expr, module, n)]
        return list(dict.fromkeys(tensors))

    # What a body asks.

    def state(self, value: EmittedValue) -> str:
        """The attribute that holds a parameter, buffer or constant."""
        path = self.loose[value]
        for outer in self.modules:
            inner = path.removeprefix(f"{outer}.")
            if inner != path and "." in inner:  # deep in a class of its own
                kind = "parameter" if value.kind == "parameter" else "buffer"
                return f'{self.holding.module(outer)}.get_{kind}("{inner}")'
        return self.holding.tensor(path, value)

    def module(self, path: str) -> str:
        """The attribute that holds a module, by its name in the model."""
        return self.holding.module(self._relative(path))

    def all_of(self, paths: Sequence[str]) -> str | None:
        """`self.h` for all of a list of modules, `self.h.values()` for all of a dict."""
        if any(self._recurrent_at(path) for path in paths):
            return None
        return self.holding.collection([self._relative(path) for path in paths])

    def tensor(self) -> str | None:
        """A tensor of the class itself, where no argument is at hand."""
        return next((self.state(value) for value in self.loose), None)

    def training(self, step: OpStep) -> bool | None:
        """The mode a step ran in if it is the mode of the whole model, else None."""
        path = step.stack[-1][1] if step.stack else ""
        own = self.classes.model.get_submodule(path).training
        return own if own == self.classes.model.training else None

    def arguments(self, item: ModuleCall, body: EmittedBody) -> list[Expr] | None:
        """`x, (h, c)` for a recurrent layer."""
        recurrent_call = self._recurrent(item)
        if recurrent_call is None:
            return None
        names = [body.name(value) for value in recurrent_call.states]
        states: list[Expr] = [f"({', '.join(names)})"] if len(names) > 1 else list(names)
        return [body.name(recurrent_call.given), *states]

    def targets(self, item: ModuleCall, body: EmittedBody) -> str | None:
        """`y, (h, c)` for a recurrent layer, `y, _` where its states are not asked for."""
        recurrent_call = self._recurrent(item)
        if recurrent_call is None or not item.gives:
            return None
        needed = set(item.gives)
        first, *last = (
            body.bind(item, v) if v is not None and v in needed else "_"
            for v in (recurrent_call.outputs, *recurrent_call.last)
        )
        if all(name == "_" for name in last):
            return f"{first}, _"
        return f"{first}, ({', '.join(last)})" if len(last) > 1 else f"{first}, {last[0]}"

    def is_unpacked(self, item: ModuleCall) -> bool:
        """Is it a recurrent layer?"""
        return self._recurrent_at(item.path)

    def _recurrent_at(self, path: str) -> bool:
        """True for a recurrent layer of PyTorch's own, not one that had to be written out."""
        is_own = str(self.modules[self._relative(path)]).startswith("nn.")
        return is_own and isinstance(self.classes.model.get_submodule(path), nn.RNNBase)

    def _recurrent(self, item: ModuleCall) -> RecurrentCall | None:
        return recurrent(item) if self._recurrent_at(item.path) else None


def _title(path: str, module: nn.Module) -> str:
    """What a module is called: its class, or for a plain holder its name in the model."""
    if type(module) is not nn.Module:
        return type(module).__name__
    *_, name = (part for part in ("block", *path.split(".")) if not part.isdigit())
    is_numbered = path.rpartition(".")[2].isdigit() and not name.lower().endswith("block")
    return f"{name} block" if is_numbered else name


def drafted(
    paths: ClassPaths,
    items: Sequence[Item],
    takes: Sequence[tuple[EmittedValue, str]],
    gives: Sequence[EmittedValue],
    doc: Sequence[str],
    forward_doc: str,
    title: str = "",
    group: str = "",
    fields: Sequence[str] = (),
) -> UnnamedClass:
    """The class that runs items, before it is known how it shall be called."""
    given = [f"{name}: {type_of(value)}" for value, name in takes]
    signature = Bracket("def forward(", ("self", *given), f") -> {annotation(gives)}:")
    body = EmittedBody(paths, takes).write(items, gives)
    return UnnamedClass(
        group, title, tuple(doc), tuple(paths.holding.made()), signature, forward_doc, tuple(body),
        tuple(fields), frozenset(paths.tensors),
    )  # fmt: skip


def _argument_names(path: str, module: nn.Module, takes: Sequence[EmittedValue]) -> list[str]:
    """The arguments as the model's own code calls them; the first as `forward` does, if need be."""
    known = list(inspect.signature(module.forward).parameters.values())
    plain = (
        type(module) is not nn.Module
        and bool(known)
        and known[0].kind is known[0].POSITIONAL_OR_KEYWORD
    )
    first = variable(known[0].name) if plain else POOL[0]
    told = [
        None if _is_among_peers(value, path) else argument_name(value, path.count("."), takes)
        for value in takes
    ]
    names: list[str] = []
    for place, name in enumerate(told):
        fresh = next((n for n in POOL if n not in names and n != first), POOL[0])
        if name is not None and name not in names and (place or first in told):
            fresh = name
        elif place == 0:
            fresh = first
        names.append(unused(fresh, names))
    return names


def _is_among_peers(value: EmittedValue, path: str) -> bool:
    """Was a value made in a numbered module beside this one, so that peers get others?"""
    parts = path.split(".")
    for place, part in enumerate(parts):
        beside, own = ".".join(parts[:place]), ".".join(parts[: place + 1])
        if part.isdigit() and f"{value.scope}.".startswith(f"{beside}."):
            return not f"{value.scope}.".startswith(f"{own}.")
    return False


def shapes(values: Sequence[EmittedValue]) -> str:
    """`(2, 8) and (2, 4)`."""
    return " and ".join(shape_text(v.meta.shape) for v in values) or "nothing"


def shape_text(shape: Sequence[object]) -> str:
    """`(2, 8)`, `(batch, 8)`."""
    sizes = [size.text if isinstance(size, Size) else str(size) for size in shape]
    return f"({', '.join(sizes)}{',' * (len(sizes) == 1)})"


def described(value: EmittedValue) -> str:
    """`float32 (2, 8)`."""
    meta = value.meta
    if not isinstance(meta, TensorSpec):
        return type(meta).__name__
    return f"{str(meta.dtype).removeprefix('torch.')} {shape_text(meta.shape)}"
