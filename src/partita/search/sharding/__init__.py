"""Searches for `ShardingProblem`: a split for every op. The first one is the default."""

from partita.problems.sharding import ShardingProblem, ShardingSolution
from partita.search.base import Search
from partita.search.sharding.brute import BruteSharding
from partita.search.sharding.exact import ExactSharding
from partita.search.sharding.pase import Pase

SEARCHES: dict[str, Search[ShardingProblem, ShardingSolution]] = {
    "exact": ExactSharding(),
    "pase": Pase(),
    "brute": BruteSharding(),
}
