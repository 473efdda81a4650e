"""Plan a model: splits, stages, devices, micro-batches, recompute and schedule in one search.

1. The model becomes a chain of segments with its repeats folded. For every number of stages (and,
   on unlike devices, every way to give kinds to stages) and a few numbers of micro-batches, the
   best cuts are drafted: see `search/joint`.
2. Drafts are simulated, the best estimates first. One that needs more memory than it was thought to
   is drafted again with less room.
3. Around the leaders other schedules are tried under the memory that is left: zero-bubble orders,
   several stages on each group of devices, and an order searched for.
4. The named strategies are candidates too: those that could still win are simulated.

The fastest that fits wins; it is never slower than a named strategy. The lower bound is the larger
of all work over all devices, and of the least over all drafted numbers of stages and micro-batches
of what their meshes must compute; each of those that cannot fit does not count.
"""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from partita import __version__, units
from partita.cluster import Cluster, resolve
from partita.costs.collectives import Collectives
from partita.costs.floors import work_bound_s
from partita.costs.memory import model_memory
from partita.costs.roofline import op_cost
from partita.costs.sharding import LEVELS
from partita.errors import InputError
from partita.graph.chain import chain_of
from partita.graph.record import Graph
from partita.jobs.advice import what_would_fit
from partita.jobs.pipelines import PIPELINES
from partita.jobs.plan_schedule import searched_schedule
from partita.jobs.shard import shard
from partita.jobs.simulate import Simulation, simulate_stage, simulate_stages
from partita.jobs.strategies import STRATEGIES
from partita.jobs.wishes import Wishes, parse_wishes
from partita.jobs.workload import Workload, load
from partita.lower import Memo
from partita.lower.orders import refusal
from partita.plans import (
    Alternative,
    ClusterRef,
    Origin,
    Plan,
    Prediction,
    Progress,
    Schedule,
    Stage,
    device_groups,
)
from partita.schedules.named import NAMED
from partita.search.base import Improvement, Status, Stop, relative_gap
from partita.search.joint.bounds import Bound
from partita.search.joint.drafts import ROOM, Draft, Drafting
from partita.search.joint.meshes import Arrangement, arrangements, divisors, weighted_meshes

OBJECTIVES = ("throughput", "latency")
DEFAULT_STOP = Stop(time_s=60.0, gap=0.01)
MOST_STAGES = 32
SIMULATED = 3  # drafts that are simulated, at least one for each number of stages in reach
IN_REACH = 1.04  # of the best estimate: drafts beyond are not simulated
BEHIND = 1.08  # times the best estimate, and the best without waiting
FAR = 2.0  # doublings of the likely number of stages
LEADERS = 2  # plain pipelines for which other orders are tried
RETRIES = 3
HOPELESS = 1.12  # times the memory there is
NEXT_BEST = 10
FIRST = ("data", "zero1", "fsdp")
ENOUGH = 5  # plans to show; from there on those that cannot win are not simulated
PROMISING = 4  # drafts that are tried with several stages on each group of devices
TURNS = (("zb-v", (2,)), ("interleaved", (2, 3, 4, 6, 8, 12, 16, 24, 32, 48)))
WORSE = 1.01  # times the best estimate: more stages on a group will not help any more
KEPT_TURNS = 2  # numbers of stages on a group that may be simulated
CLOSE = 1.01  # times the best plan: estimates beyond are not simulated
MOST_WEIGHTED = 4  # micro-batches of one stage over unlike devices
SMALL_OPS, SMALL_DEVICES = 1000, 64  # up to this size the sharding search is asked as well


@dataclass(frozen=True)
class Candidate:
    """One plan that was simulated."""

    name: str
    simulation: Simulation
    objective_s: float
    seconds: float  # when it was found
    fits: bool

    @property
    def step_s(self) -> float:
        """Seconds of one step."""
        return self.simulation.step_s


@dataclass(frozen=True)
class Planned:
    """The best plan found, the next best, and how far from optimal it can be."""

    status: Status
    why: str
    plan: Plan | None
    best: Candidate | None
    others: tuple[Candidate, ...]
    lower_bound_s: float
    seconds: float
    seed: int
    history: tuple[Improvement, ...]
    num_simulated: int
    num_drafted: int
    objective: str

    @property
    def gap(self) -> float | None:
        """How far from optimal the best is at most, as a fraction of it."""
        return relative_gap(
            None if self.best is None else self.best.objective_s, self.lower_bound_s
        )


def plan(
    model: str | Graph,
    cluster: str | Cluster,
    *,
    batch: int | None = None,
    dtype: str | None = None,
    training: bool = True,
    optimizer: str = "adamw",
    objective: str = "throughput",
    pin: Sequence[str] = (),
    forbid: Sequence[str] = (),
    max_memory: float | None = None,
    stop: Stop = DEFAULT_STOP,
    seed: int = 0,
) -> Planned:
    """Find the fastest way to run a model on a cluster.

    `objective` matters for inference: `latency` is the time of one batch, `throughput` the time
    from one batch to the next. `max_memory` is bytes per device; `pin` and `forbid` hold texts
    such as `stages=4` or `schedule=gpipe`.
    """
    if objective not in OBJECTIVES:
        raise InputError(
            f"found {objective!r}", fix=f"use one of {', '.join(OBJECTIVES)}", field="objective"
        )
    if max_memory is not None and max_memory <= 0:
        raise InputError(f"found {max_memory:g} bytes", fix="give more than 0", field="max_memory")
    wishes = parse_wishes(pin, forbid)
    machine = resolve(cluster) if isinstance(cluster, str) else cluster
    spec = cluster if isinstance(cluster, str) else cluster.name
    workload = load(model, batch=batch, dtype=dtype, training=training, optimizer=optimizer)
    job = _Job(workload, machine, spec, objective, wishes, max_memory or math.inf, stop, seed)
    return job.run()


def _rank(candidate: Candidate) -> tuple[float, float]:
    """Best first; what differs only by rounding is told apart by the step."""
    return float(f"{candidate.objective_s:.9g}"), candidate.step_s


class _Job:
    def __init__(
        self, workload: Workload, cluster: Cluster, spec: str, objective: str, wishes: Wishes,
        max_memory: float, stop: Stop, seed: int,
    ) -> None:  # fmt: skip
        self.workload, self.cluster, self.spec = workload, cluster, spec
        self.objective, self.wishes, self.max_memory = objective, wishes, max_memory
        self.stop, self.seed = stop, seed
        self.started = time.perf_counter()
        self.memo = Memo(Collectives(cluster))
        level = wishes.pinned_to("sharded")
        self.drafting = Drafting(
            workload.graph, workload.optimizer, cluster, self.memo.collectives, wishes.allow,
            LEVELS if level is None else (level,), max_memory,
        )  # fmt: skip
        self.tried: list[Candidate] = []
        self.seen: set[tuple[object, ...]] = set()
        self.skipped: dict[str, float] = {}
        self.history: list[Improvement] = []
        self.drafts: list[Draft] = []
        self.turned: list[Draft] = []  # with several stages on each group of devices
        self.num_drafted = 0
        self.reason = ""
        self.work_s = work_bound_s(workload.graph, cluster)
        self.bounds: list[Bound] = []  # of all that was drafted
        self.complete = True
        self.cut = False

    def run(self) -> Planned:
        steps = (
            self._first, self._draft_all, self._take_turns, self._simulate_leaders, self._closer,
        )  # fmt: skip
        for step in steps:
            if not self._done():
                step()
        if not self._is_cut():  # a gap that is small enough is no reason to lose to a named way
            self._named()
        if not self._done():
            self._ask_shard()
        return self._result()

    def _first(self) -> None:
        """Something to show at once: named ways on one stage, of a large model one that fits."""
        small = len(self.workload.graph.ops) <= SMALL_OPS
        for name in STRATEGIES if small else FIRST:
            if self.workload.training or name not in FIRST[1:]:
                for stage in STRATEGIES[name].stages(self.workload.graph, self.cluster.num_devices):
                    if self._allowed((stage,), Schedule()):
                        self._try(name, (stage,), Schedule())
            if self._done() or (self._best() is not None and not small):
                return

    # Drafts.

    def _draft_all(self) -> None:
        """Every number of stages with every number of micro-batches, likely ones first."""
        for arrangement in self._arrangements():
            wanted = 1 if arrangement.num_stages == 1 else 6 * arrangement.num_stages
            counts = self.drafting.counts(arrangement)
            counts.sort(key=lambda c: (abs(math.log2(c / wanted)), c))
            if self._is_far(arrangement):
                del counts[1:]
            for count in counts:
                if self._done():
                    self.complete = False
                    return
                draft = self._draft(arrangement, count)
                if draft is not None and self._is_behind(draft):
                    break
        if not self.cluster.is_homogeneous and self.wishes.allow("stages", 1):
            self._weighted()

    def _arrangements(self) -> list[Arrangement]:
        most = min(MOST_STAGES, self.drafting.chain.num_segments)
        wanted = self.wishes.pinned_to("stages")
        if wanted is not None:
            most = min(int(wanted), self.drafting.chain.num_segments)
        found = [
            arrangement
            for arrangement in arrangements(self.cluster, most)
            if self.wishes.allow("stages", arrangement.num_stages)
        ]
        likely = self._likely_stages()
        if self.cluster.is_homogeneous:
            found.sort(key=lambda a: (abs(math.log2(a.num_stages / likely)), a.num_stages))
        return found

    def _is_far(self, arrangement: Arrangement) -> bool:
        """Is the number of stages so unlikely that one number of micro-batches will do?"""
        if not self.cluster.is_homogeneous or self.wishes.pinned_to("stages") is not None:
            return False
        return abs(math.log2(arrangement.num_stages / self._likely_stages())) > FAR

    def _is_behind(self, draft: Draft) -> bool:
        """Is a draft so slow, waiting or not, that its kin need not be drafted?"""
        if not self.cluster.is_homogeneous or draft.arrangement.num_stages == 1:
            return False
        estimate = min(d.estimate_s for d in self.drafts)
        ideal = min(d.ideal_s for d in self.drafts)
        return draft.estimate_s > BEHIND * estimate and draft.ideal_s > BEHIND * ideal

    def _likely_stages(self) -> int:
        """As many as it takes for parameters and states to fill half of a node's memory."""
        memory = model_memory(self.workload.graph)
        held = memory.parameters + memory.gradients + memory.states
        inner = self.drafting.patterns.inner_size
        room = min(kind.memory_bytes for kind in self.cluster.kinds)
        wanted = max(1.0, held / (0.5 * room * inner))
        return int(min(1 << math.ceil(math.log2(wanted)), self.cluster.num_devices))

    def _draft(self, arrangement: Arrangement, count: int, room: float = ROOM) -> Draft | None:
        self.num_drafted += 1
        bound = self.drafting.bound(arrangement, count)
        if bound is None or not math.isfinite(bound.quick_s):
            return None
        self.bounds.append(bound)
        best = self._best()
        if self.cluster.is_homogeneous and best is not None and bound.quick_s >= best.objective_s:
            return None  # nothing with these stages can win
        draft = self.drafting.draft(arrangement, count, room=room)
        if draft is None:
            return None
        self.drafts.append(draft)
        if self._best() is None:  # something to show early
            self._try_draft(draft)
        return draft

    def _try_draft(self, draft: Draft) -> Candidate | None:
        """Simulate a draft; where memory turns out too small, draft again with less room."""
        for _ in range(RETRIES):
            found = self._try("search", draft.stages, draft.schedule)
            if found is None or found.fits or self._done():
                return found
            best, over = self._best(), self._over(found)
            if best is not None and (found.objective_s >= best.objective_s or over > HOPELESS):
                return None  # with so much less room it would not be faster
            room = draft.room / (over * 1.01)
            again = self.drafting.draft(
                draft.arrangement, draft.schedule.num_microbatches, room=room,
                chunks=draft.chunks, schedule=draft.schedule.name,
            )  # fmt: skip
            if again is None:
                return None
            draft = again
        return None

    def _over(self, candidate: Candidate) -> float:
        simulation = candidate.simulation
        pairs = zip(simulation.peak_bytes, simulation.capacity_bytes, strict=True)
        return max(peak / min(capacity, self.max_memory) for peak, capacity in pairs)

    def _weighted(self) -> None:
        """One stage over unlike devices, each with a share as large as it is fast."""
        graph = self.drafting.micro(1)
        speed = {
            kind.name: 1 / (sum(op_cost(graph, op, kind).seconds for op in graph.ops) or 1.0)
            for kind in self.cluster.kinds
        }
        ops = [op for segment in self.drafting.chain.segments for op in segment.ops]
        for count in (d for d in divisors(self.workload.batch) if d <= MOST_WEIGHTED):
            if not self.wishes.allow("microbatches", count):
                continue
            for mesh in weighted_meshes(self.cluster, speed, self.workload.batch // count):
                for way in self.drafting.ways(mesh, count, 1).ways[:2]:
                    if self._done():
                        return
                    splits = way.splits(ops, self.drafting.fold)
                    self._try("search", (Stage("stage0", mesh, splits),), Schedule("1f1b", count))

    # Simulations.

    def _take_turns(self) -> None:
        """Drafts with several stages on each group, for the pipelines that may gain by it."""
        if not self.workload.training:
            return
        for draft in self._promising():
            for name, all_chunks in TURNS:
                if self._done():
                    return
                if self.wishes.allow("schedule", name):
                    self.turned += self._turned(draft, name, all_chunks)

    def _turned(self, draft: Draft, name: str, all_chunks: Sequence[int]) -> list[Draft]:
        """More and more stages on each group, as long as the estimate does not grow."""
        found: list[Draft] = []
        p, count = draft.arrangement.num_stages, draft.schedule.num_microbatches
        for chunks in all_chunks:
            if p * chunks > self.drafting.chain.num_segments:
                break
            if NAMED[name].refuses(p, chunks, count):
                continue
            other = self.drafting.draft(
                draft.arrangement, count, room=draft.room, chunks=chunks, schedule=name
            )
            if other is None:
                continue
            found.append(other)
            if other.estimate_s > WORSE * min(d.estimate_s for d in found):
                break
        return sorted(found, key=lambda d: d.estimate_s)[:KEPT_TURNS]

    def _simulate_leaders(self) -> None:
        """The drafts with the best estimates; plain ones also if they would win without waiting."""
        for draft in sorted(self.turned, key=lambda d: d.estimate_s):
            best = self._best()
            if self._done():
                return
            if best is None or draft.estimate_s < best.objective_s * CLOSE:
                self._try_draft(draft)
        ranked = sorted(self.drafts, key=lambda d: d.estimate_s)
        if not ranked:
            return
        reach = ranked[0].estimate_s * IN_REACH
        firsts: dict[int, Draft] = {}
        for draft in ranked:
            firsts.setdefault(len(draft.stages), draft)
        for draft in (*ranked[:SIMULATED], *firsts.values()):
            best = self._best()
            if self._done():
                return
            near = draft.estimate_s <= reach or draft in ranked[:SIMULATED]
            if near and (best is None or draft.ideal_s < best.objective_s):
                self._try_draft(draft)

    def _closer(self) -> None:
        """Other orders for the best stages found so far."""
        if not self.workload.training:
            return
        for leader in self._leaders():
            simulation = leader.simulation
            if self._done():
                return
            for name in self._schedules(simulation):
                if not self._done():
                    self._try("search", simulation.stages, replace(simulation.schedule, name=name))
            if not self._done() and not self.wishes.pinned_to("schedule"):
                self._searched(simulation)

    def _leaders(self) -> list[Candidate]:
        """Pipelines to try other orders for: the best one, and the best with a stage per group.

        Only the latter have orders that fill their bubbles, so they need not be ahead yet; those
        that are behind even without bubbles are left out.
        """
        ranked = sorted((c for c in self.tried if c.fits), key=lambda c: c.objective_s)
        pipelines = [c for c in ranked if len(c.simulation.stages) > 1]
        plain = [
            c
            for c in pipelines
            if len(device_groups(c.simulation.stages)) == len(c.simulation.stages)
            and c.objective_s * (1 - c.simulation.bubble) < ranked[0].objective_s
        ]
        first = [c for c in pipelines[:1] if all(c is not other for other in plain[:LEADERS])]
        return [*first, *plain[:LEADERS]]

    def _promising(self) -> list[Draft]:
        """Pipelines that would be the fastest if no group ever had to wait, one of each kind."""
        kinds: dict[tuple[object, ...], Draft] = {}
        for draft in sorted(self.drafts, key=lambda d: d.ideal_s):
            if draft.arrangement.num_stages > 1 and draft.chunks == 1:
                kinds.setdefault((draft.arrangement, draft.schedule), draft)
        return list(kinds.values())[:PROMISING]

    def _schedules(self, simulation: Simulation) -> list[str]:
        stages, count = simulation.stages, simulation.schedule.num_microbatches
        if len(stages) == 1:
            return []
        groups = device_groups(stages)
        return [
            name
            for name in ("1f1b", "zb-h1", "zb-h2")
            if name != simulation.schedule.name
            and self.wishes.allow("schedule", name)
            and not refusal(name, groups, count)
        ]

    def _searched(self, simulation: Simulation) -> None:
        """An order found for exactly these stages and the memory that is left."""
        if len(simulation.stages) == 1:
            return
        left = None if self.stop.time_s is None else max(0.1, self.stop.time_s - self._seconds())
        stop = Stop(left, interrupted=self.stop.interrupted)
        found = searched_schedule(simulation, self.memo, stop, self.seed)
        if found is not None:
            self._try("search", simulation.stages, found)

    def _named(self) -> None:
        for name, stages, schedule in self._named_plans():
            if self._is_cut() and self.tried:
                return
            if self._allowed(stages, schedule):
                self._try(name, stages, schedule)

    def _named_plans(self) -> Iterator[tuple[str, tuple[Stage, ...], Schedule]]:
        graph, size = self.workload.graph, self.cluster.num_devices
        chain = chain_of(graph)
        for name, strategy in STRATEGIES.items():
            if self.workload.training or name not in ("zero1", "fsdp"):
                for stage in strategy.stages(graph, size):
                    yield name, (stage,), Schedule()
        for name, pipeline in PIPELINES.items():
            found = pipeline.plans(graph, chain, self.cluster, self.workload.batch)
            for stages, schedule in found:
                yield name, stages, schedule

    def _allowed(self, stages: tuple[Stage, ...], schedule: Schedule) -> bool:
        allow = self.wishes.allow
        shapes = {tuple(axis.size for axis in stage.mesh.axes) for stage in stages}
        levels = {split.sharded for stage in stages for split in stage.splits}
        return (
            allow("stages", len(device_groups(stages)))
            and allow("microbatches", schedule.num_microbatches)
            and allow("schedule", schedule.name)
            and all(allow("recompute", stage.recompute) for stage in stages)
            and all(allow("mesh", shape) for shape in shapes)
            and all(allow("sharded", level) for level in levels)
        )

    def _ask_shard(self) -> None:
        """What the search for splits alone finds on one stage, where that is quick."""
        graph = self.workload.graph
        small = len(graph.ops) <= SMALL_OPS and self.cluster.num_devices <= SMALL_DEVICES
        if not small or self.wishes or self.max_memory < math.inf:
            return
        left = None if self.stop.time_s is None else max(0.1, self.stop.time_s - self._seconds())
        found = shard(
            self.workload.graph, self.cluster, training=self.workload.training,
            optimizer=self.workload.optimizer, stop=Stop(left, interrupted=self.stop.interrupted),
        )  # fmt: skip
        if found.best is not None:
            self._try("sharding", (found.best.simulation.stage,), Schedule())

    def _try(self, name: str, stages: tuple[Stage, ...], schedule: Schedule) -> Candidate | None:
        """Simulate a plan unless it is known, cannot fit, or cannot be the best."""
        key = (tuple((s.mesh, s.splits, s.recompute) for s in stages), schedule)
        if key in self.seen:
            return None
        self.seen.add(key)
        floor, over = self.drafting.floor(stages, schedule.num_microbatches)
        best = self._best()
        hopeless = best is not None and floor >= best.objective_s and len(self.tried) > ENOUGH
        if over > 0 or hopeless:
            self.skipped[name] = min(floor, self.skipped.get(name, math.inf))
            return None
        plain = len(stages) == 1 and schedule.num_microbatches == 1 and not stages[0].recompute
        if plain:
            simulation = simulate_stage(
                self.workload, self.cluster, stages[0], 1, self.memo.collectives
            )
        else:
            simulation = simulate_stages(self.workload, self.cluster, stages, schedule, self.memo)
        simulation = self._capped(simulation)
        value = self._value(simulation)
        candidate = Candidate(name, simulation, value, self._seconds(), simulation.fits)
        self.tried.append(candidate)
        if candidate.fits and (best is None or candidate.objective_s < best.objective_s):
            self._record(candidate.objective_s)
        return candidate

    def _capped(self, simulation: Simulation) -> Simulation:
        """The simulation with the memory the user allows."""
        return (
            simulation
            if self.max_memory == math.inf
            else replace(simulation, cap_bytes=self.max_memory)
        )

    def _value(self, simulation: Simulation) -> float:
        if self.workload.training or self.objective == "latency":
            return simulation.step_s
        return float(simulation.timeline.busy().max())

    def _best(self) -> Candidate | None:
        fitting = [candidate for candidate in self.tried if candidate.fits]
        return min(fitting, key=_rank, default=None)

    # Ending.

    def _bound(self) -> float:
        """Named plans outside the family were simulated themselves: none is below the best."""
        best = self._best()
        if not self.complete or not self.bounds or best is None or not self.cluster.is_homogeneous:
            return self.work_s
        least, climbed = best.objective_s, self.cut  # out of time: as they are
        ranked = sorted(self.bounds, key=lambda bound: bound.quick_s)
        for bound in ranked:
            if bound.quick_s >= least:
                break
            least = min(least, bound.quick_s if climbed else bound.seconds)
        return max(self.work_s, least)

    def _record(self, objective: float) -> None:
        step = Improvement(self._seconds(), objective, self.work_s, len(self.tried))
        self.history.append(step)
        if self.stop.progress is not None:
            self.stop.progress(step)

    def _is_cut(self) -> bool:
        """Is the time used up, or was the search interrupted?"""
        if self.stop.interrupted():
            self.reason, self.cut = "interrupted", True
        elif self.stop.time_s is not None and self._seconds() >= self.stop.time_s:
            self.reason, self.cut = f"the time limit of {self.stop.time_s:g} s is used up", True
        return self.cut

    def _done(self) -> bool:
        best = self._best()
        if not self._is_cut() and not self.reason and best is not None:
            gap = relative_gap(best.objective_s, self.work_s)
            if gap is not None and gap <= self.stop.gap:
                self.reason = f"within the asked gap of {self.stop.gap:.2%}"
        return bool(self.reason)

    def _seconds(self) -> float:
        return time.perf_counter() - self.started

    def _result(self) -> Planned:
        best = self._best()
        bound = self._bound()
        ranked = sorted((c for c in self.tried if c.fits), key=_rank)
        if best is None:
            cut = self.reason and not self.complete
            status, why = (Status.STOPPED if cut else Status.INFEASIBLE), self._why_not()
        elif best.objective_s <= bound * (1 + 1e-9):
            status, why = Status.OPTIMAL, "no plan can be faster"
        elif self.reason:
            status, why = Status.STOPPED, self.reason
        else:
            status = Status.FEASIBLE
            why = f"the fastest of {len(ranked)} plans that fit, of {self.num_drafted} drafted"
        if best is not None:
            best = self._drawn(best)
        found = None if best is None else self._plan(best, status, why, bound)
        return Planned(
            status, why, found, best, tuple(ranked[1 : NEXT_BEST + 1]), bound, self._seconds(),
            self.seed, tuple(self.history), len(self.tried), self.num_drafted, self.objective,
        )  # fmt: skip

    def _drawn(self, best: Candidate) -> Candidate:
        """The winner again, with all its devices where it is one stage that runs once."""
        simulation = best.simulation
        if len(simulation.stages) > 1 or simulation.schedule.num_microbatches > 1:
            return best
        whole = simulate_stages(self.workload, self.cluster, simulation.stages, simulation.schedule)
        return replace(best, simulation=self._capped(whole))

    def _plan(self, best: Candidate, status: Status, why: str, bound: float) -> Plan:
        simulation = best.simulation
        prediction = Prediction(
            step_s=simulation.step_s,
            lower_bound_s=bound,
            compute_s=simulation.compute_s,
            communication_s=simulation.communication_s,
            peak_memory_bytes=simulation.peak_bytes,
            capacity_bytes=simulation.capacity_bytes,
        )
        cluster = ClusterRef(self.spec, self.cluster.num_devices, self.cluster.fingerprint())
        origin = Origin(
            best.name, str(status), why, self.seed, self._seconds(), __version__,
            tuple(Progress(s.seconds, s.objective, s.lower_bound) for s in self.history),
            self._alternatives(best),
        )  # fmt: skip
        return Plan(
            self.workload.ref(), cluster, simulation.stages, prediction, origin, simulation.schedule
        )

    def _alternatives(self, best: Candidate) -> tuple[Alternative, ...]:
        """The next best, and what stood against each; those that do not fit too."""
        others = sorted((c for c in self.tried if c is not best), key=lambda c: c.objective_s)
        found = (
            Alternative(
                other.name,
                other.simulation.arrangement,
                other.step_s,
                other.simulation.fullest[0],
                rejection(other, best),
            )
            for other in others
            if not _alike(other, best)
        )
        return tuple(dict.fromkeys(found))[:NEXT_BEST]

    def _why_not(self) -> str:
        if self.wishes:
            return f"nothing fits with what was asked for ({self.wishes}); drop one of these wishes"
        return what_would_fit(self.drafting, self.max_memory)


def _alike(one: Candidate, other: Candidate) -> bool:
    mine, its = one.simulation, other.simulation
    return mine.stages == its.stages and mine.schedule == its.schedule


def rejection(other: Candidate, best: Candidate) -> str:
    """What stands against a plan: memory, or what it loses most by."""
    mine, its = other.simulation, best.simulation
    if not other.fits:
        peak, room = mine.fullest
        return f"needs {units.size(peak)} of {units.size(room)} per device"
    lost = {
        "longer in computing": mine.compute_s - its.compute_s,
        "longer idle": mine.bubble * mine.step_s - its.bubble * its.step_s,
    }
    if not mine.is_pipelined and not its.is_pipelined:  # else stages wait for each other, too
        lost["longer in waiting for communication"] = mine.exposed_s - its.exposed_s
    what, seconds = max(lost.items(), key=lambda item: item[1])
    if other.step_s <= best.step_s * (1 + 1e-6) or seconds <= 0:
        return "no faster"
    return f"{units.seconds(seconds)} {what}"
