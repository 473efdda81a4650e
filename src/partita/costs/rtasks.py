"""A graph as an rTasks problem: every op cut into tiles for the execution units of one GPU.

A unit has its share of the arithmetic and of the cache's bandwidth, and no launches: the roofline
of such a small device gives the time t of the whole op on one unit. Cut into n tiles,

    tile = TILE_US + t / n

for n from a quarter of the units up to twice as many, as far as the op has rows for. Views cost
nothing and are left out, their readers read through them. Ops of an unknown kind have no tiles:
they stay outside as fallbacks, are named, and count as one tile each. Elementwise ops of one shape
need only the aligned tiles of each other, everything else all of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from partita.cluster import DeviceKind
from partita.costs.roofline import op_cost
from partita.errors import ProblemError
from partita.graph.record import Graph, Op
from partita.graph.shapes import SHAPES
from partita.problems.rtasks import ROperator, RtasksProblem, TileEdge, Tiling, VDevice

TILE_US = 0.8  # starting a tile: its row of the table, its first loads (H200)
SIGNAL_US = 0.8  # a release on one unit seen by an acquire on another (H200)
SLOTS = 2  # programs a unit holds, if nothing is known of their registers
VIEWS = frozenset({"reshape", "slice", "split", "transpose", "expand", "constant"})


@dataclass(frozen=True)
class RtasksModel:
    """The problem, the op behind each operator, and the ops that have no tiles."""

    problem: RtasksProblem
    ops: tuple[str, ...]
    fallbacks: tuple[str, ...]
    unfused_s: float  # the ops as kernels of their own, one after the other


def rtasks_model(graph: Graph, device: DeviceKind) -> RtasksModel:
    """The rTasks problem of a forward graph on one device."""
    if graph.is_training:
        raise ProblemError("the graph has a backward", fix="give an inference graph")
    ops = [op for op in graph.ops if op.kind not in VIEWS]
    if not ops:
        raise ProblemError(f"{graph.name!r} computes nothing", fix="give a graph with ops")
    number = {op.name: index for index, op in enumerate(ops)}
    unit = _unit(device)
    operators = tuple(ROperator(op.name, _tilings(graph, op, unit, device)) for op in ops)
    edges = {
        TileEdge(number[source], number[op.name], _aligned(graph, source, op))
        for op in ops
        for source in _makers(graph, op)
    }
    problem = RtasksProblem(
        VDevice(device.num_units, SLOTS, signal_us=SIGNAL_US),
        operators,
        tuple(sorted(edges, key=lambda edge: (edge.src, edge.dst))),
        graph.name,
    )
    fallbacks = tuple(op.name for op in ops if op.kind not in SHAPES)
    unfused = sum(op_cost(graph, op, device).seconds for op in ops)
    return RtasksModel(problem, tuple(op.name for op in ops), fallbacks, unfused)


def side_by_side(models: Sequence[RtasksModel]) -> RtasksModel:
    """Several models in one program: their operators beside each other, named by model."""
    if len(models) == 1:
        return models[0]
    operators: list[ROperator] = []
    edges: list[TileEdge] = []
    ops: list[str] = []
    fallbacks: list[str] = []
    for index, model in enumerate(models):
        first, prefix = len(operators), f"{index}:{model.problem.name}/"
        operators += [replace(o, name=prefix + o.name) for o in model.problem.operators]
        edges += [replace(e, src=e.src + first, dst=e.dst + first) for e in model.problem.edges]
        ops += [prefix + name for name in model.ops]
        fallbacks += [prefix + name for name in model.fallbacks]
    problem = RtasksProblem(
        models[0].problem.device,
        tuple(operators),
        tuple(edges),
        " + ".join(model.problem.name for model in models),
    )
    unfused = sum(model.unfused_s for model in models)
    return RtasksModel(problem, tuple(ops), tuple(fallbacks), unfused)


def _unit(device: DeviceKind) -> DeviceKind:
    """One unit as a device: what is read again and again lies in the cache that all share."""
    rate = max(device.cache_bytes_per_s, device.memory_bytes_per_s) / device.num_units
    return replace(
        device,
        name=f"a unit of {device.name}",
        flops_per_s=tuple((dtype, peak / device.num_units) for dtype, peak in device.flops_per_s),
        memory_bytes_per_s=rate,
        cache_bytes=0,
        cache_bytes_per_s=0.0,
        launch_s=0.0,
        num_units=1,
    )


def _tilings(graph: Graph, op: Op, unit: DeviceKind, device: DeviceKind) -> tuple[Tiling, ...]:
    whole_us = op_cost(graph, op, unit).seconds * 1e6
    if op.kind not in SHAPES:
        return (Tiling(1, TILE_US + max(whole_us / device.num_units, 1.0)),)
    rows = max(graph.tensor(name).num_elements for name in op.outputs)
    wanted = {1, *(max(1, device.num_units * part // 4) for part in (1, 2, 4, 8))}
    counts = sorted({min(rows, count) for count in wanted})
    return tuple(Tiling(count, TILE_US + whole_us / count) for count in counts)


def _makers(graph: Graph, op: Op) -> list[str]:
    """The ops that make what an op reads, seen through views."""
    makers, open_tensors = [], list(op.inputs)
    while open_tensors:
        source = graph.producer(open_tensors.pop())
        if source is None:
            continue
        if source.kind in VIEWS:
            open_tensors += source.inputs
        else:
            makers.append(source.name)
    return sorted(set(makers))


def _aligned(graph: Graph, source: str, op: Op) -> bool:
    maker = graph.op(source)
    if op.kind != "elementwise" or not set(maker.outputs) & set(op.inputs):
        return False
    shapes = {graph.tensor(name).shape for name in (*maker.outputs, *op.outputs)}
    return len(shapes) == 1 and op.attr("fn") != "rope"
