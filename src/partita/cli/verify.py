"""`partita verify FILE`: does this plan hold, can this program run, is this timeline a true run?"""

from collections.abc import Callable

import click

from partita import files
from partita.cli.base import Output, common_options
from partita.errors import FileError
from partita.program import Program
from partita.timeline import Timeline
from partita.verify import verify_program, verify_timeline

CHECKED = (
    "every block runs once per micro-batch, waits are kept, a lane does one thing at a time, "
    "memory stays within capacity, every send has its receive, nothing deadlocks"
)
MEANT = (
    "every tensor lies as its reader needs it, partial sums are reduced, gradients are complete "
    "when they are used, also inside the blocks of pipelines"
)

TORCH = (
    "every stage and micro-batch is computed once and in order, every message is received in the "
    "order of its sends, nobody waits in a circle, gradients are reduced once and at the end"
)

Findings = tuple[str, tuple[str, ...]]  # what was checked, and what is wrong with it


@click.command()
@click.argument("file")
@common_options
def command(file: str, out: Output) -> int:
    """Check FILE, a saved plan, program, timeline or CSV schedule, independently of what made it.

    A plan is checked against its model and machine, then lowered to its program, in which the
    layout of every tensor is followed, inside the blocks of pipelines too. A program is checked for
    deadlocks and unmatched messages, then run in its own order. That run, as any timeline, must
    keep every rule. Exit code 1 if anything is wrong.

    A .csv is a schedule of torch.distributed.pipelining, with messages or without: would torch run
    it to its end and compute the right gradients? A circle of waits is shown step by step. Whether
    it also runs where two ranks exchange one message at a time (NCCL) is said beside.
    """
    if file.endswith(".csv"):
        return _check_csv(file, out)
    data = files.read_bytes(file)
    kind = files.format_kind(files.decode_json(data, file), file)
    if kind not in CHECKS:
        raise FileError(
            f"found partita/{kind}",
            fix=f"one of {', '.join(f'partita/{known}' for known in CHECKS)} is needed here",
            field="format",
            file=file,
        )
    what, violations = CHECKS[kind](data, file)
    out.show(_as_text(what, violations, kind))
    out.result(
        {
            "format": "partita/verification@1",
            "file": file,
            "kind": kind,
            "verified": not violations,
            "violations": list(violations),
        }
    )
    return 1 if violations else 0


def _check_csv(file: str, out: Output) -> int:
    from partita.schedules.torch_csv import read_torch_csv
    from partita.verify.torch_schedules import verify_torch_schedule

    schedule = read_torch_csv(file)
    verdict = verify_torch_schedule(schedule)
    what = (
        f"{schedule.form} schedule of {schedule.num_stages} stages, "
        f"{schedule.num_microbatches} micro-batches, {len(schedule.rows)} ranks"
    )
    violations = tuple(map(str, verdict.refusals))
    out.show(_as_text(what, violations, "torch-schedule"))
    if not violations:
        beside = [
            *(f"where two ranks exchange one message at a time (NCCL) it hangs: {refusal}"
              for refusal in verdict.in_order),
            *(f"torch's older PipelineScheduleMulti cannot run it: {refusal}"
              for refusal in verdict.lockstep[:1] if schedule.form == "compute_only"),
            *verdict.notes,
        ]  # fmt: skip
        for line in beside:
            out.show(line)
    out.result(
        {
            "format": "partita/verification@1",
            "file": file,
            "kind": "torch-schedule",
            "verified": not violations,
            "violations": list(violations),
            "form": schedule.form,
            "nccl": list(map(str, verdict.in_order)),
            "lockstep": list(map(str, verdict.lockstep)),
            "notes": list(verdict.notes),
        }
    )
    return 1 if violations else 0


def _check_plan(data: bytes, file: str) -> Findings:
    from partita.jobs.check_plan import check_plan
    from partita.plans import plan_from_json

    plan = plan_from_json(files.decode_json(data, file), file)
    return str(plan), check_plan(plan)


def _check_program(data: bytes, file: str) -> Findings:
    program = Program.from_json(data, file)
    violations = verify_program(program)
    if not violations:
        from partita.engine import run  # compiled code: only what can run needs it

        violations = verify_timeline(program, run(program))
    return str(program), violations


def _check_timeline(data: bytes, file: str) -> Findings:
    timeline = Timeline.from_json(data, file)
    return str(timeline), verify_timeline(timeline.program, timeline)


CHECKS: dict[str, Callable[[bytes, str], Findings]] = {
    "plan": _check_plan,
    "program": _check_program,
    "timeline": _check_timeline,
}


def _as_text(what: str, violations: tuple[str, ...], kind: str) -> str:
    if not violations:
        checked = TORCH if kind == "torch-schedule" else CHECKED
        return "\n".join([f"verified: {what}", checked, *([MEANT] if kind == "plan" else [])])
    return "\n".join([f"not verified: {what}", *(f"  {line}" for line in violations)])
