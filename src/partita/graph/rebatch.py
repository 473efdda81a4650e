"""A graph for another batch: every dim that the batch runs along is scaled, nothing else.

The batch is the first dim of the model's inputs. It is followed from op to op through the loop
nests: the loop that is outermost in a batch dim of an input is the batch loop of the op, and where
that loop is outermost in a dim of an output, the batch goes on there. Merged dims (batch and
positions in one), transposed ones and the places of experts are found in this way. O(ops).
"""

import math
from dataclasses import replace

from partita.errors import GraphError
from partita.graph.loops import loop_nest
from partita.graph.record import Graph, Op, Shape, Tensor


def batch_of(graph: Graph) -> int:
    """The first dim of the first input; 1 where there is none."""
    return next((tensor.shape[0] for tensor in graph.inputs if tensor.shape), 1)


def rebatch(graph: Graph, batch: int) -> Graph:
    """The same model (and its backward, if it is there) for `batch` samples."""
    before = batch_of(graph)
    if batch < 1:
        raise GraphError(f"a batch of {batch}", fix="give at least 1", field="batch")
    return graph if batch == before else _Rebatch(graph, before, batch).run()


def batch_dims(graph: Graph) -> dict[str, int]:
    """The dim that the batch runs along, of every tensor that has one."""
    before = batch_of(graph)
    work = _Rebatch(graph, before, 2 * before)
    work.run()
    return work.carries


class _Rebatch:
    def __init__(self, graph: Graph, before: int, batch: int) -> None:
        self.graph, self.before, self.batch = graph, before, batch
        self.carries: dict[str, int] = {}  # tensor -> the dim that holds the batch
        self.shapes: dict[str, Shape] = {}  # of the tensors that change
        self.asked: dict[str, int] = {}  # made from nothing, and used as one of each sample

    def run(self) -> Graph:
        seeds: dict[str, int] = {}
        while True:
            self.carries, self.shapes, self.asked = {}, {}, {}
            for tensor in self.graph.inputs:
                if tensor.shape and tensor.shape[0] == self.before:
                    self._carry(tensor, 0)
            for name, dim in seeds.items():
                self._carry(self.graph.tensor(name), dim)
            ops = tuple(self._op(op) for op in self.graph.ops)
            if not self.asked:
                break
            seeds.update(self.asked)
        tensors = tuple(
            replace(tensor, shape=self.shapes.get(tensor.name, tensor.shape))
            for tensor in self.graph.tensors
        )
        return Graph(self.graph.name, tensors, ops, self.graph.outputs)

    def _op(self, op: Op) -> Op:
        if op.phase == "update":
            return op
        if op.forward:
            origin = self.graph.op(op.forward)
            for name, i in zip(op.outputs, self.graph.call(op).wrt, strict=True):
                self._same(name, origin.inputs[i])
            return op
        if op.phase != "forward":  # a sum of gradients
            self._same(op.outputs[0], op.inputs[0])
            return op
        return self._forward(op)

    def _same(self, name: str, as_other: str) -> None:
        if as_other in self.shapes:
            self.carries[name] = self.carries[as_other]
            self.shapes[name] = self.shapes[as_other]

    def _forward(self, op: Op) -> Op:
        carried = [(i, self.carries[n]) for i, n in enumerate(op.inputs) if n in self.carries]
        if not carried:
            return self._with_shape(op)
        nest = loop_nest(self.graph.call(op))
        loops = {nest.inputs[i].dims[dim][:1] for i, dim in carried} - {()}
        if len(loops) > 1:
            raise GraphError(
                f"op {op.name!r} mixes samples of the batch",
                fix="such a model cannot be cut into micro-batches",
            )
        loop = next(iter(loops))[0] if loops else ""
        for name, access in zip(op.inputs, nest.inputs, strict=True):
            dim = access.position(loop) if loop and name not in self.carries else None
            if dim is not None:
                self._ask(name, dim)
        for name, access in zip(op.outputs, nest.outputs, strict=True):
            position = access.position(loop) if loop else None
            if position is not None and access.dims[position][0] == loop:
                self._carry(self.graph.tensor(name), position)
            elif not loop:
                self._guess(name, op.inputs[carried[0][0]], carried[0][1])
        return self._with_shape(op)

    def _guess(self, name: str, source: str, dim: int) -> None:
        """An op whose loops are unknown: a dim of the same place and size is the batch's."""
        tensor = self.graph.tensor(name)
        if dim < len(tensor.shape) and tensor.shape[dim] == self.graph.tensor(source).shape[dim]:
            self._carry(tensor, dim)

    def _ask(self, name: str, dim: int) -> None:
        """What is made from nothing is made for each sample, if it is used so: by the ops between
        them, too."""
        producer = self.graph.producer(name)
        if producer is None or producer.phase != "forward":
            return
        if producer.kind in ("constant", "expand"):
            self.asked[name] = dim
            return
        nest = loop_nest(self.graph.call(producer))
        loops = nest.outputs[producer.outputs.index(name)].dims[dim]
        for other, access in zip(producer.inputs, nest.inputs, strict=True):
            position = access.position(loops[0]) if loops and other not in self.carries else None
            if position is not None:
                self._ask(other, position)

    def _with_shape(self, op: Op) -> Op:
        """An attribute that repeats the shape of the output follows it."""
        name = op.outputs[0]
        if op.attr("shape") is None or name not in self.shapes:
            return op
        shape = self.graph.call(op).ints("shape")
        dim, new = self.carries[name], self.shapes[name]
        followed = tuple(
            new[dim] if i == dim and size != -1 else size for i, size in enumerate(shape)
        )
        attrs = tuple((key, followed if key == "shape" else value) for key, value in op.attrs)
        return replace(op, attrs=attrs)

    def _carry(self, tensor: Tensor, dim: int) -> None:
        size = tensor.shape[dim] * self.batch
        scaled = math.ceil(size / self.before)  # an expert's places are rounded up as well
        self.carries[tensor.name] = dim
        self.shapes[tensor.name] = (*tensor.shape[:dim], scaled, *tensor.shape[dim + 1 :])
