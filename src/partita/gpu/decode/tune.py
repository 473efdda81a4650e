"""Block sizes of a step, one kind of product after the other, measured over the whole step.

A kernel by itself finds its weights in the cache and its neighbours gone; so a choice is timed as
part of the replayed graph, in turns with the best so far.
"""

import time
from dataclasses import replace

import torch

from partita.gpu.choose import attempt
from partita.gpu.decode.spec import KINDS, Block, StepOptions
from partita.gpu.decode.step import DecodeStep
from partita.gpu.decode.weights import DecoderWeights
from partita.gpu.measure import compare_us

CANDIDATES = tuple(
    Block(rows, cols, warps)
    for rows in (1, 2, 4, 8)
    for cols in (512, 1024, 2048)
    for warps in (2, 4, 8)
    if 2048 <= rows * cols <= 16384 and rows * cols >= 512 * warps
)
CHUNKS = (32, 64, 128)
MARGIN = 0.002  # a change must win by this fraction


def changes(options: StepOptions) -> list[StepOptions]:
    """Options that differ from these in one choice, the largest products first."""
    others = [replace(options, overlap=not options.overlap)]
    for kind in sorted(KINDS, key=("gate", "head", "down", "qkv", "out").index):
        for block in CANDIDATES:
            if block != options.blocks[kind]:
                others.append(replace(options, blocks={**options.blocks, kind: block}))
    others += [replace(options, chunk=chunk) for chunk in CHUNKS if chunk != options.chunk]
    return others


def merged(best: StepOptions, first: StepOptions, other: StepOptions) -> StepOptions:
    """The one choice in which `other` differs from `first`, in the best so far."""
    blocks = {
        kind: other.blocks[kind] if other.blocks[kind] != first.blocks[kind] else block
        for kind, block in best.blocks.items()
    }
    return StepOptions(
        blocks,
        other.chunk if other.chunk != first.chunk else best.chunk,
        other.overlap if other.overlap != first.overlap else best.overlap,
    )


def tuned(
    weights: DecoderWeights, options: StepOptions | None = None, time_s: float = 30.0
) -> tuple[StepOptions, float]:
    """The best options found in the time, and the microseconds of a step with them."""
    end = time.perf_counter() + time_s
    first = options or StepOptions()
    best = DecodeStep(weights, first)
    best_us = _at_the_end([best])[0]
    for change in changes(first):
        if time.perf_counter() > end:
            break
        built: list[DecodeStep] = []
        wanted = merged(best.options, first, change)
        if attempt(lambda wanted=wanted, built=built: built.append(DecodeStep(weights, wanted))):  # type: ignore[misc]
            continue
        mine, yours = _at_the_end([best, built[0]])
        if yours < mine * (1 - MARGIN):
            best, best_us = built[0], yours
    return best.options, best_us


def _at_the_end(steps: list[DecodeStep]) -> list[float]:
    """Times of replays with the cache full."""
    for step in steps:
        step.position.fill_(step.spec.length - 1)
    replays = [step.graph.replay if step.graph is not None else step.launch for step in steps]
    with torch.no_grad():
        return compare_us(replays, rounds=3, replays=10)
