"""A fused region as one persistent kernel: its table of tasks, and the launch.

    region = Region(ops, tiles, program, data, wide)      # data, wide: the arenas
    region()                                              # one launch on the current stream

The program was proven safe against a number of resident programs (`check_rprogram`); what the
compiled kernel really needs is known only now, so that is checked again before the first launch.
Before that, every operand of every op is checked to lie inside the arenas (`bounds.py`).
On the CPU, under Triton's interpreter, one program runs all tasks in an order that the waits allow,
and every wait is checked.
"""

from collections.abc import Sequence
from typing import Any

import torch

from partita.errors import ProblemError, VerificationError
from partita.gpu.bounds import check_inside
from partita.gpu.residency import check_resident, resident_programs, resources
from partita.gpu.rtasks.bounds import region_reaches
from partita.gpu.rtasks.generate import Source
from partita.gpu.rtasks.interpret import interpret
from partita.gpu.rtasks.tileops import NOWHERE, Tile, TileOp
from partita.problems.rprogram import ALL, RProgram

T = torch.Tensor
READS, WEIGHTS, WIDE, WRITES, WAITS, WIDTH = 5, 11, 13, 16, 20, 32  # columns, as in kernels.py
Row = list[int]


class Region:
    """A compiled region over its arenas."""

    def __init__(
        self,
        ops: Sequence[TileOp],
        tiles: Sequence[Tile],
        program: RProgram,
        data: T,
        wide: T,
        num_warps: int = 4,
        delay: int = 0,
    ) -> None:
        check_inside("a region", region_reaches(ops, data.numel(), wide.numel()))
        self.data, self.wide, self.num_warps, self.delay = data, wide, num_warps, delay
        self.source = Source(ops, tiles)
        self.spins = data.device.type == "cuda"
        queues = _queues(program) if self.spins else [_in_order(program)]
        self.num_programs = len(queues)
        rows, starts, waits = _table(ops, self.source.codes, program, queues)
        integers: dict[str, Any] = {"dtype": torch.int32, "device": data.device}
        self.table = torch.tensor(rows, **integers)
        self.starts = torch.tensor(starts, **integers)
        self.waits = torch.tensor(waits or [[0, 0]], **integers)
        self.flags = torch.zeros(len(ops), **integers)
        self.state = torch.zeros(
            3, **integers
        )  # launches so far, programs that ended, a failed check
        self.kernel = self.source.module().region
        self._compiled: Any = None

    def _arguments(self) -> tuple[Any, ...]:
        return (
            self.data, self.wide, self.table, self.starts, self.waits, self.flags, self.state,
            self.num_programs, self.spins, self.delay,
        )  # fmt: skip

    def __call__(self) -> None:
        """Run all tasks once."""
        if self.spins and self._compiled is None:
            self.compile()
        self.kernel[(self.num_programs,)](*self._arguments(), num_warps=self.num_warps)
        if not self.spins and self.state[2]:
            raise VerificationError(("a task ran before what it waits for was written",))

    def compile(self) -> None:
        """Compile it and check that all programs are resident at once."""
        self._compiled = self.kernel.warmup(
            *self._arguments(), grid=(self.num_programs,), num_warps=self.num_warps
        )
        self._compiled._init_handles()
        check_resident(self.num_programs, self.num_resident(), resources(self._compiled))

    def num_resident(self) -> int:
        """How many programs of the compiled kernel the device holds at once."""
        return resident_programs(self._compiled, self.num_warps, self.data.device)

    def about(self) -> str:
        """The programs, the branches and, once compiled, the resources of the kernel."""
        words = f"{self.num_programs} programs, {len(self.source.branches)} kinds of tasks"
        return words if self._compiled is None else f"{words}, {resources(self._compiled)}"


Task = tuple[int, int, tuple[int, ...], bool]  # operator, tile, operators waited for, is it heard


def _queues(program: RProgram) -> list[list[Task]]:
    """The instructions of every program as tasks: waits before, a signal after."""
    queues = []
    for number, instructions in enumerate(program.veus):
        queue: list[Task] = []
        waits: list[int] = []
        for step in instructions:
            if step.action == "wait":
                if step.tile != ALL:
                    raise ProblemError(
                        f"veu {number} waits for one tile: {program.line(step)!r}",
                        fix="wait for whole operators: a region has a counter for each",
                    )
                waits.append(step.operator)
            elif step.action == "run":
                queue.append((step.operator, step.tile, tuple(waits), False))
                waits = []
            else:
                operator, tile, before, _ = queue[-1]
                if (operator, tile) != (step.operator, step.tile):
                    raise ProblemError(
                        f"veu {number}: {program.line(step)!r} does not follow its task",
                        fix="signal a task right after it",
                    )
                queue[-1] = (operator, tile, before, True)
        queues.append(queue)
    return queues


def _in_order(program: RProgram) -> list[Task]:
    """All tasks in one queue, in an order that the waits allow."""
    tasks = {(task[0], task[1]): task for queue in _queues(program) for task in queue}
    order: list[Task] = []
    interpret(program, lambda operator, tile: order.append(tasks[operator, tile]))
    return order


def _table(
    ops: Sequence[TileOp], codes: Sequence[int], program: RProgram, queues: list[list[Task]]
) -> tuple[list[Row], list[int], list[list[int]]]:
    """A row per task, where each program begins, and (counter, tiles) per wait."""
    operands = [_operands(op) for op in ops]
    rows: list[Row] = []
    starts: list[int] = [0]
    waits: list[list[int]] = []
    for queue in queues:
        for operator, tile, before, heard in queue:
            first = [codes[operator], tile, len(waits), len(before), operator if heard else -1]
            pairs = [[each, program.num_tiles[each]] for each in before]
            row = first + operands[operator] + [number for pair in pairs for number in pair]
            rows.append((row + [0] * WIDTH)[:WIDTH])
            waits += pairs[(WIDTH - WAITS) // 2 :]
        starts.append(len(rows))
    return [*rows, [0] * WIDTH], starts, waits  # a program reads ahead by one


def _operands(op: TileOp) -> Row:
    """Where an op's operands are; the arena of values is counted in eights."""
    row = [NOWHERE] * (WAITS - READS)
    for first, places in ((READS, op.reads), (WEIGHTS, op.weights), (WRITES, op.writes)):
        for index, place in enumerate(places):
            row[first + index - READS] = place.at // 8
    for index, at in enumerate(op.wide):
        row[WIDE + index - READS] = at
    return row
