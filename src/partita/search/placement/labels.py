"""A lower bound by labels along the cut layers: latency, loads and memory at once.

A *label* says what a placement of the layers up to a cut layer costs at least: the time of one batch
there and back, work per device and channel over all batches, bytes held per device. A stretch to
the next cut layer adds one of its options. What device or channel first gets work in a stretch
waits until the first batch has come so far, and after its last work the batch must still go
back, so the time so far counts in its load:

    makespan >= time of the stretches before + batches * its work

A label is dropped when its bound reaches the best score known, or when another one is no worse in
everything. When too many are left, groups of them are replaced by their least entries; that weakens
the bound, and keeps it valid. Devices that are alike are put in order.
"""

import numpy as np

from partita.search.placement.bounds import ROUNDING
from partita.search.placement.loads import both_ways, load_weights
from partita.search.placement.segments import Stretches, cut_layers, least
from partita.search.placement.symmetry import symmetry_of
from partita.search.placement.tables import F64, I64, Tables

_MOST_LAYERS = 1000
