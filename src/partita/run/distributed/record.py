"""Recording a run: the start and end of every task of a rank, on a clock that all ranks share.

On a CPU a moment is read from the host's clock; on a GPU it is an event on the stream, so that
what is measured is the device's time and nothing waits for it while the step runs. Before every
traced step the ranks meet at a barrier; before the first one each measures how far its clock is
from rank 0's, by messages there and back, of which the quickest counts. Whoever waits for a
message or collective says so (`Waiting`), which tells waiting from computing and when results came.
A rank with one thread reads its processor time as well: on a machine that does other things too,
that is what a task takes. Collectives of a few sizes are tried before the first traced step, since
a plan that has none (a pipeline) tells nothing of them: one after the other, and between computing.
So is the optimizer, with tensors of one element: what it takes for each is beside their bytes. The
last two steps of the warm-up run all blocks op by op, of which the second is recorded: blocks as a
whole do not tell what of their time grows with the size of products, of other ops, or their number.
Two steps before those take weight gradients apart from data gradients, where the plan has both in
one: a schedule that does so takes longer, since what they read is no longer in a cache.
"""

import copy
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from partita import __version__
from partita.jobs.run_trace import (
    APART,
    SEND,
    UPDATE,
    Probe,
    RankTrace,
    TaskTime,
    TracedStep,
    check_free,
    plan_fingerprint,
    write_trace,
)
from partita.meaning import Phase, Work
from partita.plans import Plan
from partita.program import Kind, Program
from partita.run.distributed.comm import Communicator, Lines, Pending, Waiting, gather, scatter
from partita.run.distributed.walk import RankWalk
from partita.run.profile import environment_of

ROUNDS = 8  # of messages by which clocks are compared
PROBED = (2**10, 2**15, 2**18, 2**20)  # floats of the whole tensor
BY_OP = 2  # steps op by op before the traced ones: the last is recorded
TAKEN_APART = 2  # steps before those, with weight gradients by themselves: the same
PROBES = 10  # of each size: the quickest counts
APART_S, COMPUTED = 2e-3, 128  # computing between two of them, and on squares of what size
PARTS = 32  # tensors of an optimizer that is tried


class TaskClock(Protocol):
    """Moments that are cheap to take and turned into seconds later."""

    def now(self) -> Any:
        """This moment."""

    def begin(self) -> None:
        """A step begins: moments until the next one are counted from here."""

    def seconds(self, moment: Any) -> float:
        """A moment in seconds of the host's clock; all of a step have passed."""


class HostClock:
    """The host's clock, for devices that compute while the host waits."""

    def now(self) -> float:
        """This moment."""
        return time.perf_counter()

    def begin(self) -> None:
        """Nothing to do: the clock goes on."""

    def seconds(self, moment: float) -> float:
        """The moment itself."""
        return moment


class DeviceClock:
    """Events on a GPU's stream, counted from one whose moment the host knows."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.begin()

    def now(self) -> torch.cuda.Event:
        """An event on the current stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def begin(self) -> None:
        """Both clocks at one moment, when the device has nothing to do."""
        torch.cuda.synchronize(self.device)
        self.base, self.host_s = self.now(), time.perf_counter()
        torch.cuda.synchronize(self.device)

    def seconds(self, moment: torch.cuda.Event) -> float:
        """Seconds after the step began, by the device's own clock."""
        moment.synchronize()
        return self.host_s + float(self.base.elapsed_time(moment)) / 1e3


class _Open:
    """A task that is being recorded."""

    __slots__ = (
        "body", "cpu", "done", "end", "exposed", "microbatch", "part", "start", "task", "waits",
        "work",
    )  # fmt: skip

    def __init__(self, task: int, body: int, work: int, microbatch: int, start: Any) -> None:
        self.task, self.body, self.work, self.microbatch = task, body, work, microbatch
        self.start, self.end = start, start
        self.part: Phase | None = None
        self.cpu = 0.0
        self.waits: list[tuple[Any, Any]] = []
        self.done: Any = None
        self.exposed: list[tuple[Any, Any]] = []


class _TimedWaiting(Waiting):
    """Says to the recorder who waits for what."""

    __slots__ = ("recorder", "since")

    def __init__(self, recorder: "TraceRecorder") -> None:
        super().__init__()
        self.recorder = recorder
        self.since: Any = None

    def begin(self, task: Any) -> None:
        super().begin(task)
        if self.recorder.is_on:
            self.since = self.recorder.clock.now()

    def end(self, task: Any) -> None:
        super().end(task)
        if self.recorder.is_on and self.since is not None:
            self.recorder.waited(task, self.since, self.recorder.clock.now())
        self.since = None


class TraceRecorder:
    """Records some steps of a run after a warm-up, and writes them when the last has ended."""

    def __init__(
        self, plan: Plan, folder: str | Path, rank: int, *, steps: int = 3, warmup: int = 2,
    ) -> None:  # fmt: skip
        check_free(folder, rank)
        self.plan, self.folder, self.rank = plan, Path(folder), rank
        self.num_steps, self.warmup = steps, warmup
        self.is_on = False
        self.taken = 0
        self.offset_s = 0.0
        self.clock: TaskClock = HostClock()
        self.steps: list[TracedStep] = []
        self.open: list[_Open] = []
        self.recorded: list[_Open] = []
        self.between: list[tuple[Any, Any]] = []  # waits outside of tasks
        self.probes: tuple[Probe, ...] = ()
        self.by_op: list[TracedStep] = []
        self.apart: list[TracedStep] = []
        self.has_cpu = False  # is the processor time of this thread that of its tasks?
        self.written: Path | None = None

    def attach(self, walk: RankWalk) -> None:
        """Look at what will run, and take the place of whom waits are told to."""
        self.walk, self.program, self.device = walk, walk.program, walk.run.device
        self.world = dist.get_world_size()
        if self.device.type == "cuda":
            self.clock = DeviceClock(self.device)
        self.has_cpu = self.device.type == "cpu" and torch.get_num_threads() == 1
        self.waiting = _TimedWaiting(self)
        walk.run.comm.waiting = self.waiting
        walk.run.recorder, walk.parts = self, self
        kinds = {int(self.program.kind[task]) for task in walk.tasks}
        self.has_both = bool(self.program.bodies) and int(Kind.BACKWARD) in kinds
        self.body_of = {id(body.program): n for n, body in enumerate(self.program.bodies)}

    # Steps.

    def begin_step(self) -> None:
        """Meet the others, so that the step begins everywhere at once."""
        ahead = self.warmup - self.taken
        self.walk.op_by_op = bool(self.program.bodies) and 0 < ahead <= min(BY_OP, self.warmup - 1)
        last = BY_OP + TAKEN_APART
        self.walk.taken_apart = self.has_both and BY_OP < ahead <= last <= self.warmup
        is_tried = ahead == 1 and self.walk.op_by_op
        is_tried = is_tried or (ahead == BY_OP + 1 and self.walk.taken_apart)
        self.is_on = -self.num_steps < ahead <= 0 or is_tried
        if not self.is_on:
            return
        if not self.steps and not self.by_op and not self.apart:
            self.offset_s = clock_offset_s(self.rank, self.walk.run.comm.home)
            self.probes = probed(self.rank, self.world, self.walk.run.comm.home, self.offset_s)
            if self.has_cpu:
                optimizers = [state.optimizer for state in self.walk.states.values()]
                self.probes += updates_tried([each for each in optimizers if each is not None])
        dist.barrier()
        self.clock.begin()
        self.recorded, self.open, self.between = [], [], []
        self.began, self.cpu_began = self.clock.now(), time.thread_time()

    def end_step(self) -> None:
        """Turn moments into seconds; after the last step write the file."""
        if self.is_on:
            ended, cpu_s = self.clock.now(), time.thread_time() - self.cpu_began
            self.is_on = False
            self.waiting.task = None
            tasks = tuple(self._closed(each) for each in self.recorded)
            step = TracedStep(
                self.taken, self._second(self.began), self._second(ended), tasks,
                self._length(self.between), cpu_s if self.has_cpu else None,
            )  # fmt: skip
            steps = self.apart if self.walk.taken_apart else self.steps
            (self.by_op if self.walk.op_by_op else steps).append(step)
            if len(self.steps) == self.num_steps:
                self.finish()
        self.taken += 1

    def finish(self) -> None:
        """Write what was recorded, once; nothing if no step was."""
        if self.written is not None or not self.steps:
            return
        trace = RankTrace(
            plan_fingerprint(self.plan), self.rank, self.world,
            environment_of(self.device, True).device, str(torch.__version__), __version__,
            self.offset_s, tuple(self.steps), self.probes, tuple(self.by_op), tuple(self.apart),
        )  # fmt: skip
        self.written = write_trace(self.folder, trace)

    # Tasks.

    def start(self, task: int, name: str) -> None:
        """A task of the program begins."""
        if self.is_on:
            is_whole = not self.program.bodies  # one stage that runs once: its works say all
            self._push(-1 if is_whole else task, -1, -1, int(self.program.microbatch[task]))

    def end(self, task: int, name: str) -> None:
        """It has ended."""
        if self.is_on:
            self._pop()

    def start_work(self, program: Program, number: int, microbatch: int) -> None:
        """A work of a body begins."""
        if self.is_on:
            task = self.open[0].task if self.open else -1
            self._push(task, self.body_of.get(id(program), -1), number, microbatch)

    def end_work(self) -> None:
        """It has ended."""
        if self.is_on:
            self._pop()

    def start_part(self, task: int, phase: Phase, microbatch: int) -> None:
        """The data or the weight gradients of a backward begin."""
        if self.is_on:
            self._push(task, -1, -1, microbatch)
            self.open[-1].part = phase

    def end_part(self) -> None:
        """They have ended."""
        if self.is_on:
            self._pop()

    def waited(self, issuer: Any, since: Any, until: Any) -> None:
        """This rank waited for what `issuer` had started."""
        for each in self.open:
            each.waits.append((since, until))
        if not self.open:
            self.between.append((since, until))
        if isinstance(issuer, _Open):
            issuer.done = until
            issuer.exposed.append((since, until))

    def _push(self, task: int, body: int, work: int, microbatch: int) -> None:
        record = _Open(task, body, work, microbatch, self.clock.now())
        record.cpu = -time.thread_time() if self.has_cpu else 0.0
        self.open.append(record)
        self.recorded.append(record)
        self.waiting.task = record

    def _pop(self) -> None:
        record = self.open.pop()
        record.end = self.clock.now()
        record.cpu += time.thread_time() if self.has_cpu else 0.0
        self.waiting.task = self.open[-1] if self.open else None

    def _second(self, moment: Any) -> float:
        return self.clock.seconds(moment) + self.offset_s

    def _length(self, spans: list[tuple[Any, Any]]) -> float:
        return sum(self.clock.seconds(b) - self.clock.seconds(a) for a, b in spans)

    def _closed(self, each: _Open) -> TaskTime:
        work = self._work(each)
        name = self.program.task_name(each.task) if each.task >= 0 else "step"
        return TaskTime(
            each.task, each.body, each.work, each.microbatch,
            self._second(each.start), self._second(each.end), self._length(each.waits),
            None if each.done is None else self._second(each.done), self._length(each.exposed),
            "step" if work is None else work.purpose.words,
            "" if work is None else (each.part or work.phase).name.lower(),
            APART if each.part else "" if work is None else work.op or work.collective,
            -1 if work is None else work.stage, name, each.cpu if self.has_cpu else None,
        )  # fmt: skip

    def _work(self, each: _Open) -> Work | None:
        if each.work < 0:
            return self.program.work_of(each.task) if each.task >= 0 else None
        inside = self.program if each.body < 0 else self.program.bodies[each.body].program
        return inside.works[each.work]


def probed(
    rank: int, world: int, device: torch.device, offset_s: float, timeout_s: float = 300.0
) -> tuple[Probe, ...]:
    """What messages and collectives of all ranks take at the quickest; all ranks call it."""
    probes = []
    line = tuple(range(world))
    comm = None
    if world > 1 and device.type == "cpu":  # the same calls as a run's, in a group of all ranks
        comm = Communicator(Lines((line,), (), ()), device, timeout_s)
    for size in PROBED if world > 1 else ():
        own = torch.ones(-(-size // world), device=device)
        whole = own.new_empty(own.numel() * world)
        size_bytes = float(whole.numel() * 4)
        calls: dict[str, Callable[..., Any]] = {
            "all_reduce": lambda whole: dist.all_reduce(whole, async_op=True),
            "all_gather": lambda whole, own=own: gather(whole, own, async_op=True),
            "reduce_scatter": lambda whole, own=own: scatter(own, whole, async_op=True),
        }
        for name, call in calls.items():
            tried = [_tried(partial(call, whole), device) for _ in range(PROBES)]
            # The quickest in all: who was interrupted before it began to wait has waited little.
            seconds, issue_s = min(tried, key=sum)
            between_s, host_s = (
                (None, None) if comm is None
                else _between(partial(_as_run, comm, name, line), whole, offset_s, world)
            )  # fmt: skip
            probes.append(Probe(name, size_bytes, seconds, issue_s, between_s, host_s))
        sent = min(_there_and_back(rank, whole, device) for _ in range(PROBES))
        probes += [Probe(SEND, size_bytes, sent / 2)] if rank == 0 else []
    return tuple(probes)


def _tried(call: Callable[[], Any], device: torch.device) -> tuple[float, float]:
    """Seconds of a collective once it was started, and to start it."""
    dist.barrier()
    began = time.perf_counter()
    handle = call()
    started = time.perf_counter()
    handle.wait()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started, started - began


def _as_run(comm: Communicator, name: str, line: tuple[int, ...], whole: torch.Tensor) -> Pending:
    """Start a collective as a block does that runs op by op."""
    if name == "all_reduce":
        return comm.all_reduce(whole.clone(), line)
    parts = whole.chunk(len(line))
    if name == "reduce_scatter":
        return comm.reduce_scatter([[part] for part in parts], line)
    return comm.all_gather(parts[comm.rank], [part.numel() for part in parts], line)


def _between(
    start: Callable[[torch.Tensor], Pending], whole: torch.Tensor, offset_s: float, world: int
) -> tuple[float, float | None]:
    """A collective between computing: seconds once the last rank has started it; processor time.

    The latter is of this rank: until what came lies together, and what it computes slower then.
    """
    moments, host = [], []
    square, rows = torch.ones(COMPUTED, COMPUTED), torch.ones(4 * COMPUTED, COMPUTED)

    def compute() -> float:
        since = time.thread_time()
        torch.mm(square, square)
        rows.mul_(1.0).sum(1)
        return time.thread_time() - since

    for _ in range(PROBES):
        until = time.thread_time() + APART_S
        while time.thread_time() < until:
            compute()
        whole.fill_(1.0)
        usual_s = compute()
        since = time.thread_time()
        pending = start(whole)
        began = time.perf_counter()
        came = pending.wait()
        ended = time.perf_counter()
        if isinstance(came, list):
            torch.cat(came)
        own_s = time.thread_time() - since
        moments.append((began + offset_s, ended + offset_s))
        host.append(own_s + max(0.0, compute() - usual_s))
    own = torch.tensor(moments, dtype=torch.float64)
    every = own.new_empty(world * PROBES, 2)
    gather(every, own)
    last = every.view(world, PROBES, 2)[:, :, 0].amax(0)
    is_all = torch.get_num_threads() == 1  # else others of this process compute as well
    return max(0.0, float((own[:, 1] - last).min())), statistics.median(host) if is_all else None


def updates_tried(optimizers: Sequence[torch.optim.Optimizer]) -> tuple[Probe, ...]:
    """What PyTorch's own optimizers usually take for each tensor, whatever its size."""
    probes = []
    for optimizer in optimizers:
        if not type(optimizer).__module__.startswith("torch.optim"):
            continue
        parts = [torch.nn.Parameter(torch.zeros(1)) for _ in range(PARTS)]
        tried = copy.copy(optimizer)  # the same settings, and none of its tensors
        tried.param_groups = [{**optimizer.param_groups[0], "params": parts}]
        tried.state = defaultdict(dict)
        seconds = []
        for _ in range(PROBES):
            for part in parts:
                part.grad = torch.zeros(1)
            began = time.thread_time()
            tried.step()
            seconds.append((time.thread_time() - began) / PARTS)
        probes.append(Probe(UPDATE, 4.0, statistics.median(seconds)))
    return tuple(probes)


def _there_and_back(rank: int, tensor: torch.Tensor, device: torch.device) -> float:
    """Seconds of a message to the second rank and back."""
    dist.barrier()
    began = time.perf_counter()
    if rank == 0:
        dist.send(tensor, 1)
        dist.recv(tensor, 1)
    elif rank == 1:
        dist.recv(tensor, 0)
        dist.send(tensor, 0)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began


def clock_offset_s(rank: int, device: torch.device) -> float:
    """What must be added to this rank's clock to have rank 0's; all ranks call it."""
    world = dist.get_world_size()
    offset = 0.0
    for other in range(1, world):
        if rank == 0:
            for _ in range(ROUNDS):
                dist.recv(torch.zeros(1, dtype=torch.float64, device=device), other)
                answer = torch.tensor([time.perf_counter()], dtype=torch.float64, device=device)
                dist.send(answer, other)
        elif rank == other:
            offset = _offset_from_zero(device)
    return offset


def _offset_from_zero(device: torch.device) -> float:
    best, offset = float("inf"), 0.0
    for _ in range(ROUNDS):
        answer = torch.zeros(1, dtype=torch.float64, device=device)
        asked = time.perf_counter()
        dist.send(answer, 0)
        dist.recv(answer, 0)
        theirs = float(answer)
        now = time.perf_counter()
        if now - asked < best:
            best, offset = now - asked, theirs - (asked + now) / 2
    # No more is known than half of the way there and back: on one machine it is one clock.
    return offset if abs(offset) > best / 2 else 0.0
