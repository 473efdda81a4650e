"""Programs whose waits only count signals: random turns that look for one that ends too early."""

import random
from collections import Counter


def too_early(problem, program, num_groups, counter, seed):
    """Tiles that run before what they need, if waits only count the signals of a group.

    `counter` says of a step which counter of its group it is counted in, as which there.
    """
    turns, counts, done, early = random.Random(seed), Counter(), set(), []
    place = [0] * len(program.veus)
    held = set(turns.sample(range(len(place)), 1))  # whom the others may leave behind
    while left := [veu for veu in range(len(place)) if place[veu] < len(program.veus[veu])]:
        ready = []
        for veu in left:
            instruction = program.veus[veu][place[veu]]
            step, group = divmod(instruction.operator, num_groups)
            which, index = counter(step)
            needed = (index + 1) * program.num_tiles[instruction.operator]
            if instruction.action != "wait" or counts[group, which] >= needed:
                ready.append((veu, instruction, (group, which)))
        fast = [one for one in ready if one[0] not in held]
        veu, instruction, which = turns.choice(fast or ready)
        if instruction.action == "run":
            needs = [edge.src for edge in problem.before[instruction.operator]]
            tiles = [(src, tile) for src in needs for tile in range(program.num_tiles[src])]
            early += [(instruction, need) for need in tiles if need not in done]
        elif instruction.action == "signal":
            done.add((instruction.operator, instruction.tile))
            counts[which] += 1
        place[veu] += 1
    return early
