"""Nothing fits: the smallest changes that would make it fit, as far as drafts tell.

More memory per device, more such devices, or a smaller batch; each is tried by itself, in growing
steps, with a few numbers of stages. Recompute and states in shares are part of every draft.
"""

import math
import time
from collections.abc import Callable
from itertools import pairwise

from partita import units
from partita.cluster.presets import several
from partita.costs.collectives import Collectives
from partita.costs.memory import workspace_bytes
from partita.engine import run
from partita.graph.rebatch import rebatch
from partita.lower import Memo, lower_plan
from partita.search.joint.drafts import ROOM, Draft, Drafting
from partita.search.joint.meshes import arrangements, divisors

Late = Callable[[], bool]
MORE_MEMORY = (1.1, 1.25, 1.5, 2, 3, 4, 6, 8, 16)
ROUNDING = 1.005
ADVICE_S = 5.0  # for each kind of advice
HALVINGS = 3  # between the last that was too little and the first that was enough
MORE_DEVICES = (2, 4, 8, 16)
MOST_DEVICES = 1024
MOST_BATCHES = 6
MOST_STAGES = 32


def what_would_fit(drafting: Drafting, max_memory: float) -> str:
    """One sentence: what there is, and what would be enough."""
    room = min(min(kind.memory_bytes for kind in drafting.cluster.kinds), max_memory)
    tried = (
        _memory(drafting, room, _after(ADVICE_S)),
        _devices(drafting, max_memory, _after(ADVICE_S)),
        _batch(drafting, _after(ADVICE_S)),
    )
    helps = "; ".join(filter(None, tried))
    helps = helps or "use many more or larger devices, or a smaller batch"
    have = units.size(room)
    return f"no plan fits {have} per device, with recompute and states in shares: {helps}"


def _after(seconds: float) -> Late:
    """Is the time over that may be spent on a piece of advice? Drafts ask between their steps."""
    end = time.perf_counter() + seconds
    return lambda: time.perf_counter() > end


def _memory(drafting: Drafting, room: float, late: Late) -> str:
    """The room beside the workspace grows until a draft fits; its simulation says how much."""
    kinds = drafting.cluster.kinds
    workspace = max(map(workspace_bytes, kinds))
    whole = min(kind.memory_bytes - workspace_bytes(kind) for kind in kinds)
    uncapped = Drafting(
        drafting.graph, drafting.optimizer, drafting.cluster, drafting.collectives, drafting.allow,
        interrupted=late,
    )  # fmt: skip
    parameters = sum(tensor.size_bytes for tensor in drafting.graph.parameters)
    least = max(room - workspace, parameters / drafting.cluster.num_devices)

    def fitting(times: float) -> Draft | None:
        return _fitting(uncapped, ROOM * times * least / whole)

    for low, high in pairwise((1.0, *MORE_MEMORY)):
        found = fitting(high)
        for _ in range(HALVINGS if found else 0):
            middle = (low + high) / 2
            smaller = fitting(middle)
            low, high, found = (middle, high, found) if smaller is None else (low, middle, smaller)
        if found is not None:
            return f"{units.size(_peak(uncapped, found))} per device would be enough"
    return ""


def _peak(drafting: Drafting, draft: Draft) -> float:
    """The most that a device holds in a run of a draft, and a little more to be shown rounded."""
    graph, cluster = drafting.graph, drafting.cluster
    program = lower_plan(
        draft.stages, draft.schedule, graph, cluster, run, Memo(drafting.collectives),
        quick=True, most_devices=1,
    ).program  # fmt: skip
    return float(max(run(program).peaks())) * ROUNDING


def _devices(drafting: Drafting, max_memory: float, late: Late) -> str:
    cluster = drafting.cluster
    if not cluster.is_homogeneous or max_memory < math.inf:
        return ""
    for times in MORE_DEVICES:
        count = cluster.num_devices * times
        if count > MOST_DEVICES:
            break
        larger = several(cluster.kinds[0], count)
        other = Drafting(
            drafting.graph, drafting.optimizer, larger, Collectives(larger), drafting.allow,
            interrupted=late,
        )  # fmt: skip
        if _fitting(other, ROOM) is not None:
            return f"{count} such devices would be enough"
    return ""


def _batch(drafting: Drafting, late: Late) -> str:
    smaller = [size for size in divisors(drafting.batch) if size < drafting.batch]
    for size in sorted(smaller, reverse=True)[:MOST_BATCHES]:
        other = Drafting(
            rebatch(drafting.graph, size), drafting.optimizer, drafting.cluster,
            drafting.collectives, drafting.allow, max_memory=drafting.max_memory, interrupted=late,
        )  # fmt: skip
        if _fitting(other, ROOM) is not None:
            return f"a batch of {size} would fit"
    return ""


def _fitting(drafting: Drafting, room: float) -> Draft | None:
    """A draft with so much room, for a few numbers of stages, if there is one."""
    found = arrangements(drafting.cluster, min(MOST_STAGES, drafting.chain.num_segments))
    for arrangement in found[:: max(1, len(found) // 3)]:
        for count in drafting.every_count(arrangement.num_stages)[-2:]:
            if drafting.interrupted():
                return None
            draft = drafting.draft(arrangement, count, room=room)
            if draft is not None:
                return draft
    return None
