"""The sharding problem of a model: its choices are legal, its costs those of the layouts."""

import itertools
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from partita.cluster import resolve
from partita.costs.layouts import token_groups
from partita.costs.sharding import SplitChoice, Weights, dims_of, sharding_model
from partita.graph import GraphBuilder, training_graph
from partita.graph.splits import check_split
from partita.lower.ops import lower_stage
from partita.meaning import Purpose
from partita.plans import Axis, Mesh, OpSplit, Stage
from partita.problems.sharding import evaluate
from partita.search.sharding import SEARCHES
from partita.zoo import build

CLUSTER = resolve("4xA100")
LINE = Mesh((Axis("x", 4),), (0, 1, 2, 3))
SQUARE = Mesh((Axis("x", 2), Axis("y", 2)), (0, 1, 2, 3))


def mlp(batch=8, width=64):
    g = GraphBuilder("mlp")
    x = g.relu(g.linear(g.input("x", (batch, width)), 4 * width, "up"))
    return training_graph(g.finish(g.linear(x, width, "down")))


@pytest.mark.parametrize("mesh", [LINE, SQUARE], ids=str)
def test_every_choice_is_a_legal_split(mesh):
    graph = training_graph(build("bert-base@128", batch=8))
    for op in graph.ops:
        if op.phase == "forward":
            outcome = dims_of(graph.call(op), mesh.axes)
            assert ("",) * len(mesh.axes) in outcome
            for dims in outcome:
                parts = Counter()
                for dim, axis in zip(dims, mesh.axes, strict=True):
                    parts[dim] = (parts[dim] or 1) * axis.parts
                parts.pop("", None)
                check_split(graph.call(op), parts)


def test_an_axis_of_one_splits_nothing():
    graph = mlp()
    assert dims_of(graph.call(graph.op("up")), (Axis("x", 1),)) == (("",),)


def test_a_prime_number_of_devices_leaves_indivisible_dims_whole():
    graph = mlp()
    assert dims_of(graph.call(graph.op("up")), (Axis("x", 7),)) == (("",),)


def test_megatron_pays_one_sum_forward_and_one_backward():
    """Columns then rows: nothing between the layers, the sums before and after."""
    graph = mlp(batch=4096, width=1024)
    model = sharding_model(graph, CLUSTER, LINE)
    index = {name: i for i, name in enumerate(model.ops)}
    megatron = {"up": ("n",), "relu": ("c",), "down": ("k",)}
    chosen = [model.choices[index[op]].index(SplitChoice(dims)) for op, dims in megatron.items()]
    between = [
        model.matrices[m][chosen[u], chosen[v]]
        for (u, v), m in zip(model.edges, model.matrix_of, strict=True)
    ]
    assert between == [0.0, 0.0]
    repeated = [model.choices[index[op]].index(SplitChoice(("",))) for op in megatron]
    assert evaluate_of(model, chosen) < evaluate_of(model, repeated)


def evaluate_of(model, assignment):
    from partita.problems.sharding import ShardingSolution

    return evaluate(model.problem(), ShardingSolution(tuple(assignment)))


def test_equal_layers_share_their_matrices():
    model = sharding_model(training_graph(build("gpt2", batch=8)), CLUSTER, LINE)
    assert len(model.edges) > 150
    assert len(model.matrices) < 40


def test_the_compute_bound_is_below_every_assignment():
    model = sharding_model(mlp(), CLUSTER, SQUARE)
    best = SEARCHES["brute"](model.problem())
    assert best.objective is not None
    assert model.compute_bound_s() <= best.objective
    assert SEARCHES["pase"](model.problem()).objective == pytest.approx(best.objective)


def test_costs_are_finite_and_no_choice_is_free():
    model = sharding_model(training_graph(build("moe@64", batch=8)), CLUSTER, LINE)
    assert all(np.isfinite(cost).all() for cost in model.problem().costs)
    assert all((matrix >= 0).all() for matrix in model.matrices)
    forbids = {edge for edge, m in zip(model.edges, model.matrix_of, strict=True)
               if np.isinf(model.matrices[m]).any()}  # fmt: skip
    names = {(model.ops[u].rsplit(".", 1)[1], model.ops[v].rsplit(".", 1)[1]) for u, v in forbids}
    assert names == {("dispatch", "combine")}
    assert all(len(set(c)) == len(c) for c in model.choices)


def experts(batch=4):
    """Tokens routed to two experts and back, with little else."""
    g = GraphBuilder("experts")
    x = g.input("x", (batch, 6))
    gates = g.one("moe_router", x, g.parameter("gate.weight", (2, 6)), name="gate", top_k=1)
    tokens = g.one("moe_dispatch", x, gates, name="dispatch", top_k=1)
    y = g.one("expert_linear", tokens, g.parameter("up.weight", (2, 6, 6)), name="up")
    return training_graph(g.finish(g.one("moe_combine", y, gates, name="combine", top_k=1)))


class TestRouting:
    """A dispatch to experts and its combine route the same groups of tokens."""

    @pytest.mark.parametrize("search", SEARCHES)
    @pytest.mark.parametrize("blocking", [0.0, 1.0])
    def test_no_search_takes_them_apart(self, search, blocking):
        line = Mesh((Axis("x", 2),), (0, 1))
        model = sharding_model(experts(), CLUSTER, line, levels=(0,))
        # Cheap one way there, cheap another way back: only the tie keeps them together.
        problem = model.problem(Weights(compute=0.0, hidden=0.0, blocking=blocking))
        costs = list(problem.costs)
        numbers = [model.ops.index(op) for op in ("dispatch", "combine")]
        for number, liked in zip(numbers, ("b", "e"), strict=True):
            own = np.array([choice.dims != (liked,) for choice in model.choices[number]])
            costs[number] = own * 1e3
        solution = SEARCHES[search](replace(problem, costs=tuple(costs))).solution
        groups = self.groups(model, line, solution.assignment)
        assert groups["dispatch"] == groups["combine"]

    def groups(self, model, mesh, assignment):
        graph = experts()
        return {
            split.op: token_groups(graph.call(graph.op(split.op)), split.dims, mesh.axes)
            for split in model.splits(assignment)
            if split.op in ("dispatch", "combine")
        }

    def test_exactly_the_pairs_of_equal_groups_are_allowed(self):
        model = sharding_model(experts(), CLUSTER, SQUARE)
        index = {name: i for i, name in enumerate(model.ops)}
        edge = (index["dispatch"], index["combine"])
        (number,) = [m for e, m in zip(model.edges, model.matrix_of, strict=True) if e == edge]
        for i, row in enumerate(model.choices[edge[0]]):
            for j, column in enumerate(model.choices[edge[1]]):
                alike = row.dims.count("b") == column.dims.count("b")  # the shares are even
                assert model.matrices[number][i, j] == (0 if alike else np.inf)

    def test_weights_of_nothing_keep_what_is_forbidden(self):
        problem = sharding_model(experts(), CLUSTER, LINE).problem(Weights(blocking=0.0))
        assert not any(np.isnan(matrix).any() for matrix in problem.matrices)
        assert any(np.isinf(matrix).any() for matrix in problem.matrices)


def test_tied_weights_bind_their_two_users():
    model = sharding_model(training_graph(build("gpt2", batch=8)), CLUSTER, LINE)
    index = {name: i for i, name in enumerate(model.ops)}
    pair = {index["wte"], index["lm_head"]}
    assert any(set(edge) == pair for edge in model.edges)


def test_mesh_lines_differ_in_one_coordinate():
    assert SQUARE.groups(0) == ((0, 2), (1, 3))
    assert SQUARE.groups(1) == ((0, 1), (2, 3))
    cube = Mesh((Axis("a", 2), Axis("b", 3), Axis("c", 2)), tuple(range(12)))
    for axis, size in enumerate((2, 3, 2)):
        lines = cube.groups(axis)
        assert all(len(line) == size for line in lines)
        assert sorted(itertools.chain(*lines)) == list(range(12))


class TestKeepingParameters:
    def test_only_copied_parameters_can_be_kept_in_shares(self):
        model = sharding_model(mlp(), CLUSTER, LINE)
        up = model.choices[model.ops.index("up")]
        assert SplitChoice(("b",), 3) in up
        assert SplitChoice(("n",), 3) not in up  # columns: nothing is held twice

    def test_shares_hold_less_and_send_more(self):
        model = sharding_model(mlp(), CLUSTER, LINE)
        index = model.ops.index("up")
        choices, table = model.choices[index], model.tables[index]
        copies, states, shares = (choices.index(SplitChoice(("b",), level)) for level in (0, 1, 3))
        assert table.memory[copies] > table.memory[states] > table.memory[shares]
        assert table.hidden[shares] > table.hidden[copies]

    def test_a_price_on_bytes_makes_the_answer_thriftier(self):
        model = sharding_model(training_graph(build("bert-base@64", batch=8)), CLUSTER, LINE)
        held = []
        for price in (0.0, 1e-12, 1e-9):
            sharding_solution = SEARCHES["pase"](model.problem(Weights(s_per_byte=price))).solution
            held.append(model.memory_bytes(sharding_solution.assignment))
        assert held[0] >= held[1] >= held[2]
        assert held[2] < 0.95 * held[0]
        assert model.memory_bound_bytes() <= held[2] * (1 + 1e-9)

    def test_splits_and_assignments_are_inverse(self):
        model = sharding_model(mlp(), CLUSTER, SQUARE)
        assignment = tuple(len(choices) - 1 for choices in model.choices)
        assert model.assignment(model.splits(assignment)) == assignment


class TestPricesAreThoseOfTheSimulator:
    """What a sharding model charges for reductions and gathers is what lowering makes of them."""

    @pytest.mark.parametrize("spec", ["4xA100", "2x2xH100", "2x2xA100"])
    @pytest.mark.parametrize("model", ["gpt2@128", "transformer-base@32", "resnet50", "rnnlm"])
    def test_reductions_of_data_parallel_training(self, model, spec):
        cluster = resolve(spec)
        graph = training_graph(build(model, batch=16))
        sharding = sharding_model(graph, cluster, LINE)
        splits = tuple(
            OpSplit(op, ("b",) if any(c.dims == ("b",) for c in choices) else ("",))
            for op, choices in zip(sharding.ops, sharding.choices, strict=True)
        )
        chosen = sharding.assignment(splits)
        charged = sum(
            table.hidden[x] + table.hidden_buckets[x]
            for table, x in zip(sharding.tables, chosen, strict=True)
        )
        stage = Stage("model", LINE, splits)
        program = lower_stage(stage, graph, cluster, 1).program
        taken = sum(
            program.duration[task]
            for task in range(len(program.duration))
            if program.work_of(task).purpose is Purpose.GRADIENT_REDUCTION
        )
        # Buckets are filled by tensors, so that some are larger than others.
        assert charged == pytest.approx(taken, rel=0.15)

    @pytest.mark.parametrize("dims", [*itertools.product(("", "v", "e", "b"), ("", "n", "k", "b"))])
    def test_gradients_of_a_tied_parameter_are_made_alike(self, dims):
        g = GraphBuilder("tied")
        weight = g.parameter("w", (64, 32))
        x = g.one("embedding", g.input("ids", (8, 4), "i64"), weight, name="embed")
        graph = training_graph(g.finish(g.one("linear", x, weight, name="head")))
        cluster = resolve("4xA100")
        model = sharding_model(graph, cluster, LINE, levels=(0,))
        splits = tuple(map(OpSplit, ("embed", "head"), ((dim,) for dim in dims)))
        chosen = dict(zip(model.ops, model.assignment(splits), strict=True))
        charged = sum(
            model.matrices[m][chosen[model.ops[u]], chosen[model.ops[v]]]
            for (u, v), m in zip(model.edges, model.matrix_of, strict=True)
            if m in model.tied
        )
        program = lower_stage(Stage("model", LINE, splits), graph, cluster, 1).program
        tensors = ("w", *(name for op in graph.ops for name in op.outputs if name[:2] == "w."))
        taken = sum(
            program.duration[task]
            for task in range(len(program.duration))
            if (work := program.work_of(task)).purpose is Purpose.CONVERSION
            and program.values[work.reads[0]].tensor in tensors
        )
        assert charged == pytest.approx(taken)
