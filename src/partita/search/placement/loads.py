"""How long the devices need for all the work, however it is shared.

For any weights y >= 0 of the devices, every placement keeps its busiest device busy for at least

    batches * sum over layers of (least y_d * (forward + backward on d) of its devices d) / sum y

since the weighed work is at most the busiest device's time times the sum of the weights. This is
the dual of the best fractional assignment; good weights are found by multiplying those of devices
that got too much work (Arora, Hazan and Kale, 2012).
"""

import numpy as np

from partita.search.placement.tables import F64, I64, PlacementArrays

_ROUNDS = 60


def load_weights(net: PlacementArrays, first_alike: I64) -> F64:
    """The weights for which the bound is best, among those tried; alike devices weigh alike."""
    num_layers, num_devices = len(net.output_bytes), len(net.limit_bytes)
    both = both_ways(net)
    alike = first_alike[:, None] == first_alike[None, :]
    share = alike / alike.sum(axis=1, keepdims=True)
    rows = np.arange(num_layers)
    weights = best = np.ones(num_devices)
    best_bound, step = -1.0, 1.0
    if num_devices == 1 or not np.isfinite(both.min(axis=1)).all():
        return best
    for _ in range(_ROUNDS):
        weighed = both * weights
        chosen = weighed.argmin(axis=1)
        bound = float(weighed[rows, chosen].sum() / weights.sum())
        if bound > best_bound:
            best, best_bound = weights, bound
        work = share @ np.bincount(chosen, weights=both[rows, chosen], minlength=num_devices)
        most = work.max()
        if most <= 0 or work.min() >= most:
            break
        weights = weights * np.exp(step * (work - work.mean()) / most)
        weights = weights / weights.max()
        step *= 0.93
    return best


def load_bound(net: PlacementArrays, weights: F64) -> float:
    """Milliseconds that the busiest device needs at least, by these weights."""
    least = (both_ways(net) * weights).min(axis=1).sum()
    return float(net.batches * least / weights.sum())


def both_ways(net: PlacementArrays) -> F64:
    """Forward and backward of each layer on each device, infinite where it may not be."""
    num_layers = len(net.output_bytes)
    both = net.job_ms[:num_layers] + net.job_ms[num_layers:]
    return np.where(net.may[net.gene_of], both, np.inf)
