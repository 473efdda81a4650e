"""How each region of a lowered flow is launched: compiled for a GPU, or tile by tile in PyTorch."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from partita.errors import MissingExtraError, ProblemError
from partita.gpu.choose import not_compiled
from partita.gpu.rtasks.arena import LoweredModel
from partita.gpu.rtasks.execute import Launch
from partita.gpu.rtasks.interpret import interpret
from partita.gpu.rtasks.planned import PlannedRegion
from partita.gpu.rtasks.reference import Tiles

Plans = Sequence[PlannedRegion | None]
S = TypeVar("S")


@dataclass(frozen=True, slots=True, eq=False)
class Launched:
    """A launch per piece (None: PyTorch runs it), and by piece what there is to say of it."""

    launches: tuple[Launch | None, ...]
    plans: tuple[PlannedRegion | None, ...]
    about: dict[int, str]
    refused: dict[int, str]
    seconds: dict[int, float]


def interpreted(lowered: LoweredModel, plans: Plans, seed: int = 0) -> Launched:
    """Regions tile by tile in random turns over values that begin as NaN: slow, without a GPU."""
    launches: list[Launch | None] = []
    for index, plan in enumerate(plans):
        if plan is None:
            launches.append(_nothing if lowered.pieces[index].fused else None)
            continue
        launches.append(_Interpreted(Tiles(plan.region, plan.tiles, lowered.arena), plan, seed))
    about = {index: "interpreted" for index, plan in enumerate(plans) if plan is not None}
    return Launched(tuple(launches), tuple(plans), about, {}, {})


class _Interpreted:
    """One region, run by `interpret`."""

    def __init__(self, tiles: Tiles, plan: PlannedRegion, seed: int) -> None:
        self.tiles, self.plan, self.seed = tiles, plan, seed

    def __call__(self) -> None:
        """All tiles once."""
        self.tiles.spoil()
        interpret(self.plan.program, self.tiles, self.seed)


def compiled(
    lowered: LoweredModel,
    plans: Plans,
    *,
    num_warps: int = 4,
    replan: Callable[[int], PlannedRegion] | None = None,
) -> Launched:
    """Regions as persistent kernels.

    One that is not resident as planned is planned again by `replan` (for fewer programs); if that
    does not help, or if it cannot be compiled, it is refused with the numbers.
    """
    need_triton()
    launches: list[Launch | None] = []
    kept: list[PlannedRegion | None] = list(plans)
    about: dict[int, str] = {}
    refused: dict[int, str] = {}
    seconds: dict[int, float] = {}
    for index, plan in enumerate(plans):
        if plan is None:
            launches.append(_nothing if lowered.pieces[index].fused else None)
            continue
        began = time.perf_counter()
        launch: Launch | None = None
        try:
            try:
                launch, about[index] = _region(lowered, plan, num_warps)
            except ProblemError:
                if replan is None:
                    raise
                kept[index] = plan = replan(index)
                launch, about[index] = _region(lowered, plan, num_warps)
        except ProblemError as error:
            refused[index] = str(error)
        except Exception as error:  # of Triton's compiler: the region stays with PyTorch
            refused[index] = not_compiled(error)
        launches.append(launch)
        seconds[index] = time.perf_counter() - began
    return Launched(tuple(launches), tuple(kept), about, refused, seconds)


def merged(old: Launched, new: Launched, origin: Sequence[int | None]) -> Launched:
    """By piece: what there was (`origin` says which piece it was), or what is new."""

    choice = [
        (index, new, index) if was is None else (index, old, was)
        for index, was in enumerate(origin)
    ]

    def both(mine: dict[int, S], theirs: dict[int, S]) -> dict[int, S]:
        picked = {}
        for index, source, at in choice:
            held = mine if source is new else theirs
            if at in held:
                picked[index] = held[at]
        return picked

    return Launched(
        tuple(source.launches[at] for _, source, at in choice),
        tuple(source.plans[at] for _, source, at in choice),
        both(new.about, old.about),
        both(new.refused, old.refused),
        both(new.seconds, old.seconds),
    )


def _region(lowered: LoweredModel, plan: PlannedRegion, num_warps: int) -> tuple[Launch, str]:
    from partita.gpu.rtasks.region import Region

    arena = lowered.arena
    region = Region(plan.region, plan.tiles, plan.program, arena.data, arena.wide, num_warps)
    if arena.data.is_cuda:
        region.compile()
    return region, region.about()


def need_triton() -> None:
    """Refuse with the pip command where Triton is not installed."""
    import importlib.util

    if importlib.util.find_spec("triton") is None:
        raise MissingExtraError("triton", "triton", "running fused regions on a GPU")


def _nothing() -> None:
    """Places in the arena: there is nothing to run."""
