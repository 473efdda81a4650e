"""The options that name a strategy: `--tp 8 --pp 4 --zero 1 ...`, as frameworks call them."""

import functools
from collections.abc import Callable
from typing import Any

import click

from partita.errors import InputError
from partita.forecast.inputs import ATTENTION, RECOMPUTE, SCHEDULES
from partita.plans import EXECUTIONS
from partita.suggest import suggest

NODE = "node"
ZERO = ("0", "1", "2", "3")

DEGREES = (
    ("--tp", "Tensor parallel ranks."),
    ("--pp", "Pipeline stages."),
    ("--vpp", "Chunks of layers on each rank of a pipeline (interleaved)."),
    ("--dp", "Data parallel replicas; what the others leave of the devices unless given."),
    ("--cp", "Context parallel ranks, which share a sequence."),
    ("--ep", "Expert parallel ranks."),
)
NAMES = (
    "micro_batch", "tp", "pp", "vpp", "dp", "cp", "ep", "sp", "zero", "hsdp", "layers",
    "recompute", "schedule", "matmul_dtype", "grad_dtype", "execution", "attention", "dropout",
)  # fmt: skip


def strategy_options(command: Callable[..., int | None]) -> Callable[..., int | None]:
    """Add the options, handed on as `strategy`: what was given, or None if nothing was.

    A schedule that is a file of torch's pipelining is of a plan: it is handed on as `schedule`.
    """

    @click.option("--micro-batch", type=click.IntRange(1), help="Sequences that run at once.")
    @_degrees
    @click.option("--sp", is_flag=True, help="Sequence parallel: norms sharded over tp.")
    @click.option("--zero", type=click.Choice(ZERO), help="ZeRO stage; 3 is FSDP.")
    @click.option(
        "--hsdp",
        metavar="[RANKS]",
        is_flag=False,
        flag_value=NODE,
        help="Ranks that a copy is sharded over, replicated beyond; those of a node if no number.",
    )
    @click.option("--layers", metavar="N,N,...", help="Layers of each stage, where uneven.")
    @click.option("--recompute", type=click.Choice(RECOMPUTE), help="What the backward repeats.")
    @click.option(
        "--schedule",
        metavar="NAME|FILE.csv",
        help=f"{', '.join(SCHEDULES)}; or a file: run a plan's stages in this order.",
    )
    @click.option("--matmul-dtype", metavar="DTYPE", help="Of matrix products: fp8, fp4, bf16, ...")
    @click.option("--grad-dtype", metavar="DTYPE", help="Of gradient sums; f32 unless given.")
    @click.option("--execution", type=click.Choice(EXECUTIONS), help="How kernels are started.")
    @click.option("--attention", type=click.Choice(ATTENTION), help="flash unless given.")
    @click.option("--dropout", is_flag=True, help="Train with dropout.")
    @functools.wraps(command)
    def wrapped(*args: Any, **options: Any) -> int | None:
        given = {name: options.pop(name) for name in NAMES}
        chosen = {name: value for name, value in given.items() if value not in (None, False)}
        file = chosen.pop("schedule") if str(chosen.get("schedule")).endswith(".csv") else None
        return command(*args, schedule=file, strategy=_read(chosen) or None, **options)

    return wrapped  # fmt: skip


def _degrees(command: Callable[..., Any]) -> Callable[..., Any]:
    for name, text in reversed(DEGREES):
        command = click.option(name, type=click.IntRange(1), help=text)(command)
    return command


def _read(chosen: dict[str, Any]) -> dict[str, Any]:
    """Texts as numbers."""
    from partita.jobs.forecast import NODE as NODE_RANKS

    if chosen.get("schedule", SCHEDULES[0]) not in SCHEDULES:
        name = chosen["schedule"]
        raise InputError(f"found {name!r}", fix=suggest(name, SCHEDULES), field="--schedule")
    if "zero" in chosen:
        chosen["zero"] = int(chosen["zero"])
    if "hsdp" in chosen:
        text = chosen["hsdp"]
        if text != NODE and not (text.isdecimal() and 0 < int(text) < 2**31):
            raise InputError(
                f"found {text!r}", fix="give the number of ranks, or nothing", field="--hsdp"
            )
        chosen["hsdp"] = NODE_RANKS if text == NODE else int(text)
    if "layers" in chosen:
        parts = chosen["layers"].split(",")
        if not all(part.strip().isdecimal() and len(part) < 9 for part in parts):
            raise InputError(
                f"found {chosen['layers']!r}",
                fix="give a number for each stage, like 11,12,12,11",
                field="--layers",
            )
        chosen["layers"] = tuple(int(part) for part in parts)
    return chosen
