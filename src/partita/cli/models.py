"""`partita models`: the models that come with partita, or one in full, drawn if asked for."""

from collections import Counter
from pathlib import Path
from typing import Any

import click

from partita.cli.base import Output, common_options
from partita.cli.model_options import dump_graph_option, says_cache, write_dump
from partita.graph.record import FLOATS, Graph
from partita.graph.shapes import unknown_kinds
from partita.units import count, flops, size, table
from partita.zoo import ALIASES, MODELS, ZooModel, build
from partita.zoo.figures import forward_flops


@click.command()
@click.argument("model", required=False)
@click.option("--batch", "-b", type=click.IntRange(1), help="Samples in the graph of MODEL.")
@click.option("--dtype", type=click.Choice(FLOATS), help="Element type of its parameters.")
@dump_graph_option
@common_options
def command(
    model: str | None,
    batch: int | None,
    dtype: str | None,
    dump_graph: Path | None,
    out: Output,
) -> None:
    """List the models that are known, or show one MODEL.

    MODEL is a name of the list, a name with an image size or sequence length (gpt2@512), a
    Hugging Face config.json, or a saved graph.
    """
    if model is None:
        given = {"--batch": batch, "--dtype": dtype, "--dump-graph": dump_graph}
        for option, value in given.items():
            if value is not None:
                raise click.UsageError(f"{option} needs a MODEL")
        _list(out)
        return
    graph = build(model, batch=batch, dtype=dtype, loss=not says_cache(model))
    written = write_dump(dump_graph, graph, out)
    described = _described(model, graph)
    out.show(_as_text(described))
    if written is not None:
        out.show(f"graph in {written}")
    for kind in unknown_kinds(graph):
        out.note(f"warning: ops of the unknown kind {kind!r} are never split, costed by bytes")
    out.result({**described, "graph": None if written is None else str(written)})


def _list(out: Output) -> None:
    entries = [_entry(model) for model in MODELS.values()]
    rows = [
        (
            entry["name"],
            count(entry["parameters"]),
            flops(entry["forward_flops"]),
            f"{entry['option']} {entry['default']}",
            entry["summary"],
        )
        for entry in entries
    ]
    out.show(table(("model", "parameters", "forward", "per item", "what it is"), rows, (1, 2)))
    out.show("\nAnother size: resnet50@320, gpt2@512. One in full: partita models gpt2")
    out.result({"format": "partita/models@1", "models": entries, "aliases": ALIASES})


def _entry(model: ZooModel) -> dict[str, Any]:
    graph = model.build(batch=1)
    return {
        "name": model.name,
        "summary": model.summary,
        "parameters": graph.num_parameters,
        "forward_flops": forward_flops(graph),
        "option": model.option,
        "default": model.default,
        "batch": model.batch,
        "source": model.source,
    }


def _described(spec: str, graph: Graph) -> dict[str, Any]:
    kinds = Counter(op.kind for op in graph.ops)
    return {
        "format": "partita/model@1",
        "model": spec,
        "name": graph.name,
        "parameters": graph.num_parameters,
        "parameter_bytes": sum(tensor.size_bytes for tensor in graph.parameters),
        "forward_flops": forward_flops(graph),
        "num_ops": len(graph.ops),
        "num_tensors": len(graph.tensors),
        "kinds": dict(sorted(kinds.items(), key=lambda item: (-item[1], item[0]))),
        "inputs": [
            {"name": tensor.name, "shape": list(tensor.shape), "dtype": tensor.dtype}
            for tensor in graph.inputs
        ],
        "fingerprint": graph.fingerprint(),
    }


def _as_text(described: dict[str, Any]) -> str:
    inputs = ", ".join(f"{i['name']} {i['dtype']}{i['shape']}" for i in described["inputs"])
    kinds = ", ".join(f"{number} {kind}" for kind, number in described["kinds"].items())
    return "\n".join(
        [
            f"{described['name']}",
            f"  parameters  {described['parameters']:,} ({size(described['parameter_bytes'])})",
            f"  forward     {flops(described['forward_flops'])}",
            f"  inputs      {inputs}",
            f"  ops         {described['num_ops']:,}: {kinds}",
        ]
    )
