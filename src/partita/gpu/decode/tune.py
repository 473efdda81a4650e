"""Block sizes of a step, one kind of product after the other, measured over the whole step.

A kernel by itself finds its weights in the cache and its neighbours gone; so a choice is timed as
part of the replayed graph, in turns with the best so far.
"""

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import fields, replace
from typing import Any

import torch

from partita.gpu.decode.spec import KINDS, ProductBlock, StepOptions
from partita.gpu.decode.step import DecodeStep
from partita.gpu.decode.weights import DecoderWeights
from partita.gpu.measure import compare_us, raise_interrupt, wait

SHAPES = (
    (4, 1024, 4), (2, 1024, 2), (2, 1024, 4), (4, 2048, 8), (2, 2048, 8), (2, 2048, 4), (4, 512, 2),
    (8, 1024, 4), (1, 2048, 4),
)  # fmt: skip
PER_UNIT = (0, 2, 3, 4, 6, 8)  # programs
CANDIDATES = tuple(
    ProductBlock(*shape, per_unit)
    for shape in SHAPES
    for per_unit in PER_UNIT
    if per_unit * shape[2] <= 32  # warps
)
BATCHED_SHAPES = (
    (16, 256, 4), (32, 256, 4), (16, 512, 4), (16, 128, 4), (32, 128, 4), (64, 128, 4),
)  # fmt: skip
SPLITS = (1, 2, 4, 8)
BATCHED = tuple(ProductBlock(*shape, split=split) for shape in BATCHED_SHAPES for split in SPLITS)
STAGES = (2, 3, 4)
COMPILERS = 12  # threads; the compiler lets go of Python's lock
CHUNKS = ((32, 4), (64, 4), (128, 4), (128, 8), (256, 8), (512, 8))  # rows, warps
MARGIN = 0.002  # a change must win by this fraction


def changes(options: StepOptions, several: bool) -> list[StepOptions]:
    """Options that differ from these in one choice, the largest products first."""
    others = [replace(options, overlap=not options.overlap)]
    others += [
        replace(options, chunk=chunk, attend_warps=warps)
        for chunk, warps in CHUNKS
        if (chunk, warps) != (options.chunk, options.attend_warps)
    ]
    name, candidates = ("batched", BATCHED) if several else ("blocks", CANDIDATES)
    blocks = getattr(options, name)
    if several:
        others += [replace(options, stages=n) for n in STAGES if n != options.stages]
    for kind in sorted(KINDS, key=("gate", "head", "down", "qkv", "out").index):
        others += [
            _with(options, {name: {**blocks, kind: block}})
            for block in candidates
            if block != blocks[kind] and (kind != "gate" or block.split == 1)
        ]
    return others


def _with(options: StepOptions, choice: dict[str, Any]) -> StepOptions:
    return replace(options, **choice)


def merged(best: StepOptions, first: StepOptions, other: StepOptions) -> StepOptions:
    """The one choice in which `other` differs from `first`, in the best so far."""

    def chosen(name: str) -> Any:
        mine, before, now = (getattr(each, name) for each in (best, first, other))
        if isinstance(now, dict):
            return {kind: mine[kind] if now[kind] == before[kind] else now[kind] for kind in now}
        return mine if now == before else now

    return StepOptions(**{each.name: chosen(each.name) for each in fields(StepOptions)})


def tuned(
    weights: DecoderWeights, options: StepOptions | None = None, time_s: float = 30.0
) -> tuple[StepOptions, float]:
    """The best options found in the time, and the microseconds of a step with them."""
    end = time.perf_counter() + time_s
    best = DecodeStep(weights, options or StepOptions())
    best_us, before = _at_the_end([best])[0], None
    while best.options != before:  # a choice may be another one beside those made since
        first = before = best.options
        for number, change in enumerate(changes(first, weights.spec.batch > 1)):
            if number == 1:  # how kernels start was the first change: it is part of their code
                _compile_all(weights, best.options)
            if time.perf_counter() > end:
                return best.options, best_us
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
    """Compile every shape of blocks side by side; what cannot be compiled fails again later."""
    several = weights.spec.batch > 1
    shapes = BATCHED if several else tuple(ProductBlock(*shape) for shape in SHAPES)

    def work(job: tuple[str, ProductBlock]) -> None:
        kind, block = job
        name = "batched" if several else "blocks"
        with suppress(Exception), torch.cuda.device(weights.head.device):
            wanted = _with(options, {name: {**getattr(options, name), kind: block}})
            DecodeStep(weights, wanted, run=False).compile(kind)

    with ThreadPoolExecutor(COMPILERS) as pool:
        list(pool.map(work, [(kind, block) for kind in KINDS for block in shapes]))


def _at_the_end(steps: list[DecodeStep]) -> list[float]:
    """Times of replays with the cache full."""
    for step in steps:
        step.position.fill_(step.spec.length - 1)
    replays = [step.graph.replay if step.graph is not None else step.launch for step in steps]
    with torch.no_grad():
        return compare_us(replays, rounds=3, replays=10)
