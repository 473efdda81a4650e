"""Regions that were measured slower than their ops unfused: cut into the runs of ops that pay.

PyTorch's times are measured op by op for that (`regroup.py` finds the runs). Costs alone do not
decide against a region: of large products they expect a third too much.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from partita.gpu.rtasks.execute import RegionPipeline, StepKernel
from partita.gpu.rtasks.launches import Launched, merged
from partita.gpu.rtasks.piece_times import PieceTimes, op_times, piece_times
from partita.gpu.rtasks.planned import PlannedRegion
from partita.gpu.rtasks.regroup import split_by_cost, split_piece

if TYPE_CHECKING:
    from partita.gpu.rtasks.job import Job

LEAST_OPS = 3  # of a region that is cut
Origin = list[int | None]  # by piece: which it was, or None for a new one


def without_slow(
    job: "Job", launched: Launched, times: dict[int, PieceTimes], kernels: dict[str, StepKernel]
) -> tuple[Launched, dict[int, PieceTimes]]:
    """Regions slower than their steps, cut into runs that may be faster: once."""
    origin: Origin = list(range(len(job.lowered.pieces)))
    for index in sorted(times, reverse=True):
        plan = launched.plans[index]
        if plan is not None and not times[index].is_faster:
            alone = op_times(job.lowered, index, job.inputs)
            _cut(job, index, plan, times[index].fused_us, alone, origin)
    if None not in origin:
        return launched, times
    launched = merged(launched, job.compiled(_plans(job, origin)), origin)
    job.plans = launched.plans
    job.check(RegionPipeline(job.lowered, launched.launches, kernels)(*job.inputs))
    return launched, piece_times(job.lowered, launched.launches, job.inputs, kernels)


def _cut(
    job: "Job",
    index: int,
    plan: PlannedRegion,
    fused_us: float,
    alone: Sequence[float],
    origin: Origin,
) -> None:
    """Cut a piece of the job where that pays by these times; `origin` follows."""
    ops = len(plan.region.ops)
    runs = split_by_cost(plan, fused_us, alone)
    if ops < LEAST_OPS or len(runs) == 1 == sum(fused for fused, _ in runs):
        return
    before = len(job.lowered.pieces)
    job.lowered = split_piece(job.lowered, index, runs)
    origin[index : index + 1] = [None] * (len(job.lowered.pieces) - before + 1)
    kept = [some for fused, some in runs if fused]
    job.notes.append(
        f"of a region of {ops} ops, {fused_us:.1f} us fused and {sum(alone):.1f} us unfused, "
        f"{sum(map(len, kept))} ops are fused in {len(kept)} regions"
    )


def _plans(job: "Job", origin: Origin) -> list[PlannedRegion | None]:
    """Plans for the new pieces."""
    return [
        job.plan_one(index, job.per_unit)
        if was is None and region is not None and region.ops
        else None
        for index, (was, region) in enumerate(zip(origin, job.lowered.regions, strict=True))
    ]
