"""Steps of a plan one after the other, from the last checkpoint on where there is one.

Data come from a function of the number of the step, so that a run that is restarted sees what it
would have seen; without one every step has the example's arguments.
"""

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from partita.errors import InputError
from partita.plans import Plan
from partita.run.distributed import checkpoints
from partita.run.distributed.engine import execute
from partita.run.distributed.walk import Recorder

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "momentum": lambda ps, lr: torch.optim.SGD(ps, lr=lr, momentum=0.9),
    "adagrad": torch.optim.Adagrad,
    "rmsprop": torch.optim.RMSprop,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}


@dataclass(frozen=True)
class TrainSettings:
    """How a plan is trained from the command line."""

    steps: int = 10
    lr: float = 1e-3
    device: str | None = None
    folder: Path | None = None  # of checkpoints
    every: int = 0
    timeout_s: float = 300.0
    seed: int = 0
    matmul_dtype: str | None = None  # that products are computed in, where the plan has another
    backend: str | None = None  # of torch.distributed: gloo or nccl


@dataclass(frozen=True)
class StepDone:
    """One step: its number, loss and seconds; `start` is where the run went on from."""

    number: int
    loss: float
    seconds: float
    start: int


def train(
    plan: Plan,
    module: torch.nn.Module,
    example: tuple[Any, ...],
    batches: Callable[[int], tuple[Any, ...]] | None,
    settings: TrainSettings,
    recorder: Recorder | None = None,
) -> Iterator[StepDone]:
    """Take the steps of a run; checkpoints are written between them."""
    rule = plan.model.optimizer
    if rule not in OPTIMIZERS:
        raise InputError(
            f"PyTorch has no optimizer {rule!r}, with which the plan was made",
            fix=f"plan with one of {', '.join(OPTIMIZERS)}, or use partita.execute in a script",
            field="optimizer",
        )
    engine = execute(
        plan, module, optimizer=lambda ps: OPTIMIZERS[rule](ps, lr=settings.lr),
        device=settings.device, example=example, seed=settings.seed,
        timeout_s=settings.timeout_s, recorder=recorder, matmul_dtype=settings.matmul_dtype,
        backend=settings.backend,
    )  # fmt: skip
    with engine:
        start = 0
        last = None if settings.folder is None else checkpoints.latest(settings.folder)
        if last is not None:
            start = engine.load(last)
        for number in range(start, settings.steps):
            began = time.perf_counter()
            with engine.board.own(f"the data of step {number + 1}"):
                args = example if batches is None else batches(number)
            loss = engine.step(*args)
            yield StepDone(number, loss, time.perf_counter() - began, start)
            is_due = settings.every and (number + 1) % settings.every == 0
            if settings.folder is not None and is_due:
                os.makedirs(settings.folder, exist_ok=True)
                engine.save(checkpoints.place_of(settings.folder, number + 1))
                if engine.rank == 0:
                    checkpoints.drop_old(settings.folder)
