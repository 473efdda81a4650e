"""Bytes an op moves between memory and the execution units, per phase and split.

By default each tensor of the op once: what it reads plus what it writes, a device's share of each.
Views move nothing, a lookup only the rows it takes, a recurrent layer its state's weights at every
position, an optimizer its states both ways. `TRAFFIC[kind]` holds the exceptions.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from partita.graph.dtypes import dtype_bytes
from partita.graph.loops import loop_nest
from partita.graph.record import Call, Graph, Op
from partita.graph.splits import Factors, share

VIEWS = frozenset({"reshape", "split", "slice", "expand"})


@dataclass(frozen=True, slots=True)
class Element:
    """What traffic needs to know of a tensor: shape, bytes per element, given or computed."""

    shape: tuple[int, ...]
    element_bytes: int
    given: bool = False


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes of weights and states, which come from memory, and of activations, which may not."""

    given: float
    computed: float

    @property
    def total(self) -> float:
        """All bytes moved."""
        return self.given + self.computed


Elements = tuple[Element, ...]
NOTHING = Traffic(0.0, 0.0)


def elements(graph: Graph, op: Op) -> tuple[Elements, Elements]:
    """The tensors an op reads and writes, as traffic sees them."""
    key = ("elements", op.name)
    if key not in graph.memo:
        reads = tuple(_element(graph, name) for name in op.inputs)
        graph.memo[key] = reads, tuple(_element(graph, name) for name in op.outputs)
    elements: tuple[Elements, Elements] = graph.memo[key]
    return elements


def cached_inputs(graph: Graph) -> dict[str, int]:
    """Inputs that are kept from call to call, with the positions they hold; 0 for a state."""
    key = ("cached inputs", "")
    if key not in graph.memo:
        graph.memo[key] = {
            name: graph.tensor(name).shape[1] if positions else 0
            for op in graph.ops
            for name, positions in _kept(op)
        }
    cached: dict[str, int] = graph.memo[key]
    return cached


def positions_read_before(graph: Graph) -> int:
    """Positions of an encoder whose keys and values are kept; 0 where there is none."""
    read = (op for op in graph.ops if op.kind == "attention" and op.attr("remembered"))
    return max((graph.tensor(op.inputs[1]).shape[1] for op in read), default=0)


def appended_positions(graph: Graph) -> int:
    """Positions of a decoder's own text that are kept."""
    grown = (op for op in graph.ops if op.kind == "concat" and op.attr("appended"))
    return max((graph.tensor(op.inputs[0]).shape[1] for op in grown), default=0)


def _kept(op: Op) -> list[tuple[str, bool]]:
    """What an op reads of earlier calls, and whether that has positions."""
    if op.kind == "concat" and op.attr("appended"):
        return [(op.inputs[0], True)]
    if op.kind == "attention" and op.attr("remembered"):
        return [(name, True) for name in op.inputs[1:3]]
    if op.kind == "state_space":
        return [(name, False) for name in op.inputs[7:]]
    return []


def traffic(call: Call, reads: Elements, writes: Elements, factors: Factors) -> Traffic:
    """Bytes one device moves for its share of an op."""
    return TRAFFIC.get(call.kind, _all)(call, reads, writes, factors)


def traffic_bytes(graph: Graph, op: Op) -> float:
    """Bytes read and written by one execution of an op."""
    return traffic(graph.call(op), *elements(graph, op), {}).total


def _element(graph: Graph, name: str) -> Element:
    tensor = graph.tensor(name)
    given = tensor.role in ("parameter", "state")
    return Element(tensor.shape, dtype_bytes(tensor.dtype), given)


def _all(call: Call, reads: Elements, writes: Elements, factors: Factors) -> Traffic:
    nest = loop_nest(call)
    given = computed = 0.0
    for items, accesses in ((reads, nest.inputs), (writes, nest.outputs)):
        for item, access in zip(items, accesses, strict=True):
            held = share(nest, access, item.shape, factors) if factors else math.prod(item.shape)
            if item.given:
                given += held * item.element_bytes
            else:
                computed += held * item.element_bytes
    return Traffic(given, computed)


def _view(call: Call, reads: Elements, writes: Elements, factors: Factors) -> Traffic:
    """A view is free forward; its gradient is one too, except where pieces are put together."""
    if call.phase == "forward" or call.kind == "reshape":
        return NOTHING
    return _all(call, reads, writes, factors)


def _lookup(call: Call, reads: Elements, writes: Elements, factors: Factors) -> Traffic:
    """Rows taken and written, or added to the table, and the ids."""
    rows = math.prod(call.outputs[0]) / math.prod(factors.values())
    moves = 2 if call.phase == "forward" else 3
    return Traffic(moves * rows * writes[0].element_bytes, 8.0 * rows / call.outputs[0][-1])


def _elementwise(call: Call, reads: Elements, writes: Elements, factors: Factors) -> Traffic:
    return NOTHING if passes_through(call) else _all(call, reads, writes, factors)


def passes_through(call: Call) -> bool:
    """Does an elementwise op hand on its input as it is, as a sum does with its gradient?"""
    fn = call.text("fn")
    if fn == "identity" or not call.wrt:  # a sum of gradients is no gradient of a sum
        return fn == "identity"
    return fn == "add" and all(call.inputs[i] == call.outputs[0] for i in call.wrt)


def _recurrent(call: Call, reads: Elements, writes: Elements, factors: Factors) -> Traffic:
    once = _all(call, reads, writes, factors)
    if call.phase == "wgrad":  # one product over all positions
        return once
    # Inputs of all positions are multiplied at once, the state at every position by itself.
    weights = [math.prod(shape) for shape in call.inputs[1:]]
    again = math.prod(call.inputs[2]) / sum(weights) * (call.inputs[0][1] - 1)
    return Traffic(once.given * (1 + again), once.computed)


def _concat(call: Call, reads: Elements, writes: Elements, factors: Factors) -> Traffic:
    """Where the first part stays in its place, only the others are moved: a cache that grows."""
    if not call.flag("appended") or call.phase != "forward":
        return _all(call, reads, writes, factors)
    share = math.prod(factors.values())
    moved = sum(math.prod(part.shape) * part.element_bytes for part in reads[1:])
    return Traffic(0.0, 2.0 * moved / share)


def _attention(call: Call, reads: Elements, writes: Elements, factors: Factors) -> Traffic:
    """Values that are the first part of the keys come with them."""
    if not call.flag("values_in_keys") or call.phase != "forward":
        return _all(call, reads, writes, factors)
    free = tuple(replace(e, element_bytes=0) if i == 2 else e for i, e in enumerate(reads))
    return _all(call, free, writes, factors)


def _scan(call: Call, reads: Elements, writes: Elements, factors: Factors) -> Traffic:
    """A state to begin with is written again."""
    twice = (replace(each, element_bytes=2 * each.element_bytes) for each in reads[7:])
    if call.phase != "forward":
        return _all(call, reads, writes, factors)
    return _all(call, (*reads[:7], *twice), writes, factors)


def _optimizer(call: Call, reads: Elements, writes: Elements, factors: Factors) -> Traffic:
    once = _all(call, reads, writes, factors)
    return Traffic(2 * once.given, once.computed)


def _nothing(call: Call, reads: Elements, writes: Elements, factors: Factors) -> Traffic:
    return NOTHING


TRAFFIC: dict[str, Callable[[Call, Elements, Elements, Factors], Traffic]] = {
    **dict.fromkeys(sorted(VIEWS), _view),
    "attention": _attention,
    "concat": _concat,
    "embedding": _lookup,
    "elementwise": _elementwise,
    "lstm": _recurrent,
    "gru": _recurrent,
    "optimizer": _optimizer,
    "state_space": _scan,
    "constant": _nothing,
}
