"""The programs of a piped module in one mode: one for each size it was called with, or for many."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from partita.capture.exported import Captured, export_open
from partita.capture.open_sizes import Place
from partita.emit.stages import Emitted
from partita.emit.symbolic import Recaptured, same_steps
from partita.jobs.partition import Partitioned
from partita.run.sequential import SequentialStages
from partita.run.sizes import Groups, Served, Shapes, emit_open, groups_of, shapes_of

MOST_SIZES = 64  # that are remembered; the one called longest ago is captured again

Emit = Callable[[Captured, Partitioned, Mapping[str, Recaptured]], Emitted]


@dataclass(frozen=True)
class PipedMode:
    """The module in one mode: its stages, how they were found, and which sizes they serve."""

    run: SequentialStages
    partitioned: Partitioned
    served: Served


@dataclass
class Programs:
    """What there is for one mode."""

    first: PipedMode
    by_shapes: dict[Shapes, PipedMode] = field(default_factory=dict)
    serving_many: list[PipedMode] = field(default_factory=list)
    tried: set[frozenset[Place]] = field(default_factory=set)  # sizes to leave open

    def find(self, shapes: Shapes) -> PipedMode | None:
        """The program that serves these shapes, if there is one."""
        program = self.by_shapes.pop(shapes, None)
        if program is None:
            programs = (self.first, *self.serving_many)
            program = next((each for each in programs if shapes in each.served), None)
        if program is not None:
            self.add(shapes, program)
        return program

    def add(self, shapes: Shapes, program: PipedMode) -> None:
        """Remember what serves these shapes."""
        if program.served.sizes is not None and program not in self.serving_many:
            self.serving_many.append(program)
        self.by_shapes[shapes] = program
        while len(self.by_shapes) > MOST_SIZES:
            del self.by_shapes[next(iter(self.by_shapes))]

    def every(self) -> list[PipedMode]:
        """Each program once."""
        programs = (self.first, *self.serving_many, *self.by_shapes.values())
        return list({id(program): program for program in programs}.values())

    def like(self, captured: Captured) -> list[PipedMode]:
        """Those whose captured program does the same steps."""
        ops = [op.name for op in captured.graph.ops]
        return [
            program
            for program in self.every()
            if ops == [op.name for op in program.run.captured.graph.ops]
            and same_steps(program.run.captured.record, captured.record)
        ]


def resized_program(
    programs: Programs, captured: Captured, capture: Callable[[Any], Captured], emit: Emit,
    checkpointing: str,
) -> PipedMode | None:  # fmt: skip
    """Stages of the plan that there is for a new capture: for many sizes if it can be, or for one.

    None if the model does other steps at these sizes.
    """
    alike = programs.like(captured)
    if not alike:
        return None
    shapes = shapes_of(captured.program.example_inputs)
    for known in alike:
        groups = groups_of(known.served.shapes, shapes)
        places = frozenset(place for own in groups.values() for place in own)
        if groups and places not in programs.tried:
            programs.tried.add(places)
            opened = _opened(known, captured, groups, capture, emit, checkpointing)
            if opened is not None:
                return opened
    partitioned = alike[0].partitioned
    run = SequentialStages(captured, emit(captured, partitioned, {}))
    return PipedMode(run, partitioned, Served(shapes))


def _opened(
    known: PipedMode, captured: Captured, groups: Groups, capture: Callable[[Any], Captured],
    emit: Emit, checkpointing: str,
) -> PipedMode | None:  # fmt: skip
    first = known.run.captured
    if not (first.is_usual and captured.is_usual):  # sizes are left open only in the usual way
        return None
    places = [place for own in groups.values() for place in own]
    sizes = export_open(
        captured.module, *first.program.example_inputs, checkpointing=checkpointing, places=places
    )
    shapes = shapes_of(captured.program.example_inputs)
    if sizes is None or not sizes.hold(shapes) or not sizes.hold(known.served.shapes):
        return None
    emitted = emit_open(
        first, captured, groups, capture, lambda own, others: emit(own, known.partitioned, others)
    )
    if emitted is None:
        return None
    served = Served(known.served.shapes, groups, sizes)
    return PipedMode(SequentialStages(first, emitted), known.partitioned, served)
