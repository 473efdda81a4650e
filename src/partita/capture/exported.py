"""A PyTorch module as an exported program, and that as a Graph.

1. `torch.export` follows the module's Python code with tensors that have no data: non-strict first;
   where that fails, as if the model ran by itself; then strict. `watch.py` refuses what it would
   lose silently.
2. Regions without gradients or in another precision become plain nodes (`regions.py`), operations
   in place become functional ones (`functional.py`), recurrent layers one node each
   (`recurrent.py`). Nothing else is decomposed: a linear layer, an attention stays one node. The
   program still computes exactly what the module does.
3. The program is read into a record (`torch_program.py`), which everything after looks at.
4. `translate.py` gives every node its kind of op.
"""

import ast
import contextlib
import copy
import inspect
import io
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._ops import HigherOrderOperator
from torch.export import ExportedProgram
from torch.utils._pytree import tree_leaves, tree_map_only

from partita.capture import lines
from partita.capture.attributes import AskedModule, BufferMadeAnew
from partita.capture.functional import make_functional
from partita.capture.open_sizes import OpenSizes, Place, open_sizes
from partita.capture.records import know_arguments, know_result, unknown_type
from partita.capture.recurrent import split_layers
from partita.capture.regions import inline_regions
from partita.capture.repeats import OF_TORCH, as_code_was, refuse_other_calls
from partita.capture.torch_program import TorchProgram, read_torch_program
from partita.capture.translate import translate_with_places
from partita.capture.vmaps import inline_vmaps
from partita.capture.watch import PLAIN, REGION, USUAL, deciding, watching
from partita.errors import CaptureError, GraphError
from partita.graph.record import Graph, Op

log = logging.getLogger("partita")
NOISY = (
    "torch.fx.experimental.symbolic_shapes", "torch.export", "torch._export", "torch._dynamo",
    "torch._guards", "torch._subclasses.fake_tensor",
)  # fmt: skip
CHECKS = (
    "_assert_tensor_metadata", "_assert_scalar", "_assert_async", "sym_constrain_range",
    "sym_constrain_range_for_size",
)  # fmt: skip


@dataclass(frozen=True)
class Captured:
    """A module, the program exported from it, what was read of it, and the graph to plan with.

    An op of the graph bears the name of the node it stands for. Where one node became several ops
    (`addmm` is a product and a sum), the others are called `<node>.<part>`. `places` has the
    tensor of the graph that each input and node gives, or a tuple of them.
    """

    module: torch.nn.Module
    program: ExportedProgram
    record: TorchProgram
    graph: Graph
    places: Mapping[str, Any] = field(default_factory=dict)
    is_usual: bool = True  # was it followed by the first of the ways that there are?
    asked: AskedModule = field(default_factory=AskedModule)  # what the module was asked on the way

    def node_of(self, op: Op | str) -> str:
        """The name of the node that an op comes from."""
        name = op if isinstance(op, str) else op.name
        return name.partition(".")[0]

    def checkpointed(self) -> frozenset[str]:
        """The nodes of regions that the model checkpoints itself, if they were kept."""
        return frozenset(node.name for node in self.record.nodes if REGION in (node.marks or ()))

    def random_ops(self) -> list[str]:
        """The ops that draw random numbers, in the order of the program."""
        random = {node.name for node in self.record.nodes if node.is_random}
        first = {self.node_of(op): op.name for op in reversed(self.graph.ops)}
        own = {op.name for op in self.graph.ops}
        names = {node: node if node in own else first[node] for node in random & first.keys()}
        return [names[node.name] for node in self.record.nodes if node.name in names]


def export(
    module: Any, args: Any, kwargs: dict[str, Any], *, name: str | None, checkpointing: str
) -> Captured:
    """The module captured; see `partita.capture`."""
    _check(module, args, kwargs)
    args, kwargs = _distinct((tuple(args), kwargs))
    asked = AskedModule()
    program, is_usual = _exported(module, args, kwargs, checkpointing, asked)
    _find_unregistered(program, asked)
    inline_vmaps(program.graph_module)
    _erase_checks(program.graph)
    inline_regions(program.graph_module, program.graph_signature.inputs_to_buffers)
    make_functional(program)
    split_layers(program.graph)
    program.graph.lint()
    program.graph_module.recompile()
    record = read_torch_program(program)
    try:
        graph, places = translate_with_places(record, name or type(module).__name__)
    except GraphError as error:
        raise CaptureError(error.found, fix=error.fix, field=error.field) from None
    return Captured(module, program, record, graph, places, is_usual, asked)


def _find_unregistered(program: ExportedProgram, asked: AskedModule) -> None:
    """Parameters that the module holds in lists, or in modules in lists, which nobody registers.

    The export takes what they hold without gradients; the tensors themselves get theirs.
    """
    held: dict[Any, torch.Tensor] = {}
    for owner, name in asked.attributes:
        leaves = (*owner._parameters.values(), *tree_leaves(vars(owner).get(name)))
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor) and leaf.is_leaf and leaf.requires_grad:
                held[_place_of(leaf)] = leaf
    for name, constant in program.constants.items():
        if isinstance(constant, torch.Tensor) and not constant.requires_grad:
            program.constants[name] = held.get(_place_of(constant), constant)


def _place_of(tensor: torch.Tensor) -> Any:
    """Where a tensor lies; two that lie in one place are one."""
    if tensor.layout is not torch.strided:
        return id(tensor)
    memory = tensor.untyped_storage()._cdata
    return memory, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype


def export_open(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *,
    checkpointing: str, places: Sequence[Place],
) -> OpenSizes | None:  # fmt: skip
    """For which sizes at some places of the arguments the module does what it does for these."""
    args, kwargs = _distinct((tuple(args), kwargs))

    def follow(wanted: Any) -> ExportedProgram:
        shapes = inspect.signature(module.forward).bind(*wanted[0], **wanted[1]).arguments
        return _export(module, args, kwargs, checkpointing, strict=False, shapes=shapes)

    return open_sizes(follow, (args, kwargs), places)


def _erase_checks(graph: torch.fx.Graph) -> None:
    """Leave out what the export checks, and comparisons of numbers that only checks read."""
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and not node.users:
            is_number = not isinstance(node.target, torch._ops.OpOverload | HigherOrderOperator)
            if _short_name(node) in CHECKS or is_number:
                graph.erase_node(node)


def _distinct(given: Any) -> Any:
    """One tensor given as two arguments becomes two: the export would make them one input."""
    seen: set[int] = set()

    def once(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) in seen:
            return tensor.detach().clone().requires_grad_(tensor.requires_grad)
        seen.add(id(tensor))
        return tensor

    return tree_map_only(torch.Tensor, once, given)


def _check(module: Any, args: Any, kwargs: Any) -> None:
    if not isinstance(module, torch.nn.Module):
        raise CaptureError(
            f"{type(module).__name__} is no torch.nn.Module",
            fix="give a module; wrap a function in one",
        )
    if not isinstance(args, tuple | list) or not isinstance(kwargs, dict):
        raise CaptureError(
            f"args is a {type(args).__name__} and kwargs a {type(kwargs).__name__}",
            fix="give a tuple and a dict: capture(module, (x,), {'mask': mask})",
        )
    try:
        inspect.signature(module.forward).bind(*args, **kwargs)
    except TypeError as error:
        raise CaptureError(
            f"the example arguments do not fit {type(module).__name__}.forward: {error}",
            fix="give what the module is called with",
        ) from None


def _exported(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], checkpointing: str,
    asked: AskedModule,
) -> tuple[ExportedProgram, bool]:  # fmt: skip
    """The program, and whether the first way to export it was the one that worked."""
    know_arguments((args, kwargs))
    try:
        return _export_made(module, args, kwargs, checkpointing, asked), True
    except CaptureError:
        raise
    except Exception as first:
        if know_result(first):
            return _exported(module, args, kwargs, checkpointing, asked)
        if not _is_hopeless(module, first):
            for attempt in (*((_openly,) if asked.export else ()), _plainly, _strictly):
                try:
                    return attempt(module, args, kwargs, checkpointing, asked), False
                except CaptureError:
                    raise
                except Exception:
                    log.debug("another way to export failed as well", exc_info=True)
        raise _refusal(module, first) from first


def _export_made(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], checkpointing: str,
    asked: AskedModule,
) -> ExportedProgram:  # fmt: skip
    """Exported after buffers that the model makes for the sizes at hand were made."""
    for _ in module.buffers():
        try:
            return _export(module, args, kwargs, checkpointing, strict=False, asked=asked)
        except BufferMadeAnew as anew:
            anew.make()
    return _export(module, args, kwargs, checkpointing, strict=False, asked=asked)


def _plainly(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], checkpointing: str,
    asked: AskedModule,
) -> ExportedProgram:  # fmt: skip
    """As the model runs by itself: some go other ways where they are exported, and fail there."""
    return _export(module, args, kwargs, checkpointing, strict=False, denied=PLAIN, asked=asked)


def _openly(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], checkpointing: str,
    asked: AskedModule,
) -> ExportedProgram:  # fmt: skip
    """As the model is exported: some do so only in another way than they run."""
    return _export(module, args, kwargs, checkpointing, strict=False, denied=(), asked=asked)


def _strictly(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], checkpointing: str,
    asked: AskedModule,
) -> ExportedProgram:  # fmt: skip
    """By reading the bytecode, which nobody can watch; so the model is run first, without data."""
    copied = _without_data(module)
    args2, kwargs2 = tree_map_only(torch.Tensor, lambda t: t.to("meta"), (args, kwargs))
    with _silent(), torch.enable_grad(), watching(copied, checkpointing, carries=False):
        copied(*args2, **kwargs2)
    _ask_all(module, asked)
    return _export(module, args, kwargs, checkpointing, strict=True)


def _ask_all(module: torch.nn.Module, asked: AskedModule) -> None:
    """Nobody sees what is asked where bytecode is read: everything that there is may be."""
    asked.gradients = True
    asked.attributes |= {
        (child, name)
        for child in module.modules()
        for name in vars(child)
        if name not in OF_TORCH
    }  # fmt: skip


def _without_data(module: torch.nn.Module) -> torch.nn.Module:
    """A copy of a module on the meta device, made without copying what it holds."""
    held: dict[int, Any] = {
        id(p): torch.nn.Parameter(p.detach().to("meta"), p.requires_grad)
        for p in module.parameters()
    }
    held |= {id(b): b.to("meta") for b in module.buffers()}
    return copy.deepcopy(module, held)


def _export(
    module: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    checkpointing: str,
    strict: bool,
    denied: Sequence[str] = USUAL,
    shapes: dict[str, Any] | None = None,
    asked: AskedModule | None = None,
) -> ExportedProgram:
    with as_code_was(module):
        changed: list[str] = []
        watched = watching(module, checkpointing, not strict, denied, strict, changed, asked)
        with _silent(), torch.enable_grad(), watched:
            program = torch.export.export(
                module, args, kwargs, dynamic_shapes=shapes, strict=strict
            )
        if asked is not None and asked.gradients and not torch.is_grad_enabled():
            # It asks, and without gradients it may do something else.
            watched = watching(module, checkpointing, not strict, denied, strict)
            with _silent(), torch.no_grad(), watched:
                program = torch.export.export(module, args, kwargs, strict=strict)
        if shapes is None:
            with _silent(), contextlib.redirect_stdout(io.StringIO()):
                refuse_other_calls(module, args, kwargs, changed, deciding)
    return program


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """What export says on the way is for its developers; what matters comes as an error.

    What the model prints is none of what a command gives, and goes where messages do.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(sys.stderr))
        stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        for name in NOISY:
            logger = logging.getLogger(name)
            stack.callback(logger.setLevel, logger.level)
            logger.setLevel(logging.CRITICAL)
        yield


def _is_data_dependent(error: BaseException) -> bool:
    return "DataDependent" in type(error).__name__


def _scripted(module: torch.nn.Module) -> str | None:
    for name, child in module.named_modules():
        if isinstance(child, torch.jit.ScriptModule):
            return name or type(child).__name__
    return None


def _is_hopeless(module: torch.nn.Module, error: Exception) -> bool:
    return _is_data_dependent(error) or _scripted(module) is not None


def _refusal(module: torch.nn.Module, error: Exception) -> CaptureError:
    line = lines.of_error(error)
    if not line.file:
        line = lines.of_function(type(module).forward)
    scripted = _scripted(module)
    if _is_data_dependent(error):
        refusal = "depends on the values of a tensor, which are not known when a model is captured"
        fix = (
            "choose with torch.where, "
            "or decide outside the model and pass the decision as an argument"
        )
        if _writes_text(line):
            fix = TEXTS
        elif _is_in_norm(error):
            fix = "give the norm a momentum, a number: without one it counts its batches to average"
    elif scripted is not None:
        refusal = f"calls the module {scripted!r}, which is compiled by TorchScript"
        fix = "use the Python module that it was made from"
    elif unknown_type(error):
        return CaptureError(
            f"{type(module).__name__} takes or returns a {unknown_type(error)}, which cannot be "
            "taken apart into tensors",
            fix="use tensors, tuples, lists, dicts (a Hugging Face model: pass use_cache=False), "
            "or make the type known with torch.utils._pytree.register_pytree_node",
            file=lines.of_function(type(module).forward).place,
        )
    else:
        said = (str(error).strip().splitlines() or [""])[0]
        refusal = f"cannot be captured: {type(error).__name__}: {said[:300]}"
        fix = _change(error)
    return CaptureError(f"`{line.code}` {refusal}", fix=fix, file=line.place)


TEXTS = (
    "leave texts about values out of forward: return the tensor and write it where it is called, "
    "or write its shape"
)


def _is_in_norm(error: BaseException) -> bool:
    """Is it the number of batches that a norm without a momentum reads?"""
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    return any(file.endswith(os.path.join("modules", "batchnorm.py")) for file in files)


def _writes_text(line: lines.SourceLine) -> bool:
    """Does a line put values into a text: a format, an f-string, something that is printed?"""
    try:
        tree = ast.parse(line.code)
    except SyntaxError:
        return False
    return any(
        isinstance(node, ast.JoinedStr)
        or (isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "format")
        or (isinstance(node, ast.Call) and getattr(node.func, "id", "") == "print")
        or (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod)
            and isinstance(node.left, ast.Constant) and isinstance(node.left.value, str))
        for node in ast.walk(tree)
    )  # fmt: skip


def _change(error: Exception) -> str:
    """What to do about a line that fails where tensors have no numbers."""
    said = str(error)
    if hasattr(error, "line_of_model"):
        return "take gradients outside the module that is captured: its stages give their own"
    if isinstance(error, OSError):
        return (
            "read it before: in __init__, kept as a buffer, or as an argument; "
            "a model is captured without files and network"
        )
    if "numpy()" in said:
        return "compute it with torch: numbers that leave PyTorch would be kept as they are now"
    if "__format__" in said:
        return TEXTS
    return "change this line, or keep this part outside the module that is captured"


def _short_name(node: torch.fx.Node) -> str:
    if node.op != "call_function":
        return ""
    name = getattr(node.target, "_schema", None)
    if name is not None:
        return str(name.name).split("::")[-1]
    return getattr(node.target, "__name__", str(node.target))
