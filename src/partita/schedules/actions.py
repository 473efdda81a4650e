"""What a device does next: `3F2` is the forward of stage 3 for micro-batch 2.

    F   forward
    B   backward, data and weight gradients in one
    I   the data gradients only ("input")
    W   the weight gradients only

The letters are those of torch.distributed.pipelining. An order is one row of actions per rank.
Where a model is held twice (two directions), the stages of the second copy are numbered on from
those of the first.
"""

import re
from typing import NamedTuple

from partita.errors import InputError

KINDS = "FBIW"

_ACTION = re.compile(rf"([0-9]{{1,9}})([{KINDS}])([0-9]{{1,9}})")


class Action(NamedTuple):
    """One cell of an order."""

    stage: int
    kind: str  # one of KINDS
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


Order = tuple[tuple[Action, ...], ...]  # by rank


def parse_action(text: str) -> Action:
    """The action in a text, the inverse of `str`."""
    match = _ACTION.fullmatch(text)
    if match is None:
        shown = repr(text if len(text) <= 40 else text[:37] + "...")
        raise InputError(
            f"{shown} is no action", fix=f"write stage, one of {KINDS}, micro-batch: 3F2"
        )
    return Action(int(match[1]), match[2], int(match[3]))


def order_text(order: Order) -> str:
    """An order for people: a line per rank."""
    return "\n".join(f"{rank}: {' '.join(map(str, row))}" for rank, row in enumerate(order))
