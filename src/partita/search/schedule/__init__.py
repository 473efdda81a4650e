"""Searches that decide when each block of each micro-batch starts. The first is the default."""

from partita.problems.schedule import ScheduleProblem, ScheduleSolution
from partita.search.base import Search
from partita.search.schedule.auto import AutoSchedule
from partita.search.schedule.brute import BruteSchedule
from partita.search.schedule.exact_makespan import ExactMakespan
from partita.search.schedule.greedy import GreedySchedule
from partita.search.schedule.periodic import Periodic
from partita.search.schedule.tessel import Tessel

SEARCHES: dict[str, Search[ScheduleProblem, ScheduleSolution]] = {
    "auto": AutoSchedule(),
    "greedy": GreedySchedule(),
    "periodic": Periodic(),
    "exact-makespan": ExactMakespan(),
    "tessel": Tessel(),
    "brute": BruteSchedule(),
}
