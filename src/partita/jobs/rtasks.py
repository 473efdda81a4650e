"""Plan a model as one persistent kernel: tiles on execution units, proven safe, drawn per unit."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from partita.cluster import resolve
from partita.costs.rtasks import RtasksModel, rtasks_model, side_by_side
from partita.errors import InputError, VerificationError
from partita.graph.record import Graph
from partita.jobs.workload import is_saved_graph, load
from partita.problems.rprogram import RProgram, check_rprogram, rprogram
from partita.problems.rtasks import RtasksProblem, RtasksSolution, needed_tiles, simulate
from partita.program import Kind, Program, ProgramBuilder
from partita.search import searches
from partita.search.base import UNTIL_DONE, Result, Stop
from partita.showing import plot_of, repr_html, table_of
from partita.suggest import suggest
from partita.timeline import Timeline
from partita.verify import check_timeline

MOST_TILES = 20_000  # that a timeline shows one by one


@dataclass(frozen=True)
class FusedPlan:
    """Tiles on units: what was found, the program of every unit, and what it is worth."""

    model: RtasksModel
    device: str
    result: Result[RtasksSolution]
    program: RProgram | None
    alone_s: tuple[float, ...] = ()  # of several models: each as a kernel of its own

    _repr_html_, table, plot = repr_html, table_of, plot_of  # in a notebook

    @property
    def fused_s(self) -> float | None:
        """Seconds of the one kernel, without its launch; None where nothing was found."""
        objective = self.result.objective
        return None if objective is None else objective * 1e-6

    def timeline(self) -> Timeline:
        """When every tile runs, a lane per unit program; checked by the verifier."""
        if self.result.solution is None:
            raise InputError("there is no schedule to draw", fix="give the search more time")
        return timeline_of(self.model.problem, self.result.solution)


def plan_rtasks(
    model: str | Graph,
    device: str = "H200",
    *,
    beside: Sequence[str | Graph] = (),
    batch: int | None = None,
    dtype: str | None = None,
    method: str | None = None,
    stop: Stop = UNTIL_DONE,
    seed: int = 0,
) -> FusedPlan:
    """Tiles of a model's ops on the units of one device, without having it.

    Models given as `beside` are independent of it and run in the same kernel. The batch is 1 unless
    given; a saved graph has its own.
    """
    known = searches("rtasks")
    name = method or next(iter(known))
    if name not in known:
        raise InputError(f"found {name!r}", fix=suggest(name, tuple(known)), field="method")
    machine = resolve(device)
    kind = machine.kinds[0]
    models = [
        rtasks_model(load(each, batch=_batch(each, batch), dtype=dtype, training=False).graph, kind)
        for each in (model, *beside)
    ]
    new_rtasks_model = side_by_side(models)
    result = known[name](new_rtasks_model.problem, stop, seed)
    alone: tuple[float, ...] = ()
    if beside:
        each_result = [known[name](each.problem, stop, seed) for each in models]
        alone = tuple((each.objective or 0.0) * 1e-6 for each in each_result)
    program = None
    if result.solution is not None:
        program = rprogram(new_rtasks_model.problem, result.solution)
        unsafe = check_rprogram(
            new_rtasks_model.problem,
            program,
            new_rtasks_model.problem.num_veus(result.solution.tilings),
        )
        if unsafe:
            raise VerificationError(unsafe)
    return FusedPlan(new_rtasks_model, kind.name, result, program, alone)


def _batch(model: str | Graph, batch: int | None) -> int | None:
    fixed = isinstance(model, Graph) or is_saved_graph(model)
    return batch if batch is not None or fixed else 1


def timeline_of(problem: RtasksProblem, solution: RtasksSolution) -> Timeline:
    """The run of a schedule as tasks on lanes, checked by the verifier.

    Of many tiles, those of one op that follow each other on a unit are one task, without waits.
    """
    ends, _ = simulate(problem, solution)
    if sum(map(len, solution.queues)) > MOST_TILES:
        return _aggregated(problem, solution, ends)
    program, tasks = _program(problem, solution, sorted(ends, key=lambda task: ends[task]))
    for (operator, _), moment in list(ends.items()):
        ends[operator, -1] = max(moment, ends.get((operator, -1), moment))
    end = np.array([ends[task] for task in tasks]) * 1e-6
    timeline = Timeline(program, end - program.duration, end)
    check_timeline(program, timeline)
    return timeline


def _aggregated(
    problem: RtasksProblem, solution: RtasksSolution, ends: dict[tuple[int, int], float]
) -> Timeline:
    """Runs of tiles of one op on a unit, from the start of the first to the end of the last."""
    chosen = zip(problem.operators, solution.tilings, strict=True)
    tile_us = [operator.tilings[choice].tile_us for operator, choice in chosen]
    builder = ProgramBuilder(time_unit="s")
    end: list[float] = []
    for index, queue in enumerate(solution.queues):
        lane = builder.lane(f"vEU {index}", "unit")
        for operator, run in groupby(queue, key=lambda task: task[0]):
            tiles = list(run)
            start = ends[tiles[0]] - tile_us[operator]
            many = f" x{len(tiles)}" if len(tiles) > 1 else ""
            name = f"{problem.operators[operator].name}{many}"
            builder.add(name, lane, (ends[tiles[-1]] - start) * 1e-6, (), kind=Kind.FORWARD)
            end.append(ends[tiles[-1]] * 1e-6)
    program = builder.build()
    timeline = Timeline(program, np.array(end) - program.duration, np.array(end))
    check_timeline(program, timeline)
    return timeline


def _program(
    problem: RtasksProblem, solution: RtasksSolution, order: list[tuple[int, int]]
) -> tuple[Program, list[tuple[int, int]]]:
    """Tiles in the order they end; a milestone (tile -1) stands for a whole operator."""
    chosen = zip(problem.operators, solution.tilings, strict=True)
    tilings = [operator.tilings[choice] for operator, choice in chosen]
    builder = ProgramBuilder(time_unit="s")
    lanes = [builder.lane(f"vEU {index}", "unit") for index in range(len(solution.queues))]
    home = {task: veu for veu, queue in enumerate(solution.queues) for task in queue}
    left = [tiling.num_tiles for tiling in tilings]
    made: dict[tuple[int, int], int] = {}
    tasks: list[tuple[int, int]] = []
    for operator, tile in order:
        waits = []
        for edge in problem.before[operator]:
            counts = tilings[edge.src].num_tiles, tilings[operator].num_tiles
            needed = needed_tiles(edge, *counts, tile) if edge.aligned else (-1,)
            waits += [made[edge.src, other] for other in needed]
        made[operator, tile] = builder.add(
            problem.operators[operator].name,
            lanes[home[operator, tile]],
            tilings[operator].tile_us * 1e-6,
            waits,
            kind=Kind.FORWARD,
        )
        tasks.append((operator, tile))
        left[operator] -= 1
        if left[operator] == 0:
            whole = [made[operator, other] for other in range(tilings[operator].num_tiles)]
            made[operator, -1] = builder.add(problem.operators[operator].name, (), 0.0, whole)
            tasks.append((operator, -1))
    return builder.build(), tasks
