"""CP-SAT for small networks: a model that is never above the simulation, and cuts until both agree.

The model chooses a device per gene. Jobs of one device do not overlap, a job waits for what it
reads and for its transfer (of which a channel may carry several at once), weights and outputs are
held: all this holds in the simulation too, which besides serves its queues in order. So the optimum
of the model is a lower bound. Its placement is simulated and the score told to the model ("this
placement costs so much"), which then looks for another one; when its optimum reaches the best score
simulated, that is proven, to a billionth of it (logic-based Benders decomposition; Hooker and
Ottosson, 2003).

Of several batches the model has one, and the work of all.
"""

import threading
from dataclasses import dataclass
from typing import Any

import numpy as np

from partita.problems.placement import PlacementProblem, PlacementSolution
from partita.search.base import UNTIL_DONE, Result, Status, Stop
from partita.search.placement.attempt import Attempt
from partita.search.placement.episodes import make_episodes, memory_multiplier
from partita.search.placement.every import all_tried, num_placements
from partita.search.placement.feasible import joined
from partita.search.placement.lists import by_rank, earliest_end
from partita.search.placement.moves import line_of
from partita.search.placement.starts import single_devices, stages
from partita.search.placement.tables import I64, PlacementArrays
from partita.search.placement.walk import begin_episode, walker

_UNITS = 10**9  # the best score known, in units of the model
_MB = 1e6
_POLL_S = 0.05
_WALKS, _STEPS = 2, 3000  # of annealing, for a good score to begin with


@dataclass(frozen=True, slots=True)
class CpSat:
    """Model, simulate, cut, repeat; for networks of a few dozen layers."""

    most_choices: int = 150  # genes times devices; a larger problem is not modelled
    most_tried: int = 100  # a problem with at most so many placements is solved by trying all
    effort: float = 2.0  # in CP-SAT's deterministic time, about seconds

    def __call__(
        self, problem: PlacementProblem, stop: Stop = UNTIL_DONE, seed: int = 0
    ) -> Result[PlacementSolution]:
        """Ends when the best is proven or its effort is spent."""
        with Attempt(problem, stop, "cp-sat", seed) as attempt:
            net = attempt.net
            if not attempt.goes_on():
                return attempt.result()
            if num_placements(net) <= self.most_tried:
                return all_tried(attempt)
            listed = by_rank(net, earliest_end)
            line = line_of(problem, net)
            built = [single_devices(net), stages(net, line, seed)]
            attempt.score(np.concatenate(built + ([] if listed is None else [listed[None, :]])))
            choices = len(net.may) * len(net.limit_bytes)
            if choices > self.most_choices:
                why = f"{choices:,} choices are too many to model (at most {self.most_choices:,})"
                return attempt.result(why=why)
            if attempt.goes_on() and attempt.best_score > 0:
                _anneal(attempt, line, seed)
            if attempt.goes_on() and attempt.best_score > 0:
                return _Loop(self, attempt, seed).run()
            return attempt.result()


def _anneal(attempt: Attempt, line: I64, seed: int) -> None:
    """A short walk or two: the better the score to beat, the less there is to prove."""
    net = attempt.net
    scale = min(attempt.best_score, attempt.makespan_ms)
    walkers = [walker(net, seed, number) for number in range(_WALKS)]
    for walk in walkers:
        price = memory_multiplier(net, attempt.makespan_ms)
        begin_episode(walk, attempt.best, _STEPS, hot=0.05 * scale, cold=1e-3 * scale, price=price)
    make_episodes(attempt, line, walkers)


class _Loop:
    """The model with its cuts, solved in slices of effort."""

    def __init__(self, settings: CpSat, attempt: Attempt, seed: int) -> None:
        self.attempt, self.seed, self.left = attempt, seed, settings.effort
        self.model = _PlacementModel(attempt.net, _UNITS / attempt.best_score)
        self.slice = 0.25

    def run(self) -> Result[PlacementSolution]:
        """Solve and simulate by turns."""
        attempt, model = self.attempt, self.model
        model.cut(attempt.best, attempt.best_score)
        while attempt.goes_on() and self.left > 0:
            placement, bound, proven = self.solve()
            attempt.run.bound(bound)
            if placement is None and proven:
                break
            news = placement is not None and not model.knows(placement)
            if news and placement is not None and attempt.goes_on():
                score = float(attempt.score(placement[None, :])[0])
                if np.isfinite(score):
                    model.cut(placement, score)
            if proven and bound >= attempt.best_score * (1 - 3 / _UNITS):
                return attempt.result(Status.OPTIMAL, "no other placement can be better")
            if not news:
                self.slice *= 2
        return attempt.result()

    def solve(self) -> tuple[I64 | None, float, bool]:
        """A placement, a lower bound, and whether the placement is the model's optimum."""
        from ortools.sat.python import cp_model

        solver = cp_model.CpSolver()
        solver.parameters.num_workers = 1
        solver.parameters.random_seed = self.seed % 2**31
        solver.parameters.max_deterministic_time = min(self.slice, self.left)
        status = self._watched(solver)
        self.left -= max(1e-3, solver.response_proto.deterministic_time)
        bound = max(0.0, solver.best_objective_bound - 1) / self.model.scale
        if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return None, bound if status == cp_model.UNKNOWN else 0.0, False
        chosen = [
            next(device for device, literal in row.items() if solver.value(literal))
            for row in self.model.on
        ]
        placement = np.array(chosen, np.int64)[self.attempt.net.gene_of]
        return placement, bound, status == cp_model.OPTIMAL

    def _watched(self, solver: Any) -> Any:
        """Solve, and stop the solver when a stop rule holds."""
        ended = threading.Event()

        def watch() -> None:
            while not ended.wait(_POLL_S):
                if self.attempt.run.done():
                    solver.stop_search()

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        try:
            return solver.solve(self.model.model)
        finally:
            ended.set()
            watcher.join()


class _PlacementModel:
    """The CP-SAT model; times are whole units, rounded down."""

    def __init__(self, net: PlacementArrays, scale: float) -> None:
        from ortools.sat.python import cp_model

        self.net, self.scale = net, scale
        self.model: Any = cp_model.CpModel()
        self.known: set[tuple[int, ...]] = set()
        self.on = [
            {device: self.model.new_bool_var("") for device in np.flatnonzero(row).tolist()}
            for row in net.may
        ]
        for row in self.on:
            self.model.add_exactly_one(row.values())
        self.horizon = self.units(_longest(net))
        self.cost = self.model.new_int_var(0, 2**60, "")
        self._devices_used()
        self._schedule()
        self._memory()
        self.model.minimize(self.cost)

    def units(self, ms: float) -> int:
        """Milliseconds in units, rounded down."""
        return int(np.floor(ms * self.scale))

    def at(self, layer: int, device: int) -> Any:
        """Is the layer on the device? A literal, or 0 where it may not be."""
        return self.on[self.net.gene_of[layer]].get(device, 0)

    def knows(self, placement: I64) -> bool:
        """Has the score of this placement been told?"""
        return tuple(placement.tolist()) in self.known

    def cut(self, placement: I64, score: float) -> None:
        """Tell what a placement costs."""
        self.known.add(tuple(placement.tolist()))
        genes = placement[self.net.gene_layer[self.net.gene_start[:-1]]].tolist()
        literals = [self.on[gene][device] for gene, device in enumerate(genes)]
        self.model.add(self.cost >= self.units(score)).only_enforce_if(literals)

    def _devices_used(self) -> None:
        if self.net.max_devices >= len(self.net.limit_bytes):
            return
        used = [self.model.new_bool_var("") for _ in self.net.limit_bytes]
        for row in self.on:
            for device, literal in row.items():
                self.model.add_implication(literal, used[device])
        self.model.add(sum(used) <= self.net.max_devices)

    def _schedule(self) -> None:
        """One batch there and back, and the work of all batches."""
        net, model = self.net, self.model
        num_layers, num_devices = len(net.output_bytes), len(net.limit_bytes)
        self.makespan = model.new_int_var(0, 2**59, "")
        start = [model.new_int_var(0, self.horizon, "") for _ in range(2 * num_layers)]
        took = [self._duration(job) for job in range(2 * num_layers)]
        sequential_batches = -(-net.batches // net.in_flight)
        for job, begin in enumerate(start):
            model.add(self.makespan >= sequential_batches * (begin + took[job]))
        for layer in range(num_layers):
            if net.child_start[layer] == net.child_start[layer + 1]:
                model.add(start[num_layers + layer] >= start[layer] + took[layer])
            for child in net.child[net.child_start[layer] : net.child_start[layer + 1]].tolist():
                there, back = self._transfer(layer, child)
                back_job = num_layers + child
                model.add(start[child] >= start[layer] + took[layer] + there)
                model.add(start[num_layers + layer] >= start[back_job] + took[back_job] + back)
        for device in range(num_devices):
            self._one_at_a_time(device, start)

    def _duration(self, job: int) -> Any:
        layer = job % len(self.net.output_bytes)
        row = self.on[self.net.gene_of[layer]]
        return sum(self.units(self.net.job_ms[job, d]) * literal for d, literal in row.items())

    def _transfer(self, layer: int, child: int) -> tuple[Any, Any]:
        """Units for the output to the child and for its gradient back; forbids missing routes."""
        net, near = self.net, joined(self.net)
        there, back = [], []
        if net.gene_of[layer] == net.gene_of[child]:
            return 0, 0
        for source, one in self.on[net.gene_of[layer]].items():
            for target, other in self.on[net.gene_of[child]].items():
                if source == target:
                    continue
                if not near[source, target]:
                    self.model.add_bool_or(one.negated(), other.negated())
                    continue
                both = self.model.new_bool_var("")
                self.model.add_bool_or(one.negated(), other.negated(), both)
                there.append(self.units(net.transfer_ms[layer, net.route[source, target]]) * both)
                back.append(self.units(net.transfer_ms[layer, net.route[target, source]]) * both)
        return sum(there), sum(back)

    def _one_at_a_time(self, device: int, start: list[Any]) -> None:
        """The jobs of a device do not overlap; all batches together take their work."""
        net, intervals, work = self.net, [], []
        for job in range(len(start)):
            literal = self.at(job % len(net.output_bytes), device)
            length = self.units(net.job_ms[job, device])
            if isinstance(literal, int) or length == 0:
                continue
            intervals.append(
                self.model.new_optional_fixed_size_interval_var(start[job], length, literal, "")
            )
            work.append(length * literal)
        self.model.add_no_overlap(intervals)
        self.model.add(self.makespan >= net.batches * sum(work))

    def _memory(self) -> None:
        """Bytes over the limits, in whole megabytes, at their price."""
        net, model, prices = self.net, self.model, []
        num_layers = len(net.output_bytes)
        total = net.weight_bytes.sum() + net.output_bytes.sum()
        if total > 2**50:
            model.add(self.cost >= self.makespan)
            return
        most = int(total / _MB) + 1
        price = min(self.units(net.penalty * _MB), 2**58 // (most * len(net.limit_bytes)))
        for device in np.flatnonzero(net.limit_bytes < total).tolist():
            held = [
                int(net.weight_bytes[layer]) * self.at(layer, device) for layer in range(num_layers)
            ]
            for layer in range(num_layers if net.one_sink else 0):
                children = net.child[net.child_start[layer] : net.child_start[layer + 1]].tolist()
                readers = [self.at(child, device) for child in children]
                readers = [literal for literal in readers if not isinstance(literal, int)]
                if readers:
                    reads = model.new_bool_var("")
                    for literal in readers:
                        model.add_implication(literal, reads)
                    held.append(int(net.output_bytes[layer]) * reads)
            over = model.new_int_var(0, most, "")
            limit = int(np.ceil(net.limit_bytes[device]))
            model.add(int(_MB) * over + int(_MB) - 1 >= sum(held) - limit)
            prices.append(price * over)
        model.add(self.cost >= self.makespan + sum(prices))


def _longest(net: PlacementArrays) -> float:
    """Milliseconds that no start of a job of one batch need exceed."""
    jobs = net.job_ms.max(axis=1).sum()
    sent = net.transfer_ms.max(axis=1, initial=0.0)
    edges = np.diff(net.child_start)
    return float(jobs + 2 * (sent * edges).sum())
