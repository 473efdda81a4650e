"""Searches for `PartitionProblem`: stages and their devices. The first one is the default."""

from partita.problems.partition import PartitionProblem, PartitionSolution
from partita.search.base import Search
from partita.search.partition.acyclic import Acyclic
from partita.search.partition.auto import AutoPartition
from partita.search.partition.brute import BrutePartition
from partita.search.partition.chain import ChainPartition
from partita.search.partition.exact import ExactPartition
from partita.search.partition.metis import Metis
from partita.search.partition.mpipe import MixedPipe
from partita.search.partition.multilevel import Multilevel
from partita.search.partition.pipedream import PipeDream

SEARCHES: dict[str, Search[PartitionProblem, PartitionSolution]] = {
    "auto": AutoPartition(),
    "mpipe": MixedPipe(),
    "acyclic": Acyclic(),
    "multilevel": Multilevel(),
    "metis": Metis(),
    "pipedream": PipeDream(),
    "exact": ExactPartition(),
    "chain": ChainPartition(),
    "brute": BrutePartition(),
}
