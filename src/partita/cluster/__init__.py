"""Machines to plan for: devices, links, presets, and files that describe them."""

from collections.abc import Callable
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


def resolve(spec: str | PathLike[str], read: Callable[[str], bytes] | None = None) -> Cluster:
    """The cluster that a preset name, a file or a shorthand such as `2x8xH100` stands for.

    `read` gives the bytes of a file that is named, if not the file itself.
    """
    from partita.cluster import presets

    return presets.resolve(spec) if read is None else presets.resolve(spec, read)


def list_presets() -> dict[str, str]:
    """The machines that come with partita: name and one line about each."""
    from partita.cluster import presets

    return presets.list_presets()


def list_kinds() -> tuple[DeviceKind, ...]:
    """The kinds of devices that come with partita."""
    from partita.cluster import presets

    return presets.list_kinds()
