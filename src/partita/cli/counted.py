"""Many parts of one command (points of a curve, runs of an experiment) as people see them.

On a terminal one line is kept up to date: how many are done, the best so far, its bound, about how
long the rest takes. Elsewhere every part that is done is a line of its own.
"""

import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import click

from partita.units import seconds

TICK_S = 0.5
LINE_S = 1.0


class PartsDone:
    """How far the parts are; the best is that of all of them."""

    def __init__(
        self, what: str, total: int, clock: Callable[[], float] = time.monotonic
    ) -> None:  # fmt: skip
        self._what, self._total, self._clock = what, total, clock
        self._begun = clock()
        self._done = self._made = 0
        self._best, self._bound = math.inf, 0.0

    def add(self, objective_s: float | None, bound_s: float | None, is_known: bool) -> None:
        """One more is done; one that was known already says nothing of how long others take."""
        self._done += 1
        self._made += not is_known
        if objective_s is not None and objective_s < self._best:
            self._best, self._bound = objective_s, bound_s or 0.0

    def at(self, done: int, total: int) -> None:
        """So many of so many are done."""
        self._done = self._made = done
        self._total = total

    def __str__(self) -> str:
        """`2 of 4 points  12.3 s  best 59.9 ms  bound 58.2 ms  about 12 s left`."""
        spent = self._clock() - self._begun
        count = f"{self._done} of {self._total} {self._what}" if self._total else self._what
        parts = [count, seconds(spent)]
        if math.isfinite(self._best):
            parts.append(f"best {seconds(self._best)}")
            parts += [f"bound {seconds(self._bound)}"] if self._bound > 0 else []
        left = self._total - self._done
        if self._made and left > 0:
            parts.append(f"about {seconds(round(spent / self._made * left))} left")
        return "  ".join(parts)


class Counted:
    """Says of each part that it is done: above the line of all parts, or as a line by itself."""

    def __init__(self, parts: PartsDone, quiet: bool) -> None:
        self._parts, self._quiet = parts, quiet
        self._status = None
        self._next_at = 0.0
        if not quiet and sys.stderr.isatty():
            from rich.console import Console  # only a terminal pays for this import

            self._status = Console(stderr=True).status(str(parts))
            self._status.start()

    def __call__(
        self, text: str, objective_s: float | None = None, bound_s: float | None = None,
        is_known: bool = False,
    ) -> None:  # fmt: skip
        """A part is done: what it is called, its objective and bound where it has them."""
        self._parts.add(objective_s, bound_s, is_known)
        if self._quiet:
            return
        if self._status is None:
            click.echo(f"{text}; {self._parts}", err=True)
            return
        self._status.console.print(text, markup=False, highlight=False, soft_wrap=True)
        self._next_at = 0.0
        self.tick()

    def at(self, done: int, total: int, text: str) -> None:
        """So many of so many small parts are done; a line at most once a second, and the last."""
        self._parts.at(done, total)
        now = time.monotonic()
        if self._quiet or (now < self._next_at and done < total):
            return
        self._next_at = now + (LINE_S if self._status is None else TICK_S)
        if self._status is None:
            click.echo(f"{self._parts}  {text}", err=True)
        else:
            room = self._status.console.width - 3
            self._status.update(f"{self._parts}  {text}"[:room])

    def tick(self) -> None:
        """Let the clock go on between parts."""
        now = time.monotonic()
        if self._status is not None and now >= self._next_at:
            self._next_at = now + TICK_S
            self._status.update(str(self._parts))

    def close(self) -> None:
        """Take the line away."""
        if self._status is not None:
            self._status.stop()


@contextmanager
def counted(quiet: bool, what: str, total: int) -> Iterator[Counted]:
    """What to tell of each part, in the way that fits stderr."""
    view = Counted(PartsDone(what, total), quiet)
    try:
        yield view
    finally:
        view.close()
