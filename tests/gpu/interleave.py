"""Runs a launch plan as a GPU might: streams advance in any order that waits allow.

For tests and for doubts: whatever order is drawn, a right plan gives the same result.
"""


def interleaved(plan, draw):
    """The steps in an order that the streams and waits of the plan allow; drawn at random."""
    queues = {}
    for launch in plan.launches:
        queues.setdefault(launch.stream, []).append(launch)
    done = []
    while any(queues.values()):
        able = [
            stream
            for stream, queue in sorted(queues.items())
            if queue and set(queue[0].waits) <= set(done)
        ]
        done.append(queues[draw.choice(able)].pop(0).step)
    return done
