"""A lower bound by labels along the cut layers: latency, loads and memory at once.

A *label* says what a placement of the layers up to a cut layer costs at least: the time of one
batch there and back, work per device and channel over all batches, bytes held per device. A layer
range to the next cut layer adds one of its options. A device or channel that first gets work in a
range waits until the first batch has come so far, and after its last work that batch must still go
back, so the time so far counts in its load:

    makespan >= time of the ranges before + batches * its work

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


@dataclass(frozen=True, slots=True)
class _Weighing:
    """A sum of entries, less `earned`, that no score is below; and the least rest of it."""

    entries: F64  # per entry of an option
    earned: float
    to_go: F64  # [cut, device]


class LabelBound:
    """Bounds for one problem; the options of its layer ranges are worked out once."""

    def __init__(self, net: PlacementArrays, go_on: Callable[[], bool] = lambda: True) -> None:
        self.net = net
        self.symmetry = symmetry_of(net)
        many = len(net.output_bytes) * len(net.limit_bytes) ** 2 > _MOST_WORK
        chain = chain_of(net)
        self.cuts = () if many else chain.cuts
        self.sequential_batches = -(-net.batches // net.in_flight)
        if not self.useful:
            return
        total = net.weight_bytes.sum() + net.output_bytes.sum()
        # With several last layers nothing is sure to be held at once.
        self.scarce = (net.limit_bytes < total) & net.one_sink
        channels = net.transfer_ms.shape[1]
        busy = np.full(len(net.limit_bytes) + channels, net.batches > 1)
        ranges = PlacedRanges(
            net, chain, self.symmetry, np.concatenate(([True], busy, self.scarce))
        )
        self.layout = ranges.layout
        self.options = []
        for number in range(len(self.cuts) - 1):
            if not go_on():  # without all options there is no bound
                self.cuts = ()
                return
            self.options.append(ranges.options(number))
        self.weighings = self._weighings()

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
        labels = {device: rows for device, rows in self._first().items() if device in self._leaders}
        for number in range(len(self.options)):
            if not go_on():
                return self.root()
            labels, most = self._next(labels, number, width, most)
        bounds = [self._bounds(rows, device, len(self.options)) for device, rows in labels.items()]
        return min([most, *(float(array.min()) for array in bounds)]) * ROUNDING

    # A label is a row: time, busy until (devices, channels), unused flags of these, bytes held.

    def _first(self) -> dict[int, F64]:
        net, layout, slots, start = self.net, self.layout, self._num_slots, self.cuts[0]
        arrays: dict[int, F64] = {}
        for device in np.flatnonzero(net.may[net.gene_of[start]]).tolist():
            label = np.zeros((1, 1 + 2 * slots + layout.num_devices))
            both = net.job_ms[start, device] + net.job_ms[len(net.output_bytes) + start, device]
            label[0, 0] = both
            label[0, 1 : 1 + slots] = both
            label[0, 1 + slots : 1 + 2 * slots] = 1.0
            label[0, 1 + device] = net.batches * both
            label[0, 1 + slots + device] = 0.0
            held = np.zeros(layout.num_devices)
            held[device] = net.weight_bytes[start]
            label[0, 1 + 2 * slots :] = np.where(self.scarce, held, 0.0)
            arrays[device] = label
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

    def _extended(self, labels: F64, options: F64) -> F64:
        """Every label with every option added."""
        slots = self._num_slots
        work = options[:, 1 : 1 + slots] * self.net.batches
        rows = np.repeat(labels, len(options), axis=0)
        added, works = np.tile(options, (len(labels), 1)), np.tile(work, (len(labels), 1))
        rows[:, 0] += added[:, 0]
        unused = rows[:, 1 + slots : 1 + 2 * slots] > 0
        stays = unused & (works == 0)
        busy = rows[:, 1 : 1 + slots] + works  # of an unused slot it was the time so far
        rows[:, 1 : 1 + slots] = np.where(stays, rows[:, :1], busy)
        rows[:, 1 + slots : 1 + 2 * slots] = stays
        rows[:, 1 + 2 * slots :] += added[:, 1 + slots :]
        return rows

    def _bounds(self, rows: F64, device: int, cut: int) -> F64:
        """What every placement that begins so costs at least."""
        slots, net = self._num_slots, self.net
        used = rows[:, 1 + slots : 1 + 2 * slots] == 0
        busy = np.where(used, rows[:, 1 : 1 + slots], 0.0)
        held = rows[:, 1 + 2 * slots :]
        over = np.maximum(0.0, held - net.limit_bytes)[:, self.scarce].sum(axis=1)
        bounds = np.maximum(self.sequential_batches * rows[:, 0], busy.max(axis=1, initial=0.0))
        bounds = bounds + net.penalty * over
        for weighing in self.weighings:
            entries = weighing.entries
            sums = rows[:, 0] * entries[0] + busy @ entries[1 : 1 + slots]
            sums += held @ entries[1 + slots :]
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
        held = 1 + 2 * self._num_slots
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
            ([0], 1 + slots, 1 + len(slots) + slots, 1 + 2 * len(slots) + devices)
        )
        exchanged: F64 = rows[:, order]
        return exchanged

    def _weighings(self) -> list[_Weighing]:
        """Latency alone; loads alone and half of each; latency with the best prices of memory."""
        net, layout = self.net, self.layout
        latency = np.zeros(layout.size)
        latency[0] = self.sequential_batches
        weighings = [self._weighing(latency)]
        if net.batches > 1:
            loads = np.zeros(layout.size)
            shares = load_weights(net, self.symmetry.first)
            loads[layout.load] = shares / shares.sum()
            weighings += [self._weighing(loads), self._weighing((loads + latency) / 2)]
        room = net.limit_bytes[self.scarce].sum()
        if self.scarce.any() and room > 0:
            base = max(weighings, key=self._whole)
            scale = max(self._whole(base), 1e-9) / room
            priced = []
            for power in range(_MULTIPLIERS):
                price = min(net.penalty, scale * 2.0 ** (power - 6))
                entries = base.entries.copy()
                entries[layout.held] = np.where(self.scarce, price, 0.0)
                priced.append(self._weighing(entries, price * room))
            weighings += sorted(priced, key=self._whole)[-3:]
        return weighings

    def _weighing(self, entries: F64, earned: float = 0.0) -> _Weighing:
        """The least sums from every cut layer and device to the end."""
        num_devices = self.layout.num_devices
        scaled = entries.copy()
        scaled[1 : 1 + self._num_slots] *= self.net.batches
        to_go = np.full((len(self.cuts), num_devices), np.inf)
        to_go[-1] = 0.0
        for number in range(len(self.options) - 1, -1, -1):
            for (source, target), options in self.options[number].items():
                best = float((options @ scaled).min()) + to_go[number + 1, target]
                to_go[number, source] = min(to_go[number, source], best)
        return _Weighing(entries, earned, to_go)

    def _whole(self, weighing: _Weighing) -> float:
        """The bound of the whole chain by one weighing."""
        first = self._first()
        sums = []
        for device, rows in first.items():
            slots = self._num_slots
            used = rows[:, 1 + slots : 1 + 2 * slots] == 0
            busy = np.where(used, rows[:, 1 : 1 + slots], 0.0)
            entries = weighing.entries
            here = rows[:, 0] * entries[0] + busy @ entries[1 : 1 + slots]
            here += rows[:, 1 + 2 * slots :] @ entries[1 + slots :]
            to_go = float(weighing.to_go[0, device])
            sums.append(float(here.min()) + to_go - weighing.earned)
        return min(sums)
