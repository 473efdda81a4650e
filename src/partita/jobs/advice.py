"""Nothing fits: the smallest changes that would make it fit, as far as drafts tell.

More memory per device, more such devices, or a smaller batch; each is tried by itself, in growing
steps, with a few numbers of stages. Recompute and states in shares are part of every draft.
"""

import math

from partita import units
from partita.cluster.presets import several
from partita.costs.collectives import Collectives
from partita.graph.rebatch import rebatch
from partita.search.joint.drafts import ROOM, Drafting
from partita.search.joint.meshes import arrangements, divisors

MORE_MEMORY = (1.1, 1.25, 1.5, 2, 3, 4, 6, 8, 16)
MORE_DEVICES = (2, 4, 8, 16)
MOST_DEVICES = 1024
MOST_BATCHES = 6
MOST_STAGES = 32


def what_would_fit(drafting: Drafting, max_memory: float) -> str:
    """One sentence: what there is, and what would be enough."""
    room = min(min(kind.memory_bytes for kind in drafting.cluster.kinds), max_memory)
    tried = (_memory(drafting, room), _devices(drafting, max_memory), _batch(drafting))
    helps = "; ".join(filter(None, tried))
    helps = helps or "use many more or larger devices, or a smaller batch"
    have = units.size(room)
    return f"no plan fits {have} per device, with recompute and states in shares: {helps}"


def _memory(drafting: Drafting, room: float) -> str:
    for times in MORE_MEMORY:
        if _can_fit(drafting, ROOM * times):
            return f"{units.size(room * times)} per device would be enough"
    return ""


def _devices(drafting: Drafting, max_memory: float) -> str:
    cluster = drafting.cluster
    if not cluster.is_homogeneous or max_memory < math.inf:
        return ""
    for times in MORE_DEVICES:
        count = cluster.num_devices * times
        if count > MOST_DEVICES:
            break
        larger = several(cluster.kinds[0], count)
        other = Drafting(
            drafting.graph, drafting.optimizer, larger, Collectives(larger), drafting.allow
        )
        if _can_fit(other, ROOM):
            return f"{count} such devices would be enough"
    return ""


def _batch(drafting: Drafting) -> str:
    smaller = [size for size in divisors(drafting.batch) if size < drafting.batch]
    for size in sorted(smaller, reverse=True)[:MOST_BATCHES]:
        other = Drafting(
            rebatch(drafting.graph, size), drafting.optimizer, drafting.cluster,
            drafting.collectives, drafting.allow, max_memory=drafting.max_memory,
        )  # fmt: skip
        if _can_fit(other, ROOM):
            return f"a batch of {size} would fit"
    return ""


def _can_fit(drafting: Drafting, room: float) -> bool:
    """Is there a draft with so much room, for a few numbers of stages?"""
    found = arrangements(drafting.cluster, min(MOST_STAGES, drafting.chain.num_segments))
    for arrangement in found[:: max(1, len(found) // 3)]:
        for count in drafting.counts(arrangement)[-2:]:
            if drafting.draft(arrangement, count, room=room) is not None:
                return True
    return False
