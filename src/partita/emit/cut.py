"""The steps of a model dealt to stages, and the values that pass between them.

Values go straight from the stage that makes them to every stage that reads them; the stages form
any graph without circles. What depends on no input and no weight (positions, masks, zeros) is not
sent but made in every stage that needs it, once: what several modules make alike is made first.
Steps that the assignment does not name go where the last of their arguments is made.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from partita.capture.torch_program import replaced
from partita.emit.size import Size
from partita.emit.steps import EmittedValue, OpStep, Steps, values_in
from partita.errors import PlanError
from partita.problems.dag import sorted_or_cycle


@dataclass
class StageSteps:
    """One stage: what it takes, does and gives."""

    label: int
    takes: list[EmittedValue] = field(default_factory=list)
    steps: list[OpStep] = field(default_factory=list)
    gives: list[EmittedValue] = field(default_factory=list)


def cut(model: Steps, stage_of: Mapping[str, int]) -> list[StageSteps]:
    """The stages, in an order in which they can run; `stage_of` names ops of the graph."""
    constants = _constants(model)
    shared = _made_once(model, constants)
    labels = _complete(model, stage_of, constants)
    used = [label for i, label in enumerate(labels) if i not in constants] or labels
    stages = {label: StageSteps(label) for label in sorted(set(used)) or [0]}
    home: dict[EmittedValue, int] = {}
    for step, label in zip(model.steps, labels, strict=True):
        if step.index not in constants:
            stages[label].steps.append(step)
            home.update((out, label) for out in step.outs if out is not None)
    _make_constants(model, stages, constants, shared)
    _connect(model, stages, home)
    before = {s.label: {home[v] for v in s.takes if v in home} for s in stages.values()}
    order = _order(before)
    if len(order) < len(before):
        circle = sorted(before.keys() - set(order))
        raise PlanError(
            f"stages {', '.join(map(str, circle))} wait for each other in a circle",
            fix="give ops to stages so that values flow one way",
            field="stages",
        )
    return [stages[label] for label in order]


def _constants(model: Steps) -> set[int]:
    """The steps that depend on nothing and give the same wherever and whenever they run."""
    known: set[EmittedValue] = set()
    constants = set()
    for step in model.steps:
        fixed = not (step.changes or step.is_random or step.operator.startswith("empty"))
        if fixed and all(value in known for value in step.reads()):
            constants.add(step.index)
            known.update(out for out in step.outs if out is not None)
    return constants


def _make_constants(
    model: Steps, stages: dict[int, StageSteps], constants: set[int], shared: set[int]
) -> None:
    """Make constants in every stage that needs them; those that are returned in the last one."""
    returned = set(values_in(model.outputs))
    for stage in stages.values():
        needed = {value for step in stage.steps for value in step.reads()}
        needed |= returned if stage.label == max(stages) else set()
        for index in sorted(constants, reverse=True):
            step = model.steps[index]
            if any(out in needed for out in step.outs):
                needed.update(step.reads())
                stage.steps.append(step)
        stage.steps.sort(key=lambda step: (step.index not in shared, step.index))


def _made_once(model: Steps, constants: set[int]) -> set[int]:
    """Let equal constants be one, in no module: their readers read the first; which these are."""
    numbers: dict[EmittedValue, int] = {}  # of equal values the same
    keys: dict[object, int] = {}
    alike: dict[str, list[OpStep]] = {}
    returned = set(values_in(model.outputs))
    maker: dict[EmittedValue, OpStep] = {}
    for index in sorted(constants):
        step = model.steps[index]
        given = _numbered(step.args, numbers), _numbered(step.kwargs, numbers)
        key = repr((str(step.target), *given))
        for place, out in enumerate(step.outs):
            if out is not None:
                maker[out] = step
                numbers[out] = keys.setdefault((key, place), len(keys))
        if not any(out in returned for out in step.outs):
            alike.setdefault(key, []).append(step)
    first: dict[EmittedValue, EmittedValue] = {}
    shared: set[int] = set()
    for group in alike.values():
        for step in group[1:]:
            shared.update((step.index, group[0].index))
            pairs = zip(step.outs, group[0].outs, strict=True)
            first.update((out, kept) for out, kept in pairs if out is not None and kept is not None)
    waiting = list(shared)
    while waiting:  # what it is made of is made early, too
        read = (first.get(value, value) for value in model.steps[waiting.pop()].reads())
        earlier = {maker[value].index for value in read if value in maker} - shared
        shared |= earlier
        waiting += earlier
    for index, step in enumerate(model.steps):
        args, kwargs = _swapped(step.args, first), _swapped(step.kwargs, first)
        stack = () if index in shared else step.stack
        model.steps[index] = replace(step, args=args, kwargs=kwargs, stack=stack)
    return shared


def _numbered(nested: Any, numbers: Mapping[EmittedValue, int]) -> Any:
    """Arguments as something to compare: values by what they hold, sizes by what they follow."""
    sized = replaced(nested, Size, lambda size: f"size {size.text}")
    return replaced(sized, EmittedValue, lambda value: f"value {numbers.get(value, id(value))}")


def _swapped(nested: Any, first: Mapping[EmittedValue, EmittedValue]) -> Any:
    return replaced(nested, EmittedValue, lambda value: first.get(value, value))


def _connect(model: Steps, stages: dict[int, StageSteps], home: dict[EmittedValue, int]) -> None:
    """What each stage takes and gives, in the order in which it is made."""
    every = [*model.inputs, *(out for step in model.steps for out in step.outs)]
    made = {value: place for place, value in enumerate(every) if isinstance(value, EmittedValue)}
    wanted = set()
    for stage in stages.values():
        read = [value for step in stage.steps for value in step.reads() if not value.is_state]
        own = {out for step in stage.steps for out in step.outs}
        taken = {value for value in read if value not in own}
        stage.takes = sorted(taken, key=made.__getitem__)
        wanted.update(stage.takes)
    last = max(stages)
    given: set[EmittedValue] = set()
    for value in values_in(model.outputs):
        wanted.add(value)
        if value.is_state:  # a parameter that is returned as it is
            readers = [s for s in stages.values() if any(value in x.reads() for x in s.steps)]
            home[value] = readers[0].label if readers else last
            if value not in stages[home[value]].gives:
                stages[home[value]].gives.append(value)
    for stage in stages.values():
        ready = (out for step in stage.steps for out in step.outs if out in wanted)
        stage.gives += [out for out in ready if out is not None and out not in given]
        given.update(stage.gives)


def _complete(model: Steps, stage_of: Mapping[str, int], constants: set[int]) -> list[int]:
    """A stage for every step; that of a constant means nothing."""
    named: dict[str, int] = {}
    for op, label in sorted(stage_of.items(), key=lambda pair: ("." not in pair[0], -pair[1])):
        named[op.partition(".")[0]] = label  # the op of the node's own name, else its first part
    stage_of_step = [named.get(step.node) for step in model.steps]
    if all(label is None for label in stage_of_step):
        if stage_of_step and stage_of:
            raise PlanError(
                "none of its ops is in the model", fix="capture the model it was made for"
            )
        return [0] * len(stage_of_step)
    stage_of_step = [None if i in constants else label for i, label in enumerate(stage_of_step)]
    if all(label is None for label in stage_of_step):
        return [0] * len(stage_of_step)
    rank = {label: place for place, label in enumerate(_ranked(model, stage_of_step))}
    maker: dict[Any, int] = {out: step.index for step in model.steps for out in step.outs}
    users: dict[EmittedValue, list[int]] = {}
    for step in model.steps:
        for value in step.reads():
            users.setdefault(value, []).append(step.index)
        if stage_of_step[step.index] is None:
            made = [stage_of_step[maker[value]] for value in step.reads() if value in maker]
            known = [label for label in made if label is not None]
            stage_of_step[step.index] = max(known, key=rank.__getitem__, default=None)
    for step in reversed(model.steps):  # made of nothing: where it is first needed
        if stage_of_step[step.index] is None:
            used = [stage_of_step[user] for out in step.outs if out for user in users.get(out, ())]
            known = [label for label in used if label is not None]
            stage_of_step[step.index] = min(known or rank, key=rank.__getitem__)
    return [label for label in stage_of_step if label is not None]


def _ranked(model: Steps, given: list[int | None]) -> list[int]:
    """The stages in an order in which values flow, through steps without a stage too."""
    after: dict[int, set[int]] = {label: set() for label in given if label is not None}
    above: dict[EmittedValue, frozenset[int]] = {}
    for step, label in zip(model.steps, given, strict=True):
        reached = frozenset[int]().union(*(above.get(value, ()) for value in step.reads()))
        if label is not None:
            after[label] |= reached - {label}
            reached = frozenset([label])
        above.update((out, reached) for out in step.outs if out is not None)
    order = _order(after)
    # a circle is reported once all steps have a stage
    return order if len(order) == len(after) else sorted(after)


def _order(before: dict[int, set[int]]) -> list[int]:
    """The labels so that each comes after those it needs, smallest first; without a circle's."""
    labels = sorted(before)
    number = {label: index for index, label in enumerate(labels)}
    after: list[list[int]] = [[] for _ in labels]
    for label, needed in before.items():
        for each in needed & before.keys():
            after[number[each]].append(number[label])
    order, _ = sorted_or_cycle(after)
    return [labels[index] for index in order]
