"""`partita profile`: time every op of a model on this machine."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from partita import units
from partita.cli.base import Output, OutputFile, common_options, output_option
from partita.cli.model_options import ModelOptions, model_options
from partita.costs.profiles import ModelProfile

DATABASE = "partita-profile.jsonl"
MOST_ROWS = 30


@click.command()
@click.argument("model")
@click.option("--device", default="cpu", show_default=True, help="cpu, cuda or cuda:1.")
@click.option("--depth", type=click.IntRange(0), help="Sum by modules this many names deep.")
@click.option("--repeats", type=click.IntRange(1), default=10, show_default=True)
@click.option("--warmup", type=click.IntRange(0), default=2, show_default=True)
@click.option(
    "--database", default=DATABASE, show_default=True, help="Where measurements are kept."
)
@click.option("--fresh", is_flag=True, help="Measure everything again.")
@click.option("--merge", multiple=True, metavar="FILE", help="Take measurements from here too.")
@output_option("Write the profile of this model here.", only_json=True)
@model_options
@common_options
def command(
    model: str,
    device: str,
    depth: int | None,
    repeats: int,
    warmup: int,
    database: str,
    fresh: bool,
    merge: tuple[str, ...],
    output: OutputFile | None,
    options: ModelOptions,
    out: Output,
) -> int:
    """Time every op of a MODEL alone on this machine: forward, backward, memory.

    MODEL is a zoo name, which is run with random weights, or file.py:function. Each op is warmed
    up and repeated; medians and the distance between the quartiles are shown. What was measured
    is kept in a database, by call, device and version of PyTorch, and not measured again; Ctrl-C
    keeps what there is. Plan with it: partita partition MODEL --profile FILE.
    """
    from partita.capture.installed import need_torch

    need_torch("profiling")
    from partita.costs.measured import merge as merge_databases
    from partita.run.load import capture_loaded, load_module
    from partita.run.meter import Timing
    from partita.run.profile import ProfilingStopped, profile

    if merge:
        known = [path for path in (*merge, database) if path in merge or Path(path).exists()]
        merge_databases(known, database, overwrite=True)
    loaded = load_module(model, options.batch, options.dtype, options.training)
    captured, op_of = capture_loaded(loaded)
    with out.parts("calls", 0) as parts:

        def going_on(done: int, total: int, call: str) -> bool:
            parts.at(done, total, call[:70])
            return not out.interrupted

        try:
            model_profile = profile(
                captured,
                loaded.args,
                loaded.kwargs,
                device=device,
                training=options.training,
                timing=Timing(warmup, repeats),
                database=database,
                fresh=fresh,
                progress=going_on,
            )
        except ProfilingStopped as stopped:
            out.note(f"{stopped}; they are kept in {database}: run this again to go on")
            out.result({"format": "partita/result@1", "problem": model, "status": "stopped"})
            return 130
    if loaded.graph is not None:
        model_profile = model_profile.by_op(loaded.graph, op_of)
    written = None if output is None else out.save(output, model_profile.to_json)
    out.show(_text(model_profile, depth))
    out.show(f"measurements in {database}" + (f", profile in {written}" if written else ""))
    out.result(_json(model_profile, depth, database, written))
    return 0


def _text(model_profile: ModelProfile, depth: int | None) -> str:
    lines = [
        f"{model_profile.model} on {model_profile.environment}",
        f"{len(model_profile.ops):,} ops one after the other: forward "
        f"{units.seconds(model_profile.forward_s)}, "
        f"backward {units.seconds(model_profile.backward_s)}",
        "",
        _slowest(model_profile) if depth is None else _modules(model_profile, depth),
    ]
    return "\n".join(lines)


def _modules(model_profile: ModelProfile, depth: int) -> str:
    header = ("module", "ops", "forward", "backward", "peak", "kept", "parameters")
    rows = [
        (
            module.scope or "(model)", f"{module.num_ops:,}",
            units.seconds(module.forward_s), units.seconds(module.backward_s),
            units.size(module.peak_bytes), units.size(module.resident_bytes),
            units.size(module.parameter_bytes),
        )
        for module in model_profile.modules(depth)
    ]  # fmt: skip
    return units.table(header, rows, numbers=range(1, len(header)))


def _slowest(model_profile: ModelProfile) -> str:
    header = ("op", "kind", "forward", "±", "backward", "±", "peak", "kept", "parameters")
    slowest = sorted(model_profile.ops, key=lambda op: -op.seconds)
    rows = [
        (
            op.op, op.kind,
            units.seconds(op.forward_s), units.seconds(op.forward_spread_s),
            units.seconds(op.backward_s), units.seconds(op.backward_spread_s),
            units.size(op.peak_bytes), units.size(op.resident_bytes),
            units.size(op.parameter_bytes),
        )
        for op in slowest[:MOST_ROWS]
    ]  # fmt: skip
    left = len(slowest) - len(rows)
    more = f"\n{left:,} faster ops are in the profile (-o FILE); --depth sums by module"
    return units.table(header, rows, numbers=range(2, len(header))) + (more if left > 0 else "")


def _json(
    model_profile: ModelProfile, depth: int | None, database: str, written: Path | None
) -> dict[str, Any]:
    return {
        "format": "partita/result@1",
        "problem": model_profile.model,
        "status": "measured",
        "environment": asdict(model_profile.environment),
        "forward_s": model_profile.forward_s,
        "backward_s": model_profile.backward_s,
        "ops": [asdict(op) for op in model_profile.ops],
        "modules": [] if depth is None else [asdict(m) for m in model_profile.modules(depth)],
        "database": database,
        "profile": None if written is None else str(written),
    }
