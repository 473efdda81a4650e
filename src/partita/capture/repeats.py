"""Does a second call of a module do what the first one did?

A captured program does in every call what the first did. A module that counts its calls, notes that
it was called, or collects what it has seen, in numbers, lists, dicts or objects of its own, may do
otherwise: `y * self.count`. So where a call has left something changed in it, a copy of the module
is called twice, on tensors without data, and what is done on the way is compared: every operation
on what depends on the arguments, on parameters or on chance, with the numbers that are given to it.
What is made of constants alone (a table that is made when it is first needed) may be kept, and so
may what is made of parameters and buffers alone that nobody has changed since; what is kept and
not read is no matter.
"""

import contextlib
import copy
import functools
import logging
import operator
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses import FakeTensor, FakeTensorMode
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

    def __init__(self, attributes: Iterable[Mapping[str, Any]], depth: int = DEEPEST) -> None:
        self.known: dict[int, tuple[Any, Any]] = {}  # a collection and what it has held
        for own in attributes:
            for name, value in own.items():
                if name not in HELD:
                    self._look(value, depth)

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

    def put_back(self, only_without_data: bool = False) -> list[torch.Tensor]:
        """Let them hold again what they have held; gives the tensors that were put there.

        `only_without_data`: those alone that hold tensors without data.
        """
        put_there: list[torch.Tensor] = []
        for collection, held in self.known.values():
            if _holds_same(collection, held):
                continue
            before = {id(leaf) for leaf in _tensors_in(held)}
            new = [leaf for leaf in _tensors_in(collection) if id(leaf) not in before]
            if only_without_data and not any(isinstance(leaf, FakeTensor) for leaf in new):
                continue
            put_there += new
            collection.clear()
            if isinstance(collection, list | deque):
                collection.extend(held)
            else:
                collection.update(held)
        return put_there


def _tensors_in(collection: Any) -> list[torch.Tensor]:
    values = collection.values() if isinstance(collection, dict) else collection
    return [leaf for leaf in tree_leaves(list(values)) if isinstance(leaf, torch.Tensor)]


@contextlib.contextmanager
def as_code_was(module: torch.nn.Module) -> Iterator[None]:
    """Put back what the files of a module's classes hold, when a call without data has ended.

    Tables that functions fill (`lru_cache`, a dict beside the classes) would hold tensors without
    data from then on.
    """
    names = {base.__module__ for child in module.modules() for base in type(child).__mro__}
    files = [
        vars(sys.modules[name])
        for name in sorted(names)
        if name in sys.modules and not name.startswith("torch.") and name != "builtins"
    ]
    values = [value for own in files for value in list(own.values())]
    values += [value for child in module.modules() for value in vars(type(child)).values()]
    caches = {id(each): each for each in values if isinstance(each, functools._lru_cache_wrapper)}
    misses = {number: cache.cache_info().misses for number, cache in caches.items()}
    tables = [{"table": value} for value in values if type(value) in (dict, list, set, deque)]
    contents = Contents(tables, depth=0)
    try:
        yield
    finally:
        contents.put_back(only_without_data=True)
        for number, cache in caches.items():
            if cache.cache_info().misses != misses[number]:
                cache.cache_clear()


def held_by_hooks(module: torch.nn.Module) -> list[Any]:
    """What the hooks of a module, and of those in it, may write to: what their code has at hand."""
    hooks = [
        hook
        for child in module.modules()
        for hook in (*child._forward_hooks.values(), *child._forward_pre_hooks.values())
    ]
    held: list[Any] = []
    for hook in hooks:
        cells = getattr(hook, "__closure__", None) or ()
        held += [cell.cell_contents for cell in cells if _is_set(cell)]
        held += [getattr(hook, "__self__", None), getattr(hook, "args", None)]
    return [each for each in held if not isinstance(each, torch.nn.Module)]


def _is_set(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # a name that nothing was put into yet
        return False


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
        line = _first_difference(module, args, kwargs, around)
    except Exception:  # it cannot be copied, or runs only with data: nothing is known
        log.debug("whether a second call does the same is not known", exc_info=True)
        return
    if line is not None:
        raise _refusal(line, kept)


def _refusal(line: lines.SourceLine, kept: list[str]) -> CaptureError:
    named = ", ".join(kept[:3]) + (", ..." if len(kept) > 3 else "")
    why = f"the module keeps {named} from call to call" if kept else "it depends on something that"
    lost = ", which would be lost" if kept else " changes from call to call"
    return CaptureError(
        f"`{line.code}` does something else in the second call than in the first: {why}{lost}",
        fix="keep it in a buffer (register_buffer) that is changed in place, "
        "or pass it as an argument; if only the first call differs, call it once before",
        file=line.place,
    )


def _first_difference(
    module: torch.nn.Module, args: Any, kwargs: dict[str, Any],
    around: Callable[[], contextlib.AbstractContextManager[None]],
) -> lines.SourceLine | None:  # fmt: skip
    """Where a second call of a copy of the module does something else than the first; or None."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    held: dict[int, Any] = {
        id(p): torch.nn.Parameter(mode.from_tensor(p.detach()), p.requires_grad)
        for p in module.parameters()
    }
    held |= {id(b): mode.from_tensor(b) for b in module.buffers()}
    copied = copy.deepcopy(module, held)
    args, kwargs = tree_map_only(torch.Tensor, mode.from_tensor, (args, kwargs))
    given = {id(t): f"argument {i}" for i, t in enumerate(tree_leaves((args, kwargs)))}
    named = _names(copied)
    first = _CallSteps(named, given, None)
    state, caches = torch.get_rng_state(), torch.is_autocast_cache_enabled()
    hooks = Contents([{"hooks": held_by_hooks(module)}])
    torch.set_autocast_cache_enabled(False)  # else the second call casts less
    try:
        with mode, torch.enable_grad():
            with around(), first:
                results = [copied(*args, **kwargs)]
            told = first.labels_of(results[0])
            now = {number: n for number, n in _names(copied).items() if n in named.values()}
            second = _CallSteps(now, given, first)
            with around(), second:
                results.append(copied(*args, **kwargs))
    except _OtherStep as other:
        return other.line
    finally:
        torch.set_rng_state(state)
        torch.set_autocast_cache_enabled(caches)
        hooks.put_back()
    if len(first.steps) != len(second.steps) or told != second.labels_of(results[1]):
        return lines.of_function(type(module).forward)
    return None


def _names(module: torch.nn.Module) -> dict[int, str]:
    """Parameters and buffers by what they are; the call before may have put others there."""
    names = {id(p): name for name, p in module.named_parameters()}
    return names | {id(b): name for name, b in module.named_buffers()}


class _OtherStep(BaseException):
    """Ends the second call where it does something else; no `except Exception` catches it."""

    def __init__(self, line: lines.SourceLine) -> None:
        super().__init__()
        self.line = line


@dataclass(frozen=True, slots=True)
class _OfModule:
    """What is made of a module's tensors alone: by which operations, and of which, as they were."""

    number: int  # of these operations on these tensors
    version: int  # its own, when it was made
    sources: tuple[tuple[torch.Tensor, str, int], ...]  # with their names and versions

    def is_current(self, tensor: torch.Tensor, names: Mapping[int, str]) -> bool:
        """Would making it again give the same?"""
        return self.version == tensor._version and all(
            names.get(id(source)) == name and source._version == version
            for source, name, version in self.sources
        )


class _CallSteps(TorchDispatchMode):
    """What a call does on what it is given: operations, and by which tensors and numbers.

    After another call, the first step that is not the same raises `_OtherStep`. Operations on
    parameters and buffers alone are no steps: they may be done once.
    """

    def __init__(
        self, named: Mapping[int, str], given: Mapping[int, str], before: "_CallSteps | None"
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.named = named
        self.labels: dict[int, str] = {**named, **given}
        self.before = before
        self.expected: list[Any] = [] if before is None else before.steps
        self.numbers: dict[Any, int] = {} if before is None else before.numbers
        self.made: dict[int, Any] = {}  # held, so that no id is used twice
        self.of_module: dict[int, _OfModule] = {}
        self.steps: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if getattr(func, "namespace", "") == "prim":  # asks for a device, and where that is known
            return out
        draws = torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())
        leaves = tree_leaves((args, kwargs))
        labels = [self._label(leaf) for leaf in leaves]
        if not draws and not any(label[0] == "of the call" for label in labels):
            return out
        if not draws and not func._schema.is_mutable and self._is_of_module(leaves):
            self._note_made(func, leaves, labels, tree_leaves(out))
            return out
        number = len(self.steps)
        step = (func, labels)
        if self.expected and (number >= len(self.expected) or self.expected[number] != step):
            raise _OtherStep(lines.of_stack())
        self.steps.append(step)
        for place, leaf in enumerate(tree_leaves(out)):
            if isinstance(leaf, torch.Tensor):
                self.made[id(leaf)] = leaf
                self.labels.setdefault(id(leaf), f"{number}.{place}")
        return out

    def _is_of_module(self, leaves: Iterable[Any]) -> bool:
        """Are all of these the module's, made of such, or of constants?"""
        return all(
            id(leaf) in self.named
            or self._known(leaf) is not None
            or self._label(leaf)[0] == "constant"
            for leaf in leaves
            if isinstance(leaf, torch.Tensor)
        )

    def _note_made(
        self, func: Any, leaves: list[Any], labels: list[Any], results: list[Any]
    ) -> None:
        sources: dict[int, tuple[torch.Tensor, str, int]] = {}
        for leaf in leaves:
            if id(leaf) in self.named:
                sources[id(leaf)] = (leaf, self.named[id(leaf)], leaf._version)
            elif isinstance(leaf, torch.Tensor) and (known := self._known(leaf)) is not None:
                sources |= {id(source[0]): source for source in known.sources}
        for place, result in enumerate(results):
            if isinstance(result, torch.Tensor) and id(result) not in self.labels:
                number = self.numbers.setdefault((func, tuple(labels), place), len(self.numbers))
                self.made[id(result)] = result
                self.of_module[id(result)] = _OfModule(
                    number, result._version, tuple(sources.values())
                )

    def _known(self, tensor: torch.Tensor) -> _OfModule | None:
        """What is made of the module alone: in this call, or in the one before and as it was."""
        known = self.of_module.get(id(tensor))
        if known is None and self.before is not None:
            known = self.before.of_module.get(id(tensor))
            if known is not None and not known.is_current(tensor, self.named):
                return None
        return known

    def labels_of(self, results: Any) -> list[Any]:
        """What the results of the call are."""
        return [self._label(leaf) for leaf in tree_leaves(results)]

    def _label(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return ("number", str(leaf))
        if id(leaf) in self.labels:
            return ("of the call", self.labels[id(leaf)])
        known = self._known(leaf)
        if known is not None:
            return ("of the call", known.number)
        if self.before is not None and id(leaf) in self.before.made:
            return ("of the call", "kept of the call before")
        return ("constant", tuple(leaf.shape), str(leaf.dtype))
