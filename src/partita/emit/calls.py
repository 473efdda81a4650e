"""The steps of a stage gathered into calls of the model's own modules.

A call is whole when all its steps are in the stage, one after the other. Whole calls stay calls; of
the others the parts are written out where they stand. What the backward runs again is gathered
further, into pieces (`recompute.py`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from partita.emit.steps import EmittedValue, OpStep


@dataclass(eq=False)
class ModuleCall:
    """A module called: what it reads from outside, and what others read of it."""

    key: str
    path: str
    items: list["Item"]
    takes: list[EmittedValue]
    gives: list[EmittedValue]

    def steps(self) -> Iterator[OpStep]:
        """Every step inside, in order."""
        for item in self.items:
            yield from steps_of(item)

    @property
    def is_divided(self) -> bool:
        """True if only a part of it is run again, so that what is inside must be told apart."""
        marks = {step.recomputed for step in self.steps()}
        inner = (i.is_divided for i in self.items if isinstance(i, ModuleCall))
        return (
            len(marks) > 1
            or any(isinstance(i, CheckpointSegment) for i in self.items)
            or any(inner)
        )


@dataclass(eq=False)
class CheckpointSegment:
    """Items that the backward runs again; if `light`, only the marked steps among them."""

    items: list["OpStep | ModuleCall"]
    takes: list[EmittedValue]
    gives: list[EmittedValue]
    selective: bool = False

    @property
    def changes(self) -> bool:
        """Are there buffers that it changes?"""
        return any(step.changes for item in self.items for step in steps_of(item))


Item = OpStep | ModuleCall | CheckpointSegment


def steps_of(item: Item) -> Iterator[OpStep]:
    """Every step of an item, in order."""
    if isinstance(item, OpStep):
        yield item
        return
    for inner in item.items:
        yield from steps_of(inner)


def is_again(item: Item) -> bool:
    """True for what is marked to run again."""
    return not isinstance(item, CheckpointSegment) and all(
        step.recomputed for step in steps_of(item)
    )


def called(items: Sequence[Item]) -> Iterator[OpStep | ModuleCall]:
    """The items with those of pieces in place of the pieces."""
    for item in items:
        yield from item.items if isinstance(item, CheckpointSegment) else (item,)


def reads(item: Item) -> Iterator[EmittedValue]:
    """What an item reads from outside."""
    yield from item.reads() if isinstance(item, OpStep) else item.takes


def is_own(value: EmittedValue, path: str) -> bool:
    """True for a tensor that the module at a path holds."""
    return value.is_state and any(name.startswith(f"{path}.") for name in value.names)


@dataclass
class Gatherer:
    """`totals` counts the steps of every call; `keeps` says which modules may be called."""

    totals: Mapping[str, int]
    keeps: Callable[[str], bool]

    def gather(self, steps: Sequence[OpStep], kept: Sequence[EmittedValue]) -> list[Item]:
        """The items of a stage; `kept` are the values used after it."""
        last: dict[EmittedValue, int] = {}
        for place, step in enumerate(steps):
            last.update((value, place) for value in step.reads())
        last.update((value, len(steps)) for value in kept)
        return self._items(steps, 0, len(steps), 0, last)

    def _items(
        self,
        steps: Sequence[OpStep],
        start: int,
        end: int,
        depth: int,
        last: dict[EmittedValue, int],
    ) -> list[Item]:
        """Items of steps[start:end], whose first `depth` modules are done."""
        items: list[Item] = []
        while start < end:
            after = start
            own = steps[start].stack[depth : depth + 1]
            while own and after < end and steps[after].stack[depth : depth + 1] == own:
                after += 1
            if not own:
                items.append(steps[start])
                start += 1
                continue
            inner = self._items(steps, start, after, depth + 1, last)
            ((key, path),) = own
            if after - start == self.totals[key] and self.keeps(path):
                later = {value for value, place in last.items() if place >= after}
                items.append(_call(key, path, inner, steps[start:after], later))
            else:
                items += inner
            start = after
        return items


def _call(
    key: str, path: str, items: list[Item], run: Sequence[OpStep], later: set[EmittedValue]
) -> ModuleCall:
    made: dict[EmittedValue, None] = {}
    takes: dict[EmittedValue, None] = {}
    for step in run:
        takes.update((v, None) for v in step.reads() if v not in made and not is_own(v, path))
        made.update((out, None) for out in step.outs if out is not None)
    return ModuleCall(key, path, items, list(takes), [v for v in made if v in later])
