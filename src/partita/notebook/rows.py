"""What each kind of result holds, row by row: `TABLES`, keyed by the name of its class."""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from partita.notebook.table import ResultTable, Value

if TYPE_CHECKING:
    from partita.cluster import Cluster
    from partita.forecast import Forecast
    from partita.forecast.compare import Sensitivity
    from partita.gpu.accelerate.report import AcceleratedReport
    from partita.gpu.rtasks.outcome import Outcome
    from partita.gpu.streams.api import Streamed
    from partita.graph import Graph
    from partita.jobs.compare import Comparison
    from partita.jobs.compare_curve import ComparedCurve
    from partita.jobs.compare_trace import TraceComparison
    from partita.jobs.curve import Curve
    from partita.jobs.diff import Difference
    from partita.jobs.experiment import ExperimentOutcome
    from partita.jobs.explain import Explanation
    from partita.jobs.explain_plan import Explained
    from partita.jobs.kineto import KinetoComparison
    from partita.jobs.partition import Partitioned
    from partita.jobs.place_result import Placed
    from partita.jobs.plan_simulator import Planned
    from partita.jobs.rtasks import FusedPlan
    from partita.jobs.schedule import ScheduleResult
    from partita.jobs.shard import Sharding
    from partita.jobs.simulate import Simulation
    from partita.jobs.streams import AnalyticStreams
    from partita.jobs.validate import Validation
    from partita.plans import Plan
    from partita.program import Program
    from partita.search.base import Result
    from partita.timeline import Timeline


def result_table(result: object) -> ResultTable:
    """The table of any result."""
    return TABLES[type(result).__name__](result)


def _table(columns: str, rows: Iterable[tuple[Value, ...]]) -> ResultTable:
    return ResultTable(tuple(columns.split()), tuple(rows))


def _planned(result: "Planned") -> ResultTable:
    """The plan and the next best."""
    best = () if result.best is None else (result.best,)
    return _table(
        "found_by plan step_s low_s high_s objective_s peak_bytes capacity_bytes bubble mfu fits",
        (
            (one.name, one.simulation.arrangement, one.step_s, *one.simulation.likely_step_s,
             one.objective_s, *one.simulation.fullest, one.simulation.bubble, one.simulation.mfu,
             one.fits)
            for one in (*best, *result.others)
        ),
    )  # fmt: skip


def _simulation(result: "Simulation") -> ResultTable:
    """Every op of the busiest device."""
    return _table(
        "op kind phase seconds bound",
        ((op.name, op.kind, op.phase, op.cost.seconds, op.cost.bound) for op in result.ops),
    )


def _forecast(result: "Forecast") -> ResultTable:
    """Where the step goes, part by part."""
    exposed = [(f"exposed {name} communication", s) for name, s in result.exposed_s if s > 0]
    parts = [*result.parts_s, *exposed, ("bubble", result.bubble_s)]
    return _table("part seconds share", ((name, s, s / result.step_s) for name, s in parts))


def _sensitivity(result: "Sensitivity") -> ResultTable:
    """The step with each parameter worse."""
    return _table(
        "parameter meaning factor step_s winner winner_s",
        (
            (shift.name, shift.words, shift.factor, shift.step_s, str(shift.winner), shift.winner_s)
            for shift in result.shifts
        ),
    )


def _comparison(result: "Comparison") -> ResultTable:
    """Every strategy; nothing where it cannot run."""
    rows: list[tuple[Value, ...]] = []
    for row in result.rows:
        simulation = row.simulation
        if simulation is None:
            rows.append((row.name, "", None, None, None, None, False, row.note))
        else:
            rows.append((
                row.name, simulation.arrangement, simulation.step_s, *simulation.likely_step_s,
                simulation.fullest[0], row.fits, row.note,
            ))  # fmt: skip
    return _table("strategy plan step_s low_s high_s peak_bytes fits note", rows)


def _schedule(result: "ScheduleResult") -> ResultTable:
    """When every block runs."""
    blocks = result.problem.blocks
    return _table(
        "microbatch block start end devices",
        (
            (microbatch, result.problem.label(block), start, start + blocks[block].span,
             " ".join(map(str, blocks[block].devices)))
            for microbatch, block, start in result.starts
        ),
    )  # fmt: skip


def _partitioned(result: "Partitioned") -> ResultTable:
    """Every stage."""
    return _table(
        "stage device ops forward_ms backward_ms sent_bytes held_bytes",
        (
            (one.stage, one.device, one.num_ops, one.forward_ms, one.backward_ms, one.sent_bytes,
             one.held_bytes)
            for one in result.reports
        ),
    )  # fmt: skip


def _placed(result: "Placed") -> ResultTable:
    """Every placement that was simulated."""
    front = result.front()
    return _table(
        "name step_s peak_bytes devices fits on_front best",
        (
            (one.name, one.step_s, max(one.peak_bytes), one.num_devices, one.fits, one in front,
             one == result.best)
            for one in result.tried
        ),
    )  # fmt: skip


def _sharding(result: "Sharding") -> ResultTable:
    """Every way that was tried."""
    return _table(
        "found_by mesh step_s low_s high_s peak_bytes fits",
        (
            (one.name, one.mesh, one.step_s, *one.simulation.likely_step_s,
             one.simulation.fullest[0], one.simulation.fits)
            for one in result.tried
        ),
    )  # fmt: skip


def _validation(result: "Validation") -> ResultTable:
    """Every run beside its forecast."""
    rows: list[tuple[Value, ...]] = []
    for one in result.checked:
        low, high = one.interval_s or (None, None)
        rows.append((
            one.row.id, one.row.group, one.row.model.name, one.row.machine.kind.name,
            one.row.machine.num_devices, one.row.measured_s, one.predicted_s, low, high, one.error,
            one.covered, one.left_out,
        ))  # fmt: skip
    columns = "id group model device devices measured_s predicted_s low_s high_s error covered"
    return _table(f"{columns} left_out", rows)


def _difference(result: "Difference") -> ResultTable:
    """Every figure of both plans, then where the step goes."""
    return _table(
        "name first second ratio unit",
        (
            (one.name, one.first, one.second, one.second / one.first if one.first else None,
             one.unit)
            for one in (*result.figures, *result.parts)
        ),
    )  # fmt: skip


def _compared_trace(result: "TraceComparison") -> ResultTable:
    """Predicted and measured, by purpose, phase and stage."""
    return _table(
        "purpose phase stage count predicted_s measured_s",
        (
            (row.purpose, row.phase, row.stage, row.count, row.predicted_s, row.measured_s)
            for row in result.rows
        ),
    )


def _plan(result: "Plan") -> ResultTable:
    """How every op is split."""
    return _table(
        "stage op split zero",
        (
            (stage.name, split.op, " x ".join(dim or "-" for dim in split.dims), split.zero)
            for stage in result.stages
            for split in stage.splits
        ),
    )


def _timeline(result: "Timeline") -> ResultTable:
    """Every task on every lane that it occupies."""
    from partita.report.tasks import CATEGORIES, categories

    program = result.program
    kinds = categories(program)
    rows: list[tuple[Value, ...]] = []
    for lane, about in enumerate(program.lanes):
        for task in result.lane_tasks(lane).tolist():
            microbatch = int(program.microbatch[task])
            rows.append((
                about.name, program.blocks[program.block[task]], CATEGORIES[kinds[task]],
                None if microbatch < 0 else microbatch, float(result.start[task]),
                float(result.end[task]),
            ))  # fmt: skip
    return _table("lane task kind microbatch start end", rows)


def _result(result: "Result[Any]") -> ResultTable:
    """How a search went: best and bound over its time, the end last."""
    end = (result.seconds, result.objective, result.lower_bound, result.evaluations)
    steps = [(s.seconds, s.objective, s.lower_bound, s.evaluations) for s in result.history]
    return _table("seconds objective lower_bound evaluations", [*steps, end])


def _streams(result: "AnalyticStreams") -> ResultTable:
    """Every method that was tried."""
    return _table(
        "method status us bound_us seconds",
        (
            (one.method, str(one.status), one.objective, one.lower_bound, one.seconds)
            for one in result.results
        ),
    )


def _fused(result: "FusedPlan") -> ResultTable:
    """When every tile runs."""
    return _timeline(result.timeline())


def _curve(result: "Curve") -> ResultTable:
    """Every plan of every number of devices."""
    front = result.front
    return _table(
        "devices cluster plan found_by step_s low_s high_s peak_bytes price_per_step best on_front",
        (
            (one.num_devices, one.cluster, one.arrangement, one.found_by, one.step_s,
             *one.step_interval_s, one.peak_memory_bytes, one.price_per_step, one.is_best,
             one in front)
            for one in result.points
        ),
    )  # fmt: skip


def _compared_curve(result: "ComparedCurve") -> ResultTable:
    """Every strategy on every number of devices that it fits."""
    return _table(
        "devices strategy plan objective_s",
        (
            (number, name, result.plans[name, number], result.objective_s[name, number])
            for number in result.numbers
            for name in result.names
            if (name, number) in result.objective_s
        ),
    )


def _explained(result: "Explained") -> ResultTable:
    """Where the step goes on the busiest devices."""
    return _table(
        "kind part where seconds share",
        (
            (part.item.kind, part.item.what, part.item.where, part.seconds, part.share)
            for part in result.parts
        ),
    )


def _explanation(result: "Explanation") -> ResultTable:
    """The other ways to split an op, and what each would add."""
    from partita.jobs.explain import describe

    return _table(
        "split added_s alone_s together_s memory_bytes",
        (
            (describe(one.choice), one.added_s, one.alone_s, one.together_s, one.memory_bytes)
            for one in result.alternatives
        ),
    )


def _experiment(result: "ExperimentOutcome") -> ResultTable:
    """Every run."""
    return _table(
        "case optimiser seed step_s bound_s evaluations seconds status",
        (
            (one.case, one.optimiser, one.seed, one.objective_s, one.lower_bound_s,
             one.evaluations, one.seconds, one.status)
            for one in result.runs
        ),
    )  # fmt: skip


def _kineto(result: "KinetoComparison") -> ResultTable:
    """Predicted and measured seconds of a step by category."""
    return _table(
        "category predicted_s measured_s",
        (
            (name, result.predicted.get(name, 0.0), result.measured.get(name, 0.0))
            for name in dict.fromkeys((*result.predicted, *result.measured))
        ),
    )


def _graph(result: "Graph") -> ResultTable:
    """Every op, what it makes and what it costs."""
    from partita.graph.work import flops, traffic_bytes

    return _table(
        "op kind phase makes shape parameters flops bytes",
        (
            (op.name, op.kind, op.phase, ", ".join(op.outputs),
             ", ".join("x".join(map(str, result.tensor(name).shape)) for name in op.outputs),
             sum(result.tensor(name).num_elements for name in dict.fromkeys(op.inputs)
                 if result.tensor(name).role == "parameter"),
             flops(result.call(op)), traffic_bytes(result, op))
            for op in result.ops
        ),
    )  # fmt: skip


def _cluster(result: "Cluster") -> ResultTable:
    """Every device with what it has."""
    kinds = [result.kind_of(index) for index in range(result.num_devices)]
    return _table(
        "device node kind memory_bytes memory_bytes_per_s f32_flops_per_s",
        (
            (device.name, device.node, kind.name, kind.memory_bytes, kind.memory_bytes_per_s,
             kind.peak("f32"))
            for device, kind in zip(result.devices, kinds, strict=True)
        ),
    )  # fmt: skip


def _program(result: "Program") -> ResultTable:
    """Every task on each lane that it takes."""
    labels = [result.task_label(task) for task in range(result.num_tasks)]
    return _table(
        "lane task kind microbatch duration waits",
        (
            (result.lanes[lane].name, label.block, label.kind.words, label.microbatch,
             float(result.duration[task]),
             int(result.wait_start[task + 1] - result.wait_start[task]))
            for task, label in enumerate(labels)
            for lane in result.lanes_of(task)
        ),
    )  # fmt: skip


def _accelerated(result: "AcceleratedReport") -> ResultTable:
    """What was timed, and which is called."""
    return _table(
        "candidate us kept", ((name, us, name == result.kept) for name, us in result.times_us)
    )


def _streamed(result: "Streamed") -> ResultTable:
    """What was timed for each shape of inputs, and which is called."""
    return _table(
        "inputs candidate us kept",
        (
            (", ".join("x".join(map(str, shape)) for shape in one.shapes), name, us,
             name == one.label)
            for one in result.schedules
            for name, us in one.times_us
        ),
    )  # fmt: skip


def _fused_outcome(result: "Outcome") -> ResultTable:
    """The regions that are one kernel, and what PyTorch runs."""
    regions = (
        (one.name, one.num_ops, one.num_tiles, one.planned_us, one.bound_us, one.fused_us,
         one.unfused_us, one.kept, one.about)
        for one in result.regions
    )  # fmt: skip
    left = (
        (name, None, None, None, None, None, None, False, why) for name, why in result.fallbacks
    )
    return _table(
        "region ops tiles planned_us bound_us fused_us unfused_us kept about", (*regions, *left)
    )


TABLES: dict[str, Callable[[Any], ResultTable]] = {
    "Accelerated": lambda fast: _accelerated(fast.report()),
    "AcceleratedReport": _accelerated,
    "AnalyticStreams": _streams,
    "Cluster": _cluster,
    "ComparedCurve": _compared_curve,
    "Comparison": _comparison,
    "Curve": _curve,
    "Difference": _difference,
    "ExperimentOutcome": _experiment,
    "Explained": _explained,
    "Explanation": _explanation,
    "Forecast": _forecast,
    "FusedModel": lambda fused: _fused_outcome(fused.report()),
    "FusedPlan": _fused,
    "Graph": _graph,
    "KinetoComparison": _kineto,
    "Outcome": _fused_outcome,
    "Partitioned": _partitioned,
    "Placed": _placed,
    "Plan": _plan,
    "Planned": _planned,
    "Program": _program,
    "Result": _result,
    "ScheduleResult": _schedule,
    "Sensitivity": _sensitivity,
    "Sharding": _sharding,
    "Simulation": _simulation,
    "Streamed": _streamed,
    "Timeline": _timeline,
    "TraceComparison": _compared_trace,
    "Validation": _validation,
}
