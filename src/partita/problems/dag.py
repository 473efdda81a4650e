"""Topological orders, and the cycle to show where there is none."""

import heapq
from collections.abc import Sequence


def sorted_or_cycle(consumers: Sequence[Sequence[int]]) -> tuple[list[int], list[int]]:
    """Kahn's order, smallest index first; and, if it cannot be completed, one cycle."""
    missing = [0] * len(consumers)
    for targets in consumers:
        for target in targets:
            missing[target] += 1
    ready = [index for index, count in enumerate(missing) if count == 0]
    heapq.heapify(ready)
    order = []
    while ready:
        index = heapq.heappop(ready)
        order.append(index)
        for target in consumers[index]:
            missing[target] -= 1
            if missing[target] == 0:
                heapq.heappush(ready, target)
    if len(order) == len(consumers):
        return order, []
    return order, _one_cycle(consumers, [index for index, count in enumerate(missing) if count])


def _one_cycle(consumers: Sequence[Sequence[int]], stuck: Sequence[int]) -> list[int]:
    """Walk backwards among the nodes that wait for each other until one comes up again."""
    producer = {
        target: index for index in reversed(stuck) for target in consumers[index]
    }  # of a stuck node some producer is stuck as well
    path, seen = [stuck[0]], {stuck[0]: 0}
    while True:
        before = producer[path[-1]]
        if before in seen:
            return [before, *reversed(path[seen[before] :])]
        seen[before] = len(path)
        path.append(before)
