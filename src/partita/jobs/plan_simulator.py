"""Plans that were simulated: the best, how it went, when to stop, and the answer made of them.

The evaluator of the joint search (`search.joint.auto`): a solution is lowered and simulated, once,
and not at all where what must lie on a device does not fit or, once there are some to show, where
computing alone takes longer than the best plan. Named strategies are simulated by the same.

The answer, `Planned`, is the best plan, the next best, and how far from optimal it can be.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from partita import __version__
from partita.cluster import Cluster
from partita.compiled import work_clock
from partita.costs.roofline import work_bound_s
from partita.degrees import axis_names, copied_bytes, stage_degrees, zero_words
from partita.jobs.advice import what_may_fit, what_would_fit
from partita.jobs.constraints import ANYWHERE, SEARCHED, Constraints, keeps_degrees
from partita.jobs.frameworks import RankedStrategy
from partita.jobs.plan_settings import USUAL, PlanSettings
from partita.jobs.shapes import searched_schedule, shape_name
from partita.jobs.simulate import (
    Attempts,
    Simulation,
    alternatives,
    rejection,
    simulate_stages,
)
from partita.jobs.workload import Workload, cluster_ref
from partita.lower import MAX_REPRESENTATIVES, WRITTEN, Memo
from partita.plans import (
    ZERO_STAGES,
    Alternative,
    Origin,
    Plan,
    Progress,
    Schedule,
    Stage,
    device_groups,
    runs_once,
    shared_stages,
)
from partita.problems.joint import Cell, JointProblem, JointSolution
from partita.search.base import PROVEN_GAP, Improvement, Result, Status, Stop, relative_gap
from partita.search.joint.auto import Evaluation
from partita.search.joint.bounds import PlanBounds
from partita.search.joint.model import JointModel
from partita.showing import plot_of, repr_html, table_of
from partita.timeline import Timeline

MEASURED = 100  # ops: of so many it can be told how long each takes
VERIFIED = 6.0  # times as long as to try a plan: op by op, and the verifier follows every tensor


@dataclass(frozen=True)
class SimulatedPlan:
    """One plan that was simulated."""

    name: str
    simulation: Simulation
    objective_s: float
    seconds: float  # when it was found
    fits: bool
    solution: JointSolution | None = None  # whose stages they are, where the search chose them
    moved: bool = False  # were they moved to the borders of the model's blocks?

    @property
    def step_s(self) -> float:
        """Seconds of one step."""
        return self.simulation.step_s


def rank(candidate: SimulatedPlan) -> tuple[float, float]:
    """Best first; what differs only by rounding is told apart by the step."""
    return float(f"{candidate.objective_s:.9g}"), candidate.step_s


@dataclass
class Clock:
    """How long a search goes on already; `searching` is its part of the time, the rest is named.

    What the answer needs in the end grows with the plan: `ending_s` is what that will take.
    """

    stop: Stop
    started: float = field(default_factory=work_clock)
    searching: float = 0.7  # named strategies need the rest: they must not be faster
    trying: float = 0.88  # from there on nothing new: the answer is lowered and verified in full
    ending_s: float = 0.0  # that takes about so long, and to try the plan that is tried then
    most_ending: float = 0.5  # of the time at most: it is foretold roughly

    def seconds(self) -> float:
        """Since the search began."""
        return work_clock() - self.started

    def left_s(self, part: float) -> float:
        """Until a part of the time is used up; of the rest the end has what it needs."""
        limit = self.stop.time_s
        if limit is None:
            return math.inf
        ending_s = min(self.ending_s, self.most_ending * limit)
        more_s = max(0.0, ending_s - (1 - self.trying) * limit)
        return part * limit - more_s - self.seconds()

    def is_late(self) -> bool:
        """Is it time to leave the rest to the named strategies?"""
        return self.left_s(self.searching) <= 0

    def is_over(self) -> bool:
        """Is only the time left that the answer itself needs?"""
        return self.left_s(self.trying) <= 0

    def must_end(self) -> bool:
        """Must the joint search end, also in the middle of a step?"""
        return self.stop.interrupted() or self.is_late()

    def search_stop(self, progress: Callable[[Improvement], None]) -> Stop:
        """What the joint search may take."""
        left = None if self.stop.time_s is None else max(0.0, self.left_s(self.searching))
        return Stop(left, self.stop.gap, interrupted=self.must_end, progress=progress)


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
    _each_op_s: float = math.inf  # that was lowered for a plan, in the plan where that is least

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
        candidate = self.add("search", stages, schedule, solution=solution)
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
                    self.add("search", stages, order, solution=solution)
                return

    # Plans.

    def add(
        self, name: str, stages: tuple[Stage, ...], schedule: Schedule, *, quick: bool = True,
        solution: JointSolution | None = None, moved: bool = False,
    ) -> SimulatedPlan | None:  # fmt: skip
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
        began, written = work_clock(), self.memo.written_ops
        simulation = self.attempt(
            f"{name} in {len(stages)} stages on {stages[0].mesh}, {schedule}",
            lambda: simulate_stages(
                self.workload,
                self.cluster,
                stages,
                schedule,
                self.memo,
                most_devices=1 if quick else MAX_REPRESENTATIVES,
                quick=quick,
            ).capped(self.max_memory),
        )
        tried_s, written = work_clock() - began, self.memo.written_ops - written
        if written >= MEASURED:
            self._each_op_s = min(self._each_op_s, tried_s / written)
        if simulation is None:
            return None
        value = simulation.interval_s if self.steady_state else simulation.step_s
        candidate = SimulatedPlan(
            name, simulation, value, self.clock.seconds(), simulation.fits, solution, moved
        )
        self.candidates.append(candidate)
        if candidate.fits and (best is None or candidate.objective_s < best.objective_s):
            self.clock.ending_s = tried_s + self._in_full_s(simulation)
            self._record(candidate.objective_s)
        return candidate

    def _in_full_s(self, simulation: Simulation) -> float:
        """About what it takes to lower and verify a plan in full, by what lowering took so far."""
        if math.isinf(self._each_op_s):
            return 0.0
        in_full = ops_in_full(simulation.stages, simulation.schedule, self)
        return VERIFIED * self._each_op_s * in_full

    @property
    def steady_state(self) -> bool:
        """Does the time from batch to batch count, rather than that of a step?"""
        return not self.workload.training and self.objective == "throughput"

    def best(self) -> SimulatedPlan | None:
        """The fastest that fits; stages moved to the borders of blocks may cost a little."""
        fitting = [candidate for candidate in self.candidates if candidate.fits]
        fastest = min(fitting, key=rank, default=None)
        moved = [candidate for candidate in fitting if candidate.moved]
        if fastest is None or fastest.solution is None or not moved:
            return fastest
        named = (candidate.objective_s for candidate in fitting if candidate.solution is None)
        most = min([fastest.objective_s * (1 + self.settings.whole_blocks), *named])
        near = (candidate for candidate in moved if candidate.objective_s <= most)
        return min(near, key=rank, default=fastest)

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
        left = self.clock.left_s(self.clock.trying)
        seconds = None if math.isinf(left) else max(0.1, left)
        return Stop(seconds, interrupted=self.stop.interrupted)


def ops_in_full(
    stages: Sequence[Stage], schedule: Schedule, simulator: Simulator
) -> float:  # fmt: skip
    """How many ops are written to lower a plan in full: those of stages that are alike once."""
    ops = simulator.workload.graph.ops
    if runs_once(tuple(stages), schedule):  # on many devices it is lowered as it was tried
        again = simulator.cluster.num_devices <= MAX_REPRESENTATIVES
        return len(ops) if again else len(ops) / VERIFIED
    phases = len(ops) / max(1, sum(op.phase == "forward" for op in ops))
    kinds = {
        (
            stage.mesh.axes,
            stage.checkpointing,
            tuple((split.dims, split.zero) for split in stage.splits),
        ): len(stage.splits)
        for stage in stages
    }
    return WRITTEN * phases * sum(kinds.values())


def order_bound_s(timeline: Timeline) -> float:
    """The longest of a group's work after its first forward, which comes as early in any order."""
    busy, longest = timeline.busy(), 0.0
    for lane, what in enumerate(timeline.program.lanes):
        if what.kind == "device" and busy[lane] > 0:
            first = timeline.start[timeline.lane_tasks(lane)[0]]
            longest = max(longest, float(first + busy[lane]))
    return longest


@dataclass(frozen=True)
class Planned:
    """The best plan found, the next best, and how far from optimal it can be."""

    status: Status
    why: str
    plan: Plan | None
    best: SimulatedPlan | None
    others: tuple[SimulatedPlan, ...]
    lower_bound_s: float
    seconds: float
    seed: int
    history: tuple[Improvement, ...]
    num_simulated: int
    num_drafted: int
    objective: str
    space: str = ""  # the plans that the lower bound speaks of, in words
    problem: JointProblem | None = None  # the joint problem, with the tables that were made
    cut_otherwise: SimulatedPlan | None = None  # at the borders of blocks if it is not, or anywhere

    _repr_html_, table, plot = repr_html, table_of, plot_of  # in a notebook

    @property
    def gap(self) -> float | None:
        """How far from optimal the best is at most, as a fraction of it."""
        return relative_gap(
            None if self.best is None else self.best.objective_s, self.lower_bound_s
        )


def planned(simulator: Simulator, result: Result[Any], spec: str, space: str = "") -> Planned:
    """The answer, from all that was simulated; `space` where it is not the joint problem's."""
    if simulator.best() is None and simulator.cut() and not simulator.stop.interrupted():
        _try_what_fits(simulator)
    best, work_s = _in_full(simulator), simulator.work_s
    simulator.attempt.refuse_if_all_failed(simulator.candidates)
    bound = max(work_s, (result.lower_bound or 0.0) if simulator.bounds_hold else 0.0)
    if best is not None:
        bound = min(bound, best.objective_s)  # a named plan may be outside of the space
    simulator.raise_bound(bound)
    problem = simulator.model.problem
    status, why = _ending(simulator, result, bound)
    space = space or problem.space()
    said = (status, f"{why}; no plan of this space is below: {space}")
    plan = None if best is None else _plan(simulator, best, said, bound, spec)
    kind = None if best is None else _kind(best.simulation)
    others = [one for one in differing(simulator.candidates) if _kind(one.simulation) != kind]
    return Planned(
        status, why, plan, best, tuple(others[: simulator.settings.next_best]), bound,
        simulator.clock.seconds(), simulator.seed, tuple(simulator.history),
        len(simulator.candidates), result.evaluations, simulator.objective, space, problem,
        _cut_otherwise(simulator, best),
    )  # fmt: skip


def _try_what_fits(simulator: Simulator) -> None:
    """The time is up and nothing that fits was met: any plan that does is better than none."""
    for stages, schedule in what_may_fit(simulator.model, simulator.settings.advice):
        simulator.add("search", stages, schedule)
        if simulator.best() is not None:
            return


def _cut_otherwise(simulator: Simulator, best: SimulatedPlan | None) -> SimulatedPlan | None:
    """The fastest whose stages begin where those of the best may not, or need not."""
    fitting = [candidate for candidate in simulator.candidates if candidate.fits]
    moved = [candidate for candidate in fitting if candidate.moved]
    if best is None or not moved:
        return None
    if not best.moved:
        return min(moved, key=rank)
    fastest = min(fitting, key=rank)
    return None if fastest.moved else fastest


def differing(candidates: Sequence[SimulatedPlan]) -> list[SimulatedPlan]:
    """Those that fit, the fastest of each kind, best first: degrees, ZeRO, schedule, recompute."""
    kinds: dict[object, SimulatedPlan] = {}
    for candidate in sorted((c for c in candidates if c.fits), key=rank):
        kinds.setdefault(_kind(candidate.simulation), candidate)
    return list(kinds.values())


def _kind(simulation: Simulation) -> object:
    """What makes a plan another kind of plan; cuts and numbers of micro-batches do not."""
    stages, graph = simulation.stages, simulation.workload.graph
    largest = max(stages, key=lambda stage: len(stage.splits))
    degrees = stage_degrees(largest, axis_names(graph, largest))
    groups = len(device_groups(stages))
    return (
        groups,
        len(stages) // groups,
        tuple(degrees.items()),
        len({stage.mesh.axes for stage in stages}) > 1,
        zero_words(stages, graph),
        tuple(sorted({stage.checkpointing for stage in stages})),
        simulation.schedule.name if groups > 1 else simulation.schedule.num_microbatches > 1,
    )


def _ending(simulator: Simulator, result: Result[Any], bound: float) -> tuple[Status, str]:
    """How the search ended, and one sentence of why."""
    best, cut = simulator.best(), simulator.cut()
    stopped = result.status is Status.STOPPED and bool(simulator.clock.must_end())
    limit = simulator.stop.time_s  # that of the whole; what searched inside of it had less
    if best is None:
        status = Status.STOPPED if cut or stopped else Status.INFEASIBLE
        return status, _why_not(simulator, cut or stopped)
    if best.objective_s <= bound * (1 + 1e-9):
        return Status.OPTIMAL, "no plan of the space can be faster"
    if cut or stopped:
        late = result.why if limit is None else f"the time limit of {limit:g} s is used up"
        return Status.STOPPED, cut or late
    gap = relative_gap(best.objective_s, bound)
    if gap is not None and gap <= simulator.stop.gap:
        return Status.STOPPED, f"within the asked gap of {simulator.stop.gap:.2%}"
    fitting = sum(candidate.fits for candidate in simulator.candidates)
    why = f"the fastest of {fitting} plans that fit" if fitting > 1 else "the only plan that fits"
    return Status.FEASIBLE, why


def _in_full(simulator: Simulator) -> SimulatedPlan | None:
    """The winner, simulated op by op in every stage; candidates are only estimated where deep.

    One that is not the fastest, or does not fit, when looked at in full gives way to the next.
    """
    whole: set[int] = set()  # by identity: candidates are large to compare
    while (best := simulator.best()) is not None and id(best) not in whole:
        place = next(i for i, one in enumerate(simulator.candidates) if one is best)
        simulation = simulator.attempt(
            f"{best.name} as {best.simulation.arrangement}",
            partial(_whole, best, simulator),
        )
        if simulation is None:
            del simulator.candidates[place]
            continue
        value = simulation.interval_s if simulator.steady_state else simulation.step_s
        full = replace(best, simulation=simulation, objective_s=value, fits=simulation.fits)
        simulator.candidates[place] = full
        whole.add(id(full))
    return best


def _whole(candidate: SimulatedPlan, simulator: Simulator) -> Simulation:
    return candidate.simulation.in_full(simulator.memo).capped(simulator.max_memory)


def _plan(
    simulator: Simulator, best: SimulatedPlan, said: tuple[Status, str], bound: float, spec: str
) -> Plan:
    simulation, (status, why) = best.simulation, said
    prediction = simulation.prediction(bound, best.objective_s if simulator.steady_state else None)
    cluster = cluster_ref(spec, simulator.cluster)
    origin = Origin(
        best.name, str(status), why, simulator.seed, simulator.clock.seconds(), __version__,
        tuple(Progress(s.seconds, s.objective, s.lower_bound) for s in simulator.history),
        _alternatives(simulator, best),
    )  # fmt: skip
    return Plan(
        simulator.workload.ref(),
        cluster,
        simulation.decided,
        prediction,
        origin,
        simulation.schedule,
    )


def _alternatives(simulator: Simulator, best: SimulatedPlan) -> tuple[Alternative, ...]:
    """The next best, and what stood against each; those that do not fit too."""
    others = sorted((c for c in simulator.candidates if c is not best), key=lambda c: c.objective_s)
    told = (
        (
            other.name,
            other.simulation,
            _against(other, best),
            other.objective_s if simulator.steady_state else None,
        )
        for other in others
    )
    return alternatives(told, best.simulation, simulator.settings.next_best)


def _against(other: SimulatedPlan, best: SimulatedPlan) -> str:
    """What stands against a plan; a faster one can only be cut where the best must not be."""
    if best.moved and other.fits and other.objective_s < best.objective_s:
        return "stages begin inside of blocks"
    return rejection(other.simulation, best.simulation)


def _why_not(simulator: Simulator, early: object) -> str:
    """Why there is no plan; a search that ended `early` does not know that there is none."""
    limit = simulator.stop.time_s
    if simulator.constraints and early and limit is not None and not simulator.stop.interrupted():
        return (
            f"nothing that fits with what was asked for ({simulator.constraints}) was found in the "
            f"time limit of {limit:g} s; give more time, or drop one of these constraints"
        )
    if simulator.constraints:
        asked = f"nothing fits with what was asked for ({simulator.constraints})"
        if simulator.constraints.pinned_to("recompute") == "selective":
            asked += ", where selective needs ops that are cheap to run again"
        return f"{asked}; drop one of these constraints"
    return what_would_fit(
        simulator.model, simulator.max_memory, simulator.settings.advice, limit if early else None
    )
