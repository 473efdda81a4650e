"""Collectives that nobody waits for yet go into the gaps: parameters gathered ahead, sums of grads.

A device's network lane runs its collectives one after the other, in a fixed order. One that the
next op waits for goes as soon as its turn comes; one that can wait goes before it only if the lane
would be idle for longer than the op is then kept waiting,

    idle = ready - begin >= begin + seconds - ready = late

with `begin` the moment it could begin and `ready` the moment the other is ready. What is gathered
has to be there when it is used, and no more than `MOST_LATE` sums are put off, so that gradients do
not pile up. Times are known while tasks are written, because a lane's order is that of writing.
"""

from collections.abc import Callable
from dataclasses import dataclass

from partita.cluster import Cluster
from partita.costs.collectives import Collectives
from partita.graph.record import Graph
from partita.lower.tasks import Made, Ready, TaskWriter
from partita.plans import Stage

MOST_LATE = 4  # sums of gradients that may be put off


@dataclass(frozen=True, eq=False)
class Later:
    """A collective that can wait: what it waits for itself, its seconds, and how it is written."""

    ready: Ready
    seconds: float
    write: Callable[[], object]
    makes: tuple[object, ...] = ()  # keys of what is gathered


class BackgroundWriter(TaskWriter):
    """Puts collectives that can wait into the gaps between those that cannot."""

    def __init__(
        self, stage: Stage, graph: Graph, cluster: Cluster, devices: tuple[int, ...],
        collectives: Collectives,
    ) -> None:  # fmt: skip
        super().__init__(stage, graph, cluster, devices, collectives)
        self.ahead: list[Later] = []  # gathered for ops to come, in their order
        self.late: list[Later] = []  # sums of gradients

    def _urgent(self, label: str, name: str, size: float, axis: int, ready: Ready) -> Made:
        """A collective that the next op waits for, after what goes before it."""
        moment = self._moment(ready)
        while self.ahead and self._goes_before(self.ahead[0], moment):
            self.ahead.pop(0).write()
        self._fill(moment)
        return self._group_tasks(label, name, size, axis, ready)

    def _is_asked_for(self, key: object) -> bool:
        return any(key in later.makes for later in self.ahead)

    def _needed(self, key: object) -> None:
        """Write what an op is about to use, unless it is there already."""
        while self._is_asked_for(key):
            later = self.ahead.pop(0)
            self._fill(self._moment(later.ready))
            later.write()

    def _put_off(self, later: Later) -> None:
        self.late.append(later)
        while len(self.late) > MOST_LATE:
            self.late.pop(0).write()

    def _drain(self) -> None:
        """Write all that was put off."""
        while self.late:
            self.late.pop(0).write()

    def _fill(self, moment: float) -> None:
        """Write the sums that go well before a collective that is ready at a moment."""
        for later in list(self.late):
            if self._goes_before(later, moment):
                self.late.remove(later)
                later.write()

    def _goes_before(self, later: Later, moment: float) -> bool:
        lanes = max(self.free[self._network(device)] for device in self.devices)
        begin = max(lanes, self._moment(later.ready))
        return moment - begin >= begin + later.seconds - moment

    def _moment(self, ready: Ready) -> float:
        """When all that is waited for is there."""
        return max((self.ends[task] for tasks in ready.values() for task in tasks), default=0.0)
