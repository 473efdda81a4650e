"""Block sizes of a step, one kind of product after the other, measured over the whole step.

A kernel by itself finds its weights in the cache and its neighbours gone; so a choice is timed as
part of the replayed graph, in turns with the best so far.
"""

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace

import torch

from partita.gpu.decode.spec import KINDS, ProductBlock, StepOptions
from partita.gpu.decode.step import DecodeStep
from partita.gpu.decode.weights import DecoderWeights
from partita.gpu.measure import compare_us, raise_interrupt, wait

CANDIDATES = tuple(
    ProductBlock(*sizes)
    for sizes in (
        (1, 2048, 4), (2, 1024, 2), (2, 2048, 4), (4, 512, 2), (4, 1024, 4), (4, 2048, 8),
        (8, 512, 4), (8, 1024, 8),
    )
)  # fmt: skip
COMPILERS = 12  # threads; the compiler lets go of Python's lock
CHUNKS = (32, 64, 128)
MARGIN = 0.002  # a change must win by this fraction


def changes(options: StepOptions) -> list[StepOptions]:
    """Options that differ from these in one choice, the largest products first."""
    others = [replace(options, overlap=not options.overlap)]
    for kind in sorted(KINDS, key=("gate", "head", "down", "qkv", "out").index):
        others += [
            replace(options, blocks={**options.blocks, kind: block})
            for block in CANDIDATES
            if block != options.blocks[kind]
        ]
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
    _compile_all(weights, first)
    best = DecodeStep(weights, first)
    best_us = _at_the_end([best])[0]
    for change in changes(first):
        if time.perf_counter() > end:
            break
        other = _built(weights, merged(best.options, first, change))
        if other is None:
            continue
        mine, yours = _at_the_end([best, other])
        if yours < mine * (1 - MARGIN):
            best, best_us = other, yours
    return best.options, best_us


def _built(weights: DecoderWeights, options: StepOptions) -> DecodeStep | None:
    """A step, if its kernels can be had."""
    try:
        return DecodeStep(weights, options)
    except Exception as error:  # too many registers, no memory: another choice will do
        raise_interrupt(error)
        wait()
        return None


def _compile_all(weights: DecoderWeights, options: StepOptions) -> None:
    """Compile every choice of blocks side by side; what cannot be compiled fails again later."""

    def work(job: tuple[str, ProductBlock]) -> None:
        kind, block = job
        blocks = {**options.blocks, kind: block}
        with suppress(Exception), torch.cuda.device(weights.head.device):
            DecodeStep(weights, replace(options, blocks=blocks), run=False).compile(kind)

    with ThreadPoolExecutor(COMPILERS) as pool:
        list(pool.map(work, [(kind, block) for kind in KINDS for block in CANDIDATES]))


def _at_the_end(steps: list[DecodeStep]) -> list[float]:
    """Times of replays with the cache full."""
    for step in steps:
        step.position.fill_(step.spec.length - 1)
    replays = [step.graph.replay if step.graph is not None else step.launch for step in steps]
    with torch.no_grad():
        return compare_us(replays, rounds=3, replays=10)
