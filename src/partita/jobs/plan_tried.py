"""Plans that were simulated: the best, how it went, and when to stop.

A plan is simulated once, and not at all where what must lie on a device does not fit or, once there
are some to show, where computing alone takes longer than the best plan.
"""

import time
from dataclasses import dataclass, field

from partita.cluster import Cluster
from partita.costs.floors import work_bound_s
from partita.jobs.simulate import Simulation, simulate_stages
from partita.jobs.wishes import Wishes
from partita.jobs.workload import Workload
from partita.lower import Memo
from partita.plans import Schedule, Stage, device_groups
from partita.search.base import Improvement, Stop, relative_gap
from partita.search.joint.drafts import Draft, Drafting

ENOUGH = 5  # plans to show; from there on those that cannot win are not simulated
RETRIES = 3
SHRUNK, LESS = 6, 0.95  # how often, and to how much, room shrinks for another draft
HOPELESS = 1.12  # times the memory there is
SEARCHING = 0.7  # of the time: the rest is for named strategies


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


def rank(candidate: Candidate) -> tuple[float, float]:
    """Best first; what differs only by rounding is told apart by the step."""
    return float(f"{candidate.objective_s:.9g}"), candidate.step_s


@dataclass(frozen=True)
class Clock:
    """How long a search goes on already."""

    stop: Stop
    started: float = field(default_factory=time.perf_counter)

    def seconds(self) -> float:
        """Since the search began."""
        return time.perf_counter() - self.started

    def is_late(self) -> bool:
        """Is it time to leave the rest to the named strategies, which must not be faster?"""
        limit = self.stop.time_s
        return limit is not None and self.seconds() >= SEARCHING * limit

    def must_end(self) -> bool:
        """Must drafting end, also in the middle of a step?"""
        return self.stop.interrupted() or self.is_late()


@dataclass
class Tried:
    """Simulates plans one by one for one question, and remembers them."""

    workload: Workload
    cluster: Cluster
    objective: str
    wishes: Wishes
    max_memory: float
    stop: Stop
    drafting: Drafting
    memo: Memo
    clock: Clock
    candidates: list[Candidate] = field(default_factory=list)
    history: list[Improvement] = field(default_factory=list)
    reason: str = ""  # why the search ends before its time
    cut: bool = False
    _seen: set[tuple[object, ...]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.work_s = work_bound_s(self.workload.graph, self.cluster)
        self.lower_s = self.work_s  # the best bound so far

    def add(self, name: str, stages: tuple[Stage, ...], schedule: Schedule) -> Candidate | None:
        """Simulate a plan unless it is known, cannot fit, or cannot be the best."""
        key = (tuple((s.mesh, s.splits, s.recompute, s.again) for s in stages), schedule)
        if key in self._seen:
            return None
        self._seen.add(key)
        floor, over = self.drafting.floor(stages, schedule.num_microbatches)
        best = self.best()
        hopeless = best is not None and floor >= best.objective_s and len(self.candidates) > ENOUGH
        if over > 0 or hopeless:
            return None
        simulation = simulate_stages(
            self.workload, self.cluster, stages, schedule, self.memo, most_devices=1, quick=True
        ).capped(self.max_memory)
        value = simulation.interval_s if self.in_a_row else simulation.step_s
        candidate = Candidate(name, simulation, value, self.seconds(), simulation.fits)
        self.candidates.append(candidate)
        if candidate.fits and (best is None or candidate.objective_s < best.objective_s):
            self._record(candidate.objective_s)
        return candidate

    @property
    def in_a_row(self) -> bool:
        """Does the time from batch to batch count, rather than that of a step?"""
        return not self.workload.training and self.objective == "throughput"

    def best(self) -> Candidate | None:
        """The fastest that fits, if there is one."""
        fitting = [candidate for candidate in self.candidates if candidate.fits]
        return min(fitting, key=rank, default=None)

    def add_draft(self, draft: Draft) -> Candidate | None:
        """Simulate a draft; where memory turns out too small, draft again with less room."""
        for _ in range(RETRIES):
            found = self.add("search", draft.stages, draft.schedule)
            if found is None or found.fits or self.done():
                return found
            best, over = self.best(), self._over(found)
            if best is not None and (found.objective_s >= best.objective_s or over > HOPELESS):
                return None  # with so much less room it would not be faster
            again = self._smaller(draft, draft.room / (over * 1.01))
            if again is None:
                return None
            draft = again
        return None

    def _smaller(self, draft: Draft, room: float) -> Draft | None:
        """Another draft, with so much room or less; None where there is none."""
        for _ in range(SHRUNK):
            again = self.drafting.draft(
                draft.arrangement, draft.schedule.num_microbatches, room=room,
                chunks=draft.chunks, schedule=draft.schedule.name, light=draft.light,
            )  # fmt: skip
            if again is None or again.stages != draft.stages:
                return again
            room *= LESS  # what is live only for a moment is not in its estimate
        return None

    def _over(self, candidate: Candidate) -> float:
        simulation = candidate.simulation
        pairs = zip(simulation.peak_bytes, simulation.capacity_bytes, strict=True)
        return max(peak / min(capacity, self.max_memory) for peak, capacity in pairs)

    def allowed(self, stages: tuple[Stage, ...], schedule: Schedule) -> bool:
        """Is a plan as the user wishes?"""
        allow = self.wishes.allow
        shapes = {tuple(axis.size for axis in stage.mesh.axes) for stage in stages}
        levels = {split.sharded for stage in stages for split in stage.splits}
        return (
            allow("stages", len(device_groups(stages)))
            and allow("microbatches", schedule.num_microbatches)
            and allow("schedule", schedule.name)
            and all(allow("recompute", stage.recomputed) for stage in stages)
            and all(allow("mesh", shape) for shape in shapes)
            and all(allow("sharded", level) for level in levels)
        )

    def raise_bound(self, bound_s: float) -> None:
        """No plan takes less: say so where it is news."""
        if bound_s <= self.lower_s * (1 + 1e-9):
            return
        self.lower_s = bound_s
        best = self.best()
        if best is not None:
            self._record(best.objective_s)

    def _record(self, objective: float) -> None:
        self.lower_s = min(self.lower_s, objective)  # a named plan may be of another family
        step = Improvement(self.seconds(), objective, self.lower_s, len(self.candidates))
        self.history.append(step)
        if self.stop.progress is not None:
            self.stop.progress(step)

    def is_cut(self) -> bool:
        """Is the time used up, or was the search interrupted?"""
        if self.stop.interrupted():
            self.reason, self.cut = "interrupted", True
        elif self.stop.time_s is not None and self.seconds() >= self.stop.time_s:
            self.reason, self.cut = self._used_up(), True
        return self.cut

    def done(self) -> bool:
        """Is there a reason to end: time, an interruption, or a gap that is small enough?"""
        best = self.best()
        if not self.is_cut() and not self.reason and best is not None:
            gap = relative_gap(best.objective_s, self.lower_s)
            if gap is not None and gap <= self.stop.gap:
                self.reason = f"within the asked gap of {self.stop.gap:.2%}"
        return bool(self.reason)

    def pressed(self) -> bool:
        """Must the search for pipelines end?"""
        if not self.done() and self.clock.is_late():
            self.reason = self._used_up()
        return bool(self.reason)

    def _used_up(self) -> str:
        return f"the time limit of {self.stop.time_s:g} s is used up"

    def seconds(self) -> float:
        """Since the search began."""
        return self.clock.seconds()

    def left(self) -> Stop:
        """What a search inside this one may take."""
        limit = self.stop.time_s
        seconds = None if limit is None else max(0.1, limit - self.seconds())
        return Stop(seconds, interrupted=self.stop.interrupted)
