"""Devices that can change names without any placement costing more or less.

Two devices are alike if exchanging them, and their channels along with them, leaves every number
of the problem as it is. Alike is an equivalence: within a class all orders are as good, so a
search need look at one of them. Only rounding and the order of simultaneous events may differ.
"""

from dataclasses import dataclass

import numpy as np

from partita.search.placement.tables import I64, PlacementArrays


@dataclass(frozen=True, slots=True)
class Symmetry:
    """Which devices are alike, and what becomes of the channels when two change names."""

    first: I64  # per device: the first device that is like it
    channels: I64  # [one, other, channel] -> channel, where one and other are alike

    def slots(self, one: int, other: int) -> I64:
        """Devices and then channels, by the names they have after exchanging two alike devices."""
        devices = np.arange(len(self.first))
        devices[[one, other]] = other, one
        return np.concatenate((devices, len(devices) + self.channels[one, other]))


def symmetry_of(net: PlacementArrays) -> Symmetry:
    """The classes of alike devices."""
    num_devices, num_channels = len(net.limit_bytes), net.transfer_ms.shape[1]
    first = np.arange(num_devices)
    channels = np.zeros((num_devices, num_devices, num_channels), np.int64)
    channels[:] = np.arange(num_channels)
    for other in range(num_devices):
        for one in range(other):
            if first[one] != one and first[other] == other:
                continue  # it is not like the first of that class
            renamed = _exchanged(net, one, other)
            if renamed is not None:
                first[other] = min(first[other], first[one])
                channels[one, other] = channels[other, one] = renamed
    return Symmetry(first, channels)


def _exchanged(net: PlacementArrays, one: int, other: int) -> I64 | None:
    """The names of the channels after exchanging two devices; None if something would differ."""
    alike = (
        net.limit_bytes[one] == net.limit_bytes[other]
        and np.array_equal(net.job_ms[:, one], net.job_ms[:, other])
        and np.array_equal(net.may[:, one], net.may[:, other])
    )
    if not alike:
        return None
    names = np.arange(len(net.limit_bytes))
    names[[one, other]] = other, one
    before, after = net.route, net.route[np.ix_(names, names)]
    off_diagonal = ~np.eye(len(names), dtype=np.bool_)
    renamed: dict[int, int] = {-1: -1}
    for old, new in zip(before[off_diagonal].tolist(), after[off_diagonal].tolist(), strict=True):
        if renamed.setdefault(old, new) != new:
            return None
    used = {old for old in renamed if old >= 0}
    if {renamed[old] for old in used} != used:
        return None
    channels = np.arange(net.transfer_ms.shape[1])
    for old in used:
        channels[old] = renamed[old]
    if not np.array_equal(net.transfer_ms, net.transfer_ms[:, channels]):
        return None
    return channels
