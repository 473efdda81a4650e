"""A traced run, ours or Kineto's, beside its prediction: as text, for programs, for Perfetto."""

from dataclasses import asdict
from typing import Any

import msgspec

from partita import units
from partita.jobs.compare_trace import Row, TraceComparison
from partita.jobs.kineto import CATEGORIES, KinetoComparison
from partita.report.trace import chrome_trace

HEADER = ("purpose", "phase", "stage", "tasks", "predicted", "measured", "ratio")
MEASURED_PID = 1000  # above the processes of the prediction


def comparison_text(compared: TraceComparison) -> str:
    """What to know, in a screenful."""
    matched = compared.matched
    steps = len(matched.traces[0].steps)
    lines = [
        f"{matched.plan.model.spec}: {len(matched.traces)} ranks on {matched.traces[0].device}, "
        f"the quicker {steps} of the traced steps",
        "",
        f"step     predicted {units.seconds(compared.predicted_s)}, "
        f"measured {units.seconds(compared.measured_s)} "
        f"({_times(compared.measured_s, compared.predicted_s)})",
        f"bubble   predicted {compared.predicted_bubble:.0%}, "
        f"measured {compared.measured_bubble:.0%}",
        "",
        units.table(HEADER, [_row(row) for row in compared.rows], (3, 4, 5, 6)),
        "",
        units.table(
            ("largest differences", "predicted", "measured", "ratio"),
            [
                (task.name, units.seconds(task.predicted_s), units.seconds(task.measured_s or 0.0),
                 _times(task.measured_s or 0.0, task.predicted_s))
                for task in compared.slowest
            ],
            (1, 2, 3),
        ),
        "",
    ]  # fmt: skip
    worst = compared.worst
    if worst is None:
        lines.append("every assumption was right within 10 %")
    else:
        lines.append(f"the assumption that was most wrong: {worst.name}")
    for cause in compared.causes:
        mark = "wrong" if cause.is_wrong else "right"
        lines.append(f"  {cause.name:<13}{mark}  {cause.sentence}")
    return "\n".join(lines)


def _row(row: Row) -> tuple[str, ...]:
    hidden = f" ({row.hidden} hidden)" if row.hidden else ""
    measured = units.seconds(row.measured_s) if row.hidden < row.count else "hidden"
    ratio = _times(row.measured_s, row.predicted_s) if row.hidden < row.count else ""
    return (
        row.purpose, row.phase, row.stage, f"{row.count}{hidden}", units.seconds(row.predicted_s),
        measured, ratio,
    )  # fmt: skip


def _times(measured_s: float, predicted_s: float) -> str:
    return f"{measured_s / predicted_s:.3g}x" if predicted_s > 0 else "-"


def comparison_json(compared: TraceComparison) -> dict[str, Any]:
    """The same for programs, every task included."""
    matched, worst = compared.matched, compared.worst
    return {
        "format": "partita/trace-comparison@1",
        "model": matched.plan.model.spec,
        "ranks": len(matched.traces),
        "predicted_step_s": compared.predicted_s,
        "measured_step_s": compared.measured_s,
        "predicted_bubble": compared.predicted_bubble,
        "measured_bubble": compared.measured_bubble,
        "wrong": None if worst is None else worst.name,
        "causes": [msgspec.to_builtins(cause) for cause in compared.causes],
        "rows": [msgspec.to_builtins(row) for row in compared.rows],
        "rank_times": [
            {**msgspec.to_builtins(rank), "host_s": rank.host_s} for rank in matched.ranks
        ],
        "tasks": [
            {
                "task": task.key[0], "body": task.key[1], "work": task.key[2], "name": task.name,
                "purpose": task.work.purpose.words, "phase": task.work.phase.name.lower(),
                "op": task.work.op, "stage": task.work.stage, "microbatch": task.microbatch,
                "predicted_s": task.predicted_s, "measured_s": task.measured_s,
            }
            for task in matched.tasks
        ],
    }  # fmt: skip


def comparison_trace(compared: TraceComparison) -> bytes:
    """The predicted step and the first measured one in one trace for Perfetto."""
    content = msgspec.json.decode(chrome_trace(compared.matched.timeline))
    events = content["traceEvents"]
    traces = compared.matched.traces
    zero = min(trace.steps[0].start for trace in traces)
    for trace in traces:
        pid = MEASURED_PID + trace.rank
        name = {"name": f"measured, rank {trace.rank}"}
        events.append({"ph": "M", "pid": pid, "tid": 0, "name": "process_name", "args": name})
        for each in trace.steps[0].tasks:
            what = each.op if each.work >= 0 else each.name
            events.append({
                "ph": "X", "pid": pid, "tid": 1, "name": what or each.purpose, "cat": each.purpose,
                "ts": round((each.start - zero) * 1e6, 3),
                "dur": round((each.end - each.start) * 1e6, 3),
                "args": {"task": each.task, "phase": each.phase, "stage": each.stage,
                         "microbatch": each.microbatch, "wait_us": each.wait_s * 1e6},
            })  # fmt: skip
    return msgspec.json.encode(content) + b"\n"


def kineto_text(compared: KinetoComparison) -> str:
    """A table of categories, and the one that differs most."""
    where = "kernels of the device" if compared.on_device else "ops of the CPU"
    rows = [
        (
            name, units.seconds(compared.predicted[name]), units.seconds(compared.measured[name]),
            _times(compared.measured[name], compared.predicted[name]),
        )
        for name in CATEGORIES
    ]  # fmt: skip
    rows.append((
        "step", units.seconds(compared.predicted_step_s), units.seconds(compared.measured_step_s),
        _times(compared.measured_step_s, compared.predicted_step_s),
    ))  # fmt: skip
    worst = most_wrong(compared)
    return "\n".join((
        f"{compared.file}: {where} in {compared.num_steps} steps, per step",
        "",
        units.table(("category", "predicted", "measured", "ratio"), rows, (1, 2, 3)),
        "",
        f"the largest difference: {worst}, {units.seconds(compared.measured[worst])} measured "
        f"for {units.seconds(compared.predicted[worst])} predicted",
    ))  # fmt: skip


def most_wrong(compared: KinetoComparison) -> str:
    """The category whose seconds differ most."""
    return max(CATEGORIES, key=lambda c: abs(compared.measured[c] - compared.predicted[c]))


def kineto_json(compared: KinetoComparison) -> dict[str, Any]:
    """The same for programs."""
    return {
        "format": "partita/kineto-comparison@1", **asdict(compared), "wrong": most_wrong(compared),
    }  # fmt: skip
