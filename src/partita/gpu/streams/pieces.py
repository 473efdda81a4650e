"""Pieces: steps without products that hang together, as one launch made by torch.compile.

Sums, pools, norms, softmax and the like are bound by memory; written as one kernel each value is
read once. A piece is a maximal group of such steps, joined along who reads whom, that can be one
launch: no way leaves it and comes back, not even through other pieces.

    groups       which steps belong together          O(steps * edges), far less in practice
    contracted   the flow with some groups as pieces: one step `piece`, and for every value that is
                 read outside a view `made`, named as before, so that it lies where it lay
    alike        a piece with names of its own taken out: equal for pieces that are compiled once
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from partita.capture.torch_program import Ref
from partita.gpu.flow.read import Held
from partita.gpu.flow.steps import Flow, Step, sorted_steps

Group = tuple[str, ...]  # names of steps, in the order of the flow

SUMS = ("combine", "maxpool", "avgpool")
# In the names of operators with products, or of whole algorithms: libraries do them better.
PRODUCTS = (
    "conv", "mm", "linear", "matmul", "einsum", "attention", "lstm", "gru", "rnn", "fft", "linalg",
    "dot", "cdist", "addmv", "mv.", "sort", "topk", "multinomial",
)  # fmt: skip
# Operators that launch nothing: another look at the same memory.
LOOKS = {
    "alias", "as_strided", "chunk", "detach", "diagonal", "expand", "getitem", "permute", "reshape",
    "select", "slice", "split", "split_with_sizes", "squeeze", "t", "transpose", "unbind",
    "unflatten", "unsqueeze", "view",
}  # fmt: skip
FEWEST = 2  # launches that one replaces


def groups(flow: Flow) -> tuple[Group, ...]:
    """The steps that may be one launch, group by group, the largest groups possible."""
    joined = _Joined(flow, [index for index, step in enumerate(flow.steps) if _joins(flow, step)])
    while joined.grow():
        pass
    groups = []
    for members in joined.members.values():
        steps = [flow.steps[index] for index in sorted(members)]
        if sum(not _is_look(step) for step in steps) >= FEWEST and _is_closed(flow, steps):
            groups.append(tuple(step.name for step in steps))
    return tuple(groups)


def _joins(flow: Flow, step: Step) -> bool:
    if step.kind in SUMS:
        return True
    if step.kind != "call" or step.target in flow.random_ops:
        return False
    return not any(word in step.target for word in PRODUCTS)


def _is_look(step: Step) -> bool:
    if step.kind != "call":
        return False
    words = step.target.split(".")
    return (words[1] if len(words) > 1 else words[0]).strip("_") in LOOKS


def _is_closed(flow: Flow, steps: Sequence[Step]) -> bool:
    """Are all values that go in and out tensors, not tuples of them? And does one come out?"""
    makes = _made(flow, steps)
    return bool(makes) and all(name in flow.shapes for name in (*_inputs(steps), *makes))


class _Joined:
    """Groups that grow along who reads whom; together with all else they stay without circles."""

    def __init__(self, flow: Flow, able: Sequence[int]) -> None:
        at = {step.name: index for index, step in enumerate(flow.steps)}
        self.readers: list[list[int]] = [[] for _ in flow.steps]
        for index, step in enumerate(flow.steps):
            for name in dict.fromkeys(step.uses):
                if name in at:
                    self.readers[at[name]].append(index)
        self.group = {index: index for index in able}  # of every member
        self.members = {index: {index} for index in able}

    def grow(self) -> bool:
        """Join what can be joined; one joint may make room for another, so ask again."""
        joints = [(step, reader) for step in self.group for reader in self.readers[step]]
        return sum(self.join(*pair) for pair in joints) > 0

    def join(self, step: int, reader: int) -> bool:
        """The groups of two steps become one, if that leaves no circle."""
        mine, other = self.group[step], self.group.get(reader)
        if other is None or other == mine:
            return False
        both = self.members[mine] | self.members[other]
        if self.comes_back(both):
            return False
        self.members[mine] = both
        self.group |= dict.fromkeys(self.members.pop(other), mine)
        return True

    def comes_back(self, some: set[int]) -> bool:
        """Does a way leave these steps and return to them?"""
        todo = [reader for each in some for reader in self.readers[each] if reader not in some]
        seen: set[int] = set()
        while todo:
            step = todo.pop()
            if step in seen:
                continue
            together = self.members[self.group[step]] if step in self.group else {step}
            seen |= together
            for each in together:
                if some.intersection(self.readers[each]):
                    return True
                todo += self.readers[each]
        return False


def contracted(flow: Flow, chosen: Iterable[Group]) -> Flow:
    """The flow in which every chosen group is one step."""
    steps = {step.name: step for step in flow.steps}
    ordered: dict[str, Step] = dict(steps)
    for group in chosen:
        members = tuple(steps[name] for name in group)
        makes = _made(flow, members)
        piece = Step(f"{makes[-1]}.piece", "piece", _inputs(members), members=members, makes=makes)
        for name in group:
            del ordered[name]
        ordered[piece.name] = piece
        ordered |= {name: Step(name, "made", (piece.name,)) for name in makes}
    return flow.with_steps(sorted_steps(ordered.values()))


def _inputs(steps: Sequence[Step]) -> tuple[str, ...]:
    inside = {step.name for step in steps}
    uses = (name for step in steps for name in step.uses)
    return tuple(dict.fromkeys(name for name in uses if name not in inside))


def _made(flow: Flow, steps: Sequence[Step]) -> tuple[str, ...]:
    inside = {step.name for step in steps}
    wanted = set(flow.outputs)
    for step in flow.steps:
        if step.name not in inside:
            wanted |= set(step.uses)
    return tuple(step.name for step in steps if step.name in wanted)


CONSTANTS = ("weight", "bias", "pre_scale", "pre_shift", "scale", "shift")


def constants_of(piece: Step) -> tuple[str, ...]:
    """The names of the constants that a piece reads, in order."""
    constants: dict[str, None] = {}
    for step in piece.members:
        constants |= dict.fromkeys(getattr(step, each) for each in CONSTANTS if getattr(step, each))
        constants |= dict.fromkeys(_held((step.arguments, step.keywords)))
    return tuple(constants)


def _held(value: Any) -> list[str]:
    if isinstance(value, Held):
        return [value]
    if isinstance(value, tuple | list):
        return [name for each in value for name in _held(each)]
    return []


def alike(piece: Step) -> str:
    """The piece with numbers for names."""
    names = {name: f"value {number}" for number, name in enumerate(piece.inputs)}
    names |= {step.name: f"step {number}" for number, step in enumerate(piece.members)}
    held = {name: f"constant {number}" for number, name in enumerate(constants_of(piece))}
    members = [_renamed(step, names, held) for step in piece.members]
    return repr((members, [names[name] for name in piece.makes]))


def _renamed(step: Step, names: dict[str, str], held: dict[str, str]) -> Step:
    def new(value: Any) -> Any:
        if isinstance(value, Ref):
            return Ref(names[value.name])
        if isinstance(value, Held):
            return Held(held[value])
        if isinstance(value, tuple | list):
            return type(value)(new(each) for each in value)
        return value

    constants: dict[str, Any] = {
        each: held[getattr(step, each)] for each in CONSTANTS if getattr(step, each)
    }
    return replace(
        step, name=names[step.name], inputs=tuple(names[name] for name in step.inputs),
        residual=names[step.residual] if step.residual else "", arguments=new(step.arguments),
        keywords=new(step.keywords), **constants,
    )  # fmt: skip
