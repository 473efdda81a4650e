"""How a plan is started: the command line, or why there is none."""

import shlex
from pathlib import Path

from partita.capture.onnx_file import is_onnx_spec
from partita.errors import PartitaError
from partita.graph.record import Graph
from partita.jobs.workload import load_cluster
from partita.plans import Plan

OPTIMIZERS = ("sgd", "momentum", "adagrad", "rmsprop", "adam", "adamw")


def num_ranks(plan: Plan) -> int:
    """One process for each device that the plan uses."""
    return len({device for stage in plan.stages for device in stage.mesh.devices})


def run_refusal(plan: Plan, graph: Graph) -> str | None:
    """Why a plan cannot be trained with as it is, in one sentence; None if it can."""
    spec = plan.model.spec
    if not plan.model.training:
        return "it is for inference; plan without --infer"
    if is_onnx_spec(spec):
        return "an ONNX file has no PyTorch module; plan file.py:function, which gives one"
    if plan.model.matmul_dtype:
        return narrow_products(plan)
    loss = graph.tensor(graph.outputs[0])
    if loss.shape:
        return (
            f"the model gives a tensor of {list(loss.shape)} and no loss; "
            "let its forward return the loss"
        )
    if plan.model.optimizer not in OPTIMIZERS:
        return (
            f"PyTorch has no optimizer {plan.model.optimizer!r}; plan with one of "
            f"{', '.join(OPTIMIZERS)}"
        )
    return None


def narrow_products(plan: Plan) -> str:
    """Why a plan with products in fp8 does not run as it is, and what to do."""
    return (
        f"its linear layers multiply in {plan.model.matmul_dtype}, and a run multiplies in the "
        f"model's {plan.model.dtype}; run it so with partita run --matmul-dtype "
        f"{plan.model.dtype}, or plan without matmul-dtype"
    )


def launch_lines(plan: Plan, program: str) -> list[str]:
    """The lines that start `program` on CPU ranks of one machine, on GPUs, on several machines."""
    alone = f"torchrun --standalone --nproc-per-node {num_ranks(plan)} {program}"
    return [alone, f"{_everywhere(plan, program) or alone} --device cuda"]


def _everywhere(plan: Plan, program: str) -> str:
    """The line to type on each of several machines; nothing where there is one."""
    ranks, nodes = num_ranks(plan), _nodes(plan)
    if nodes == 1:
        return ""
    return (
        f"torchrun --nnodes {nodes} --nproc-per-node {ranks // nodes} --rdzv-backend c10d "
        f"--rdzv-endpoint HOST:29500 {program}"
    )


def _nodes(plan: Plan) -> int:
    """Machines of the cluster, where all have as many of the plan's devices."""
    try:
        devices = load_cluster(plan).devices
    except PartitaError:  # its file may be elsewhere by now
        return 1
    used = {device for stage in plan.stages for device in stage.mesh.devices}
    counts: dict[str, int] = {}
    for device in used:
        if device < len(devices):
            counts[devices[device].node] = counts.get(devices[device].node, 0) + 1
    return len(counts) if len(set(counts.values())) == 1 else 1


def run_command(plan: Plan, file: str | Path) -> str:
    """The command that runs a plan in a file: on its machine, or on each of its machines."""
    program = f"-m partita run {shlex.quote(str(file))}"
    return _everywhere(plan, program) or launch_lines(plan, program)[0]
