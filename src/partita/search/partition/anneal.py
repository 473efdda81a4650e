"""Simulated annealing over labellings of nodes by devices, compiled.

    energy = (sum over devices of time^SHARPNESS)^(1 / SHARPNESS), about the largest device time

A change of the energy by the fraction x is accepted with probability exp(-x / temperature), and the
temperature falls geometrically from `hot` to `cold` over a given number of steps. A step moves
one node to a device of a neighbour or to any device, swaps two nodes, or moves a run of the
topological order. Moving node v touches the nets v makes or consumes: a step takes
O(pins of those nets + devices), whatever the size of the model.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from partita.compiled import compiled
from partita.search.partition.network import F64, I64, PartitionNetwork

_Function = TypeVar("_Function", bound=Callable[..., Any])
SHARPNESS = 64
_SQUARINGS = 6  # 2^6 = SHARPNESS
_LONGEST_RUN = 64
_OVER = 2.0  # what holding twice the cap costs, in largest device times
_TO_NEIGHBOUR, _ANYWHERE, _SWAP = 0.80, 0.83, 0.89  # shares of steps, summed up; the rest: runs


def inner(function: _Function) -> _Function:
    """Compile a function that only compiled code calls: without wrappers, in half the time."""
    options: dict[str, Any] = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
    return compiled(forceinline=True, **options)(function)


@inner
def keep(kept: I64, now: I64) -> None:
    """Copy a row; `kept[:] = now` takes seconds more to compile."""
    for i in range(len(now)):
        kept[i] = now[i]


class State(NamedTuple):
    """A labelling with what `shift` keeps up to date, the best seen, and the random state."""

    device: I64  # per node; -1: none yet
    consumers: I64  # per net and device: how many are there
    fwd: F64  # per net and device: the largest of its consumers there, in bytes
    bwd: F64
    time_ms: F64  # per device
    held_bytes: F64  # per device
    best_device: I64
    best_ms: F64  # one number; inf: nothing seen that keeps to the caps
    random: npt.NDArray[np.uint64]  # one number


def start(net: PartitionNetwork, device: I64, seed: int) -> State:
    """The state of a labelling; its own best so far."""
    shape = len(net.net_src), net.num_devices
    state = State(
        device.astype(np.int64),
        np.zeros(shape, np.int64),
        np.zeros(shape),
        np.zeros(shape),
        np.zeros(net.num_devices),
        np.zeros(net.num_devices),
        device.astype(np.int64),
        np.full(1, np.inf),
        np.array([seed], np.uint64),
    )
    rebuild(net, state)
    if (state.held_bytes <= net.caps_bytes).all():
        state.best_ms[0] = state.time_ms.max()
    return state


@compiled()
def rebuild(net: PartitionNetwork, state: State) -> None:
    """Set counts, sizes and times from the labelling; takes rounding errors away, too."""
    state.consumers[:] = 0
    state.fwd[:] = 0.0
    state.bwd[:] = 0.0
    state.time_ms[:] = 0.0
    state.held_bytes[:] = 0.0
    for node in range(len(net.held_bytes)):
        here = state.device[node]
        state.time_ms[here] += net.work_ms[node, here]
        state.held_bytes[here] += net.held_bytes[node]
    for each in range(len(net.net_src)):
        for at in range(net.pin_start[each], net.pin_start[each + 1]):
            state.consumers[each, state.device[net.pin_node[at]]] += 1
        home = state.device[net.net_src[each]]
        for there in range(net.num_devices):
            if state.consumers[each, there]:
                measure(net, state, each, there)
                if there != home:
                    charge(net, state, each, home, there, 1.0)


@inner
def measure(net: PartitionNetwork, state: State, each: int, there: int) -> None:
    """Bring the largest fwd and bwd of a net's consumers on one device up to date."""
    first = net.pin_start[each]
    fwd = bwd = 0.0
    if state.consumers[each, there] > 0:
        if net.alike[each]:
            fwd, bwd = net.pin_fwd[first], net.pin_bwd[first]
        else:
            for at in range(first, net.pin_start[each + 1]):
                if state.device[net.pin_node[at]] == there:
                    fwd = max(fwd, net.pin_fwd[at])
                    bwd = max(bwd, net.pin_bwd[at])
    state.fwd[each, there] = fwd
    state.bwd[each, there] = bwd


@inner
def charge(
    net: PartitionNetwork, state: State, each: int, home: int, there: int, sign: float
) -> None:
    """Add (or, with sign -1, take away) what a net costs between two devices."""
    fwd, bwd = state.fwd[each, there], state.bwd[each, there]
    ms = fwd * net.per_byte_ms[home, there] + bwd * net.per_byte_ms[there, home]
    if fwd > 0.0:
        ms += net.net_messages[each, 0] * net.latency_ms[home, there]
    if bwd > 0.0:
        ms += net.net_messages[each, 1] * net.latency_ms[there, home]
    state.time_ms[home] += sign * ms
    state.time_ms[there] += sign * ms
    state.held_bytes[there] += sign * net.kept_received * fwd


@compiled(forceinline=True)
def shift(net: PartitionNetwork, state: State, node: int, to: int) -> None:
    """Move one node to a device."""
    frm = state.device[node]
    state.time_ms[frm] -= net.work_ms[node, frm]
    state.time_ms[to] += net.work_ms[node, to]
    state.held_bytes[frm] -= net.held_bytes[node]
    state.held_bytes[to] += net.held_bytes[node]
    for at in range(net.made_start[node], net.made_start[node + 1]):
        each = net.made_net[at]
        if net.uniform:
            _rehome(net, state, each, frm, to)
            continue
        for there in range(net.num_devices):
            if state.consumers[each, there]:
                if there != frm:
                    charge(net, state, each, frm, there, -1.0)
                if there != to:
                    charge(net, state, each, to, there, 1.0)
    state.device[node] = to
    for at in range(net.used_start[node], net.used_start[node + 1]):
        each = net.used_net[at]
        home = state.device[net.net_src[each]]
        recount(net, state, each, home, frm, -1)
        recount(net, state, each, home, to, 1)


@inner
def _rehome(net: PartitionNetwork, state: State, each: int, frm: int, to: int) -> None:
    """Move the producer of a net where all links are the same: others pay what they paid."""
    everywhere = 0.0
    for there in range(net.num_devices):
        everywhere += state.fwd[each, there] + state.bwd[each, there]
    there_before = state.fwd[each, frm] + state.bwd[each, frm]
    there_after = state.fwd[each, to] + state.bwd[each, to]
    price = net.per_byte_ms[frm, to]
    # a device pays as home for all others, as guest for itself
    state.time_ms[frm] += price * (there_before - (everywhere - there_before))
    state.time_ms[to] += price * ((everywhere - there_after) - there_after)
    state.held_bytes[frm] += net.kept_received * state.fwd[each, frm]
    state.held_bytes[to] -= net.kept_received * state.fwd[each, to]


@inner
def recount(
    net: PartitionNetwork, state: State, each: int, home: int, there: int, more: int
) -> None:
    """One consumer of a net more or less on a device, whose label is set already."""
    state.consumers[each, there] += more
    count = state.consumers[each, there]
    if net.alike[each] and count != (1 if more > 0 else 0):
        return  # the message is the same with one more or less
    if home != there:
        charge(net, state, each, home, there, -1.0)
    measure(net, state, each, there)
    if home != there:
        charge(net, state, each, home, there, 1.0)


@inner
def fits(net: PartitionNetwork, state: State) -> bool:
    """Does no device hold more than its cap?"""
    for device in range(net.num_devices):
        if state.held_bytes[device] > net.caps_bytes[device]:
            return False
    return True


@inner
def energy(net: PartitionNetwork, state: State, scale: float) -> float:
    """The sum of (time * scale)^SHARPNESS; bytes over the cap count as time."""
    total = 0.0
    for device in range(net.num_devices):
        power = state.time_ms[device] * scale
        over = state.held_bytes[device] - net.caps_bytes[device]
        if over > 0.0:
            power = max(power, 0.5) + _OVER * over / max(net.caps_bytes[device], 1.0)
        for _ in range(_SQUARINGS):
            power *= power
        total += power
    return total


@inner
def draw(state: State) -> float:
    """The next number in [0, 1): splitmix64."""
    state.random[0] += np.uint64(0x9E3779B97F4A7C15)
    mixed = state.random[0]
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed = mixed ^ (mixed >> np.uint64(31))
    return float(mixed >> np.uint64(11)) / 9007199254740992.0


@inner
def accepts(state: State, now: float, after: float, temperature: float) -> bool:
    """Is a change of the energy taken? Always if it is for the better."""
    if after <= now:
        return True
    luck = -math.log(1.0 - draw(state))
    return bool(after <= now * math.exp(luck * temperature * SHARPNESS))


@inner
def _neighbour(net: PartitionNetwork, state: State, node: int) -> int:
    """A producer or consumer of a node, at random; the node itself if there is none."""
    made = net.made_start[node + 1] - net.made_start[node]
    used = net.used_start[node + 1] - net.used_start[node]
    if made + used == 0:
        return node
    which = int(draw(state) * (made + used))
    if which >= made:
        return int(net.net_src[net.used_net[net.used_start[node] + which - made]])
    each = net.made_net[net.made_start[node] + which]
    first, last = net.pin_start[each], net.pin_start[each + 1]
    return int(net.pin_node[first + int(draw(state) * (last - first))])


@inner
def _propose(net: PartitionNetwork, state: State, moved: I64, target: I64) -> int:
    """Draw nodes to move and their new devices; how many."""
    num_nodes, device = len(net.held_bytes), state.device
    node = int(draw(state) * num_nodes)
    kind = draw(state)
    if kind < _TO_NEIGHBOUR:
        moved[0], target[0] = node, device[_neighbour(net, state, node)]
        return 1
    anywhere = int(draw(state) * net.num_devices)
    if kind < _ANYWHERE:
        moved[0], target[0] = node, anywhere
        return 1
    if kind < _SWAP:
        other = int(draw(state) * num_nodes)
        moved[0], target[0], moved[1], target[1] = node, device[other], other, device[node]
        return 2 if device[node] != device[other] else 0
    length = min(int(1.0 / (1.0 - draw(state))), _LONGEST_RUN)
    end = min(num_nodes, node + length)
    which = draw(state)
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


@compiled()
def anneal(
    net: PartitionNetwork, state: State, first: int, last: int, steps: int, hot: float, cold: float
) -> None:
    """Steps `first` to `last` of a walk of `steps` that cools from `hot` to `cold`."""
    rebuild(net, state)
    largest = state.time_ms.max()
    scale = 1.0 / largest if largest > 0.0 else 1.0
    now = energy(net, state, scale)
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
        after = energy(net, state, scale)
        if accepts(state, now, after, temperature):
            now = after
            largest = state.time_ms.max()
            if largest < state.best_ms[0] and fits(net, state):
                state.best_ms[0] = largest
                keep(state.best_device, state.device)
        else:
            for index in range(count - 1, -1, -1):
                shift(net, state, moved[index], target[index])
