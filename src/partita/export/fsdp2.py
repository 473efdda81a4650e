"""FSDP2 and tensor parallelism of plain PyTorch: a Python file to import, and to edit.

`parallelize(model)` splits the matrices of each layer with `parallelize_module`, wraps layers for
recomputation, and shares parameters with `fully_shard` (or replicates them: DDP). ZeRO 3 gathers
parameters for each use and reduces gradients of each micro-batch, ZeRO 2 keeps what was gathered
until the backward, ZeRO 1 gathers and reduces once in a step. Shard groups of replicas (HSDP) are
two axes of the mesh; gradients are summed across groups once in a step. Names of modules
are those of the plan's ops; a name that the model does not have is an error when it runs. What the
file does stands in its table `STRATEGY`, which the reader takes without running anything.
"""

import ast
import re
from typing import Any

from partita.errors import FileError
from partita.export.scope import ExportScope
from partita.graph.record import Op
from partita.graph.work import VIEWS
from partita.jobs.frameworks import (
    NORMS,
    FrameworkStrategy,
    LayerStack,
    framework_plan,
    module_of,
)

VERSION = "PyTorch 2.6 or later"
KEYS = ("tp", "sp", "dp", "zero", "hsdp", "micro_batch", "num_microbatches", "recompute")


def refusal(s: FrameworkStrategy, scope: ExportScope) -> str:
    """Why this code cannot do a strategy; nothing if it can."""
    if s.cp > 1:
        return "this code has no context parallelism: megatron and torchtitan have"
    if s.pp > 1:
        return "FSDP2 has no pipeline: torchtitan and `partita emit --training` have"
    if scope.stack is None:
        return "it wraps one stack of equal layers, which the model is not"
    if s.zero == 0 and s.dp > 1 and s.tp > 1:
        return "DDP replicates whole parameters, and tensor parallelism splits them"
    if s.recompute in ("norms", "attention"):
        return f"it recomputes layers, or all but products, not {s.recompute} alone"
    if s.tp > 1 and scope.sizes is not None and scope.sizes.tied:
        return "parallelize_module would untie the output layer from the table of words"
    if s.sp and (name := _uneven(s, scope)):
        return f"tp={s.tp} does not divide the vocabulary of {name}: pad it"
    return ""


def write(s: FrameworkStrategy, scope: ExportScope) -> str:
    """The file."""
    assert scope.stack is not None, "refused before"
    styles = tensor_styles(s, scope)
    stack = scope.stack.name.rstrip(".")
    strategy = {name: getattr(s, name) for name in KEYS}
    logits = "logits" in styles.values()
    parts = [
        _HEAD.format(
            spec=scope.spec, told=s, version=VERSION, launcher=scope.launcher(),
            imports="\n".join(_imports(s, styles)), strategy=_table(strategy), layers=stack,
        ),
        _STYLES.format(styles=_table(styles)) if s.tp > 1 else "",
        _SELECTIVE if s.recompute == "selective" else "",
        _parallelize(s, scope),
        _STEP.format(
            context="loss_parallel()" if logits else "nullcontext()",
            loss="loss.detach().full_tensor()" if logits else "loss.detach()",
            sync=_sync(s),
            each="number, batch" if _sync(s) else "batch",
            batches="enumerate(micro_batches)" if _sync(s) else "micro_batches",
        ),
    ]  # fmt: skip
    return "".join(parts)


def _sync(s: FrameworkStrategy) -> str:
    """The lines that put the reduction of gradients off to the last micro-batch."""
    if s.zero > 1 and s.hsdp:  # within a group in every micro-batch, across groups once a step
        last = "        last = number == len(micro_batches) - 1"
        return f"{last}\n        model.set_requires_all_reduce(last)\n"
    if s.zero > 1 or s.dp == 1:
        return ""
    names = ("require_backward_grad_sync",) if s.zero == 0 else ()
    lines = [f"        model.{name} = last" for name in names]
    if s.zero == 1:
        lines = ["        model.set_requires_gradient_sync(last)"]
        lines.append("        model.set_reshard_after_backward(last)")
    last = "        last = number == len(micro_batches) - 1"
    return "\n".join([last, *lines]) + "\n"


def _imports(s: FrameworkStrategy, styles: dict[str, str]) -> list[str]:
    """Only what the rest needs, in ruff's order."""
    lines = [] if "logits" in styles.values() else ["from contextlib import nullcontext", ""]
    lines += ["import torch", "from torch import nn"]
    wrapper = "torch.distributed.algorithms._checkpoint.checkpoint_wrapper"
    if s.recompute != "none":
        lines.append(f"from {wrapper} import checkpoint_wrapper")
    lines.append("from torch.distributed.device_mesh import init_device_mesh")
    if s.dp > 1 and s.zero:
        lines.append("from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard")
    if s.tp > 1:
        names = ["ColwiseParallel", "RowwiseParallel", "SequenceParallel"]
        names += ["loss_parallel"] * ("logits" in styles.values()) + ["parallelize_module"]
        lines.append("from torch.distributed.tensor import Replicate, Shard")
        lines.append("from torch.distributed.tensor.parallel import (")
        lines += [f"    {name}," for name in names] + [")"]
    if s.dp > 1 and not s.zero:
        lines.append("from torch.nn.parallel import DistributedDataParallel")
    if s.recompute == "selective":
        lines.append(
            "from torch.utils.checkpoint import CheckpointPolicy, "
            "create_selective_checkpoint_contexts"
        )
    return lines


def _table(entries: dict[str, Any]) -> str:
    rows = [f"    {key!r}: {value!r},".replace("'", '"') for key, value in entries.items()]
    return "{\n" + "\n".join(rows) + "\n}"


def tensor_styles(s: FrameworkStrategy, scope: ExportScope) -> dict[str, str]:
    """How each module is split along tp; names of a layer begin with `*`.

    `columns`, `rows`, `logits` (columns that the loss reads split), `vocabulary` (a table by its
    rows), `positions` (the same, looked up without a batch), `sequence` (a norm).
    """
    if s.tp == 1 or scope.stack is None:
        return {}
    (stage, *_), _ = framework_plan(scope.graph, s)
    styles: dict[str, str] = {}
    for split in stage.splits:
        op, dim = scope.graph.op(split.op), split.dims[-1]
        style = ""
        if op.kind == "linear" and dim in ("n", "k"):
            style = "rows" if dim == "k" else "logits" if _feeds_loss(scope, op) else "columns"
        elif op.kind == "embedding" and dim == "v":
            index = scope.graph.tensor(op.inputs[0])
            style = "vocabulary" if len(index.shape) > 1 else "positions"
        elif op.kind in NORMS and dim == "s":
            style = "sequence"
        if style:
            styles[_pattern(module_of(op), scope.stack)] = style
    return styles


def _feeds_loss(scope: ExportScope, op: Op) -> bool:
    """Is it read by the loss, or by views that the loss reads?"""
    readers = scope.graph.consumers(op.outputs[0])
    return any(
        reader.kind == "cross_entropy" or (reader.kind in VIEWS and _feeds_loss(scope, reader))
        for reader in readers
        if reader.phase == "forward"
    )


def _uneven(s: FrameworkStrategy, scope: ExportScope) -> str:
    """A table or output layer that sequence parallelism would leave to the sequence."""
    (stage, *_), _ = framework_plan(scope.graph, s)
    for split in stage.splits:
        if scope.graph.op(split.op).kind in ("linear", "embedding") and split.dims[-1] == "s":
            return module_of(scope.graph.op(split.op))
    return ""


def _pattern(op: str, stack: LayerStack) -> str:
    return re.sub(rf"^{re.escape(stack.name)}[0-9]+\.", "*.", op)


def _parallelize(s: FrameworkStrategy, scope: ExportScope) -> str:
    """The function that does it; only what the strategy asks for is in it."""
    replicas = [("dp", s.dp)] * (s.dp > 1 or s.tp == 1)
    if s.hsdp:
        replicas = [("dp_replicate", s.dp // s.hsdp), ("dp_shard", s.hsdp)]
    shape = replicas + [("tp", s.tp)] * (s.tp > 1)
    sizes = ", ".join(str(size) for _, size in shape) + ("," if len(shape) == 1 else "")
    names = ", ".join(f'"{name}"' for name, _ in shape) + ("," if len(shape) == 1 else "")
    lines = [
        "def parallelize(model: nn.Module, device: str) -> nn.Module:",
        '    """Split, wrap and share a model on the devices of this job."""',
        f"    mesh = init_device_mesh(device, ({sizes}), mesh_dim_names=({names}))",
        "    layers = list(model.get_submodule(LAYERS).children())",
    ]
    if s.tp > 1:
        lines += [
            '    parallelize_module(model, mesh["tp"], styles_of(model, ""))',
            "    for layer in layers:",
            '        parallelize_module(layer, mesh["tp"], styles_of(layer, "*."))',
        ]
    if s.recompute != "none":
        context = ", context_fn=products_only" if s.recompute == "selective" else ""
        lines += [
            "    for number, layer in enumerate(layers):",
            f"        layers[number] = checkpoint_wrapper(layer{context})",
            "        setattr(model.get_submodule(LAYERS), str(number), layers[number])",
        ]
    lines += _shared(s, scope)
    return "\n".join(lines) + "\n\n\n"


def _shared(s: FrameworkStrategy, scope: ExportScope) -> list[str]:
    if s.dp == 1:
        return ["    return model"]
    if s.zero == 0:
        return ['    return DistributedDataParallel(model, device_mesh=mesh["dp"])']
    dtypes = {"bf16": "torch.bfloat16", "f16": "torch.float16"}
    dtype = dtypes.get(scope.dtype)
    policy = f"param_dtype={dtype}, reduce_dtype=torch.float32" if dtype else ""
    return [
        "    how = {",
        f'        "mesh": mesh[{_axes(s)}],',
        f'        "mp_policy": MixedPrecisionPolicy({policy}),',
        '        "reshard_after_forward": STRATEGY["zero"] == 3,',
        "    }",
        "    for layer in layers:",
        "        fully_shard(layer, **how)",
        "    return fully_shard(model, **how)",
    ]


def _axes(s: FrameworkStrategy) -> str:
    """The axes of the mesh that parameters are shared over: two where groups replicate (HSDP)."""
    return '"dp_replicate", "dp_shard"' if s.hsdp else '"dp"'


def read(text: str, scope: ExportScope) -> FrameworkStrategy:
    """The strategy of a file, from its table; nothing is run."""
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise FileError(f"is no Python: {error}", fix="mend it") from None
    for node in tree.body:
        if isinstance(node, ast.Assign) and _is_name(node.targets[0], "STRATEGY"):
            try:
                table = ast.literal_eval(node.value)
            except ValueError:
                break
            return _strategy(table, scope)
    raise FileError("has no table STRATEGY of plain values", fix="export the plan again")


def _is_name(node: ast.expr, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _strategy(table: Any, scope: ExportScope) -> FrameworkStrategy:
    if not isinstance(table, dict) or set(table) != set(KEYS):
        raise FileError(f"the table has other keys than {', '.join(KEYS)}", fix="export again")
    for key in KEYS:
        kind: type = str if key == "recompute" else bool if key == "sp" else int
        if type(table[key]) is not kind:
            raise FileError(f"found {table[key]!r}", fix="export again", field=f"STRATEGY {key}")
    strategy = FrameworkStrategy(**table)
    if strategy.world != scope.num_devices:
        raise FileError(
            f"tp={strategy.tp} x dp={strategy.dp} are not the {scope.num_devices} devices",
            fix="choose degrees whose product is the devices",
            field="STRATEGY",
        )
    return strategy


_HEAD = '''"""{spec}: {told}.

For {version}. Import it where your model is built, and start with
{launcher} train.py:

    model = parallelize(model, "cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    loss = step(model, optimizer, micro_batches)  # inputs of the model, which gives its loss
"""

{imports}

STRATEGY = {strategy}
LAYERS = "{layers}"


'''

_STYLES = '''# How modules are split along tp; names that begin with `*.` are of every layer.
STYLES = {styles}


def styles_of(module: nn.Module, prefix: str) -> dict:
    """The styles of a module's own parts, by their names in it."""
    whole = Shard(1) if STRATEGY["sp"] else Replicate()  # what passes from layer to layer
    made = {{
        "columns": lambda: ColwiseParallel(input_layouts=whole),
        "logits": lambda: ColwiseParallel(input_layouts=whole, use_local_output=False),
        "rows": lambda: RowwiseParallel(output_layouts=whole),
        "vocabulary": lambda: RowwiseParallel(input_layouts=Replicate(), output_layouts=whole),
        "positions": lambda: RowwiseParallel(
            input_layouts=Replicate(), output_layouts=Shard(0) if STRATEGY["sp"] else whole
        ),
        "sequence": lambda: SequenceParallel(use_local_output=True),
    }}
    of_layers = bool(prefix)
    chosen = {{}}
    for name, style in STYLES.items():
        if name.startswith("*.") == of_layers:
            own = name.removeprefix(prefix)
            module.get_submodule(own)  # a name that the model does not have is an error
            chosen[own] = made[style]()
    return chosen


'''

_SELECTIVE = '''KEPT = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
}


def products_only():
    """Keep what products and attention make; all else is made again."""

    def policy(context, op, *args, **kwargs):
        kept = op in KEPT
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


'''

_STEP = '''\
def step(model: nn.Module, optimizer: torch.optim.Optimizer, micro_batches: list) -> float:
    """One step over the micro-batches of this replica."""
    total = 0.0
    for {each} in {batches}:
{sync}        with {context}:
            loss = model(*batch) / len(micro_batches)
            loss.backward()
        total += float({loss})
    optimizer.step()
    optimizer.zero_grad()
    return total
'''
