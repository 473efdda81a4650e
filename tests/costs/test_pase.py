"""PaSE's graphs and costs are PaSE's: equal to its own tables, choice by choice."""

import itertools
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partita.costs.pase import (
    COSTS,
    choices,
    describe,
    edge_flop,
    flop_per_word,
    graph_problem,
    layouts,
    op_flop,
    pase_problem,
)
from partita.errors import GraphError, ModelError, ProblemError
from partita.problems.sharding import ShardingSolution, evaluate, read, write_npz
from partita.search.sharding import SEARCHES
from partita.zoo.pase_graphs import GRAPHS, pase_graph
from partita.zoo.pase_ops import PaseBuilder, PaseDim, PaseGraph, PaseOp, PaseTensor

DATA = Path(__file__).parent.parent / "data" / "sharding"
FILES = [path.stem for path in sorted(DATA.glob("*.npz"))]
RUNS = json.loads((DATA / "pase_runs.json").read_text())["runs"]
TOO_LONG = {  # for a test: tables of more than some ten million cells, or too many for anyone
    "transformer_p16",
    "inception3_p64",
    "inception3_p128",
    "densenet-6-6-6-6-dense_p4",
    "densenet-6-12-24-16-dense_p4",
    "densenet-6-12-24-16-dense_p8",
}


def run_id(run):
    return f"{run['graph']}_p{run['procs']}"


RECORDED = [run for run in RUNS if "costs_moment" in run]
SOLVED = [run for run in RUNS if "optimum" in run and run_id(run) not in TOO_LONG]


@pytest.fixture(scope="module", params=FILES)
def pair(request):
    """A problem saved from PaSE, the one built here, its ops, and our choices as its."""
    theirs = read(DATA / f"{request.param}.npz")
    meta = json.loads(theirs.meta)
    ours, ops = pase_problem(meta["graph"], meta["p"], meta["batch"], meta["flops_T"])
    return theirs, ours, ops, [np.lexsort(splits.T[::-1]) for splits in theirs.splits]


class TestRecordedProblem:
    """Eight files, entry by entry."""

    def test_ops_are_the_same_loops_in_the_same_order(self, pair):
        theirs, _, ops, _ = pair
        meta = json.loads(theirs.meta)
        assert [op.kind for op in ops] == meta["ops"]
        assert [[dim.extent for dim in op.dims] for op in ops] == meta["dom"]

    def test_choices_and_their_costs_are_the_same(self, pair):
        theirs, ours, _, orders = pair
        for op, order in enumerate(orders):
            np.testing.assert_array_equal(ours.splits[op], theirs.splits[op][order])
            np.testing.assert_allclose(ours.costs[op], theirs.costs[op][order], rtol=1e-12)

    def test_tensors_cost_the_same_between_any_two_choices(self, pair):
        theirs, ours, _, orders = pair
        assert ours.edges == theirs.edges
        assert len(ours.matrices) == len(theirs.matrices)
        for edge, (src, dst) in enumerate(ours.edges):
            matrix = theirs.matrices[theirs.matrix_of[edge]][np.ix_(orders[src], orders[dst])]
            np.testing.assert_allclose(ours.matrices[ours.matrix_of[edge]], matrix, rtol=1e-12)

    def test_the_recorded_strategy_costs_what_was_recorded(self, pair):
        theirs, ours, _, orders = pair
        chosen = zip(orders, theirs.known.assignment, strict=True)
        solution = ShardingSolution(tuple(order.tolist().index(x) for order, x in chosen))
        assert evaluate(ours, solution) == pytest.approx(theirs.known_cost, rel=1e-12)


@pytest.mark.parametrize("run", RECORDED, ids=run_id)
def test_every_table_has_the_moments_of_the_recorded_one(run):
    problem, _ = pase_problem(run["graph"], run["procs"])
    assert (problem.num_ops, len(problem.edges)) == (run["num_ops"], run["num_edges"])
    ranks = [np.arange(1.0, count + 1) for count in problem.num_choices]
    splits = [rank @ rows.sum(axis=1) for rank, rows in zip(ranks, problem.splits, strict=True)]
    costs = [rank @ cost for rank, cost in zip(ranks, problem.costs, strict=True)]
    edges = [
        ranks[src] @ problem.matrices[index] @ ranks[dst]
        for (src, dst), index in zip(problem.edges, problem.matrix_of, strict=True)
    ]
    for name, values in (("splits", splits), ("costs", costs), ("edges", edges)):
        moment = sum(place * value for place, value in enumerate(values, start=1))
        assert moment == pytest.approx(run[f"{name}_moment"], rel=1e-12), name


@pytest.mark.parametrize("run", RUNS, ids=run_id)
def test_an_op_has_at_most_as_many_choices_as_in_pase(run):
    problem, _ = pase_problem(run["graph"], run["procs"])
    assert max(problem.num_choices) == run["most_choices"]


@pytest.mark.parametrize("run", SOLVED, ids=run_id)
def test_the_optimum_is_the_one_that_was_found(run):
    problem, _ = pase_problem(run["graph"], run["procs"])
    result = SEARCHES["pase"](problem)
    assert result.status == "optimal"
    assert result.objective == pytest.approx(run["optimum"], rel=1e-12)


class TestCostsByHand:
    """Ops small enough to price on paper, at 10 FLOP a word."""

    @staticmethod
    def price(op, split=""):
        row = [
            int(ways[1]) if (ways := re.search(f"{d.name}/(\\d)", split)) else 1 for d in op.dims
        ]
        return op_flop(op, np.array([row]), 10.0)[0]

    @staticmethod
    def source(g, *shape):
        letters = "zyxwvuts"[: len(shape)]
        dims = tuple(PaseDim(*dim) for dim in zip(letters, shape, strict=True))
        return g.add("source", "Elementwise", dims, (shape, tuple(letters)))

    def only(self, shape, add):
        g = PaseBuilder()
        return g.ops[add(g, self.source(g, *shape))]

    def test_a_linear_layer_adds_what_a_split_dim_summed(self):
        op = self.only((8, 2), lambda g, x: g.fc("fc", x, 4, "bk", pointwise=1))
        assert self.price(op) == 3 * 8 * 4 * 2 + 3 * 8 * 4
        assert self.price(op, "b/2") == 96 + 48 + 10 * 2 * (4 * 2) / 2  # the weights' gradient
        assert self.price(op, "n/2") == 96 + 48 + 10 * 2 * (8 * 2) / 2  # the input's gradient
        assert self.price(op, "k/2") == 96 + 96 + 10 * 2 * (8 * 4) / 2  # the result

    def test_a_batch_of_products_is_that_many(self):
        sizes = {"b": 2, "m": 2, "n": 2, "k": 4}
        op = self.only((2, 2, 4), lambda g, x: g.einsum("e", "bmk,bkn->bmn", (x,), sizes))
        assert self.price(op) == 2 * 3 * 2 * 2 * 4
        assert self.price(op, "b/2") == 48
        assert self.price(op, "k/2") == 2 * (24 + 10 * 2 * 4 / 2)

    def test_a_convolution_is_the_product_of_its_unfolded_image(self):
        op = self.only((4, 4, 3, 3), lambda g, x: g.conv("conv", x, 4, 3))
        assert self.price(op) == 3 * 4 * 4 * 36
        assert self.price(op, "n/2") == 864 + 10 * 2 * (4 * 36) / 2
        assert self.price(op, "b/2 c/2") == 432 + 10 * 2 * 8 / 2 + 10 * 2 * 72 / 2

    def test_an_embedding_is_a_dense_product_with_the_vocabulary(self):
        g = PaseBuilder()
        op = g.ops[g.embedding("table", (2, 3), 100, 5)]
        assert self.price(op) == 3 * (2 * 3) * 100 * 5

    def test_a_recurrent_state_moves_in_every_layer_and_step(self):
        op = self.only((2, 3, 2), lambda g, x: g.lstm("lstm", x, 2))
        assert self.price(op) == 2 * (3 * 6 * 8 * 4 + 9 * 6 * 8)
        assert self.price(op, "l/2") == self.price(op) / 2
        products = 2 * (3 * 6 * 4 * 4 + 9 * 6 * 4 + 10 * 2 * (6 * 4) / 2)
        assert self.price(op, "n/2") == products + 2 * 3 * 10 * (2 * 2 - 2 * 1)

    def test_split_layers_wait_for_each_other_s_state(self):
        op = self.only((2, 3, 2), lambda g, x: g.lstm("lstm", x, 2))
        products = 3 * 6 * 4 * 4 + 9 * 6 * 4 + 10 * 2 * (6 * 4) / 2
        assert self.price(op, "l/2 n/2") == products + 2 * 3 * 10 * (2 * 2 - 2 * 1)

    def test_a_split_pooling_fetches_a_halo_of_its_input(self):
        op = self.only((2, 4, 8, 8), lambda g, x: g.pool("pool", x, 2, 2))
        assert self.price(op) == 2 * 4 * 4 * 4
        assert self.price(op, "h/2") == 64 + 10 * 2 * 4 * ((4 + 2) * 8 - 4 * 8)
        assert self.price(op, "h/2 w/2") == 32 + 10 * 2 * 4 * ((4 + 2) * (4 + 2) - 4 * 4)

    def test_a_norm_adds_statistics_along_its_axis_and_parameters_across(self):
        op = self.only((2, 4), lambda g, x: g.norm("norm", x, "bd", "d"))
        assert self.price(op) == 16 * 8
        assert self.price(op, "d/2") == 64 + 4 * 10 * 2 * 2 / 2
        assert self.price(op, "b/2") == 64 + 4 * 10 * 2 * 4 / 2

    def test_a_batch_norm_has_its_statistics_along_the_batch(self):
        op = self.only((2, 4, 1, 1), lambda g, x: g.batchnorm("norm", x))
        assert self.price(op, "b/2") == 64 + 4 * 10 * 2 * 4 / 2
        assert self.price(op, "c/2") == 64 + 4 * 10 * 2 * 2 / 2

    def test_a_softmax_pays_for_the_square_of_its_axis(self):
        op = self.only((2, 4), lambda g, x: g.softmax("softmax", x, "bd", "d"))
        assert self.price(op) == 4 * 8 + 8 * 4
        assert self.price(op, "d/2") == 16 + 16 + 2 * 10 * 2 * 2 / 2 + 10 * 2 * (2 * 4) / 2

    def test_a_loss_over_split_classes_sends_two_words_a_row(self):
        op = self.only((2, 4), lambda g, x: g.loss("loss", x, "bn"))
        assert self.price(op) == 4 * 8 + 2 * 2
        assert self.price(op, "n/2") == 16 + 4 + 10 * 2 * 2
        assert self.price(op, "b/2") == 16 + 2

    def test_a_mean_costs_only_its_reduction(self):
        op = self.only((2, 4, 2, 2), lambda g, x: g.mean("mean", x))
        assert self.price(op, "b/2 c/2") == 0
        assert self.price(op, "h/2") == 10 * 2 * 16 / 2

    def test_elementwise_work_counts_its_activation(self):
        op = self.only((2, 4), lambda g, x: g.elementwise("add", (x,), "bd", pointwise=1))
        assert self.price(op, "b/2") == 2 * 4

    def test_what_only_moves_is_free(self):
        op = self.only((2, 4, 2, 2), lambda g, x: g.concat("concat", (x, x)))
        assert self.price(op, "b/2 h/2") == 0


@st.composite
def loops(draw):
    extents = draw(st.lists(st.integers(1, 24), min_size=1, max_size=4))
    splits = draw(st.lists(st.booleans(), min_size=len(extents), max_size=len(extents)))
    kind = draw(st.sampled_from(["Elementwise", "Ravel"]))
    dims = [
        PaseDim(letter, extent, "", may)
        for letter, extent, may in zip("abcd", extents, splits, strict=False)
    ]
    return PaseOp("op", kind, tuple(dims), PaseTensor((), ()))


def runs_of_elements(extents, row):
    """Whether each share of a tensor split like this is one run of its elements."""
    number = np.arange(math.prod(extents)).reshape(extents)
    shares = [number]
    for dim, ways in enumerate(row):
        shares = [part for share in shares for part in np.split(share, ways, axis=dim)]
    return all(np.ptp(share) + 1 == share.size for share in shares)


@settings(deadline=None)
@given(op=loops(), procs=st.integers(1, 12), cutoff=st.integers(1, 5))
def test_choices_are_all_legal_splits_in_ascending_order(op, procs, cutoff):
    expected = []
    for row in itertools.product(*(range(1, dim.extent + 1) for dim in op.dims)):
        legal = all(
            dim.extent % ways == 0 and (ways == 1 or (dim.splits and dim.extent / ways >= cutoff))
            for dim, ways in zip(op.dims, row, strict=True)
        )
        if not legal or math.prod(row) > procs:
            continue
        if op.kind != "Ravel" or runs_of_elements([dim.extent for dim in op.dims], row):
            expected.append(list(row))
    assert choices(op, procs, cutoff).tolist() == expected


@settings(deadline=None)
@given(
    dims=st.lists(
        st.tuples(st.integers(1, 64), st.integers(1, 8), st.integers(1, 8)), min_size=1, max_size=4
    )
)
def test_a_tensor_costs_what_its_reader_lacks_there_and_back(dims):
    shape, made, read = zip(*dims, strict=True)
    share = math.prod(extent / ways for extent, _, ways in dims)
    common = math.prod(extent / max(before, after) for extent, before, after in dims)
    if math.prod(read) > math.prod(made):
        common = 0
    cost = edge_flop(shape, np.array([made]), np.array([read]), 7.0)
    assert cost.shape == (1, 1)
    assert cost[0, 0] == pytest.approx(2 * 7.0 * max(0, share - common), rel=1e-12, abs=1e-6)


def test_a_merged_dim_is_divided_by_all_its_loops():
    op = pase_graph("alexnet").ops[8]
    assert op.name == "flatten.ravel"
    assert layouts(op, np.array([[4, 1, 1, 1], [2, 3, 1, 1]]), op.output.access).tolist() == [
        [4],
        [6],
    ]


def test_a_single_number_is_never_sent():
    op = PaseOp("sum", "Elementwise", (PaseDim("b", 4),), PaseTensor((), ()))
    whole = layouts(op, choices(op, 4, 1), op.output.access)
    assert edge_flop((), whole, whole, 10.0).tolist() == [[0.0] * 3] * 3


class TestHabits:
    """What PaSE does that one would not expect, and its numbers depend on."""

    def test_of_several_tensors_between_two_ops_only_the_last_counts(self):
        problem, ops = pase_problem("transformer", 4)
        assert sum(len(op.inputs) for op in ops) - len(problem.edges) == 24
        scores = next(v for v, op in enumerate(ops) if op.name == "encoder.0.self.scores")
        query, key = ops[scores].inputs
        assert query.source == key.source
        made = layouts(ops[key.source], problem.splits[key.source], tuple("bhle"))
        read = layouts(ops[scores], problem.splits[scores], key.access)
        edge = problem.edges.index((key.source, scores))
        matrix = problem.matrices[problem.matrix_of[edge]]
        np.testing.assert_array_equal(matrix, edge_flop(key.shape, made, read, 5000.0))

    @pytest.mark.parametrize("graph", ["alexnet", "resnet101", "inception3"])
    def test_a_device_of_a_cnn_keeps_four_of_a_dim(self, graph):
        problem, ops = pase_problem(graph, 128)
        for op, splits in zip(ops, problem.splits, strict=True):
            extents = np.array([dim.extent for dim in op.dims])
            assert ((splits == 1) | (extents / splits >= 4)).all()
        assert problem.splits[0][:, 0].max() == 32

    def test_a_sequence_model_splits_its_batch_to_single_samples(self):
        problem, _ = pase_problem("transformer", 128)
        assert problem.splits[0][:, 0].max() == 128

    def test_a_convolution_never_splits_its_image(self):
        problem, ops = pase_problem("inception3", 16)
        for op, splits in zip(ops, problem.splits, strict=True):
            if op.kind == "Conv":
                assert (splits[:, 2:4] == 1).all()

    def test_what_an_einsum_sums_comes_last_in_the_order_of_its_first_input(self):
        ops = {op.name: op for op in pase_graph("transformer").ops}
        assert "".join(dim.name for dim in ops["encoder.0.self.out"].dims) == "bldhe"
        assert "".join(dim.name for dim in ops["decoder.5.cross.qkv"].dims) == "qbhled"

    def test_three_inputs_make_a_batch_of_products_and_one_makes_a_wide_one(self):
        ops = {op.name: op for op in pase_graph("transformer").ops}
        assert ops["decoder.0.self.qkv"].dims[0] == PaseDim("q", 3, "N")
        assert ops["decoder.0.cross.qkv"].dims[0] == PaseDim("q", 3, "B")

    def test_a_word_has_eight_bytes(self):
        assert flop_per_word(10.0, 16.0) == 5000.0
        assert flop_per_word(10.0, 8.0) == 10000.0


class TestSettings:
    def test_one_device_has_one_choice_and_nothing_to_send(self):
        problem, ops = pase_problem("transformer", 1)
        assert problem.num_choices == (1,) * len(ops)
        assert all((matrix == 0).all() for matrix in problem.matrices)

    @pytest.mark.parametrize("graph", GRAPHS)
    def test_any_number_of_devices_and_any_batch_will_do(self, graph):
        for procs, batch in ((7, 128), (6, 1), (5, 30)):
            problem, ops = pase_problem(graph, procs, batch)
            assert max(splits.prod(axis=1).max() for splits in problem.splits) <= procs
            assert ops[0].dims[0].extent == batch

    def test_work_of_one_device_grows_with_the_batch(self):
        small, _ = pase_problem("resnet101", 1, batch=32)
        large, _ = pase_problem("resnet101", 1, batch=64)
        for few, many in zip(small.costs, large.costs, strict=True):
            assert many == pytest.approx(2 * few)

    def test_faster_devices_make_words_dearer(self):
        slow, _ = pase_problem("alexnet", 4, tflops=10.0, gbps=16.0)
        fast, _ = pase_problem("alexnet", 4, tflops=30.0, gbps=8.0)
        for before, after in zip(slow.matrices, fast.matrices, strict=True):
            np.testing.assert_allclose(after, 6 * before)

    def test_a_flat_tensor_of_one_sample_is_split_by_channels(self):
        op = pase_graph("alexnet", batch=1).ops[8]
        assert choices(op, 4, 4).tolist() == [[1, 1, 1, 1], [1, 2, 1, 1], [1, 4, 1, 1]]

    def test_densenet_has_any_four_blocks(self):
        chain = pase_graph("densenet-2-1-3-1-chain")
        dense = pase_graph("densenet-2-1-3-1-dense")
        assert [op.name for op in chain.ops] == [op.name for op in dense.ops]
        third = [op.name for op in dense.ops].index("block3.3.concat")
        assert [len(graph.ops[third].inputs) for graph in (chain, dense)] == [2, 4]

    def test_where_it_comes_from_is_saved_with_the_problem(self, tmp_path):
        problem, ops = pase_problem("rnnlm", 4, 64, 20.0, 12.5)
        again = read(write_npz(problem, tmp_path / "rnnlm.npz"))
        assert again.names == tuple(op.name for op in ops)
        meta = json.loads(again.meta)
        assert (meta["graph"], meta["p"], meta["batch"]) == ("rnnlm", 4, 64)
        assert (meta["flops_T"], meta["bw_GBs"], meta["flop_per_word"]) == (20.0, 12.5, 12800.0)


class TestNames:
    def test_a_strategy_reads_as_splits_by_name(self):
        problem, ops = pase_problem("alexnet", 8)
        rows = problem.splits[0].tolist()
        chosen = [rows.index([4, 1, 1, 1, 1, 1, 2]), *[0] * (len(ops) - 1)]
        lines = describe(problem, ops, ShardingSolution(tuple(chosen)))
        assert lines[0] == "conv1: b/4 n/2"
        assert lines[1] == "pool1: whole"

    @pytest.mark.parametrize("graph", [*GRAPHS, "densenet-6-12-24-16-dense"])
    def test_every_op_has_a_name_of_its_own_and_a_price(self, graph):
        ops = pase_graph(graph).ops
        assert len({op.name for op in ops}) == len(ops)
        assert {op.kind for op in ops} <= set(COSTS)

    def test_the_answer_for_alexnet_is_one_weird_trick(self):
        problem, ops = pase_problem("alexnet", 8)
        lines = describe(problem, ops, SEARCHES["pase"](problem).solution)
        assert lines[0] == "conv1: b/8"  # the batch for convolutions, channels for the rest
        assert all("n/" in line or "k/" in line for line in lines if line.startswith("fc"))


class TestRefusals:
    @pytest.mark.parametrize(
        ("settings", "error", "words"),
        [
            ({"graph": "resnet"}, ModelError, "did you mean resnet101"),
            ({"graph": "densenet-6-12-24-dense"}, ModelError, "densenet-6-12-24-16-dense"),
            ({"batch": 0}, ModelError, "batch: is 0; give at least 1"),
            ({"batch": 2**50}, GraphError, "an extent of 1 to"),
            ({"procs": 0}, ProblemError, "procs: is 0; give at least one device"),
            ({"tflops": 0.0}, ProblemError, "tflops: is 0.0; give a positive number"),
            ({"gbps": math.nan}, ProblemError, "gbps: is nan; give a positive number"),
            ({"tflops": 1e300, "gbps": 1e-300}, ProblemError, "found inf FLOP per word"),
            ({"graph": "transformer", "procs": 100_000}, ProblemError, "give fewer devices"),
        ],
    )
    def test_settings_that_make_no_sense(self, settings, error, words):
        given = {"graph": "alexnet", "procs": 4} | settings
        with pytest.raises(error, match=re.escape(words)):
            pase_problem(**given)

    def test_an_op_of_an_unknown_kind(self):
        op = PaseOp("x", "Convolution", (PaseDim("b", 4),), PaseTensor((4,), ("b",)))
        with pytest.raises(ProblemError, match="x: is a Convolution; known are Concat"):
            graph_problem(PaseGraph("mine", (op,), 1), 4)

    @pytest.mark.parametrize(
        ("make", "words"),
        [
            (lambda: PaseDim("bb", 4), "found the dim 'bb' of 4"),
            (lambda: PaseDim("b", 0), "found the dim 'b' of 0"),
            (lambda: PaseTensor((4, 2), ("b",)), "a tensor of 2 dims divided as one of 1"),
            (lambda: linear(access=("z",)), "divides tensors by z"),
            (lambda: PaseGraph("g", (), 1), "g: has no ops"),
            (lambda: PaseGraph("g", (linear(),), 0), "g: has the cutoff 0"),
            (lambda: PaseGraph("g", (linear(), linear()), 1), "two ops have one name"),
            (lambda: PaseGraph("g", (linear(source=0),), 1), "op 0 reads what op 0 makes"),
            (lambda: PaseGraph("g", (linear(), linear("y", 5, 0)), 1), "reads a tensor of (5,)"),
        ],
    )
    def test_graphs_that_are_none(self, make, words):
        with pytest.raises(GraphError, match=re.escape(words)):
            make()


def linear(name="x", extent=4, source=None, access=("b",)):
    """A copy of a vector: whole, or of what another op made."""
    read = () if source is None else (PaseTensor((extent,), access, source),)
    made = PaseTensor((extent,), access)
    return PaseOp(name, "Elementwise", (PaseDim("b", extent),), made, read)


def test_a_graph_written_by_hand_is_a_problem_too():
    g = PaseBuilder()
    image = g.conv("conv", (8, 4, 8, 8), 16, 3, padding=1)
    g.fc("fc", g.mean("mean", image), 10, "bc")
    problem = graph_problem(g.finish("mine", 1), procs=4, word=100.0)
    brute, pase = (SEARCHES[name](problem) for name in ("brute", "pase"))
    assert brute.objective == pytest.approx(pase.objective)
    assert json.loads(problem.meta)["graph"] == "mine"
