"""rTasks: which tile of which operator runs on which execution unit, inside one persistent kernel.

After Rammer (OSDI 2020). An *rOperator* is a group of independent equal tiles (*rTasks*); each of
its tilings says into how many, how long one takes and what a program that runs it needs. A
*vDevice* has units (SMs) that hold resident programs (*vEUs*); one kernel runs all of them, so a
program needs the most that any chosen tiling needs, and that decides how many fit:

    programs per unit = min(slots, shared / most shared, registers / most registers)
    vEUs              = units * programs per unit

Every vEU runs its queue in order. A tile starts when its vEU is free and every tile it needs has
ended; what another vEU made is seen `signal_us` later. An edge needs all tiles of the operator
before it or, where it is `aligned`, those that cover the same part of the range. A schedule is
valid if every tile runs once and no vEU waits for ever. The objective is the time until the last
tile ends, in microseconds.
"""

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from partita import files
from partita.errors import FileError, ProblemError

FORMAT = "rtasks-problem"
LARGEST = 1e15
MAX_TILES = 1_000_000  # of one tiling, and of a whole schedule


@dataclass(frozen=True, slots=True)
class Tiling:
    """One way to cut an operator: equal tiles, and what a program needs that runs one."""

    num_tiles: int
    tile_us: float
    shared_bytes: int = 0
    registers: int = 0


@dataclass(frozen=True, slots=True)
class ROperator:
    """Independent equal tiles; the tilings are alternatives."""

    name: str
    tilings: tuple[Tiling, ...]


@dataclass(frozen=True, slots=True)
class TileEdge:
    """Tiles of `dst` need all tiles of `src`, or only the aligned ones."""

    src: int
    dst: int
    aligned: bool = False


@dataclass(frozen=True, slots=True)
class VDevice:
    """Units that hold resident programs, and how long a signal takes from one to another."""

    num_units: int
    slots_per_unit: int = 1
    shared_bytes_per_unit: int = 0
    registers_per_unit: int = 0
    signal_us: float = 0.0


@dataclass(frozen=True, slots=True)
class RtasksProblem:
    """Operators in topological order, what needs what, and the device they share."""

    device: VDevice
    operators: tuple[ROperator, ...]
    edges: tuple[TileEdge, ...] = ()
    name: str = ""
    before: tuple[tuple[TileEdge, ...], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _check_device(self.device)
        if not self.operators:
            raise ProblemError("there are none", fix="give at least one", field="operators")
        for index, operator in enumerate(self.operators):
            _check_operator(self.device, index, operator)
        before: list[list[TileEdge]] = [[] for _ in self.operators]
        for index, edge in enumerate(self.edges):
            _check_edge(self, index, edge)
            before[edge.dst].append(edge)
        object.__setattr__(self, "before", tuple(map(tuple, before)))

    def num_veus(self, tilings: tuple[int, ...]) -> int:
        """How many programs are resident at once with these tilings; 0 if one does not fit."""
        chosen = [op.tilings[i] for op, i in zip(self.operators, tilings, strict=True)]
        return self.device.num_units * programs_per_unit(self.device, chosen)

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return {"format": f"partita/{FORMAT}@1", **_plain(_RTasksWire.of(self))}

    def __str__(self) -> str:
        tiles = sum(op.tilings[0].num_tiles for op in self.operators)
        return (
            f"{self.name or 'rtasks'}: {len(self.operators):,} operators of {tiles:,} tiles "
            f"on {self.device.num_units} units"
        )


def programs_per_unit(device: VDevice, tilings: list[Tiling]) -> int:
    """How many programs that can run any of these tilings a unit holds."""
    shared = max((tiling.shared_bytes for tiling in tilings), default=0)
    registers = max((tiling.registers for tiling in tilings), default=0)
    programs = device.slots_per_unit
    if shared:
        programs = min(programs, device.shared_bytes_per_unit // shared)
    if registers:
        programs = min(programs, device.registers_per_unit // registers)
    return programs


@dataclass(frozen=True, slots=True)
class RtasksSolution:
    """A tiling for every operator, and the queue of every vEU: (operator, tile) in order."""

    tilings: tuple[int, ...]
    queues: tuple[tuple[tuple[int, int], ...], ...]

    def to_json(self) -> dict[str, Any]:
        """As the `solution` of an answer."""
        return {
            "tilings": list(self.tilings),
            "queues": [[list(task) for task in queue] for queue in self.queues],
        }

    @classmethod
    def from_json(cls, value: object, file: str = "") -> "RtasksSolution":
        """Read what `to_json` wrote."""
        return files.convert(value, cls, file)


def needed_tiles(edge: TileEdge, src_tiles: int, dst_tiles: int, tile: int) -> range:
    """The tiles of the edge's source that a tile of its target waits for."""
    if not edge.aligned:
        return range(src_tiles)
    first = tile * src_tiles // dst_tiles
    last = -((tile + 1) * src_tiles // -dst_tiles)  # rounded up
    return range(first, max(last, first + 1))


def check(problem: RtasksProblem, solution: RtasksSolution) -> tuple[str, ...]:
    """What is wrong with this solution, one sentence each; empty if nothing is."""
    wrong = _wrong_tilings(problem, solution)
    if wrong:
        return wrong
    fit = problem.num_veus(solution.tilings)
    if len(solution.queues) > fit:
        return (f"{len(solution.queues)} queues, but only {fit} programs are resident at once",)
    wrong = _wrong_tiles(problem, solution)
    if wrong:
        return wrong
    ends, stuck = simulate(problem, solution)
    return () if len(ends) == sum(map(len, solution.queues)) else (_stuck_text(problem, stuck),)


def evaluate(problem: RtasksProblem, solution: RtasksSolution) -> float:
    """The time until the last tile ends, in microseconds."""
    violations = check(problem, solution)
    if violations:
        raise ProblemError(violations[0], fix="give a valid solution", field="solution")
    ends, _ = simulate(problem, solution)
    return max(ends.values())


def simulate(
    problem: RtasksProblem, solution: RtasksSolution
) -> tuple[dict[tuple[int, int], float], list[tuple[int, int]]]:
    """When each tile ends; and, where vEUs wait for ever, the tiles they wait to run."""
    return _QueueRun(problem, solution).run()


class _QueueRun:
    """Runs the queues; a vEU that must wait sleeps until what it misses has ended.

    Of the tiles of an operator only the latest end and the latest on another vEU matter to one
    that needs them all: a tile costs O(edges), not O(tiles).
    """

    def __init__(self, problem: RtasksProblem, solution: RtasksSolution) -> None:
        self.problem, self.queues = problem, solution.queues
        chosen = zip(problem.operators, solution.tilings, strict=True)
        self.tilings = [operator.tilings[choice] for operator, choice in chosen]
        self.left = [tiling.num_tiles for tiling in self.tilings]
        self.latest = [(-math.inf, -1)] * len(self.left)  # (end, vEU)
        self.other = [-math.inf] * len(self.left)  # the latest end on any other vEU
        self.home = {task: veu for veu, queue in enumerate(solution.queues) for task in queue}
        self.ends: dict[tuple[int, int], float] = {}

    def run(self) -> tuple[dict[tuple[int, int], float], list[tuple[int, int]]]:
        place, free = [0] * len(self.queues), [0.0] * len(self.queues)
        waiting: dict[int, list[int]] = {}  # an operator that is not done -> vEUs that need it
        awake = deque(range(len(self.queues)))
        while awake:
            veu = awake.popleft()
            queue = self.queues[veu]
            while place[veu] < len(queue):
                operator, tile = queue[place[veu]]
                seen, missing = self._seen(operator, tile, veu)
                if missing >= 0:
                    waiting.setdefault(missing, []).append(veu)
                    break
                free[veu] = max(free[veu], seen) + self.tilings[operator].tile_us
                self._end(operator, tile, veu, free[veu])
                place[veu] += 1
                awake.extend(waiting.pop(operator, ()))
        stuck = [q[p] for q, p in zip(self.queues, place, strict=True) if p < len(q)]
        return self.ends, stuck

    def _end(self, operator: int, tile: int, veu: int, end: float) -> None:
        self.ends[operator, tile] = end
        self.left[operator] -= 1
        latest, its = self.latest[operator]
        if end > latest:
            if its != veu:
                self.other[operator] = latest
            self.latest[operator] = (end, veu)
        elif its != veu:
            self.other[operator] = max(self.other[operator], end)

    def _seen(self, operator: int, tile: int, veu: int) -> tuple[float, int]:
        """When all that a tile needs is seen on its vEU; or an operator that it still misses."""
        seen, signal = 0.0, self.problem.device.signal_us
        for edge in self.problem.before[operator]:
            if edge.aligned:
                counts = self.tilings[edge.src].num_tiles, self.tilings[operator].num_tiles
                for other in needed_tiles(edge, *counts, tile):
                    need = (edge.src, other)
                    if need not in self.ends:
                        return 0.0, edge.src
                    late = signal if self.home[need] != veu else 0.0
                    seen = max(seen, self.ends[need] + late)
            elif self.left[edge.src]:
                return 0.0, edge.src
            else:
                latest, its = self.latest[edge.src]
                here = max(latest, self.other[edge.src] + signal)
                seen = max(seen, here if its == veu else latest + signal)
        return seen, -1


def lower_bound(problem: RtasksProblem) -> float:
    """No schedule is shorter than a path of shortest tiles, or than the work over all programs.

    Along a path, what needs all of an operator waits for a signal, or for all its tiles to be run
    by one vEU: the lesser of the two.
    """
    most = problem.device.num_units * problem.device.slots_per_unit
    begin: list[float] = []
    ends: list[float] = []
    for index, operator in enumerate(problem.operators):
        begin.append(
            max((begin[e.src] + _passed_us(problem, e) for e in problem.before[index]), default=0.0)
        )
        ends.append(begin[-1] + min(t.tile_us for t in _fitting(problem, operator)))
    work = math.fsum(
        min(t.num_tiles * t.tile_us for t in _fitting(problem, op)) for op in problem.operators
    )
    return max(*ends, work / most) * (1 - 1e-12)


def _passed_us(problem: RtasksProblem, edge: TileEdge) -> float:
    """The least time from the start of an edge's source until its target can start."""
    tilings = _fitting(problem, problem.operators[edge.src])
    if edge.aligned:
        return min(tiling.tile_us for tiling in tilings)
    signal = problem.device.signal_us
    return min(min(t.tile_us + signal, t.num_tiles * t.tile_us) for t in tilings)


def _fitting(problem: RtasksProblem, operator: ROperator) -> Iterator[Tiling]:
    return (t for t in operator.tilings if programs_per_unit(problem.device, [t]) >= 1)


def _wrong_tilings(problem: RtasksProblem, solution: RtasksSolution) -> tuple[str, ...]:
    if len(solution.tilings) != len(problem.operators):
        return (f"{len(solution.tilings)} tilings for {len(problem.operators)} operators",)
    return tuple(
        f"operator {op.name!r} has no tiling {choice}"
        for op, choice in zip(problem.operators, solution.tilings, strict=True)
        if not 0 <= choice < len(op.tilings)
    )


def _wrong_tiles(problem: RtasksProblem, solution: RtasksSolution) -> tuple[str, ...]:
    counts = [
        op.tilings[i].num_tiles for op, i in zip(problem.operators, solution.tilings, strict=True)
    ]
    seen: set[tuple[int, int]] = set()
    wrong = []
    for task in (task for queue in solution.queues for task in queue):
        operator, tile = task
        if not (0 <= operator < len(counts) and 0 <= tile < counts[operator]):
            wrong.append(f"there is no tile {tile} of operator {operator}")
        elif task in seen:
            wrong.append(f"{_task_text(problem, task)} runs twice")
        seen.add(task)
    for operator, count in enumerate(counts):
        wrong += [
            f"{_task_text(problem, (operator, tile))} never runs"
            for tile in range(count)
            if (operator, tile) not in seen
        ]
    return tuple(wrong)


def _stuck_text(problem: RtasksProblem, stuck: list[tuple[int, int]]) -> str:
    names = ", ".join(_task_text(problem, task) for task in stuck[:4])
    more = f" and {len(stuck) - 4} more" if len(stuck) > 4 else ""
    return f"vEUs wait for each other for ever: {names}{more} cannot start"


def _task_text(problem: RtasksProblem, task: tuple[int, int]) -> str:
    return f"tile {task[1]} of {problem.operators[task[0]].name!r}"


def _check_device(device: VDevice) -> None:
    whole = ("num_units", "slots_per_unit")
    for name in (*whole, "shared_bytes_per_unit", "registers_per_unit"):
        value, least = getattr(device, name), 1 if name in whole else 0
        if not least <= value <= LARGEST:
            raise ProblemError(f"is {value}", fix=f"at least {least}", field=f"device {name}")
    if not 0 <= device.signal_us < LARGEST:
        raise ProblemError(f"is {device.signal_us}", fix="at least 0", field="device signal_us")


def _check_operator(device: VDevice, index: int, operator: ROperator) -> None:
    where = f"operators[{index}]"
    if not operator.tilings:
        raise ProblemError("has no tilings", fix="give at least one", field=where)
    for number, tiling in enumerate(operator.tilings):
        place = f"{where} tilings[{number}]"
        if not 1 <= tiling.num_tiles <= MAX_TILES:
            raise ProblemError(
                f"has {tiling.num_tiles} tiles", fix=f"1 to {MAX_TILES:,}", field=place
            )
        if not 0 < tiling.tile_us < LARGEST:
            raise ProblemError(f"a tile takes {tiling.tile_us} us", fix="more than 0", field=place)
        if tiling.shared_bytes < 0 or tiling.registers < 0:
            raise ProblemError("needs less than nothing", fix="at least 0", field=place)
    if not any(programs_per_unit(device, [tiling]) for tiling in operator.tilings):
        least = min(tiling.shared_bytes for tiling in operator.tilings)
        raise ProblemError(
            f"{operator.name!r} cannot be resident: its smallest program needs {least:,} bytes of "
            f"shared memory and {min(t.registers for t in operator.tilings):,} registers, a unit "
            f"has {device.shared_bytes_per_unit:,} and {device.registers_per_unit:,}",
            fix="give it smaller tiles",
            field=where,
        )


def _check_edge(problem: RtasksProblem, index: int, edge: TileEdge) -> None:
    where, count = f"edges[{index}]", len(problem.operators)
    if not (0 <= edge.src < count and 0 <= edge.dst < count):
        raise ProblemError(
            f"goes from {edge.src} to {edge.dst}",
            fix=f"operators are 0 to {count - 1}",
            field=where,
        )
    if edge.src >= edge.dst:
        raise ProblemError(
            f"goes from {edge.src} to {edge.dst}",
            fix="operators come after everything they need",
            field=where,
        )


@dataclass(frozen=True, slots=True)
class _RTasksWire:
    device: VDevice
    operators: tuple[ROperator, ...]
    edges: tuple[TileEdge, ...] = ()
    name: str = ""

    @classmethod
    def of(cls, problem: RtasksProblem) -> "_RTasksWire":
        return cls(problem.device, problem.operators, problem.edges, problem.name)


def _plain(value: object) -> dict[str, Any]:

    fields: dict[str, Any] = msgspec.to_builtins(value)
    return fields


def from_json(value: dict[str, Any], file: str = "") -> RtasksProblem:
    """The problem in a decoded file."""
    files.check_format(value, FORMAT, file=file)
    try:
        wire = files.convert({k: v for k, v in value.items() if k != "format"}, _RTasksWire, file)
        return RtasksProblem(wire.device, wire.operators, wire.edges, wire.name)
    except FileError as error:
        raise ProblemError(error.found, fix=error.fix, field=error.field, file=file) from None
    except ProblemError as error:
        raise error.within(file) from None


def read(path: str | Path) -> RtasksProblem:
    """Read a problem file."""
    return from_json(files.decode_json(files.read_bytes(path), str(path)), str(path))
