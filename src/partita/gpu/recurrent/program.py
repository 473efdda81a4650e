"""What the persistent kernels wait for and signal, as an rProgram: to be proven, step by step.

Every program of a group runs its tile of a step after it waited for the group below at the same
step, and for its own group a step earlier; then it signals. A decoder waits for the head of the
step before. The problem says what a tile reads, the program what the kernel waits for; for a few
steps `check_rprogram` shows that nothing is missing and nothing waits for ever, and since every
step looks the same, that carries over to any number of them.
"""

from collections.abc import Sequence

from partita.problems.rprogram import ALL, Instruction, RProgram
from partita.problems.rtasks import ROperator, RtasksProblem, TileEdge, Tiling, VDevice

Sources = tuple[tuple[int, int], ...]  # (group, steps earlier)


def recurrent_rprogram(
    num_groups: int, num_blocks: int, num_steps: int, batch: int = 1, both: bool = False
) -> tuple[RtasksProblem, RProgram]:
    """Groups of programs over steps: pipelined layers, or two directions that are independent."""
    reads, waits, owners = [], [], []
    for group in range(num_groups):
        input_row: Sources = ((group - 1, 0),) if group and not both else ()
        past: Sources = ((group, batch),)
        reads.append(past + input_row)
        waits.append(input_row + past)  # in the order of the kernel
        owners.append(range(group * num_blocks, (group + 1) * num_blocks))
    names = [f"cell.{group}" for group in range(num_groups)]
    return _problem(names, owners, reads, num_steps), _program(names, owners, waits, num_steps)


def decoder_rprogram(
    num_layers: int, num_blocks: int, num_steps: int, num_programs: int | None = None
) -> tuple[RtasksProblem, RProgram]:
    """A decoder: every program has rows of the head, and but for some, rows of one layer.

    The first layer reads the token that the head chose; all wait for it, since it also says
    whether to go on.
    """
    head = num_layers
    reads: list[Sources] = []
    waits: list[Sources] = []
    owners = []
    for layer in range(num_layers):
        input_row = ((layer - 1, 0),) if layer else ((head, 1),)
        reads.append((*input_row, (layer, 1)))
        waits.append(((layer, 1), (head, 1), *(input_row if layer else ())))
        owners.append(range(layer * num_blocks, (layer + 1) * num_blocks))
    reads.append(((head - 1, 0),))
    waits.append(((head - 1, 0),))
    owners.append(range(num_programs or num_layers * num_blocks))
    names = [*(f"cell.{layer}" for layer in range(num_layers)), "head"]
    return _problem(names, owners, reads, num_steps), _program(names, owners, waits, num_steps)


def _sources(given: Sources, step: int, num_groups: int) -> list[int]:
    """Operators are numbered step by step: `step * groups + group`."""
    return [(step - earlier) * num_groups + group for group, earlier in given if step >= earlier]


def _problem(
    names: Sequence[str], owners: Sequence[range], reads: Sequence[Sources], num_steps: int
) -> RtasksProblem:
    operators: list[ROperator] = []
    edges: list[TileEdge] = []
    for step in range(num_steps):
        for name, mine, given in zip(names, owners, reads, strict=True):
            sources = _sources(given, step, len(names))
            edges += [TileEdge(source, len(operators)) for source in sources]
            operators.append(ROperator(f"{name}.{step}", (Tiling(len(mine), 1.0),)))
    device = VDevice(max(mine.stop for mine in owners))
    return RtasksProblem(device, tuple(operators), tuple(edges))


def _program(
    names: Sequence[str], owners: Sequence[range], waits: Sequence[Sources], num_steps: int
) -> RProgram:
    veus: list[list[Instruction]] = [[] for _ in range(max(mine.stop for mine in owners))]
    for step in range(num_steps):
        for group, mine in enumerate(owners):
            operator = step * len(names) + group
            sources = _sources(waits[group], step, len(names))
            for tile, veu in enumerate(mine):
                veus[veu] += [Instruction("wait", source, ALL) for source in sources]
                veus[veu].append(Instruction("run", operator, tile))
                veus[veu].append(Instruction("signal", operator, tile))
    return RProgram(
        tuple(f"{name}.{step}" for step in range(num_steps) for name in names),
        tuple(len(mine) for _ in range(num_steps) for mine in owners),
        tuple(map(tuple, veus)),
    )
