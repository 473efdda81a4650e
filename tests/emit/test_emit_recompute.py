"""Stages that run something again: the same numbers, and less kept."""

import functools
import random
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import partita
from partita.capture import export_module
from partita.capture.reference_module import example_inputs, reference_module
from partita.emit.plans import emit_plan
from partita.emit.recompute import RecomputedNodes
from partita.emit.stages import emit
from partita.run.sequential import load_source
from partita.zoo import build
from tests.emit.models import Gpt, ids
from tests.emit.plans import plan_in_parts
from tests.emit.test_emit_models import WRITTEN, equal_parts, written_model
from tests.emit.test_emit_source import assert_only_expected_names
from tests.emit.transparency import Model, assert_ruff_has_nothing_to_say, same
from tests.shallow import GPT2

T = torch.Tensor
PRODUCTS = ("linear", "conv", "matmul", "attention")


def nodes(it: Model) -> list[str]:
    """The nodes that ops of the graph are named after, in order."""
    return list(dict.fromkeys(it.captured.node_of(op) for op in it.ops))


def everything(it: Model, starts: set[str]) -> RecomputedNodes:
    return RecomputedNodes(everything=True, starts=frozenset(starts))


def light(it: Model, again: set[str]) -> RecomputedNodes:
    return RecomputedNodes(nodes=frozenset(again), others=frozenset(set(nodes(it)) - again))


def cheap(it: Model) -> list[str]:
    """The nodes that are no products."""
    kind = {it.captured.node_of(op): op.kind for op in it.captured.graph.ops}
    return [node for node in nodes(it) if not kind[node].startswith(PRODUCTS)]


class Watch(TorchDispatchMode):
    """Which operators run, and which of the tensors they make are still there."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: list[str] = []
        self.made: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.ran.append(func.overloadpacket.__name__)
        for out in result if isinstance(result, tuple | list) else [result]:
            if isinstance(out, T) and not func.is_view:
                storage = out.untyped_storage()
                self.made[StorageWeakRef(storage)] = storage.nbytes()
        return result

    def kept_bytes(self) -> int:
        return sum(size for ref, size in self.made.items() if not ref.expired())


def watched(it: Model, again: RecomputedNodes | None) -> tuple[int, list[str]]:
    """Bytes of activations kept after the forward, and what the backward runs."""
    stages = it.stages(dict.fromkeys(it.ops, 0), {} if again is None else {0: again})
    with Watch() as forward:
        result = stages(*it.args, **it.kwargs)
    kept = forward.kept_bytes()
    end = result if isinstance(result, T) else result["loss"]
    with Watch() as backward:
        end.sum().backward()
    for name, buffer in it.captured.module.named_buffers():
        buffer.data.copy_(it.before[name])
    return kept, backward.ran


# The same numbers.


@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.parametrize("seed", range(3))
def test_stages_that_run_everything_again_give_the_same_numbers(name, seed):
    it, generator = written_model(name, training=True), random.Random(seed)
    known = nodes(it)
    starts = set(generator.sample(known, generator.randrange(len(known) // 2)))
    stages = generator.randint(1, 3)
    it.assert_same(
        equal_parts(it, stages), again={k: everything(it, starts) for k in range(stages)}
    )


@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.parametrize("seed", range(3))
def test_stages_that_run_some_ops_again_give_the_same_numbers(name, seed):
    it, generator = written_model(name, training=True), random.Random(seed)
    some = cheap(it) if seed else nodes(it)  # products are never named by a plan, yet may be
    again = set(generator.sample(some, generator.randint(1, len(some))))
    stages = generator.randint(1, 3)
    it.assert_same(equal_parts(it, stages), again={k: light(it, again) for k in range(stages)})


def test_what_is_made_of_nothing_is_no_piece_and_keeps_its_device():
    it = written_model("gpt", training=True)
    again = {"arange", "embedding", "embedding_1"} & set(nodes(it))
    for way in (light(it, again), everything(it, {"embedding", "add"})):
        source = it.stages(dict.fromkeys(it.ops, 0), {0: way}).emitted.source
        assert "def piece()" not in source
        assert "torch.arange(16, device=" in source


def test_a_sum_is_no_reason_to_stretch_a_piece():
    it = written_model("gpt", training=True)
    norms = {node for node in nodes(it) if node.startswith(("layer_norm", "dropout"))}
    source = it.stages(dict.fromkeys(it.ops, 0), {0: light(it, norms)}).emitted.source
    assert "        for block in self.h:\n            x = block(x)\n" in source
    it.assert_same(dict.fromkeys(it.ops, 0), again={0: light(it, norms)})


def test_a_stage_that_only_its_neighbour_runs_again_keeps_its_ways():
    it = written_model("gpt", training=True)
    it.assert_same(equal_parts(it, 2), again={1: everything(it, set())})


def test_random_numbers_that_are_kept_and_drawn_again_stay_in_step():
    class Dropped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(8, 8) for _ in range(3))

        def forward(self, x: T) -> T:
            x = torch.dropout(torch.tanh(self.a(x)), 0.5, True)
            y = torch.dropout(torch.tanh(self.b(x)), 0.5, True)
            return self.c(x) * torch.dropout(y, 0.5, True)

    args = (torch.randn(4, 8),)
    it = Model(export_module(Dropped(), args), args, {})
    for again in ({"tanh", "dropout"}, {"tanh", "dropout_1"}, {"dropout", "dropout_2"}):
        it.assert_same(dict.fromkeys(it.ops, 0), again={0: light(it, again)})


# Less is kept, and no more is run than was said.


def test_everything_again_keeps_what_passes_between_pieces():
    it = written_model("gpt", training=True)
    blocks = {node for node in nodes(it) if node.startswith("layer_norm")}
    before, _ = watched(it, None)
    after, ran = watched(it, everything(it, blocks))
    assert after < before / 2
    assert "native_layer_norm" in ran


def test_batch_norms_that_run_again_count_their_batches_once():
    it = written_model("resnet", training=True)
    again = everything(it, {node for node in nodes(it) if node.startswith("conv2d")})
    before, _ = watched(it, None)
    after, ran = watched(it, again)
    assert after < before
    assert "native_batch_norm" in ran
    it.assert_same(dict.fromkeys(it.ops, 0), again={0: again})


def test_what_reads_a_buffer_that_it_changes_runs_once():
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(()))
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: T) -> T:
            x = torch.tanh(torch.tanh(self.a(x)))
            self.count.add_(1)
            return torch.tanh(self.b(torch.tanh(x * self.count)))

    args = (torch.randn(2, 4),)
    it = Model(export_module(Counting(), args), args, {})
    it.assert_same(dict.fromkeys(it.ops, 0), again={0: everything(it, set())})


def test_an_activation_before_a_product_is_run_again_without_the_product():
    it = written_model("gpt", training=True)
    gelus = {node for node in nodes(it) if node.startswith("gelu")}
    before, without = watched(it, None)
    after, ran = watched(it, light(it, gelus))
    width, tokens = 4 * 32, 2 * 16
    assert before - after == len(gelus) * tokens * width * 4
    assert ran.count("gelu") == len(gelus)
    assert ran.count("addmm") == without.count("addmm") == 0


def test_what_several_products_read_is_made_again_once_and_they_are_not_run_again():
    class Three(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(16)
            self.q, self.k, self.v = (nn.Linear(16, 16) for _ in range(3))

        def forward(self, x: T) -> T:
            x = self.norm(x)
            return torch.tanh(self.q(x)) * torch.tanh(self.k(x)) * torch.tanh(self.v(x))

    args = (torch.randn(3, 5, 16),)
    it = Model(export_module(Three(), args), args, {})
    again = light(it, {"layer_norm"})
    source = it.stages(dict.fromkeys(it.ops, 0), {0: again}).emitted.source
    assert "        with RUN_AGAIN:\n                x = self.norm(x)\n" in source
    assert_only_expected_names(source)
    it.assert_same(dict.fromkeys(it.ops, 0), again={0: again})
    _, ran = watched(it, again)
    assert ran.count("native_layer_norm") == 1
    assert ran.count("addmm") == 0


# What it looks like.


def test_the_code_shows_what_runs_again(tmp_path):
    torch.manual_seed(0)
    args = (ids(97, 2, 16), ids(97, 2, 16))
    captured = export_module(Gpt(layers=2), args)
    it = Model(captured, args, {})
    norms = {node for node in nodes(it) if node.startswith("layer_norm")}
    ways = {
        "whole": everything(it, set()),
        "halves": everything(it, norms),
        "light": light(it, set(cheap(it))),
    }
    for name, again in ways.items():
        emitted = emit(captured, dict.fromkeys(it.ops, 0), again={0: again})
        assert_only_expected_names(emitted.source)
        (tmp_path / f"{name}.py").write_text(emitted.source)
    resnet = written_model("resnet", training=True)
    emitted = emit(resnet.captured, dict.fromkeys(resnet.ops, 0), again={0: everything(it, set())})
    assert_only_expected_names(emitted.source)
    (tmp_path / "resnet.py").write_text(emitted.source)
    assert_ruff_has_nothing_to_say(tmp_path)
    assert "in the backward" not in emit(captured, dict.fromkeys(it.ops, 0)).source
    halves = (tmp_path / "halves.py").read_text()
    assert HALVES in halves
    assert "Runs its forward again in the backward" in halves
    assert "Runs cheap ops again in the backward" in (tmp_path / "light.py").read_text()


HALVES = """
        def piece(x: Tensor) -> Tensor:
            return x + self.attn(self.ln_1(x))

        x = checkpoint(piece, x, use_reentrant=False)

        def piece_2(x: Tensor) -> Tensor:
            return x + self.mlp(self.ln_2(x))

        return checkpoint(piece_2, x, use_reentrant=False)
"""


# Plans.


def recomputed(plan, **decisions):
    """The plan with other decisions in its first stage."""
    first, *rest = plan.stages
    return replace(plan, stages=(replace(first, **decisions), *rest))


@functools.cache
def trained_gpt2():
    """A module, what it reads, its loss, and the gradient of every parameter."""
    graph = build(f"{GPT2}@16", batch=1, loss=True)
    module, args = reference_module(graph).train(), example_inputs(graph)
    loss = module(*args)
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in module.named_parameters()}
    return module, args, loss.detach(), gradients


@pytest.mark.parametrize("level", ["yes", "light"])
def test_a_plan_is_emitted_with_what_it_runs_again(level):
    plan = plan_in_parts(f"{GPT2}@16", 2, batch=1)
    ops = [split.op for split in plan.stages[0].splits]
    if level == "yes":
        starts = tuple(op for op in ops[1:] if op.endswith(("ln_1", "ln_2")))
        plan = recomputed(plan, checkpointing="full", segments=starts)
    else:
        plan = recomputed(
            plan,
            checkpointing="selective",
            recomputed=tuple(op for op in ops if op.endswith("gelu_tanh")),
        )
    emitted = emit_plan(plan)
    first, second = emitted.source.split("class Stage1(")
    assert "in the backward" in first.split("class Stage0(")[1]
    assert "in the backward" not in second
    loaded = load_source(emitted.source)
    module, args, wanted, gradients = trained_gpt2()
    module.zero_grad(set_to_none=True)
    stages = loaded.build_stages(dict(module.named_parameters()))
    outcome = loaded.run_stages(stages, *args)
    outcome.backward()
    assert same(outcome, wanted)
    for name, p in module.named_parameters():
        assert same(p.grad, gradients[name]), name


def test_inference_runs_nothing_again():
    plan = recomputed(plan_in_parts(f"{GPT2}@16", 2, batch=1, training=False), checkpointing="full")
    assert "checkpoint" not in emit_plan(plan).source


def test_a_piped_module_runs_again_what_was_asked_for():
    module = Gpt(layers=2)
    args = (ids(97, 2, 16), ids(97, 2, 16))
    piped = partita.pipe(module, args, devices=2, recompute=True)
    assert "checkpoint(" in piped.source
    torch.manual_seed(1)
    module(*args)["loss"].backward()
    wanted = {name: p.grad.clone() for name, p in module.named_parameters()}
    module.zero_grad(set_to_none=True)
    torch.manual_seed(1)
    piped(*args)["loss"].backward()
    for name, p in module.named_parameters():
        torch.testing.assert_close(p.grad, wanted[name], rtol=1e-5, atol=1e-6)
