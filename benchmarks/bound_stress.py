"""Is any plan below the bound of its cell? Good plans, and their kin, simulated at random.

    python benchmarks/bound_stress.py --plans 400 --seed 1
    python benchmarks/bound_stress.py --case gpt2 2x4xA100 32 --plans 100

A cell and an order are drawn, the best cuts and strategies of the search's own tables made for them
(those lie nearest to the bound), and simulated; then some of the cuts are moved at random, stages
get other meshes, splits, ZeRO stages and checkpointing, and each such plan is simulated as well.
Every level of the bound of its cell must be below each of them. With `--few` cells with few
micro-batches are drawn, where waits and the end of a step matter.
"""

import argparse
import random
import time
from collections.abc import Iterator
from dataclasses import replace

from partita import units
from partita.cluster import resolve
from partita.costs.collectives import Collectives
from partita.errors import PartitaError
from partita.jobs.simulate import Simulation, simulate_stages
from partita.jobs.workload import load
from partita.lower import Memo
from partita.problems.joint import Cell, JointSolution
from partita.search.joint.bounds import PlanBounds
from partita.search.joint.candidates import USUAL_INTERLEAVED as USUAL
from partita.search.joint.candidates import Candidates
from partita.search.joint.cuts import SLACKS
from partita.search.joint.model import JointModel

CASES = (
    ("gpt2", "2x4xA100", 32),
    ("gpt2-xl", "2x8xA100", 256),
    ("resnet50", "8xA100", 32),
    ("vit-b16", "8xV100", 64),
    ("t5-base", "2x4xA100", 32),
    ("mixtral-8x7b@256", "4x8xA100", 64),
    ("bert-large", "4x4xP100", 64),
    ("unet", "8xA100", 16),
    ("gpt3-13b", "8x8xA100", 256),
    ("gpt2", "2xV100+4xP100", 24),
    ("vit-b16", "2xA100+2xH100", 32),
    ("gpt2", "2xV100+2xP100+2xA100", 24),
    ("t5-base", "2xA100+4xV100", 16),
    ("resnet50", "2xV100+2xP100@links=0.1", 32),
    ("bert-large", "2xA100+2xH100+2xV100+2xP100", 32),
    ("gpt2", "2xA100+2xH100@links=0.05", 16),
)
ROUNDING = 1e-9


class Kin:
    """Plans of one model's space."""

    def __init__(self, model: str, cluster: str, batch: int) -> None:
        self.work, self.cluster = load(model, batch=batch), resolve(cluster)
        self.memo = Memo(Collectives(self.cluster))
        self.model = JointModel(
            self.work.graph, "adamw", self.cluster, self.memo.collectives, name=model
        )
        self.bounds = PlanBounds(self.model)
        self.candidates = Candidates(self.model.problem, SLACKS, USUAL)

    def solutions(self, rng: random.Random, moved: int, few: bool) -> Iterator[JointSolution]:
        """The best of a cell in an order, at random, and what its cuts and stages may become."""
        problem = self.model.problem
        cell = rng.choice(problem.cells)
        groups = problem.groupings[cell.grouping].num_groups
        if few and cell.num_microbatches > 2 * groups:
            return
        orders = [k for k in range(len(problem.schedules)) if self.candidates.flights(cell, k)]
        if not orders or cell.num_microbatches > 64:
            return
        best = self.candidates.best(cell, rng.choice(orders))
        if best is None:
            return
        yield best.solution
        for _ in range(moved if len(best.solution.stages) > 1 else 0):
            yield moved_cuts(best.solution, rng)
        for _ in range(moved):
            yield self.otherwise(best.solution, rng)

    def otherwise(self, solution: JointSolution, rng: random.Random) -> JointSolution:
        """The same with other meshes, splits and checkpointing of some stages."""
        problem, cell = self.model.problem, solution.cell
        groups = problem.groupings[cell.grouping].num_groups
        schedule = problem.schedules[solution.schedule]
        stages = list(solution.stages)
        for number, stage in enumerate(stages):
            if rng.random() < 0.5:
                continue
            group = schedule.group_of(number, groups)
            shapes = problem.meshes_of(cell, group)
            mesh = rng.randrange(len(shapes))
            known = problem.strategies[problem.key(cell, group, shapes[mesh])]
            strategy = rng.randrange(len(known))
            again = rng.choice(problem.options(known[strategy]))
            stages[number] = stage._replace(mesh=mesh, strategy=strategy, checkpointing=again)
        return replace(solution, stages=tuple(stages))

    def simulated(self, solution: JointSolution) -> Simulation | None:
        """A plan as the search simulates it; None where it cannot be."""
        stages, schedule = self.model.stages(solution), self.model.schedule(solution)
        try:
            return simulate_stages(
                self.work, self.cluster, stages, schedule, self.memo, most_devices=1, quick=True
            )
        except PartitaError:
            return None

    def bound_s(self, cell: Cell) -> float:
        """The most that any level says."""
        return max(
            self.bounds.bound(cell, level, float("inf")) for level in range(self.bounds.num_levels)
        )


def moved_cuts(solution: JointSolution, rng: random.Random) -> JointSolution:
    """The same with some cuts a few segments further on or back."""
    stages = list(solution.stages)
    for _ in range(rng.randint(1, len(stages))):
        k = rng.randrange(len(stages) - 1)
        one, two = stages[k], stages[k + 1]
        cut = one.end + rng.choice((-2, -1, 1, 2))
        if one.first < cut < two.end:
            stages[k], stages[k + 1] = one._replace(end=cut), two._replace(first=cut)
    return replace(solution, stages=tuple(stages))


def row(
    model: str, cluster: str, batch: int, plans: int, seed: int, few: bool
) -> tuple[str, ...]:  # fmt: skip
    """One line: how many plans, how many below, how near the nearest came."""
    kin, rng, began = Kin(model, cluster, batch), random.Random(seed), time.process_time()
    tried = below = 0
    nearest = float("inf")
    bounds: dict[Cell, float] = {}
    for _ in range(20 * plans):
        if tried >= plans:
            break
        for solution in kin.solutions(rng, 4, few):
            simulation = kin.simulated(solution)
            if simulation is None or not simulation.fits:
                continue
            if solution.cell not in bounds:
                bounds[solution.cell] = kin.bound_s(solution.cell)
            tried += 1
            ratio = simulation.step_s / bounds[solution.cell]
            nearest = min(nearest, ratio)
            if ratio < 1 - ROUNDING:
                below += 1
                print(f"below: {model} {cluster} {simulation.arrangement}: {ratio:.6f}")
    seconds = time.process_time() - began
    return (
        model, cluster, str(batch), str(len(bounds)), str(tried), str(below),
        f"{nearest - 1:.2%}", units.seconds(seconds),
    )  # fmt: skip


def main() -> None:
    """Print a table; the exit code is 1 if a plan is below its bound."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", nargs=3, metavar=("MODEL", "CLUSTER", "BATCH"))
    parser.add_argument("--plans", type=int, default=100, help="of each case")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--few", action="store_true", help="micro-batches: 2 for each group at most"
    )
    options = parser.parse_args()
    cases = [tuple(options.case)] if options.case else CASES
    rows = [row(m, c, int(b), options.plans, options.seed, options.few) for m, c, b in cases]
    header = ("model", "machine", "batch", "cells", "plans", "below", "nearest", "CPU")
    print(units.table(header, rows))
    raise SystemExit(any(int(line[5]) for line in rows))


if __name__ == "__main__":
    main()
