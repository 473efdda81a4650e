"""Published pipeline schedules side by side: what each idles and holds on 8 devices.

    python examples/schedule_published.py

A forward, the data gradients and the weight gradients of a stage take one step each; 16
micro-batches, 8 for Hanayo. `span` is the longest that a device takes from its first start to its
last end.
"""

from partita.jobs.baselines import named_schedule
from partita.schedules.named import NAMED
from partita.units import number, table

DEVICES, MICROBATCHES = 8, 16

rows = []
for name, named in NAMED.items():
    schedule = named_schedule(name, DEVICES, DEVICES if name == "hanayo" else MICROBATCHES)
    rows.append(
        (
            named.title,
            schedule.placement,
            number(schedule.makespan),
            number(schedule.longest_span),
            number(schedule.bubble),
            number(max(schedule.peak_memory)),
        )
    )
print(table(("schedule", "placement", "makespan", "span", "bubble", "memory"), rows, (2, 3, 4, 5)))
