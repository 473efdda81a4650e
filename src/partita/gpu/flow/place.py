"""Where values lie: concatenations and parts as views of shared buffers, without copies.

A member of a concatenation must lie at its channel of it, a part at its channel of the whole. Each
such wish ties two values at a fixed distance in one buffer; wishes are granted one after the other
(union-find with distances) unless two values that are both written would overlap. A member that
could not be placed is copied. So the lists of a dense block, each a prefix of the next, are one
buffer, and a merged convolution can end where a concatenation begins.

Channels come in eights (`EIGHT`): a value by itself is padded with zeros, a concatenation with a
member of another width stays an operator. Values with four dimensions that only operators of
PyTorch make and read (the heads of an attention, say) are no images: they lie as they are made.
"""

from dataclasses import dataclass, replace

from partita.capture.torch_program import Ref
from partita.gpu.flow.steps import Flow, Step, sorted_steps

EIGHT = 8


@dataclass(frozen=True, slots=True)
class BufferPlace:
    """Channels `begin` to `begin + width` of a buffer."""

    buffer: str
    begin: int
    width: int  # padded


@dataclass(frozen=True, slots=True)
class BufferPlacement:
    """A place for every image that has one, and the shape of every buffer."""

    places: dict[str, BufferPlace]
    buffers: dict[str, tuple[int, int, int, int]]


def padded(channels: int) -> int:
    """Channels rounded up to eights."""
    return -(-channels // EIGHT) * EIGHT


def place(flow: Flow) -> tuple[Flow, BufferPlacement]:
    """The flow with views and copies settled, and where everything lies."""
    flow = replace(_real_cats(flow), shapes=dict(flow.shapes), dtypes=dict(flow.dtypes))
    wishes = _Wishes(flow)
    steps: list[Step] = []
    for step in flow.steps:
        if step.kind == "part":
            wishes.tie(step.name, step.inputs[0], step.begin)
    for step in flow.steps:
        if step.kind == "cat":
            step, copies = _settle(step, flow, wishes)
            steps += copies
        steps.append(step)
    return flow.with_steps(sorted_steps(steps)), wishes.placement()


def _real_cats(flow: Flow) -> Flow:
    """Concatenations that cannot be views become calls."""
    steps = []
    for step in flow.steps:
        if step.kind == "cat" and any(flow.shapes[name][1] % EIGHT for name in step.inputs):
            steps.append(as_call(step))
        else:
            steps.append(step)
    return flow.with_steps(steps)


def as_call(step: Step) -> Step:
    """A concatenation as an operator."""
    members = [Ref(name) for name in step.inputs]
    return replace(
        step, kind="call", target="aten.cat.default", arguments=(tuple(members), 1)
    )  # fmt: skip


def _settle(step: Step, flow: Flow, wishes: "_Wishes") -> tuple[Step, list[Step]]:
    copies: list[Step] = []
    members: list[str] = []
    begin = 0
    for number, name in enumerate(step.inputs):
        if name in members or not wishes.tie(name, step.name, begin):
            copy = Step(f"{step.name}.copy{number}", "combine", (name,), factors=(1.0,))
            flow.shapes[copy.name] = flow.shapes[name]
            flow.dtypes[copy.name] = flow.dtypes[name]
            copies.append(copy)
            wishes.add(copy.name, written=True)
            assert wishes.tie(copy.name, step.name, begin)
            name = copy.name
        members.append(name)
        begin += flow.shapes[name][1]
    return replace(step, inputs=tuple(members)), copies


def _images(flow: Flow) -> set[str]:
    """The values that a step other than an operator of PyTorch makes or reads."""
    images: set[str] = set()
    for step in flow.steps:
        if step.kind not in ("call", "piece", "made"):
            images |= {step.name, *step.uses}
    return {name for name in images if len(flow.shapes.get(name, ())) == 4}


class _Wishes:
    """Values tied together at fixed distances."""

    def __init__(self, flow: Flow) -> None:
        self.flow = flow
        self.parent: dict[str, str] = {}
        self.offset: dict[str, int] = {}  # to the parent
        self.members: dict[str, list[str]] = {}  # of every root
        self.written: set[str] = set()
        images = _images(flow)
        for name in flow.inputs:
            if name in images:
                self.add(name, written=True)
        for step in flow.steps:
            if step.name not in images:
                continue
            self.add(step.name, written=not step.is_view or step.kind == "made")

    def add(self, name: str, *, written: bool) -> None:
        self.parent[name], self.offset[name] = name, 0
        self.members[name] = [name]
        if written:
            self.written.add(name)

    def root(self, name: str) -> tuple[str, int]:
        """The root of a value and its distance from there."""
        distance = 0
        while self.parent[name] != name:
            distance += self.offset[name]
            name = self.parent[name]
        return name, distance

    def span(self, name: str, at: int) -> tuple[int, int]:
        return at, at + padded(self.flow.shapes[name][1])

    def tie(self, name: str, base: str, distance: int) -> bool:
        """Put `name` at `distance` channels into `base`, if nothing written is in the way."""
        mine, my_at = self.root(name)
        yours, your_at = self.root(base)
        if mine == yours:
            return my_at == your_at + distance
        shape, other = self.flow.shapes[name], self.flow.shapes[base]
        same = (shape[0], *shape[2:]) == (other[0], *other[2:])
        if not same or self.flow.dtypes[name] != self.flow.dtypes[base]:
            return False
        shift = your_at + distance - my_at
        if self.overlaps(mine, yours, shift):
            return False
        self.parent[mine], self.offset[mine] = yours, shift
        self.members[yours] += self.members.pop(mine)
        return True

    def overlaps(self, mine: str, yours: str, shift: int) -> bool:
        """Would two written values of different groups share a channel?"""
        taken = [self.span(each, self.root(each)[1]) for each in self.of(yours)]
        for each in self.of(mine):
            begin, end = self.span(each, self.root(each)[1] + shift)
            if any(begin < last and first < end for first, last in taken):
                return True
        return False

    def of(self, root: str) -> list[str]:
        return [name for name in self.members[root] if name in self.written]

    def placement(self) -> BufferPlacement:
        places: dict[str, BufferPlace] = {}
        buffers: dict[str, tuple[int, int, int, int]] = {}
        for root, members in self.members.items():
            at = {name: self.root(name)[1] for name in members}
            low = min(at.values())
            shape = self.flow.shapes[root]
            high = max(at[name] + padded(self.flow.shapes[name][1]) for name in members)
            buffers[root] = (shape[0], high - low, shape[2], shape[3])
            for name in members:
                width = padded(self.flow.shapes[name][1])
                places[name] = BufferPlace(root, at[name] - low, width)
        return BufferPlacement(places, buffers)
