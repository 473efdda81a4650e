"""docs/kinds.md says what the tables say: loops, splittable dims, attributes and FLOPs per kind."""

import re
from pathlib import Path

import pytest

from partita.graph.backward import saved_by
from partita.graph.loops import LOOPS, loop_nest
from partita.graph.record import Call, Op
from partita.graph.shapes import SHAPES
from partita.graph.splits import splittable
from partita.graph.work import FLOPS, flops
from tests.graph.calls import make_call

PAGE = Path(__file__).parents[2] / "docs" / "kinds.md"

# One call of each kind with every optional input, and no size of one: its loops are all there.
EXAMPLES = {
    "linear": ([(4, 6, 8), (10, 8), (10,)], {}),
    "matmul": ([(4, 6, 8, 10), (4, 6, 10, 12)], {}),
    "einsum": ([(4, 6), (6, 8)], {"equation": "ij,jk->ik"}),
    "expert_linear": ([(4, 6, 8), (4, 10, 8), (4, 10)], {}),
    "conv": ([(4, 6, 12, 14), (8, 3, 3, 3), (8,)], {"groups": 2, "padding": 1}),
    "pool": ([(4, 6, 12, 14)], {"kernel": 3, "stride": 2, "padding": 1}),
    "resize": ([(4, 6, 12, 14)], {"output": (24, 28)}),
    "batch_norm": ([(4, 6, 12, 14), (6,), (6,)], {}),
    "group_norm": ([(4, 6, 12, 14), (6,), (6,)], {"groups": 2}),
    "layer_norm": ([(4, 6, 8), (8,), (8,)], {}),
    "rms_norm": ([(4, 6, 8), (8,)], {}),
    "softmax": ([(4, 6, 8)], {}),
    "attention": ([(4, 6, 8, 10), (4, 2, 12, 10), (4, 2, 12, 14), (4, 6, 8, 12)], {}),
    "embedding": ([(4, 6), (8, 10)], {}),
    "elementwise": ([(4, 6, 8), (8,)], {"fn": "add"}),
    "reduce": ([(4, 6, 8)], {"axes": (1, 2)}),
    "concat": ([(4, 6, 8), (4, 6, 10)], {}),
    "split": ([(4, 6, 8)], {"sizes": (2, 6)}),
    "slice": ([(4, 6, 8)], {"stop": 4}),
    "pad": ([(4, 6, 8)], {"before": (0, 0, 1), "after": (0, 0, 1)}),
    "reshape": ([(4, 6, 8)], {"shape": (24, 2, 4)}),
    "transpose": ([(4, 6, 8)], {"perm": (0, 2, 1)}),
    "expand": ([(6, 1)], {"shape": (4, 6, 8)}),
    "constant": ([], {"shape": (4, 6, 8)}),
    "lstm": ([(4, 6, 8), (80, 8), (80, 10), (80,), (80,)], {"bidirectional": True}),
    "gru": ([(4, 6, 8), (60, 8), (60, 10), (60,), (60,)], {"bidirectional": True}),
    "lstm_cell": ([(4, 8), (4, 10), (4, 10), (40, 8), (40, 10), (40,), (40,)], {}),
    "gru_cell": ([(4, 8), (4, 10), (30, 8), (30, 10), (30,), (30,)], {}),
    "state_space": (
        [(4, 6, 40), (4, 6, 8), (8,), (4, 6, 14), (4, 6, 14), (8,), (8,)],
        {"heads": 8, "groups": 2, "chunk": 3},
    ),
    "moe_router": ([(4, 6, 8), (10, 8)], {}),
    "moe_dispatch": ([(4, 6, 8), (4, 6, 10)], {"top_k": 2}),
    "moe_combine": ([(10, 24, 8), (4, 6, 10)], {}),
    "cross_entropy": ([(4, 6, 8), (4, 6)], {}),
    "mse_loss": ([(4, 6, 8), (4, 6, 8)], {}),
    "optimizer": ([(4, 6), (4, 6), (4, 6), (4, 6)], {}),
}
CALLS = {kind: make_call(kind, inputs, **attrs) for kind, (inputs, attrs) in EXAMPLES.items()}


def table():
    """The rows of the page: kind -> [inputs, attributes, loops, splits, FLOPs]."""
    rows = {}
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if cells and re.fullmatch(r"`[a-z][a-z_]+`", cells[0]):
            kind = cells[0].strip("`")
            assert kind not in rows, f"{kind} stands twice"
            rows[kind] = cells[1:]
    return rows


def quoted(cell):
    """The names in backticks, without their defaults."""
    return [text.split("=")[0] for text in re.findall(r"`([^`]+)`", cell)]


READ: set[str] = set()


class ReadCall(Call):
    """A call that writes down which attributes are asked for."""

    def attr(self, name, default=None):
        READ.add(name)
        return Call.attr(self, name, default)


class ReadOp(Op):
    """An op that does the same."""

    def attr(self, name, default=None):
        READ.add(name)
        return Op.attr(self, name, default)


def attributes_read(kind):
    """Every attribute that a table asks a call of this kind for."""
    READ.clear()
    variants = [CALLS[kind]]
    if kind == "conv":
        attrs = {"transposed": True}
        variants.append(make_call(kind, [(4, 6, 12), (6, 8, 3)], **attrs))
    if kind == "pool":
        variants.append(make_call(kind, [(4, 6, 12)], output=3))
    if kind == "attention":
        variants.append(make_call(kind, [(4, 6, 8)] * 3, heads=2))
    if kind == "elementwise":
        variants.append(make_call(kind, [(4, 6, 8)], fn="rope", heads=2))
    for call in variants:
        spy = ReadCall(call.kind, call.attrs, call.inputs, call.outputs)
        SHAPES[kind](spy)
        LOOPS[kind](spy)
        if kind in FLOPS:
            FLOPS[kind](spy)
        saved_by(ReadOp("o", kind, (), ("o",), call.attrs), "dgrad")
    return set(READ)


def test_the_page_has_a_row_for_every_kind():
    assert set(table()) == set(SHAPES) == set(EXAMPLES)


@pytest.mark.parametrize("kind", SHAPES)
def test_the_page_names_the_attributes_that_are_read(kind):
    _, attributes, *_ = table()[kind]
    assert set(quoted(attributes)) == attributes_read(kind)


@pytest.mark.parametrize("kind", SHAPES)
def test_the_page_shows_the_loop_nest(kind):
    _, _, loops, *_ = table()[kind]
    text, _, _ = str(loop_nest(CALLS[kind])).partition(" |")
    assert loops == f"`{text.strip()}`"


@pytest.mark.parametrize("kind", SHAPES)
def test_the_page_names_the_dims_that_may_be_split(kind):
    *_, splits, _ = table()[kind]
    assert quoted(splits) == list(splittable(CALLS[kind]))


@pytest.mark.parametrize("kind", SHAPES)
def test_the_page_counts_the_flops(kind):
    call = CALLS[kind]
    *_, formula = table()[kind]
    sizes = {dim.name: dim.extent for dim in loop_nest(call).dims}
    sizes |= {"chunk": call.whole("chunk", 0), "min": min}
    assert eval(formula.strip("`").replace("·", "*"), {}, sizes) == flops(call)
