"""Small right programs, and ways to make one thing in them wrong."""

from dataclasses import replace

import numpy as np

from partita.cluster import resolve
from partita.engine import run
from partita.graph import GraphBuilder, training_graph
from partita.lower import lower_plan
from partita.meaning import Purpose
from partita.plans import Axis, Mesh, OpSplit, Schedule, Stage
from partita.program import Body
from partita.verify import verify_meaning

SPLITS = {"up": "n", "tanh": "c", "norm": "c", "down": "k", "add": "c"}


def block():
    """A linear layer, a norm that is split along what it norms, a skip."""
    g = GraphBuilder("block")
    x = g.elementwise("tanh", g.linear(g.input("x", (8, 8)), 8, "up"))
    y = g.linear(g.norm(x, name="norm"), 8, "down")
    return training_graph(g.finish(g.add(y, x)))


def image():
    """A convolution that is split along the height of images."""
    g = GraphBuilder("image")
    x = g.conv(g.input("x", (4, 2, 8, 8)), 2, 3, padding=1, bias=False, name="first")
    return training_graph(g.finish(g.conv(x, 2, 3, padding=1, bias=False, name="conv")))


class Right:
    """A plan's program, which the verifier has nothing against."""

    def __init__(self, graph, stages, schedule, cluster="8xA100"):
        self.graph, self.schedule = graph, schedule
        lowered = lower_plan(stages, schedule, graph, resolve(cluster), run)
        self.program, self.stages = lowered.program, lowered.stages
        assert self.says(self.program) == ()

    def says(self, program):
        return verify_meaning(program, self.graph, self.stages, self.schedule)


def one_stage(level=0, *, again=(), recompute=False):
    """The block on 2 x 2 devices: its layers split along one axis, the batch along the other."""
    mesh = Mesh((Axis("t", 2), Axis("d", 2)), (0, 1, 2, 3))
    splits = tuple(OpSplit(op, (dim, "b"), level) for op, dim in SPLITS.items())
    stage = Stage(
        "model", mesh, splits, "full" if recompute else "selective" if again else "none", (), again
    )
    return Right(block(), (stage,), Schedule())


def one_image():
    mesh = Mesh((Axis("h", 2),), (0, 1))
    stage = Stage("model", mesh, (OpSplit("first", ("h",)), OpSplit("conv", ("h",))))
    return Right(image(), (stage,), Schedule())


def two_stages(schedule="1f1b", graph=None, cut=2, level=0):
    """The block in two stages of two devices, two micro-batches."""
    graph = graph or block()
    ops = [op.name for op in graph.ops if op.phase == "forward"]
    stages = tuple(
        Stage(f"s{i}", Mesh((Axis("d", 2),), (2 * i, 2 * i + 1)),
              tuple(OpSplit(op, ("b",), level) for op in own))
        for i, own in enumerate((ops[:cut], ops[cut:]))
    )  # fmt: skip
    return Right(graph, stages, Schedule(schedule, 2))


def works(program, purpose, *, op="", **fields):
    """Numbers of the works of a purpose, of an op, with these fields."""
    return [
        n
        for n, work in enumerate(program.works)
        if work.purpose is purpose
        and (not op or work.op == op)
        and all(getattr(work, name) == value for name, value in fields.items())
    ]


def reads_tensor(program, number, tensor):
    """The place of a tensor among what a work reads."""
    names = [program.values[v].tensor for v in program.works[number].reads]
    return names.index(tensor)


def with_work(program, number, **changes):
    """The program with one work changed."""
    changed = list(program.works)
    changed[number] = replace(changed[number], **changes)
    return replace(program, works=tuple(changed))


def with_value(program, number, **changes):
    """The program with one value changed."""
    changed = list(program.values)
    changed[number] = replace(changed[number], **changes)
    return replace(program, values=tuple(changed))


def with_new_value(program, value):
    """The program with one value more, and its number."""
    return replace(program, values=(*program.values, value)), len(program.values)


def reading(program, number, place, value):
    """A work reads another value in one place."""
    reads = list(program.works[number].reads)
    reads[place] = value
    return with_work(program, number, reads=tuple(reads))


def without(program, number):
    """The tasks of a work do something else that has no meaning."""
    column = program.work.copy()
    column[column == number] = -1
    return replace(program, work=column)


def without_waits(program, number):
    """The tasks of a work wait for nothing, and are the first of their lanes."""
    mine = np.isin(np.arange(program.num_tasks), np.flatnonzero(program.work == number))
    owner = np.repeat(np.arange(program.num_tasks), np.diff(program.wait_start))
    keep = ~mine[owner]
    counts = np.bincount(owner[keep], minlength=program.num_tasks)
    return replace(
        program,
        wait_start=np.concatenate(([0], np.cumsum(counts))).astype(np.int32),
        wait_on=program.wait_on[keep],
        wait_delay=program.wait_delay[keep],
    )


def inside(program, number, change):
    """The program with one of its bodies changed."""
    bodies = list(program.bodies)
    body = bodies[number]
    bodies[number] = Body(body.stage, change(body.program), body.start, body.end)
    return replace(program, bodies=tuple(bodies))


COMPUTE, EXCHANGE, CONVERSION = Purpose.COMPUTE, Purpose.EXCHANGE, Purpose.CONVERSION
GATHER, REDUCTION, UPDATE = Purpose.PARAMETER_GATHER, Purpose.GRADIENT_REDUCTION, Purpose.UPDATE
SEND, RECEIVE, RECOMPUTE = Purpose.SEND, Purpose.RECEIVE, Purpose.RECOMPUTE


def number(program, purpose, op="", nth=0, **fields):
    """The number of one work; see `works`."""
    return works(program, purpose, op=op, **fields)[nth]


def value(program, text, nth=0, source=""):
    """The number of a value by how it is shown, such as `down [P S(0)]`."""
    return [
        n
        for n, own in enumerate(program.values)
        if str(own) == text and (not source or own.source == source)
    ][nth]
