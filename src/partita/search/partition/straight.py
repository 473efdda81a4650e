"""The least compute of a straight pipeline, proven: one stage per device, no edge backwards.

    b[v, s]: node v is in stage s or before; b[v, s] implies b[v, s + 1], and b[u, s] for u -> v
    minimise T, where every stage's work  sum of w[v] (b[v, s] - b[v, s - 1]) <= T

Communication is left out, so the optimum bounds every straight pipeline; it is the objective itself
where links are fast. With an answer T, node v and all it depends on take at least ceil(work / T)
stages, and so do all that depend on it: that leaves most nodes one stage only, and CP-SAT
proves models of thousands of nodes in a second. Times are whole nanoseconds where they can be;
otherwise they are rounded down, the total to about 2^40.
"""

from dataclasses import replace

import numpy as np

from partita.problems.partition import PartitionProblem, solution_of_stages
from partita.search.partition.chain import ChainPartition
from partita.search.partition.network import F64, I64
from partita.search.partition.orders import reordered
from partita.search.partition.walk import LabelWalk
from partita.search.schedule.solver import SolverOutcome, solve

_NO_COST = 1e99  # bytes per second
_PER_MS = 1e6  # nanoseconds
_ROUNDING = 1e-9
_NOTHING = 1e-200  # ms; quotients by less overflow


def prove_straight(walk: LabelWalk, effort: float, num_orders: int = 4) -> None:
    """Raise the bound to the least compute of a straight pipeline, and offer what has it."""
    problem, net = walk.problem, walk.net
    if not problem.straight or not net.alike_devices or walk.run.done():
        return
    count = problem.num_stages or net.num_devices
    edges = _edges(walk)
    work = net.work_ms[:, 0]
    most_ms = _some_answer_ms(problem, num_orders, walk.run.seed)
    low, high = windows(work, edges, count, most_ms)
    scale, exact = _scale(work)
    units = (np.rint(work * scale) if exact else np.floor(work * scale)).astype(np.int64)
    model = _StraightModel(units, edges, low, high, int(most_ms * scale * (1 + _ROUNDING)) + 1)
    ids = [node.id for node in problem.placed]

    def on_solution(values: tuple[int, ...]) -> None:
        stage = dict(zip(ids, model.stages(values), strict=True))
        walk.offer_solution(solution_of_stages(problem, stage, stage))

    def on_bound(bound: float) -> None:
        walk.run.bound(bound / scale * (1 - 1e-12))

    answer = solve(
        model.cp,
        model.variables,
        walk.run,
        effort=effort,
        linear=0,  # relaxations cost more than they bring here
        on_solution=on_solution,
        on_bound=on_bound,
    )
    if answer.outcome is SolverOutcome.SOLVED:
        assert answer.values is not None
        totals = np.bincount(model.stages(answer.values), weights=units)
        on_bound(float(totals.max()))


def windows(work: F64, edges: list[tuple[int, int]], count: int, most_ms: float) -> tuple[I64, I64]:
    """The first and the last stage of every node in answers of at most `most_ms`."""
    size = len(work)
    before = np.eye(size, dtype=bool)  # row v: what v needs, itself included
    for src, dst in edges:  # by consumer, so a row is complete before it is used
        before[dst] |= before[src]
    needed, following = before @ work, before.T @ work
    share = 1 / most_ms if most_ms > _NOTHING else 0.0
    low = np.maximum(np.ceil(needed * share - _ROUNDING) - 1, 0).astype(np.int64)
    high = np.minimum(count - np.ceil(following * share - _ROUNDING), count - 1).astype(np.int64)
    for src, dst in edges:
        low[dst] = max(low[dst], low[src])
    for src, dst in reversed(edges):
        high[src] = min(high[src], high[dst])
    return low, np.maximum(low, high)


class _StraightModel:
    """The stages as monotone booleans, where they are not settled by the windows."""

    def __init__(
        self, units: I64, edges: list[tuple[int, int]], low: I64, high: I64, most: int
    ) -> None:
        from ortools.sat.python import cp_model

        self.cp = cp = cp_model.CpModel()
        self.low, self.high = low.tolist(), high.tolist()
        self.begun: dict[tuple[int, int], cp_model.IntVar] = {}
        for node, (first, last) in enumerate(zip(self.low, self.high, strict=True)):
            for stage in range(first, last):
                self.begun[node, stage] = cp.new_bool_var("")
            for stage in range(first, last - 1):
                cp.add_implication(self.begun[node, stage], self.begun[node, stage + 1])
        self.variables = list(self.begun.values())
        for src, dst in edges:
            for stage in range(self.low[dst], self.high[src]):
                here, there = self.begun.get((dst, stage)), self.begun.get((src, stage))
                if here is not None and there is not None:
                    cp.add_implication(here, there)
                elif there is not None:
                    cp.add(there == 1)
                elif here is not None and stage < self.low[src]:
                    cp.add(here == 0)
        self._add_times(units, most)

    def _add_times(self, units: I64, most: int) -> None:
        from ortools.sat.python import cp_model

        count = max(self.high) + 1
        least = max(int(units.max()), -(-int(units.sum()) // count))
        largest = self.cp.new_int_var(least, max(most, least), "")
        terms: list[list[cp_model.LinearExpr]] = [[] for _ in range(count)]
        fixed = [0] * count
        for node, weight in enumerate(units.tolist()):
            first, last = self.low[node], self.high[node]
            if first == last:
                fixed[first] += weight
                continue
            for stage in range(first, last):
                terms[stage].append(weight * self.begun[node, stage])
                terms[stage + 1].append(-weight * self.begun[node, stage])
            fixed[last] += weight
        for stage in range(count):
            self.cp.add(sum(terms[stage]) + fixed[stage] <= largest)
        self.cp.minimize(largest)

    def stages(self, values: tuple[int, ...]) -> list[int]:
        """The stage of every node in an answer."""
        stages = list(self.high)
        for (node, _), value in zip(self.begun, values, strict=True):
            stages[node] -= value
        return stages


def _edges(walk: LabelWalk) -> list[tuple[int, int]]:
    """Producer and consumer of every edge, sorted by consumer: places in topological order."""
    place = {node.id: index for index, node in enumerate(walk.problem.placed)}
    pairs = {(place[edge.src], place[edge.dst]) for edge in walk.problem.inner_edges}
    return sorted(pairs, key=lambda pair: (pair[1], pair[0]))


def _some_answer_ms(problem: PartitionProblem, num_orders: int, seed: int) -> float:
    """The compute of the best cut of a few orders."""
    free = replace(
        problem,
        bandwidth_bytes_per_s=_NO_COST,
        links=None,
        memory_bytes=(),
        num_stages=None,
        recompute=False,
    )
    if problem.recompute:
        nodes = tuple(replace(node, bwd_ms=node.bwd_ms + node.fwd_ms) for node in problem.nodes)
        free = replace(free, nodes=nodes)
    some_answer_ms = []
    if problem.num_stages is not None:
        free = replace(
            free, num_devices=problem.num_stages, speeds=free.speeds[: problem.num_stages]
        )
    for index in range(num_orders):
        each = free if index == 0 else reordered(free, seed + index)
        objective = ChainPartition(700, rescue=False)(each).objective
        assert objective is not None, "a chain without caps can be cut"
        some_answer_ms.append(objective)
    return min(some_answer_ms)


def _scale(work: F64) -> tuple[float, bool]:
    """Units per ms, and whether all times are whole numbers of them."""
    whole = work * _PER_MS
    if whole.sum() < 2.0**50 and bool((np.abs(whole - np.rint(whole)) < 1e-4).all()):
        return _PER_MS, True
    return 2.0**40 / max(float(work.sum()), _NOTHING), False
