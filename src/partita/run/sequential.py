"""Emitted stages run one after the other in one process, with the arguments of the original model.

The stages hold the very tensors of the original: its Parameters, so that gradients arrive where its
optimizer looks for them, and its buffers, so that running statistics are kept there.
"""

import inspect
import linecache
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from partita.capture.exported import Captured
from partita.emit.stages import Emitted
from partita.errors import CaptureError


def load_source(source: str, name: str = "partita_stages") -> ModuleType:
    """Emitted source as a module; tracebacks show its lines."""
    file = f"<{name}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    module = ModuleType(name)
    exec(compile(source, file, "exec"), module.__dict__)
    return module


def held_tensors(captured: Captured) -> dict[str, torch.Tensor]:
    """Every tensor of the original by all its names, constants included."""
    module = captured.module
    return {
        **captured.program.constants,
        **dict(module.named_buffers(remove_duplicate=False)),
        **dict(module.named_parameters(remove_duplicate=False)),
    }


def build_stages(captured: Captured, emitted: Emitted) -> list[nn.Module]:
    """The stages with the original's own Parameters and buffers."""
    made = load_source(emitted.source).build_stages(held_tensors(captured))
    return list(made)


def used_tensors(module: nn.Module) -> list[tuple[dict[str, Any], str, Any]]:
    """Every parameter and buffer, and the table and name by which it is looked up."""
    return [
        (table, name, tensor)
        for child in module.modules()
        for table in (child._parameters, child._buffers)
        for name, tensor in table.items()
    ]


def link(stages: Sequence[nn.Module], tensors: Mapping[str, torch.Tensor]) -> None:
    """Let the stages use these tensors, by the original names.

    One of another shape is of other sizes: a buffer that the model makes anew for those at hand.
    """
    for stage in stages:
        held = (
            *stage.named_parameters(remove_duplicate=False),
            *stage.named_buffers(remove_duplicate=False),
        )
        for name, tensor in held:
            if tensors[name].shape != tensor.shape:
                continue
            owner, _, leaf = name.rpartition(".")
            own = vars(stage.get_submodule(owner))
            own["_parameters" if leaf in own["_parameters"] else "_buffers"][leaf] = tensors[name]


def run_stages(stages: Sequence[nn.Module], given: Mapping[str, Any]) -> dict[str, Any]:
    """Everything the stages give, by name, when they run in order on what is given."""
    known = dict(given)
    for stage in stages:
        taken: tuple[str, ...] = stage.takes  # type: ignore[assignment]
        names: tuple[str, ...] = stage.gives  # type: ignore[assignment]
        made = stage(*(known[name] for name in taken))
        known.update(zip(names, (made,) if len(names) == 1 else made or (), strict=True))
    return known


@dataclass
class SequentialStages:
    """A captured model run by its stages: called as the model is, it gives what the model gives."""

    captured: Captured
    emitted: Emitted
    stages: list[nn.Module] = field(default_factory=list)
    used: list[tuple[dict[str, Any], str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.stages = self.stages or build_stages(self.captured, self.emitted)
        self.used = used_tensors(self.captured.module)

    def follow(self) -> None:
        """Let the stages use the tensors that are the module's now, if they are others."""
        if any(table[name] is not tensor for table, name, tensor in self.used):
            link(self.stages, held_tensors(self.captured))
            self.used = used_tensors(self.captured.module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's result, in the model's structure; sizes are not looked at."""
        known = run_stages(self.stages, self.given(args, kwargs))
        flat = [known[out] if isinstance(out, str) else out[0] for out in self.emitted.outputs]
        return pytree.tree_unflatten(flat, self.captured.program.call_spec.out_spec)

    def given(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments by the names that stages know them by."""
        flat = _flat(*self.arranged(args, kwargs))
        pairs = zip(self.emitted.inputs, flat, strict=True)
        return {name: value for name, (_, value) in pairs if name is not None}

    def arranged(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments by position and by name as they were captured; refused if they do not fit."""
        example = self.captured.program.example_inputs
        wanted = _flat(*example)
        arranged = _arranged(self.captured.module, args, kwargs, *example)
        flat = _flat(*arranged)
        if [place for place, _ in flat] != [place for place, _ in wanted]:
            given, captured = (", ".join(place for place, _ in it) for it in (flat, wanted))
            raise CaptureError(
                f"the arguments hold {given}, and {captured} were captured",
                fix="call it with arguments of the structure it was captured with",
            )
        for (place, value), (_, known) in zip(flat, wanted, strict=True):
            _check(value, known, place)
        return arranged


def _flat(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[str, Any]]:
    """Every value in the arguments, and where it stands."""
    pairs, _ = pytree.tree_flatten_with_path((args, kwargs))
    return [(pytree.keystr(path[1:]), value) for path, value in pairs]


def _arranged(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    example_args: tuple[Any, ...],
    example_kwargs: dict[str, Any],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments by position and by name as in the example, however they are given."""
    signature = inspect.signature(module.forward)
    try:
        given = signature.bind(*args, **kwargs).arguments
    except TypeError as error:
        raise CaptureError(
            f"the arguments do not fit: {error}", fix="give what the model is called with"
        ) from None
    wanted = signature.bind(*example_args, **example_kwargs).arguments
    if given.keys() != wanted.keys():
        raise CaptureError(
            f"is given {', '.join(given) or 'nothing'}, and {', '.join(wanted) or 'nothing'} was"
            " captured",
            fix="give the same arguments; those left out kept their defaults",
        )
    by_name = dict(given)
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            by_name.update(by_name.pop(name, {}))
    arranged_kwargs = {name: by_name.pop(name) for name in example_kwargs if name in by_name}
    arranged_args: list[Any] = []
    for name, value in by_name.items():
        many = signature.parameters[name].kind is inspect.Parameter.VAR_POSITIONAL
        arranged_args += value if many else [value]
    return tuple(arranged_args), arranged_kwargs


def _check(value: Any, known: Any, place: str) -> None:
    """Refuse what the captured program does not fit."""
    if isinstance(known, torch.Tensor):
        if not isinstance(value, torch.Tensor):
            wrong = f"is a {type(value).__name__}"
        elif _kind(value) != _kind(known) or (known.numel() and not value.numel()):
            wrong = f"is {value.dtype} {tuple(value.shape)}"
        else:
            return
        raise CaptureError(
            f"{wrong}, and {known.dtype} {tuple(known.shape)} was captured",
            fix="give tensors of that type with at least one element, or capture again",
            field=f"argument {place}",
        )
    if value is not known and value != known:
        raise CaptureError(
            f"is {value!r}, and {known!r} was captured",
            fix="what is no tensor is fixed when a model is captured", field=f"argument {place}",
        )  # fmt: skip


def _kind(tensor: torch.Tensor) -> tuple[bool, bool, bool]:
    """What a model's code asks of a type: is it real numbers, complex ones, truths, or integers?"""
    return tensor.is_floating_point(), tensor.is_complex(), tensor.dtype == torch.bool
