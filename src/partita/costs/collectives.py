"""Seconds of communication between devices, by latency and bandwidth over the actual links.

A collective runs in `groups` of devices at the same time (one group per line of a mesh axis).
Every message follows its route; what crosses one link adds up there, so that shared links and
network cards slow each other down as they do in reality. With p devices and n bytes:

    ring all-reduce        2 (p - 1) (latency + n/p * load)    load: seconds per byte of the
    ring all-gather          (p - 1) (latency + n/p * load)    busiest link when every device
    tree all-reduce        2 (log2 p * latency + n * load)     sends to its neighbour at once
    hierarchical           reduce-scatter inside, all-reduce across, all-gather inside
    all-to-all             (p - 1) latency + n/p * load of all pairs

The fastest algorithm is taken, as communication libraries do. Whatever it is, a collective has a
fixed cost and reaches a part of the bandwidth, both by the kind of the devices and by whether it
leaves a node (`costs/physics.py`); across nodes every rank that it passes adds a little. A kind
that nobody compared with real runs has no fixed cost and reaches 85 % of its links.

Groups of devices that lie alike in a cluster's hierarchy cost alike (`Patterns`). A pattern is the
kinds of the devices and, level by level, which of them are together, in the order the groups are
met. On large clusters it stands for the links themselves, which would be slow to compare; small
ones are compared by what collectives take.
"""

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from partita.cluster import Cluster, DeviceKind
from partita.cluster.calibration import FIXED_ACROSS, FIXED_INSIDE, MESSAGE
from partita.costs.physics import physics_sets

Groups = tuple[tuple[int, ...], ...]

EFFICIENCY = 0.85  # of a link's bandwidth that large messages reach
ALL_PAIRS_LIMIT = 4096  # with more pairs than this, all-to-all is estimated from the levels
HUGE_BYTES = 1e12  # of a collective so large that only bandwidth counts
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "halo")


@dataclass(frozen=True, slots=True)
class Reached:
    """What collectives of a cluster's devices reach and cost: inside a node, across nodes."""

    inside: float = EFFICIENCY
    across: float = EFFICIENCY
    inside_s: float = 0.0
    across_s: float = 0.0
    hop_s: float = 0.0
    interference: float = 0.0
    message_s: float | None = None  # fixed cost of a message; None: that of a collective of two
    share_inside: float = 1.0  # of a message's bandwidth that collectives reach
    share_across: float = 1.0


def reached(cluster: Cluster) -> Reached:
    """By the parameter sets of the kinds; the least of them where kinds differ."""
    kinds = {(kind := cluster.kind_of(d)).name: kind for d in range(cluster.num_devices)}
    sets = [_reached_by(kinds[name]) for name in sorted(kinds)]
    known = [own for own in sets if own is not None]
    if not known or len(known) < len(sets):
        return Reached()
    return Reached(
        min(own.inside for own in known),
        min(own.across for own in known),
        max(own.inside_s for own in known),
        max(own.across_s for own in known),
        max(own.hop_s for own in known),
        max(own.interference for own in known),
        max((own.message_s for own in known if own.message_s is not None), default=None),
        min(own.share_inside for own in known),
        min(own.share_across for own in known),
    )


def _reached_by(kind: DeviceKind) -> Reached | None:
    """By a kind's parameter set, and what a calibration measured instead; None without a set.

    What computing pays for communication beside it is in the measured times of ops.
    """
    record = physics_sets().get(kind.name)
    if record is None:
        return None
    known = record.physics
    fixed = {name: (factor, seconds) for name, factor, seconds in kind.measured}
    if FIXED_INSIDE in fixed:
        (inside, inside_s), (across, across_s) = fixed[FIXED_INSIDE], fixed[FIXED_ACROSS]
        message_s = fixed[MESSAGE][1] if MESSAGE in fixed else None
        return Reached(
            known.inside, known.across, inside_s, across_s, 0.0, 0.0, message_s, inside, across
        )
    return Reached(
        known.inside, known.across, known.inside_s, known.across_s, known.hop_s,
        0.0 if kind.measured else known.interference,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Path:
    """Sending along several routes at once: worst latency, seconds per byte of the worst link."""

    latency_s: float
    s_per_byte: float


@dataclass(frozen=True)
class Collectives:
    """Times of collectives on one cluster; remembers routes and rings."""

    cluster: Cluster
    assumed: Reached | None = None  # instead of what the kinds of the devices are known to reach
    _paths: dict[tuple[str, int], Path] = field(default_factory=dict, repr=False, compare=False)
    _cuts: dict[int, tuple[Groups, Groups] | None] = field(
        default_factory=dict, repr=False, compare=False
    )
    _times: dict[tuple[str, float, int], float] = field(
        default_factory=dict, repr=False, compare=False
    )
    _pairs: dict[tuple[tuple[int, int], ...], Path] = field(
        default_factory=dict, repr=False, compare=False
    )
    # Groups of a thousand devices are slow to hash: they are known by identity, and kept for that.
    _kept: dict[int, Groups] = field(default_factory=dict, repr=False, compare=False)

    def seconds(self, collective: str, size_bytes: float, groups: Groups) -> float:
        """Time of a collective of `size_bytes` in each of the groups at once.

        The size is the whole tensor's: for all-gather and all-to-all the result on one device
        before or after, for reduce-scatter what goes in, for halo what one neighbour sends.
        """
        if size_bytes <= 0:
            return 0.0
        key = (collective, size_bytes, id(groups))
        seconds = self._times.get(key)
        if seconds is None:
            self._known(groups)
            p = max((len(group) for group in groups), default=1)
            seconds = 0.0
            if p > 1:
                moving = self._by_name(collective, size_bytes, groups, p)
                seconds = self.fixed_s(groups) + moving
            self._times[key] = seconds
        return seconds

    def by_bandwidth(self, collective: str, size_bytes: float, groups: Groups) -> float:
        """The part of a collective's time that grows with its size."""
        return self.seconds(collective, HUGE_BYTES, groups) * size_bytes / HUGE_BYTES

    def fixed_s(self, groups: Groups) -> float:
        """What any collective in these groups costs before a byte is moved."""
        p = max((len(group) for group in groups), default=1)
        if p < 2:
            return 0.0
        if not self._leaves_node(groups):
            return self.reached.inside_s
        return self.reached.across_s + (p - 1) * self.reached.hop_s

    def message_s(self, pair: tuple[int, int]) -> float:
        """What a message costs before a byte is moved."""
        known = self.reached.message_s
        return self.fixed_s((pair,)) if known is None else known

    @cached_property
    def reached(self) -> Reached:
        """What the devices of the cluster reach."""
        return self.assumed or reached(self.cluster)

    @property
    def interference(self) -> float:
        """How much of a collective beside computing the computing pays for."""
        return self.reached.interference

    def _leaves_node(self, groups: Groups) -> bool:
        devices = self.cluster.devices
        return any(devices[d].node != devices[group[0]].node for group in groups for d in group)

    def send(self, size_bytes: float, source: int, target: int) -> float:
        """Time of one message between two devices."""
        if source == target:
            return 0.0
        path = self._measure([(source, target)], message=True)
        fixed = self.message_s((source, target))
        return fixed + path.latency_s + size_bytes * path.s_per_byte

    def exchange(self, size_bytes: float, pairs: tuple[tuple[int, int], ...]) -> float:
        """Time of a message of `size_bytes` from each source to its target, all at once."""
        if pairs not in self._pairs:
            apart = ((a, b) for a, b in pairs if a != b)
            self._pairs[pairs] = self._measure(apart, message=True)
        path = self._pairs[pairs]
        fixed = max((self.message_s(pair) for pair in pairs if pair[0] != pair[1]), default=0.0)
        return fixed + path.latency_s + size_bytes * path.s_per_byte

    def algorithm(self, size_bytes: float, groups: Groups) -> str:
        """Which all-reduce is the fastest here."""
        times = self._all_reduce_times(size_bytes, groups)
        return min(times, key=lambda name: times[name])

    def _by_name(self, name: str, size: float, groups: Groups, p: int) -> float:
        if name == "all_reduce":
            return min(self._all_reduce_times(size, groups).values())
        if name in ("all_gather", "reduce_scatter"):
            return min(self._gather(size, groups, p), self._gather_by_level(size, groups))
        if name == "all_to_all":
            return self._all_to_all(size, groups, p)
        if name == "broadcast":
            path = self._path("tree", groups)
            return math.ceil(math.log2(p)) * path.latency_s + size * path.s_per_byte
        if name == "halo":
            path = self._path("ring", groups)
            return 2 * (path.latency_s + size * path.s_per_byte)
        raise ValueError(f"no collective {name!r}; there are {', '.join(COLLECTIVES)}")

    def _gather(self, size: float, groups: Groups, p: int) -> float:
        path = self._path("ring", groups)
        return (p - 1) * (path.latency_s + size / p * path.s_per_byte)

    def _gather_by_level(self, size: float, groups: Groups) -> float:
        cut = self._cut(groups)
        if cut is None:
            return math.inf
        inside, across = cut
        q, r = len(inside[0]), len(across[0])
        return self._gather(size / q, across, r) + self._gather(size, inside, q)

    def _all_reduce_times(self, size: float, groups: Groups) -> dict[str, float]:
        p = max(len(group) for group in groups)
        tree = self._path("tree", groups)
        times = {
            "ring": 2 * self._gather(size, groups, p),
            "tree": 2 * (math.ceil(math.log2(p)) * tree.latency_s + size * tree.s_per_byte),
        }
        cut = self._cut(groups)
        if cut is not None:
            inside, across = cut
            q = len(inside[0])
            across_time = min(self._all_reduce_times(size / q, across).values())
            times["hierarchical"] = 2 * self._gather(size, inside, q) + across_time
        return times

    def _all_to_all(self, size: float, groups: Groups, p: int) -> float:
        if len(groups) * p * (p - 1) <= ALL_PAIRS_LIMIT:
            path = self._path("all", groups)
            return (p - 1) * path.latency_s + size / p * path.s_per_byte
        cut = self._cut(groups)
        if cut is None:  # a flat group: every device sends n (p-1)/p over its own link
            path = self._path("ring", groups)
            return (p - 1) * path.latency_s + size * (p - 1) / p * path.s_per_byte
        inside, across = cut
        q, r = len(inside[0]), len(across[0])
        far = self._path("ring", across)
        leaving = (r - 1) / r
        outside = (r - 1) * far.latency_s + size * leaving * far.s_per_byte
        return max(outside, self._all_to_all(size / r, inside, q))

    def _cut(self, groups: Groups) -> tuple[Groups, Groups] | None:
        """Groups as equal parts inside a level and lines across it; None where they do not fit."""
        key = self._known(groups)
        if key not in self._cuts:
            levels = tuple(level.groups for level in self.cluster.levels())
            self._cuts[key] = _cut_by_level(levels, groups)
        return self._cuts[key]

    def _path(self, shape: str, groups: Groups) -> Path:
        key = (shape, self._known(groups))
        if key not in self._paths:
            self._paths[key] = self._measure(_pairs(shape, groups))
        return self._paths[key]

    def _known(self, groups: Groups) -> int:
        self._kept[id(groups)] = groups
        return id(groups)

    def _measure(self, pairs: Iterable[tuple[int, int]], message: bool = False) -> Path:
        loads: Counter[tuple[str, int]] = Counter()
        latency, far = 0.0, False
        links, devices = self.cluster.links, self.cluster.devices
        for source, target in pairs:
            far = far or devices[source].node != devices[target].node
            route = self.cluster.route(source, target)
            latency = max(latency, sum(links[i].latency_s for i in route))
            for i in route:
                loads[(links[i].lane, -1) if links[i].lane else ("", i)] += 1
        worst = max((count / self._rates[key] for key, count in loads.items()), default=0.0)
        known = self.reached
        part = known.across if far else known.inside
        if not message:
            part *= known.share_across if far else known.share_inside
        return Path(latency, worst / part)

    @cached_property
    def _rates(self) -> dict[tuple[str, int], float]:
        """Bytes per second of every medium: a link, or all links of one lane."""
        return {
            (link.lane, -1) if link.lane else ("", i): link.bytes_per_s
            for i, link in enumerate(self.cluster.links)
        }


def _cut_by_level(levels: tuple[Groups, ...], groups: Groups) -> tuple[Groups, Groups] | None:
    for level in reversed(levels[:-1]):
        home = {device: i for i, members in enumerate(level) for device in members}
        inside: list[tuple[int, ...]] = []
        across: list[tuple[int, ...]] = []
        for group in groups:
            parts: dict[int, list[int]] = {}
            for device in group:
                parts.setdefault(home[device], []).append(device)
            sizes = {len(part) for part in parts.values()}
            if len(parts) < 2 or len(sizes) != 1 or sizes == {1}:
                break
            inside.extend(map(tuple, parts.values()))
            across.extend(zip(*parts.values(), strict=True))
        else:
            return tuple(inside), tuple(across)
    return None


def _pairs(shape: str, groups: Groups) -> Iterable[tuple[int, int]]:
    """Who sends to whom at once, over all groups."""
    for group in groups:
        p = len(group)
        if shape == "ring" and p > 1:
            yield from ((group[i], group[(i + 1) % p]) for i in range(p))
        elif shape == "tree":
            yield from ((group[i], group[(i - 1) // 2]) for i in range(1, p))
        elif shape == "all":
            yield from ((a, b) for a in group for b in group if a != b)


@dataclass(frozen=True)
class Patterns:
    """Where devices lie in the hierarchy, for comparing groups of them."""

    cluster: Cluster
    homes: tuple[tuple[int, ...], ...]  # per level, the group of each device

    @classmethod
    def of(cls, cluster: Cluster) -> "Patterns":
        """Look up every level once."""
        homes = []
        for level in cluster.levels():
            home = [0] * cluster.num_devices
            for number, members in enumerate(level.groups):
                for device in members:
                    home[device] = number
            homes.append(tuple(home))
        return cls(cluster, tuple(homes))

    @property
    def inner_size(self) -> int:
        """Devices in the largest group of the innermost level."""
        return max(len(group) for group in self.cluster.levels()[0].groups)

    def pattern(self, devices: Sequence[int]) -> tuple[object, ...]:
        """Equal for groups of like devices that lie alike."""
        kinds = tuple(self.cluster.devices[device].kind for device in devices)
        return (
            len(devices),
            kinds[0] if len(set(kinds)) == 1 else kinds,
            tuple(_relabelled(home, devices) for home in self.homes),
        )


def _relabelled(home: Sequence[int], devices: Sequence[int]) -> tuple[int, ...]:
    """Numbers of groups in the order they are met, as run lengths."""
    names: dict[int, int] = {}
    relabelled: list[int] = []
    for key, run in itertools.groupby(home[device] for device in devices):
        relabelled += [names.setdefault(key, len(names)), sum(1 for _ in run)]
    return tuple(relabelled)
