"""`partita explain`: why an op is split as it is, and what the other ways would cost."""

from dataclasses import asdict
from typing import Any

import click

from partita import units
from partita.cli.base import Output, common_options
from partita.jobs.explain import Explanation, describe, explain, parameter_placements
from partita.jobs.simulate import Simulation

MOST = 8


@click.command()
@click.argument("plan")
@click.argument("op", required=False)
@common_options
def command(plan: str, op: str | None, out: Output) -> int:
    """Explain a PLAN, or the split of one OP of it.

    Without OP: what bounds the plan, and how every parameter lies (as DTensor placements). With OP:
    its split, what that sends, and what each other split would add to a step, both with all other
    ops left as they are and with all others free to follow.
    """
    from partita.cluster import resolve
    from partita.jobs.simulate import simulate
    from partita.plans import read_plan

    record = read_plan(plan)
    found = simulate(record)
    if op is None:
        placements = {}
        for stage in record.stages:
            placements.update(parameter_placements(stage, found.workload.graph))
        out.show(_plan_text(found, placements))
        out.result(
            {
                "format": "partita/explanation@1",
                "plan": plan,
                "bounds_s": found.bounds(),
                "parameters": {name: list(p) for name, p in placements.items()},
            }
        )
        return 0
    told = explain(record, found.workload.graph, resolve(record.cluster.spec), op)
    out.show(_op_text(told))
    out.result({"format": "partita/explanation@1", "plan": plan, **_op_json(told)})
    return 0


def _plan_text(found: Simulation, placements: dict[str, tuple[str, ...]]) -> str:
    from partita.report.summary import headline

    most = max(found.stages, key=lambda stage: len(stage.mesh.axes))
    axes = [str(axis) for axis in most.mesh.axes]
    if len(found.stages) > 1:
        axes = [f"axis {i}" for i in range(len(axes))]
    groups: dict[tuple[str, ...], list[str]] = {}
    for name, layout in placements.items():
        groups.setdefault(layout, []).append(name)
    rows = [
        (
            *layout,
            *("",) * (len(axes) - len(layout)),
            f"{len(names)}",
            ", ".join(names[:3]) + (", ..." if len(names) > 3 else ""),
        )
        for layout, names in sorted(groups.items(), key=lambda item: -len(item[1]))
    ]
    table = units.table((*axes, "count", "parameters"), rows, numbers=(len(axes),))
    return "\n".join((*headline(found), "", table))


def _op_text(told: Explanation) -> str:
    lines = [
        f"{told.op}: {told.kind}   {told.nest}",
        f"split: {describe(told.choice)}   compute {units.seconds(told.compute_s)} in all phases",
        f"why: {told.why()}",
        "",
        units.table(("tensor", "lies as"), told.layouts),
    ]
    if told.sent:
        rows = [
            (item.what, item.collective, units.size(item.size_bytes), units.seconds(item.seconds))
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
        "why": told.why(),
        "layouts": dict(told.layouts),
        "sent": [asdict(item) for item in told.sent],
        "alternatives": [asdict(item) for item in told.alternatives],
    }
