"""`partita.streams`: an inference model made faster on one GPU, as something to call like it."""

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from partita.errors import InputError
from partita.gpu.flow.export import evaluating, flow_of
from partita.gpu.flow.fold import fold_norms
from partita.gpu.flow.place import BufferPlacement, place
from partita.gpu.flow.steps import Flow, T
from partita.gpu.sequential import SequentialGraph
from partita.gpu.step_times import StepTimes, here, in_words
from partita.gpu.streams.bound import Bound
from partita.gpu.streams.candidates import Options, compiled_call, variants
from partita.gpu.streams.choose import Chooser
from partita.gpu.streams.compiled import Compiler
from partita.gpu.streams.pieces import contracted, groups
from partita.gpu.streams.record import (
    StreamSchedule,
    check_plan,
    other_steps,
    read_schedules,
    write_schedules,
)
from partita.gpu.streams.replay import Replay
from partita.gpu.streams.tune import compile_all
from partita.showing import plot_of, repr_html, table_of

Call = Callable[..., tuple[T, ...]]
Key = tuple[tuple[int, ...], ...]


def streams(
    module: nn.Module,
    example: T | Sequence[T],
    *,
    batches: Sequence[int] = (),
    time_s: float = 60.0,
    schedule: str | Path | None = None,
    profile: str | Path | None = None,
    compile: bool = True,
    seed: int = 0,
    note: Callable[[str], None] | None = None,
) -> "Streamed":
    """The module as one CUDA graph over several streams; the fastest of several ways, measured.

    `example` has the inputs, on the GPU, in the shapes that will be used; with `batches` a schedule
    is made for each of these sizes of the first dimension as well. `schedule` is a file written by
    `Streamed.save`: nothing is searched then. `profile` keeps measurements between runs. Weights
    are copied: after changing them, optimise again or load the schedule again.
    """
    inputs = _inputs(module, example)
    streamed = Streamed(module, inputs)
    if schedule is not None:
        streamed.load(schedule)
        return streamed
    known = StepTimes(profile)
    options = Options(time_s=time_s, compile=compile, seed=seed)
    for each in _sizes(inputs, batches):
        chooser = Chooser(module, each, options, known, note or _silent)
        best, decided = chooser.choose()
        streamed.add(decided, best.call)
        if chooser.interrupted:
            break  # and leave the other batches
    return streamed


class Streamed:
    """A model with a schedule per shape of its inputs, picked at every call."""

    _repr_html_, table, plot = repr_html, table_of, plot_of  # in a notebook

    def __init__(self, module: nn.Module, inputs: tuple[T, ...]) -> None:
        self.module = module
        self.example = inputs
        self.schedules: tuple[StreamSchedule, ...] = ()
        self.calls: dict[Key, Call] = {}
        self.shape = _shape_of_output(module, inputs)
        self.unknown: set[Key] = set()

    def add(self, schedule: StreamSchedule, call: Call) -> None:
        """Use this for inputs of its shapes."""
        self.schedules = (*self.schedules, schedule)
        self.calls[schedule.shapes] = call

    def __call__(self, *inputs: T) -> Any:
        """What the module gives for these inputs; shapes without a schedule run as they are."""
        key = tuple(tuple(each.shape) for each in inputs)
        call = self.calls.get(key)
        if call is None:
            if key not in self.unknown:
                self.unknown.add(key)
                known = ", ".join(str(list(each.shapes[0])) for each in self.schedules)
                warnings.warn(
                    f"no schedule for inputs of {[list(shape) for shape in key]}, not {known}: "
                    "the model runs as it is; name this batch in `batches`",
                    stacklevel=2,
                )
            with evaluating(self.module), torch.no_grad():
                return self.module(*inputs)
        for mine, given in zip(self.example, inputs, strict=True):
            if given.dtype != mine.dtype:
                raise InputError(f"an input is {given.dtype}", fix=f"give {mine.dtype}")
        return tree_unflatten(list(call(*inputs)), self.shape)

    @property
    def inputs(self) -> tuple[T, ...]:
        """The tensors that the example's schedule reads where they lie.

        Write into them and call with them: nothing is copied then. torch.compile reads any tensors.
        """
        call = self.calls.get(tuple(tuple(each.shape) for each in self.example))
        return getattr(call, "inputs", self.example)

    def save(self, path: str | Path, *, overwrite: bool = False) -> None:
        """Write the decisions as JSON; `partita.streams(..., schedule=path)` uses them again."""
        name = type(self.module).__name__
        write_schedules(path, self.schedules, name, overwrite=overwrite)

    def load(self, path: str | Path) -> None:
        """Use the decisions of a file, for this module's weights."""
        for schedule in read_schedules(path):
            if schedule.on != in_words(here()):
                warnings.warn(
                    f"{path} was measured on {schedule.on}; this is {in_words(here())}: it may not "
                    "be the fastest here",
                    stacklevel=3,
                )
            inputs = _like(self.example, schedule.shapes)
            self.add(schedule, built(self.module, inputs, schedule))


def built(module: nn.Module, inputs: tuple[T, ...], schedule: StreamSchedule) -> Call:
    """What a schedule says, ready to call."""
    if schedule.form == "compile":
        with evaluating(module):
            return compiled_call(module)
    with torch.no_grad():
        flow = flow_of(module, inputs)
        if schedule.form == "sequential":
            return SequentialGraph(fold_norms(flow), inputs)
        if schedule.form == "compiled":
            return SequentialGraph(fold_norms(flow), inputs, Compiler().whole)
        chosen, placement = _placed(flow, schedule)
        check_plan(schedule, chosen)
        bound = Bound(chosen, placement, inputs[0].device)
        bound.set_inputs(inputs)
        ways = schedule.way_of()
        steps = chosen.maker()
        compile_all(bound, [(steps[name], way) for name, way in ways.items()])
        return Replay(bound, schedule.plan, ways)


def _placed(flow: Flow, schedule: StreamSchedule) -> tuple[Flow, BufferPlacement]:
    """The steps of a schedule, and where their values lie."""
    known = variants(flow)
    if schedule.variant not in known:
        raise other_steps(schedule, f"here without {schedule.variant!r}")
    chosen, placement = place(known[schedule.variant])
    if not set(schedule.pieces) <= set(groups(chosen)):
        raise other_steps(schedule, "whose pieces are other ones")
    return contracted(chosen, schedule.pieces), placement


def _inputs(module: nn.Module, example: T | Sequence[T]) -> tuple[T, ...]:
    inputs = (example,) if isinstance(example, T) else tuple(example)
    if not inputs or not all(isinstance(each, T) for each in inputs):
        raise InputError("the example has no tensors", fix="give what the model is called with")
    if not torch.cuda.is_available():
        raise InputError(
            "there is no CUDA device here, so nothing can be measured",
            fix="use the analytic costs: partita streams MODEL --device analytic",
        )
    places = {each.device.type for each in (*inputs, *module.parameters())}
    if places != {"cuda"}:
        raise InputError(
            f"the model and its example are on {', '.join(sorted(places))}",
            fix="put both on the GPU: module.cuda(), example.cuda()",
        )
    return inputs


def _sizes(inputs: tuple[T, ...], batches: Sequence[int]) -> list[tuple[T, ...]]:
    """The example itself and copies of it with other batch sizes."""
    shapes = tuple(tuple(each.shape) for each in inputs)
    wanted = {shapes: inputs}
    for batch in batches:
        if batch < 1:
            raise InputError(f"a batch of {batch}", fix="give 1 or more", field="batches")
        other = tuple((batch, *shape[1:]) for shape in shapes)
        wanted.setdefault(other, _like(inputs, other))
    return list(wanted.values())


def _like(inputs: tuple[T, ...], shapes: Key) -> tuple[T, ...]:
    """Inputs of other batch sizes, made of the given ones."""
    examples = []
    for value, shape in zip(inputs, shapes, strict=True):
        if tuple(value.shape) == shape:
            examples.append(value)
            continue
        rows = torch.arange(shape[0], device=value.device) % value.shape[0]
        examples.append(value[rows].contiguous())
    return tuple(examples)


def _shape_of_output(module: nn.Module, inputs: tuple[T, ...]) -> TreeSpec:
    """One tensor, a tuple, a dict...: what the outputs are put into again."""
    with evaluating(module), torch.no_grad():
        return tree_flatten(module(*inputs))[1]


def _silent(text: str) -> None:
    """Nobody listens."""
