"""Schedule a placement of your own: an encoder and a decoder that share an embedding.

    python examples/schedule_your_own.py [picture.svg]

The embedding is sharded over all four devices and runs before the encoder (devices 0 and 1) and
again before the decoder (devices 2 and 3); each device holds at most six activations.
"""

import sys
from pathlib import Path

from partita.jobs.schedule import schedule
from partita.report.svg_timeline import timeline_svg
from partita.report.terminal import gantt
from partita.schedules import Block, Placement
from partita.search.base import Stop

EVERYWHERE = [0, 1, 2, 3]

place = Placement(4, "encoder and decoder")
place.chain(
    [
        Block("embed source", 1),
        Block("encoder 0", 2, memory=1),
        Block("encoder 1", 2, memory=1),
        Block("embed target", 1),
        Block("decoder 0", 2, memory=1),
        Block("decoder 1", 2, memory=1),
    ],
    devices=[EVERYWHERE, 0, 1, EVERYWHERE, 2, 3],
)
place.chain(
    [
        Block("decoder 1 backward", 4, memory=-1, kind="backward"),
        Block("decoder 0 backward", 4, memory=-1, kind="backward"),
        Block("embed target backward", 1, kind="backward"),
        Block("encoder 1 backward", 4, memory=-1, kind="backward"),
        Block("encoder 0 backward", 4, memory=-1, kind="backward"),
        Block("embed source backward", 1, kind="backward"),
    ],
    devices=[3, 2, EVERYWHERE, 1, 0, EVERYWHERE],
    after="decoder 1",
)

result = schedule(place, memory=6, microbatches=8, stop=Stop(time_s=2))
print(f"{result.makespan} steps for {result.num_microbatches} micro-batches, {result.status}")
print(f"no order takes less than {result.lower_bound}; {result.period} steps a micro-batch")
print(f"devices hold at most {', '.join(map(str, result.peak_memory))}")
print()
print(gantt(result.timeline()))
if len(sys.argv) > 1:
    Path(sys.argv[1]).write_text(timeline_svg(result.timeline(), title=place.name))
