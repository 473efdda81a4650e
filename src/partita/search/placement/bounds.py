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

*Symmetry.* Two devices are alike if exchanging them, and their channels along with them, leaves
every number of the problem as it is. Alike is an equivalence: within a class all orders are as
good, so a search need look at one of them. Only rounding and the order of simultaneous events may
differ.

Sharing. For any weights y >= 0 of the devices, every placement keeps its busiest device busy for at
least

    batches * sum over layers of (least y_d * (forward + backward on d) of its devices d) / sum y

since the weighed work is at most the busiest device's time times the sum of the weights. This is
the dual of the best fractional assignment; good weights are found by multiplying those of devices
that got too much work (Arora, Hazan and Kale, 2012).
"""

from dataclasses import dataclass

import numpy as np

from partita.problems.placement import PlacementProblem
from partita.problems.placement import lower_bound as simple_bound
from partita.search.placement.feasible import joined
from partita.search.placement.tables import F64, I64, PlacementArrays

_ROUNDS = 60
# The simulation adds the same numbers in another order: leave room for its rounding.
ROUNDING = 1 - 1e-10


@dataclass(frozen=True, slots=True)
class Symmetry:
    """Which devices are alike, and what becomes of the channels when two change names."""

    first: I64  # per device: the first device that is like it
    channels: I64  # [one, other, channel] -> channel, where one and other are alike

    def slots(self, one: int, other: int) -> I64:
        """Devices and then channels, by the names they have after exchanging two alike devices."""
        devices = np.arange(len(self.first))
        devices[[one, other]] = other, one
        return np.concatenate((devices, len(devices) + self.channels[one, other]))


def symmetry_of(net: PlacementArrays) -> Symmetry:
    """The classes of alike devices."""
    num_devices, num_channels = len(net.limit_bytes), net.transfer_ms.shape[1]
    first = np.arange(num_devices)
    channels = np.zeros((num_devices, num_devices, num_channels), np.int64)
    channels[:] = np.arange(num_channels)
    for other in range(num_devices):
        for one in range(other):
            if first[one] != one and first[other] == other:
                continue  # it is not like the first of that class
            renamed = _exchanged(net, one, other)
            if renamed is not None:
                first[other] = min(first[other], first[one])
                channels[one, other] = channels[other, one] = renamed
    return Symmetry(first, channels)


def _exchanged(net: PlacementArrays, one: int, other: int) -> I64 | None:
    """The names of the channels after exchanging two devices; None if something would differ."""
    alike = (
        net.limit_bytes[one] == net.limit_bytes[other]
        and np.array_equal(net.job_ms[:, one], net.job_ms[:, other])
        and np.array_equal(net.may[:, one], net.may[:, other])
    )
    if not alike:
        return None
    names = np.arange(len(net.limit_bytes))
    names[[one, other]] = other, one
    before, after = net.route, net.route[np.ix_(names, names)]
    off_diagonal = ~np.eye(len(names), dtype=np.bool_)
    renamed: dict[int, int] = {-1: -1}
    for old, new in zip(before[off_diagonal].tolist(), after[off_diagonal].tolist(), strict=True):
        if renamed.setdefault(old, new) != new:
            return None
    used = {old for old in renamed if old >= 0}
    if {renamed[old] for old in used} != used:
        return None
    channels = np.arange(net.transfer_ms.shape[1])
    for old in used:
        channels[old] = renamed[old]
    if not np.array_equal(net.transfer_ms, net.transfer_ms[:, channels]):
        return None
    return channels


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
