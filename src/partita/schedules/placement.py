"""A placement: the blocks of one micro-batch, the devices each occupies, and what waits for what.

    place = Placement(2)
    place.chain([Block("F0", 1, memory=1), Block("F1", 1, memory=1)], devices=[0, 1])
    place.chain(
        [Block("B1", 2, memory=-1, kind="backward"), Block("B0", 2, memory=-1, kind="backward")],
        devices=[1, 0], after="F1",
    )
    problem = place.problem(memory=2, microbatches=8)

It is built step by step (every step returns the placement, so that steps can be chained) and ends
in a frozen `ScheduleProblem`, which is also what it is saved as. Spans and memory may be whole or
real numbers; a block may occupy several devices, all of them for its whole span.
"""

import math
import numbers
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from partita import files
from partita.errors import InputError, ProblemError
from partita.problems import schedule as problems
from partita.problems.schedule import ScheduleProblem
from partita.suggest import suggest

Devices = int | Sequence[int]


@dataclass(frozen=True, slots=True)
class Block:
    """A piece of work of one micro-batch; it takes `memory` at its start, or gives it back (< 0).

    `kind` is forward, backward, weight (the part of a split backward that makes the gradients of
    the weights), or anything else.
    """

    name: str
    span: float
    memory: float = 0
    kind: str = "forward"

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ProblemError(f"found {self.name!r}", fix="give text", field="name of a block")
        span = number(self.span, f"span of block {self.name!r}")
        if not 0 < span <= problems.LARGEST:
            raise ProblemError(
                f"found {self.span!r}",
                fix=f"give a number above zero, at most {problems.LARGEST:.0e}",
                field=f"span of block {self.name!r}",
            )
        object.__setattr__(self, "span", span)
        object.__setattr__(self, "memory", number(self.memory, f"memory of block {self.name!r}"))


class Placement:
    """Blocks on devices; `name` is what reports call it.

    `time_unit` is "" where spans are steps, "s" where they are seconds and memory is bytes.
    `memory` and `microbatches` are what a file said; they hold unless something else is asked.
    """

    def __init__(self, num_devices: int, name: str = "", time_unit: str = "") -> None:
        self.num_devices = whole(num_devices, "num_devices")
        if not 1 <= self.num_devices <= problems.MAX_DEVICES:
            raise ProblemError(
                f"found {num_devices}",
                fix=f"give a whole number from 1 to {problems.MAX_DEVICES:,}",
                field="num_devices",
            )
        self.name = name
        self.time_unit = time_unit
        self.memory: tuple[float, ...] | None = None
        self.microbatches: int | None = None
        self._blocks: dict[str, tuple[Block, tuple[int, ...]]] = {}
        self._delays: dict[tuple[str, str], float] = {}

    # --- building ---------------------------------------------------------------------------

    def add(
        self,
        block: Block,
        devices: Devices,
        after: Block | str | Iterable[Block | str] = (),
        delay: float = 0,
    ) -> Self:
        """Add one block on its device or devices, to start `delay` after the end of others."""
        if not isinstance(block, Block):
            raise ProblemError(f"found {block!r}", fix="give a Block", field="blocks")
        if block.name in self._blocks:
            raise ProblemError(
                f"{block.name!r} is there already", fix="give each block a name of its own",
                field="blocks",
            )  # fmt: skip
        self._blocks[block.name] = (block, self._devices(block, devices))
        for other in [after] if isinstance(after, Block | str) else after:
            self.depends(other, block, delay)
        return self

    def chain(
        self,
        blocks: Iterable[Block],
        devices: Iterable[Devices],
        after: Block | str | Iterable[Block | str] = (),
        delay: float = 0,
    ) -> Self:
        """Add blocks one after the other, each on its device or devices.

        The first waits for `after`; `delay` is what passes between one block and the next.
        """
        blocks = list(blocks)
        places = list(devices) if isinstance(devices, Iterable) else [devices]
        if len(places) != len(blocks):
            raise ProblemError(
                f"found {len(places)} for {len(blocks)} blocks",
                fix="give the device (or a list of devices) of each block",
                field="devices",
            )
        before: Block | str | Iterable[Block | str] = after
        for block, place in zip(blocks, places, strict=True):
            self.add(block, place, before, delay)
            before = block
        return self

    def depends(self, before: Block | str, after: Block | str, delay: float = 0) -> Self:
        """`before` ends (and `delay` passes) before `after` starts, in every micro-batch."""
        pair = (self._known(before), self._known(after))
        late = number(delay, "delay")
        if not 0 <= late <= problems.LARGEST:
            raise ProblemError(f"found {delay!r}", fix="give at least zero", field="delay")
        self._delays[pair] = max(late, self._delays.get(pair, 0))
        return self

    # --- reading ----------------------------------------------------------------------------

    @property
    def blocks(self) -> tuple[Block, ...]:
        """All blocks, in the order they were added; a dependency names them by this order."""
        return tuple(block for block, _ in self._blocks.values())

    def devices_of(self, block: Block | str) -> tuple[int, ...]:
        """The devices a block occupies."""
        return self._blocks[self._known(block)][1]

    def problem(
        self, memory: float | Sequence[float] | None = None, microbatches: int | None = None
    ) -> ScheduleProblem:
        """The schedule problem: these blocks, a cap for all devices or one for each, how many."""
        index = {name: place for place, name in enumerate(self._blocks)}
        pairs = sorted((index[a], index[b], late) for (a, b), late in self._delays.items())
        delays = tuple(late for _, _, late in pairs)
        record = ScheduleProblem(
            self.num_devices,
            tuple(
                problems.ScheduleBlock(block.span, devices, block.memory, block.name, block.kind)
                for block, devices in self._blocks.values()
            ),
            tuple((first, second) for first, second, _ in pairs),
            delays if any(delays) else (),
            self.memory,
            self.microbatches,
            self.name,
        )
        return asked(record, memory, microbatches)

    def __str__(self) -> str:
        blocks, deps = len(self._blocks), len(self._delays)
        name = f"{self.name}: " if self.name else ""
        return f"{name}{blocks} blocks on {self.num_devices} devices, {deps} dependencies"

    def __repr__(self) -> str:
        return f"<Placement {self}>"

    # --- files ------------------------------------------------------------------------------

    def save(
        self,
        path: str | Path,
        memory: float | Sequence[float] | None = None,
        microbatches: int | None = None,
        *,
        overwrite: bool = False,
    ) -> Path:
        """Write a `partita/schedule-problem@1` file, which `partita solve` reads as well."""
        data = files.encode_json(self.problem(memory, microbatches).to_json())
        return files.write_atomically(path, data, overwrite=overwrite)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """The placement in a `partita/schedule-problem@1` file, with its cap and its number."""
        return cls.from_problem(problems.read(path))

    @classmethod
    def from_problem(cls, problem: ScheduleProblem, time_unit: str = "") -> Self:
        """The placement of a problem; blocks without a name of their own are named by index."""
        place = cls(problem.num_devices, problem.name, time_unit)
        names = unique_names(problem)
        for name, block in zip(names, problem.blocks, strict=True):
            place.add(Block(name, block.span, block.memory, block.kind), block.devices)
        delays = problem.delays or (0,) * len(problem.deps)
        for (first, second), delay in zip(problem.deps, delays, strict=True):
            place.depends(names[first], names[second], delay)
        place.memory, place.microbatches = problem.memory_capacity, problem.num_microbatches
        return place

    # --- checks -----------------------------------------------------------------------------

    def _known(self, block: Block | str) -> str:
        name = block.name if isinstance(block, Block) else block
        if name not in self._blocks:
            fix = suggest(str(name), list(self._blocks)) if self._blocks else "add it first"
            raise ProblemError(f"there is no block {name!r}", fix=fix, field="depends")
        return name

    def _devices(self, block: Block, devices: Devices) -> tuple[int, ...]:
        field = f"devices of block {block.name!r}"
        several = devices if isinstance(devices, Iterable) else (devices,)
        places = tuple(whole(device, field) for device in several)
        if not places:
            raise ProblemError("is empty", fix="name the devices that run the block", field=field)
        for place in places:
            if not 0 <= place < self.num_devices:
                raise ProblemError(
                    f"found device {place}",
                    fix=f"devices are 0 to {self.num_devices - 1}",
                    field=field,
                )
        if len(set(places)) != len(places):
            raise ProblemError("names a device twice", fix="name each device once", field=field)
        return places


def asked(
    problem: ScheduleProblem,
    memory: float | Sequence[float] | None = None,
    microbatches: int | None = None,
) -> ScheduleProblem:
    """The problem with another cap and another number of micro-batches, where given."""
    if memory is not None:
        given = list(memory) if isinstance(memory, Iterable) else [memory] * problem.num_devices
        caps = tuple(number(cap, "memory") for cap in given)
        problem = _renamed(problem, "memory", memory_capacity=caps)
    if microbatches is not None:
        count = whole(microbatches, "microbatches")
        problem = _renamed(problem, "microbatches", num_microbatches=count)
    return problem


def unique_names(problem: ScheduleProblem) -> list[str]:
    """A name for each block: its own, made different where it is missing or taken."""
    names: list[str] = []
    taken: set[str] = set()
    for index, block in enumerate(problem.blocks):
        name = block.name or f"b{index}"
        while name in taken:
            name = f"{name}#{index}"
        taken.add(name)
        names.append(name)
    return names


def whole(value: object, field: str) -> int:
    """A whole number as Python has it; anything else is refused by name."""
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise ProblemError(f"found {value!r}", fix="give a whole number", field=field) from None


def number(value: object, field: str) -> float:
    """A finite number; whole ones stay whole, so that sums of them are exact."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ProblemError(f"found {value!r}", fix="give a number", field=field)
    if isinstance(value, numbers.Integral):
        return int(value)
    plain = float(value)
    if not math.isfinite(plain):
        raise ProblemError(f"found {value!r}", fix="give a finite number", field=field)
    return int(plain) if plain.is_integer() and abs(plain) <= problems.LARGEST else plain


def _renamed(problem: ScheduleProblem, field: str, **changes: object) -> ScheduleProblem:
    """`replace`, with errors that name what the caller typed."""
    try:
        return replace(problem, **changes)  # type: ignore[arg-type]
    except InputError as error:
        raise ProblemError(error.found, fix=error.fix, field=field) from None
