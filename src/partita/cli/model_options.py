"""The options that say what to run: shared by every command that takes a MODEL and a cluster."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from partita.cli.base import OutputFile
from partita.graph.backward import OPTIMIZER_STATES
from partita.graph.dtypes import FLOATS
from partita.graph.record import Graph


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """What was asked for, in the names the jobs use."""

    batch: int | None
    dtype: str | None
    training: bool
    optimizer: str

    def as_dict(self) -> dict[str, Any]:
        """As keyword arguments of a job."""
        return {
            "batch": self.batch,
            "dtype": self.dtype,
            "training": self.training,
            "optimizer": self.optimizer,
        }


objective_option = click.option(
    "--objective",
    type=click.Choice(["throughput", "latency"]),
    default="throughput",
    show_default=True,
    help="For inference: time from batch to batch, or of one batch.",
)


def model_options(command: Callable[..., int | None]) -> Callable[..., int | None]:
    """Add `--batch`, `--dtype`, `--train/--infer`, `--optimizer`, handed on as `options`."""

    @click.option("--batch", "-b", type=click.IntRange(1), help="Samples per step on all devices.")
    @click.option("--dtype", type=click.Choice(FLOATS), help="Element type of the parameters.")
    @click.option("--train/--infer", "training", default=True, help="Training is the default.")
    @click.option(
        "--optimizer",
        type=click.Choice(list(OPTIMIZER_STATES)),
        default="adamw",
        show_default=True,
        help="Decides the memory and time of updates.",
    )
    @functools.wraps(command)
    def wrapped(
        *args: Any,
        batch: int | None,
        dtype: str | None,
        training: bool,
        optimizer: str,
        **rest: Any,
    ) -> int | None:
        return command(*args, options=ModelOptions(batch, dtype, training, optimizer), **rest)

    return wrapped


calibration_option = click.option(
    "--calibration",
    metavar="FILE",
    help="What partita compare-trace measured of such devices and links: used for all costs.",
)


def dump_graph_option(command: Callable[..., int | None]) -> Callable[..., int | None]:
    """Add `--dump-graph FILE`, handed on as `dump_graph: Path | None`; checked before the work."""

    def checked(ctx: click.Context, option: click.Parameter, path: Path | None) -> Path | None:
        if path is not None:
            from partita.graph.files import WRITERS

            OutputFile(path).ending(WRITERS)
        return path

    return click.option(
        "--dump-graph",
        type=click.Path(path_type=Path),
        metavar="FILE",
        callback=checked,
        help="Write the model's graph too: .dot, .svg, .txt or .json.",
    )(command)


def write_dump(path: Path | None, graph: Graph) -> None:
    """Write the graph if a file was named; an existing file is never overwritten."""
    if path is not None:
        from partita.graph.files import write_graph

        write_graph(path, graph)
