"""What a rank holds of a stage: shards of parameters, buffers, gradients, and its optimizer.

Parameters lie as the program says: in a layout on the stage's mesh, under ZeRO 3 as a flat part of
their shard. With ZeRO 1 and 2 the optimizer sees flat parts, which are views of the shards: it
works in place, and what the others updated is gathered into the same memory. An optimizer whose
rule is elementwise gives the same numbers on shards as on whole parameters; others are refused
where a parameter is not whole.
"""

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch

from partita.errors import PlanError, ProgramError
from partita.graph.record import Graph
from partita.meaning import Purpose, Value
from partita.plans import Axis, Stage
from partita.program import Program
from partita.run.local.shards import Place, gate_rows, shard, shard_index

T = torch.Tensor
MakeOptimizer = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]

ELEMENTWISE = (
    "SGD", "Adam", "AdamW", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop",
    "ASGD", "Lion",
)  # fmt: skip


@dataclass(frozen=True)
class Shapes:
    """Shapes of all tensors of a micro-batch, gradients and updates by what they belong to."""

    graph: Graph
    origin: Mapping[str, str]
    gates: Mapping[str, int]

    def shape(self, tensor: str) -> tuple[int, ...]:
        """The whole shape of a tensor of a micro-batch."""
        return self.graph.tensor(self.origin.get(tensor, tensor)).shape

    def num_gates(self, tensor: str) -> int:
        """By how many gates the rows of a tensor are shared out."""
        return self.gates.get(tensor, self.gates.get(self.origin.get(tensor, ""), 1))


def shapes_of(small: Graph, program: Program) -> Shapes:
    """Every name of the program, gradients that only a stage knows included."""
    origin: dict[str, str] = {}
    for op in small.ops:
        if op.phase == "update":
            origin[op.outputs[0]] = op.inputs[0]
    origin |= gradients_of(program)
    return Shapes(small, origin, gate_rows(small))


def gradients_of(program: Program) -> dict[str, str]:
    """The tensor that each gradient of a program belongs to."""
    return {
        value.tensor: value.gradient_of
        for each in (program, *(body.program for body in program.bodies))
        for value in each.values
        if value.gradient_of
    }


@dataclass
class Stored:
    """A parameter or buffer as a rank keeps it between steps."""

    value: Value
    tensor: T
    part: torch.nn.Parameter | None = None  # what the optimizer updates: the shard, or a view of it
    flat: tuple[int, ...] = ()  # of that part


@dataclass
class StageState:
    """All that a rank holds of one stage."""

    number: int
    stage: Stage
    place: Place
    shapes: Shapes
    stored: dict[str, Stored] = field(default_factory=dict)
    gradients: dict[str, tuple[Value, T, bool]] = field(default_factory=dict)  # owned?
    optimizer: torch.optim.Optimizer | None = None
    gradient_of: dict[str, str] = field(default_factory=dict)  # parameter -> gradient tensor
    last_gradients: dict[str, tuple[Value, T]] = field(default_factory=dict)
    leaves: dict[str, T] = field(default_factory=dict)  # parameters that autograd adds to itself

    @property
    def axes(self) -> tuple[Axis, ...]:
        """The axes of the stage's mesh."""
        return self.stage.mesh.axes

    def keep(self, value: Value, whole: T, device: torch.device) -> None:
        """Take this rank's part of a whole tensor."""
        gates = self.shapes.num_gates(value.tensor)
        own = cut(whole.detach(), value, self.axes, self.place, gates)
        own = own.to(device).clone(memory_format=torch.contiguous_format)
        self.stored[value.tensor] = Stored(value, own)

    def add_gradient(self, value: Value, tensor: T) -> None:
        """Add to a gradient; the first is kept as it is, since autograd may hand out views."""
        known = self.gradients.get(value.tensor)
        if known is None:
            self.gradients[value.tensor] = (value, tensor, False)
        elif known[2]:
            known[1].add_(tensor)
        else:
            self.gradients[value.tensor] = (value, known[1] + tensor, True)

    def leaf(self, name: str) -> T:
        """A parameter as autograd sees it in every micro-batch: gradients are added in place."""
        if name not in self.leaves:
            self.leaves[name] = self.stored[name].tensor.detach().requires_grad_()
        return self.leaves[name]

    def take_leaf(self, name: str, value: Value) -> None:
        """The gradient of a leaf becomes that of the stage; nothing was added: it is zero."""
        leaf = self.leaves[name]
        if leaf.grad is None:
            leaf.grad = torch.zeros_like(leaf)
        known = self.gradients.get(value.tensor)
        if known is None:
            self.gradients[value.tensor] = (value, leaf.grad, True)
        elif known[1] is not leaf.grad:  # another block has added to it by itself
            self.add_gradient(value, leaf.grad)
            leaf.grad = None

    def clear_gradients(self) -> None:
        """A step has ended."""
        self.gradients.clear()
        for leaf in self.leaves.values():
            leaf.grad = None

    def make_parts(self, program: Program) -> None:
        """What the optimizer updates, as the updates of a body say."""
        for work in program.works:
            if work.purpose is not Purpose.UPDATE:
                continue
            for k in range(len(work.writes)):
                parameter = program.values[work.reads[2 * k]]
                gradient = program.values[work.reads[2 * k + 1]]
                stored = self.stored[parameter.tensor]
                part = stored.tensor
                for axis in gradient.flat[len(parameter.flat) :]:
                    part = flat_view(part, self.place[axis], self.axes[axis].size)
                stored.part = torch.nn.Parameter(part, requires_grad=True)
                stored.flat = gradient.flat
                self.gradient_of[parameter.tensor] = gradient.tensor

    def make_optimizer(self, make: MakeOptimizer) -> None:
        """One optimizer for the parameters of the stage."""
        trained = [stored for stored in self.stored.values() if stored.part is not None]
        if not trained:
            return
        self.optimizer = make([stored.part for stored in trained if stored.part is not None])
        name = type(self.optimizer).__name__
        is_elementwise = name in ELEMENTWISE or getattr(self.optimizer, "elementwise", False)
        for stored in trained:
            whole = not stored.flat and all(
                p.kind != "shard" or axis.size == 1
                for p, axis in zip(stored.value.layout, self.axes, strict=True)
            )
            if not whole and not is_elementwise:
                raise PlanError(
                    f"the optimizer {name} is not elementwise as far as is known, and the plan "
                    f"gives a rank only a part of {stored.value.tensor}",
                    fix="use an elementwise one (SGD, AdamW, ...), set `elementwise = True` on "
                    "its class if it is, or plan with zero=0 and replicated parameters",
                    field=f"stage {self.stage.name!r}",
                )

    def update(self, reads: Callable[[str], tuple[Value, T]], keep: bool) -> None:
        """One step of the optimizer with reduced gradients, by parameter."""
        if self.optimizer is None:
            return
        for name, stored in self.stored.items():
            if stored.part is None:
                continue
            value, gradient = reads(name)
            if gradient.numel() != stored.part.numel():
                raise ProgramError(
                    f"{name} of {list(stored.part.shape)} is updated with a gradient of "
                    f"{list(gradient.shape)}", fix="verify the plan: partita verify",
                )  # fmt: skip
            # A sum in a wider type is rounded once, for an optimizer that takes its parameter's.
            stored.part.grad = gradient.reshape(stored.part.shape).to(stored.part.dtype)
            if keep:
                self.last_gradients[name] = (value, gradient)
        self.optimizer.step()
        for stored in self.stored.values():
            if stored.part is not None:
                stored.part.grad = None


def cut(whole: T, value: Value, axes: tuple[Axis, ...], place: Place, num_gates: int = 1) -> T:
    """A rank's part of a whole tensor, as a value lies."""
    own = shard(whole, value.layout, axes, place, num_gates)
    for axis in value.flat:
        own = flat_view(own, place[axis], axes[axis].size)
    return own


def flat_view(own: T, index: int, count: int) -> T:
    """Part `index` of `count` nearly equal parts of a tensor, flattened, without a copy."""
    flat = own.reshape(-1)
    size = flat.numel()
    return flat[size * index // count : size * (index + 1) // count]


def roots(program: Program, sources: Iterable[str] = ("parameter",)) -> dict[str, Value]:
    """Values that lie there from the start, by tensor."""
    return {
        value.tensor: value for value in program.values if value.source in sources and value.of < 0
    }


def joined(
    parts: Mapping[Place, T], value: Value, shape: tuple[int, ...], axes: tuple[Axis, ...],
    num_gates: int = 1,
) -> T:  # fmt: skip
    """The whole tensor from the parts of all places of a mesh."""
    sizes = [range(axis.size) for axis in axes]
    shards = dict(parts)
    for axis in reversed(value.flat):
        merged = {}
        for place in itertools.product(*sizes):
            line = [(*place[:axis], k, *place[axis + 1 :]) for k in range(axes[axis].size)]
            merged[place] = torch.cat([shards[other].reshape(-1) for other in line])
        shards = merged
    first = next(iter(shards.values()))
    full = first.new_zeros(shape)
    for place, own in shards.items():
        if any(c for c, p in zip(place, value.layout, strict=True) if p.kind == "replicate"):
            continue
        index = shard_index(shape, value.layout, axes, place, num_gates)
        full[index] += own.reshape(full[index].shape)
    return full
