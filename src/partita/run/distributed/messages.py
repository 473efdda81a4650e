"""The messages between stages: who sends which part of which tensor to whom, numbered by link.

Worked out once from the program, by every rank alike, so that both ends of a directed link agree on
the order and the number of every message on it. A rank posts the receives of the block that it is
about to run and of the one after it, not all of them: the next message then arrives while this
block computes, and no receive sits on a stream long before its send.
"""

from collections import defaultdict
from dataclasses import dataclass

import torch

from partita.meaning import Purpose, Value, Work
from partita.plans import Stage
from partita.program import Program
from partita.run.distributed.boxes import Box, box, inside, put_together, routes, shape_of
from partita.run.distributed.comm import Communicator, Pending
from partita.run.distributed.held import Shapes

T = torch.Tensor


@dataclass(frozen=True)
class Message:
    """One part of one tensor from a rank to a rank; `number` counts on their directed link."""

    task: int  # the send
    tensor: int  # which of the values that are sent
    source: int
    target: int
    part: Box
    number: int


@dataclass(frozen=True, eq=False)
class MessageTable:
    """All messages of a step, by their send task."""

    by_send: dict[int, tuple[Message, ...]]
    send_of: dict[int, int]  # by receive task
    links: dict[tuple[int, int], tuple[Message, ...]]


def message_table(
    program: Program, stages: tuple[Stage, ...], rank_of: dict[int, int], shapes: Shapes
) -> MessageTable:
    """The messages of a program in its order."""
    by_send: dict[int, tuple[Message, ...]] = {}
    links: dict[tuple[int, int], list[Message]] = defaultdict(list)
    send_of = {int(b): int(a) for a, b in program.pairs.tolist()}
    works = {send: receive for receive, send in send_of.items()}
    for task in sorted(works):
        send, receive = program.work_of(task), program.work_of(works[task])
        assert send is not None, "a send says what it is"
        assert receive is not None, "so does its receive"
        messages = []
        for k, (read, written) in enumerate(zip(send.reads, receive.writes, strict=True)):
            have, need = program.values[read], program.values[written]
            for source, target, part in routes(
                shapes.shape(have.tensor), stages[send.stage].mesh, have.layout,
                stages[receive.stage].mesh, need.layout,
            ):  # fmt: skip
                link = (rank_of[source], rank_of[target])
                message = Message(task, k, *link, part, len(links[link]))
                messages.append(message)
                if link[0] != link[1]:
                    links[link].append(message)
        by_send[task] = tuple(messages)
    return MessageTable(by_send, send_of, {link: tuple(each) for link, each in links.items()})


class Mailbox:
    """What a rank has posted and kept within one step."""

    def __init__(
        self, program: Program, stages: tuple[Stage, ...], table: MessageTable, shapes: Shapes,
        comm: Communicator, dtypes: dict[str, torch.dtype], devices: tuple[int, ...],
    ) -> None:  # fmt: skip
        self.program, self.stages, self.table, self.shapes = program, stages, table, shapes
        self.comm, self.dtypes, self.devices = comm, dtypes, devices
        self.posted: dict[Message, Pending] = {}
        self.next: dict[tuple[int, int], int] = defaultdict(int)
        self.sending: list[Pending] = []
        self.local: dict[Message, T] = {}

    def _value(self, work: Work, k: int) -> Value:
        return self.program.values[(work.reads or work.writes)[k]]

    def send(self, task: int, work: Work, tensors: list[T]) -> None:
        """Send this rank's parts of what leaves a block."""
        rank = self.comm.rank
        mesh = self.stages[work.stage].mesh
        for message in self.table.by_send[task]:
            if message.source != rank:
                continue
            value = self._value(work, message.tensor)
            own = box(
                self.shapes.shape(value.tensor), value.layout, mesh.axes,
                mesh.place(self.devices[rank]),
            )  # fmt: skip
            part = tensors[message.tensor].detach()[inside(message.part, own)]
            if message.target == rank:
                self.local[message] = part
            else:
                self.sending.append(self.comm.send(part, message.target, message.number))
        self.sending = [each for each in self.sending if not _is_done(each)]

    def post(self, receive: int) -> None:
        """Post the receives of a task, and those before them on their links."""
        for message in self._incoming(receive):
            link = (message.source, message.target)
            while self.next[link] <= message.number:
                self._post(self.table.links[link][self.next[link]])
                self.next[link] += 1

    def _post(self, message: Message) -> None:
        work = self.program.work_of(message.task)
        assert work is not None, "a send says what it is"
        dtype = self.dtypes[
            self.shapes.origin.get(name := self._value(work, message.tensor).tensor, name)
        ]
        like = torch.empty(shape_of(message.part), dtype=dtype, device=self.comm.device)
        self.posted[message] = self.comm.receive(like, message.source, message.number)

    def _incoming(self, receive: int) -> list[Message]:
        messages = self.table.by_send[self.table.send_of[receive]]
        return [m for m in messages if m.target == self.comm.rank != m.source]

    def receive(self, task: int, work: Work) -> list[tuple[Value, T]]:
        """What came in for a receive, put together."""
        self.post(task)
        mesh = self.stages[work.stage].mesh
        place = mesh.place(self.devices[self.comm.rank])
        parts: dict[int, list[tuple[Box, T]]] = defaultdict(list)
        for message in self.table.by_send[self.table.send_of[task]]:
            if message.target != self.comm.rank:
                continue
            if message.source == message.target:
                tensor = self.local.pop(message)
            else:
                tensor = self.posted.pop(message).wait()
            parts[message.tensor].append((message.part, tensor))
        received = []
        for k, pieces in sorted(parts.items()):
            value = self.program.values[work.writes[k]]
            needed = box(self.shapes.shape(value.tensor), value.layout, mesh.axes, place)
            received.append((value, put_together(pieces, needed, pieces[0][1])))
        return received

    def finish(self) -> None:
        """Wait until everything is sent; the next step counts anew."""
        for pending in self.sending:
            pending.wait()
        self.sending.clear()
        self.next.clear()


def _is_done(pending: Pending) -> bool:
    return pending.handle is None or bool(pending.handle.is_completed())


def receives_of(program: Program, task: int) -> tuple[int, ...]:
    """The receives that a block waits for."""
    return tuple(
        other
        for other, _ in program.waits_of(task)
        if (work := program.work_of(other)) is not None and work.purpose is Purpose.RECEIVE
    )
