"""Plans that were simulated: the best, how it went, and when to stop.

The evaluator of the joint search (`search.joint.auto`): a solution is lowered and simulated, once,
and not at all where what must lie on a device does not fit or, once there are some to show, where
computing alone takes longer than the best plan. Named strategies are simulated by the same.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from partita.cluster import Cluster
from partita.compiled import work_clock
from partita.costs.roofline import work_bound_s
from partita.degrees import copied_bytes
from partita.errors import Attempts
from partita.jobs.constraints import ANYWHERE, SEARCHED, Constraints, keeps_degrees
from partita.jobs.field import RankedStrategy
from partita.jobs.plan_order import searched_schedule
from partita.jobs.plan_settings import USUAL, PlanSettings
from partita.jobs.shared_stages import shape_name
from partita.jobs.simulate import Simulation, simulate_stages
from partita.jobs.workload import Workload
from partita.lower import MAX_DRAWN, Memo
from partita.plans import ZERO_STAGES, Schedule, Stage, device_groups, shared_stages
from partita.problems.joint import Cell, JointSolution
from partita.search.base import PROVEN_GAP, Improvement, Stop, relative_gap
from partita.search.joint.evaluator import Evaluation
from partita.search.joint.model import JointModel
from partita.search.joint.plan_bounds import PlanBounds
from partita.timeline import Timeline


@dataclass(frozen=True)
class SimulatedPlan:
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


def rank(candidate: SimulatedPlan) -> tuple[float, float]:
    """Best first; what differs only by rounding is told apart by the step."""
    return float(f"{candidate.objective_s:.9g}"), candidate.step_s


@dataclass(frozen=True)
class Clock:
    """How long a search goes on already; `searching` is its part of the time, the rest is named."""

    stop: Stop
    started: float = field(default_factory=work_clock)
    searching: float = 0.7  # named strategies need the rest: they must not be faster
    trying: float = 0.88  # from there on nothing new: the answer is lowered and verified in full

    def seconds(self) -> float:
        """Since the search began."""
        return work_clock() - self.started

    def is_late(self) -> bool:
        """Is it time to leave the rest to the named strategies?"""
        limit = self.stop.time_s
        return limit is not None and self.seconds() >= self.searching * limit

    def is_over(self) -> bool:
        """Is only the time left that the answer itself needs?"""
        limit = self.stop.time_s
        return limit is not None and self.seconds() >= self.trying * limit

    def must_end(self) -> bool:
        """Must the joint search end, also in the middle of a step?"""
        return self.stop.interrupted() or self.is_late()

    def search_stop(self, progress: Callable[[Improvement], None]) -> Stop:
        """What the joint search may take."""
        limit = self.stop.time_s
        left = None if limit is None else max(0.0, self.searching * limit - self.seconds())
        return Stop(left, self.stop.gap, interrupted=self.stop.interrupted, progress=progress)


@dataclass
class Simulator:
    """Simulates plans one by one for one question, and remembers them."""

    workload: Workload
    cluster: Cluster
    objective: str
    constraints: Constraints
    max_memory: float
    model: JointModel
    memo: Memo
    clock: Clock
    seed: int = 0
    settings: PlanSettings = USUAL
    enough: int = 5  # plans to show; from there on those that cannot win are not simulated
    candidates: list[SimulatedPlan] = field(default_factory=list)
    history: list[Improvement] = field(default_factory=list)
    is_cheap: bool = False
    attempt: Attempts = field(default_factory=Attempts)
    field_ranked: Sequence[RankedStrategy] | None = None  # what frameworks do, once asked for
    _seen: set[tuple[object, ...]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.stop = self.clock.stop
        self.work_s = work_bound_s(self.workload.graph, self.cluster, self.workload.execution)
        self.lower_s = self.work_s  # the best bound so far
        self.bounds = PlanBounds(self.model, self.steady_state)

    # The evaluator of the joint search.

    @property
    def num_levels(self) -> int:
        """Levels of bounds."""
        return self.bounds.num_levels

    def bound(self, cell: Cell, level: int, enough: float) -> float:
        """No plan of a cell is below."""
        return self.bounds.bound(cell, level, enough)

    def incumbent_s(self) -> float:
        """The best so far, named strategies included."""
        best = self.best()
        return math.inf if best is None else best.objective_s

    def __call__(self, solution: JointSolution) -> Evaluation | None:
        """Lower and simulate a solution of the joint problem."""
        stages, schedule = self.model.stages(solution), self.model.schedule(solution)
        if not self._keeps(stages):
            return None
        candidate = self.add("search", stages, schedule)
        if candidate is None:
            return None
        simulation = candidate.simulation
        pairs = zip(simulation.peak_bytes, simulation.capacity_bytes, strict=True)
        over = max(peak / max(min(own, self.max_memory), 1.0) for peak, own in pairs)
        if candidate.fits:
            over = min(over, 1.0)
        return Evaluation(candidate.objective_s, over, order_bound_s(simulation.timeline))

    def reorder(self, solution: JointSolution) -> None:
        """An order found for exactly these stages and the memory that is left."""
        if not self.constraints.allow("schedule", SEARCHED):
            return
        stages, schedule = self.model.stages(solution), self.model.schedule(solution)
        for candidate in self.candidates:
            simulation = candidate.simulation
            if simulation.stages == stages and simulation.schedule == schedule:
                order = self.attempt(
                    "a searched order",
                    functools.partial(
                        searched_schedule,
                        simulation,
                        self.memo,
                        self.left(),
                        self.seed,
                        self.settings,
                    ),
                )
                if order is not None:
                    self.add("search", stages, order)
                return

    # Plans.

    def add(
        self, name: str, stages: tuple[Stage, ...], schedule: Schedule, *, quick: bool = True
    ) -> SimulatedPlan | None:
        """Simulate a plan unless it is known, cannot fit, or cannot be the best."""
        looks = tuple(
            (s.mesh, s.splits, s.checkpointing == "full", s.recomputed, s.overlap, s.bundles)
            for s in stages
        )
        key = (looks, schedule)
        if key in self._seen:
            return None
        self._seen.add(key)
        if self.constraints and not self.allowed(stages, schedule):
            return None
        if schedule.num_microbatches > 1 and not self.model.is_cut:
            return None
        least, over = self.model.stage_bound(stages, schedule.num_microbatches)
        best = self.best()
        hopeless = (
            best is not None and least >= best.objective_s and len(self.candidates) > self.enough
        )
        if over > 0 or hopeless:
            return None
        simulation = self.attempt(
            f"{name} in {len(stages)} stages on {stages[0].mesh}, {schedule}",
            lambda: simulate_stages(
                self.workload,
                self.cluster,
                stages,
                schedule,
                self.memo,
                most_devices=1 if quick else MAX_DRAWN,
                quick=quick,
            ).capped(self.max_memory),
        )
        if simulation is None:
            return None
        value = simulation.interval_s if self.steady_state else simulation.step_s
        candidate = SimulatedPlan(name, simulation, value, self.clock.seconds(), simulation.fits)
        self.candidates.append(candidate)
        if candidate.fits and (best is None or candidate.objective_s < best.objective_s):
            self._record(candidate.objective_s)
        return candidate

    @property
    def steady_state(self) -> bool:
        """Does the time from batch to batch count, rather than that of a step?"""
        return not self.workload.training and self.objective == "throughput"

    def best(self) -> SimulatedPlan | None:
        """The fastest that fits, if there is one."""
        fitting = [candidate for candidate in self.candidates if candidate.fits]
        return min(fitting, key=rank, default=None)

    def allowed(self, stages: tuple[Stage, ...], schedule: Schedule) -> bool:
        """Does a plan keep to the constraints?"""
        allow, groups = self.constraints.allow, device_groups(stages)
        shapes = {tuple(axis.size for axis in stage.mesh.axes) for stage in stages}
        return (
            allow("pp", len(groups))
            and allow("shape", shape_name(groups))
            and allow("micro-batches", schedule.num_microbatches)
            and self.constraints.allow_order(schedule.name, len(groups))
            and self._keeps_checkpointing(stages)
            and all(allow("mesh", shape) for shape in shapes)
            and self._keeps_zero(stages)
            and (allow("cut", ANYWHERE) or self._keeps_blocks(stages))
            and self._keeps(stages)
        )

    def _keeps_checkpointing(self, stages: tuple[Stage, ...]) -> bool:
        """Is every stage checkpointed as was asked, or has it nothing that is cheap to run again?

        Then others must have: a plan that runs nothing again is not selective.
        """
        kinds = {stage.checkpointing for stage in stages}
        wrong = {kind for kind in kinds if not self.constraints.allow("recompute", kind)}
        return not wrong or (wrong == {"none"} and "selective" in kinds)

    def _keeps_blocks(self, stages: tuple[Stage, ...]) -> bool:
        """Does every stage begin where the model may be cut between its modules?"""
        borders = {segment.ops[0] for segment in self.model.chain.segments}
        return all(stage.splits[0].op in borders for stage in stages)

    def _keeps_zero(self, stages: tuple[Stage, ...]) -> bool:
        """Are parameters sharded as was asked, wherever several devices would have the same?"""
        allow, graph = self.constraints.allow, self.workload.graph
        wrong = [level for level in ZERO_STAGES if not allow("zero", level)]
        return not any(
            split.zero in wrong and copied_bytes(graph, stage, split)
            for stage in (stages if wrong else ())
            for split in stage.splits
        )

    def _keeps(self, stages: tuple[Stage, ...]) -> bool:
        """Are degrees and virtual stages what was asked for? Meshes and splits alone do not say."""
        groups = device_groups(stages)
        own = len(stages) - len(shared_stages(groups))
        chunks = max(1, math.ceil(own / len(groups)))
        return self.constraints.allow("vpp", chunks) and keeps_degrees(
            self.constraints, self.workload.graph, stages
        )

    def raise_bound(self, bound_s: float) -> None:
        """No plan takes less: say so where it is news."""
        if bound_s <= self.lower_s * (1 + 1e-9):
            return
        self.lower_s = bound_s
        best = self.best()
        if best is not None:
            self._record(best.objective_s)

    @property
    def bounds_hold(self) -> bool:
        """Do the bounds of cells hold? They are of kernels one by one, which a compiler fuses."""
        return self.workload.execution == "graph"

    def heard(self, step: Improvement) -> None:
        """What the joint search reports: bounds are news, plans are known."""
        if step.lower_bound is not None and self.bounds_hold:
            self.raise_bound(min(step.lower_bound, self.incumbent_s()))

    def _record(self, objective: float) -> None:
        self.lower_s = min(self.lower_s, objective)  # a named plan may be outside of the space
        step = Improvement(self.clock.seconds(), objective, self.lower_s, len(self.candidates))
        self.history.append(step)
        if self.stop.progress is not None:
            self.stop.progress(step)

    # When to end.

    def cut(self) -> str:
        """Is the time used up, or was the search interrupted? In words."""
        if self.stop.interrupted():
            return "interrupted"
        if self.clock.is_over():
            return f"the time limit of {self.stop.time_s:g} s is used up"
        return ""

    def done(self) -> bool:
        """Is there a reason to end: time, an interruption, or a gap that is small enough?"""
        best = self.best()
        gap = None if best is None else relative_gap(best.objective_s, self.lower_s)
        return bool(self.cut()) or (gap is not None and gap <= max(self.stop.gap, PROVEN_GAP))

    def left(self) -> Stop:
        """What a search inside this one may take."""
        limit = self.stop.time_s
        trying = self.clock.trying
        seconds = None if limit is None else max(0.1, trying * limit - self.clock.seconds())
        return Stop(seconds, interrupted=self.stop.interrupted)


def order_bound_s(timeline: Timeline) -> float:
    """The longest of a group's work after its first forward, which comes as early in any order."""
    busy, longest = timeline.busy(), 0.0
    for lane, what in enumerate(timeline.program.lanes):
        if what.kind == "device" and busy[lane] > 0:
            first = timeline.start[timeline.lane_tasks(lane)[0]]
            longest = max(longest, float(first + busy[lane]))
    return longest
