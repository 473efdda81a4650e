"""The layout of every tensor of a stage, followed through its program task by task.

What holds in a right program, for the mesh of the stage and its splits:

- every op of the stage runs once (recomputed ops once more), split as the plan says, on every
  representative rank; it reads the tensors that the model says, each in the layout that the split
  needs: nothing partial, nothing in parts;
- statistics and borders that a split needs are exchanged, along the right axis, in time;
- a collective does what its kind says to the layout along its axis, among the devices of that axis:
  all-reduce P -> R, reduce-scatter P -> S, all-gather S -> R, all-to-all S -> S;
- a gradient is read when all that contribute to it are in it, each once, and an update reads the
  reduced gradient, in the layout and parts in which its parameter and states lie;
- a task waits for the tasks that make what it reads, or comes after them on its lane;
- what the model returns is there and not partial.

O(tasks + reads).
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from partita.graph.record import Graph, Op, Tensor
from partita.graph.splits import PARTIAL, REPLICATE, TensorPlacement, communication, placements
from partita.meaning import Layout, Phase, Purpose, Value, Work
from partita.plans import Mesh, Stage
from partita.program import Program

TOLERANCE = 1e-9
FEW = 20
ENDING = (Phase.REDUCE, Phase.UPDATE)
CHANGES = {  # collective -> (before, after) along its axis
    "all_reduce": ("partial", "replicate"),
    "reduce_scatter": ("partial", "shard"),
    "all_gather": ("shard", "replicate"),
    "all_to_all": ("shard", "shard"),
}


@dataclass(frozen=True, slots=True)
class Fact:
    """What is known of a value: the tensor, how it lies, and whose gradient it is, made by whom."""

    tensor: str
    layout: Layout
    flat: tuple[int, ...] = ()
    gradient_of: str = ""
    givers: frozenset[str] = frozenset()  # backward ops whose partial sums are in it
    phase: Phase = Phase.NONE
    root: int = -1  # the value that a task wrote, of which this is a slice


@dataclass(frozen=True)
class ModelFacts:
    """What the verifier looks up in a model."""

    graph: Graph
    ops: dict[str, Op]
    givers: dict[str, frozenset[str]]  # tensor -> the gradients that backward ops give it
    tensors: dict[str, Tensor]
    giver_of: dict[str, Op]  # such a gradient, by the name of its op -> the op
    updates: dict[str, Op]  # by parameter
    phases: dict[str, tuple[Op, ...]]  # a forward op with its gradients
    trained: dict[str, tuple[str, ...]]  # by forward op, the parameters with updates that it reads

    def of(self, ops: set[str]) -> list[Op]:
        """Some forward ops with their gradients."""
        return [phase for op, own in self.phases.items() if op in ops for phase in own]

    def parameters_of(self, ops: set[str]) -> list[str]:
        """The parameters with updates that some forward ops read."""
        own = (names for op, names in self.trained.items() if op in ops)
        return list(dict.fromkeys(name for names in own for name in names))


def model_facts(graph: Graph) -> ModelFacts:
    """Read a (training) graph once."""
    givers: dict[str, set[str]] = {}
    giver_of: dict[str, Op] = {}
    ops = {op.name: op for op in graph.ops}
    updates = {op.inputs[0]: op for op in graph.ops if op.phase == "update"}
    phases: dict[str, list[Op]] = {}
    for op in graph.ops:
        if op.forward or op.phase == "forward":
            phases.setdefault(op.forward or op.name, []).append(op)
        if op.forward:
            for k, position in enumerate(graph.call(op).wrt):
                giver_of[giver_name(graph, op, k)] = op
                tensor = ops[op.forward].inputs[position]
                givers.setdefault(tensor, set()).add(giver_name(graph, op, k))
    return ModelFacts(
        graph,
        ops,
        {name: frozenset(own) for name, own in givers.items()},
        {tensor.name: tensor for tensor in graph.tensors},
        giver_of,
        updates,
        {name: tuple(own) for name, own in phases.items()},
        {
            name: tuple(tensor for tensor in ops[name].inputs if tensor in updates)
            for name in phases
        },
    )


def giver_name(graph: Graph, op: Op, output: int) -> str:
    """A gradient by its op; where an op gives a tensor two of them, by its name."""
    inputs, wrt = graph.op(op.forward).inputs, graph.call(op).wrt
    same = [k for k in range(output) if inputs[wrt[k]] == inputs[wrt[output]]]
    return op.outputs[output] if same else op.name


@dataclass
class StageCheck:
    """Follows one program of one stage; `wrong` is what does not hold, in words."""

    program: Program
    model: ModelFacts
    stage: Stage
    received: dict[tuple[str, Layout], Fact] = field(default_factory=dict)
    alone: bool = True  # does the stage hold the whole model?
    ends: bool = True  # does the program end a step, with updates?
    wrong: list[str] = field(default_factory=list)
    facts: dict[int, Fact] = field(default_factory=dict)
    gradients: dict[str, frozenset[str]] = field(default_factory=dict)  # parameter -> givers

    def run(self) -> list[str]:
        """What is wrong, the first few."""
        self.splits = {split.op: split for split in self.stage.splits}
        self.mesh: Mesh = self.stage.mesh
        self.sized = [axis.size > 1 for axis in self.mesh.axes]
        self.factors = [axis.ways() for axis in self.mesh.axes]
        self.lines = [self.mesh.groups(axis) for axis in range(len(self.mesh.axes))]
        self.num_devices = sum(lane.kind == "device" for lane in self.program.lanes)
        self.makers: dict[tuple[int, int], int] = {}  # (value, rank drawn) -> last task to write it
        self.ran: Counter[tuple[str, bool]] = Counter()
        self.exchanged: Counter[tuple[str, bool, int, bool]] = Counter()  # borders, before the op
        self.missing: dict[int, Counter[int]] = {}  # value -> axes whose statistics are not there
        self.updated: dict[str, Fact] = {}
        self.parameter_of = {op.outputs[0]: name for name, op in self.model.updates.items()}
        self.stored: dict[str, Value] = {}
        self.sums: dict[str, Fact] = {}  # parameter -> the gradient that micro-batches add to
        position = self._positions()
        for work, tasks in self._works(position):
            if len(self.wrong) >= FEW:
                break
            self._ranks(work, tasks)
            self._check(work, tasks)
            for task in tasks:
                self._waits(work, task, position)
            self._made(work, tasks)
        self._complete()
        return self.wrong

    # Tasks.

    def _positions(self) -> list[int]:
        order = self.program.order
        if order is None:
            return list(range(self.program.num_tasks))
        position = [0] * self.program.num_tasks
        for place, task in enumerate(order.tolist()):
            position[task] = place
        return position

    def _works(self, position: list[int]) -> Iterator[tuple[Work, list[int]]]:
        """Works with their tasks, in the order of their first tasks."""
        tasks: dict[int, list[int]] = {}
        column = self.program.work.tolist()
        for task in sorted(range(self.program.num_tasks), key=position.__getitem__):
            if column[task] >= 0:
                tasks.setdefault(column[task], []).append(task)
        for number, own in tasks.items():
            yield self.program.works[number], own

    def _devices(self, task: int) -> list[int]:
        """The representative ranks that a task runs on, counted from 0."""
        return [lane % self.num_devices for lane in self.program.lanes_of(task)]

    def _ranks(self, work: Work, tasks: Sequence[int]) -> None:
        """Every representative rank takes part once; members of a line together."""
        if work.purpose in (Purpose.OTHER, Purpose.RESIDENT):
            return
        seen = sorted(device for task in tasks for device in self._devices(task))
        if seen != list(range(self.num_devices)):
            self._say(work, "does not run once on every rank")

    def _waits(self, work: Work, task: int, position: list[int]) -> None:
        """A task comes after those that make what it reads."""
        waits = {other for other, _ in self.program.waits_of(task)}
        lanes = set(self.program.lanes_of(task))
        for value in work.reads:
            fact = self.facts.get(value)
            root = value if fact is None or fact.root < 0 else fact.root
            for device in self._devices(task):
                maker = self.makers.get((root, device))
                if maker is None or maker in waits or maker == task:
                    continue
                same_lane = not lanes.isdisjoint(self.program.lanes_of(maker))
                if not (same_lane and position[maker] < position[task]):
                    tensor = self.program.values[value].tensor
                    name = self.program.task_name
                    self.wrong.append(
                        f"{name(task)} reads {tensor} without waiting for {name(maker)}"
                    )

    def _made(self, work: Work, tasks: Sequence[int]) -> None:
        for task in tasks:
            for device in self._devices(task):
                for value in work.writes:
                    self.makers[value, device] = task

    # What works do.

    def _check(self, work: Work, tasks: Sequence[int]) -> None:
        if work.purpose in (Purpose.COMPUTE, Purpose.RECOMPUTE):
            self._op(work)
        elif work.purpose is Purpose.EXCHANGE:
            if self._in_line(work, tasks):
                self._exchange(work)
        elif work.purpose is Purpose.CONVERSION:
            if self._in_line(work, tasks):
                self._conversion(work)
        elif work.purpose is Purpose.PARAMETER_GATHER:
            if self._in_line(work, tasks):
                self._gather(work)
        elif work.purpose is Purpose.GRADIENT_REDUCTION:
            if self._in_line(work, tasks):
                self._reduction(work)
        elif work.purpose is Purpose.UPDATE:
            self._update(work)

    def _in_line(self, work: Work, tasks: Sequence[int]) -> bool:
        """Does a collective run among the devices of an axis of the mesh?"""
        if not 0 <= work.axis < len(self.lines):
            self._say(work, f"runs along axis {work.axis}, which the mesh does not have")
            return False
        if work.group < 0 or self.program.groups[work.group] != self.lines[work.axis]:
            name = self.mesh.axes[work.axis].name
            self._say(work, f"does not run among the devices of axis {name}")
            return False
        return True

    def _read(self, work: Work, value: int) -> Fact | None:
        fact = self._fact(work, value)
        if fact is None:
            self._say(work, f"reads {self.program.values[value]}, which nothing has made")
        elif value in self.missing or fact.root in self.missing:
            self._say(work, f"reads {fact.tensor} before its statistics are exchanged")
        elif not self.alone and work.phase in ENDING and not self._outlasts(value):
            self._say(work, f"reads {fact.tensor} of one micro-batch, not the sum of all")
        return fact

    def _outlasts(self, value: int) -> bool:
        """Is a value there when a step ends? Kept over micro-batches, or made at the end."""
        known = self.program.values[value]
        if known.source in ("gradient", "parameter"):
            return True
        return self._outlasts(known.of) if known.of >= 0 else self.facts[value].phase in ENDING

    def _fact(self, work: Work, value: int) -> Fact | None:
        """What is known of a value; given ones and slices are looked at when first read."""
        if value in self.facts:
            return self.facts[value]
        known = self.program.values[value]
        fact = None
        if known.of >= 0:
            fact = self._slice(work, value, known)
        elif known.source == "input":
            fact = Fact(known.tensor, known.layout)
        elif known.source == "received":
            fact = self.received.get((known.tensor, known.layout))
        elif known.source == "parameter":
            fact = Fact(known.tensor, known.layout, known.flat)
            self._stored(known)
        if fact is not None:
            if (
                PARTIAL in (p for p, many in zip(known.layout, self.sized, strict=True) if many)
                and known.of < 0
            ):
                self._say(work, f"reads {known} as partial sums, which nothing has made")
            self.facts[value] = fact
        return fact

    def _stored(self, known: Value) -> None:
        if self.stored.setdefault(known.tensor, known) != known:
            self.wrong.append(f"parameter {known.tensor} is stored twice, in two layouts")

    def _slice(self, work: Work, value: int, known: Value) -> Fact | None:
        """A rank's part of what it holds already: R -> S, or a part along an axis of replicas."""
        base = self._fact(work, known.of)
        if base is None:
            return None
        legal = base.tensor == known.tensor and known.flat[: len(base.flat)] == base.flat
        for have, need, many in zip(base.layout, known.layout, self.sized, strict=True):
            cut = have == REPLICATE and need.kind == "shard"
            legal &= have == need or not many or cut
        legal &= all(known.layout[axis] == REPLICATE for axis in known.flat[len(base.flat) :])
        now = base.layout
        for axis, need in enumerate(known.layout):
            legal &= now[axis] == need or self._is_innermost(now, axis, (need,))
            now = (*now[:axis], need, *now[axis + 1 :])
        if not legal:
            self._say(work, f"takes {known} as a slice of {base.tensor}, which it is not")
        root = known.of if base.root < 0 else base.root
        return replace(base, layout=known.layout, flat=known.flat, root=root)

    # Ops.

    def _op(self, work: Work) -> None:
        op = self.model.ops.get(work.op)
        if op is None or (op.phase != "forward" and not op.forward):
            self._sum(work)
            return
        again = work.purpose is Purpose.RECOMPUTE
        self.ran[op.name, again] += 1
        split = self.splits.get(op.forward or op.name)
        if split is None or split.dims != work.dims:
            self._say(work, f"is split as {' x '.join(work.dims)}, not as the plan says")
            return
        call = self.model.graph.call(op)
        needed, given = placements(call, work.dims)
        if len(work.reads) != len(op.inputs) or len(work.writes) != len(op.outputs):
            self._say(work, "does not read and write the tensors of its op")
            return
        codes = call.reads if op.forward else tuple(f"i{i}" for i in range(len(op.inputs)))
        for value, name, need, code in zip(work.reads, op.inputs, needed, codes, strict=True):
            fact = self._read(work, value)
            if fact is not None:
                self._operand(work, op, fact, name, need, code)
        self._borders(work, op, again)
        self._results(work, op, given)

    def _operand(self, work: Work, op: Op, fact: Fact, name: str, need: Layout, code: str) -> None:
        if fact.flat:
            self._say(work, f"reads {fact.tensor} in parts, before it is gathered")
        elif not self._same(fact.layout, need):
            self._say(work, f"needs {name} as {_text(need)}, and finds {_text(fact.layout)}")
        if code[0] == "g":
            tensor = self.model.ops[op.forward].outputs[int(code[1:])]
            self._whole_gradient(work, fact, tensor, name)
        elif fact.tensor != name:
            self._say(work, f"reads {fact.tensor} where it needs {name}")

    def _whole_gradient(self, work: Work, fact: Fact, tensor: str, name: str) -> None:
        wanted = self.model.givers.get(tensor, frozenset())
        if not wanted:  # where the backward begins
            if fact.tensor != name:
                self._say(work, f"reads {fact.tensor} where it needs {name}")
        elif fact.gradient_of != tensor:
            self._say(work, f"reads {fact.tensor} where it needs the gradient of {tensor}")
        elif fact.givers != wanted:
            lacks = ", ".join(sorted(wanted - fact.givers)[:3])
            self._say(work, f"reads the gradient of {tensor} without what {lacks} adds to it")

    def _borders(self, work: Work, op: Op, again: bool) -> None:
        """Borders were fetched before the op; statistics must follow it."""
        for axis, count in self._needed(op, work.dims, borders=True).items():
            if self.exchanged.pop((op.name, again, axis, True), 0) < count:
                self._say(work, f"runs before its borders along axis {axis} are fetched")
        lacking = self._needed(op, work.dims, borders=False)
        if lacking:
            for value in work.writes:
                self.missing[value] = Counter(lacking)

    def _needed(self, op: Op, dims: tuple[str, ...], *, borders: bool) -> Counter[int]:
        call, factors = self.model.graph.call(op), dict[str, float]()
        for dim, ways, many in zip(dims, self.factors, self.sized, strict=True):
            if dim and many:
                factors[dim] = factors.get(dim, 1) * ways
        needed: Counter[int] = Counter()
        for axis, dim in enumerate(dims):
            for exchange in communication(call, factors, along=dim) if dim else ():
                if exchange.tensor < 0 and (exchange.collective == "halo") == borders:
                    needed[axis] += 1
        return needed

    def _results(self, work: Work, op: Op, given: tuple[Layout, ...]) -> None:
        wrt = self.model.graph.call(op).wrt
        for k, (value, name, layout) in enumerate(zip(work.writes, op.outputs, given, strict=True)):
            known = self.program.values[value]
            if known.tensor != name or not self._same(known.layout, layout):
                self._say(work, f"writes {known} where it makes {name} as {_text(layout)}")
            fact = Fact(name, layout, phase=work.phase)
            if op.forward:
                tensor = self.model.ops[op.forward].inputs[wrt[k]]
                fact = replace(
                    fact,
                    gradient_of=tensor,
                    givers=frozenset({giver_name(self.model.graph, op, k)}),
                )
            self._write(value, fact)

    def _sum(self, work: Work) -> None:
        """A sum of gradients of one tensor; partial sums may be added as they are."""
        facts = [fact for value in work.reads if (fact := self._read(work, value)) is not None]
        if len(facts) != len(work.reads) or len(work.writes) != 1 or not facts:
            if len(facts) == len(work.reads):
                self._say(work, "is no op of the model")
            return
        known = self.program.values[work.writes[0]]
        if not all(self._same(fact.layout, known.layout) and not fact.flat for fact in facts):
            self._say(work, f"adds tensors that lie unlike {known}")
        origins = {fact.gradient_of for fact in facts}
        if len(origins) > 1 or "" in origins:
            self._say(work, "adds what are no gradients of one tensor")
        givers = [giver for fact in facts for giver in fact.givers]
        if len(givers) != len(set(givers)):
            self._say(work, "adds a gradient twice")
        origin = facts[0].gradient_of
        fact = Fact(known.tensor, known.layout, (), origin, frozenset(givers), work.phase)
        self._write(work.writes[0], fact)

    # Communication.

    def _exchange(self, work: Work) -> None:
        for value in work.reads:
            self._fact(work, value)
        if not work.writes:
            self.exchanged[work.op, self._runs_again(work), work.axis, True] += 1
            return
        for value in work.writes:
            left = self.missing.get(value)
            if left is None or left[work.axis] < 1:
                self._say(work, "exchanges statistics that no op of its split needs there")
                continue
            left[work.axis] -= 1
            if not +left:
                del self.missing[value]

    def _runs_again(self, work: Work) -> bool:
        """Borders are for the second run of an op where its first has been."""
        op = self.model.ops.get(work.op)
        return op is not None and op.phase == "forward" and bool(self.ran[op.name, False])

    def _pairs(self, work: Work) -> Iterator[tuple[Fact, int, Value]]:
        if len(work.reads) != len(work.writes):
            self._say(work, f"reads {len(work.reads)} values and writes {len(work.writes)}")
            return
        for value, made in zip(work.reads, work.writes, strict=True):
            fact = self._read(work, value)
            if fact is None:
                continue
            if fact.tensor != self.program.values[made].tensor:
                self._say(work, f"turns {fact.tensor} into {self.program.values[made].tensor}")
            yield fact, made, self.program.values[made]

    def _conversion(self, work: Work) -> None:
        if work.collective not in CHANGES:
            self._say(work, f"is no conversion: {work.collective}")
            return
        before, after = CHANGES[work.collective]
        for fact, made, known in self._pairs(work):
            have, need = fact.layout[work.axis], known.layout[work.axis]
            rest = [*fact.layout[: work.axis], need, *fact.layout[work.axis + 1 :]]
            right = have.kind == before and need.kind == after and have != need
            right &= self._is_innermost(fact.layout, work.axis, (have, need))
            if not right or tuple(rest) != known.layout or fact.flat:
                self._say(work, f"cannot turn {_text(fact.layout)} into {_text(known.layout)}")
            self._bytes(work, fact, known)
            self._write(made, replace(fact, layout=known.layout, phase=work.phase, root=-1))

    def _is_innermost(self, layout: Layout, axis: int, changed: Sequence[TensorPlacement]) -> bool:
        """A later axis cuts the parts of an earlier one: that has no say while the later cuts."""
        dims = {p.dim for p in changed if p.kind == "shard"}
        later = zip(layout[axis + 1 :], self.sized[axis + 1 :], strict=True)
        return not any(p.kind == "shard" and p.dim in dims and many for p, many in later)

    def _bytes(self, work: Work, fact: Fact, known: Value) -> None:
        """A reduce-scatter takes what was held before it, others what is held after it."""
        layout = fact.layout if work.collective == "reduce_scatter" else known.layout
        self._moves(work, self._held_bytes(work, fact, layout))

    def _moves(self, work: Work, held: float) -> None:
        if abs(held - work.size_bytes) > TOLERANCE * held:
            self._say(work, f"is said to move {work.size_bytes:g} bytes of {held:g}")

    def _held_bytes(self, work: Work, fact: Fact, layout: Layout) -> float:
        """What a rank holds of a tensor in a layout, before ZeRO takes a part of it."""
        name = fact.gradient_of or fact.tensor  # a gradient is as large as what it is of,
        if fact.gradient_of in self.model.updates:  # that of a parameter as its update reads it
            name = self.model.updates[name].inputs[1]
        tensor = self.model.tensors.get(name)
        if tensor is None:
            self._say(work, f"moves {fact.tensor}, which the model does not have")
            return work.size_bytes
        held = float(tensor.size_bytes)
        for placement, ways in zip(layout, self.factors, strict=True):
            held /= ways if placement.kind == "shard" else 1
        return held

    def _gather(self, work: Work) -> None:
        if work.collective != "all_gather":
            self._say(work, f"gathers by {work.collective}")
        held = 0.0
        for fact, made, known in self._pairs(work):
            held += self._held_bytes(work, self._gathered(fact), fact.layout)
            if fact.flat[-1:] != (work.axis,) or known.flat != fact.flat[:-1]:
                self._say(work, f"cannot make {known} of parts along {list(fact.flat)}")
            if known.layout != fact.layout:
                self._say(work, f"cannot turn {_text(fact.layout)} into {_text(known.layout)}")
            new = replace(fact, flat=known.flat, phase=work.phase, root=-1)
            self._write(made, new)
            if known.tensor in self.updated:
                self.updated[known.tensor] = new
        self._moves(work, held)

    def _gathered(self, fact: Fact) -> Fact:
        """What is gathered as a tensor of the model: parameters are as large before an update."""
        parameter = self.parameter_of.get(fact.tensor, fact.tensor)
        return replace(fact, tensor=parameter)

    def _reduction(self, work: Work) -> None:
        scatters = work.collective == "reduce_scatter"
        if not scatters and work.collective != "all_reduce":
            self._say(work, f"reduces by {work.collective}")
        held = 0.0
        for fact, made, known in self._pairs(work):
            # Replicas of shard groups reduce the parts that ZeRO keeps.
            parts = 1 if scatters else math.prod(self.mesh.axes[axis].size for axis in fact.flat)
            held += self._held_bytes(work, fact, fact.layout) / parts
            rest = (*fact.layout[: work.axis], REPLICATE, *fact.layout[work.axis + 1 :])
            flat = (*fact.flat, work.axis) if scatters else fact.flat
            if fact.layout[work.axis] != PARTIAL or rest != known.layout or known.flat != flat:
                self._say(work, f"cannot make {known} of {fact.tensor} as {_text(fact.layout)}")
            self._write(made, replace(fact, layout=rest, flat=flat, phase=work.phase, root=-1))
        self._moves(work, held)

    # The end of a step.

    def _update(self, work: Work) -> None:
        if len(work.reads) != 2 * len(work.writes):
            self._say(work, "does not read a parameter and a gradient for each it updates")
            return
        for k, made in enumerate(work.writes):
            parameter = self._read(work, work.reads[2 * k])
            gradient = self._read(work, work.reads[2 * k + 1])
            if parameter is not None and gradient is not None:
                self._updated_one(work, parameter, gradient, made)

    def _updated_one(self, work: Work, parameter: Fact, gradient: Fact, made: int) -> None:
        op, known = self.model.updates.get(parameter.tensor), self.program.values[made]
        if op is None or known.tensor != op.outputs[0]:
            self._say(work, f"updates {parameter.tensor} into {known.tensor}")
            return
        name = parameter.tensor
        if gradient.gradient_of != name:
            self._say(work, f"updates {name} with {gradient.tensor}")
        if self.alone and gradient.givers != self.model.givers[name]:
            lacks = ", ".join(sorted(self.model.givers[name] - gradient.givers)[:3])
            self._say(work, f"updates {name} without what {lacks} adds to its gradient")
        self.gradients[name] = gradient.givers
        if not self._same(gradient.layout, parameter.layout):
            have, need = _text(gradient.layout), _text(parameter.layout)
            self._say(
                work, f"updates {name}, which lies as {need}, with a gradient that lies as {have}"
            )
        kept = self._zero_axes(parameter.layout)
        level = self._level(name)
        wanted = () if level == 0 else kept
        if gradient.flat != wanted or known.flat != wanted or known.layout != parameter.layout:
            self._say(
                work, f"updates {name} in parts along {list(gradient.flat)}, not {list(wanted)}"
            )
        if parameter.flat != (kept if level == 3 else ()):
            self._say(work, f"finds {name} in parts along {list(parameter.flat)}")
        fact = Fact(known.tensor, known.layout, known.flat, phase=work.phase)
        self._write(made, fact)
        self.updated[known.tensor] = fact

    def _zero_axes(self, layout: Layout) -> tuple[int, ...]:
        """The axes along which ZeRO keeps parts: those with copies that do not replicate."""
        return tuple(
            i
            for i, p in enumerate(layout)
            if p == REPLICATE and self.sized[i] and not self.mesh.axes[i].replicates
        )

    def _level(self, parameter: str) -> int:
        """How a parameter is kept: as the first op of the stage that reads it says."""
        for op in self.model.graph.consumers(parameter):
            if op.phase == "forward" and op.name in self.splits:
                return self.splits[op.name].zero
        return 0

    # All of it.

    def _complete(self) -> None:
        mine = set(self.splits)
        for op in self.model.of(mine):
            if op.phase == "update":
                continue
            if self.ran[op.name, False] != 1:
                times = self.ran[op.name, False]
                self.wrong.append(f"op {op.name} runs {times} times, and once is needed")
            if self.ran[op.name, True] > 1:
                self.wrong.append(f"op {op.name} is recomputed {self.ran[op.name, True]} times")
        for value in self.missing:
            tensor = self.program.values[value].tensor
            self.wrong.append(f"the statistics of {tensor} are never exchanged")
        self._returned(mine)
        self._accumulated(mine)
        if self.ends:
            self._all_updated(mine)

    def _returned(self, mine: set[str]) -> None:
        for name in self.model.graph.outputs:
            maker = self.model.graph.producer(name)
            if maker is None or maker.name not in mine:
                continue
            facts = [fact for fact in self.facts.values() if fact.tensor == name]
            if not any(not self._partial(fact.layout) and not fact.flat for fact in facts):
                self.wrong.append(f"the model returns {name} as partial sums that nobody adds up")

    def _accumulated(self, mine: set[str]) -> None:
        """What micro-batches add up: all that the stage gives for a parameter, as it is kept."""
        nobody = Work()
        for number, value in enumerate(self.program.values):
            if value.source != "gradient":
                continue
            fact = self._fact(nobody, number) if value.of >= 0 else self.facts.get(number)
            if fact is None or fact.gradient_of not in self.model.updates:
                continue
            name = fact.gradient_of
            if self.sums.setdefault(name, fact) is not fact:
                self.wrong.append(f"gradients of {name} are added up in two places")
        for name in self.model.parameters_of(mine):
            here = frozenset(
                giver
                for giver in self.model.givers.get(name, ())
                if self.model.giver_of[giver].forward in mine
            )
            if here:
                self._added_up(name, here)

    def _added_up(self, name: str, here: frozenset[str]) -> None:
        fact = self.sums.get(name)
        if fact is None or fact.givers != here:
            lacks = here - (frozenset() if fact is None else fact.givers)
            what = ", ".join(sorted(lacks)[:3])
            self.wrong.append(f"nobody adds {what} to the gradient of {name}")
            return
        level = self._level(name)
        stored = self.stored.get(name)
        if level in (2, 3) and stored is not None:
            kept = self._zero_axes(stored.layout)
            if self._partial_within_groups(fact.layout) or fact.flat != kept:
                self.wrong.append(f"the gradient of {name} is not reduced in every micro-batch")

    def _all_updated(self, mine: set[str]) -> None:
        for name in self.model.parameters_of(mine):
            fact = self.updated.get(self.model.updates[name].outputs[0])
            if fact is None:
                self.wrong.append(f"parameter {name} is never updated")
            elif fact.flat != (self.stored[name].flat if name in self.stored else ()):
                self.wrong.append(f"parameter {name} is not gathered after its update")

    # Words.

    def _write(self, value: int, fact: Fact) -> None:
        if value in self.facts and self.program.values[value].source != "gradient":
            self.wrong.append(f"{self.program.values[value]} is written twice")
        self.facts[value] = fact

    def _same(self, a: Layout, b: Layout) -> bool:
        return all(x == y or not many for x, y, many in zip(a, b, self.sized, strict=True))

    def _partial(self, layout: Layout) -> bool:
        return any(p == PARTIAL and many for p, many in zip(layout, self.sized, strict=True))

    def _partial_within_groups(self, layout: Layout) -> bool:
        """Is anything partial but across replicas of shard groups, which add up once a step?"""
        within = (
            many and not axis.replicates
            for axis, many in zip(self.mesh.axes, self.sized, strict=True)
        )
        return any(p == PARTIAL and many for p, many in zip(layout, within, strict=True))

    def _say(self, work: Work, what: str) -> None:
        if work not in self.program.works:
            self.wrong.append(f"a sum of gradients {what}")
            return
        number = self.program.works.index(work)
        task = int((self.program.work == number).argmax())
        self.wrong.append(f"{self.program.task_name(task)} {what}")


def _text(layout: Layout) -> str:
    return " ".join(map(str, layout)) or "it is"
