"""Published schedules, run: how long they take, what they hold, and how they compare with ours.

A named schedule runs on the problem itself where that holds its stages as the schedule needs them.
Where all stages of the problem are alike, the same model is also placed as the other schedules
need it: in chunks of 1/v of a stage, or twice in opposite directions (weights are then held twice,
which is not counted here). The work of a device is the same in all of them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from partita.engine import run
from partita.errors import InputError, ProblemError, VerificationError
from partita.jobs.schedule import ScheduleResult
from partita.problems.schedule import (
    ScheduleProblem,
    ScheduleSolution,
    lower_bound,
    memory_left_per_device,
    solution_of,
)
from partita.schedules.actions import Order
from partita.schedules.named import NAMED, Layout, NamedSchedule
from partita.schedules.pipeline import Pipeline, StageHolding, held, on_devices, pipeline_of
from partita.schedules.placement import whole
from partita.schedules.programs import ordered_program
from partita.schedules.shapes import ShapeOptions, shape
from partita.search.base import Result, Status
from partita.suggest import suggest
from partita.timeline import Timeline
from partita.verify import verify_program, verify_timeline

_SHAPES: dict[Layout, str] = {
    "line": "vshape",
    "looped": "looped",
    "wave": "wave",
    "two-way": "xshape",
}


@dataclass(frozen=True, slots=True)
class UniformModel:
    """A model of equal stages, one for each device: spans and memory of a stage."""

    num_devices: int
    forward_span: float
    backward_span: float
    weight_span: float | None = None
    memory: float = 1
    weight_memory: float | None = None
    delay: float = 0

    def placed(self, layout: Layout, chunks: int, split: bool) -> ScheduleProblem:
        """The model in chunks, with weight gradients as blocks of their own or not."""
        weight = self.weight_span or 0
        options = ShapeOptions(
            forward_span=_part(self.forward_span, chunks),
            backward_span=_part(self.backward_span + (0 if split else weight), chunks),
            weight_span=_part(weight, chunks) if split else None,
            memory=_part(self.memory, chunks),
            weight_memory=None if self.weight_memory is None else _part(self.weight_memory, chunks),
            chunks=chunks,
            delay=self.delay,
        )
        return shape(_SHAPES[layout], self.num_devices, options).problem()


@dataclass(frozen=True, slots=True)
class Baseline:
    """A named schedule that was run: `problem` is what it was run on, without caps."""

    name: str
    title: str
    placement: str  # where it holds the stages, in words
    problem: ScheduleProblem
    num_microbatches: int
    timeline: Timeline
    run: Callable[[int], Timeline] = field(repr=False, compare=False)  # for other numbers
    strategies: int = 1  # 2: each micro-batch of the problem is two of the model

    @property
    def period(self) -> float | None:
        """By how much the makespan grows with one more micro-batch, once the pipeline is full."""
        if not NAMED[self.name].goes_on:
            return None
        p = self.problem.num_devices
        few, many = 4 * p, 6 * p  # multiples of p: some schedules exist for no other numbers
        longer = self.run(many).makespan - self.run(few).makespan
        return longer / (many - few) / self.strategies

    @property
    def makespan(self) -> float:
        """The time from 0 to the end of all."""
        return self.timeline.makespan

    @property
    def longest_span(self) -> float:
        """The longest that a device takes from its first start to its last end."""
        return max(device_spans(self.timeline))

    @property
    def bubble(self) -> float:
        """Idle time of the device that idles longest, from its first start to its last end."""
        spans, busy = device_spans(self.timeline), self.timeline.busy()
        return max(span - float(work) for span, work in zip(spans, busy, strict=True))

    @property
    def bubble_rate(self) -> float:
        """The share of the makespan that devices are idle, all together."""
        return 1 - float(self.timeline.utilisation().mean())

    @property
    def peak_memory(self) -> tuple[float, ...]:
        """The most that each device holds."""
        return tuple(self.timeline.peaks().tolist())

    def fits(self, problem: ScheduleProblem) -> bool:
        """Does every device stay within its cap in that problem?"""
        return fits(self.peak_memory, problem)


@dataclass(frozen=True, slots=True)
class BaselineRuns:
    """What ran, the shortest first, and (title, why) of what could not.

    `ways` is how many micro-batches of the model one of the problem stands for: 2 where it holds
    the model in two directions.
    """

    ran: tuple[Baseline, ...]
    left_out: tuple[tuple[str, str], ...]
    baselines: int = 1


def run_order(
    problem: ScheduleProblem, order: Order, num_microbatches: int, time_unit: str = ""
) -> Timeline:
    """Run a pipeline in this order (rows by device), every block as early as it can; verified."""
    program = ordered_program(problem, pipeline_of(problem), order, num_microbatches, time_unit)
    if violations := verify_program(program):
        raise VerificationError(violations)
    timeline = run(program)
    if violations := verify_timeline(program, timeline):
        raise VerificationError(violations)
    return timeline


def order_result(problem: ScheduleProblem, order: Order) -> ScheduleResult:
    """An order as a result: it runs as early as it can, and no one has searched."""
    assert problem.num_microbatches is not None
    timeline = run_order(problem, order, problem.num_microbatches)
    table = timeline.start.reshape(-1, len(problem.blocks)).tolist()
    plain = [[int(t) if t == int(t) else t for t in row] for row in table]
    solution = solution_of(problem, plain)
    result: Result[ScheduleSolution] = Result(
        "order", Status.FEASIBLE, solution, solution.makespan, lower_bound(problem),
        "the order given, every block as early as it can", 0.0, 0,
    )  # fmt: skip
    return ScheduleResult(problem, result, None)


def named_schedule(
    name: str,
    devices: int,
    microbatches: int,
    *,
    forward: float = 1,
    backward: float = 1,
    weight: float = 1,
    memory: float = 1,
    chunks: int = 2,
    delay: float = 0,
) -> Baseline:
    """A published schedule for equal stages: spans and memory are of all that a device holds.

    Where the schedule does not split the backward, it takes `backward + weight`.
    """
    if name not in NAMED:
        raise InputError(f"found {name!r}", fix=suggest(name, list(NAMED)), field="schedule")
    whole(devices, "devices")
    if whole(microbatches, "microbatches") < 1:
        raise ProblemError(f"found {microbatches}", fix="give 1 or more", field="microbatches")
    model = UniformModel(devices, forward, backward, weight, memory, None, delay)
    named = NAMED[name]
    count = chunks if named.layout in ("looped", "wave") else 1
    why = _refusal(named, devices, count, microbatches)
    if why:
        raise ProblemError(f"{named.title} {why}", fix="choose other numbers", field=name)
    return _run_placed(name, model, count, microbatches)


def compare(problem: ScheduleProblem, num_microbatches: int) -> BaselineRuns:
    """All named schedules that this problem, or the same model placed otherwise, allows."""
    try:
        pipeline = pipeline_of(problem)
    except ProblemError as error:
        return BaselineRuns((), (("published schedules", error.found),))
    where = held(pipeline)
    if where is None or not pipeline.training:
        why = "it is inference" if where else "the devices hold the stages in no known layout"
        return BaselineRuns((), (("published schedules", why),))
    ran: list[Baseline] = []
    left_out: list[tuple[str, str]] = []
    model = uniform_model(problem)
    total = num_microbatches * len(pipeline.chains)
    for name, named in NAMED.items():
        here = named.layout == where.layout
        chunks = where.chunks if here else 2 if named.layout in ("looped", "wave") else 1
        why = _refusal(named, len(where.ranks), chunks, total)
        if named.split and not pipeline.split:
            why = "needs the weight gradients as blocks of their own"
        if not here and model is None:
            why = "needs another placement, and the stages are not alike"
        if why:
            left_out.append((named.title, why))
        elif here:
            ran.append(_run_here(name, problem, pipeline, where, num_microbatches))
        else:
            assert model is not None
            ran.append(_run_placed(name, model, chunks, total))
    ran.sort(key=lambda baseline: (baseline.makespan, baseline.title))
    return BaselineRuns(tuple(ran), tuple(left_out), len(pipeline.chains))


def uniform_model(problem: ScheduleProblem) -> UniformModel | None:
    """The model of equal stages that a problem places; None if its stages are not alike."""
    try:
        pipeline = pipeline_of(problem)
    except ProblemError:
        return None
    where = held(pipeline)
    if where is None or not pipeline.training:
        return None
    alike = {
        tuple(
            (problem.blocks[block].span, problem.blocks[block].memory)
            for block in (stage.forward, stage.backward, stage.weight)
            if block is not None
        )
        for stage in pipeline.stages
    }
    delay = _delay(problem, pipeline)
    if len(alike) > 1 or delay is None:
        return None
    (forward, memory), (backward, _), *rest = alike.pop()
    chunks = where.chunks
    return UniformModel(
        len(where.ranks),
        forward * chunks,
        backward * chunks,
        rest[0][0] * chunks if rest else None,
        memory * chunks,
        -rest[0][1] * chunks if rest else None,
        delay,
    )


def device_spans(timeline: Timeline) -> list[float]:
    """From the first start to the last end on each lane; 0 where nothing runs."""
    spans = []
    for lane in range(len(timeline.program.lanes)):
        tasks = timeline.lane_tasks(lane)
        ends = timeline.end[tasks].max() - timeline.start[tasks].min() if len(tasks) else 0.0
        spans.append(float(ends))
    return spans


def fits(peaks: Sequence[float], problem: ScheduleProblem) -> bool:
    """Are these peaks within the caps of the problem?"""
    return all(
        peak <= room for peak, room in zip(peaks, memory_left_per_device(problem), strict=True)
    )


def _run_here(
    name: str,
    problem: ScheduleProblem,
    pipeline: Pipeline,
    where: StageHolding,
    num_microbatches: int,
) -> Baseline:
    free = replace(problem, memory_capacity=None, num_microbatches=None)

    def at(n: int) -> Timeline:
        order = NAMED[name].order(len(where.ranks), where.chunks, n)
        return run_order(free, on_devices(order, where.ranks), n)

    ways = len(pipeline.chains)
    total = num_microbatches * ways
    title = NAMED[name].title
    return Baseline(name, title, "as given", free, total, at(num_microbatches), at, ways)


def _run_placed(name: str, model: UniformModel, chunks: int, total: int) -> Baseline:
    named = NAMED[name]
    problem = model.placed(named.layout, chunks, named.split)
    ways = 2 if named.layout == "two-way" else 1

    def at(n: int) -> Timeline:
        return run_order(problem, named.order(model.num_devices, chunks, n), n)

    words = {
        "line": "one stage a device",
        "looped": f"{chunks} chunks a device",
        "wave": f"{chunks} chunks a device, there and back",
        "two-way": "both directions, weights twice",
    }[named.layout]
    return Baseline(name, named.title, words, problem, total, at(total // ways), at, ways)


def _refusal(named: NamedSchedule, p: int, chunks: int, total: int) -> str:
    """Why there is no such schedule for `total` micro-batches of the model, or nothing."""
    if named.layout == "two-way":
        if p % 2 or total % 2:
            return f"needs an even number of {'devices' if p % 2 else 'micro-batches'}"
        return named.refuses(p, chunks, total // 2)
    return named.refuses(p, chunks, total)


def _delay(problem: ScheduleProblem, pipeline: Pipeline) -> float | None:
    """The delay between stages on different devices; None if there are several."""
    of = dict(zip(problem.deps, problem.delays or (0,) * len(problem.deps), strict=True))
    delays = set()
    for chain in pipeline.chains:
        for first, second in pairwise(chain):
            assert first.backward is not None
            assert second.backward is not None
            across = (of[first.forward, second.forward], of[second.backward, first.backward])
            if first.device != second.device:
                delays |= set(across)
            elif any(across):
                return None
    return delays.pop() if len(delays) == 1 else 0 if not delays else None


def _part(value: float, chunks: int) -> float:
    """1/chunks of a value; whole if it can be."""
    if isinstance(value, int) and value % chunks == 0:
        return value // chunks
    return value / chunks
