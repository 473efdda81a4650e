"""Simulated annealing over stages in pipeline order, compiled: acyclicity is kept at every step.

Every node has a stage, no consumer an earlier one than its producers, and every stage a device. A
step moves one node within the window that its neighbours leave, or a node with all its consumers
in the stage to the next one (with all its producers to the one before), or gives a stage another
device. Energy and acceptance are those of `anneal`.
"""

from typing import NamedTuple

import numpy as np

from partita.compiled import compiled
from partita.search.partition.anneal import (
    State,
    accepts,
    draw,
    energy,
    fits,
    inner,
    keep,
    rebuild,
    shift,
)
from partita.search.partition.network import I64, PartitionNetwork

_MOST = 64  # nodes that move together
_SINGLE, _TOGETHER = 0.6, 0.99  # shares of steps, summed up; the rest: devices


class Stages(NamedTuple):
    """A stage for every node and a device for every stage, and the best seen."""

    stage: I64
    device_of: I64
    size: I64  # nodes of every stage
    best_stage: I64
    best_device_of: I64
    mark: I64  # per node, then the last mark used


def stages(stage: I64, device_of: I64) -> Stages:
    """The given stages; their own best so far."""
    return Stages(
        stage.astype(np.int64),
        device_of.astype(np.int64),
        np.bincount(stage, minlength=len(device_of)).astype(np.int64),
        stage.astype(np.int64),
        device_of.astype(np.int64),
        np.zeros(len(stage) + 1, np.int64),
    )


@inner
def _window(net: PartitionNetwork, staged: Stages, node: int) -> tuple[int, int]:
    """The stages a node may be in while nothing else moves."""
    low, high = 0, len(staged.device_of) - 1
    for at in range(net.used_start[node], net.used_start[node + 1]):
        low = max(low, staged.stage[net.net_src[net.used_net[at]]])
    for at in range(net.made_start[node], net.made_start[node + 1]):
        each = net.made_net[at]
        for pin in range(net.pin_start[each], net.pin_start[each + 1]):
            high = min(high, staged.stage[net.pin_node[pin]])
    return low, high


@inner
def _gather(net: PartitionNetwork, staged: Stages, node: int, onward: bool, moved: I64) -> int:
    """The node with all that follows (or precedes) it in its stage; 0 if that is too much."""
    here = staged.stage[node]
    staged.mark[-1] += 1
    stamp = staged.mark[-1]
    staged.mark[node] = stamp
    moved[0] = node
    done, count = 0, 1
    while done < count:
        each_node = moved[done]
        done += 1
        if onward:
            for at in range(net.made_start[each_node], net.made_start[each_node + 1]):
                each = net.made_net[at]
                for pin in range(net.pin_start[each], net.pin_start[each + 1]):
                    other = net.pin_node[pin]
                    if staged.stage[other] == here and staged.mark[other] != stamp:
                        if count == _MOST:
                            return 0
                        staged.mark[other] = stamp
                        moved[count] = other
                        count += 1
        else:
            for at in range(net.used_start[each_node], net.used_start[each_node + 1]):
                other = net.net_src[net.used_net[at]]
                if staged.stage[other] == here and staged.mark[other] != stamp:
                    if count == _MOST:
                        return 0
                    staged.mark[other] = stamp
                    moved[count] = other
                    count += 1
    return count


@compiled()
def _place(
    net: PartitionNetwork, state: State, staged: Stages, moved: I64, count: int, to: int
) -> None:
    """Put nodes of one stage into another."""
    staged.size[staged.stage[moved[0]]] -= count
    staged.size[to] += count
    for index in range(count):
        staged.stage[moved[index]] = to
        if state.device[moved[index]] != staged.device_of[to]:
            shift(net, state, moved[index], staged.device_of[to])


@compiled()
def _redevice(net: PartitionNetwork, state: State, staged: Stages, one: int, device: int) -> None:
    """Give a stage a device; on a straight pipeline its holder gets the other one."""
    staged.device_of[one] = device
    for node in range(len(staged.stage)):
        if staged.stage[node] == one and state.device[node] != device:
            shift(net, state, node, device)


@compiled()
def anneal_stages(
    net: PartitionNetwork,
    state: State,
    staged: Stages,
    straight: bool,
    keep_all: bool,
    first: int,
    last: int,
    steps: int,
    hot: float,
    cold: float,
) -> None:
    """Steps `first` to `last` of a walk of `steps`; with `keep_all` no stage becomes empty."""
    rebuild(net, state)
    largest = state.time_ms.max()
    scale = 1.0 / largest if largest > 0.0 else 1.0
    now = energy(net, state, scale)
    num_nodes, num_stages = len(staged.stage), len(staged.device_of)
    moved = np.zeros(_MOST, np.int64)
    # A plain -1 has a type of its own, for which moves would be compiled again.
    none: int = np.int64(-1)  # type: ignore[assignment]
    temperature = hot
    for step in range(first, last):
        if (step - first) % 64 == 0:
            temperature = hot * (cold / hot) ** (step / steps)
        kind = draw(state)
        node = int(draw(state) * num_nodes)
        here = staged.stage[node]
        onward = draw(state) < 0.5
        to = here + 1 if onward else here - 1
        count, one, other, before, holder_before = 0, none, none, none, none
        if kind < _TOGETHER:
            if kind < _SINGLE:
                low, high = _window(net, staged, node)
                moved[0], count = node, 1
                if draw(state) < 0.3:
                    to = low + int(draw(state) * (high - low + 1))
                if to < low or to > high or to == here:
                    continue
            else:
                if to < 0 or to >= num_stages:
                    continue
                count = _gather(net, staged, node, onward, moved)
            if count == 0 or (keep_all and count == staged.size[here]):
                continue
            _place(net, state, staged, moved, count, to)
        else:
            device = int(draw(state) * net.num_devices)
            one, before = here, staged.device_of[here]
            if device == before or (straight and net.alike_devices):
                continue
            if straight:
                for each in range(num_stages):
                    if staged.device_of[each] == device:
                        other, holder_before = each, device
                if other >= 0:
                    _redevice(net, state, staged, other, before)
            _redevice(net, state, staged, one, device)
        after = energy(net, state, scale)
        if accepts(state, now, after, temperature):
            now = after
            largest = state.time_ms.max()
            if largest < state.best_ms[0] and fits(net, state):
                state.best_ms[0] = largest
                keep(staged.best_stage, staged.stage)
                keep(staged.best_device_of, staged.device_of)
        elif one >= 0:
            _redevice(net, state, staged, one, before)
            if other >= 0:
                _redevice(net, state, staged, other, holder_before)
        else:
            _place(net, state, staged, moved, count, here)
