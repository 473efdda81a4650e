"""rProgram: what every vEU of a persistent kernel does, instruction by instruction.

    run cell.0:3       compute tile 3 of the operator cell.0
    signal cell.0:3    tell the others that it is done (one flag per operator counts its tiles)
    wait cell.0        until all tiles of cell.0 are signalled
    wait cell.0:3      until this tile is

`rprogram` writes the fewest waits and signals that a schedule needs: none within a queue, none
twice. `check_rprogram` is told only the problem and the program, and proves before anything is
compiled that it is safe; see there for what that takes.
"""

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from partita.errors import ProblemError
from partita.problems.rtasks import RtasksProblem, RtasksSolution, needed_tiles

ACTIONS = ("run", "wait", "signal")
ALL = -1
_LINE = re.compile(r"(?P<action>run|wait|signal) (?P<name>.+?)(:(?P<tile>\d{1,9}))?\Z")

Task = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Instruction:
    """One step of a vEU; tile -1 is all tiles of the operator (waits only)."""

    action: str
    operator: int
    tile: int = ALL


@dataclass(frozen=True, slots=True)
class RProgram:
    """The tiles of every operator, and the instructions of every vEU."""

    names: tuple[str, ...]
    num_tiles: tuple[int, ...]
    veus: tuple[tuple[Instruction, ...], ...]

    def __str__(self) -> str:
        lines = []
        for number, veu in enumerate(self.veus):
            lines.append(f"veu {number}")
            lines += [f"  {self.line(instruction)}" for instruction in veu]
        return "\n".join(lines)

    def line(self, instruction: Instruction) -> str:
        """An instruction as text."""
        tile = "" if instruction.tile == ALL else f":{instruction.tile}"
        return f"{instruction.action} {self.names[instruction.operator]}{tile}"


def rprogram(problem: RtasksProblem, solution: RtasksSolution) -> RProgram:
    """The instructions of a valid schedule."""
    counts = _counts(problem, solution)
    home = {task: veu for veu, queue in enumerate(solution.queues) for task in queue}
    homes: dict[int, set[int]] = defaultdict(set)  # the vEUs that run some tile of an operator
    for (operator, _), veu in home.items():
        homes[operator].add(veu)
    heard = _heard(problem, solution, counts, home, homes)
    veus = []
    for veu, queue in enumerate(solution.queues):
        known: set[Task] = set()  # run here or waited for; ALL stands for every tile
        lines: list[Instruction] = []
        for operator, tile in queue:
            for source, wanted in _waits(problem, counts, home, homes, veu, (operator, tile)):
                if not _is_known(known, source, wanted, counts[source]):
                    known.add((source, wanted))
                    lines.append(Instruction("wait", source, wanted))
            lines.append(Instruction("run", operator, tile))
            known.add((operator, tile))
            if (operator, tile) in heard:
                lines.append(Instruction("signal", operator, tile))
        veus.append(tuple(lines))
    return RProgram(tuple(op.name for op in problem.operators), counts, tuple(veus))


def _is_known(known: set[Task], operator: int, tile: int, count: int) -> bool:
    if (operator, tile) in known or (operator, ALL) in known:
        return True
    return tile == ALL and all((operator, each) in known for each in range(count))


def _counts(problem: RtasksProblem, solution: RtasksSolution) -> tuple[int, ...]:
    chosen = zip(problem.operators, solution.tilings, strict=True)
    return tuple(operator.tilings[choice].num_tiles for operator, choice in chosen)


def _waits(
    problem: RtasksProblem,
    counts: tuple[int, ...],
    home: dict[Task, int],
    homes: dict[int, set[int]],
    veu: int,
    task: Task,
) -> Iterator[Task]:
    """What a tile must wait for: nothing that its own vEU has run before."""
    operator, tile = task
    for edge in problem.before[operator]:
        if not edge.aligned:
            if homes[edge.src] != {veu}:
                yield edge.src, ALL
            continue
        for other in needed_tiles(edge, counts[edge.src], counts[operator], tile):
            if home[edge.src, other] != veu:
                yield edge.src, other


def _heard(
    problem: RtasksProblem,
    solution: RtasksSolution,
    counts: tuple[int, ...],
    home: dict[Task, int],
    homes: dict[int, set[int]],
) -> set[Task]:
    """The tiles that another vEU waits for; of an operator waited for as a whole, all of them."""
    known: set[Task] = set()
    whole: set[int] = set()
    for veu, queue in enumerate(solution.queues):
        for task in queue:
            for source, wanted in _waits(problem, counts, home, homes, veu, task):
                if wanted == ALL:
                    whole.add(source)
                else:
                    known.add((source, wanted))
    return known | {(source, tile) for source in whole for tile in range(counts[source])}


def parse_rprogram(text: str, problem: RtasksProblem, num_tiles: tuple[int, ...]) -> RProgram:
    """The program that `str` wrote."""
    number = {operator.name: index for index, operator in enumerate(problem.operators)}
    veus: list[list[Instruction]] = []
    for row, line in enumerate(text.splitlines(), start=1):
        if line.startswith("veu "):
            veus.append([])
            continue
        match = _LINE.match(line.strip())
        if match is None or not veus or match["name"] not in number:
            raise ProblemError(
                f"{line.strip()!r} is no instruction",
                fix="write run, wait or signal and an operator of the problem, under a veu",
                field=f"line {row}",
            )
        tile = ALL if match["tile"] is None else int(match["tile"])
        veus[-1].append(Instruction(match["action"], number[match["name"]], tile))
    names = tuple(operator.name for operator in problem.operators)
    return RProgram(names, num_tiles, tuple(map(tuple, veus)))


def check_rprogram(problem: RtasksProblem, program: RProgram, num_resident: int) -> tuple[str, ...]:
    """Why a program must not be launched, one sentence each; empty if it is safe.

    - no more vEUs than programs that are resident at once: one that is not would never signal;
    - every tile runs once, and is signalled at most once, after it ran, by the vEU that ran it:
      flags only grow;
    - whatever a tile needs ran before it in its queue, or was waited for: no missing wait;
    - what is waited for is signalled: no wait for ever;
    - queues and waits together have no cycle: there is one order that every queue is a part of.
    """
    if len(program.veus) > num_resident:
        return (
            f"{len(program.veus)} programs, but only {num_resident} are resident at once: "
            f"the others would never start while these wait for them",
        )
    return _unsafe_flags(program) or _missing_waits(problem, program) or _waits_for_ever(program)


def _unsafe_flags(program: RProgram) -> tuple[str, ...]:
    wrong: list[str] = []
    ran: set[Task] = set()
    signalled: set[Task] = set()
    for veu, instructions in enumerate(program.veus):
        mine: set[Task] = set()
        for step in instructions:
            task = (step.operator, step.tile)
            text = f"veu {veu}: {program.line(step)!r}"
            if not 0 <= step.operator < len(program.names) or step.action not in ACTIONS:
                return (f"veu {veu}: {step} names nothing",)
            if step.action != "wait" and not 0 <= step.tile < program.num_tiles[step.operator]:
                wrong.append(f"{text} names no tile")
            elif step.action == "run":
                if task in ran:
                    wrong.append(f"{text} runs it a second time")
                ran.add(task)
                mine.add(task)
            elif step.action == "signal":
                if task not in mine:
                    wrong.append(f"{text} before it has run there")
                if task in signalled:
                    wrong.append(f"{text} signals it a second time")
                signalled.add(task)
    for operator, count in enumerate(program.num_tiles):
        wrong += [
            f"tile {tile} of {program.names[operator]!r} never runs"
            for tile in range(count)
            if (operator, tile) not in ran
        ]
    return tuple(wrong)


def _missing_waits(problem: RtasksProblem, program: RProgram) -> tuple[str, ...]:
    wrong = []
    for veu, instructions in enumerate(program.veus):
        known: set[Task] = set()  # run here or waited for; ALL stands for every tile
        for step in instructions:
            if step.action == "run":
                for edge in problem.before[step.operator]:
                    counts = program.num_tiles[edge.src], program.num_tiles[step.operator]
                    if (edge.src, ALL) in known:
                        continue
                    for tile in needed_tiles(edge, *counts, step.tile):
                        if (edge.src, tile) not in known:
                            wrong.append(
                                f"veu {veu}: {program.line(step)!r} needs tile {tile} of "
                                f"{program.names[edge.src]!r} and does not wait for it"
                            )
                            break
                known.add((step.operator, step.tile))
            elif step.action == "wait":
                known.add((step.operator, step.tile))
    return tuple(wrong)


def _waits_for_ever(program: RProgram) -> tuple[str, ...]:
    """Run the program without time: whoever is left cannot go on."""
    signalled: dict[int, set[int]] = defaultdict(set)
    place = [0] * len(program.veus)
    sleeping: dict[int, list[int]] = defaultdict(list)
    awake = list(range(len(program.veus)))
    while awake:
        veu = awake.pop()
        instructions = program.veus[veu]
        while place[veu] < len(instructions):
            step = instructions[place[veu]]
            done = signalled[step.operator]
            if step.action == "wait" and not (
                step.tile in done
                if step.tile != ALL
                else len(done) == program.num_tiles[step.operator]
            ):
                sleeping[step.operator].append(veu)
                break
            if step.action == "signal":
                done.add(step.tile)
                awake += sleeping.pop(step.operator, [])
            place[veu] += 1
    return tuple(
        f"veu {veu} waits for ever at {program.line(instructions[at])!r}"
        for veu, (instructions, at) in enumerate(zip(program.veus, place, strict=True))
        if at < len(instructions)
    )
