"""Machines to plan for: devices, links, presets, and files that describe them."""

from os import PathLike

from partita.cluster.record import Cluster, Device, DeviceKind, Level, Link

__all__ = [
    "Cluster",
    "Device",
    "DeviceKind",
    "Level",
    "Link",
    "list_kinds",
    "list_presets",
    "resolve",
]


# The readers and the preset data are imported when first asked for, not with the records.


def resolve(spec: str | PathLike[str]) -> Cluster:
    """The cluster that a preset name, a file or a shorthand such as `2x8xH100` stands for."""
    from partita.cluster import presets

    return presets.resolve(spec)


def list_presets() -> dict[str, str]:
    """The machines that come with partita: name and one line about each."""
    from partita.cluster import presets

    return presets.list_presets()


def list_kinds() -> tuple[DeviceKind, ...]:
    """The kinds of devices that come with partita."""
    from partita.cluster import presets

    return presets.list_kinds()
