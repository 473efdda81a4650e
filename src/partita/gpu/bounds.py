"""How far a kernel can reach, and whether that is inside its buffers: checked before a launch.

A kernel of ours reads and writes matrices: rows a fixed number of elements apart, some columns of
each, masked by the sizes it is given. So the farthest element of an operand follows from sizes
alone. An index past the end of a buffer would take the whole process down; here it is a refusal
with the name of the operand. Offsets inside an operand are 32-bit numbers, so they are checked too.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from partita.errors import VerificationError

MOST_OFFSET = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Reach:
    """Elements of an operand that a kernel may touch, and those that there are from its begin."""

    operand: str
    needs: int
    room: int
    begin: int = 0  # of the operand in its buffer


def matrix_end(rows: int, stride: int, cols: int) -> int:
    """One past the last element of `rows` rows of `cols` columns, `stride` elements apart."""
    return 0 if rows <= 0 or cols <= 0 else (rows - 1) * stride + cols


def outside(reaches: Iterable[Reach]) -> list[str]:
    """What would be touched outside of its buffer, in words; empty where all is inside."""
    wrong = []
    for reach in reaches:
        if reach.begin < 0 or reach.needs > reach.room:
            wrong.append(
                f"{reach.operand}: element {reach.needs - 1:,} of {reach.room:,} is reached"
                if reach.begin >= 0
                else f"{reach.operand} begins at {reach.begin:,}"
            )
        elif reach.needs > MOST_OFFSET:
            wrong.append(f"{reach.operand}: offset {reach.needs - 1:,} is no 32-bit number")
    return wrong


def check_inside(what: str, reaches: Iterable[Reach]) -> None:
    """Refuse a launch that could touch anything but its own buffers."""
    wrong = outside(reaches)
    if wrong:
        raise VerificationError(tuple(f"{what} would leave its memory: {each}" for each in wrong))
