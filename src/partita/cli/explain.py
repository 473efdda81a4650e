"""`partita explain`: what bounds a plan and what would help; why an op is split as it is."""

from dataclasses import asdict
from typing import Any

import click

from partita import units
from partita.cli.base import Output, common_options
from partita.cli.progress import saying
from partita.jobs.explain import Explanation, describe, explain, parameter_placements
from partita.jobs.explain_plan import BUDGET_S, explain_plan

MOST = 8


@click.command()
@click.argument("plan")
@click.argument("op", required=False)
@click.option(
    "--time-limit",
    type=click.FloatRange(min=0),
    default=BUDGET_S,
    show_default=True,
    help="Seconds after which no further change is simulated.",
)
@common_options
def command(plan: str, op: str | None, time_limit: float, out: Output) -> int:
    """Explain a PLAN, or the split of one OP of it.

    Without OP: what bounds the plan, where every second of its step goes on the busiest devices,
    what fills the memory, what stood against the plans that were not taken, what would help most
    (each change is simulated), and how every parameter lies (as DTensor placements). With OP:
    its split, what that sends, and what each other split would add to a step (of a pipeline, to a
    micro-batch), both with all other ops left as they are and with all others free to follow.
    """
    from partita.cli.explain_text import plan_json, plan_text
    from partita.jobs.workload import load_cluster, load_model
    from partita.plans import read_plan

    record = read_plan(plan)
    if op is None:
        with saying(out.quiet, time_limit) as say:
            told = explain_plan(record, budget_s=time_limit, say=say)
        placements = {}
        for stage in record.stages:
            placements.update(parameter_placements(stage, told.simulation.workload.graph))
        out.show(plan_text(told, placements, record))
        out.result(
            {
                "format": "partita/explanation@1",
                "plan": plan,
                **plan_json(told),
                "parameters": {name: list(p) for name, p in placements.items()},
            }
        )
        return 0
    one = explain(record, load_model(record).graph, load_cluster(record), op)
    out.show(_op_text(one))
    out.result({"format": "partita/explanation@1", "plan": plan, **_op_json(one)})
    return 0


def _op_text(told: Explanation) -> str:
    lines = [
        f"{told.op}: {told.kind}   {told.nest}",
        f"split: {describe(told.choice)}   compute {units.seconds(told.compute_s)} in all phases"
        + (f" of one of {count} micro-batches" if (count := told.num_microbatches) > 1 else ""),
        f"why: {told.why()}",
        "",
        units.table(("tensor", "lies as"), told.layouts),
    ]
    if told.sent:
        rows = [
            (
                item.what,
                item.collective.replace("_", "-"),
                units.size(item.size_bytes),
                units.seconds(item.seconds),
            )
            for item in told.sent
        ]
        lines += ["", units.table(("sent because of it", "how", "size", "time"), rows, (2, 3))]
    rows = [
        (
            describe(other.choice),
            _signed(other.alone_s),
            "" if other.together_s is None else _signed(other.together_s),
            ("+" if other.memory_bytes >= 0 else "-") + units.size(abs(other.memory_bytes)),
        )
        for other in told.alternatives[:MOST]
    ]
    if rows:
        header = ("instead", "others as they are", "others follow", "memory")
        lines += ["", units.table(header, rows, (1, 2, 3))]
    return "\n".join(lines)


def _signed(seconds: float) -> str:
    return ("+" if seconds >= 0 else "-") + units.seconds(abs(seconds))


def _op_json(told: Explanation) -> dict[str, Any]:
    return {
        "op": told.op,
        "kind": told.kind,
        "nest": told.nest,
        "split": asdict(told.choice),
        "num_microbatches": told.num_microbatches,
        "why": told.why(),
        "layouts": dict(told.layouts),
        "sent": [asdict(item) for item in told.sent],
        "alternatives": [asdict(item) for item in told.alternatives],
    }
