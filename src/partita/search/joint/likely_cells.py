"""Which cells of a space are looked at, and in which order: likely ones first."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from partita.problems.joint import Cell, JointProblem

CountsOf = Mapping[int, Sequence[int]]  # of every grouping, the numbers of micro-batches there are


@dataclass(frozen=True, slots=True)
class LikelyCells:
    """Which numbers of micro-batches are looked at, for a number of groups p."""

    per_stage: int = 4  # micro-batches a group to begin with: small bubbles, shares not yet tiny
    samples: tuple[int, ...] = (1, 2, 4, 8)  # per data-parallel share of a micro-batch
    most_counts: int = 3  # numbers for each p; one less on a large cluster
    large: int = 128  # devices of a large cluster
    deepest: int = 64  # micro-batches a group at most
    few: int = 8  # micro-batches of one group: so many and less are looked at, whole shares or not
    far: float = 2.0  # doublings from the likely number of groups: beyond, one number will do

    def wanted(self, num_groups: int) -> int:
        """Micro-batches to begin with. A single stage has no bubble: more only for memory."""
        return 1 if num_groups == 1 else self.per_stage * num_groups

    def counts(
        self, problem: JointProblem, grouping: int, counts_of: CountsOf, *, everything: bool
    ) -> list[int]:
        """Numbers of micro-batches to look at: shares of one, two, ... samples on some mesh."""
        mine = sorted(counts_of[grouping])
        p = problem.groupings[grouping].num_groups
        wanted = self.wanted(p)

        def likely_first(count: int) -> tuple[float, int]:
            return abs(math.log2(count / wanted)), count

        if everything:
            return sorted(mine, key=likely_first)
        whole = set(self._whole_shares(problem, grouping))
        if p == 1 or not whole:
            whole |= {count for count in mine if count <= self.few}
        last = max(whole, default=0)
        good = [
            count
            for count in mine
            if count in whole
            and count <= self.deepest * p
            and (count >= p or p == 1 or count == last)
        ]
        size = sum(map(len, problem.groupings[grouping].devices))
        most = self.most_counts - (size > self.large)
        ranked = sorted(good or mine, key=likely_first)[:most]  # of a large batch none is so small
        if self._is_far(problem, p, counts_of):
            del ranked[1:]
        weighted = [
            count
            for count in mine
            if count not in ranked
            and any(mesh.weights for mesh in problem.meshes_of(Cell(grouping, count), 0))
        ]
        return [*ranked, *weighted]

    def _whole_shares(self, problem: JointProblem, grouping: int) -> Iterator[int]:
        """Numbers of micro-batches with whole samples for every data-parallel share."""
        patterns = set(problem.groupings[grouping].patterns)
        shapes = {
            mesh.sizes
            for (pattern, _), meshes in problem.meshes.items()
            if pattern in patterns
            for mesh in meshes
        }
        for shape in sorted(shapes):
            for ways in (shape[0], math.prod(shape)):
                for samples in self.samples:
                    count, rest = divmod(problem.batch, ways * samples)
                    if not rest and count:
                        yield count

    def _is_far(self, problem: JointProblem, num_groups: int, counts_of: CountsOf) -> bool:
        """Is the number of groups so unlikely that one number of micro-batches will do?"""
        known = {problem.groupings[grouping].num_groups for grouping in counts_of}
        if not problem.homogeneous or len(known) == 1:
            return False
        return abs(math.log2(num_groups / problem.likely_stages)) > self.far


USUAL_CELLS = LikelyCells()


def likely_groupings(problem: JointProblem, counts_of: CountsOf) -> list[int]:
    """One group first: nothing waits there. On heterogeneous devices, few groups first."""
    likely = problem.likely_stages

    def likely_first(grouping: int) -> tuple[float, ...]:
        p = problem.groupings[grouping].num_groups
        if not problem.homogeneous:
            return (p, grouping)
        return (p > 1, abs(math.log2(p / likely)), p, grouping)

    return sorted(counts_of, key=likely_first)
