"""Strategies that differ from a given one in one decision, as many as can be run.

Each keeps the devices, the model, the global batch and the precision: what changes is how the same
step is spread and what is kept in memory. A neighbour that `check_strategy` refuses is left out.
"""

from collections.abc import Iterator
from dataclasses import replace

from partita.errors import PlanError
from partita.forecast.inputs import (
    RECOMPUTE,
    Strategy,
    Transformer,
    check_divisions,
    check_strategy,
)


def neighbours(
    model: Transformer, strategy: Strategy, num_devices: int
) -> tuple[tuple[str, Strategy], ...]:
    """What changes in words (`tp=8 dp=4`), and the strategy with that change."""
    legal: list[tuple[str, Strategy]] = []
    known = {strategy}
    for words, changed in _changes(strategy):
        if changed in known:
            continue
        known.add(changed)
        try:
            check_strategy(model, changed, num_devices)
            check_divisions(model, changed)
        except PlanError:
            continue
        legal.append((words, changed))
    return tuple(legal)


def _changes(s: Strategy) -> Iterator[tuple[str, Strategy]]:
    for recompute in RECOMPUTE:
        if recompute != s.recompute:
            yield f"recompute={recompute}", replace(s, recompute=recompute)
    for zero in range(4):
        if zero != s.zero:
            yield f"zero={zero}", replace(s, zero=zero, hsdp=s.hsdp if zero else 0)
    if s.hsdp:
        yield "no hsdp", replace(s, hsdp=0)
    if s.tp > 1:
        yield ("no sp" if s.sp else "sp"), replace(s, sp=not s.sp)
    for micro_batch in (s.micro_batch * 2, s.micro_batch // 2):
        if micro_batch:
            yield f"micro-batch={micro_batch}", replace(s, micro_batch=micro_batch)
    for name in ("tp", "pp", "cp"):
        for other in ("dp", "tp", "pp"):
            if other == name:
                continue
            for more, less in ((name, other), (other, name)):
                if getattr(s, less) % 2 == 0:
                    yield from _moved(s, more, less)
    if s.pp > 1 and s.schedule in ("1f1b", "gpipe"):
        yield "schedule=interleaved vpp=2", replace(s, schedule="interleaved", vpp=2, layers=())
    if s.vpp > 1:
        yield "schedule=1f1b, no vpp", replace(s, schedule="1f1b", vpp=1, layers=())


def _moved(s: Strategy, more: str, less: str) -> Iterator[tuple[str, Strategy]]:
    """Half of one degree given to another; sequence parallelism and chunks stay where they can."""
    degrees = {more: getattr(s, more) * 2, less: getattr(s, less) // 2}
    changed = replace(s, layers=(), **degrees)
    if changed.tp == 1:
        changed = replace(changed, sp=False)
    if changed.pp == 1:
        changed = replace(changed, schedule="1f1b", vpp=1)
    if changed.hsdp > changed.dp:
        changed = replace(changed, hsdp=0)
    yield f"{more}={degrees[more]} {less}={degrees[less]}", changed
