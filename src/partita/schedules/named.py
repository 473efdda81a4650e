"""The orders of published pipeline schedules, for p devices and m micro-batches.

A named schedule is one row of actions per rank; when they run follows from their spans. In units
of a stage (F forward, B data gradients, W weight gradients; bubble of the rank that waits longest,
from its first start to its last end; memory in activations of one stage):

    schedule      bubble                         memory            source
    gpipe         (p-1)(F+B+W)                   m                 Huang et al. 2019
    1f1b          (p-1)(F+B+W)                   min(m, p - rank)  Narayanan et al. 2019
    interleaved   (p-1)(F+B+W) / v               p + (p-1) / v     Narayanan et al. 2021
    looped-bfs    (p-1)(F+B+W) / v               m                 Lamy-Poirier 2022
    chimera       (p-2) F where F = B+W          p/2 + 1 to p      Li, Hoefler 2021
    hanayo        (p-1)(F+B+W) / v, F = B+W      p - (p-1)/v to p  Liu et al. 2023
    zb-h1         (p-1)(F+B-W) where W <= F      p                 Qi et al. 2023
    zb-h2         (p-1)(F+B-2W) where W <= F, B  2p - 1            Qi et al. 2023
    zb-v          0 where F = B = W              p                 Qi et al. 2023
    dualpipe      (p/2-1)(F&B + B - 2W)          p + 1             DeepSeek-AI 2024
    dualpipe-v    (p-1)(F&B + B - 2W) / 2        p + 1/2           DeepSeek-AI 2025

v is the number of chunks a device holds. F&B is a forward and a whole backward that overlap; here
they run one after the other and pass on what is ready, which leaves (p/2-1)(F+B-W) where F = B.
Chimera and Hanayo are ordered for slots of one length. For p micro-batches and B+W >= F they leave
(p-2)(B+W) and 2(p-1)(B+W)/v. More than p follow in units of p: in Chimera directly after each
other ("direct concatenation"), with bubbles between them where F differs from B+W; Hanayo is
given here for one unit only. It is taken to be Chimera folded in the middle: the same slots
without a second copy of the weights.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from partita.schedules.actions import Action, Order

Layout = Literal["line", "looped", "wave", "two-way"]


@dataclass(frozen=True, slots=True)
class NamedSchedule:
    """A published schedule: where it holds its stages, and the order on each rank.

    `order(p, v, n)` is for p ranks with v chunks each and n micro-batches in each direction;
    `refuses(p, v, n)` says why there is none, or nothing.
    """

    title: str
    layout: Layout
    order: Callable[[int, int, int], Order]
    split: bool = False  # has weight gradients as actions of their own
    goes_on: bool = True  # is there for any number of micro-batches, however large
    refuses: Callable[[int, int, int], str] = lambda p, v, n: ""


# --- one stage on each device --------------------------------------------------------------------


def _gpipe(p: int, v: int, n: int) -> Order:
    return tuple(_spelled([(n, "F0"), (n, "B0")], (rank,)) for rank in range(p))


def _one_forward_one_backward(p: int, warmup: int, n: int) -> Order:
    """Rank r runs `ahead` (p - 1 - r) forwards before it takes turns."""
    rows = []
    for rank in range(p):
        warm = min(n, warmup * (p - 1 - rank))
        rows.append(_spelled([(warm, "F0"), (n - warm, "F0 B0"), (warm, "B0")], (rank,)))
    return tuple(rows)


def _1f1b(p: int, v: int, n: int) -> Order:
    return _one_forward_one_backward(p, 1, n)


def _zb_h(p: int, warmup: int, n: int) -> Order:
    """1F1B with weight gradients put off, the later in the pipeline the more.

    Rank r has `ahead` (p - 1 - r) + 1 activations for want of a backward and up to `ahead` r for
    want of the weight gradients: the same on all ranks.
    """
    order = _one_forward_one_backward(p, warmup, n)
    return tuple(_put_off(row, warmup * rank) for rank, row in enumerate(order))


def _put_off(row: Sequence[Action], count: int) -> tuple[Action, ...]:
    """Split every backward; its weight gradients run once `count` more wait."""
    split: list[Action] = []
    waiting: deque[Action] = deque()
    for action in row:
        if action.kind == "F":
            split.append(action)
            continue
        split.append(action._replace(kind="I"))
        waiting.append(action._replace(kind="W"))
        if len(waiting) > count:
            split.append(waiting.popleft())
    return (*split, *waiting)


# --- v chunks on each device, round and round ----------------------------------------------------


def _interleaved(p: int, v: int, n: int) -> Order:
    """Groups of p micro-batches go through all chunks, depth first."""
    total = n * v

    def action(rank: int, kind: str, step: int) -> Action:
        turn, place = divmod(step, p * v)
        chunk = place // p if kind == "F" else v - 1 - place // p
        return Action(chunk * p + rank, kind, turn * p + place % p)

    rows = []
    for rank in range(p):
        warm = min(total, 2 * (p - 1 - rank) + (v - 1) * p)
        row = [action(rank, "F", step) for step in range(warm)]
        for step in range(warm, total):
            row += [action(rank, "F", step), action(rank, "B", step - warm)]
        row += [action(rank, "B", step) for step in range(total - warm, total)]
        rows.append(tuple(row))
    return tuple(rows)


def _looped_bfs(p: int, v: int, n: int) -> Order:
    """All micro-batches through a chunk before the next chunk, breadth first."""
    rows = []
    for rank in range(p):
        stages = [chunk * p + rank for chunk in range(v)]
        row = [Action(stage, "F", i) for stage in stages for i in range(n)]
        row += [Action(stage, "B", i) for stage in reversed(stages) for i in reversed(range(n))]
        rows.append(tuple(row))
    return tuple(rows)


# --- equal slots: Chimera, and what it becomes when folded ----------------------------------------
#
# Micro-batch i is at stage s of S in slot s + 2i forward and 2S - 1 - s + 2i backward. On a device
# with stages s and t of different parity these never meet within a unit of micro-batches (p/2 in
# each of two directions; p in one), nor with the next unit 2S slots later.


def _chimera(p: int, v: int, n: int) -> Order:
    def stages(rank: int) -> list[tuple[int, int]]:
        return [(rank, rank), (p + p - 1 - rank, p - 1 - rank)]

    return _in_slots(p, stages, p, p // 2, n)


def _hanayo(p: int, v: int, n: int) -> Order:
    def stages(rank: int) -> list[tuple[int, int]]:
        held = [chunk * p + (p - 1 - rank if chunk % 2 else rank) for chunk in range(v)]
        return [(stage, stage) for stage in held]

    return _in_slots(p, stages, v * p, p, n)


def _in_slots(
    p: int, stages: Callable[[int], list[tuple[int, int]]], depth: int, unit: int, n: int
) -> Order:
    """Rows sorted by slot; `stages(rank)` are (number, place in its pipeline)."""
    rows = []
    for rank in range(p):
        slots = []
        for stage, place in stages(rank):
            for i in range(n):
                begin = 2 * depth * (i // unit) + 2 * (i % unit)
                slots.append((begin + place, Action(stage, "F", i)))
                slots.append((begin + 2 * depth - 1 - place, Action(stage, "B", i)))
        rows.append(tuple(action for _, action in sorted(slots)))
    return tuple(rows)


# --- two chunks on each device: zero bubble and DualPipe ------------------------------------------


def _zb_v(p: int, v: int, n: int) -> Order:
    count = max(n, 2 * p - 1)  # made for that many; what is not there is left out
    rows = []
    for rank in range(p):
        left = p - rank
        phases = [
            (2 * left - 1, "F0"),
            (rank, "F1 F0"),
            (left, "F1 I1 W1"),
            (count - 2 * p + rank + 1, "F0 I0 W0 F1 I1 W1"),
            (left - 1, "I0 W0 F1 I1 W1"),
            (rank, "I0 I1"),
            (left, "I0 W0"),
            (rank, "W1"),
            (rank, "W0"),
        ]
        row = _spelled(phases, (rank, 2 * p - 1 - rank))
        rows.append(tuple(action for action in row if action.microbatch < n))
    return tuple(rows)


def _dualpipe_phases(half: int, rank: int, n: int) -> list[tuple[int, str]]:
    """What the rank-th device from the ends does; chunk 0 is the one it meets first."""
    left = half - rank - 1
    ending = ["B1", "B0"] * (rank + 1)
    ending[rank + 1 :] = [word.replace("B", "I") for word in ending[rank + 1 :]]
    return [
        (2 * left, "F0"),
        (rank + 1, "F0 F1"),
        (left, "I1 W F1"),
        (n - 2 * half + rank + 1, "F0 B1 F1 B0"),
        (left, "B1 F1 B0"),
        (1, " ".join(ending)),
        (left, "W I0"),
        (rank + 1, "W"),
    ]


def _dualpipe(p: int, v: int, n: int) -> Order:
    rows = []
    for rank in range(p):
        first, second = rank, 2 * p - 1 - rank  # stage p - 1 - rank of the second copy
        held = (first, second) if rank < p // 2 else (second, first)
        rows.append(_spelled(_dualpipe_phases(p // 2, min(rank, p - 1 - rank), n), held))
    return tuple(rows)


def _dualpipe_v(p: int, v: int, n: int) -> Order:
    return tuple(
        _spelled(_dualpipe_phases(p, rank, n), (rank, 2 * p - 1 - rank)) for rank in range(p)
    )


def _spelled(phases: Sequence[tuple[int, str]], stages: tuple[int, ...]) -> tuple[Action, ...]:
    """Phases as actions: each word is a kind and a chunk, and goes on with its next micro-batch.

    F, B, I count on by chunk, B and I together. `W1` runs the oldest weight gradients that wait
    on chunk 1, `W` the oldest of all.
    """
    row: list[Action] = []
    counts: dict[str, int] = {}
    waiting: list[tuple[int, int]] = []  # (chunk, micro-batch)
    for times, words in phases:
        for word in words.split() * times:
            if word[0] == "W":
                place = next(
                    i for i, (chunk, _) in enumerate(waiting) if word in ("W", f"W{chunk}")
                )
                chunk, microbatch = waiting.pop(place)
            else:
                chunk = int(word[1])
                key = word if word[0] == "F" else f"B{chunk}"
                microbatch = counts.get(key, 0)
                counts[key] = microbatch + 1
                if word[0] == "I":
                    waiting.append((chunk, microbatch))
            row.append(Action(stages[chunk], word[0], microbatch))
    assert not waiting, "every weight gradient is made"
    return tuple(row)


# --- the table -----------------------------------------------------------------------------------


def _needs_multiple(p: int, v: int, n: int) -> str:
    return f"needs a multiple of {p} micro-batches" if n % p else ""


def _needs_even(p: int, v: int, n: int) -> str:
    return "needs an even number of devices" if p % 2 else ""


def _needs_one_unit(p: int, v: int, n: int) -> str:
    if v % 2:
        return "needs an even number of chunks on a device"
    return f"needs {p} micro-batches or fewer" if n > p else ""


def _needs_two_chunks(p: int, v: int, n: int) -> str:
    return "needs two chunks on a device" if v != 2 else ""


def _needs_dualpipe(p: int, v: int, n: int) -> str:
    return _needs_even(p, v, n) or (f"needs {2 * p} micro-batches or more" if n < p else "")


def _needs_dualpipe_v(p: int, v: int, n: int) -> str:
    few = f"needs {2 * p} micro-batches or more" if n < 2 * p else ""
    return _needs_two_chunks(p, v, n) or few


NAMED: dict[str, NamedSchedule] = {
    "gpipe": NamedSchedule("GPipe", "line", _gpipe),
    "1f1b": NamedSchedule("1F1B", "line", _1f1b),
    "zb-h1": NamedSchedule("ZB-H1", "line", lambda p, v, n: _zb_h(p, 1, n), split=True),
    "zb-h2": NamedSchedule("ZB-H2", "line", lambda p, v, n: _zb_h(p, 2, n), split=True),
    "interleaved": NamedSchedule(
        "interleaved 1F1B", "looped", _interleaved, refuses=_needs_multiple
    ),
    "looped-bfs": NamedSchedule("looped BFS", "looped", _looped_bfs),
    "hanayo": NamedSchedule("Hanayo", "wave", _hanayo, goes_on=False, refuses=_needs_one_unit),
    "zb-v": NamedSchedule("ZB-V", "wave", _zb_v, split=True, refuses=_needs_two_chunks),
    "dualpipe-v": NamedSchedule(
        "DualPipeV", "wave", _dualpipe_v, split=True, refuses=_needs_dualpipe_v
    ),
    "chimera": NamedSchedule("Chimera (direct)", "two-way", _chimera, refuses=_needs_even),
    "dualpipe": NamedSchedule(
        "DualPipe", "two-way", _dualpipe, split=True, refuses=_needs_dualpipe
    ),
}
