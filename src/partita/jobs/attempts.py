"""One candidate, piece of advice or picture that fails is one line: the answer does not hang on it.

A job makes many things on its way: plans that are simulated, sentences of advice, drawings. Each is
an attempt. What goes wrong in one is a mistake of ours, or of a model nobody thought of; it is
logged in one line, and the rest is shown. Where everything has failed there is no rest: then the
first error is the answer.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from partita.errors import PartitaError

T = TypeVar("T")

log = logging.getLogger("partita")


@dataclass
class Attempts:
    """What failed so far."""

    errors: list[Exception] = field(default_factory=list)

    def __call__(self, what: str, make: Callable[[], T]) -> T | None:
        """What `make` gives; None, and a line, where it fails."""
        try:
            return make()
        except Exception as error:
            self.errors.append(error)
            log.warning("%s is left out: %s", what, in_words(error), extra={"failure": error})
            return None

    def refuse_if_all_failed(self, anything: object) -> None:
        """Raise the first error where nothing else is left to show."""
        if not anything and self.errors:
            raise self.errors[0]


def in_words(error: Exception) -> str:
    """An error in one line, with its class where the text alone says little."""
    text = str(error).split("\n", 1)[0]
    return text if isinstance(error, PartitaError) else f"{type(error).__name__}: {text}"
