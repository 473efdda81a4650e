"""List scheduling of tiles on vEUs: whenever one is free, it takes the most urgent ready tile.

    urgency of an operator = its tile time + the largest urgency of what follows (+ a signal)

There are no barriers: a tile is ready as soon as the tiles it needs have ended. A step costs
O(log tiles) plus the aligned tiles that it frees; 100,000 tiles take a few hundredths of a second.
"""

import heapq
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from partita.compiled import compiled
from partita.problems.rtasks import RtasksProblem, RtasksSolution

I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]


@dataclass(frozen=True)
class RTaskArrays:
    """A problem as arrays; edges by source, in compressed rows."""

    num_operators: int
    edge_start: I64  # per source operator
    edge_dst: I64
    edge_aligned: npt.NDArray[np.bool_]

    @classmethod
    def of(cls, problem: RtasksProblem) -> "RTaskArrays":
        """The arrays of a problem."""
        count = len(problem.operators)
        edges = sorted(problem.edges, key=lambda edge: (edge.src, edge.dst, edge.aligned))
        start = np.searchsorted([edge.src for edge in edges], np.arange(count + 1))
        return cls(
            count,
            start.astype(np.int64),
            np.array([edge.dst for edge in edges], np.int64),
            np.array([edge.aligned for edge in edges], np.bool_),
        )


def urgency(problem: RtasksProblem, tilings: tuple[int, ...]) -> F64:
    """The longest way from the start of each operator to the end of all."""
    tiles = [op.tilings[i] for op, i in zip(problem.operators, tilings, strict=True)]
    urgency = np.array([tile.tile_us for tile in tiles])
    for dst in range(len(tiles) - 1, -1, -1):
        for edge in problem.before[dst]:
            way = tiles[edge.src].tile_us + problem.device.signal_us + urgency[dst]
            urgency[edge.src] = max(urgency[edge.src], way)
    return urgency


def list_schedule(
    problem: RtasksProblem, tables: RTaskArrays, tilings: tuple[int, ...], priority: F64
) -> tuple[float, RtasksSolution]:
    """The makespan as the list sees it, and the queues."""
    tiles = [op.tilings[i] for op, i in zip(problem.operators, tilings, strict=True)]
    counts = np.array([tile.num_tiles for tile in tiles], np.int64)
    times = np.array([tile.tile_us for tile in tiles])
    num_veus = min(problem.num_veus(tilings), int(counts.sum()))
    makespan, order, veu_of = _list(  # type: ignore[no-untyped-call]
        num_veus, counts, times, tables.edge_start, tables.edge_dst, tables.edge_aligned,
        priority, problem.device.signal_us,
    )  # fmt: skip
    queues: list[list[tuple[int, int]]] = [[] for _ in range(num_veus)]
    operator = np.repeat(np.arange(len(counts)), counts)
    first = np.concatenate(([0], np.cumsum(counts)))
    for task in order.tolist():
        op = int(operator[task])
        queues[int(veu_of[task])].append((op, task - int(first[op])))
    kept = tuple(tuple(queue) for queue in queues if queue)
    return float(makespan), RtasksSolution(tilings, kept)


@compiled(small=5_000)
def _list(num_veus, counts, times, edge_start, edge_dst, edge_aligned, priority, signal):  # type: ignore[no-untyped-def] # pragma: no cover # fmt: skip
    num_ops = len(counts)
    first = np.zeros(num_ops + 1, np.int64)
    for i in range(num_ops):
        first[i + 1] = first[i] + counts[i]
    total = first[num_ops]
    operator = np.empty(total, np.int64)
    for i in range(num_ops):
        operator[first[i] : first[i + 1]] = i
    left = counts.copy()  # tiles of an operator that have not ended
    whole_missing = np.zeros(num_ops, np.int64)  # edges that wait for all of a source
    tile_missing = np.zeros(total, np.int64)  # aligned tiles that a tile waits for
    for src in range(num_ops):
        for e in range(edge_start[src], edge_start[src + 1]):
            dst = edge_dst[e]
            if not edge_aligned[e]:
                whole_missing[dst] += 1
                continue
            for t in range(counts[dst]):
                low = t * counts[src] // counts[dst]
                high = -((t + 1) * counts[src] // -counts[dst])
                tile_missing[first[dst] + t] += max(high, low + 1) - low
    whole_time = np.zeros(num_ops)  # when everything an operator waits for is seen
    tile_time = np.zeros(total)
    ready = [(0.0, np.int64(0))]  # (-priority, tile)
    ready.clear()
    later = [(0.0, 0.0, np.int64(0))]  # (time, -priority, tile)
    later.clear()
    running = [(0.0, np.int64(0), np.int64(0))]  # (end, tile, veu)
    running.clear()
    idle = [np.int64(0)]
    idle.clear()
    for v in range(num_veus):
        heapq.heappush(idle, np.int64(v))
    for i in range(num_ops):
        if whole_missing[i] == 0:
            for t in range(first[i], first[i + 1]):
                if tile_missing[t] == 0:
                    heapq.heappush(ready, (-priority[i], np.int64(t)))
    order = np.empty(total, np.int64)
    veu_of = np.empty(total, np.int64)
    now, done, makespan = 0.0, 0, 0.0
    while done < total:
        while later and later[0][0] <= now:
            _, urgent, tile = heapq.heappop(later)
            heapq.heappush(ready, (urgent, tile))
        while ready and idle:
            _, tile = heapq.heappop(ready)
            veu = heapq.heappop(idle)
            end = now + times[operator[tile]]
            order[done], veu_of[tile] = tile, veu
            done += 1
            heapq.heappush(running, (end, tile, veu))
        if not running:
            now = later[0][0]
            continue
        if later and idle and later[0][0] < running[0][0]:
            now = later[0][0]
            continue
        now = running[0][0]
        makespan = max(makespan, now)
        while running and running[0][0] <= now:
            _, tile, veu = heapq.heappop(running)
            heapq.heappush(idle, veu)
            src = operator[tile]
            left[src] -= 1
            index = tile - first[src]
            seen = now + signal
            for e in range(edge_start[src], edge_start[src + 1]):
                dst = edge_dst[e]
                if not edge_aligned[e]:
                    if left[src] == 0:
                        whole_missing[dst] -= 1
                        whole_time[dst] = max(whole_time[dst], seen)
                        if whole_missing[dst] == 0:
                            for t in range(first[dst], first[dst + 1]):
                                if tile_missing[t] == 0:
                                    at = max(whole_time[dst], tile_time[t])
                                    heapq.heappush(later, (at, -priority[dst], np.int64(t)))
                    continue
                low = index * counts[dst] // counts[src]
                high = -((index + 1) * counts[dst] // -counts[src])
                for t in range(low, max(high, low + 1)):
                    own_low = t * counts[src] // counts[dst]
                    own_high = max(-((t + 1) * counts[src] // -counts[dst]), own_low + 1)
                    if not own_low <= index < own_high:
                        continue
                    tile_id = first[dst] + t
                    tile_missing[tile_id] -= 1
                    tile_time[tile_id] = max(tile_time[tile_id], seen)
                    if tile_missing[tile_id] == 0 and whole_missing[dst] == 0:
                        at = max(whole_time[dst], tile_time[tile_id])
                        heapq.heappush(later, (at, -priority[dst], np.int64(tile_id)))
    for end, _, _ in running:
        makespan = max(makespan, end)
    return makespan, order, veu_of
