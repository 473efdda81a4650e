"""One placement job: candidates from searches and cuts, simulated, refined, the best one kept.

`place.py` says what it is for. A job is made for one workload on one machine and run once, by our
own rules (`own`), by Exprimo's (`exprimo`), or for a placement that is given (`again`).

Cuts of the network in a row, and changes of one, are worth a simulation of their own. Weight
gradients wait for nobody, so a device can make up for them while another goes on with the backward:
what our own simulation likes are stages whose neighbours overlap, and these are found by moving
whole runs of layers, not one layer at a time.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from partita import __version__
from partita.compiled import work_clock
from partita.costs.placement import PlacementModel
from partita.errors import VerificationError
from partita.jobs.place_program import (
    DISPATCHES,
    excess_bytes,
    lower_placement,
    simulate_placement,
)
from partita.jobs.place_result import Placed, SavedPlacement, SimulatedPlacement, stages_of
from partita.jobs.place_subject import Subject
from partita.jobs.place_trace import exprimo_timeline
from partita.jobs.workload import carried_file, cluster_ref
from partita.plans import CarriedFile, Origin, Plan, Prediction
from partita.problems.placement import (
    PlacementProblem,
    PlacementSolution,
    RecordConstraints,
    check,
    simulate_exprimo,
)
from partita.search.base import Improvement, Result, Search, Status, Stop
from partita.search.placement.attempt import usual_evaluations
from partita.search.placement.front import sweep
from partita.timeline import Timeline
from partita.units import size

RUNS = (1, 2, 4, 8, 16)  # layers that change sides together
PARTS = (0.25, 0.5, 0.75)  # of the work before a cut in two
# Weights of communication in the record, and the part of the time each search may take.
# A large program takes long to simulate: little time is left for changing placements then.
ROUNDS = {"small": ((1.0, 0.3), (0.5, 0.1)), "large": ((1.0, 0.65), (0.5, 0.15))}
LARGE = 2500  # ops of all batches of a step
REFINED = 4  # of the best placements are changed
REFINEMENTS = 400  # changed placements that are simulated op by op, at most
REFINED_OPS = 2_000_000  # simulated for that, where no limit is set
EASE = 1e-9


def cuts(model: PlacementModel) -> Iterator[tuple[int, ...]]:
    """Stages in a row: equal work on all devices and fewer, halves and quarters on two."""
    total = model.phase_total(1)
    order = np.argsort(total.sum(axis=0), kind="stable").tolist()  # fastest devices first
    done = np.cumsum(total.min(axis=1))
    share = done / done[-1] if done[-1] > 0 else np.arange(1, len(done) + 1) / len(done)
    for count in range(len(order), 2, -1):
        stage = np.minimum((share * count).astype(np.int64), count - 1)
        yield tuple(np.array(order)[stage].tolist())
    for other in order[1:3]:
        for first, second in ((order[0], other), (other, order[0])):
            for part in PARTS:
                yield tuple(np.where(share <= part, first, second).tolist())


def changes(model: PlacementModel, placement: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Runs of layers beside a cut put on its other side, longest runs first; then single layers."""
    last = len(placement)
    sides = [at for at in range(1, last) if placement[at - 1] != placement[at]]
    for length in reversed(RUNS):
        for at in sides:
            before, after = placement[at - 1], placement[at]
            start, end = max(0, at - length), min(last, at + length)
            yield (*placement[:start], *((after,) * (at - start)), *placement[at:])
            yield (*placement[:at], *((before,) * (end - at)), *placement[end:])
    for layer, parents in enumerate(model.parents):
        for parent in parents:
            here, there = placement[parent], placement[layer]
            if here != there:
                yield (*placement[:layer], here, *placement[layer + 1 :])
                yield (*placement[:parent], there, *placement[parent + 1 :])


def _in_seconds(step: Improvement) -> Improvement:
    return replace(
        step,
        objective=None if step.objective is None else step.objective / 1e3,
        lower_bound=None if step.lower_bound is None else step.lower_bound / 1e3,
    )


class PlacementJob:
    """The state of one job: what was tried, the bound, the history."""

    def __init__(
        self, subject: Subject, model: PlacementModel, constraints: RecordConstraints, method: str,
        search: Search[PlacementProblem, PlacementSolution], batches: int, in_flight: int,
        stop: Stop, seed: int,
    ) -> None:  # fmt: skip
        self.subject, self.model, self.constraints = subject, model, constraints
        self.method, self.search = method, search
        self.batches, self.in_flight = batches, in_flight
        self.stop, self.seed = stop, seed
        self.started = work_clock()
        self.tried: dict[tuple[int, ...], SimulatedPlacement] = {}
        self.history: list[Improvement] = []
        self.evaluations = 0
        self.bound_s = 0.0
        self.stopped = False
        self.archive: Any = None

    def again(self, saved: SavedPlacement, placement: tuple[int, ...]) -> Placed:
        """One given placement, timed; a claim that does not hold is refused."""
        claimed, origin = saved.plan.prediction, saved.plan.origin
        self.bound_s = claimed.lower_bound_s
        if saved.semantics == "exprimo":
            problem = self._exprimo_problem()
            best = self._scored(problem, placement)
            timeline, rule = exprimo_timeline(problem, placement), ""
        else:
            problem = self._record()
            best = self._offer(origin.method, placement)
            timeline, rule = simulate_placement(self.model, placement, self.batches, self.in_flight)
        if not math.isclose(best.step_s, claimed.step_s, rel_tol=1e-6):
            raise VerificationError(
                (f"the file predicts {claimed.step_s:.6g} s, it takes {best.step_s:.6g} s",)
            )
        status = Status(origin.status)
        return self._placed(problem, saved.semantics, status, origin.why, best, timeline, rule)

    # By Exprimo's rules.

    def _exprimo_problem(self) -> PlacementProblem:
        make = self.subject.exprimo
        if make is not None:
            return make(self.batches, self.in_flight, self.constraints)
        return self.model.problem(
            "exprimo",
            batches=self.batches,
            in_flight=self.in_flight,
            constraints=self.constraints,
        )

    def _scored(self, problem: PlacementProblem, placement: tuple[int, ...]) -> SimulatedPlacement:
        evaluation = simulate_exprimo(problem, placement)
        over = sum(
            max(0.0, peak - device.memory_limit_bytes)
            for peak, device in zip(evaluation.peak_memory_bytes, problem.devices, strict=True)
        )
        best = SimulatedPlacement(
            self.method, placement, evaluation.makespan_ms / 1e3, evaluation.peak_memory_bytes, over
        )
        self.tried[placement] = best
        return best

    def exprimo(self, with_front: bool) -> Placed:
        """The search's answer on the record, which is the whole truth here."""
        problem = self._exprimo_problem()
        refusal = self._never_fits(
            [(layer.name, layer.weight_bytes) for layer in problem.layers],
            [device.memory_limit_bytes for device in problem.devices],
        )
        if refusal:
            return self._infeasible(problem, "exprimo", refusal)
        result = self._solve(problem, self._forwarding(0.6 if with_front else 1.0))
        self.bound_s = (result.lower_bound or 0.0) / 1e3
        if result.solution is None:
            return self._infeasible(problem, "exprimo", result.why, result.status)
        best = self._scored(problem, result.solution.placement)
        if not best.fits:
            over = size(best.excess_bytes)
            why = f"the best that {self.method} found needs {over} more memory"
            return self._infeasible(problem, "exprimo", why, Status.STOPPED)
        if with_front and not self.stop.interrupted():
            for _, placement in self._alternatives(problem):
                self._scored(problem, placement)
        timeline = exprimo_timeline(problem, best.placement)
        proven = result.status is Status.OPTIMAL
        why = "no placement can be faster" if proven else result.why
        self.history = [_in_seconds(step) for step in result.history]
        return self._placed(problem, "exprimo", result.status, why, best, timeline, "")

    def _forwarding(self, part: float) -> Stop:
        """The stop rule, for a part of the time, with the record's ms told in seconds."""
        told = self.stop.progress

        def tell(step: Improvement) -> None:
            assert told is not None
            told(_in_seconds(step))

        target = None if self.stop.target is None else self.stop.target * 1e3
        limit = None if self.stop.time_s is None else self.stop.time_s * part
        progress = None if told is None else tell
        return replace(self.stop, time_s=limit, target=target, progress=progress)

    # By our own rules.

    def own(self, with_front: bool) -> Placed:
        """Candidates from several sources, simulated op by op; the fastest that fits."""
        problem = self._record()
        refusal = self._never_fits(
            [(names[0], sum(self.model.parameter_bytes(i))) for i, names in enumerate(self._names)],
            [self.model.capacity_bytes(d) for d in range(self.model.cluster.num_devices)],
        )
        if refusal:
            return self._infeasible(problem, "partita", refusal)
        self.bound_s = self.model.bound_s(self.constraints, self.batches, self.in_flight)
        self._singles(problem)
        self._cuts(problem)
        why = ""
        left = 0.5 if with_front else 1.0  # of the time, the rest is for the front
        large = self.batches * len(self.model.graph.ops) > LARGE
        for communication, part in ROUNDS["large" if large else "small"]:
            if self._out_of_time():
                break
            result = self._solve(self._record(communication), self._share(part * left))
            if result.status is Status.INFEASIBLE:
                return self._infeasible(problem, "partita", result.why)
            why = why or result.why
            if result.solution is not None:
                self._offer(f"{self.method} x{communication:g}", result.solution.placement)
            self._elites()
        if with_front and not self._out_of_time():
            for name, placement in self._alternatives(problem):
                self._offer(name, placement)
        self._refine(problem)
        return self._own_result(problem, why)

    @property
    def _by_size(self) -> bool:
        """Without a limit the model's size says how long to search: the same on any machine."""
        return self.stop.time_s is None and self.stop.evaluations is None

    @property
    def _names(self) -> tuple[tuple[str, ...], ...]:
        return self.model.layers

    def _record(
        self, communication: float = 1.0, constraints: RecordConstraints | None = None
    ) -> Any:
        return self.model.problem(
            "partita",
            batches=self.batches,
            in_flight=self.in_flight,
            constraints=constraints or self.constraints,
            communication=communication,
        )

    def _singles(self, problem: PlacementProblem) -> None:
        """All on one device, for the first of each kind that may."""
        kinds: set[str] = set()
        for index, device in enumerate(self.model.cluster.devices):
            placement = (index,) * len(self.model.layers)
            if device.kind not in kinds and not check(problem, PlacementSolution(placement)):
                kinds.add(device.kind)
                self._offer(f"all on {device.name}", placement)

    def _elites(self) -> None:
        """What a method that keeps an archive has kept is worth a look too."""
        for elite in getattr(self.archive, "elites", ())[:REFINEMENTS]:
            if not self._out_of_time():
                self._offer(f"{self.method} (elite)", tuple(elite.placement))

    def _cuts(self, problem: PlacementProblem) -> None:
        """Stages in a row."""
        for placement in cuts(self.model):
            if self._out_of_time():
                return
            if not check(problem, PlacementSolution(placement)):
                self._offer("cut in a row", placement)

    def _refine(self, problem: PlacementProblem) -> None:
        """Change the best of each sort for as long as that helps; the rule of dispatch stays."""
        fitting = sorted((x for x in self.tried.values() if x.fits), key=lambda x: x.step_s)
        sorts = {item.name: item for item in reversed(fitting)}  # the best of each sort
        best = sorted(sorts.values(), key=lambda item: item.step_s)
        budget = REFINEMENTS
        if self._by_size:
            ops = self.batches * len(self.model.graph.ops)
            budget = max(REFINED, min(budget, REFINED_OPS // ops))
        for start in best[:REFINED]:
            budget = self._descend(problem, start, budget)

    def _descend(self, problem: PlacementProblem, best: SimulatedPlacement, budget: int) -> int:
        """Take the first change that helps until none does; what is left of the budget."""
        better = True
        while better:
            better = False
            for placement in changes(self.model, best.placement):
                if budget == 0 or self._out_of_time():
                    return 0
                if placement in self.tried or check(problem, PlacementSolution(placement)):
                    continue
                budget -= 1
                simulated = self._offer("refined", placement, (best.dispatch,))
                if simulated.fits and simulated.step_s < best.step_s:
                    best, better = simulated, True
                    break
        return budget

    def _alternatives(self, problem: PlacementProblem) -> list[tuple[str, tuple[int, ...]]]:
        """Placements on fewer devices and in less memory, named, for the front."""
        every = self.model.cluster.num_devices
        most = min(self.constraints.max_devices or every, every)
        front_points = sweep(problem, self.search, self._share(0.4 / (4 * most)), self.seed)
        return [
            (f"front, {len(set(item.placement))} devices", item.placement) for item in front_points
        ]

    def _offer(
        self, name: str, placement: tuple[int, ...], rules: Sequence[str] = tuple(DISPATCHES)
    ) -> SimulatedPlacement:
        """Simulate a placement op by op; one that was tried is not tried again."""
        if placement in self.tried:
            return self.tried[placement]
        program = lower_placement(self.model, placement, self.batches, self.in_flight)
        runs = [(DISPATCHES[rule](program), rule) for rule in rules]
        timeline, rule = min(runs, key=lambda run: (excess_bytes(run[0]), run[0].makespan))
        candidate = self._candidate(name, placement, timeline, rule)
        before = self._best()
        self.tried[placement] = candidate
        if candidate.fits and (before is None or candidate.step_s < before.step_s):
            step = Improvement(self._seconds(), candidate.step_s, self.bound_s, len(self.tried))
            self.history.append(step)
            if self.stop.progress is not None:
                self.stop.progress(step)
        return candidate

    def _candidate(
        self, name: str, placement: tuple[int, ...], timeline: Timeline, rule: str
    ) -> SimulatedPlacement:
        peaks, over = self._peaks(timeline), excess_bytes(timeline)
        return SimulatedPlacement(name, placement, timeline.makespan, peaks, over, rule)

    def _peaks(self, timeline: Timeline) -> tuple[float, ...]:
        names = [memory.name for memory in timeline.program.memories]
        peaks = dict(zip(names, timeline.peaks().tolist(), strict=True))
        return tuple(peaks.get(device.name, 0.0) for device in self.model.cluster.devices)

    def _best(self) -> SimulatedPlacement | None:
        fitting = [item for item in self.tried.values() if item.fits]
        return min(fitting, key=lambda item: item.step_s, default=None)

    def _own_result(self, problem: PlacementProblem, why: str) -> Placed:
        best = self._best()
        if best is None and not self.tried:
            return self._infeasible(
                problem, "partita", "stopped before any placement was simulated", Status.STOPPED
            )
        if best is None:
            least = min(self.tried.values(), key=lambda item: item.excess_bytes)
            return self._infeasible(
                problem,
                "partita",
                f"no placement that fits was found; the thriftiest of {len(self.tried)} "
                f"({least.name}) needs {size(least.excess_bytes)} more memory: use more or larger "
                "devices, or a smaller batch",
                Status.STOPPED,
            )
        timeline, rule = simulate_placement(
            self.model, best.placement, self.batches, self.in_flight
        )
        best = self._candidate(best.name, best.placement, timeline, rule)
        self.tried[best.placement] = best
        if best.step_s <= self.bound_s * (1 + EASE):
            status, why = Status.OPTIMAL, "no placement can be faster"
        elif self.stopped:
            status = Status.STOPPED
            why = "interrupted" if self.stop.interrupted() else "the time limit is used up"
        else:
            status = Status.FEASIBLE
            why = f"the fastest of {len(self.tried)} placements simulated; the search: {why}"
        return self._placed(problem, "partita", status, why, best, timeline, rule)

    # Both.

    def _never_fits(self, layers: Sequence[tuple[str, float]], room: Sequence[float]) -> str:
        """Why no placement at all can hold the layers, if so."""
        name, largest = max(layers, key=lambda item: item[1])
        if largest > max(room):
            return (
                f"layer {name} alone holds {size(largest)}, and the largest device has "
                f"{size(max(room))}: use a larger device"
            )
        total = sum(amount for _, amount in layers)
        most = min(self.constraints.max_devices or len(room), len(room))
        have = sum(sorted(room, reverse=True)[:most])
        if total > have:
            return (
                f"all layers together hold {size(total)}, and {most} devices have {size(have)}: "
                "use more or larger devices, or an optimizer with less state"
            )
        return ""

    def _solve(self, problem: PlacementProblem, stop: Stop) -> Result[PlacementSolution]:
        archive = getattr(self.search, "archive", None)
        if callable(archive):
            self.archive = archive(problem, stop, self.seed)
            result: Result[PlacementSolution] = self.archive.result
        else:
            result = self.search(problem, stop, self.seed)
        self.evaluations += result.evaluations
        return result

    def _share(self, part: float) -> Stop:
        limit, evaluations = self.stop.time_s, self.stop.evaluations
        if self._by_size:
            size = len(self.model.layers), self.model.cluster.num_devices, self.batches
            evaluations = max(1, int(usual_evaluations(*size) * part))
        left = None if limit is None else max(0.05, min(limit * part, limit - self._seconds()))
        return Stop(time_s=left, evaluations=evaluations, interrupted=self.stop.interrupted)

    def _out_of_time(self) -> bool:
        late = self.stop.time_s is not None and self._seconds() >= self.stop.time_s
        self.stopped = self.stopped or late or self.stop.interrupted()
        return self.stopped

    def _seconds(self) -> float:
        return work_clock() - self.started

    def _infeasible(
        self, problem: PlacementProblem, semantics: str, why: str,
        status: Status = Status.INFEASIBLE,
    ) -> Placed:  # fmt: skip
        return self._placed(problem, semantics, status, why, None, None, "")

    def _placed(
        self, problem: PlacementProblem, semantics: str, status: Status, why: str,
        best: SimulatedPlacement | None, timeline: Timeline | None, rule: str,
    ) -> Placed:  # fmt: skip
        tried = sorted(self.tried.values(), key=lambda item: (item.excess_bytes, item.step_s))
        saved = None
        if best is not None and timeline is not None:
            plan = self._plan(best, timeline, status, why)
            saved = SavedPlacement(plan, semantics, self.batches, self.in_flight)
        return Placed(
            self.subject, self.model, problem, semantics, self.method, status, why, best,
            tuple(tried), timeline, rule, self.bound_s, self._seconds(), self.seed,
            self.evaluations, saved, tuple(self.history), self.archive,
        )  # fmt: skip

    def _plan(self, best: SimulatedPlacement, timeline: Timeline, status: Status, why: str) -> Plan:
        longest = {"device": 0.0, "link": 0.0}
        for busy, lane in zip(timeline.busy().tolist(), timeline.program.lanes, strict=True):
            longest[lane.kind] = max(longest[lane.kind], busy)
        used = sorted(set(best.placement))
        cluster = self.model.cluster
        prediction = Prediction(
            step_s=best.step_s,
            lower_bound_s=self.bound_s,
            compute_s=longest["device"],
            communication_s=longest["link"],
            peak_memory_bytes=tuple(best.peak_bytes[device] for device in used),
            capacity_bytes=tuple(float(cluster.kind_of(device).memory_bytes) for device in used),
        )
        machine = cluster_ref(self.subject.cluster_spec, cluster)
        return Plan(
            self.subject.workload.ref(),
            replace(machine, files=(*machine.files, *self._exprimo_files())),
            stages_of(self.model, best.placement),
            prediction,
            Origin(self.method, str(status), why, self.seed, self._seconds(), __version__),
        )

    def _exprimo_files(self) -> tuple[CarriedFile, ...]:
        """Exprimo's network and devices: its rules are simulated from these."""
        subject = self.subject
        if subject.exprimo is None:
            return ()
        return carried_file(subject.workload.spec), carried_file(subject.cluster_spec)
