"""A lower bound by labels along the cut layers: latency, loads and memory at once.

A *label* says what a placement of the layers up to a cut layer costs at least: the time of one
batch there and back, work per device and channel, bytes held per device. A layer range to the next
cut layer adds one of its options.

With N batches, K in flight at most, let L be the time of one batch and, for a device or channel s,
w its work for one batch; with q full rounds of K before the last one and r = N - q K batches left:

    makespan >= (q + 1) L + (r - 1) f
             >= N w + first               no work of s before the first batch reaches it, none after
             >= q L + r w + first         that of the r-th batch that ends, q rounds later
             >= (N - K) w + L + out       if q > 0
             >= q L + r w + out           if q > 0

f is the work that a batch begins with before the device of the input is idle again, which is when
the next one is let in. `first` is the time before the first work of s plus that after its last.
`out` is how long a batch is away from s: between its last work there forward and its first
backward. Before any batch comes back, s has at most the forward work of K batches, since no more
are let in; when the last has gone out, at most the backward work of K. The two waits of s do not
overlap, as the last batch is let in after one has ended. All this holds for any part of the work
of s as well: the greatest is kept, over the ranges where `first` may end or `out` begin.

What the rest of the chain adds at least is known for several weighings of time, loads and bytes (a
Lagrangian relaxation: bytes have a price, and room on the devices earns it back). A label is left
out when its bound reaches the best score known, or when another one is no worse in everything. When
too many remain, those with the greatest bounds are given up, and the answer is not above the least
of these. Devices that are alike are put in order.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from partita.search.placement.bounds import ROUNDING, load_weights, symmetry_of
from partita.search.placement.segments import PlacedRanges, chain_of, undominated
from partita.search.placement.tables import F64, PlacementArrays

_MOST_WORK = 6000  # layers times pairs of devices; more would take longer than it is worth
_MULTIPLIERS = 24  # of memory, tried to find the best
# Per device and channel: w; N w + first; r w + first; (N - K) w + away; r w + away.
_WORK, _BUSY, _BUSY_LAST, _OUT, _OUT_LAST = range(5)
_OF_SLOTS = 5


@dataclass(frozen=True, slots=True)
class _Weighing:
    """A sum of entries, less `earned`, that no score is below; and the least rest of it."""

    time: float
    work: F64  # per device and channel
    busy: F64
    held: F64  # per device
    earned: float
    to_go: F64  # [cut, device]


class LabelBound:
    """Bounds for one problem; the options of its layer ranges are worked out once."""

    def __init__(self, net: PlacementArrays, go_on: Callable[[], bool] = lambda: True) -> None:
        self.net = net
        self.gave_up = True  # would more labels make the last search better, or was there none?
        self.symmetry = symmetry_of(net)
        many = len(net.output_bytes) * len(net.limit_bytes) ** 2 > _MOST_WORK
        chain = chain_of(net)
        self.cuts = () if many else chain.cuts
        self.rounds = -(-net.batches // net.in_flight) - 1  # full ones, before the last
        self.left = net.batches - self.rounds * net.in_flight
        self.loads_count = net.batches > 1
        if not self.useful:
            return
        total = net.weight_bytes.sum() + net.output_bytes.sum()
        # With several last layers nothing is sure to be held at once.
        self.scarce = (net.limit_bytes < total) & net.one_sink
        channels = net.transfer_ms.shape[1]
        busy = np.full(len(net.limit_bytes) + channels, self.loads_count)
        out = np.full(len(net.limit_bytes) + channels, self.rounds > 0)
        # Where only the layers of the chain make a device wait, and there is one input.
        self.spaced = self.left > 1 and len(net.inputs) == 1 and bool(chain.kept.all())
        needed = np.concatenate(([True], busy, busy, out, self.scarce, [self.spaced]))
        ranges = PlacedRanges(net, chain, self.symmetry, needed)
        self.layout = ranges.layout
        self.options = []
        for number in range(len(self.cuts) - 1):
            if not go_on():  # without all options there is no bound
                self.cuts = ()
                return
            self.options.append(ranges.options(number))
        self.weighings = self._weighings()
        self.rest_ms = self.weighings[0].to_go / (self.rounds + 1)

    @property
    def useful(self) -> bool:
        """Is there a chain of at least two cut layers?"""
        return len(self.cuts) > 1

    def root(self) -> float:
        """The bound before any label: the best weighing of the whole chain."""
        if not self.useful:
            return 0.0
        return max(self._whole(weighing) for weighing in self.weighings) * ROUNDING

    def search(self, width: int, most: float, go_on: Callable[[], bool] = lambda: True) -> float:
        """The bound with at most `width` labels per cut layer and device; at most `most`."""
        if not self.useful:
            return 0.0
        before = most
        labels = {device: rows for device, rows in self._first().items() if device in self._leaders}
        for number in range(len(self.options)):
            if not go_on():
                self.gave_up = True
                return self.root()
            labels, most = self._next(labels, number, width, most)
        bounds = [self._bounds(rows, device, len(self.options)) for device, rows in labels.items()]
        least = min((float(array.min()) for array in bounds), default=np.inf)
        self.gave_up = most < min(least, before)
        return min(most, least) * ROUNDING

    # A label is a row: time; five entries per device and channel (`_WORK` to `_OUT_LAST`); bytes
    # held; the work that a batch begins with, and whether it has left its first device yet.

    @property
    def _num_entries(self) -> int:
        return self._prefix + 2

    def _columns(self, number: int) -> slice:
        begin = 1 + number * self._num_slots
        return slice(begin, begin + self._num_slots)

    @property
    def _held(self) -> slice:
        begin = 1 + _OF_SLOTS * self._num_slots
        return slice(begin, begin + self.layout.num_devices)

    @property
    def _prefix(self) -> int:
        return 1 + _OF_SLOTS * self._num_slots + self.layout.num_devices

    def _first(self) -> dict[int, F64]:
        net, start = self.net, self.cuts[0]
        arrays: dict[int, F64] = {}
        for device in np.flatnonzero(net.may[net.gene_of[start]]).tolist():
            both = net.job_ms[start, device] + net.job_ms[len(net.output_bytes) + start, device]
            option = np.zeros((1, self.layout.size))
            option[0, 0] = both
            if self.loads_count:
                option[0, self.layout.load.start + device] = both
            if self.scarce[device]:
                option[0, self.layout.held.start + device] = net.weight_bytes[start]
            label = np.zeros((1, self._num_entries))
            if self.spaced:
                option[0, self.layout.prefix] = net.job_ms[start, device]
                label[0, self._prefix + 1] = 1.0
            arrays[device] = self._extended(label, option, begin=True)
        return arrays

    @property
    def _leaders(self) -> list[int]:
        """One device of each kind: a chain may as well begin there."""
        return [int(device) for device in np.unique(self.symmetry.first)]

    @property
    def _num_slots(self) -> int:
        return self.layout.num_devices + self.layout.num_channels

    def _next(
        self, labels: dict[int, F64], number: int, width: int, most: float
    ) -> tuple[dict[int, F64], float]:
        """The labels at the next cut layer that may lead below `most`, and what is left of it."""
        by_device: dict[int, list[F64]] = {}
        for (source, target), options in self.options[number].items():
            if source not in labels:
                continue
            for begin in range(0, len(labels[source]), 256):
                rows = self._extended(labels[source][begin : begin + 256], options)
                rows = rows[self._bounds(rows, target, number + 1) < most]
                device, rows = self._renamed(rows, target)
                by_device.setdefault(device, []).append(rows)
        kept: dict[int, F64] = {}
        for device, parts in sorted(by_device.items()):
            rows = np.unique(np.concatenate(parts), axis=0)
            rows, most = self._cheapest(rows, device, number + 1, 4 * width, most)
            rows, most = self._cheapest(undominated(rows), device, number + 1, width, most)
            if len(rows):
                kept[device] = rows
        return kept, most

    def _cheapest(
        self, rows: F64, device: int, cut: int, count: int, most: float
    ) -> tuple[F64, float]:
        """The `count` labels of least bounds; no answer may be above the least bound given up."""
        if len(rows) <= count:
            return rows, most
        bounds = self._bounds(rows, device, cut)
        order = np.argsort(bounds, kind="stable")
        return rows[order[:count]], min(most, float(bounds[order[count]]))

    def _extended(self, labels: F64, options: F64, *, begin: bool = False) -> F64:
        """Every label with every option added."""
        net, layout = self.net, self.layout
        rows = np.repeat(labels, len(options), axis=0)
        added = np.tile(options, (len(labels), 1))
        before, took = rows[:, :1].copy(), added[:, :1]
        rows[:, 0] += added[:, 0]
        rows[:, self._held] += added[:, layout.held]
        if self.spaced:
            ahead = added[:, layout.prefix]
            rows[:, self._prefix] += ahead * rows[:, self._prefix + 1]
            rows[:, self._prefix + 1] *= (ahead > 0) | begin
        if not self.loads_count:
            return rows
        works = added[:, layout.work]
        is_used = works > 0
        rows[:, self._columns(_WORK)] += works
        work = rows[:, self._columns(_WORK)]
        came = before + added[:, layout.lead]
        for number, times in ((_BUSY, net.batches), (_BUSY_LAST, self.left)):
            busy = rows[:, self._columns(number)]
            busy[:] = np.where(is_used, np.maximum(busy, came) + times * works, busy)
        if self.rounds:
            idle = added[:, layout.lag]
            for number, times in ((_OUT, net.batches - net.in_flight), (_OUT_LAST, self.left)):
                out = rows[:, self._columns(number)]
                out[:] = np.where(work > 0, out + took, 0.0)
                out[:] = np.where(is_used, np.maximum(out, times * work + idle), out)
        return rows

    def _bounds(self, rows: F64, device: int, cut: int) -> F64:
        """What every placement that begins so costs at least."""
        net, rest = self.net, self.rest_ms[cut, device]
        held = rows[:, self._held]
        over = np.maximum(0.0, held - net.limit_bytes)[:, self.scarce].sum(axis=1)
        time, rounds = rows[:, 0] + rest, self.rounds
        bounds = (rounds + 1) * time + (self.left - 1) * rows[:, self._prefix]
        work, busy = rows[:, self._columns(_WORK)], rows[:, self._columns(_BUSY)]
        if self.loads_count:
            bounds = np.maximum(bounds, busy.max(axis=1))
            last = rows[:, self._columns(_BUSY_LAST)].max(axis=1)
            bounds = np.maximum(bounds, last + rounds * time)
        if rounds:
            out = rows[:, self._columns(_OUT)].max(axis=1) + rest
            bounds = np.maximum(bounds, time + out)
            out = rows[:, self._columns(_OUT_LAST)].max(axis=1) + rest
            bounds = np.maximum(bounds, rounds * time + out)
        bounds = bounds + net.penalty * over
        for weighing in self.weighings:
            sums = rows[:, 0] * weighing.time + work @ weighing.work + busy @ weighing.busy
            sums += held @ weighing.held
            bounds = np.maximum(bounds, sums + weighing.to_go[cut, device] - weighing.earned)
        return np.asarray(bounds)

    def _renamed(self, rows: F64, device: int) -> tuple[int, F64]:
        """The same labels with the names of alike devices in order: the current one first."""
        first = self.symmetry.first
        kin = np.flatnonzero(first == first[device])
        if len(kin) > 1 and device != kin[0]:
            rows = self._exchanged(rows, int(kin[0]), device)
            device = int(kin[0])
        for leader in np.unique(first).tolist():
            others = [d for d in np.flatnonzero(first == leader).tolist() if d != device]
            for last in range(len(others) - 1, 0, -1):  # a few passes of exchanges: bubble sort
                for position in range(last):
                    rows = self._sorted_pair(rows, others[position], others[position + 1])
        return device, rows

    def _sorted_pair(self, rows: F64, one: int, other: int) -> F64:
        """Exchange two alike devices in the rows where the second is busier, or holds more."""
        held = self._held.start
        less = rows[:, 1 + one] < rows[:, 1 + other]
        same = rows[:, 1 + one] == rows[:, 1 + other]
        turn = less | (same & (rows[:, held + one] < rows[:, held + other]))
        if not turn.any():
            return rows
        rows = rows.copy()
        rows[turn] = self._exchanged(rows[turn], one, other)
        return rows

    def _exchanged(self, rows: F64, one: int, other: int) -> F64:
        """The labels with two alike devices, and their channels, exchanged."""
        slots = self.symmetry.slots(one, other)
        devices = slots[: self.layout.num_devices]
        order = np.concatenate(
            (
                [0],
                *(self._columns(number).start + slots for number in range(_OF_SLOTS)),
                self._held.start + devices,
                [self._prefix, self._prefix + 1],
            )
        )
        exchanged: F64 = rows[:, order]
        return exchanged

    def _weighings(self) -> list[_Weighing]:
        """Latency alone; loads alone and half of each; latency with the best prices of memory."""
        net = self.net
        none = np.zeros(self._num_slots)
        no_bytes = np.zeros(self.layout.num_devices)
        latency = self._weighing(self.rounds + 1.0, none, none, no_bytes)
        weighings = [latency]
        if self.loads_count:
            shares = none.copy()
            shares[: self.layout.num_devices] = load_weights(net, self.symmetry.first)
            shares /= shares.sum()
            for part in (1.0, 0.5):
                time = (1 - part) * (self.rounds + 1.0)
                weighings.append(self._weighing(time, none, part * shares, no_bytes))
        room = net.limit_bytes[self.scarce].sum()
        if self.scarce.any() and room > 0:
            base = max(weighings, key=self._whole)
            scale = max(self._whole(base), 1e-9) / room
            priced = []
            for power in range(_MULTIPLIERS):
                price = min(net.penalty, scale * 2.0 ** (power - 6))
                held = np.where(self.scarce, price, 0.0)
                priced.append(self._weighing(base.time, base.work, base.busy, held, price * room))
            weighings += sorted(priced, key=self._whole)[-3:]
        return weighings

    def _weighing(
        self, time: float, work: F64, busy: F64, held: F64, earned: float = 0.0
    ) -> _Weighing:
        """The least sums from every cut layer and device to the end."""
        entries = np.zeros(self.layout.size)
        entries[0] = time
        entries[self.layout.work] = work + busy * self.net.batches
        entries[self.layout.held] = held
        to_go = np.full((len(self.cuts), self.layout.num_devices), np.inf)
        to_go[-1] = 0.0
        for number in range(len(self.options) - 1, -1, -1):
            for (source, target), options in self.options[number].items():
                best = float((options @ entries).min()) + to_go[number + 1, target]
                to_go[number, source] = min(to_go[number, source], best)
        return _Weighing(time, work, busy, held, earned, to_go)

    def _whole(self, weighing: _Weighing) -> float:
        """The bound of the whole chain by one weighing."""
        sums = []
        for device, rows in self._first().items():
            here = float(rows[0, 0] * weighing.time + rows[0, self._columns(_WORK)] @ weighing.work)
            here += float(rows[0, self._columns(_BUSY)] @ weighing.busy)
            here += float(rows[0, self._held] @ weighing.held)
            sums.append(here + float(weighing.to_go[0, device]) - weighing.earned)
        return min(sums)
