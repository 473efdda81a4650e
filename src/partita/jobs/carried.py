"""What a plan carries: the graph of its model and the files of its machine, in and out.

Opening a plan runs no code and opens no file that is not carried or lies in the plan's own folder:
a plan may come from a stranger. What the model's code is needed for (`emit`, `run`) asks `code_of`
first: the file must be the one that was captured, by its hash, or be named anew by the user.

    plan of            carries                     opened again
    a zoo model        its name                    built by the zoo
    file.py:function   graph, sha256 of the file   the graph; never the code
    .onnx, a graph,    graph                       the graph
    a config.json
    a preset, 4xA100   its name                    built from the presets
    a .toml or .json,  the files' lines            those lines
    a calibration
"""

import functools
import hashlib
from pathlib import Path

from partita.capture.onnx_file import is_onnx_spec
from partita.capture.python_file import is_python_spec, python_path
from partita.cluster import Cluster, resolve
from partita.errors import GraphError, InputError, PlanError
from partita.files import decode_json, read_bytes
from partita.graph.files import from_text
from partita.graph.record import Graph
from partita.jobs.workload import Workload, load
from partita.plans import CarriedFile, ClusterRef, ModelRef, Plan
from partita.zoo.spec import names_file

MACHINE = "machine.json"  # what a machine is called that no spec describes
AGAIN = "plan again with this version, which carries it"


def load_model(plan: Plan) -> Workload:
    """The workload that a plan was made for, checked by its fingerprint; runs no code."""
    return load_ref(plan.model, plan.folder)


def load_ref(ref: ModelRef, folder: str = "") -> Workload:
    """The workload that a plan names; `folder` is where the plan's file is."""
    workload = _load(ref, folder)
    if workload.graph.fingerprint() != ref.fingerprint:
        raise PlanError(
            f"the plan is for another {ref.spec} (fingerprint {ref.fingerprint}, "
            f"now {workload.graph.fingerprint()})",
            fix="plan again with this version of the model",
            field="model",
        )
    return workload


def _load(ref: ModelRef, folder: str) -> Workload:
    spec = ref.spec
    given = functools.partial(
        load, training=ref.training, optimizer=ref.optimizer, execution=ref.execution,
        grad_dtype=ref.grad_dtype, matmul_dtype=ref.matmul_dtype,
    )  # fmt: skip
    if ref.graph:
        return given(_graph(ref), spec=spec)
    if is_python_spec(spec):
        raise PlanError(
            f"the plan carries no graph of {spec}, and opening a plan runs no code",
            fix=AGAIN,
            field="model",
        )
    if is_onnx_spec(spec) or names_file(spec):
        spec = beside(folder, spec, "model")
        if is_saved_graph(spec):  # it has the batch and dtype it has
            return given(spec)
    return given(spec, batch=ref.batch, dtype=ref.dtype)


def load_cluster(plan: Plan, spec: str | None = None) -> Cluster:
    """The machine that a plan was made for; `spec` is a part of its name, without what is added."""
    texts = {file.name: "\n".join(file.lines).encode() for file in plan.cluster.files}
    if MACHINE in texts:
        return Cluster.from_json(texts[MACHINE], MACHINE)

    def read(name: str) -> bytes:
        return texts[name] if name in texts else read_bytes(beside(plan.folder, name, "cluster"))

    return resolve(plan.cluster.spec if spec is None else spec, read)


def cluster_ref(spec: str, cluster: Cluster) -> ClusterRef:
    """How a plan names a machine: a preset by its name, all else with the files that describe it.

    A machine that was made in Python, or whose files have changed since, is carried as a whole.
    """
    files: list[CarriedFile] = []

    def read(name: str) -> bytes:
        files.append(carried_file(name))
        return "\n".join(files[-1].lines).encode()

    try:
        is_described = resolve(spec, read).fingerprint() == cluster.fingerprint()
    except (InputError, UnicodeDecodeError):
        is_described = False
    if not is_described:
        lines = tuple(cluster.to_json().decode().split("\n"))
        files = [CarriedFile(MACHINE, lines)]
    return ClusterRef(spec, cluster.num_devices, cluster.fingerprint(), tuple(files))


def carried_file(name: str) -> CarriedFile:
    """A text file as a plan carries it."""
    return CarriedFile(name, tuple(read_bytes(name).decode("utf-8-sig").split("\n")))


def code_of(ref: ModelRef, given: str | None = None) -> str:
    """What names the model's code: `given` by the user, else the plan's, if it is what it was."""
    if given is not None or not is_python_spec(ref.spec):
        return given or ref.spec
    path = python_path(ref.spec)
    if not ref.sha256:
        raise PlanError(
            f"the plan does not say which {path} was captured",
            fix=f"look at that file, then name it: --model {ref.spec}",
            field="model",
        )
    if hashlib.sha256(read_bytes(path)).hexdigest() != ref.sha256:
        raise PlanError(
            f"{path} is not the file that was captured: its content differs",
            fix=f"plan again, or, if it may be run, name it: --model {ref.spec}",
            field="model",
        )
    return ref.spec


def beside(folder: str, name: str, field: str) -> str:
    """The path of a file that a plan names, if it lies in the plan's own folder."""
    home = Path(folder).resolve()
    for path in (home / name, Path(name)):
        before = str(path).rpartition("@")[0]  # config.json@4096
        file = path if path.exists() or not before else Path(before)
        if folder and file.exists() and file.resolve().is_relative_to(home):
            return str(path)
    raise PlanError(
        f"the plan names {name} and does not carry it; only files in the plan's folder are opened",
        fix=f"put it there, or {AGAIN}",
        field=field,
    )


def _graph(ref: ModelRef) -> Graph:
    try:
        return from_text("\n".join(ref.graph) + "\n")
    except GraphError as error:
        raise PlanError(
            f"the graph that is carried: {error}", fix="plan again", field="model.graph"
        ) from None


def is_saved_graph(spec: str) -> bool:
    """Does a MODEL name a graph in a file, which has the batch and dtype it has?"""
    path = Path(spec)
    if path.suffix == ".json" and path.is_file():
        return "model_type" not in decode_json(read_bytes(path), spec)
    return path.suffix == ".txt"
