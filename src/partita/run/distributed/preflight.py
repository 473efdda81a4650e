"""What is refused before the first step, by all ranks with one sentence.

Every rank checks what it can see; then all tell each other what they found and which versions, plan
and model they have. A rank that stands alone is named.
"""

import hashlib
import platform
from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist

from partita import __version__
from partita.capture.translate import DTYPES
from partita.errors import PartitaError, PlanError
from partita.graph.rebatch import batch_of
from partita.graph.record import Graph
from partita.jobs.workload import load_model
from partita.plans import Plan
from partita.run.distributed.comm import Waiting

R = TypeVar("R")


def agree(check: Callable[[], R], waiting: Waiting) -> R:
    """Run a check on every rank; if it fails on one, it fails on all, with that rank's words."""
    error: PartitaError | None = None
    result: R | None = None
    try:
        result = check()
    except PartitaError as refused:
        error = refused
    said: list[str | None] = [None] * dist.get_world_size()
    waiting.now = True
    dist.all_gather_object(said, None if error is None else str(error))
    waiting.now = False
    if error is not None:
        raise error
    for rank, text in enumerate(said):
        if text is not None:
            raise PlanError(f"rank {rank} cannot run the plan: {text}")
    return result  # type: ignore[return-value]


def check_alike(plan: Plan, graph: Graph, device: torch.device) -> None:
    """All ranks must have one torch, one partita, one plan, one model, one kind of device."""
    own = {
        "torch": torch.__version__,
        "partita": __version__,
        "python": ".".join(platform.python_version_tuple()[:2]),
        "plan": hashlib.sha256(plan.to_json()).hexdigest()[:12],
        "model": graph.fingerprint(),
        "kind of device": device.type,
    }
    known: list[dict[str, str]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(known, own)
    for rank, theirs in enumerate(known):
        for what, text in known[0].items():
            if theirs[what] != text:
                raise PlanError(
                    f"rank {rank} has {what} {theirs[what]}, and rank 0 has {text}",
                    fix="give all ranks the same",
                    field="ranks",
                )


def check_model(plan: Plan, graph: Graph) -> None:
    """The module must be the one that was planned, in its dtype, at its size of batch."""
    dtype = graph.parameters[0].dtype if graph.parameters else plan.model.dtype
    if dtype != plan.model.dtype:
        wanted = next((str(key) for key, name in DTYPES.items() if name == plan.model.dtype), "")
        raise PlanError(
            f"the module's parameters are {dtype}, and the plan is for {plan.model.dtype}",
            fix=f"cast the module with .to({wanted}), or plan it as it is",
            field="dtype",
        )
    if batch_of(graph) != plan.model.batch:
        raise PlanError(
            f"the step has a batch of {batch_of(graph)}, and the plan one of {plan.model.batch}",
            fix=f"give batches of {plan.model.batch} samples, or plan with --batch "
            f"{batch_of(graph)}",
            field="batch",
        )
    if graph.fingerprint() != plan.model.fingerprint:
        _check_arguments(plan, graph)
        raise PlanError(
            f"the plan is for another model (fingerprint {plan.model.fingerprint}, this one has "
            f"{graph.fingerprint()})",
            fix=f"run the module that was planned ({plan.model.spec}), with its loss where it was "
            "planned with one, or plan this one",
            field="model",
        )


def _check_arguments(plan: Plan, graph: Graph) -> None:
    """A model that differs may be the same one with other arguments: say which."""
    try:
        planned = {tensor.name: tensor for tensor in load_model(plan).graph.inputs}
    except PartitaError:  # the plan names a model that cannot be had here
        return
    for tensor in graph.inputs:
        wanted = planned.get(tensor.name, tensor)
        if tensor.dtype != wanted.dtype:
            name = next((str(key) for key, own in DTYPES.items() if own == wanted.dtype), "")
            raise PlanError(
                f"argument {tensor.name} is {tensor.dtype}, and the plan is for {wanted.dtype}",
                fix=f"cast it with .to({name}), or plan with what the step gives",
                field="dtype",
            )
        if tensor.shape != wanted.shape:
            raise PlanError(
                f"argument {tensor.name} is {list(tensor.shape)}, and the plan is for "
                f"{list(wanted.shape)}",
                fix="give arguments of the planned size, or plan for these",
                field="shape",
            )


def check_training(plan: Plan, graph: Graph) -> None:
    """A run trains: the model must give a loss to differentiate."""
    loss = graph.tensor(graph.outputs[0])
    if not plan.model.training:
        raise PlanError(
            "the plan is for inference", fix="plan without --infer to train", field="plan"
        )
    if loss.shape:
        raise PlanError(
            f"the module returns a tensor of {list(loss.shape)} first, and no loss",
            fix="return the loss from the module, or plan and run partita.with_loss(module, loss)",
            field="model",
        )
