"""In which groups a split dispatch or combine routes its tokens.

A device that has a share of the tokens routes that share by itself: its tokens compete for its
share of every expert's places, in its order. So the groups are the shares of the tokens, and a
dispatch and its combine must have the same ones, over whichever axes (`graph.routing`).
"""

import functools
from fractions import Fraction

from partita.graph.loops import loop_nest
from partita.graph.record import Call
from partita.plans import Axis


@functools.lru_cache(maxsize=4096)
def token_groups(call: Call, dims: tuple[str, ...], axes: tuple[Axis, ...]) -> tuple[Fraction, ...]:
    """Where the groups of tokens end, as parts of all tokens; (1,) if all are one group."""
    gates = loop_nest(call).inputs[1]
    tokens = {name for names in gates.dims[:-1] for name in names}
    shares = [Fraction(1)]
    for dim, axis in zip(dims, axes, strict=True):
        if dim in tokens:  # a later axis cuts the shares of an earlier one
            own = [Fraction(weight, axis.parts) for weight in axis.weights or (1,) * axis.size]
            shares = [share * part for share in shares for part in own]
    ends, end = [], Fraction(0)
    for share in shares:
        end += share
        ends.append(end)
    return tuple(ends)
