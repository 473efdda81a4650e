"""Joint: cut a chain of layers into stages, with devices, strategies, checkpointing and an order.

A model is a chain of n segments (layers, or parts of them). A solution chooses one of the space's
cells (a grouping of the devices, a number m of micro-batches), an order with v virtual stages on
each of the p groups, cuts of the chain into p v layer ranges, and for each range a strategy (mesh,
splits, ZeRO stage) and what of its activations is checkpointed. All figures are of one device of
the group and one micro-batch. Sums are over the segments of a range, e is EXPOSED:

    late(a, b) communication a that ends after the computing b beside it: max over k of 0,
               sum of a up to segment k - sum of b before k. A range has nothing beside which its
               first gather or its last reduction, both of its first segment, could be hidden
    waited     blocking + e overlapped
    seconds    none       waited + compute + late(overlapped, compute)
               selective  waited + e again_sent + c + late(overlapped + again_sent, c)
                          with c = compute + again
               full       waited + c + late(4/3 overlapped, c) with c = compute + forward
    tail       late(sync, compute - forward) + ends          once, at the end of a step
    own        seconds + tail / (m v)
    kept       static + tied parameters + k saved   with k micro-batches in flight; selective:
               again_saved; full: entering instead of saved
    moment     selective: max(saved - again_saved); full: max(saved); inference: max(entering)

A group holds the kept bytes of its ranges and the largest of their moments, within its budget. With
the seconds x of what crosses the first cut of each range (latency + bytes / m * s_per_byte), pace
from one micro-batch to the next, and h = 2 where weight gradients fill the bubble, else 1:

    fill       sum of own + 2 x
    pace       line, wave: the busiest group; looped: sum over rounds of the round's longest
    objective  m pace + (fill - pace) / h   for v = 1;   m pace + fill / (v h)   for v > 1

`cells` is the space: nothing outside of it is meant. Tables of a large model are mappings that
make their values when asked; `made` is the same problem with the cells whose tables are there,
which is what a file holds.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from partita import files
from partita.errors import InputError, ProblemError
from partita.units import size

FORMAT = "joint-problem"
Floats = npt.NDArray[np.float64]
EXPOSED = 0.03  # of the communication that may be overlapped, what is not
CHECKPOINTING = ("none", "selective", "full")
LAYOUTS = ("line", "looped", "wave")


class Cell(NamedTuple):
    """One part of the space: a grouping of the devices and a number of micro-batches."""

    grouping: int
    num_microbatches: int


class MeshShape(NamedTuple):
    """Sizes of a mesh's axes; `weights` give heterogeneous devices of a line unequal shares.

    Along the first axis of a mesh that `replicates` ZeRO shards nothing (HSDP).
    """

    sizes: tuple[int, ...]
    weights: tuple[int, ...] = ()
    replicates: bool = False

    def __str__(self) -> str:
        shape = "x".join(map(str, self.sizes))
        shape += " (replicas first)" if self.replicates else ""
        return f"{shape} ({':'.join(map(str, self.weights))})" if self.weights else shape


class TableKey(NamedTuple):
    """Strategies of groups that lie alike, made for so many micro-batches in flight."""

    pattern: int
    mesh: MeshShape
    num_microbatches: int
    in_flight: int


class FlightKey(NamedTuple):
    """A schedule (by its place in the record) on so many groups and micro-batches."""

    schedule: int
    num_groups: int
    num_microbatches: int


@dataclass(frozen=True, slots=True)
class Grouping:
    """The devices of every group in pipeline order, where they lie, and what they may hold."""

    devices: tuple[tuple[int, ...], ...]
    patterns: tuple[int, ...]  # groups of one pattern share their strategies
    budget_bytes: tuple[float, ...]
    latency_s: float = 0.0  # of a transfer from group to group
    s_per_byte: float = 0.0

    @property
    def num_groups(self) -> int:
        """How many groups there are."""
        return len(self.devices)


@dataclass(frozen=True, slots=True)
class JointSchedule:
    """An order with `virtual_stages` on each group; deferred: weight gradients run apart."""

    name: str
    virtual_stages: int = 1
    layout: str = "line"
    deferred: bool = False

    def group_of(self, stage: int, num_groups: int) -> int:
        """Which group runs a stage."""
        chunk, rank = divmod(stage, num_groups)
        return num_groups - 1 - rank if self.layout == "wave" and chunk % 2 else rank


@dataclass(frozen=True, slots=True)
class TiedBytes:
    """Bytes that a stage with segment `user` holds, unless it has segment `owner` too."""

    owner: int
    user: int
    size_bytes: float


@dataclass(frozen=True, slots=True, eq=False)
class JointStrategy:
    """One way to split all segments on a mesh: figures per kind of segment."""

    compute: Floats
    blocking: Floats
    overlapped: Floats
    sync: Floats
    ends: Floats
    forward: Floats
    static: Floats
    saved: Floats
    entering: Floats
    again: Floats
    again_sent: Floats
    again_saved: Floats
    tied: tuple[TiedBytes, ...] = ()
    selective: bool = False  # is there anything that selective checkpointing would not keep?
    replicated: bool = False  # are all parameters, gradients and states kept replicated?

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, JointStrategy):
            return NotImplemented
        plain = ("tied", "selective", "replicated")
        return all(getattr(self, name) == getattr(other, name) for name in plain) and all(
            np.array_equal(getattr(self, name), getattr(other, name)) for name in COLUMNS
        )

    __hash__ = None  # type: ignore[assignment]


COLUMNS = tuple(each.name for each in fields(JointStrategy) if each.type is Floats)


class StageChoice(NamedTuple):
    """One stage: its layer range, the mesh and strategy it runs with, what is checkpointed."""

    first: int
    end: int
    mesh: int
    strategy: int
    checkpointing: str


@dataclass(frozen=True, slots=True)
class JointSolution:
    """Everything decided; stages in the order of the chain."""

    cell: Cell
    schedule: int
    stages: tuple[StageChoice, ...]

    def to_json(self) -> dict[str, Any]:
        """As the `solution` of an answer."""
        return {
            "grouping": self.cell.grouping,
            "num_microbatches": self.cell.num_microbatches,
            "schedule": self.schedule,
            "stages": [stage._asdict() for stage in self.stages],
        }

    @classmethod
    def from_json(cls, value: object, file: str = "") -> "JointSolution":
        """Read what `to_json` wrote."""
        wire = files.convert(value, _JointSolutionWire, file)
        cell = Cell(wire.grouping, wire.num_microbatches)
        return cls(cell, wire.schedule, tuple(StageChoice(*stage) for stage in wire.stages))


class JointStageCost(NamedTuple):
    """What a layer range takes: seconds, once a step, bytes as kept, per micro-batch, for once."""

    seconds: float
    tail: float
    static: float
    saved: float
    moment: float


@dataclass(frozen=True)
class JointProblem:
    """The space (cells, schedules, checkpointing), and tables of what its plans cost."""

    batch: int
    training: bool
    segment_kind: tuple[int, ...]  # of each segment of the chain: its place in columns
    crossing_bytes: tuple[float, ...]  # before each segment, for the whole batch
    groupings: tuple[Grouping, ...]
    cells: tuple[Cell, ...]
    schedules: tuple[JointSchedule, ...]
    meshes: Mapping[tuple[int, int], tuple[MeshShape, ...]]  # by (pattern, micro-batches)
    strategies: Mapping[TableKey, tuple[JointStrategy, ...]] = field(repr=False)
    in_flight: Mapping[FlightKey, tuple[float, ...]] = field(repr=False)  # by group; (): refused
    checkpointing: tuple[str, ...] = CHECKPOINTING
    likely_stages: int = 1  # where to begin: so many that parameters and states fit well
    homogeneous: bool = True  # are all devices of one kind?
    name: str = ""
    constraints: str = ""  # what was asked for, in words

    def __post_init__(self) -> None:
        _check_record(self)

    @property
    def num_segments(self) -> int:
        """How many segments the chain has."""
        return len(self.segment_kind)

    def key(self, cell: Cell, group: int, mesh: MeshShape) -> TableKey:
        """Where the strategies of a group stand: those that lie alike share them."""
        grouping = self.groupings[cell.grouping]
        flight = rounded_in_flight(min(cell.num_microbatches, grouping.num_groups))
        return TableKey(grouping.patterns[group], mesh, cell.num_microbatches, flight)

    def meshes_of(self, cell: Cell, group: int) -> tuple[MeshShape, ...]:
        """The meshes that a group may form."""
        pattern = self.groupings[cell.grouping].patterns[group]
        return self.meshes.get((pattern, cell.num_microbatches), ())

    def options(self, strategy: JointStrategy) -> tuple[str, ...]:
        """What may be checkpointed with a strategy; where nothing is cheap, all is kept."""
        if not self.training:
            return ("none",)
        return tuple(
            each
            for each in self.checkpointing
            if each != "selective" or strategy.selective or "none" not in self.checkpointing
        )

    def send_s(self, cell: Cell) -> Floats:
        """Seconds to send what crosses the cut before each segment; nothing on one group."""
        grouping = self.groupings[cell.grouping]
        sizes = np.array(self.crossing_bytes, np.float64) / cell.num_microbatches
        if grouping.num_groups == 1:
            return np.zeros_like(sizes)
        send_s: Floats = grouping.latency_s + sizes * grouping.s_per_byte
        return send_s

    def space(self) -> str:
        """Which plans the problem speaks of, in words."""
        return space_text(self)

    def made(self) -> "JointProblem":
        """The same with the cells whose tables were made, as plain dicts: what can be saved."""
        tables, flights = dict(self.strategies.items()), dict(self.in_flight.items())
        cells = tuple(
            cell for cell in self.cells if all(key in tables for key in _keys(self, cell))
        )
        counts = {cell.num_microbatches for cell in cells}
        meshes = {key: own for key, own in self.meshes.items() if key[1] in counts}
        used = {key for cell in cells for key in _keys(self, cell)}
        left = {key: own for key, own in tables.items() if key in used}
        return replace(self, cells=cells, meshes=meshes, strategies=left, in_flight=flights)

    def to_json(self) -> dict[str, Any]:
        """As plain values: everything that was made."""
        return _to_wire(self.made())

    def __str__(self) -> str:
        return f"{self.num_segments} segments; {self.space()}"


def rounded_in_flight(count: int) -> int:
    """A power of two: numbers that are near share their strategies."""
    return 1 << max(0, count.bit_length() - 1)


def _keys(problem: JointProblem, cell: Cell) -> Iterator[TableKey]:
    for group in range(problem.groupings[cell.grouping].num_groups):
        for mesh in problem.meshes_of(cell, group):
            yield problem.key(cell, group, mesh)


def space_text(problem: JointProblem) -> str:
    """The numbers of stages and micro-batches, meshes, orders and checkpointing of a space."""
    if not problem.cells:
        return "no plans at all"
    groups = sorted({problem.groupings[cell.grouping].num_groups for cell in problem.cells})
    counts = sorted({cell.num_microbatches for cell in problem.cells})
    axes = max(len(mesh.sizes) for own in problem.meshes.values() for mesh in own)
    orders: dict[str, list[int]] = {}
    banned = problem.constraints.split(", ")
    for schedule in problem.schedules if groups[-1] > 1 else ():
        if f"not schedule={schedule.name}" in banned:
            continue  # it stands for one stage alone, which has nothing to order
        orders.setdefault(schedule.name, []).append(schedule.virtual_stages)
    named = [
        name if chunks == [1] else f"{name} with {_few(chunks)} virtual stages"
        for name, chunks in orders.items()
    ]
    parts = [
        f"{_few(groups)} {'stage' if groups == [1] else 'stages'} or groups of them",
        f"{_few(counts)} micro-batches",
        f"meshes of {'one axis' if axes == 1 else f'up to {axes} axes'}",
        *([_sharding_words(problem)] if problem.training else []),
        *([f"orders {', '.join(named)}"] if named else []),
        *([f"checkpointing {', '.join(problem.checkpointing)}"] if problem.training else []),
        *([f"with {problem.constraints}"] if problem.constraints else []),
    ]
    return "; ".join(parts)


def _sharding_words(problem: JointProblem) -> str:
    """Over which replicas ZeRO shards in a space: all, unless a shard group is pinned."""
    if any(mesh.replicates for own in problem.meshes.values() for mesh in own):
        return "ZeRO over pinned shard groups of replicas (HSDP)"
    return "ZeRO over all replicas (no HSDP)"


def _few(values: list[int]) -> str:
    """All of a few numbers; of many the first and the last."""
    unique = sorted(set(values))
    if len(unique) > 4:
        return f"{unique[0]} to {unique[-1]} ({len(unique)} numbers)"
    return ", ".join(map(str, unique[:-1])) + (" or " if unique[1:] else "") + str(unique[-1])


# What a solution costs.


def stage_cost(
    problem: JointProblem, strategy: JointStrategy, checkpointing: str, first: int, end: int
) -> JointStageCost:
    """The formulas of this module's text, for one layer range."""
    kinds = np.array(problem.segment_kind[first:end])

    def total(column: Floats) -> float:
        return float(column[kinds].sum())

    def beside(computing: Floats, sent: Floats) -> float:
        return total(computing) + _late(sent[kinds], computing[kinds])

    compute, overlapped = strategy.compute, strategy.overlapped
    waited = total(strategy.blocking) + EXPOSED * total(overlapped)
    static = total(strategy.static) + sum(
        tied.size_bytes for tied in strategy.tied if tied.owner < first <= tied.user < end
    )
    if not problem.training:
        moment = float(strategy.entering[kinds].max())
        return JointStageCost(waited + beside(compute, overlapped), 0.0, static, 0.0, moment)
    late = _late(strategy.sync[kinds], (compute - strategy.forward)[kinds])
    tail = late + total(strategy.ends)
    if checkpointing == "none":
        saved = total(strategy.saved)
        return JointStageCost(waited + beside(compute, overlapped), tail, static, saved, 0.0)
    if checkpointing == "selective":
        sent = strategy.again_sent
        seconds = waited + EXPOSED * total(sent)
        seconds += beside(compute + strategy.again, overlapped + sent)
        moment = float((strategy.saved - strategy.again_saved)[kinds].max())
        return JointStageCost(seconds, tail, static, total(strategy.again_saved), moment)
    seconds = waited + beside(compute + strategy.forward, overlapped)
    moment = float(strategy.saved[kinds].max())
    return JointStageCost(seconds, tail, static, total(strategy.entering), moment)


def _late(sent: Floats, computing: Floats) -> float:
    """Communication that ends after the computing beside it."""
    return max(0.0, float((np.cumsum(sent) - np.cumsum(computing) + computing).max()))


def check(problem: JointProblem, solution: JointSolution) -> tuple[str, ...]:
    """What is wrong with this solution, one sentence each; empty if nothing is."""
    cell = solution.cell
    if cell not in problem.cells:
        return (f"grouping {cell.grouping} with {cell.num_microbatches} micro-batches: no cell",)
    if not 0 <= solution.schedule < len(problem.schedules):
        return (f"there is no schedule {solution.schedule}",)
    grouping, schedule = problem.groupings[cell.grouping], problem.schedules[solution.schedule]
    flights = _flights(problem, solution)
    if not flights:
        count = f"{grouping.num_groups} groups and {cell.num_microbatches} micro-batches"
        return (f"{schedule.name} is not there for {count}",)
    wanted = grouping.num_groups * schedule.virtual_stages
    if len(solution.stages) != wanted:
        return (f"there are {len(solution.stages)} stages, and {wanted} are needed",)
    ends = [0, *(stage.end for stage in solution.stages)]
    wrong = [
        f"stage {k} has the layer range {stage.first} to {stage.end}, after {before}"
        for k, (stage, before) in enumerate(zip(solution.stages, ends, strict=False))
        if stage.first != before or stage.end <= stage.first
    ]
    if not wrong and ends[-1] != problem.num_segments:
        wrong = [f"the stages end at {ends[-1]} of {problem.num_segments} segments"]
    wrong += _wrong_choices(problem, solution)
    return tuple(wrong) or _over_budget(problem, solution)


def _wrong_choices(problem: JointProblem, solution: JointSolution) -> list[str]:
    wrong = []
    for k, stage in enumerate(solution.stages):
        known = _strategies(problem, solution, k)
        if not 0 <= stage.strategy < len(known):
            wrong.append(f"stage {k} has no strategy {stage.strategy} on its mesh {stage.mesh}")
        elif stage.checkpointing not in problem.options(known[stage.strategy]):
            wrong.append(f"stage {k} may not have checkpointing {stage.checkpointing!r}")
    return wrong


def _strategies(
    problem: JointProblem, solution: JointSolution, k: int
) -> tuple[JointStrategy, ...]:
    grouping, schedule = problem.groupings[solution.cell.grouping], solution.schedule
    group = problem.schedules[schedule].group_of(k, grouping.num_groups)
    meshes, mesh = problem.meshes_of(solution.cell, group), solution.stages[k].mesh
    if not 0 <= mesh < len(meshes):
        return ()
    return problem.strategies[problem.key(solution.cell, group, meshes[mesh])]


def strategy_of(problem: JointProblem, solution: JointSolution, k: int) -> JointStrategy:
    """The strategy of a stage."""
    return _strategies(problem, solution, k)[solution.stages[k].strategy]


def stage_costs(problem: JointProblem, solution: JointSolution) -> list[JointStageCost]:
    """What every stage takes."""
    return [
        stage_cost(
            problem, strategy_of(problem, solution, k), stage.checkpointing, stage.first, stage.end
        )
        for k, stage in enumerate(solution.stages)
    ]


def _flights(problem: JointProblem, solution: JointSolution) -> tuple[float, ...]:
    num_groups = problem.groupings[solution.cell.grouping].num_groups
    key = FlightKey(solution.schedule, num_groups, solution.cell.num_microbatches)
    return problem.in_flight.get(key, ())


def group_bytes(problem: JointProblem, solution: JointSolution) -> list[float]:
    """What a device of every group holds."""
    grouping, schedule = (
        problem.groupings[solution.cell.grouping],
        problem.schedules[solution.schedule],
    )
    flights, p = _flights(problem, solution), grouping.num_groups
    kept, moment = [0.0] * p, [0.0] * p
    for k, cost in enumerate(stage_costs(problem, solution)):
        group = schedule.group_of(k, p)
        kept[group] += cost.static + flights[group] * cost.saved
        moment[group] = max(moment[group], cost.moment)
    return [own + once for own, once in zip(kept, moment, strict=True)]


def _over_budget(problem: JointProblem, solution: JointSolution) -> tuple[str, ...]:
    budgets = problem.groupings[solution.cell.grouping].budget_bytes
    held = group_bytes(problem, solution)
    return tuple(
        f"group {group} holds {size(needed)} and has {size(budget)}"
        for group, (needed, budget) in enumerate(zip(held, budgets, strict=True))
        if needed > budget * (1 + 1e-12)
    )


def pace_s(schedule: JointSchedule, num_groups: int, own: Floats) -> float:
    """Seconds from one micro-batch to the next, if no group waits for anything else."""
    if schedule.layout == "looped":
        return float(own.reshape(-1, num_groups).max(axis=1).sum())
    groups = [schedule.group_of(k, num_groups) for k in range(len(own))]
    return float(np.bincount(groups, weights=own, minlength=num_groups).max())


def estimate_s(
    schedule: JointSchedule, num_groups: int, num_microbatches: int, own: Floats, sent_s: float
) -> float:
    """The objective, from the own seconds of every stage and what all cuts send."""
    pace, fill = pace_s(schedule, num_groups, own), float(own.sum()) + 2 * sent_s
    bubble_parts = schedule.virtual_stages * (2 if schedule.deferred else 1)
    once = pace if schedule.virtual_stages == 1 else 0.0
    return num_microbatches * pace + (fill - once) / bubble_parts


def evaluate(problem: JointProblem, solution: JointSolution) -> float:
    """The objective of a valid solution: seconds of a step."""
    violations = check(problem, solution)
    if violations:
        raise ProblemError(violations[0], fix="give a valid solution", field="solution")
    return objective_s(problem, solution)


def objective_s(problem: JointProblem, solution: JointSolution) -> float:
    """The same without a check."""
    cell, schedule = solution.cell, problem.schedules[solution.schedule]
    times = cell.num_microbatches * schedule.virtual_stages
    own = np.array([cost.seconds + cost.tail / times for cost in stage_costs(problem, solution)])
    sends = problem.send_s(cell)
    sent = float(sum(sends[stage.first] for stage in solution.stages))
    num_groups = problem.groupings[cell.grouping].num_groups
    return estimate_s(schedule, num_groups, cell.num_microbatches, own, sent)


def cell_bound(problem: JointProblem, cell: Cell) -> float:
    """No solution of a cell is below: each segment runs on some group, all are busy m times.

    With weights of the groups that add up to 1, and each segment on the group where it is least;
    weights make all groups about equally busy. Infinite where a group has no strategy.
    """
    rows = []
    for group in range(problem.groupings[cell.grouping].num_groups):
        known = [
            strategy
            for mesh in problem.meshes_of(cell, group)
            for strategy in problem.strategies[problem.key(cell, group, mesh)]
        ]
        if not known:
            return math.inf
        rows.append(
            np.min([s.compute + s.blocking + EXPOSED * s.overlapped for s in known], axis=0)
        )
    kinds = np.array(problem.segment_kind)
    times = np.array(rows)[:, kinds]
    speeds = 1 / np.maximum(times.sum(axis=1), 1e-30)
    weights = speeds / speeds.sum()
    least = float((weights[:, None] * times).min(axis=0).sum())
    return cell.num_microbatches * least * (1 - 1e-12)


def lower_bound(problem: JointProblem) -> float:
    """A cheap bound that no valid solution goes below: the least of all cells'."""
    return min((cell_bound(problem, cell) for cell in problem.cells), default=0.0)


# Files.


@dataclass(frozen=True, slots=True)
class _TableWire:
    pattern: int
    mesh: tuple[int, ...]
    num_microbatches: int
    in_flight: int
    strategies: tuple[dict[str, Any], ...]
    weights: tuple[int, ...] = ()
    replicates: bool = False


@dataclass(frozen=True, slots=True)
class _FlightWire:
    schedule: int
    num_groups: int
    num_microbatches: int
    in_flight: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class _StrategyWire:
    compute: tuple[float, ...]
    blocking: tuple[float, ...]
    overlapped: tuple[float, ...]
    sync: tuple[float, ...]
    ends: tuple[float, ...]
    forward: tuple[float, ...]
    static: tuple[float, ...]
    saved: tuple[float, ...]
    entering: tuple[float, ...]
    again: tuple[float, ...]
    again_sent: tuple[float, ...]
    again_saved: tuple[float, ...]
    tied: tuple[TiedBytes, ...] = ()
    selective: bool = False
    replicated: bool = False


@dataclass(frozen=True, slots=True)
class _StageWire:
    first: int
    end: int
    mesh: int
    strategy: int
    checkpointing: str

    def __iter__(self) -> Iterator[Any]:
        return iter((self.first, self.end, self.mesh, self.strategy, self.checkpointing))


@dataclass(frozen=True, slots=True)
class _JointSolutionWire:
    grouping: int
    num_microbatches: int
    schedule: int
    stages: tuple[_StageWire, ...]


@dataclass(frozen=True, slots=True)
class _JointWire:
    batch: int
    training: bool
    segment_kind: tuple[int, ...]
    crossing_bytes: tuple[float, ...]
    groupings: tuple[Grouping, ...]
    cells: tuple[tuple[int, int], ...]
    schedules: tuple[JointSchedule, ...]
    tables: tuple[_TableWire, ...]
    flights: tuple[_FlightWire, ...]
    checkpointing: tuple[str, ...] = CHECKPOINTING
    likely_stages: int = 1
    homogeneous: bool = True
    name: str = ""
    constraints: str = ""


def _to_wire(problem: JointProblem) -> dict[str, Any]:
    plain = ("batch", "training", "checkpointing", "likely_stages", "homogeneous", "name")
    shared = ("constraints", "segment_kind", "crossing_bytes", "groupings", "cells", "schedules")
    return {
        "format": f"partita/{FORMAT}@1",
        **{name: getattr(problem, name) for name in (*plain, *shared)},
        "tables": [
            {
                "pattern": key.pattern,
                "mesh": key.mesh.sizes,
                "weights": key.mesh.weights,
                "replicates": key.mesh.replicates,
                "num_microbatches": key.num_microbatches,
                "in_flight": key.in_flight,
                "strategies": [_strategy_json(each) for each in own],
            }
            for key, own in problem.strategies.items()
        ],
        "flights": [{**key._asdict(), "in_flight": own} for key, own in problem.in_flight.items()],
    }


def _strategy_json(strategy: JointStrategy) -> dict[str, Any]:
    value: dict[str, Any] = {name: getattr(strategy, name).tolist() for name in COLUMNS}
    value["tied"] = strategy.tied
    return value | {"selective": strategy.selective, "replicated": strategy.replicated}


def read(path: str | Path) -> JointProblem:
    """Read a problem from JSON."""
    return from_json(files.decode_json(files.read_bytes(path), str(path)), str(path))


def from_json(value: dict[str, Any], file: str = "") -> JointProblem:
    """A problem from plain values."""
    files.check_format(value, FORMAT, 1, file)
    wire = files.convert(value, _JointWire, file)
    strategies: dict[TableKey, tuple[JointStrategy, ...]] = {}
    meshes: dict[tuple[int, int], tuple[MeshShape, ...]] = {}
    for table in wire.tables:
        shape = MeshShape(table.mesh, table.weights, table.replicates)
        key = TableKey(table.pattern, shape, table.num_microbatches, table.in_flight)
        strategies[key] = tuple(_strategy(each, file) for each in table.strategies)
        place = (table.pattern, table.num_microbatches)
        meshes[place] = tuple(dict.fromkeys((*meshes.get(place, ()), shape)))
    flights = {
        FlightKey(each.schedule, each.num_groups, each.num_microbatches): each.in_flight
        for each in wire.flights
    }
    try:
        return JointProblem(
            wire.batch, wire.training, wire.segment_kind, wire.crossing_bytes, wire.groupings,
            tuple(Cell(*cell) for cell in wire.cells), wire.schedules, meshes, strategies, flights,
            wire.checkpointing, wire.likely_stages, wire.homogeneous, wire.name, wire.constraints,
        )  # fmt: skip
    except InputError as error:
        raise error.within(file) from None


def _strategy(value: dict[str, Any], file: str) -> JointStrategy:
    wire = files.convert(value, _StrategyWire, file)
    columns = {name: np.array(getattr(wire, name), np.float64) for name in COLUMNS}
    return JointStrategy(
        **columns, tied=wire.tied, selective=wire.selective, replicated=wire.replicated
    )


def _check_record(problem: JointProblem) -> None:
    """Refuse what does not hang together; tables that are made later are not asked for."""
    n, kinds = problem.num_segments, problem.segment_kind
    _need(n > 0 and min(kinds, default=-1) >= 0, "segment_kind", "names no segments", "one each")
    _need(
        len(problem.crossing_bytes) == n and _plain(problem.crossing_bytes),
        "crossing_bytes", f"has {len(problem.crossing_bytes)} entries for {n} segments",
        "give bytes of at least 0, one for each segment",
    )  # fmt: skip
    for k, grouping in enumerate(problem.groupings):
        p = grouping.num_groups
        _need(
            p > 0 and len(grouping.patterns) == len(grouping.budget_bytes) == p,
            f"groupings[{k}]", "has groups without a pattern or a budget", "give each group both",
        )  # fmt: skip
        _need(
            _plain((grouping.latency_s, grouping.s_per_byte)) and all(grouping.devices),
            f"groupings[{k}]", "has no devices or times below 0", "at least one device, times >= 0",
        )  # fmt: skip
    for cell in problem.cells:
        _need(
            0 <= cell.grouping < len(problem.groupings) and cell.num_microbatches > 0,
            "cells", f"holds {tuple(cell)}", "name a grouping and at least 1 micro-batch",
        )  # fmt: skip
    for k, schedule in enumerate(problem.schedules):
        _need(
            schedule.virtual_stages > 0 and schedule.layout in LAYOUTS,
            f"schedules[{k}]", f"has the layout {schedule.layout!r}", f"use {', '.join(LAYOUTS)}",
        )  # fmt: skip
    _need(
        bool(problem.checkpointing) and set(problem.checkpointing) <= set(CHECKPOINTING),
        "checkpointing", f"is {list(problem.checkpointing)}", f"use {', '.join(CHECKPOINTING)}",
    )  # fmt: skip
    if isinstance(problem.strategies, dict):
        _check_tables(problem)


def _check_tables(problem: JointProblem) -> None:
    """Tables that are all there: each cell has its own, each column a figure for each kind."""
    for cell in problem.cells:
        missing = {key for key in _keys(problem, cell) if key not in problem.strategies}
        _need(
            not missing, "tables",
            f"lacks {len(missing)} of grouping {cell.grouping} x {cell.num_microbatches}",
            "give the strategies of every mesh, or leave the cell out",
        )  # fmt: skip
    most = max(problem.segment_kind) + 1
    for key, own in problem.strategies.items():
        for strategy in own:
            good = all(
                len(column) >= most and np.isfinite(column).all() and (column >= 0).all()
                for column in (getattr(strategy, name) for name in COLUMNS)
            )
            _need(
                good, "tables", f"mesh {key.mesh}: a column is short, or below 0",
                f"give {most} figures of at least 0 in each",
            )  # fmt: skip


def _plain(values: tuple[float, ...]) -> bool:
    return all(0 <= value < math.inf for value in values)


def _need(good: bool, field_name: str, wrong: str, fix: str) -> None:
    if not good:
        raise ProblemError(wrong, fix=fix, field=field_name)
