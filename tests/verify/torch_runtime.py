"""An oracle: torch's pipeline runtime with symbols instead of tensors, queues instead of a network.

It shares no code with the verifier. Every rank runs its row; messages go through queues and are
matched by their place, whatever they hold; what is computed is a term, so that a wrong message, a
wrong loss or a missing gradient shows in the terms at the end.
"""

from collections import Counter, defaultdict
from typing import Any

from partita.schedules.torch_csv import TorchAction, TorchSchedule


class RuntimeRefusalError(Exception):
    """The runtime would raise, hang, or be wrong."""


def runs(schedule: TorchSchedule, *, in_order: bool = False) -> bool:
    """Does a `compute_comms` schedule run to its end with the right gradients?"""
    try:
        _Run(schedule, in_order).check()
    except RuntimeRefusalError:
        return False
    return True


def need(holds: object, why: str = "") -> None:
    if not holds:
        raise RuntimeRefusalError(why)


class _Run:
    def __init__(self, schedule: TorchSchedule, in_order: bool) -> None:
        need(all(row and all(row) for row in schedule.rows), "an empty row or cell")
        self.rows = [[action for cell in row for action in cell] for row in schedule.rows]
        self.in_order = in_order
        actions = [action for row in self.rows for action in row]
        self.stages = 1 + max(action.stage for action in actions)
        self.count = 1 + max((-1 if a.microbatch is None else a.microbatch) for a in actions)
        self.rank_of: dict[int, int] = {}
        for rank, row in enumerate(self.rows):
            for action in row:
                need(self.rank_of.setdefault(action.stage, rank) == rank, "a stage on two ranks")
        need(len(self.rank_of) == self.stages, "a stage is nowhere")
        self.fsdp = {a.stage for a in actions if a.kind in ("UNSHARD", "RESHARD")}
        self.sent: dict[tuple[int, int], list[Any]] = defaultdict(list)
        self.asked: dict[tuple[int, int], int] = Counter()
        self.stream: dict[tuple[int, int], list[str]] = defaultdict(list)  # (rank, peer) -> s, r
        self.ended: dict[tuple[int, int], int] = Counter()  # of a stream: how many are done
        self.slots: dict[tuple[str, int, int], tuple[tuple[int, int], int, int]] = {}
        self.local: dict[tuple[str, int, int], Any] = {}
        self.outputs: dict[tuple[int, int], Any] = {}
        self.grads: dict[tuple[int, int], Any] = {}
        self.halves: dict[tuple[int, int], Any] = {}
        self.losses: list[Any] = []
        self.summed: dict[int, Counter[Any]] = defaultdict(Counter)
        self.reduced: dict[int, list[int]] = defaultdict(list)
        self.gathering: set[int] = set()
        self.gathered: set[int] = set()
        self.ran: set[TorchAction] = set()

    def check(self) -> None:
        place = [0] * len(self.rows)
        going = True
        while going:
            going = False
            for rank, row in enumerate(self.rows):
                while place[rank] < len(row) and self.step(rank, row[place[rank]]):
                    place[rank] += 1
                    going = True
            going = self.deliver() or going
        need(place == list(map(len, self.rows)), "it hangs")
        need(not self.slots and not self.gathering and not self.gathered, "something is left over")
        need(all(len(self.sent[way]) == n for way, n in self.asked.items()), "a receive is left")
        need(all(self.asked[way] == len(n) for way, n in self.sent.items()), "a send is left")
        if self.in_order:
            need(all(self.ended[end] == len(ops) for end, ops in self.stream.items()), "it hangs")
        if self.reduced:
            need(all(self.reduced[s] == [self.count] for s in range(self.stages)), "not reduced")
        for stage in range(self.stages):
            need(self.summed[stage] == self.wanted(stage), "wrong gradients")

    def wanted(self, stage: int) -> Counter[Any]:
        terms: Counter[Any] = Counter()
        for m in range(self.count):
            values: list[Any] = [("x", m)]
            for s in range(self.stages):
                values.append(("F", s, m, values[-1]))
            grad: Any = ("loss", values[-1])
            for s in reversed(range(stage + 1, self.stages)):
                grad = ("B", s, m, values[s + 1], grad)
            terms[values[stage + 1], grad] += 1
        return terms

    def deliver(self) -> bool:
        """Messages of a pair of ranks pass when both ends have come to them."""
        moved = False
        for a, b in list(self.stream):
            mine, theirs = self.stream[a, b], self.stream[b, a]
            i, j = self.ended[a, b], self.ended[b, a]
            if i < len(mine) and j < len(theirs) and mine[i] != theirs[j]:
                self.ended[a, b] += 1
                self.ended[b, a] += 1
                moved = True
        return moved

    def step(self, rank: int, action: TorchAction) -> bool:
        """Run an action; False while it waits."""
        stage, kind, m = action
        if kind in ("UNSHARD", "RESHARD", "REDUCE_GRAD"):
            self.whole(stage, kind)
            return True
        assert m is not None
        if kind.startswith("SEND"):
            to = stage + 1 if kind == "SEND_F" else stage - 1
            need(0 <= to < self.stages and self.rank_of[to] != rank, "no other end")
            if kind == "SEND_F":
                need((stage, m) in self.outputs, "nothing to send")
                value = self.outputs[stage, m]
            else:
                need((stage, m) in self.grads, "nothing to send")
                value = self.grads.pop((stage, m))
            self.sent[rank, self.rank_of[to]].append(value)
            self.stream[rank, self.rank_of[to]].append("s")
            need(action not in self.ran, "sent twice")
            self.ran.add(action)
            return True
        if kind.startswith("RECV"):
            source = stage - 1 if kind == "RECV_F" else stage + 1
            need(0 <= source < self.stages and self.rank_of[source] != rank, "no other end")
            way = (self.rank_of[source], rank)
            need((kind[-1], stage, m) not in self.slots, "received twice")
            self.stream[rank, way[0]].append("r")
            number = len(self.stream[rank, way[0]])
            self.slots[kind[-1], stage, m] = (way, self.asked[way], number)
            self.asked[way] += 1
            return True
        return self.compute(rank, action, stage, kind, m)

    def whole(self, stage: int, kind: str) -> None:
        if kind == "UNSHARD":
            need(stage not in self.gathered | self.gathering, "gathered twice")
            self.gathering.add(stage)
        elif kind == "RESHARD":
            need(stage in self.gathered and stage not in self.gathering, "not gathered")
            self.gathered.remove(stage)
        else:
            self.reduced[stage].append(sum(self.summed[stage].values()))

    def compute(self, rank: int, action: TorchAction, stage: int, kind: str, m: int) -> bool:
        way, source = ("F", stage - 1) if kind == "F" else ("B", stage + 1)
        value: Any = ("x", m)
        if kind != "W" and 0 <= source < self.stages:
            if self.rank_of[source] == rank:
                need((way, stage, m) in self.local, "nothing was handed over")
                value = self.local[way, stage, m]
            else:
                need((way, stage, m) in self.slots, "computing before receiving")
                pair, number, op = self.slots[way, stage, m]
                if len(self.sent[pair]) <= number:
                    return False
                if self.in_order and self.ended[pair[1], pair[0]] < op:
                    return False
                value = self.sent[pair][number]
                del self.slots[way, stage, m]
        if stage in self.fsdp:
            if stage in self.gathering:
                self.gathering.remove(stage)
                self.gathered.add(stage)
            need(stage in self.gathered, "computing on shards")
        need(action not in self.ran, "run twice")
        self.ran.add(action)
        if kind == "F":
            self.outputs[stage, m] = output = ("F", stage, m, value)
            self.local["F", stage + 1, m] = output
            if stage == self.stages - 1:
                self.losses.append(("loss", output))
        elif kind == "W":
            need((stage, m) in self.halves, "no backward before")
            self.summed[stage][self.halves.pop((stage, m))] += 1
        else:
            need((stage, m) in self.outputs, "no forward before")
            output = self.outputs.pop((stage, m))
            if stage == self.stages - 1:
                need(m < len(self.losses), "no loss")
                value = self.losses[m]
            self.grads[stage, m] = self.local["B", stage - 1, m] = ("B", stage, m, output, value)
            if kind == "B":
                self.summed[stage][output, value] += 1
            else:
                self.halves[stage, m] = (output, value)
        return True
