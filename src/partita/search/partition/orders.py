"""Other topological orders of the same model, for searches that cut an order.

A depth-first order finishes one branch before it begins the next, so what is cut off later belongs
together. Which branch comes first is drawn at random; order 0 is the problem's own.
"""

from dataclasses import replace

import numpy as np

from partita.problems.partition import PartitionProblem


def reordered(problem: PartitionProblem, seed: int) -> PartitionProblem:
    """The same problem, its nodes in a random depth-first topological order."""
    by_id = {node.id: node for node in problem.nodes}
    order = depth_first(problem, seed)
    return replace(problem, nodes=tuple(by_id[node] for node in order))


def depth_first(problem: PartitionProblem, seed: int) -> list[int]:
    """Node ids in a random depth-first topological order."""
    rng = np.random.default_rng(seed)
    consumers: dict[int, list[int]] = {node.id: [] for node in problem.nodes}
    missing = dict.fromkeys(consumers, 0)
    for edge in problem.edges:
        consumers[edge.src].append(edge.dst)
        missing[edge.dst] += 1
    ready = [node for node in problem.order if missing[node] == 0]
    rng.shuffle(ready)
    order = []
    while ready:
        node = ready.pop()  # what became ready last, so its branch goes on
        order.append(node)
        released = []
        for consumer in consumers[node]:
            missing[consumer] -= 1
            if missing[consumer] == 0:
                released.append(consumer)
        rng.shuffle(released)
        ready += released
    return order
