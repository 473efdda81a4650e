"""Plans of small models, and what a run of them is held against: the model in one process."""

import functools
import random
from dataclasses import replace

import torch
from distributed_models import make

from partita.capture import capture
from partita.cluster import resolve
from partita.graph import training_graph
from partita.graph.loops import loop_nest
from partita.jobs.workload import load
from partita.plans import (
    Axis,
    ClusterRef,
    Mesh,
    OpSplit,
    Origin,
    Plan,
    Prediction,
    Schedule,
    Stage,
)
from partita.run.distributed.model import RunModel

CLUSTER = "8xA100"


def graph_of(module, args, grad_dtype=""):
    """The training graph of a module."""
    return training_graph(capture(module, args), "sgd", grad_dtype=grad_dtype)


def in_half(module, args):
    """A module and its arguments in bf16."""
    own = [arg.bfloat16() if arg.is_floating_point() else arg for arg in args]
    return module.bfloat16(), tuple(own)


@functools.cache
def graph_by_name(name):
    """The training graph of one of the small models."""
    return graph_of(*make(name))


EXPORTS: dict[str, RunModel] = {}


def exported_once(module, args, kwargs, device):
    """Exports of a model are made once for all cases of a process: every make() is the same."""
    key = f"{module} {next(module.parameters()).dtype}"
    if key not in EXPORTS:
        EXPORTS[key] = RunModel(module, args, kwargs, device)
    return EXPORTS[key]


def plan_of(graph, stages, schedule, batch=8):
    """A plan with what a run does not look at left out."""
    cluster = resolve(CLUSTER)
    ref = load(graph, optimizer="sgd", spec="model.py:make").ref()
    update = next((op for op in graph.ops if op.phase == "update"), None)
    if update is not None:
        own, summed = (graph.tensor(name).dtype for name in update.inputs[:2])
        ref = replace(ref, grad_dtype=summed if summed != own else "")
    return Plan(
        replace(ref, batch=batch),
        ClusterRef(CLUSTER, cluster.num_devices, cluster.fingerprint()),
        tuple(stages),
        Prediction(1.0, 1.0, 1.0, 1.0, (1.0,), (1.0,)),
        Origin("test", "feasible", "", 0, 0.0, ""),
        schedule,
    )


def pipeline(
    graph, groups, name, count, *, chunks=1, data_parallel=1, zero=0, waves=False, weights=(),
    batch=8, hsdp=0, **settings,
):  # fmt: skip
    """Stages of equal numbers of ops, each on one device or split along the batch."""
    ops = [op for op in graph.ops if op.phase == "forward"]
    number = groups * chunks
    axes = (Axis("x", data_parallel, weights),) if data_parallel > 1 else ()
    if hsdp:
        axes = (Axis("x", data_parallel // hsdp, (), True), Axis("y", hsdp))
    stages = []
    for i in range(number):
        chunk, group = divmod(i, groups)
        group = groups - 1 - group if waves and chunk % 2 else group
        first = group * data_parallel
        mesh = Mesh(axes, tuple(range(first, first + data_parallel)))
        own = ops[i * len(ops) // number : (i + 1) * len(ops) // number]
        splits = tuple(OpSplit(op.name, _along_batch(graph, op, axes), zero) for op in own)
        stages.append(Stage(f"stage{i}", mesh, splits, **settings))
    return plan_of(graph, stages, Schedule(name, count), batch)


def shaped(graph, devices, name, count, *, zero=0, batch=8, **settings):
    """Stages of equal numbers of ops on these devices, along the batch where there are several."""
    ops = [op for op in graph.ops if op.phase == "forward"]
    number = len(devices)
    stages = []
    for i, own in enumerate(devices):
        axes = (Axis("x", len(own)),) if len(own) > 1 else ()
        mine = ops[i * len(ops) // number : (i + 1) * len(ops) // number]
        splits = tuple(OpSplit(op.name, _along_batch(graph, op, axes), zero) for op in mine)
        stages.append(Stage(f"stage{i}", Mesh(axes, own), splits, **settings))
    return plan_of(graph, stages, Schedule(name, count), batch)


def planned_shape(graph, shape, count, *, world, batch=8):
    """One of Tessel's shapes as it is planned, in a searched order."""
    from partita.jobs.shapes import shape_plan

    workload = load(graph, optimizer="sgd", spec="model.py:make")
    plan = shape_plan(shape, workload, resolve(f"{world}xA100"), count, shared=0.2)
    assert plan.schedule.name == "searched"
    return plan_of(graph, plan.stages, plan.schedule, batch)


def _along_batch(graph, op, axes):
    if not axes:
        return ()
    dims = [dim.name for dim in loop_nest(graph.call(op)).dims if not dim.whole]
    return ("b" if "b" in dims else "",) * len(axes)


def random_plan_on(world, seed, graph, *, shared=False, replicas=True):
    """A random plan that uses so many devices; with `shared` some stages have those of others."""
    from partita.plans import device_groups, shared_stages
    from tests.lower.random_plans import random_plan

    chance = random.Random(seed)
    while True:
        plan = random_plan(chance, graph, shared=shared, replicas=replicas)
        if shared and not shared_stages(device_groups(plan.stages)):
            continue
        if len({d for stage in plan.stages for d in stage.mesh.devices}) == world:
            return plan_of(graph, plan.stages, plan.schedule)


def in_one_process(module, args, count, steps, make_optimizer, grad_dtype=None):
    """Losses, gradients of the last step and the state after it, of the module by itself.

    With `grad_dtype` micro-batches add to gradients of that type.
    """
    optimizer = make_optimizer(module.parameters())
    losses, gradients = [], {}
    for _ in range(steps):
        optimizer.zero_grad()
        total = 0.0
        sums = {}
        for m in range(count):
            part = [arg[m * len(arg) // count : (m + 1) * len(arg) // count] for arg in args]
            loss = module(*part)
            total += float(loss.detach())
            (loss / count).backward()
            if grad_dtype is not None:
                for name, p in module.named_parameters():
                    own = p.grad.to(grad_dtype)
                    sums[name] = sums[name] + own if name in sums else own
                optimizer.zero_grad()
        for name, p in module.named_parameters():
            if name in sums:
                p.grad = sums[name].to(p.dtype)
        gradients = sums or {
            name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None
        }
        optimizer.step()
        losses.append(total / count)
    return losses, gradients, {k: v.clone() for k, v in module.state_dict().items()}


def apart(computed, expected):
    """The largest difference relative to the size of a tensor.

    What is zero but for rounding (a bias before a norm) is measured by the others' size.
    """
    largest = max(float(right.abs().max()) for right in expected.values())
    worst = 0.0
    for name, right in expected.items():
        difference = (computed[name].double() - right.double()).abs()
        scale = max(float(right.abs().max()), 0.1 * largest)
        worst = max(worst, float(difference.max()) / scale)
    return worst


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-3)
