"""Placements worth a simulation of their own: cuts of the network in a row, and changes of one.

Weight gradients wait for nobody, so a device can make up for them while another goes on with the
backward: what our own simulation likes are stages whose neighbours overlap, and these are found by
moving whole runs of layers, not one layer at a time.
"""

from collections.abc import Iterator

import numpy as np

from partita.costs.placement import PlacementModel

RUNS = (1, 2, 4, 8, 16)  # layers that change sides together
PARTS = (0.25, 0.5, 0.75)  # of the work before a cut in two


def cuts(model: PlacementModel) -> Iterator[tuple[int, ...]]:
    """Stages in a row: equal work on all devices and fewer, halves and quarters on two."""
    total = model.phase_total(1)
    order = np.argsort(total.sum(axis=0), kind="stable").tolist()  # fastest devices first
    done = np.cumsum(total.min(axis=1))
    share = done / done[-1] if done[-1] > 0 else np.arange(1, len(done) + 1) / len(done)
    for count in range(len(order), 2, -1):
        stage = np.minimum((share * count).astype(np.int64), count - 1)
        yield tuple(np.array(order)[stage].tolist())
    for other in order[1:3]:
        for first, second in ((order[0], other), (other, order[0])):
            for part in PARTS:
                yield tuple(np.where(share <= part, first, second).tolist())


def changes(model: PlacementModel, placement: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Runs of layers beside a cut put on its other side, longest runs first; then single layers."""
    last = len(placement)
    sides = [at for at in range(1, last) if placement[at - 1] != placement[at]]
    for length in reversed(RUNS):
        for at in sides:
            before, after = placement[at - 1], placement[at]
            start, end = max(0, at - length), min(last, at + length)
            yield (*placement[:start], *((after,) * (at - start)), *placement[at:])
            yield (*placement[:at], *((before,) * (end - at)), *placement[end:])
    for layer, parents in enumerate(model.parents):
        for parent in parents:
            here, there = placement[parent], placement[layer]
            if here != there:
                yield (*placement[:layer], here, *placement[layer + 1 :])
                yield (*placement[:parent], there, *placement[parent + 1 :])
