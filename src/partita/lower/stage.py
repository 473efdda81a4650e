"""One stage that runs once: the program of the whole model, op by op, as one step."""

from dataclasses import dataclass

from partita.cluster import Cluster
from partita.costs.collectives import Collectives
from partita.costs.roofline import OpCost, Split
from partita.graph.record import Graph
from partita.lower.context import MAX_DRAWN, context_of, drawn_devices
from partita.lower.ops import run_ops, settle_outputs
from partita.lower.parameters import flush_all, resident_bytes, update_all
from partita.lower.pieces import homes, piece
from partita.lower.writer import NetworkOrder, Recorded, Writer
from partita.meaning import Phase
from partita.plans import Stage
from partita.program import Program
from partita.search.overlap import FillGaps


@dataclass(frozen=True)
class LoweredStage:
    """A stage's program, and what each op costs on the first device under its split.

    The graph is the one that was lowered: with recompute, some ops stand there twice. `order` is
    that of the collectives, in the words of a plan.
    """

    graph: Graph
    program: Program
    splits: dict[str, Split]
    costs: dict[str, OpCost]
    order: str


def network_order(stage: Stage, recorded: str | None, num_devices: int) -> NetworkOrder:
    """The order of collectives that a plan lists; where it lists none, one is decided."""
    if recorded is None:
        return FillGaps(num_devices)
    return Recorded(recorded, stage.name)


def lower_stage(
    stage: Stage,
    graph: Graph,
    cluster: Cluster,
    most_devices: int = MAX_DRAWN,
    collectives: Collectives | None = None,
    execution: str = "graph",
) -> LoweredStage:
    """The program of a stage that holds the whole model and runs it once."""
    devices = drawn_devices(stage, cluster, most_devices)
    times = collectives or Collectives(cluster)
    part = None
    local, num_forward = stage, sum(op.phase == "forward" for op in graph.ops)
    if stage.checkpointing != "none" and graph.is_training:
        part = piece(graph, stage, 0, homes(graph, [stage]))
        local, graph = part.local(stage), part.graph
    context = context_of(local, graph, cluster, devices, times, 0, part, execution)
    recorded = None if stage.overlap is None else stage.overlap.order
    writer = Writer(context, network_order(stage, recorded, len(devices)))
    _write(writer, num_forward)
    program = writer.build({d: resident_bytes(writer, d) for d in devices})
    return LoweredStage(graph, program, writer.splits, writer.costs, writer.order.ended())


def _write(w: Writer, num_forward: int) -> None:
    """All ops in the graph's order, then the updates."""
    graph = w.context.graph
    ops = [op for op in graph.ops if op.phase != "update"]
    run_ops(w, ops[:num_forward], {})
    settle_outputs(w, graph.outputs)
    w.gathered.clear()  # what is gathered for the forward is not kept for the backward
    w.phase, w.reduces_now = Phase.BACKWARD, True
    run_ops(w, ops[num_forward:], {})
    flush_all(w)
    update_all(w)
