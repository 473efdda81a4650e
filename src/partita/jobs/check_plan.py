"""Is a plan what it claims to be? Checked anew, without trusting whoever made it.

The model and machine are those that the plan carries, or rebuilt from their names, and compared by
fingerprint; no code of the model is run; every forward op
must have exactly one split that its loop nest allows, on devices that exist; the plan is lowered,
its program checked for deadlock and for its meaning (every tensor in the layout that its reader
needs, partial sums reduced, messages matched, also inside the blocks of a pipeline), run, the run
verified, memory included; and the time it takes and the memory must be what the plan predicts.
"""

from collections import Counter

from partita import units
from partita.cluster import Cluster
from partita.engine import run
from partita.errors import InputError, PlanError
from partita.graph.loops import loop_nest
from partita.graph.record import Graph
from partita.jobs.workload import load_cluster, load_model
from partita.lower import lower_plan
from partita.plans import Axis, OpSplit, Plan, Stage
from partita.verify import verify_meaning, verify_program, verify_timeline

TOLERANCE = 1e-6


def check_plan(plan: Plan) -> tuple[str, ...]:
    """What is wrong with a plan, in words; empty if nothing is."""
    try:
        cluster, graph = load_cluster(plan), load_model(plan).graph
    except InputError as error:
        return (str(error),)
    if cluster.fingerprint() != plan.cluster.fingerprint:
        return (f"the machine {plan.cluster.spec} is not the one the plan was made for",)
    return wrong_decisions(plan, graph, cluster) or _check_run(plan, graph, cluster)


def wrong_decisions(plan: Plan, graph: Graph, cluster: Cluster) -> tuple[str, ...]:
    """Which decisions cannot be carried out, in words: ops, splits, devices that are not there."""
    violations = _check_ops(plan, graph)
    for stage in plan.stages:
        violations.extend(_check_stage(stage, graph, cluster))
    return tuple(violations)


def refuse_wrong_decisions(plan: Plan, graph: Graph, cluster: Cluster) -> None:
    """Raise where a plan cannot be carried out."""
    violations = wrong_decisions(plan, graph, cluster)
    if violations:
        more = f" (and {len(violations) - 1} more)" if len(violations) > 1 else ""
        raise PlanError(
            f"{violations[0]}{more}", fix="plan again; partita verify lists all", field="stages"
        )


def _check_ops(plan: Plan, graph: Graph) -> list[str]:
    """Every forward op in exactly one stage, and no stage before what it reads."""
    wanted = [op.name for op in graph.ops if op.phase == "forward"]
    given = [split.op for stage in plan.stages for split in stage.splits]
    violations = [f"op {op!r} has no split" for op in sorted(set(wanted) - set(given))]
    violations += [f"op {op!r} is not in the model" for op in sorted(set(given) - set(wanted))]
    violations += [f"op {op!r} is split twice" for op, n in sorted(Counter(given).items()) if n > 1]
    stage_of = {split.op: i for i, stage in enumerate(plan.stages) for split in stage.splits}
    for source, target, _ in graph.edges():
        if source.phase == target.phase == "forward":
            a, b = stage_of.get(source.name, 0), stage_of.get(target.name, len(plan.stages))
            if a > b:
                stages = plan.stages[a].name, plan.stages[b].name
                violations.append(
                    f"op {target.name!r} of {stages[1]} reads what {stages[0]} makes later"
                )
    return violations


def _check_stage(stage: Stage, graph: Graph, cluster: Cluster) -> list[str]:
    violations = [
        f"device {device} does not exist; there are {cluster.num_devices}"
        for device in stage.mesh.devices
        if not 0 <= device < cluster.num_devices
    ]
    known = {op.name for op in graph.ops if op.phase == "forward"}
    for split in stage.splits:
        if split.op in known:
            violations.extend(_check_split(graph, split, stage.mesh.axes))
    return violations


def _check_split(graph: Graph, split: OpSplit, axes: tuple[Axis, ...]) -> list[str]:
    op = split.op
    legal = {dim.name: dim for dim in loop_nest(graph.call(graph.op(op))).dims}
    parts: dict[str, int] = {}
    for dim, axis in zip(split.dims, axes, strict=True):
        if dim:
            parts[dim] = parts.get(dim, 1) * axis.parts
    violations = []
    for dim, count in parts.items():
        if count == 1:
            continue
        if dim not in legal or legal[dim].whole:
            violations.append(f"op {op!r} cannot be split along {dim!r}")
        elif legal[dim].extent % count:
            violations.append(
                f"op {op!r}: {dim} of {legal[dim].extent} is not divisible by {count}"
            )
    return violations


def _check_run(plan: Plan, graph: Graph, cluster: Cluster) -> tuple[str, ...]:
    try:
        lowered = lower_plan(
            plan.stages, plan.schedule, graph, cluster, run, execution=plan.model.execution
        )
    except InputError as error:
        return (str(error),)
    program = lowered.program
    violations = (
        *verify_program(program),
        *verify_meaning(program, graph, lowered.stages, plan.schedule),
    )
    if violations:
        return violations
    timeline = run(program)
    violations = verify_timeline(program, timeline)
    predicted = plan.prediction.step_s
    if abs(timeline.makespan - predicted) > TOLERANCE * max(timeline.makespan, predicted):
        claim = (
            f"the plan predicts {predicted:.6g} s, it takes {timeline.makespan:.6g} s; it was "
            "edited, or predicted with other costs: simulate it, or plan again"
        )
        violations = (*violations, claim)
    said, peak = max(plan.prediction.peak_memory_bytes, default=0.0), float(timeline.peaks().max())
    if abs(said - peak) > TOLERANCE * max(said, peak):
        claim = (
            f"the plan predicts {units.size(said)} at most on a device, it takes {units.size(peak)}"
        )
        violations = (*violations, claim)
    return violations
