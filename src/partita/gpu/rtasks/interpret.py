"""Running an rProgram without a GPU: tile by tile, in any order that its waits allow.

Which program goes on next is drawn at random, as on a device that promises nothing. Buffers begin
as NaN, and a tile writes only its own share of an op's output: a tile that runs before what it
needs spoils the result. So a missing wait shows for some seeds, and what passes many is no
accident.
"""

import random
from collections.abc import Callable

from partita.errors import ProblemError
from partita.problems.rprogram import ALL, RProgram


def interpret(program: RProgram, run_tile: Callable[[int, int], None], seed: int = 0) -> None:
    """Run every tile once, programs in random turns; a wait holds until its signals were given."""
    turns = random.Random(seed)
    place = [0] * len(program.veus)
    signalled: list[set[int]] = [set() for _ in program.names]
    left = [veu for veu, steps in enumerate(program.veus) if steps]
    while left:
        ready = [veu for veu in left if _can_go_on(program, veu, place[veu], signalled)]
        if not ready:
            stuck = program.line(program.veus[left[0]][place[left[0]]])
            raise ProblemError(f"all programs wait; veu {left[0]} at {stuck!r}", fix="check it")
        veu = turns.choice(ready)
        step = program.veus[veu][place[veu]]
        if step.action == "run":
            run_tile(step.operator, step.tile)
        elif step.action == "signal":
            signalled[step.operator].add(step.tile)
        place[veu] += 1
        if place[veu] == len(program.veus[veu]):
            left.remove(veu)


def _can_go_on(program: RProgram, veu: int, place: int, signalled: list[set[int]]) -> bool:
    step = program.veus[veu][place]
    if step.action != "wait":
        return True
    done = signalled[step.operator]
    if step.tile == ALL:
        return len(done) == program.num_tiles[step.operator]
    return step.tile in done
