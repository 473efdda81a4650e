"""MAP-Elites: the best placement of every kind, where kinds are devices used and communication.

The archive has a niche for each number of devices used and each class of bytes sent between devices
per batch (none, or a power of two of the bytes of all edges). A new placement, changed or crossed
over from archived ones, takes its niche if it is the best there. What is kept shows how time trades
against devices and communication. Mouret and Clune, 2015; Exprimo's default method.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from partita.problems.placement import PlacementProblem, PlacementSolution
from partita.search.base import UNTIL_DONE, Result, Stop
from partita.search.placement.attempt import Attempt
from partita.search.placement.episodes import memory_multiplier
from partita.search.placement.fastsim import MAKESPAN, PEAKS, SCORE
from partita.search.placement.moves import line_of
from partita.search.placement.starts import random_placements, random_stages, single_devices
from partita.search.placement.tables import F64, I64, PlacementArrays
from partita.search.placement.variation import (
    costs,
    cross,
    genes_of_layers,
    layers_of_genes,
    mutate,
    mutate_zones,
    within_limit,
)

_CLASSES = 11  # none, then up to 1/512, 1/256, ..., 1/2, 1 of the bytes of all edges


@dataclass(frozen=True, slots=True)
class Elite:
    """The best placement of one niche."""

    devices_used: int
    communication_class: int
    communication_bytes: float  # sent between devices per batch, forward
    score_ms: float
    makespan_ms: float
    peak_memory_bytes: tuple[float, ...]  # per device
    placement: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Archive:
    """All elites, by devices used and then by communication; and how the search ended."""

    elites: tuple[Elite, ...]
    num_devices: int
    class_bytes: tuple[float, ...]  # the most bytes of each class of communication
    evaluations: int
    result: Result[PlacementSolution] | None = None  # None while the search runs

    def scores_ms(self) -> tuple[tuple[float | None, ...], ...]:
        """[devices used - 1][communication class]: the score there, None where there is none."""
        grid: list[list[float | None]] = [
            [None] * len(self.class_bytes) for _ in range(self.num_devices)
        ]
        for elite in self.elites:
            grid[elite.devices_used - 1][elite.communication_class] = elite.score_ms
        return tuple(map(tuple, grid))


@dataclass(frozen=True, slots=True)
class MapElites:
    """Fills an archive of the best placements by devices used and communication."""

    initial: int = 200
    brood: int = 100  # children per round
    rounds: int = 300
    crossover_rate: float = 0.4
    mutations: float = 1.2  # genes changed in a child, on average, besides one that always is
    zone_rate: float = 0.4
    watch: Callable[[Archive], None] | None = None  # told the archive after every round

    def __call__(
        self, problem: PlacementProblem, stop: Stop = UNTIL_DONE, seed: int = 0
    ) -> Result[PlacementSolution]:
        """Ends after its rounds; a problem of few genes has as few as five per gene."""
        result = self.archive(problem, stop, seed).result
        assert result is not None
        return result

    def archive(self, problem: PlacementProblem, stop: Stop = UNTIL_DONE, seed: int = 0) -> Archive:
        """The whole archive; its `result` is that of the search."""
        with Attempt(problem, stop, "map-elites", seed, archives=True) as attempt:
            net = attempt.net
            line, generator = line_of(problem, net), np.random.default_rng(seed)
            niches = _Niches(net)
            first = np.concatenate(
                (
                    single_devices(net),
                    random_stages(net, line, self.initial // 2, generator),
                    random_placements(net, self.initial, generator),
                )
            )[: self.initial]
            details = attempt.details(first)
            price = memory_multiplier(net, attempt.makespan_ms)
            niches.add(first, details, costs(details, price))
            for _ in range(min(self.rounds, 5 * len(line))):
                if not attempt.goes_on() or not niches.rows:
                    break
                children = layers_of_genes(net, self._children(net, line, niches, generator))
                details = attempt.details(children)
                niches.add(children, details, costs(details, price))
                if self.watch is not None:
                    self.watch(niches.archive(attempt.run.evaluations, None))
            return niches.archive(attempt.run.evaluations, attempt.result())

    def _children(
        self, net: PlacementArrays, line: I64, niches: "_Niches", generator: np.random.Generator
    ) -> I64:
        """Changed copies of random elites, some of them crossed over."""
        pool = genes_of_layers(net, np.array([row for row, _ in niches.rows.values()], np.int64))
        one, other = (pool[generator.integers(0, len(pool), self.brood)] for _ in range(2))
        crossed = generator.random(self.brood) < self.crossover_rate
        genes = np.where(crossed[:, None], cross(line, one, other, generator), one)
        zoned = generator.random(self.brood) < self.zone_rate
        zones = mutate_zones(net, line, genes, generator)
        single = mutate(net, genes, self.mutations / len(line), generator)
        return within_limit(net, np.where(zoned[:, None], zones, single))


class _Niches:
    """The archive while it grows."""

    def __init__(self, net: PlacementArrays) -> None:
        self.net = net
        self.parent = np.repeat(np.arange(len(net.output_bytes)), np.diff(net.child_start))
        total = float(net.output_bytes[self.parent].sum())
        self.class_bytes = (0.0, *(total * 2.0 ** (k - _CLASSES + 2) for k in range(_CLASSES - 1)))
        self.rows: dict[tuple[int, int], tuple[I64, F64]] = {}  # placement; cost, bytes, found

    def add(self, placements: I64, array: F64, cost: F64) -> None:
        """Let each placement take its niche if it is the best there."""
        used = (placements[:, :, None] == np.arange(len(self.net.limit_bytes))).any(axis=1).sum(1)
        cut = placements[:, self.parent] != placements[:, self.net.child]
        sent = (cut * self.net.output_bytes[self.parent]).sum(axis=1)
        classes = np.searchsorted(np.array(self.class_bytes) * (1 + 1e-12), sent)
        for index in np.flatnonzero(np.isfinite(cost)).tolist():
            niche = int(used[index]), min(int(classes[index]), _CLASSES - 1)
            if niche not in self.rows or cost[index] < self.rows[niche][1][0]:
                facts = np.concatenate(([cost[index], sent[index]], array[index]))
                self.rows[niche] = placements[index].copy(), facts

    def archive(self, evaluations: int, result: Result[PlacementSolution] | None) -> Archive:
        """The archive as it stands."""
        elites = tuple(
            Elite(
                devices_used=used,
                communication_class=kind,
                communication_bytes=float(facts[1]),
                score_ms=float(facts[2 + SCORE]),
                makespan_ms=float(facts[2 + MAKESPAN]),
                peak_memory_bytes=tuple(facts[2 + PEAKS :].tolist()),
                placement=tuple(row.tolist()),
            )
            for (used, kind), (row, facts) in sorted(self.rows.items(), key=lambda item: item[0])
        )
        return Archive(elites, len(self.net.limit_bytes), self.class_bytes, evaluations, result)
