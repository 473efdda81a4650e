"""The tasks of a timeline as a table (CSV): lane, task, kind, micro-batch, start, end, critical."""

import csv
import io

from partita.report.tasks import CATEGORIES, categories
from partita.timeline import Timeline

HEADER = ("lane", "task", "kind", "microbatch", "start", "end", "critical")


def task_table(timeline: Timeline) -> str:
    """A row for every task of every lane, lane by lane in the order they run."""
    program = timeline.program
    of, path = categories(program), set(timeline.critical_path())
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(HEADER)
    for number, lane in enumerate(program.lanes):
        for task in timeline.lane_tasks(number).tolist():
            label = program.task_label(task)
            writer.writerow(
                (
                    _plain(lane.name),
                    _plain(label.block),
                    CATEGORIES[of[task]],
                    label.microbatch if label.microbatch >= 0 else "",
                    float(timeline.start[task]),
                    float(timeline.end[task]),
                    int(task in path),
                )
            )
    return text.getvalue()


def _plain(name: str) -> str:
    """A cell that begins like a formula is kept from being one in a spreadsheet."""
    return f"'{name}" if name[:1] in ("=", "+", "-", "@", "\t", "\r") else name
