"""A plan as one training script that runs as it is, and is the user's to edit.

The script builds the model again (a user's `file.py:name` is imported, of a model of the zoo the
reference module is made), has a data stub of the right shapes and types, an optimizer, checkpoints,
and hands the plan to `partita.execute`. Files are named relative to the script, so that the folder
can be moved.
"""

import inspect
import os
from pathlib import Path
from typing import Any

import torch

from partita.capture.python_file import is_python_spec, read_function, read_module
from partita.capture.reference_module import DTYPES, id_limits
from partita.emit.text import docstring, literal, quoted, statement
from partita.errors import PlanError
from partita.graph.backward import forward_part
from partita.graph.record import Graph
from partita.jobs.launch_command import launch_lines, num_ranks, run_refusal
from partita.jobs.workload import code_of, load_model
from partita.plans import Plan

OPTIMIZERS = {
    "sgd": "torch.optim.SGD(parameters, lr=LEARNING_RATE)",
    "momentum": "torch.optim.SGD(parameters, lr=LEARNING_RATE, momentum=0.9)",
    "adagrad": "torch.optim.Adagrad(parameters, lr=LEARNING_RATE)",
    "rmsprop": "torch.optim.RMSprop(parameters, lr=LEARNING_RATE)",
    "adam": "torch.optim.Adam(parameters, lr=LEARNING_RATE)",
    "adamw": "torch.optim.AdamW(parameters, lr=LEARNING_RATE)",
}

MAIN = '''\
def build_optimizer(parameters):
    """The optimizer of the parameters, or shards of them, that a rank holds."""
    return {optimizer}


def main():
    """Train, from the last checkpoint on where there is one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--checkpoint", type=Path, help="folder; a run goes on from what is there")
    parser.add_argument("--every", type=int, default=10, help="steps from checkpoint to checkpoint")
    options = parser.parse_args()

    engine = partita.execute(
        HERE / PLAN,
        build_model(),
        optimizer=build_optimizer,
        device=options.device,
        example=next(batches(0)),
    )
    level = logging.WARNING if engine.rank else logging.INFO  # one rank tells
    logging.basicConfig(format="%(message)s", level=level)
    with engine:
        last = latest(options.checkpoint) if options.checkpoint else None
        start = engine.load(last) if last else 0
        if start:
            log.info("goes on after step %d", start)
        steps = range(start + 1, options.steps + 1)
        for step, batch in zip(steps, batches(start), strict=False):
            began = time.perf_counter()
            loss = engine.step(*batch)  # forward, backward and optimizer
            log.info("step %d: loss %.6f, %.3f s", step, loss, time.perf_counter() - began)
            if options.checkpoint and step % options.every == 0:
                engine.save(place_of(options.checkpoint, step))


if __name__ == "__main__":
    main()
'''


def training_script(
    plan: Plan, plan_file: str | Path, script: str | Path | None = None, model: str | None = None
) -> str:
    """The source of a script that trains as a plan says; `script` is where it will stand.

    Of a plan for file.py:function the file is run to see what it gives: the one that was captured,
    or `model`, which the user names.
    """
    graph = load_model(plan).graph
    refusal = run_refusal(plan, graph)
    if refusal is not None:
        raise PlanError(f"there is no training script for this plan: {refusal}", field="plan")
    folder = Path(script).parent if script is not None else Path()
    name = Path(script).name if script is not None else "train.py"
    spec = code_of(plan.model, model)
    model = (
        _own_model(plan, spec, forward_part(graph), folder)
        if is_python_spec(spec)
        else _zoo_model(plan, forward_part(graph), folder)
    )
    lines = [
        *_head(plan, name),
        "",
        *_imports(model),
        "",
        "HERE = Path(__file__).parent",
        f"PLAN = {quoted(_relative(plan_file, folder))}",
        f"BATCH = {plan.model.batch}",
        "LEARNING_RATE = 1e-3",
        "log = logging.getLogger(__name__)",
        "",
        "",
        *model.splitlines(),
        "",
        "",
        "",
    ]
    return "\n".join(lines) + MAIN.replace("{optimizer}", OPTIMIZERS[plan.model.optimizer])


def _head(plan: Plan, name: str) -> list[str]:
    ranks, count = num_ranks(plan), plan.schedule.num_microbatches
    size = plan.model.batch // count
    cpu, gpu = launch_lines(plan, name)
    many = f"{len(plan.stages)} stage{'s' * (len(plan.stages) > 1)}"
    return docstring(
        [
            f"Train {plan.model.spec} on {ranks} rank{'s' * (ranks > 1)}, as the plan says.",
            "",
            f"    {cpu}    # on this machine's CPU",
            f"    {gpu}    # one GPU for each rank",
            "",
            f"{many}, {count} micro-batch{'es' * (count > 1)} of "
            f"{size} sample{'s' * (size > 1)}, schedule {plan.schedule.name}.",
            "The functions below are yours to change: weights, data and optimizer do not change",
            "the plan; layers and sizes do, and what is not the planned model is refused before",
            "the first step. Every rank runs this file.",
        ],
        0,
    )


def _imports(model: str) -> list[str]:
    uses_path = "sys.path" in model
    return [
        "import argparse",
        "import itertools",
        "import logging",
        *(["import sys"] if uses_path else []),
        "import time",
        "from pathlib import Path",
        "",
        "import torch",
        "",
        "import partita",
        *(
            ["from partita.capture.reference_module import reference_module"]
            if "reference_module(" in model
            else []
        ),
        "from partita.run.distributed.checkpoints import latest, place_of",
    ]


def _zoo_model(plan: Plan, graph: Graph, folder: Path) -> str:
    spec = plan.model.spec
    named = quoted(_relative(spec, folder)) if Path(spec).is_file() else quoted(spec)
    where = f"str(HERE / {named})" if Path(spec).is_file() else named
    dtype = quoted(plan.model.dtype)
    built = (
        [f"    graph = partita.read_graph({where})"]
        if Path(spec).is_file() and Path(spec).suffix == ".txt"
        else statement(f"partita.model({where}, batch=BATCH, dtype={dtype})", 4, "graph = ")
    )
    lines = [
        "def build_model():",
        *docstring([f"The reference module of {spec}: its forward gives the loss."], 4),
        *built,
        "    return reference_module(graph, seed=0)",
        "",
        "",
        *_data(plan, [(tensor.name, tensor) for tensor in graph.inputs], id_limits(graph)),
    ]  # fmt: skip
    return "\n".join(lines)


def _own_model(plan: Plan, spec: str, graph: Graph, folder: Path) -> str:
    path, _, name = spec.rpartition(":")
    module, args, kwargs = read_module(spec, plan.model.batch)
    if kwargs:
        raise PlanError("the example has keyword arguments", fix="give positional ones", field=spec)
    maker = read_function(spec)
    is_class = isinstance(maker, type)
    takes_batch = not is_class and "batch" in inspect.signature(maker).parameters
    own = next((str(p.dtype) for p in module.parameters()), "")
    wanted = DTYPES[plan.model.dtype]
    cast = f".to({wanted})" if own and own != str(wanted) else ""
    made = f"{name}()" if is_class else f"{name}({'batch=BATCH' if takes_batch else ''})[0]"
    near = _relative(Path(path).parent, folder)
    lines = ["def build_model():"]
    lines += docstring([f"The module of {Path(path).name}: its forward gives the loss."], 4)
    if near != ".":
        lines.append(f"    sys.path.insert(0, str(HERE / {quoted(near)}))")
    lines += [
        f"    from {Path(path).stem} import {name}",
        "",
        "    torch.manual_seed(0)  # the same weights on every rank",
        f"    return {made}{cast}",
        "",
        "",
    ]
    tensors = iter(graph.inputs)
    given: list[tuple[str, Any]] = []
    for number, arg in enumerate(args):
        if isinstance(arg, torch.Tensor):
            tensor = next(tensors)
            given.append((tensor.name, tensor))
        elif arg is None or isinstance(arg, bool | int | float | str):
            given.append((f"argument{number}", arg))
        else:
            raise PlanError(
                f"argument {number} of the example is a {type(arg).__name__}",
                fix="give tensors and numbers, or write the loop with partita.execute",
                field=spec,
            )
    lines += _data(plan, given, id_limits(graph))
    return "\n".join(lines)


def _data(plan: Plan, given: list[tuple[str, Any]], limits: dict[str, int]) -> list[str]:
    """The stub that gives random data, in the shapes and types that were planned."""
    lines = [
        "def batches(start):",
        *docstring(
            [
                "The arguments of every step, on the whole batch; random until your data are here.",
                "",
                "`start` steps were done before: a run that goes on sees what it would have seen.",
            ],
            4,
        ),
        "    for step in itertools.count(start):",
        "        generator = torch.Generator().manual_seed(step)",
    ]
    names = []
    for number, (name, value) in enumerate(given):
        own = name if name.isidentifier() and name not in ("step", "generator") else f"arg{number}"
        own = own if own not in names else f"{own}_{number}"
        names.append(own)
        lines += statement(_random(value, limits.get(name, 2), plan.model.batch), 8, f"{own} = ")
    tail = "," if len(names) == 1 else ""
    return [*lines, f"        yield {', '.join(names)}{tail}"]


def _random(value: Any, limit: int, batch: int) -> str:
    if not hasattr(value, "shape"):
        return str(literal(value))
    sizes = list(map(str, value.shape))
    if sizes and value.shape[0] == batch:
        sizes[0] = "BATCH"
    shape = f"({', '.join(sizes)}{',' if len(sizes) == 1 else ''})"
    dtype = DTYPES[value.dtype]
    if dtype.is_floating_point:
        made = f"torch.randn({shape}, generator=generator)"
        return made if dtype is torch.float32 else f"{made}.to({dtype})"
    made = f"torch.randint({limit}, {shape}, generator=generator)"
    return made if dtype is torch.int64 else f"{made}.to({dtype})"


def _relative(path: str | Path, folder: Path) -> str:
    return Path(os.path.relpath(path, folder or ".")).as_posix()
