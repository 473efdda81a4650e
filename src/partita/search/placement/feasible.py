"""One placement that breaks no rule, or the reason why there is none.

Rules are the devices that a gene may be on, routes both ways between neighbours on heterogeneous
devices, and the number of devices used. All genes on one device break none, unless pins and
forbidden devices stand against it: then genes are placed one by one next to those already placed,
devices that lost their last neighbour's route are struck off, and dead ends are undone. That is
exponential at worst, so it is bounded; machines on which every device reaches every other never
come near it.
"""

from dataclasses import dataclass

import numpy as np

from partita.problems.placement import PlacementProblem
from partita.search.placement.tables import B1, I64, PlacementArrays

_MOST_NODES = 100_000


@dataclass(frozen=True, slots=True)
class Opening:
    """A valid placement, or why there is none; `proven` if there surely is none."""

    placement: I64 | None
    why: str = ""
    proven: bool = False


def valid_placement(problem: PlacementProblem, net: PlacementArrays) -> Opening:
    """A valid placement, on few devices."""
    for gene in range(len(net.may)):
        if not net.may[gene].any():
            layer = int(net.gene_layer[net.gene_start[gene]])
            name = problem.layers[layer].name
            return Opening(None, f"no device is left for layer {layer} ({name})", proven=True)
    for device in range(len(net.limit_bytes)):
        if net.may[:, device].all():
            return Opening(np.full(len(net.output_bytes), device, np.int64))
    chosen, proven = _GeneSearch(net).run()
    if chosen is not None:
        return Opening(np.array(chosen, np.int64)[net.gene_of])
    if not proven:
        return Opening(None, "no placement that keeps to the constraints was found")
    return Opening(
        None, "every placement needs a route that is missing or too many devices", proven=True
    )


def joined(net: PlacementArrays) -> B1:
    """Which devices can hold neighbours: [one, other], both ways; a device and itself."""
    there = net.route >= 0
    both: B1 = there & there.T
    both[np.diag_indices(len(both))] = True
    return both


class _GeneSearch:
    """Backtracking over the genes; the devices left for each are bits of a number."""

    def __init__(self, net: PlacementArrays) -> None:
        self.max_devices = net.max_devices
        devices = range(len(net.limit_bytes))
        near = joined(net)
        self.near = [sum(1 << b for b in devices if near[a, b]) for a in devices]
        self.left = [sum(1 << d for d in devices if row[d]) for row in net.may]
        self.neighbours = _gene_neighbours(net)
        self.order = _by_neighbours(self.neighbours, self.left)
        self.chosen = [-1] * len(self.left)

    def run(self) -> tuple[list[int] | None, bool]:
        """The device of every gene, or None and whether that is proven."""
        nodes, depth, used = 0, 0, [0] * len(self.near)
        options = [self._options(self.order[0], used)]
        undo: list[list[tuple[int, int]]] = []
        while options:
            gene = self.order[depth]
            if self.chosen[gene] >= 0:  # come back: take the last choice here away
                used[self.chosen[gene]] -= 1
                self.chosen[gene] = -1
                for other, before in undo.pop():
                    self.left[other] = before
            if not options[-1]:
                options.pop()
                depth -= 1
                continue
            device = options[-1].pop(0)
            nodes += 1
            if nodes > _MOST_NODES:
                return None, False
            self.chosen[gene] = device
            used[device] += 1
            undo.append(self._strike(gene, device))
            if all(self.left[other] for other in self.neighbours[gene]):
                if depth + 1 == len(self.order):
                    return self.chosen, True
                depth += 1
                options.append(self._options(self.order[depth], used))
        return None, True

    def _options(self, gene: int, used: list[int]) -> list[int]:
        """The devices left for a gene, those in use first."""
        full = sum(count > 0 for count in used) >= self.max_devices
        devices = [d for d in range(len(used)) if self.left[gene] >> d & 1]
        return sorted((d for d in devices if used[d] or not full), key=lambda d: not used[d])

    def _strike(self, gene: int, device: int) -> list[tuple[int, int]]:
        """Leave neighbours what this device reaches; what to put back."""
        before = [(other, self.left[other]) for other in self.neighbours[gene]]
        for other, _ in before:
            if self.chosen[other] < 0:
                self.left[other] &= self.near[device]
        return before


def _gene_neighbours(net: PlacementArrays) -> list[list[int]]:
    """For each gene the other genes that it exchanges tensors with."""
    gene_neighbours: list[set[int]] = [set() for _ in range(len(net.may))]
    for layer in range(len(net.output_bytes)):
        for child in net.child[net.child_start[layer] : net.child_start[layer + 1]].tolist():
            one, other = int(net.gene_of[layer]), int(net.gene_of[child])
            if one != other:
                gene_neighbours[one].add(other)
                gene_neighbours[other].add(one)
    return [sorted(others) for others in gene_neighbours]


def _by_neighbours(neighbours: list[list[int]], left: list[int]) -> list[int]:
    """Genes so that each but the first of a part follows a neighbour; pinned ones first."""
    order: list[int] = []
    seen = [False] * len(neighbours)
    for root in sorted(range(len(neighbours)), key=lambda gene: left[gene].bit_count()):
        stack = [root]
        while stack:
            gene = stack.pop()
            if not seen[gene]:
                seen[gene] = True
                order.append(gene)
                stack += [other for other in reversed(neighbours[gene]) if not seen[other]]
    return order
