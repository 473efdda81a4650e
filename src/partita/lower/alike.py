"""Bodies of stages that are alike: written once, and for the others with their names.

With virtual stages a group of devices has many stages of the same layers. Where the pieces of two
stages differ in names alone, and both lie on the same devices, the tasks inside their blocks differ
in names alone, too.
"""

from dataclasses import replace

import numpy as np

from partita.graph.record import Graph
from partita.lower.blocks import StageBodies
from partita.lower.pieces import StageGraph
from partita.meaning import Value, Work, label
from partita.plans import Stage
from partita.program import Body, Program

Names = dict[str, str]


def structure(part: StageGraph, stage: Stage) -> tuple[object, ...]:
    """Equal for stages on the same devices whose pieces are the same but for names."""
    graph = part.graph
    tensors = {tensor.name: i for i, tensor in enumerate(graph.tensors)}
    ops = {op.name: i for i, op in enumerate(graph.ops)}
    return (
        stage.mesh,
        stage.prefetch,
        stage.bucket_bytes,
        stage.overlap,
        tuple(ops[name] for name in stage.bundles or () if name in ops),
        tuple((t.shape, t.dtype, t.role) for t in graph.tensors),
        tuple(
            (
                op.kind, repr(op.attrs), op.phase, ops.get(op.forward, -1),
                tuple(tensors[name] for name in op.inputs),
                tuple(tensors[name] for name in op.outputs),
            )
            for op in graph.ops
        ),
        tuple((ops[split.op], split.dims, split.zero) for split in part.splits),
        tuple(tensors[name] for name in graph.outputs),
        tuple(tensors[name] for name in part.entering),
        tuple(tensors[name] for name in part.leaving),
        tuple((tensors[name], tensors[sent]) for name, _, sent in part.gradients_in),
        tuple((tensors[name], tensors[sent]) for name, sent in part.gradients_out),
        tuple(tensors[name] for name in part.shared),
        part.num_forward,
        tuple(op.name in part.recomputed for op in graph.ops),
        tuple(op.name in part.single for op in graph.ops),
        tuple(tensors.get(part.original.get(t.name, ""), -1) for t in graph.tensors),
        tuple(ops.get(part.original.get(op.name, ""), -1) for op in graph.ops),
    )  # fmt: skip


def with_names(bodies: StageBodies, part: StageGraph, stage: Stage, number: int) -> StageBodies:
    """The bodies of a stage like another one, whose piece is `part`."""
    tensors = _paired(bodies.part.graph, part.graph, "tensors")
    ops = _paired(bodies.part.graph, part.graph, "ops")
    stages = (stage.name,) * (number + 1)

    def named(body: Body) -> Body:
        program = _renamed(body.program, tensors, ops, number, stages)
        return Body(number, program, body.start, body.end)

    ending = None if bodies.ending is None else named(bodies.ending)
    return replace(bodies, part=part, steady=named(bodies.steady), ending=ending)


def _paired(first: Graph, second: Graph, what: str) -> Names:
    """Names of one graph -> names of the other, by their places."""
    ours, theirs = getattr(first, what), getattr(second, what)
    return {"": ""} | {a.name: b.name for a, b in zip(ours, theirs, strict=True)}


def _renamed(
    program: Program, tensors: Names, ops: Names, number: int, stages: tuple[str, ...]
) -> Program:
    values = tuple(
        Value(
            tensors[v.tensor], v.layout, v.source, v.of, v.flat, tensors[v.gradient_of]
        )
        for v in program.values
    )  # fmt: skip
    works = tuple(
        Work(
            w.purpose, w.phase, ops[w.op], w.dims, number, w.peer, w.collective, w.axis, w.group,
            w.size_bytes, w.reads, w.writes, w.body, w.part,
        )
        for w in program.works
    )  # fmt: skip
    names: dict[str, int] = {}
    blocks = [names.setdefault(label(work, values, stages), len(names)) for work in works]
    block = np.array(blocks, np.int32)[program.work]
    return replace(program, works=works, values=values, blocks=tuple(names), block=block)
