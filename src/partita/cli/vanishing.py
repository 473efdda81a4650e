"""`partita plan --without n3`: the plan if a node goes, for a new plan or one that is running."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from partita import files, units
from partita.cli.base import Output, OutputFile
from partita.errors import InputError

if TYPE_CHECKING:
    from partita.jobs.vanish import Vanished


def is_plan_file(name: str) -> bool:
    """Is this the file of a plan?"""
    path = Path(name)
    if path.suffix.lower() != ".json" or not path.is_file():
        return False
    try:
        value = files.decode_json(files.read_bytes(path), name)
    except InputError:
        return False
    return isinstance(value, dict) and str(value.get("format", "")).startswith("partita/plan@")


def beside(output: OutputFile, without: tuple[str, ...]) -> OutputFile:
    """Where the plan without some nodes is written: plan.without-n3.json."""
    names = "-".join(re.sub(r"[^\w.]", "_", name) for name in without)
    path = output.path
    return OutputFile(path.with_name(f"{path.stem}.without-{names}{path.suffix}"), output.force)


def show_vanished(answer: "Vanished", output: OutputFile | None, out: Output) -> dict[str, Any]:
    """Say it, write its plan, and give it for programs."""
    from partita.report.vanished import vanished_json, vanished_text

    written = None
    if output is not None and answer.planned.plan is not None:
        written = out.save(output, answer.planned.plan.to_json)
    out.show(vanished_text(answer))
    if written is not None:
        out.show(f"  in      {written}")
    return vanished_json(answer, None if written is None else str(written))


def answer_for_plan(
    name: str, without: tuple[str, ...], time_s: float, gap: float, output: OutputFile | None,
    out: Output,
) -> int:  # fmt: skip
    """The same for a plan that is there already; `-o` names the other plan's file."""
    from partita.jobs.plan import plan
    from partita.jobs.vanish import machine_without, vanished
    from partita.jobs.workload import load_cluster, load_model
    from partita.plans import read_plan

    before = read_plan(name)
    machine_without(load_cluster(before), without)  # refused before the model is opened
    workload = load_model(before)
    ref, latency = before.model, before.prediction.interval_s is None
    given: dict[str, Any] = {"training": ref.training, "optimizer": ref.optimizer}
    if workload.given is None:  # a zoo model is built again from its name
        given |= {"batch": ref.batch, "dtype": ref.dtype}
    with out.stop(time_s=time_s, gap=gap, words=units.seconds) as stop:
        answer = vanished(
            before,
            without,
            lambda left: plan(
                workload.given or ref.spec, left, stop=stop, seed=out.seed,
                objective="latency" if latency and not ref.training else "throughput", **given,
            ),
        )  # fmt: skip
    shown = show_vanished(answer, output, out)
    out.result({"format": "partita/result@1", "kind": "vanished", "from": name, **shown})
    return 0 if answer.moves is not None else 1
