"""`partita export`: a plan in the format of a training framework."""

from pathlib import Path

import click

from partita import files, units
from partita.cli.base import Output, OutputFile, common_options, output_option
from partita.export.job import Export

NAMES = ("torchtitan", "megatron", "deepspeed", "fsdp2", "torch-schedule")


@click.command()
@click.argument("plan")
@click.option("--to", "target", required=True, metavar="TARGET", help=f"One of {', '.join(NAMES)}.")
@output_option("Write it here. Without it, it goes to the terminal.")
@click.option(
    "--read", "edited", metavar="FILE", help="Read such a file, edited perhaps, and simulate it."
)
@common_options
def command(
    plan: str, target: str, output: OutputFile | None, edited: str | None, out: Output
) -> int:
    """Write a PLAN as what people launch: torchtitan, Megatron-LM, DeepSpeed, FSDP2, a schedule.

    torchtitan is a job configuration in TOML (0.2.2), megatron arguments of pretrain_gpt.py with
    the layout of the pipeline, deepspeed a configuration in JSON, fsdp2 Python with fully_shard and
    parallelize_module, torch-schedule the CSV of torch.distributed.pipelining.

    What is written is read back and simulated. A plan that a target cannot be told is not written
    as it is: the nearest one that can be is, and what it costs is said. With --read a file
    is not written but read: the step it would take with the plan's model on the plan's machine.

    Exit code 1 says that what the file says does not fit the memory.
    """
    from partita.export.job import export, read_export
    from partita.plans import read_plan

    record = read_plan(plan)
    if edited is None:
        answer = export(record, target)
    else:
        text = files.read_bytes(edited).decode("utf-8", errors="replace")
        answer = read_export(record, target, text)
    written = None if output is None else output.write(answer.text)
    if written is None and edited is None:
        out.show(answer.text.rstrip("\n"))
    for line in export_lines(answer, edited or written):
        out.show(line) if written or edited else out.note(line)
    out.result(
        {
            "format": "partita/export@1",
            "plan": plan,
            "target": answer.target,
            "version": answer.version,
            "strategy": answer.told,
            "step_s": answer.step_s,
            "step_interval_s": list(answer.likely_step_s),
            "plan_step_s": answer.plan_step_s,
            "fits": answer.fits,
            "exact": answer.is_exact,
            "differences": list(answer.differences),
            "why": answer.why or None,
            "text": answer.text if written is None else None,
            "output": None if written is None else str(written),
        }
    )
    return 0 if answer.fits else 1


def export_lines(answer: Export, file: str | Path | None) -> list[str]:
    """What was written, and what the plan does that it does not say."""
    from partita.report.summary import INTERVAL, interval_words

    own = units.seconds(answer.plan_step_s)
    step = f"{units.seconds(answer.step_s)} ({INTERVAL} {interval_words(answer.likely_step_s)})"
    where = "" if file is None else f" in {file}"
    lines = [f"{answer.version}{where}: {answer.told}"]
    if answer.is_exact:
        return [*lines, f"the plan itself: simulated again from the file, {step} a step"]
    told = "; ".join(answer.differences) or "nothing"
    change = answer.step_s / answer.plan_step_s - 1
    why = f" ({answer.target}: {answer.why})" if answer.why else ""
    lines.append(f"not said of the plan: {told}{why}")
    lines.append(f"the file takes {step} a step, the plan {own} ({change:+.1%})")
    if not answer.fits:
        lines.append("what the file says does not fit the memory")
    return lines
