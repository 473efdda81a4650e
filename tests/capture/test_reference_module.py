"""Reference modules: parameters, shapes, numbers and determinism of modules made from graphs."""

import pytest

from partita.errors import GraphError
from partita.graph import GraphBuilder, training_graph
from partita.graph.files import from_json, from_text, to_json, to_text
from partita.graph.packed import PackedPart, read_source
from partita.graph.record import Tensor
from partita.zoo import build
from partita.zoo.t5 import T5Sizes, encoder_decoder

torch = pytest.importorskip("torch")
modules = pytest.importorskip("partita.capture.reference_module")

SMALL = {
    "squeezenet1_1": {"batch": 1},
    "inception_v3@139": {"batch": 2},
    "rnnlm@8": {"batch": 1, "hidden": 32, "vocab": 100},
    "t5-small@16": {"batch": 1, "target_seq": 8},
}
# Recurrent ones over few steps: they have the parameters and the kinds of outputs of long ones.
FAMILIES = [
    "alexnet", "vgg16", "resnet50", "resnext50", "inception_v3", "densenet121", "squeezenet1_0",
    "nasnet_large", "randwire", "unet", "vit-b16", "rnnlm@8", "lstm@6", "seq2seq@8",
    "deepspeech2@51",
    "transformer-base", "bert-base", "gpt2", "llama-7b", "mixtral-8x7b", "t5-small", "moe",
]  # fmt: skip


def on_meta(graph):
    return [
        torch.empty(tensor.shape, dtype=modules.DTYPES[tensor.dtype], device="meta")
        for tensor in graph.inputs
    ]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_reference_module_has_the_parameters_and_the_output_shapes_of_its_graph(name):
    graph = build(name, batch=1)
    module = modules.reference_module(graph, device="meta")
    stored = [read_source(t.source) if t.source else t for t in graph.parameters]
    assert {name: tuple(p.shape) for name, p in module.named_parameters()} == {
        tensor.name: tensor.shape for tensor in stored
    }
    with torch.no_grad():
        outputs = module(*on_meta(graph))
    outcome = outputs if isinstance(outputs, tuple) else (outputs,)
    assert [tuple(o.shape) for o in outcome] == [graph.tensor(n).shape for n in graph.outputs]


def mlp():
    g = GraphBuilder("mlp")
    x = g.input("x", (4, 8))
    with g.scope("body"):
        x = g.relu(g.linear(x, 16, name="up"))
    return g.finish(g.linear(x, 3, name="head"))


def test_a_reference_module_computes_what_its_ops_say():
    module = modules.reference_module(mlp())
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    weights = module.state_dict()
    hidden = torch.relu(x @ weights["body.up.weight"].T + weights["body.up.bias"])
    expected = hidden @ weights["head.weight"].T + weights["head.bias"]
    torch.testing.assert_close(module(x), expected)


def test_a_weight_with_two_readers_is_one_parameter():
    g = GraphBuilder("tied")
    ids = g.input("ids", (2, 3), "i64")
    table = g.parameter("table.weight", (7, 5))
    module = modules.reference_module(g.finish(g.one("linear", g.lookup(ids, table), table)))
    assert [name for name, _ in module.named_parameters()] == ["table.weight"]
    loss = module(torch.tensor([[0, 1, 2], [3, 4, 5]])).sum()
    loss.backward()
    assert module.table.weight.grad is not None


def test_equal_seeds_give_equal_weights_and_others_do_not():
    first, again, other = (
        modules.reference_module(mlp(), seed=seed).head.weight for seed in (3, 3, 4)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_making_a_reference_module_leaves_the_random_state_alone():
    before = torch.random.get_rng_state()
    modules.reference_module(mlp())
    assert torch.equal(before, torch.random.get_rng_state())


def narrow_moe():
    """A Switch transformer of two blocks, one with experts; the zoo's has 12, all like these."""
    sizes = T5Sizes(2, 64, 96, 2, head_size=32, vocab=100, experts=2)
    return encoder_decoder("moe", sizes, 1, 16, 8, "f32", loss=True)


@pytest.mark.parametrize("name", [*SMALL, "moe"])
def test_reference_modules_run_on_example_inputs_with_finite_outputs_and_gradients(name):
    graph = narrow_moe() if name == "moe" else build(name, dtype="f32", **SMALL[name])
    assert name != "moe" or {op.kind for op in graph.ops} == {
        op.kind for op in build("moe@16", batch=1, experts=2, target_seq=8).ops
    }
    module = modules.reference_module(graph)
    loss = module(*modules.example_inputs(graph))
    loss.backward()
    assert torch.isfinite(loss)
    assert all(torch.isfinite(p.grad).all() for p in module.parameters() if p.grad is not None)


def test_expert_outputs_return_to_the_tokens_they_came_from():
    graph = build("moe@16", batch=1, experts=2, target_seq=8)
    op = next(op for op in graph.ops if op.kind == "moe_combine")
    call = graph.call(op)
    gates = torch.rand(call.inputs[1])
    experts = torch.arange(1.0, 1 + gates.shape[-1]).reshape(-1, 1, 1).expand(call.inputs[0])
    from partita.capture.eager import RULES

    mixed = RULES["moe_combine"](torch.nn.Module(), call, experts, gates)
    flat = gates.flatten(0, -2)
    places = flat.topk(call.inputs[0][1], dim=0).indices
    expected = torch.zeros(flat.shape[0])
    for expert in range(flat.shape[1]):
        expected[places[:, expert]] += (expert + 1) * flat[places[:, expert], expert]
    torch.testing.assert_close(mixed[..., 0].flatten(), expected)


def test_parameters_that_are_parts_of_one_are_read_from_it_and_put_back():
    g = GraphBuilder("packed")
    x = g.input("x", (4, 6))
    parts = [
        g.parameter(
            f"{letter}.weight",
            (6, 6),
            packed=PackedPart("qk.weight", (6, 12), (), 1, *span, 1, True),
        )
        for letter, span in (("q", (0, 6)), ("k", (6, 12)))
    ]
    heads = PackedPart("kv.weight", (12, 6), (3, 2, 2, 6), 1, 1, 2)
    parts.append(g.parameter("v.weight", (6, 6), packed=heads))
    graph = g.finish(*(g.one("linear", x, w, name=w.name[0]) for w in parts))
    assert graph == from_text(to_text(graph)) == from_json(to_json(graph))
    module = modules.reference_module(graph)
    assert {name for name, _ in module.named_parameters()} == {"qk.weight", "kv.weight"}
    given = torch.randn(4, 6)
    q, k, v = module(given)
    stored, mixed = module.qk.weight, module.kv.weight.reshape(3, 2, 2, 6)
    torch.testing.assert_close(torch.cat((q, k), 1), given @ stored)
    torch.testing.assert_close(v, given @ mixed[:, 1].reshape(6, 6).T)
    own = {tensor.name: torch.randn(tensor.shape) for tensor in graph.parameters}
    state = dict(module.state_dict())
    module.pack(own, state)
    module.load_state_dict(state)
    for tensor in graph.parameters:
        torch.testing.assert_close(module.parameter_of(tensor).detach(), own[tensor.name])


def test_a_source_that_does_not_fit_is_refused():
    with pytest.raises(GraphError, match="source 'w'; it is written like"):
        Tensor("q", (2, 2), "f32", "parameter", "w")
    with pytest.raises(GraphError, match=r"has 4 elements; a parameter of 6 needs as many"):
        Tensor("q", (2, 3), "f32", "parameter", "w[2, 2]")
    with pytest.raises(GraphError, match="takes what the tensor does not have"):
        Tensor("q", (2, 2), "f32", "parameter", "w[2, 2] axis 1 at 0:3:1")


def test_a_graph_with_its_backward_has_no_reference_module():
    with pytest.raises(GraphError, match="optimizer"):
        modules.reference_module(training_graph(mlp_with_loss()))


def mlp_with_loss():
    g = GraphBuilder("mlp")
    logits = g.linear(g.input("x", (4, 8)), 3)
    return g.finish(g.cross_entropy(logits, g.input("targets", (4,), "i64")))


def test_ids_stay_within_the_table():
    graph = build("gpt2", batch=1)
    ids, targets = modules.example_inputs(graph)
    assert int(ids.max()) < 50257
    assert int(targets.max()) < 50257
    assert int(ids.max()) > 1000
