"""A timeline told coarsely, small enough to stand in a plan file: what a lane does, in thousandths.

    F0:12 F1:12 -:30 B0:24 ...

A letter is the kind of a task (`program.Kind`), with its micro-batch where it has one, and `-` is
idle; the numbers add up to 1000, which is the step. A plan remembers those it was chosen from this
way: their stages and splits would be as large as the plan itself, once for each.
"""

import re
from dataclasses import dataclass
from typing import NamedTuple

from partita.errors import PlanError

WHOLE = 1000  # the parts of a step
_SPAN = re.compile(r"(?:-|([FBDWUCSRX])([0-9]{0,9})):([0-9]{1,4})")


class Span(NamedTuple):
    """What a lane does from `begin` to `end`, in thousandths of the step; no letter is idle."""

    begin: int
    end: int
    letter: str = ""
    microbatch: int = -1

    def __str__(self) -> str:
        number = "" if self.microbatch < 0 else str(self.microbatch)
        return f"{self.letter + number if self.letter else '-'}:{self.end - self.begin}"


@dataclass(frozen=True, slots=True)
class LaneSketch:
    """One lane, and how many do the same; `spans` as text."""

    name: str
    spans: str
    num_lanes: int = 1

    def __post_init__(self) -> None:
        matches = [_SPAN.fullmatch(part) for part in self.spans.split()]
        whole = sum(int(match[3]) for match in matches if match is not None)
        if None in matches or whole != WHOLE or self.num_lanes < 1:
            raise PlanError(
                "a sketch that does not tell what its lane does",
                fix=f"write spans like F0:12 -:3 that add up to {WHOLE}, or leave the sketch out",
                field="spans",
            )

    def parts(self) -> tuple[Span, ...]:
        """The spans in their order."""
        spans, begin = [], 0
        for letter, number, size in _SPAN.findall(self.spans):
            end = begin + int(size)
            spans.append(Span(begin, end, letter, int(number) if number else -1))
            begin = end
        return tuple(spans)
