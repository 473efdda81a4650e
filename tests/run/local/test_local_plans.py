"""Plans mean what they say: executed on ranks they give the numbers of the whole model.

Both judges are tried on the same plans: the verifier follows layouts, the runtime computes.
"""

import functools
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partita.cluster import resolve
from partita.errors import PlanError
from partita.graph import GraphBuilder, training_graph
from partita.graph.rebatch import rebatch
from partita.graph.splits import routed_pairs
from partita.meaning import Purpose
from partita.plans import Axis, Mesh, OpSplit, Schedule, Stage, device_groups, shared_stages
from partita.schedules.named import NAMED
from partita.zoo import MODELS as ZOO
from tests.lower.mutants import mutant
from tests.lower.random_graphs import random_graph, random_training
from tests.lower.random_plans import RandomPlan, random_plan

torch = pytest.importorskip("torch")
from tests.run.local.plans import TOLERANCE, trial  # noqa: E402
from tests.run.local.small_models import LARGE_MODELS, MODELS  # noqa: E402


@functools.cache
def training(name):
    return training_graph(MODELS[name]())


@pytest.mark.parametrize("model", MODELS)
@settings(max_examples=2, deadline=None)
@given(random=st.randoms(use_true_random=False))
def test_any_plan_of_a_model_gives_its_numbers(model, random):
    outcome = trial(random_plan(random, training(model)))
    assert outcome.refused() == ()
    assert outcome.error() < TOLERANCE


@settings(max_examples=12, deadline=None)
@given(model=st.sampled_from(sorted(MODELS)), random=st.randoms(use_true_random=False))
def test_any_plan_with_shared_stages_gives_the_numbers_of_its_model(model, random):
    """And where a communication of it is wrong so that numbers change, it is refused."""
    right = trial(random_plan(random, training(model), shared=True))
    assert right.refused() == ()
    assert right.error() < TOLERANCE
    wrong = mutant(random, right.lowered.program)
    if wrong is not None and right.error(wrong[1]) > TOLERANCE:
        assert right.refused(wrong[1]), wrong[0]


def test_groups_that_share_a_stage_may_have_its_kinds_of_devices_in_any_order():
    random = Random(62000180)
    graph = training(random.choice(sorted(MODELS)))
    plan = random_plan(random, graph, shared=True, replicas=False)
    while not shared_stages(device_groups(plan.stages)):
        plan = random_plan(random, graph, shared=True, replicas=False)
    outcome = trial(plan)
    assert outcome.refused() == ()
    assert outcome.error() < TOLERANCE


@pytest.mark.parametrize("model", LARGE_MODELS)
def test_a_plan_of_a_model_of_many_ops_gives_its_numbers(model):
    """One that is always the same: of so many ops each takes seconds."""
    graph = training_graph(LARGE_MODELS[model]())
    outcome = trial(random_plan(Random(0), graph))
    assert outcome.refused() == ()
    assert outcome.error() < TOLERANCE


@settings(max_examples=30, deadline=None)
@given(random=st.randoms(use_true_random=False))
def test_any_plan_of_any_graph_gives_its_numbers(random):
    try:
        outcome = trial(random_plan(random, random_training(random, random_graph(random))))
    except PlanError as error:
        assert "gives it no gradient" in str(error)
        return
    assert outcome.refused() == ()
    assert outcome.error() < TOLERANCE


def test_every_family_of_the_zoo_has_a_small_model():
    builders = {model.builder.split(":")[0] for model in ZOO.values()}
    named = {
        "alexnet", "vgg", "resnet", "inception", "densenet", "squeezenet", "nasnet", "randwire",
        "unet", "vit", "deepspeech2", "transformer", "bert", "gpt", "llama", "t5",
    }  # fmt: skip
    assert builders - named == {"recurrent"}
    assert named | {"rnnlm", "lstm", "seq2seq"} <= {*MODELS, *LARGE_MODELS}


@pytest.mark.parametrize("model", ["gpt", "convolutions", "mixtral"])
@settings(max_examples=3, deadline=None)
@given(random=st.randoms(use_true_random=False))
def test_any_plan_for_inference_gives_the_outputs(model, random):
    outcome = trial(random_plan(random, MODELS[model]()))
    assert outcome.refused() == ()
    assert outcome.error() < TOLERANCE


@settings(max_examples=10, deadline=None)
@given(
    model=st.sampled_from(sorted(MODELS)),
    random=st.randoms(use_true_random=False),
)
def test_what_changes_numbers_is_refused(model, random):
    """One communication of a right program is removed, moved or sent elsewhere."""
    right = trial(random_plan(random, training(model)))
    for _ in range(4):
        wrong = mutant(random, right.lowered.program)
        if wrong is not None and right.error(wrong[1]) > TOLERANCE:
            assert right.refused(wrong[1]), wrong[0]


@settings(max_examples=6, deadline=None)
@given(model=st.sampled_from(sorted(MODELS)), random=st.randoms(use_true_random=False))
def test_a_plan_with_all_decisions_said_is_lowered_to_the_same_numbers_and_time(model, random):
    plan = random_plan(random, training(model))
    first = trial(plan)
    assert all(stage.overlap is not None for stage in first.lowered.stages)
    again = trial(replace(plan, stages=first.lowered.stages))
    assert again.refused() == ()
    assert again.timeline.makespan == first.timeline.makespan
    assert again.error() < TOLERANCE


SCHEDULES = [name for name, named in NAMED.items() if named.layout in ("line", "looped", "wave")]


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_named_schedule_gives_the_numbers_of_the_model(name):
    graph = training("gpt")
    ops = [op.name for op in graph.ops if op.phase == "forward"]
    named, groups = NAMED[name], 2
    count = 2 if NAMED[name].refuses(2, 2, 4) else 4
    chunks = 1 if named.layout == "line" else 2
    stages = []
    for number in range(groups * chunks):
        chunk, rank = divmod(number, groups)
        place = groups - 1 - rank if named.layout == "wave" and chunk % 2 else rank
        total = groups * chunks
        own = ops[len(ops) * number // total : len(ops) * (number + 1) // total]
        splits = tuple(OpSplit(op, ()) for op in own)
        stages.append(Stage(f"stage{number}", Mesh((), (place,)), splits))
    cluster = resolve("2xA100")
    outcome = trial(RandomPlan(graph, cluster, tuple(stages), Schedule(name, count)))
    assert outcome.refused() == ()
    assert outcome.error() < TOLERANCE


def one_layer(dims, name="head"):
    g = GraphBuilder("one")
    graph = g.finish(g.linear(g.input("x", (4, 8)), 8, name))
    mesh = Mesh((Axis("x", 2), Axis("y", 2)), (0, 1, 2, 3))
    stage = Stage("model", mesh, (OpSplit(name, dims),))
    return RandomPlan(graph, resolve("4xA100"), (stage,), Schedule())


def test_an_output_that_is_split_along_its_reduction_is_added_up():
    outcome = trial(one_layer(("k", "k")))
    assert outcome.refused() == ()
    assert outcome.error() < TOLERANCE
    collectives = [work.collective for work in outcome.lowered.program.works if work.collective]
    assert collectives == ["all_reduce", "all_reduce"]


def test_an_op_takes_its_memory_whatever_its_name_ends_in():
    sizes = [
        trial(one_layer(("", ""), name)).timeline.peaks()[0] for name in ("head", "block.next")
    ]
    assert sizes[0] == sizes[1]


def test_names_that_second_runs_would_have_are_no_obstacle():
    g = GraphBuilder("names")
    x = g.relu(g.linear(g.input("x", (4, 8)), 8, "a"), name="a.again")
    graph = training_graph(g.finish(g.linear(x, 8, "a.again.again")))
    ops = tuple(op.name for op in graph.ops if op.phase == "forward")
    mesh = Mesh((Axis("x", 2),), (0, 1))
    micro = rebatch(graph, 4)
    splits = tuple(OpSplit(op, ("b",)) for op in ops if micro.op(op))
    stage = Stage(
        "model", mesh, splits, checkpointing="selective" if ops else "none", recomputed=ops
    )
    outcome = trial(RandomPlan(graph, resolve("2xA100"), (stage,), Schedule("1f1b", 2)))
    assert outcome.refused() == ()
    assert outcome.error() < TOLERANCE


def one_axis(graph, dims, schedule=None):
    """All ops on two devices, split as said."""
    ops = [op.name for op in graph.ops if op.phase == "forward"]
    splits = tuple(OpSplit(op, (dims.get(op, ""),)) for op in ops)
    stage = Stage("model", Mesh((Axis("x", 2),), (0, 1)), splits)
    return RandomPlan(graph, resolve("2xA100"), (stage,), schedule or Schedule())


@pytest.mark.parametrize("dim", ["b", "m", "n", "k"])
def test_a_product_of_a_tensor_with_itself_has_a_gradient_for_each_place(dim):
    g = GraphBuilder("square")
    x = g.linear(g.input("x", (4, 8, 8)), 8, "first")
    graph = training_graph(g.finish(g.matmul(x, x)))
    outcome = trial(one_axis(graph, {"matmul": dim}))
    assert outcome.refused() == ()
    assert outcome.error() < TOLERANCE


@pytest.mark.parametrize("dim", ["b", "n", "k"])
def test_weights_that_are_computed_have_their_gradient(dim):
    g = GraphBuilder("computed")
    weight = g.elementwise("tanh", g.parameter("w", (8, 8)))
    y = g.one("linear", g.input("x", (4, 8)), weight, name="linear")
    outcome = trial(one_axis(training_graph(g.finish(y)), {"linear": dim}))
    assert outcome.refused() == ()
    assert outcome.error() < TOLERANCE


def test_an_order_may_take_apart_the_backward_of_one_micro_batch_only():
    schedule = Schedule("listed", 2, ("0F0 0F1 0B0 0I1 0W1",))
    graph = training("perceptron")
    outcome = trial(one_axis(graph, {}, schedule))
    assert outcome.refused() == ()
    assert outcome.error() < TOLERANCE


def test_constants_behind_other_ops_follow_the_batch():
    g = GraphBuilder("constants")
    x = g.linear(g.input("x", (4, 8)), 8, "first")
    bias = g.elementwise("tanh", g.one("constant", name="constant", shape=(4, 8)))
    graph = rebatch(g.finish(g.add(x, bias)), 2)
    assert {graph.tensor(name).shape for name in ("constant", "tanh", "add")} == {(2, 8)}


def test_parameters_that_three_stages_share_in_unlike_chains_are_added_up():
    """The second layer's chain of holders joins that of the first behind its beginning."""
    graph = training("lstm")
    parts = [["zeros"], ["lstm.0.step0"], ["lstm.1.step0"], ["lstm.0.step1", "lstm.1.step1"],
             ["lstm.0.step2", "lstm.1.step2", "loss"]]  # fmt: skip
    stages = tuple(
        Stage(f"s{i}", Mesh((), (i,)), tuple(OpSplit(op, ()) for op in own))
        for i, own in enumerate(parts)
    )
    tried = trial(RandomPlan(graph, resolve("8xA100"), stages, Schedule("1f1b", 2)))
    assert tried.refused() == ()
    assert tried.error() < TOLERANCE


def test_a_stage_that_only_reads_what_another_trains_is_refused():
    g = GraphBuilder("reader")
    weight = g.parameter("w", (8, 8))
    still = g.one("linear", g.input("x", (4, 8)), weight, name="still", detach=True)
    graph = training_graph(g.finish(g.one("linear", still, weight, name="trained")))
    stages = tuple(
        Stage(f"s{i}", Mesh((), (i,)), (OpSplit(op, ()),))
        for i, op in enumerate(("still", "trained"))
    )
    with pytest.raises(PlanError) as caught:
        trial(RandomPlan(graph, resolve("2xA100"), stages, Schedule("1f1b", 2)))
    assert str(caught.value) == (
        "stages: s0 reads w, which other stages train, and gives it no gradient; put the ops that "
        "read it into one stage"
    )


def recurrent(kind):
    """A layer right after the input: its weights have a gradient, what it reads has none."""
    g = GraphBuilder("first")
    x = g.input("x", (4, 3, 4))
    if kind == "moe_router":
        y = g.one("moe_router", x, g.parameter("gate.weight", (4, 4)), name="layer", top_k=1)
    else:
        gates = {"lstm": 4, "gru": 3}[kind]
        weights = [g.parameter(f"{name}.weight", (gates * 4, 4)) for name in ("in", "state")]
        y = g.one(kind, x, *weights, name="layer")
    return training_graph(g.finish(g.linear(y, 2, "head")))


def without_exchange(program, op):
    """The program without what an op exchanges."""
    bodies = tuple(replace(b, program=without_exchange(b.program, op)) for b in program.bodies)
    gone = [
        n
        for n, work in enumerate(program.works)
        if work.purpose is Purpose.EXCHANGE and work.op == op
    ]
    works = list(program.works)
    for number in gone:
        works[number] = replace(works[number], purpose=Purpose.OTHER)
    return replace(program, works=tuple(works), bodies=bodies)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("level", [0, 2, 3])
@pytest.mark.parametrize(("kind", "dim"), [("lstm", "h"), ("gru", "h"), ("moe_router", "e")])
def test_weight_gradients_without_data_gradients_exchange_what_those_would(kind, dim, level, count):
    graph = recurrent(kind)
    schedule = Schedule("1f1b", count) if count > 1 else Schedule()
    plan = one_axis(graph, {"layer": dim}, schedule)
    stage = plan.stages[0]
    kept = tuple(replace(split, zero=level) for split in stage.splits)
    right = trial(replace(plan, stages=(replace(stage, splits=kept),)))
    assert right.refused() == ()
    assert right.error() < TOLERANCE
    wrong = without_exchange(right.lowered.program, "layer.wgrad")
    assert wrong != right.lowered.program
    assert right.error(wrong) > TOLERANCE
    assert any("statistics" in sentence for sentence in right.refused(wrong))


@pytest.mark.parametrize("level", [2, 3])
@pytest.mark.parametrize("dims", [("h", ""), ("", "h"), ("h", "i")])
def test_parts_of_a_gradient_are_cut_from_what_was_exchanged(dims, level):
    graph = recurrent("lstm")
    ops = [op.name for op in graph.ops if op.phase == "forward"]
    splits = tuple(OpSplit(op, dims if op == "layer" else ("", ""), level) for op in ops)
    stage = Stage("model", Mesh((Axis("x", 2), Axis("y", 2)), (0, 1, 2, 3)), splits)
    right = trial(RandomPlan(graph, resolve("4xA100"), (stage,), Schedule("1f1b", 2)))
    assert right.refused() == ()
    assert right.error() < TOLERANCE


def routed(dispatch, combine, axes, stages=1):
    """A model with experts in which every dispatch and combine is split as said."""
    graph = training("mixtral")
    pairs = routed_pairs(graph)
    dims = {
        op.name: way for pair in pairs for op, way in zip(pair, (dispatch, combine), strict=True)
    }
    ops = [op.name for op in graph.ops if op.phase == "forward"]
    cut = ops.index(pairs[0][1].name)  # the second stage begins with a combine
    parts, size = [ops] if stages == 1 else [ops[:cut], ops[cut:]], 1
    for axis in axes:
        size *= axis.size
    whole = ("",) * len(axes)
    return RandomPlan(
        graph,
        resolve("8xA100"),
        tuple(
            Stage(
                f"s{i}",
                Mesh(axes, tuple(range(i * size, (i + 1) * size))),
                tuple(OpSplit(op, dims.get(op, whole)) for op in own),
            )
            for i, own in enumerate(parts)
        ),
        Schedule(),
    )


LINE, UNEVEN = (Axis("x", 2),), (Axis("x", 2, (1, 3)),)
SQUARE, MIXED = (Axis("x", 2), Axis("y", 2)), (Axis("x", 2), Axis("y", 2, (1, 3)))


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize(
    ("dispatch", "combine", "axes", "words"),
    [
        (("b",), ("",), LINE, "2 groups|one group"),
        (("",), ("b",), LINE, "one group|2 groups"),
        (("b",), ("e",), LINE, "2 groups|one group"),
        (("k",), ("b",), UNEVEN, "one group|groups of 1:3"),
        (("b", "b"), ("b", "e"), SQUARE, "4 groups|2 groups"),
        (("b", ""), ("", "b"), MIXED, "2 groups|groups of 1:3"),
    ],
)
def test_a_combine_that_routes_other_groups_than_its_dispatch_is_caught_by_both_judges(
    dispatch, combine, axes, words, stages
):
    wrong = trial(routed(dispatch, combine, axes, stages))
    sent, back = words.split("|")
    (first, second), *_ = routed_pairs(wrong.plan.graph)
    assert wrong.refused() == (
        f"{first.name} routes tokens in {sent} and {second.name} gives them back in {back}; split "
        "both along 'b' into the same shares",
    )
    assert wrong.error() > TOLERANCE
    right = trial(routed(dispatch, dispatch, axes, stages))
    assert right.refused() == ()
    assert right.error() < TOLERANCE


@pytest.mark.parametrize("stages", [1, 2])
def test_equal_groups_over_other_axes_are_the_same_routing(stages):
    for dispatch, combine in ((("b", ""), ("", "b")), (("b", "k"), ("e", "b"))):
        outcome = trial(routed(dispatch, combine, SQUARE, stages))
        assert outcome.refused() == ()
        assert outcome.error() < TOLERANCE
