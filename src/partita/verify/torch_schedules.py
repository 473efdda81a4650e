"""Will torch's pipeline runtime run this schedule to its end, and compute what it should?

torch checks little of a `compute_only` schedule and nothing of a `compute_comms` one: what is wrong
there hangs, or computes wrong gradients without a word. Checked here is what the runtime relies on:

    complete     every stage on one rank; of every stage and micro-batch one forward and one
                 backward (B, or I and W), in that order
    losses       the last stage runs forwards in the order of micro-batches: torch numbers losses
                 as they are made and looks them up by micro-batch
    parameters   a stage with UNSHARD computes only while gathered, and is let go at the end
    gradients    REDUCE_GRAD once, behind the last B or W
    messages     every result for another rank is sent once, after it is computed, and received
                 once, before it is read; from one rank to another in one order, since messages are
                 matched by their place and nothing else
    waits        nobody waits in a circle

Sends and receives are posted and do not block; a compute waits for the receive it reads. That is
gloo. NCCL runs the messages between two ranks, both directions, one after the other on one stream:
`in_order` asks for no circle with these waits too. torch's older `PipelineScheduleMulti` has no
messages of its own; each column is a step, in which ranks exchange what was computed and wait for
each other: see `lockstep_refusals`.

Each refusal names row, cell and action. Of circles one of the shortest is shown.
"""

from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice, pairwise

from partita.schedules.torch_csv import CellPlace, TorchAction, TorchSchedule

SHOWN = 20  # refusals of one schedule; the first is what to correct
_TRIED_STARTS = 300  # of which the shortest circle is searched


@dataclass(frozen=True, slots=True)
class ScheduleRefusal:
    """What is wrong with a schedule, where, and what to do."""

    where: str
    wrong: str
    fix: str

    def __str__(self) -> str:
        return f"{self.where}{': ' * bool(self.where)}{self.wrong}; {self.fix}"


@dataclass(frozen=True, slots=True)
class TorchVerdict:
    """What torch's runtimes would make of a schedule; no refusals: it runs and is right.

    `in_order` are the refusals where the messages of two ranks run one at a time, as with NCCL;
    `lockstep` those of the older `PipelineScheduleMulti`.
    """

    refusals: tuple[ScheduleRefusal, ...]
    in_order: tuple[ScheduleRefusal, ...]
    lockstep: tuple[ScheduleRefusal, ...]
    notes: tuple[str, ...]


def verify_torch_schedule(schedule: TorchSchedule) -> TorchVerdict:
    """Check a schedule for all of torch's runtimes."""
    refusals = torch_refusals(schedule)
    in_order = refusals or torch_refusals(schedule, in_order=True)
    lockstep = refusals or lockstep_refusals(schedule)
    return TorchVerdict(refusals, in_order, lockstep, _notes(schedule))


def torch_refusals(
    schedule: TorchSchedule, *, in_order: bool = False
) -> tuple[ScheduleRefusal, ...]:
    """Why torch's runtime would stop, hang or be wrong; the first ones, nothing if it is right."""
    for check in (_check_rows, _check_stages, _check_complete, _check_rank_rows):
        refusals = tuple(islice(check(schedule), SHOWN))
        if refusals:
            return refusals
    messages = _Messages(schedule)
    if schedule.form == "compute_comms":
        refusals = tuple(islice(messages.refusals(), SHOWN))
        if refusals:
            return refusals
    return tuple(_check_waits(schedule, messages, in_order))


def lockstep_refusals(schedule: TorchSchedule) -> tuple[ScheduleRefusal, ...]:
    """Why `PipelineScheduleMulti`, which exchanges results column by column, would not do."""
    return tuple(islice(_check_lockstep(schedule), SHOWN))


# --- rows and stages ------------------------------------------------------------------------------


def _check_rows(schedule: TorchSchedule) -> Iterator[ScheduleRefusal]:
    comms = schedule.form == "compute_comms"
    for rank, row in enumerate(schedule.rows):
        where = f"row {rank + 1} (rank {rank})"
        if not any(row):
            yield ScheduleRefusal(where, "has no action", "give the rank a stage, or no row")
        for column, cell in enumerate(row) if comms else ():
            if not cell:
                yield ScheduleRefusal(
                    f"{where}, cell {column + 1}", "is empty beside messages",
                    "leave it out: with messages there are no steps to wait for",
                )  # fmt: skip


def _check_stages(schedule: TorchSchedule) -> Iterator[ScheduleRefusal]:
    ranks: dict[int, CellPlace] = {}
    for place in schedule.places():
        first = ranks.setdefault(place.action.stage, place)
        if first.rank != place.rank:
            yield _refusal(
                place, f"stage {place.action.stage} is on rank {first.rank} too",
                "run a stage on one rank",
            )  # fmt: skip
    missing = next((s for s in range(len(ranks) + 1) if s not in ranks), 0)
    if missing < len(ranks):
        yield ScheduleRefusal("", f"stage {missing} is nowhere", "number stages from 0")


def _check_complete(schedule: TorchSchedule) -> Iterator[ScheduleRefusal]:
    """One forward and one backward of everything, no action twice."""
    seen: dict[TorchAction, CellPlace] = {}
    done: dict[tuple[int, str], set[int]] = defaultdict(set)
    for place in schedule.places():
        action = place.action
        if action.microbatch is None:
            continue
        if action in seen:
            first = seen[action].column + 1
            yield _refusal(place, f"is there already in cell {first}", "run everything once")
        seen[action] = place
        done[action.stage, action.kind].add(action.microbatch)
    count = schedule.num_microbatches
    for stage in range(schedule.num_stages):
        forward, whole = done[stage, "F"], done[stage, "B"]
        data, weight = done[stage, "I"], done[stage, "W"]
        for group, what in (
            (forward, "F"), (whole | data, "B, or I and W,"), (whole | weight, "B, or I and W,"),
        ):  # fmt: skip
            if len(group) < count:
                microbatch = next(m for m in range(count) if m not in group)
                yield ScheduleRefusal(
                    "", f"stage {stage} has no {what} of micro-batch {microbatch}",
                    f"give every stage a forward and a backward of all {count}",
                )  # fmt: skip
                break
        for microbatch in sorted(whole & (data | weight)):
            action = TorchAction(stage, "B", microbatch)
            yield _refusal(seen[action], "is there as I or W as well", "keep B, or I and W")


def _check_rank_rows(schedule: TorchSchedule) -> Iterator[ScheduleRefusal]:
    """What can be seen in one row: order of F, B, I, W, losses, parameters, gradients."""
    last = schedule.num_stages - 1
    count = schedule.num_microbatches
    reduces = any(place.action.kind == "REDUCE_GRAD" for place in schedule.places())
    for rank, row in enumerate(schedule.rows):
        here = {action.stage for cell in row for action in cell}
        stages = {stage: _StageState(stage, count, last) for stage in sorted(here)}
        for column, cell in enumerate(row):
            for action in cell:
                place = CellPlace(rank, column, action)
                yield from stages[action.stage].passed(place, stages)
        for state in stages.values():
            yield from state.ended(rank, reduces)


@dataclass(slots=True)
class _StageState:
    """A stage while its row is read."""

    stage: int
    num_microbatches: int
    last: int
    done: dict[str, set[int]] = field(default_factory=lambda: defaultdict(set))
    gathered: bool | None = None  # None: no UNSHARD or RESHARD was met
    used: bool = False  # since it was gathered
    computed: CellPlace | None = None  # while no UNSHARD was met
    reduced: bool = False

    def passed(
        self, place: CellPlace, stages: dict[int, "_StageState"]
    ) -> Iterator[ScheduleRefusal]:
        kind, microbatch = place.action.kind, place.action.microbatch
        if place.action.computes:
            assert microbatch is not None
            yield from self._computes(place, stages, microbatch)
            self.done[kind].add(microbatch)
        elif kind == "UNSHARD":
            if self.gathered:
                yield _refusal(place, "is gathered already", "RESHARD it before")
            elif self.gathered is None and self.computed is not None:
                yield _refusal(
                    place, f"stands behind {self.computed.action}, which needs it too",
                    "gather the stage before its first action",
                )  # fmt: skip
            self.gathered, self.used = True, False
        elif kind == "RESHARD":
            if not self.gathered or not self.used:
                wrong = "was not used since UNSHARD" if self.gathered else "is not gathered"
                yield _refusal(place, wrong, "UNSHARD, compute, then RESHARD")
            self.gathered = False
        elif kind == "REDUCE_GRAD":
            if self.reduced:
                yield _refusal(place, "is there twice", "reduce the gradients once")
            if self._backwards() < self.num_microbatches:
                yield _refusal(
                    place, f"stands before the last backward of stage {self.stage}",
                    "put it behind the last B or W",
                )  # fmt: skip
            self.reduced = True

    def ended(self, rank: int, reduces: bool) -> Iterator[ScheduleRefusal]:
        where = f"row {rank + 1} (rank {rank})"
        if self.gathered:
            yield ScheduleRefusal(
                where, f"stage {self.stage} is still gathered at the end",
                f"add {self.stage}RESHARD: the next step gathers it again",
            )  # fmt: skip
        if reduces and not self.reduced:
            yield ScheduleRefusal(
                where, f"there is no {self.stage}REDUCE_GRAD, and other stages have one",
                f"add it behind the last backward of stage {self.stage}",
            )  # fmt: skip

    def _backwards(self) -> int:
        return len(self.done["B"]) + len(self.done["W"])

    def _computes(
        self, place: CellPlace, stages: dict[int, "_StageState"], microbatch: int
    ) -> Iterator[ScheduleRefusal]:
        action = place.action
        if self.gathered is False:
            yield _refusal(place, f"stage {self.stage} is not gathered", "UNSHARD it before")
        self.used, self.computed = True, self.computed or place
        needed = {"B": "F", "I": "F", "W": "I"}.get(action.kind)
        if needed and microbatch not in self.done[needed]:
            yield _before(place, action._replace(kind=needed))
        if action.kind == "F" and self.stage == self.last and microbatch != len(self.done["F"]):
            yield _refusal(
                place, f"is forward number {len(self.done['F'])} of the last stage",
                "run its micro-batches in order, or number them so: torch finds losses by it",
            )  # fmt: skip
        # Neighbours on one rank hand over without a message.
        before = stages.get(self.stage - 1) if action.kind == "F" else None
        if before is not None and microbatch not in before.done["F"]:
            yield _before(place, action._replace(stage=self.stage - 1))
        after = stages.get(self.stage + 1) if action.kind in ("B", "I") else None
        if after is not None and microbatch not in after.done["B"] | after.done["I"]:
            yield _before(place, TorchAction(self.stage + 1, "B", microbatch), " or I")


def _before(place: CellPlace, needed: TorchAction, more: str = "") -> ScheduleRefusal:
    return _refusal(place, f"stands before {needed}{more}, whose result it reads", "swap them")


def _refusal(place: CellPlace, wrong: str, fix: str) -> ScheduleRefusal:
    return ScheduleRefusal(str(place), wrong, fix)


# --- messages -------------------------------------------------------------------------------------


class _Messages:
    """The messages of a schedule: who makes, sends, receives and reads what.

    A message is named by the action that reads it: stage, F or B, micro-batch.
    """

    def __init__(self, schedule: TorchSchedule) -> None:
        self.rank_of = schedule.rank_of
        self.last = schedule.num_stages - 1
        self.sends: dict[TorchAction, CellPlace] = {}
        self.receives: dict[TorchAction, CellPlace] = {}
        self.makers: dict[TorchAction, CellPlace] = {}
        self.readers: dict[TorchAction, CellPlace] = {}
        for place in schedule.places():
            action = place.action
            if action.kind.startswith("SEND"):
                self.sends[self._sent(action, action.kind[-1])] = place
            elif action.kind.startswith("RECV"):
                self.receives[action._replace(kind=action.kind[-1])] = place
            elif action.kind in ("F", "B", "I"):
                way = "F" if action.kind == "F" else "B"
                self._add(self.makers, self._sent(action, way), place)
                self._add(self.readers, action._replace(kind=way), place)

    def _sent(self, action: TorchAction, way: str) -> TorchAction:
        return action._replace(stage=action.stage + (1 if way == "F" else -1), kind=way)

    def _source(self, message: TorchAction) -> int:
        return message.stage + (-1 if message.kind == "F" else 1)

    def _add(
        self, table: dict[TorchAction, CellPlace], message: TorchAction, place: CellPlace
    ) -> None:
        """Keep what passes from one rank to another."""
        ends = {message.stage, self._source(message)}
        if ends <= self.rank_of.keys() and len({self.rank_of[end] for end in ends}) == 2:
            table[message] = place

    def refusals(self) -> Iterator[ScheduleRefusal]:
        """Messages that are missing, out of place, or matched with others."""
        for table in (self.sends, self.receives):
            for message, place in table.items():
                if message not in self.readers:
                    ends = {message.stage, self._source(message)}
                    here = ends <= self.rank_of.keys()
                    why = "both stages are on one rank" if here else "there is no such stage"
                    yield _refusal(place, f"has no other end: {why}", "leave it out")
        for message, reader in self.readers.items():
            yield from self._missing(message, reader)
        yield from self._out_of_order()

    def _missing(self, message: TorchAction, reader: CellPlace) -> Iterator[ScheduleRefusal]:
        source = self._source(message)
        send = TorchAction(source, f"SEND_{message.kind}", message.microbatch)
        receive = message._replace(kind=f"RECV_{message.kind}")
        maker = self.makers[message]
        for table, action, on in (
            (self.sends, send, self.rank_of[source]), (self.receives, receive, reader.rank),
        ):  # fmt: skip
            if message not in table:
                yield _refusal(
                    reader, f"there is no {action} on rank {on}",
                    f"add it {'after ' + str(maker.action) if table is self.sends else 'before'}",
                )  # fmt: skip
        sent, received = self.sends.get(message), self.receives.get(message)
        if sent is not None and sent.column < maker.column:
            yield _refusal(sent, f"stands before {maker.action}, which makes it", "swap them")
        if received is not None and received.column > reader.column:
            yield _refusal(received, f"stands behind {reader.action}, which reads it", "swap them")

    def _out_of_order(self) -> Iterator[ScheduleRefusal]:
        """Messages from one rank to another, sent in one order and received in another."""
        pairs: dict[tuple[int, int], list[TorchAction]] = defaultdict(list)
        for message, sent in self.sends.items():
            if message in self.receives:
                pairs[sent.rank, self.receives[message].rank].append(message)
        for (source, target), messages in sorted(pairs.items()):
            received = sorted(messages, key=lambda m: self.receives[m].column)
            for number, (one, other) in enumerate(zip(messages, received, strict=True)):
                if one != other:
                    yield _refusal(
                        self.receives[other],
                        f"is message {number + 1} from rank {source} to rank {target}, "
                        f"and rank {source} sends {self.sends[one].action} then "
                        f"(its cell {self.sends[one].column + 1})",
                        "receive in the order of the sends",
                    )  # fmt: skip
                    break


# --- waits ----------------------------------------------------------------------------------------


class _Waits:
    """Who waits for whom: cells by row, and the moments in which messages pass.

    `edges[n]` are (what n waits for, whether a message is waited for).
    """

    def __init__(self, schedule: TorchSchedule, messages: _Messages, in_order: bool) -> None:
        self.schedule = schedule
        self.starts = [0]
        for row in schedule.rows:
            self.starts.append(self.starts[-1] + len(row))
        self.edges: list[list[tuple[int, bool]]] = [[] for _ in range(self.starts[-1])]
        for start, end in pairwise(self.starts):
            for cell in range(start + 1, end):
                self.edges[cell].append((cell - 1, False))
        if schedule.form == "compute_only":
            for message, reader in messages.readers.items():
                self._wait(reader, self._cell(messages.makers[message]))
            return
        passing = {message: self._pass(messages, message) for message in messages.readers}
        for message, reader in messages.readers.items():
            self._wait(reader, passing[message])
        if in_order:
            self._one_at_a_time(messages, passing)

    def _cell(self, place: CellPlace) -> int:
        return self.starts[place.rank] + place.column

    def _wait(self, place: CellPlace, other: int) -> None:
        self.edges[self._cell(place)].append((other, True))

    def _pass(self, messages: _Messages, message: TorchAction) -> int:
        ends = (messages.sends[message], messages.receives[message])
        self.edges.append([(self._cell(end), False) for end in ends])
        return len(self.edges) - 1

    def _one_at_a_time(self, messages: _Messages, passing: dict[TorchAction, int]) -> None:
        """On each end of each pair of ranks a message waits for the one before it."""
        streams: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
        for message, number in passing.items():
            sent, received = messages.sends[message], messages.receives[message]
            streams[sent.rank, received.rank].append((sent.column, number))
            streams[received.rank, sent.rank].append((received.column, number))
        for stream in streams.values():
            stream.sort()
            for (_, first), (_, second) in pairwise(stream):
                self.edges[second].append((first, True))

    def stuck(self) -> set[int]:
        """What never happens."""
        left = [len(edges) for edges in self.edges]
        after: list[list[int]] = [[] for _ in self.edges]
        for number, edges in enumerate(self.edges):
            for other, _ in edges:
                after[other].append(number)
        ready = deque(number for number, count in enumerate(left) if not count)
        while ready:
            for number in after[ready.popleft()]:
                left[number] -= 1
                if not left[number]:
                    ready.append(number)
        return {number for number, count in enumerate(left) if count}

    def circle(self, stuck: set[int]) -> list[int]:
        """A shortest circle of waits, counted in messages; each waits for the one behind it."""
        waiting = [n for n in sorted(stuck) if any(m and o in stuck for o, m in self.edges[n])]
        best: list[int] = []
        fewest = len(self.edges) + 1
        for start in waiting[:_TRIED_STARTS]:
            path, fewest = self._round(start, stuck, fewest)
            best = path or best
        return best

    def _round(self, start: int, stuck: set[int], limit: int) -> tuple[list[int], int]:
        """The way from a node to itself over the fewest messages, if there is one below a limit."""
        distance: dict[int, int] = {start: 0}
        before: dict[int, int] = {}
        queue, end = deque([start]), start  # of the way: what the start is waited for by
        while queue:
            number = queue.popleft()
            if distance[number] >= limit:
                break
            for other, message in self.edges[number]:
                steps = distance[number] + message
                if other == start and steps < limit:
                    end, limit = number, steps
                elif other in stuck and steps < distance.get(other, limit):
                    distance[other], before[other] = steps, number
                    (queue.append if message else queue.appendleft)(other)
        path = [end]
        while path[-1] != start:
            path.append(before[path[-1]])
        return (path[::-1], limit) if end != start else ([], limit)

    def by_message(self, number: int, other: int) -> bool:
        """Does a node wait for another because of a message, and not of its row alone?"""
        return (other, True) in self.edges[number]

    def name(self, number: int) -> str:
        """A cell as people read it; a message is named by its two ends."""
        if number >= self.starts[-1]:
            (send, _), (receive, _) = self.edges[number][:2]
            return f"the message {self.name(send)} to {self.name(receive)}"
        rank = next(r for r in range(len(self.schedule.rows)) if number < self.starts[r + 1])
        column = number - self.starts[rank]
        cell = self.schedule.rows[rank][column]
        text = "+".join(map(str, cell)) or "waiting"
        return f"{text} (rank {rank}, cell {column + 1})"


def _check_waits(
    schedule: TorchSchedule, messages: _Messages, in_order: bool
) -> Iterator[ScheduleRefusal]:
    waits = _Waits(schedule, messages, in_order)
    stuck = waits.stuck()
    if not stuck:
        return
    circle = waits.circle(stuck)
    text = f"a circle of waits: {waits.name(circle[0])}"
    following = [*circle[1:], circle[0]]
    for place, (one, other) in enumerate(zip(circle, following, strict=True)):
        ahead = following[place + 1] if place + 1 < len(following) else None
        which = ", which" if place else ""
        if waits.by_message(one, other):
            text += f"{which} waits for {waits.name(other)}"
        elif ahead is None or waits.by_message(other, ahead):
            text += f", which comes after {waits.name(other)}"
    fix = "compute in an order that follows what is read"
    if schedule.form == "compute_comms":
        fix = "move a receive and its compute behind, or a send before, one of these"
    if in_order:
        fix = "give both ranks their messages in one order, as torch's lowering does"
    yield ScheduleRefusal("", text, fix)


# --- PipelineScheduleMulti ------------------------------------------------------------------------


def _check_lockstep(schedule: TorchSchedule) -> Iterator[ScheduleRefusal]:
    if schedule.form == "compute_comms":
        yield ScheduleRefusal("", "has messages", "PipelineScheduleMulti makes its own")
        return
    rank_of = schedule.rank_of
    for stage in range(schedule.num_stages - 1):
        if rank_of[stage] == rank_of[stage + 1]:
            yield ScheduleRefusal(
                f"row {rank_of[stage] + 1} (rank {rank_of[stage]})",
                f"holds stages {stage} and {stage + 1}, would send to itself and fail, "
                "and others wait",
                "use a runtime with messages of its own: _PipelineScheduleRuntime",
            )  # fmt: skip
    columns: dict[tuple[int, str, int | None], int] = {}
    for place in schedule.places():
        way = {"F": "F", "B": "B", "I": "B"}.get(place.action.kind, "")
        columns[place.action.stage, way, place.action.microbatch] = place.column
        if len(schedule.rows[place.rank][place.column]) > 1:
            yield _refusal(place, "is one of a pair", "write the two in two cells")
    for place in schedule.places():
        action = place.action
        if action.kind == "W":
            continue
        way, source = ("F", action.stage - 1) if action.kind == "F" else ("B", action.stage + 1)
        column = columns.get((source, way, action.microbatch))
        if column is not None and column >= place.column and rank_of[source] != place.rank:
            yield _refusal(
                place, f"reads what rank {rank_of[source]} makes in cell {column + 1}",
                "leave cells empty until a later column than that",
            )  # fmt: skip


def _notes(schedule: TorchSchedule) -> tuple[str, ...]:
    """What is right, and may not be what was wanted."""
    if schedule.form == "compute_only":
        return ()
    kinds = {place.action.kind for place in schedule.places()}
    notes = []
    if "REDUCE_GRAD" not in kinds:
        notes.append(
            "no REDUCE_GRAD: gradients stay sums over micro-batches, and FSDP does not reduce them"
        )
    if "UNSHARD" not in kinds:
        notes.append("no UNSHARD: for stages that are not sharded by FSDP")
    return tuple(notes)
