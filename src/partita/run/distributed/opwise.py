"""A block of a stage op by op: the works of its body in order, on one rank's shards.

All ranks of a mesh do the works of a body in the same order, so the collectives of a line meet.
Each is started where the program has it and waited for by the first work that reads its result:
what the plan overlaps is overlapped. A value is dropped after its last reader.

The forward of an op runs under autograd from leaves of its own; its data and weight gradients are
two calls of autograd, where and when the program has them. Sharded parameters (ZeRO 3) give their
memory back after the forward and get it again from the gather of the backward. Gathers that follow
one another go in one message of at most some megabytes, started while the one before is used.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from partita.capture.translate import DTYPES
from partita.errors import PlanError, ProgramError
from partita.graph.record import Graph, Op
from partita.meaning import Layout, Phase, Purpose, Value, Work
from partita.program import Program
from partita.run.distributed.boxes import flat_size, local_shape
from partita.run.distributed.comm import Communicator, Pending
from partita.run.distributed.convert import MeshPlace, convert, sliced
from partita.run.distributed.held import StageState, flat_view
from partita.run.distributed.model import OpsFunction, RunModel
from partita.run.distributed.shares import (
    BackwardPlan,
    Record,
    SharePlan,
    backward_plan,
    check_joins,
    run_backward,
    run_forward,
    share_plan,
)
from partita.run.distributed.statistics import StatisticExchange, StatisticRule, rule_of

T = torch.Tensor
TORCH_DTYPES = {name: dtype for dtype, name in reversed(DTYPES.items())}
BUCKET_BYTES = 4 << 20  # what one message of gathers holds; a larger parameter goes alone


class WorkRecorder(Protocol):
    """What is told of every work of a block that runs op by op."""

    def start_work(self, program: Program, number: int, microbatch: int) -> None:
        """A work of a body begins."""

    def end_work(self) -> None:
        """The work that began last has ended."""


@dataclass
class RankContext:
    """What every block of a rank needs."""

    small: Graph  # of a micro-batch, with its backward
    model: RunModel
    comm: Communicator
    device: torch.device
    batch_dims: dict[str, int]
    micro_batch: int
    inputs: Callable[[str, Value, "StageState", int], T]  # what the model is fed with
    gradient_of: dict[str, str]  # by gradient, those that only a stage knows included
    keep_gradients: bool = False
    recorder: WorkRecorder | None = None
    ops: dict[str, Op] = field(default_factory=dict)
    backward_of: dict[str, list[Op]] = field(default_factory=dict)
    live: set[str] = field(default_factory=set)  # tensors that the loss depends on
    ops_of: dict[str, str] = field(default_factory=dict)  # by what they make, in the forward
    wide: dict[str, torch.dtype] = field(default_factory=dict)  # of sums, by gradient, parameter

    def __post_init__(self) -> None:
        self.ops = {op.name: op for op in self.small.ops}
        for op in self.small.ops:
            if op.forward:
                self.backward_of.setdefault(op.forward, []).append(op)
                origin = self.ops[op.forward]
                for name, i in zip(op.outputs, self.small.call(op).wrt, strict=True):
                    self._note_type(name, origin.inputs[i])
        forward = [op for op in self.small.ops if op.phase == "forward"]
        self.ops_of = {name: op.name for op in forward for name in op.outputs}
        self.live = {self.small.outputs[0]}
        for op in reversed(self.small.ops):
            if op.phase == "forward" and not self.live.isdisjoint(op.outputs):
                self.live.update(op.inputs)

    def _note_type(self, gradient: str, of: str) -> None:
        """Gradients of parameters may be added up in a wider type than they are computed in."""
        summed, own = self.small.tensor(gradient), self.small.tensor(of)
        if own.role == "parameter" and summed.dtype != own.dtype:
            self.wide[gradient] = self.wide[of] = TORCH_DTYPES[summed.dtype]


@dataclass(frozen=True, eq=False)
class BodyPlan:
    """A body's works in order, with what is worked out once: last readers, exchanges."""

    program: Program
    works: tuple[int, ...]
    last_read: dict[int, int]  # value -> place in the order of its last reader
    exchanged: dict[int, frozenset[int]]  # work -> axes along which it is joined
    recomputed: frozenset[str]
    added: dict[int, list[int]]  # value -> gradients that are slices of it
    forwards: dict[int, "ForwardPlan"] = field(default_factory=dict)  # by work
    backwards: dict[int, BackwardPlan] = field(default_factory=dict)
    following: dict[int, int] = field(default_factory=dict)  # the next work of the same phase
    buckets: tuple[tuple[int, ...], ...] = ()  # gathers of parameters that go together
    bucket_of: dict[int, int] = field(default_factory=dict)  # by gather
    sizes: dict[tuple[int, ...], list[list[int]]] = field(default_factory=dict)  # of gathers


@dataclass(frozen=True, eq=False)
class ForwardPlan:
    """How a rank runs the forward of one op: the same in every micro-batch, so worked out once."""

    share: SharePlan
    again: bool
    wanted: frozenset[int]  # inputs that the backward differentiates
    ties: tuple[int, ...]
    function: OpsFunction | None  # None where a rule computes with exchanged statistics
    order: list[int]
    hidden: list[str]
    local: Callable[..., tuple[T, ...]] | None
    num_backward: int


def body_plan(
    program: Program, kept: Callable[[Value], bool], size_bytes: Callable[[Value], int],
    forward_of: Mapping[str, str],
) -> BodyPlan:  # fmt: skip
    """What the works of a body do in which order; `kept` values are read from outside.

    `forward_of` has the op of the forward that each op of the backward belongs to.
    """
    order: Iterable[int] = range(program.num_tasks)
    if program.order is not None:
        order = program.order.tolist()
    given = tuple(dict.fromkeys(n for t in order if (n := int(program.work[t])) >= 0))
    exchanged = _exchanges(program, given)
    works = _started_early(program, given, exchanged)
    last: dict[int, int] = {}
    for position, number in enumerate(works):
        for value in program.works[number].reads:
            while value >= 0:
                last[value] = position
                value = program.values[value].of
    for number, known in enumerate(program.values):
        if kept(known):
            root = number
            while root >= 0:
                last[root] = len(works)
                root = program.values[root].of
    added: dict[int, list[int]] = {}
    for number, known in enumerate(program.values):
        if known.source == "gradient" and known.of >= 0:
            root = known.of
            while program.values[root].of >= 0:
                root = program.values[root].of
            added.setdefault(root, []).append(number)
    recomputed = _recomputed_first(program, works, forward_of)
    following = {
        a: b for a, b in pairwise(works) if program.works[a].phase is program.works[b].phase
    }
    buckets = _buckets(program, works, size_bytes)
    return BodyPlan(
        program, works, last, exchanged, recomputed, added, following=following, buckets=buckets,
        bucket_of={number: k for k, bucket in enumerate(buckets) for number in bucket},
    )  # fmt: skip


def _started_early(
    program: Program, works: Sequence[int], exchanged: Mapping[int, frozenset[int]]
) -> tuple[int, ...]:
    """The works with each conversion right after what it reads, in the order of conversions.

    The network of the simulated step begins there: a weight gradient that comes next is computed
    while the data gradient before it is summed. All ranks of a mesh move alike.
    """
    order: list[int] = []
    for number in works:
        work = program.works[number]
        at = len(order)
        if work.purpose is Purpose.CONVERSION and work.collective:
            reads = set(work.reads)
            for value in work.reads:
                while (value := program.values[value].of) >= 0:
                    reads.add(value)
            while at and _may_wait(program.works[order[at - 1]], work, reads):
                if exchanged.get(order[at - 1]):
                    break  # it sends itself
                at -= 1
        order.insert(at, number)
    return tuple(order)


def _may_wait(before: Work, conversion: Work, reads: set[int]) -> bool:
    """May a conversion start ahead of this op, which makes nothing that it reads?"""
    is_op = before.purpose is Purpose.COMPUTE and before.phase is conversion.phase
    return is_op and reads.isdisjoint(before.writes)


def _buckets(
    program: Program, works: Sequence[int], size_bytes: Callable[[Value], int]
) -> tuple[tuple[int, ...], ...]:
    """Gathers of stored parameters that follow one another, as many as fit into one message."""
    buckets: list[list[int]] = []
    size, before = 0, None
    for number in works:
        work = program.works[number]
        reads = [program.values[value] for value in work.reads]
        if work.purpose is not Purpose.PARAMETER_GATHER or work.phase is Phase.UPDATE:
            continue
        more = sum(size_bytes(value) for value in reads)
        stored = all(value.source == "parameter" and value.of < 0 for value in reads)
        kind = (work.phase, work.axis) if stored else None
        if kind is None or kind != before or size + more > BUCKET_BYTES:
            buckets.append([])
            size = 0
        buckets[-1].append(number)
        size, before = size + more, kind
    return tuple(map(tuple, buckets))


def _recomputed_first(
    program: Program, works: Sequence[int], forward_of: Mapping[str, str]
) -> frozenset[str]:
    """Ops that run again before their gradients: those read what the second run left.

    Others run again only because someone else reads what they make; their gradients come from the
    first run, which kept what they need.
    """
    again, before = set(), set()
    for number in works:
        work = program.works[number]
        if work.purpose is Purpose.RECOMPUTE and work.op not in before:
            again.add(work.op)
        elif work.purpose is Purpose.COMPUTE and work.op in forward_of:
            before.add(forward_of[work.op])
    return frozenset(again)


def _exchanges(program: Program, works: Sequence[int]) -> dict[int, frozenset[int]]:
    """Along which axes each compute is joined: borders stand before it, statistics after."""
    borders: dict[str, set[int]] = {}
    joined: dict[int, set[int]] = {}
    maker: dict[int, int] = {}
    for number in works:
        work = program.works[number]
        if work.purpose in (Purpose.COMPUTE, Purpose.RECOMPUTE):
            joined[number] = borders.pop(work.op, set())
            if work.writes:
                maker[work.writes[0]] = number
        elif work.purpose is Purpose.EXCHANGE:
            if work.writes:
                joined[maker[work.writes[0]]].add(work.axis)
            else:
                borders.setdefault(work.op, set()).add(work.axis)
    return {number: frozenset(axes) for number, axes in joined.items()}


class Frame:
    """The values of one body of one stage, for one micro-batch, on one rank."""

    def __init__(
        self, run: RankContext, state: StageState, at: MeshPlace, plan: BodyPlan, m: int
    ) -> None:
        self.run, self.state, self.at, self.plan, self.m = run, state, at, plan, m
        self.program = plan.program
        self.values: dict[int, Any] = {}
        self.received: dict[tuple[str, Layout], T] = {}
        self.records: dict[str, Record] = {}
        self.early: dict[int, tuple[T, ...]] = {}  # results of works whose turn comes next
        self.late: list[tuple[int, Pending]] = []  # sums that are added when the block ends
        self.has_stepped = False
        self.num_gathered = 0  # buckets that were started
        self.phases: Sequence[Phase] = ()  # that are run now

    # Values.

    def read(self, number: int, work: Work | None = None) -> T:
        """A value, once it is there."""
        if number in self.values:
            known = self.values[number]
            if isinstance(known, Pending):
                known = self.values[number] = known.wait()
            return known  # type: ignore[no-any-return]
        value = self.program.values[number]
        if value.source == "gradient":
            self._settle(value.tensor)
            if value.tensor not in self.state.gradients:
                raise self._missing(value, work)
            return self.state.gradients[value.tensor][1]
        if value.of >= 0:
            own = self._sliced(self.read(value.of, work), self.program.values[value.of], value)
        elif value.source == "input":
            own = self.run.inputs(value.tensor, value, self.state, self.m)
        elif value.source == "parameter":
            own = self._stored(value)
        elif (value.tensor, value.layout) in self.received:
            own = self.received[value.tensor, value.layout]
        else:
            raise self._missing(value, work)
        self.values[number] = own
        return own

    def _stored(self, value: Value) -> T:
        return self.state.stored[value.tensor].tensor

    def _missing(self, value: Value, work: Work | None) -> ProgramError:
        who = "" if work is None else f"{work.op or work.purpose.words} reads "
        return ProgramError(f"{who}{value}, which is not there", fix="verify the plan")

    def _check_size(self, value: Value, own: T) -> None:
        """A shard of another size would make a collective wait for ever, or mix things up."""
        shape = local_shape(
            self._shape(value), value.layout, self.at.axes, self.at.place, self._gates(value)
        )
        if tuple(own.shape) != shape:
            raise ProgramError(
                f"{value} is {list(own.shape)} here, and its shard {list(shape)}",
                fix="verify the plan",
            )

    def _shape(self, value: Value) -> tuple[int, ...]:
        return self.state.shapes.shape(value.tensor)

    def _gates(self, value: Value) -> int:
        return self.state.shapes.num_gates(value.tensor)

    def _sliced(self, own: T, have: Value, need: Value) -> T:
        layout, shape, gates = have.layout, self._shape(have), self._gates(have)
        for axis, placement in enumerate(need.layout):
            if layout[axis] != placement:
                after = (*layout[:axis], placement, *layout[axis + 1 :])
                own = sliced(own, shape, layout, after, self.at.axes, self.at.place, gates)
                layout = after
        for axis in need.flat[len(have.flat) :]:
            own = flat_view(own, self.at.place[axis], self.at.axes[axis].size)
        return own

    def write(self, number: int, tensor: T) -> None:
        """A result; gradients are added to what the stage has."""
        value = self.program.values[number]
        if value.source == "gradient":
            self.state.add_gradient(value, tensor)
        else:
            self.values[number] = tensor
        for other in self.plan.added.get(number, ()):
            known = self.program.values[other]
            base = self.read(known.of)
            self.state.add_gradient(known, self._sliced(base, self.program.values[known.of], known))

    def start(self, number: int, pending: Pending) -> None:
        """A result that is on its way; what is added to at once is waited for."""
        value = self.program.values[number]
        if value.source == "gradient" or number in self.plan.added:
            self.write(number, pending.wait())
        else:
            self.values[number] = pending

    def drop(self, position: int, work: Work) -> None:
        """Forget what nobody reads later."""
        for value in (*work.reads, *work.writes):
            while value >= 0 and self.plan.last_read.get(value, position) <= position:
                self.values.pop(value, None)
                value = self.program.values[value].of

    # Works.

    def do_all(
        self, phases: Sequence[Phase], *, purposes: frozenset[Purpose] | None = None
    ) -> None:
        """All works of some phases, in order."""
        self.phases = phases
        for position, number in enumerate(self.plan.works):
            work = self.program.works[number]
            if work.phase in phases and (purposes is None or work.purpose in purposes):
                if self.run.recorder is not None:
                    self.run.recorder.start_work(self.program, number, self.m)
                self._do(position, number, work)
                self.drop(position, work)
                if self.run.recorder is not None:
                    self.run.recorder.end_work()

    def _do(self, position: int, number: int, work: Work) -> None:
        if work.purpose in (Purpose.COMPUTE, Purpose.RECOMPUTE):
            self._op(position, number, work)
        elif work.purpose is Purpose.CONVERSION:
            (read,), (made,) = work.reads, work.writes
            have, need = self.program.values[read], self.program.values[made]
            own = self.read(read, work)
            self._check_size(have, own)
            self.start(
                made,
                convert(
                    self.run.comm, self.at, own, self._shape(have), have.layout, need.layout,
                    self._gates(have),
                ),
            )  # fmt: skip
        elif work.purpose is Purpose.PARAMETER_GATHER:
            self._gather(number, work)
        elif work.purpose is Purpose.GRADIENT_REDUCTION:
            self._reduction(work)
        elif work.purpose is Purpose.UPDATE:
            self._update(work)

    # Ops.

    def _op(self, position: int, number: int, work: Work) -> None:
        op = self.run.ops.get(work.op)
        if op is None or (op.phase != "forward" and not op.forward):
            tensors = [self.read(value, work) for value in work.reads]
            total = tensors[0]
            for other in tensors[1:]:
                total = total + other
            self.write(work.writes[0], total)
        elif op.forward:
            self._backward(number, work, op)
        elif self.run.model.is_further(op):
            self._more(work, op)
        else:
            self._forward(position, number, work, op)

    def _forward_plan(self, number: int, work: Work, op: Op) -> ForwardPlan:
        run = self.run
        exchanged = self.plan.exchanged[number]
        share = share_plan(
            run.small.call(op), work.dims, self.at.axes, self.at.place, exchanged,
            is_random=run.model.is_random_op(op.name),
            rule=self._statistic_rule(op) if exchanged else None,
        )  # fmt: skip
        for layout in share.layouts:
            check_joins(op, layout, share.joined)
        again = work.purpose is Purpose.RECOMPUTE
        backward = run.backward_of.get(op.name, ())
        wanted = frozenset(i for each in backward for i in run.small.call(each).wrt)
        if again != (op.name in self.plan.recomputed):
            wanted = frozenset()  # its other run is the one that the backward reads
        ties = (i if i in wanted else op.inputs.index(name) for i, name in enumerate(op.inputs))
        if share.rule is not None:  # the node itself does not run
            return ForwardPlan(
                share, again, wanted, tuple(ties), None, [], self._buffers(op), None, len(backward)
            )
        function, order, names = self._function(op, share)
        return ForwardPlan(
            share, again, wanted, tuple(ties), function, order, names, self._local(op, share),
            len(backward),
        )  # fmt: skip

    def _forward(self, position: int, number: int, work: Work, op: Op) -> None:
        run, known = self.run, self.plan.forwards.get(number)
        run.model.sample = self.m * run.micro_batch  # what draws runs at its full size
        if known is None:
            known = self.plan.forwards[number] = self._forward_plan(number, work, op)
        hidden = [self._hidden(name) for name in known.hidden]
        if known.again:  # running statistics were taken the first time
            hidden = [each.clone() for each in hidden]
        inputs = [self.read(value, work) for value in work.reads]
        if known.again:
            inputs = [
                own.clone() if run.small.tensor(name).role == "state" else own
                for name, own in zip(op.inputs, inputs, strict=True)
            ]
        shares, record = run_forward(
            known.share, known.function, inputs, hidden, known.ties, known.wanted, self._gathered,
            known.order, known.local, self._meeting,
        )  # fmt: skip
        if known.wanted:
            record.left = known.num_backward
            self.records[op.name] = record
            self._release(position, work, record)
        for value, own in zip(work.writes, shares, strict=True):
            self.write(value, own)

    def _more(self, work: Work, op: Op) -> None:
        """Further results of a node, beside those that its op in the graph gives."""
        if not self.run.live.isdisjoint(op.outputs):
            raise PlanError(
                f"the loss depends on further results of {self.run.model.node_of(op)!r}, which "
                "a stage that runs op by op does not have",
                fix="plan with this op in a stage without splits inside",
                field="stages",
            )
        for value, name in zip(work.writes, op.outputs, strict=True):  # nobody needs them
            shape = self.run.small.tensor(name).shape
            self.write(value, torch.zeros(shape, device=self.run.device))

    def _function(self, op: Op, plan: SharePlan) -> tuple[OpsFunction, list[int], list[str]]:
        batch = self.run.micro_batch if plan.is_whole else self._batch(op, plan)
        wanted = plan.out_shape(0)
        for other in (batch, self.run.model.batch):  # a constant may have the size of any batch
            if self.run.model.at(other).graph.tensor(op.outputs[0]).shape == wanted:
                batch = other
                break
        function = self.run.model.function([op.name], op.outputs, batch, given=frozenset(op.inputs))
        order: list[int] = []
        hidden: list[str] = []
        for name in function.inputs:
            if name in op.inputs:
                order.append(op.inputs.index(name))
            else:
                order.append(len(op.inputs) + len(hidden))
                hidden.append(name)
        return function, order, hidden

    def _batch(self, op: Op, plan: SharePlan) -> int:
        """The size of batch that this rank's share of an op has."""
        for names, shapes, local in (
            (op.outputs, plan.call.outputs, plan.out_shape),
            (op.inputs, plan.call.inputs, plan.in_shape),
        ):
            for i, name in enumerate(names):
                dim = self.run.batch_dims.get(name)
                if dim is not None:
                    share = self.run.micro_batch * local(i)[dim]
                    whole, rest = divmod(share, shapes[i][dim])
                    return whole if not rest and whole else self.run.micro_batch
        return self.run.micro_batch

    def _local(self, op: Op, plan: SharePlan) -> Callable[..., tuple[T, ...]] | None:
        """Ops whose sizes stand in their arguments take those of the share."""
        if plan.is_whole or op.kind not in ("reshape", "expand") or len(op.outputs) != 1:
            return None
        shape = plan.out_shape(0)
        if shape == plan.call.outputs[0] or self.run.model.num_parts(op) > 1:
            return None
        if op.kind == "expand":
            return lambda x, *_: (_expanded(x, shape),)
        return lambda x, *_: (x.reshape(shape),)

    def _hidden(self, name: str) -> T:
        """A buffer that only the node reads."""
        if name not in self.state.stored:
            raise PlanError(
                f"an op reads {name} beside what the model's graph says, and it is made in "
                "another stage",
                fix="plan with both ops in one stage",
                field="stages",
            )
        return self.state.stored[name].tensor

    def _statistic_rule(self, op: Op) -> StatisticRule | None:
        """How the op is computed with exchanged statistics, from what its node is called with."""
        model, node = self.run.model, None
        if model.num_parts(op) == 1:
            node = model.captured.record.node[model.node_of(op)]
        names = [*op.inputs, *self._buffers(op)]
        return rule_of(self.run.small.call(op), node, names, model.captured.places.get)

    def _buffers(self, op: Op) -> list[str]:
        """What the node of an op reads beside its inputs and is held here."""
        model = self.run.model
        reads = model.captured.record.node[model.node_of(op)].reads
        names = [model.captured.places.get(read) for read in reads]
        return [n for n in names if n not in op.inputs and n in self.state.stored]

    def _meeting(self, axes: frozenset[int]) -> StatisticExchange:
        """The ranks that exchange statistics with this one."""
        return StatisticExchange(self.run.comm, [self.at.line(axis) for axis in sorted(axes)])

    def _gathered(
        self, own: T, shape: tuple[int, ...], have: Layout, need: Layout, gates: int
    ) -> T:
        pending = convert(self.run.comm, self.at, own, shape, have, need, gates)
        return pending.wait()  # type: ignore[no-any-return]

    def _backward(self, number: int, work: Work, op: Op) -> None:
        results = self.early.pop(number, None)
        if results is None:
            record = self.records.get(op.forward)
            if record is None:
                raise ProgramError(f"{op.name} runs before its forward", fix="verify the plan")
            results = self._differentiated(number, work, record)
            if record.left == 0:
                del self.records[op.forward]
        for value, name, own in zip(work.writes, op.outputs, results, strict=True):
            wide = self.run.wide.get(name)
            self.write(value, own if wide is None else own.to(wide))

    def _differentiated(self, number: int, work: Work, record: Record) -> tuple[T, ...]:
        """The results of a backward op; a weight gradient that comes next is taken along."""
        numbers, backs = [number], [self._backward_plan(number, work, record)]
        other = self.plan.following.get(number, -1)
        if other in self.plan.exchanged:
            after = self.program.works[other]
            op = self.run.ops.get(after.op)
            if op is not None and op.forward and op.forward == self.run.ops[work.op].forward:
                back = self._backward_plan(other, after, record)
                if (back.joins, back.gradients) == (backs[0].joins, backs[0].gradients):
                    numbers.append(other)
                    backs.append(back)
        for back in backs:
            for place, value in back.inputs:
                if place in record.released:
                    self._restore(record, place, value, work)
        given = {place: self.read(value, work) for place, value in backs[0].gradients}
        record.left -= len(backs)
        results = run_backward(
            record, backs, given, self._gathered, meet=self._meeting, retain=record.left > 0
        )
        self.early.update(zip(numbers[1:], results[1:], strict=True))
        return results[0]

    def _backward_plan(self, number: int, work: Work, record: Record) -> BackwardPlan:
        known = self.plan.backwards.get(number)
        if known is None:
            call = self.run.small.call(self.run.ops[work.op])
            known = self.plan.backwards[number] = backward_plan(
                record.plan, call, work.dims, self.plan.exchanged[number], work.reads
            )
        return known

    # Memory of sharded parameters.

    def _release(self, position: int, work: Work, record: Record) -> None:
        """Parameters that were gathered for this op give their memory back."""
        for i, value in enumerate(work.reads):
            known = self.program.values[value]
            stored = self.state.stored.get(known.tensor)
            if stored is None or not stored.value.flat or known.of >= 0:
                continue
            last = self.plan.last_read.get(value, -1)
            leaf = record.leaves[i]
            if any(_same_memory(leaf, out) for out in record.outputs):
                continue  # a view of it goes on
            if last <= position and leaf.data_ptr() == self.values[value].data_ptr():
                record.released.add(i)
                self.values.pop(value, None)
                leaf.untyped_storage().resize_(0)

    def _restore(self, record: Record, position: int, value: int, work: Work) -> None:
        """A parameter gets its memory again, filled from where it was gathered."""
        leaf, known = record.leaves[position], self.values.get(value)
        storage = leaf.untyped_storage()
        if storage.size() == 0:
            storage.resize_(leaf.numel() * leaf.element_size())
            with torch.no_grad(), _unsafe_preserve_version_counter(leaf):
                if isinstance(known, _SharedPart):
                    torch.cat(known.pieces(), out=leaf.data.view(-1))
                else:
                    leaf.data.copy_(self.read(value, work))
        record.released.discard(position)

    # Collectives of parameters and gradients.

    def _gather(self, number: int, work: Work) -> None:
        """Start what this gather belongs to, unless it is on its way, and what comes after it."""
        own = self.plan.bucket_of.get(number)
        if own is None:  # of updated parameters
            self._gather_together((work,))
            return
        if self.plan.buckets[own][0] != number:
            return
        ahead = own + 2 if self._may_start(own + 1) else own + 1
        for k in range(max(own, self.num_gathered), ahead):
            self._gather_together([self.program.works[each] for each in self.plan.buckets[k]])
        self.num_gathered = max(self.num_gathered, ahead)

    def _may_start(self, bucket: int) -> bool:
        """May the next bucket go ahead? Only what is stored, and of the phases that run now."""
        if bucket >= len(self.plan.buckets):
            return False
        work = self.program.works[self.plan.buckets[bucket][0]]
        reads = (self.program.values[value] for value in work.reads)
        return work.phase in self.phases and all(
            value.source == "parameter" and value.of < 0 for value in reads
        )

    def _gather_together(self, works: Sequence[Work]) -> None:
        """Flat parts along one axis, those of several parameters in one message."""
        axis = works[0].axis
        reads = tuple(value for work in works for value in work.reads)
        sizes = self.plan.sizes.get(reads)  # per member, per value
        if sizes is None:
            known = [self.program.values[read] for read in reads]
            sizes = self.plan.sizes[reads] = [
                [flat_size(v, self._shape(v), self.at.axes, place, self._gates(v)) for v in known]
                for place in self.at.line_places(axis)
            ]
        parts = [self.read(value, works[0]).detach().reshape(-1) for value in reads]
        pending = self.run.comm.all_gather(
            torch.cat(parts) if len(parts) > 1 else parts[0], [sum(own) for own in sizes],
            self.at.line(axis), overlapped=True,
        )  # fmt: skip
        shared = _Shared(pending, sizes)
        k = 0
        for work in works:
            for made in work.writes:
                value = self.program.values[made]
                self.start(made, shared.part(k, self._shaped(value)))
                if work.phase is Phase.UPDATE and not value.flat:
                    self._updated(value, self.read(made))
                k += 1

    def _shaped(self, value: Value) -> Callable[[T], T]:
        if value.flat:
            return lambda flat: flat
        shape = local_shape(
            self._shape(value), value.layout, self.at.axes, self.at.place, self._gates(value)
        )
        return lambda flat: flat.reshape(shape)

    def _updated(self, value: Value, whole: T) -> None:
        name = self.state.shapes.origin[value.tensor]
        with torch.no_grad():
            self.state.stored[name].tensor.copy_(whole)

    def _reduction(self, work: Work) -> None:
        """Gradients of a bucket summed over a line, in one message."""
        line = self.at.line(work.axis)
        tensors = [self.read(value, work).detach() for value in work.reads]
        if work.collective != "reduce_scatter":
            flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
            pending = self.run.comm.all_reduce(flat, line, overlapped=True)
            shapes = [tensor.shape for tensor in tensors]
            shared = _Shared(pending, [[tensor.numel() for tensor in tensors]])
            for k, made in enumerate(work.writes):
                self._reduced(made, shared.part(k, _reshape(shapes[k])))
            return
        count = len(line)
        parts = [[flat_view(tensor, k, count) for tensor in tensors] for k in range(count)]
        pending = self.run.comm.reduce_scatter(parts, line, overlapped=True)
        mine = line.index(self.run.comm.rank)
        sizes = [flat_view(tensor, mine, count).numel() for tensor in tensors]
        shared = _Shared(pending, [sizes])
        for k, made in enumerate(work.writes):
            self._reduced(made, shared.part(k, lambda flat: flat))

    def _reduced(self, made: int, pending: Pending) -> None:
        value = self.program.values[made]
        if value.source == "gradient" or made in self.plan.added:
            self.late.append((made, pending))
        else:
            self.values[made] = pending

    def settle(self) -> None:
        """Add up the sharded gradients that came in while the block ran."""
        for made, pending in self.late:
            self.write(made, pending.wait())
        self.late.clear()

    def _settle(self, tensor: str) -> None:
        """Add up what has come in of one sharded gradient: its replicas add theirs next."""
        mine = [one for one in self.late if self.program.values[one[0]].tensor == tensor]
        if mine:
            self.late = [one for one in self.late if one not in mine]
            for made, pending in mine:
                self.write(made, pending.wait())

    def leaving(self, value: Value) -> T:
        """What the block has made, in the layout in which it is sent."""
        same = [
            k
            for k, known in enumerate(self.program.values)
            if (known.tensor, known.layout, known.flat) == (value.tensor, value.layout, ())
        ]
        there = [k for k in same if k in self.values] or same
        if not there:
            raise ProgramError(f"{value} is sent and not there", fix="verify the plan")
        return self.read(there[-1])

    # The optimizer.

    def _update(self, work: Work) -> None:
        if not self.has_stepped:
            self.has_stepped = True
            self.settle()
            self._step()
        for k, made in enumerate(work.writes):
            name = self.program.values[work.reads[2 * k]].tensor
            part = self.state.stored[name].part
            assert part is not None, "what is updated has a part"
            self.values[made] = part.detach()

    def _step(self) -> None:
        where: dict[str, int] = {}
        for work in self.program.works:
            if work.purpose is Purpose.UPDATE:
                for k in range(len(work.writes)):
                    where[self.program.values[work.reads[2 * k]].tensor] = work.reads[2 * k + 1]

        def gradient(name: str) -> tuple[Value, T]:
            number = where[name]
            return self.program.values[number], self.read(number)

        self.state.update(gradient, self.run.keep_gradients)


class _Shared:
    """Several tensors that come in one message."""

    def __init__(self, pending: Pending, sizes: list[list[int]]) -> None:
        self.pending, self.sizes = pending, sizes
        self.parts: list[list[T]] | None = None

    def part(self, k: int, shape: Callable[[T], T]) -> "_SharedPart":
        """The k-th of them, in its shape."""
        return _SharedPart(self, k, shape)

    def wait(self) -> None:
        if self.parts is None:
            result = self.pending.wait()
            members = result if isinstance(result, list) else [result]
            self.parts = [
                list(flat.split(sizes)) for flat, sizes in zip(members, self.sizes, strict=True)
            ]

    def pieces(self, k: int) -> list[T]:
        """The k-th of them as every member sent it."""
        assert self.parts is not None, "it was waited for"
        return [member[k] for member in self.parts]


class _SharedPart(Pending):
    """One tensor of several that come in one message."""

    __slots__ = ("number", "shared")

    def __init__(self, shared: _Shared, number: int, shape: Callable[[T], T]) -> None:
        super().__init__(shared, lambda: shape(self._joined()))
        self.shared, self.number = shared, number

    def pieces(self) -> list[T]:
        """What every member sent, once it is there."""
        self.shared.wait()
        return self.shared.pieces(self.number)

    def _joined(self) -> T:
        pieces = self.shared.pieces(self.number)
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def _same_memory(a: T, b: T) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def _reshape(shape: torch.Size) -> Callable[[T], T]:
    return lambda flat: flat.reshape(shape)


def _expanded(x: T, shape: tuple[int, ...]) -> T:
    return x.expand(shape)
