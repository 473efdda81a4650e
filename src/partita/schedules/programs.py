"""A schedule problem as a program: its blocks for N micro-batches as tasks on devices.

Task `m * blocks + b` is block b of micro-batch m. Devices are lanes with a memory each; a block's
memory is taken (or given back) at its start. O(N blocks), in numpy.
"""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from partita.errors import InputError, ProblemError
from partita.problems.schedule import ScheduleProblem, lags
from partita.program import F64, I32, Kind, Lane, Memory, Program
from partita.schedules.actions import Action, Order
from partita.schedules.pipeline import Pipeline, PipelineStage
from partita.schedules.placement import unique_names

_KINDS = {
    "forward": Kind.FORWARD,
    "backward": Kind.BACKWARD,
    "dgrad": Kind.DGRAD,
    "weight": Kind.WGRAD,
    "wgrad": Kind.WGRAD,
    "update": Kind.UPDATE,
    "collective": Kind.COLLECTIVE,
}


def program_of(
    problem: ScheduleProblem,
    num_microbatches: int,
    order: I32 | None = None,
    time_unit: str = "",
    wait_for: dict[int, dict[int, int]] | None = None,
) -> Program:
    """The program of a problem; `order` is a permutation of its tasks.

    `wait_for[task][other] = later` makes a task wait for the end of a later task instead of that
    of `other`.
    """
    count, blocks = len(problem.blocks), problem.blocks
    tasks = np.arange(num_microbatches) * count
    lanes = [device for block in blocks for device in block.devices]
    waits = sorted(
        (second, first, lag - blocks[first].span)
        for (first, second), lag in zip(problem.deps, lags(problem), strict=True)
    )
    effects = [
        (device, block.memory) if block.memory else None
        for block in blocks
        for device in block.devices
    ]
    numbers = Counter(second for second, _, _ in waits)
    wait_on = np.add.outer(tasks, np.array([first for _, first, _ in waits], np.int64)).ravel()
    if wait_for:
        _replace_waits(wait_on, waits, wait_for, count)
    caps = problem.memory_capacity or (None,) * problem.num_devices
    return Program(
        lanes=tuple(Lane(f"device {d}") for d in range(problem.num_devices)),
        duration=np.tile(np.array([block.span for block in blocks], np.float64), len(tasks)),
        lane_start=_starts([len(block.devices) for block in blocks], len(tasks)),
        lane_of=_int32(np.tile(lanes, len(tasks))),
        wait_start=_starts([numbers[block] for block in range(count)], len(tasks)),
        wait_on=_int32(wait_on),
        wait_delay=np.tile(np.array([delay for _, _, delay in waits], np.float64), len(tasks)),
        memories=tuple(Memory(f"device {d}", cap) for d, cap in enumerate(caps)),
        effect_start=_starts(
            [len(block.devices) if block.memory else 0 for block in blocks], len(tasks)
        ),
        effect_memory=_int32(np.tile([e[0] for e in effects if e], len(tasks))),
        effect_at_start=np.tile(np.array([e[1] for e in effects if e], np.float64), len(tasks)),
        effect_at_end=np.zeros(sum(e is not None for e in effects) * len(tasks)),
        blocks=tuple(unique_names(problem)),
        block=_int32(np.tile(np.arange(count), len(tasks))),
        kind=np.tile(np.array(_kinds(problem), np.int8), len(tasks)),
        microbatch=_int32(np.repeat(np.arange(len(tasks)), count)),
        order=order,
        time_unit=time_unit,
    )


def start_column(
    problem: ScheduleProblem, starts: Sequence[tuple[int, int, float]]
) -> tuple[int, F64]:
    """(micro-batches, the start of each task) of the starts of a solution."""
    microbatch, block, start = (np.array(column) for column in zip(*starts, strict=True))
    column = np.empty(len(starts), np.float64)
    column[microbatch * len(problem.blocks) + block] = start
    return len(starts) // len(problem.blocks), column


def ordered_program(
    problem: ScheduleProblem,
    pipeline: Pipeline,
    order: Order,
    num_microbatches: int,
    time_unit: str = "",
) -> Program:
    """The program that runs a pipeline in this order; rows are by device.

    Where weight gradients are blocks of their own, `B` runs both and passes the gradient on when
    both are done, as a backward in one piece does. An order that leaves something out, repeats it
    or puts it on another device is refused.
    """
    count = len(problem.blocks)
    after: list[list[int]] = [[] for _ in problem.blocks]
    for first, second in problem.deps:
        after[first].append(second)
    sequence: list[int] = []
    wait_for: dict[int, dict[int, int]] = {}
    done: set[int] = set()
    for device, row in enumerate(order):
        for action in row:
            for block in _blocks_of(pipeline, action, device, num_microbatches):
                task = action.microbatch * count + block
                if task in done:
                    raise ProblemError(f"{action} is there twice", fix="run it once", field="order")
                done.add(task)
                sequence.append(task)
            if action.kind == "B" and pipeline.split:
                _pass_on_late(pipeline.stages[action.stage], action.microbatch, after, wait_for)
    if len(done) < count * num_microbatches:
        task = min(set(range(count * num_microbatches)) - done)
        label = problem.label(task % count, task // count)
        raise ProblemError(f"{label} is not in it", fix="run every block once", field="order")
    return program_of(problem, num_microbatches, _int32(sequence), time_unit, wait_for)


def _blocks_of(
    pipeline: Pipeline, action: Action, device: int, num_microbatches: int
) -> tuple[int, ...]:
    """The blocks that an action on a device runs, one after the other."""
    if action.stage >= len(pipeline.stages):
        raise _refused(action, f"stages are 0 to {len(pipeline.stages) - 1}")
    if action.microbatch >= num_microbatches:
        raise _refused(action, f"micro-batches are 0 to {num_microbatches - 1}")
    stage = pipeline.stages[action.stage]
    if stage.device != device:
        raise _refused(action, f"stage {action.stage} is on device {stage.device}, not {device}")
    wanted = {
        "F": (stage.forward,),
        "I": (stage.backward,) if pipeline.split else (None,),
        "W": (stage.weight,),
        "B": (stage.backward, stage.weight) if pipeline.split else (stage.backward,),
    }[action.kind]
    if None in wanted:
        raise _refused(action, "the placement has no block for it")
    return tuple(block for block in wanted if block is not None)


def _pass_on_late(
    stage: PipelineStage,
    microbatch: int,
    after: list[list[int]],
    wait_for: dict[int, dict[int, int]],
) -> None:
    """Who waits for the backward of this stage waits for its weight gradients as well."""
    assert stage.backward is not None
    assert stage.weight is not None
    base = microbatch * len(after)
    for second in after[stage.backward]:
        if second != stage.weight:
            wait_for.setdefault(base + second, {})[base + stage.backward] = base + stage.weight


def _replace_waits(
    wait_on: np.ndarray[tuple[int], np.dtype[np.int64]],
    waits: Sequence[tuple[int, int, float]],
    wait_for: dict[int, dict[int, int]],
    count: int,
) -> None:
    place = {(second, first): index for index, (second, first, _) in enumerate(waits)}
    for task, instead in wait_for.items():
        microbatch, block = divmod(task, count)
        for other, later in instead.items():
            wait_on[microbatch * len(waits) + place[block, other % count]] = later


def _refused(action: Action, why: str) -> InputError:
    return ProblemError(f"{action} cannot run: {why}", fix="correct the order", field="order")


def _kinds(problem: ScheduleProblem) -> list[Kind]:
    """What the blocks are; a backward that a weight block follows is the data gradient alone."""
    kinds = [_KINDS.get(block.kind, Kind.OTHER) for block in problem.blocks]
    for first, second in problem.deps:
        if kinds[second] is Kind.WGRAD and kinds[first] is Kind.BACKWARD:
            kinds[first] = Kind.DGRAD
    return kinds


def _starts(lengths: Sequence[int], times: int) -> I32:
    return _int32(np.concatenate(([0], np.cumsum(np.tile(lengths, times)))))


def _int32(values: object) -> I32:
    return np.asarray(values, np.int64).astype(np.int32)
