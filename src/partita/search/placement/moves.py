"""Moves between placements, compiled: what all local searches here change at a time.

one       a gene goes to another device
run       a run of genes along the line goes to one device
pull      a gene goes to the device of a neighbour
boundary  where the device changes along the line, one side takes some genes of the other
swap      two devices change places within a run of the line, or everywhere
spread    a gene and connected genes of its device go to a neighbour's device
blocks    a few blocks of the network in a row go to the device before or behind them
border    where the device changes within a block, or in the next one, each branch is cut anew

The *line* is an order of the genes in which branches of the network stay together: layers as they
become ready, last come first served. A gene keeps its device where it may not be on the new one.
"""

import numpy as np

from partita.problems.placement import PlacementProblem
from partita.search.placement.fastsim import inner
from partita.search.placement.tables import I64, U64, PlacementArrays

ONE, RUN, PULL, BOUNDARY, SWAP, SPREAD, BLOCKS, BORDER = range(8)
ALL_MOVES = 0b11111111  # a bit for each kind
_MOST_BLOCKS = 4


def line_of(problem: PlacementProblem, net: PlacementArrays) -> I64:
    """The genes in an order that follows each branch of the network to its end."""
    missing = [len(layer.parents) for layer in problem.layers]
    ready = [index for index, count in enumerate(missing) if count == 0][::-1]
    order: list[int] = []
    while ready:
        layer = ready.pop()
        order.append(layer)
        for child in reversed(problem.layers[layer].children):
            missing[child] -= 1
            if missing[child] == 0:
                ready.append(child)
    genes = dict.fromkeys(int(net.gene_of[layer]) for layer in order)
    return np.array(list(genes), np.int64)


def random_state(seed: int, stream: int = 0) -> U64:
    """A generator of random numbers for compiled code: one word, by splitmix64."""
    words = np.random.SeedSequence((seed, stream)).generate_state(1, np.uint64)
    return np.asarray(words, np.uint64)


@inner
def uniform(state: U64) -> float:
    """The next random number in [0, 1), by Steele, Lea and Flood's splitmix64."""
    state[0] += np.uint64(0x9E3779B97F4A7C15)
    z = state[0]
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z = z ^ (z >> np.uint64(31))
    return float(z >> np.uint64(11)) * 2.0**-53


@inner
def below(state: U64, limit: int) -> int:
    """A random whole number from 0 to limit - 1."""
    return int(uniform(state) * limit)


@inner
def put(net: PlacementArrays, placement: I64, gene: int, device: int) -> bool:
    """Move a gene, if it may be there; True if that changes anything."""
    first = net.gene_layer[net.gene_start[gene]]
    if placement[first] == device or not net.may[gene, device]:
        return False
    for k in range(net.gene_start[gene], net.gene_start[gene + 1]):
        placement[net.gene_layer[k]] = device
    return True


@inner
def device_of(net: PlacementArrays, placement: I64, gene: int) -> int:
    """The device of a gene."""
    return int(placement[net.gene_layer[net.gene_start[gene]]])


@inner
def neighbour(net: PlacementArrays, state: U64, gene: int) -> int:
    """A random layer joined to a layer of the gene, -1 if there is none."""
    begin, end = net.gene_start[gene], net.gene_start[gene + 1]
    layer = net.gene_layer[begin + below(state, end - begin)]
    num_parents = net.parent_start[layer + 1] - net.parent_start[layer]
    num_children = net.child_start[layer + 1] - net.child_start[layer]
    if num_parents + num_children == 0:
        return -1
    k = below(state, num_parents + num_children)
    if k < num_parents:
        return int(net.parent[net.parent_start[layer] + k])
    return int(net.child[net.child_start[layer] + k - num_parents])


@inner
def run_length(state: U64, longest: int) -> int:
    """The length of a run: short ones and long ones alike often, by the logarithm."""
    return min(longest, int(np.exp(uniform(state) * np.log(longest + 1.0))))


@inner
def move(net: PlacementArrays, state: U64, line: I64, placement: I64, kinds: int) -> bool:
    """Change `placement` by a random move of these kinds; True if it is another one now."""
    num_genes, num_devices = len(line), len(net.limit_bytes)
    kind = below(state, 8)
    while kinds >> kind & 1 == 0:
        kind = (kind + 1) % 8
    position = below(state, num_genes)
    gene = line[position]
    changed = False
    if kind == ONE:
        k = below(state, net.allowed_start[gene + 1] - net.allowed_start[gene])
        return put(net, placement, gene, net.allowed[net.allowed_start[gene] + k])
    if kind == RUN:
        device = below(state, num_devices)
        for k in range(position, min(num_genes, position + run_length(state, num_genes))):
            changed |= put(net, placement, line[k], device)
        return changed
    if kind == PULL:
        other = neighbour(net, state, gene)
        return other >= 0 and put(net, placement, gene, placement[other])
    if kind == BOUNDARY:
        return _shift_boundary(net, state, line, placement, position)
    if kind == SWAP:
        return _swap(net, state, line, placement, position)
    if kind == BLOCKS:
        return _move_blocks(net, state, placement)
    if kind == BORDER:
        return _cut_border(net, state, placement)
    return _spread(net, state, placement, gene)


@inner
def _shift_boundary(
    net: PlacementArrays, state: U64, line: I64, placement: I64, position: int
) -> bool:
    """Find the next change of device from a position on, and move it by some genes."""
    num_genes = len(line)
    for step in range(num_genes):
        left = (position + step) % num_genes
        right = left + 1
        if right == num_genes:
            continue
        before = device_of(net, placement, line[left])
        after = device_of(net, placement, line[right])
        if before == after:
            continue
        changed = False
        length = run_length(state, max(1, num_genes // 4))
        if uniform(state) < 0.5:
            for k in range(right, min(num_genes, right + length)):
                changed |= put(net, placement, line[k], before)
        else:
            for k in range(left, max(-1, left - length), -1):
                changed |= put(net, placement, line[k], after)
        return changed
    return False


@inner
def _move_blocks(net: PlacementArrays, state: U64, placement: I64) -> bool:
    """Put all layers of a few blocks on the device of the cut layer before or behind them."""
    if len(net.cut) < 2:
        return False
    first = below(state, len(net.cut))
    last = min(len(net.cut), first + 1 + below(state, _MOST_BLOCKS))
    begin = net.cut[first]
    end = net.cut[last] if last < len(net.cut) else len(placement)
    if first == 0 or (end < len(placement) and uniform(state) < 0.5):
        if end == len(placement):
            return False
        device = placement[end]
    else:
        device = placement[net.cut[first - 1]]
    changed = False
    for layer in range(begin, end):
        changed |= put(net, placement, net.gene_of[layer], device)
    return changed


@inner
def _cut_border(net: PlacementArrays, state: U64, placement: I64) -> bool:
    """Find a block whose ends are on two devices; cut its branches anew, or those of a neighbour.

    All behind a cut go to the device of the block's end, so a branch changes device once.
    """
    num_blocks = len(net.cut) - 1
    if num_blocks < 1:
        return False
    block, step = below(state, num_blocks), 0
    while placement[net.cut[block]] == placement[net.cut[block + 1]]:
        block, step = (block + 1) % num_blocks, step + 1
        if step == num_blocks:
            return False
    before, behind = placement[net.cut[block]], placement[net.cut[block + 1]]
    changed, drawn = False, below(state, 4)
    if drawn == 0 and block > 0:  # the border moves to the block before
        for layer in range(net.cut[block], net.cut[block + 1]):
            changed |= put(net, placement, net.gene_of[layer], behind)
        block -= 1
        changed |= put(net, placement, net.gene_of[net.cut[block]], before)
    elif drawn == 1 and block + 1 < num_blocks:  # to the block behind
        for layer in range(net.cut[block] + 1, net.cut[block + 1] + 1):
            changed |= put(net, placement, net.gene_of[layer], before)
        block += 1
        changed |= put(net, placement, net.gene_of[net.cut[block + 1]], behind)
    first, last = net.cut[block], net.cut[block + 1]
    stays = uniform(state)
    for layer in range(first + 1, last):
        device = before if uniform(state) < stays else behind
        for k in range(net.parent_start[layer], net.parent_start[layer + 1]):
            parent = net.parent[k]
            if parent > first and placement[parent] == behind:
                device = behind
        changed |= put(net, placement, net.gene_of[layer], device)
    return changed


@inner
def _swap(net: PlacementArrays, state: U64, line: I64, placement: I64, position: int) -> bool:
    """Exchange two devices in a run of the line; a long run is everywhere."""
    num_genes, num_devices = len(line), len(net.limit_bytes)
    one = device_of(net, placement, line[position])
    other = below(state, num_devices)
    length = run_length(state, 2 * num_genes)
    begin, end = (0, num_genes) if length > num_genes else (position, position + length)
    changed = False
    for k in range(begin, min(num_genes, end)):
        device = device_of(net, placement, line[k])
        if device == one:
            changed |= put(net, placement, line[k], other)
        elif device == other:
            changed |= put(net, placement, line[k], one)
    return changed


@inner
def _spread(net: PlacementArrays, state: U64, placement: I64, gene: int) -> bool:
    """Walk along neighbours on the same device, taking them to a neighbour's device."""
    other = neighbour(net, state, gene)
    if other < 0:
        return False
    source = device_of(net, placement, gene)
    target = placement[other]
    if source == target:
        target = below(state, len(net.limit_bytes))
    changed = False
    for _ in range(1 + below(state, 12)):
        changed |= put(net, placement, gene, target)
        for _ in range(4):
            other = neighbour(net, state, gene)
            if other >= 0 and placement[other] == source:
                break
        if other < 0 or placement[other] != source:
            break
        gene = net.gene_of[other]
    return changed
