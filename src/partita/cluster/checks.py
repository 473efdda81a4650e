"""What every name and figure in a cluster must be; each complaint names the field it is about."""

from collections.abc import Iterable

from partita.errors import ClusterError

DTYPES = ("f64", "f32", "tf32", "f16", "bf16", "f8", "i8")  # what a kind may list a rate for
MAX_BYTES = 2**62


def check_name(name: object, field: str, what: str) -> None:
    """Refuse what could not be told from other names when printed."""
    if not isinstance(name, str):
        wrong = f"found {shown(name)} where the name of {what} belongs"
    elif not name:
        wrong = f"the name of {what} is empty"
    elif not name.isprintable() or name != name.strip():
        wrong = f"{shown(name)} has characters that a name cannot have"
    elif len(name) > 200:
        wrong = f"a name of {len(name)} characters"
    else:
        return
    raise ClusterError(wrong, fix="use 1 to 200 printable characters", field=field)


def checked_rates(rates: object, where: str) -> tuple[tuple[str, float], ...]:
    """The rates in the order of DTYPES, each a positive number, f32 among them."""
    field = f"{where} flops_per_s"
    try:
        pairs = [(dtype, rate) for dtype, rate in rates]  # type: ignore[attr-defined]
        listed = dict(pairs)
    except (TypeError, ValueError):
        raise ClusterError(
            "is not a list of pairs (dtype, FLOP/s)", fix='give (("f32", 1e12),)', field=field
        ) from None
    if len(listed) < len(pairs):
        raise ClusterError("gives a rate for one dtype twice", fix="give it once", field=field)
    for dtype, rate in pairs:
        if dtype not in DTYPES:
            raise ClusterError(
                f"unknown dtype {shown(dtype)}", fix=f"use {', '.join(DTYPES)}", field=field
            )
        _check_number(rate, f"{field} {dtype}", positive=True)
    if "f32" not in listed:
        raise ClusterError("has no rate for f32", fix="give at least that one", field=field)
    return tuple((dtype, float(listed[dtype])) for dtype in DTYPES if dtype in listed)


def set_number(record: object, name: str, where: str, positive: bool = False) -> None:
    """Check a field and keep it as a float: 1 and 1.0 must not print differently."""
    value = getattr(record, name)
    _check_number(value, f"{where} {name}", positive)
    object.__setattr__(record, name, float(value))


def _check_number(value: object, field: str, positive: bool = False) -> None:
    real = isinstance(value, int | float) and not isinstance(value, bool)
    if real and (0 < value <= 1e300 or (value == 0 and not positive)):  # type: ignore[operator]
        return
    needed = "a finite number above 0" if positive else "a finite number of 0 or more"
    raise ClusterError(f"found {shown(value)}", fix=f"{needed} is needed", field=field)


def check_whole(value: object, field: str, least: int = 0) -> None:
    """Refuse what is not a whole number of at least `least`."""
    if type(value) is not int or not least <= value <= MAX_BYTES:
        raise ClusterError(
            f"found {shown(value)}",
            fix=f"a whole number of {least} or more is needed",
            field=field,
        )


def check_limit(count: int, most: int, what: str) -> None:
    """Refuse more than anyone has."""
    if count > most:
        raise ClusterError(f"has {count:,} {what}", fix=f"at most {most:,} are read", field=what)


def check_unique(names: Iterable[str], seen: set[str], what: str) -> None:
    """Refuse names that were seen before, and note the others."""
    for index, name in enumerate(names):
        if name in seen:
            raise ClusterError(
                f"the name {name!r} is given twice", fix="rename one", field=f"{what}[{index}]"
            )
        seen.add(name)


def is_unicode(text: str) -> bool:
    """False where the text has half characters that no file can hold."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def shown(value: object) -> str:
    """A value as it may stand in a message: short, and spelled as in a file."""
    if isinstance(value, bool):
        return "true" if value else "false"
    try:
        text = repr(value)
    except ValueError:  # a whole number of thousands of digits
        return "a number far too large"
    return text if len(text) <= 60 else f"{text[:57]}..."
