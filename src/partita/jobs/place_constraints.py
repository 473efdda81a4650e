"""What a placement must keep to, as people say it: patterns of op names, devices by number or name.

`encoder.*=0` pins every op whose name matches (`*`, `?`, `[...]` as in a shell) to device 0. A name
without a match is an error that says the nearest one, never a constraint silently passed over.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from partita.cluster import Cluster
from partita.errors import InputError
from partita.problems.placement import RecordConstraints
from partita.suggest import suggest

Constraint = tuple[str, int | str]  # (pattern of op names, device)


@dataclass(frozen=True)
class PlacementConstraints:
    """Constraints by op, before ops are joined to layers."""

    pinned: Mapping[str, int]
    forbidden: Mapping[str, frozenset[int]]
    colocated: tuple[tuple[str, ...], ...]
    max_devices: int | None

    def apart(self) -> dict[str, tuple[int | None, frozenset[int]]]:
        """What must be equal for two ops to be in one layer."""
        nowhere: frozenset[int] = frozenset()
        names = {*self.pinned, *self.forbidden}
        return {name: (self.pinned.get(name), self.forbidden.get(name, nowhere)) for name in names}

    def constraints(self, layers: Sequence[Sequence[str]]) -> RecordConstraints:
        """The same by layer."""
        layer_of = {name: index for index, names in enumerate(layers) for name in names}
        pinned = {(layer_of[name], device) for name, device in self.pinned.items()}
        forbidden = {
            (layer_of[name], device)
            for name, devices in self.forbidden.items()
            for device in devices
        }
        groups = [sorted({layer_of[name] for name in group}) for group in self.colocated]
        return RecordConstraints(
            tuple(tuple(group) for group in groups if len(group) > 1),
            tuple(sorted(pinned)),
            tuple(sorted(forbidden)),
            self.max_devices,
        )


def read_constraints(
    ops: Sequence[str],
    cluster: Cluster,
    pinned: Iterable[Constraint] = (),
    forbidden: Iterable[Constraint] = (),
    colocated: Iterable[Sequence[str]] = (),
    max_devices: int | None = None,
) -> PlacementConstraints:
    """The constraints by op; what names no op or device, or cannot be, is refused."""
    if max_devices is not None and max_devices < 1:
        raise InputError(f"found {max_devices}", fix="use at least one device", field="max_devices")
    pins: dict[str, int] = {}
    for pattern, place in pinned:
        device = find_device(cluster, place, "pinned")
        for name in matching(ops, pattern, "pinned"):
            if pins.setdefault(name, device) != device:
                raise InputError(
                    f"op {name!r} is pinned to the devices {pins[name]} and {device}",
                    fix="pin it to one",
                    field="pinned",
                )
    bans: dict[str, frozenset[int]] = {}
    for pattern, place in forbidden:
        device = find_device(cluster, place, "forbidden")
        for name in matching(ops, pattern, "forbidden"):
            bans[name] = bans.get(name, frozenset()) | {device}
    _check_room(cluster, pins, bans)
    groups = [
        tuple(dict.fromkeys(name for p in group for name in matching(ops, p, "colocated")))
        for group in colocated
    ]
    return PlacementConstraints(pins, bans, tuple(groups), max_devices)


def matching(ops: Sequence[str], pattern: str, field: str) -> list[str]:
    """The ops that a pattern names; none is an error."""
    matching = [name for name in ops if name == pattern] or [
        name for name in ops if fnmatchcase(name, pattern)
    ]
    if not matching:
        raise InputError(f"no op is called {pattern!r}", fix=suggest(pattern, ops), field=field)
    return matching


def find_device(cluster: Cluster, place: int | str, field: str) -> int:
    """The index of a device given by number or name."""
    names = [device.name for device in cluster.devices]
    if isinstance(place, str) and place in names:
        return names.index(place)
    number = int(place) if isinstance(place, int) or place.isdecimal() else -1
    if not 0 <= number < len(names):
        raise InputError(
            f"there is no device {place!r}",
            fix=f"devices are 0 to {len(names) - 1}, or by name: {suggest(str(place), names)}",
            field=field,
        )
    return number


def _check_room(
    cluster: Cluster, pins: Mapping[str, int], bans: Mapping[str, frozenset[int]]
) -> None:
    for name, devices in bans.items():
        if pins.get(name) in devices:
            raise InputError(
                f"op {name!r} is pinned to device {pins[name]}, which is forbidden for it",
                fix="drop one of the two",
                field="forbidden",
            )
        if len(devices) == cluster.num_devices:
            raise InputError(
                f"every device is forbidden for op {name!r}", fix="leave one", field="forbidden"
            )
