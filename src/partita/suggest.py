"""What to type instead of a name that is not known."""

from collections.abc import Iterable, Mapping

SHOWN = 12
NEAR = 3


def suggest(name: str, known: Iterable[str], shown_as: Mapping[str, str] | None = None) -> str:
    """The nearest known names as a question; where none is near, what there is to choose from.

    Case, dashes and dots do not matter. `shown_as` gives another name to show for a known one.
    """
    from difflib import get_close_matches  # only a mistake pays for this import

    shown = {item: (shown_as or {}).get(item, item) for item in known}
    if not shown:
        return "there is nothing to choose from"
    spelled = {_plain(item) or item: shown[item] for item in sorted(shown, reverse=True)}
    wanted = _plain(name[:100])
    near = [wanted] if wanted in spelled else get_close_matches(wanted, spelled, n=NEAR)
    if near:
        names = dict.fromkeys(spelled[match] for match in near)
        return f"did you mean {' or '.join(names)}?"
    every = sorted(set(shown.values()))
    more = f", ... ({len(every)} in all)" if len(every) > SHOWN else ""
    return f"known are {', '.join(every[:SHOWN])}{more}"


def _plain(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())
