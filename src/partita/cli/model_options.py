"""The options that say what to run: shared by every command that takes a MODEL and a cluster."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from partita.capture.onnx_file import is_onnx_spec
from partita.capture.python_file import is_python_spec
from partita.cli.base import Output, OutputFile
from partita.errors import InputError
from partita.graph.backward import OPTIMIZER_STATES
from partita.graph.record import FLOATS, Graph
from partita.units import counted
from partita.zoo.catalogue import MODELS
from partita.zoo.spec import assumed_lengths, find, names_file


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
    help="For inference: the steady state, batch after batch, or the time of one batch.",
)


def model_options(command: Callable[..., int | None]) -> Callable[..., int | None]:
    """Add `--batch`, `--seq`, `--dtype`, `--train/--infer`, `--optimizer`, as `options`.

    A sequence length becomes part of the MODEL (`gpt2@512`), so that plans say it.
    """

    @click.option("--batch", "-b", type=click.IntRange(1), help="Samples per step on all devices.")
    @click.option("--seq", type=click.IntRange(1), help="Tokens per sample; as MODEL@SEQ.")
    @click.option(
        "--decode",
        is_flag=True,
        help="Inference of one token a sample behind --cache; without it a prompt is read.",
    )
    @click.option(
        "--cache",
        type=click.IntRange(1),
        metavar="N",
        help="Tokens read before, in the KV cache; as MODEL@1+N.",
    )
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
        seq: int | None,
        decode: bool,
        cache: int | None,
        dtype: str | None,
        training: bool,
        optimizer: str,
        **rest: Any,
    ) -> int | None:
        model = rest.get("model")
        if decode or cache is not None:
            rest["model"] = model = _decoding(model, seq, cache)
            training = False
        elif seq is not None:
            rest["model"] = model = _with_sequence(model, str(seq), "--seq")
        elif isinstance(model, str) and says_cache(model):
            training = False
        if isinstance(model, str) and not rest.get("quiet"):
            _say_what_is_assumed(model, batch)
        return command(*args, options=ModelOptions(batch, dtype, training, optimizer), **rest)

    return wrapped


def says_cache(model: str) -> bool:
    """`llama-7b@1+4095`: only inference has a cache."""
    return not is_python_spec(model) and "+" in model.rpartition("@")[2] and "@" in model


def _decoding(model: str | None, seq: int | None, cache: int | None) -> str:
    """The MODEL with one new token (or --seq of them) behind a cache."""
    if cache is None:
        raise InputError(
            "needs to know how many tokens were read before", fix="add --cache, for example 4096",
            field="--decode",
        )  # fmt: skip
    return _with_sequence(model, f"{seq or 1}+{cache}", "--cache")


def _with_sequence(model: str | None, value: str, option: str) -> str:
    """The MODEL with its sequence length; refused where it has none to choose."""
    if model is None or is_python_spec(model) or is_onnx_spec(model):
        raise InputError(
            "is for models of the zoo and configurations",
            fix="let the file give arguments of that length",
            field=option,
        )
    if "@" in model:
        raise InputError(f"{model} says a size already", fix="give it once", field=option)
    if not names_file(model) and find(model).option != "seq":
        known = find(model)
        raise InputError(
            f"{known.name} has no sequence", fix=f"choose its {known.option}: {model}@224",
            field=option,
        )  # fmt: skip
    return f"{model}@{value}"


def _say_what_is_assumed(model: str, batch: int | None) -> None:
    """A language model's batch and length are decisions of its user: say which are assumed."""
    if is_python_spec(model) or is_onnx_spec(model):
        return
    assumed = None
    if names_file(model):
        lengths = assumed_lengths(model)
        assumed = 1 if lengths is not None else None
        if lengths is not None and "@" not in model and lengths[0] < lengths[1]:
            click.echo(
                f"its configuration has {lengths[1]:,} positions, of which {lengths[0]:,} are "
                "assumed; give the length of texts with --seq",
                err=True,
            )
    elif (known := MODELS.get(model.partition("@")[0])) is not None and known.option == "seq":
        assumed = known.batch
    if assumed is not None and batch is None:
        are = "is" if assumed == 1 else "are"
        click.echo(
            f"no --batch is given, so {counted(assumed, 'sample')} per step {are} assumed on all "
            "devices together; give the global batch with --batch",
            err=True,
        )


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


def write_dump(path: Path | None, graph: Graph, out: Output) -> Path | None:
    """Write the graph if a file was named, and say where; an existing file is never overwritten."""
    if path is None:
        return None
    from partita.graph.files import write_graph

    return out.keep(path, lambda: write_graph(path, graph))
