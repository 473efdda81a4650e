"""The network as a chain of *cut layers*, and what each layer range between two of them costs at
least.

A cut layer is one that every path passes: no edge jumps over it. Between two of them, `first` and
`last`, lie inner layers in separate branches. With `first` and `last` on given devices, every way
to place the inner layers is an *option*: a vector of

    time   forward from the end of `first` to the end of `last`, and backward the other way; the
           longest path, the busiest device and the busiest channel each give a bound of it
    load   work per device and per channel, forward and backward
    lead   per device and channel: from the begin of the range to its first work forward, and from
           its last work backward to the end of the range
    lag    likewise from its last work forward to the end, and from there to the first one backward
    held   bytes per device when the forward pass ends
    prefix work forward if no layer of the range leaves the device, else 0

Branches are enumerated one by one and combined; options that are worse than another in every entry
are dropped. Where there are too many, groups of them are replaced by their least entries, which
keeps every bound valid. Alike layer ranges and alike devices are done once.
"""

import math
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
    def num_slots(self) -> int:
        """Devices and channels."""
        return self.num_devices + self.num_channels

    @property
    def work(self) -> slice:
        """Time per device and channel."""
        return slice(1, 1 + self.num_slots)

    @property
    def load(self) -> slice:
        """Work per device."""
        return slice(1, 1 + self.num_devices)

    @property
    def channel(self) -> slice:
        """Time per channel."""
        return slice(1 + self.num_devices, 1 + self.num_slots)

    @property
    def lead(self) -> slice:
        """Per device and channel: time before its first work and after its last."""
        return slice(1 + self.num_slots, 1 + 2 * self.num_slots)

    @property
    def lag(self) -> slice:
        """Per device and channel: time between its last work forward and its first backward."""
        return slice(1 + 2 * self.num_slots, 1 + 3 * self.num_slots)

    @property
    def held(self) -> slice:
        """Bytes per device."""
        begin = 1 + 3 * self.num_slots
        return slice(begin, begin + self.num_devices)

    @property
    def size(self) -> int:
        """How many entries there are."""
        return self.prefix + 1

    @property
    def prefix(self) -> int:
        """Work forward where all layers up to the last are on the device of the first; else 0."""
        return 1 + 3 * self.num_slots + self.num_devices


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
        self.weight, self.weight_of_parts = self._weights()
        self.may = net.may[net.gene_of]
        self.near = joined(net)
        self.remembered: dict[bytes, dict[tuple[int, int], F64]] = {}

    def _weights(self) -> tuple[F64 | None, F64 | None]:
        """What matters most of options and of parts of them: time, and work shared evenly."""
        net, layout = self.net, self.layout
        if net.batches == 1:
            return None, None
        rounds = -(-net.batches // net.in_flight)
        weight = np.zeros(layout.size)
        weight[0] = rounds
        weight[layout.load] = net.batches / layout.num_devices
        weight[layout.channel] = net.batches / max(1, layout.num_channels)
        parts = _nothing(layout, 1)
        for field in (parts.ends_there, parts.ends_back, parts.stays):
            field[:] = 0.0
        parts.path_there[:] = parts.path_back[:] = rounds
        parts.load_there[:] = parts.load_back[:] = net.batches / layout.num_devices
        parts.sent_there[:] = parts.sent_back[:] = net.batches / max(1, layout.num_channels)
        return weight, parts.rows()[0]

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
                size = len(slots)
                renamed = int(devices[ends[0]]), int(devices[ends[1]])
                rows = self._add(known, first, last, renamed)
                order = np.concatenate(
                    (
                        [0],
                        1 + slots,
                        1 + size + slots,
                        1 + 2 * size + slots,
                        1 + 3 * size + devices,
                        [self.layout.prefix],
                    )
                )
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
            if self.layout.num_devices ** len(branch) > _MOST_CONFIGURATIONS:
                combined.stays[:] = 0.0
            else:
                parts = self._branch(branch, first, last, source, target)
                combined = combined.plus(parts.fewest(_MOST_OF_BRANCH, self.weight_of_parts))
                combined = combined.fewest(_MOST_OPTIONS, self.weight_of_parts)
        closed = self._closed(combined, first, last, source, target)
        return least(closed, _MOST_OPTIONS, weight=self.weight)

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
            devices = self.layout.num_devices
            for lead, channel in ((parts.ends_there, there), (parts.ends_back, back)):
                lead[:, :, devices + channel] = 0.0
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
        for parent, child in self._edges(branch, first, last):
            away = on[parent] != on[child]
            valid &= self.near[on[parent], on[child]]
            back = net.route[on[child], on[parent]]
            returned = np.where(away, net.transfer_ms[parent, back], 0.0)
            np.add.at(parts.sent_back, (rows, back), returned)
        parts.path_there[:] = self._ends(parts.ends_there, branch, first, last, on, backward=False)
        parts.path_back[:] = self._ends(parts.ends_back, branch, first, last, on, backward=True)
        for layer in branch:
            here = on[layer]
            parts.stays[here != source] = 0.0
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

    def _edges(self, branch: list[int], first: int, last: int) -> Iterator[tuple[int, int]]:
        """Parent and child of the edges of a branch; by children, in topological order."""
        net, layers = self.net, {first, *branch}
        for child in [*branch, last]:
            begin, end = net.parent_start[child], net.parent_start[child + 1]
            for parent in net.parent[begin:end].tolist():
                if parent in layers and not (parent == first and child == last):
                    yield parent, child

    def _ends(
        self,
        ends: F64,
        branch: list[int],
        first: int,
        last: int,
        on: dict[int, I64],
        *,
        backward: bool,
    ) -> F64:
        """The longest path in one direction; fills the least times of each slot from both ends.

        `ends[0]` is from the first layer to the slot's first job, and from its last job backward,
        `ends[1]` from the slot's last job to the last layer, and to its first job backward.
        """
        net, devices = self.net, self.layout.num_devices
        count = len(on[last])
        rows = np.arange(count)
        edges = list(self._edges(branch, first, last))
        job = {layer: net.job_ms[backward * self.num_layers + layer, on[layer]] for layer in branch}
        sent, channels = [], []
        for parent, child in edges:
            source, target = (child, parent) if backward else (parent, child)
            channel = net.route[on[source], on[target]]
            away = on[source] != on[target]
            sent.append(np.where(away, net.transfer_ms[parent, channel], 0.0))
            channels.append(channel)
        # From the first layer, then from the last one: times up to a layer, itself left out.
        near = {layer: np.zeros(count) for layer in [*branch, first, last]}
        far = {layer: np.zeros(count) for layer in [*branch, first, last]}
        for number, (parent, child) in enumerate(edges):
            before = near[parent] + job.get(parent, 0.0)
            _lower(ends[:, 0], rows, devices + channels[number], before, sent[number])
            np.maximum(near[child], before + sent[number], out=near[child])
        for number in range(len(edges) - 1, -1, -1):
            parent, child = edges[number]
            after = far[child] + job.get(child, 0.0)
            _lower(ends[:, 1], rows, devices + channels[number], after, sent[number])
            np.maximum(far[parent], after + sent[number], out=far[parent])
        for layer in branch:
            _lower(ends[:, 0], rows, on[layer], near[layer], job[layer])
            _lower(ends[:, 1], rows, on[layer], far[layer], job[layer])
        return near[last]

    def _closed(self, parts: "_Parts", first: int, last: int, source: int, target: int) -> F64:
        """The vectors of options, the last layer included."""
        net, layout = self.net, self.layout
        parts.send(net, first, np.full(len(parts.path_there), source), parts.reads)
        there = parts.longest(
            parts.path_there, parts.load_there, parts.sent_there, parts.ends_there
        )
        back = parts.longest(parts.path_back, parts.load_back, parts.sent_back, parts.ends_back)
        both = net.job_ms[last, target] + net.job_ms[self.num_layers + last, target]
        closed = np.zeros((len(there), layout.size))
        closed[:, 0] = there + back + both
        closed[:, layout.load] = parts.load_there + parts.load_back
        closed[:, layout.load.start + target] += both
        closed[:, layout.channel] = parts.sent_there + parts.sent_back
        ends = np.minimum(parts.ends_there, there[:, None, None])
        ends += np.minimum(parts.ends_back, back[:, None, None])
        closed[:, layout.lead] = ends[:, 0]
        closed[:, layout.lag] = ends[:, 1]
        if both > 0:
            closed[:, layout.lag.start + target] = 0.0
        # Of what has no work they say nothing, and nothing undercuts less than zero.
        unused = closed[:, layout.work] == 0
        closed[:, layout.lead][unused] = 0.0
        closed[:, layout.lag][unused] = 0.0
        if source == target:
            ahead = parts.load_there[:, source] + net.job_ms[last, target]
            closed[:, layout.prefix] = parts.stays * ahead
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
    stays: F64  # 1 where all layers are on the device of the first, else 0
    ends_there: F64  # [from the first layer, to the last], per device and channel; see `_ends`
    ends_back: F64

    def longest(self, path: F64, load: F64, sent: F64, ends: F64) -> F64:
        """What one direction takes at least: a path, or what a slot does and what lies around."""
        work = np.column_stack((load, sent))
        around = np.where(work > 0, ends[:, 0] + ends[:, 1], 0.0)
        longest: F64 = np.maximum(path, (work + around).max(axis=1, initial=0.0))
        return longest

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
            each(self.stays, other.stays, np.minimum),
            each(self.ends_there, other.ends_there, np.minimum),
            each(self.ends_back, other.ends_back, np.minimum),
        )

    def rows(self) -> F64:
        """All fields side by side."""
        return _side_by_side(self.fields())

    def fields(self) -> list[F64]:
        """The arrays in their order."""
        return [getattr(self, name) for name in _Parts.__slots__]

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

    def fewest(self, count: int, weight: F64 | None) -> "_Parts":
        """At most so many options; more are replaced by the least of groups."""
        rows = self.rows()
        fields = self.fields()
        used_there = np.column_stack((self.load_there, self.sent_there))[:, None, :] > 0
        used_back = np.column_stack((self.load_back, self.sent_back))[:, None, :] > 0
        fields[-2] = np.where(used_there, self.ends_there, 0.0)
        fields[-1] = np.where(used_back, self.ends_back, 0.0)
        compared = _side_by_side(fields)
        kept, begin, columns = least(rows, count, compared, weight), 0, []
        for name in _Parts.__slots__:
            one = getattr(self, name)
            width = math.prod(one.shape[1:])
            part = kept[:, begin : begin + width]
            columns.append(part.reshape(len(kept), *one.shape[1:]).copy())
            begin += width
        return _Parts(*columns)


def _side_by_side(fields: list[F64]) -> F64:
    rows = [field.reshape(len(field), math.prod(field.shape[1:])) for field in fields]
    return np.concatenate(rows, axis=1)


def _nothing(layout: VectorLayout, count: int) -> _Parts:
    devices, channels = (count, layout.num_devices), (count, layout.num_channels)
    ends = count, 2, layout.num_slots
    return _Parts(
        np.zeros(count), np.zeros(count), np.zeros(devices), np.zeros(devices), np.zeros(devices),
        np.zeros(channels), np.zeros(channels), np.zeros(devices), np.ones(count),
        np.full(ends, np.inf), np.full(ends, np.inf),
    )  # fmt: skip


def _lower(ends: F64, rows: I64, slots: I64, times: F64, costs: F64) -> None:
    """Note when slots have jobs; those that take no time are none."""
    here = ends[rows, slots]
    ends[rows, slots] = np.where(costs > 0, np.minimum(here, times), here)


def least(rows: F64, count: int, compared: F64 | None = None, weight: F64 | None = None) -> F64:
    """Rows such that every given one is at least some row in every entry; at most `count`.

    Rows that another one undercuts are dropped. If too many are left the cheapest stay as they are
    and the others are put together, neighbours by their sums, by the least of their entries.
    Entries that say nothing where they stand may be less in what is compared.
    """
    order = _cheap_first(rows if compared is None else compared, weight)
    whole = count - count // 4
    kind = _undercut((rows if compared is None else compared)[order], whole)
    rows = rows[order]
    rest = rows[kind == _LEFT]
    groups = np.array_split(rest, min(len(rest), count - whole)) if len(rest) else []
    merged = [group.min(axis=0) for group in groups]
    return np.array([*rows[kind == _KEPT], *merged]).reshape(-1, rows.shape[1])


def undominated(rows: F64) -> F64:
    """The rows that no other one undercuts in every entry."""
    rows = rows[_cheap_first(rows)]
    undominated: F64 = rows[_undercut(rows, len(rows)) == _KEPT]
    return undominated


def _cheap_first(rows: F64, weight: F64 | None = None) -> I64:
    """Rows by the sums of their entries, each entry by its greatest; a worse row comes later."""
    scale = rows.max(axis=0, initial=0.0)
    evenly = np.divide(1.0, scale, out=np.zeros_like(scale), where=scale > 0)
    if weight is None:
        order: I64 = np.argsort(rows @ evenly, kind="stable")
    else:
        order = np.lexsort((rows @ evenly, rows @ weight))
    return order


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
