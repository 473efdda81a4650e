"""What one device can hold at most within a time, for given prices: a program over the nodes.

The nodes come in an order in which each stands just before the first that needs it, so that few
nets are open at a time. A state is whether the last node is in the set, for every open net (its
producer before, a consumer to come) whether the producer is in the set and whether the net is paid
for, and how much of the time is used, in steps. The time of a set is that of its nodes on the
device and one message over the device's cheapest link for every net that it cuts: no more than
what a device really pays. Time is rounded so that a run of nodes is never overcharged. Where there
are more than `most_keys` states, the cheapest net that is open is forgotten, which only makes room
for more. O(nodes * keys * steps).

Of *shared* nets every message counts. A set that holds the producer may send any number up to the
other devices, each for the price of one message, and gets a toll for each; a set that holds some
consumers, but not the producer, pays the toll. In a labelling as many are sent as are received, so
tolls cancel out, whatever they are.
"""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from partita.compiled import compiled
from partita.search.partition.anneal import inner
from partita.search.partition.bounds import CutNet, cut_nets
from partita.search.partition.network import F64, I64, PartitionNetwork

U16 = npt.NDArray[np.uint16]
_NONE = -1e300
_MOST_MESSAGES = 32  # times the keys, and times 2: no more than 16 bits hold


class CoverProgram(NamedTuple):
    """The transitions of the program for one kind of device, layer by layer.

    A layer is a node, or a shared net whose producer settles how many messages it sends.
    """

    work_ms: F64  # per layer; 0 where it is a net
    node: I64  # per layer; -1 where it is a net
    start: I64  # the transitions of layer l are start[l] to start[l + 1]
    frm: I64  # key before
    into: I64  # key after
    inside: I64  # is the node in the set?
    first: I64  # does it begin a run?
    cut_ms: F64  # what is paid for nets at this layer
    toll_start: I64  # the tolls of transition r are toll_start[r] to toll_start[r + 1]
    toll_net: I64  # a shared net
    toll: F64  # messages sent less messages received
    num_keys: int


class SharedNets(NamedTuple):
    """The nets of which every message counts."""

    src: I64  # the producer of each
    message_ms: F64  # over the cheapest link of all


def cover_programs(
    net: PartitionNetwork, most_keys: int, most_shared: int, least_ms: float
) -> tuple[list[tuple[int, CoverProgram]], SharedNets]:
    """A program for every kind of device, with how many devices are of that kind.

    Nets that cost less than `least_ms` are left out.
    """
    kinds: dict[tuple[bytes, float, float], list[int]] = {}
    off = ~np.eye(net.num_devices, dtype=bool)
    for device in range(net.num_devices):
        others = off[device]
        per_byte = min(
            float(net.per_byte_ms[device][others].min()),
            float(net.per_byte_ms[:, device][others].min()),
        )
        latency = min(
            float(net.latency_ms[device][others].min()),
            float(net.latency_ms[:, device][others].min()),
        )
        kinds.setdefault((net.work_ms[:, device].tobytes(), per_byte, latency), []).append(device)
    nets = list(cut_nets(net, float(net.per_byte_ms[off].min()), float(net.latency_ms[off].min())))
    counted = {index for index, each in enumerate(nets) if each.ms >= least_ms}
    shared = _shared(net, nets, counted, most_shared)
    made = []
    for (_, per_byte, latency), devices in kinds.items():
        kind = devices[0], per_byte, latency
        tried = [
            _program(net, kind, most_keys, counted, shared, order) for order in late_orders(net)
        ]
        best = min(tried, key=lambda each: (sum(nets[n].ms for n in each[2]), len(each[0].rows)))
        made.append((len(devices), *best))
    kept = [each for each in shared if not any(each in lost for _, _, _, lost in made)]
    number = {each: index for index, each in enumerate(kept)}
    programs = [(count, rows.program(number, keys)) for count, rows, keys, _ in made]
    ends = np.array([nets[each].src for each in kept], np.int64)
    return programs, SharedNets(ends, np.array([nets[each].ms for each in kept], np.float64))


def _shared(net: PartitionNetwork, nets: list[CutNet], counted: set[int], most: int) -> list[int]:
    """The nets for which more than one message may cost most."""

    def beyond_one(each: int) -> float:
        return nets[each].ms * (min(net.num_devices - 1, len(nets[each].pins)) - 1)

    dearest = sorted(counted, key=lambda each: (-beyond_one(each), each))
    few = [
        each
        for each in dearest
        if beyond_one(each) > 0 and min(net.num_devices - 1, len(nets[each].pins)) <= _MOST_MESSAGES
    ]
    return few[:most]


def late_orders(net: PartitionNetwork) -> list[list[int]]:
    """Topological orders in which nodes come just before the first that needs them.

    Of what a node needs, the first comes first, or the deepest.
    """
    producers: list[list[int]] = [[] for _ in range(net.num_nodes)]
    for each, src in enumerate(net.net_src.tolist()):
        for node in net.pin_node[net.pin_start[each] : net.pin_start[each + 1]].tolist():
            producers[node].append(src)
    depth = [0] * net.num_nodes  # nodes come in topological order
    for node, before in enumerate(producers):
        depth[node] = max((depth[src] + 1 for src in before), default=0)
    sinks = sorted(set(range(net.num_nodes)) - set(net.net_src.tolist()))
    by_place = [sorted(set(before), reverse=True) for before in producers]
    by_depth = [sorted(before, key=depth.__getitem__) for before in by_place]
    orders = [_after_inputs(sinks, last) for last in (by_place, by_depth)]
    return orders if orders[0] != orders[1] else orders[:1]


def _after_inputs(sinks: list[int], inputs: list[list[int]]) -> list[int]:
    """Every node after its inputs, of which the last listed comes first."""
    order: list[int] = []
    seen = [False] * len(inputs)
    for sink in sinks:
        stack = [(sink, False)]
        while stack:
            node, complete = stack.pop()
            if complete:
                order.append(node)
            elif not seen[node]:
                seen[node] = True
                stack.append((node, True))
                stack += [(src, False) for src in inputs[node]]
    return order


class _Rows:
    """The transitions in the making."""

    def __init__(self) -> None:
        self.work_ms: list[float] = []
        self.node: list[int] = []
        self.start = [0]
        self.rows: list[tuple[int, int, int, int]] = []
        self.cut_ms: list[float] = []
        self.tolls: list[tuple[tuple[int, int], ...]] = []  # (net, messages)

    def add(
        self, row: tuple[int, int, int, int], cut_ms: float, tolls: tuple[tuple[int, int], ...]
    ) -> None:
        """Another transition of the layer that is in the making."""
        self.rows.append(row)
        self.cut_ms.append(cut_ms)
        self.tolls.append(tolls)

    def close(self, node: int, work_ms: float) -> None:
        """The layer is complete."""
        self.node.append(node)
        self.work_ms.append(work_ms)
        self.start.append(len(self.rows))

    def program(self, shared: dict[int, int], num_keys: int) -> CoverProgram:
        """As arrays; tolls only of the nets in `shared`, by the numbers given there."""
        frm, into, inside, first = np.array(self.rows, np.int64).T.copy()
        tolls = [[(shared[n], more) for n, more in row if n in shared] for row in self.tolls]
        flat = [toll for row in tolls for toll in row]
        return CoverProgram(
            np.array(self.work_ms, np.float64),
            np.array(self.node, np.int64),
            np.array(self.start, np.int64),
            frm,
            into,
            inside,
            first,
            np.array(self.cut_ms, np.float64),
            np.cumsum([0, *map(len, tolls)]).astype(np.int64),
            np.array([net for net, _ in flat], np.int64),
            np.array([more for _, more in flat], np.float64),
            num_keys,
        )


def _program(
    net: PartitionNetwork,
    kind: tuple[int, float, float],
    most_keys: int,
    counted: set[int],
    shared: list[int],
    order: list[int],
) -> tuple[_Rows, int, set[int]]:
    """Walk over the nodes with all states that can be; a state is a set of (net, two bits).

    Gives the rows, how many keys there are at most, and the nets that were forgotten.
    """
    device, per_byte, latency = kind
    nets = list(cut_nets(net, per_byte, latency))
    made: list[list[int]] = [[] for _ in range(net.num_nodes)]
    used: list[list[int]] = [[] for _ in range(net.num_nodes)]
    for index in sorted(counted):
        made[nets[index].src].append(index)
        for node in nets[index].pins:
            used[node].append(index)
    place_of = {node: place for place, node in enumerate(order)}
    last_use = [max(each.pins, key=place_of.__getitem__) for each in nets]
    ever = set(shared)
    keys: dict[tuple[int, ...], int] = {(0,): 0}  # (is the last node in?, status of open nets)
    open_nets: list[int] = []
    rows, most, forgotten = _Rows(), 1, set[int]()
    for node in order:
        for each in shared:
            if last_use[each] == node and each in open_nets:
                _settle(rows, keys, 1 + open_nets.index(each), each, nets[each], net.num_devices)
        after_open = [each for each in open_nets if last_use[each] != node] + made[node]
        steps = _steps(keys, open_nets, after_open, set(used[node]), ever, nets)
        while len({after for _, after, _, _, _ in steps}) > most_keys:
            cheapest = min(after_open, key=lambda each: (nets[each].ms, -each))
            at = 1 + after_open.index(cheapest)
            after_open.remove(cheapest)
            forgotten.add(cheapest)
            steps = [(b, a[:at] + a[at + 1 :], x, cut, t) for b, a, x, cut, t in steps]
        after_keys: dict[tuple[int, ...], int] = {}
        before_of = list(keys)
        for before, after, member, cut, tolls in steps:
            place = after_keys.setdefault(after, len(after_keys))
            begins = int(member and not before_of[before][0])
            rows.add((before, place, member, begins), cut, tolls)
        rows.close(node, float(net.work_ms[node, device]))
        keys, open_nets = after_keys, after_open
        most = max(most, len(keys))
    return rows, most, forgotten


def _settle(
    rows: _Rows, keys: dict[tuple[int, ...], int], at: int, each: int, net: CutNet, devices: int
) -> None:
    """A producer that has paid for one message may send more, each for the same price.

    One consumer is to come: if it alone is elsewhere, there is one message, paid for there.
    """
    most = min(devices - 1, len(net.pins))
    for key, place in keys.items():
        for more in range(most if key[at] == 3 else 1):
            rows.add((place, place, 0, 0), more * net.ms, ((each, more),) if more else ())
    rows.close(-1, 0.0)


def _steps(
    keys: Iterable[tuple[int, ...]],
    open_nets: list[int],
    after_open: list[int],
    used: set[int],
    shared: set[int],
    nets: list[CutNet],
) -> list[tuple[int, tuple[int, ...], int, float, tuple[tuple[int, int], ...]]]:
    """(key before, key after, in the set?, ms paid, tolls): status 2 = producer in, 1 = paid.

    Where a net is paid for that is not shared, its producer no longer matters.
    """
    steps = []
    for before, key in enumerate(keys):
        for inside in (0, 1):
            cut, tolls = 0.0, []
            status = {}
            for each, now in zip(open_nets, key[1:], strict=True):
                if each in used and (now >> 1) != inside and not now & 1:
                    cut += nets[each].ms
                    tolls.append((each, -1 if inside else 1))
                    now |= 1
                status[each] = now if each in shared or not now & 1 else 1
            after = (inside, *(status.get(each, 2 * inside) for each in after_open))
            steps.append((before, after, inside, cut, tuple(tolls)))
    return steps


@compiled()
def _rounded(program: CoverProgram, within_ms: float, steps: int) -> tuple[I64, I64, I64]:
    """Work in steps as part of a run and as its first node, and what is paid, rounded down.

    Sums over a run of nodes are differences of rounded sums over all, so that rounding does not
    add up; the first node of a run is charged for one step less where that is needed.
    """
    count = len(program.work_ms)
    inner = np.zeros(count, np.int64)
    first = np.zeros(count, np.int64)
    scale = steps / within_ms
    total = 0.0
    for node in range(count):
        after = total + program.work_ms[node] * scale
        inner[node] = int(np.floor(after)) - int(np.floor(total))
        first[node] = int(np.floor(after)) - int(np.ceil(total))
        total = after
    cuts = np.zeros(len(program.cut_ms), np.int64)
    for row in range(len(cuts)):
        # Beyond all that is allowed, even where a first node takes one step back.
        cuts[row] = min(int(program.cut_ms[row] * scale), steps + 3)
    return inner, first, cuts


@compiled()
def _gains(program: CoverProgram, prices: F64, tolls: F64) -> F64:
    """What every transition brings: the price of a node in the set, and tolls."""
    gains = np.zeros(len(program.frm))
    for layer in range(len(program.node)):
        for row in range(program.start[layer], program.start[layer + 1]):
            if program.inside[row]:
                gains[row] += prices[program.node[layer]]
            for at in range(program.toll_start[row], program.toll_start[row + 1]):
                gains[row] += program.toll[at] * tolls[program.toll_net[at]]
    return gains


@compiled()
def fill(
    program: CoverProgram,
    prices: F64,
    tolls: F64,
    within_ms: float,
    steps: int,
    origin: U16,
    member: I64,
    messages: F64,
    most: F64,
) -> float:
    """The largest price of a set that takes at most `within_ms`.

    `member` is set to that set, `messages` to what it sends less what it receives of shared nets,
    and most[i] to the largest price within i steps. A run may be charged nothing for its first
    step, so one step more than `steps` is allowed: what is cut off at zero is at most one step in
    all.
    """
    width = steps + 2
    within, first, cuts = _rounded(program, within_ms, steps)
    gains = _gains(program, prices, tolls)
    value = np.full((program.num_keys, width), _NONE)
    after = np.full((program.num_keys, width), _NONE)
    value[0, 0] = 0.0
    for layer in range(len(program.node)):
        for key in range(program.num_keys):
            for at in range(width):
                after[key, at] = _NONE
        for row in range(program.start[layer], program.start[layer + 1]):
            into = program.into[row]
            shift, gain = cuts[row], gains[row]
            if program.inside[row]:
                shift += first[layer] if program.first[row] else within[layer]
            code = 2 * (row - program.start[layer])
            _relax(value[program.frm[row]], after[into], origin[layer], into, (shift, code), gain)
        value, after = after, value
    best, where = _NONE, 0
    for at in range(width):
        for key in range(program.num_keys):
            if value[key, at] > best:
                best, where = value[key, at], key * width + at
        most[at] = best
    for node in range(len(member)):
        member[node] = 0
    for each in range(len(messages)):
        messages[each] = 0.0
    for layer in range(len(program.node) - 1, -1, -1):
        code = np.int64(origin[layer, where])
        row = program.start[layer] + code // 2
        if program.inside[row]:
            member[program.node[layer]] = 1
        for at in range(program.toll_start[row], program.toll_start[row + 1]):
            messages[program.toll_net[at]] += program.toll[at]
        shift = cuts[row]
        if program.inside[row]:
            shift += first[layer] if program.first[row] else within[layer]
        before = 0 if code % 2 else where % width - shift
        where = program.frm[row] * width + before
    return best


@inner
def _relax(
    value: F64, after: F64, origin: U16, into: int, step: tuple[int, int], gain: float
) -> None:
    """Take one transition from every amount of time used; without branches, for the processor.

    The origin is twice the transition's number; one more where a step back was one from nothing.
    """
    shift, code = step
    width = len(value)
    base = into * width
    if shift < 0 and value[0] > _NONE and value[0] + gain > after[0]:
        after[0] = value[0] + gain
        origin[base] = code + 1
    own = np.uint16(code)
    begin = max(0, -shift)
    for at in range(begin, width - max(0, shift)):
        to = at + shift
        now = value[at] + gain if value[at] > _NONE else _NONE
        better = now > after[to]
        after[to] = now if better else after[to]
        origin[base + to] = own if better else origin[base + to]
