"""Regions with their programs: a tile shape for every op, a queue for every unit, proven safe."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from partita.cluster import DeviceKind
from partita.errors import InputError, VerificationError
from partita.gpu.rtasks.arena import LoweredModel, RegionOps
from partita.gpu.rtasks.lower_rules import VIEW_TARGETS
from partita.gpu.rtasks.plan_cache import keep_plan, read_plan
from partita.gpu.rtasks.tilecosts import SIGNAL_US, Unit, region_problem, shapes_of, unfused_us
from partita.gpu.rtasks.tileops import Tile
from partita.problems.rprogram import RProgram, check_rprogram, rprogram
from partita.problems.rtasks import RtasksProblem, RtasksSolution, VDevice
from partita.search import searches
from partita.search.base import Result, Stop
from partita.suggest import suggest


@dataclass(frozen=True, slots=True, eq=False)
class PlannedRegion:
    """One region: its problem, what was found, and the program of every unit."""

    region: RegionOps
    problem: RtasksProblem
    result: Result[RtasksSolution]
    tiles: tuple[Tile, ...]
    program: RProgram
    unfused_us: float  # by the same costs
    seconds: float  # that planning took

    @property
    def fused_us(self) -> float:
        """What the costs say of it, without its launch."""
        assert self.result.objective is not None
        return self.result.objective


def plan_regions(
    lowered: LoweredModel,
    kind: DeviceKind,
    *,
    method: str = "search",
    time_s: float = 3.0,
    per_unit: int = 2,
    seed: int = 0,
    keep: bool = False,
    interrupted: Callable[[], bool] = lambda: False,
) -> tuple[PlannedRegion | None, ...]:
    """A plan for every piece that is a region with ops; the time is shared by their ops."""
    sizes = [0 if each is None else len(each.ops) for each in lowered.regions]
    return tuple(
        plan_region(
            lowered, index, kind, method=method, time_s=time_s * size / sum(sizes),
            per_unit=per_unit, seed=seed, keep=keep, interrupted=interrupted,
        )
        if size
        else None
        for index, size in enumerate(sizes)
    )  # fmt: skip


def plan_region(
    lowered: LoweredModel,
    index: int,
    kind: DeviceKind,
    *,
    method: str = "search",
    time_s: float = 3.0,
    per_unit: int = 2,
    seed: int = 0,
    keep: bool = False,
    interrupted: Callable[[], bool] = lambda: False,
) -> PlannedRegion:
    """Tile shapes and queues for the region of one piece, on `per_unit` programs of every unit.

    With `keep` a plan is kept under the user's cache folder, and taken from there the next time.
    """
    region = lowered.regions[index]
    assert region is not None
    unit = _unit(lowered, kind, per_unit)
    problem = region_problem(
        region, VDevice(kind.num_units, per_unit, signal_us=SIGNAL_US), unit, f"piece {index}"
    )
    expected = unfused_us(region, kind, unit, _launches(lowered, index))
    stop = Stop(time_s=time_s, interrupted=interrupted)
    shapes = tuple(shapes_of(op, unit.itemsize) for op in region.ops)
    return _planned(region, problem, shapes, expected, method, stop, seed, keep=keep)


def _launches(lowered: LoweredModel, index: int) -> int:
    """Kernels that PyTorch starts for the steps of a piece."""
    steps = lowered.pieces[index].unfused(lowered.flow)
    return sum(not step.is_view and step.target not in VIEW_TARGETS for step in steps)


def _unit(lowered: LoweredModel, kind: DeviceKind, per_unit: int) -> Unit:
    data = lowered.arena.data
    size = data.numel() * data.element_size()
    return Unit.of(kind, data.dtype, arena_bytes=size, per_unit=per_unit)


def _planned(
    region: RegionOps,
    problem: RtasksProblem,
    shapes: Sequence[Sequence[Tile]],
    expected_us: float,
    method: str,
    stop: Stop,
    seed: int,
    *,
    keep: bool,
) -> PlannedRegion:
    began = time.perf_counter()
    known = searches("rtasks")
    if method not in known:
        raise InputError(f"found {method!r}", fix=suggest(method, tuple(known)), field="method")
    kept = read_plan(problem, method, seed) if keep else None
    result = kept or known[method](problem, stop, seed)
    if result.solution is None:  # stopped before its first schedule
        result = known["list"](problem, seed=seed)
    if keep and kept is None:
        keep_plan(problem, result, method)
    assert result.solution is not None
    tiles = tuple(some[at] for some, at in zip(shapes, result.solution.tilings, strict=True))
    program = rprogram(problem, result.solution)
    unsafe = check_rprogram(problem, program, problem.num_veus(result.solution.tilings))
    if unsafe:
        raise VerificationError(unsafe)
    seconds = time.perf_counter() - began
    return PlannedRegion(region, problem, result, tiles, program, expected_us, seconds)
