"""Searches that decide on which device each layer runs. The first is the default."""

from partita.problems.placement import PlacementProblem, PlacementSolution
from partita.search.base import Search
from partita.search.placement.brute import Brute
from partita.search.placement.single import Single

SEARCHES: dict[str, Search[PlacementProblem, PlacementSolution]] = {
    "single": Single(),
    "brute": Brute(),
}
