"""Where to draw the nodes and edges of a directed graph: layers from top to bottom.

The steps of Sugiyama, Tagawa and Toda (1981):
  1. layers by longest path, sources pulled down to their first reader;
  2. a long edge gets a place in every layer it crosses; the edges of one source share theirs;
  3. the order within a layer: sweeps down and up, each node to the mean of its neighbours' places,
     keeping the order with the fewest crossings;
  4. coordinates after Brandes and Köpf (2001): nodes in line with their middle neighbour form
     blocks that are packed; of four such layouts each node takes the middle.
Time O(rounds * n log n), with n the nodes and the places of edges.
"""

from bisect import bisect_right, insort
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

ORDER_ROUNDS = 10
GAP_X, GAP_Y, GAP_EDGE = 22.0, 36.0, 12.0


@dataclass(frozen=True, slots=True)
class DrawnLayout:
    """Centres of nodes, and for each edge the points it passes, top to bottom.

    Between points of one x an edge is straight, which keeps it clear of the nodes beside it.
    """

    x: tuple[float, ...]
    y: tuple[float, ...]
    edges: tuple[tuple[tuple[float, float], ...], ...]
    width: float
    height: float


def layered(sizes: Sequence[tuple[float, float]], edges: Sequence[tuple[int, int]]) -> DrawnLayout:
    """A layout of nodes of these widths and heights, numbered in topological order.

    An edge to a lower number is drawn upwards; an edge from a node to itself has no points.
    """
    down = [(min(edge), max(edge)) for edge in edges]
    grid = _LayerGrid(sizes, down)
    grid.put_in_order()
    grid.put_in_place()
    return grid.layout(down)


def _layers(num_nodes: int, edges: list[tuple[int, int]]) -> list[int]:
    before: list[list[int]] = [[] for _ in range(num_nodes)]
    after: list[list[int]] = [[] for _ in range(num_nodes)]
    for a, b in edges:
        if a != b:
            before[b].append(a)
            after[a].append(b)
    layer: list[int] = []
    for node in range(num_nodes):
        layer.append(max((layer[u] + 1 for u in before[node]), default=0))
    for node in range(num_nodes):
        if not before[node] and after[node]:
            layer[node] = min(layer[v] for v in after[node]) - 1
    return layer


class _LayerGrid:
    """Nodes, then places of long edges, in layers; `order` and `x` are worked out in turn."""

    def __init__(self, sizes: Sequence[tuple[float, float]], edges: list[tuple[int, int]]) -> None:
        self.sizes = sizes
        self.layer = _layers(len(sizes), edges)
        self.width = [width for width, _ in sizes]
        self.above: list[list[int]] = [[] for _ in sizes]
        self.below: list[list[int]] = [[] for _ in sizes]
        self.source = list(range(len(sizes)))  # a place belongs to the node its edges come from
        self.places: list[list[int]] = [[] for _ in sizes]  # of a node's edges, by layer
        for a, b in dict.fromkeys(edges):
            if a != b:
                self._join(self._place(a, self.layer[b] - 1), b)
        self.order: list[list[int]] = [[] for _ in range(max(self.layer, default=-1) + 1)]
        for node in sorted(range(len(self.layer)), key=lambda n: (self.source[n], n)):
            self.order[self.layer[node]].append(node)
        self.x = [0.0] * len(self.layer)

    def _join(self, upper: int, lower: int) -> None:
        self.below[upper].append(lower)
        self.above[lower].append(upper)

    def _place(self, source: int, layer: int) -> int:
        """The place of a source's edges in a layer: the source itself in its own."""
        places = self.places[source]
        while self.layer[source] + len(places) < layer:
            upper, place = (places[-1] if places else source), len(self.layer)
            self.layer.append(self.layer[upper] + 1)
            self.width.append(0.0)
            self.above.append([])
            self.below.append([])
            self.source.append(source)
            places.append(place)
            self._join(upper, place)
        depth = layer - self.layer[source]
        return places[depth - 1] if depth else source

    def put_in_order(self) -> None:
        """Sweep down and up; the order with the fewest crossings stays."""
        best, fewest = [list(row) for row in self.order], self._crossings()
        for turn in range(2 * ORDER_ROUNDS):
            if not fewest:
                break
            downwards = turn % 2 == 0
            rows = self.order[1:] if downwards else self.order[-2::-1]
            near = self.above if downwards else self.below
            position = self._positions()
            for row in rows:
                wish = {n: _mean([position[m] for m in near[n]], position[n]) for n in row}
                row.sort(key=lambda n: (wish[n], position[n]))
                for i, node in enumerate(row):
                    position[node] = i
            crossings = self._crossings()
            if crossings < fewest:
                best, fewest = [list(row) for row in self.order], crossings
        self.order = best

    def _positions(self) -> dict[int, float]:
        return {node: float(i) for row in self.order for i, node in enumerate(row)}

    def _crossings(self) -> int:
        position = self._positions()
        total = 0
        for row in self.order:
            seen: list[float] = []
            for upper in row:
                ends = sorted(position[lower] for lower in self.below[upper])
                total += sum(len(seen) - bisect_right(seen, end) for end in ends)
                for end in ends:
                    insort(seen, end)
        return total

    def put_in_place(self) -> None:
        """The middle of four layouts: aligned with what is above or below, packed left or right."""
        crossed = self._crossed()
        layouts = []
        for rows, near in ((self.order, self.above), (self.order[::-1], self.below)):
            for right in (False, True):
                mirrored = [row[::-1] for row in rows] if right else rows
                x = self._packed(mirrored, self._aligned(mirrored, near, crossed))
                layouts.append([-value for value in x] if right else x)
        spans = [self._span(x) for x in layouts]
        left, end = min(spans, key=lambda span: span[1] - span[0])
        for i, (x, span) in enumerate(zip(layouts, spans, strict=True)):
            shift = end - span[1] if i % 2 else left - span[0]
            layouts[i] = [value + shift for value in x]
        middle = [sum(sorted(values)[1:3]) / 2 for values in zip(*layouts, strict=True)]
        first, _ = self._span(middle)
        self.x = [value - first for value in middle]

    def _span(self, x: list[float]) -> tuple[float, float]:
        sides = [width / 2 for width in self.width]
        low = min((v - side for v, side in zip(x, sides, strict=True)), default=0.0)
        return low, max((v + side for v, side in zip(x, sides, strict=True)), default=0.0)

    def _is_place(self, node: int) -> bool:
        return node >= len(self.sizes)

    def _crossed(self) -> set[tuple[int, int]]:
        """Joints that cross a long edge between two of its places: they give way to it."""
        position = self._positions()
        crossed: set[tuple[int, int]] = set()
        for row in self.order[1:]:
            inner = [
                (position[up], position[node])
                for node in row
                if self._is_place(node)
                for up in self.above[node]
                if self._is_place(up)
            ]
            for node in row if inner else ():
                for up in self.above[node]:
                    if self._is_place(node) and self._is_place(up):
                        continue
                    x, y = position[up], position[node]
                    if any((u - x) * (v - y) < 0 for u, v in inner):
                        crossed.add((up, node))
        return crossed

    def _aligned(
        self, rows: list[list[int]], near: list[list[int]], crossed: set[tuple[int, int]]
    ) -> list[int]:
        """The block of each node: it joins that of its middle neighbour unless joints cross."""
        position = {node: i for row in rows for i, node in enumerate(row)}
        block = list(range(len(self.layer)))
        taken: set[int] = set()
        for row in rows[1:]:
            last = -1
            for node in row:
                others = sorted(near[node], key=lambda n: position[n])
                half = (len(others) - 1) / 2
                for other in dict.fromkeys(others[int(half) : int(half + 0.5) + 1]):
                    joint = (min(other, node, key=self._depth), max(other, node, key=self._depth))
                    free = other not in taken and joint not in crossed
                    if block[node] == node and free and position[other] > last:
                        block[node] = block[other]
                        taken.add(other)
                        last = position[other]
        return block

    def _depth(self, node: int) -> int:
        return self.layer[node]

    def _packed(self, rows: list[list[int]], block: list[int]) -> list[float]:
        """Blocks as far left as their order and gaps allow, then right up to what they lean on."""
        gaps: dict[tuple[int, int], float] = {}
        for row in rows:
            for a, b in pairwise(row):
                pair = (block[a], block[b])
                gaps[pair] = max(gaps.get(pair, 0.0), self._gap(a, b))
        lefts: dict[int, list[int]] = {root: [] for root in block}
        rights: dict[int, list[int]] = {root: [] for root in block}
        for a, b in gaps:
            lefts[b].append(a)
            rights[a].append(b)
        order = _sorted_blocks(lefts, rights)
        x = dict.fromkeys(block, 0.0)
        for root in order:
            x[root] = max((x[a] + gaps[a, root] for a in lefts[root]), default=0.0)
        for root in reversed(order):
            x[root] = max(x[root], min((x[b] - gaps[root, b] for b in rights[root]), default=0.0))
        return [x[root] for root in block]

    def _gap(self, a: int, b: int) -> float:
        wide = self.width[a] > 0 and self.width[b] > 0
        return (self.width[a] + self.width[b]) / 2 + (GAP_X if wide else GAP_EDGE)

    def layout(self, edges: list[tuple[int, int]]) -> DrawnLayout:
        """Coordinates of everything."""
        real = len(self.sizes)
        tall = [max((self.sizes[n][1] for n in row if n < real), default=0.0) for row in self.order]
        top = [0.0]
        for height in tall:
            top.append(top[-1] + height + GAP_Y)
        paths = tuple(self._path(a, b, top, tall) for a, b in edges)
        xs, layers = self.x[:real], self.layer[:real]
        right = [x + self.width[n] / 2 for n, x in enumerate(self.x)]
        return DrawnLayout(
            tuple(xs),
            tuple(top[layer] + tall[layer] / 2 for layer in layers),
            paths,
            max(right, default=0.0),
            max(0.0, top[-1] - GAP_Y),
        )

    def _path(
        self, a: int, b: int, top: list[float], tall: list[float]
    ) -> tuple[tuple[float, float], ...]:
        if a == b:
            return ()
        upper, lower = self.layer[a], self.layer[b]
        points = [(self.x[a], top[upper] + (tall[upper] + self.sizes[a][1]) / 2)]
        for place in self.places[a][: lower - upper - 1]:
            layer = self.layer[place]
            points += [(self.x[place], top[layer]), (self.x[place], top[layer] + tall[layer])]
        return (*points, (self.x[b], top[lower] + (tall[lower] - self.sizes[b][1]) / 2))


def _sorted_blocks(lefts: dict[int, list[int]], rights: dict[int, list[int]]) -> list[int]:
    """Blocks so that each comes after those on its left."""
    waiting = {root: len(others) for root, others in lefts.items()}
    order = sorted(root for root, count in waiting.items() if not count)
    for root in order:
        for other in rights[root]:
            waiting[other] -= 1
            if not waiting[other]:
                order.append(other)
    return order


def _mean(values: list[float], otherwise: float) -> float:
    return sum(values) / len(values) if values else otherwise
