"""The engine meets a slow reference that moves a clock and keeps real queues."""

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partita.engine.events import MODES, evaluate_fifo, evaluate_static, followers, run
from partita.errors import ProgramError
from partita.program import Kind, Lane, Memory, Program, ProgramBuilder
from partita.timeline import Timeline
from partita.verify import verify_program, verify_timeline
from tests.quickness import least_cpu_s

# --- the reference ------------------------------------------------------------------------------


def slow_static(program: Program) -> Timeline | None:
    """Run whatever is next on all its lanes and has its waits behind it; None if all are stuck."""
    order = range(program.num_tasks) if program.order is None else program.order.tolist()
    todo = {lane: [i for i in order if lane in program.lanes_of(i)] for lane in lanes_of(program)}
    start, end = {}, {}
    left = set(range(program.num_tasks))
    while left:
        ready = [
            i
            for i in sorted(left)
            if all(other in end for other, _ in program.waits_of(i))
            and all(todo[lane][0] == i for lane in program.lanes_of(i))
        ]
        if not ready:
            return None
        task = ready[0]
        over = [end[other] + delay for other, delay in program.waits_of(task)]
        free = [
            max((end[i] for i in end if lane in program.lanes_of(i)), default=0.0)
            for lane in program.lanes_of(task)
        ]
        start[task] = max([0.0, *over, *free])
        end[task] = start[task] + float(program.duration[task])
        for lane in program.lanes_of(task):
            todo[lane].pop(0)
        left.remove(task)
    return as_timeline(program, start, end)


class Clock:
    """Queues on lanes, moved from one moment to the next."""

    def __init__(self, program: Program, mode: str) -> None:
        self.program, self.mode = program, mode
        self.now = 0.0
        self.queues: dict[int, list[int]] = {lane: [] for lane in lanes_of(program)}
        self.joined: dict[int, float] = {}
        self.start: dict[int, float] = {}
        self.end: dict[int, float] = {}
        self.done: set[int] = set()

    def moment(self, task: int) -> float | None:
        """When a task's last wait is over, if that is known."""
        waits = self.program.waits_of(task)
        if any(other not in self.done for other, _ in waits):
            return None
        return max([0.0, *(self.end[other] + delay for other, delay in waits)])

    def due(self) -> list[int]:
        """Tasks that join now."""
        return [
            i
            for i in range(self.program.num_tasks)
            if i not in self.joined and (m := self.moment(i)) is not None and m <= self.now
        ]

    def join(self, task: int) -> None:
        self.joined[task] = self.now
        for lane in self.program.lanes_of(task):
            self.queues[lane].append(task)
            if self.mode == "priority":
                self.queues[lane].sort(key=self.rank)

    def rank(self, task: int) -> tuple[float, float, int]:
        priority = self.program.priority
        return (0.0 if priority is None else -priority[task], self.joined[task], task)

    def settle(self) -> bool:
        """Let tasks end and milestones happen; True if anything did."""
        ended = [i for i, end in self.end.items() if i not in self.done and end <= self.now]
        marks = [i for i in self.due() if not self.program.lanes_of(i)]
        for task in marks:
            self.joined[task] = self.start[task] = self.end[task] = self.now
        self.done |= {*ended, *marks}
        return bool(ended or marks)

    def heads(self) -> list[int]:
        """Tasks that head all their queues, on lanes that are free."""
        running = [i for i in self.start if i not in self.done]
        busy = {lane for i in running for lane in self.program.lanes_of(i)}
        return [
            i
            for i in self.joined
            if i not in self.start
            and all(self.queues[x][0] == i and x not in busy for x in self.program.lanes_of(i))
        ]

    def begin(self, tasks: list[int]) -> None:
        for task in tasks:
            self.start[task] = self.now
            self.end[task] = self.now + float(self.program.duration[task])
            for lane in self.program.lanes_of(task):
                self.queues[lane].remove(task)

    def fifo_moment(self) -> None:
        """All that can happen happens before the next one joins, the lowest index first."""
        while True:
            if self.settle():
                continue
            if heads := self.heads():
                self.begin(heads)
            elif due := self.due():
                self.join(due[0])
            else:
                return

    def priority_moment(self) -> None:
        """All join before lanes choose, all lanes at once."""
        while True:
            if self.settle():
                continue
            if due := self.due():
                for task in due:
                    self.join(task)
            elif heads := self.heads():
                self.begin(heads)
            else:
                return

    def next_moment(self) -> float:
        ends = [end for i, end in self.end.items() if i not in self.done]
        joins = [self.moment(i) for i in range(self.program.num_tasks) if i not in self.joined]
        return min([*ends, *(m for m in joins if m is not None)], default=math.inf)

    def timeline(self) -> Timeline | None:
        while self.now < math.inf:
            self.fifo_moment() if self.mode == "fifo" else self.priority_moment()
            self.now = self.next_moment()
        if len(self.done) < self.program.num_tasks:
            return None
        return as_timeline(self.program, self.start, self.end)


def lanes_of(program: Program) -> range:
    return range(len(program.lanes))


def as_timeline(program: Program, start: dict[int, float], end: dict[int, float]) -> Timeline:
    tasks = range(program.num_tasks)
    return Timeline(program, np.array([start[i] for i in tasks]), np.array([end[i] for i in tasks]))


def slow(program: Program, mode: str) -> Timeline | None:
    return slow_static(program) if mode == "static" else Clock(program, mode).timeline()


# --- random programs ----------------------------------------------------------------------------


@st.composite
def programs(draw, *, acyclic: bool = True):
    """Few lanes and few different times, so that ties, queues and reservations are common."""
    b = ProgramBuilder(time_unit="")
    lanes = [b.lane(f"lane{i}") for i in range(draw(st.integers(1, 3)))]
    memory = b.memory("m")
    size = draw(st.integers(1, 9))
    rank = draw(st.permutations(range(size)))  # waits go from high to low rank
    times = st.sampled_from([0.0, 1.0, 1.0, 2.0, 0.1, 0.2, 0.30000000000000004])
    for i in range(size):
        duration = draw(times)
        on = draw(st.sets(st.sampled_from(lanes), min_size=1 if duration else 0, max_size=2))
        others = [j for j in range(size) if j != i and (not acyclic or rank[j] < rank[i])]
        waits = (
            draw(st.lists(st.tuples(st.sampled_from(others), times), max_size=2)) if others else []
        )
        waits = [(j, draw(st.sampled_from([0.0, 0.0, delay]))) for j, delay in waits]
        b.add(
            f"t{i}",
            sorted(on),
            duration,
            waits,
            [(memory, 1.0, -1.0)],
            Kind.FORWARD,
            priority=float(draw(st.integers(0, 2))),
        )
    b.order = draw(st.sampled_from([None, sorted(range(size), key=rank.__getitem__)]))
    return b.build()


@pytest.mark.parametrize("mode", MODES)
class TestEveryMode:
    @settings(deadline=None, max_examples=120)
    @given(data=st.data())
    def test_the_engine_is_as_the_slow_reference(self, mode, data):
        program = data.draw(programs(acyclic=data.draw(st.booleans())))
        expected = slow(program, mode)
        if expected is None:
            with pytest.raises(ProgramError, match="deadlock: "):
                run(program, mode)
        else:
            timeline = run(program, mode)
            assert timeline.start.tolist() == expected.start.tolist()
            assert timeline.end.tolist() == expected.end.tolist()

    @settings(deadline=None, max_examples=40)
    @given(data=st.data())
    def test_the_verifier_accepts_what_the_engine_finds(self, mode, data):
        program = data.draw(programs())
        try:
            timeline = run(program, mode)
        except ProgramError:
            assert mode == "static"
            assert verify_program(program)
        else:
            assert verify_timeline(program, timeline) == ()
            assert run(program, mode) == timeline

    def test_a_program_of_nothing_takes_no_time(self, mode):
        assert run(ProgramBuilder().build(), mode).makespan == 0.0

    def test_a_wait_with_a_delay_holds_a_task_back(self, mode):
        b = ProgramBuilder()
        x = b.add("x", b.lane("a"), 1.0)
        b.add("y", b.lane("b"), 1.0, [(x, 2.5)])
        assert run(b.build(), mode).start.tolist() == [0.0, 3.5]

    def test_a_cycle_of_waits_is_named(self, mode):
        b = ProgramBuilder()
        a = b.lane("a")
        for i in range(3):
            b.add("s", a, 1.0, [(i + 1) % 3], kind=Kind.FORWARD, microbatch=i)
        b.add("fine", a, 1.0)
        message = "deadlock: F0@s waits for F1@s, F1@s waits for F2@s, F2@s waits for F0@s; break"
        with pytest.raises(ProgramError, match=message):
            run(b.build(), mode)

    def test_times_beyond_all_floats_are_refused(self, mode):
        b = ProgramBuilder()
        a = b.lane("a")
        for _ in range(3):
            b.add("x", a, 1e308)
        with pytest.raises(ProgramError, match="more than a float can hold; use a larger unit"):
            run(b.build(), mode)

    def test_milestones_take_the_moment_of_their_last_wait(self, mode):
        b = ProgramBuilder()
        a, c = b.lane("a"), b.lane("b")
        x, y = b.add("x", a, 3.0), b.add("y", c, 1.0)
        both = b.add("both", (), 0.0, [x, (y, 1.0)])
        b.add("z", c, 1.0, [both])
        assert run(b.build(), mode).start.tolist() == [0.0, 0.0, 3.0, 3.0]


# --- static order -------------------------------------------------------------------------------


def test_lane_order_and_waits_that_contradict_are_named():
    b = ProgramBuilder()
    a, c = b.lane("gpu0"), b.lane("gpu1")
    b.add("s0", a, 1.0, [3], kind=Kind.BACKWARD, microbatch=0)
    b.add("s0", a, 1.0, kind=Kind.FORWARD, microbatch=1)
    b.add("s1", c, 1.0, [1], kind=Kind.FORWARD, microbatch=1)
    b.add("s1", c, 1.0, kind=Kind.BACKWARD, microbatch=0)
    program = b.build()
    with pytest.raises(ProgramError) as refusal:
        run(program)
    assert str(refusal.value) == (
        "deadlock: B0@s0 waits for B0@s1, B0@s1 comes after F1@s1 on lane gpu1, F1@s1 waits for "
        "F1@s0, F1@s0 comes after B0@s0 on lane gpu0; break this cycle: change the order of tasks "
        "on a lane or remove a wait"
    )
    assert run(program, "fifo").makespan == 2.0  # queues need no order


def test_another_order_is_another_timeline():
    b = ProgramBuilder()
    a = b.lane("a")
    b.add("x", a, 1.0)
    b.add("y", a, 2.0)
    program = b.build()
    assert run(program).start.tolist() == [0.0, 1.0]
    assert run(dataclasses.replace(program, order=[1, 0])).start.tolist() == [2.0, 0.0]


def test_a_long_cycle_is_told_in_short():
    b = ProgramBuilder()
    a = b.lane("a")
    for i in range(100):
        b.add("s", a, 1.0, [(i + 1) % 100], microbatch=i)
    with pytest.raises(ProgramError, match=r"X5@s waits for X6@s, \.\.\. 88 more \.\.\., X94@s"):
        run(b.build())


# --- queues -------------------------------------------------------------------------------------


def queue_program() -> ProgramBuilder:
    """Lane a is taken until 3; x (ready at 1), y (ready at 2) and z (ready at 2) queue for it."""
    b = ProgramBuilder()
    a, c, d = b.lane("a"), b.lane("b"), b.lane("c")
    b.add("first", a, 3.0)
    soon, later = b.add("soon", c, 1.0), b.add("later", d, 2.0)
    b.add("y", a, 1.0, [later], priority=1.0)
    b.add("z", a, 1.0, [later], priority=2.0)
    b.add("x", a, 1.0, [soon], priority=1.0)
    return b


def started(timeline: Timeline, lane: int) -> list[str]:
    program = timeline.program
    return [program.blocks[program.block[i]] for i in timeline.lane_tasks(lane).tolist()]


def test_fifo_serves_in_the_order_of_arrival_then_of_index():
    assert started(run(queue_program().build(), "fifo"), 0) == ["first", "x", "y", "z"]


def test_priority_serves_the_largest_then_the_first_come():
    assert started(run(queue_program().build(), "priority"), 0) == ["first", "z", "x", "y"]


def test_without_priorities_the_first_come_is_served():
    program = dataclasses.replace(queue_program().build(), priority=None)
    assert run(program, "priority") == Timeline(program, *columns(run(program, "fifo")))


def columns(timeline: Timeline) -> tuple[np.ndarray, np.ndarray]:
    return timeline.start, timeline.end


def test_a_task_on_two_lanes_reserves_the_one_that_is_free():
    b = ProgramBuilder()
    a, c = b.lane("a"), b.lane("b")
    b.add("long", a, 5.0)
    b.add("both", [a, c], 1.0)
    b.add("short", c, 1.0)
    timeline = run(b.build(), "fifo")
    assert timeline.start.tolist() == [0.0, 5.0, 6.0]


def test_two_tasks_that_want_the_same_lanes_do_not_block_each_other():
    b = ProgramBuilder()
    a, c = b.lane("a"), b.lane("b")
    b.add("x", [a, c], 1.0)
    b.add("y", [c, a], 1.0)
    for mode in MODES:
        assert run(b.build(), mode).start.tolist() == [0.0, 1.0]


def test_an_unknown_mode_is_refused():
    with pytest.raises(ProgramError, match="mode: found 'lifo'; one of static, fifo, priority"):
        run(ProgramBuilder().build(), "lifo")  # type: ignore[arg-type]


# --- the entry for searches ---------------------------------------------------------------------


def test_searches_evaluate_raw_arrays_into_their_own():
    program = queue_program().build()
    start, end, free = np.empty(6), np.empty(6), np.empty(3)
    lanes = (program.duration, program.lane_start, program.lane_of)
    waits = (program.wait_start, program.wait_on, program.wait_delay)
    no_order = np.empty(0, np.int32)
    no_order.flags.writeable = False  # as the arrays of programs are, so that it is compiled once
    assert evaluate_static(*lanes, *waits, no_order, free, start, end) == run(program).makespan
    assert start.tolist() == run(program).start.tolist()
    after = followers(*waits)
    for _ in range(2):  # the arrays can be used again
        makespan = evaluate_fifo(*lanes, program.wait_start, *after, free, start, end)
        assert makespan == run(program, "fifo").makespan
        assert end.tolist() == run(program, "fifo").end.tolist()


# --- figures ------------------------------------------------------------------------------------


def wavefront(tasks: int, num_lanes: int = 16) -> Program:
    """Each task waits for the one before it and the one before that on its lane."""
    index = np.arange(tasks, dtype=np.int32)
    waits = np.stack((index - 1, index - num_lanes), 1)
    waits[index % num_lanes == 0, 0] = -1
    counts = (waits >= 0).sum(1)
    one_each = np.arange(tasks + 1, dtype=np.int32)
    return Program(
        lanes=tuple(Lane(f"gpu{i}") for i in range(num_lanes)),
        duration=np.full(tasks, 1e-3),
        lane_start=one_each,
        lane_of=index % num_lanes,
        wait_start=np.concatenate(([0], counts.cumsum())).astype(np.int32),
        wait_on=waits[waits >= 0],
        memories=(Memory("m", 16.0),),
        effect_start=one_each,
        effect_memory=np.zeros(tasks, np.int32),
        effect_at_start=np.ones(tasks),
        effect_at_end=-np.ones(tasks),
        blocks=tuple(f"s{i}" for i in range(num_lanes)),
        block=index % num_lanes,
        kind=np.zeros(tasks, np.int8),
        microbatch=index // num_lanes,
    )


def test_a_million_tasks_are_timed_and_verified_quickly_in_200_bytes_each():
    program = wavefront(1_000_000)
    run(wavefront(20_000))  # compiles, or loads what was compiled; small ones need neither
    timeline = run(program)
    assert verify_timeline(program, timeline) == ()
    # 0.01 on an idle machine; benchmarks/engine.py measures properly
    assert least_cpu_s(lambda: run(program), 0.5) < 0.5
    assert least_cpu_s(lambda: verify_timeline(program, timeline), 5.0) < 5.0
    assert (program.nbytes + timeline.nbytes) / program.num_tasks <= 200
