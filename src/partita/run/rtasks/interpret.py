"""Running an rProgram without a GPU: tile by tile, in any order that its waits allow.

Which program goes on next is drawn at random, as on a device that promises nothing. Buffers begin
as NaN, and a tile writes only its own share of an op's output: a tile that runs before what it
needs spoils the result. So a missing wait shows for some seeds, and what passes many is no
accident. What an op computes is taken from PyTorch (`capture/eager.py`), not from a tile's code.
"""

import math
import random
from collections.abc import Callable, Sequence

import torch

from partita.capture.eager import RULES
from partita.capture.twin import Twin
from partita.costs.rtasks import VIEWS
from partita.errors import ProblemError
from partita.graph.record import Graph, Op
from partita.problems.rprogram import ALL, RProgram

T = torch.Tensor


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


class GraphTiles:
    """The ops of a graph as tiles over its twin's weights; call it as `run_tile`."""

    def __init__(self, graph: Graph, twin: Twin, inputs: Sequence[T], program: RProgram) -> None:
        self.graph, self.twin, self.program = graph, twin, program
        self.values = dict(zip((t.name for t in graph.inputs), inputs, strict=True))
        self.values.update(dict(twin.named_parameters()))
        for op in graph.ops:
            if op.kind not in VIEWS:
                for name in op.outputs:
                    self.values[name] = torch.full(graph.tensor(name).shape, math.nan)

    def __call__(self, operator: int, tile: int) -> None:
        """Compute one tile: the op on what is there now, its share of the output written."""
        op = self.graph.op(self.program.names[operator])
        count = self.program.num_tiles[operator]
        with torch.no_grad():
            for name, whole in zip(op.outputs, self._computed(op), strict=True):
                size = whole.numel()
                share = slice(tile * size // count, (tile + 1) * size // count)
                self.values[name].view(-1)[share] = whole.reshape(-1)[share]

    def outputs(self) -> tuple[T, ...]:
        """What the model gives, once all tiles have run."""
        return tuple(self._value(name) for name in self.graph.outputs)

    def _value(self, name: str) -> T:
        """A tensor; views are made when they are read."""
        source = self.graph.producer(name)
        if name in self.values or source is None:
            return self.values[name]
        return dict(zip(source.outputs, self._computed(source), strict=True))[name]

    def _computed(self, op: Op) -> tuple[T, ...]:
        if op.kind == "constant":
            return (self.twin.constant(op.outputs[0]),)
        inputs = [self._value(name) for name in op.inputs]
        found = RULES[op.kind](self.twin, self.graph.call(op), *inputs)
        return found if isinstance(found, tuple) else (found,)
