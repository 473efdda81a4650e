"""Drafts of plans: the best cuts for given groups of devices and a number of micro-batches.

The model is a chain of segments with its repeats folded (`graph.chain`). For each mesh shape of a
group of devices and each micro-batch size, the sharding problem of the folded graph is solved for a
few prices on bytes (`costs.segments`); groups that lie alike in the cluster share the answers. The
cuts then choose, stage by stage, shape, splits and recompute under the memory that is left
(`cuts`). A draft carries an estimate; what it really takes is for the simulator to say.
"""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from partita.cluster import Cluster
from partita.costs.collectives import Collectives
from partita.costs.memory import model_memory, workspace_bytes
from partita.costs.patterns import Patterns
from partita.costs.segments import PRICES, MeshWays, Way
from partita.costs.sharding import LEVELS
from partita.graph.backward import training_graph
from partita.graph.chain import Chain, Folded, chain_of, folded
from partita.graph.rebatch import batch_of, rebatch
from partita.graph.record import Graph
from partita.plans import Mesh, Schedule, Stage
from partita.problems.sharding import ShardingProblem
from partita.schedules.named import NAMED
from partita.search.base import Status, Stop
from partita.search.joint.bounds import Bound
from partita.search.joint.cuts import (
    Cuts,
    best_cuts,
)
from partita.search.joint.least import Least
from partita.search.joint.meshes import Arrangement, divisors, mesh_of, mesh_shapes
from partita.search.joint.tables import Option, Table, table_of
from partita.search.joint.turns import Turns
from partita.search.sharding import SEARCHES

Floats = npt.NDArray[np.float64]
Allow = Callable[[str, object], bool]

MOST_COUNTS = 3  # numbers of micro-batches tried for a number of stages; on large clusters 2
LARGE = 128  # devices
DEEPEST = 64  # micro-batches per stage at most
CLOSE = 1e-5  # splits so near to the best are good enough to draft with
MOST_SWEEPS = 400  # of the sharding search for one mesh and price; most need a few
PER_STAGE = 4  # micro-batches, where there is a choice
COPIES = ("none",)  # parameters are kept in no other way
SAMPLES = (1, 2, 4, 8)  # per data-parallel share of a micro-batch
FINEST = 200  # segments: the more, the more evenly stages can be cut, and the slower
WAITING = 0.25  # of the activations: the gradients that are kept for weight gradients
CHANGES = {"F": 1.0, "B": -1.0, "I": WAITING, "W": -1.0 - WAITING}
ROOM = 0.94  # of the memory, before what is live only for a moment is known


@dataclass(frozen=True)
class Draft:
    """A plan on paper: stages, schedule, an estimate of the step."""

    stages: tuple[Stage, ...]
    schedule: Schedule
    estimate_s: float
    arrangement: Arrangement
    room: float = ROOM
    chunks: int = 1
    ideal_s: float = 0.0  # the busiest group, if it never had to wait
    light: bool = True  # may stages be recomputed lightly?


@dataclass
class Drafting:
    """Makes drafts for one model on one cluster, and remembers what they share."""

    graph: Graph
    optimizer: str
    cluster: Cluster
    collectives: Collectives
    allow: Allow
    levels: tuple[str, ...] = LEVELS
    max_memory: float = math.inf
    interrupted: Callable[[], bool] = field(default=lambda: False)
    chain: Chain = field(init=False)
    fold: Folded = field(init=False)

    def __post_init__(self) -> None:
        self.batch = batch_of(self.graph)
        self.training = self.graph.is_training
        self.chain = chain_of(self.graph, FINEST, FINEST)
        self.fold = folded(self.chain)
        short = self.fold.graph
        self.base = training_graph(short, self.optimizer) if self.training else short
        self.patterns = Patterns.of(self.cluster)
        self.search = next(iter(SEARCHES.values()))
        self._graphs: dict[int, Graph] = {}
        self.floor = Least(self.fold, self.cluster, self.training, self.micro, self._room)
        self._ways: dict[tuple[object, ...], MeshWays] = {}
        self._tables: dict[tuple[object, ...], Table | None] = {}

    # What is tried.

    def counts(self, arrangement: Arrangement) -> list[int]:
        """Numbers of micro-batches worth trying: shares of one, two, ... samples on some shape."""
        stages = arrangement.num_stages
        found: set[int] = set()
        for size in {len(group) for group in arrangement.groups}:
            for shape in mesh_shapes(size, self.patterns.inner_size):
                for ways in {shape[0], size}:
                    for samples in SAMPLES:
                        count, rest = divmod(self.batch, ways * samples)
                        if not rest and count:
                            found.add(count)
        if stages == 1 or not found:
            found |= {d for d in divisors(self.batch) if d <= 8}
        good = [
            count
            for count in sorted(found)
            if self.allow("microbatches", count) and count <= DEEPEST * stages
            and (count >= stages or stages == 1 or count == max(found))
        ]  # fmt: skip
        pinned = self.every_count(1)
        if not good:
            good = pinned[:1] if len(pinned) == 1 else []
        most = MOST_COUNTS if self.cluster.num_devices <= LARGE else MOST_COUNTS - 1
        if len(good) <= most:
            return good
        wanted = wanted_count(stages)
        ranked = sorted(good, key=lambda c: (abs(math.log2(c / wanted)), c))
        return sorted(ranked[:most])

    def every_count(self, num_stages: int) -> list[int]:
        """All numbers of micro-batches that may be, some for each stage."""
        return [
            count
            for count in divisors(self.batch)
            if self.allow("microbatches", count) and count >= min(num_stages, self.batch)
        ]

    # A draft.

    def draft(
        self,
        arrangement: Arrangement,
        num_microbatches: int,
        *,
        room: float = ROOM,
        chunks: int = 1,
        schedule: str = "1f1b",
        light: bool = True,
    ) -> Draft | None:
        """The best cuts for these devices; None where nothing fits.

        With `chunks` every group of devices holds so many stages and takes turns with them.
        """
        p, m = arrangement.num_stages, num_microbatches
        stages = p * chunks
        if stages > self.chain.num_segments:
            return None
        groups = [arrangement.groups[self._rank(s, p, schedule)] for s in range(stages)]
        tables = [self._table(group, m, min(m, p)) for group in groups]
        if any(table is None for table in tables):
            return None
        known = [table for table in tables if table is not None]
        if not light:
            known = [table.without_light for table in known if table.without_light is not None]
            if len(known) < len(tables):
                return None
        ranks = [self._rank(s, p, schedule) for s in range(stages)]
        held = in_flight(schedule, p, chunks, m) if self.training else (1.0,) * p
        own, flights = [table.stretches for table in known], [held[rank] for rank in ranks]
        rooms = [self._room(group) * room for group in groups[:p]]
        sends = self._sends(groups, m)
        if chunks == 1:
            cuts = best_cuts(own, flights, rooms, sends, m)
        else:
            looped = NAMED[schedule].layout == "looped"
            cuts = Turns(own, flights, ranks, rooms, sends, m, looped).best()
        if cuts is None:
            return None
        found = tuple(
            self._stage(s, groups[s], known[s].options[way], start, end)
            for s, (start, end, way) in enumerate(cuts.stages)
        )
        estimate = self._estimate(cuts, schedule, chunks, m)
        ideal = m * chunks * cuts.bottleneck_s
        plan = Schedule(schedule, m)
        return Draft(found, plan, estimate, arrangement, room, chunks, ideal, light)

    def on_each_mesh(
        self,
        arrangement: Arrangement,
        num_microbatches: int,
        meshes: Sequence[Mesh] | None = None,
    ) -> Iterator[Draft]:
        """Of a single stage, the best draft on each mesh where something fits: given ones, or all
        shapes."""
        (group,), m = arrangement.groups, num_microbatches
        room = self._room(group) * ROOM
        asked = self._meshes(group, m, 1)
        if meshes is not None:
            asked = [self.ways(mesh, m, 1) for mesh in meshes]
        if self._copies_fit(room) and len(self.levels) > 1:  # then splits without shares differ
            asked += [replace(ways, levels=COPIES, prices=PRICES[:1]) for ways in asked]
        for ways in asked:
            table = table_of([ways], self.training, self.allow)
            if table is None:
                continue
            known = table.stretches
            seconds = m * known.seconds[:, 0, -1] + known.tail[:, 0, -1]
            held = (known.static + known.saved + known.transient)[:, 0, -1]
            seconds[held > room] = np.inf
            best = int(seconds.argmin())
            if np.isfinite(seconds[best]):
                option, devices = table.options[best], ways.mesh.devices
                stage = self._stage(0, devices, option, 0, self.chain.num_segments)
                estimate = float(seconds[best])
                plan = Schedule("1f1b", m)
                yield Draft((stage,), plan, estimate, arrangement, ideal_s=estimate)

    def _copies_fit(self, room: float) -> bool:
        """May every device hold all parameters, gradients and states, and as much again?"""
        memory = model_memory(self.graph)
        return 2 * (memory.parameters + memory.gradients + memory.states) <= room

    def bound(self, arrangement: Arrangement, num_microbatches: int) -> Bound | None:
        """What no plan with these groups and so many micro-batches is below; None: no such plan."""
        meshes = self._all_meshes(arrangement, num_microbatches)
        if not meshes:
            return None
        room = max(map(self._room, arrangement.groups))
        return Bound(meshes, arrangement.num_stages, num_microbatches, room, self.training)

    def least_compute_s(self, arrangement: Arrangement, num_microbatches: int) -> float:
        """A lower bound that counts nothing but computing, found at once.

        With seconds t_r of every segment on group r and weights of the groups that add up to 1,
        no step is below the sum over segments of min_r weight_r t_r: each segment runs somewhere.
        """
        flight = min(num_microbatches, arrangement.num_stages)
        rows = []
        for group in arrangement.groups:
            meshes = self._meshes(group, num_microbatches, flight)
            if not meshes:
                return 0.0
            rows.append(np.min([ways.least_compute for ways in meshes], axis=0))
        speeds = np.array([1 / max(float(row.sum()), 1e-30) for row in rows])
        weights = speeds / speeds.sum()  # so that all groups are about equally busy
        return float((weights[:, None] * np.array(rows)).min(axis=0).sum())

    def _all_meshes(self, arrangement: Arrangement, m: int) -> list[MeshWays]:
        """The meshes of all groups of devices, those that lie alike once."""
        flight = min(m, arrangement.num_stages)
        found = [self._meshes(group, m, flight) for group in arrangement.groups]
        if not all(found):
            return []
        return list({id(ways): ways for own in found for ways in own}.values())

    def least_bytes(self, arrangement: Arrangement, num_microbatches: int) -> float:
        """Roughly what a device must hold at the thriftiest."""
        group = arrangement.groups[0]
        table = self._table(group, num_microbatches, min(num_microbatches, arrangement.num_stages))
        if table is None:
            return math.inf
        held = (table.stretches.static + table.stretches.saved + table.stretches.transient)[
            :, 0, -1
        ]
        return float(held.min()) / arrangement.num_stages + workspace_bytes(
            self.cluster.kind_of(group[0])
        )

    def micro(self, m: int) -> Graph:
        """The folded graph for one of m micro-batches."""
        if m not in self._graphs:
            self._graphs[m] = rebatch(self.base, self.batch // m)
        return self._graphs[m]

    def _estimate(self, cuts: Cuts, schedule: str, chunks: int, m: int) -> float:
        if chunks == 1:
            return cuts.step_s
        fill = cuts.step_s - (m - 1) * cuts.bottleneck_s
        hidden = 2 if NAMED[schedule].split else 1  # weight gradients fill about half of the wait
        return m * cuts.bottleneck_s * chunks + fill / chunks / hidden

    @staticmethod
    def _rank(stage: int, p: int, schedule: str) -> int:
        chunk, rank = divmod(stage, p)
        return p - 1 - rank if schedule in ("zb-v", "dualpipe-v") and chunk % 2 else rank

    def _room(self, group: Sequence[int]) -> float:
        kinds = {self.cluster.devices[device].kind: device for device in group}
        found = (self.cluster.kind_of(device) for device in kinds.values())
        return min(min(k.memory_bytes, self.max_memory) - workspace_bytes(k) for k in found)

    def _sends(self, groups: Sequence[Sequence[int]], m: int) -> Floats:
        """Seconds to send what crosses each cut, each device its part, between two groups."""
        sizes = np.array(self.chain.crossing_bytes, np.float64) / m
        if len(groups) == 1:
            return np.zeros_like(sizes)
        small = min(len(groups[0]), len(groups[1]))
        pairs = tuple(zip(groups[0][:small], groups[1][:small], strict=True))
        none, some = self.collectives.exchange(0.0, pairs), self.collectives.exchange(1e6, pairs)
        return none + sizes / small * (some - none) / 1e6

    def _stage(self, number: int, group: Sequence[int], option: Option, a: int, b: int) -> Stage:
        segments = self.chain.segments[a:b]
        ops = [name for segment in segments for name in segment.ops]
        whole = option.recompute == "yes"
        kept = tuple(segment.ops[0] for segment in segments[1:]) if whole else ()
        again = self._again(option.way, ops) if option.recompute == "light" else ()
        mesh = Mesh(option.way.mesh.axes, tuple(group))
        splits = option.way.splits(ops, self.fold)
        return Stage(f"stage{number}", mesh, splits, whole, kept, again)

    def _again(self, way: Way, ops: Sequence[str]) -> tuple[str, ...]:
        """The ops of a stage that light recompute runs again: for gradients of this stage."""
        found: set[str] = set()
        mine = set(ops)
        for op in reversed(ops):
            readers, users = self.readers[op]
            if self.fold.op_like[op] in way.again and (readers & mine or users & found):
                found.add(op)
        return tuple(op for op in ops if op in found)

    @functools.cached_property
    def readers(self) -> dict[str, tuple[set[str], set[str]]]:
        """Per op the ops whose gradients read what it makes, and those that read it themselves."""
        found: dict[str, tuple[set[str], set[str]]] = {}
        for op in self.graph.ops:
            if op.phase == "forward":
                users = [user for name in op.outputs for user in self.graph.consumers(name)]
                found[op.name] = (
                    {user.forward for user in users if user.forward},
                    {user.name for user in users if user.phase == "forward"},
                )
        return found

    # Tables.

    def _table(self, group: Sequence[int], m: int, in_flight: int) -> Table | None:
        """Every way to run every stretch of segments on a group, for one micro-batch size."""
        key = (self.patterns.pattern(group), m, _rounded(in_flight))
        if key not in self._tables:
            self._tables[key] = table_of(
                self._meshes(group, m, in_flight), self.training, self.allow
            )
        return self._tables[key]

    def _meshes(self, group: Sequence[int], m: int, in_flight: int) -> list[MeshWays]:
        flight = _rounded(in_flight)
        return [
            self.ways(mesh_of(shape, group), m, flight) for shape in self._shapes(len(group), m)
        ]

    def _shapes(self, size: int, m: int) -> list[tuple[int, ...]]:
        """The shapes of a group's mesh; of many devices, those that the samples reach."""
        allowed = [s for s in mesh_shapes(size, self.patterns.inner_size) if self.allow("mesh", s)]
        if self.cluster.num_devices <= LARGE:
            return allowed
        reached = [shape for shape in allowed if shape[0] <= self.batch // m]
        return reached or allowed

    def ways(self, mesh: Mesh, m: int, in_flight: int) -> MeshWays:
        """The answers on one mesh, shared by all that lie alike."""
        key = (mesh.axes, self.patterns.pattern(mesh.devices), m, in_flight)
        if key not in self._ways:
            self._ways[key] = MeshWays(
                self.micro(m), self.chain, self.fold, self.cluster, mesh, m, in_flight,
                self._solve, self._prove, self.collectives, PRICES if self.training else PRICES[:3],
                self.levels, self.allow("recompute", "light"),
            )  # fmt: skip
        return self._ways[key]

    def _solve(self, problem: ShardingProblem) -> tuple[int, ...] | None:
        """Splits that are good enough to draft with."""
        stop = Stop(gap=CLOSE, evaluations=MOST_SWEEPS, interrupted=self.interrupted)
        solution = self.search(problem, stop, 0).solution
        return None if solution is None else tuple(solution.assignment)

    def _prove(self, problem: ShardingProblem) -> tuple[int, ...] | None:
        """Splits than which none are better, or nothing."""
        stop = Stop(evaluations=MOST_SWEEPS, interrupted=self.interrupted)
        result = self.search(problem, stop, 0)
        if result.solution is None or result.status is not Status.OPTIMAL:
            return None
        return tuple(result.solution.assignment)


def _rounded(in_flight: int) -> int:
    """A power of two: numbers that are near share their answers."""
    return 1 << max(0, in_flight.bit_length() - 1)


def wanted_count(num_stages: int) -> int:
    """Micro-batches to begin with: with some for each stage bubbles are small, shares not yet tiny.

    A single stage has no bubble, and needs more than one only for want of memory.
    """
    return 1 if num_stages == 1 else PER_STAGE * num_stages


@functools.lru_cache(maxsize=256)
def in_flight(schedule: str, p: int, chunks: int, m: int) -> tuple[float, ...]:
    """Per rank, the most activations of a micro-batch that it holds, as parts of all its stages'.

    Read off the order itself; where weight gradients wait, gradients of activations wait with them.
    """
    found = []
    for row in NAMED[schedule].order(p, chunks, m):
        level = peak = 0.0
        for action in row:
            level += CHANGES[action.kind]
            peak = max(peak, level)
        found.append(peak / chunks)
    return tuple(found)
