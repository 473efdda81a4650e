"""Random graphs for Hypothesis: `graphs()`."""

from typing import Any

from hypothesis import strategies as st

from partita.graph import Graph, GraphBuilder, Op, Tensor, training_graph
from partita.graph.record import BYTES, Attr
from partita.graph.shapes import SHAPES

Draw = Any  # Hypothesis' draw function
SIZES = st.sampled_from([1, 2, 3, 4, 6])
ROLES = st.sampled_from(["activation", "gradient"])

# Names as a hostile exporter would give them; halves of surrogate pairs are refused elsewhere.
NAMES = st.one_of(
    st.text(alphabet="abcxyz_.:/-0189", min_size=1, max_size=8),
    st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=6),
    st.sampled_from(
        ["input", "output", "graph", 'a"b', "a b", "a\nb", "as", "x:0", "=", "\\", ":"]
    ),
)
SCALARS = st.one_of(
    st.booleans(),
    st.integers(-(2**63) + 1, 2**63 - 1),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=6),
)
ATTRS: st.SearchStrategy[Attr] = st.one_of(
    SCALARS,
    st.lists(st.integers(-99, 99), max_size=3).map(tuple),
    st.lists(st.floats(-9, 9), max_size=3).map(tuple),
    st.lists(st.text('ab"\\\n é', max_size=3), max_size=3).map(tuple),
)  # type: ignore[assignment]


@st.composite
def graphs(draw: Draw, hostile: bool = True, training: bool | None = None) -> Graph:
    """Graphs of ops of known and unknown kinds; some with their backward.

    `hostile` graphs have strange names, attributes, scopes and orders of tensors; `training`
    asks for a backward pass, or for none. Not hostile ones always end in a loss.
    """
    wanted = draw(st.booleans()) if training is None else training
    graph = draw(_wild_graphs()) if hostile and not wanted else draw(_tame_graphs())
    if wanted:
        rule = draw(st.sampled_from([None, "sgd", "momentum", "adamw"]))
        graph = training_graph(graph, rule, draw(st.sampled_from(["f32", "bf16"])))
    return draw(_renamed(graph)) if hostile else graph


@st.composite
def _tame_graphs(draw: Draw) -> Graph:
    """A small network with a loss, built as a person would."""
    g = GraphBuilder(draw(st.sampled_from(["net", "model"])), draw(st.sampled_from(["f32", "f16"])))
    width = draw(st.sampled_from([2, 4]))
    x = g.linear(g.input("x", (2, 4, width)), width, "first")
    alive = [x]
    for i in range(draw(st.integers(0, 5))):
        step = draw(st.sampled_from(["linear", "add", "gelu", "norm", "attention", "mystery"]))
        a, b = draw(st.sampled_from(alive)), draw(st.sampled_from(alive))
        with g.scope(f"layers.{i}"):
            if step == "linear":
                alive.append(g.linear(a, width, bias=draw(st.booleans())))
            elif step == "add":
                alive.append(g.add(a, b))
            elif step == "gelu":
                alive.append(g.elementwise("gelu", a))
            elif step == "norm":
                alive.append(g.norm(a))
            elif step == "attention":
                alive.append(g.attention(a, b, b, 2, causal=draw(st.booleans())))
            else:
                alive += g.op("mystery", a, b, shapes=[a.shape, b.shape], level=1.5)
    last = g.add(*alive, name="all") if len(alive) > 1 else alive[0]
    logits = g.linear(last, 3, "head")
    return g.finish(g.cross_entropy(logits, g.input("y", (2, 4), "i64")))


@st.composite
def _wild_graphs(draw: Draw) -> Graph:
    """Ops of kinds nobody knows over tensors of any type, listed in any order."""
    dtypes, shapes = st.sampled_from(sorted(BYTES)), st.lists(SIZES, max_size=3).map(tuple)
    roles = st.sampled_from(["input", "parameter", "state"])
    tensors = [
        Tensor(f"given {i}", draw(shapes), draw(dtypes), draw(roles))
        for i in range(draw(st.integers(0, 3)))
    ]
    ops = []
    for i in range(draw(st.integers(0, 4))):
        names = [tensor.name for tensor in tensors]
        reads = draw(st.lists(st.sampled_from(names), max_size=3)) if names else []
        made = [
            Tensor(f"{i}:{j}", draw(shapes), draw(dtypes), draw(ROLES))
            for j in range(draw(st.integers(1, 2)))
        ]
        attrs = draw(st.dictionaries(NAMES, ATTRS, max_size=3))
        phase = draw(st.sampled_from(["forward", "forward", "dgrad", "wgrad", "update"]))
        kind = draw(st.one_of(NAMES, st.sampled_from(["foo.dgrad", "foo.forward"])))
        ops.append(
            Op(
                draw(st.sampled_from([f"{i}", f"{i}:0", f"op {i}"])),
                kind if kind not in SHAPES else f"my {kind}",
                tuple(reads),
                tuple(tensor.name for tensor in made),
                tuple(sorted(attrs.items())),
                draw(st.one_of(st.just(""), NAMES)),
                phase,
            )
        )
        tensors += made
    outputs = draw(st.lists(st.sampled_from(tensors), max_size=2)) if tensors else []
    order = draw(st.permutations(tensors))
    title = draw(st.one_of(NAMES, st.just("")))
    return Graph(title, tuple(order), tuple(ops), tuple(tensor.name for tensor in outputs))


@st.composite
def _renamed(draw: Draw, graph: Graph) -> Graph:
    """The same graph with a few names changed into hostile ones."""
    taken = {tensor.name for tensor in graph.tensors}
    new = draw(st.lists(NAMES, max_size=3, unique=True))
    old = draw(st.permutations(sorted(taken)))
    name = {o: n for o, n in zip(old, new, strict=False) if n not in taken}
    op_name = {}
    if graph.ops:
        chosen, other = draw(st.sampled_from(graph.ops)).name, draw(NAMES)
        op_name = {chosen: other} if other not in {op.name for op in graph.ops} else {}
    ops = tuple(
        Op(
            op_name.get(op.name, op.name),
            op.kind,
            tuple(name.get(n, n) for n in op.inputs),
            tuple(name.get(n, n) for n in op.outputs),
            op.attrs,
            op.scope,
            op.phase,
            op_name.get(op.forward, op.forward),
        )
        for op in graph.ops
    )
    tensors = tuple(
        Tensor(name.get(t.name, t.name), t.shape, t.dtype, t.role) for t in graph.tensors
    )
    return Graph(graph.name, tensors, ops, tuple(name.get(n, n) for n in graph.outputs))
