"""Runs a launch plan as a GPU might: streams advance in any order that waits allow.

For tests and for doubts: whatever order is drawn, a right plan gives the same result.
"""

import random

from partita.run.streams.order import Launch, LaunchPlan


def interleaved(plan: LaunchPlan, draw: random.Random) -> list[int]:
    """The steps in an order that the streams and waits of the plan allow; drawn at random."""
    queues: dict[int, list[Launch]] = {}
    for launch in plan.launches:
        queues.setdefault(launch.stream, []).append(launch)
    done: list[int] = []
    while any(queues.values()):
        able = [
            stream
            for stream, queue in sorted(queues.items())
            if queue and set(queue[0].waits) <= set(done)
        ]
        done.append(queues[draw.choice(able)].pop(0).step)
    return done
