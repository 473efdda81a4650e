"""Annealing of stages in pipeline order, from cuts of several topological orders.

A straight pipeline has one stage per device; otherwise several numbers of stages are tried, each
stage first on the devices in turn. Steps count as evaluations.
"""

from dataclasses import dataclass

import numpy as np

from partita.problems.dag import sorted_or_cycle
from partita.problems.partition import solution_of_stages
from partita.search.partition.anneal import start
from partita.search.partition.network import I64
from partita.search.partition.orders import depth_first
from partita.search.partition.stage_anneal import Stages, anneal_stages, stages
from partita.search.partition.walk import AnnealingSchedule, LabelWalk, proven

_CHUNK_STEPS = 20_000


@dataclass(frozen=True, slots=True)
class InOrder:
    """How stages are annealed: how often from scratch, how long, how many per device."""

    restarts: int = 4
    steps_per_node: int = 1000
    most_steps: int = 1_000_000
    per_device: tuple[int, ...] = (1, 2)


def anneal_in_order(walk: LabelWalk, how: InOrder, seed: int) -> None:
    """Offer the best stages of several walks."""
    net, run = walk.net, walk.run
    steps = min(how.most_steps, how.steps_per_node * net.num_nodes)
    if run.done() or proven(run):
        return
    again = _of_best(walk)
    if again is not None:
        _walk(walk, again, AnnealingSchedule(steps, 1e-3), seed)
    for index in range(how.restarts):
        for count in _counts(walk, how):
            if run.done() or proven(run):
                return
            begun = stages(*_even(walk, count, seed + index if index else None))
            _walk(walk, begun, AnnealingSchedule(steps, 2e-2), seed + 31 * index + count)


def _counts(walk: LabelWalk, how: InOrder) -> list[int]:
    """The numbers of stages to try."""
    problem, net = walk.problem, walk.net
    if problem.num_stages is not None:
        return [problem.num_stages]
    if problem.straight:
        return [min(net.num_devices, net.num_nodes)]
    return sorted({min(net.num_nodes, each * net.num_devices) for each in how.per_device})


def _of_best(walk: LabelWalk) -> Stages | None:
    """The stages of the best answer so far, where they may be annealed as they are."""
    solution = walk.run.solution
    if solution is None:
        return None
    devices = [device for _, device in sorted(solution.device_of)]
    number = {stage: index for index, stage in enumerate(sorted(dict(solution.device_of)))}
    rank = _topological_ranks(walk, {node: number[s] for node, s in solution.stage_of})
    stage_of = {node: rank[number[stage]] for node, stage in solution.stage_of}
    stage = np.array([stage_of[node.id] for node in walk.problem.placed], np.int64)
    device_of = np.zeros(len(devices), np.int64)
    for index, device in enumerate(devices):
        device_of[rank[index]] = device
    missing = walk.net.num_devices - len(devices)
    if walk.problem.straight and walk.problem.num_stages is None and missing > 0:
        unused = sorted(set(range(walk.net.num_devices)) - set(devices))
        device_of = np.concatenate((device_of, np.array(unused, np.int64)))
    return stages(stage, device_of)


def _topological_ranks(walk: LabelWalk, stage_of: dict[int, int]) -> list[int]:
    """The place of every stage in an order of the stages."""
    consumers: list[list[int]] = [[] for _ in range(max(stage_of.values()) + 1)]
    for edge in walk.problem.inner_edges:
        src, dst = stage_of[edge.src], stage_of[edge.dst]
        if src != dst:
            consumers[src].append(dst)
    order, _ = sorted_or_cycle(consumers)
    rank = [0] * len(order)
    for place, stage in enumerate(order):
        rank[stage] = place
    return rank


def _even(walk: LabelWalk, count: int, seed: int | None) -> tuple[I64, I64]:
    """Stages of about equal work, none empty, cut from the problem's order or a random one."""
    net, problem = walk.net, walk.problem
    place = {node.id: index for index, node in enumerate(problem.placed)}
    order = list(range(net.num_nodes))
    if seed is not None:
        order = [place[id] for id in depth_first(problem, seed) if id in place]
    done = net.mean_ms[order].cumsum()
    wanted = np.floor(done / max(done[-1], 1e-300) * count * (1 - 1e-12)).astype(np.int64)
    stage = np.zeros(net.num_nodes, np.int64)
    now = 0
    for index, node in enumerate(order):
        left = net.num_nodes - index
        if index:
            now = min(now + 1, max(now, int(wanted[index])))
        now = min(max(now, count - left), count - 1)
        stage[node] = now
    return stage, np.arange(count) % net.num_devices


def _walk(walk: LabelWalk, begun: Stages, schedule: AnnealingSchedule, seed: int) -> None:
    """Anneal, and offer what is better than the best."""
    net, run, problem = walk.net, walk.run, walk.problem
    state = start(net, begun.device_of[begun.stage], seed)
    keep_all = problem.num_stages is not None
    done = 0
    known = np.inf
    while done < schedule.steps and not run.done():
        chunk = min(_CHUNK_STEPS, schedule.steps - done)
        if run.stop.evaluations is not None:
            chunk = min(chunk, run.stop.evaluations - run.evaluations)
        if done == 0:
            _offer(walk, begun)
        hot = schedule.hot_coarse
        anneal_stages(
            net, state, begun, problem.straight, keep_all,
            done, done + chunk, schedule.steps, hot, schedule.cold,
        )  # fmt: skip
        done += chunk
        run.evaluations += chunk
        if state.best_ms[0] < min(known, np.inf if run.objective is None else run.objective):
            known = state.best_ms[0]
            _offer(walk, begun)


def _offer(walk: LabelWalk, stages: Stages) -> None:
    ids = [node.id for node in walk.problem.placed]
    stage_of = dict(zip(ids, stages.best_stage.tolist(), strict=True))
    devices = stages.best_device_of[stages.best_stage].tolist()
    device_of = dict(zip(ids, devices, strict=True))
    if walk.in_order:
        walk.offer_solution(solution_of_stages(walk.problem, stage_of, device_of))
    else:
        walk.offer(devices)
