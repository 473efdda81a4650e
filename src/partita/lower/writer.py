"""Tasks of a stage while they are written: lanes, waits, values, and memory from first use to last.

Each representative rank has a compute lane and a network lane. Memory is taken where a tensor is
made and given back after its last use; a view keeps what it looks at. The writer decides nothing:
which collective goes next on the network is told to it (`order`).

A network lane runs one collective after the other. Some are waited for by the next op (blocking),
others can wait: parameters that are gathered ahead of their use, reductions of gradients. Where
those go between the blocking ones is a decision, and stands in the plan as a text in the order of
the lane (`plans.Overlap`):

    12        so many blocking collectives
    g, g7     the next gather that was asked for, the next seven
    r3        the fourth bucket of gradients (or output) that is reduced

`Recorded` reads such a text and decides nothing; what decides is `search/overlap.py`, which
watches the times of tasks while they are written and says what it chose in the same words.
"""

import re
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from partita.costs.roofline import OpCost, Split, issue_s
from partita.errors import PlanError
from partita.graph.record import Op
from partita.lower.context import Context
from partita.meaning import Layout, Phase, Purpose, Value, Work
from partita.program import Kind, Program, ProgramBuilder
from partita.search.overlap import Deferred, Ready

LONGEST = 7  # digits of a number, so that no file can ask for more than there is memory
_TOKEN = re.compile(r"[1-9][0-9]*|g([1-9][0-9]*)?|r(0|[1-9][0-9]*)")
Made = dict[int, int]  # per device the task that makes something


class NetworkOrder(Protocol):
    """What the writer asks: which collectives that can wait are written now."""

    def written(self, lanes: tuple[int, ...], seconds: float, waits: Sequence[int]) -> None:
        """A task was written."""

    def before_blocking(self, writer: "Writer", ready: Ready) -> None:
        """A blocking collective comes next: write what goes before it."""

    def before_use(self, writer: "Writer", key: object) -> None:
        """An op is about to use what is gathered under a key: write it, and what goes before."""

    def queued(self, writer: "Writer") -> None:
        """A reduction was put off: write some if there are too many."""

    def next_reduction(self, writer: "Writer") -> Deferred:
        """All reductions are written now: which one is first?"""

    def ended(self) -> str:
        """The order in words, when everything is written."""


class Recorded:
    """The order that a plan lists; one that cannot work is refused with the collective."""

    def __init__(self, text: str, stage: str) -> None:
        self.stage, self.text = stage, text
        self.tokens: list[str] = []
        self.at = 0
        self.blocking_left = 0
        for token in text.split():
            if not _TOKEN.fullmatch(token) or len(token) > LONGEST:
                self._refuse(f"holds {token!r}", "write numbers, g, and r with a number")
            self.tokens += ["g"] * int(token[1:] or 1) if token[0] == "g" else [token]

    def written(self, lanes: tuple[int, ...], seconds: float, waits: Sequence[int]) -> None:
        """Times do not matter: all is decided."""

    def before_blocking(self, writer: "Writer", ready: Ready) -> None:
        """Write all that stands before the next blocking collective."""
        if self.blocking_left:
            self.blocking_left -= 1
            return
        while (token := self._next()) is not None and not token[0].isdigit():
            writer.write(self._named(writer, token))
        if token is None:
            self._refuse("ends before a collective that an op waits for", "list all of them")
        assert token is not None
        self.blocking_left = int(token) - 1

    def before_use(self, writer: "Writer", key: object) -> None:
        """Write all up to what an op is about to use."""
        while any(key in gather.makes for gather in writer.gathers):
            what = next(gather.what for gather in writer.gathers if key in gather.makes)
            token = None if self.blocking_left else self._next()
            if token is None or token[0].isdigit():
                self._refuse(
                    f"gathers {what} after a collective that waits for it",
                    "put its g before that one",
                )
            assert token is not None
            writer.write(self._named(writer, token))

    def queued(self, writer: "Writer") -> None:
        """What was put off is written when its turn comes."""

    def next_reduction(self, writer: "Writer") -> Deferred:
        """The next in the list."""
        token = None if self.blocking_left else self._next()
        if token is None or token[0].isdigit():
            left = ", ".join(deferred.what for deferred in writer.reductions[:3])
            self._refuse(f"does not reduce {left} in time", "list its reduction before")
        assert token is not None
        return self._named(writer, token)

    def ended(self) -> str:
        """The same text; refused where more is listed than there is."""
        if self.at < len(self.tokens) or self.blocking_left:
            rest = " ".join(self.tokens[self.at :]) or f"{self.blocking_left} blocking"
            self._refuse(f"goes on with {rest[:40]!r} when all is done", "remove that")
        return self.text

    def _next(self) -> str | None:
        if self.at == len(self.tokens):
            return None
        self.at += 1
        return self.tokens[self.at - 1]

    def _named(self, writer: "Writer", token: str) -> Deferred:
        waiting = writer.gathers[:1] if token == "g" else writer.reductions
        for deferred in waiting:
            if deferred.token == token:
                return deferred
        what = "a gather" if token == "g" else f"reduction {token[1:]}"
        self._refuse(
            f"runs {what} (entry {self.at}) before it is asked for, or twice",
            "move it behind what it waits for",
        )
        raise AssertionError

    def _refuse(self, what: str, fix: str) -> None:
        raise PlanError(
            f"the order of collectives {what}", fix=fix, field=f"stage {self.stage!r} overlap"
        )


@dataclass(eq=False)
class Buffer:
    """A tensor in one layout: its value, which task makes it on each device, what it occupies."""

    name: str
    layout: Layout
    size_bytes: float
    value: int
    made_by: Made = field(default_factory=dict)
    root: "Buffer | None" = None  # views occupy nothing of their own
    last_use: Made = field(default_factory=dict)

    def owner(self) -> "Buffer":
        """The buffer whose memory this one is a view of."""
        return self.root.owner() if self.root is not None else self


@dataclass(slots=True)
class StageTask:
    """A task before the program is built."""

    work: Work
    lanes: tuple[int, ...]
    seconds: float
    waits: tuple[int, ...]
    kind: Kind
    launched_s: float = 0.0  # when the host has started it, from the phase's begin
    takes: dict[int, float] = field(default_factory=dict)  # memory -> bytes from the start on
    gives: dict[int, float] = field(default_factory=dict)  # memory -> bytes back at the end


@dataclass(eq=False)
class Writer:
    """The tasks of one stage, and where everything is that they made so far."""

    context: Context
    order: NetworkOrder
    phase: Phase = Phase.FORWARD
    barrier: int | None = None  # a task that all later ones wait for
    barriers: list[int] = field(default_factory=list)  # all there were
    tasks: list[StageTask] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    occupied: list[Buffer] = field(default_factory=list)  # all that have memory of their own
    kept: list[Buffer] = field(default_factory=list)  # what the model returns stays
    buffers: dict[str, Buffer] = field(default_factory=dict)  # every tensor as it was made
    fed: dict[tuple[str, Layout], Buffer] = field(default_factory=dict)
    converted: dict[tuple[int, Layout], Buffer] = field(default_factory=dict)
    gathered: dict[tuple[str, bool], Buffer] = field(default_factory=dict)
    buckets: dict[tuple[int, Layout], list[Buffer]] = field(default_factory=dict)
    reduced: list[tuple[list[Buffer], Ready]] = field(default_factory=list)
    last_sharded: Made = field(default_factory=dict)  # latest compute of an op with sharded params
    gathers: list[Deferred] = field(default_factory=list)  # asked for, in order, not yet written
    reductions: list[Deferred] = field(default_factory=list)
    num_reductions: int = 0
    reduces_now: bool = False  # are all gradients reduced in this step, not when others ended?
    keeps_gradients: bool = True  # have reduced gradients memory of their own?
    host_s: list[float] = field(default_factory=list)  # of each device's host, since the barrier
    extras: dict[str, Buffer] = field(default_factory=dict)  # kept for gradients, by forward op
    owed: dict[int, float] = field(default_factory=dict)  # seconds by which computing is slowed
    issued: dict[int, float] = field(default_factory=dict)  # of the host, for collectives it began
    splits: dict[str, Split] = field(default_factory=dict)  # as the first device runs each op
    costs: dict[str, OpCost] = field(default_factory=dict)

    # Values and tasks.

    def value(
        self, tensor: str, layout: Layout, source: str = "task", of: int = -1,
        flat: tuple[int, ...] = (),
    ) -> int:  # fmt: skip
        """Add a value; returns its number. What a second run makes is the tensor of the first."""
        tensor = self.context.original.get(tensor, tensor)
        gradient_of = self.context.gradient_of.get(tensor, "")
        self.values.append(Value(tensor, layout, source, of, flat, gradient_of))
        return len(self.values) - 1

    def task(
        self, work: Work, lanes: tuple[int, ...], seconds: float, waits: Iterable[int], kind: Kind
    ) -> int:
        """Add a task; returns its number."""
        known = set(waits)
        if self.barrier is not None:
            known.add(self.barrier)
        ordered = tuple(sorted(known))
        launched_s = max((self._launched_s(lane) for lane in lanes), default=0.0)
        self.tasks.append(StageTask(work, lanes, seconds, ordered, kind, launched_s))
        self.order.written(lanes, seconds, ordered)
        return len(self.tasks) - 1

    def host(self, device: int, seconds: float) -> None:
        """The host of a device is busy with the next task for so long before that can begin.

        A host runs ahead of its device: what it starts is queued. So the moment at which a task has
        been started is known before anything runs: the sum of what its host did until then.
        """
        if not self.host_s:
            self.host_s = [0.0] * len(self.context.devices)
        self.host_s[self.context.index[device]] += seconds

    def _launched_s(self, lane: int) -> float:
        return self.host_s[lane % len(self.host_s)] if self.host_s else 0.0

    def beside(self, work: Work, ready: Ready) -> Made:
        """A gather that nobody waits for yet: it slows down what is computed meanwhile.

        Two things side by side take max(a, b) + interference min(a, b). So computing owes that part
        of a collective, and every task pays what it can: that part of its own time at most.
        """
        made = self.collective(work, ready)
        share = self.context.collectives.interference
        if share:
            for device, task in made.items():
                self.owe(device, share * self.tasks[task].seconds)
        return made

    def owe(self, device: int, seconds: float) -> None:
        """Computing on a device is slowed down by so much, from now on."""
        self.owed[device] = self.owed.get(device, 0.0) + seconds

    def slowed(self, device: int, seconds: float) -> float:
        """Seconds of computing on a device, with what it pays for collectives beside it."""
        owed = self.owed.get(device, 0.0)
        if not owed:
            return seconds
        paid = min(owed, self.context.collectives.interference * seconds)
        self.owed[device] = owed - paid
        return seconds + paid

    def collective(self, work: Work, ready: Ready) -> Made:
        """One task per line of the work's axis; every drawn member waits for it."""
        context = self.context
        groups = context.groups[work.axis]
        seconds = context.collectives.seconds(work.collective, work.size_bytes, groups)
        made: Made = {}
        for members in context.members[work.axis]:
            waits = [task for device in members for task in ready[device]]
            lanes = tuple(context.network(device) for device in members)
            task = self.task(work, lanes, seconds, waits, Kind.COLLECTIVE)
            made.update(dict.fromkeys(members, task))
        for device in made:
            if each := issue_s(context.kinds[device], work.size_bytes):
                self.issued[device] = self.issued.get(device, 0.0) + each
        return made

    def blocking(self, work: Work, ready: Ready) -> Made:
        """A collective that the next op waits for, after what the order puts before it."""
        self.order.before_blocking(self, ready)
        return self.collective(work, ready)

    def close_phase(self) -> int:
        """A milestone: all that comes later waits for all that came before."""
        since = 0 if self.barrier is None else self.barrier
        work = Work(Purpose.OTHER, self.phase, stage=self.context.number)
        waits = tuple(range(since, len(self.tasks)))
        self.barrier = self.task(work, (), 0.0, waits, Kind.OTHER)
        self.barriers.append(self.barrier)
        self.host_s = []
        return self.barrier

    # Collectives that nobody waits for yet.

    def write(self, deferred: Deferred) -> None:
        """Write a collective that was put off."""
        queue = self.gathers if deferred.is_gather else self.reductions
        queue.remove(deferred)
        deferred.write()

    def put_off(self, deferred: Deferred) -> None:
        """Let a reduction wait for a moment when the network has nothing more urgent to do."""
        self.reductions.append(deferred)
        self.order.queued(self)

    def drain(self) -> None:
        """Write all reductions that were put off."""
        while self.reductions:
            self.write(self.order.next_reduction(self))

    # Memory.

    def ready(self, buffers: Iterable[Buffer]) -> Ready:
        """On every device the tasks that make some buffers."""
        ready: Ready = {device: [] for device in self.context.devices}
        for buffer in buffers:
            for device, task in buffer.made_by.items():
                ready[device].append(task)
        return ready

    def take(self, buffer: Buffer, made: Made) -> None:
        """A buffer has memory from the start of the tasks that make it."""
        for device, task in made.items():
            memory = self.context.index[device]
            takes = self.tasks[task].takes
            takes[memory] = takes.get(memory, 0.0) + buffer.size_bytes
            buffer.last_use[device] = max(task, buffer.last_use.get(device, -1))
        self.occupied.append(buffer)

    def temporary(self, size_bytes: float, made: Made) -> None:
        """Memory that tasks need only while they run."""
        for device, task in made.items():
            memory = self.context.index[device]
            for effects in (self.tasks[task].takes, self.tasks[task].gives):
                effects[memory] = effects.get(memory, 0.0) + size_bytes

    def use(self, buffers: Iterable[Buffer], made: Made) -> None:
        """Buffers are needed until some tasks end."""
        for buffer in buffers:
            owner = buffer.owner()
            for device, task in made.items():
                owner.last_use[device] = max(task, owner.last_use.get(device, -1))

    def note(self, op: Op, device: int, split: Split, cost: OpCost) -> None:
        """Remember what an op costs on the first device."""
        if device == self.context.devices[0]:
            self.splits[op.name] = split
            self.costs[op.name] = cost

    def build(self, resident: dict[int, float], stages: tuple[str, ...] = ()) -> Program:
        """The program; `resident` are the bytes that always lie on each device."""
        context = self.context
        builder = ProgramBuilder()
        builder.values = self.values
        builder.stages = stages or (context.stage.name,) * (context.number + 1)
        names = [context.cluster.devices[device].name for device in context.devices]
        for name in names:
            builder.lane(name, "device")
        for name in names:
            builder.lane(f"{name} net", "link")
        for device, name in zip(context.devices, names, strict=True):
            builder.memory(name, float(context.kinds[device].memory_bytes))
        self._give_back()
        numbers = [builder.group(groups) for groups in context.groups]
        start = builder.add(
            Work(Purpose.RESIDENT, stage=context.number), (), 0.0,
            memory=[(context.index[d], size, 0.0) for d, size in resident.items()],
        )  # fmt: skip
        for number, task in enumerate(self.tasks):
            memories = sorted({*task.takes, *task.gives})
            builder.add(
                _in_groups(task.work, numbers),
                task.lanes,
                task.seconds,
                _waits(task, start, self._begin(number)),
                [(m, task.takes.get(m, 0.0), -task.gives.get(m, 0.0)) for m in memories],
                task.kind,
            )
        return builder.build()

    def _begin(self, task: int) -> int:
        """The barrier before a task; -1 before the first."""
        at = bisect_left(self.barriers, task)
        return self.barriers[at - 1] if at else -1

    def _give_back(self) -> None:
        stays = set(map(id, self.kept))
        for buffer in self.occupied:
            if id(buffer) in stays:
                continue
            for device, last in buffer.last_use.items():
                memory = self.context.index[device]
                gives = self.tasks[last].gives
                gives[memory] = gives.get(memory, 0.0) + buffer.size_bytes


def _waits(task: StageTask, start: int, begin: int) -> list[int | tuple[int, float]]:
    """What a task waits for: others, and its host since the phase began (`begin`, or the start)."""
    waits: list[int | tuple[int, float]] = [wait + 1 for wait in task.waits]
    if not waits:
        waits = [start]
    if task.launched_s > 0:
        since = start if begin < 0 else begin + 1
        waits = [wait for wait in waits if wait != since] + [(since, task.launched_s)]
    return waits


def _in_groups(work: Work, numbers: list[int]) -> Work:
    """The work with the number of its groups, which only the program has."""
    if work.axis < 0 or work.group == numbers[work.axis]:
        return work
    return replace(work, group=numbers[work.axis])


def after(made: Made) -> Ready:
    """Wait, on every device, for the task that made something there."""
    return {device: [task] for device, task in made.items()}


def last_of(ready: Ready) -> Made:
    """The latest task of each device."""
    return {device: max(tasks) for device, tasks in ready.items()}
