"""`partita shard`: split every op of a model over the devices of a cluster."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from partita import units
from partita.cli.base import Output, OutputFile, common_options, output_option, refuse_twice
from partita.cli.model_options import ModelOptions, dump_graph_option, model_options, write_dump

if TYPE_CHECKING:
    from partita.jobs.simulate import Simulation
    from partita.plans import Stage

PASE_GRAPHS = ("alexnet", "resnet101", "inception3", "rnnlm", "transformer")


@click.command()
@click.argument("model", required=False)
@click.option("--cluster", "-c", help="A preset, 4xA100, 2x8xH100, or a .toml file.")
@click.option("--method", help="A search for sharding problems; see: partita methods sharding.")
@click.option("--time-limit", type=click.FloatRange(0, min_open=True), help="Seconds to search.")
@click.option("--compare", is_flag=True, help="Put the named strategies beside the best plan.")
@click.option("--graph", "graph", help=f"PaSE's own graphs: {', '.join(PASE_GRAPHS)}.")
@click.option("--procs", "-p", type=click.IntRange(1), default=8, help="PaSE: devices.")
@click.option("--flops", type=float, default=10.0, help="PaSE: peak TFLOP/s of a device.")
@click.option("--bw", type=float, default=16.0, help="PaSE: link bandwidth in GB/s.")
@click.option("--algo", help="PaSE: dp (0) or brute (1); by default the fastest exact method.")
@click.option("--costs", type=click.Choice(["pase"]), help="PaSE: its cost model (with --graph).")
@click.option("--measure", is_flag=True, help="PaSE: the mean of five searches.")
@click.option("--profile", is_flag=True, help="PaSE: where the search's time goes.")
@dump_graph_option
@output_option("Write the plan here.", only_json=True)
@model_options
@common_options
def command(
    model: str | None,
    cluster: str | None,
    method: str | None,
    time_limit: float | None,
    compare: bool,
    graph: str | None,
    dump_graph: Path | None,
    output: OutputFile | None,
    options: ModelOptions,
    out: Output,
    **pase: Any,
) -> int:
    """Find the fastest split of every op of a MODEL over the devices of a cluster.

    MODEL is a zoo name (gpt2, inception_v3@299), a Hugging Face config.json, a saved graph, an ONNX
    file, or file.py:function, which gives a PyTorch module and the arguments of a call.

    On every mesh of one or two axes each op chooses which loop dims to split and whether its
    parameters are kept replicated or sharded; the memory of the devices is a hard limit. The best
    answers and the named strategies are simulated, and the fastest that fits is kept.

    With --graph instead of MODEL, PaSE's own problem is solved: its graphs, its cost model, its
    options --procs, --batch, --flops, --bw, --algo, --measure, --profile.
    """
    refuse_twice(output, dump_graph)
    if graph is not None:
        from partita.cli.shard_pase import solve_pase

        if model is not None:
            raise click.UsageError("give a MODEL or --graph, not both")
        return solve_pase(
            out, graph=graph, batch=options.batch, output=output, time_limit=time_limit,
            dump_graph=dump_graph, **pase,
        )  # fmt: skip
    if model is None or cluster is None:
        raise click.UsageError("give a MODEL and --cluster, for example: gpt2 --cluster 4xA100")
    return _shard(model, cluster, method, time_limit, compare, dump_graph, output, options, out)


def _shard(
    model: str, cluster: str, method: str | None, time_limit: float | None, compare: bool,
    dump_graph: Path | None, output: OutputFile | None, options: ModelOptions, out: Output,
) -> int:  # fmt: skip
    from partita.jobs.shard import shard
    from partita.report.summary import comparison_text, headline, sharding_text

    with out.stop(time_s=time_limit, words=units.seconds) as stop:
        sharding = shard(
            model, cluster, method=method, stop=stop, seed=out.seed, **options.as_dict()
        )
    written = None
    if output is not None and sharding.plan is not None:
        written = out.save(output, sharding.plan.to_json)
    if sharding.best is not None:
        write_dump(dump_graph, sharding.best.simulation.workload.graph, out)
        out.show("\n".join(headline(sharding.best.simulation)) + "\n")
    out.show(comparison_text(sharding) if compare else sharding_text(sharding))
    if written is not None:
        out.show(f"plan in {written}; look at it with: partita report {written} -o report.html")
    stage = None if sharding.best is None else _decided(sharding.best.simulation)
    out.result(
        {
            "format": "partita/result@1",
            "problem": model,
            "cluster": cluster,
            "method": sharding.method,
            "status": str(sharding.status),
            "objective": None if sharding.best is None else sharding.best.step_s,
            "lower_bound": sharding.lower_bound_s,
            "seconds": sharding.seconds,
            "seed": sharding.seed,
            "why": sharding.why,
            "solution": None
            if stage is None
            else {
                "mesh": {axis.name: axis.size for axis in stage.mesh.axes},
                "splits": {
                    split.op: {"dims": list(split.dims), "sharded": split.zero}
                    for split in stage.splits
                },
            },
            "candidates": [
                {
                    "name": c.name,
                    "plan": c.simulation.arrangement,
                    "mesh": str(_decided(c.simulation).mesh),
                    "step_s": c.step_s,
                    "communication_s": c.simulation.communication_s,
                    "peak_memory_bytes": max(c.simulation.peak_bytes),
                    "fits": c.simulation.fits,
                }
                for c in sharding.tried
            ],
            "plan": None if written is None else str(written),
        }
    )
    return 0 if sharding.best is not None else 1


def _decided(simulation: "Simulation") -> "Stage":
    """The one stage, its axes called what they split: dp, tp, ..."""
    return (simulation.decided or simulation.stages)[0]
