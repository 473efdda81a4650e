"""A graph for another batch: every dim that the batch runs along is scaled, nothing else.

The batch is the first dim of the model's inputs. It is followed from op to op through the loop
nests: a loop in a batch dim of an input is the batch loop of the op, and the batch goes on in the
dims of outputs that have the loop. Of a merged dim (batch and positions in one) it is known how
many steps of others are around the batch: `outer` is 1 where the batch is outermost. Merged dims,
transposed ones and the places of experts are found in this way. O(ops).

An op without loops is followed by sizes: a dim of its output that is as large as the batch dim of
an input. Shapes that do not go together in the end are refused: the model is for one batch only.
"""

import math
from dataclasses import replace

from partita.errors import GraphError
from partita.graph.loops import Access, Nest, loop_nest
from partita.graph.record import Graph, Op, Shape, Tensor
from partita.graph.shapes import SHAPES, output_shapes

Place = tuple[int, int]  # the dim of a tensor that has the batch, and `outer`
LoopPlace = tuple[str, int]  # the loop of an op that has it, and `outer` within the loop
MOST_KEPT = 4  # graphs of other batches that a graph remembers: one plan asks for few


def batch_of(graph: Graph) -> int:
    """The first dim of the first input; 1 where there is none."""
    return next((tensor.shape[0] for tensor in graph.inputs if tensor.shape), 1)


def rebatch(graph: Graph, batch: int) -> Graph:
    """The same model (and its backward, if it is there) for `batch` samples."""
    before = batch_of(graph)
    if batch < 1:
        raise GraphError(f"a batch of {batch}", fix="give at least 1", field="batch")
    if batch == before:
        return graph
    known: dict[int, Graph] = graph.memo.setdefault(("rebatch", ""), {})
    if batch not in known:
        _refuse_offsets(graph)
        if len(known) >= MOST_KEPT:
            del known[next(iter(known))]
        known[batch] = _Rebatch(graph, before, batch).run()
    return known[batch]


def batch_dims(graph: Graph) -> dict[str, int]:
    """The dim that the batch runs along, of every tensor that has one with the batch outermost."""
    if ("batch dims", "") not in graph.memo:
        before = batch_of(graph)
        work = _Rebatch(graph, before, 2 * before)
        work.run()
        dims = {name: dim for name, (dim, outer) in work.carries.items() if outer == 1}
        graph.memo["batch dims", ""] = dims
    known: dict[str, int] = graph.memo["batch dims", ""]
    return known


class _Rebatch:
    def __init__(self, graph: Graph, before: int, batch: int) -> None:
        self.graph, self.before, self.batch = graph, before, batch
        self.carries: dict[str, Place] = {}
        self.shapes: dict[str, Shape] = {}  # of the tensors that change
        self.asked: dict[str, Place] = {}  # made from nothing, and used as one of each sample

    def run(self) -> Graph:
        seeds: dict[str, Place] = {}
        while True:
            self.carries, self.shapes, self.asked = {}, {}, {}
            for tensor in self.graph.inputs:
                if tensor.shape and tensor.shape[0] == self.before:
                    self._carry(tensor, (0, 1))
            for name, place in seeds.items():
                self._carry(self.graph.tensor(name), place)
            ops = tuple(self._op(op) for op in self.graph.ops)
            if not self.asked:
                break
            seeds.update(self.asked)
        tensors = tuple(
            replace(tensor, shape=self.shapes[tensor.name])
            if tensor.name in self.shapes
            else tensor
            for tensor in self.graph.tensors
        )
        made = replace(self.graph, tensors=tensors, ops=ops)
        for op in made.ops:
            if op.phase == "forward" and op.kind in SHAPES and not op.forward:
                _check_shapes(made, op)
        return made

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
        carried = {i: self.carries[n] for i, n in enumerate(op.inputs) if n in self.carries}
        if not carried:
            return self._with_shape(op)
        if op.kind == "embedding_bag" and not _is_given(self.graph, op.inputs[2]):
            return self._bags(op)
        nest = loop_nest(self.graph.call(op))
        places = {_in_loop(nest, nest.inputs[i], place) for i, place in carried.items()} - {None}
        if op.kind == "embedding":  # rows of a table that samples have filled: any of them is read
            places.discard(_in_loop(nest, nest.inputs[1], carried.get(1)))
        if len(places) > 1:
            raise _mixing(op)
        loop = next(iter(places)) if places else None
        for i, access in enumerate(nest.inputs):
            where = _in_dim(nest, access, loop) if i not in carried else None
            if where is not None:
                self._ask(op.inputs[i], where)
        for name, access in zip(op.outputs, nest.outputs, strict=True):
            where = _in_dim(nest, access, loop)
            if where is not None:
                self._carry(self.graph.tensor(name), where)
            elif loop is None:
                self._guess(name, [(op.inputs[i], place) for i, place in carried.items()])
        return self._with_shape(op)

    def _bags(self, op: Op) -> Op:
        """Bags of rows of ids: a bag for each sample; which bag an id is in lies as the ids do."""
        _, ids, offsets = op.inputs[:3]
        if ids in self.carries:
            if self.carries[ids] != (0, 1):
                raise _mixing(op)
            bags = self.graph.tensor(op.outputs[0]).shape[0]
            for i, name in enumerate(op.outputs):
                tensor = self.graph.tensor(name)
                if i == 1 and tensor.shape == self.graph.tensor(ids).shape:
                    self._carry(tensor, self.carries[ids])
                elif tensor.shape[:1] == (bags,):
                    self._carry(tensor, (0, 1))
            if offsets not in self.carries:
                self._ask(offsets, (0, 1))
        return op

    def _guess(self, name: str, carried: list[tuple[str, Place]]) -> None:
        """An op whose loops are unknown: a dim of the same size is the batch's, best in its place.

        A dim of one element is never taken for another's.
        """
        tensor = self.graph.tensor(name)
        for source, (dim, outer) in carried:
            size = self.graph.tensor(source).shape[dim]
            if dim < len(tensor.shape) and tensor.shape[dim] == size:
                self._carry(tensor, (dim, outer))
                return
        for source, (dim, outer) in carried:
            size = self.graph.tensor(source).shape[dim]
            if size > 1 and tensor.shape.count(size) == 1:
                self._carry(tensor, (tensor.shape.index(size), outer))
                return

    def _ask(self, name: str, place: Place) -> None:
        """What is made from nothing is made for each sample, if it is used so: by the ops between
        them, too."""
        producer = self.graph.producer(name)
        if producer is None or producer.phase != "forward":
            return
        if producer.kind in ("constant", "expand"):
            self.asked[name] = place
        if producer.kind == "constant":
            return
        nest = loop_nest(self.graph.call(producer))
        if not nest.dims:  # unknown loops: what it reads in this place and size is the batch's, too
            self.asked[name] = place
            size = self.graph.tensor(name).shape[place[0]]
            for other in producer.inputs:
                shape = self.graph.tensor(other).shape
                if other not in self.carries and shape[place[0] : place[0] + 1] == (size,):
                    self._ask(other, place)
            return
        loop = _in_loop(nest, nest.outputs[producer.outputs.index(name)], place)
        for other, access in zip(producer.inputs, nest.inputs, strict=True):
            where = _in_dim(nest, access, loop) if other not in self.carries else None
            if where is not None:
                self._ask(other, where)

    def _with_shape(self, op: Op) -> Op:
        """An attribute that repeats the shape of the output follows it."""
        name = op.outputs[0]
        if op.attr("shape") is None or name not in self.shapes:
            return op
        shape = self.graph.call(op).ints("shape")
        (dim, _), new = self.carries[name], self.shapes[name]
        followed = tuple(
            new[dim] if i == dim and size != -1 else size for i, size in enumerate(shape)
        )
        attrs = tuple((key, followed if key == "shape" else value) for key, value in op.attrs)
        return replace(op, attrs=attrs)

    def _carry(self, tensor: Tensor, place: Place) -> None:
        dim = place[0]
        size = tensor.shape[dim] * self.batch
        scaled = math.ceil(size / self.before)  # an expert's places are rounded up as well
        self.carries[tensor.name] = place
        self.shapes[tensor.name] = (*tensor.shape[:dim], scaled, *tensor.shape[dim + 1 :])


def _in_loop(nest: Nest, access: Access, place: Place | None) -> LoopPlace | None:
    """The loop of a tensor's dim that has the batch, and what of it is around the batch."""
    if place is None:
        return None
    dim, outer = place
    for name in access.dims[dim]:
        extent = nest.extent(name)
        if outer < extent or (outer == 1 and extent == 1):
            return name, outer
        if outer % extent:
            return None
        outer //= extent
    return None


def _in_dim(nest: Nest, access: Access, loop: LoopPlace | None) -> Place | None:
    """The dim of a tensor that has the batch, if its loops have the batch in this one."""
    if loop is None:
        return None
    name, outer = loop
    dim = access.position(name)
    if dim is None:
        return None
    loops = access.dims[dim]
    return dim, outer * math.prod(nest.extent(each) for each in loops[: loops.index(name)])


def _mixing(op: Op) -> GraphError:
    return GraphError(
        f"op {op.name!r} mixes samples of the batch",
        fix="such a model cannot be cut into micro-batches",
    )


def _refuse_offsets(graph: Graph) -> None:
    """Offsets that a call gives point into the ids of all bags, not into those of a part."""
    for op in graph.ops:
        is_bag = op.kind == "embedding_bag" and op.phase == "forward"
        if is_bag and _is_given(graph, op.inputs[2]):
            raise GraphError(
                f"op {op.name!r} is given offsets, which are others in a part of the batch",
                fix="such a model cannot be cut into micro-batches: give nn.EmbeddingBag ids with "
                "a row for each bag, padded with padding_idx, and no offsets",
            )


def _is_given(graph: Graph, name: str) -> bool:
    """Does a tensor depend on what the model is called with?"""
    left, seen = [name], {name}
    while left:
        each = left.pop()
        producer = graph.producer(each)
        if producer is None and graph.tensor(each).role == "input":
            return True
        reads = () if producer is None else producer.inputs
        left += [other for other in reads if other not in seen]
        seen.update(reads)
    return False


def _check_shapes(graph: Graph, op: Op) -> None:
    """Refuse an op whose tensors no longer go together."""
    try:
        fits = output_shapes(graph.call(op)) == tuple(graph.tensor(n).shape for n in op.outputs)
    except GraphError:
        fits = False
    if not fits:
        raise GraphError(
            f"op {op.name!r} does not follow the size of the batch",
            fix="such a model cannot be cut into micro-batches",
        )
