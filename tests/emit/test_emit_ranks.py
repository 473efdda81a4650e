"""A plan's step written for one rank: local shapes, explicit collectives, the model's numbers."""

import json
import random
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner

from partita.cli import partita
from partita.costs.sharding import dims_of as legal_dims
from partita.emit.plans import emit_plan_rank
from partita.emit.ranks import emit_rank
from partita.errors import PlanError
from partita.graph import GraphBuilder, training_graph
from partita.graph.files import write_graph
from partita.graph.loops import loop_nest
from partita.jobs.workload import load
from partita.plans import Axis
from partita.run.local.reference import example, reference
from tests.emit.plans import plan_by_strategy, plan_in_parts
from tests.emit.rank_models import (
    at_random,
    attended,
    block,
    constants,
    dropped,
    image,
    lowered,
    megatron,
    normal,
    perceptron,
    run_threads,
    worst_error,
)
from tests.emit.transparency import assert_ruff_has_nothing_to_say
from tests.run.local.small_models import MODELS


def gpt():
    return training_graph(MODELS["gpt"]())


def emitted_ranks(plan, graph):
    stage = plan.stages[0]
    return [emit_rank(plan.program, graph, stage, r) for r in range(len(stage.mesh.devices))]


def error_of(plan, graph):
    emitted = emitted_ranks(plan, graph)
    given = example(graph)
    results = run_threads(emitted, given.inputs | constants(graph), given.parameters)
    whole = reference(graph, given.inputs, given.parameters)
    return worst_error(emitted, results, plan.stages[0].mesh.axes, whole)


@pytest.mark.parametrize("model", [perceptron, block, gpt])
@pytest.mark.parametrize(("dp", "tp"), [(1, 2), (2, 1), (2, 2), (1, 4)])
def test_tensor_and_data_parallel_steps_give_the_numbers_of_the_model(model, dp, tp):
    graph = model()
    assert error_of(megatron(graph, dp, tp), graph) < 1e-9


@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("model", [perceptron, block])
def test_sharded_parameters_are_gathered_and_gradients_kept_in_parts(model, zero):
    graph = model()
    plan = megatron(graph, 2, 2, zero)
    assert error_of(plan, graph) < 1e-9
    source = emitted_ranks(plan, graph)[1].source
    assert ("all_gather(up_weight, 0, dp).reshape([" in source) == (zero == 3)
    assert ("reduce_scatter(up_weight_grad.flatten(), 0, dp)" in source) == (zero >= 1)


def test_any_split_that_can_be_written_gives_the_numbers_of_the_model():
    rng = random.Random(3)
    right = refused = 0
    for trial in range(15):
        graph = (perceptron, block, gpt)[trial % 3]()
        axes = rng.choice([(Axis("a", 2),), (Axis("a", 4),), (Axis("a", 2), Axis("b", 2))])
        try:
            plan = at_random(graph, axes, rng)
            emitted_ranks(plan, graph)
        except PlanError:
            refused += 1
            continue
        assert error_of(plan, graph) < 1e-9, trial
        right += 1
    assert right >= 5, refused


@pytest.mark.parametrize(
    "axes", [(Axis("tp", 2),), (Axis("tp", 4),), (Axis("tp", 2), Axis("dp", 2))]
)
def test_norms_and_softmaxes_in_parts_exchange_sums_of_their_rows(axes, tmp_path):
    graph = normal()
    along = {"first": "c", "second": "c", "third": "c", "fourth": "s"}
    plan = lowered(graph, axes, lambda op: (along.get(op.name, ""), "b")[: len(axes)])
    assert error_of(plan, graph) < 1e-9
    source = emitted_ranks(plan, graph)[1].source
    forward = source.partition("    # forward")[2].partition("    # backward")[0]
    assert "scaled(centred(" in forward
    assert "shared_softmax(" in forward
    (tmp_path / "rank.py").write_text(source)
    assert_ruff_has_nothing_to_say(tmp_path)


CHANNELS = {"conv_1": "n", "norm_1": "c", "relu": "c", "pool": "c", "conv_2": "c", "norm_2": "g"}


@pytest.mark.parametrize("zero", [0, 3])
@pytest.mark.parametrize("kind", ["batch", "channels", "both"])
def test_nets_of_images_give_the_numbers_of_the_model(kind, zero):
    """Norms of channels over a batch in parts exchange sums; bias is added once."""
    graph = image()

    def dims(op):
        names = {dim.name for dim in loop_nest(graph.call(op)).dims}
        return "b" if "b" in names else "", CHANNELS.get(op.name, "")

    axes = {"batch": (Axis("dp", 4), Axis("tp", 1)), "channels": (Axis("dp", 1), Axis("tp", 2))}
    plan = lowered(graph, axes.get(kind, (Axis("dp", 2), Axis("tp", 2))), dims, lambda: zero)
    assert error_of(plan, graph) < 1e-9
    assert ("channels(" in emitted_ranks(plan, graph)[0].source) == (kind != "channels")


@pytest.mark.parametrize("count", [2, 4])
def test_a_loss_over_classes_in_parts_exchanges_sums_of_its_rows(count):
    graph = block()
    split = {"cross_entropy": "v", "head": "n"}
    axes = (Axis("tp", count),)
    plan = lowered(graph, axes, lambda op: (split.get(op.name, split.get(op.kind, "")),))
    assert error_of(plan, graph) < 1e-9
    source = emitted_ranks(plan, graph)[1].source
    assert f"shared_cross_entropy(head, targets, {24 // count}, 32, tp)" in source


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_parts_of_parameters_that_are_no_equal_parts_are_gathered_and_kept(zero):
    g = GraphBuilder("odd")
    x = g.relu(g.linear(g.input("x", (6, 5)), 7, "up"))
    graph = training_graph(g.finish(g.linear(x, 6, "down")))
    plan = lowered(graph, (Axis("dp", 3),), lambda op: ("b",), lambda: zero)
    assert error_of(plan, graph) < 1e-9
    assert ("gather_parts(up_bias, 7, dp)" in emitted_ranks(plan, graph)[2].source) == (zero == 3)


def test_masks_of_the_whole_are_drawn_alike_on_all_ranks():
    """The numbers of one rank that has all, whatever is split; another seed gives others."""
    graph = dropped()
    given = example(graph)

    def both(op):
        names = {dim.name for dim in loop_nest(graph.call(op)).dims}
        along = {"up": "n", "drop_1": "c", "relu": "c", "down": "k", "drop_2": "c"}.get(op.name, "")
        return "b" if "b" in names else "", along

    def ran(axes, seed):
        emitted = emitted_ranks(lowered(graph, axes, both), graph)
        return emitted, run_threads(emitted, given.inputs, given.parameters, seed=seed)

    ((outputs, gradients),) = ran((Axis("dp", 1), Axis("tp", 1)), 7)[1]
    alone = SimpleNamespace(outputs=(outputs,), gradients=gradients)
    axes = (Axis("dp", 2), Axis("tp", 2))
    assert worst_error(*ran(axes, 7), axes, alone) < 1e-9
    assert worst_error(*ran(axes, 8), axes, alone) > 1e-3


def test_a_rank_is_written_line_by_line(is_golden):
    graph = perceptron()
    plan = megatron(graph, 2, 2)
    text = emit_rank(plan.program, graph, plan.stages[0], 1).source
    is_golden(Path(__file__).parent / "golden" / "rank.py.txt", text)


def test_ruff_has_nothing_to_say(tmp_path):
    for model in (perceptron, block):
        graph = model()
        for number, rank in enumerate(emitted_ranks(megatron(graph, 2, 2), graph)):
            (tmp_path / f"{graph.name}_{number}.py").write_text(rank.source)
    assert_ruff_has_nothing_to_say(tmp_path)


def test_a_rank_looks_up_the_rows_of_its_part_of_a_table():
    graph = block()
    plan = lowered(graph, (Axis("tp", 4),), lambda op: ("v" if op.name == "table" else "",))
    assert error_of(plan, graph) < 1e-9
    assert "vocab_embedding(ids, table_weight, 12)" in emitted_ranks(plan, graph)[2].source


def test_heads_are_turned_by_the_positions_of_the_whole_sequence():
    g = GraphBuilder("turned")
    q = g.linear(g.input("x", (2, 8, 16)), 16, "q")
    graph = training_graph(
        g.finish(g.linear(g.one("elementwise", q, name="turn", fn="rope", heads=4), 8, "out"))
    )
    dims = {"q": ("b", "n"), "turn": ("b", "h"), "out": ("b", "k")}
    plan = lowered(graph, (Axis("dp", 2), Axis("tp", 2)), lambda op: dims[op.name])
    assert error_of(plan, graph) < 1e-6  # angles are single precision in the reference
    assert "turn = rope(q, 2)" in emitted_ranks(plan, graph)[1].source


KINDS_OF_ATTENTION = {
    "all": {}, "causal": {"causal": True}, "window": {"causal": True, "window": 3},
    "chunks": {"causal": True, "chunk": 4}, "few heads": {"causal": True, "kv_heads": 2},
    "scaled": {"scale": 0.3}, "mask": {"mask": True},
    "causal, mask": {"causal": True, "mask": True}, "other keys": {"keys": 12},
    "earlier keys": {"keys": 12, "causal": True, "scale": 0.2},
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS_OF_ATTENTION)
@pytest.mark.parametrize("dims", [("s",), ("s", "h"), ("b", "s"), ("s", "s"), ("", "")])
def test_a_rank_attends_from_its_part_of_the_sequence(kind, dims):
    graph = attended(**KINDS_OF_ATTENTION[kind])
    axes = tuple(Axis(name, 2) for name in ("cp", "tp")[: len(dims)])

    def dims_of(op):
        names = {dim.name for dim in loop_nest(graph.call(op)).dims}
        known = dims if op.name == "attention" else ("s", "")[: len(dims)]
        return tuple(dim if dim in names else "" for dim in known)

    assert error_of(lowered(graph, axes, dims_of), graph) < 1e-9


@pytest.mark.parametrize("name", ["gpt", "llama", "t5", "bert", "transformer"])
def test_every_op_by_its_sequence_is_written_for_models_of_the_zoo(name):
    graph = training_graph(MODELS[name]())

    def dims_of(op):
        legal = legal_dims(graph.call(op), (Axis("cp", 2),))
        return ("s",) if ("s",) in legal else ("",)

    plan = lowered(graph, (Axis("cp", 2),), dims_of)
    source = emitted_ranks(plan, graph)[1].source
    assert ("attention_from(" in source) == (name != "bert")  # which sees all from everywhere
    assert error_of(plan, graph) < 1e-5  # angles are single precision in the reference


def test_angles_start_at_the_first_position_of_a_rank():
    g = GraphBuilder("turned")
    q = g.linear(g.input("x", (2, 8, 16)), 16, "q")
    turned = g.one("elementwise", q, name="turn", fn="rope", heads=4, start=3)
    graph = training_graph(g.finish(g.linear(turned, 8, "out")))
    plan = lowered(graph, (Axis("cp", 2),), lambda op: ("s",))
    assert error_of(plan, graph) < 1e-6  # angles are single precision in the reference
    first, second = (each.source for each in emitted_ranks(plan, graph))
    assert "rope(q, 4, first=3)" in first
    assert "rope(q, 4, first=7)" in second


def test_gradients_are_reduced_where_the_batch_is_split():
    graph = perceptron()
    source = emitted_ranks(megatron(graph, 2, 2), graph)[3].source
    assert "up_weight_grad_2 = all_reduce(up_weight_grad, dp)" in source
    assert "dp, _ = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])" in source
    assert "down_bias" not in source.partition("def step")[2].partition("# backward")[0]


LANGUAGE = """
import torch
from torch import nn
from torch.nn import functional as F

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(16, eps=1e-3), nn.LayerNorm(16)
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        b, s, _ = x.shape
        parts = self.qkv(self.norm_1(x)).chunk(3, -1)
        q, k, v = (y.view(b, s, 4, -1).transpose(1, 2) for y in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, s, -1))
        return x + self.down(F.gelu(self.up(self.norm_2(x)), approximate="tanh"))

class Language(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(24, 16), nn.Embedding(6, 16)
        self.layers = nn.Sequential(Layer(), Layer())
        self.head = nn.Linear(16, 24, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids, targets):
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1]))
        return F.cross_entropy(self.head(self.layers(x)).flatten(0, 1), targets.flatten())

def make(batch=4):
    torch.manual_seed(0)
    ids, targets = torch.randint(24, (2, batch, 6))
    return Language(), (ids, targets)
"""


@pytest.mark.parametrize(
    ("strategy", "count", "mesh"),
    [("tensor", 2, 0), ("tensor", 4, 1), ("fsdp", 2, 0), ("data", 4, 0)],
)
def test_a_captured_model_has_the_numbers_of_its_module_on_every_rank(
    strategy, count, mesh, tmp_path
):
    """Code of a file: lines are written where nodes say no more than ops."""
    torch.manual_seed(1)
    (tmp_path / "net.py").write_text(LANGUAGE)
    space = {}
    exec(LANGUAGE, space)
    module, (ids, targets) = space["make"](4)
    module.double()
    plan = plan_by_strategy(f"{tmp_path / 'net.py'}:make", strategy, count, mesh, batch=4)
    emitted = [emit_plan_rank(plan, rank) for rank in range(count)]
    loss = module(ids, targets)
    loss.backward()
    (name,) = emitted[0].outputs
    given = {"ids": ids, "targets": targets, f"{name}.grad": torch.ones((), dtype=torch.float64)}
    results = run_threads(emitted, given, module.state_dict())
    gradients = {name: p.grad for name, p in module.named_parameters()}
    whole = SimpleNamespace(outputs=({name: loss.detach()},), gradients=gradients)
    for rank in results:
        assert rank[1].keys() <= gradients.keys()
    assert worst_error(emitted, results, plan.stages[0].mesh.axes, whole) < 1e-9


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("self.l(x) * 0.1", "computes with the number 0.1"),
        ("torch.add(self.l(x), x, alpha=2)", "scales or rounds what it computes"),
        ("F.dropout(self.l(x), 0.3)", "calls dropout, which no line says exactly"),
        ("self.l(x).softmax(-1, dtype=torch.float64).float()", "computes in another type"),
    ],
)
def test_what_a_node_says_besides_is_refused_by_name(line, words, tmp_path):
    (tmp_path / "net.py").write_text(
        "import torch\nfrom torch.nn import functional as F\n\n\nclass Net(torch.nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n"
        "        self.l = torch.nn.Linear(8, 8)\n"
        f"    def forward(self, x):\n        return ({line}).mean()\n\n\n"
        "def make(batch=4):\n    return Net(), (torch.ones(batch, 8),)\n"
    )
    plan = plan_in_parts(f"{tmp_path / 'net.py'}:make", 1, batch=4)
    with pytest.raises(PlanError, match=words):
        emit_plan_rank(plan, 0)


class TestRefusals:
    def of(self, graph, axes, dims_of):
        plan = lowered(graph, axes, dims_of)
        with pytest.raises(PlanError) as refused:
            emit_rank(plan.program, graph, plan.stages[0], 0)
        return str(refused.value)

    def test_statistics_along_two_axes(self):
        def dims(op):
            return ("c", "c") if op.name == "first" else ("", "")

        message = self.of(normal(), (Axis("tp", 2), Axis("cp", 2)), dims)
        assert "'first' (layer_norm) exchanges statistics where c is split" in message

    def test_keys_of_attention_in_parts(self):
        def dims(op):
            return ("t" if op.name == "attention" else "",)

        message = self.of(block(), (Axis("cp", 2),), dims)
        assert "'attention' (attention) exchanges statistics where t is split" in message

    def test_scores_that_are_capped(self):
        message = self.of(attended(softcap=20.0), (Axis("tp", 2),), lambda op: ("",))
        assert "'attention' (attention) caps its scores" in message

    def test_uneven_shares(self):
        message = self.of(perceptron(), (Axis("dp", 2, (3, 1)),), lambda op: ("b",))
        assert "8 elements along dp=2 are uneven; emit without --rank" in message

    def test_windows_that_overlap(self):
        def dims(op):
            return ("h" if op.name == "pool" else "",)

        message = self.of(image(), (Axis("sp", 2),), dims)
        assert "'pool' (pool) is split along h, where windows overlap" in message

    def test_ops_that_have_no_line(self):
        g = GraphBuilder("images")
        x = g.one("resize", g.input("x", (2, 3, 8, 8)), name="larger", output=(16, 16))
        graph = training_graph(g.finish(g.conv(x, 4, 3)))
        message = self.of(graph, (Axis("dp", 2),), lambda op: ("b",))
        assert "'larger' (resize) has no line yet" in message

    def test_ranks_that_are_not_there(self):
        graph = perceptron()
        plan = megatron(graph, 1, 2)
        with pytest.raises(PlanError, match="rank: found 2; ranks are 0 to 1"):
            emit_rank(plan.program, graph, plan.stages[0], 2)


class TestCommand:
    def run(self, *words):
        return CliRunner().invoke(partita, ["emit", *map(str, words)])

    def plan(self, folder, parts=1, **options):
        path = folder / "plan.json"
        path.write_bytes(plan_in_parts("gpt2@16", parts, batch=2, **options).to_json())
        return path

    def test_a_rank_is_written_into_a_file(self, tmp_path):
        target = tmp_path / "rank0.py"
        result = self.run(self.plan(tmp_path), "--rank", 0, "-o", target)
        assert result.exit_code == 0, result.output
        assert "use it with: step(inputs, load_shards(model.state_dict()), make_groups())" in (
            result.stdout
        )
        source = target.read_text()
        assert "h_11_mlp_gelu = F.gelu(h_11_mlp_c_fc)  # [2, 16, 3072]" in source
        answer = self.run(self.plan(tmp_path), "--rank", 0, "--json")
        printed = json.loads(answer.stdout)
        assert (printed["format"], printed["rank"], printed["source"]) == (
            "partita/emitted@1", 0, source
        )  # fmt: skip

    def test_pipelines_are_refused(self, tmp_path):
        result = self.run(self.plan(tmp_path, 2), "--rank", 0)
        assert result.exit_code == 2
        assert "rank: the plan has 2 stages and 1 micro-batches; a rank is written for one" in (
            result.stderr
        )

    def captured(self, folder):
        (folder / "net.py").write_text(
            "import torch\n\n\nclass Net(torch.nn.Linear):\n"
            "    def forward(self, x):\n        return 0.1 * super().forward(x) + 3\n\n\n"
            "def make(batch=4):\n    return Net(6, 8), (torch.ones(batch, 6),)\n"
        )
        return f"{folder / 'net.py'}:make"

    def test_what_no_line_says_exactly_is_refused(self, tmp_path):
        path = tmp_path / "plan.json"
        plan = plan_in_parts(self.captured(tmp_path), 1, batch=4, training=False)
        path.write_bytes(plan.to_json())
        result = self.run(path, "--rank", 0)
        assert result.exit_code == 2
        assert "'mul' (elementwise) computes with the number 0.1" in result.stderr
        assert "emit without --rank" in result.stderr

    @pytest.mark.parametrize("name", ["net.json", "net.txt"])
    @pytest.mark.parametrize("words", [["--rank", 0], []])
    def test_saved_graphs_of_captured_models_are_refused(self, name, words, tmp_path):
        write_graph(tmp_path / name, load(self.captured(tmp_path), training=False).graph)
        path = tmp_path / "plan.json"
        plan = plan_in_parts(str(tmp_path / name), 1, training=False)
        path.write_bytes(plan.to_json())
        result = self.run(path, *words)
        assert result.exit_code == 2
        assert "has not all numbers of its code" in result.stderr
        assert "plan the PyTorch model it was made from" in result.stderr
