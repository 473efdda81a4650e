"""From devices to stages: groups of nodes that can run one after the other.

Nodes come in topological order, with the producers and the device of each; every function gives
the groups in an order in which they can run, each in topological order.
"""

from partita.problems.dag import sorted_or_cycle


def device_groups(
    order: list[int], producers: dict[int, list[int]], device_of: dict[int, int]
) -> list[list[int]]:
    """The nodes of each device, producing devices first if that is possible."""
    devices = sorted({device_of[node] for node in order})
    place = {device: index for index, device in enumerate(devices)}
    consumers: list[list[int]] = [[] for _ in devices]
    for node in order:
        here = place[device_of[node]]
        for src in producers[node]:
            if place[device_of[src]] != here:
                consumers[place[device_of[src]]].append(here)
    ascending, cycle = sorted_or_cycle(consumers)
    ranks = range(len(devices)) if cycle else ascending
    members: dict[int, list[int]] = {device: [] for device in devices}
    for node in order:
        members[device_of[node]].append(node)
    return [members[devices[rank]] for rank in ranks]


def level_groups(
    order: list[int], producers: dict[int, list[int]], device_of: dict[int, int]
) -> list[list[int]]:
    """A level of a device is a stage.

    A node's level is one more than that of a producer on another device and no less than that of
    one on its own, so an edge between two stages always climbs.
    """
    level: dict[int, int] = {}
    groups: dict[tuple[int, int], list[int]] = {}
    for node in order:
        here = device_of[node]
        climbs = [level[src] + (device_of[src] != here) for src in producers[node]]
        level[node] = max(climbs, default=0)
        groups.setdefault((level[node], here), []).append(node)
    return [groups[key] for key in sorted(groups)]


def run_groups(
    order: list[int], producers: dict[int, list[int]], device_of: dict[int, int]
) -> list[list[int]]:
    """One device after the other runs all it can; the one with most nodes ready is next."""
    consumers: dict[int, list[int]] = {node: [] for node in order}
    missing = {node: len(producers[node]) for node in order}
    for node in order:
        for src in producers[node]:
            consumers[src].append(node)
    ready: dict[int, list[int]] = {device_of[node]: [] for node in order}
    for node in reversed(order):
        if not missing[node]:
            ready[device_of[node]].append(node)
    groups: list[list[int]] = []
    left = len(order)
    while left:
        device = max(sorted(ready), key=lambda each: len(ready[each]))
        group = []
        while ready[device]:
            node = ready[device].pop()
            group.append(node)
            for consumer in consumers[node]:
                missing[consumer] -= 1
                if not missing[consumer]:
                    ready[device_of[consumer]].append(consumer)
        groups.append(group)
        left -= len(group)
    return groups


def cut_up(groups: list[list[int]], count: int) -> list[list[int]]:
    """The longest groups cut in two until there are `count`, or single nodes."""
    pieces = list(groups)
    while len(pieces) < count:
        longest = max(range(len(pieces)), key=lambda index: (len(pieces[index]), -index))
        whole = pieces[longest]
        if len(whole) == 1:
            break
        pieces[longest : longest + 1] = [whole[: len(whole) // 2], whole[len(whole) // 2 :]]
    return pieces
