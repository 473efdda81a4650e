"""Searches for `RtasksProblem`: tiles of operators on execution units. The first is the default."""

from partita.problems.rtasks import RtasksProblem, RtasksSolution
from partita.search.base import Search
from partita.search.rtasks.brute import BruteRTasks
from partita.search.rtasks.critical import CriticalPathList
from partita.search.rtasks.search import TileSearch
from partita.search.rtasks.wavefront import Wavefront

SEARCHES: dict[str, Search[RtasksProblem, RtasksSolution]] = {
    "search": TileSearch(),
    "list": CriticalPathList(),
    "wavefront": Wavefront(),
    "brute": BruteRTasks(),
}
