"""`partita place`: a device for every op of a model on a machine of heterogeneous devices."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from partita import units
from partita.cli.base import Output, OutputFile, common_options, output_option, refuse_twice
from partita.cli.model_options import ModelOptions, model_options
from partita.errors import InputError

if TYPE_CHECKING:
    from partita.jobs.place_result import Placed


def _wish(text: str) -> tuple[str, str]:
    """`op=device`, where op may be a pattern."""
    pattern, equals, device = text.rpartition("=")
    if not equals or not pattern or not device:
        raise click.BadParameter(f"found {text!r}, op=device is needed, for example 'encoder.*=0'")
    return pattern, device


@click.command()
@click.argument("model")
@click.option("--cluster", "-c", help="A preset, 2xA100+2xV100, a .toml file, or Exprimo's .json.")
@click.option("--method", "-m", help="A search; see: partita methods placement.")
@click.option(
    "--semantics",
    type=click.Choice(["partita", "exprimo"]),
    default="partita",
    show_default=True,
    help="Rules of the simulation.",
)
@click.option("--pin", type=_wish, multiple=True, metavar="OP=DEVICE", help="Only there.")
@click.option("--forbid", type=_wish, multiple=True, metavar="OP=DEVICE", help="Anywhere else.")
@click.option("--colocate", multiple=True, metavar="OP,OP,...", help="All on one device.")
@click.option("--max-devices", type=click.IntRange(1), metavar="K", help="Use at most so many.")
@click.option(
    "--batches", type=click.IntRange(1), default=1, metavar="N", help="Batches in a step; 1."
)
@click.option(
    "--in-flight", type=click.IntRange(1), metavar="K", help="Batches at once; one per device."
)
@click.option("--front", is_flag=True, help="Also the best on fewer devices and in less memory.")
@click.option(
    "--time-limit",
    type=click.FloatRange(0, min_open=True),
    help="Seconds to search; without it as the model's size asks, the same on any machine.",
)
@click.option("--page", metavar="FILE", help="Draw it: one HTML page, timeline and graph.")
@click.option("--net", metavar="FILE", help="Exprimo: write MODEL again, with its devices.")
@output_option("Write the placement here.", only_json=True)
@model_options
@common_options
def command(
    model: str,
    cluster: str | None,
    pin: tuple[tuple[str, str], ...],
    forbid: tuple[tuple[str, str], ...],
    colocate: tuple[str, ...],
    front: bool,
    time_limit: float | None,
    page: str | None,
    net: str | None,
    output: OutputFile | None,
    options: ModelOptions,
    out: Output,
    **settings: Any,
) -> int:
    """Find a device for every op of a MODEL on a cluster, none of which need be here.

    MODEL is a zoo name (resnet50, gpt2), a saved graph, a network of Exprimo or Paleo (.json), or a
    placement that was written with -o: that one is simulated again and checked.

    OP is the name of a forward op or a pattern (encoder.*, h.?.mlp*); DEVICE is a number or a name.
    With --semantics exprimo the rules are Exprimo's: no latency, no weight gradients, half-duplex
    links, first come first served. Experiments with many runs: partita experiment.
    """
    from partita.jobs.place import place, place_again
    from partita.report.placement import front_text, placement_text

    force = bool(click.get_current_context().params.get("force"))  # -o's own, for all files
    drawn = None if page is None else OutputFile(Path(page), force)
    filled = None if net is None else OutputFile(Path(net), force)
    refuse_twice(output, drawn, filled)
    if drawn is not None:
        drawn.check_page()
    is_written = _is_placement(model)
    if filled is not None and not is_written:
        _check_network(model)
    if is_written:
        from partita.jobs.place_result import read_placement

        placed = place_again(read_placement(model))
    elif cluster is None:
        raise click.UsageError("give --cluster, for example: resnet50 --cluster malvik")
    else:
        with out.stop(time_s=time_limit, words=units.seconds) as stop:
            placed = place(
                model, cluster, pinned=pin, forbidden=forbid,
                colocated=[group.split(",") for group in colocate], with_front=front,
                stop=stop, seed=out.seed, **settings, **options.as_dict(),
            )  # fmt: skip
    written = None
    if output is not None and placed.saved is not None:
        written = out.save(output, placed.saved.to_json)
    if placed.best is not None:
        _write_more(model, placed, drawn, filled, out)
    out.show(placement_text(placed, out.width))
    if front and placed.best is not None:
        out.show("\n" + front_text(placed.front()))
    if written is not None:
        out.show(f"placement in {written}; look at it again with: partita place {written}")
    out.result(_as_data(model, cluster, placed, written))
    return 0 if placed.best is not None else 1


def _is_placement(model: str) -> bool:
    from partita.files import decode_json, read_bytes

    if not model.endswith(".json") or not Path(model).is_file():
        return False
    file_format = decode_json(read_bytes(model), model).get("format")
    return isinstance(file_format, str) and file_format.startswith("partita/placement@")


def _check_network(model: str) -> None:
    """Refuse, before anything is searched, what --net cannot write."""
    from partita.jobs.place_subject import is_exprimo_network

    missing = model.lower().endswith(".json") and not Path(model).is_file()
    if not missing and not is_exprimo_network(model):  # who reads what is missing says so
        raise _no_network(model)


def _no_network(model: str) -> InputError:
    return InputError(f"{model} is no network of Exprimo's", fix="use -o instead", field="--net")


def _write_more(
    model: str, placed: "Placed", drawn: OutputFile | None, filled: OutputFile | None, out: Output
) -> None:
    if drawn is not None:
        from partita.report.placement_page import placement_page

        out.save(drawn, lambda: placement_page(placed))
    if filled is not None:
        from partita.capture.exprimo_net import with_devices
        from partita.files import decode_json, encode_json, read_bytes

        spec = placed.subject.workload.spec
        if placed.subject.network is None:
            raise _no_network(model)
        out.save(
            filled,
            lambda: encode_json(with_devices(decode_json(read_bytes(spec)), placed.devices())),
        )


def _as_data(model: str, cluster: str | None, placed: Any, written: Path | None) -> dict[str, Any]:
    best = placed.best
    return {
        "format": "partita/result@1",
        "problem": model,
        "cluster": cluster or placed.subject.cluster_spec,
        "semantics": placed.semantics,
        "method": placed.method,
        "status": str(placed.status),
        "objective": None if best is None else best.step_s,
        "step_interval_s": None if placed.likely_step_s is None else list(placed.likely_step_s),
        "lower_bound": placed.lower_bound_s,
        "gap": placed.gap,
        "seconds": placed.seconds,
        "seed": placed.seed,
        "why": placed.why,
        "evaluations": placed.evaluations,
        "batches": placed.problem.batches,
        "in_flight": placed.problem.pipeline_batches,
        "dispatch": placed.dispatch,
        "solution": None if best is None else {"devices": placed.devices()},
        "peak_memory_bytes": None if best is None else list(best.peak_bytes),
        "candidates": [_row(item) for item in placed.tried],
        "front": [_row(item) for item in placed.front()],
        "archive": [
            {
                "devices": elite.devices_used,
                "communication_bytes": elite.communication_bytes,
                "step_s": elite.makespan_ms / 1e3,
                "fits": elite.score_ms <= elite.makespan_ms,
            }
            for elite in getattr(placed.archive, "elites", ())
        ],
        "plan": None if written is None else str(written),
    }


def _row(item: Any) -> dict[str, Any]:
    return {
        "name": item.name,
        "step_s": item.step_s,
        "devices": item.num_devices,
        "peak_memory_bytes": max(item.peak_bytes),
        "fits": item.fits,
    }
