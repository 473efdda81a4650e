"""Searches that decide when each block of each micro-batch starts. The first is the default."""

from partita.problems.schedule import ScheduleProblem, ScheduleSolution
from partita.search.base import Search
from partita.search.schedule.brute import Brute
from partita.search.schedule.greedy import Greedy
from partita.search.schedule.periodic import Periodic

SEARCHES: dict[str, Search[ScheduleProblem, ScheduleSolution]] = {
    "greedy": Greedy(),
    "periodic": Periodic(),
    "brute": Brute(),
}
