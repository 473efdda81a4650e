"""Cuts one topological order into contiguous blocks, one per device: a simple, quick baseline.

    best[k][b] = min over a < b of max(best[k - 1][a], block(a, b))

for k = 1, 2, ... blocks; block(a, b) is the device time of the nodes between the cuts a and b. What
a block receives is exact: it depends on a and b alone. What it sends depends on how many later
blocks want it, so the table assumes one, the least possible; each of the P answers is then
evaluated by the problem's own rules. O(P cuts^2) time and O(cuts^2) memory, in numpy; models of
more than `max_cuts` nodes are cut only at places evenly spaced by time.

PipeDream's planner (Narayanan et al., SOSP 2019) has this shape, without the producer's side.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from partita.problems.partition import (
    PartitionEdge,
    PartitionProblem,
    PartitionSolution,
    check,
    evaluate,
    lower_bound,
    stages_from_devices,
)
from partita.search.base import UNTIL_DONE, Result, Run, Stop

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ChainPartition:
    """Cuts the model's order into contiguous blocks, one per device, by dynamic programming."""

    max_cuts: int = 2000
    rescue: bool = True  # look for any other answer where no cut is valid

    def __call__(
        self, problem: PartitionProblem, stop: Stop = UNTIL_DONE, seed: int = 0
    ) -> Result[PartitionSolution]:
        """Search until every number of blocks was tried."""
        run: Run[PartitionSolution] = Run(stop, "chain", seed)
        run.bound(lower_bound(problem))
        if run.done():
            return run.result()
        cuts = cut_places(problem, self.max_cuts)
        moved = moved_ms(problem, cuts)
        best = np.full(len(cuts), np.inf)
        best[0] = 0.0
        origins: list[Ints] = []
        for device in range(min(problem.num_devices, len(cuts) - 1)):
            if run.done():
                break
            if device == 0 or not problem.alike:
                blocks = moved + work_ms(problem, cuts, device)
            candidates = np.maximum(best[:, None], blocks)
            origins.append(candidates.argmin(axis=0))
            best = candidates.min(axis=0)
            run.evaluations += 1
            solution = _solution(problem, cuts, origins)
            if np.isfinite(best[-1]) and not check(problem, solution):
                run.offer(solution, evaluate(problem, solution))
        return self._ending(problem, run)

    def _ending(
        self, problem: PartitionProblem, run: Run[PartitionSolution]
    ) -> Result[PartitionSolution]:
        if not self.rescue or run.solution is not None:
            return run.result()
        from partita.search.partition.ending import ending  # which offers chains itself
        from partita.search.partition.walk import LabelWalk

        return ending(LabelWalk(problem, run))


def cut_places(problem: PartitionProblem, max_cuts: int) -> Ints:
    """Where to cut: before these positions of the order; the first is 0, the last is its end."""
    times = np.array([problem.node_ms(node, 0) for node in problem.placed])
    if len(times) <= max_cuts:
        return np.arange(len(times) + 1)
    done = np.concatenate(([0.0], np.cumsum(times)))
    even = np.searchsorted(done, np.linspace(0.0, done[-1], max(2, max_cuts)))
    return np.unique(np.concatenate(([0], even, [len(times)])))


def block_times_ms(problem: PartitionProblem, cuts: Ints) -> Floats:
    """Time of the nodes from cut a to cut b, for every a < b; inf elsewhere."""
    return moved_ms(problem, cuts) + work_ms(problem, cuts, 0)


def work_ms(problem: PartitionProblem, cuts: Ints, device: int) -> Floats:
    """How long a device works on the nodes from cut a to cut b; inf if it cannot hold them."""
    times = [problem.node_ms(node, device) for node in problem.placed]
    total = _between(times, cuts)
    if problem.memory_bytes:
        held = _between([problem.node_bytes(node) for node in problem.placed], cuts)
        total[held > problem.memory_bytes[device] * (1 + 1e-12)] = np.inf
    total[np.tril_indices(len(cuts))] = np.inf
    return total


def _between(values: Sequence[float], cuts: Ints) -> Floats:
    done = np.concatenate(([0.0], np.cumsum(np.array(values, np.float64))))[cuts]
    difference: Floats = done[None, :] - done[:, None]
    return difference


def moved_ms(problem: PartitionProblem, cuts: Ints) -> Floats:
    """How long the block from cut a to cut b sends and receives, over an average link."""
    rates = [problem.bandwidth_bytes_per_s]
    if problem.links is not None:
        rates = [
            rate
            for src, row in enumerate(problem.links.bandwidth)
            for dst, rate in enumerate(row)
            if src != dst
        ] or rates
    ms_per_byte = sum(1e3 / rate for rate in rates) / len(rates)
    moved: Floats = (_received_bytes(problem, cuts) + _sent_bytes(problem, cuts)) * ms_per_byte
    return moved


def _received_bytes(problem: PartitionProblem, cuts: Ints) -> Floats:
    """What block (a, b) gets from producers before it, and the gradients it sends them."""
    steps = np.zeros((len(cuts), len(cuts) + 1))  # change at b, to be summed up along b
    for producer, consumers in _by_producer(problem):
        places = [producer, *(place for place, _ in consumers)]
        rows = np.searchsorted(cuts, places, side="right")
        for first in range(len(consumers)):
            begin, end = rows[first], rows[first + 1]  # blocks whose first consumer this is
            if begin < end:
                for index, more in _growth([edge for _, edge in consumers[first:]]):
                    steps[begin:end, rows[first + 1 + index]] += more
    return steps.cumsum(axis=1)[:, :-1]


def _growth(edges: Sequence[PartitionEdge]) -> Iterator[tuple[int, int]]:
    """Where the largest fwd_bytes and bwd_bytes so far grow, and by how much together."""
    most_fwd = max(edge.fwd_bytes for edge in edges)
    most_bwd = max(edge.bwd_bytes for edge in edges)
    fwd = bwd = 0
    for index, edge in enumerate(edges):
        more_fwd, more_bwd = max(fwd, edge.fwd_bytes), max(bwd, edge.bwd_bytes)
        yield index, (more_fwd - fwd) + (more_bwd - bwd)
        fwd, bwd = more_fwd, more_bwd
        if (fwd, bwd) == (most_fwd, most_bwd):
            return


def _sent_bytes(problem: PartitionProblem, cuts: Ints) -> Floats:
    """What block (a, b) sends to one later block, and the gradients it gets from it."""
    steps = np.zeros((len(cuts), len(cuts)))  # of the producers just after cut a
    for producer, consumers in _by_producer(problem):
        places = [producer, *(place for place, _ in consumers)]
        columns = np.searchsorted(cuts, places, side="right")
        fwd = bwd = 0
        for index in reversed(range(len(consumers))):
            edge = consumers[index][1]
            fwd, bwd = max(fwd, edge.fwd_bytes), max(bwd, edge.bwd_bytes)
            steps[columns[0] - 1, columns[index] : columns[index + 1]] += fwd + bwd
    return steps[::-1].cumsum(axis=0)[::-1]


def _by_producer(
    problem: PartitionProblem,
) -> list[tuple[int, list[tuple[int, PartitionEdge]]]]:
    """Per producer: its place in the order, and its consumers by their places."""
    place = {node.id: index for index, node in enumerate(problem.placed)}
    consumers: dict[int, list[tuple[int, PartitionEdge]]] = {}
    for edge in problem.inner_edges:
        consumers.setdefault(place[edge.src], []).append((place[edge.dst], edge))
    return [(src, sorted(targets, key=lambda each: each[0])) for src, targets in consumers.items()]


def _solution(problem: PartitionProblem, cuts: Ints, origins: Sequence[Ints]) -> PartitionSolution:
    """Follow the cuts back from the end; block k runs on device k."""
    ends = [len(cuts) - 1]
    for origin in reversed(origins):
        ends.append(int(origin[ends[-1]]))
    places = cuts[ends[::-1]]
    devices = np.searchsorted(places[1:], np.arange(places[-1]), side="right")
    ids = (node.id for node in problem.placed)
    return stages_from_devices(problem, dict(zip(ids, devices.tolist(), strict=True)))
