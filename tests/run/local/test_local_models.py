"""Whole models, every op on a mesh with a split of its own, give what the reference gives.

Layouts are converted through the whole tensor, so only ops, shards and the reference are tested.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partita.graph.backward import training_graph
from partita.graph.splits import placements, routed_pairs
from partita.plans import Axis

torch = pytest.importorskip("torch")
from partita.run.local.compute import routing_groups  # noqa: E402
from partita.run.local.ops import backward, forward, needs_exchange  # noqa: E402
from partita.run.local.reference import (  # noqa: E402
    example,
    initial_states,
    microbatch_graph,
    microbatch_inputs,
    reference,
)
from partita.run.local.shards import (  # noqa: E402
    flat_part,
    gate_rows,
    join_flat,
    places,
    replica_error,
    shard,
    whole,
)
from partita.run.local.updates import update  # noqa: E402
from tests.run.local.small_models import MODELS  # noqa: E402
from tests.run.local.test_local_ops import legal_dims  # noqa: E402


class Mesh:
    """Tensors as the ranks hold them."""

    def __init__(self, graph, axes, forgotten=""):
        self.graph, self.axes = graph, axes
        self.forgotten = forgotten  # the op whose exchange is left out
        self.gates = gate_rows(graph)
        self.whole = {}

    def read(self, name, layout):
        gates = self.gates.get(name, 1)
        value = self.whole[name]
        return [shard(value, layout, self.axes, place, gates) for place in places(self.axes)]

    def write(self, name, layout, shards):
        assert replica_error(shards, layout, self.axes) < 1e-9, name
        shape, gates = self.graph.tensor(name).shape, self.gates.get(name, 1)
        self.whole[name] = whole(shards, shape, layout, self.axes, gates)

    def run(self, op, dims, number):
        call = self.graph.call(op)
        read, written = placements(call, dims)
        shards = [self.read(n, layout) for n, layout in zip(op.inputs, read, strict=True)]
        inputs = [tuple(s[rank] for s in shards) for rank in range(len(places(self.axes)))]
        execute = forward if op.phase == "forward" else backward
        exchanged = () if op.name == self.forgotten else range(len(self.axes))
        results = execute(
            self.graph, op, dims, self.axes, inputs, exchanged, microbatch=number, seed=5
        )
        for i, (name, layout) in enumerate(zip(op.outputs, written, strict=True)):
            self.write(name, layout, [result[i] for result in results])


def run_on_mesh(graph, given, axes, dims_of, num_microbatches, forgotten=""):
    """Outputs per micro-batch, gradients, and parameters and states after the step."""
    small = microbatch_graph(graph, num_microbatches)
    mesh = Mesh(small, axes, forgotten)
    updates = [op for op in graph.ops if op.phase == "update"]
    outputs, gradients = [], {}
    for number, inputs in enumerate(microbatch_inputs(graph, given.inputs, num_microbatches)):
        mesh.whole = {**inputs, **given.parameters}
        for op in small.ops:
            if op.phase != "update":
                mesh.run(op, dims_of(small, op), number)
        outputs.append({name: mesh.whole[name] for name in graph.outputs})
        for op in updates:
            name, gradient = op.inputs[0], mesh.whole[op.inputs[1]]
            gradients[name] = gradients.get(name, 0) + gradient
    states = initial_states(graph, given.parameters)
    updated = {}
    for op in updates:  # in three flat parts, as ZeRO has them
        name, own = op.inputs[0], op.inputs[2:]
        parts = [given.parameters[name], gradients[name], *(states[s] for s in own)]
        steps = []
        for i in range(3):
            w, g, *held = (flat_part(part, i, 3) for part in parts)
            new, changed = update(op.attr("rule"), w, g, held)
            steps.append((new, *changed))
        shape = graph.tensor(name).shape
        joined = [join_flat(column, shape) for column in zip(*steps, strict=True)]
        updated[name] = joined[0]
        states.update(zip(own, joined[1:], strict=True))
    return outputs, gradients, updated, states


def close(computed, right, what):
    assert computed.keys() == right.keys()
    for name in right:
        torch.testing.assert_close(
            computed[name],
            right[name],
            rtol=1e-8,
            atol=1e-10,
            msg=lambda m: f"{what} {name}: {m}",  # noqa: B023
        )


MESHES = [
    (Axis("x", 2),),
    (Axis("x", 2), Axis("y", 2)),
    (Axis("x", 2), Axis("y", 1)),
    (Axis("x", 3),),
    (Axis("x", 2, (1, 3)),),
    (Axis("x", 2), Axis("y", 2, (2, 1))),
]


def groups_of(graph, dims_of, axes):
    """In which groups the dispatches route their tokens, and their combines with them."""
    groups = {
        op.name: routing_groups(graph.call(op), dims_of(graph, op), axes)
        for op in graph.ops
        if op.phase == "forward"
    }
    return groups | {combine.name: groups[d.name] for d, combine in routed_pairs(graph)}


@pytest.mark.parametrize("model", MODELS)
@settings(max_examples=6, deadline=None)
@given(data=st.data())
def test_a_model_on_a_mesh_trains_as_the_whole_model_does(model, data):
    rule = data.draw(st.sampled_from(["adamw", "sgd", "momentum", "lion"]))
    graph = training_graph(MODELS[model](), rule)
    axes = data.draw(st.sampled_from(MESHES))
    num_microbatches = data.draw(st.sampled_from([1, 2]))
    draws = data.draw(st.randoms(use_true_random=False))
    chosen = {}

    def dims_of(small, op):
        if op.phase != "forward" and not op.forward:
            return ("",) * len(axes)
        name = op.forward or op.name
        if name not in chosen:
            ways = legal_dims(small.call(small.op(name)), axes)
            for dispatch, combine in routed_pairs(small):
                if combine.name == name:
                    groups = routing_groups(small.call(dispatch), chosen[dispatch.name], axes)
                    call = small.call(combine)
                    ways = [way for way in ways if routing_groups(call, way, axes) == groups]
            chosen[name] = draws.choice(ways)
        return chosen[name]

    given = example(graph, 1)
    groups = groups_of(microbatch_graph(graph, num_microbatches), dims_of, axes)
    right = reference(
        graph, given.inputs, given.parameters, num_microbatches, groups=groups, seed=5
    )
    outputs, gradients, updated, states = run_on_mesh(graph, given, axes, dims_of, num_microbatches)
    for mine, other in zip(outputs, right.outputs, strict=True):
        close(mine, other, "output")
    close(gradients, right.gradients, "gradient of")
    if rule != "lion":  # a sign has two sides
        close(updated, right.updated, "parameter")
    close(states if rule != "lion" else {}, right.states if rule != "lion" else {}, "state")


@pytest.mark.parametrize(
    "model", ["convolutions", "spelled", "gpt", "mixtral", "rnnlm", "lstm", "layers"]
)
def test_every_exchange_that_is_left_out_is_noticed(model):
    """As many ops as can be are split along a dim that needs one; each is forgotten once."""
    graph, axes = training_graph(MODELS[model](), "sgd"), (Axis("x", 2),)

    def dims_of(small, op):
        if op.phase != "forward" and not op.forward:
            return ("",)
        call = small.call(small.op(op.forward or op.name))
        ways = legal_dims(call, axes)
        needy = [way for way in ways if way[0] and needs_exchange(call, way[0])]
        return (*needy, ways[-1])[0]

    given = example(graph, 2)
    right = reference(graph, given.inputs, given.parameters, groups=groups_of(graph, dims_of, axes),
                      seed=5)  # fmt: skip
    needy = [
        op.name
        for op in graph.ops
        if op.phase != "update" and needs_exchange(graph.call(op), dims_of(graph, op)[0])
    ]
    assert needy
    for name in ("", *needy):
        try:
            outputs, gradients, _, _ = run_on_mesh(graph, given, axes, dims_of, 1, name)
            close(outputs[0], right.outputs[0], "output")
            close(gradients, right.gradients, "gradient of")
            noticed = False
        except AssertionError:
            noticed = True
        assert noticed == bool(name), f"the exchange of {name}"
