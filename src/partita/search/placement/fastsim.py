"""The simulation of `problems.placement.simulate_exprimo`, compiled, for searches.

The same events in the same order, so the same numbers: every device and channel has at most one
event in the heap, whose ties are broken as CPython's `heapq` does; memory is counted by references
in the same sequence of additions. Costs lie in tables, queues are linked lists over packed
numbers, and nothing is allocated, so one event takes tens of nanoseconds.

Before the simulation a placement is *screened*: the longest path of one batch with its transfers,
the work of every device and channel over all batches, and the memory that is surely held when the
forward pass ends are lower bounds of what the simulation will find, at about a tenth of its cost.
A candidate that cannot cost at most what is asked (`most`) is given up there, or in the simulation
as soon as the time plus the rest of the path, or the rest of a device's work, says so.

The cost of a candidate is `makespan + price * bytes over the limits`; with the problem's own price
that is its score. A lower price lets a search pass through placements that do not fit.
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

import numpy as np

from partita.compiled import compiled
from partita.errors import ProblemError
from partita.problems.placement import PlacementEvaluation, PlacementProblem
from partita.search.placement.tables import F64, I32, I64, PlacementArrays, tables

_Function = TypeVar("_Function", bound=Callable[..., Any])


# Without the wrappers for Python these compile in half the time. For the same reason arrays are
# filled by loops here: every slice costs 60 ms.
def inner(function: _Function) -> _Function:
    """Compile a function that only compiled code calls."""
    options: dict[str, Any] = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
    return compiled(nogil=True, **options)(function)


INVALID = 1e300  # the cost of a placement that breaks a rule, times the number of rules broken

SCORE, MAKESPAN, OVER, EVENTS, PEAKS = range(5)  # columns of what is found of many placements

FEW_JOBS = 10_000  # layers of all batches and placements that are soon simulated uncompiled
_ROWS_PER_THREAD = 16
_IDLE, _WAKING = -1, -2  # what a slot does where it is no item
_NONE = -1
_SLACK = 1 + 1e-9  # sums in another order round differently: never give up for that alone


class PlacementWork(NamedTuple):
    """Scratch of one simulation at a time; and what it found."""

    layer_bits: int  # a job is (batch slot * 2 + direction) << layer_bits | layer
    device_bits: int  # a transfer is job << device_bits | target
    heap_ms: F64
    heap_slot: I64
    woken: I64  # slots that get a wakeup at this event
    head: I32  # per slot: its queue
    tail: I32
    current: I32  # per slot: what it does
    next_job: I32
    next_transfer: I32
    present: I32  # per job: inputs that are there
    references: I32  # per batch slot, layer, device
    outstanding: I64  # per batch slot: things queued or running
    used: F64  # bytes per device
    peak: F64
    seen: I64  # per device
    gathered: F64  # per device
    after_ms: F64  # per job: the longest path after it
    rest_ms: F64  # per slot: work still to be done, of all batches
    drain_ms: F64  # per slot: what surely comes after its last work
    began_ms: F64  # per slot: the length of its transfer
    sure_bytes: F64  # per device: held when the forward pass ends
    order: I64  # the input layers by device
    result: F64  # makespan, score, events, bytes over the limits


def workspace(net: PlacementArrays) -> PlacementWork:
    """Scratch for simulations of this problem; one per thread."""
    num_layers, num_devices = len(net.output_bytes), len(net.limit_bytes)
    num_slots = num_devices + net.transfer_ms.shape[1]
    layer_bits = max(1, (num_layers - 1).bit_length())
    device_bits = max(1, (num_devices - 1).bit_length())
    jobs = net.in_flight * 2 << layer_bits
    if jobs << device_bits >= 2**31:
        raise ProblemError(
            f"{net.in_flight:,} batches in flight, {num_layers:,} layers and {num_devices:,} "
            "devices are more than can be simulated",
            fix="let fewer batches be in flight at once",
            field="settings.pipeline_batches",
        )
    return PlacementWork(
        layer_bits=layer_bits,
        device_bits=device_bits,
        heap_ms=np.zeros(num_slots),
        heap_slot=np.zeros(num_slots, np.int64),
        woken=np.zeros(num_slots, np.int64),
        head=np.zeros(num_slots, np.int32),
        tail=np.zeros(num_slots, np.int32),
        current=np.zeros(num_slots, np.int32),
        next_job=np.zeros(jobs, np.int32),
        next_transfer=np.zeros(jobs << device_bits, np.int32),
        present=np.zeros(jobs, np.int32),
        references=np.zeros((net.in_flight << layer_bits) << device_bits, np.int32),
        outstanding=np.zeros(net.in_flight, np.int64),
        used=np.zeros(num_devices),
        peak=np.zeros(num_devices),
        seen=np.full(num_devices, -1, np.int64),
        gathered=np.zeros(num_devices),
        after_ms=np.zeros(2 * num_layers),
        rest_ms=np.zeros(num_slots),
        drain_ms=np.zeros(num_slots),
        began_ms=np.zeros(num_slots),
        sure_bytes=np.zeros(num_devices),
        order=np.zeros(len(net.inputs), np.int64),
        result=np.zeros(4),
    )


class PlacementSimulator:
    """Evaluates placements of one problem, one or many at a time."""

    def __init__(self, problem: PlacementProblem) -> None:
        self.net = tables(problem)
        self.work = workspace(self.net)

    def evaluate(self, placement: Sequence[int]) -> PlacementEvaluation:
        """What `simulate_exprimo` says of the placement; it must be a valid one."""
        row = self.details(np.array([placement], np.int64))[0].tolist()
        return PlacementEvaluation(row[MAKESPAN], tuple(row[PEAKS:]), row[SCORE], int(row[EVENTS]))

    def scores(self, placements: I64) -> F64:
        """The score of every row; infinite for one that is not valid."""
        return self.details(placements)[:, SCORE].copy()

    def details(self, placements: I64) -> F64:
        """Per row: score, makespan, bytes over the limits, events, and the peak of each device."""
        placements = np.ascontiguousarray(placements)  # else it is compiled for other strides too
        details = np.empty((len(placements), PEAKS + len(self.net.limit_bytes)))
        evaluate_many(self.net, self.work, placements, details)
        return details


class Pool:
    """Scratch and threads for evaluating many placements; the answers do not depend on them."""

    def __init__(self, net: PlacementArrays, num_threads: int = 0) -> None:
        self.net = net
        self.num_threads = num_threads or os.cpu_count() or 1
        self.works = [workspace(net)]
        self.executor: ThreadPoolExecutor | None = None

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, *_: object) -> None:
        if self.executor is not None:
            self.executor.shutdown()

    def details(self, placements: I64) -> F64:
        """Per row: score, makespan, bytes over the limits, events, and the peak of each device."""
        placements = np.ascontiguousarray(placements)  # else it is compiled for other strides too
        details = np.empty((len(placements), PEAKS + len(self.net.limit_bytes)))
        parts = min(self.num_threads, len(placements) // _ROWS_PER_THREAD)
        if parts <= 1:
            evaluate_many(self.net, self.works[0], placements, details)
            return details
        while len(self.works) < parts:
            self.works.append(workspace(self.net))
        ends = np.linspace(0, len(placements), parts + 1).astype(int).tolist()
        self.each(
            lambda part: evaluate_many(
                self.net,
                self.works[part],
                placements[ends[part] : ends[part + 1]],
                details[ends[part] : ends[part + 1]],
            ),
            parts,
        )
        return details

    def each(self, job: Callable[[int], None], count: int) -> None:
        """Do a job for every number below `count`, several at a time."""
        if self.num_threads == 1 or count == 1:
            for number in range(count):
                job(number)
            return
        if self.executor is None:
            self.executor = ThreadPoolExecutor(self.num_threads)
        for done in [self.executor.submit(job, number) for number in range(count)]:
            done.result()


def _few(net: PlacementArrays, work: PlacementWork, placements: I64, array: F64) -> bool:
    return placements.size * net.batches <= FEW_JOBS


@compiled(small=_few, nogil=True)
def evaluate_many(net: PlacementArrays, work: PlacementWork, placements: I64, array: F64) -> None:
    """Fill a row of `found` for every row of `placements`; the score of an invalid one is inf."""
    for index in range(len(placements)):
        placement = placements[index]
        if broken_rules(net, work, placement) > 0:
            for column in range(array.shape[1]):
                array[index, column] = np.inf
            continue
        simulate(net, work, placement, 0.0, np.inf)
        array[index, SCORE], array[index, MAKESPAN] = work.result[1], work.result[0]
        array[index, OVER], array[index, EVENTS] = work.result[3], work.result[2]
        for device in range(len(net.limit_bytes)):
            array[index, PEAKS + device] = work.peak[device]


@inner
def cost_of(
    net: PlacementArrays, work: PlacementWork, placement: I64, price: float, most: float
) -> float:
    """Makespan plus `price` per byte over the limits; infinite if that is surely above `most`.

    A placement that breaks rules costs `INVALID` for each. After a finite cost below `INVALID` the
    score is in `work.result[1]`.
    """
    broken = broken_rules(net, work, placement)
    if broken > 0:
        return INVALID * broken if INVALID * broken <= most else np.inf
    if most < np.inf and screen(net, work, placement, price) > most * _SLACK:
        return np.inf
    return simulate(net, work, placement, price, most)


@inner
def broken_rules(net: PlacementArrays, work: PlacementWork, placement: I64) -> int:
    """How many edges have no route, and how many devices are used beyond those allowed."""
    broken = 0
    for layer in range(len(placement)):
        here = placement[layer]
        for k in range(net.child_start[layer], net.child_start[layer + 1]):
            there = placement[net.child[k]]
            if here != there and (net.route[here, there] < 0 or net.route[there, here] < 0):
                broken += 1
    if net.max_devices < len(net.limit_bytes):
        for device in range(len(work.seen)):
            work.seen[device] = -1
        num_used = 0
        for device in placement:
            if work.seen[device] < 0:
                work.seen[device] = 0
                num_used += 1
        broken += max(0, num_used - net.max_devices)
    return broken


@inner
def screen(net: PlacementArrays, work: PlacementWork, placement: I64, price: float) -> float:
    """A lower bound of the cost of a placement; fills what the simulation gives up by."""
    latency = _paths_after(net, work, placement)
    num_layers, num_devices = len(placement), len(net.limit_bytes)
    rest_ms, route = work.rest_ms, net.route
    for slot in range(len(rest_ms)):
        rest_ms[slot] = 0.0
    for layer in range(num_layers):
        here = placement[layer]
        rest_ms[here] += net.job_ms[layer, here] + net.job_ms[num_layers + layer, here]
        # Each output goes once to every other device that needs it, each gradient comes by itself.
        for device in range(num_devices):
            work.seen[device] = -1
        for k in range(net.child_start[layer], net.child_start[layer + 1]):
            there = placement[net.child[k]]
            if there != here:
                if work.seen[there] < 0:
                    work.seen[there] = 0
                    channel = route[here, there]
                    rest_ms[num_devices + channel] += net.transfer_ms[layer, channel]
                channel = route[there, here]
                rest_ms[num_devices + channel] += net.transfer_ms[layer, channel]
    _drains(net, work, placement)
    busiest = 0.0
    for slot in range(len(rest_ms)):
        rest_ms[slot] *= net.batches
        busiest = max(busiest, rest_ms[slot] + work.drain_ms[slot])
    sequential_batches = (net.batches + net.in_flight - 1) // net.in_flight
    return max(sequential_batches * latency, busiest) + price * _surely_over(net, work, placement)


@inner
def _drains(net: PlacementArrays, work: PlacementWork, placement: I64) -> None:
    """Fill `drain_ms`: the time that surely passes after the last work of a slot.

    After any job of a device comes at least the shortest of the paths after its backward jobs.
    """
    num_layers = len(placement)
    drain = work.drain_ms
    for slot in range(len(drain)):
        drain[slot] = np.inf if slot < len(net.limit_bytes) else 0.0
    for layer in range(num_layers):
        here = placement[layer]
        drain[here] = min(drain[here], work.after_ms[num_layers + layer])
    for device in range(len(net.limit_bytes)):
        if drain[device] == np.inf:
            drain[device] = 0.0


@inner
def _paths_after(net: PlacementArrays, work: PlacementWork, placement: I64) -> float:
    """The longest path of one batch, transfers included; fills `after_ms`."""
    num_layers = len(placement)
    after, gathered, job_ms = work.after_ms, work.gathered, net.job_ms
    for layer in range(num_layers):  # backward jobs: their successors are the parents' backward
        here, longest = placement[layer], 0.0
        begin, end = net.parent_start[layer], net.parent_start[layer + 1]
        for k in range(begin, end):
            there = placement[net.parent[k]]
            if there != here:  # gradients for one device travel as one transfer
                gathered[there] += net.transfer_ms[net.parent[k], net.route[here, there]]
        for k in range(begin, end):
            parent = net.parent[k]
            there = placement[parent]
            tail = job_ms[num_layers + parent, there] + after[num_layers + parent]
            if there != here:
                tail += gathered[there]
            longest = max(longest, tail)
        for k in range(begin, end):
            gathered[placement[net.parent[k]]] = 0.0
        after[num_layers + layer] = longest
    latency = 0.0
    for layer in range(num_layers - 1, -1, -1):
        here, longest = placement[layer], 0.0
        begin, end = net.child_start[layer], net.child_start[layer + 1]
        for k in range(begin, end):
            there = placement[net.child[k]]
            tail = job_ms[net.child[k], there] + after[net.child[k]]
            if there != here:
                tail += net.transfer_ms[layer, net.route[here, there]]
            longest = max(longest, tail)
        if begin == end:
            longest = job_ms[num_layers + layer, here] + after[num_layers + layer]
        after[layer] = longest
        if net.parent_start[layer] == net.parent_start[layer + 1]:
            latency = max(latency, job_ms[layer, here] + longest)
    return latency


@inner
def _surely_over(net: PlacementArrays, work: PlacementWork, placement: I64) -> float:
    """Bytes over the limits that any order of events has at some moment; fills `sure_bytes`.

    When the last layer's forward ends, all outputs lie on every device that has a child for them:
    references go with backward jobs, and the first of these comes later. With several last layers
    only the weights are sure.
    """
    sure = work.sure_bytes
    for device in range(len(sure)):
        sure[device] = 0.0
    for layer in range(len(placement)):
        sure[placement[layer]] += net.weight_bytes[layer]
        if net.one_sink:
            for device in range(len(sure)):
                work.seen[device] = -1
            for k in range(net.child_start[layer], net.child_start[layer + 1]):
                there = placement[net.child[k]]
                if work.seen[there] < 0:
                    work.seen[there] = 0
                    sure[there] += net.output_bytes[layer]
    over = 0.0
    for device in range(len(sure)):
        over += max(0.0, sure[device] - net.limit_bytes[device])
    return over


@inner
def simulate(
    net: PlacementArrays, work: PlacementWork, placement: I64, price: float, most: float
) -> float:
    """Makespan plus `price` per byte over the limits, event by event; fills `found` and `peak`.

    Infinite, and `found` is stale, where that is surely above `most`; a finite `most` needs what
    `screen` filled for this placement.

    One long function on purpose: every array handed to a helper costs reference counting, which
    would take longer than the event.
    """
    num_layers, num_devices = len(placement), len(net.limit_bytes)
    layer_bits, device_bits = work.layer_bits, work.device_bits
    layer_mask, device_mask = (1 << layer_bits) - 1, (1 << device_bits) - 1
    job_bits = layer_bits + 1
    edge_start, edge, needed = net.edge_start, net.edge, net.needed
    job_ms, transfer_ms, output_bytes = net.job_ms, net.transfer_ms, net.output_bytes
    route, batches, in_flight = net.route, net.batches, net.in_flight
    heap_ms, heap_slot, woken = work.heap_ms, work.heap_slot, work.woken
    head, tail, current = work.head, work.tail, work.current
    next_job, next_transfer, order = work.next_job, work.next_transfer, work.order
    used, peak, limit, seen = work.used, work.peak, net.limit_bytes, work.seen
    references, outstanding, present = work.references, work.outstanding, work.present
    after_ms, rest_ms, drain_ms, began_ms = (
        work.after_ms, work.rest_ms, work.drain_ms, work.began_ms,
    )  # fmt: skip
    limited = most < np.inf
    most *= _SLACK

    for slot in range(len(head)):
        head[slot], current[slot] = _NONE, _IDLE
    for index in range(len(present)):
        present[index] = 0
    for batch in range(len(outstanding)):
        outstanding[batch] = 0
    for device in range(num_devices):
        seen[device], used[device] = -1, 0.0
    for layer in range(num_layers):
        used[placement[layer]] += net.weight_bytes[layer]
    over = 0.0  # bytes over the limits so far
    for device in range(num_devices):
        peak[device] = used[device]
        over += max(0.0, peak[device] - limit[device])
    _sort_inputs(net.inputs, order, placement)

    now, size, events = 0.0, 0, 0
    admitted, flying, num_woken = 0, 0, 0
    started, started_end = _NONE, 0.0  # the slot that began something at this event, and its end
    while True:
        # The slots woken at this event and the end of what was begun go into the heap in the
        # order in which they came up, then those woken by a batch that is admitted.
        before = num_woken
        if admitted < batches and flying < in_flight:
            waiting = True
            for layer in order:
                if current[placement[layer]] != _IDLE:
                    waiting = False
            if waiting:
                batch = 0
                while outstanding[batch] > 0:
                    batch += 1
                admitted += 1
                flying += 1
                outstanding[batch] = len(order)
                for layer in order:
                    device = placement[layer]
                    job = batch << job_bits | layer
                    if head[device] == _NONE:
                        head[device] = job
                    else:
                        next_job[tail[device]] = job
                    tail[device] = job
                    next_job[job] = _NONE
                    if current[device] == _IDLE:
                        current[device] = _WAKING
                        woken[num_woken] = device
                        num_woken += 1
        for k in range(num_woken + 1):
            if k == before:
                if started == _NONE:
                    continue
                slot, end_ms = started, started_end
            else:
                slot, end_ms = woken[k if k < before else k - 1], now
            # heapq.heappush: rises while strictly smaller than its parent.
            position = size
            size += 1
            while position > 0:
                parent = (position - 1) >> 1
                if not end_ms < heap_ms[parent]:
                    break
                heap_ms[position] = heap_ms[parent]
                heap_slot[position] = heap_slot[parent]
                position = parent
            heap_ms[position] = end_ms
            heap_slot[position] = slot
        if size == 0:
            break

        now, slot = heap_ms[0], heap_slot[0]
        events += 1
        # heapq.heappop: the smaller child rises, of equal ones the right; the last finds its place.
        size -= 1
        last_ms, last_slot = heap_ms[size], heap_slot[size]
        position, lower = 0, 1
        while lower < size:
            if lower + 1 < size and not heap_ms[lower] < heap_ms[lower + 1]:
                lower += 1
            heap_ms[position] = heap_ms[lower]
            heap_slot[position] = heap_slot[lower]
            position = lower
            lower = 2 * position + 1
        while position > 0:
            parent = (position - 1) >> 1
            if not last_ms < heap_ms[parent]:
                break
            heap_ms[position] = heap_ms[parent]
            heap_slot[position] = heap_slot[parent]
            position = parent
        heap_ms[position] = last_ms
        heap_slot[position] = last_slot

        num_woken = 0
        item = np.int64(current[slot])
        if item >= 0 and slot < num_devices:  # a job is done
            layer, side = item & layer_mask, item >> layer_bits  # type: ignore[assignment]
            batch, backward = side >> 1, side & 1  # type: ignore[assignment]
            row = backward * num_layers + layer
            if limited:
                rest_ms[slot] -= job_ms[row, slot]
                if now + max(after_ms[row], rest_ms[slot] + drain_ms[slot]) + price * over > most:
                    return np.inf
            begin, end = edge_start[row], edge_start[row + 1]
            here = used[slot]
            if backward:
                for k in range(begin, end):
                    parent = edge[k]
                    held = (batch << layer_bits | parent) << device_bits | slot
                    references[held] -= 1
                    if references[held] == 0:
                        here -= output_bytes[parent]
                    here += output_bytes[parent]
                here -= needed[row] * output_bytes[layer]
            count, outgoing = 0, 0
            for k in range(begin, end):
                other = edge[k]
                there = placement[other]
                if there == slot:
                    count += 1
                    job = side << layer_bits | other
                    present[job] += 1
                    if present[job] == needed[backward * num_layers + other]:
                        present[job] = 0
                        outgoing += 1
                        if head[slot] == _NONE:
                            head[slot] = job
                        else:
                            next_job[tail[slot]] = job
                        tail[slot] = job
                        next_job[job] = _NONE
                elif seen[there] != events:
                    seen[there] = events
                    count += 1
                    outgoing += 1
                    channel = num_devices + route[slot, there]
                    transfer = item << device_bits | there
                    if head[channel] == _NONE:
                        head[channel] = transfer
                    else:
                        next_transfer[tail[channel]] = transfer
                    tail[channel] = transfer
                    next_transfer[transfer] = _NONE
                    if current[channel] == _IDLE:
                        current[channel] = _WAKING
                        woken[num_woken] = channel
                        num_woken += 1
            if not backward:
                if count > 0:
                    references[(batch << layer_bits | layer) << device_bits | slot] = count
                    here += output_bytes[layer]
                else:  # it has no children: its own backward is next
                    outgoing += 1
                    job = item | 1 << layer_bits
                    if head[slot] == _NONE:
                        head[slot] = job
                    else:
                        next_job[tail[slot]] = job
                    tail[slot] = job
                    next_job[job] = _NONE
            outstanding[batch] += outgoing - 1
            if outstanding[batch] == 0:
                flying -= 1
            used[slot] = here
            if here > peak[slot]:
                over += max(0.0, here - max(peak[slot], limit[slot]))
                peak[slot] = here
        elif item >= 0:  # a transfer is done
            target, source_job = item & device_mask, item >> device_bits
            layer, side = source_job & layer_mask, source_job >> layer_bits  # type: ignore[assignment]
            batch, backward = side >> 1, side & 1  # type: ignore[assignment]
            source = placement[layer]
            row = backward * num_layers + layer
            if limited:
                rest_ms[slot] -= began_ms[slot]
                if now + rest_ms[slot] + price * over > most:
                    return np.inf
            count, outgoing = 0, 0
            for k in range(edge_start[row], edge_start[row + 1]):
                other = edge[k]
                if placement[other] != target:
                    continue
                count += 1
                if backward:
                    used[source] -= output_bytes[other]
                    used[target] += output_bytes[other]
                job = side << layer_bits | other
                present[job] += 1
                if present[job] == needed[backward * num_layers + other]:
                    present[job] = 0
                    outgoing += 1
                    if head[target] == _NONE:
                        head[target] = job
                    else:
                        next_job[tail[target]] = job
                    tail[target] = job
                    next_job[job] = _NONE
                    if current[target] == _IDLE:
                        current[target] = _WAKING
                        woken[num_woken] = target
                        num_woken += 1
            if not backward:
                row = (batch << layer_bits | layer) << device_bits  # type: ignore[assignment]
                references[row | source] -= 1
                if references[row | source] == 0:
                    used[source] -= output_bytes[layer]
                references[row | target] = count
                used[target] += output_bytes[layer]
            outstanding[batch] += outgoing - 1
            if outstanding[batch] == 0:
                flying -= 1
            if used[target] > peak[target]:
                over += max(0.0, used[target] - max(peak[target], limit[target]))
                peak[target] = used[target]

        # Start what heads the queue of the slot; without one it becomes idle.
        first = np.int64(head[slot])
        current[slot] = first
        started = _NONE
        if first != _NONE:
            started = slot
            if slot < num_devices:
                head[slot] = next_job[first]
                backward = first >> layer_bits & 1
                started_end = now + job_ms[backward * num_layers + (first & layer_mask), slot]
            else:
                head[slot] = next_transfer[first]
                target, source_job = first & device_mask, first >> device_bits
                layer, channel = source_job & layer_mask, slot - num_devices  # type: ignore[assignment]
                cost = 0.0
                if source_job >> layer_bits & 1:
                    for k in range(
                        edge_start[num_layers + layer], edge_start[num_layers + layer + 1]
                    ):
                        if placement[edge[k]] == target:
                            cost += transfer_ms[edge[k], channel]
                else:
                    cost = transfer_ms[layer, channel]
                started_end = now + cost
                began_ms[slot] = cost

    over = 0.0
    for device in range(num_devices):
        over += max(0.0, peak[device] - limit[device])
    work.result[0] = now
    work.result[1] = now + net.penalty * over
    work.result[2] = events
    work.result[3] = over
    return now + price * over


@inner
def _sort_inputs(inputs: I64, order: I64, placement: I64) -> None:
    """Fill `order` with the input layers by device, then by index."""
    for position in range(len(inputs)):
        layer = inputs[position]
        k = position
        while k > 0 and placement[order[k - 1]] > placement[layer]:
            order[k] = order[k - 1]
            k -= 1
        order[k] = layer
