"""What to place on what, and what a placement must keep to, as people say it.

A subject is a zoo model, a graph or an Exprimo network; on a cluster or its device graph. Where
both files are Exprimo's, the problem that Exprimo itself would solve can be built from them, with
Paleo's times (`costs/paleo.py`).

Constraints are patterns of op names, and devices by number or name. `encoder.*=0` pins every op
whose name matches (`*`, `?`, `[...]` as in a shell) to device 0. A name without a match is an error
that says the nearest one, never a constraint silently passed over.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

from partita.capture.exprimo_devices import (
    DeviceGraph,
    device_cluster,
    device_graph_from_json,
    is_device_graph,
)
from partita.capture.exprimo_graph import layer_ops, network_graph
from partita.capture.exprimo_net import ExprimoNetwork, is_network, network_from_json
from partita.cluster import Cluster, resolve
from partita.costs.paleo import exprimo_problem
from partita.costs.placement import PlacementModel, placement_model
from partita.errors import InputError
from partita.files import decode_json, read_bytes
from partita.graph.record import Graph
from partita.jobs.workload import Workload, load
from partita.problems.placement import PlacementProblem, RecordConstraints
from partita.suggest import suggest

Constraint = tuple[str, int | str]  # (pattern of op names, device)


@dataclass(frozen=True)
class Subject:
    """A workload and a machine; `network` and `machine` where they came from Exprimo's files."""

    workload: Workload
    cluster: Cluster
    cluster_spec: str
    network: ExprimoNetwork | None = None
    machine: DeviceGraph | None = None

    @property
    def exprimo(self) -> Callable[[int, int, RecordConstraints], PlacementProblem] | None:
        """Makes Exprimo's own problem of (batches, in flight, constraints), if it can be made."""
        if self.network is None or self.machine is None:
            return None
        return partial(exprimo_problem, self.network, self.machine)

    def exprimo_layers(self) -> PlacementModel:
        """The layers as the network's file has them."""
        assert self.network is not None
        layers = layer_ops(self.network, self.workload.graph)
        return placement_model(self.workload.graph, self.cluster, layers=layers)


def load_subject(
    model: str | Graph,
    cluster: str | Cluster,
    *,
    batch: int | None = None,
    dtype: str | None = None,
    training: bool = True,
    optimizer: str = "adamw",
) -> Subject:
    """Read the model and the machine, whatever form they are in."""
    spec = cluster if isinstance(cluster, str) else cluster.name
    machine = _exprimo_file(cluster, is_device_graph)
    graph_of_devices = None if machine is None else device_graph_from_json(machine, spec)
    if graph_of_devices is not None:
        subject = device_cluster(graph_of_devices)
    else:
        subject = resolve(cluster) if isinstance(cluster, str) else cluster
    net = _exprimo_file(model, is_network)
    options: dict[str, Any] = {"training": training, "optimizer": optimizer}
    if net is None:
        workload = load(model, batch=batch, dtype=dtype, **options)
        return Subject(workload, subject, spec, None, graph_of_devices)
    network = network_from_json(net, batch, str(model))
    workload = load(network_graph(network, dtype or "f32"), spec=str(model), **options)
    named = replace(workload, batch=network.layers[0].shape[0])
    return Subject(named, subject, spec, network, graph_of_devices)


def is_exprimo_network(model: str) -> bool:
    """Is this the file of a network as Exprimo and Paleo have them?"""
    return _exprimo_file(model, is_network) is not None


def _exprimo_file(given: object, is_one: Callable[[dict[str, Any]], bool]) -> dict[str, Any] | None:
    """The decoded JSON file if it is one of Exprimo's; None for anything else."""
    if not isinstance(given, str) or not given.lower().endswith(".json"):
        return None
    if not Path(given).is_file():
        return None  # who reads it next says so
    value = decode_json(read_bytes(given), given)
    return value if is_one(value) else None


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
