"""A traced step on cores of their own: the program of the plan with what its tasks took.

Where ranks had to share their cores, the clock says little. The processor time of a task is what it
would take alone; a rank's time between tasks is spread over its computing. Messages and collectives
take what those took that were tried before the first traced step, by their latency, fixed and
bandwidth parts. Then the engine says when everything would have run.
"""

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from partita.cluster.calibration import calibrated
from partita.engine import run
from partita.jobs.calibrate import base_cluster, link_calibration, link_fit
from partita.jobs.trace_match import ALL_UPDATES, COMPUTE, MatchedRun
from partita.lower import lower_plan
from partita.meaning import COMMUNICATION, Purpose
from partita.program import Program

F64 = npt.NDArray[np.float64]


def with_replay(matched: MatchedRun) -> MatchedRun:
    """The same run with its replayed step, where it needs one."""
    return replace(matched, replayed_s=replayed_s(matched)) if matched.is_shared else matched


def replayed_s(matched: MatchedRun) -> float:
    """Seconds of the step on cores of their own."""
    base, plan, graph = base_cluster(matched), matched.plan, matched.workload.graph
    lowered = lower_plan(matched.lowered.stages, plan.schedule, graph, base, run)
    fit = link_fit(matched, lowered, base)
    if fit is not None:
        machine = calibrated(base, link_calibration(matched, base, fit))
        lowered = lower_plan(lowered.stages, plan.schedule, graph, machine, run)
    program = lowered.program
    took, inner = _took(matched)
    duration = program.duration.copy()
    _set(duration, program, took.get(-1, {}))
    for task, seconds in took.get(None, {}).items():
        duration[task] = seconds
    for task, seconds in inner.items():
        duration[task] = seconds + _sent_inside(program, task)
    return run(replace(program, duration=duration)).makespan


Took = dict[int | None, dict[int, float]]  # None: by task; else by work of this body


def _took(matched: MatchedRun) -> tuple[Took, dict[int, float]]:
    """Seconds of computing by task and, of one stage that runs once, by work; of blocks by work."""
    spread = {
        rank.rank: rank.busy_s / rank.compute_s if rank.compute_s > 0 else 1.0
        for rank in matched.ranks
    }
    took: Took = {}
    inner: dict[int, float] = {}
    for match in matched.tasks:
        if match.work.purpose not in COMPUTE:
            continue
        task, body, number = match.key
        seconds = max(own * spread[rank] for rank, own in match.by_rank.items())
        if number == -1:
            took.setdefault(None, {})[task] = seconds
        elif body < 0:
            took.setdefault(body, {})[number] = seconds
        else:
            inner[task] = inner.get(task, 0.0) + seconds
    return took, inner


def _set(duration: F64, program: Program, took: dict[int, float]) -> None:
    updates = [n for n, work in enumerate(program.works) if work.purpose is Purpose.UPDATE]
    for task, number in enumerate(program.work.tolist()):
        if number in took:
            duration[task] = took[number]
        elif number in updates and ALL_UPDATES in took:
            duration[task] = took[ALL_UPDATES] / len(updates)


def _sent_inside(program: Program, task: int) -> float:
    """What is sent inside of a block that runs op by op, one after the other."""
    work = program.work_of(task)
    if work is None or work.body < 0:
        return 0.0
    within = program.bodies[work.body].program
    kinds = {w: each for w, each in enumerate(within.works) if each.purpose in COMMUNICATION}
    sent: dict[int, float] = {}
    for each, number in enumerate(within.work.tolist()):
        if number in kinds and kinds[number].phase is work.phase:
            sent[number] = max(sent.get(number, 0.0), float(within.duration[each]))
    return sum(sent.values())
