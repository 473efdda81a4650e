"""torch's own lowering of a schedule, as an oracle."""

import csv

import pytest

from partita.schedules.torch_csv import TorchSchedule, parse_torch_csv


def lowered_by_torch(
    schedule: TorchSchedule, *, defer_receives: bool = False
) -> TorchSchedule | None:
    """What `_PipelineScheduleRuntime` would run of a schedule that only computes; None: it raises.

    No process group is made: only the methods that lower are called.
    """
    torch = pytest.importorskip("torch.distributed.pipelining.schedules")
    rows = [
        [torch._Action.from_str(cell) for cell in row]
        for row in csv.reader(schedule.to_csv().splitlines())
    ]
    runtime = object.__new__(torch._PipelineScheduleRuntime)
    runtime.__dict__ |= {
        "pp_group_size": len(rows),
        "_num_stages": schedule.num_stages,
        "_n_microbatches": schedule.num_microbatches,
        "_stages": [],
        "_defer_pp_recv": defer_receives,
    }
    try:
        runtime._prepare_schedule_with_comms(dict(enumerate(rows)))
    except (AssertionError, KeyError, ValueError):
        return None
    lowered = runtime.pipeline_order_with_comms
    return parse_torch_csv("\n".join(",".join(map(str, lowered[r])) for r in range(len(rows))))
