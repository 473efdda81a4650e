"""The timeline of a strategy by name: its stages' micro-batches in the order of its schedule.

A forecast has no tasks: pipelines are closed forms. What a stage takes for one micro-batch and
the schedule's order are enough to run them block by block, and to see what each rank holds when.
Reductions, the optimizer and what else comes once a step follow as one block.
"""

from partita.engine import run
from partita.forecast import Forecast
from partita.forecast.memory import MemoryParts, in_flight
from partita.forecast.predict import Times, stage_times
from partita.program import Kind, ProgramBuilder
from partita.schedules.actions import Action, Order
from partita.schedules.named import NAMED
from partita.timeline import Timeline

MOST_BLOCKS = 20_000
KIND_OF = {"F": Kind.FORWARD, "B": Kind.BACKWARD, "I": Kind.DGRAD, "W": Kind.WGRAD}
TWO_CHUNKS = ("zb-v", "dualpipe-v")  # a backward in one piece passes its gradients on early

Waits = dict[tuple[int, str, int], int]  # (stage, F or I or W, micro-batch) -> task


def forecast_timeline(forecast: Forecast) -> Timeline | None:
    """One rank of each stage over a step; None where that is too much to draw."""
    s = forecast.strategy
    name = s.schedule if s.pp > 1 else "1f1b"
    chunks = 2 if name in TWO_CHUNKS else s.vpp
    count = s.num_microbatches
    if 3 * s.pp * chunks * count > MOST_BLOCKS or NAMED[name].refuses(s.pp, chunks, count):
        return None
    order = NAMED[name].order(s.pp, chunks, count)
    times = stage_times(forecast.model, forecast.machine, s)
    pipeline = _run(forecast, order, times, chunks, 0.0).makespan
    return _run(forecast, order, times, chunks, max(0.0, forecast.step_s - pipeline))


def _run(
    forecast: Forecast, order: Order, times: list[Times], chunks: int, rest_s: float
) -> Timeline:
    """The program of an order, run; `rest_s` is what comes after all blocks."""
    b, s = ProgramBuilder(), forecast.strategy
    memory = forecast.memory_of_stages
    lanes = [b.lane(f"stage {rank}") for rank in range(len(order))]
    held = []  # bytes of one block's activations
    for rank, parts in enumerate(memory):
        store = b.memory(f"stage {rank}", forecast.capacity_bytes)
        whole = max(in_flight(s, rank, s.pp), 1 / chunks)
        held.append(parts.activations / whole / chunks)
        b.add("held", (), 0.0, (), [(store, _always(parts), 0.0)])
    done: Waits = {}
    place = [0] * len(order)
    last = len(order) * chunks - 1
    early = s.pp > 1 and s.schedule in TWO_CHUNKS
    while any(place[rank] < len(row) for rank, row in enumerate(order)):
        before = sum(place)
        for rank, row in enumerate(order):
            while place[rank] < len(row) and _ready(row[place[rank]], done, last):
                sizes = (chunks, held[rank], last)
                for action in _parts(row[place[rank]], early):
                    _add(b, action, (rank, lanes[rank]), times[rank], sizes, done)
                place[rank] += 1
        assert sum(place) > before, "a schedule that forecasts are made of ends"
    if rest_s > 0:
        b.add("gradients and optimizer", lanes, rest_s, list(range(len(b))), (), Kind.UPDATE)
    return run(b.build())


def _always(parts: MemoryParts) -> float:
    return parts.total - parts.activations


def _parts(action: Action, early: bool) -> tuple[Action, ...]:
    """A backward in two pieces where its gradients are passed on before those of weights."""
    if action.kind != "B" or not early:
        return (action,)
    return (action._replace(kind="I"), action._replace(kind="W"))


def _waits(action: Action, last: int) -> list[tuple[int, str, int]]:
    stage, kind, microbatch = action
    if kind == "F":
        return [(stage - 1, "F", microbatch)] if stage else []
    if kind == "W":
        return [(stage, "I", microbatch)]
    behind = [(stage + 1, "I", microbatch)] if stage < last else []
    return [(stage, "F", microbatch), *behind]


def _ready(action: Action, done: Waits, last: int) -> bool:
    return all(wait in done for wait in _waits(action, last))


def _add(
    b: ProgramBuilder, action: Action, at: tuple[int, int], time: Times,
    sizes: tuple[int, float, int], done: Waits,
) -> None:  # fmt: skip
    """Add the task of an action on its rank's lane."""
    stage, kind, microbatch = action
    (rank, lane), (chunks, held, last) = at, sizes
    span = {"F": time.forward, "B": time.backward, "I": time.data, "W": time.weights}[kind] / chunks
    effects = {"F": [(rank, held, 0.0)], "I": []}.get(kind, [(rank, 0.0, -held)])
    waits = [done[wait] for wait in _waits(action, last)]
    task = b.add(f"stage {stage}", lane, span, waits, effects, KIND_OF[kind], microbatch)
    done[stage, "I" if kind == "B" else kind, microbatch] = task
