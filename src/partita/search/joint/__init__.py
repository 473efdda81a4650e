"""Searches for joint problems: cuts, devices, strategies, checkpointing and order in one.

On the record (`problems.joint`) alone:

auto             candidates of likely cells, the best evaluated, bounds for all cells
brute            everything; the oracle
cells            groupings of devices, likely cells, the bound of all cells
candidates       the best cuts of a cell for one schedule, also with virtual stages
cuts             costs of layer ranges; the least bottleneck and fill, within budgets

From a model to the record, and bounds for plans that are simulated:

model            a model on a cluster as a problem; solutions as stages
strategies       splits, ZeRO stages and ops to run again, for a few Lagrange multipliers on bytes
bounds           what no plan of a cell is below: at three levels, the last by multipliers
orders           what orders hold, and take at the least: lines of stages, longest paths, bubbles
bound_segments   the least of a segment over all splits; `bound_tables` makes its tables
"""

from partita.search.joint.auto import Auto
from partita.search.joint.brute import Brute

SEARCHES = {"auto": Auto(), "brute": Brute()}
