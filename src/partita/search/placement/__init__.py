"""Searches that decide on which device each layer runs. The first is the default."""

from partita.problems.placement import PlacementProblem, PlacementSolution
from partita.search.base import Search
from partita.search.placement.annealing import Annealing
from partita.search.placement.auto import AutoPlacement
from partita.search.placement.brute import BrutePlacement
from partita.search.placement.cp_sat import CpSat
from partita.search.placement.critical_path import CriticalPath
from partita.search.placement.etf import Etf
from partita.search.placement.genetic import Genetic
from partita.search.placement.heft import Heft
from partita.search.placement.hill_climbing import HillClimbing
from partita.search.placement.map_elites import MapElites
from partita.search.placement.particle_swarm import ParticleSwarm
from partita.search.placement.random_search import RandomSearch
from partita.search.placement.single import Single

SEARCHES: dict[str, Search[PlacementProblem, PlacementSolution]] = {
    "auto": AutoPlacement(),
    "annealing": Annealing(),
    "hill-climbing": HillClimbing(),
    "genetic": Genetic(),
    "map-elites": MapElites(),
    "particle-swarm": ParticleSwarm(),
    "random": RandomSearch(),
    "cp-sat": CpSat(),
    "heft": Heft(),
    "etf": Etf(),
    "critical-path": CriticalPath(),
    "single": Single(),
    "brute": BrutePlacement(),
}
