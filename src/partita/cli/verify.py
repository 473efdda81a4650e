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

Findings = tuple[str, tuple[str, ...]]  # what was checked, and what is wrong with it


@click.command()
@click.argument("file")
@common_options
def command(file: str, out: Output) -> int:
    """Check FILE, a saved plan, program or timeline, independently of what made it.

    A plan is checked against its model and machine, then lowered to its program, in which the
    layout of every tensor is followed, inside the blocks of pipelines too. A program is checked for
    deadlocks and unmatched messages, then run in its own order. That run, as any timeline, must
    keep every rule. Exit code 1 if anything is wrong.
    """
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
        return "\n".join([f"verified: {what}", CHECKED, *([MEANT] if kind == "plan" else [])])
    return "\n".join([f"not verified: {what}", *(f"  {line}" for line in violations)])
