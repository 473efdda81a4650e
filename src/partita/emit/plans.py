"""A plan as source: its model is built again, captured, and written out in the plan's stages.

Models of the zoo are captured as their torch twins, without data: any size can be emitted. While a
twin is followed, each of its ops marks the nodes it makes, so that the plan's stages and the scopes
of the zoo are known for every node. The code is for one micro-batch.
"""

from typing import Any

import torch
from torch.fx import traceback

from partita import zoo
from partita.capture import export_module
from partita.capture.exported import Captured
from partita.capture.onnx_file import is_onnx_spec
from partita.capture.python_file import is_python_spec, read_module
from partita.capture.twin import Twin, example_inputs
from partita.emit.stages import Emitted, emit
from partita.errors import ModelError, PlanError
from partita.graph.record import Graph, Op
from partita.jobs.workload import load_ref
from partita.plans import Plan

_MARK = "partita_op"


def emit_plan(plan: Plan) -> Emitted:
    """The stages of a plan as one Python module; the plan must be for the model as it is now."""
    load_ref(plan.model)
    stage_of = {split.op: i for i, stage in enumerate(plan.stages) for split in stage.splits}
    spec, batch = plan.model.spec, plan.model.batch // plan.schedule.num_microbatches
    if is_onnx_spec(spec):
        raise ModelError(
            "an ONNX file has no PyTorch module to write in stages",
            fix="plan the PyTorch model it was exported from: file.py:function",
            field=spec,
        )
    if is_python_spec(spec):
        module, args, kwargs = read_module(spec, batch)
        captured = export_module(module.train(plan.model.training), args, kwargs)
        return emit(captured, stage_of, title=f"{spec} ({type(module).__name__})")
    graph = zoo.build(spec, batch=batch, dtype=plan.model.dtype, loss=plan.model.training)
    captured, op_of = capture_twin(graph, plan.model.training)
    missing = sorted({op.name for op in graph.ops} - stage_of.keys())
    if missing:
        raise PlanError(
            f"op {missing[0]!r} is in no stage", fix="plan again with this version of the model"
        )
    scope_of = {op.name: op.scope for op in graph.ops}
    return emit(
        captured,
        {node: stage_of[op] for node, op in op_of.items()},
        title=graph.name,
        scopes={node: scope_of[op] for node, op in op_of.items()},
        input_names=[tensor.name for tensor in graph.inputs],
    )


def capture_twin(
    graph: Graph, training: bool = True, device: str = "meta"
) -> tuple[Captured, dict[str, str]]:
    """The twin of a graph captured, and for every node of it the op of the graph it is for."""
    twin = _Marked(graph, torch.device(device)).train(training)
    with traceback.preserve_node_meta():
        captured = export_module(twin, example_inputs(graph, device=device), name=graph.name)
    return captured, {
        node.name: node.meta["custom"][_MARK]
        for node in captured.program.graph.nodes
        if _MARK in node.meta.get("custom", {})
    }


class _Marked(Twin):
    """A twin whose ops leave their names on the nodes they make."""

    def _run(self, op: Op, values: dict[str, Any]) -> tuple[Any, ...]:
        with traceback.annotate({_MARK: op.name}):
            return super()._run(op, values)
