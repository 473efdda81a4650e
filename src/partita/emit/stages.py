"""A captured model and an assignment of its ops to stages, as one Python module.

The module has a class per stage, and a class per kind of module that a stage holds whole; classes
hold their parameters under the original names. `build_stages` loads the original state dict into
them, and `run_stages` runs one after the other. Every name in it is made by `names.py`, every other
text is a quoted string: nothing in a model or a plan becomes code.

A tied weight is one Parameter, in as many stages as use it, so its gradients add up as they do in
the model. A runtime that puts such stages into different processes has to add them up itself:
`TIED` and the names in the stages say which. Buffers that change are the tensors of the state dict,
changed in place.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from torch import nn

from partita import __version__
from partita.capture.functions import function_of, source_of
from partita.capture.torch_program import TorchProgram
from partita.emit.builder import Builder, Runner, constants, dict_of, names_tuple
from partita.emit.calls import Gatherer
from partita.emit.classes import Classes, ClassPaths, NotAlike, described, drafted
from partita.emit.cut import StageSteps, cut
from partita.emit.families import Families, UnnamedClass
from partita.emit.helpers import helpers, imports, stage_base
from partita.emit.names import unused, variable
from partita.emit.recompute import RecomputedNodes, in_pieces, words
from partita.emit.steps import EmittedValue, Steps, read_steps
from partita.emit.symbolic import Recaptured, planned_for, symbolic, tables_unknown
from partita.emit.text import docstring, quoted, statement
from partita.errors import PlanError
from partita.units import count

MOST_NAMED = 8  # modules in a stage's docstring
_HOLDERS = ("model", "module", "layers", "blocks")  # they say little in a name


class CapturedModule(Protocol):
    """What is emitted: a module and what was read of the program exported from it."""

    @property
    def module(self) -> nn.Module:
        """The original."""

    @property
    def record(self) -> TorchProgram:
        """Its program, with nothing in place but buffers."""


@dataclass(frozen=True)
class Emitted:
    """The source of the stages, and how they are wired.

    `inputs` are the names of the model's flat arguments, None for those that are constants;
    `outputs` its flat results: a name, or a constant in a tuple of one. `constants` names tensors
    that neither the state dict nor the source holds. `sizes` are those that the code reads from
    what it is given: batch, length.
    """

    source: str
    labels: tuple[int, ...]
    class_names: tuple[str, ...]
    inputs: tuple[str | None, ...]
    outputs: tuple[str | tuple[Any], ...]
    constants: tuple[str, ...]
    sizes: Mapping[str, Recaptured] = field(default_factory=dict)


def same_code(one: Emitted, other: Emitted) -> bool:
    """Are two the same, but for the sizes that they say they were planned for?"""
    plain = []
    for each in (one, other):
        said = "\n".join(docstring(["", planned_for(each.sizes)], 0)[1:-1])  # in lines, if long
        plain.append(replace(each, source=each.source.replace(said, "", 1), sizes={}))
    return plain[0] == plain[1]


def emit(
    captured: CapturedModule,
    stage_of: Mapping[str, int],
    *,
    title: str = "",
    scopes: Mapping[str, str] | None = None,
    op_names: Mapping[str, str] | None = None,
    input_names: Sequence[str] | None = None,
    again: Mapping[int, RecomputedNodes] | None = None,
    others: Mapping[str, Recaptured] | None = None,
) -> Emitted:
    """The source and the wiring; `stage_of` gives ops of the captured graph to stages.

    `scopes` names a module for nodes that were not captured in a call of one, `op_names` the ops
    that nodes are for; `input_names` are better names for the model's flat arguments than their
    places; `again` is what the backward of a stage runs again. `others` are captures of the model
    with another batch or length: sizes that follow these are written so (`symbolic.py`).
    """
    for op, label in stage_of.items():
        if not isinstance(label, int) or isinstance(label, bool) or label < 0:
            raise PlanError(
                f"op {op!r} is given to stage {label!r}", fix="stages are numbered from 0 up"
            )
    known = dict(others or {})
    while True:  # at most once per symbol: what some class cannot read is not followed
        emission = _emission(
            captured, stage_of, known, title, scopes, op_names, input_names, again or {}
        )
        emitted = emission.emit()
        lost = [name for name in known if name in emission.unread]
        if not lost:
            return emitted
        known[lost[-1]] = replace(known[lost[-1]], is_open=False)  # the other may be read then


def _emission(
    captured: CapturedModule, stage_of: Mapping[str, int], others: Mapping[str, Recaptured],
    title: str, scopes: Mapping[str, str] | None, op_names: Mapping[str, str] | None,
    input_names: Sequence[str] | None, again: Mapping[int, RecomputedNodes],
) -> "_Emission":  # fmt: skip
    """The module to be written, with the sizes that all captures of it tell."""
    record, followed = symbolic(captured.record, others)
    model = read_steps(record, captured.module, scopes, op_names)
    model.input_names = list(input_names or model.input_names)
    for value, name in zip(model.inputs, model.input_names, strict=True):
        if value is not None:
            value.word = variable(name.rpartition(".")[2])
    stages = cut(model, stage_of)
    name = title.strip() or type(captured.module).__name__
    fixed = [f"{each} {other.before:,}" for each, other in others.items() if each not in followed]
    return _Emission(captured, model, stages, name, again, followed, fixed)


class _Emission:
    """One module being written."""

    def __init__(
        self, captured: CapturedModule, model: Steps, stages: list[StageSteps], title: str,
        again: Mapping[int, RecomputedNodes], followed: Mapping[str, Recaptured],
        fixed: Sequence[str],
    ) -> None:  # fmt: skip
        self.module = captured.module
        self.followed = followed
        self.unread: set[str] = set()  # symbols of sizes that stayed numbers
        self.fixed = fixed
        self.again = again
        self.out_spec = captured.record.out_spec
        self.model = model
        self.stages = stages
        self.title = title
        self.names = _wire_names(model, stages)
        self.class_names = [f"Stage{stage.label}" for stage in stages]
        read = [v for step in model.steps for v in step.reads() if v.is_state]
        read += [v for v in model.outputs if isinstance(v, EmittedValue) and v.is_state]
        self.states = list(dict.fromkeys(read))

    def emit(self) -> Emitted:
        classes, stages = self._alike()
        self.unread = {*classes.unread} & self.followed.keys()
        base = stage_base(self.module.training)
        functions = self._functions()
        taken = {*self.class_names, base, *(name for _, name in functions)}
        families = Families(classes.drafts, taken)
        body = self._tables()
        for name, lines in families.classes():
            body += ["", "", f"class {name}(nn.Module):", *lines]
        for name, draft in zip(self.class_names, stages, strict=True):
            body += ["", "", f"class {name}({base}):", *draft.lines(families.final(draft))]
        made, missing = constants(self.states)
        body += [*made, *self._builder(bool(made)).lines(), *self._runner().lines()]
        own = helpers(body, self.module.training)
        blank = [""] if own and body[:2] != ["", ""] else []  # after a class there are two
        lines = [*self._head(), "", *imports(body, functions), *own, *blank, *body]
        return Emitted(
            "\n".join(lines) + "\n",
            tuple(stage.label for stage in self.stages),
            tuple(self.class_names),
            tuple(
                self.names[v] if isinstance(v, EmittedValue) else None for v in self.model.inputs
            ),
            tuple(
                self.names[v] if isinstance(v, EmittedValue) else (v,) for v in self.model.outputs
            ),
            tuple(missing),
            dict(self.followed),
        )

    def _functions(self) -> list[tuple[str, str]]:
        """Custom Functions that the code calls: module and name, sorted."""
        carried = (function_of(step.target) for step in self.model.steps)
        sources = {source_of(function) for function in carried if function is not None}
        return sorted(source for source in sources if source is not None)

    # Classes.

    def _alike(self) -> tuple[Classes, list[UnnamedClass]]:
        """All classes; a module that cannot be one class is written out where it is called."""
        written_out: set[str] = set()
        while True:  # at most once per module of the model
            try:
                return self._classes(written_out)
            except NotAlike as clash:
                written_out.add(clash.path)

    def _classes(self, written_out: set[str]) -> tuple[Classes, list[UnnamedClass]]:
        classes = Classes(self.module)
        totals: dict[str, int] = {}
        for step in self.model.steps:
            for key, _ in step.stack:
                totals[key] = totals.get(key, 0) + 1
        known = dict(self.module.named_modules(remove_duplicate=False))

        def keeps(path: str) -> bool:
            same_mode = path in known and known[path].training == self.module.training
            return same_mode and path not in written_out

        gatherer = Gatherer(totals, keeps)
        return classes, [self._stage(classes, stage, gatherer) for stage in self.stages]

    def _stage(self, classes: Classes, stage: StageSteps, gatherer: Gatherer) -> UnnamedClass:
        again = self.again.get(stage.label)
        items = in_pieces(gatherer.gather(stage.steps, stage.gives), stage.gives, again)
        paths = ClassPaths(classes, "", items, stage.gives)
        takes = [(value, self.names[value]) for value in stage.takes]
        gives = [self.names[value] for value in stage.gives]
        fields = [
            *statement(names_tuple([name for _, name in takes]), 4, before="takes = "),
            *statement(names_tuple(gives), 4, before="gives = "),
        ]
        return drafted(
            paths, items, takes, stage.gives,
            doc=[*self._stage_doc(stage, paths), *filter(None, [words(items, again)])],
            forward_doc="What it gives, from what it takes.",
            fields=fields,
        )  # fmt: skip

    def _stage_doc(self, stage: StageSteps, paths: ClassPaths) -> list[str]:
        held = dict(self.module.named_parameters(remove_duplicate=False))
        own = {id(held[name]): held[name] for name in paths.tensors if name in held}
        number = self.stages.index(stage) + 1
        first = f"Stage {number} of {len(self.stages)}"
        if own:
            first += f", {count(sum(tensor.numel() for tensor in own.values()))} parameters"
        lines = [f"{first}.", ""]
        if own:
            lines.append(f"Holds {_summary(paths.tensors, list(held))}.")
        for word, values in (("Takes", stage.takes), ("Gives", stage.gives)):
            lines += [f"{word} {self.names[v]}: {described(v)}, {_origin(v)}." for v in values]
        return lines

    # The rest of the module.

    def _head(self) -> list[str]:
        many = f"{len(self.stages)} stage{'s' if len(self.stages) > 1 else ''}"
        doc = [
            f"{self.title} in {many}, written by partita {__version__}.",
            "",
            "`build_stages(model.state_dict())` makes the stages with the weights of the original;",
            "`run_stages(stages, ...)` runs one after the other and gives what the model gives.",
        ]
        if self.followed:
            doc.append(planned_for(self.followed))
            doc += filter(None, [tables_unknown(self.followed)])
        if self.fixed:
            doc.append(f"It is for {' and '.join(self.fixed)} alone.")
        return docstring(doc, 0)

    def _tables(self) -> list[str]:
        lines = []
        if tied := self._tied():
            table = dict_of((name, quoted(tied[name])) for name in sorted(tied))
            lines += ["", "# other names of one tensor", *statement(table, 0, before="TIED = ")]
        if frozen := self._frozen():
            lines += ["", *statement(names_tuple(frozen), 0, before="FROZEN = ")]
        return lines

    def _tied(self) -> dict[str, str]:
        return {other: value.names[0] for value in self.states for other in value.names[1:]}

    def _frozen(self) -> list[str]:
        learned = dict(self.module.named_parameters(remove_duplicate=False))
        first = [value.names[0] for value in self.states if value.kind == "parameter"]
        return sorted(name for name in first if not learned[name].requires_grad)

    def _builder(self, has_constants: bool) -> Builder:
        return Builder(
            self.class_names, self.module.training, has_constants,
            has_tied=bool(self._tied()), has_frozen=bool(self._frozen()),
        )  # fmt: skip

    def _runner(self) -> Runner:
        inputs = [value for value in self.model.inputs if isinstance(value, EmittedValue)]
        wires = [(stage.takes, stage.gives) for stage in self.stages]
        return Runner(self.names, inputs, wires, self.model.outputs, self.out_spec)


def _wire_names(model: Steps, stages: list[StageSteps]) -> dict[EmittedValue, str]:
    """A name of its own for everything that enters, leaves or passes between stages."""
    wire_names: dict[EmittedValue, str] = {}
    for value, name in zip(model.inputs, model.input_names, strict=True):
        if isinstance(value, EmittedValue):
            wire_names[value] = unused(variable(name), wire_names.values())
    given = list(dict.fromkeys(value for stage in stages for value in stage.gives))
    apart = _told_apart(given)
    last = _last_module(stages)
    for value in given:
        if value not in wire_names:
            origin = value.names[0] if value.is_state else value.scope or value.label
            name = variable("_".join(_short(origin)), "value")
            told = variable(value.word) if value.word else name
            own = name in wire_names.values() or not (value.is_state or value.scope)
            if own or value in apart:
                name = told
                if not value.scope and name in wire_names.values() and value in last:
                    name = variable("_".join(["after", *_short(last[value])]))
            wire_names[value] = unused(name, wire_names.values())
    return wire_names


def _told_apart(given: Sequence[EmittedValue]) -> set[EmittedValue]:
    """What one module gives with several others, each called otherwise: `cos` and `sin`."""
    by_module: dict[str, list[EmittedValue]] = {}
    for value in given:
        if value.scope and not value.is_state:
            by_module.setdefault(value.scope, []).append(value)
    apart: set[EmittedValue] = set()
    for values in by_module.values():
        words = {value.word for value in values}
        if len(values) > 1 and "" not in words and len(words) == len(values):
            apart.update(values)
    return apart


def _last_module(stages: Sequence[StageSteps]) -> dict[EmittedValue, str]:
    """The module, or the numbered block, that ran last before a value was made by none."""
    last: dict[EmittedValue, str] = {}
    for stage in stages:
        module = ""
        for value in (out for step in stage.steps for out in step.outs if out is not None):
            if value.scope:
                parts = value.scope.split(".")
                ends = (i for i, part in enumerate(parts, 1) if part[-1:].isdigit())
                module = ".".join(parts[: next(ends, len(parts))])
            elif module:
                last[value] = module
    return last


def _short(origin: str) -> list[str]:
    """The last parts of a path that say something, for a name."""
    return list(itertools.dropwhile(str.isdigit, _telling(origin.split("."))[-3:]))


def _telling(parts: Sequence[str]) -> list[str]:
    """The parts of a path that say something: `layers` does not, but with a number `layer` does."""
    telling = []
    for part, following in zip(parts, [*parts[1:], ""], strict=True):
        if part not in _HOLDERS:
            telling.append(part)
        elif following.isdigit():
            telling.append(part.removesuffix("s"))
    return telling


def _origin(value: EmittedValue) -> str:
    if value.kind == "input":
        return "given to the model"
    if value.is_state:
        return value.names[0]
    return f"{value.label} in {value.scope}" if value.scope else value.label


def _summary(tensors: Sequence[str], every: Sequence[str]) -> str:
    """The modules that a stage holds, whole ones by their name: `layer1, layer2.0`."""
    own = set(tensors) & set(every)
    split = {".".join(n.split(".")[:d]) for n in set(every) - own for d in range(n.count(".") + 2)}
    summary: list[str] = []
    for name in every:
        if name in own and not any(name.startswith(f"{path}.") for path in summary[-1:]):
            parts = name.split(".")
            paths = [".".join(parts[: depth + 1]) for depth in range(len(parts))]
            summary.append(next(path for path in paths if path not in split))
    more = f" and {len(summary) - MOST_NAMED} more" if len(summary) > MOST_NAMED else ""
    return ", ".join(summary[:MOST_NAMED]) + more
