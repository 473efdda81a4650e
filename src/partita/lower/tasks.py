"""Tasks of a stage while they are written: lanes, waits, and memory from first use to last.

Each device drawn has a compute lane and a network lane. Memory is taken where a tensor is made and
given back after its last use; a view keeps what it looks at.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field

from partita.cluster import Cluster
from partita.costs.collectives import Collectives, Groups
from partita.costs.layouts import Layout
from partita.graph.record import Graph
from partita.plans import Stage
from partita.program import Kind, Program, ProgramBuilder

Ready = dict[int, list[int]]  # per device the tasks to wait for
Made = dict[int, int]  # per device the task that makes something


@dataclass(eq=False)
class Buffer:
    """A tensor in one layout: which task makes it on each device, and what it occupies."""

    name: str
    layout: Layout
    size_bytes: float
    made_by: Made = field(default_factory=dict)
    root: "Buffer | None" = None  # views occupy nothing of their own
    last_use: Made = field(default_factory=dict)

    def owner(self) -> "Buffer":
        """The buffer whose memory this one is a view of."""
        return self.root.owner() if self.root is not None else self


@dataclass
class StageTask:
    """A task before the program is built."""

    block: str
    lanes: tuple[int, ...]
    seconds: float
    waits: tuple[int, ...]
    kind: Kind
    takes: dict[int, float] = field(default_factory=dict)  # memory -> bytes from the start on
    gives: dict[int, float] = field(default_factory=dict)  # memory -> bytes back at the end


class TaskWriter(ABC):
    """Writes the tasks of a stage's drawn devices, and builds their program."""

    def __init__(
        self, stage: Stage, graph: Graph, cluster: Cluster, devices: tuple[int, ...],
        collectives: Collectives,
    ) -> None:  # fmt: skip
        self.graph, self.cluster, self.collectives = graph, cluster, collectives
        self.devices = devices
        self.kinds = {device: cluster.kind_of(device) for device in devices}
        self.place = {device: i for i, device in enumerate(devices)}
        self.groups: list[Groups] = [stage.mesh.groups(i) for i in range(len(stage.mesh.axes))]
        self.members = [  # per axis: the drawn devices of each line that has any
            [drawn for line in lines if (drawn := [d for d in line if d in self.place])]
            for lines in self.groups
        ]
        self.tasks: list[StageTask] = []
        self.ends: list[float] = []  # of every task, if lanes run them in this order
        self.free = [0.0] * (2 * len(devices))  # of every lane
        self.made: list[Buffer] = []  # every buffer that occupies memory of its own

    def _group_tasks(self, label: str, name: str, size: float, axis: int, ready: Ready) -> Made:
        """One collective task per line of the axis; every drawn member waits for it."""
        seconds = self.collectives.seconds(name, size, self.groups[axis])
        made = {}
        for members in self.members[axis]:
            waits: list[int] = []
            for device in members:
                waits.extend(ready[device])
            lanes = tuple(self._network(device) for device in members)
            task = self._task(label, lanes, seconds, waits, Kind.COLLECTIVE)
            made.update(dict.fromkeys(members, task))
        return made

    def _task(
        self, block: str, lanes: tuple[int, ...], seconds: float, waits: Iterable[int], kind: Kind
    ) -> int:
        known = tuple(sorted(set(waits)))
        self.tasks.append(StageTask(block, lanes, seconds, known, kind))
        begin = max((self.ends[task] for task in known), default=0.0)
        for lane in lanes:
            begin = max(begin, self.free[lane])
        for lane in lanes:
            self.free[lane] = begin + seconds
        self.ends.append(begin + seconds)
        return len(self.tasks) - 1

    def _ready(self, buffers: Iterable[Buffer]) -> Ready:
        ready: Ready = {device: [] for device in self.devices}
        for buffer in buffers:
            for device, task in buffer.made_by.items():
                ready[device].append(task)
        return ready

    def _take(self, buffer: Buffer, made: Made) -> None:
        for device, task in made.items():
            memory = self.place[device]
            takes = self.tasks[task].takes
            takes[memory] = takes.get(memory, 0.0) + buffer.size_bytes
            buffer.last_use[device] = max(task, buffer.last_use.get(device, -1))
        self.made.append(buffer)

    def _use(self, buffers: Iterable[Buffer], made: Made) -> None:
        for buffer in buffers:
            owner = buffer.owner()
            for device, task in made.items():
                owner.last_use[device] = max(task, owner.last_use.get(device, -1))

    def _build(self) -> Program:
        builder = ProgramBuilder()
        names = [self.cluster.devices[device].name for device in self.devices]
        for name in names:
            builder.lane(name, "device")
        for name in names:
            builder.lane(f"{name} net", "link")
        for device, name in zip(self.devices, names, strict=True):
            builder.memory(name, float(self.kinds[device].memory_bytes))
        for buffer in self.made:
            if buffer.name in self.graph.outputs:
                continue  # what the model returns stays
            for device, last in buffer.last_use.items():
                memory = self.place[device]
                gives = self.tasks[last].gives
                gives[memory] = gives.get(memory, 0.0) + buffer.size_bytes
        start = builder.add(
            "parameters, states and workspace", (), 0.0,
            memory=[(m, self._static_bytes(d), 0.0) for m, d in enumerate(self.devices)],
        )  # fmt: skip
        for task in self.tasks:
            memories = sorted({*task.takes, *task.gives})
            builder.add(
                task.block,
                task.lanes,
                task.seconds,
                [wait + 1 for wait in task.waits] or [start],
                [(m, task.takes.get(m, 0.0), -task.gives.get(m, 0.0)) for m in memories],
                task.kind,
            )
        return builder.build()

    @abstractmethod
    def _static_bytes(self, device: int) -> float:
        """What lies on a device all the time."""

    def _lane(self, device: int) -> int:
        return self.place[device]

    def _network(self, device: int) -> int:
        return len(self.devices) + self.place[device]


def after(made: Made) -> Ready:
    """Wait, on every device, for the task that made something there."""
    return {device: [task] for device, task in made.items()}


def last_of(ready: Ready) -> Made:
    """The latest task of each device."""
    return {device: max(tasks) for device, tasks in ready.items()}
