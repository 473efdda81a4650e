"""The ops of a graph as tiles: what an op computes is PyTorch's, not a tile's code."""

import math

import torch

from partita.capture.eager import RULES
from partita.costs.rtasks import VIEWS


class GraphTiles:
    """Tiles over the weights of a graph's reference module; call it as `run_tile`."""

    def __init__(self, graph, module, inputs, program):
        self.graph, self.module, self.program = graph, module, program
        self.values = dict(zip((t.name for t in graph.inputs), inputs, strict=True))
        self.values.update(dict(module.named_parameters()))
        for op in graph.ops:
            if op.kind not in VIEWS:
                for name in op.outputs:
                    self.values[name] = torch.full(graph.tensor(name).shape, math.nan)

    def __call__(self, operator, tile):
        """Compute one tile: the op on what is there now, its share of the output written."""
        op = self.graph.op(self.program.names[operator])
        count = self.program.num_tiles[operator]
        with torch.no_grad():
            for name, whole in zip(op.outputs, self._computed(op), strict=True):
                size = whole.numel()
                share = slice(tile * size // count, (tile + 1) * size // count)
                self.values[name].view(-1)[share] = whole.reshape(-1)[share]

    def outputs(self):
        """What the model gives, once all tiles have run."""
        return tuple(self._value(name) for name in self.graph.outputs)

    def _value(self, name):
        """A tensor; views are made when they are read."""
        source = self.graph.producer(name)
        if name in self.values or source is None:
            return self.values[name]
        return dict(zip(source.outputs, self._computed(source), strict=True))[name]

    def _computed(self, op):
        if op.kind == "constant":
            return (self.module.constant(op.outputs[0]),)
        inputs = [self._value(name) for name in op.inputs]
        computed = RULES[op.kind](self.module, self.graph.call(op), *inputs)
        return computed if isinstance(computed, tuple) else (computed,)
