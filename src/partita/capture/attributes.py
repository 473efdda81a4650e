"""What a module keeps in its attributes from one call to the next, watched while it is followed.

A captured program has no attributes: every call of it begins where the first one did. That is right
as long as a call reads nothing that the call before it has put there. So of every attribute that is
a tensor or None it is seen whether the model reads it before it sets it. If it does, and what it
sets depends on what the call was given, on parameters or on random numbers, it is refused. A tensor
made of constants alone (an index for the sizes at hand, made when it is first needed) is the same
in every call.
"""

import contextlib
import logging
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from partita.capture import lines
from partita.capture.of_call import constant_of, depending, is_of_call, node_of
from partita.capture.repeats import (
    HELD,
    OF_TORCH,
    PLAIN,
    Contents,
    differences,
    held_by_hooks,
    picture_of,
)
from partita.errors import CaptureError

log = logging.getLogger("partita")


class BufferMadeAnew(CaptureError):  # noqa: N818
    """A buffer is replaced by one of another shape, made of constants: it can be there before."""

    def __init__(
        self, owner: torch.nn.Module, name: str, node: Node, line: lines.SourceLine
    ) -> None:
        super().__init__(
            f"`{line.code}` puts a tensor of another shape in the place of the buffer {name!r}",
            fix="let it be made before: call the model once with such arguments, then capture",
            file=line.place,
        )
        mode = get_proxy_mode()
        self.owner, self.name, self.node = owner, name, node
        self.root = getattr(mode.tracer, "root", None) if mode is not None else None

    def make(self) -> None:
        """Put the buffer where the model's own first call would."""
        made = constant_of(self.node, self.root)
        self.owner._buffers[self.name] = made
        log.info("the buffer %s is made for the sizes at hand, as a call would", self.name)


@contextlib.contextmanager
def kept_attributes(
    module: torch.nn.Module, refused: list[CaptureError], reads: bool = True,
    changed: list[str] | None = None, asked: "AskedModule | None" = None,
) -> Iterator[None]:  # fmt: skip
    """Refuse what would be kept; what is new or another in attributes goes again.

    Without `reads` nobody sees what is read, and nothing is refused for it. What is no tensor and
    is another after the call is named in `changed` (`repeats.py`), what was looked up in `asked`.
    """
    paths = {child: path for path, child in module.named_modules()}
    before = {child: dict(vars(child)) for child in module.modules()}
    tables = {child: {held: dict(known[held]) for held in HELD} for child, known in before.items()}
    picture = picture_of({paths[child]: known for child, known in before.items()})
    contents = Contents(before.values())
    shown = Contents([{"hooks": held_by_hooks(module)}])
    names = _may_be_kept(before.values())
    read: set[tuple[torch.nn.Module, str]] = set()  # before they were set
    written: set[tuple[torch.nn.Module, str]] = set()
    own_changed: list[str] = []  # also what the export has put back when the call has ended
    left: dict[tuple[torch.nn.Module, str], tuple[Node, lines.SourceLine]] = {}
    get, put = torch.nn.Module.__getattribute__, torch.nn.Module.__setattr__

    def note_read(owner: torch.nn.Module, name: str) -> None:
        if owner in before and (owner, name) not in written:
            read.add((owner, name))

    def on_get(self: torch.nn.Module, name: str) -> Any:
        if asked is not None and (name not in OF_TORCH or name == "training"):
            asked.attributes.add((self, name))
        if name in names and lines.is_called_by_user(sys._getframe(1)):
            note_read(self, name)
        try:
            return get(self, name)
        except AttributeError:  # a parameter, a buffer, a module, or not there: hasattr asks
            if not any(name in vars(self).get(held, ()) for held in HELD):
                note_read(self, name)
            raise

    def on_set(self: torch.nn.Module, name: str, value: Any) -> None:
        if lines.is_called_by_user(sys._getframe(1)):
            old = before.get(self, {}).get(name, getattr(type(self), name, None))
            line = lines.of_stack()
            error = _refusal(self, name, value, line, (self, name) in read, self in before)
            if error is not None:
                refused.append(error)
                raise error
            left.pop((self, name), None)
            if isinstance(value, torch.Tensor) and (node := node_of(value)) is not None:
                left[self, name] = node, line
            if self in before and _is_changed(self, name, value):
                own_changed.append(f"{paths[self]}.{name}".lstrip("."))
            if isinstance(old, int | float) and value is not old:
                log.warning(
                    "%s: `%s` changes %s from call to call; captured, it stays as it is now",
                    line.place, line.code, name,
                )  # fmt: skip
        elif name == "training" and self in before and value != self.training:
            error = _mode_refusal(paths[self])
            refused.append(error)
            raise error
        written.add((self, name))
        put(self, name, value)

    cls: Any = torch.nn.Module
    cls.__setattr__ = on_set
    if reads:
        cls.__getattribute__ = on_get
    try:
        yield
    finally:
        if reads:
            del cls.__getattribute__
        cls.__setattr__ = put
        if changed is not None:
            now = {paths[child]: vars(child) | known for child, known in before.items()}
            changed += sorted({*own_changed, *differences(picture, picture_of(now))})
        _say_left(left, shown, paths)
        for child, known in before.items():
            _put_back(child, known, tables[child])
        _say_collected(contents.put_back(), changed)


def _say_collected(tensors: list[torch.Tensor], changed: list[str] | None) -> None:
    if any(each.requires_grad for each in tensors):
        log.warning(
            "what the model collects in %s is not collected when it is captured: give it back "
            "from forward if it is needed", ", ".join((changed or ["a collection"])[:3]),
        )  # fmt: skip


def _may_be_kept(attributes: Iterable[dict[str, Any]]) -> set[str]:
    """The names of attributes that may keep a tensor: plain ones, not parameters or buffers."""
    return {
        name
        for known in attributes
        for name, value in known.items()
        if value is None or isinstance(value, torch.Tensor)
    }


@dataclass
class AskedModule:
    """What a module was asked while it was followed: where it says something else, it may do so.

    `attributes` are those that were looked up, also where there were none; `gradients`: was it
    asked whether gradients are recorded? `export`: did it ask whether it is exported?
    """

    attributes: set[tuple[torch.nn.Module, str]] = field(default_factory=set)
    gradients: bool = False
    export: bool = False


def _say_left(
    left: dict[tuple[torch.nn.Module, str], tuple[Node, lines.SourceLine]], shown: Contents,
    paths: dict[torch.nn.Module, str],
) -> None:  # fmt: skip
    """Say which lines leave a tensor in an attribute for others, as a captured call does not."""
    if shown.put_back():
        log.warning("what hooks of the model keep is not kept when it is captured")
    known: dict[Any, set[Node]] = {}
    for (owner, name), (node, line) in left.items():
        if name in owner._buffers or owner not in paths:
            continue
        if node.graph not in known:
            known[node.graph] = depending(node.graph)
        if node in known[node.graph]:
            path = f"{paths[owner]}.{name}".lstrip(".")
            log.warning(
                "%s: `%s` leaves a tensor in %s; captured, it is not put there: give it back from "
                "forward if it is needed", line.place, line.code, path,
            )  # fmt: skip


def _mode_refusal(path: str) -> CaptureError:
    line = lines.of_stack()
    return CaptureError(
        f"`{line.code}` changes the mode of {path or 'the module'} while the model runs",
        fix="set it before, in train() of the model, which both train() and eval() call",
        file=line.place,
    )


def _refusal(
    owner: torch.nn.Module, name: str, value: Any, line: lines.SourceLine,
    is_read: bool, is_known: bool,
) -> CaptureError | None:  # fmt: skip
    """Why an attribute may not be set to this; `is_read` before, `is_known`: of the model's own."""
    if isinstance(value, torch.Tensor) and is_read and is_of_call(value):
        lost = "keeps a tensor for the next call, which would be lost"
        fix = f"make {name} a buffer (register_buffer) and change that in place"
    elif _is_other_shape(owner, name, value):
        if not is_of_call(value) and (node := node_of(value)) is not None:
            return BufferMadeAnew(owner, name, node, line)
        lost = f"puts a tensor of another shape in the place of the buffer {name!r}"
        fix = "let it be made before: call the model once with such arguments, then capture"
    elif isinstance(value, torch.nn.Module) and is_known and value is not owner._modules.get(name):
        lost = f"puts another module in the place of {name!r} while the model runs"
        fix = "put it there before: call the model once, then capture it"
    else:
        return None
    return CaptureError(f"`{line.code}` {lost}", fix=fix, file=line.place)


def _is_changed(owner: torch.nn.Module, name: str, value: Any) -> bool:
    """Is what is no tensor and no module set to something else?"""
    if isinstance(value, torch.Tensor | torch.nn.Module):
        return False
    old = getattr(owner, name, None)
    return not (isinstance(value, PLAIN) and type(old) is type(value) and old == value)


def _put_back(
    child: torch.nn.Module, known: dict[str, Any], tables: dict[str, dict[str, Any]]
) -> None:
    """A module's attributes as they were: a call of it that has no data must leave nothing in it.

    Nor must it leave a buffer that it has registered.

    Flags go with what they stand for: a model that puts hooks on its modules in its first call, and
    notes that it has, would else put them there twice, or never.
    """
    for name in vars(child).keys() - known.keys():
        delattr(child, name)
    for name, value in known.items():
        if vars(child).get(name) is not value:
            vars(child)[name] = value
    for held, own in tables.items():
        for name in vars(child)[held].keys() - own.keys():
            del vars(child)[held][name]
            child._non_persistent_buffers_set.discard(name)


def _is_other_shape(owner: torch.nn.Module, name: str, value: Any) -> bool:
    """Is a buffer replaced by a tensor that it cannot be changed into?"""
    old = vars(owner).get("_buffers", {}).get(name)
    tensors = isinstance(old, torch.Tensor) and isinstance(value, torch.Tensor)
    return tensors and (old.shape, old.dtype) != (value.shape, value.dtype)
