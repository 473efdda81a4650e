"""A plan's schedule and torch's: from a CSV file into a plan, and from a plan into a CSV file."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from partita.errors import PlanError, VerificationError
from partita.lower.orders import order_of, order_text
from partita.plans import Plan, Schedule, device_groups, shared_stages
from partita.schedules.torch_comms import in_loss_order, with_comms
from partita.schedules.torch_csv import TorchSchedule, torch_schedule
from partita.verify.torch_schedules import torch_refusals


def plan_with_schedule(plan: Plan, schedule: TorchSchedule, file: str = "") -> Plan:
    """The plan with its stages in the order of a schedule of torch's.

    A rank of the file is a group of devices of the plan; it is known by the stages it holds.
    """
    refusals = torch_refusals(schedule)
    if refusals:
        raise VerificationError(tuple(f"{file}: {refusal}" for refusal in refusals))
    groups = device_groups(plan.stages)
    rows = {tuple(sorted({action.stage for action in row})): row for row in schedule.order}
    for group in groups:
        if group not in rows:
            raise PlanError(
                f"no rank holds {_stages(group)}, and a group of devices of the plan does",
                fix="place stages as the plan does, or plan again with as many stages",
                field="schedule",
                file=file,
            )
    if len(rows) > len(groups):
        extra = min(set(rows) - set(groups))
        raise PlanError(
            f"a rank holds {_stages(extra)}, and the plan has {len(plan.stages)} stages",
            fix="leave it out, or plan again with as many stages",
            field="schedule",
            file=file,
        )
    count = schedule.num_microbatches
    order = order_text(tuple(rows[group] for group in groups))
    try:
        return replace(plan, schedule=Schedule(Path(file).stem or "given", count, order))
    except PlanError as error:
        raise error.within(file) from None


def schedule_of_plan(plan: Plan, *, comms: bool = False) -> TorchSchedule:
    """The plan's schedule for torch's runtime, a rank for each group of devices."""
    groups = device_groups(plan.stages)
    if shared := shared_stages(groups):
        raise PlanError(
            f"{plan.stages[min(shared)].name} runs on several groups of devices together, and "
            "torch's pipelining has every stage on one rank",
            fix="run the plan with: partita run",
            field="schedule",
        )
    order = order_of(plan.schedule, groups, training=plan.model.training)
    schedule = in_loss_order(torch_schedule(order))
    return with_comms(schedule) if comms else schedule


def _stages(numbers: Sequence[int]) -> str:
    words = ", ".join(map(str, numbers))
    return f"stage {words} alone" if len(numbers) == 1 else f"stages {words}"
