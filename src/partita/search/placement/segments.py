"""The network as a chain of *cut layers*, and what each layer range between two of them costs at
least.

A cut layer is one that every path passes: no edge jumps over it. Between two of them, `first` and
`last`, lie inner layers in separate branches. With `first` and `last` on given devices, every way
to place the inner layers is an *option*: a vector of

    time   forward from the end of `first` to the end of `last`, and backward the other way; the
           longest path, the busiest device and the busiest channel each give a bound of it
    load   work per device and per channel, forward and backward
    held   bytes per device when the forward pass ends

Branches are enumerated one by one and combined; options that are worse than another in every entry
are dropped. Where there are too many, groups of them are replaced by their least entries, which
keeps every bound valid. Alike layer ranges and alike devices are done once.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from partita.compiled import compiled
from partita.search.placement.bounds import Symmetry
from partita.search.placement.feasible import joined
from partita.search.placement.tables import B1, F64, I64, PlacementArrays

_MOST_CONFIGURATIONS = 5000  # of one branch; a longer branch is left out, as if it cost nothing
_MOST_OPTIONS = 200  # of one layer range with given ends
_MOST_OF_BRANCH = 48
_DROPPED, _KEPT, _LEFT = range(3)


@dataclass(frozen=True, slots=True)
class LayerPaths:
    """The layers on paths from one first layer to one last one, and the cut layers among them.

    Other layers are left out, which only makes a bound lower.
    """

    kept: B1
    cuts: tuple[int, ...]


def chain_of(net: PlacementArrays) -> LayerPaths:
    """The chain between the ends of the longest path."""
    num_layers = len(net.output_bytes)
    work = net.job_ms.min(axis=1)
    work = work[:num_layers] + work[num_layers:]
    before, after = work.copy(), work.copy()
    for layer in range(num_layers):
        parents = net.parent[net.parent_start[layer] : net.parent_start[layer + 1]]
        before[layer] += before[parents].max(initial=0.0)
    for layer in range(num_layers - 1, -1, -1):
        children = net.child[net.child_start[layer] : net.child_start[layer + 1]]
        after[layer] += after[children].max(initial=0.0)
    first = int(net.inputs[after[net.inputs].argmax()])
    below = _reached(net.child_start, net.child, first, range(first, num_layers))
    ends = np.flatnonzero(below & (np.diff(net.child_start) == 0))
    last = int(ends[before[ends].argmax()])
    kept = below & _reached(net.parent_start, net.parent, last, range(last, -1, -1))
    jumped = np.zeros(num_layers + 1, np.int64)
    for layer in np.flatnonzero(kept).tolist():
        for child in net.child[net.child_start[layer] : net.child_start[layer + 1]].tolist():
            if kept[child]:
                jumped[layer + 1] += 1
                jumped[child] -= 1
    free = np.cumsum(jumped)[:num_layers] == 0
    return LayerPaths(kept, tuple(np.flatnonzero(free & kept).tolist()))


def _reached(start: I64, neighbour: I64, origin: int, order: range) -> B1:
    """What can be reached from a layer, looking at the layers in this order."""
    reached = np.zeros(len(start) - 1, np.bool_)
    reached[origin] = True
    for layer in order:
        if reached[layer]:
            reached[neighbour[start[layer] : start[layer + 1]]] = True
    return reached


@dataclass(frozen=True, slots=True)
class VectorLayout:
    """Where what stands in a vector of an option: time, then loads, channels, bytes."""

    num_devices: int
    num_channels: int

    @property
    def load(self) -> slice:
        """Work per device."""
        return slice(1, 1 + self.num_devices)

    @property
    def channel(self) -> slice:
        """Time per channel."""
        return slice(1 + self.num_devices, 1 + self.num_devices + self.num_channels)

    @property
    def held(self) -> slice:
        """Bytes per device."""
        begin = 1 + self.num_devices + self.num_channels
        return slice(begin, begin + self.num_devices)

    @property
    def size(self) -> int:
        """How many entries there are."""
        return 1 + 2 * self.num_devices + self.num_channels


class PlacedRanges:
    """The options of all layer ranges between cut layers."""

    def __init__(
        self, net: PlacementArrays, chain: LayerPaths, symmetry: Symmetry, needed: B1
    ) -> None:
        self.net, self.kept, self.cuts = net, chain.kept, chain.cuts
        self.symmetry = symmetry
        self.num_layers = len(net.output_bytes)
        self.layout = VectorLayout(len(net.limit_bytes), net.transfer_ms.shape[1])
        self.needed = needed  # which entries anyone looks at
        self.may = net.may[net.gene_of]
        self.near = joined(net)
        self.remembered: dict[bytes, dict[tuple[int, int], F64]] = {}

    def options(self, number: int) -> dict[tuple[int, int], F64]:
        """For the devices of both ends of a layer range: its options, [option, entry]."""
        first, last = self.cuts[number], self.cuts[number + 1]
        layers = np.arange(first, last + 1)
        key = self._key(layers[self.kept[first : last + 1]])
        if key not in self.remembered:
            known: dict[tuple[int, int], F64] = {}
            for source, target in np.ndindex(*self.near.shape):
                if self.may[first, source] and self.may[last, target]:
                    self._add(known, first, last, (source, target))
            self.remembered[key] = {ends: array for ends, array in known.items() if len(array)}
        return self.remembered[key]

    def _add(
        self, known: dict[tuple[int, int], F64], first: int, last: int, ends: tuple[int, int]
    ) -> F64:
        """Options with these ends: those of alike devices with other names, where known."""
        if ends in known:
            return known[ends]
        alike = self.symmetry.first
        for end, other in ((ends[0], ends[1]), (ends[1], ends[0])):
            kin = np.flatnonzero(alike == alike[end]).tolist()
            # Each end goes to the first device of its kind that the other end does not have.
            name = next(device for device in kin if device != other or end == other)
            if name < end:
                slots = self.symmetry.slots(end, name)
                devices = slots[: self.layout.num_devices]
                renamed = int(devices[ends[0]]), int(devices[ends[1]])
                rows = self._add(known, first, last, renamed)
                order = np.concatenate(([0], 1 + slots, 1 + len(slots) + devices))
                known[ends] = rows[:, order]
                return known[ends]
        known[ends] = self._between(first, last, *ends)
        return known[ends]

    def _key(self, layers: I64) -> bytes:
        """Equal for layer ranges that cost the same."""
        net = self.net
        edges = [
            np.searchsorted(layers, children[self.kept[children]])
            for layer in layers[:-1].tolist()
            for children in [net.child[net.child_start[layer] : net.child_start[layer + 1]]]
        ]
        parts = [
            net.job_ms[layers],
            net.job_ms[self.num_layers + layers],
            net.transfer_ms[layers],
            net.output_bytes[layers],
            net.weight_bytes[layers],
            self.may[layers],
            np.array([len(row) for row in edges]),
            np.concatenate(edges),
        ]
        return b"".join(part.tobytes() for part in parts)

    def _between(self, first: int, last: int, source: int, target: int) -> F64:
        """The options with the ends on these devices; none where a route is missing."""
        combined = _nothing(self.layout, 1)
        net = self.net
        if last in net.child[net.child_start[first] : net.child_start[first + 1]]:
            if not self.near[source, target]:
                return np.empty((0, self.layout.size))
            combined = combined.plus(self._edge(first, source, target))
        for branch in self._branches(first, last):
            if self.layout.num_devices ** len(branch) <= _MOST_CONFIGURATIONS:
                parts = self._branch(branch, first, last, source, target)
                combined = combined.plus(parts.fewest(_MOST_OF_BRANCH))
                combined = combined.fewest(_MOST_OPTIONS)
        return least(self._closed(combined, first, last, source, target), _MOST_OPTIONS)

    def _branches(self, first: int, last: int) -> Iterator[list[int]]:
        """The inner layers in groups that only the ends join."""
        net, kept = self.net, self.kept
        group = {layer: layer for layer in range(first + 1, last) if kept[layer]}

        def root(layer: int) -> int:
            while group[layer] != layer:
                layer = group[layer]
            return layer

        for layer in group:
            for child in net.child[net.child_start[layer] : net.child_start[layer + 1]].tolist():
                if child != last and kept[child]:
                    one, other = root(layer), root(child)
                    group[max(one, other)] = min(one, other)
        for begin in sorted({root(layer) for layer in group}):
            yield [layer for layer in group if root(layer) == begin]

    def _edge(self, first: int, source: int, target: int) -> "_Parts":
        """The edge from the first to the last layer."""
        parts = _nothing(self.layout, 1)
        parts.reads[:, target] = 1.0
        if source != target:
            there, back = self.net.route[source, target], self.net.route[target, source]
            parts.path_there[:] = self.net.transfer_ms[first, there]
            parts.path_back[:] = self.net.transfer_ms[first, back]
            parts.sent_back[:, back] += self.net.transfer_ms[first, back]
        return parts

    def _branch(
        self, branch: list[int], first: int, last: int, source: int, target: int
    ) -> "_Parts":
        """All ways to place the layers of one branch."""
        net = self.net
        allowed = [np.flatnonzero(self.may[layer]) for layer in branch]
        grids = np.meshgrid(*allowed, indexing="ij")
        count = grids[0].size
        on = {layer: grid.ravel() for layer, grid in zip(branch, grids, strict=True)}
        on[first], on[last] = np.full(count, source), np.full(count, target)
        parts, valid, rows = (
            _nothing(self.layout, count),
            np.ones(count, np.bool_),
            np.arange(count),
        )
        end = {first: np.zeros(count)}
        for layer in [*branch, last]:
            start = np.zeros(count)
            for parent in net.parent[
                net.parent_start[layer] : net.parent_start[layer + 1]
            ].tolist():
                if parent not in end or (layer == last and parent == first):
                    continue
                away = on[parent] != on[layer]
                valid &= self.near[on[parent], on[layer]]
                there = net.route[on[parent], on[layer]]
                back = net.route[on[layer], on[parent]]
                sent = np.where(away, net.transfer_ms[parent, there], 0.0)
                start = np.maximum(start, end[parent] + sent)
                returned = np.where(away, net.transfer_ms[parent, back], 0.0)
                np.add.at(parts.sent_back, (rows, back), returned)
            end[layer] = start + (net.job_ms[layer, on[layer]] if layer != last else 0.0)
        parts.path_there[:] = end[last]
        parts.path_back[:] = self._path_back(branch, first, last, on)
        for layer in branch:
            here = on[layer]
            parts.load_there[rows, here] += net.job_ms[layer, here]
            parts.load_back[rows, here] += net.job_ms[self.num_layers + layer, here]
            parts.held[rows, here] += net.weight_bytes[layer]
        for layer in [first, *branch]:
            children = net.child[net.child_start[layer] : net.child_start[layer + 1]].tolist()
            reads = np.zeros((count, self.layout.num_devices))
            for child in children:
                if child in on and not (layer == first and child == last):
                    reads[rows, on[child]] = 1.0
            if layer == first:  # other branches read it too: accounted for when all are known
                parts.reads[:] = np.maximum(parts.reads, reads)
            else:
                parts.send(net, layer, on[layer], reads)
        return parts.only(valid)

    def _path_back(self, branch: list[int], first: int, last: int, on: dict[int, I64]) -> F64:
        """The longest path from the last layer's backward to the first's."""
        net = self.net
        end = {last: np.zeros(len(on[last]))}
        for layer in [*reversed(branch), first]:
            start = np.zeros(len(on[last]))
            for child in net.child[net.child_start[layer] : net.child_start[layer + 1]].tolist():
                if child in end and not (layer == first and child == last):
                    away = on[layer] != on[child]
                    back = net.route[on[child], on[layer]]
                    sent = np.where(away, net.transfer_ms[layer, back], 0.0)
                    start = np.maximum(start, end[child] + sent)
            own = net.job_ms[self.num_layers + layer, on[layer]] if layer != first else 0.0
            end[layer] = start + own
        return end[first]

    def _closed(self, parts: "_Parts", first: int, last: int, source: int, target: int) -> F64:
        """The vectors of options, the last layer included."""
        net, layout = self.net, self.layout
        parts.send(net, first, np.full(len(parts.path_there), source), parts.reads)
        there = np.maximum(parts.path_there, parts.load_there.max(axis=1, initial=0.0))
        there = np.maximum(there, parts.sent_there.max(axis=1, initial=0.0))
        back = np.maximum(parts.path_back, parts.load_back.max(axis=1, initial=0.0))
        back = np.maximum(back, parts.sent_back.max(axis=1, initial=0.0))
        both = net.job_ms[last, target] + net.job_ms[self.num_layers + last, target]
        closed = np.zeros((len(there), layout.size))
        closed[:, 0] = there + back + both
        closed[:, layout.load] = parts.load_there + parts.load_back
        closed[:, layout.load.start + target] += both
        closed[:, layout.channel] = parts.sent_there + parts.sent_back
        closed[:, layout.held] = parts.held
        closed[:, layout.held.start + target] += net.weight_bytes[last]
        closed[:, ~self.needed] = 0.0
        return closed


@dataclass(frozen=True, slots=True)
class _Parts:
    """Options before the ends of their layer range are accounted for; a row each."""

    path_there: F64
    path_back: F64
    reads: F64  # per device: does it read the output of the first layer?
    load_there: F64
    load_back: F64
    sent_there: F64  # per channel
    sent_back: F64
    held: F64

    def plus(self, other: "_Parts") -> "_Parts":
        """Every option of this with every option of another branch."""

        def each(one: F64, two: F64, how: np.ufunc) -> F64:
            combined = how(one[:, None], two[None, :])
            return np.asarray(combined.reshape(-1, *one.shape[1:]), np.float64)

        return _Parts(
            each(self.path_there, other.path_there, np.maximum),
            each(self.path_back, other.path_back, np.maximum),
            each(self.reads, other.reads, np.maximum),
            each(self.load_there, other.load_there, np.add),
            each(self.load_back, other.load_back, np.add),
            each(self.sent_there, other.sent_there, np.add),
            each(self.sent_back, other.sent_back, np.add),
            each(self.held, other.held, np.add),
        )

    def only(self, rows: B1) -> "_Parts":
        """Some of the options."""
        return _Parts(*(getattr(self, name)[rows] for name in _Parts.__slots__))

    def send(self, net: PlacementArrays, layer: int, source: I64, reads: F64) -> None:
        """A layer's output goes once to every device that reads it, and is held there."""
        self.held[:] += reads * net.output_bytes[layer]
        rows = np.arange(len(source))
        for device in range(reads.shape[1]):
            away = (source != device) & (reads[:, device] > 0)
            channel = net.route[source, device]
            cost = np.where(away, net.transfer_ms[layer, channel], 0.0)
            self.sent_there[rows, channel] += cost

    def fewest(self, count: int) -> "_Parts":
        """At most so many options; more are replaced by the least of groups."""
        rows = np.column_stack([getattr(self, name) for name in _Parts.__slots__])
        kept, begin, columns = least(rows, count), 0, []
        for name in _Parts.__slots__:
            one = getattr(self, name)
            width = 1 if one.ndim == 1 else one.shape[1]
            part = kept[:, begin : begin + width]
            columns.append(part[:, 0].copy() if one.ndim == 1 else part.copy())
            begin += width
        return _Parts(*columns)


def _nothing(layout: VectorLayout, count: int) -> _Parts:
    devices, channels = (count, layout.num_devices), (count, layout.num_channels)
    return _Parts(
        np.zeros(count), np.zeros(count), np.zeros(devices), np.zeros(devices), np.zeros(devices),
        np.zeros(channels), np.zeros(channels), np.zeros(devices),
    )  # fmt: skip


def least(rows: F64, count: int) -> F64:
    """Rows such that every given one is at least some row in every entry; at most `count`.

    Rows that another one undercuts are dropped. If too many are left the cheapest stay as they are
    and the others are put together, neighbours by their sums, by the least of their entries.
    """
    rows = _cheap_first(rows)
    whole = count - count // 4
    kind = _undercut(rows, whole)
    rest = rows[kind == _LEFT]
    groups = np.array_split(rest, min(len(rest), count - whole)) if len(rest) else []
    merged = [group.min(axis=0) for group in groups]
    return np.array([*rows[kind == _KEPT], *merged]).reshape(-1, rows.shape[1])


def undominated(rows: F64) -> F64:
    """The rows that no other one undercuts in every entry."""
    rows = _cheap_first(rows)
    undominated: F64 = rows[_undercut(rows, len(rows)) == _KEPT]
    return undominated


def _cheap_first(rows: F64) -> F64:
    """Rows by the sums of their entries, each entry by its greatest; a worse row comes later."""
    scale = rows.max(axis=0, initial=0.0)
    weight = np.divide(1.0, scale, out=np.zeros_like(scale), where=scale > 0)
    array: F64 = rows[np.argsort(rows @ weight, kind="stable")]
    return array


@compiled(small=3_000, nogil=True)
def _undercut(rows: F64, most: int) -> I64:
    """Per row: dropped because one kept before is no worse; kept; or left when `most` are kept."""
    kind = np.zeros(len(rows), np.int64)
    kept = np.zeros(len(rows), np.int64)
    size = 0
    for row in range(len(rows)):
        worse = False
        for k in range(size):
            worse = True
            for entry in range(rows.shape[1]):
                if rows[row, entry] < rows[kept[k], entry]:
                    worse = False
                    break
            if worse:
                break
        if worse:
            kind[row] = _DROPPED
        elif size < most:
            kind[row] = _KEPT
            kept[size] = row
            size += 1
        else:
            kind[row] = _LEFT
    return kind
