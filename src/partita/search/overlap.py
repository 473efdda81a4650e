"""Which collectives that can wait go into which gaps of the network.

A device's network runs its collectives one after the other, in a fixed order. One that the next op
waits for goes as soon as its turn comes; one that can wait (a gather of parameters, a reduction of
gradients) goes before it only if the network would be idle for longer than the op is then kept
waiting,

    idle = ready - begin >= begin + seconds - ready = late

with `begin` the moment it could begin and `ready` the moment the other is ready. What is gathered
has to be there when it is used, and no more than `most_deferred` reductions are put off, so that
gradients do not pile up. Times are known while tasks are written, because a lane's order is that
of writing. What was chosen is said in the words of a plan, so that lowering the plan, and running
it, repeat that without any clock.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

Ready = dict[int, list[int]]  # per device the tasks to wait for


@dataclass(frozen=True, eq=False)
class Deferred:
    """A collective that can wait: what it waits for itself, its seconds, and how it is written."""

    number: int  # of a reduction; -1: it gathers
    ready: Ready
    seconds: float
    write: Callable[[], object]
    makes: tuple[object, ...] = ()  # keys of what is gathered
    what: str = ""  # for people

    @property
    def is_gather(self) -> bool:
        """Does it gather parameters?"""
        return self.number < 0

    @property
    def token(self) -> str:
        """What it is called in the order."""
        return "g" if self.is_gather else f"r{self.number}"


class FillGaps:
    """Decides the order of a stage's collectives while its tasks are written."""

    def __init__(self, num_devices: int, most_deferred: int = 4) -> None:
        self.most_deferred = most_deferred
        self.ends: list[float] = []  # of every task, if lanes run them in this order
        self.free = [0.0] * (2 * num_devices)  # of every lane
        self.num_devices = num_devices
        self.tokens: list[str] = []

    def written(self, lanes: tuple[int, ...], seconds: float, waits: Sequence[int]) -> None:
        """Keep the clocks of all lanes."""
        ends, free = self.ends, self.free
        begin = 0.0
        for task in waits:
            if ends[task] > begin:
                begin = ends[task]
        for lane in lanes:
            if free[lane] > begin:
                begin = free[lane]
        end = begin + seconds
        for lane in lanes:
            free[lane] = end
        ends.append(end)

    def slowed(self, lanes: tuple[int, ...], task: int, seconds: float) -> None:
        """The last task of some lanes ends later."""
        self.ends[task] += seconds
        for lane in lanes:
            self.free[lane] += seconds

    def before_blocking(self, writer: Any, ready: dict[int, list[int]]) -> None:
        """Gathers in their order, then reductions, as long as they go well before."""
        moment = self._moment(ready.values())
        while writer.gathers and self._goes_before(writer.gathers[0], moment):
            self._write(writer, writer.gathers[0])
        self._fill(writer, moment)
        self.tokens.append("b")

    def before_use(self, writer: Any, key: object) -> None:
        """What an op is about to use is gathered now, unless it is there already."""
        while any(key in gather.makes for gather in writer.gathers):
            gather = writer.gathers[0]
            self._fill(writer, self._moment(gather.ready.values()))
            self._write(writer, gather)

    def queued(self, writer: Any) -> None:
        """The oldest reductions go when there are too many."""
        while len(writer.reductions) > self.most_deferred:
            self._write(writer, writer.reductions[0])

    def next_reduction(self, writer: Any) -> Deferred:
        """The oldest one."""
        oldest: Deferred = writer.reductions[0]
        self.tokens.append(oldest.token)
        return oldest

    def ended(self) -> str:
        """What was decided."""
        return tokens_text(self.tokens)

    def _write(self, writer: Any, deferred: Deferred) -> None:
        self.tokens.append(deferred.token)
        writer.write(deferred)

    def _fill(self, writer: Any, moment: float) -> None:
        """Write the reductions that go well before a collective that is ready at a moment."""
        for deferred in list(writer.reductions):
            if self._goes_before(deferred, moment):
                self._write(writer, deferred)

    def _goes_before(self, deferred: Deferred, moment: float) -> bool:
        network = max(self.free[self.num_devices :])
        begin = max(network, self._moment(deferred.ready.values()))
        return moment - begin >= begin + deferred.seconds - moment

    def _moment(self, ready: Iterable[Sequence[int]]) -> float:
        """When all that is waited for is there."""
        return max((self.ends[task] for tasks in ready for task in tasks), default=0.0)


def tokens_text(tokens: Sequence[str]) -> str:
    """Tokens of single collectives (`b` for a blocking one) as a plan lists them."""
    words = []
    for token, run in itertools.groupby(tokens):
        count = sum(1 for _ in run)
        if token == "b":
            words.append(str(count))
        elif token == "g":
            words.append("g" if count == 1 else f"g{count}")
        else:
            words.append(token)
    return " ".join(words)
