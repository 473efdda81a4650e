"""`partita emit`: a plan as Python source."""

from typing import TYPE_CHECKING

import click

from partita.cli.base import Output, OutputFile, common_options, output_option
from partita.errors import InputError
from partita.units import count

if TYPE_CHECKING:
    from partita.plans import Plan


@click.command()
@click.argument("plan")
@output_option("Write the module here: stages.py. Without it, it goes to the terminal.")
@click.option("--rank", metavar="R", type=int, help="Write what one rank does, splits included.")
@click.option("--training", is_flag=True, help="Write a script that trains as the plan says.")
@click.option(
    "--model", metavar="FILE.PY:NAME", help="Run this file; else the plan's, if it is unchanged."
)
@common_options
def command(
    plan: str,
    output: OutputFile | None,
    rank: int | None,
    training: bool,
    model: str | None,
    out: Output,
) -> int:
    """Write the stages of a PLAN as one Python module that needs nothing but PyTorch.

    A class per stage holds its parameters under the original names; build_stages(state_dict)
    loads the original's weights, run_stages(stages, ...) runs one after the other. The model of
    the plan is built again: a zoo model as its reference module; for file.py:function that file is
    run, if it is the one that was captured (by its hash) or is named with --model. The
    code is for one micro-batch, and whole: splits within a stage are not written out; what a stage
    runs again in the backward is, by torch.utils.checkpoint.

    With --rank R it is the step of one rank of a plan of one stage, forward and backward, op by op:
    a line for each, with the shape of the rank's shard, and the collectives between them as calls
    of torch.distributed. load_shards(state_dict) cuts the rank's parameters out.

    With --training it is a script to start with torchrun, on CPU ranks or, with --device cuda, on
    GPUs: model, data stub, optimizer, checkpoints, and the plan handed to partita.execute.
    """
    from partita.capture.installed import need_torch
    from partita.plans import read_plan

    need_torch("writing a plan's stages")
    from partita.emit.plans import emit_plan

    record = read_plan(plan)
    if training:
        if rank is not None:
            raise InputError(
                "a training script is for all ranks", fix="leave --rank out", field="--training"
            )
        return _emit_training(record, plan, model, output, out)
    if rank is not None:
        return _emit_rank(record, plan, model, rank, output, out)
    emitted = emit_plan(record, model)
    lines = emitted.source.count("\n")
    if output is None:
        out.show(emitted.source.rstrip("\n"))
    else:
        output.write(emitted.source)
        many = f"{len(emitted.class_names)} stage{'s' if len(emitted.class_names) > 1 else ''}"
        out.show(f"{many} of {record.model.spec} in {output.path}, {count(lines)} lines")
        out.show("use it with: stages = build_stages(model.state_dict())")
    if emitted.constants:
        out.note(f"build_stages needs constants for {', '.join(emitted.constants)}")
    if any(len(stage.mesh.devices) > 1 for stage in record.stages):
        out.note("stages on several devices are written whole; their splits are in the plan")
    out.result(
        {
            "format": "partita/emitted@1",
            "plan": plan,
            "model": record.model.spec,
            "stages": list(emitted.class_names),
            "lines": lines,
            "constants": list(emitted.constants),
            "source": emitted.source if output is None else None,
            "output": None if output is None else str(output.path),
        }
    )
    return 0


def _emit_rank(
    record: "Plan", plan: str, model: str | None, rank: int, output: OutputFile | None, out: Output
) -> int:
    from partita.emit.plans import emit_plan_rank

    emitted = emit_plan_rank(record, rank, model)
    lines = emitted.source.count("\n")
    if output is None:
        out.show(emitted.source.rstrip("\n"))
    else:
        output.write(emitted.source)
        out.show(f"rank {rank} of {record.model.spec} in {output.path}, {count(lines)} lines")
        out.show("use it with: step(inputs, load_shards(model.state_dict()), make_groups())")
    out.result(
        {
            "format": "partita/emitted@1",
            "plan": plan,
            "model": record.model.spec,
            "rank": rank,
            "lines": lines,
            "gradients": sorted(emitted.gradients),
            "source": emitted.source if output is None else None,
            "output": None if output is None else str(output.path),
        }
    )
    return 0


def _emit_training(
    record: "Plan", plan: str, model: str | None, output: OutputFile | None, out: Output
) -> int:
    from partita.emit.training import training_script
    from partita.jobs.launch_command import launch_lines

    path = None if output is None else output.path
    source = training_script(record, plan, path, model)
    launch = launch_lines(record, "train.py" if path is None else str(path))
    if output is None:
        out.show(source.rstrip("\n"))
    else:
        output.write(source)
        lines = count(source.count("\n"))
        out.show(f"training of {record.model.spec} in {output.path}, {lines} lines")
        out.show(f"start it with: {launch[0]}")
    out.result(
        {
            "format": "partita/emitted@1",
            "plan": plan,
            "model": record.model.spec,
            "lines": source.count("\n"),
            "launch": launch,
            "source": source if output is None else None,
            "output": None if path is None else str(path),
        }
    )
    return 0
