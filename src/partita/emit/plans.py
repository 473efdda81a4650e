"""A plan as source: its model is built again, captured, and written out in the plan's stages.

Models of the zoo and saved graphs are captured as reference modules, without data: any size can be
emitted. While one is followed, each of its ops marks the nodes it makes, so that the plan's
stages and the scopes of the zoo are known for every node. The code is for one micro-batch. What the
plan's backwards run again, they do here (`recompute.py`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from difflib import SequenceMatcher
from typing import Any

import torch
from torch.fx import traceback
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from partita.capture import export_module
from partita.capture.exported import Captured, export_open
from partita.capture.functions import function_of, source_of
from partita.capture.onnx_file import is_onnx_spec
from partita.capture.open_sizes import MOST, Limits, Place
from partita.capture.python_file import is_python_spec, read_module
from partita.capture.reference_module import ReferenceModule, example_inputs
from partita.capture.torch_program import TorchNode, TorchProgram
from partita.degrees import num_tokens
from partita.emit.ranks import EmittedRank, emit_rank
from partita.emit.recompute import RecomputedNodes
from partita.emit.stages import CapturedModule, Emitted, emit, same_code
from partita.emit.symbolic import BATCH, LENGTH, Recaptured, same_steps
from partita.engine import run
from partita.errors import InputError, ModelError, PlanError
from partita.graph.backward import forward_part
from partita.graph.rebatch import batch_of, rebatch
from partita.graph.record import Graph, Op
from partita.jobs.launch_command import narrow_products
from partita.jobs.workload import beside, code_of, load_cluster, load_model
from partita.lower import lower_plan
from partita.plans import Plan, runs_once
from partita.zoo import build

_MARK = "partita_op"
LEAST_ALIKE = 0.9  # of the ops: so many of a micro-batch must be those of the batch
MOST_NODES = 6000  # of a model that is captured more than once
_LACKING = (
    "and that of a captured model has not all numbers of its code: factors, approximations, what a "
    "loss leaves out"
)
_PLAN_THE_CODE = "plan the PyTorch model it was made from: file.py:function"


def emit_plan(plan: Plan, model: str | None = None) -> Emitted:
    """The stages of a plan as one Python module; the plan must be for the model as it is now.

    Of a plan for file.py:function the file is run: the one that was captured, or `model`, which
    the user names.
    """
    _refuse_narrow_products(plan)
    graph = load_model(plan).graph
    stage_of = {split.op: i for i, stage in enumerate(plan.stages) for split in stage.splits}
    spec = code_of(plan.model, model)
    batch = plan.model.batch // plan.schedule.num_microbatches
    if is_onnx_spec(spec):
        raise ModelError(
            "an ONNX file has no PyTorch module to write in stages",
            fix=_PLAN_THE_CODE,
            field=spec,
        )
    if is_python_spec(spec):
        return _emit_module(plan, spec, batch, graph, stage_of)
    if graph.is_captured:
        raise ModelError(
            f"the stages of a saved graph are written from it, {_LACKING}",
            fix=_PLAN_THE_CODE,
            field=spec,
        )
    return _emit_reference(plan, spec, rebatch(forward_part(graph), batch), stage_of)


def emit_plan_rank(plan: Plan, rank: int, model: str | None = None) -> EmittedRank:
    """The step of one rank of a plan, its splits and collectives written out.

    Of a plan for file.py:function the file is run, as for whole stages: the graph says what a
    rank computes, and the exported nodes that it says all.
    """
    _refuse_narrow_products(plan)
    graph, is_code = load_model(plan).graph, is_python_spec(plan.model.spec)
    is_known = graph.is_captured or is_onnx_spec(plan.model.spec)  # plans of before: by name
    if is_known and not is_code:
        raise ModelError(
            f"the step of a rank is written from the graph, {_LACKING}",
            fix=_PLAN_THE_CODE,
            field=plan.model.spec,
        )
    if plan.model.grad_dtype:
        raise PlanError(
            f"the plan adds gradients up in {plan.model.grad_dtype}, and the code of a rank in "
            f"{plan.model.dtype}",
            fix="run the plan (partita run), or plan without grad-dtype",
            field="grad-dtype",
        )
    if not runs_once(plan.stages, plan.schedule):
        raise PlanError(
            f"the plan has {len(plan.stages)} stages and {plan.schedule.num_microbatches} "
            "micro-batches",
            fix="a rank is written for one stage that runs its batch at once: "
            "plan with --pin pp=1 --pin micro-batches=1",
            field="rank",
        )
    lowered = lower_plan(plan.stages, plan.schedule, graph, load_cluster(plan), run)
    nodes = _nodes_of(plan, code_of(plan.model, model), graph) if is_code else None
    return emit_rank(lowered.program, graph, lowered.stages[0], rank, nodes)


def _nodes_of(plan: Plan, spec: str, graph: Graph) -> dict[str, TorchNode]:
    """The exported nodes of a captured model, by the ops of its graph."""
    captured, like, module = _captured_again(plan, spec, plan.model.batch, graph)[:3]
    if any(here != planned for here, planned in like.items()):
        raise _another_model(spec)
    forward = [op.name for op in captured.graph.ops if op.phase == "forward"]
    own = set(module.state_dict())
    for tensor in captured.graph.tensors:
        if tensor.role in ("parameter", "state") and tensor.name not in own:
            raise ModelError(
                f"has {tensor.name}, which is not in its state_dict",
                fix="emit whole stages, without --rank, or run the plan",
                field=spec,
            )
    return {name: captured.record.node[captured.node_of(name)] for name in forward}


def _refuse_narrow_products(plan: Plan) -> None:
    """Emitted code multiplies in the type of the model, and never silently otherwise."""
    if plan.model.matmul_dtype:
        raise PlanError(narrow_products(plan), field="matmul-dtype")


def _emit_module(
    plan: Plan, spec: str, batch: int, graph: Graph, stage_of: Mapping[str, int]
) -> Emitted:
    captured, like, module, args, kwargs = _captured_again(plan, spec, batch, graph)
    _check_functions(captured, spec)
    nodes: dict[str, list[str]] = {op: [] for op in stage_of}
    for op, planned in like.items():
        nodes[planned].append(captured.node_of(op))
    stage_of = {op: stage_of[planned] for op, planned in like.items()}
    again = recomputed_of(plan, nodes)
    others = recaptured_module(module, captured.record, args, kwargs, batch)
    title = f"{spec} ({type(module).__name__})"

    def write(own: CapturedModule, followed: Mapping[str, Recaptured]) -> Emitted:
        return emit(own, stage_of, title=title, again=again, others=followed)

    return write(captured, written_alike(captured, others, write))


def _captured_again(
    plan: Plan, spec: str, batch: int, graph: Graph
) -> tuple[Captured, dict[str, str], Any, tuple[Any, ...], dict[str, Any]]:
    """The planned model as it is now, whose ops are which of the plan, the module, a call."""
    module, args, kwargs = read_module(spec, batch)
    module.train(plan.model.training)
    captured = export_module(module, args, kwargs, checkpointing="inline")
    if batch_of(captured.graph) != batch:
        raise ModelError(
            f"gives arguments for a batch of {batch_of(captured.graph)}, "
            f"and the plan's micro-batches are of {batch}",
            fix="let the function take `batch`",
            field=spec,
        )
    like = _planned_ops(captured.graph, forward_part(graph))
    if like is None:
        raise _another_model(spec)
    return captured, like, module, args, kwargs


def _another_model(spec: str) -> PlanError:
    return PlanError(
        f"the plan is for another {spec}: its ops are not those of the graph that it carries",
        fix="plan again with this version of the model",
        field="model",
    )


def _planned_ops(captured: Graph, planned: Graph) -> dict[str, str] | None:
    """For each op of a capture the op of the plan that it is like; None if it is another model.

    A micro-batch may have a few ops less or more than the batch that was planned: one sample need
    not be expanded. Such an op goes with the one before it; all that read parameters must be there.
    """
    here, there = ([op.name for op in graph.ops] for graph in (captured, planned))
    if set(here) == set(there):
        return {name: name for name in here}
    keys = [[_look(graph, op) for op in graph.ops] for graph in (captured, planned)]
    same = SequenceMatcher(a=keys[0], b=keys[1], autojunk=False).get_matching_blocks()
    like = {here[a + k]: there[b + k] for a, b, length in same for k in range(length)}
    holding = [key[2:] for key in keys[0]], [key[2:] for key in keys[1]]
    matched = sum(bool(_look(captured, captured.op(name))[2:]) for name in like)
    if any(sum(map(bool, each)) != matched for each in holding):
        return None
    if len(like) < LEAST_ALIKE * max(len(here), len(there)):
        return None
    last = there[0]
    for name in here:
        last = like.setdefault(name, last)
    return like


def _look(graph: Graph, op: Op) -> tuple[str, ...]:
    """The kind of an op, its module, and the parameters that it reads."""
    held = (name for name in op.inputs if graph.tensor(name).role == "parameter")
    return (op.kind, op.scope, *held)


def written_alike(
    captured: Captured, others: Mapping[str, Recaptured],
    write: Callable[[CapturedModule, Mapping[str, Recaptured]], Emitted],
) -> dict[str, Recaptured]:  # fmt: skip
    """The captures, those closed that leave a number in the code that follows the size.

    There is none if the code is the same whichever of the two captures it is written from.
    """

    def is_alike(name: str, other: Recaptured) -> bool:
        if not same_steps(captured.record, other.record):
            return False
        back = replace(other, record=captured.record, before=other.after, after=other.before)
        one = write(captured, {name: other})
        two = write(replace(captured, record=other.record), {name: back})
        return bool(one.sizes) and same_code(one, two)

    return {
        name: replace(other, is_open=other.is_open and is_alike(name, other))
        for name, other in others.items()
    }


def _check_functions(captured: Captured, spec: str) -> None:
    """Refuse custom Functions that code in a file of its own could not import."""
    for node in captured.record.nodes:
        function = function_of(node.target)
        if function is not None and source_of(function) is None:
            raise ModelError(
                f"`{node.line.code}` calls the autograd.Function {function.cls.__name__}, which "
                "the emitted code cannot import",
                fix="define it in a module that can be imported by name, and import it from there",
                file=node.line.place,
                field=spec,
            )


def _emit_reference(plan: Plan, spec: str, graph: Graph, stage_of: Mapping[str, int]) -> Emitted:
    missing = sorted({op.name for op in graph.ops} - stage_of.keys())
    if missing:
        raise PlanError(
            f"op {missing[0]!r} is in no stage", fix="plan again with this version of the model"
        )
    captured, op_of = capture_reference(graph, plan.model.training)
    scope_of = {op.name: op.scope for op in graph.ops}
    nodes: dict[str, list[str]] = {op: [] for op in stage_of}
    for node, op in op_of.items():
        nodes[op].append(node)
    return emit(
        captured,
        {node: stage_of[op] for node, op in op_of.items()},
        title=graph.name,
        scopes={node: scope_of[op] for node, op in op_of.items()},
        op_names=op_of,
        input_names=[tensor.name for tensor in graph.inputs],
        again=recomputed_of(plan, nodes),
        others=_recaptured_reference(plan, spec, graph, captured),
    )


def recaptured_module(
    module: torch.nn.Module, record: TorchProgram, args: tuple[Any, ...], kwargs: dict[str, Any],
    batch: int,
) -> dict[str, Recaptured]:  # fmt: skip
    """A module captured with twice the batch, and with half the length where it reads texts."""
    leaves, spec = tree_flatten((args, kwargs))
    arrays = {number: leaf for number, leaf in enumerate(leaves) if _is_array(leaf)}
    tensors = list(arrays.values())
    others: dict[str, Recaptured] = {}
    if not tensors or len(record.nodes) > MOST_NODES:
        return others
    if all(leaf.shape[0] == batch for leaf in tensors):
        leaves = [torch.cat([x, x]) if _is_array(x) else x for x in leaves]
        _add_capture(others, BATCH, module, tree_unflatten(leaves, spec), batch, 2 * batch)
    largest = tree_unflatten(leaves, spec)  # sizes of 1 cannot be left open
    shapes = {tuple(leaf.shape) for leaf in tensors}
    texts = all(not leaf.is_floating_point() and leaf.ndim == 2 for leaf in tensors)
    if texts and len(shapes) == 1 and tensors[0].shape[1] > 2:
        length = tensors[0].shape[1]
        leaves = tree_leaves((args, kwargs))
        half = [x[:, : length // 2].contiguous() if _is_array(x) else x for x in leaves]
        _add_capture(others, LENGTH, module, tree_unflatten(half, spec), length, length // 2)
    groups = {
        name: [(number, dim) for number in arrays]
        for dim, name in enumerate((BATCH, LENGTH))
        if name in others
    }
    return _limited(module, largest, others, groups)


def _limited(
    module: torch.nn.Module, given: Any, others: Mapping[str, Recaptured],
    groups: Mapping[str, list[Place]],
) -> dict[str, Recaptured]:  # fmt: skip
    """The captures, each with the sizes that the module is known to do the same steps for."""
    limits: dict[str, Limits] = {}
    for names in (list(groups), *([name] for name in groups)):  # all at once, or one by itself
        own = {name: groups[name] for name in names}
        places = [place for group in own.values() for place in group]
        if places and not limits:
            sizes = export_open(module, *given, checkpointing="inline", places=places)
            limits = sizes.limits(own) if sizes is not None else {}
    limited = {}
    for name, other in others.items():
        least, most = limits.get(name, (0, 0))
        within = least <= max(other.before, other.after) <= most
        last = most if most < MOST else None
        limited[name] = replace(other, least=least, most=last, is_open=within)
    return limited


def _is_array(leaf: Any) -> bool:
    """Is an argument a tensor with dims?"""
    return isinstance(leaf, torch.Tensor) and leaf.ndim > 0


def _add_capture(
    others: dict[str, Recaptured], symbol: str, module: torch.nn.Module, given: Any, before: int,
    after: int,
) -> None:  # fmt: skip
    """Where a model takes no other batch or length, its numbers stay; that is no mistake."""
    try:
        captured = export_module(module, *given, checkpointing="inline")
    except Exception:
        return
    others[symbol] = Recaptured(captured.record, before, after)


def _recaptured_reference(
    plan: Plan, spec: str, graph: Graph, captured: Captured
) -> dict[str, Recaptured]:
    """A model of the zoo captured with twice the batch, and half the length where it has one."""
    batch, training = batch_of(graph), plan.model.training
    others: dict[str, Recaptured] = {}
    if batch is None or len(captured.record.nodes) > MOST_NODES:
        return others
    again = capture_reference(rebatch(graph, 2 * batch), training)[0]
    others[BATCH] = Recaptured(again.record, batch, 2 * batch)
    length = (num_tokens(graph) or 0) // batch
    name, _, value = spec.rpartition("@") if "@" in spec else (spec, "", "")
    if length > 2 and "+" not in value:
        try:
            if plan.model.graph and spec == plan.model.spec:  # a file that only the plan names
                name = beside(plan.folder, name, "model")
            shorter = build(f"{name}@{length // 2}", batch, plan.model.dtype, loss=training)
        except InputError:  # a saved graph has its length, and other folders are not opened
            return others
        again = capture_reference(shorter, training)[0]
        others[LENGTH] = Recaptured(again.record, length, length // 2)
    return others


def recomputed_of(plan: Plan, nodes: Mapping[str, Sequence[str]]) -> dict[int, RecomputedNodes]:
    """What each stage's backward runs again; `nodes` are those of every op, in order."""
    recomputed_nodes = {}
    for number, stage in enumerate(plan.stages if plan.model.training else ()):
        again = [node for op in stage.recomputed for node in nodes[op]]
        others = (node for split in stage.splits for node in nodes[split.op])
        starts = (nodes[op][0] for op in stage.segments if nodes[op])
        recomputed_nodes[number] = RecomputedNodes(
            (stage.checkpointing == "full"),
            frozenset(starts),
            frozenset(again),
            frozenset(others).difference(again),
        )
    return recomputed_nodes


def capture_reference(
    graph: Graph, training: bool = True, device: str = "meta"
) -> tuple[Captured, dict[str, str]]:
    """A graph's reference module captured, and for every node of it the op that it is for."""
    module = _Marked(graph, torch.device(device)).train(training)
    with traceback.preserve_node_meta():
        captured = export_module(module, example_inputs(graph, device=device), name=graph.name)
    return captured, {
        node.name: node.marks[_MARK]
        for node in captured.record.nodes
        if node.marks is not None and _MARK in node.marks
    }


class _Marked(ReferenceModule):
    """A reference module whose ops leave their names on the nodes they make."""

    def _run(self, op: Op, values: dict[str, Any]) -> tuple[Any, ...]:
        with traceback.annotate({_MARK: op.name}):
            return super()._run(op, values)
