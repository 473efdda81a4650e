"""`partita run`: a plan on torch.distributed, under torchrun."""

import inspect
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from partita.cli.base import Output, common_options
from partita.errors import InputError, RunError
from partita.plans import Plan

if TYPE_CHECKING:
    from partita.run.distributed.record import TraceRecorder


LEAST_WARMUP, USUAL_WARMUP = 2, 4


@click.command()
@click.argument("plan")
@click.option("--model", metavar="FILE.PY:NAME", help="The module; else the plan's, if unchanged.")
@click.option(
    "--data", metavar="FILE.PY:NAME",
    help="A function of the number of the step that gives its arguments; else the example's.",
)  # fmt: skip
@click.option("--steps", type=click.IntRange(1), default=10, show_default=True)
@click.option("--lr", type=click.FloatRange(0, min_open=True), default=1e-3, show_default=True)
@click.option("--device", metavar="DEVICE", help="cpu or cuda; this rank's GPU where there is one.")
@click.option(
    "--backend", type=click.Choice(["gloo", "nccl"]),
    help="What messages take: nccl for GPUs, else gloo; ranks that share a GPU need gloo.",
)  # fmt: skip
@click.option("--checkpoint", metavar="FOLDER", help="Where checkpoints are, and go on from there.")
@click.option("--checkpoint-every", type=click.IntRange(1), metavar="K", help="Save every K steps.")
@click.option(
    "--matmul-dtype", metavar="TYPE",
    help="The model's type: run a plan with products in fp8 without them.",
)  # fmt: skip
@click.option(
    "--timeout", type=click.FloatRange(1), default=300.0, show_default=True,
    help="Seconds after which a rank that does not answer ends the run.",
)  # fmt: skip
@click.option(
    "--trace", metavar="FOLDER",
    help="Record every task of some steps here, a file per rank; see partita compare-trace.",
)  # fmt: skip
@click.option(
    "--trace-steps", type=click.IntRange(1), default=3, show_default=True, help="How many steps."
)
@click.option(
    "--trace-warmup", type=click.IntRange(0), show_default="4, or 2 or 3 where --steps are few",
    help="Steps that are taken before the first that is recorded; some try what a plan lacks.",
)  # fmt: skip
@common_options
def command(
    plan: str,
    model: str | None,
    data: str | None,
    steps: int,
    lr: float,
    device: str | None,
    backend: str | None,
    checkpoint: str | None,
    checkpoint_every: int | None,
    matmul_dtype: str | None,
    timeout: float,
    trace: str | None,
    trace_steps: int,
    trace_warmup: int | None,
    out: Output,
) -> int:
    """Run a PLAN: one process per device, each walks its part of the program that was simulated.

    Started by torchrun: torchrun --standalone --nproc-per-node 2 -m partita run plan.json. The
    model of the plan is file.py:function, which gives the module (its forward returns the loss) and
    the arguments of one call (a file that is not the one that was captured is refused unless it is
    named with --model); of a model of the zoo the reference module is trained, on random
    data. A plan for one kind of device runs on another. With
    --checkpoint-every and torchrun's --max-restarts, a run that lost a rank goes on from the last
    complete checkpoint.

    With --trace every rank records when each of its tasks starts and ends, on one clock:
    partita compare-trace plan.json FOLDER lays that beside what was predicted.
    """
    rank = int(os.environ.get("RANK", "0"))
    try:
        with _said_once(rank):
            return _run(
                plan, model, data, steps, lr, device, checkpoint, checkpoint_every, timeout, rank,
                out, (trace, trace_steps, trace_warmup), matmul_dtype, backend,
            )  # fmt: skip
    except InputError as error:  # all ranks refuse alike: one says it
        if rank and error.field != "launch" and "rank" not in error.found:
            sys.exit(error.exit_code)
        raise
    except RunError as error:
        click.echo(f"partita: {error}", err=True)
        sys.stdout.flush()
        os._exit(1)  # threads of the backend may wait for ranks that have gone


@contextmanager
def _said_once(rank: int) -> Iterator[None]:
    """What is said on the way (`runs FILE`) is alike on all ranks: rank 0 says each line once.

    Warnings may differ, so every rank says its own.
    """
    said: set[str] = set()

    def is_new(record: logging.LogRecord) -> bool:
        if record.levelno >= logging.WARNING:
            return True
        line = record.getMessage()
        if rank or line in said:
            return False
        said.add(line)
        return True

    log = logging.getLogger("partita")
    log.addFilter(is_new)
    try:
        yield
    finally:
        log.removeFilter(is_new)


def _run(
    plan: str, model: str | None, data: str | None, steps: int, lr: float, device: str | None,
    checkpoint: str | None, every: int | None, timeout: float, rank: int, out: Output,
    tracing: tuple[str | None, int, int | None] = (None, 0, 0), matmul_dtype: str | None = None,
    backend: str | None = None,
) -> int:  # fmt: skip
    from partita.capture.installed import need_torch
    from partita.plans import read_plan

    need_torch("running a plan")
    from partita.capture.onnx_file import is_onnx_spec
    from partita.jobs.workload import code_of
    from partita.run.distributed.train import TrainSettings, train
    from partita.run.load import load_module

    record = read_plan(plan)
    recorder = _recorder(record, steps, rank, *tracing)
    spec = code_of(record.model, model)
    if is_onnx_spec(spec):
        raise InputError(
            f"the plan is for {spec}, and an ONNX file has no PyTorch module",
            fix="plan file.py:function, which gives one, and run that plan",
            field="--model",
        )
    if every and checkpoint is None:
        raise InputError(
            "does not say where checkpoints go", fix="add --checkpoint FOLDER",
            field="--checkpoint-every",
        )  # fmt: skip
    loaded = load_module(spec, record.model.batch, record.model.dtype)
    if loaded.kwargs:
        raise InputError(
            "the example has keyword arguments", fix="give positional ones", field=spec
        )
    settings = TrainSettings(
        steps, lr, device, None if checkpoint is None else Path(checkpoint), every or 0, timeout,
        out.seed, matmul_dtype, backend,
    )  # fmt: skip
    losses, seconds, start = [], 0.0, 0
    batches = _batches(data, record.model.batch)
    for done in train(record, loaded.module, loaded.args, batches, settings, recorder):
        losses.append(done.loss)
        seconds, start = done.seconds, done.start
        if rank == 0:
            if done.number == start and start:
                out.show(f"goes on after step {start}")
            out.show(f"step {done.number + 1}: loss {done.loss:.6f}, {done.seconds:.3g} s")
            sys.stdout.flush()
    if recorder is not None:
        recorder.finish()  # a run that goes on from a checkpoint may take fewer steps
        if rank == 0:
            out.show(_traced(plan, recorder))
    if rank == 0:
        out.result({
            "format": "partita/run@1", "plan": plan, "start": start, "steps": steps,
            "losses": losses, "step_s": seconds, "predicted_step_s": record.prediction.step_s,
        })  # fmt: skip
    else:
        out.result({"format": "partita/run@1", "rank": rank})
    return 0


def _recorder(
    plan: Plan, steps: int, rank: int, trace: str | None, trace_steps: int, warmup: int | None
) -> "TraceRecorder | None":
    """What records the run, if it was asked for."""
    if trace is None:
        return None
    if warmup is None:
        warmup = min(max(steps - trace_steps, LEAST_WARMUP), USUAL_WARMUP)
    if steps < warmup + trace_steps:
        raise InputError(
            f"{steps} steps are fewer than {warmup} of warm-up and {trace_steps} that are traced",
            fix="take more --steps, or fewer --trace-steps or --trace-warmup",
            field="--trace",
        )
    from partita.run.distributed.record import TraceRecorder

    return TraceRecorder(plan, trace, rank, steps=trace_steps, warmup=warmup)


def _traced(plan: str, recorder: "TraceRecorder") -> str:
    trace = recorder.folder
    if recorder.written is None:
        return "nothing was traced: no step was left after the warm-up"
    return f"trace in {trace}; look at it with: partita compare-trace {plan} {trace}"


def _batches(data: str | None, batch: int) -> Callable[[int], tuple[Any, ...]] | None:
    """The function behind --data: of the step, and of `batch` where it takes that."""
    if data is None:
        return None
    from partita.capture.python_file import read_function

    function = read_function(data)
    takes_batch = "batch" in inspect.signature(function).parameters

    def batches(step: int) -> tuple[Any, ...]:
        given = function(step, batch=batch) if takes_batch else function(step)
        return tuple(given) if isinstance(given, tuple | list) else (given,)

    return batches
