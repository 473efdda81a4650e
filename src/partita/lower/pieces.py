"""The part of a (training) graph that one stage runs, as a graph of its own.

What enters becomes an input: activations of earlier stages, gradients of later ones. Where several
ops of a stage give gradients for one tensor that came from outside, they are added here and one sum
is sent back. A parameter that two stages read is held, and updated, by both.

With full activation checkpointing the forward's ops stand twice: the first time for what leaves the
stage and passes from segment to segment, the second time (under a name of its own) right before the
backward of their segment, which reads what the second run made. With selective checkpointing only
the ops that the stage names stand twice, the second time right before the gradients of the first op
that need what they make, if any do: so what has to be sent for a weight gradient can be sent while
the data gradient is computed. Which ops are second runs is said in `StageGraph.recomputed`.
"""

import functools
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from partita.graph.record import Graph, Op, Tensor
from partita.plans import OpSplit, Stage


@dataclass(frozen=True)
class StageGraph:
    """A stage's graph, the splits of all its ops, and what crosses its borders.

    `entering` and `leaving` are activations; `gradients_in` of what leaves (per consuming stage)
    and `gradients_out` of what entered go the other way. All by the tensor's name in the piece.
    """

    graph: Graph
    splits: tuple[OpSplit, ...]
    entering: tuple[str, ...]
    leaving: tuple[str, ...]
    gradients_in: tuple[tuple[str, int, str], ...]  # (activation, stage, its name here)
    gradients_out: tuple[tuple[str, str], ...]  # (activation, its name here)
    shared: tuple[str, ...]  # parameters that other stages hold too
    num_forward: int  # the first so many ops are the forward; what follows is the backward
    recomputed: frozenset[str] = frozenset()  # ops that are second runs
    single: frozenset[str] = frozenset()  # those of them that run one by one, not by segments
    original: dict[str, str] = field(default_factory=dict)  # of ops and tensors of second runs

    def local(self, stage: Stage) -> Stage:
        """The stage with the splits of its piece: all that there is to recompute stands in it."""
        own = {split.op for split in self.splits}
        return Stage(
            stage.name, stage.mesh, self.splits, prefetch=stage.prefetch,
            bucket_bytes=stage.bucket_bytes, bundles=stage.bundles and tuple(
                op for op in stage.bundles if op in own
            ),
        )  # fmt: skip


@dataclass(frozen=True)
class Homes:
    """Where everything of a graph belongs: the stage of each op, the users of each tensor."""

    stage_of: dict[str, int]
    users: dict[str, tuple[int, ...]]  # tensor -> stages whose forward reads it
    maker: dict[str, int]  # activation -> stage
    givers: dict[str, tuple[int, ...]]  # tensor -> stages that give gradients for it
    origin: dict[str, str]  # gradient that a user gives -> tensor
    forward: tuple[tuple[Op, ...], ...]  # per stage
    backward: tuple[tuple[Op, ...], ...]
    update_of: dict[str, Op]  # by parameter

    def borders(self, number: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The activations that enter a stage, and those that leave it."""
        entering: dict[str, None] = {}
        for op in self.forward[number]:
            for name in op.inputs:
                if self.maker.get(name, number) != number:
                    entering[name] = None
        leaving = tuple(
            name
            for op in self.forward[number]
            for name in op.outputs
            if any(user != number for user in self.users.get(name, ()))
        )
        return tuple(entering), leaving


def homes(graph: Graph, stages: Iterable[Stage]) -> Homes:
    """Work out once what all pieces of a graph need to know."""
    known = tuple(stages)
    stage_of = {split.op: i for i, stage in enumerate(known) for split in stage.splits}
    users: dict[str, set[int]] = {}
    maker: dict[str, int] = {}
    givers: dict[str, set[int]] = {}
    origin_of: dict[str, str] = {}
    forward: list[list[Op]] = [[] for _ in known]
    backward: list[list[Op]] = [[] for _ in known]
    for op in graph.ops:
        if op.phase == "forward":
            here = stage_of[op.name]
            forward[here].append(op)
            for name in op.inputs:
                users.setdefault(name, set()).add(here)
            maker.update(dict.fromkeys(op.outputs, here))
        elif op.forward:
            origin, here = graph.op(op.forward), stage_of[op.forward]
            backward[here].append(op)
            for name, i in zip(op.outputs, graph.call(op).wrt, strict=True):
                givers.setdefault(origin.inputs[i], set()).add(here)
                origin_of[name] = origin.inputs[i]
    return Homes(
        stage_of,
        {name: tuple(sorted(homes)) for name, homes in users.items()},
        maker,
        {name: tuple(sorted(homes)) for name, homes in givers.items()},
        origin_of,
        tuple(map(tuple, forward)),
        tuple(map(tuple, backward)),
        {op.inputs[0]: op for op in graph.ops if op.phase == "update"},
    )


@dataclass(frozen=True)
class Shorter:
    """Forward ops to leave out of a piece, and what those after them read instead."""

    gone: frozenset[str] = frozenset()
    renamed: dict[str, str] = field(default_factory=dict)


WHOLE = Shorter()


def piece(
    graph: Graph, stage: Stage, number: int, where: Homes, shorter: Shorter = WHOLE
) -> StageGraph:
    """The piece of a graph that the `number`-th stage runs, or a shorter one like it."""
    return _Piece(graph, stage, number, where, shorter).build()


def shortened(ops: tuple[Op, ...], shorter: Shorter) -> tuple[Op, ...]:
    """Forward ops without those that are left out."""
    if not shorter.gone:
        return ops
    read = shorter.renamed
    return tuple(
        replace(op, inputs=tuple(read.get(name, name) for name in op.inputs))
        for op in ops
        if op.name not in shorter.gone
    )


class _Piece:
    def __init__(
        self, graph: Graph, stage: Stage, number: int, where: Homes, shorter: Shorter
    ) -> None:
        self.graph, self.stage, self.number, self.where = graph, stage, number, where
        self.renamed = shorter.renamed
        self.ops: list[Op] = []
        self.tensors: dict[str, Tensor] = {}
        self.forward = shortened(where.forward[number], shorter)
        self.backward = [op for op in where.backward[number] if op.forward not in shorter.gone]
        self.op_of = {op.name: op for op in self.forward}
        self.local: dict[str, list[str]] = {}  # tensor -> gradients given in this stage
        self.whole: dict[str, str] = {}  # tensor -> its whole gradient, once it is there
        self.gradients_in: list[tuple[str, int, str]] = []
        self.segment_of: dict[str, int] = {}
        self.kept: set[str] = set()
        self.made_in: dict[str, int] = {}
        self.again: set[int] = set()
        self.second_of: dict[str, str] = {}  # tensors and ops -> their names in the second run
        self.light = self._light()
        self.reads: dict[str, list[str]] = {}  # per op what its gradients read
        self.place = {op.name: i for i, op in enumerate(self.forward)}
        self.done: set[str] = set()  # the ops of selective recompute that ran again

    def build(self) -> StageGraph:
        where, number = self.where, self.number
        entering, leaving = where.borders(number)
        if (self.stage.checkpointing == "full") and self.backward:
            self._cut()
        for op in self.forward:
            self._add(op)
        for op in self.backward:
            for part in op.outputs:
                self.local.setdefault(self._read(where.origin[part]), []).append(part)
            if self.light:
                self.reads.setdefault(op.forward, []).extend(map(self._read, op.inputs))
        for op in self.backward:
            self._backward(op)
        gradients_out = [
            (name, self._total(name, f"{name}.grad.sent"))
            for name in entering
            if name in self.local
        ]
        for name in self.local:
            if name in where.update_of:
                self._update(where.update_of[name])
        outputs = tuple(n for n in self.graph.outputs if where.maker.get(n, -1) == number)
        graph = Graph(self.graph.name, tuple(self.tensors.values()), tuple(self.ops), outputs)
        shared = (p.name for p in graph.parameters if len(where.users.get(p.name, ())) > 1)
        return StageGraph(
            graph,
            self._splits(),
            entering,
            leaving,
            tuple(self.gradients_in),
            tuple(gradients_out),
            tuple(shared),
            len(self.forward),
            frozenset(self.second_of[name] for name in self._second_ops()),
            frozenset(self.second_of[name] for name in self.done),
            {second: name for name, second in self.second_of.items()},
        )

    # Forward ops, and their second run.

    def _add(self, op: Op) -> None:
        for name in op.inputs:
            if name not in self.tensors:
                tensor = self.graph.tensor(name)
                role = tensor.role if tensor.is_given else "input"
                self.tensors[name] = replace(tensor, role=role)
        for name in op.outputs:
            self.tensors[name] = self.graph.tensor(name)
        self.ops.append(op)

    def _cut(self) -> None:
        """Number the pieces that are run again, and find what passes between them."""
        firsts, segment = set(self.stage.segments), 0
        made: dict[str, int] = {}
        for i, op in enumerate(self.forward):
            if i and op.name in firsts:
                segment += 1
            self.segment_of[op.name] = segment
            made.update(dict.fromkeys(op.outputs, segment))
        for op in self.forward:
            here = self.segment_of[op.name]
            self.kept.update(name for name in op.inputs if made.get(name, here) != here)
        self.made_in = made

    def _second(self, name: str) -> str:
        """What the second run reads for a tensor of the first."""
        return name if name in self.kept or name not in self.made_in else self._again(name)

    def _again(self, name: str) -> str:
        """The name of a tensor, or an op, in the second run: one that nothing else has."""
        if name not in self.second_of:
            fresh = f"{name}.again"
            while fresh in self.taken_names:
                fresh += "_"
            self.second_of[name] = fresh
        return self.second_of[name]

    @functools.cached_property
    def taken_names(self) -> set[str]:
        tensors, ops = self.graph.tensors, self.graph.ops
        return {tensor.name for tensor in tensors} | {op.name for op in ops}

    def _second_ops(self) -> list[str]:
        """The ops of the forward that run twice."""
        return [
            op.name
            for op in self.forward
            if self.segment_of.get(op.name) in self.again or op.name in self.done
        ]

    def _run_again(self, segment: int) -> None:
        self.again.add(segment)
        for op in self.forward:
            if self.segment_of[op.name] == segment:
                self._second_run(op, tuple(map(self._second, op.inputs)))

    def _second_run(self, op: Op, inputs: tuple[str, ...]) -> None:
        outputs = tuple(map(self._again, op.outputs))
        for name, second in zip(op.outputs, outputs, strict=True):
            self.tensors[second] = replace(self.graph.tensor(name), name=second)
        self.ops.append(replace(op, name=self._again(op.name), inputs=inputs, outputs=outputs))

    def _light(self) -> dict[str, Op]:
        """The ops that run again one by one, by what they make."""
        named = set(self.stage.recomputed)
        return {name: op for op in self.forward if op.name in named for name in op.outputs}

    def _made_again(self, name: str) -> str:
        """What a gradient reads for a tensor: where its op runs again, that second run's."""
        if name not in self.light:
            return name
        ops, left = [], [self.light[name]]
        while left:
            op = left.pop()
            if op.name not in self.done:
                self.done.add(op.name)
                ops.append(op)
                left.extend(self.light[read] for read in op.inputs if read in self.light)
        for op in sorted(ops, key=lambda op: self.place[op.name]):
            reads = (self._again(read) if read in self.light else read for read in op.inputs)
            self._second_run(op, tuple(reads))
        return self._again(name)

    # Backward ops.

    def _read(self, name: str) -> str:
        return self.renamed.get(name, name)

    def _backward(self, op: Op) -> None:
        origin = self.op_of[op.forward]
        for name in self.reads.pop(op.forward, ()):
            self._made_again(name)
        grads = self.graph.call(op).reads
        inputs = []
        for given, read in zip(op.inputs, grads, strict=True):
            name = self._read(given) if read[0] == "i" else given
            if read[0] == "g":
                inputs.append(self._gradient(origin.outputs[int(read[1:])]))
            elif not self.segment_of:
                inputs.append(self._made_again(name))
            elif read[0] == "o":
                inputs.append(self._again(name))
            else:
                inputs.append(self._second(name))
        if self.segment_of:
            segment = self.segment_of[origin.name]
            if segment not in self.again:
                self._run_again(segment)
            op = replace(op, forward=self._again(origin.name))
        elif self.light:  # what it reads may have another name than its forward's
            told = tuple(read for read in grads if read[0] != "g")
            attrs = [item for item in op.attrs if item[0] != "reads"]
            op = replace(op, attrs=tuple(sorted((*attrs, ("reads", told)))))
        for name in op.outputs:
            self.tensors[name] = self.graph.tensor(name)
        self.ops.append(replace(op, inputs=tuple(inputs)))

    def _gradient(self, name: str) -> str:
        """The whole gradient of a tensor made here: local parts and those of later stages."""
        if name not in self.whole:
            self.whole[name] = self._make_gradient(name)
        return self.whole[name]

    def _make_gradient(self, name: str) -> str:
        whole = f"{name}.grad"
        parts = list(self.local.get(name, ()))
        for user in self.where.givers.get(name, ()):
            if user != self.number:
                sent = f"{name}.grad.from{user}"
                source = self.graph.tensor(name)
                self.tensors[sent] = replace(source, name=sent, role="input")
                self.gradients_in.append((name, user, sent))
                parts.append(sent)
        if not parts:  # where the backward begins
            self.tensors[whole] = self.graph.tensor(whole)
            return whole
        return self._total(name, whole, parts)

    def _total(self, name: str, whole: str, parts: list[str] | None = None) -> str:
        parts = list(self.local[name]) if parts is None else parts
        if len(parts) == 1:
            return parts[0]
        source = self.graph.tensor(name)
        summed = self.tensors[parts[0]].dtype
        self.tensors[whole] = replace(source, name=whole, dtype=summed, role="gradient")
        phase = "wgrad" if source.role == "parameter" else "dgrad"
        self.ops.append(
            Op(
                name=f"{whole}.sum",
                kind="elementwise",
                inputs=tuple(parts),
                outputs=(whole,),
                attrs=(("fn", "add"),),
                phase=phase,
            )
        )
        return whole

    def _update(self, op: Op) -> None:
        parameter, _, *states = op.inputs
        gradient = self._total(parameter, f"{parameter}.grad")
        for name in (*states, *op.outputs):
            self.tensors[name] = self.graph.tensor(name)
        self.ops.append(replace(op, inputs=(parameter, gradient, *states)))

    def _splits(self) -> tuple[OpSplit, ...]:
        splits = [split for split in self.stage.splits if split.op in self.op_of]
        twice = set(self._second_ops())
        splits += [
            replace(split, op=self._again(split.op)) for split in splits if split.op in twice
        ]
        return tuple(splits)
