"""Searches for `StreamsProblem`: stages of ops on one GPU. The first one is the default."""

from partita.problems.streams import StreamsProblem, StreamsSolution
from partita.search.base import Search
from partita.search.streams.barrier_free import BarrierFree
from partita.search.streams.brute import BruteStreams
from partita.search.streams.exact import ExactStreams
from partita.search.streams.greedy import GreedyStreams
from partita.search.streams.ios import Ios
from partita.search.streams.lazy import Lazy
from partita.search.streams.sequential import Sequential

SEARCHES: dict[str, Search[StreamsProblem, StreamsSolution]] = {
    "exact": ExactStreams(),
    "ios": Ios(),
    "lazy": Lazy(),
    "barrier-free": BarrierFree(),
    "greedy": GreedyStreams(),
    "sequential": Sequential(),
    "brute": BruteStreams(),
}
