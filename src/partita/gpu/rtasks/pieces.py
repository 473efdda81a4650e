"""A flow cut into pieces: fused regions of tile ops, and fallbacks that PyTorch runs between them.

Every draft has a level. A tile op is of the level of tile ops it reads, and above every fallback
it reads; a fallback runs after the level of what it reads. So the tile ops of one level never need
a fallback that needs one of them, each level is one region, and pieces follow one another:

    fallbacks of level -1, region 0, fallbacks of level 0, region 1, ...

A view of what is in the arena is a place there; a view of anything else is left to PyTorch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from partita.gpu.flow.steps import Flow, Step
from partita.gpu.rtasks.absorb import absorb
from partita.gpu.rtasks.drafts import OUTSIDE, Draft, Values
from partita.gpu.rtasks.lower_rules import read_drafts
from partita.gpu.rtasks.reading import Reading


@dataclass(frozen=True, slots=True)
class Piece:
    """A region (tile ops and places) or fallbacks (with the views between them), in order."""

    fused: bool
    drafts: tuple[Draft, ...]

    @property
    def steps(self) -> frozenset[str]:
        """The steps of the flow that it stands for."""
        return frozenset(name for draft in self.drafts for name in draft.steps)

    @property
    def fallbacks(self) -> tuple[Draft, ...]:
        """What PyTorch runs here."""
        return tuple(draft for draft in self.drafts if draft.kind == "fallback")

    def unfused(self, flow: Flow) -> tuple[Step, ...]:
        """The steps of the flow that compute the same."""
        names = self.steps
        return tuple(step for step in flow.steps if step.name in names)


@dataclass(frozen=True, slots=True)
class Pieces:
    """A flow as pieces, and the layout of its values."""

    flow: Flow
    pieces: tuple[Piece, ...]
    values: Values


def cut(flow: Flow, device: torch.device) -> Pieces:
    """The largest regions between fallbacks."""
    reading = Reading(flow, device)
    drafts = absorb(read_drafts(reading), reading.values, flow.outputs)
    levels, drafts = _levels(drafts, flow.inputs)
    pieces = []
    for level in range(-1, max(levels.values(), default=-1) + 1):
        here = [draft for draft in drafts if levels[draft.name] == level]
        for fused in (True, False):
            some = tuple(draft for draft in here if (draft.kind not in OUTSIDE) == fused)
            if some:
                pieces.append(Piece(fused, some))
    return Pieces(flow, tuple(pieces), reading.values)


def _levels(drafts: Sequence[Draft], inputs: Sequence[str]) -> tuple[dict[str, int], list[Draft]]:
    """The level of every draft; places outside the arena have become views."""
    inside: dict[str, bool] = dict.fromkeys(inputs, False)
    level: dict[str, int] = dict.fromkeys(inputs, -1)
    levels, placed = {}, []
    for draft in drafts:
        constants = {name for name, _ in draft.constants}
        reads = [name for name in draft.reads if name not in constants]
        if _is_outside(draft, drafts) and not any(inside[name] for name in reads):
            draft = _left_outside(draft)
        ours = draft.kind not in OUTSIDE
        here = max(
            (level[name] + (1 if ours and not inside[name] else 0) for name in reads), default=0
        )
        for name in draft.makes:
            level[name], inside[name] = here, ours
        levels[draft.name] = here
        placed.append(draft)
    return levels, placed


def _is_outside(draft: Draft, drafts: Sequence[Draft]) -> bool:
    """May PyTorch make this view? Not a part of our own making, nor what a tile op joins."""
    if draft.kind == "part":
        return bool(draft.steps)
    return draft.kind == "cat" and not any(
        each.is_tiled and draft.name in each.reads for each in drafts
    )


def _left_outside(draft: Draft) -> Draft:
    kind = "view" if draft.kind == "part" else "fallback"
    reason = "" if kind == "view" else "it joins values that no tile has made"
    return replace(draft, kind=kind, reason=reason)
