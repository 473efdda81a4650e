"""Lower bounds of every placement's score.

*Latency.* Let S(l, d) be the least time from the start of a batch to the end of layer l's forward,
plus that from the start of its backward to the end of the batch, with l on device d:

    S(l, d) = forward + backward of l on d
              + max over parents p of (min over e of (S(p, e) + p's output there and gradient back))

Some last layer has S(l, d) at least, whatever the placement, and of the batches at most
`in_flight` overlap, so ceil(batches / in_flight) of them follow one another.

*Load.* The busiest device needs at least what the best fractional sharing of all work gives it.

*Memory.* When the forward of the only last layer ends, all outputs that have readers lie somewhere;
weights always do. What the devices together cannot hold is penalised.

All this is O(edges * devices ** 2).
"""

import numpy as np

from partita.problems.placement import PlacementProblem
from partita.problems.placement import lower_bound as simple_bound
from partita.search.placement.feasible import joined
from partita.search.placement.loads import load_bound, load_weights
from partita.search.placement.symmetry import symmetry_of
from partita.search.placement.tables import F64, PlacementArrays

# The simulation adds the same numbers in another order: leave room for its rounding.
ROUNDING = 1 - 1e-10


def lower_bound(problem: PlacementProblem, net: PlacementArrays) -> float:
    """No valid placement scores less than this; in milliseconds."""
    if not net.may.any(axis=1).all():
        return simple_bound(problem)  # no placement is valid: any number is below all scores
    sequential_batches = -(-net.batches // net.in_flight)
    latency = sequential_batches * latency_bound(net)
    load = load_bound(net, load_weights(net, symmetry_of(net).first))
    penalty = net.penalty * surely_over(net)
    bound = (max(latency, load) + penalty) * ROUNDING
    if not np.isfinite(bound):
        return simple_bound(problem)  # routes that are missing leave no valid placement
    return max(simple_bound(problem), float(bound))


def latency_bound(net: PlacementArrays) -> float:
    """Milliseconds that one batch takes there and back, at least; infinite if nothing is valid."""
    num_layers = len(net.output_bytes)
    both = net.job_ms[:num_layers] + net.job_ms[num_layers:]
    least = np.where(net.may[net.gene_of], both, np.inf)
    ways = there_and_back_ms(net)
    there_and_back = least.copy()
    for layer in range(num_layers):
        parents = net.parent[net.parent_start[layer] : net.parent_start[layer + 1]]
        if len(parents):
            before = (there_and_back[parents][:, :, None] + ways[parents]).min(axis=1)
            there_and_back[layer] += before.max(axis=0)
    return float(there_and_back.min(axis=1).max())


def there_and_back_ms(net: PlacementArrays) -> F64:
    """[layer, its device, a child's device]: sending the output there and its gradient back."""
    route = np.where(net.route >= 0, net.route, 0)
    if net.transfer_ms.shape[1] == 0:
        ways = np.zeros((len(net.output_bytes), *route.shape))
    else:
        ways = net.transfer_ms[:, route] + net.transfer_ms[:, route.T]
    ways[:, ~joined(net)] = np.inf
    devices = np.arange(len(route))
    ways[:, devices, devices] = 0.0
    return ways


def surely_over(net: PlacementArrays) -> float:
    """Bytes that all devices together lack, at some moment of every placement."""
    held = net.weight_bytes.sum()
    if net.one_sink:
        held += net.output_bytes[np.diff(net.child_start) > 0].sum()
    return float(max(0.0, held - net.limit_bytes.sum()))
