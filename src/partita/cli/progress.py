"""A running search as people see it: improvements on stderr, Ctrl-C as a request to stop.

On a terminal one line is kept up to date; elsewhere (a log file, CI) an improvement is a line of
its own, at most one per second, the last one always shown.
"""

import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from types import FrameType

import click

from partita.search.base import Improvement, relative_gap
from partita.units import number, seconds

LINE_INTERVAL_S = 1.0


class Interrupt:
    """Remembers the first Ctrl-C; the second aborts."""

    def __init__(self) -> None:
        self.asked = False

    @contextmanager
    def listening(self, quiet: bool) -> Iterator[None]:
        """Take Ctrl-C while the search runs, then give it back to whoever had it."""
        before = signal.getsignal(signal.SIGINT)
        if before is None or threading.current_thread() is not threading.main_thread():
            yield  # Python can only take signals in its main thread
            return

        def handle(_number: int, _frame: FrameType | None) -> None:
            if self.asked:
                raise KeyboardInterrupt
            self.asked = True
            if not quiet:
                _write_from_handler("stopping with the best so far (Ctrl-C again aborts)\n")

        signal.signal(signal.SIGINT, handle)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)


Words = Callable[[float], str]  # an objective as people read it


def describe(
    step: Improvement, words: Words = number, left_s: float | None = None, room: int = 0
) -> str:
    """One improvement in one line: `1.2 s  best 10  bound 8  gap 20.0%  1,000 evaluations`.

    With a time limit it ends with what is left of that. Where `room` is too small for all, the
    evaluations and then the gap are left out.
    """
    parts = [seconds(step.seconds)]
    parts += ["no answer yet" if step.objective is None else f"best {words(step.objective)}"]
    if step.lower_bound is not None:
        parts.append(f"bound {words(step.lower_bound)}")
    gap = relative_gap(step.objective, step.lower_bound)
    more = [] if gap is None else [f"gap {gap:.1%}"]
    if step.evaluations:
        more.append(f"{step.evaluations:,} evaluation{'s' * (step.evaluations != 1)}")
    left = [] if left_s is None else [f"at most {seconds(round(max(0.0, left_s)))} left"]
    while more and room and len("  ".join([*parts, *more, *left])) > room:
        more.pop()
    return "  ".join([*parts, *more, *left])


class PlainLines:
    """Improvements as plain lines: the first at once, then at most one per `LINE_INTERVAL_S`."""

    def __init__(
        self, words: Words = number, clock: Callable[[], float] = time.monotonic,
        time_s: float | None = None,
    ) -> None:  # fmt: skip
        self._words = words
        self._clock = clock
        self._time_s = time_s
        self._next_at = -math.inf
        self._waiting: Improvement | None = None

    def __call__(self, step: Improvement) -> None:
        """Show the step, now or when the last line is old enough."""
        self._waiting = step
        self.tick()

    def tick(self) -> None:
        """Show what waits if its time has come; asked between the steps of a search."""
        if self._waiting is not None and self._clock() >= self._next_at:
            self.close()

    def close(self) -> None:
        """Show what still waits."""
        if self._waiting is not None:
            self._next_at = self._clock() + LINE_INTERVAL_S
            left = None if self._time_s is None else self._time_s - self._waiting.seconds
            click.echo(describe(self._waiting, self._words, left), err=True)
            self._waiting = None


class Live:
    """The last improvement and the time that is left, in one line that is kept up to date."""

    def __init__(self, words: Words = number, time_s: float | None = None) -> None:
        from rich.console import Console  # only a terminal pays for this import

        text = "searching (Ctrl-C stops with the best so far)"
        self._status = Console(stderr=True).status(text)
        self._room = self._status.console.width - 3  # beside what turns
        self._status.start()
        self._words = words
        self._begun = self._next_at = time.monotonic()
        self._time_s = time_s
        self._step: Improvement | None = None

    def __call__(self, step: Improvement) -> None:
        """Show the step in place of the one before."""
        self._step = step
        self._next_at = 0.0
        self.tick()

    def tick(self) -> None:
        """Let the clock go on between improvements, at most twice a second."""
        now = time.monotonic()
        if self._step is None or now < self._next_at:
            return
        self._next_at = now + 0.5
        spent = max(now - self._begun, self._step.seconds)
        left = None if self._time_s is None else self._time_s - spent
        step = replace(self._step, seconds=spent)
        self._status.update(describe(step, self._words, left, self._room))

    def close(self) -> None:
        """Take the line away."""
        self._status.stop()


@contextmanager
def shown(
    quiet: bool, words: Words = number, time_s: float | None = None
) -> Iterator[PlainLines | Live | None]:
    """What shows improvements in the way that fits stderr; None when quiet."""
    if quiet:
        yield None
        return
    view = Live(words, time_s) if sys.stderr.isatty() else PlainLines(words, time_s=time_s)
    try:
        yield view
    finally:
        view.close()


@contextmanager
def saying(
    quiet: bool, time_s: float, line: Callable[[str], None] | None = None
) -> Iterator[Callable[[str], None]]:
    """Says what is being done: on a terminal beside a bar of the time allowed, else in lines.

    Without `line`, what is no terminal hears nothing.
    """
    if quiet or not sys.stderr.isatty():
        yield line or (lambda _: None)
        return
    from rich.console import Console  # only a terminal pays for this import
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        BarColumn(12), TimeElapsedColumn(), TextColumn("{task.fields[left]}"),
        TextColumn("{task.description}"),
    )  # fmt: skip
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("starting", total=time_s, left=f"at most {time_s:.0f} s left")
        began = time.monotonic()

        def note(text: str) -> None:
            left = max(0.0, time_s - (time.monotonic() - began))
            words = f"at most {left:.0f} s left"
            bar.update(task, description=text, left=words, completed=time_s - left)

        yield note


def _write_from_handler(text: str) -> None:
    # Not click.echo: a handler may run inside another write to stderr, whose buffer is not
    # reentrant.
    with suppress(OSError, ValueError):
        os.write(sys.stderr.fileno(), text.encode())
