"""Machines as Exprimo writes them (a device graph in JSON), and as a Cluster.

    {"devices": [{"model": ..., "type": "gpu", "clock": MHz, "peak_gflops": ..., "memory": GB,
                  "mem_bandwidth": GB/s, "neighbours": [{"device": 1, "comm_channel": 0}, ...]}],
     "comm_channels": [{"type": "pcie3", "bandwidth": Gbit/s}]}

`neighbours` are directed: they say over which channel a device sends to another. A channel is one
half-duplex medium. In the cluster each such entry is a link, and those of one channel share a lane.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from partita.cluster import Cluster, Device, DeviceKind, Link
from partita.errors import ClusterError

GB = 1e9
GBIT = 1e9 / 8
LATENCY_S = {"cpu": 0.0, "gpu": 5e-6}  # what the files do not say: a launch, a message
LINK_LATENCY_S = 5e-6


@dataclass(frozen=True, slots=True)
class ExprimoDevice:
    """One device, in Exprimo's units."""

    model: str
    type: str
    clock_mhz: float
    peak_gflops: float
    memory_gb: float
    mem_bandwidth_gb_per_s: float


@dataclass(frozen=True, slots=True)
class DeviceGraph:
    """Devices, channels (type, Gbit/s), and `route[source][target]`: a channel, or -1."""

    name: str
    devices: tuple[ExprimoDevice, ...]
    channels: tuple[tuple[str, float], ...]
    route: tuple[tuple[int, ...], ...]


def is_device_graph(value: Mapping[str, Any]) -> bool:
    """Does this JSON object look like a device graph of Exprimo?"""
    return "format" not in value and "devices" in value and "comm_channels" in value


def device_graph_from_json(value: Mapping[str, Any], file: str = "") -> DeviceGraph:
    """The device graph in a decoded file."""
    raw_devices = _objects(value, "devices", file)
    if not raw_devices:
        raise ClusterError("has no devices", fix="give at least one", field="devices", file=file)
    raw_channels = _objects(value, "comm_channels", file)
    channels = tuple(
        (str(raw.get("type", "")), _number(raw, "bandwidth", f"comm_channels[{index}]", file))
        for index, raw in enumerate(raw_channels)
    )
    devices = tuple(
        ExprimoDevice(
            str(raw.get("model", "") or f"device {index}"),
            str(raw.get("type", "") or "gpu"),
            _number(raw, "clock", f"devices[{index}]", file),
            _number(raw, "peak_gflops", f"devices[{index}]", file),
            _number(raw, "memory", f"devices[{index}]", file),
            _number(raw, "mem_bandwidth", f"devices[{index}]", file),
        )
        for index, raw in enumerate(raw_devices)
    )
    route = _routes(raw_devices, len(channels), file)
    return DeviceGraph(Path(file).stem or "device graph", devices, channels, route)


def device_cluster(graph: DeviceGraph) -> Cluster:
    """The machine as a Cluster; what Exprimo leaves out (latencies, units) is usual."""
    kinds: dict[str, DeviceKind] = {}
    devices, names = [], []
    for index, device in enumerate(graph.devices):
        kind = _kind(device, kinds)
        kinds[kind.name] = kind
        names.append(f"{device.type}{index}")
        devices.append(Device(names[-1], kind.name, "node"))
    links = tuple(
        Link(
            names[source],
            names[target],
            LINK_LATENCY_S,
            graph.channels[channel][1] * GBIT,
            f"channel {channel} {graph.channels[channel][0]}".strip(),
        )
        for source, row in enumerate(graph.route)
        for target, channel in enumerate(row)
        if channel >= 0
    )
    return Cluster(graph.name, tuple(kinds.values()), tuple(devices), (), links)


def _kind(device: ExprimoDevice, known: Mapping[str, DeviceKind]) -> DeviceKind:
    """The kind of a device; equal devices share one, unlike ones of a model get a number."""
    number = 1
    while True:
        name = device.model if number == 1 else f"{device.model} ({number})"
        made = DeviceKind(
            name,
            device.type,
            (("f32", device.peak_gflops * 1e9),),
            round(device.memory_gb * GB),
            device.mem_bandwidth_gb_per_s * GB,
            launch_s=LATENCY_S.get(device.type, 0.0),
            source="an Exprimo device graph",
        )
        if known.get(name, made) == made:
            return made
        number += 1


def _objects(value: Mapping[str, Any], key: str, file: str) -> list[Mapping[str, Any]]:
    objects = value.get(key)
    if not isinstance(objects, list) or not all(isinstance(item, dict) for item in objects):
        raise ClusterError(
            "is missing" if objects is None else "is no list of objects",
            fix="give a list of objects, as Exprimo's device graphs have",
            field=key,
            file=file,
        )
    return objects


def _number(raw: Mapping[str, Any], key: str, where: str, file: str) -> float:
    value = raw.get(key)
    good = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e18
    if not good:
        raise ClusterError(
            "is missing" if value is None else f"found {value!r}",
            fix="give a number above 0",
            field=f"{where}.{key}",
            file=file,
        )
    return float(value)  # type: ignore[arg-type]


def _routes(
    devices: list[Mapping[str, Any]], num_channels: int, file: str
) -> tuple[tuple[int, ...], ...]:
    table = [[-1] * len(devices) for _ in devices]
    for source, raw in enumerate(devices):
        neighbours = raw.get("neighbours", [])
        where = f"devices[{source}].neighbours"
        if not isinstance(neighbours, list):
            raise ClusterError("is no list", fix="list the neighbours", field=where, file=file)
        for place, entry in enumerate(neighbours):
            field = f"{where}[{place}]"
            fields = entry if isinstance(entry, dict) else {}
            target = _index(fields, "device", len(devices), field, file)
            channel = _index(fields, "comm_channel", num_channels, field, file)
            if target == source:
                raise ClusterError(
                    "names the device itself", fix="remove it", field=field, file=file
                )
            table[source][target] = channel
    _check_reached(table, file)
    return tuple(map(tuple, table))


def _check_reached(table: list[list[int]], file: str) -> None:
    """Every device sends to another and hears from one; a device alone needs neither."""
    columns = list(zip(*table, strict=True))
    for rows, lack in ((table, "sends to no other device"), (columns, "hears from no other")):
        for index, row in enumerate(rows):
            if len(table) > 1 and max(row) < 0:
                raise ClusterError(
                    f"{lack}: there is no route",
                    fix="list it as a neighbour both ways, or remove it",
                    field=f"devices[{index}].neighbours",
                    file=file,
                )


def _index(raw: Mapping[str, Any], key: str, count: int, field: str, file: str) -> int:
    value = raw.get(key)
    if type(value) is not int or not 0 <= value < count:
        raise ClusterError(
            "is missing" if value is None else f"found {value!r}",
            fix=f"there are {count}, counted from 0",
            field=f"{field}.{key}",
            file=file,
        )
    return value
