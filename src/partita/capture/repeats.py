"""Does a second call of a module do what the first one did?

A captured program does in every call what the first did. A module that counts its calls, notes that
it was called, or collects what it has seen, in numbers, lists, dicts or objects of its own, may do
otherwise: `y * self.count`. So where a call has left something changed in it, a copy of the module
is called twice, on tensors without data, and what is done on the way is compared: every operation
on what depends on the arguments, on parameters or on chance, with the numbers that are given to it.
What is made of constants alone (a table that is made when it is first needed) may be kept, and what
is kept and not read is no matter.
"""

import contextlib
import copy
import logging
import operator
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from partita.capture import lines
from partita.errors import CaptureError

log = logging.getLogger("partita")
HELD = ("_parameters", "_buffers", "_modules")
OF_TORCH = frozenset(vars(torch.nn.Module()))
PLAIN = (int, float, complex, str, bytes, bool, type(None), torch.Size, torch.dtype, torch.device)
DEEPEST, MOST = 3, 1000
Picture = Mapping[str, Any]


def picture_of(attributes: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """What modules hold besides tensors and modules, by path; `attributes` of each by its path."""
    known: dict[int, Any] = {}
    return {
        f"{path}.{name}".lstrip("."): _pictured(value, known, DEEPEST)
        for path, own in attributes.items()
        for name, value in own.items()
        if name not in OF_TORCH
    }


def _pictured(value: Any, known: dict[int, Any], depth: int) -> Any:
    if isinstance(value, PLAIN):
        return (type(value).__name__, value)
    if isinstance(value, torch.Tensor):
        return id(value)
    if id(value) in known:
        return known[id(value)]
    known[id(value)] = "within itself"
    pictured: Any = type(value).__name__
    if depth and isinstance(value, dict):
        pictured = [(str(key), _pictured(each, known, depth - 1)) for key, each in _first(value)]
    elif depth and isinstance(value, list | tuple | set | deque) and len(value) <= MOST:
        pictured = [_pictured(each, known, depth - 1) for each in value]
    elif depth and hasattr(value, "__dict__") and not _is_code(value):
        pictured = [(key, _pictured(own, known, depth - 1)) for key, own in _first(vars(value))]
    known[id(value)] = pictured
    return pictured


class Contents:
    """What the collections and objects among attributes hold: hooks, tables, notes of calls."""

    def __init__(self, attributes: Iterable[Mapping[str, Any]]) -> None:
        self.known: dict[int, tuple[Any, Any]] = {}  # a collection and what it has held
        for own in attributes:
            for name, value in own.items():
                if name not in HELD:
                    self._look(value, DEEPEST)

    def _look(self, value: Any, depth: int) -> None:
        if isinstance(value, PLAIN) or id(value) in self.known:
            return
        inner: Any = ()
        if isinstance(value, dict | list | set | deque):
            self.known[id(value)] = value, value.copy()
            inner = value.values() if isinstance(value, dict) else value
        elif isinstance(value, tuple):
            inner = value
        elif hasattr(value, "__dict__") and not isinstance(value, torch.Tensor):
            inner = () if _is_code(value) else (vars(value),)
        if depth:
            for _, each in zip(range(MOST), inner, strict=False):
                self._look(each, depth - 1)

    def put_back(self) -> None:
        """Let them hold again what they have held."""
        for collection, held in self.known.values():
            if not _holds_same(collection, held):
                collection.clear()
                if isinstance(collection, list | deque):
                    collection.extend(held)
                else:
                    collection.update(held)


def _holds_same(one: Any, other: Any) -> bool:
    """Do two collections hold the very same things?"""
    if isinstance(one, dict):
        return list(one) == list(other) and all(one[key] is other[key] for key in one)
    if isinstance(one, set):
        return {id(each) for each in one} == {id(each) for each in other}
    return len(one) == len(other) and all(map(operator.is_, one, other))


def _first(table: Any) -> list[tuple[Any, Any]]:
    return list(table.items())[:MOST]


def _is_code(value: Any) -> bool:
    return isinstance(value, torch.nn.Module | type) or callable(value)


def differences(before: Picture, after: Picture) -> list[str]:
    """The paths where two pictures differ."""
    return sorted(
        path for path in before.keys() | after.keys() if before.get(path) != after.get(path)
    )


def refuse_other_calls(
    module: torch.nn.Module, args: Any, kwargs: dict[str, Any], kept: list[str],
    around: Callable[[], contextlib.AbstractContextManager[None]],
) -> None:  # fmt: skip
    """Raise `CaptureError` where a second call does something else; `kept` is what was changed."""
    try:
        first, second = _two_calls(module, args, kwargs, around)
    except Exception:  # it cannot be copied, or runs only with data: nothing is known
        log.debug("whether a second call does the same is not known", exc_info=True)
        return
    for one, other in zip(first.steps, second.steps, strict=False):
        if one != other:
            place = second.steps.index(other)
            raise _refusal(second.lines[place], kept)
    if len(first.steps) != len(second.steps):
        longer = max(first, second, key=lambda calls: len(calls.steps))
        raise _refusal(longer.lines[min(len(first.steps), len(second.steps))], kept)


def _refusal(line: lines.SourceLine, kept: list[str]) -> CaptureError:
    named = ", ".join(kept[:3]) + (", ..." if len(kept) > 3 else "")
    return CaptureError(
        f"`{line.code}` does something else in the second call than in the first: the module keeps "
        f"{named} from call to call, which would be lost",
        fix="keep it in a buffer (register_buffer) that is changed in place, "
        "or pass it as an argument; if only the first call differs, call it once before",
        file=line.place,
    )


def _two_calls(
    module: torch.nn.Module, args: Any, kwargs: dict[str, Any],
    around: Callable[[], contextlib.AbstractContextManager[None]],
) -> tuple["_CallSteps", "_CallSteps"]:  # fmt: skip
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    held: dict[int, Any] = {
        id(p): torch.nn.Parameter(mode.from_tensor(p.detach()), p.requires_grad)
        for p in module.parameters()
    }
    held |= {id(b): mode.from_tensor(b) for b in module.buffers()}
    copied = copy.deepcopy(module, held)
    args, kwargs = tree_map_only(torch.Tensor, mode.from_tensor, (args, kwargs))
    names = {id(p): name for name, p in copied.named_parameters()}
    names |= {id(b): name for name, b in copied.named_buffers()}
    given = {id(t): f"argument {i}" for i, t in enumerate(tree_leaves((args, kwargs)))}
    calls: list[_CallSteps] = []
    state = torch.get_rng_state()
    try:
        with mode, torch.enable_grad():
            for _ in range(2):
                steps = _CallSteps({**names, **given}, calls[0].made if calls else {})
                with around(), steps:
                    copied(*args, **kwargs)
                calls.append(steps)
    finally:
        torch.set_rng_state(state)
    return calls[0], calls[1]


class _CallSteps(TorchDispatchMode):
    """What a call does on what it is given: operations, and by which tensors and numbers."""

    def __init__(self, given: Mapping[int, str], before: Mapping[int, Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.labels: dict[int, str] = dict(given)
        self.before = before
        self.made: dict[int, Any] = {}  # held, so that no id is used twice
        self.steps: list[Any] = []
        self.lines: list[lines.SourceLine] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if getattr(func, "namespace", "") == "prim":  # asks for a device, and where that is known
            return out
        draws = torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())
        leaves = tree_leaves((args, kwargs))
        labels = [self._label(leaf) for leaf in leaves]
        if draws or any(label[0] == "of the call" for label in labels):
            number = len(self.steps)
            self.steps.append((str(func), labels))
            self.lines.append(lines.of_stack())
            for place, leaf in enumerate(tree_leaves(out)):
                if isinstance(leaf, torch.Tensor):
                    self.made[id(leaf)] = leaf
                    self.labels.setdefault(id(leaf), f"{number}.{place}")
        return out

    def _label(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return ("number", str(leaf))
        if id(leaf) in self.labels:
            return ("of the call", self.labels[id(leaf)])
        if id(leaf) in self.before:
            return ("of the call", "kept of the call before")
        return ("constant", tuple(leaf.shape), str(leaf.dtype))
