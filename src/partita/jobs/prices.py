"""What devices cost in an hour: one number for all, or a list by kind in a TOML file.

currency = "USD"

[per_hour]              # of one device; names as in shorthands (A100) or of kinds in files
A100 = 2.1
H100 = 3.9
"""

import math
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass

from partita.cluster import Cluster
from partita.cluster.presets import catalogue
from partita.errors import InputError
from partita.files import read_bytes


@dataclass(frozen=True, slots=True)
class Prices:
    """Of one device of a kind in an hour."""

    per_hour: tuple[tuple[str, float], ...]  # kind -> price; "" is any
    currency: str = ""

    def of_devices(self, cluster: Cluster, devices: Iterable[int]) -> float:
        """An hour of some devices of a cluster."""
        table = dict(self.per_hour)
        total = 0.0
        for device in devices:
            name = cluster.kind_of(device).name
            total += table[name] if name in table else table[""]
        return total

    def words(self, amount: float) -> str:
        """An amount of money."""
        digits = 2 if abs(amount) >= 0.1 or amount == 0 else 4
        return f"{amount:,.{digits}f}{f' {self.currency}' if self.currency else ''}"


def read_prices(text: str, cluster: Cluster) -> Prices:
    """The prices that a number or a file says, for the kinds of a cluster; all must be there."""
    if not text.lower().endswith(".toml"):
        return Prices((("", _price(text, "--price")),))
    try:
        given = tomllib.loads(read_bytes(text).decode("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"is no TOML: {error}", fix="mend it", file=text) from None
    table = given.get("per_hour")
    if not isinstance(table, dict) or not table:
        raise InputError(
            "has no table [per_hour]", fix="write a line such as A100 = 2.1 in it", file=text
        )
    prices = {}
    for name, value in table.items():
        preset = catalogue().kind(str(name))
        kind = str(name) if preset is None else preset.kind.name
        prices[kind] = _price(value, f"per_hour {name}", text)
    for device in range(cluster.num_devices):
        kind = cluster.kind_of(device).name
        if kind not in prices:
            listed = ", ".join(map(str, table))
            raise InputError(
                f"has no price of {kind}, only of {listed}",
                fix=f"add a line to [per_hour]: {kind} = ...",
                field="per_hour",
                file=text,
            )
    return Prices(tuple(sorted(prices.items())), str(given.get("currency", "")))


def _price(value: object, field: str, file: str = "") -> float:
    try:
        price = float(value) if not isinstance(value, bool) else math.nan  # type: ignore[arg-type]
    except (TypeError, ValueError):
        price = math.nan
    if not 0 <= price < math.inf:
        raise InputError(
            f"found {value!r}",
            fix="give the price of one device in an hour, or a list in a .toml file",
            field=field,
            file=file,
        )
    return price
