"""The numbers that a region's kernel reads: a row per task, a begin per program, further waits.

    code, tile, first further wait, waits, counter | six reads, two weights, three wide, two writes
    | six pairs (counter, tiles)

The kernel (`generate.py`, `kernels/tiles.py`) trusts them: a wrong one is an access outside of the
arena, a read of what is not written yet, or a wait for ever. So `check_table.py` proves them before
a launch, from these numbers and the sizes that the code was generated for.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from partita.errors import ProblemError
from partita.gpu.rtasks.interpret import interpret
from partita.gpu.rtasks.tileops import NOWHERE, TileOp
from partita.problems.rprogram import ALL, RProgram

READS, WEIGHTS, WIDE, WRITES, WAITS, WIDTH = 5, 11, 13, 16, 20, 32  # columns, as in kernels/tiles
INLINE = (WIDTH - WAITS) // 2  # waits that lie in the row itself
Row = tuple[int, ...]
Pair = tuple[int, int]  # a counter, and the tiles that it counts


@dataclass(frozen=True, slots=True)
class LaunchTable:
    """Rows of all programs one after the other, and one more that the last program reads ahead."""

    rows: tuple[Row, ...]
    starts: tuple[int, ...]  # the first row of every program, and the end
    waits: tuple[Pair, ...]
    num_counters: int

    @property
    def num_programs(self) -> int:
        """How many programs run side by side."""
        return len(self.starts) - 1

    def pairs(self, row: Row) -> tuple[Pair, ...]:
        """What a task waits for, as the kernel reads it."""
        inline = [(row[at], row[at + 1]) for at in range(WAITS, WIDTH, 2)]
        further = self.waits[row[2] : row[2] + max(row[3] - INLINE, 0)]
        return (*inline[: max(row[3], 0)], *further)


def launch_table(
    ops: Sequence[TileOp], codes: Sequence[int], program: RProgram, *, alone: bool = False
) -> LaunchTable:
    """The table of a program; `alone`: for one program that runs all tasks in an allowed order."""
    queues = [_in_order(program)] if alone else task_queues(program)
    operands = [operand_columns(op) for op in ops]
    rows: list[Row] = []
    starts: list[int] = [0]
    waits: list[Pair] = []
    for queue in queues:
        for operator, tile, before, heard in queue:
            first = (codes[operator], tile, len(waits), len(before), operator if heard else -1)
            pairs = [(each, program.num_tiles[each]) for each in before]
            row = (*first, *operands[operator], *(number for pair in pairs for number in pair))
            rows.append((row + (0,) * WIDTH)[:WIDTH])
            waits += pairs[INLINE:]
        starts.append(len(rows))
    return LaunchTable((*rows, (0,) * WIDTH), tuple(starts), tuple(waits), len(ops))


Task = tuple[int, int, tuple[int, ...], bool]  # operator, tile, operators waited for, is it heard


def task_queues(program: RProgram) -> list[list[Task]]:
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
    tasks = {(task[0], task[1]): task for queue in task_queues(program) for task in queue}
    order: list[Task] = []
    interpret(program, lambda operator, tile: order.append(tasks[operator, tile]))
    return order


def operand_columns(op: TileOp) -> Row:
    """Where an op's operands are; the arena of values is counted in eights."""
    row = [NOWHERE] * (WAITS - READS)
    for first, places in ((READS, op.reads), (WEIGHTS, op.weights), (WRITES, op.writes)):
        for index, place in enumerate(places):
            row[first + index - READS] = place.at // 8
    for index, at in enumerate(op.wide):
        row[WIDE + index - READS] = at
    return tuple(row)
