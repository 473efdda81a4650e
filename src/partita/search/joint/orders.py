"""What published orders hold: micro-batches in flight on every group, read off the orders."""

import functools

from partita.problems.joint import JointSchedule
from partita.schedules.named import NAMED

SINGLE = "1f1b"  # the name of the order of a single stage, which has nothing to order


def joint_schedule(name: str, virtual_stages: int = 1) -> JointSchedule:
    """A published order as a record of the space."""
    known = NAMED[name]
    return JointSchedule(name, virtual_stages, known.layout, known.split)


def refused(name: str, num_groups: int, virtual_stages: int, num_microbatches: int) -> bool:
    """Is an order not there for these numbers?

    Virtual stages fill the bubbles between many micro-batches: with fewer of them than groups they
    are no part of the space.
    """
    known = NAMED[name]
    if num_groups == 1:
        return name != SINGLE or virtual_stages > 1
    if virtual_stages > 1 and (known.layout == "line" or num_microbatches < num_groups):
        return True
    return bool(known.refuses(num_groups, virtual_stages, num_microbatches))


@functools.lru_cache(maxsize=256)
def in_flight(
    name: str, num_groups: int, virtual_stages: int, num_microbatches: int, waiting: float = 0.25
) -> tuple[float, ...]:
    """Per group, the most activations of a micro-batch that it holds, as parts of all its stages'.

    Read off the order itself; where weight gradients wait, gradients of activations wait with them
    (`waiting`, a part of the activations). Interleaved 1F1B has a closed form: a group runs as many
    forwards as come before its first backward, and one more.
    """
    if name == "interleaved":
        most = virtual_stages * num_microbatches
        first = (virtual_stages - 1) * num_groups + 1
        ahead = [2 * (num_groups - 1 - group) for group in range(num_groups)]
        return tuple(min(most, first + more) / virtual_stages for more in ahead)
    changes = {"F": 1.0, "B": -1.0, "I": waiting, "W": -1.0 - waiting}
    peaks = []
    for row in NAMED[name].order(num_groups, virtual_stages, num_microbatches):
        level = peak = 0.0
        for action in row:
            level += changes[action.kind]
            peak = max(peak, level)
        peaks.append(peak / virtual_stages)
    return tuple(peaks)
