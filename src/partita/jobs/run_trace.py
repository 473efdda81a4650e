"""What a run was measured to do: one file per rank, with the start and end of every task.

    trace/rank0.json    {"format": "partita/run-trace@1", "plan": ..., "steps": [{"tasks": [...]}]}

Times are seconds of one clock: that of rank 0, by the offset that each rank measured before its
first traced step. A record is of a task of the program, or of one work of a body where a block runs
op by op (`body` and `work` are its numbers there; of a program without bodies `body` is -1 and
`task` is -1). `wait_s` is what of it was spent waiting for others. What sends has `done`: when its
result was there, if anybody waited for it, and `exposed_s`: how long. On a CPU with one thread a
rank, `cpu_s` is the processor time: less than the clock's where the core was another's for a while.
`probes` are collectives of some sizes that were tried before the first traced step, and the
optimizer with tensors of nothing (what it takes for each, whatever its size); `by_op` is a
step before it in which blocks that run as a whole were run op by op: what each op takes of a block.
`apart` is one in which weight gradients were taken after the next block instead of with the data
gradients: its tasks hold the two parts of a backward as records of their own (`op` is "apart").
"""

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from partita.errors import FileError, PlanError
from partita.files import encode_json, read_record, write_atomically
from partita.plans import Plan

KIND = "run-trace"
APART = "apart"  # the op of a record that is a part of a backward
SEND = "send"  # a probe from rank 0 to rank 1
UPDATE = "update of a tensor"  # a probe of the optimizer, for each tensor of one element


@dataclass(frozen=True, slots=True)
class TaskTime:
    """One task, or one work inside a block, in one step on one rank."""

    task: int
    body: int
    work: int  # -1: the task itself
    microbatch: int
    start: float
    end: float
    wait_s: float = 0.0
    done: float | None = None
    exposed_s: float = 0.0
    purpose: str = ""
    phase: str = ""
    op: str = ""
    stage: int = -1
    name: str = ""
    cpu_s: float | None = None

    @property
    def clock_s(self) -> float:
        """From start to end, without what was waited for."""
        return max(0.0, self.end - self.start - self.wait_s)

    @property
    def seconds(self) -> float:
        """The same, as far as is known without what the core did for others."""
        return self.clock_s if self.cpu_s is None else min(self.clock_s, self.cpu_s)


@dataclass(frozen=True, slots=True)
class TracedStep:
    """One step of one rank."""

    number: int
    start: float
    end: float
    tasks: tuple[TaskTime, ...]
    wait_s: float = 0.0  # between tasks: until everything was sent
    cpu_s: float | None = None


@dataclass(frozen=True, slots=True)
class Probe:
    """A collective of all ranks, or a message, that was tried: the quickest of some.

    `between_s` is the same between computing and with new memory, from when the last rank began.
    `host_s` is then usual of a rank's processor time: to lay together what is sent, start it, and
    take apart what came, and what computing takes longer right after, with a cache gone cold.
    """

    collective: str
    size_bytes: float  # of the whole tensor
    seconds: float  # once it was started
    issue_s: float = 0.0  # of the host, to start it
    between_s: float | None = None
    host_s: float | None = None


@dataclass(frozen=True, slots=True)
class RankTrace:
    """What one rank recorded."""

    plan: str  # fingerprint
    rank: int
    world: int
    device: str
    torch: str
    partita: str
    clock_offset_s: float
    steps: tuple[TracedStep, ...]
    probes: tuple[Probe, ...] = ()
    by_op: tuple[TracedStep, ...] = ()
    apart: tuple[TracedStep, ...] = ()

    def to_json(self) -> bytes:
        """The text of its file."""
        return encode_json({"format": f"partita/{KIND}@1", **asdict(self)}, indent=0)


def plan_fingerprint(plan: Plan) -> str:
    """Equal for equal plans, predictions and origins included."""
    return hashlib.sha256(plan.to_json()).hexdigest()[:16]


def trace_path(folder: str | Path, rank: int) -> Path:
    """Where a rank writes what it recorded."""
    return Path(folder) / f"rank{rank}.json"


def check_free(folder: str | Path, rank: int) -> None:
    """Refuse before a run what could not be written after it."""
    if trace_path(folder, rank).exists():
        raise FileError(
            f"the trace of rank {rank} exists already", fix="choose another folder, or remove it",
            file=str(trace_path(folder, rank)),
        )  # fmt: skip


def write_trace(folder: str | Path, trace: RankTrace) -> Path:
    """Write the file of one rank; one that is there is kept."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    return write_atomically(trace_path(folder, trace.rank), trace.to_json())


def read_traces(folder: str | Path) -> tuple[RankTrace, ...]:
    """The traces of all ranks of a run; one that is missing is named."""
    paths = sorted(Path(folder).glob("rank*.json"))
    if not paths:
        raise FileError(
            "has no rank0.json", fix="give the folder of partita run --trace", file=str(folder)
        )
    traces = {}
    for path in paths:
        trace = read_record(path, KIND, RankTrace)
        _check(trace, path)
        traces[trace.rank] = trace
    first = traces[min(traces)]
    for rank in range(first.world):
        if rank not in traces:
            raise FileError(
                f"has no trace of rank {rank} of {first.world}",
                fix="copy the files of all ranks into one folder", file=str(folder),
            )  # fmt: skip
    for trace in traces.values():
        for field in ("plan", "world"):
            if getattr(trace, field) != getattr(first, field):
                raise FileError(
                    f"is {getattr(trace, field)}, and {getattr(first, field)} in the others",
                    fix="keep the traces of one run in a folder of their own", field=field,
                    file=str(trace_path(folder, trace.rank)),
                )  # fmt: skip
    return tuple(traces[rank] for rank in range(first.world))


def _check(trace: RankTrace, path: Path) -> None:
    def refuse(wrong: str, field: str, fix: str = "trace the run again") -> None:
        raise FileError(wrong, fix=fix, field=field, file=str(path))

    if not 0 <= trace.rank < trace.world:
        refuse(f"is {trace.rank} of {trace.world}", "rank")
    if not trace.steps:
        refuse("is empty", "steps", "run more steps than --trace-warmup")
    for i, step in enumerate(trace.steps):
        for k, task in enumerate(step.tasks):
            if not task.start <= task.end:
                refuse(f"ends at {task.end} before it starts", f"steps[{i}].tasks[{k}]")


def check_plan_of(plan: Plan, traces: Sequence[RankTrace]) -> None:
    """A trace is compared with the plan that ran."""
    own = plan_fingerprint(plan)
    if traces[0].plan != own:
        raise PlanError(
            f"the trace is of another plan (fingerprint {traces[0].plan}, this one has {own})",
            fix="give the plan that was run",
            field="plan",
        )
