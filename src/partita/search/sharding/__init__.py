"""Searches for `ShardingProblem`: a split for every op. The first one is the default."""

from partita.problems.sharding import ShardingProblem, ShardingSolution
from partita.search.base import Search
from partita.search.sharding.brute import Brute
from partita.search.sharding.exact import Exact
from partita.search.sharding.pase import Pase

SEARCHES: dict[str, Search[ShardingProblem, ShardingSolution]] = {
    "exact": Exact(),
    "pase": Pase(),
    "brute": Brute(),
}
