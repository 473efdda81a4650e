"""A captured model as a straight line of steps over values, made from its torch program.

A value is something given (an input, a parameter, a buffer, a constant) or computed; a step is one
operator. The items of a result are values of their own, small constants stand in the arguments, and
steps nobody needs are left out, except those that change buffers or draw random numbers.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from partita.capture.lines import SourceLine, places_of
from partita.capture.torch_program import (
    Ref,
    TensorSpec,
    TorchInput,
    TorchNode,
    TorchProgram,
    replaced,
)
from partita.emit.local_names import Sentence, named_sentence, sentence_at
from partita.emit.plain import without_examples
from partita.errors import CaptureError

MOST_WRITTEN_OUT = 128  # elements of a constant that is written into the source
_CHECKS = ("_assert_tensor_metadata", "_assert_scalar", "_assert_async")
_HELD = ("parameter", "buffer", "constant")
_SAME = ("alias", "detach_")  # gives its argument; only new constants are detached in place
SHAPE_OPS = {
    "view", "reshape", "transpose", "permute", "unsqueeze", "squeeze", "expand", "contiguous", "to",
    "flatten", "unflatten", "clone", "select", "slice", "t", "type_as", "float", "detach",
}  # fmt: skip
LEARNING = ("batch_norm", "instance_norm")  # they change buffers though their schema hides it


@dataclass(eq=False)
class EmittedValue:
    """A tensor with an identity of its own.

    `names` are the names a parameter or buffer has in the model, several where it is tied.
    """

    label: str
    meta: Any
    kind: str = "computed"  # or input, parameter, buffer, constant
    names: tuple[str, ...] = ()
    persistent: bool = True
    data: torch.Tensor | None = None
    scope: str = ""
    said: tuple[Sentence | None, ...] = ()  # of the step that makes it
    word: str = ""  # what the statement that makes it calls it

    @property
    def is_state(self) -> bool:
        """True for what the model holds."""
        return self.kind in _HELD


@dataclass(eq=False)
class OpStep:
    """One operator: arguments hold values, `outs` are what it gives (None where nobody asks)."""

    node: str
    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outs: tuple[EmittedValue | None, ...]
    is_list: bool = False
    changes: bool = False  # a buffer
    stack: tuple[tuple[str, str], ...] = ()  # (call, path) of modules around it, outermost first
    index: int = 0
    recomputed: bool = False  # marked to run again in the backward (`recompute.py`)
    is_random: bool = False  # draws random numbers
    # The statements that it stands in: those that call the modules around it, then its own.
    said: tuple[Sentence | None, ...] = ()

    @property
    def operator(self) -> str:
        """The operator's name without overload: `conv2d`."""
        return str(self.target.overloadpacket.__name__)

    def reads(self) -> Iterator[EmittedValue]:
        """Every value in the arguments, as often as it stands there."""
        yield from values_in((self.args, self.kwargs))


@dataclass
class Steps:
    """The whole model: what it is given, what it does, what it returns (flat).

    An input that is no tensor is None: it is the one that was captured, whatever is given.
    """

    inputs: list[EmittedValue | None] = field(default_factory=list)
    input_names: list[str] = field(default_factory=list)
    steps: list[OpStep] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)


def values_in(nested: Any) -> Iterator[EmittedValue]:
    """The values in nested arguments."""
    if isinstance(nested, EmittedValue):
        yield nested
    elif isinstance(nested, list | tuple):
        for item in nested:
            yield from values_in(item)
    elif isinstance(nested, dict):
        yield from values_in(list(nested.values()))


def read_steps(
    program: TorchProgram,
    module: nn.Module,
    scopes: Mapping[str, str] | None = None,
    op_names: Mapping[str, str] | None = None,
) -> Steps:
    """The steps of a torch program; the module says which names its tensors have.

    `scopes` puts nodes into modules that were not called but might have been: those that only hold
    others, as in the reference module of a graph, whose ops have names (`op_names`, by node).
    """
    return _StepReader(program, module, scopes or {}, op_names or {}).read()


class _StepReader:
    def __init__(
        self, program: TorchProgram, module: nn.Module, scopes: Mapping[str, str],
        op_names: Mapping[str, str],
    ) -> None:  # fmt: skip
        self.program = program
        self.scopes = scopes
        self.op_names = op_names
        self.holders = _holders(module) if scopes else set()
        self.names = _names_of(module)
        self.known: dict[str, Any] = {}  # by node: its value, or the values it gives
        self.same: dict[str, tuple[str, Any]] = {}  # casts that do nothing: where, and to what
        self.model = Steps()

    def read(self) -> Steps:
        model = self.model
        for given in self.program.inputs:
            self._given(given)
        for node in self.program.nodes:
            if not node.is_body:
                self._call(node)
        for output in self.program.outputs:
            if output.kind != "output":
                raise CaptureError(
                    f"the program gives back a {output.kind}",
                    fix="emit what partita.capture gives, before run_decompositions",
                )
            model.outputs.append(self._known(output.value))
        model.steps = _needed(model.steps, model.outputs)
        for index, step in enumerate(model.steps):
            step.index = index
        return model

    def _given(self, given: TorchInput) -> None:
        if given.kind != "input":
            self.known[given.name] = self._state(given)
            return
        value = None if given.is_fixed else EmittedValue(given.name, given.value, "input")
        self.model.inputs.append(value)
        self.model.input_names.append(given.target)
        self.known[given.name] = given.value if value is None else value

    def _state(self, given: TorchInput) -> EmittedValue:
        if given.kind not in _HELD:
            raise self._refusal(given)
        others = self.names.get(given.target, ())
        return EmittedValue(
            given.name, given.value, given.kind,
            names=(given.target, *(name for name in others if name != given.target)),
            persistent=given.persistent,
            data=given.data,
        )  # fmt: skip

    def _refusal(self, given: TorchInput) -> CaptureError:
        """What the model holds cannot be written; the line that reads it is to blame."""
        reader = next((node for node in self.program.nodes if given.name in node.reads), None)
        line = SourceLine() if reader is None else reader.line
        if isinstance(given.data, torch.Generator):
            return CaptureError(
                f"`{line.code}` draws with a generator of its own, which stages would not share",
                fix="leave the generator out (draws then follow torch.manual_seed), or draw "
                "outside and pass what is drawn as an argument",
                file=line.place,
            )
        kind = getattr(given.value, "class_fqn", given.kind)
        return CaptureError(
            f"`{line.code}` reads {given.target!r} that the model holds, a {kind}",
            fix="keep parameters, buffers and plain tensors in it",
            file=line.place,
        )

    def _known(self, item: Any, scope: str | None = None) -> Any:
        """Arguments with values in place of their names, as an operator in a module reads them.

        The exporter gives everyone who reads a tensor later what a cast to its own type gave. So
        that a module does not give back what it was given, others read the tensor itself.
        """

        def value(ref: Ref) -> Any:
            where, source = self.same.get(ref.name, ("", None))
            outside = scope is not None and not f"{scope}.".startswith(f"{where}.")
            return source if source is not None and where and outside else self.known[ref.name]

        return replaced(item, Ref, value)

    def _call(self, node: TorchNode) -> None:
        if node.is_item:
            source, index = node.args
            value = self.known[source.name][index]
            value.label = node.name
            self.known[node.name] = value
        elif not node.is_operator:
            raise CaptureError(
                f"`{node.line.code}` calls {getattr(node.target, '__name__', node.target)}, "
                "which cannot be written into a stage",
                fix="compute with operations on tensors (x.sum(), torch.where), not with numbers "
                "that are read off them, and without torch.cond",
                file=node.line.place,
            )
        elif node.target.overloadpacket.__name__ in _SAME:
            self.known[node.name] = self._known(node.args[0])
        elif node.target.overloadpacket.__name__ not in _CHECKS:
            self._step(node)

    def _step(self, node: TorchNode) -> None:
        given = self._known(node.args, node.scope)
        named = self._known(dict(node.kwargs), node.scope)
        target, args, kwargs = without_examples(node.target, given, named, node.value)
        called = tuple((key, path) for key, path in node.stack if path)  # without the model itself
        stack = (*self._around(node), *called)
        scope = stack[-1][1] if stack else ""
        results = list(node.value) if node.gives_several else [node.value]
        said = self._said(node, stack)
        words = _words(
            said, len(results), args if target.overloadpacket.__name__ in SHAPE_OPS else ()
        )
        outs = [
            EmittedValue(node.name, item, scope=scope, said=said, word=word)
            for item, word in zip(results, words, strict=True)
        ]
        self.known[node.name] = outs if node.gives_several else outs[0]
        if _is_idle_cast(node, given):
            self.same[node.name] = (node.scope, given[0])
        if target.overloadpacket.__name__ == "lift_fresh_copy" and _is_small(args[0]):
            args = (args[0].data,)
        step = OpStep(
            node.name, target, args, kwargs, tuple(outs), node.gives_several, stack=stack,
            is_random=node.is_random, said=said,
        )  # fmt: skip
        step.changes = step.operator in LEARNING or any(
            argument.alias_info is not None and argument.alias_info.is_write
            for argument in target._schema.arguments
        )
        self.model.steps.append(step)

    def _said(
        self, node: TorchNode, stack: tuple[tuple[str, str], ...]
    ) -> tuple[Sentence | None, ...]:
        """The statements around a node, one more than modules; none where they do not match."""
        if node.name in self.op_names:
            return *(named_sentence(path) for _, path in stack), named_sentence(
                self.op_names[node.name]
            )
        places = places_of(node.stack_trace)
        if len(places) != len(stack) + 1:
            return ()
        return tuple(sentence_at(*place) for place in places)

    def _around(self, node: TorchNode) -> tuple[tuple[str, str], ...]:
        """The holders a node is said to be in, outermost first."""
        parts = self.scopes.get(node.name, "").split(".")
        paths = (".".join(parts[:depth]) for depth in range(1, len(parts) + 1))
        return tuple((path, path) for path in paths if path in self.holders)


def _is_idle_cast(node: TorchNode, args: tuple[Any, ...]) -> bool:
    """Does a cast give the very tensor that it was given?"""
    if node.operation != "to" or not args or not isinstance(args[0], EmittedValue):
        return False
    before, after = args[0].meta, node.value
    if not isinstance(before, TensorSpec) or not isinstance(after, TensorSpec):
        return False
    asked = node.arguments
    copies = asked.get("copy") or asked.get("memory_format") is not None
    same = (before.dtype, before.device, before.stride) == (after.dtype, after.device, after.stride)
    return not copies and same


def _words(
    said: tuple[Sentence | None, ...], count: int, source: tuple[Any, ...]
) -> tuple[str, ...]:
    """What a statement calls the results of its operator; another shape is called as before."""
    sentence = said[-1] if said else None
    if sentence is not None and len(sentence.targets) == count:
        return sentence.targets
    before = source[0].word if source and isinstance(source[0], EmittedValue) else ""
    return (before,) * count


def _names_of(module: nn.Module) -> dict[str, tuple[str, ...]]:
    """All names of the parameter or buffer that has a name."""
    named = (
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    )
    by_id: dict[int, list[str]] = {}
    for name, tensor in named:
        by_id.setdefault(id(tensor), []).append(name)
    return {name: tuple(by_id[id(tensor)]) for name, tensor in named}


def _holders(module: nn.Module) -> set[str]:
    """The modules that only hold others, by name rather than by number."""
    return {
        path
        for path, child in module.named_modules()
        if path and type(child) is nn.Module and not all(map(str.isdigit, child._modules))
    }


def _is_small(value: Any) -> bool:
    data = value.data if isinstance(value, EmittedValue) else None
    if data is None or type(data) is not torch.Tensor or data.device.type == "meta":
        return False
    return data.numel() <= MOST_WRITTEN_OUT and not data.is_complex()


def _needed(steps: list[OpStep], outputs: list[Any]) -> list[OpStep]:
    needed = set(values_in(outputs))
    kept = []
    for step in reversed(steps):
        if step.changes or step.is_random or any(out in needed for out in step.outs):
            needed.update(step.reads())
            kept.append(replace(step, outs=tuple(o if o in needed else None for o in step.outs)))
    return kept[::-1]
