"""Products that wait for loads: rows that do not lie on 16 bytes, as those of 50,257 words.

Matrix units read 16 bytes at a time. Where the rows of a half-precision product are no multiple of
8 elements they are fed by plain loads, and twice the arithmetic would gain nothing. The roofline
counts that to computing; here it is told apart, since padding the dim is the cure.
"""

from dataclasses import dataclass, replace

from partita.cluster import DeviceKind
from partita.costs.roofline import CONTRACTIONS, op_cost
from partita.graph.record import Graph, Op
from partita.jobs.simulate import OpReport, Simulation

TOGETHER = 8  # elements of 2 bytes
FASTER = 1024.0


@dataclass(frozen=True, slots=True)
class Rows:
    """A size that is no multiple of 8, the first op that has it, the seconds of all that do."""

    op: str
    size: int
    seconds: float

    @property
    def padded(self) -> int:
        """The size that would lie on 16 bytes."""
        return -(-self.size // TOGETHER) * TOGETHER


def unaligned_rows(simulation: Simulation) -> tuple[Rows, ...]:
    """The sizes that slow products of the busiest devices down, the costliest first."""
    graph = simulation.workload.graph
    ops = {op.name: op for op in graph.ops}
    kind = simulation.cluster.kind_of(simulation.stage.mesh.devices[0])
    known: dict[int, Rows] = {}
    for report in simulation.ops:
        if report.name in ops and _is_fed_slowly(graph, ops[report.name], report, kind):
            size = _odd_size(graph, ops[report.name])
            first = known.get(size, Rows(report.name, size, 0.0))
            known[size] = replace(first, seconds=first.seconds + report.cost.seconds)
    return tuple(sorted(known.values(), key=lambda rows: (-rows.seconds, rows.size)))


def _is_fed_slowly(graph: Graph, op: Op, report: OpReport, kind: DeviceKind) -> bool:
    """Would a product take as long with any arithmetic?"""
    if report.kind not in CONTRACTIONS or report.cost.bound != "compute":
        return False
    rates = tuple((dtype, rate * FASTER) for dtype, rate in kind.flops_per_s)
    now = op_cost(graph, op, kind, report.split).compute_s
    then = op_cost(graph, op, replace(kind, flops_per_s=rates), report.split).compute_s
    return then > now / 2


def _odd_size(graph: Graph, op: Op) -> int:
    """The length of the rows that are no multiple of 8; images lie channels last."""
    call = graph.call(op)
    place = 1 if call.kind == "conv" else -1
    rows = [shape[place] for shape in (call.inputs[0], *call.outputs) if len(shape) > 1]
    return max((size for size in rows if size % TOGETHER), default=max(rows))
