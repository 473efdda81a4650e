"""A traced run laid over the program that it walked: every task with both its times.

The plan is lowered as the runtime does. A block that ran op by op is told by the works inside it,
one that ran as a whole by itself. What a rank computes is measured without its waits. A message or
collective is measured from the last rank that started it until its result was there, and only
where somebody waited for it: what came in while others computed is known to be hidden, no more.
The first update of a step stands for all (the optimizer is called once).

Of the recorded steps the quicker half counts, by means: what a machine did besides is left out, and
parts still add up to the whole.

Where ranks had less than most of their cores (`had`), the clock tells of the machine's other work:
waits and the step are longer by what others did. Then computing is told by processor time, what was
waited for is not known, and the step is replayed (`calibrate.py`).
"""

import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from partita.cluster import Cluster
from partita.engine import run
from partita.errors import FileError
from partita.jobs.run_trace import RankTrace, TaskTime, check_plan_of
from partita.jobs.workload import Workload, load_cluster, load_model
from partita.lower import Lowered, lower_plan
from partita.meaning import COMMUNICATION, Purpose, Work
from partita.plans import Plan
from partita.program import Program
from partita.timeline import Timeline

Key = tuple[int, int, int]  # task, body, work (-1: the task itself; -2: all updates of a body)
NOTICED_S = 5e-6  # a shorter wait is no wait: the result was there
MOST_OF = 0.95  # of its core that a rank must have had for the clock to count
WATCHED = 0.5  # of its time that a message must have been waited for to be measured
ALL_UPDATES = -2
COMPUTE = frozenset({Purpose.COMPUTE, Purpose.RECOMPUTE, Purpose.UPDATE})


@dataclass(frozen=True)
class TaskMatch:
    """One task of a step: seconds predicted and measured.

    `measured_s` is None for what was hidden behind computing. A task of several ranks is one match;
    `by_rank` has what each rank computed.
    """

    key: Key
    name: str
    work: Work
    microbatch: int
    predicted_s: float
    measured_s: float | None
    by_rank: Mapping[int, float]

    @property
    def is_communication(self) -> bool:
        """Is something sent?"""
        return self.work.purpose in COMMUNICATION


@dataclass(frozen=True)
class RankTimes:
    """Where the time of a rank goes in a step, in seconds."""

    rank: int
    step_s: float
    compute_s: float
    issue_s: float  # the host's time to start messages and collectives
    wait_s: float
    num_tasks: int
    busy_s: float  # all that is not waiting

    @property
    def host_s(self) -> float:
        """Between tasks: neither computing nor waiting."""
        return max(0.0, self.busy_s - self.compute_s - self.issue_s)


@dataclass(frozen=True)
class MatchedRun:
    """A plan's program and run, with what was measured."""

    plan: Plan
    workload: Workload
    cluster: Cluster
    lowered: Lowered
    timeline: Timeline
    traces: tuple[RankTrace, ...]
    tasks: tuple[TaskMatch, ...]
    ranks: tuple[RankTimes, ...]
    clock_s: float  # the step by the clock
    had: float = 1.0  # of their cores, while ranks computed
    by_op: tuple[TaskMatch, ...] = ()  # of the step before, in which all blocks ran op by op
    replayed_s: float = 0.0  # the step on cores of their own, where they were shared
    most_of: float = MOST_OF  # of its core that a rank must have had for the clock to count

    @property
    def is_shared(self) -> bool:
        """Did others take a good part of the cores?"""
        return self.had < self.most_of

    @property
    def step_s(self) -> float:
        """The measured step: by the clock, or replayed where cores were shared."""
        return self.replayed_s if self.is_shared else self.clock_s

    @property
    def devices(self) -> tuple[int, ...]:
        """The devices of the plan, by rank."""
        return tuple(sorted({d for stage in self.plan.stages for d in stage.mesh.devices}))


def match_run(plan: Plan, traces: tuple[RankTrace, ...], most_of: float = MOST_OF) -> MatchedRun:
    """Lower the plan and match what was recorded of it; with `most_of` above 1 by replay alone."""
    check_plan_of(plan, traces)
    traces = quicker_half(traces)
    cluster, workload = load_cluster(plan), load_model(plan)
    lowered = lower_plan(plan.stages, plan.schedule, workload.graph, cluster, run)
    _check_numbers(lowered.program, traces)
    devices = sorted({d for stage in plan.stages for d in stage.mesh.devices})
    records, had = _by_key(lowered.program, traces), cores_had(traces)
    rank_of = {d: r for r, d in enumerate(devices)}
    tasks = tuple(_matches(lowered.program, records, rank_of, is_shared=had < most_of))
    return MatchedRun(
        plan, workload, cluster, lowered, run(lowered.program), traces, tasks,
        tuple(_rank_times(trace, had < most_of) for trace in traces),
        statistics.fmean(step_lengths(traces)), had, _by_op(lowered.program, traces, rank_of),
        most_of=most_of,
    )  # fmt: skip


def _by_op(
    program: Program, traces: Sequence[RankTrace], rank_of: Mapping[int, int]
) -> tuple[TaskMatch, ...]:
    own = [replace(trace, steps=trace.by_op) for trace in traces]
    _check_numbers(program, own)
    return tuple(_matches(program, _by_key(program, own), rank_of, is_shared=True))


def cores_had(traces: Sequence[RankTrace]) -> float:
    """Processor time of all computing over the clock's; 1 where it is not known."""
    clock_s = cpu_s = 0.0
    words = {purpose.words for purpose in COMPUTE}
    for trace in traces:
        for step in trace.steps:
            opened = containers(step.tasks)
            for each in step.tasks:
                finest = each.work >= 0 or each.task not in opened
                if finest and each.purpose in words and each.cpu_s is not None:
                    clock_s += each.clock_s
                    cpu_s += each.seconds
    return cpu_s / clock_s if clock_s > 0 else 1.0


def step_lengths(traces: Sequence[RankTrace]) -> list[float]:
    """Seconds of each step, from the first rank that begins to the last that ends."""
    steps = zip(*(trace.steps for trace in traces), strict=False)
    return [max(s.end for s in step) - min(s.start for s in step) for step in steps]


def quicker_half(traces: Sequence[RankTrace]) -> tuple[RankTrace, ...]:
    """The same traces with the quicker half of their steps (at least one)."""
    lengths = step_lengths(traces)
    ranked = sorted(range(len(lengths)), key=lambda i: lengths[i])
    kept = sorted(ranked[: (len(lengths) + 1) // 2])
    return tuple(replace(each, steps=tuple(each.steps[i] for i in kept)) for each in traces)


def inside(program: Program, body: int) -> Program:
    """The program that a record's work is in."""
    return program if body < 0 else program.bodies[body].program


def _check_numbers(program: Program, traces: Sequence[RankTrace]) -> None:
    for trace in traces:
        for i, step in enumerate(trace.steps):
            for k, each in enumerate(step.tasks):
                body = each.body < len(program.bodies)
                fits = body and each.work < len(inside(program, each.body).works)
                if not fits or not -1 <= each.task < program.num_tasks:
                    raise FileError(
                        f"names task {each.task}, body {each.body}, work {each.work}, which the "
                        "program of the plan does not have",
                        fix="trace the run again with this version of partita",
                        field=f"steps[{i}].tasks[{k}]",
                        file=f"rank{trace.rank}.json",
                    )


Records = dict[Key, dict[int, list[list[TaskTime]]]]  # rank -> step -> records


def containers(tasks: Iterable[TaskTime]) -> set[int]:
    """The tasks whose works were recorded one by one."""
    return {each.task for each in tasks if each.work >= 0}


def _by_key(program: Program, traces: Sequence[RankTrace]) -> Records:
    records: Records = {}
    for trace in traces:
        for i, step in enumerate(trace.steps):
            opened = containers(step.tasks)
            for each in step.tasks:
                if each.work < 0 and each.task in opened:
                    continue
                work = _work(program, each)
                if work is None:
                    continue
                number = each.work
                if work.purpose is Purpose.UPDATE and number >= 0:
                    number = ALL_UPDATES
                own = records.setdefault((each.task, each.body, number), {})
                own.setdefault(trace.rank, [[] for _ in trace.steps])[i].append(each)
    return records


def _work(program: Program, each: TaskTime) -> Work | None:
    if each.work >= 0:
        return inside(program, each.body).works[each.work]
    return program.work_of(each.task) if each.task >= 0 else None


def _matches(
    program: Program, records: Records, rank_of: Mapping[int, int], *, is_shared: bool
) -> Iterator[TaskMatch]:
    durations = {body: _durations(inside(program, body)) for _, body, _ in records}
    receive_of = {int(a): int(b) for a, b in program.pairs.tolist()}
    for key, ranks in records.items():
        task, body, number = key
        first = next(each for steps in ranks.values() for step in steps for each in step)
        work = _work(program, first)
        assert work is not None, "records without a work are left out"
        if work.purpose is Purpose.RECEIVE or (
            number < 0 and work.purpose is Purpose.GRADIENT_REDUCTION and work.peer < 0
        ):
            continue  # told with its send; with what was reduced inside the last backward
        within = inside(program, body)
        if number == ALL_UPDATES:
            wanted = [n for n, w in enumerate(within.works) if w.purpose is Purpose.UPDATE]
            predicted = sum(durations[body].get(n, 0.0) for n in wanted)
        elif number >= 0:
            predicted = durations[body].get(number, 0.0)
        else:
            predicted = float(program.duration[task])
        own = {
            rank: statistics.fmean(sum(each.seconds for each in step) for step in steps)
            for rank, steps in ranks.items()
        }
        measured: float | None = statistics.fmean(own.values())
        if work.purpose is Purpose.SEND:
            lengths = _message_s(ranks, records.get((receive_of[task], -1, -1), {}))
            measured = statistics.fmean(lengths) if lengths and not is_shared else None
        elif work.purpose in COMMUNICATION:
            groups = within.groups[work.group] if work.group >= 0 else ()
            lines = [[rank_of[d] for d in group if d in rank_of] for group in groups]
            lengths = _collective_s(ranks, lines, is_tie=work.peer >= 0)
            measured = statistics.fmean(lengths) if lengths and not is_shared else None
        name = first.name if number < 0 else f"{first.name}: {work.op or work.purpose.words}"
        yield TaskMatch(key, name, work, first.microbatch, predicted, measured, own)


def _durations(program: Program) -> dict[int, float]:
    """Seconds of each work: of the slowest of the ranks that are drawn."""
    durations: dict[int, float] = {}
    for task, number in enumerate(program.work.tolist()):
        if number >= 0:
            seconds = float(program.duration[task])
            durations[number] = max(durations.get(number, 0.0), seconds)
    return durations


Ranks = Mapping[int, list[list[TaskTime]]]


def _is_seen(length_s: float, wait_s: float) -> bool:
    """Was it waited for most of its time? Else it may have been there long before."""
    return wait_s > max(NOTICED_S, WATCHED * length_s)


def _message_s(sends: Ranks, receives: Ranks) -> list[float]:
    """From when it was handed over until the receiver that waited has it."""
    lengths = []
    for step in range(len(next(iter(sends.values())))):
        began = max(each.end for steps in sends.values() for each in steps[step])
        for steps in receives.values():
            lengths += [
                max(0.0, each.end - began)
                for each in steps[step]
                if _is_seen(each.end - began, each.wait_s)
            ]
    return lengths


def _collective_s(ranks: Ranks, lines: Sequence[Sequence[int]], *, is_tie: bool) -> list[float]:
    """From when the last rank of a line has started it until who waits for it has it."""
    lengths = []
    for line in lines if not is_tie and lines else [sorted(ranks)]:
        own = [ranks[rank] for rank in line if rank in ranks]
        for step in range(len(own[0]) if own else 0):
            both = [each for steps in own for each in steps[step]]
            if is_tie:  # over when its task is; who was early waited for others' computing
                began = max((each.start for each in both), default=0.0)
                lengths.append(max((each.end - began for each in both), default=0.0))
                continue
            began = max((each.end for each in both), default=0.0)
            ends = [
                each.done
                for each in both
                if each.done is not None and _is_seen(each.done - began, each.exposed_s)
            ]
            if ends:
                lengths.append(max(0.0, max(ends) - began))
    return lengths


def _rank_times(trace: RankTrace, is_shared: bool) -> RankTimes:
    columns: dict[str, list[float]] = defaultdict(list)
    for step in trace.steps:
        opened = containers(step.tasks)
        finest = [each for each in step.tasks if each.work >= 0 or each.task not in opened]
        words = {purpose.words for purpose in COMPUTE}
        receive = Purpose.RECEIVE.words
        columns["compute"].append(sum(t.seconds for t in finest if t.purpose in words))
        columns["issue"].append(
            sum(t.seconds for t in finest if t.purpose not in words and t.purpose != receive)
        )
        # A block that ran as a whole has waited for its messages itself.
        top = [t for t in step.tasks if t.work < 0 and t.purpose != receive]
        columns["wait"].append(sum(t.wait_s for t in top) + step.wait_s)
        columns["step"].append(step.end - step.start)
        busy_s = step.end - step.start - columns["wait"][-1]
        columns["busy"].append(step.cpu_s if is_shared and step.cpu_s is not None else busy_s)
        columns["tasks"].append(len([t for t in finest if t.purpose != receive]))
    middle = {name: statistics.fmean(values) for name, values in columns.items()}
    return RankTimes(
        trace.rank, middle["step"], middle["compute"], middle["issue"], middle["wait"],
        int(middle["tasks"]), middle["busy"],
    )  # fmt: skip
