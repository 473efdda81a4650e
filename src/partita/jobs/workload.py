"""What is to be run: a model at a batch size, by its name or out of a plan that carries it.

A plan carries the graph of its model and the files of its machine. Opening a plan runs no code and
opens no file that is not carried or lies in the plan's own folder: a plan may come from a stranger.
What the model's code is needed for (`emit`, `run`) asks `code_of` first: the file must be the one
that was captured, by its hash, or be named anew by the user.

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
import logging
from dataclasses import dataclass, replace
from pathlib import Path

from partita import zoo
from partita.capture.onnx_file import is_onnx_spec, onnx_graph
from partita.capture.python_file import is_python_spec, python_graph, python_path
from partita.cluster import Cluster, resolve
from partita.errors import GraphError, InputError, ModelError, PlanError
from partita.files import decode_config, read_bytes
from partita.graph.backward import OPTIMIZER_STATES, training_graph
from partita.graph.files import from_text, to_text
from partita.graph.record import Graph, multiplied_in
from partita.graph.shapes import unknown_kinds
from partita.plans import EXECUTIONS, CarriedFile, ClusterRef, ModelRef, Plan
from partita.zoo.spec import names_file

log = logging.getLogger("partita")
MACHINE = "machine.json"  # what a machine is called that no spec describes
AGAIN = "plan again with this version, which carries it"


@dataclass(frozen=True)
class Workload:
    """A model with everything that decides its cost; `graph` holds the backward if it trains."""

    spec: str
    graph: Graph
    batch: int
    dtype: str
    training: bool
    optimizer: str
    execution: str = "graph"  # one of EXECUTIONS
    given: Graph | None = None  # what a plan carries: the graph that was given or read from a file
    sha256: str = ""  # of the Python file that was run for it
    grad_dtype: str = ""  # of gradients of parameters while they are added up; "": theirs
    matmul_dtype: str = ""  # that linear layers multiply in; "": the model's

    def ref(self) -> ModelRef:
        """How a plan names it, with the graph where the name alone does not make it."""
        lines = () if self.given is None else tuple(to_text(self.given).splitlines())
        return ModelRef(
            self.spec, self.batch, self.dtype, self.training, self.optimizer,
            self.graph.fingerprint(), lines, self.sha256, self.grad_dtype, self.matmul_dtype,
            self.execution,
        )  # fmt: skip


def load(
    model: str | Graph,
    *,
    batch: int | None = None,
    dtype: str | None = None,
    training: bool = True,
    optimizer: str = "adamw",
    execution: str = "graph",
    spec: str | None = None,
    grad_dtype: str = "",
    matmul_dtype: str = "",
) -> Workload:
    """The workload of a graph, or of what names one: zoo, config, graph, `file.py:name`, ONNX.

    `spec` is what a graph is called, if not by its own name. `grad_dtype` and `matmul_dtype` are
    that of the model where they are not given.
    """
    if batch is not None and batch < 1:
        raise ModelError(f"a batch of {batch}", fix="give at least 1", field="batch")
    if optimizer not in OPTIMIZER_STATES:
        raise ModelError(
            f"unknown optimizer {optimizer!r}",
            fix=f"use one of {', '.join(OPTIMIZER_STATES)}",
            field="optimizer",
        )
    if execution not in EXECUTIONS:
        raise ModelError(
            f"unknown execution {execution!r}",
            fix=f"use one of {', '.join(EXECUTIONS)}",
            field="execution",
        )
    if spec is None:
        spec = model if isinstance(model, str) else model.name
    forward = model if isinstance(model, Graph) else _forward(model, batch, dtype, training)
    for kind in unknown_kinds(forward):
        log.warning(
            "ops of the unknown kind %r are carried as they are: never split, costed by bytes", kind
        )
    wants_backward = training and not forward.is_training
    own = _dtype_of(forward)
    grad_dtype, matmul_dtype = ("" if each == own else each for each in (grad_dtype, matmul_dtype))
    _check_types(own, grad_dtype, matmul_dtype, training=wants_backward)
    graph = multiplied_in(forward, matmul_dtype) if matmul_dtype else forward
    graph = training_graph(graph, optimizer, grad_dtype=grad_dtype) if wants_backward else graph
    from_file = isinstance(model, Graph) or is_onnx_spec(spec) or names_file(spec)
    is_code = isinstance(model, str) and is_python_spec(model)
    return Workload(
        spec, graph, _batch_of(forward), own, graph.is_training, optimizer,
        execution, forward if from_file or is_code else None,
        hashlib.sha256(read_bytes(python_path(spec))).hexdigest() if is_code else "", grad_dtype,
        matmul_dtype,
    )  # fmt: skip


def computed_as(
    workload: Workload, grad_dtype: str, matmul_dtype: str, execution: str, cluster: Cluster
) -> Workload:
    """The same model computed otherwise, on a machine that can; '' is the model's own type."""
    if matmul_dtype == "f8":
        for kind in cluster.kinds:
            if "f8" not in dict(kind.flops_per_s):
                raise ModelError(
                    f"{kind.name} has no fp8 products",
                    fix="leave it out, or choose devices that have them: partita clusters",
                    field="matmul-dtype",
                )
    if not grad_dtype and not matmul_dtype:
        return replace(workload, execution=execution)
    again = functools.partial(
        load, training=workload.training, optimizer=workload.optimizer, execution=execution,
        grad_dtype=grad_dtype, matmul_dtype=matmul_dtype,
    )  # fmt: skip
    if workload.given is None:
        return again(workload.spec, batch=workload.batch, dtype=workload.dtype)
    return replace(again(workload.given, spec=workload.spec), sha256=workload.sha256)


def _check_types(dtype: str, grad_dtype: str, matmul_dtype: str, *, training: bool) -> None:
    """Sums of gradients may be wider than the model, products of linear layers narrower."""
    if grad_dtype and not training:
        raise ModelError(
            f"gradients in {grad_dtype}, but inference has none, and a graph with a backward "
            "has those it has",
            fix="leave it out",
            field="grad-dtype",
        )
    if grad_dtype and not (grad_dtype == "f32" and dtype in ("bf16", "f16")):
        raise ModelError(
            f"gradients in {grad_dtype} of a model in {dtype}",
            fix=f"give {dtype}" + (" or f32" if dtype in ("bf16", "f16") else ""),
            field="grad-dtype",
        )
    if matmul_dtype and not (matmul_dtype == "f8" and dtype in ("bf16", "f16")):
        raise ModelError(
            f"products in {matmul_dtype} of a model in {dtype}",
            fix=f"give {dtype}"
            + (" or fp8" if dtype in ("bf16", "f16") else ", or plan with --dtype bf16"),
            field="matmul-dtype",
        )


def _forward(spec: str, batch: int | None, dtype: str | None, training: bool) -> Graph:
    if is_python_spec(spec):
        return _with_batch(python_graph(spec, batch, dtype, training), spec, batch)
    if is_onnx_spec(spec):
        return _with_batch(onnx_graph(spec, batch, dtype), spec, batch)
    return zoo.build(spec, batch=batch, dtype=dtype, loss=training)


def _with_batch(graph: Graph, spec: str, batch: int | None) -> Graph:
    """A model of the user's decides its own batch; another one asked for would be a lie."""
    if batch is not None and batch != _batch_of(graph):
        raise ModelError(
            f"has a batch of {_batch_of(graph)}, not {batch}",
            fix=(
                "leave it out, or export the model with a batch that may vary"
                if is_onnx_spec(spec)
                else "let the function take `batch`, and its first argument have so many rows (of "
                "nn.EmbeddingBag: the offsets, or ids with a row for each bag), or leave it out"
            ),
            field=spec,
        )
    return graph


def _batch_of(graph: Graph) -> int:
    return graph.inputs[0].shape[0] if graph.inputs and graph.inputs[0].shape else 1


def _dtype_of(graph: Graph) -> str:
    return graph.parameters[0].dtype if graph.parameters else "f32"


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
        return "model_type" not in decode_config(read_bytes(path), spec)
    return path.suffix == ".txt"
