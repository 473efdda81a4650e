"""A lower bound from what one device can hold at most: it knows what cutting a model costs.

Let every node v have a price pi_v (of either sign). In a labelling whose device times are all at
most T, the nodes of device d are some set S with time_d(S) <= T, and every node is on one device:

    sum over devices of  max { pi(S) : time_d(S) <= T }  >=  pi(V)

so prices for which this fails prove that every answer takes longer than T. With pi = work it says
that every device also pays for the cheapest cut around the work it does; prices that a subgradient
method raises where cuts are dear make it the bound of the linear program over all sets (the dual
of its column generation). T is found by bisection between the bound and the best answer.

The largest pi(S) comes from a program over the nodes in their order. Its state is whether the last
node is in S, for every net with consumers to come whether its producer is in S and whether the net
is paid for, and how much of T is used, in steps of T / `steps`. The time of a set is that of its
nodes on the device and, for every net that it cuts, one message over the device's cheapest link:
no more than what a device really pays. Time is rounded so that a run of nodes is never
overcharged. Where there are more than `most_keys` states, the cheapest net that is open is
forgotten, which only lowers the bound. O(nodes * keys * steps) for one set of prices.

Where it falls short of the answer, the answer may be far off, or sets that fit T cover the model
only in fractions.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from partita.compiled import compiled
from partita.search.partition.bounds import CutNet, cut_nets
from partita.search.partition.network import F64, I64, PartitionNetwork
from partita.search.partition.walk import LabelWalk

I32 = npt.NDArray[np.int32]
_NONE = -1e300
_SLACK = 1e-9  # of T: rounding may not make a set too dear


@dataclass(frozen=True, slots=True)
class CoverBound:
    """Settings of the bound: how fine time is counted, how many states, how many price steps."""

    steps: int = 800
    most_cells: int = 30_000_000  # nodes * keys * steps: fewer steps beyond
    most_keys: int = 128
    price_steps: int = 40  # for one T
    bisections: int = 7
    near: float = 0.01  # of the answer: no more is worth proving


class CoverProgram(NamedTuple):
    """The transitions of the program for one kind of device, node by node."""

    work_ms: F64  # per node
    start: I64  # the transitions of node v are start[v] to start[v + 1]
    frm: I64  # key before
    into: I64  # key after
    inside: I64  # is the node in the set?
    first: I64  # does it begin a run?
    cut_ms: F64  # what is paid for nets at this node
    num_keys: int


def cover_programs(net: PartitionNetwork, most_keys: int) -> list[tuple[int, CoverProgram]]:
    """A program for every kind of device, with how many devices are of that kind."""
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
    return [
        (len(devices), _program(net, devices[0], per_byte, latency, most_keys))
        for (_, per_byte, latency), devices in kinds.items()
    ]


def _program(
    net: PartitionNetwork, device: int, per_byte: float, latency: float, most_keys: int
) -> CoverProgram:
    """Walk over the nodes with all states that can be; a state is a set of (net, two bits)."""
    nets = list(cut_nets(net, per_byte, latency))
    made: list[list[int]] = [[] for _ in range(net.num_nodes)]
    used: list[list[int]] = [[] for _ in range(net.num_nodes)]
    for index, each in enumerate(nets):
        made[each.src].append(index)
        for node in each.pins:
            used[node].append(index)
    last_use = [max(each.pins) for each in nets]
    keys: dict[tuple[int, ...], int] = {(0,): 0}  # (is the last node in?, status of open nets)
    open_nets: list[int] = []
    rows: list[tuple[int, int, int, int, float]] = []
    start, most = [0], 1
    for node in range(net.num_nodes):
        after_open = [each for each in open_nets if last_use[each] > node] + made[node]
        steps = _steps(keys, open_nets, after_open, set(used[node]), nets)
        while len({after for _, after, _, _ in steps}) > most_keys:
            cheapest = min(after_open, key=lambda each: (nets[each].ms, -each))
            at = 1 + after_open.index(cheapest)
            after_open.remove(cheapest)
            steps = [(b, a[:at] + a[at + 1 :], x, cut) for b, a, x, cut in steps]
        after_keys: dict[tuple[int, ...], int] = {}
        before_of = list(keys)
        for before, after, member, cut in steps:
            place = after_keys.setdefault(after, len(after_keys))
            begins = int(member and not before_of[before][0])
            rows.append((before, place, member, begins, cut))
        keys, open_nets = after_keys, after_open
        most = max(most, len(keys))
        start.append(len(rows))
    frm, into, inside, first = np.array([row[:4] for row in rows], np.int64).T.copy()
    return CoverProgram(
        np.ascontiguousarray(net.work_ms[:, device]),
        np.array(start, np.int64),
        frm,
        into,
        inside,
        first,
        np.array([row[4] for row in rows], np.float64),
        most,
    )


def _steps(
    keys: Iterable[tuple[int, ...]],
    open_nets: list[int],
    after_open: list[int],
    used: set[int],
    nets: list[CutNet],
) -> list[tuple[int, tuple[int, ...], int, float]]:
    """(key before, key after, in the set?, ms paid): status 2 = producer in, 1 = paid for."""
    steps = []
    for before, key in enumerate(keys):
        for inside in (0, 1):
            cut = 0.0
            status = {}
            for each, now in zip(open_nets, key[1:], strict=True):
                if each in used and (now >> 1) != inside and not now & 1:
                    cut += nets[each].ms
                    now |= 1
                status[each] = now
            after = (inside, *(status.get(each, 2 * inside) for each in after_open))
            steps.append((before, after, inside, cut))
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
def _fill(
    program: CoverProgram, prices: F64, within_ms: float, steps: int, origin: I32, member: I64
) -> float:
    """The largest price of a set that takes at most `within_ms`; `member` is set to that set.

    A run may be charged nothing for its first step, so one step more than `steps` is allowed: what
    is cut off at zero is at most one step in all.
    """
    width = steps + 2
    inner, first, cuts = _rounded(program, within_ms, steps)
    value = np.full((program.num_keys, width), _NONE)
    value[0, 0] = 0.0
    for node in range(len(program.work_ms)):
        after = np.full((program.num_keys, width), _NONE)
        for row in range(program.start[node], program.start[node + 1]):
            frm, into, inside = program.frm[row], program.into[row], program.inside[row]
            shift, gain = cuts[row], 0.0
            if inside:
                shift += first[node] if program.first[row] else inner[node]
                gain = prices[node]
            for at in range(width):
                if value[frm, at] == _NONE:
                    continue
                to = max(0, at + shift)
                if to < width and value[frm, at] + gain > after[into, to]:
                    after[into, to] = value[frm, at] + gain
                    origin[node, into * width + to] = 2 * (frm * width + at) + inside
        value = after
    best, where = _NONE, 0
    for key in range(program.num_keys):
        for at in range(width):
            if value[key, at] > best:
                best, where = value[key, at], key * width + at
    for node in range(len(program.work_ms) - 1, -1, -1):
        code = origin[node, where]
        member[node] = code & 1
        where = code >> 1
    return best


class CoverProof:
    """The bound of one network: prices are kept from one T to the next."""

    def __init__(self, net: PartitionNetwork, settings: CoverBound) -> None:
        self.settings = settings
        self.programs = cover_programs(net, settings.most_keys)
        self.prices: F64 = net.work_ms.min(axis=1)
        self.scale = self.prices + 1e-3 * float(self.prices.mean())  # who moves how much
        keys = max(program.num_keys for _, program in self.programs)
        affordable = settings.most_cells // (net.num_nodes * keys)
        self.steps = max(50, min(settings.steps, affordable))
        self.origin = np.zeros((net.num_nodes, keys * (self.steps + 2)), np.int32)
        self.member = np.zeros(net.num_nodes, np.int64)

    def excludes(self, within_ms: float, done: Callable[[], bool]) -> bool:
        """Is it proven that no labelling keeps every device within that time?

        Polyak's steps down the excess of what devices can hold over what there is to hold; they
        become shorter where they do not help. Prices always add up to the work.
        """
        prices = best_prices = self.prices
        total = float(prices.sum())
        best, length, idle = np.inf, 1.0, 0
        for _ in range(self.settings.price_steps):
            if done():
                break
            excess, slope = self._excess(prices, within_ms)
            if excess < -_SLACK * float(np.abs(prices).sum()):
                self.prices = prices
                return True
            if excess < best - 1e-4 * total:
                best, best_prices, idle = excess, prices, 0
            else:
                idle += 1
            if idle == 4:
                prices, length, idle = best_prices, 0.6 * length, 0
                continue
            slope -= float(self.scale @ slope) / float(self.scale.sum())
            move = self.scale * slope
            norm = float(slope @ move)
            if norm == 0.0:
                break
            prices = prices - length * (excess + 0.01 * total) / norm * move
        self.prices = best_prices
        return False

    def _excess(self, prices: F64, within_ms: float) -> tuple[float, F64]:
        """What the devices can hold beyond all prices, and how it changes with each price."""
        excess, slope = -float(prices.sum()), np.full(len(prices), -1.0)
        for count, program in self.programs:
            excess += count * _fill(
                program, prices, within_ms * (1 + _SLACK), self.steps, self.origin, self.member
            )
            slope += count * self.member
        return excess, slope


def prove_by_covers(walk: LabelWalk, settings: CoverBound, share: float = 1.0) -> None:
    """Raise the run's bound by bisection towards its answer, in a share of the time left."""
    run, net = walk.run, walk.net
    if net.num_devices == 1 or run.objective is None or run.lower_bound is None:
        return
    done = walk.done_after(share)
    low, high = run.lower_bound, run.objective
    proof: CoverProof | None = None
    for _ in range(settings.bisections):
        if done() or high - low <= settings.near * high:
            return
        proof = proof or CoverProof(net, settings)
        middle = (low + high) / 2
        if proof.excludes(middle, done):
            low = middle
            run.bound(low)
        else:
            high = middle
