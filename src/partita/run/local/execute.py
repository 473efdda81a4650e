"""Executes the program of a plan on small tensors: all ranks in one process, task by task.

Every rank holds only what the program gives it: shards of inputs and parameters, what its ops
make, what collectives and messages bring. A task reads values that are there and writes new ones;
one that is not there is an error that names the task. In the end the outputs, gradients and
updated parameters are put together from what the ranks hold (`Outcome`), to be compared with the
whole model (`reference`). Nothing is taken from the plan but the splits and meshes of its stages.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from partita.errors import ProgramError
from partita.graph.record import Graph, Op
from partita.graph.splits import routed_pairs
from partita.meaning import Layout, Phase, Purpose, Value, Work
from partita.plans import Axis, Stage
from partita.program import Kind, Program
from partita.run.local import ops
from partita.run.local.compute import ROUTED, Groups, routing_groups
from partita.run.local.reference import (
    Example,
    Values,
    initial_states,
    microbatch_graph,
    microbatch_inputs,
)
from partita.run.local.shards import (
    convert,
    flat_part,
    gate_rows,
    places,
    replica_error,
    shard,
    shard_index,
    whole,
)
from partita.run.local.updates import update

T = torch.Tensor
Shards = list[T]  # one per rank of a mesh

INSIDE = {
    Kind.FORWARD: (Phase.FORWARD,),
    Kind.BACKWARD: (Phase.BACKWARD, Phase.WEIGHT),
    Kind.DGRAD: (Phase.BACKWARD,),
    Kind.WGRAD: (Phase.WEIGHT,),
}
EVERY = tuple(Phase)
CANCELS = 1e-4  # of the largest number: below that a tensor may be zero but for rounding


@dataclass(frozen=True)
class StepOutcome:
    """What the ranks arrived at together; `replicas` is the largest difference between copies."""

    outputs: tuple[Values, ...]  # per micro-batch
    gradients: Values  # by parameter, as the updates read them
    updated: Values
    replicas: float


def execute(
    program: Program,
    graph: Graph,
    stages: Sequence[Stage],
    num_microbatches: int,
    example: Example,
    *,
    seed: int = 0,
) -> StepOutcome:
    """Run one step of a plan's program; the graph and the example are of the whole batch."""
    try:
        return _StepRun(program, graph, tuple(stages), num_microbatches, example, seed).run()
    except (ValueError, LookupError, RuntimeError) as error:  # shapes that do not go together
        raise ProgramError(
            f"the program cannot be executed: {error}", fix="verify it with: partita verify"
        ) from error


def plan_routing(graph: Graph, stages: Sequence[Stage], num_microbatches: int) -> dict[str, Groups]:
    """In which groups of tokens the experts of a plan choose, for the reference.

    The groups are those of the dispatches; a combine has those of the dispatch it belongs to,
    however the plan splits it: the whole model knows one routing.
    """
    small = microbatch_graph(graph, num_microbatches)
    groups = {}
    for stage in stages:
        for split in stage.splits:
            call = small.call(small.op(split.op))
            if call.kind in ROUTED:
                groups[split.op] = routing_groups(call, split.dims, stage.mesh.axes)
    for dispatch, combine in routed_pairs(small):
        groups[combine.name] = groups[dispatch.name]
    return groups


@dataclass
class _PendingOp:
    """An op whose statistics are still exchanged: along which axes, and what it runs on."""

    op: Op
    work: Work
    inputs: list[tuple[T, ...]]
    axes: set[int]


@dataclass
class _Rank:
    """What one stage's mesh holds."""

    number: int
    stage: Stage
    parameters: Values  # whole, before the step
    gradients: dict[str, tuple[Value, Shards]] = field(default_factory=dict)  # by gradient tensor
    # What each micro-batch has added to a gradient, by the value that holds it.
    parts: dict[str, dict[tuple["_StageFrame", int], Shards]] = field(default_factory=dict)
    updated: dict[str, tuple[Value, Shards]] = field(default_factory=dict)
    read_gradients: dict[str, T] = field(default_factory=dict)  # by parameter, whole

    @property
    def axes(self) -> tuple[Axis, ...]:
        return self.stage.mesh.axes


class _StageFrame:
    """The values of one program of one stage, for one micro-batch."""

    def __init__(self, run: "_StepRun", mesh: _Rank, program: Program, m: int) -> None:
        self.run, self.mesh, self.program, self.m = run, mesh, program, m
        self.shards: dict[int, Shards] = {}
        self.received: dict[tuple[str, Layout], Shards] = {}
        self.borders: dict[str, set[int]] = {}
        self.pending: dict[int, _PendingOp] = {}  # by the first value that an op writes
        self.added = _slices(program, lambda value: value.source == "gradient")
        self.slices = _slices(program, lambda value: value.source != "gradient")

    # Values.

    def read(self, number: int, work: Work | None = None) -> Shards:
        if number in self.shards:
            return self.shards[number]
        value = self.program.values[number]
        if value.source == "gradient":
            if value.tensor not in self.mesh.gradients:
                raise self._missing(value, work)
            return self.mesh.gradients[value.tensor][1]
        if value.of >= 0:
            shards = self._sliced(self.read(value.of, work), self.program.values[value.of], value)
        elif value.source == "input":
            shards = self._cut(self.run.inputs[self.m][value.tensor], value)
        elif value.source == "parameter":
            shards = self._cut(self.mesh.parameters[value.tensor], value)
        elif value.source == "received" and (value.tensor, value.layout) in self.received:
            shards = self.received[value.tensor, value.layout]
        else:
            raise self._missing(value, work)
        self.shards[number] = shards
        return shards

    def _missing(self, value: Value, work: Work | None) -> ProgramError:
        who = "" if work is None else f"{work.op or work.purpose.words} reads "
        return ProgramError(f"{who}{value}, which is not there", fix="correct the program")

    def _cut(self, tensor: T, value: Value) -> Shards:
        """The shards of a whole tensor, in parts along the axes where it is kept so."""
        gates = self.run.num_gates(value.tensor)
        shards = []
        for place in places(self.mesh.axes):
            own = shard(tensor, value.layout, self.mesh.axes, place, gates)
            for axis in value.flat:
                own = flat_part(own, place[axis], self.mesh.axes[axis].size)
            shards.append(own)
        return shards

    def _sliced(self, shards: Shards, have: Value, need: Value) -> Shards:
        layout = have.layout
        for axis, placement in enumerate(need.layout):
            if layout[axis] != placement:
                after = (*layout[:axis], placement, *layout[axis + 1 :])
                shards = self._turn(shards, have.tensor, layout, after)
                layout = after
        for axis in need.flat[len(have.flat) :]:
            size = self.mesh.axes[axis].size
            shards = [
                flat_part(own, place[axis], size)
                for own, place in zip(shards, places(self.mesh.axes), strict=True)
            ]
        return shards

    def _turn(self, shards: Shards, tensor: str, have: Layout, need: Layout) -> Shards:
        shape = self.run.shape(tensor)
        gates = self.run.num_gates(tensor)
        return convert(shards, shape, have, need, self.mesh.axes, gates)

    def write(self, number: int, shards: Shards, *, anew: bool = False) -> None:
        """A value is there, or it is there anew, now that statistics have arrived."""
        value = self.program.values[number]
        if anew:  # slices of it that were read meanwhile are not what they were
            for slice_ in self.slices.get(number, ()):
                self.shards.pop(slice_, None)
        if value.source == "gradient":
            self._accumulate(number, shards, anew=anew)
        else:
            self.shards[number] = shards
        for other in self.added.get(number, ()):
            # What is added to is the slice itself, not the sum so far.
            known = self.program.values[other]
            self._accumulate(other, self._resolve(known.of, known), anew=anew)

    def _resolve(self, base: int, need: Value) -> Shards:
        return self._sliced(self.read(base), self.program.values[base], need)

    def _accumulate(self, number: int, shards: Shards, *, anew: bool) -> None:
        value = self.program.values[number]
        parts = self.mesh.parts.setdefault(value.tensor, {})
        before = parts.get((self, number))
        if before is not None and not anew:  # an op that runs twice adds twice
            shards = [a + b for a, b in zip(before, shards, strict=True)]
        parts[self, number] = shards
        total = [_sum(own) for own in zip(*parts.values(), strict=True)]
        self.mesh.gradients[value.tensor] = (value, total)

    # Works.

    def do(self, work: Work) -> None:
        if work.purpose in (Purpose.COMPUTE, Purpose.RECOMPUTE):
            self._op(work)
        elif work.purpose is Purpose.EXCHANGE:
            self._exchange(work)
        elif work.purpose is Purpose.CONVERSION:
            self._conversion(work)
        elif work.purpose is Purpose.PARAMETER_GATHER:
            self._gather(work)
        elif work.purpose is Purpose.GRADIENT_REDUCTION:
            self._reduction(work)
        elif work.purpose is Purpose.UPDATE:
            self._update(work)

    def _op(self, work: Work) -> None:
        inputs = [self.read(value, work) for value in work.reads]
        op = self.run.ops.get(work.op)
        if op is None or (op.phase != "forward" and not op.forward):
            (made,) = work.writes
            self.run.same_size(self.program.values[made], self.program.values[work.reads[0]])
            self.write(made, [_sum(own) for own in zip(*inputs, strict=True)])
            return
        ranks = len(places(self.mesh.axes))
        by_rank: list[tuple[T, ...]] = list(zip(*inputs, strict=True)) if inputs else [()] * ranks
        pending = _PendingOp(op, work, by_rank, self.borders.pop(work.op, set()))
        self.pending[work.writes[0]] = pending
        self._compute(pending)

    def _compute(self, pending: _PendingOp, *, anew: bool = False) -> None:
        step = ops.backward if pending.op.forward else ops.forward
        results = step(
            self.run.small, pending.op, pending.work.dims, self.mesh.axes, pending.inputs,
            pending.axes, microbatch=self.m, seed=self.run.seed,
        )  # fmt: skip
        for k, value in enumerate(pending.work.writes):
            self.write(value, [own[k] for own in results], anew=anew)

    def _exchange(self, work: Work) -> None:
        self._lines(work)
        if not work.writes:  # borders come before their op
            self.borders.setdefault(work.op, set()).add(work.axis)
            return
        pending = self.pending.get(work.writes[0])
        if pending is None:
            raise ProgramError(
                f"statistics of {work.op} are exchanged before it runs", fix="correct the program"
            )
        if any(self.program.values[v].source == "gradient" for v in work.writes):
            raise ProgramError(
                f"{work.op} exchanges statistics of a sum", fix="correct the program"
            )
        pending.axes.add(work.axis)
        self._compute(pending, anew=True)

    def _lines(self, work: Work) -> list[list[int]]:
        """The ranks of a collective's groups; the groups must be lines of the mesh."""
        mesh = self.mesh.stage.mesh
        groups = self.program.groups[work.group] if work.group >= 0 else ()
        rank = {device: k for k, device in enumerate(mesh.devices)}
        if not groups or any(device not in rank for group in groups for device in group):
            raise ProgramError(
                f"{work.collective} runs among devices outside of its mesh",
                fix="correct the program",
            )
        return [[rank[device] for device in group] for group in groups]

    def _conversion(self, work: Work) -> None:
        (read,), (made,) = work.reads, work.writes
        have, need = self.program.values[read], self.program.values[made]
        shards, lines = self.read(read, work), self._lines(work)
        if work.collective == "all_reduce":
            self.write(made, _all_reduce(shards, lines))
            return
        axes = [i for i, (a, b) in enumerate(zip(have.layout, need.layout, strict=True)) if a != b]
        own = [self._line_of(axis) for axis in axes]
        if len(axes) != 1 or sorted(own[0]) != sorted(lines):
            raise ProgramError(
                f"{work.collective} cannot turn {have} into {need} among these devices",
                fix="correct the program",
            )
        self.write(made, self._turn(shards, have.tensor, have.layout, need.layout))

    def _line_of(self, axis: int) -> list[list[int]]:
        mesh = self.mesh.stage.mesh
        rank = {device: k for k, device in enumerate(mesh.devices)}
        return [[rank[device] for device in group] for group in mesh.groups(axis)]

    def _gather(self, work: Work) -> None:
        lines = self._lines(work)
        for read, made in zip(work.reads, work.writes, strict=True):
            shards, value = self.read(read, work), self.program.values[made]
            joined: Shards = [shards[0]] * len(shards)
            for line in lines:
                parts = torch.cat([shards[rank].reshape(-1) for rank in line])
                for rank in line:
                    joined[rank] = parts
            if not value.flat:
                joined = [self._shaped(own, value, k) for k, own in enumerate(joined)]
            self.write(made, joined)
            if work.phase is Phase.UPDATE:
                self.mesh.updated[value.tensor] = (value, joined)

    def _shaped(self, flat: T, value: Value, rank: int) -> T:
        """A shard in its shape again; one of another size cannot be it."""
        place = places(self.mesh.axes)[rank]
        gates = self.run.num_gates(value.tensor)
        index = shard_index(
            self.run.shape(value.tensor), value.layout, self.mesh.axes, place, gates
        )
        like = torch.empty(self.run.shape(value.tensor), device="meta")[index]
        if like.numel() != flat.numel():
            raise ProgramError(
                f"{value.tensor} is gathered to {flat.numel()} elements of {like.numel()}",
                fix="correct the program",
            )
        return flat.reshape(like.shape)

    def _reduction(self, work: Work) -> None:
        lines = self._lines(work)
        for read, made in zip(work.reads, work.writes, strict=True):
            shards = _all_reduce(self.read(read, work), lines)
            if work.collective == "reduce_scatter":
                parts: Shards = [shards[0]] * len(shards)
                for line in lines:
                    for k, rank in enumerate(line):
                        parts[rank] = flat_part(shards[rank], k, len(line))
                shards = parts
            self.write(made, shards)

    def _update(self, work: Work) -> None:
        for k, made in enumerate(work.writes):
            stored, given = work.reads[2 * k], work.reads[2 * k + 1]
            parameter, gradient = self.program.values[stored], self.program.values[given]
            self._update_one(work, parameter, (stored, given), gradient, made)

    def _update_one(
        self, work: Work, parameter: Value, reads: tuple[int, int], gradient: Value, made: int
    ) -> None:
        op = self.run.updates[parameter.tensor]
        mesh = self.mesh
        own, sums = self.read(reads[0], work), self.read(reads[1], work)
        part = Value(parameter.tensor, parameter.layout, flat=gradient.flat)
        if parameter.flat != gradient.flat:
            own = self._sliced(own, parameter, part)
        states = [
            self._cut(
                self.run.states[name], Value(parameter.tensor, parameter.layout, flat=gradient.flat)
            )
            for name in op.inputs[2:]
        ]
        new = []
        for rank, (w, g) in enumerate(zip(own, sums, strict=True)):
            if w.shape != g.shape:
                raise ProgramError(
                    f"{parameter.tensor} of {list(w.shape)} is updated with a gradient of "
                    f"{list(g.shape)}", fix="correct the program",
                )  # fmt: skip
            rule = str(op.attr("rule"))
            new.append(update(rule, w, g, [state[rank] for state in states])[0])
        value = self.program.values[made]
        self.write(made, new)
        mesh.updated[value.tensor] = (value, new)
        mesh.read_gradients[parameter.tensor] = self.run.join(
            mesh, sums, Value(parameter.tensor, gradient.layout, flat=gradient.flat)
        )


class _StepRun:
    """One step of all stages."""

    def __init__(
        self, program: Program, graph: Graph, stages: tuple[Stage, ...], count: int,
        example: Example, seed: int,
    ) -> None:  # fmt: skip
        self.program, self.graph, self.count, self.seed = program, graph, count, seed
        self.small = microbatch_graph(graph, count)
        self.inputs = microbatch_inputs(graph, example.inputs, count)
        self.states = initial_states(graph, example.parameters)
        self.gates = gate_rows(graph)
        self.ops = {op.name: op for op in self.small.ops}
        self.updates = {op.inputs[0]: op for op in graph.ops if op.phase == "update"}
        self.meshes = [_Rank(i, stage, example.parameters) for i, stage in enumerate(stages)]
        self.origin = _origins(self.small)
        self.replicas = 0.0
        self.frames: dict[tuple[int, int, int], _StageFrame] = {}  # (stage, body, micro-batch)
        self.mail: dict[int, list[tuple[Value, T]]] = {}  # by send
        self.send_of = {int(b): int(a) for a, b in program.pairs.tolist()}  # by receive
        self.steady = {
            work.stage: work.body for work in program.works if work.purpose is Purpose.COMPUTE
        }

    def shape(self, tensor: str) -> tuple[int, ...]:
        """The shape of a tensor; a gradient's is that of what it is the gradient of."""
        return self.small.tensor(self.origin.get(tensor, tensor)).shape

    def num_gates(self, tensor: str) -> int:
        """By how many gates the rows of a tensor are shared out."""
        return self.gates.get(tensor, self.gates.get(self.origin.get(tensor, ""), 1))

    def same_size(self, made: Value, like: Value) -> None:
        """Gradients that only a stage knows are as large as what they are made of."""
        self.origin.setdefault(made.tensor, self.origin.get(like.tensor, like.tensor))

    def run(self) -> StepOutcome:
        order: Iterable[int] = range(self.program.num_tasks)
        if self.program.order is not None:
            order = self.program.order.tolist()
        if self.program.bodies:
            for task in order:
                self._task(task)
        else:
            frame = self._frame(0, -1, 0)
            _do_all(frame, EVERY)
        return self._outcome()

    def _frame(self, stage: int, body: int, m: int) -> _StageFrame:
        key = (stage, body, m)
        if key not in self.frames:
            program = self.program if body < 0 else self.program.bodies[body].program
            self.frames[key] = _StageFrame(self, self.meshes[stage], program, m)
        return self.frames[key]

    # A pipeline's tasks.

    def _task(self, task: int) -> None:
        work = self.program.work_of(task)
        if work is None or work.purpose in (Purpose.OTHER, Purpose.RESIDENT):
            return
        m = int(self.program.microbatch[task])
        if work.purpose is Purpose.SEND:
            self._send(task, work, m)
        elif work.purpose is Purpose.RECEIVE:
            self._receive(task, work, m)
        elif work.purpose is Purpose.COMPUTE:
            _do_all(
                self._frame(work.stage, work.body, m), INSIDE[Kind(int(self.program.kind[task]))]
            )
        elif work.peer >= 0:
            self._tie(work)
        elif work.body >= 0:
            _do_all(self._frame(work.stage, work.body, self.count - 1), (work.phase,))

    def _send(self, task: int, work: Work, m: int) -> None:
        mesh = self.meshes[work.stage]
        frame = self._frame(work.stage, self.steady[work.stage], m)
        letters = []
        for number in work.reads:
            value = self.program.values[number]
            same = [
                k
                for k, known in enumerate(frame.program.values)
                if (known.tensor, known.layout, known.flat) == (value.tensor, value.layout, ())
            ]
            there = [k for k in same if k in frame.shards] or same
            if not there:
                raise ProgramError(f"{value} is sent and not there", fix="correct the program")
            letters.append((value, self.join(mesh, frame.read(there[-1]), value)))
        self.mail[task] = letters

    def _receive(self, task: int, work: Work, m: int) -> None:
        send = self.send_of.get(task, -1)
        if send not in self.mail:
            raise ProgramError(
                f"{self.program.task_name(task)} comes before its send", fix="correct the program"
            )
        mesh = self.meshes[work.stage]
        frame = self._frame(work.stage, self.steady[work.stage], m)
        for number, (sent, tensor) in zip(work.writes, self.mail[send], strict=False):
            value = self.program.values[number]
            if sent.tensor != value.tensor:
                self.same_size(value, sent)
            frame.received[value.tensor, value.layout] = [
                shard(tensor, value.layout, mesh.axes, place) for place in places(mesh.axes)
            ]

    def _tie(self, work: Work) -> None:
        """Two stages that hold parameters add up their gradients, or one hands its sum on."""
        here, there = self.meshes[work.stage], self.meshes[work.peer]
        for number in work.reads:
            parameter = self.program.values[number].tensor
            names = [self._gradient_name(mesh.number, parameter) for mesh in (here, there)]
            sums = []
            for mesh, name in zip((here, there), names, strict=True):
                value, shards = mesh.gradients[name]
                sums.append(self.join(mesh, shards, value))
            total = sums[0] + sums[1] if work.collective == "all_reduce" else sums[0]
            for mesh, name in zip((here, there), names, strict=True):
                value, _ = mesh.gradients[name]
                frame = self._frame(mesh.number, -1, 0)
                mesh.gradients[name] = (value, frame._cut(total, value))

    def _gradient_name(self, stage: int, parameter: str) -> str:
        """What the gradient of a parameter is called in a stage: its update reads both."""
        for work in self.program.works:
            if work.purpose is not Purpose.UPDATE or work.stage != stage or work.body < 0:
                continue
            body = self.program.bodies[work.body].program
            for inner in body.works:
                if inner.purpose is Purpose.UPDATE:
                    for k in range(len(inner.writes)):
                        if body.values[inner.reads[2 * k]].tensor == parameter:
                            return body.values[inner.reads[2 * k + 1]].tensor
        raise ProgramError(f"no update of {parameter} in stage {stage}", fix="correct the program")

    # Whole tensors.

    def join(self, mesh: _Rank, shards: Shards, value: Value) -> T:
        """The whole tensor from what the ranks hold; replicas are compared on the way."""
        for axis in reversed(value.flat):
            lines = [
                [k for k, other in enumerate(places(mesh.axes)) if _alike(place, other, axis)]
                for place in places(mesh.axes)
            ]
            shards = [torch.cat([shards[k].reshape(-1) for k in line]) for line in lines]
        gates = self.num_gates(value.tensor)
        shape = self.shape(value.tensor)
        if value.flat:
            index = [
                shard_index(shape, value.layout, mesh.axes, p, gates) for p in places(mesh.axes)
            ]
            like = torch.empty(shape, device="meta")
            shards = [own.reshape(like[i].shape) for own, i in zip(shards, index, strict=True)]
        self.replicas = max(self.replicas, replica_error(shards, value.layout, mesh.axes))
        return whole(shards, shape, value.layout, mesh.axes, gates)

    def _outcome(self) -> StepOutcome:
        outputs = tuple(self._outputs(m) for m in range(self.count))
        gradients: Values = {}
        updated: Values = {}
        for mesh in self.meshes:
            gradients |= mesh.read_gradients
            for tensor, (value, shards) in mesh.updated.items():
                parameter = self._parameter_of(tensor)
                new = self.join(mesh, shards, Value(parameter, value.layout, flat=value.flat))
                if parameter in updated:  # held by several stages, which must agree
                    apart = float((updated[parameter] - new).abs().max())
                    self.replicas = max(self.replicas, apart)
                updated[parameter] = new
        return StepOutcome(outputs, gradients, updated, self.replicas)

    def _parameter_of(self, tensor: str) -> str:
        return next(name for name, op in self.updates.items() if op.outputs[0] == tensor)

    def _outputs(self, m: int) -> Values:
        outputs: Values = {}
        for name in self.small.outputs:
            for (stage, _, number), frame in self.frames.items():
                if number != m or name in outputs:
                    continue
                mesh = self.meshes[stage]
                for k, value in enumerate(frame.program.values):
                    settled = all(
                        p.kind != "partial" or axis.size == 1
                        for p, axis in zip(value.layout, mesh.axes, strict=True)
                    )
                    if value.tensor == name and k in frame.shards and settled and not value.flat:
                        outputs[name] = self.join(mesh, frame.shards[k], value)
            if name not in outputs:
                raise ProgramError(
                    f"the output {name} is not there but for partial sums",
                    fix="correct the program",
                )
        return outputs


def _do_all(frame: _StageFrame, phases: Sequence[Phase]) -> None:
    """All works of some phases in the order of their first tasks."""
    program = frame.program
    order: Iterable[int] = range(program.num_tasks)
    if program.order is not None:
        order = program.order.tolist()
    done: set[int] = set()
    for task in order:
        number = int(program.work[task])
        if number >= 0 and number not in done and program.works[number].phase in phases:
            done.add(number)
            frame.do(program.works[number])


def _slices(program: Program, counts: Callable[[Value], bool]) -> dict[int, list[int]]:
    """Values that are slices, at any remove, of what a task writes, by that value."""
    slices: dict[int, list[int]] = {}
    for number, value in enumerate(program.values):
        if value.of >= 0 and counts(value):
            root = value.of
            while program.values[root].of >= 0:
                root = program.values[root].of
            slices.setdefault(root, []).append(number)
    return slices


def _origins(graph: Graph) -> dict[str, str]:
    """Gradients, and what updates make, by the tensor that they are as large as."""
    origin: dict[str, str] = {}
    for op in graph.ops:
        if op.phase == "update":
            origin[op.outputs[0]] = op.inputs[0]
    return origin


def _sum(tensors: Sequence[T]) -> T:
    total = tensors[0].clone()
    for other in tensors[1:]:
        total += other
    return total


def _all_reduce(shards: Sequence[T], lines: Sequence[Sequence[int]]) -> Shards:
    sums: Shards = list(shards)
    for line in lines:
        total = _sum([shards[rank] for rank in line])
        for rank in line:
            sums[rank] = total.clone()
    return sums


def _alike(place: tuple[int, ...], other: tuple[int, ...], axis: int) -> bool:
    """Do two ranks differ along one axis at most?"""
    return all(a == b for i, (a, b) in enumerate(zip(place, other, strict=True)) if i != axis)


def relative_error(outcome: Mapping[str, T], expected: Mapping[str, T]) -> float:
    """The largest difference of tensors, each relative to its size; infinite if one is missing.

    What is zero but for rounding (a gradient that cancels out) is measured by the others' size.
    """
    worst = 0.0
    largest = max(
        (float(right.abs().max()) for right in expected.values() if right.numel()), default=1.0
    )
    for name, right in expected.items():
        if name not in outcome:
            return float("inf")
        scale = max(float(right.abs().max()) if right.numel() else 0.0, CANCELS * largest, 1e-30)
        apart = (outcome[name] - right).abs()
        error = float(apart.max()) / scale if apart.numel() else 0.0
        worst = max(worst, error if error == error else float("inf"))
    return worst
