"""What of a stage the backward runs again, gathered into pieces for `torch.utils.checkpoint`.

Of a piece only what it takes is kept; what is made in it is made again when a gradient first asks.

- All of a stage: runs of items from one start to the next, within the modules they stand in. A
  module with a start inside it is entered; one without belongs to a piece as a whole.
- Some ops (light): an op and all that would keep what it makes for their gradients, as a product
  does and a sum does not. What lies in between is kept. If that is nothing but a product at the
  end, an ordinary checkpoint does: it stops as soon as the product has its arguments again.
  Otherwise the piece is `light`.

Statistics (those of a batch norm) are put back after a second run. What changes buffers otherwise
must not run twice: it stands between pieces, as all that changes any does where only some ops run
again. Random numbers are drawn again from the state that they were drawn from; in a light piece
every step that draws some runs again, or the numbers of later ones would differ.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from partita.capture.torch_program import TensorSpec
from partita.emit.calls import CheckpointSegment, Item, ModuleCall, reads, steps_of
from partita.emit.steps import LEARNING, EmittedValue, OpStep

_PRODUCTS = {
    "linear",
    "matmul",
    "mm",
    "bmm",
    "addmm",
    "baddbmm",
    "conv1d",
    "conv2d",
    "conv3d",
}  # fmt: skip  they keep their arguments alone
_SUMS = {"add", "sub", "neg", "sum", "mean", "cat", "stack"}  # they keep nothing


@dataclass(frozen=True)
class RecomputedNodes:
    """What the backward of a stage runs again, by nodes of the captured program.

    `everything` in pieces, each from one of `starts` to the next; else just `nodes`. `others` are
    the nodes that have a name in the plan but do not run again.
    """

    everything: bool = False
    starts: frozenset[str] = frozenset()
    nodes: frozenset[str] = frozenset()
    others: frozenset[str] = frozenset()


def in_pieces(
    items: list[Item], gives: Sequence[EmittedValue], again: RecomputedNodes | None
) -> list[Item]:
    """The items of a stage with what runs again in pieces; modules are entered where need be."""
    steps = [step for item in items for step in steps_of(item)]
    for step in steps:
        step.recomputed = False
    if again is None:
        return items
    if again.everything:
        once = {step for step in steps if step.changes} - set(_statistics(steps))
        return _Everything(again.starts, frozenset(once)).divided(items, gives)
    return _Selective(_run_again(steps, again)).divided(items, gives) if again.nodes else items


def _piece(run: Sequence[Item], later: set[EmittedValue], light: bool = False) -> CheckpointSegment:
    """A run of items as one, given what is read after it."""
    made: dict[EmittedValue, None] = {}
    takes: dict[EmittedValue, None] = {}
    plain: list[OpStep | ModuleCall] = []
    for item in run:
        assert not isinstance(item, CheckpointSegment), "pieces are not nested"
        plain.append(item)
        takes.update((value, None) for value in reads(item) if value not in made)
        made.update((out, None) for step in steps_of(item) for out in step.outs if out is not None)
    return CheckpointSegment(plain, list(takes), [value for value in made if value in later], light)


def _is_worth_it(piece: CheckpointSegment) -> bool:
    """Does it take something from others and give something to them? Constants do not."""
    return bool(piece.gives) and any(not value.is_state for value in piece.takes)


def _read_after(
    items: Sequence[Item], place: int, gives: Sequence[EmittedValue]
) -> set[EmittedValue]:
    return {*gives, *(value for item in items[place:] for value in reads(item))}


def _changes(item: Item) -> bool:
    return any(step.changes for step in steps_of(item))


def _is_real(step: OpStep) -> bool:
    """Does it make numbers that gradients may ask for? Positions and masks have none."""
    made = (out.meta for out in step.outs if out)
    return any(isinstance(each, TensorSpec) and each.dtype.is_floating_point for each in made)


def _statistics(steps: Sequence[OpStep]) -> Iterator[OpStep]:
    """The steps that change buffers in which nothing in the forward looks."""
    looked = {value for step in steps if not step.changes for value in step.reads()}
    for step in steps:
        silent = step.operator in LEARNING or not any(step.outs)
        if step.changes and silent and not looked.intersection(_buffers(step)):
            yield step


def _buffers(step: OpStep) -> Iterator[EmittedValue]:
    return (value for value in step.reads() if value.kind == "buffer")


@dataclass(frozen=True)
class _Everything:
    """The whole forward runs again, from start to start; but for what must run `once`."""

    starts: frozenset[str]
    once: frozenset[OpStep]

    def divided(self, items: Sequence[Item], gives: Sequence[EmittedValue]) -> list[Item]:
        """Items in pieces; a single step keeps nothing that a piece of it would not."""
        steps: list[Item] = []
        begin = 0
        for place, item in enumerate(items):
            enters = self._enters(item)
            if enters or next(steps_of(item)).node in self.starts:
                steps += self._closed(items, begin, place, gives)
                begin = place
            if enters:
                if isinstance(item, ModuleCall):
                    item.items = self.divided(item.items, item.gives)
                steps.append(item)
                begin = place + 1
        return [*steps, *self._closed(items, begin, len(items), gives)]

    def _enters(self, item: Item) -> bool:
        first, *rest = steps_of(item)
        return first in self.once or any(s.node in self.starts or s in self.once for s in rest)

    def _closed(
        self, items: Sequence[Item], begin: int, end: int, gives: Sequence[EmittedValue]
    ) -> list[Item]:
        run = list(items[begin:end])
        if sum(_is_real(step) for item in run for step in steps_of(item)) < 2:
            return run
        piece = _piece(run, _read_after(items, end, gives))
        return [piece] if _is_worth_it(piece) else run


@dataclass(frozen=True)
class _Selective:
    """Only some steps run again, each in a piece with all that read what it makes."""

    recomputed: frozenset[OpStep]

    def divided(self, items: Sequence[Item], gives: Sequence[EmittedValue]) -> list[Item]:
        """Items in pieces; what is not in one is looked into."""
        steps: list[Item] = []
        place = 0
        for begin, end in self._spans(items):
            steps += map(self._entered, items[place:begin])
            piece = _piece(items[begin:end], _read_after(items, end, gives))
            steps += [self._marked(piece)] if _is_worth_it(piece) else items[begin:end]
            place = end
        return [*steps, *map(self._entered, items[place:])]

    def _entered(self, item: Item) -> Item:
        if isinstance(item, ModuleCall) and any(step in self.recomputed for step in item.steps()):
            item.items = self.divided(item.items, item.gives)
        return item

    def _spans(self, items: Sequence[Item]) -> list[tuple[int, int]]:
        """From each step that runs again to the last item that keeps what it makes, merged."""
        last = self._last_kept(items)
        spans: list[tuple[int, int]] = []
        for place, item in enumerate(items):
            made = [
                o for s in steps_of(item) if s in self.recomputed for o in s.outs if o is not None
            ]
            end = max((last.get(value, place) for value in made), default=place) + 1
            changing = (p for p in range(place, end) if _changes(items[p]))
            end = min(end, next(changing, end))
            if end <= place + 1:
                continue
            if spans and place < spans[-1][1]:
                spans[-1] = spans[-1][0], max(end, spans[-1][1])
            else:
                spans.append((place, end))
        return spans

    def _last_kept(self, items: Sequence[Item]) -> dict[EmittedValue, int]:
        """The last item that keeps a value, or a view of it, for its gradients."""
        last: dict[EmittedValue, int] = {}
        for place in range(len(items) - 1, -1, -1):
            for step in reversed(list(steps_of(items[place]))):
                if step.operator in _SUMS:
                    continue
                reach = place
                if step.target.is_view:
                    reach = max((last.get(out, -1) for out in step.outs if out), default=-1)
                for value in step.reads() if reach >= 0 else ():
                    last[value] = max(reach, last.get(value, reach))
        return last

    def _marked(self, piece: CheckpointSegment) -> CheckpointSegment:
        """The piece; where more is kept than a product at its end, with its steps marked."""
        steps = [step for item in piece.items for step in steps_of(item)]
        kept = [step for step in steps if step not in self.recomputed and not step.is_random]
        if not kept or (kept == steps[-1:] and kept[0].operator in _PRODUCTS):
            return piece
        piece.selective = True
        for step in steps:
            step.recomputed = step not in kept
        return piece


def _run_again(steps: Sequence[OpStep], again: RecomputedNodes) -> frozenset[OpStep]:
    """The steps of the nodes named, and those without a name that only they read."""
    readers: dict[EmittedValue, list[OpStep]] = {}
    for step in steps:
        for value in step.reads():
            readers.setdefault(value, []).append(step)
    new_steps: set[OpStep] = set()
    for step in reversed(steps):
        if step.node in again.nodes or (
            step.node not in again.others and _only_for(step, readers, new_steps)
        ):
            new_steps.add(step)
    return frozenset(new_steps)


def _only_for(
    step: OpStep, readers: dict[EmittedValue, list[OpStep]], steps: Iterable[OpStep]
) -> bool:
    who = [reader for out in step.outs if out is not None for reader in readers.get(out, ())]
    return bool(who) and all(reader in steps for reader in who)


def pieces_in(items: Iterable[Item]) -> Iterator[CheckpointSegment]:
    """The pieces among items, and in the modules that they call."""
    for item in items:
        if isinstance(item, CheckpointSegment):
            yield item
        elif isinstance(item, ModuleCall):
            yield from pieces_in(item.items)


def words(items: Sequence[Item], again: RecomputedNodes | None) -> str:
    """What to say of a stage that runs something again; nothing of one that does not."""
    if again is None or not any(pieces_in(items)):
        return ""
    if again.everything:
        return "Runs its forward again in the backward; only what its pieces take is kept."
    return "Runs cheap ops again in the backward instead of keeping what they make."
