"""The reference: autograd on the whole model, gradients averaged over micro-batches, one step."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partita.errors import GraphError
from partita.graph.backward import OPTIMIZER_STATES, training_graph
from partita.graph.build import GraphBuilder
from partita.graph.record import FLOATS, Graph, Op, Tensor

torch = pytest.importorskip("torch")
from partita.capture.reference_module import reference_module  # noqa: E402
from partita.run.local.compute import Site, compute  # noqa: E402
from partita.run.local.reference import (  # noqa: E402
    OPTIMIZERS,
    example,
    first_step,
    initial_states,
    microbatch_inputs,
    reference,
)
from partita.run.local.updates import RATE, UPDATES, update  # noqa: E402
from tests.run.local.small_models import MODELS, perceptron  # noqa: E402


def as_module_has_it(graph):
    """Without dropout, of which modules draw other random numbers, and in double precision.

    Parameters are not packed, and experts have room for as many tokens as on devices.
    """
    ops = tuple(
        replace(op, attrs=tuple(pair for pair in op.attrs if pair[0] != "dropless"))
        if op.attr("fn") != "dropout"
        else Op(op.name, "reshape", op.inputs, op.outputs,
                (("shape", graph.tensor(op.outputs[0]).shape),))
        for op in graph.ops
    )  # fmt: skip
    tensors = tuple(
        replace(t, dtype="f64", source="") if t.dtype in FLOATS else t for t in graph.tensors
    )
    return Graph(graph.name, tensors, ops, graph.outputs)


@pytest.mark.parametrize("name", [m for m in MODELS if m != "perceptron"])
def test_it_gives_the_loss_and_gradients_of_the_reference_module(name):
    graph = as_module_has_it(MODELS[name]())
    training = training_graph(graph)
    given = example(training, 3)
    this_reference = reference(training, given.inputs, given.parameters)
    module = reference_module(graph)
    held = dict(module.named_parameters())
    with torch.no_grad():
        for parameter in held:
            held[parameter].copy_(given.parameters[parameter])
    loss = module(*(given.inputs[t.name] for t in graph.inputs))
    loss.backward()
    torch.testing.assert_close(this_reference.outputs[0][graph.outputs[0]], loss.detach())
    for parameter, gradient in this_reference.gradients.items():
        torch.testing.assert_close(gradient, held[parameter].grad, msg=parameter)


@pytest.mark.parametrize("name", MODELS)
def test_examples_neither_vanish_nor_blow_up(name):
    graph = training_graph(MODELS[name]())
    given = example(graph)
    this_reference = reference(graph, given.inputs, given.parameters)
    for value in (*this_reference.outputs[0].values(), *this_reference.gradients.values()):
        assert value.dtype == torch.float64
        assert value.isfinite().all()
        assert value.abs().max() < 100
    assert max(float(g.abs().max()) for g in this_reference.gradients.values()) > 1e-3
    shares = [bool((g.abs() > 1e-9).any()) for g in this_reference.gradients.values()]
    assert sum(shares) / len(shares) > 0.9


def test_examples_depend_on_the_seed_only():
    graph = training_graph(perceptron())
    one, same, other = example(graph, 1), example(graph, 1), example(graph, 2)
    assert torch.equal(one.parameters["up.weight"], same.parameters["up.weight"])
    assert not torch.equal(one.parameters["up.weight"], other.parameters["up.weight"])
    assert not (one.parameters["up.bias"] == 0).any()


def test_gradients_of_microbatches_add_up_to_those_of_the_batch():
    graph = training_graph(MODELS["gpt"]())
    given = example(graph)
    whole = reference(graph, given.inputs, given.parameters, 1)
    parts = reference(graph, given.inputs, given.parameters, 4)
    assert len(parts.outputs) == 4
    losses = torch.stack([o["loss"] for o in parts.outputs])
    torch.testing.assert_close(losses.mean(), whole.outputs[0]["loss"])
    for name, gradient in whole.gradients.items():
        torch.testing.assert_close(parts.gradients[name], gradient, msg=name)
        torch.testing.assert_close(parts.updated[name], whole.updated[name], msg=name)


def test_the_gradient_of_an_output_that_is_no_number_is_an_input():
    graph = training_graph(perceptron())
    given = example(graph)
    seed = given.inputs["down.grad"]
    assert seed.shape == (4, 4)
    first, second = microbatch_inputs(graph, given.inputs, 2)
    torch.testing.assert_close(first["down.grad"], seed[:2] / 2)
    torch.testing.assert_close(second["x"], given.inputs["x"][2:])
    x, w = given.inputs["x"], given.parameters
    hidden = torch.tanh(x @ w["up.weight"].T + w["up.bias"])
    this_reference = reference(graph, given.inputs, w)
    torch.testing.assert_close(this_reference.gradients["down.weight"], seed.T @ hidden)
    torch.testing.assert_close(this_reference.gradients["down.bias"], seed.sum(0))


def test_a_forward_graph_has_outputs_only():
    graph = perceptron()
    given = example(graph)
    this_reference = reference(graph, given.inputs, given.parameters, 2)
    assert len(this_reference.outputs) == 2
    assert (this_reference.gradients, this_reference.updated, this_reference.states) == ({}, {}, {})


def test_a_batch_that_microbatches_do_not_divide_is_refused():
    graph = perceptron()
    given = example(graph)
    with pytest.raises(GraphError) as caught:
        reference(graph, given.inputs, given.parameters, 3)
    assert str(caught.value) == (
        "a batch of 4 in 3 micro-batches; give a number that divides the batch"
    )


def test_a_kind_without_a_rule_is_refused():
    g = GraphBuilder("odd")
    (y,) = g.op("sort", g.input("x", (4,)), shapes=[(4,)])
    graph = g.finish(y)
    given = example(graph)
    with pytest.raises(GraphError, match="no rule computes ops of the kind 'sort'"):
        reference(graph, given.inputs, given.parameters)


def test_a_detached_branch_has_no_gradient():
    tensors = (Tensor("w", (3,), "f32", "parameter"), Tensor("a", (3,)), Tensor("b", (3,)),
               Tensor("loss", ()))  # fmt: skip
    ops = (
        Op("stop", "elementwise", ("w",), ("a",), (("detach", True), ("fn", "relu"))),
        Op("mul", "elementwise", ("w", "a"), ("b",), (("fn", "mul"),)),
        Op("sum", "reduce", ("b",), ("loss",)),
    )
    graph = training_graph(Graph("stopped", tensors, ops, ("loss",)))
    w = torch.tensor([-1.0, 2.0, 3.0], dtype=torch.float64)
    this_reference = reference(graph, example(graph).inputs, {"w": w})
    assert this_reference.gradients["w"].tolist() == [0.0, 2.0, 3.0]


def test_experts_route_within_the_groups_that_are_given():
    graph = MODELS["mixtral"]()
    given = example(graph)
    whole = reference(graph, given.inputs, given.parameters)
    dispatch = next(op for op in graph.ops if op.kind == "moe_dispatch")
    capacity = graph.tensor(dispatch.outputs[0]).shape[1]
    half = capacity // 2
    groups = (((0, 8), (0, half)), ((8, 16), (half, capacity)))
    named = {op.name: groups for op in graph.ops if op.kind in ("moe_dispatch", "moe_combine")}
    apart = reference(graph, given.inputs, given.parameters, groups=named)
    assert apart.outputs[0]["loss"] != whole.outputs[0]["loss"]


def test_one_group_of_all_tokens_is_no_grouping():
    graph = MODELS["mixtral"]()
    op = next(op for op in graph.ops if op.kind == "moe_dispatch")
    call = graph.call(op)
    x, gates = (torch.randn(shape, dtype=torch.float64) for shape in call.inputs)
    tokens, places = call.inputs[1][0] * call.inputs[1][1], call.outputs[0][1]
    grouped = Site(op.name, groups=(((0, tokens), (0, places)),))
    (one,), (plain,) = compute(call, [x, gates], grouped), compute(call, [x, gates], Site(op.name))
    assert torch.equal(one, plain)


STEPS = st.lists(st.floats(-2, 2), min_size=1, max_size=4)


@pytest.mark.parametrize("rule", OPTIMIZERS)
@settings(max_examples=30, deadline=None)
@given(gradients=STEPS)
def test_every_rule_is_that_of_the_optimizer_over_many_steps(rule, gradients):
    make, options, names = OPTIMIZERS[rule]
    leaf = torch.nn.Parameter(torch.tensor([0.5, -1.0, 0.0], dtype=torch.float64))
    optimizer = make([leaf], lr=RATE, **options)
    own, states = leaf.detach().clone(), (torch.zeros_like(leaf.detach()),) * len(names)
    for step, size in enumerate(gradients, 1):
        gradient = size * torch.tensor([1.0, 0.3, -0.7], dtype=torch.float64)
        leaf.grad = gradient.clone()
        optimizer.step()
        own, states = update(rule, own, gradient, states, step=step)
        torch.testing.assert_close(own, leaf.detach())
        for state, name in zip(states, names, strict=True):
            torch.testing.assert_close(state, optimizer.state[leaf][name])


def test_lion_steps_by_a_sign_and_decays():
    w, g, m = (torch.tensor([x], dtype=torch.float64) for x in (2.0, 1.0, -4.0))
    new, (mean,) = update("lion", w, g, [m])
    # 0.9 * -4 + 0.1 * 1 < 0, so the step is up; the decay is 0.02 of the parameter.
    torch.testing.assert_close(new, w + RATE * (1 - 0.02 * 2.0))
    torch.testing.assert_close(mean, 0.99 * m + 0.01 * g)


def test_every_rule_of_training_graphs_has_a_formula():
    assert UPDATES.keys() == OPTIMIZER_STATES.keys()
    assert OPTIMIZERS.keys() == UPDATES.keys() - {"lion"}


@pytest.mark.parametrize("rule", [r for r in UPDATES if r != "lion"])
def test_the_size_of_a_gradient_shows_in_the_first_step(rule):
    w, g = torch.ones(1, dtype=torch.float64), torch.full((1,), 0.2, dtype=torch.float64)
    assert not torch.allclose(first_step(rule, w, g)[0], first_step(rule, w, 2 * g)[0], atol=1e-4)


def test_master_copies_start_as_the_parameter_and_are_what_is_updated():
    graph = training_graph(MODELS["mixtral"](), "adamw")
    given = example(graph)
    start = initial_states(graph, given.parameters)
    name = "model.norm.weight"
    assert torch.equal(start[f"{name}.master"], given.parameters[name])
    assert (start[f"{name}.adamw.0"] == 0).all()
    this_reference = reference(graph, given.inputs, given.parameters)
    assert this_reference.states.keys() == start.keys()
    assert torch.equal(this_reference.states[f"{name}.master"], this_reference.updated[name])
    states = [start[f"{name}.{s}"] for s in ("adamw.0", "adamw.1", "master")]
    new, changed = update("adamw", given.parameters[name], this_reference.gradients[name], states)
    torch.testing.assert_close(new, this_reference.updated[name])
    torch.testing.assert_close(changed[2], new)
