"""A module that draws as the ranks of its plans do: the plain run to hold them against.

    draws = partita.placed_draws(module, args, seed=0)
    with draws.step(3):                        # the fourth step of partita.execute(..., seed=0)
        module(*args).backward()

A module by itself draws its random numbers in the order in which it runs, from one generator; ranks
of a plan draw each at its place (`draws.py`). Within `step` the module (or what `partita.pipe` made
of it) draws at these places, too: losses and gradients are then those of any plan.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from partita.run.draws import Draw


class ModuleDraws:
    """The places at which a module draws; `step` lets it."""

    def __init__(self, draws: Sequence["Draw"], seed: int) -> None:
        self.draws, self.seed = tuple(draws), seed

    @contextlib.contextmanager
    def step(self, step: int = 0, *, sample: int = 0) -> Iterator[None]:
        """Draw as in a step of a run, for samples from this one of the batch on.

        Forward and backward both belong into it where the backward runs something again.
        """
        import torch

        from partita.run.draws import PlacedDraws, first_place

        start = first_place(self.seed, step)
        before = torch.get_rng_state()
        torch.default_generator.manual_seed(start)
        try:
            with PlacedDraws(self.draws, start, sample):
                yield
        finally:
            torch.set_rng_state(before)


def placed_draws(
    module: "torch.nn.Module", args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None, *,
    seed: int = 0,
) -> ModuleDraws:  # fmt: skip
    """Let a module draw what ranks of its plans draw with this seed; see `ModuleDraws.step`.

    The arguments are those of one call, the batch along their first dim: the module is captured
    with them and with another batch.
    """
    from partita.capture.installed import need_torch

    need_torch()
    import torch

    from partita.errors import CaptureError
    from partita.run.distributed.model import RunModel, other_batch, resized
    from partita.run.distributed.places import module_draws

    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    call = tuple(args), kwargs or {}
    model = RunModel(module, *call, device)
    other = other_batch(model.batch)
    calls = call, resized(call, model.batch, other)
    draws = module_draws(module, calls, (model.batch, other))
    if len(draws) != len(model.table.draws):
        raise CaptureError(
            f"the module draws {len(draws)} times, and its captured program "
            f"{len(model.table.draws)} times: they cannot be held against each other",
            fix="draw with PyTorch's operators, not within a custom function",
        )
    return ModuleDraws(draws, seed)
