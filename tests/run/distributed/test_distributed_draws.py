"""What is random is the same in a plain run, a piped one and on ranks, however they are split."""

import copy

import pytest

torch = pytest.importorskip("torch")

from distributed_models import make  # noqa: E402
from distributed_plans import (  # noqa: E402
    apart,
    exported_once,
    graph_by_name,
    pipeline,
    plan_of,
    random_plan_on,
    sgd,
)
from distributed_ranks import run_on_ranks  # noqa: E402

import partita  # noqa: E402
from partita.capture import export_module  # noqa: E402
from partita.errors import CaptureError  # noqa: E402
from partita.graph.loops import loop_nest  # noqa: E402
from partita.graph.rebatch import batch_dims  # noqa: E402
from partita.plans import Axis, Mesh, OpSplit, Schedule, Stage  # noqa: E402
from partita.run.distributed import engine as engines  # noqa: E402
from partita.run.distributed.model import RunModel  # noqa: E402
from partita.run.draws import Draw, first_place, sample_seed  # noqa: E402

SEED = 7
RANDOM_PLANS = range(2)  # dropout split along features; attention along heads in micro-batches


def along_samples(graph, op):
    """The dim of an op that its samples run along; none where it may not be split."""
    nest = loop_nest(graph.call(op))
    for names, accesses in ((op.outputs, nest.outputs), (op.inputs, nest.inputs)):
        for name, access in zip(names, accesses, strict=True):
            dim = batch_dims(graph).get(name)
            if dim is not None and access.dims[dim]:
                outer = access.dims[dim][0]
                return "" if any(d.name == outer and d.whole for d in nest.dims) else outer
    return ""


def plans():
    """Two stages, replicas with and without micro-batches and ZeRO, splits inside ops."""
    graph = graph_by_name("masks")
    yield "two stages, run again", pipeline(graph, 2, "1f1b", 4, checkpointing="full")
    for name, count, weights, zero, checkpointing in (
        ("replicas", 1, (), 0, "none"),
        ("replicas, run again", 2, (), 0, "full"),
        ("unequal replicas", 2, (3, 1), 0, "none"),
        ("replicas, ZeRO 3", 2, (), 3, "none"),
    ):
        mesh = Mesh((Axis("x", 2, weights),), (0, 1))
        splits = tuple(
            OpSplit(op.name, (along_samples(graph, op),), zero)
            for op in graph.ops
            if op.phase == "forward"
        )
        stage = Stage("stage0", mesh, splits, checkpointing=checkpointing)
        yield name, plan_of(graph, [stage], Schedule("1f1b", count))
    for seed in RANDOM_PLANS:
        yield f"random plan {seed}", random_plan_on(2, seed, graph)


def on_ranks(rank):
    """Losses of two steps and the gradients of the second, by plan."""
    engines.RunModel = exported_once
    ends = {}
    graph = graph_by_name("mlp-dropout")
    replicas = pipeline(graph, 1, "1f1b", 2, data_parallel=2, weights=(3, 1))
    for name, plan in [*plans(), ("dropout alone, replicas", replicas)]:
        module, args = make("mlp-dropout" if "alone" in name else "masks")
        engine = engines.execute(
            plan, module, optimizer=sgd, device="cpu", seed=SEED, keep_gradients=True
        )
        losses = [engine.step(*args) for _ in range(2)]
        is_in_segments = [plan is not None for plan in engine.walk.segments.values()]
        gradients = engine.full_gradients() or {}
        arrays = {name: gradient.numpy() for name, gradient in gradients.items()}
        ends[name] = losses, arrays, any(is_in_segments)
        engine.board.close()
    return ends


def plain(module, args, step, draws, parts=1):
    """Loss and gradients of a step in one process, the batch in one call or in several."""
    module.zero_grad()
    total = 0.0
    for part in range(parts):
        rows = [arg[part * len(arg) // parts : (part + 1) * len(arg) // parts] for arg in args]
        with draws.step(step, sample=part * len(args[0]) // parts):
            loss = module(*rows) / parts
            loss.backward()
        total += float(loss.detach())
    return total, {name: p.grad.clone() for name, p in module.named_parameters()}


@pytest.fixture(scope="module")
def ends(tmp_path_factory):
    ends = run_on_ranks(2, on_ranks, folder=tmp_path_factory.mktemp("draws"))
    assert [end.code for end in ends] == [0, 0], ends[0].stderr + ends[1].stderr
    return ends


def wanted(name):
    """Two steps of the plain module at the places of the ranks."""
    module, args = make(name)
    draws = partita.placed_draws(module, args, seed=SEED)
    optimizer, losses, gradients = sgd(module.parameters()), [], {}
    for step in range(2):
        loss, gradients = plain(module, args, step, draws)
        optimizer.step()
        losses.append(loss)
    return losses, gradients


def test_every_plan_draws_what_the_plain_module_draws(ends):
    plain_runs = {True: wanted("mlp-dropout"), False: wanted("masks")}
    for name, (own, arrays, _) in ends[0].result.items():
        losses, gradients = plain_runs["alone" in name]
        assert losses[0] != losses[1]
        own_gradients = {key: torch.from_numpy(array) for key, array in arrays.items()}
        assert own == pytest.approx(losses, rel=1e-5), name
        assert apart(own_gradients, gradients) < 1e-5, name


def test_replicas_with_dropout_run_in_segments(ends):
    assert ends[0].result["dropout alone, replicas"][2]
    assert not ends[0].result["replicas, ZeRO 3"][2]


def test_a_piped_module_draws_what_the_plain_module_draws():
    module, args = make("masks")
    draws = partita.placed_draws(module, args, seed=SEED)
    loss, gradients = plain(module, args, 0, draws)
    for recompute in (False, True):
        piped = partita.pipe(copy.deepcopy(module), args, devices=2, recompute=recompute)
        own, own_gradients = plain(piped, args, 0, draws)
        assert own == loss
        assert apart(own_gradients, gradients) < 1e-6


def test_samples_keep_their_masks_however_the_batch_is_cut():
    module, args = make("masks")
    draws = partita.placed_draws(module, args, seed=SEED)
    loss, gradients = plain(module, args, 3, draws)
    for parts in (2, 8):
        own, own_gradients = plain(module, args, 3, draws, parts)
        assert own == pytest.approx(loss, rel=1e-6)
        assert apart(own_gradients, gradients) < 1e-5
    other, _ = plain(module, args, 4, draws)
    assert other != loss


def test_each_draw_knows_the_dim_of_its_samples():
    module, args = make("masks")
    table = RunModel(module, args, {}, torch.device("cpu")).table
    whole = [Draw(dim=0, each=1)] * 3  # activations, attention, path
    assert list(table.draws) == [*whole, Draw(dim=1, each=1), Draw(), Draw(dim=0, each=1)]
    random = [node.name for node in export_module(module, args).record.nodes if node.is_random]
    assert list(table.first) == random


def test_rows_of_several_lines_belong_to_their_sample():
    class Windows(torch.nn.Module):
        def forward(self, x):
            return torch.nn.functional.dropout(x.reshape(-1, 4), 0.5).sum()

    args = (torch.randn(3, 2, 4),)
    assert RunModel(Windows(), args, {}, torch.device("cpu")).table.draws == (Draw(dim=0, each=2),)


def test_generators_are_left_as_they_were():
    module, args = make("masks")
    draws = partita.placed_draws(module, args, seed=SEED)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    plain(module, args, 0, draws)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_second_call_in_one_step_is_refused():
    module, args = make("masks")
    draws = partita.placed_draws(module, args, seed=SEED)
    with draws.step(0):
        module(*args)
        with pytest.raises(CaptureError, match="draw 7 of 6"):
            module(*args)


def test_looking_at_a_module_changes_no_buffer():
    module = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4))
    before = {name: each.clone() for name, each in module.state_dict().items()}
    partita.placed_draws(module, (torch.randn(4, 3, 8, 8),))
    assert all(torch.equal(each, before[name]) for name, each in module.state_dict().items())


def test_places_of_runs_steps_and_samples_differ():
    places = {first_place(seed, step) for seed in range(30) for step in range(300)}
    assert len(places) == 9000
    assert all(0 <= place < 2**63 - 2**20 for place in places)
    start = first_place(0, 0)
    seeds = {sample_seed(start + number, s) for number in range(100) for s in range(100)}
    assert len(seeds) == 10_000
