"""Runs the cases of test_torch_pipelining on gloo: one process imports torch, then forks the ranks.

    python torch_ranks.py FOLDER        writes FOLDER/rank-R.json: case -> what was found

FOLDER/plan.json is a plan of the model `example` here, for two devices.
"""

import functools
import json
import multiprocessing
import random
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from partita.capture import export_module
from partita.emit.ranks import emit_rank
from partita.emit.stages import emit
from partita.jobs.schedule import schedule
from partita.plans import Axis, read_plan
from partita.run.local.reference import example as example_of
from partita.run.local.reference import reference
from partita.run.sequential import SequentialStages, load_source
from partita.run.torch_pipelining import (
    ChainStage,
    TorchPipeline,
    chain_of,
    pipeline_of_plan,
    torch_pipeline,
)
from partita.schedules.named import NAMED
from partita.schedules.order_problem import order_of_solution
from partita.schedules.shapes import ShapeOptions, shape
from partita.schedules.torch_comms import in_loss_order, with_comms
from partita.schedules.torch_csv import TorchSchedule, torch_schedule
from tests.emit import rank_models

LAYERS, WIDTH = 8, 6
RANDOM_SPLIT = 0  # a seed whose splits can be written and need every collective


class Model(nn.Module):
    """Eight layers and a loss; the target is read by the last stage alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return ((x - target) ** 2).mean()


def named(name: str, ranks: int, held: int, count: int) -> TorchSchedule:
    return in_loss_order(torch_schedule(NAMED[name].order(ranks, held, count)))


def searched() -> TorchSchedule:
    """Found for two devices with two stages each under a cap, weight gradients apart."""
    place = shape("wave", 2, ShapeOptions(backward_span=1, weight_span=1))
    result = schedule(place, memory=5, microbatches=5, method="greedy")
    order = order_of_solution(result.problem, result.outcome.solution)
    return in_loss_order(torch_schedule(order))


@functools.cache
def cases() -> dict[str, TorchSchedule]:
    computed = {
        "gpipe on 2": named("gpipe", 2, 1, 4),
        "gpipe on 4": named("gpipe", 4, 1, 4),
        "1f1b on 2": named("1f1b", 2, 1, 4),
        "1f1b on 4": named("1f1b", 4, 1, 6),
        "interleaved on 2": named("interleaved", 2, 2, 4),
        "interleaved on 4": named("interleaved", 4, 2, 4),
        "zb-h1 on 4": named("zb-h1", 4, 1, 6),
        "zb-v on 2": named("zb-v", 2, 2, 3),
        "zb-v on 4": named("zb-v", 4, 2, 8),
        "dualpipe-v on 2": named("dualpipe-v", 2, 2, 4),
        "searched on 2": searched(),
    }
    comms = ("1f1b on 4", "interleaved on 2", "searched on 2")
    return computed | {f"{name}, comms": with_comms(computed[name]) for name in comms}


def example(batch: int = 8) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """The model and a batch, the same in every process."""
    torch.manual_seed(0)
    module = Model().double()
    x, target = (torch.randn(batch, WIDTH, dtype=torch.float64) for _ in range(2))
    return module, (x, target)


@functools.cache
def stages_of(count: int) -> tuple[nn.Module, tuple[ChainStage, ...], list[str]]:
    """The whole model, its layers as a chain of so many stages, and the names of its inputs."""
    whole, args = example(2)
    captured = export_module(whole, args)
    stage_of: dict[str, int] = {}
    for op in captured.graph.ops:
        layer = op.scope.split(".")[1] if "." in op.scope else None
        before = max(stage_of.values(), default=0)
        stage_of[op.name] = int(layer) * count // LAYERS if layer else before
    emitted = emit(captured, stage_of)
    stages = SequentialStages(captured, emitted).stages
    names = [name for name in emitted.inputs if name is not None]
    return whole, chain_of(stages, emitted.inputs, emitted.outputs), names


def compare(pipeline: TorchPipeline, names: list[str]) -> dict[str, object]:
    """Losses and gradients of a step beside those of the whole model in this process."""
    count = pipeline.runtime._n_microbatches
    whole, (x, target) = example(2 * count)
    losses = [whole(*pair) for pair in zip(x.chunk(count), target.chunk(count), strict=True)]
    (sum(losses) / count).backward()
    wanted = {name: p.grad for name, p in whole.named_parameters()}
    losses_here = pipeline.step(dict(zip(names, (x, target), strict=True)))
    errors = [
        ((parameter.grad - wanted[name]).norm() / wanted[name].norm()).item()
        for number in pipeline.local
        for name, parameter in pipeline.chain[number].stage.named_parameters()
    ]
    for number in pipeline.local:
        pipeline.chain[number].zero_grad()
    far = [abs(a.item() - b.item()) for a, b in zip(losses_here, losses, strict=False)]
    return {"compared": len(errors), "worst": max(errors), "losses": len(losses_here),
            "loss": max(far, default=0)}  # fmt: skip


def run_case(order: TorchSchedule, rank: int, group: dist.ProcessGroup) -> dict[str, object]:
    _, chain, names = stages_of(order.num_stages)
    return compare(torch_pipeline(chain, order, rank=rank, group=group), names)


def run_deferred(rank: int, group: dist.ProcessGroup) -> dict[str, object]:
    """What the verifier refuses, run all the same: receives put off as torch's option does it."""
    _, chain, names = stages_of(4)
    order = named("zb-v", 2, 2, 3)
    pipeline = torch_pipeline(chain, order, rank=rank, group=group)
    pipeline.runtime._defer_pp_recv = True
    pipeline.runtime._prepare_schedule_with_comms(pipeline.runtime.pipeline_order)
    return compare(pipeline, names)


def run_plan(file: Path, rank: int, group: dist.ProcessGroup) -> dict[str, object]:
    """The emitted stages of a plan in the plan's order."""
    whole, _ = example()
    plan = read_plan(file)
    pipeline = pipeline_of_plan(plan, dict(whole.named_parameters()), rank=rank, group=group)
    return compare(pipeline, ["x", "target"])


@functools.cache
def rank_sources() -> dict[str, object]:
    """Steps written for single ranks of a mesh of four: by name, graph, axes, sources."""
    graph, attended = rank_models.block(), rank_models.attended(causal=True, chunk=4)
    axes = (Axis("a", 2), Axis("b", 2))
    sequence = {"attention": ("s", "h"), **dict.fromkeys(("q", "k", "v"), ("s", "n"))}
    plans = {
        "tensor and data parallel": (graph, rank_models.megatron(graph, 2, 2, zero=2)),
        "any split": (graph, rank_models.at_random(graph, axes, random.Random(RANDOM_SPLIT))),
        "context and tensor parallel": (
            attended,
            rank_models.lowered(attended, axes, lambda op: sequence.get(op.name, ("s", ""))),
        ),
    }
    return {
        name: (graph, plan.stages[0].mesh.axes,
               [emit_rank(plan.program, graph, plan.stages[0], rank) for rank in range(4)])
        for name, (graph, plan) in plans.items()
    }  # fmt: skip


def run_emitted(rank: int) -> dict[str, float]:
    """How far this rank's outputs and gradients are from shards of the whole model's."""
    errors = {}
    for name, (graph, axes, emitted) in rank_sources().items():
        given = example_of(graph)
        module = load_source(emitted[rank].source)
        shards = module.load_shards(given.parameters)
        outcome = module.step(given.inputs, shards, module.make_groups())
        whole = reference(graph, given.inputs, given.parameters)
        errors[name] = rank_models.rank_error(emitted[rank], outcome, axes, rank, whole)
    return errors


def rank_main(rank: int, folder: str) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=4,
        timeout=timedelta(seconds=40),
    )  # fmt: skip
    two = dist.new_group([0, 1])
    outcome: dict[str, object] = {}
    for name, order in cases().items():
        if rank < len(order.rows):
            group = two if len(order.rows) == 2 else dist.group.WORLD
            outcome[name] = run_case(order, rank, group)
    outcome["emitted"] = run_emitted(rank)
    if rank < 2:
        outcome["plan on 2"] = run_plan(Path(folder, "plan.json"), rank, two)
        outcome["deferred"] = run_deferred(rank, two)
    Path(folder, f"rank-{rank}.json").write_text(json.dumps(outcome))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    for stages in {case.num_stages for case in cases().values()}:
        stages_of(stages)  # once, before the ranks part
    rank_sources()
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=rank_main, args=(rank, sys.argv[1])) for rank in range(4)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    sys.exit(max(abs(process.exitcode or 0) for process in ranks))
