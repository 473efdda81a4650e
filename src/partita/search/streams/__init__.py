"""Searches for `StreamsProblem`: stages of ops on one GPU. The first one is the default."""

from partita.problems.streams import StreamsProblem, StreamsSolution
from partita.search.base import Search
from partita.search.streams.brute import Brute
from partita.search.streams.sequential import Sequential

SEARCHES: dict[str, Search[StreamsProblem, StreamsSolution]] = {
    "sequential": Sequential(),
    "brute": Brute(),
}
