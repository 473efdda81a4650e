"""What the user has decided or ruled out before the search: `--pin` and `--forbid`.

    stages=4           microbatches=16     schedule=1f1b
    recompute=light    mesh=16x8           sharded=states

A pin leaves one value of that decision, a ban all others. Two constraints that contradict each
other are refused, both named.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from partita.errors import InputError
from partita.plans import RECOMPUTE, SHARDING_LEVELS
from partita.schedules.named import NAMED
from partita.suggest import suggest

DECISIONS = ("stages", "microbatches", "schedule", "recompute", "mesh", "sharded")
ANSWERS = {"yes": "yes", "on": "yes", "true": "yes", "no": "no", "off": "no", "false": "no"}


@dataclass(frozen=True)
class Constraints:
    """Values that must be, and values that must not."""

    pinned: tuple[tuple[str, str], ...] = ()
    banned: tuple[tuple[str, str], ...] = ()

    def allow(self, decision: str, value: object) -> bool:
        """May a decision have this value?"""
        text = _text(value)
        if any(key == decision and text != wanted for key, wanted in self.pinned):
            return False
        return (decision, text) not in self.banned

    def pinned_to(self, decision: str) -> str | None:
        """The value a decision must have, if one was named."""
        return dict(self.pinned).get(decision)

    def __bool__(self) -> bool:
        return bool(self.pinned or self.banned)

    def __str__(self) -> str:
        pins = [f"{key}={value}" for key, value in self.pinned]
        return ", ".join((*pins, *(f"not {key}={value}" for key, value in self.banned)))


def parse_constraints(pins: Iterable[str] = (), bans: Iterable[str] = ()) -> Constraints:
    """The constraints in texts such as `stages=4`."""
    pinned: dict[str, str] = {}
    for text in pins:
        key, value = _parse(text, "pin")
        if pinned.get(key, value) != value:
            raise InputError(
                f"{key}={pinned[key]} and {key}={value} contradict each other",
                fix="keep one of the two",
                field="pin",
            )
        pinned[key] = value
    banned = []
    for text in bans:
        key, value = _parse(text, "forbid")
        if pinned.get(key) == value:
            raise InputError(
                f"--pin {key}={value} and --forbid {key}={value} contradict each other",
                fix="keep one of the two",
                field="forbid",
            )
        banned.append((key, value))
    return Constraints(tuple(pinned.items()), tuple(banned))


def _parse(text: str, field: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    key, value = key.strip(), value.strip().lower()
    if key not in DECISIONS or not equals:
        fix = suggest(key, DECISIONS) if equals else f"write one of {', '.join(DECISIONS)}=value"
        raise InputError(f"found {text!r}", fix=fix, field=field)
    if key in ("stages", "microbatches"):
        if not value.isdecimal() or int(value) < 1:
            raise InputError(f"found {text!r}", fix="give a whole number from 1 on", field=field)
        value = str(int(value))
    elif key == "recompute":
        value = ANSWERS.get(value, value)
        if value not in RECOMPUTE:
            raise InputError(f"found {text!r}", fix="give yes, light or no", field=field)
    elif key == "schedule" and value not in NAMED:
        raise InputError(f"found {text!r}", fix=suggest(value, NAMED), field=field)
    elif key == "sharded" and value not in SHARDING_LEVELS:
        raise InputError(f"found {text!r}", fix=suggest(value, SHARDING_LEVELS), field=field)
    elif key == "mesh" and not all(part.isdecimal() and int(part) for part in value.split("x")):
        raise InputError(f"found {text!r}", fix="write sizes such as 16x8", field=field)
    return key, value


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        return "x".join(map(str, value))
    return str(value)
