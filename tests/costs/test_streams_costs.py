import pytest

from partita.cluster import resolve
from partita.costs.streams import streams_model
from partita.graph import GraphBuilder
from partita.problems.streams import INPUT, solo_us
from partita.search.streams import SEARCHES
from partita.zoo import build

H200 = resolve("H200").kind_of(0)


def two_branches():
    """A 1x1 and a 3x3 convolution of one image with norm and ReLU, concatenated, then a linear."""
    g = GraphBuilder("two", "f16")
    x = g.input("image", (1, 16, 8, 8))
    a = g.relu(g.norm(g.conv(x, 32, 1, bias=False, name="a"), "batch_norm", "bn_a", training=False))
    b = g.relu(g.conv(x, 32, 3, padding=1, bias=False, name="b"), "relu_b")
    y = g.concat([a, b])
    y = g.flatten(g.global_pool(y))
    return g.finish(g.linear(y, 10, "fc"))


def test_norms_relus_and_views_are_not_launched():
    this_streams_model = streams_model(two_branches(), H200)
    assert [names[0] for names in this_streams_model.names] == ["input", "a", "b", "pool", "fc"]
    assert this_streams_model.names[1] == ("a", "bn_a", "relu")
    ops = this_streams_model.problem.ops
    assert ops[0].type == INPUT
    assert [op.preds for op in ops] == [(), (0,), (0,), (1, 2), (3,)]


def test_a_convolution_costs_what_the_problem_says_of_it():
    problem = streams_model(two_branches(), H200).problem
    conv = problem.ops[2]
    assert conv.conv is not None
    assert conv.t_us == pytest.approx(solo_us(problem.constants, conv.conv), rel=0.05)
    assert 0 < conv.w_us < conv.t_us


def test_convolutions_of_one_image_may_be_merged_if_the_same_follows():
    problem = streams_model(two_branches(), H200).problem
    assert problem.merge_class(1) != problem.merge_class(2)  # only one has a norm
    fire = streams_model(build("squeezenet", batch=1, loss=False), H200).problem
    names = {op.name: at for at, op in enumerate(fire.ops)}
    pairs = [(at, names[name.replace("1x1", "3x3")]) for name, at in names.items() if "1x1" in name]
    assert pairs
    assert all(fire.merge_class(a) == fire.merge_class(b) for a, b in pairs)


def test_blocks_end_at_the_concatenations_of_inception():
    problem = streams_model(build("inception_v3", batch=1, loss=False), H200).problem
    assert len(problem.parts) >= 12
    assert max(map(len, problem.parts)) <= 12


@pytest.mark.parametrize("name", ["squeezenet", "resnext50"])
def test_running_side_by_side_is_never_longer(name):
    problem = streams_model(build(name, batch=1, loss=False), H200).problem
    alone = SEARCHES["sequential"](problem).objective
    for method in ("exact", "barrier-free"):
        result = SEARCHES[method](problem)
        assert result.lower_bound <= result.objective <= alone * (1 + 1e-9)


def test_a_larger_batch_leaves_less_to_gain():
    gains = []
    for batch in (1, 64):
        problem = streams_model(build("squeezenet", batch=batch, loss=False), H200).problem
        alone, best = (SEARCHES[name](problem).objective for name in ("sequential", "exact"))
        gains.append(alone / best)
    assert gains[1] < gains[0]
