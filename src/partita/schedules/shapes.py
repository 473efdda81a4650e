"""Placements by name, for any number of devices.

A shape says where the forward steps of a micro-batch run and what waits for what; the backward
pass is its mirror image. (f forward, b backward; a row is a device, a column what runs next.)

    vshape   f     b    xshape  f   f b   b    mshape   f f     b b    nnshape  f f   f   b   b b
               f b                f f b b               f   f b   b             f   f f   b b   b
                                                                                (twice the devices)
    kshape   f f b b    two branches, each a pipeline on half of the devices, meet on all of them

Steps on all devices at once (a sharded embedding, a loss) are *shared* and have spans and memory
of their own. Source of all but the last two: the example placements of Tessel (HPCA 2024), whose
spans and memory are the defaults here. `looped` and `wave` hold several chunks on each device, as
interleaved and zero-bubble schedules need it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from partita.errors import InputError, ProblemError
from partita.schedules.placement import Block, Placement, number, whole
from partita.suggest import suggest

BACKWARD_SPAN = 3  # of a stage; a shape may have another
MAX_STAGES = 100_000


@dataclass(frozen=True, slots=True)
class ShapeOptions:
    """Spans and memory of a shape's blocks; None is what the shape has by itself.

    `backward_span` is all of the backward pass, unless `weight_span` is given: then the weight
    gradients are blocks of their own and `backward_span` is what remains. A forward takes `memory`;
    what the weight gradients need of it, `weight_memory` (all of it if None), is given back by
    them, the rest by the backward.
    """

    training: bool = True
    forward_span: float = 1
    backward_span: float | None = None
    weight_span: float | None = None
    memory: float = 1
    weight_memory: float | None = None
    shared_forward_span: float = 1
    shared_backward_span: float | None = None
    shared_memory: float | None = None
    chunks: int = 2  # stages on each device: looped and wave
    delay: float = 0  # between blocks that run on different devices

    def __post_init__(self) -> None:
        for name in ("forward_span", "backward_span", "weight_span", "shared_forward_span",
                     "shared_backward_span"):  # fmt: skip
            value = getattr(self, name)
            if value is not None and not number(value, name) > 0:
                raise ProblemError(f"found {value}", fix="give a number above zero", field=name)
        for name in ("memory", "weight_memory", "shared_memory", "delay"):
            value = getattr(self, name)
            if value is not None and not number(value, name) >= 0:
                raise ProblemError(
                    f"found {value}", fix="give a number of at least zero", field=name
                )
        if whole(self.chunks, "chunks") < 1:
            raise ProblemError(f"found {self.chunks}", fix="give 1 or more", field="chunks")


class ShapeStep(NamedTuple):
    """One forward step of a micro-batch."""

    devices: tuple[int, ...]
    shared: bool = False
    backward: bool = True  # has a mirror image in the backward pass
    holds: bool = True  # takes memory until then
    after: tuple[int, ...] = ()  # earlier steps it waits for


@dataclass(frozen=True, slots=True)
class NamedShape:
    """A named placement: its forward steps for p devices, and what its blocks are by default."""

    about: str
    steps: Callable[[int, int], list[ShapeStep]]  # (devices, chunks) -> forward steps
    min_devices: int = 1
    backward_span: float = BACKWARD_SPAN
    shared_backward_span: float = 1
    shared_memory: float = 0
    chunked: bool = False


def shape(name: str, num_devices: int, options: ShapeOptions | None = None) -> Placement:
    """The placement of this name on so many devices; what the shape refuses names the reason."""
    options = options or ShapeOptions()
    if name not in SHAPES:
        raise InputError(f"found {name!r}", fix=suggest(name, list(SHAPES)), field="shape")
    kind = SHAPES[name]
    count = whole(num_devices, "devices")
    if count < kind.min_devices:
        raise ProblemError(
            f"found {count}", fix=f"{name} needs {kind.min_devices} or more", field="devices"
        )
    mode = "train" if options.training else "infer"
    place = Placement(count, f"{name}.{mode}.nd{count}")
    if kind.chunked and count * options.chunks > MAX_STAGES:
        raise ProblemError(
            f"found {options.chunks} on each of {count} devices",
            fix=f"at most {MAX_STAGES:,} stages are made",
            field="chunks",
        )
    _ShapeBlocks(kind, options, kind.steps(count, options.chunks)).add_to(place)
    return place


# --- steps of each shape -------------------------------------------------------------------------


def _line(places: Sequence[ShapeStep]) -> list[ShapeStep]:
    """Steps one after the other."""
    return [step._replace(after=(index - 1,) if index else ()) for index, step in enumerate(places)]


def _on(devices: Sequence[int]) -> list[ShapeStep]:
    return [ShapeStep((device,)) for device in devices]


def _shared(num_devices: int) -> ShapeStep:
    return ShapeStep(tuple(range(num_devices)), shared=True)


def _v(p: int, _: int) -> list[ShapeStep]:
    return _line(_on(range(p)))


def _x(p: int, _: int) -> list[ShapeStep]:
    """Two lines in opposite directions; steps of both in turn."""
    steps = []
    for place in range(p):
        for way, device in enumerate((place, p - 1 - place)):
            steps.append(ShapeStep((device,), after=(2 * (place - 1) + way,) if place else ()))
    return steps


def _m(p: int, _: int) -> list[ShapeStep]:
    return _line([_shared(p), *_on(range(p))])


def _nn(p: int, _: int) -> list[ShapeStep]:
    half = p // 2
    return _line([_shared(p), *_on(range(half)), _shared(p), *_on(range(half, p))])


def _nn_eager(p: int, _: int) -> list[ShapeStep]:
    return _line([_shared(p), *_on([0]), _shared(p), *_on(range(1, p))])


def _k(p: int, _: int) -> list[ShapeStep]:
    """Two branches that meet on all devices."""
    half = p // 2
    steps: list[ShapeStep] = []
    ends = []
    for branch in (range(half), range(half, p)):
        for place, device in enumerate(branch):
            steps.append(ShapeStep((device,), after=(len(steps) - 1,) if place else ()))
        ends.append(len(steps) - 1)
    return [*steps, _shared(p)._replace(after=tuple(ends))]


def _two_shared(p: int, _: int) -> list[ShapeStep]:
    return _line([_shared(p), *_on(range(p)), _shared(p)])


def _finetune(p: int, _: int) -> list[ShapeStep]:
    frozen = _shared(p)._replace(backward=False, holds=False)
    return _line([frozen, *_on(range(p))])


def _alphafold(p: int, _: int) -> list[ShapeStep]:
    once = _on(range(p))
    without = [step._replace(backward=False, holds=False) for step in once]
    return _line([*without, *without, *once])


def _looped(p: int, chunks: int) -> list[ShapeStep]:
    return _line(_on([*range(p)] * chunks))


def _wave(p: int, chunks: int) -> list[ShapeStep]:
    there, back = [*range(p)], [*reversed(range(p))]
    return _line(_on([d for chunk in range(chunks) for d in (back if chunk % 2 else there)]))


SHAPES: dict[str, NamedShape] = {
    "vshape": NamedShape("a pipeline: one stage on each device", _v),
    "xshape": NamedShape("two pipelines in opposite directions, as in Chimera", _x, 2),
    "mshape": NamedShape("a step on all devices, then a pipeline", _m),
    "nnshape": NamedShape("steps on all devices before and halfway through a pipeline", _nn, 2),
    "nnshape_eager": NamedShape("as nnshape, the second after the first stage", _nn_eager, 2),
    "kshape": NamedShape("two branches on half of the devices each, meeting on all", _k, 2,
                    shared_memory=1),
    "interlace_mlm": NamedShape("a pipeline between steps on all devices that hold memory",
                                _two_shared, backward_span=2, shared_backward_span=2,
                                shared_memory=1),
    "mllm": NamedShape("a pipeline between two steps on all devices", _two_shared),
    "finetune": NamedShape("a frozen step on all devices, then a pipeline", _finetune,
                           backward_span=2),
    "alphafold": NamedShape("three passes through a pipeline, the last one differentiated",
                            _alphafold,
                       backward_span=1),
    "looped": NamedShape("several stages on each device, round and round (interleaved)", _looped,
                    chunked=True),
    "wave": NamedShape("several stages on each device, there and back (ZB-V, Hanayo)", _wave,
                  chunked=True),
}  # fmt: skip


# --- blocks of the steps -------------------------------------------------------------------------


class _ShapeBlocks:
    """Forward, backward and weight blocks for given steps.

    Forward blocks come first, by how many steps are before them, then by device; backward blocks
    alike, then those of the weights.
    """

    def __init__(self, kind: NamedShape, options: ShapeOptions, steps: list[ShapeStep]) -> None:
        self.kind, self.options, self.steps = kind, options, steps
        self.later: list[list[int]] = [[] for _ in steps]
        for index, step in enumerate(steps):
            for before in step.after:
                self.later[before].append(index)
        self.forward_spans = (options.forward_span, options.shared_forward_span)
        shared_backward = options.shared_backward_span
        if shared_backward is None:
            shared_backward = kind.shared_backward_span
        self.backward_spans = (self._backward_span(), shared_backward)
        shared_memory = options.shared_memory
        if shared_memory is None:
            shared_memory = kind.shared_memory
        self.memory = (options.memory, shared_memory)

    def add_to(self, place: Placement) -> None:
        """Add all blocks and dependencies."""
        self.place = place
        self.names: dict[tuple[str, int], str] = {}
        depth = self._depths()
        order = sorted(range(len(self.steps)), key=lambda i: (depth[i], self.steps[i].devices))
        for index in order:
            self._add("forward", index)
        if self.options.training:
            back = self._backward_depths()
            order = sorted(back, key=lambda i: (back[i], self.steps[i].devices))
            for index in order:
                self._add("backward", index)
            for index in order:
                if self._split(index):
                    self._add("weight", index)
        self._connect()

    def _add(self, kind: str, index: int) -> None:
        step = self.steps[index]
        name = f"b{len(self.names)}"
        span, memory = self._figures(kind, step)
        self.names[kind, index] = name
        self.place.add(Block(name, span, memory, kind), step.devices)

    def _figures(self, kind: str, step: ShapeStep) -> tuple[float, float]:
        """(span, memory) of a block."""
        held = self.memory[step.shared] if step.holds and self.options.training else 0
        kept = 0.0
        if self.options.weight_span is not None and not step.shared:
            wanted = self.options.weight_memory
            kept = held if wanted is None else min(held, wanted)
        if kind == "forward":
            return self.forward_spans[step.shared], held
        if kind == "backward":
            return self.backward_spans[step.shared], kept - held
        assert self.options.weight_span is not None
        return self.options.weight_span, -kept

    def _connect(self) -> None:
        for index, step in enumerate(self.steps):
            for before in step.after:
                self._depends(("forward", before), ("forward", index))
                self._depends(("backward", index), ("backward", before))
            if not self.later[index]:
                self._depends(("forward", index), ("backward", index))
            self._depends(("backward", index), ("weight", index))

    def _depends(self, before: tuple[str, int], after: tuple[str, int]) -> None:
        if before in self.names and after in self.names:
            elsewhere = self.steps[before[1]].devices != self.steps[after[1]].devices
            delay = self.options.delay if elsewhere else 0
            self.place.depends(self.names[before], self.names[after], delay)

    def _split(self, index: int) -> bool:
        return self.options.weight_span is not None and not self.steps[index].shared

    def _depths(self) -> list[int]:
        depth: list[int] = []
        for step in self.steps:
            depth.append(max((depth[before] + 1 for before in step.after), default=0))
        return depth

    def _backward_depths(self) -> dict[int, int]:
        depth: dict[int, int] = {}
        for index in reversed(range(len(self.steps))):
            if self.steps[index].backward:
                known = (depth[later] + 1 for later in self.later[index] if later in depth)
                depth[index] = max(known, default=0)
        return depth

    def _backward_span(self) -> float:
        given, weight = self.options.backward_span, self.options.weight_span
        if given is not None:
            return given
        left = self.kind.backward_span - (weight or 0)
        if left <= 0:
            raise ProblemError(
                f"found {weight}, and the whole backward takes {self.kind.backward_span}",
                fix="give the span of the rest, backward_span, as well",
                field="weight_span",
            )
        return left
