"""Place a model: a device for every op on a machine of heterogeneous devices, none of which need be
here.

By our own rules (`partita`): the search works on a record that a compiled simulation scores a
hundred thousand times a second; it knows gradients, updates and latency as sums per layer. What it
finds under several weights of communication, every single device, cuts in a row and neighbours of
the best (`place_job.py`) are then simulated op by op (`place_program.py`), and the fastest that
fits wins. By Exprimo's rules (`exprimo`) the record is the whole truth and the search's answer is
the answer.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TypedDict, Unpack

from partita.capture.exprimo_devices import device_graph_from_json
from partita.capture.exprimo_net import network_from_json
from partita.cluster import Cluster
from partita.costs.placement import SEMANTICS, placement_model
from partita.errors import InputError, PlanError
from partita.files import decode_json
from partita.graph.record import Graph
from partita.jobs.place_job import PlacementJob
from partita.jobs.place_result import Placed, SavedPlacement, layer_devices
from partita.jobs.place_subject import Constraint, Subject, load_subject, read_constraints
from partita.jobs.workload import load_cluster, load_model
from partita.problems.placement import (
    PlacementProblem,
    PlacementSolution,
    RecordConstraints,
)
from partita.search import searches
from partita.search.base import UNTIL_DONE, Search, Stop
from partita.suggest import suggest

MAX_TASKS = 2_000_000  # ops of all batches of a step


class Settings(TypedDict, total=False):
    """How to place: what every way of asking has in common."""

    method: str | Search[PlacementProblem, PlacementSolution] | None
    semantics: str
    pinned: Iterable[Constraint]
    forbidden: Iterable[Constraint]
    colocated: Iterable[Sequence[str]]
    max_devices: int | None
    batches: int
    in_flight: int | None
    with_front: bool
    stop: Stop
    seed: int


def place(
    model: str | Graph,
    cluster: str | Cluster,
    *,
    batch: int | None = None,
    dtype: str | None = None,
    training: bool = True,
    optimizer: str = "adamw",
    **settings: Unpack[Settings],
) -> Placed:
    """Find a device for every op of a model on a cluster, and time one step of it.

    `batches` of `batch` samples make a step, at most `in_flight` of them at once. Ops are named by
    patterns (`encoder.*`), devices by number or name. `with_front` also looks for the best on fewer
    devices and in less memory.
    """
    subject = load_subject(
        model, cluster, batch=batch, dtype=dtype, training=training, optimizer=optimizer
    )
    return place_subject(subject, **settings)


def place_subject(subject: Subject, **settings: Unpack[Settings]) -> Placed:
    """The same for a workload and a machine that are loaded already."""
    semantics = settings.get("semantics", "partita")
    if semantics not in SEMANTICS:
        raise InputError(
            f"found {semantics!r}", fix=suggest(semantics, SEMANTICS), field="semantics"
        )
    batches = settings.get("batches", 1)
    in_flight = settings.get("in_flight") or min(batches, subject.cluster.num_devices)
    for name, value in (("batches", batches), ("in_flight", in_flight)):
        if value < 1:
            raise InputError(f"found {value}", fix="give at least 1", field=name)
    most = MAX_TASKS // max(1, len(subject.workload.graph.ops))
    if semantics == "partita" and batches > most:
        raise InputError(
            f"found {batches:,}",
            fix=f"so many batches of {len(subject.workload.graph.ops):,} ops are not simulated "
            f"one by one; give at most {most:,}",
            field="batches",
        )
    ops = [op.name for op in subject.workload.graph.ops if op.phase == "forward"]
    asked = read_constraints(
        ops,
        subject.cluster,
        settings.get("pinned", ()),
        settings.get("forbidden", ()),
        settings.get("colocated", ()),
        settings.get("max_devices"),
    )
    if semantics == "exprimo" and subject.exprimo is not None:
        layers = subject.exprimo_layers()
    else:
        layers = placement_model(subject.workload.graph, subject.cluster, asked.apart())
    name, search = find_search(settings.get("method"))
    job = PlacementJob(
        subject, layers, asked.constraints(layers.layers), name, search, batches, in_flight,
        settings.get("stop", UNTIL_DONE), settings.get("seed", 0),
    )  # fmt: skip
    with_front = settings.get("with_front", False)
    return job.exprimo(with_front) if semantics == "exprimo" else job.own(with_front)


def place_again(saved: SavedPlacement) -> Placed:
    """Simulate a saved placement anew, checked against the model, the machine and its claim."""
    subject = _subject_again(saved)
    if subject.cluster.fingerprint() != saved.plan.cluster.fingerprint:
        raise PlanError(
            f"the placement is for another {saved.plan.cluster.spec}",
            fix="place the model again",
            field="plan",
        )
    devices = saved.devices()
    layers = placement_model(subject.workload.graph, subject.cluster, devices)
    if saved.semantics == "exprimo" and subject.exprimo is not None:
        layers = subject.exprimo_layers()
    job = PlacementJob(
        subject, layers, RecordConstraints(), saved.plan.origin.method,
        searches("placement")["single"],
        saved.batches, saved.in_flight, UNTIL_DONE, saved.plan.origin.seed,
    )  # fmt: skip
    return job.again(saved, layer_devices(layers, devices))


def _subject_again(saved: SavedPlacement) -> Subject:
    """Model and machine as the plan carries them, Exprimo's files too where its rules are used."""
    plan = saved.plan
    workload, cluster = load_model(plan), load_cluster(plan)
    subject = Subject(workload, cluster, plan.cluster.spec)
    if saved.semantics != "exprimo":
        return subject
    texts = {file.name: "\n".join(file.lines).encode() for file in plan.cluster.files}
    net, devices = texts.get(plan.model.spec), texts.get(plan.cluster.spec)
    if net is None or devices is None:
        raise PlanError(
            "the placement is timed by Exprimo's rules and does not carry its files",
            fix="place the model again",
            field="semantics",
        )
    spec, machine = plan.model.spec, plan.cluster.spec
    return replace(
        subject,
        network=network_from_json(decode_json(net, spec), plan.model.batch, spec),
        machine=device_graph_from_json(decode_json(devices, machine), machine),
    )


def find_search(
    method: str | Search[PlacementProblem, PlacementSolution] | None,
) -> tuple[str, Search[PlacementProblem, PlacementSolution]]:
    """A search by its name (the default for none), or one that is given."""
    known = searches("placement")
    if method is None:
        return next(iter(known.items()))
    if not isinstance(method, str):
        return getattr(method, "name", type(method).__name__.lower()), method
    if method not in known:
        raise InputError(
            f"unknown method {method!r}",
            fix=f"{suggest(method, known)} (there is {', '.join(known)})",
            field="method",
        )
    return method, known[method]
