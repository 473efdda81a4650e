"""Cluster: devices of any mix of kinds, joined by directed links with latency and bandwidth.

A vertex is a device or a switch. A link goes one way; a cable is two of them. Links with the same
non-empty `lane` share one half-duplex medium: only one of them carries data at a time.

A message of n bytes takes  sum of latencies + n / narrowest bandwidth  from one device to the next:
switches pass it on as it comes in. Routes are those of least time for n = 1 MB. They may lead
through devices, as in a ring or a torus; a device passes a message on once it has all of it.

Rates a kind does not list (`DeviceKind.peak`), each an upper bound on what the hardware can do:

    tf32        f32: the type needs tensor cores, the numbers do not
    f16, bf16   each other, then f32: without units for it, 16 bits are stored and 32 computed
    f8          f16's rate by the same reasoning
    f64         half of f32, as on CPUs and data-centre GPUs; list it for consumer GPUs (1/32, 1/64)
    i8, u8      i8, then f32;  all other integers and bool: f32

Every name and figure is checked; each complaint names the field it is about.
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache

from partita.cluster.topology import Groups, Topology, join_ranks
from partita.errors import ClusterError
from partita.showing import plot_of, repr_html, table_of

DTYPES = ("f64", "f32", "tf32", "f16", "bf16", "f8", "i8")  # what a kind may list a rate for
MAX_BYTES = 2**62
ROUTE_BYTES = 1_000_000
MAX_DEVICES = 100_000
MAX_LINKS = 4_000_000


def check_name(name: object, field: str, what: str) -> None:
    """Refuse what could not be told from other names when printed."""
    if not isinstance(name, str):
        wrong = f"found {shown(name)} where the name of {what} belongs"
    elif not name:
        wrong = f"the name of {what} is empty"
    elif not name.isprintable() or name != name.strip():
        wrong = f"{shown(name)} has characters that a name cannot have"
    elif len(name) > 200:
        wrong = f"a name of {len(name)} characters"
    else:
        return
    raise ClusterError(wrong, fix="use 1 to 200 printable characters", field=field)


def checked_rates(rates: object, where: str) -> tuple[tuple[str, float], ...]:
    """The rates in the order of DTYPES, each a positive number, f32 among them."""
    field = f"{where} flops_per_s"
    try:
        pairs = [(dtype, rate) for dtype, rate in rates]  # type: ignore[attr-defined]
        listed = dict(pairs)
    except (TypeError, ValueError):
        raise ClusterError(
            "is not a list of pairs (dtype, FLOP/s)", fix='give (("f32", 1e12),)', field=field
        ) from None
    if len(listed) < len(pairs):
        raise ClusterError("gives a rate for one dtype twice", fix="give it once", field=field)
    for dtype, rate in pairs:
        if dtype not in DTYPES:
            raise ClusterError(
                f"unknown dtype {shown(dtype)}", fix=f"use {', '.join(DTYPES)}", field=field
            )
        _check_number(rate, f"{field} {dtype}", positive=True)
    if "f32" not in listed:
        raise ClusterError("has no rate for f32", fix="give at least that one", field=field)
    return tuple((dtype, float(listed[dtype])) for dtype in DTYPES if dtype in listed)


def set_number(record: object, name: str, where: str, positive: bool = False) -> None:
    """Check a field and keep it as a float: 1 and 1.0 must not print differently."""
    value = getattr(record, name)
    _check_number(value, f"{where} {name}", positive)
    object.__setattr__(record, name, float(value))


def _check_number(value: object, field: str, positive: bool = False) -> None:
    real = isinstance(value, int | float) and not isinstance(value, bool)
    if real and (0 < value <= 1e300 or (value == 0 and not positive)):  # type: ignore[operator]
        return
    needed = "a finite number above 0" if positive else "a finite number of 0 or more"
    raise ClusterError(f"found {shown(value)}", fix=f"{needed} is needed", field=field)


def check_whole(value: object, field: str, least: int = 0) -> None:
    """Refuse what is not a whole number of at least `least`."""
    if type(value) is not int or not least <= value <= MAX_BYTES:
        raise ClusterError(
            f"found {shown(value)}",
            fix=f"a whole number of {least} or more is needed",
            field=field,
        )


def check_limit(count: int, most: int, what: str) -> None:
    """Refuse more than anyone has."""
    if count > most:
        raise ClusterError(f"has {count:,} {what}", fix=f"at most {most:,} are read", field=what)


def check_unique(names: Iterable[str], seen: set[str], what: str) -> None:
    """Refuse names that were seen before, and note the others."""
    for index, name in enumerate(names):
        if name in seen:
            raise ClusterError(
                f"the name {name!r} is given twice", fix="rename one", field=f"{what}[{index}]"
            )
        seen.add(name)


def is_unicode(text: str) -> bool:
    """False where the text has half characters that no file can hold."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def shown(value: object) -> str:
    """A value as it may stand in a message: short, and spelled as in a file."""
    if isinstance(value, bool):
        return "true" if value else "false"
    try:
        text = repr(value)
    except ValueError:  # a whole number of thousands of digits
        return "a number far too large"
    return text if len(text) <= 60 else f"{text[:57]}..."


# dtype -> where to look for its rate, and the part of that rate it runs at
_RATES: dict[str, tuple[tuple[str, float], ...]] = {
    "f64": (("f64", 1.0), ("f32", 0.5)),
    "f32": (("f32", 1.0),),
    "tf32": (("tf32", 1.0), ("f32", 1.0)),
    "f16": (("f16", 1.0), ("bf16", 1.0), ("f32", 1.0)),
    "bf16": (("bf16", 1.0), ("f16", 1.0), ("f32", 1.0)),
    "f8": (("f8", 1.0), ("f16", 1.0), ("bf16", 1.0), ("f32", 1.0)),
    "i8": (("i8", 1.0), ("f32", 1.0)),
    "u8": (("i8", 1.0), ("f32", 1.0)),
    "i16": (("f32", 1.0),),
    "i32": (("f32", 1.0),),
    "i64": (("f32", 1.0),),
    "bool": (("f32", 1.0),),
}


@dataclass(frozen=True, slots=True)
class DeviceKind:
    """What one model of device can do; `source` says where the figures come from."""

    name: str
    type: str  # gpu, cpu, tpu, ...
    flops_per_s: tuple[tuple[str, float], ...]  # dense peak by dtype; f32 at least
    memory_bytes: int
    memory_bytes_per_s: float
    cache_bytes: int = 0  # last level before memory; 0 if there is none to count on
    cache_bytes_per_s: float = 0.0
    launch_s: float = 0.0  # what starting one kernel costs
    num_units: int = 1  # SMs, CUs, cores
    shared_bytes_per_unit: int = 0
    registers_per_unit: int = 0  # of 32 bits
    source: str = ""
    # (class of ops, factor on the roofline, seconds per launch); see calibration.py
    measured: tuple[tuple[str, float, float], ...] = ()

    def __hash__(self) -> int:  # asked for with every cost of an op: a few fields will do
        return hash((self.name, self.launch_s, self.measured))

    def __post_init__(self) -> None:
        check_name(self.name, "kinds", "a kind of device")
        where = f"kind {self.name!r}"
        check_name(self.type, f"{where} type", "a type such as gpu or cpu")
        object.__setattr__(self, "flops_per_s", checked_rates(self.flops_per_s, where))
        check_whole(self.memory_bytes, f"{where} memory_bytes", least=1)
        set_number(self, "memory_bytes_per_s", where, positive=True)
        check_whole(self.cache_bytes, f"{where} cache_bytes")
        set_number(self, "cache_bytes_per_s", where, positive=self.cache_bytes > 0)
        set_number(self, "launch_s", where)
        check_whole(self.num_units, f"{where} num_units", least=1)
        check_whole(self.shared_bytes_per_unit, f"{where} shared_bytes_per_unit")
        check_whole(self.registers_per_unit, f"{where} registers_per_unit")
        if not isinstance(self.source, str) or not is_unicode(self.source):
            raise ClusterError("is not text", fix="give text", field=f"{where} source")

    def peak(self, dtype: str) -> float:
        """Dense FLOP/s for this element type; what stands in for an unlisted rate is said above."""
        try:
            rates = _RATES[dtype]
        except (KeyError, TypeError):
            raise ClusterError(
                f"unknown dtype {dtype!r}", fix=f"use one of {', '.join(_RATES)}", field="dtype"
            ) from None
        return _peak(self.flops_per_s, rates)


@lru_cache(maxsize=1024)
def _peak(
    flops_per_s: tuple[tuple[str, float], ...], rates: tuple[tuple[str, float], ...]
) -> float:
    listed = dict(flops_per_s)
    return next(listed[name] * part for name, part in rates if name in listed)


@dataclass(frozen=True, slots=True)
class Device:
    """One device: its name, the name of its kind, and the machine it sits in."""

    name: str
    kind: str
    node: str = ""

    def __post_init__(self) -> None:
        check_name(self.name, "devices", "a device")
        where = f"device {self.name!r}"
        check_name(self.kind, f"{where} kind", "a kind of device")
        if self.node != "":
            check_name(self.node, f"{where} node", "a node")


@dataclass(frozen=True, slots=True)
class Link:
    """One direction of a connection between two vertices."""

    source: str
    target: str
    latency_s: float
    bytes_per_s: float
    lane: str = ""  # links of one lane take turns

    def __post_init__(self) -> None:
        check_name(self.source, "links source", "a vertex")
        check_name(self.target, "links target", "a vertex")
        where = f"link {self.source!r} -> {self.target!r}"
        if self.source == self.target:
            raise ClusterError("leads back to where it starts", fix="remove it", field=where)
        set_number(self, "latency_s", where)
        set_number(self, "bytes_per_s", where, positive=True)
        if self.lane != "":
            check_name(self.lane, f"{where} lane", "a lane")


@dataclass(frozen=True, slots=True)
class Level:
    """Groups of devices whose members reach each other at `bytes_per_s` or more.

    `latency_s` is that of the route between the first and the last of the smaller groups that
    were joined into one here; the largest of those.
    """

    bytes_per_s: float
    latency_s: float
    groups: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)  # no slots: what is derived from the fields is kept in __dict__
class Cluster:
    """A machine to plan for. Devices are known by their index, links by theirs."""

    name: str
    kinds: tuple[DeviceKind, ...]
    devices: tuple[Device, ...]
    switches: tuple[str, ...] = ()
    links: tuple[Link, ...] = ()

    _repr_html_, table, plot = repr_html, table_of, plot_of  # in a notebook

    def __post_init__(self) -> None:
        check_name(self.name, "name", "a cluster")
        if not self.devices:
            raise ClusterError("has no devices", fix="give it at least one", field="devices")
        check_limit(len(self.devices), MAX_DEVICES, "devices")
        check_limit(len(self.links), MAX_LINKS, "links")
        for index, switch in enumerate(self.switches):
            check_name(switch, f"switches[{index}]", "a switch")
        check_unique((kind.name for kind in self.kinds), set(), "kinds")
        vertices: set[str] = set()
        check_unique((device.name for device in self.devices), vertices, "devices")
        check_unique(self.switches, vertices, "switches")
        self._check_kinds()
        self._check_ends()
        pair = self._topology.unreachable_pair(range(self.num_devices))
        if pair is not None:
            a, b = (self.devices[index].name for index in pair)
            raise ClusterError(
                f"device {a!r} cannot reach device {b!r}",
                fix="add links that lead from one to the other",
                field="links",
            )

    def __hash__(self) -> int:
        return hash(self._fingerprint)

    @property
    def num_devices(self) -> int:
        """How many devices it has."""
        return len(self.devices)

    @property
    def is_homogeneous(self) -> bool:
        """True where all devices are of one kind."""
        return len({device.kind for device in self.devices}) == 1

    def kind_of(self, device_index: int) -> DeviceKind:
        """The kind of a device."""
        return self._kind_by_name[self.devices[device_index].kind]

    def route(self, a: int, b: int) -> tuple[int, ...]:
        """Links of the quickest path for 1 MB from device a to device b; none from a to itself.

        Ties go to fewer links, then to the vertices whose names sort first.
        """
        return self._topology.route(a, b)

    def levels(self) -> tuple[Level, ...]:
        """The hierarchy in the topology, innermost (widest) first; the last joins all devices.

        A device alone forms one level, at the bandwidth of its own memory.
        """
        return self._levels

    def subset(self, devices: Iterable[int]) -> "Cluster":
        """The cluster of these devices, in this order, with the switches and links they need.

        Links to devices left out go with them. Where that would part the rest (a ring, say), the
        devices left out stay as switches: they still pass data on.
        """
        chosen = tuple(devices)
        self._check_chosen(chosen)
        kept = tuple(self.devices[index] for index in chosen)
        try:
            return self._cut(kept, self.switches)
        except ClusterError:
            names = {device.name for device in kept}
            gone = tuple(device.name for device in self.devices if device.name not in names)
            return self._cut(kept, self.switches + gone)

    def fingerprint(self) -> str:
        """16 hex digits that are the same for equal clusters, on any machine."""
        return self._fingerprint

    def to_json(self) -> bytes:
        """The cluster as the text of a `partita/cluster@1` file."""
        from partita.files import encode_json  # as costly to import as this module itself

        return encode_json(self._plain())

    @classmethod
    def from_json(cls, data: bytes | str, file: str = "") -> "Cluster":
        """Read what `to_json` wrote; `file` is named in errors."""
        from partita import files

        try:
            raw = data.encode() if isinstance(data, str) else data
        except UnicodeEncodeError:
            raise ClusterError("is not Unicode text", fix="give UTF-8", file=file) from None
        value = files.decode_json(raw, file)
        files.check_format(value, "cluster", file=file)
        try:
            return files.convert(value, cls, file)
        except ClusterError as error:
            raise error.within(file) from None

    def summary(self) -> str:
        """A few lines for people: what it is made of and how it hangs together."""
        nodes = len({device.node for device in self.devices})
        lines = [
            f"{self.name}: {_counted(self.num_devices, 'device')} in {_counted(nodes, 'node')}"
        ]
        counts: dict[str, int] = {}
        for device in self.devices:
            counts[device.kind] = counts.get(device.kind, 0) + 1
        lines += [
            f"  {count} x {_told(self._kind_by_name[name])}" for name, count in counts.items()
        ]
        if self.num_devices > 1:
            lines += [f"  {_level_told(level)}" for level in self.levels()]
        return "\n".join(lines)

    def _plain(self) -> dict[str, object]:
        return {
            "format": "partita/cluster@1",
            "name": self.name,
            "kinds": [_plain_kind(kind) for kind in self.kinds],
            "devices": [{"name": d.name, "kind": d.kind, "node": d.node} for d in self.devices],
            "switches": list(self.switches),
            "links": [
                {
                    "source": link.source,
                    "target": link.target,
                    "latency_s": link.latency_s,
                    "bytes_per_s": link.bytes_per_s,
                    "lane": link.lane,
                }
                for link in self.links
            ],
        }

    @cached_property
    def _fingerprint(self) -> str:
        import hashlib  # here and not above: most who import the records never need these two
        import json

        text = json.dumps(self._plain(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @cached_property
    def _kind_by_name(self) -> dict[str, DeviceKind]:
        return {kind.name: kind for kind in self.kinds}

    @cached_property
    def _vertices(self) -> dict[str, int]:
        """Vertex numbers: devices first, so that a device's number is its index."""
        names = [device.name for device in self.devices] + list(self.switches)
        return {name: number for number, name in enumerate(names)}

    @cached_property
    def _topology(self) -> Topology:
        number = self._vertices
        edges = [
            (number[link.source], number[link.target], link.latency_s, link.bytes_per_s)
            for link in self.links
        ]
        return Topology(list(number), edges, self.num_devices, ROUTE_BYTES)

    @cached_property
    def _levels(self) -> tuple[Level, ...]:
        groups: tuple[tuple[int, ...], ...] = tuple((i,) for i in range(self.num_devices))
        if self.num_devices == 1:
            return (Level(self.kind_of(0).memory_bytes_per_s, 0.0, groups),)
        widths = sorted({link.bytes_per_s for link in self.links}, reverse=True)
        rank = {width: place for place, width in enumerate(widths)}
        edges = [(source, target, rank[width]) for source, target, _, width in self._topology.edges]
        joined = Groups(len(self._vertices))
        levels = []
        joins = join_ranks(edges, len(widths))
        for place, (now, a, b) in enumerate(joins):
            joined.join(a, b)
            if place + 1 < len(joins) and joins[place + 1][0] == now:
                continue
            grown = self._device_groups(joined)
            if len(grown) < len(groups):
                levels.append(Level(widths[now], self._latency_between(groups, grown), grown))
                groups = grown
        return tuple(levels)

    def _device_groups(self, joined: Groups) -> tuple[tuple[int, ...], ...]:
        members: dict[int, list[int]] = {}
        for index in range(self.num_devices):
            members.setdefault(joined.find(index), []).append(index)
        return tuple(tuple(group) for group in members.values())

    def _latency_between(
        self, inner: tuple[tuple[int, ...], ...], outer: tuple[tuple[int, ...], ...]
    ) -> float:
        """Latency between the first and the last inner group of each outer one; the largest."""
        firsts = {group[0] for group in inner}
        slowest = 0.0
        for group in outer:
            ends = [index for index in group if index in firsts]
            route = self.route(ends[0], ends[-1])
            slowest = max(slowest, sum(self.links[link].latency_s for link in route))
        return slowest

    def _cut(self, devices: tuple[Device, ...], switches: tuple[str, ...]) -> "Cluster":
        names = {device.name for device in devices}.union(switches)
        links = tuple(ln for ln in self.links if ln.source in names and ln.target in names)
        linked = {ln.source for ln in links}.union(ln.target for ln in links)
        used = {device.kind for device in devices}
        return Cluster(
            self.name,
            tuple(kind for kind in self.kinds if kind.name in used),
            devices,
            tuple(switch for switch in switches if switch in linked),
            links,
        )

    def _check_chosen(self, chosen: tuple[int, ...]) -> None:
        last = self.num_devices - 1
        for index in chosen:
            if type(index) is not int or not 0 <= index <= last:
                raise ClusterError(
                    f"there is no device {index!r}", fix=f"use 0 to {last}", field="devices"
                )
        if len(set(chosen)) < len(chosen):
            raise ClusterError("a device is chosen twice", fix="choose it once", field="devices")

    def _check_kinds(self) -> None:
        for index, device in enumerate(self.devices):
            if device.kind not in self._kind_by_name:
                raise ClusterError(
                    f"{device.name!r} is of the unknown kind {device.kind!r}",
                    fix=f"the kinds here are {_some(self._kind_by_name)}",
                    field=f"devices[{index}].kind",
                )

    def _check_ends(self) -> None:
        for index, link in enumerate(self.links):
            for end in ("source", "target"):
                if getattr(link, end) not in self._vertices:
                    raise ClusterError(
                        f"there is no device or switch {getattr(link, end)!r}",
                        fix="name one that exists, or add it",
                        field=f"links[{index}].{end}",
                    )


def _plain_kind(kind: DeviceKind) -> dict[str, object]:
    """A kind's figures; what was measured only where there is something: fingerprints stay."""
    plain = asdict(kind)
    if not kind.measured:
        del plain["measured"]
    return plain


def _some(names: Iterable[str]) -> str:
    listed = sorted(names)
    return ", ".join(listed[:8]) + (f", ... ({len(listed)} in all)" if len(listed) > 8 else "")


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def _told(kind: DeviceKind) -> str:
    best = "bf16" if dict(kind.flops_per_s).get("bf16", 0) >= kind.peak("f16") else "f16"
    rates = f"{kind.peak('f32') / 1e12:.4g} TFLOP/s f32"
    if kind.peak(best) > kind.peak("f32"):
        rates += f", {kind.peak(best) / 1e12:.4g} {best}"
    memory = f"{kind.memory_bytes / 2**30:.4g} GiB at {kind.memory_bytes_per_s / 1e9:,.4g} GB/s"
    return f"{kind.name} ({kind.type}): {rates}; {memory}"


def _level_told(level: Level) -> str:
    sizes = sorted({len(group) for group in level.groups}, reverse=True)
    shape = f"{_counted(len(level.groups), 'group')} of {' or '.join(map(str, sizes))}"
    return f"{shape}: {level.bytes_per_s / 1e9:.4g} GB/s, {level.latency_s * 1e6:.3g} us"
