"""Choose for stages that share devices the ways to run them, such that all fit, at the least pace.

Every stage has a menu: its ways from the quickest to the thriftiest, those left out that another
beats in both. All begin with the quickest. While a group has too little room, the stages of one set
that go over together, on the groups that need it, go some items down their menus: those that free
most for the time it costs. Greedy, so not always the best; O(items x sets x stages) a move.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
NOTHING = 1e-9  # differences by rounding
OTHERS = 1e-3  # what time of stages that do not set the pace counts: they may be next


class Item(NamedTuple):
    """One way: seconds, bytes that lie there, bytes live only for a moment."""

    seconds: float
    kept_bytes: float
    moment_bytes: float
    way: int

    @property
    def held_bytes(self) -> float:
        """Both together."""
        return self.kept_bytes + self.moment_bytes


def menu_of(seconds: Floats, kept: Floats, moment: Floats) -> list[Item]:
    """The ways that are worth it, the quickest first."""
    found: list[Item] = []
    for way in np.lexsort((kept + moment, seconds)):
        item = Item(float(seconds[way]), float(kept[way]), float(moment[way]), int(way))
        if not found or item.held_bytes < found[-1].held_bytes * (1 - NOTHING):
            found.append(item)
    return found


def thrifty(
    menus: Sequence[Sequence[Item]],
    group_of: Sequence[int],
    room: Sequence[float],
    together: Sequence[Sequence[int]],
    pace: Callable[[Floats], float],
) -> list[Item] | None:
    """An item for every stage with which every group fits its room; None if there is none.

    `pace` judges the seconds of all stages.
    """
    at = [0] * len(menus)
    held = [[item.held_bytes for item in menu] for menu in menus]
    while True:
        chosen = [menu[k] for menu, k in zip(menus, at, strict=True)]
        over = _over(chosen, group_of, room)
        if max(over) <= 0:
            return chosen
        own = np.array([item.seconds for item in chosen])
        before = pace(own)
        best, move = 0.0, None
        for members in together:
            needy = [s for s in members if over[group_of[s]] > 0]
            for down in range(1, max((len(menus[s]) - at[s] for s in needy), default=1)):
                new = {s: min(at[s] + down, len(menus[s]) - 1) for s in needy}
                freed = sum(
                    min(over[group_of[s]], held[s][at[s]] - held[s][k]) for s, k in new.items()
                )
                trial = own.copy()
                trial[list(new)] = [menus[s][k].seconds for s, k in new.items()]
                paid = pace(trial) - before + OTHERS * float((trial - own).sum())
                if freed > 0 and freed / max(paid, 1e-12) > best:
                    best, move = freed / max(paid, 1e-12), new
        if move is None:
            return None
        for s, k in move.items():
            at[s] = k


def _over(chosen: Sequence[Item], group_of: Sequence[int], room: Sequence[float]) -> list[float]:
    """Bytes that each group has too many; of what is live for a moment the most counts once."""
    kept, moment = [0.0] * len(room), [0.0] * len(room)
    for item, group in zip(chosen, group_of, strict=True):
        kept[group] += item.kept_bytes
        moment[group] = max(moment[group], item.moment_bytes)
    return [a + b - c for a, b, c in zip(kept, moment, room, strict=True)]
