"""A plan that runs gives the numbers of the model in one process, whatever the plan."""

from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from distributed_models import make  # noqa: E402
from distributed_plans import (  # noqa: E402
    adamw,
    apart,
    exported_once,
    graph_by_name,
    graph_of,
    in_half,
    in_one_process,
    pipeline,
    planned_shape,
    random_plan_on,
    sgd,
    shaped,
)
from distributed_ranks import run_on_ranks  # noqa: E402

from partita.run.distributed import engine as engines  # noqa: E402

CLOSE = 1e-5
EXACT = 0.0
HALF_CLOSE = 0.05  # bf16 rounds the gradients of a share otherwise
OPTIMIZERS = {"sgd": sgd, "adamw": adamw}

# name -> (model, settings of the plan, optimizer, how close)
TWO_RANKS = {
    "1f1b": ("gpt", {"groups": 2, "name": "1f1b", "count": 4}, "adamw", CLOSE),
    "fewer micro-batches than stages": (
        "mlp", {"groups": 2, "name": "1f1b", "count": 1}, "sgd", EXACT,
    ),
    "gpipe of a residual network": (
        "resnet", {"groups": 2, "name": "gpipe", "count": 4}, "sgd", EXACT,
    ),
    "skips between stages": ("unet", {"groups": 2, "name": "zb-h1", "count": 2}, "sgd", EXACT),
    "zero bubble": ("gpt", {"groups": 2, "name": "zb-h2", "count": 4}, "adamw", CLOSE),
    "interleaved": (
        "mlp", {"groups": 2, "name": "interleaved", "count": 2, "chunks": 2}, "sgd", EXACT,
    ),
    "V": (
        "unet", {"groups": 2, "name": "zb-v", "count": 4, "chunks": 2, "waves": True}, "sgd",
        CLOSE,
    ),
    "full checkpointing": (
        "gpt", {"groups": 2, "name": "1f1b", "count": 2, "checkpointing": "full"}, "sgd", CLOSE,
    ),
    "layers of an LSTM": ("lstm", {"groups": 2, "name": "1f1b", "count": 2}, "adamw", EXACT),
    "encoder, decoder, tied weights": (
        "t5", {"groups": 2, "name": "zb-h1", "count": 2}, "adamw", CLOSE,
    ),
    "experts": ("moe", {"groups": 2, "name": "zb-h1", "count": 2}, "sgd", CLOSE),
    "data parallel": (
        "mlp", {"groups": 1, "name": "1f1b", "count": 2, "data_parallel": 2}, "sgd", CLOSE,
    ),
    "shares of 3 to 1": (
        "mlp",
        {"groups": 1, "name": "1f1b", "count": 1, "data_parallel": 2, "weights": (3, 1)},
        "sgd", CLOSE,
    ),
    "batch statistics of all replicas": (
        "resnet", {"groups": 1, "name": "1f1b", "count": 2, "data_parallel": 2}, "sgd", CLOSE,
    ),
    "ZeRO 1": (
        "gpt", {"groups": 1, "name": "1f1b", "count": 2, "data_parallel": 2, "zero": 1}, "adamw",
        CLOSE,
    ),
    "ZeRO 2": (
        "t5", {"groups": 1, "name": "1f1b", "count": 2, "data_parallel": 2, "zero": 2}, "adamw",
        CLOSE,
    ),
    "ZeRO 3": (
        "gpt", {"groups": 1, "name": "1f1b", "count": 2, "data_parallel": 2, "zero": 3}, "adamw",
        CLOSE,
    ),
    "M shape": (
        "gpt", {"devices": ((0, 1), (0,), (1,)), "name": "1f1b", "count": 4}, "adamw", CLOSE,
    ),
    "NN shape, data gradients first": (
        "mlp", {"devices": ((0, 1), (0,), (0, 1), (1,)), "name": "zb-h1", "count": 4}, "sgd", CLOSE,
    ),
    "K shape, devices in any order, ZeRO 3": (
        "t5", {"devices": ((0,), (1,), (1, 0)), "name": "gpipe", "count": 2, "zero": 3}, "adamw",
        CLOSE,
    ),
    "NN shape as it is planned": ("gpt", {"shape": "nn", "count": 2, "world": 2}, "adamw", CLOSE),
    "K shape as it is planned": ("t5", {"shape": "k", "count": 2, "world": 2}, "sgd", CLOSE),
}  # fmt: skip


def run_case(rank, model, plan, optimizer, steps=2, without=None):
    """Errors of losses, gradients and parameters after some steps, on rank 0."""
    module, args = make(model)
    engine = engines.execute(
        plan, module, optimizer=OPTIMIZERS[optimizer], device="cpu", keep_gradients=True
    )
    with mock.patch.object(engines, "RunModel", exported_once):
        losses = [engine.step(*args) for _ in range(steps)]
    state, gradients = engine.full_state_dict(), engine.full_gradients()
    engine.board.close()
    if rank:
        return losses
    alone = make(model)[0]
    count = plan.schedule.num_microbatches
    wanted, grads, after = in_one_process(alone, args, count, steps, OPTIMIZERS[optimizer])
    after = {name: tensor for name, tensor in after.items() if not without or without not in name}
    off = max(abs(a - b) for a, b in zip(losses, wanted, strict=True))
    return {"loss": off, "gradients": apart(gradients, grads), "state": apart(state, after)}


def run_cases(rank, cases):
    results = {}
    for name, (model, plan_settings, optimizer, _) in cases.items():
        planned = shaped if "devices" in plan_settings else pipeline
        planned = planned_shape if "shape" in plan_settings else planned
        plan = planned(graph_by_name(model), **plan_settings)
        results[name] = run_case(rank, model, plan, optimizer)
    return results


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    ends = run_on_ranks(2, run_cases, TWO_RANKS, folder=tmp_path_factory.mktemp("ranks"))
    assert [end.code for end in ends] == [0, 0], "\n".join(end.stderr for end in ends)
    return ends[0].result


@pytest.mark.parametrize("name", TWO_RANKS)
def test_two_ranks_give_the_numbers_of_one_process(two_ranks, name):
    close = TWO_RANKS[name][3]
    assert two_ranks[name]["state"] <= close
    assert two_ranks[name]["gradients"] <= close
    assert two_ranks[name]["loss"] <= (close and 5e-6)


FOUR_RANKS = {
    "shard groups of replicas, ZeRO 3": (
        "gpt",
        {"groups": 1, "name": "1f1b", "count": 2, "data_parallel": 4, "zero": 3, "hsdp": 2},
        "adamw", CLOSE,
    ),
    "shard groups of replicas, ZeRO 2": (
        "t5",
        {"groups": 1, "name": "1f1b", "count": 1, "data_parallel": 4, "zero": 2, "hsdp": 2},
        "sgd", CLOSE,
    ),
    "shard groups of replicas, ZeRO 1": (
        "mlp",
        {"groups": 1, "name": "1f1b", "count": 2, "data_parallel": 4, "zero": 1, "hsdp": 2},
        "adamw", CLOSE,
    ),
    "NN shape as it is planned": ("gpt", {"shape": "nn", "count": 2, "world": 4}, "sgd", CLOSE),
    "K shape as it is planned": ("t5", {"shape": "k", "count": 2, "world": 4}, "adamw", CLOSE),
}  # fmt: skip


def run_wide(rank):
    """Gradients of a model in bf16 that are added up in f32, by a pipeline and in shard groups."""
    graph = graph_of(*in_half(*make("mlp")), "f32")
    results = {}
    for name, wanted in {
        "pipeline": {"groups": 4, "name": "1f1b", "count": 4},
        "groups": {
            "groups": 1, "name": "1f1b", "count": 2, "data_parallel": 4, "zero": 3, "hsdp": 2,
        },
    }.items():  # fmt: skip
        plan = pipeline(graph, **wanted)
        assert plan.model.grad_dtype == "f32"
        module, args = in_half(*make("mlp"))
        with mock.patch.object(engines, "RunModel", exported_once):
            engine = engines.execute(
                plan, module, optimizer=sgd, device="cpu", keep_gradients=True, example=args
            )
            engine.step(*args)
        gradients = engine.full_gradients()
        engine.board.close()
        if not rank:
            count = wanted["count"]
            alone = in_half(*make("mlp"))[0]
            _, wide, _ = in_one_process(alone, args, count, 1, sgd, torch.float32)
            alone = in_half(*make("mlp"))[0]
            _, narrow, _ = in_one_process(alone, args, count, 1, sgd)
            types = {own.dtype for own in gradients.values()}
            results[name] = types, apart(gradients, wide), apart(gradients, narrow)
    return results


def run_grouped(rank):
    return run_cases(rank, FOUR_RANKS), run_wide(rank)


def test_four_ranks_in_shard_groups_and_shapes_give_the_numbers_of_one_process(tmp_path):
    ends = run_on_ranks(4, run_grouped, folder=tmp_path)
    assert [end.code for end in ends] == [0] * 4, "\n".join(end.stderr for end in ends)
    grouped, wide = ends[0].result
    for name, errors in grouped.items():
        assert max(errors["state"], errors["gradients"]) <= FOUR_RANKS[name][3], name
    types, as_wide, as_narrow = wide["pipeline"]
    assert types == {torch.float32}
    assert as_wide <= EXACT < as_narrow  # the sums are f32, not bf16
    types, as_wide, _ = wide["groups"]
    assert types == {torch.float32}
    assert as_wide <= HALF_CLOSE


def run_random(rank, world, models, seed, shared=False, replicas=True):
    results = {}
    for model in models:
        graph = graph_by_name(model)
        plan = random_plan_on(world, seed, graph, shared=shared, replicas=replicas)
        # Running statistics depend on the order of micro-batches, which these plans choose.
        results[model] = run_case(rank, model, plan, "sgd", without="running_")
    return results


@settings(max_examples=1, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_random_plans_on_four_ranks_give_the_numbers_of_one_process(tmp_path_factory, seed):
    folder = tmp_path_factory.mktemp("ranks")
    ends = run_on_ranks(4, run_random, 4, ("gpt", "resnet", "lstm", "moe"), seed, folder=folder)
    assert [end.code for end in ends] == [0] * 4, "\n".join(end.stderr for end in ends)
    for model, errors in ends[0].result.items():
        assert errors["state"] <= CLOSE, model
        assert errors["gradients"] <= CLOSE, model
    assert ends[1].result == ends[2].result == ends[3].result  # losses are the same on every rank


EIGHT_RANKS = {
    "a stage on each, data gradients first": (
        "mlp", {"groups": 8, "name": "zb-h1", "count": 4}, "sgd", CLOSE,
    ),
    "four stages of two replicas, ZeRO 1": (
        "mlp", {"groups": 4, "name": "1f1b", "count": 2, "data_parallel": 2, "zero": 1}, "adamw",
        CLOSE,
    ),
}  # fmt: skip


def test_eight_ranks_give_the_numbers_of_one_process(tmp_path):
    ends = run_on_ranks(8, run_cases, EIGHT_RANKS, folder=tmp_path)
    assert [end.code for end in ends] == [0] * 8, "\n".join(end.stderr for end in ends)
    for name, errors in ends[0].result.items():
        assert max(errors["state"], errors["gradients"]) <= EIGHT_RANKS[name][3], name
    assert all(end.result == ends[1].result for end in ends[1:])  # losses


def run_seeds(rank, world, cases):
    return [
        run_random(rank, world, (case[0],), *case[1:], replicas=False)[case[0]] for case in cases
    ]


def test_plans_that_once_failed_give_the_numbers_of_one_process(tmp_path):
    cases = [
        ("moe", 880899),  # a stage in which nothing is differentiated
        ("moe", 15882),  # one weight is gathered alone and, elsewhere, with its bias
        ("t5", 619812),  # ZeRO 3 with tied weights in one stage
        ("mlp", 103482, True),  # lines of a mesh whose devices do not ascend
    ]
    ends = run_on_ranks(4, run_seeds, 4, cases, folder=tmp_path)
    assert [end.code for end in ends] == [0] * 4, "\n".join(end.stderr for end in ends)
    for case, errors in zip(cases, ends[0].result, strict=True):
        assert errors["state"] <= CLOSE, case
        assert errors["gradients"] <= CLOSE, case
