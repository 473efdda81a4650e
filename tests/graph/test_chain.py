"""Chains: every op once and in order, cuts where little crosses, repeats folded."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partita.graph import GraphBuilder, training_graph
from partita.graph.chain import chain_of, folded, inside_blocks, longest_repeat, runs
from partita.graph.splits import routed_pairs
from partita.zoo import build
from partita.zoo.llama import DecoderSizes, Experts, decoder

MODELS = ("gpt2", "t5-small", "unet", "inception_v3", "moe", "resnet50", "transformer-base")


@pytest.mark.parametrize("name", MODELS)
def test_segments_hold_every_forward_op_once_in_order(name):
    graph = build(name, batch=4)
    chain = chain_of(graph)
    ops = [op for segment in chain.segments for op in segment.ops]
    assert ops == [op.name for op in graph.ops]
    assert chain.num_segments > 1


@pytest.mark.parametrize("name", MODELS)
def test_what_enters_is_what_was_made_before_and_is_read_later(name):
    graph = build(name, batch=4)
    chain = chain_of(graph)
    made: set[str] = set()
    for i, segment in enumerate(chain.segments):
        later = {n for s in chain.segments[i:] for op in s.ops for n in graph.op(op).inputs}
        assert set(segment.entering) == made & later
        made |= {n for op in segment.ops for n in graph.op(op).outputs}


@pytest.mark.parametrize("name", MODELS)
def test_a_folded_graph_trains_and_every_op_has_its_like(name):
    graph = build(name, batch=4)
    chain = chain_of(graph)
    fold = folded(chain)
    assert training_graph(fold.graph).is_training
    assert len(fold.like) == chain.num_segments
    for op in graph.ops:
        like = fold.graph.op(fold.op_like[op.name])
        assert like.kind == op.kind
        assert fold.graph.call(like) == graph.call(op)


def test_a_deep_model_folds_to_a_few_layers():
    fold = folded(chain_of(build("gpt3-13b", batch=2)))
    assert len(fold.graph.ops) < 80
    assert fold.graph.outputs == build("gpt3-13b", batch=2).outputs


def test_equal_layers_are_of_one_kind():
    g = GraphBuilder("layers")
    x = g.input("x", (4, 8))
    for i in range(6):
        x = g.relu(g.linear(x, 8, f"l{i}", bias=False), name=f"r{i}")
    chain = chain_of(g.finish(x))
    assert len({segment.kind for segment in chain.segments[1:-2]}) == 1


def test_a_model_of_one_op_is_one_segment():
    g = GraphBuilder("one")
    chain = chain_of(g.finish(g.linear(g.input("x", (4, 8)), 8, "only")))
    assert chain.num_segments == 1
    assert folded(chain).segments == (("only",),)


@given(st.lists(st.integers(0, 2), max_size=30))
def test_runs_repeat_their_pattern_and_do_not_overlap(kinds):
    end = 0
    for first, period, times in runs(kinds):
        assert first >= end
        assert times >= 2
        end = first + period * times
        assert kinds[first:end] == kinds[first : first + period] * times


def test_the_longest_repeat_can_be_left_out():
    graph = build("gpt2", batch=2)
    ops = [op for op in graph.ops if op.phase == "forward"]
    repeat = longest_repeat(graph, ops)
    assert repeat.times >= 10
    gone, renamed = repeat.without(2)
    assert len(gone) == repeat.length * (repeat.times - 2)
    made = {name for i in gone for name in ops[i].outputs}
    left = [op for i, op in enumerate(ops) if i not in gone]
    reads = {renamed.get(name, name) for op in left for name in op.inputs}
    assert not made & reads


def test_ops_without_a_pattern_have_no_repeat():
    ops = [op for op in build("unet", batch=1).ops if op.phase == "forward"]
    assert longest_repeat(build("unet", batch=1), ops) is None


def test_no_cut_lies_between_a_dispatch_and_its_combine():
    """The narrowest place of a layer with small experts is inside of them."""
    sizes = DecoderSizes(2, 64, 96, 4, vocab=50, experts=Experts(8, 4, 8, 16))
    graph = decoder("narrow", sizes, 4, 8, "f32", True)
    segment_of = {op: i for i, s in enumerate(chain_of(graph).segments) for op in s.ops}
    pairs = routed_pairs(graph)
    assert len(pairs) == 2
    for dispatch, combine in pairs:
        assert segment_of[dispatch.name] == segment_of[combine.name]


def test_whole_blocks_are_not_cut():
    for name, ends in (("gpt2", "ln_1"), ("resnet50", "conv1"), ("t5-small", "layer_norm")):
        chain = chain_of(build(name, batch=1), 200, 200, whole_blocks=True)
        firsts = [segment.ops[0] for segment in chain.segments]
        inside = [op for op in firsts if any(part.isdecimal() for part in op.split(".")[:-1])]
        assert len(inside) > 10
        assert all(op.endswith(f".{ends}") for op in inside)
        blocks = {".".join(op.split(".")[:-1]).removesuffix(".layer.0") for op in inside}
        assert len(blocks) == len(inside)  # one cut before each
    flat = build("alexnet", batch=1)
    assert chain_of(flat, whole_blocks=True) == chain_of(flat)


def test_modules_beside_the_layers_are_whole_as_well():
    """A final norm of many small ops, embeddings; a module as large as many layers is none."""
    ops = []
    scopes = [("embed", 3), *((f"layers.{i}", 4) for i in range(6)), ("norm", 4), ("", 2)]
    g = GraphBuilder("model")
    x = g.input("x", (4, 8))
    for scope, count in scopes:
        for i in range(count):
            x = g.relu(x, name=f"{scope or 'root'}_{i}".replace(".", "_"))
            ops.append((x.name, scope, i))
    graph = g.finish(x)
    named = dict(zip([op.name for op in graph.ops], ops, strict=True))
    graph = replace(graph, ops=tuple(replace(op, scope=named[op.name][1]) for op in graph.ops))
    inside = inside_blocks(graph)
    for op in graph.ops:
        _, scope, place = named[op.name]
        assert inside.get(op.name) == (scope if scope and place else None)
    firsts = {s.ops[0] for s in chain_of(graph, whole_blocks=True).segments}
    assert firsts.isdisjoint(inside)
    wide = replace(graph, ops=tuple(
        replace(op, scope="tower" if op.scope == "" or "layers" in op.scope else op.scope)
        for op in graph.ops
    ))  # fmt: skip
    assert "tower" not in inside_blocks(wide).values()  # most of the model


def _graph_of(*modules):
    """A chain of ops, each in the module of that name."""
    g = GraphBuilder("model")
    x = g.input("x", (4, 8))
    for i in range(len(modules)):
        x = g.relu(x, name=f"op{i}")
    graph = g.finish(x)
    ops = zip(graph.ops, modules, strict=True)
    return replace(graph, ops=tuple(replace(op, scope=module) for op, module in ops))


@pytest.mark.parametrize(
    ("name", "inner", "count", "whole"),
    [
        ("block{}", ("a", "b", "act"), 4, "block{}"),
        ("net.down{}", ("conv.0", "conv.1", "conv.2"), 3, "net.down{}"),
        ("layer{}", ("0.a", "0.b", "1.a", "1.b"), 4, "layer{}.0"),
        ("tower{}", ("a", "b"), 2, "tower{}.a"),  # two are no row
        ("conv{}", ("",), 6, "conv{}"),
    ],
)
def test_modules_numbered_by_their_names_are_blocks(name, inner, count, whole):
    modules = [
        f"{name.format(i + 1)}.{part}".rstrip(".")
        for i in range(count)
        for part in inner
        for _ in range(2)
    ]
    blocks = set(inside_blocks(_graph_of("stem", *modules, "head")).values())
    assert {whole.format(i + 1) for i in range(count)} <= blocks
    outer = whole.format(1).rpartition(".")[0]
    assert not outer or outer not in blocks
    assert not any(block.startswith(f"{whole.format(1)}.") for block in blocks)


@pytest.mark.parametrize("unit_beyond", [200, 8])
@pytest.mark.parametrize("lead", [1, 2, 3])
def test_a_block_that_opens_with_a_cast_can_be_cut_before_it(unit_beyond, lead):
    """As captured norms do: what crosses is as large before the cast as behind it."""
    g = GraphBuilder("model")
    x = g.input("x", (4, 8))
    for i in range(lead):
        x = g.linear(x, 8, name=f"stem{i}")
    scopes = {}
    for layer in range(6):
        x = opened = g.relu(x, name=f"cast{layer}")
        inner = g.linear(g.relu(x, name=f"square{layer}"), 16, name=f"up{layer}")
        x = g.add(opened, g.linear(inner, 8, name=f"down{layer}"), name=f"sum{layer}")
        scopes.update({f"{n}{layer}": f"layers.{layer}" for n in
                       ("cast", "square", "up", "down", "sum")})  # fmt: skip
    graph = g.finish(g.linear(x, 8, name="head"))
    graph = replace(
        graph, ops=tuple(replace(op, scope=scopes.get(op.name, op.name)) for op in graph.ops)
    )
    opens = {f"cast{layer}" for layer in range(6)}
    whole = {s.ops[0] for s in chain_of(graph, 200, unit_beyond, whole_blocks=True).segments}
    assert opens <= whole
    assert whole.isdisjoint(inside_blocks(graph))
    free = {s.ops[0] for s in chain_of(graph, 200, unit_beyond).segments}
    assert len(opens & free) >= (6 if unit_beyond > 100 else 5)  # the first run may be in parts
