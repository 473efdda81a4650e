"""Simulated annealing over labellings of nodes by devices, compiled.

    energy = (sum over devices of time^SHARPNESS)^(1 / SHARPNESS), about the largest device time

A change of the energy by the fraction x is accepted with probability exp(-x / temperature), and the
temperature falls geometrically from `hot` to `cold` over a given number of steps. A step moves
one node to a device of a neighbour or to any device, swaps two nodes, or moves a run of the
topological order. Moving node v touches the nets v makes or consumes: a step takes
O(pins of those nets + devices), whatever the size of the model.
"""

import math
from typing import NamedTuple

import numba
import numpy as np
import numpy.typing as npt

from partita.search.partition.network import F64, I64, Network

SHARPNESS = 64
_SQUARINGS = 6  # 2^6 = SHARPNESS
_LONGEST_RUN = 64
_TO_NEIGHBOUR, _ANYWHERE, _SWAP = 0.80, 0.83, 0.89  # shares of steps, summed up; the rest: runs


class State(NamedTuple):
    """A labelling with what `shift` keeps up to date, the best seen, and the random state."""

    device: I64  # per node
    consumers: I64  # per net and device: how many are there
    price_ms: F64  # per net and device: largest fwd + largest bwd of its consumers there
    time_ms: F64  # per device
    best_device: I64
    best_ms: F64  # one number
    random: npt.NDArray[np.uint64]  # one number


def start(net: Network, device: I64, seed: int) -> State:
    """The state of a labelling; its own best so far."""
    shape = len(net.net_src), net.num_devices
    state = State(
        device.astype(np.int64),
        np.zeros(shape, np.int64),
        np.zeros(shape),
        np.zeros(net.num_devices),
        device.astype(np.int64),
        np.full(1, np.inf),
        np.array([seed], np.uint64),
    )
    rebuild(net, state)
    state.best_ms[0] = state.time_ms.max()
    return state


@numba.njit(cache=True)
def rebuild(net: Network, state: State) -> None:
    """Set counts, prices and times from the labelling; takes rounding errors away, too."""
    state.consumers[:] = 0
    state.price_ms[:] = 0.0
    state.time_ms[:] = 0.0
    for node in range(len(net.work_ms)):
        state.time_ms[state.device[node]] += net.work_ms[node]
    for each in range(len(net.net_src)):
        home = state.device[net.net_src[each]]
        for at in range(net.pin_start[each], net.pin_start[each + 1]):
            state.consumers[each, state.device[net.pin_node[at]]] += 1
        for there in range(net.num_devices):
            if state.consumers[each, there]:
                price = price_of(net, state, each, there)
                state.price_ms[each, there] = price
                if there != home:
                    state.time_ms[home] += price
                    state.time_ms[there] += price


@numba.njit(cache=True)
def price_of(net: Network, state: State, each: int, there: int) -> float:
    """What the consumers of a net on one device cost, if any and if the producer is not there."""
    first = net.pin_start[each]
    if state.consumers[each, there] == 0:
        return 0.0
    if net.alike[each]:
        return float(net.pin_fwd_ms[first] + net.pin_bwd_ms[first])
    fwd = bwd = 0.0
    for at in range(first, net.pin_start[each + 1]):
        if state.device[net.pin_node[at]] == there:
            fwd = max(fwd, net.pin_fwd_ms[at])
            bwd = max(bwd, net.pin_bwd_ms[at])
    return fwd + bwd


@numba.njit(cache=True)
def shift(net: Network, state: State, node: int, to: int) -> None:
    """Move one node to a device."""
    frm = state.device[node]
    time_ms, price_ms = state.time_ms, state.price_ms
    time_ms[frm] -= net.work_ms[node]
    time_ms[to] += net.work_ms[node]
    for at in range(net.made_start[node], net.made_start[node + 1]):
        each = net.made_net[at]
        everywhere = 0.0
        for there in range(net.num_devices):
            everywhere += price_ms[each, there]
        # a device pays as home for all others, as guest for itself
        time_ms[frm] += price_ms[each, frm] - (everywhere - price_ms[each, frm])
        time_ms[to] += (everywhere - price_ms[each, to]) - price_ms[each, to]
    state.device[node] = to
    for at in range(net.used_start[node], net.used_start[node + 1]):
        each = net.used_net[at]
        home = state.device[net.net_src[each]]
        state.consumers[each, frm] -= 1
        state.consumers[each, to] += 1
        for there in (frm, to):
            price = price_of(net, state, each, there)
            if there != home:
                more = price - price_ms[each, there]
                time_ms[there] += more
                time_ms[home] += more
            price_ms[each, there] = price


@numba.njit(cache=True)
def _energy(time_ms: F64, scale: float) -> float:
    """The sum of (time * scale)^SHARPNESS."""
    total = 0.0
    for time in time_ms:
        power = time * scale
        for _ in range(_SQUARINGS):
            power *= power
        total += power
    return total


@numba.njit(cache=True)
def _random(state: State) -> float:
    """The next number in [0, 1): splitmix64."""
    state.random[0] += np.uint64(0x9E3779B97F4A7C15)
    mixed = state.random[0]
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed = mixed ^ (mixed >> np.uint64(31))
    return float(mixed >> np.uint64(11)) / 9007199254740992.0


@numba.njit(cache=True)
def _neighbour(net: Network, state: State, node: int) -> int:
    """A producer or consumer of a node, at random; the node itself if there is none."""
    made = net.made_start[node + 1] - net.made_start[node]
    used = net.used_start[node + 1] - net.used_start[node]
    if made + used == 0:
        return node
    which = int(_random(state) * (made + used))
    if which >= made:
        return int(net.net_src[net.used_net[net.used_start[node] + which - made]])
    each = net.made_net[net.made_start[node] + which]
    first, last = net.pin_start[each], net.pin_start[each + 1]
    return int(net.pin_node[first + int(_random(state) * (last - first))])


@numba.njit(cache=True)
def _propose(net: Network, state: State, moved: I64, target: I64) -> int:
    """Draw nodes to move and their new devices; how many."""
    num_nodes, device = len(net.work_ms), state.device
    node = int(_random(state) * num_nodes)
    kind = _random(state)
    if kind < _TO_NEIGHBOUR:
        moved[0], target[0] = node, device[_neighbour(net, state, node)]
        return 1
    anywhere = int(_random(state) * net.num_devices)
    if kind < _ANYWHERE:
        moved[0], target[0] = node, anywhere
        return 1
    if kind < _SWAP:
        other = int(_random(state) * num_nodes)
        moved[0], target[0], moved[1], target[1] = node, device[other], other, device[node]
        return 2 if device[node] != device[other] else 0
    length = min(int(1.0 / (1.0 - _random(state))), _LONGEST_RUN)
    end = min(num_nodes, node + length)
    which = _random(state)
    if which < 0.45 and node > 0:
        anywhere = device[node - 1]
    elif which < 0.9 and end < num_nodes:
        anywhere = device[end]
    count = 0
    for each in range(node, end):
        if device[each] != anywhere:
            moved[count], target[count] = each, anywhere
            count += 1
    return count


@numba.njit(cache=True)
def anneal(
    net: Network, state: State, first: int, last: int, steps: int, hot: float, cold: float
) -> None:
    """Steps `first` to `last` of a walk of `steps` that cools from `hot` to `cold`."""
    rebuild(net, state)
    largest = state.time_ms.max()
    scale = 1.0 / largest if largest > 0.0 else 1.0
    energy = _energy(state.time_ms, scale)
    moved = np.zeros(_LONGEST_RUN, np.int64)
    target = np.zeros(_LONGEST_RUN, np.int64)
    temperature = hot
    for step in range(first, last):
        if (step - first) % 64 == 0:
            temperature = hot * (cold / hot) ** (step / steps)
        count = _propose(net, state, moved, target)
        if count == 0 or (count == 1 and state.device[moved[0]] == target[0]):
            continue
        for index in range(count):
            origin = state.device[moved[index]]
            shift(net, state, moved[index], target[index])
            target[index] = origin
        after = _energy(state.time_ms, scale)
        luck = -math.log(1.0 - _random(state)) if after > energy else 0.0
        if after <= energy * math.exp(luck * temperature * SHARPNESS):
            energy = after
            largest = state.time_ms.max()
            if largest < state.best_ms[0]:
                state.best_ms[0] = largest
                state.best_device[:] = state.device
        else:
            for index in range(count - 1, -1, -1):
                shift(net, state, moved[index], target[index])
