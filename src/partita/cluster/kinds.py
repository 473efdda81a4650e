"""`[[kinds]]` tables: figures in the units people write, and the kinds a file may name.

Figures are kept as the decimals that were written until they are in our units, so that `0.07 GB/s`
is 70,000,000 bytes/s exactly.
"""

from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, NoReturn

from partita.cluster.catalogue import Catalogue, KindPreset
from partita.cluster.record import DTYPES, DeviceKind, shown
from partita.cluster.tables import TomlTable
from partita.suggest import suggest

_MEMORY = {"memory_bytes": "1", "memory_GiB": str(2**30), "memory_GB": "1e9"}
_MEMORY_RATE = {"memory_bytes_per_s": "1", "memory_GB_per_s": "1e9"}
_CACHE = {"cache_bytes": "1", "cache_MiB": str(2**20), "cache_KiB": "1024"}
_CACHE_RATE = {"cache_bytes_per_s": "1", "cache_GB_per_s": "1e9"}
_LAUNCH = {"launch_s": "1", "launch_us": "1e-6"}
_SHARED = {"shared_bytes_per_unit": "1", "shared_KiB_per_unit": "1024"}


@dataclass(slots=True)
class KindTable:
    """The kinds a file defines and the presets it uses, by the names devices are given."""

    catalogue: Catalogue
    by_name: dict[str, DeviceKind] = field(default_factory=dict)
    habits: dict[str, KindPreset] = field(default_factory=dict)  # how a kind is usually wired

    def add(self, table: TomlTable) -> None:
        """Take in one `[[kinds]]` entry."""
        base = None
        if "based_on" in table:
            base = self.catalogue.kind(table.text("based_on"))
            if base is None:
                self._unknown(table, table.text("based_on"), "based_on")
        kind = read_kind(table, base.kind if base else None)
        if kind.name in self.by_name:
            table.fail(f"the kind {kind.name!r} is given twice", "rename one", "name")
        self.by_name[kind.name] = kind
        if base is not None:
            self.habits[kind.name] = base

    def find(self, table: TomlTable, name: str, *keys: str | int) -> DeviceKind:
        """The kind of this name, from the file or else from the presets."""
        if name in self.by_name:
            return self.by_name[name]
        preset = self.catalogue.kind(name)
        if preset is None:
            self._unknown(table, name, *keys)
        preset_name = preset.kind.name
        if preset_name not in self.by_name:
            self.by_name[preset_name] = preset.kind
            self.habits[preset_name] = preset
        return self.by_name[preset_name]

    def used(self) -> tuple[DeviceKind, ...]:
        """All kinds, those of the file first."""
        return tuple(self.by_name.values())

    def _unknown(self, table: TomlTable, name: str, *keys: str | int) -> NoReturn:
        known = {*self.by_name}.union(preset.kind.name for preset in self.catalogue.kinds.values())
        table.fail(f"unknown kind of device {shown(name)}", suggest(name, known), *keys)


def read_kind(table: TomlTable, base: DeviceKind | None = None) -> DeviceKind:
    """One `[[kinds]]` entry; what it does not say is taken from `base`."""

    def usual(name: str, otherwise: Any = None) -> Any:
        return getattr(base, name) if base else otherwise

    cache_bytes = _whole(table, _CACHE, usual("cache_bytes", 0), positive=False)
    values: dict[str, Any] = {
        "name": table.text("name"),
        "type": table.text("type", usual("type")),
        "flops_per_s": _read_rates(table, base),
        "memory_bytes": _whole(table, _MEMORY, usual("memory_bytes")),
        "memory_bytes_per_s": _real(table, _MEMORY_RATE, usual("memory_bytes_per_s")),
        "cache_bytes": cache_bytes,
        "cache_bytes_per_s": _real(
            table, _CACHE_RATE, usual("cache_bytes_per_s", 0.0), positive=cache_bytes > 0
        ),
        "launch_s": _real(table, _LAUNCH, usual("launch_s", 0.0), positive=False),
        "num_units": table.whole("num_units", usual("num_units", 1), 1),
        "shared_bytes_per_unit": _whole(
            table, _SHARED, usual("shared_bytes_per_unit", 0), positive=False
        ),
        "registers_per_unit": table.whole("registers_per_unit", usual("registers_per_unit", 0)),
        "source": table.text("source", f"as {base.name}: {base.source}" if base else ""),
    }
    table.close()
    with table.located():
        return DeviceKind(**values)


def _read_rates(table: TomlTable, base: DeviceKind | None) -> tuple[tuple[str, float], ...]:
    both = [key for key in ("TFLOPS", "flops_per_s") if key in table]
    if len(both) == 2:
        table.fail("TFLOPS is given as flops_per_s too", "give one of them", "flops_per_s")
    rates = dict(base.flops_per_s) if base else {}
    if not both:
        if base is None:
            table.fail("the peak rates are missing", "add TFLOPS = { f32 = ... }")
        return tuple(rates.items())
    scale = Decimal("1e12" if both[0] == "TFLOPS" else 1)
    listed = table.table(both[0])
    for dtype in DTYPES:
        if dtype in listed:
            rates[dtype] = float(listed.number(dtype) * scale)
    listed.close()
    if "f32" not in rates:
        table.fail("has no rate for f32", "give at least that one", both[0])
    return tuple(rates.items())


def _real(
    table: TomlTable, units: dict[str, str], default: float | None, positive: bool = True
) -> float:
    value = table.quantity(units, positive)
    if value is None and (default is None or (positive and not default)):
        names = list(units)
        table.fail(f"{names[0]} is missing", f"add {' or '.join(names[1:] or names)}")
    return float(value) if value is not None else default or 0.0


def _whole(
    table: TomlTable, units: dict[str, str], default: int | None, positive: bool = True
) -> int:
    value = table.quantity(units, positive)
    if value is not None and value > 2**62:
        key = next(key for key in units if key in table)
        table.fail(f"found {shown(table.get(key))}", "a size below 4 EiB is needed", key)
    if value is None:
        return int(_real(table, units, default, positive))
    return max(round(value), 1) if positive else round(value)
