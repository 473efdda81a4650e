"""What is to be run: a model at a batch size, for training or inference."""

import functools
import hashlib
import logging
from dataclasses import dataclass, replace

from partita import zoo
from partita.capture.onnx_file import is_onnx_spec, onnx_graph
from partita.capture.python_file import is_python_spec, python_graph, python_path
from partita.cluster import Cluster
from partita.errors import ModelError
from partita.files import read_bytes
from partita.graph import Graph, training_graph
from partita.graph.backward import OPTIMIZER_STATES
from partita.graph.files import to_text, unknown_kinds
from partita.graph.record import multiplied_in
from partita.plans import EXECUTIONS, ModelRef
from partita.zoo.spec import names_file

log = logging.getLogger("partita")


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
                else "let the function take `batch`, or leave it out"
            ),
            field=spec,
        )
    return graph


def _batch_of(graph: Graph) -> int:
    return graph.inputs[0].shape[0] if graph.inputs and graph.inputs[0].shape else 1


def _dtype_of(graph: Graph) -> str:
    return graph.parameters[0].dtype if graph.parameters else "f32"
