"""Searches for `PartitionProblem`: stages and their devices. The first one is the default."""

from partita.problems.partition import PartitionProblem, PartitionSolution
from partita.search.base import Search
from partita.search.partition.brute import Brute
from partita.search.partition.chain import Chain

SEARCHES: dict[str, Search[PartitionProblem, PartitionSolution]] = {
    "chain": Chain(),
    "brute": Brute(),
}
