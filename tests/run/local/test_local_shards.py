"""Shards: what a rank holds, put together, is the whole; replicas are compared."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partita.costs.layouts import conversion
from partita.errors import ProgramError
from partita.graph import GraphBuilder
from partita.graph.backward import training_graph
from partita.graph.splits import PARTIAL, REPLICATE, TensorPlacement
from partita.plans import Axis

torch = pytest.importorskip("torch")
from partita.run.local.shards import (  # noqa: E402
    convert,
    flat_part,
    gate_rows,
    interval,
    join_flat,
    places,
    replica_error,
    shard,
    whole,
)
from partita.zoo.recurrent import lstm  # noqa: E402

ROWS, COLUMNS = TensorPlacement("shard", 0), TensorPlacement("shard", 1)


def numbers(*shape):
    return torch.arange(float(math.prod(shape))).reshape(shape).double()


def spans(size, *axes):
    return [interval(size, list(zip(axes, place, strict=True))) for place in places(axes)]


def test_an_axis_cuts_a_dim_in_equal_parts():
    assert spans(6, Axis("x", 3)) == [(0, 2), (2, 4), (4, 6)]


def test_weights_give_a_place_several_parts():
    assert spans(10, Axis("x", 3, (2, 2, 1))) == [(0, 4), (4, 8), (8, 10)]


def test_parts_of_a_size_that_does_not_divide_are_cut_in_proportion():
    assert spans(7, Axis("x", 3)) == [(0, 2), (2, 4), (4, 7)]
    assert spans(1, Axis("x", 2)) == [(0, 0), (0, 1)]


def test_the_first_axis_cuts_first():
    assert spans(8, Axis("x", 2), Axis("y", 2, (3, 1))) == [(0, 3), (3, 4), (4, 7), (7, 8)]


def test_ranks_are_numbered_row_by_row():
    assert places((Axis("x", 2), Axis("y", 2))) == ((0, 0), (0, 1), (1, 0), (1, 1))
    assert places(()) == ((),)


def test_a_share_of_hidden_units_has_their_rows_of_every_gate():
    weight = numbers(12, 1)  # 3 gates of 4 units
    axes = (Axis("x", 2),)
    rows = [shard(weight, (ROWS,), axes, place, 3)[:, 0].tolist() for place in places(axes)]
    assert rows == [[0, 1, 4, 5, 8, 9], [2, 3, 6, 7, 10, 11]]


@st.composite
def laid_out(draw):
    """A shape, a mesh and a layout of it, and by how many gates its rows go."""
    gates = draw(st.sampled_from([1, 1, 3, 4]))
    shape = (gates * draw(st.integers(1, 6)), *draw(st.lists(st.integers(1, 6), max_size=2)))
    axes = []
    for name in draw(st.sampled_from(["", "x", "xy", "xyz"])):
        weights = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
        axes.append(Axis(name, len(weights), tuple(weights) if draw(st.booleans()) else ()))
    one = st.sampled_from(
        [REPLICATE, PARTIAL, *(TensorPlacement("shard", i) for i in range(len(shape)))]
    )
    return shape, tuple(axes), tuple(draw(one) for _ in axes), gates


@settings(max_examples=200, deadline=None)
@given(case=laid_out())
def test_shards_put_together_are_the_whole(case):
    shape, axes, layout, gates = case
    value = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    shards = [shard(value, layout, axes, place, gates) for place in places(axes)]
    assert torch.equal(whole(shards, shape, layout, axes, gates), value)
    assert replica_error(shards, layout, axes) == 0


def test_partial_sums_are_added():
    axes = (Axis("x", 2), Axis("y", 2))
    shards = [torch.full((1,), float(n)) for n in (1, 2, 10, 20)]
    assert whole(shards, (2,), (ROWS, PARTIAL), axes).tolist() == [3, 30]
    assert whole(shards, (1,), (PARTIAL, PARTIAL), axes).tolist() == [33]


def test_replicas_that_differ_are_noticed():
    axes = (Axis("x", 2), Axis("y", 2))
    shards = [torch.tensor([2.0]), torch.tensor([8.0]), torch.tensor([2.0]), torch.tensor([6.0])]
    assert replica_error(shards, (REPLICATE, ROWS), axes) == 0.25
    assert replica_error(shards, (ROWS, REPLICATE), axes) > 0.25
    assert replica_error(shards, (ROWS, COLUMNS), axes) == 0


def test_replicas_of_unlike_shapes_or_without_a_number_differ():
    axes = (Axis("x", 2),)
    assert replica_error([torch.ones(2), torch.ones(3)], (REPLICATE,), axes) == math.inf
    bad = torch.tensor([math.nan])
    assert replica_error([torch.ones(1), bad], (REPLICATE,), axes) == math.inf
    masked = torch.tensor([-math.inf, 1.0])
    assert replica_error([masked, masked.clone()], (REPLICATE,), axes) == 0


@given(size=st.integers(0, 20), count=st.integers(1, 5))
def test_flat_parts_are_nearly_equal_and_join_again(size, count):
    own = numbers(size, 2)
    parts = [flat_part(own, i, count) for i in range(count)]
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1
    assert torch.equal(join_flat(parts, (size, 2)), own)


def test_weights_gradients_and_states_of_recurrent_ops_go_by_gates():
    graph = training_graph(lstm(2, 2, hidden=4, layers=1, dtype="bf16"), "adamw")
    rows = gate_rows(graph)
    weight = "lstm.0.weight_ih"
    own = {weight, f"{weight}.grad", f"{weight}.adamw.0", f"{weight}.adamw.1", f"{weight}.master",
           f"{weight}.next"}  # fmt: skip
    assert {name: rows.get(name) for name in own} == dict.fromkeys(own, 4)
    assert rows["lstm.0.bias_hh"] == 4
    assert "loss" not in rows
    assert all(name.startswith("lstm.0.") for name in rows)


def test_both_directions_of_a_layer_are_split_apart_and_not_by_gates():
    g = GraphBuilder("both")
    y = g.recurrent(g.input("x", (2, 3, 4)), 4, "gru", bidirectional=True)
    assert gate_rows(g.finish(y)) == {}


def convert_all(shards, shape, have, need, axes, gates=1):
    """Step by step, as conversions of layouts say."""
    layout = have
    for step in conversion(1.0, [axis.size for axis in axes], have, need):
        shards = convert(shards, shape, layout, step.layout, axes, gates)
        layout = step.layout
    return shards


@settings(max_examples=200, deadline=None)
@given(case=laid_out(), data=st.data())
def test_conversions_move_what_the_layouts_say(case, data):
    """Where no dim is sharded twice, every step is a collective along one axis."""
    shape, axes, have, gates = case
    others = [REPLICATE, *(TensorPlacement("shard", i) for i in range(len(shape)))]
    need = tuple(data.draw(st.sampled_from([*others, old])) for old in have)
    value = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    shards = [shard(value, have, axes, place, gates) for place in places(axes)]
    try:
        outcome = convert_all(shards, shape, have, need, axes, gates)
    except ProgramError as error:
        dims = [p.dim for p in (*have, *need) if p.kind == "shard"]
        assert len(dims) > len(set(dims))
        assert "convert the later axes that shard the same dim first" in str(error)
        return
    right = [shard(value, need, axes, place, gates) for place in places(axes)]
    for mine, other, place in zip(outcome, right, places(axes), strict=True):
        torch.testing.assert_close(mine, other, msg=str(place))


def test_an_all_reduce_adds_along_its_line_only():
    axes = (Axis("x", 2), Axis("y", 2))
    shards = [torch.full((1,), float(n)) for n in (1, 2, 10, 20)]
    outcome = convert(shards, (1,), (REPLICATE, PARTIAL), (REPLICATE, REPLICATE), axes)
    assert [f.item() for f in outcome] == [3, 3, 30, 30]
    outcome = convert(shards, (1,), (PARTIAL, PARTIAL), (REPLICATE, PARTIAL), axes)
    assert [f.item() for f in outcome] == [11, 22, 11, 22]


def test_copies_become_one_summand():
    axes = (Axis("x", 2),)
    outcome = convert([torch.ones(1), torch.ones(1)], (1,), (REPLICATE,), (PARTIAL,), axes)
    assert [f.item() for f in outcome] == [1, 0]


def test_gathering_the_outer_of_two_axes_of_one_dim_first_is_refused():
    axes = (Axis("x", 2), Axis("y", 2))
    shards = [shard(numbers(8), (ROWS, ROWS), axes, place) for place in places(axes)]
    with pytest.raises(ProgramError) as caught:
        convert(shards, (8,), (ROWS, ROWS), (REPLICATE, ROWS), axes)
    assert str(caught.value) == (
        "a step from S(0) S(0) to R S(0): rank 0 needs elements that no rank of its line along "
        "axis 'x' holds; convert the later axes that shard the same dim first"
    )
    outcome = convert(shards, (8,), (ROWS, ROWS), (ROWS, REPLICATE), axes)
    outcome = convert(outcome, (8,), (ROWS, REPLICATE), (REPLICATE, REPLICATE), axes)
    assert all(torch.equal(f, numbers(8)) for f in outcome)


def test_a_step_changes_one_axis():
    axes = (Axis("x", 1), Axis("y", 1))
    with pytest.raises(
        ProgramError, match="from P P to R R changes 2 axes; convert one axis after"
    ):
        convert([torch.ones(1)], (1,), (PARTIAL, PARTIAL), (REPLICATE, REPLICATE), axes)
