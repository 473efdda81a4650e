"""What if a machine were a little different: `8xA100@memory=24GB,links=0.5`.

    memory=24GB     every device has this much (or 24GiB, or bytes)
    links=0.5       every link has this many times its bandwidth
    without=n1      this node, or this device (n0.gpu3), is gone

They stand in the machine's name, so that plans and commands say them.
"""

from collections.abc import Callable
from dataclasses import replace

from partita.cluster.record import Cluster
from partita.errors import ClusterError
from partita.suggest import suggest
from partita.units import size_bytes

LEAST_FACTOR, MOST_FACTOR = 1e-3, 1e3


def split_changes(spec: str) -> tuple[str, str]:
    """The machine and its changes; these are empty where the name has none."""
    base, at, changes = spec.rpartition("@")
    return (base, changes) if at and "=" in changes else (spec, "")


def changed(cluster: Cluster, changes: str) -> Cluster:
    """The cluster with the changes of its name made."""
    for change in changes.split(","):
        name, _, value = change.partition("=")
        if name not in CHANGES:
            raise ClusterError(f"found {name[:60]!r}", fix=suggest(name, CHANGES), field="cluster")
        cluster = CHANGES[name](cluster, value)
    return replace(cluster, name=f"{cluster.name}@{changes}"[:200])


def _memory(cluster: Cluster, text: str) -> Cluster:
    memory_bytes = int(size_bytes(text, "memory"))
    kinds = tuple(replace(kind, memory_bytes=memory_bytes) for kind in cluster.kinds)
    return replace(cluster, kinds=kinds)


def _links(cluster: Cluster, text: str) -> Cluster:
    try:
        factor = float(text)
    except ValueError:
        factor = 0.0
    if not LEAST_FACTOR <= factor <= MOST_FACTOR:
        raise ClusterError(
            f"found {text[:60]!r}",
            fix=f"give a factor of {LEAST_FACTOR:g} to {MOST_FACTOR:g}: links=0.5",
            field="links",
        )
    links = tuple(replace(link, bytes_per_s=link.bytes_per_s * factor) for link in cluster.links)
    return replace(cluster, links=links)


def _without(cluster: Cluster, text: str) -> Cluster:
    left = [i for i, each in enumerate(cluster.devices) if text not in (each.node, each.name)]
    nodes = dict.fromkeys(each.node for each in cluster.devices if each.node)
    if len(left) == cluster.num_devices:
        names = [*nodes, *(each.name for each in cluster.devices)]
        raise ClusterError(
            f"{cluster.name} has no node or device {text[:60]!r}",
            fix=f"{suggest(text, names)}; its nodes are {', '.join(list(nodes)[:8]) or 'unnamed'}",
            field="without",
        )
    if not left:
        raise ClusterError(
            f"nothing is left of {cluster.name} without {text}",
            fix="name a part of it",
            field="without",
        )
    return cluster.subset(left)


CHANGES: dict[str, Callable[[Cluster, str], Cluster]] = {
    "memory": _memory,
    "links": _links,
    "without": _without,
}
