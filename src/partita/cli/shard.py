"""`partita shard`: split every op of a model over the devices of a cluster."""

from pathlib import Path

import click

from partita.cli.base import Output, OutputFile, common_options, output_option
from partita.cli.model_options import ModelOptions, dump_graph_option, model_options, write_dump


@click.command()
@click.argument("model")
@click.option("--cluster", "-c", required=True, help="A preset, 4xA100, 2x8xH100, or a .toml file.")
@click.option("--method", help="A search for sharding problems; see: partita methods sharding.")
@click.option("--time-limit", type=click.FloatRange(0, min_open=True), help="Seconds to search.")
@dump_graph_option
@output_option("Write the plan here.")
@model_options
@common_options
def command(
    model: str,
    cluster: str,
    method: str | None,
    time_limit: float | None,
    dump_graph: Path | None,
    output: OutputFile | None,
    options: ModelOptions,
    out: Output,
) -> int:
    """Find the fastest split of every op of a MODEL over the devices of a cluster.

    MODEL is a zoo name (gpt2, inception_v3@299), a Hugging Face config.json, or a saved graph.
    Tries data parallel, sharded data parallel, and the best split of each op on every mesh of one
    or two axes; each is simulated, and the fastest that fits the memory is kept.
    """
    from partita.jobs.shard import shard
    from partita.report.summary import headline, sharding_text

    with out.stop(time_s=time_limit) as stop:
        found = shard(model, cluster, method=method, stop=stop, seed=out.seed, **options.as_dict())
    written = None
    if output is not None and found.plan is not None:
        written = output.write(found.plan.to_json())
    if found.best is not None:
        write_dump(dump_graph, found.best.simulation.workload.graph)
        out.show("\n".join(headline(found.best.simulation)) + "\n")
    out.show(sharding_text(found))
    if written is not None:
        out.show(f"plan in {written}; look at it with: partita report {written} -o report.html")
    out.result(
        {
            "format": "partita/result@1",
            "problem": model,
            "cluster": cluster,
            "method": method or "pase",
            "status": str(found.status),
            "objective": None if found.best is None else found.best.step_s,
            "lower_bound": found.lower_bound_s,
            "seconds": found.seconds,
            "seed": found.seed,
            "why": found.why,
            "solution": None
            if found.best is None
            else {
                "mesh": {a.name: a.size for a in found.best.simulation.stage.mesh.axes},
                "splits": {
                    split.op: {"dims": list(split.dims), "sharded": split.sharded}
                    for split in found.best.simulation.stage.splits
                },
            },
            "candidates": [
                {
                    "name": c.name,
                    "mesh": c.mesh,
                    "step_s": c.step_s,
                    "communication_s": c.simulation.communication_s,
                    "peak_memory_bytes": max(c.simulation.peak_bytes),
                    "fits": c.simulation.fits,
                }
                for c in found.tried
            ],
            "plan": None if written is None else str(written),
        }
    )
    return 0 if found.best is not None else 1
