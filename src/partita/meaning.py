"""What the tasks of a program are: the op, tensors, collective and purpose behind each of them.

Lowering writes these records; reports, explanations, the verifier and the runtimes read them. A
label is made from a record and never read back.

A `Work` is what one or several tasks do together: the tasks of one op on the devices that are
drawn, or of one collective in all its groups, share one. Everything a stage does is done by all
ranks of its mesh alike, so a work is said once for the mesh.

A `Value` is a tensor in one layout on a stage's mesh. It is written once (an exchange of
statistics completes it), so that reading it can mean only one thing:

    task       a task writes it
    input      the model is fed with it, in any layout that is asked for
    parameter  it lies there from the start
    received   another stage sends it
    gradient   tasks add to it, micro-batch by micro-batch, until the step ends

A value that is a slice of another (`of`) is there as soon as that one is; nothing is sent for it.
A gradient, a part of one included, says which tensor it is the gradient of (`gradient_of`).
Along the axes in `flat` a rank holds only its part of the shard, as ZeRO keeps it.
"""

from dataclasses import dataclass
from enum import IntEnum

from partita.graph.splits import TensorPlacement

Layout = tuple[TensorPlacement, ...]
Groups = tuple[tuple[int, ...], ...]


class Purpose(IntEnum):
    """What a task is for."""

    OTHER = 0
    COMPUTE = 1
    RECOMPUTE = 2  # an op of the forward, once more for the backward
    EXCHANGE = 3  # statistics or borders that an op needs from its neighbours
    CONVERSION = 4  # a tensor is brought into the layout that its reader needs
    PARAMETER_GATHER = 5
    GRADIENT_REDUCTION = 6
    SEND = 7
    RECEIVE = 8
    UPDATE = 9
    RESIDENT = 10  # memory that is held from start to end

    @property
    def words(self) -> str:
        """What reports call it."""
        return _WORDS[self]


_WORDS = {
    Purpose.OTHER: "other",
    Purpose.COMPUTE: "compute",
    Purpose.RECOMPUTE: "recompute",
    Purpose.EXCHANGE: "exchange of statistics or borders",
    Purpose.CONVERSION: "layout conversion",
    Purpose.PARAMETER_GATHER: "parameter gather",
    Purpose.GRADIENT_REDUCTION: "gradient reduction",
    Purpose.SEND: "send",
    Purpose.RECEIVE: "receive",
    Purpose.UPDATE: "update",
    Purpose.RESIDENT: "resident memory",
}
COMMUNICATION = frozenset({
    Purpose.EXCHANGE, Purpose.CONVERSION, Purpose.PARAMETER_GATHER, Purpose.GRADIENT_REDUCTION,
    Purpose.SEND, Purpose.RECEIVE,
})  # fmt: skip


class Phase(IntEnum):
    """The part of a step that a task belongs to."""

    NONE = 0
    FORWARD = 1
    BACKWARD = 2  # of the data; of the weights too, where they are not taken apart
    WEIGHT = 3  # weight gradients by themselves
    REDUCE = 4  # what ends a step: gradient reductions,
    UPDATE = 5  # and the optimizer


SOURCES = ("task", "input", "parameter", "received", "gradient")


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor in one layout on the mesh of a stage; see the module for its sources."""

    tensor: str
    layout: Layout
    source: str = "task"
    of: int = -1
    flat: tuple[int, ...] = ()
    gradient_of: str = ""

    def __str__(self) -> str:
        parts = f" in parts along {', '.join(map(str, self.flat))}" if self.flat else ""
        return f"{self.tensor} [{' '.join(map(str, self.layout))}]{parts}"


@dataclass(frozen=True, slots=True)
class Work:
    """What some tasks do together; `reads` and `writes` are numbers of values.

    `dims` is the split of an op, one loop dim per mesh axis. A collective runs along one axis in
    groups of devices (the number of a row of the program's `groups`). A block of a pipeline has
    its tasks in one of the program's `bodies`.
    """

    purpose: Purpose = Purpose.OTHER
    phase: Phase = Phase.NONE
    op: str = ""
    dims: tuple[str, ...] = ()
    stage: int = -1
    peer: int = -1  # the other stage of a send or receive
    collective: str = ""
    axis: int = -1
    group: int = -1
    size_bytes: float = 0.0
    reads: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    body: int = -1
    part: int = 0  # tells works apart that are otherwise alike: two borders along one axis


def label(work: Work, values: "tuple[Value, ...] | list[Value]", stages: tuple[str, ...]) -> str:
    """What people call a work: made from what it is."""
    if work.purpose in (Purpose.COMPUTE, Purpose.RECOMPUTE):
        name = work.op or stages[work.stage]
        return f"{name} (recompute)" if work.purpose is Purpose.RECOMPUTE else name
    if work.purpose is Purpose.EXCHANGE:
        return f"{work.op} {work.collective}"
    if work.purpose in (Purpose.SEND, Purpose.RECEIVE) or work.peer >= 0:
        return _between(work, values, stages)
    if work.purpose is Purpose.RESIDENT:
        return "parameters, states and workspace"
    stage = stages[work.stage] if 0 <= work.stage < len(stages) and len(stages) > 1 else ""
    if work.body >= 0 or not (work.reads or work.writes):
        return f"{stage} {work.purpose.words}".strip()
    names = list(dict.fromkeys(values[v].tensor for v in (work.reads or work.writes)))
    what = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
    if work.purpose is Purpose.UPDATE:
        return f"update of {what}"
    return f"{what} {work.collective}"


def _between(work: Work, values: "tuple[Value, ...] | list[Value]", stages: tuple[str, ...]) -> str:
    a, b = stages[work.stage], stages[work.peer]
    if work.purpose is Purpose.GRADIENT_REDUCTION:
        return f"{a} <> {b} shared gradients"
    if work.purpose is Purpose.RECEIVE:
        a, b = b, a
    back = work.phase is not Phase.FORWARD
    first, second = (b, a) if back else (a, b)
    verb = " receive" if work.purpose is Purpose.RECEIVE else ""
    return f"{first} {'<' if back else '>'} {second}{verb}"
