"""The tables that cuts are chosen from: every way to run every stretch of segments on a group.

A way of a mesh (`costs.segments`) may keep what its gradients read, run cheap ops again, or all of
its forward; each is an option. Its seconds, for a stretch of segments and a micro-batch, are those
of computing and waiting, or of communication that may be hidden where that takes longer.
"""

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from partita.costs.segments import MeshWays, Way
from partita.costs.tied import tied_stretches
from partita.search.joint.cuts import Stretches, joined, stretch_peaks, stretch_sums

Floats = npt.NDArray[np.float64]
EXPOSED = 0.03  # of the communication that may be hidden, what is not
GATHERED_AGAIN = 4 / 3  # communication of parameters in shares with recompute


@dataclass(frozen=True)
class Option:
    """One way of the table of a group: splits, and what of the forward runs again."""

    way: Way
    recompute: str  # of plans.RECOMPUTE


@dataclass
class Table:
    """All stretches in every option."""

    stretches: Stretches
    options: list[Option]

    @functools.cached_property
    def without_light(self) -> "Table | None":
        """The same without light recompute."""
        left = [i for i, option in enumerate(self.options) if option.recompute != "light"]
        if len(left) == len(self.options):
            return self
        known = self.stretches
        parts = (known.seconds, known.static, known.saved, known.transient, known.tail)
        stretches = Stretches(*(part[left] for part in parts))
        return Table(stretches, [self.options[i] for i in left]) if left else None


def table_of(
    meshes: Iterable[MeshWays], training: bool, allow: Callable[[str, object], bool]
) -> Table | None:
    """The table of some meshes with the recompute that is allowed; None where there is none."""
    parts, options = [], []
    for ways in meshes:
        for way in ways.ways:
            made = _training(way) if training else {"no": _inference(way)}
            if not allow("recompute", "no"):  # then what has nothing cheap keeps all
                made.setdefault("light", made["no"])
            for recompute, part in made.items():
                if allow("recompute", recompute):
                    parts.append(part)
                    options.append(Option(way, recompute))
    return Table(joined(parts), options) if parts else None


def _training(way: Way) -> dict[str, Stretches]:
    """Every stretch with all activations kept, with cheap ones and with all computed again."""
    hidden, compute = stretch_sums(way.hidden), stretch_sums(way.compute)
    waited = stretch_sums(way.blocking + EXPOSED * way.hidden)
    static = stretch_sums(way.static) + tied_stretches(way.tied, len(way.static))
    saved = stretch_sums(way.saved)
    # Gradients are synchronised while the last backward goes on.
    late = np.concatenate(([0.0], np.cumsum(way.sync - way.compute + way.forward)))
    tail: Floats = np.maximum(0.0, late[None, :] - late[:, None])
    tail += np.where(np.isfinite(static), stretch_sums(way.ends), 0.0)
    # What is kept in shares is gathered once more for a second forward.
    again = np.maximum(compute + stretch_sums(way.forward), GATHERED_AGAIN * hidden)
    found = {
        "no": _one(waited + np.maximum(compute, hidden), static, saved, np.zeros_like(saved), tail)
    }
    if way.again:
        light = compute + stretch_sums(way.light_s)
        sent = stretch_sums(way.light_sent)
        found["light"] = _one(
            waited + EXPOSED * sent + np.maximum(light, hidden + sent),
            static,
            stretch_sums(way.light_saved),
            stretch_peaks(way.saved - way.light_saved),
            tail,
        )
    found["yes"] = _one(
        waited + again, static, stretch_sums(way.entering), stretch_peaks(way.saved), tail
    )
    return found


def _inference(way: Way) -> Stretches:
    """Every stretch when nothing is kept but what passes through it."""
    hidden, compute = stretch_sums(way.hidden), stretch_sums(way.compute)
    waited = stretch_sums(way.blocking + EXPOSED * way.hidden)
    nothing = np.zeros_like(hidden)
    static = stretch_sums(way.static) + tied_stretches(way.tied, len(way.static))
    return _one(
        waited + np.maximum(compute, hidden), static, nothing, stretch_peaks(way.entering), nothing
    )


def _one(*arrays: Floats) -> Stretches:
    return Stretches(*(array[None] for array in arrays))
