"""In which order a device's network runs its collectives: as a plan says it.

A network lane runs one collective after the other. Some are waited for by the next op (blocking),
others can wait: parameters that are gathered ahead of their use, reductions of gradients. Where
those go between the blocking ones is a decision, and stands in the plan as a text in the order of
the lane (`plans.Overlap`):

    12        so many blocking collectives
    g, g7     the next gather that was asked for, the next seven
    r3        the fourth bucket of gradients (or output) that is reduced

`Recorded` reads such a text and decides nothing; what decides is `search/overlap.py`, which
watches the times of tasks while they are written and says what it chose in the same words.
"""

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from partita.errors import PlanError
from partita.search.overlap import Deferred, Ready

if TYPE_CHECKING:
    from partita.lower.writer import Writer

LONGEST = 7  # digits of a number, so that no file can ask for more than there is memory
_TOKEN = re.compile(r"[1-9][0-9]*|g([1-9][0-9]*)?|r(0|[1-9][0-9]*)")


class NetworkOrder(Protocol):
    """What the writer asks: which collectives that can wait are written now."""

    def written(self, lanes: tuple[int, ...], seconds: float, waits: Sequence[int]) -> None:
        """A task was written."""

    def slowed(self, lanes: tuple[int, ...], task: int, seconds: float) -> None:
        """The last task of some lanes takes longer than was said."""

    def before_blocking(self, writer: "Writer", ready: Ready) -> None:
        """A blocking collective comes next: write what goes before it."""

    def before_use(self, writer: "Writer", key: object) -> None:
        """An op is about to use what is gathered under a key: write it, and what goes before."""

    def queued(self, writer: "Writer") -> None:
        """A reduction was put off: write some if there are too many."""

    def next_reduction(self, writer: "Writer") -> Deferred:
        """All reductions are written now: which one is first?"""

    def ended(self) -> str:
        """The order in words, when everything is written."""


class Recorded:
    """The order that a plan lists; one that cannot work is refused with the collective."""

    def __init__(self, text: str, stage: str) -> None:
        self.stage, self.text = stage, text
        self.tokens: list[str] = []
        self.at = 0
        self.blocking_left = 0
        for token in text.split():
            if not _TOKEN.fullmatch(token) or len(token) > LONGEST:
                self._refuse(f"holds {token!r}", "write numbers, g, and r with a number")
            self.tokens += ["g"] * int(token[1:] or 1) if token[0] == "g" else [token]

    def written(self, lanes: tuple[int, ...], seconds: float, waits: Sequence[int]) -> None:
        """Times do not matter: all is decided."""

    def slowed(self, lanes: tuple[int, ...], task: int, seconds: float) -> None:
        """Nor here."""

    def before_blocking(self, writer: "Writer", ready: Ready) -> None:
        """Write all that stands before the next blocking collective."""
        if self.blocking_left:
            self.blocking_left -= 1
            return
        while (token := self._next()) is not None and not token[0].isdigit():
            writer.write(self._named(writer, token))
        if token is None:
            self._refuse("ends before a collective that an op waits for", "list all of them")
        assert token is not None
        self.blocking_left = int(token) - 1

    def before_use(self, writer: "Writer", key: object) -> None:
        """Write all up to what an op is about to use."""
        while any(key in gather.makes for gather in writer.gathers):
            what = next(gather.what for gather in writer.gathers if key in gather.makes)
            token = None if self.blocking_left else self._next()
            if token is None or token[0].isdigit():
                self._refuse(
                    f"gathers {what} after a collective that waits for it",
                    "put its g before that one",
                )
            assert token is not None
            writer.write(self._named(writer, token))

    def queued(self, writer: "Writer") -> None:
        """What was put off is written when its turn comes."""

    def next_reduction(self, writer: "Writer") -> Deferred:
        """The next in the list."""
        token = None if self.blocking_left else self._next()
        if token is None or token[0].isdigit():
            left = ", ".join(deferred.what for deferred in writer.reductions[:3])
            self._refuse(f"does not reduce {left} in time", "list its reduction before")
        assert token is not None
        return self._named(writer, token)

    def ended(self) -> str:
        """The same text; refused where more is listed than there is."""
        if self.at < len(self.tokens) or self.blocking_left:
            rest = " ".join(self.tokens[self.at :]) or f"{self.blocking_left} blocking"
            self._refuse(f"goes on with {rest[:40]!r} when all is done", "remove that")
        return self.text

    def _next(self) -> str | None:
        if self.at == len(self.tokens):
            return None
        self.at += 1
        return self.tokens[self.at - 1]

    def _named(self, writer: "Writer", token: str) -> Deferred:
        waiting = writer.gathers[:1] if token == "g" else writer.reductions
        for deferred in waiting:
            if deferred.token == token:
                return deferred
        what = "a gather" if token == "g" else f"reduction {token[1:]}"
        self._refuse(
            f"runs {what} (entry {self.at}) before it is asked for, or twice",
            "move it behind what it waits for",
        )
        raise AssertionError

    def _refuse(self, what: str, fix: str) -> None:
        raise PlanError(
            f"the order of collectives {what}", fix=fix, field=f"stage {self.stage!r} overlap"
        )
