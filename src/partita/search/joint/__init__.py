"""Searches for joint problems: cuts, devices, strategies, checkpointing and order in one.

On the record (`problems.joint`) alone:

auto             candidates of likely cells, the best evaluated, bounds for all cells
brute            everything; the oracle
space_bound      the bound of a whole space, from bounds of its cells
candidates       the best cuts of a cell for one schedule
ranges           what every strategy costs on every layer range
cuts             dynamic programming over cuts: the least bottleneck and fill, within budgets
interleaved      the same where groups of devices have several virtual stages
rounds           for looped orders: rounds of stages of equal length

From a model to the record, and bounds for plans that are simulated:

model            a model on a cluster as a problem; solutions as stages
groupings        which devices form groups, and their meshes
orders           what published orders hold
strategies       splits and ZeRO stages of a mesh for a few Lagrange multipliers on bytes
selective        which ops selective checkpointing runs again
plan_bounds      bounds of cells at three levels
bounds           what no plan of a cell is below, by multipliers
bound_segments   the least of a segment over all splits; `bound_tables`, `bound_backward` and
                 `bound_selective` make its tables
stage_bound      what given stages take at least, before they are simulated
"""

from partita.search.joint.auto import Auto
from partita.search.joint.brute import Brute

SEARCHES = {"auto": Auto(), "brute": Brute()}
