"""What to place on what: a zoo model, a graph or an Exprimo network; a cluster or its device graph.

Where both files are Exprimo's, the problem that Exprimo itself would solve can be built from them,
with Paleo's times (`costs/paleo.py`).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from partita.capture.exprimo_devices import (
    DeviceGraph,
    device_cluster,
    device_graph_from_json,
    is_device_graph,
)
from partita.capture.exprimo_graph import layer_ops, network_graph
from partita.capture.exprimo_net import ExprimoNetwork, is_network, network_from_json
from partita.cluster import Cluster, resolve
from partita.costs.paleo import exprimo_problem
from partita.costs.placement import PlacementModel, placement_model
from partita.files import decode_json, read_bytes
from partita.graph.record import Graph
from partita.jobs.workload import Workload, load
from partita.problems.placement import PlacementProblem, RecordConstraints


@dataclass(frozen=True)
class Subject:
    """A workload and a machine; `network` and `machine` where they came from Exprimo's files."""

    workload: Workload
    cluster: Cluster
    cluster_spec: str
    network: ExprimoNetwork | None = None
    machine: DeviceGraph | None = None

    @property
    def exprimo(self) -> Callable[[int, int, RecordConstraints], PlacementProblem] | None:
        """Makes Exprimo's own problem of (batches, in flight, constraints), if it can be made."""
        if self.network is None or self.machine is None:
            return None
        return partial(exprimo_problem, self.network, self.machine)

    def exprimo_layers(self) -> PlacementModel:
        """The layers as the network's file has them."""
        assert self.network is not None
        layers = layer_ops(self.network, self.workload.graph)
        return placement_model(self.workload.graph, self.cluster, layers=layers)


def load_subject(
    model: str | Graph,
    cluster: str | Cluster,
    *,
    batch: int | None = None,
    dtype: str | None = None,
    training: bool = True,
    optimizer: str = "adamw",
) -> Subject:
    """Read the model and the machine, whatever form they are in."""
    spec = cluster if isinstance(cluster, str) else cluster.name
    machine = _exprimo_file(cluster, is_device_graph)
    graph_of_devices = None if machine is None else device_graph_from_json(machine, spec)
    if graph_of_devices is not None:
        subject = device_cluster(graph_of_devices)
    else:
        subject = resolve(cluster) if isinstance(cluster, str) else cluster
    net = _exprimo_file(model, is_network)
    options: dict[str, Any] = {"training": training, "optimizer": optimizer}
    if net is None:
        workload = load(model, batch=batch, dtype=dtype, **options)
        return Subject(workload, subject, spec, None, graph_of_devices)
    network = network_from_json(net, batch, str(model))
    workload = load(network_graph(network, dtype or "f32"), spec=str(model), **options)
    named = replace(workload, batch=network.layers[0].shape[0])
    return Subject(named, subject, spec, network, graph_of_devices)


def _exprimo_file(given: object, is_one: Callable[[dict[str, Any]], bool]) -> dict[str, Any] | None:
    """The decoded JSON file if it is one of Exprimo's; None for anything else."""
    if not isinstance(given, str) or not given.lower().endswith(".json"):
        return None
    if not Path(given).is_file():
        return None  # who reads it next says so
    value = decode_json(read_bytes(given), given)
    return value if is_one(value) else None
