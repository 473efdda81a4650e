"""Searches for joint problems: cuts, devices, strategies, checkpointing and order in one.

auto          candidates of likely cells, the best evaluated, bounds for all cells
brute         everything; the oracle
space_bound   the bound of a whole space, from bounds of its cells
candidates    the best cuts of a cell for one schedule
ranges        what every strategy costs on every layer range
cuts          dynamic programming over cuts: the least bottleneck and fill, within memory budgets
interleaved   the same where groups of devices have several virtual stages
rounds        for looped orders: rounds of stages of equal length
"""

from partita.search.joint.auto import Auto
from partita.search.joint.brute import Brute

SEARCHES = {"auto": Auto(), "brute": Brute()}
