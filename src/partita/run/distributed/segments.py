"""A block as segments under autograd: where nothing is sent inside, op by op is only overhead.

A stage on one device, or one whose ops are all split along the batch and whose gradients are
reduced once a step, runs its forward as one function and its backward as one call of autograd. With
full checkpointing the forward keeps what passes from segment to segment, and the backward runs each
segment again. Everything else (splits within ops, ZeRO 2 and 3, selective checkpointing) runs op by
op.

Where the schedule has data and weight gradients apart, the first call of autograd stops at the
results of the nodes that read parameters; what came there is differentiated again, node by node,
when the weight gradients' turn has come. Until then all of the block's activations are kept.
Autograd adds the gradients of parameters itself, in place.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from partita.graph.record import Graph
from partita.meaning import Layout, Phase, Purpose, Value
from partita.plans import Stage
from partita.program import Program
from partita.run.distributed.autograd import add_gradients, differentiate
from partita.run.distributed.boxes import box, local_shape
from partita.run.distributed.comm import Pending
from partita.run.distributed.convert import MeshPlace, convert
from partita.run.distributed.held import StageState
from partita.run.distributed.model import OpsFunction
from partita.run.distributed.opwise import BodyPlan, Frame, RankContext
from partita.run.distributed.shares import share_plan

T = torch.Tensor
BLOCK_PHASES = (Phase.FORWARD, Phase.BACKWARD, Phase.WEIGHT)


@dataclass(frozen=True, eq=False)
class SegmentPlan:
    """A stage's forward as functions, and how what it gives is called in the program."""

    functions: tuple[OpsFunction, ...]
    keeps: bool  # are activations kept for the backward, or run again?
    start: int  # of a micro-batch's samples, the first that this rank computes
    scale: float  # of a loss that is a mean over a part of the batch
    loss: str
    inputs: dict[str, Value]  # what the model is fed with
    gradients: dict[str, Value]  # by parameter
    entering: tuple[str, ...]
    settles: tuple[tuple[Value, Value], ...]  # conversions of the loss
    split_axes: tuple[int, ...]  # along which the batch is split
    summed: frozenset[str]  # parameters whose gradients are summed in every micro-batch
    apart: bool  # are data and weight gradients two blocks?


def segment_plan(
    run: RankContext, state: StageState, at: MeshPlace, program: Program, leaving: Sequence[str],
    *, taken_apart: bool = False,
) -> SegmentPlan | None:  # fmt: skip
    """How a stage runs in segments; None where it must run op by op.

    `taken_apart` has data and weight gradients in two calls, whatever the program says.
    """
    stage, small = state.stage, run.small
    if stage.checkpointing == "selective" or not small.is_training:
        return None
    loss = small.outputs[0]
    settles = []
    for work in program.works:
        if work.phase not in BLOCK_PHASES:
            continue
        if work.purpose is Purpose.CONVERSION:
            have, need = program.values[work.reads[0]], program.values[work.writes[0]]
            if have.tensor == loss:
                settles.append((have, need))
            elif work.collective != "all_reduce" or have.gradient_of in run.batch_dims:
                return None  # else a sum over the batch on its way to a parameter: see below
        elif work.purpose not in (Purpose.COMPUTE, Purpose.RECOMPUTE, Purpose.OTHER):
            return None
    start, batch, scale = _share_of_batch(run, stage, at, loss)
    if batch == 0:
        return None
    own = {name for split in stage.splits for name in small.op(split.op).outputs}
    if any(name in own for name in small.outputs[1:]):
        return None
    gradients = {
        name: value
        for name, gradient in state.gradient_of.items()
        for value in program.values
        if value.tensor == gradient and value.source == "gradient" and value.of < 0
    }
    if gradients.keys() != state.gradient_of.keys():
        return None
    wanted = [*leaving, *([loss] if loss in own else [])]
    apart = taken_apart or any(w.phase is Phase.WEIGHT and w.op for w in program.works)
    split_axes = tuple(
        i
        for i, axis in enumerate(at.axes)
        if axis.size > 1 and any(split.dims[i] for split in stage.splits)
    )
    return SegmentPlan(
        _functions(
            run, stage, small, batch, wanted, program,
            frozenset(gradients) if apart else frozenset(),
        ),
        stage.checkpointing == "none",
        start,
        scale,
        loss if loss in own else "",
        {v.tensor: v for v in program.values if v.source == "input" and v.of < 0},
        gradients,
        tuple({v.tensor: None for v in program.values if v.source == "received"}),
        tuple(settles),
        split_axes,
        frozenset(
            name
            for name, value in gradients.items()
            if any(value.layout[axis].kind == "replicate" for axis in split_axes)
        ),
        apart,
    )  # fmt: skip


def _share_of_batch(
    run: RankContext, stage: Stage, at: MeshPlace, loss: str
) -> tuple[int, int, float]:
    """Start and size of the batch that all ops of a stage have on this rank; a size of 0 if none.

    The third is the scale of the loss.
    """
    none = 0, 0, 1.0
    batches, scale = set(), 1.0
    small = run.small
    for split in stage.splits:
        op = small.op(split.op)
        if not any(d and a.size > 1 for d, a in zip(split.dims, at.axes, strict=True)):
            carries = any(n in run.batch_dims for n in (*op.inputs, *op.outputs))
            if carries or not at.axes:
                batches.add((0, run.micro_batch))
            continue
        draws = run.model.is_random_op(op.name) and not run.model.draws_by_sample(op.name)
        plan = share_plan(small.call(op), split.dims, at.axes, at.place, frozenset(), draws)
        if plan.is_whole or plan.joined:
            return none
        for names, layouts in ((op.inputs, plan.layouts), (op.outputs, plan.out_layouts)):
            for name, layout in zip(names, layouts, strict=True):
                share = _batch_share(run, at, name, layout, small)
                if share is None:
                    continue
                if share < 0 or (share == 0 and name != loss):
                    return none
                if share > 0:
                    batches.add((_batch_start(run, at, name, layout, small), share))
        if plan.scale != 1.0:
            if op.outputs != (loss,):
                return none
            scale = plan.scale
    return (*batches.pop(), scale) if len(batches) == 1 else none


def _batch_start(run: RankContext, at: MeshPlace, name: str, layout: Layout, small: Graph) -> int:
    """The first sample of a micro-batch in a shard along its batch dim."""
    dim, shape = run.batch_dims[name], small.tensor(name).shape
    return box(shape, layout, at.axes, at.place)[dim][0] * run.micro_batch // shape[dim]


def _batch_share(
    run: RankContext, at: MeshPlace, name: str, layout: Layout, small: Graph
) -> int | None:
    """The batch of a shard along its batch dim; 0 for partial sums, -1 for any other split.

    None is what has no batch dim and lies whole.
    """
    kinds = {p.kind for p, a in zip(layout, at.axes, strict=True) if a.size > 1}
    if "partial" in kinds:
        return 0
    dim = run.batch_dims.get(name)
    sharded = {p.dim for p, a in zip(layout, at.axes, strict=True) if a.size > 1 and p.dim >= 0}
    if dim is None:
        return -1 if sharded else None
    if sharded - {dim}:
        return -1
    shape = small.tensor(name).shape
    own = local_shape(shape, layout, at.axes, at.place)
    share, rest = divmod(run.micro_batch * own[dim], shape[dim])
    return -1 if rest or not share else share


def _functions(
    run: RankContext, stage: Stage, small: Graph, batch: int, wanted: list[str], program: Program,
    apart: frozenset[str],
) -> tuple[OpsFunction, ...]:  # fmt: skip
    """The stage's ops as functions, one per checkpoint segment."""
    named = {split.op for split in stage.splits}
    ops = [
        op
        for op in small.ops
        if op.name in named
        and op.phase == "forward"
        and (not run.live.isdisjoint(op.outputs) or run.model.changes_buffers(op.name))
    ]
    wanted = [name for name in wanted if name in run.live]
    starts = set(stage.segments) if stage.checkpointing == "full" else set()
    groups: list[list[str]] = [[]]
    for op in ops:
        if op.name in starts and groups[-1]:
            groups.append([])
        groups[-1].append(op.name)
    given = frozenset(v.tensor for v in program.values if v.source == "received")
    functions = []
    for i, group in enumerate(groups):
        later = {n for other in groups[i + 1 :] for name in other for n in small.op(name).inputs}
        made = [n for name in group for n in small.op(name).outputs]
        outputs = [n for n in made if n in later or n in wanted]
        known = given | {
            n for other in groups[:i] for name in other for n in small.op(name).outputs
        }
        functions.append(
            run.model.function(group, outputs, batch, given=frozenset(known), apart=apart)
        )
    return tuple(functions)


@dataclass(eq=False)
class _Ran:
    """A segment that ran: its arguments, what it gave, and what came to nodes with parameters."""

    function: OpsFunction
    leaves: list[T]
    results: tuple[T, ...]
    seen: list[T | None] = field(default_factory=list)  # gradients of results, once they are known


class SegmentFrame(Frame):
    """The values of one stage for one micro-batch, run in segments."""

    def __init__(
        self, run: RankContext, state: StageState, at: MeshPlace, plan: BodyPlan, m: int,
        segments: SegmentPlan,
    ) -> None:  # fmt: skip
        super().__init__(run, state, at, plan, m)
        self.segments = segments
        self.ran: list[_Ran] = []
        self.late_weights: list[_Ran] = []
        self.known: dict[str, T] = {}  # activations by tensor
        self.backwards: dict[str, T] = {}  # gradients of what entered, by tensor
        self.loss: T | Pending | None = None

    def do_all(
        self, phases: Sequence[Phase], *, purposes: frozenset[Purpose] | None = None
    ) -> None:
        """The forward, the backward, or the weight gradients of the block."""
        if Phase.FORWARD in phases:
            self._forward_block()
        if Phase.BACKWARD in phases:
            self._backward_block()
        if Phase.WEIGHT in phases and self.segments.apart:
            for ran in self.late_weights:
                self._weigh(ran)
            self.late_weights.clear()

    def _given(self, name: str) -> T:
        if name in self.known:
            return self.known[name]
        stored = self.state.stored.get(name)
        if stored is not None:
            return stored.tensor
        if name in self.segments.inputs:
            own = self.run.inputs(name, self.segments.inputs[name], self.state, self.m)
        else:
            own = next((t for (tensor, _), t in self.received.items() if tensor == name), None)  # type: ignore[assignment]
            if own is None:
                raise self._missing(Value(name, ()), None)
        self.known[name] = own
        return own

    def _leaf(self, name: str, *, grad: bool, again: bool, shared: bool) -> T:
        """An argument of a segment; parameters are the same leaf in every micro-batch."""
        is_trained = name in self.segments.gradients
        # Autograd adds in the parameter's type: what is summed in another is taken each time.
        alone = shared or name in self.segments.summed or name in self.run.wide
        if is_trained and grad and not alone:
            return self.state.leaf(name)
        own = self._given(name)
        if name in self.state.stored and not is_trained:
            return own.clone() if again else own  # running statistics are taken once
        own = own.detach()
        moves = name not in self.segments.inputs and own.is_floating_point()
        return own.requires_grad_() if grad and moves else own

    def _run_segment(self, function: OpsFunction, *, grad: bool, again: bool = False) -> _Ran:
        names = function.inputs
        self.run.model.sample = self.m * self.run.micro_batch + self.segments.start
        is_once = len(set(names)) == len(names)
        leaves = [
            self._leaf(name, grad=grad, again=again, shared=not is_once and names.count(name) > 1)
            for name in names
        ]
        with torch.set_grad_enabled(grad):
            results = function.run(*leaves)
            if self.segments.scale != 1.0 and self.segments.loss in function.outputs:
                place = function.outputs.index(self.segments.loss)
                scaled = results[place] * self.segments.scale
                results = (*results[:place], scaled, *results[place + 1 :])
        return _Ran(function, leaves, results)

    def _forward_block(self) -> None:
        keeps = self.segments.keeps
        for function in self.segments.functions:
            ran = self._run_segment(function, grad=keeps)
            if keeps:
                self.ran.append(ran)
            for name, out in zip(function.outputs, ran.results, strict=False):
                self.known[name] = out.detach()
        if self.segments.loss:
            self.loss = self.known[self.segments.loss]
            for have, need in self.segments.settles:
                assert isinstance(self.loss, torch.Tensor), "conversions follow one another"
                self.loss = convert(
                    self.run.comm, self.at, self.loss, (), have.layout, need.layout
                ).wait()

    def _backward_block(self) -> None:
        given: dict[str, T] = {}
        for (name, _), tensor in self.received.items():
            origin = self.run.gradient_of.get(name)
            if origin is not None:
                given[origin] = given[origin] + tensor if origin in given else tensor
        if self.segments.loss:
            layout = next(v for v in self.program.values if v.tensor == self.segments.loss).layout
            seed = Value(f"{self.segments.loss}.grad", layout, "input")
            given[self.segments.loss] = self.run.inputs(seed.tensor, seed, self.state, self.m)
        for i in reversed(range(len(self.segments.functions))):
            if self.segments.keeps:
                ran = self.ran.pop()
            else:
                ran = self._run_segment(self.segments.functions[i], grad=True, again=True)
            self._differentiate(ran, given)
        self.backwards = given
        self.known = {}

    def _differentiate(self, ran: _Ran, given: dict[str, T]) -> None:
        """Gradients of a segment's arguments, added to those that are known."""
        outputs, gradients = [], []
        for name, out in zip(ran.function.outputs, ran.results, strict=False):
            if name in given:
                gradient = given.pop(name)
                if out.requires_grad:
                    outputs.append(out)
                    gradients.append(gradient)
        trained = self.segments.gradients
        entered = {
            name: leaf
            for name, leaf in zip(ran.function.inputs, ran.leaves, strict=True)
            if leaf.requires_grad and name not in trained
        }
        if self.segments.apart:
            self._split(ran, outputs, gradients, entered, given)
            return
        if outputs:
            add_gradients(outputs, gradients)
        for name, leaf in entered.items():
            if leaf.grad is not None:
                given[name] = given[name] + leaf.grad if name in given else leaf.grad
        self._take(ran)

    def _split(
        self, ran: _Ran, outputs: list[T], gradients: list[T], entered: dict[str, T],
        given: dict[str, T],
    ) -> None:  # fmt: skip
        """The data gradients; what comes to nodes that read parameters is kept for later."""
        later = ran.results[len(ran.function.outputs) :]
        wanted = [*entered.values(), *(each for each in later if each.requires_grad)]
        computed = iter(differentiate(outputs, wanted, gradients, retain=True))
        for name in entered:
            gradient = next(computed)
            if gradient is not None:
                given[name] = given[name] + gradient if name in given else gradient
        ran.seen = [next(computed) if each.requires_grad else None for each in later]
        self.late_weights.append(ran)

    def _weigh(self, ran: _Ran) -> None:
        """The weight gradients of a segment, node by node."""
        first = len(ran.function.outputs)
        for use in ran.function.uses:
            came = [(ran.results[i], ran.seen[i - first]) for i in use.results]
            pairs = [(out, gradient) for out, gradient in came if gradient is not None]
            if pairs:
                leaves = [ran.leaves[i] for i in use.arguments]
                add_gradients([out for out, _ in pairs], [own for _, own in pairs], leaves)
        self._take(ran)

    def _take(self, ran: _Ran) -> None:
        """What autograd has added to parameters is the stage's; arguments of one are added up."""
        sums: dict[str, T] = {}
        for name, leaf in zip(ran.function.inputs, ran.leaves, strict=True):
            value = self.segments.gradients.get(name)
            if value is None:
                continue
            if leaf is self.state.leaves.get(name):
                self.state.take_leaf(name, value)
            else:
                own = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
                own = own.to(self.run.wide.get(name, own.dtype))
                sums[name] = sums[name] + own if name in sums else own
        for name, total in sums.items():
            value = self.segments.gradients[name]
            self.state.add_gradient(value, self._whole_sum(value, total))

    def _whole_sum(self, value: Value, gradient: T) -> T:
        """A gradient that the program has summed over the batch by now.

        What has no batch, such as positions, is summed before its op's gradients; here autograd has
        gone on to the parameter, which is summed instead.
        """
        for axis in self.segments.split_axes:
            if value.layout[axis].kind == "replicate":
                own = gradient.clone(memory_format=torch.contiguous_format)
                gradient = self.run.comm.all_reduce(own, self.at.line(axis)).wait()
        return gradient

    def leaving(self, value: Value) -> T:
        """What is sent: an activation, or the gradient of one that entered."""
        if value.tensor in self.known:
            return self.known[value.tensor]
        if value.tensor in self.run.ops_of and value.tensor not in self.run.live:
            tensor = self.run.small.tensor(value.tensor)  # nobody needs it
            shape = local_shape(tensor.shape, value.layout, self.at.axes, self.at.place)
            return torch.zeros(shape, device=self.run.device)
        origin = value.gradient_of
        if origin in self.backwards:
            own = self.backwards[origin]
            return own if origin in self.run.batch_dims else self._whole_sum(value, own)
        entered = next((t for (n, _), t in self.received.items() if n == origin), None)
        if entered is None:
            raise self._missing(value, None)
        return torch.zeros_like(entered)  # nothing of the loss depends on it
