"""`partita clusters`: the machines and kinds of devices that come with partita, or one in full."""

from dataclasses import asdict

import click

from partita.cli.base import Output, common_options
from partita.cluster import Cluster, DeviceKind, list_kinds, list_presets, resolve
from partita.files import decode_json
from partita.units import rate, size, table

SHORTHAND = (
    "A cluster is one of these machines, a .toml or .json file, or a shorthand of kinds:\n"
    "  4xA100          four in one node\n"
    "  2x8xH100        two nodes of eight\n"
    "  4xV100+8xP100   different kinds, joined by the network"
)


@click.command()
@click.argument("cluster", required=False)
@click.option("--toml", is_flag=True, help="Print CLUSTER as a TOML file, to start your own from.")
@common_options
def command(cluster: str | None, toml: bool, out: Output) -> None:
    """List the machines and devices that are known, or show one CLUSTER.

    CLUSTER is a machine of the list, a file, or a shorthand such as 2x8xH100.
    """
    if toml and (cluster is None or out.json):
        raise click.UsageError(
            "--toml and --json exclude each other" if out.json else "--toml needs a CLUSTER"
        )
    if cluster is None:
        _list(out)
    else:
        _show(resolve(cluster), toml, out)


def _list(out: Output) -> None:
    machines, kinds = list_presets(), list_kinds()
    out.show(table(("machine", "what it is"), sorted(machines.items())))
    out.show("")
    out.show(
        table(
            ("device", "memory", "bandwidth", "f32", "f16"),
            [_kind_row(kind) for kind in kinds],
            numbers=(1, 2, 3, 4),
        )
    )
    out.show(f"\n{SHORTHAND}")
    out.result(
        {
            "format": "partita/clusters@1",
            "machines": machines,
            "kinds": [asdict(kind) for kind in kinds],
        }
    )


def _kind_row(kind: DeviceKind) -> tuple[str, ...]:
    return (
        kind.name,
        size(kind.memory_bytes),
        rate(kind.memory_bytes_per_s, "B"),
        rate(kind.peak("f32"), "FLOP"),
        rate(kind.peak("f16"), "FLOP"),
    )


def _show(cluster: Cluster, toml: bool, out: Output) -> None:
    from partita.cluster.toml import write_toml  # half of what importing this command would cost

    out.show(write_toml(cluster).rstrip("\n") if toml else cluster.summary())
    out.result(decode_json(cluster.to_json()))
