"""Paths and bandwidth levels of a directed graph whose edges have a latency and a bandwidth.

Vertices are numbers in the order of their names; edges are `(source, target, latency, bandwidth)`.

Route: from one relay to the next, a message of n bytes takes  sum of latencies + n / narrowest
bandwidth;  the other vertices pass it on as it comes in, a relay once it has all of it. A path is
not known by one number then, but by the time that passes whatever the bandwidth, and the narrowest
bandwidth since the last relay. `Topology.route` is Dijkstra's search over such labels in order of
total time, which never shrinks as a path grows; at each vertex it keeps the labels that no other
beats in both respects (one per relay, as a rule one per switch). A step to the target is tried
before all others, and what cannot beat it is dropped: big switches are rarely searched through.

Levels: two vertices are joined at bandwidth B if each reaches the other over edges of at least B,
that is, if they are in one strong component of those edges. `join_ranks` finds for every edge the
first rank (widest bandwidth first) at which its ends are joined, by halving the range of ranks:
O(edges · log ranks), however many different bandwidths there are. Where every edge has a reference
module of the same bandwidth the other way, this is Kruskal's union of the edges, widest first.
"""

from collections.abc import Iterable, Sequence
from heapq import heappop, heappush

Edge = tuple[int, int, float, float]
INFINITY = float("inf")


class Topology:
    """A graph whose first `num_relays` vertices are relays; remembers routes for `size_bytes`."""

    def __init__(
        self, names: Sequence[str], edges: Sequence[Edge], num_relays: int, size_bytes: float
    ) -> None:
        self.edges = edges
        self.num_relays = num_relays
        self.size_bytes = size_bytes
        self.by_name = sorted(range(len(names)), key=names.__getitem__)
        self.rank = [0] * len(names)  # place of a vertex among the sorted names: breaks ties
        for place, vertex in enumerate(self.by_name):
            self.rank[vertex] = place
        self.outgoing: list[list[int]] = [[] for _ in names]
        self.incoming: list[list[int]] = [[] for _ in names]
        for index, (source, target, _, _) in enumerate(edges):
            self.outgoing[source].append(index)
            self.incoming[target].append(index)
        self.onward = [self._least_step(vertex) for vertex in range(len(names))]
        self.routes: dict[tuple[int, int], tuple[int, ...]] = {}

    def unreachable_pair(self, wanted: Sequence[int]) -> tuple[int, int] | None:
        """Two of the wanted vertices of which the first cannot reach the second, if any."""
        first = wanted[0]
        seen = self._reached_from(first, self.outgoing, 1)
        for vertex in wanted:
            if not seen[vertex]:
                return first, vertex
        seen = self._reached_from(first, self.incoming, 0)
        for vertex in wanted:
            if not seen[vertex]:
                return vertex, first
        return None

    def route(self, source: int, target: int) -> tuple[int, ...]:
        """Edges of the quickest path, none from a vertex to itself.

        Ties go to fewer edges, then to the vertices whose names sort first.
        """
        if source == target:
            return ()
        route = self.routes.get((source, target))
        if route is None:
            route = _RouteSearch(self, source, target).run()
            self.routes[source, target] = route
        return route

    def _least_step(self, vertex: int) -> float:
        """The least time that any step from here adds: all of it at a relay, else the latency."""
        steps = (self.edges[index] for index in self.outgoing[vertex])
        if vertex < self.num_relays:
            return min((edge[2] + self.size_bytes / edge[3] for edge in steps), default=0.0)
        return min((edge[2] for edge in steps), default=0.0)

    def _reached_from(self, start: int, near: list[list[int]], end: int) -> list[bool]:
        seen = [False] * len(near)
        seen[start] = True
        stack = [start]
        while stack:
            for index in near[stack.pop()]:
                head = int(self.edges[index][end])
                if not seen[head]:
                    seen[head] = True
                    stack.append(head)
        return seen


class _RouteSearch:
    """One search for one route.

    A label is (fixed time, narrowest bandwidth since the last relay, edges, label before, edge).
    """

    def __init__(self, graph: Topology, source: int, target: int) -> None:
        self.graph = graph
        self.target = target
        self.size = graph.size_bytes
        self.best = (INFINITY, INFINITY)  # time and edges of the best way to the target so far
        self.labels: list[tuple[float, float, int, int, int]] = [(0.0, INFINITY, 0, -1, -1)]
        self.kept: dict[int, list[int]] = {source: [0]}  # labels at each vertex
        self.heap: list[tuple[float, int, int, int]] = [(0.0, 0, graph.rank[source], 0)]
        steps_to_target = reversed(graph.incoming[target])  # of parallel edges the first stays
        self.last_step = {graph.edges[index][0]: index for index in steps_to_target}

    def run(self) -> tuple[int, ...]:
        """The edges of the best path."""
        while self.heap:
            _, _, place, label = heappop(self.heap)
            vertex = self.graph.by_name[place]
            if vertex == self.target:
                return self._path(label)
            if label in self.kept[vertex]:  # else it was beaten after it was pushed
                self._expand(vertex, label)
        return ()

    def _expand(self, vertex: int, label: int) -> None:
        if vertex in self.last_step:  # first the step that sets the time to beat
            self._step(self.last_step[vertex], label)
        fixed, width, steps, _, _ = self.labels[label]
        soonest = fixed + self.graph.onward[vertex] + self.size / width
        if (soonest, steps + 1) < self.best:  # else nothing from here on is of use
            for index in self.graph.outgoing[vertex]:
                self._step(index, label)

    def _step(self, index: int, before: int) -> None:
        _, head, latency, bandwidth = self.graph.edges[index]
        fixed, width, steps, _, _ = self.labels[before]
        fixed += latency
        width = min(width, bandwidth)
        steps += 1
        time = fixed + self.size / width
        if head == self.target:
            if (time, steps) >= self.best:
                return
            self.best = (time, steps)
        elif (time + self.graph.onward[head], steps + 1) >= self.best:
            return
        if head < self.graph.num_relays:
            fixed, width = time, INFINITY
        if self._keep(head, fixed, width, steps):
            heappush(self.heap, (time, steps, self.graph.rank[head], len(self.labels)))
            self.labels.append((fixed, width, steps, before, index))

    def _keep(self, vertex: int, fixed: float, width: float, steps: int) -> bool:
        """Note the label about to be made at this vertex, unless one there is as good."""
        labels, kept = self.labels, self.kept.setdefault(vertex, [])
        for label in kept:
            other = labels[label]
            if other[1] >= width and (other[0], other[2]) <= (fixed, steps):
                return False
        kept[:] = [
            label
            for label in kept
            if labels[label][1] > width or (labels[label][0], labels[label][2]) < (fixed, steps)
        ]
        kept.append(len(labels))
        return True

    def _path(self, label: int) -> tuple[int, ...]:
        path = []
        while label > 0:
            _, _, _, label, index = self.labels[label]
            path.append(index)
        return tuple(reversed(path))


class Groups:
    """Disjoint sets of the numbers below `size` (union-find with path halving)."""

    def __init__(self, size: int) -> None:
        self.parent = list(range(size))

    def find(self, member: int) -> int:
        """The number that stands for the set of `member`."""
        parent = self.parent
        while parent[member] != member:
            parent[member] = member = parent[parent[member]]
        return member

    def join(self, a: int, b: int) -> None:
        """Make one set of the sets of two numbers."""
        a, b = self.find(a), self.find(b)
        self.parent[max(a, b)] = min(a, b)


def join_ranks(edges: Sequence[tuple[int, int, int]], num_ranks: int) -> list[tuple[int, int, int]]:
    """Joins `(rank, a, b)` in order of rank, from edges `(source, target, own rank)`.

    Joining a and b for all entries up to a rank gives the strong components of the edges of that
    rank and before. Edges whose ends are never in one component give no join.
    """
    joins: list[tuple[int, int, int]] = []
    work = [(list(edges), 0, num_ranks)]  # the rank num_ranks stands for never
    while work:
        group, low, high = work.pop()
        if not group or low == num_ranks:
            continue
        if low == high:
            joins.extend((low, u, v) for u, v, _ in group)
            continue
        middle = (low + high) // 2
        component = strong_components((u, v) for u, v, rank in group if rank <= middle)
        before, after = [], []
        for u, v, rank in group:
            a, b = component.get(u, u), component.get(v, v)
            if a == b:
                before.append((u, v, rank))
            else:
                after.append((a, b, rank))  # a component stays one from here on
        work.append((before, low, middle))
        work.append((after, middle + 1, high))
    return sorted(joins)


def strong_components(edges: Iterable[tuple[int, int]]) -> dict[int, int]:
    """For each vertex of an edge one that stands for its strong component (Kosaraju)."""
    forward: dict[int, list[int]] = {}
    backward: dict[int, list[int]] = {}
    for u, v in edges:
        forward.setdefault(u, []).append(v)
        backward.setdefault(v, []).append(u)
    finished: list[int] = []
    seen: set[int] = set()
    for root in forward:
        if root not in seen:
            _finish_order(root, forward, seen, finished)
    component: dict[int, int] = {}
    for root in reversed(finished):
        if root in component:
            continue
        component[root] = root
        stack = [root]
        while stack:
            for head in backward.get(stack.pop(), ()):
                if head not in component:
                    component[head] = root
                    stack.append(head)
    return component


def _finish_order(
    root: int, forward: dict[int, list[int]], seen: set[int], finished: list[int]
) -> None:
    """Append the vertices reached from `root` in the order a depth-first search leaves them."""
    seen.add(root)
    stack = [(root, iter(forward.get(root, ())))]
    while stack:
        vertex, heads = stack[-1]
        for head in heads:
            if head not in seen:
                seen.add(head)
                stack.append((head, iter(forward.get(head, ()))))
                break
        else:
            stack.pop()
            finished.append(vertex)
