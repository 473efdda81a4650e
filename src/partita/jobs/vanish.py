"""Nodes that may vanish (spot machines): the plan if they do, and what going there costs.

The devices that are left are planned for like any machine; parameters and states that they hold by
the plan so far are moved to where the other plan needs them (`moving`). What only the lost devices
held comes from a checkpoint, and steps since then are done again. Where a node loses only some of
its devices, the machine without all of that node is planned for as well: seven devices of a node
are often slower than none of them, because nothing divides by seven.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from partita.cluster import Cluster
from partita.cluster.presets import changed
from partita.jobs.moving import Moves, moves
from partita.jobs.plan_simulator import Planned
from partita.jobs.workload import load_cluster, load_model
from partita.plans import Plan


@dataclass(frozen=True)
class Vanished:
    """What is left without some nodes: the plan for it, and what moving to it costs."""

    names: tuple[str, ...]
    cluster: Cluster  # what is left and used
    idle: tuple[str, ...]  # devices that are left and not used
    num_before: int  # devices
    step_before_s: float
    planned: Planned
    moves: Moves | None  # None where nothing fits what is left

    @property
    def slowdown(self) -> float | None:
        """How many times as long a step takes."""
        best = self.planned.best
        return None if best is None else best.step_s / self.step_before_s


def machine_without(cluster: Cluster, names: Sequence[str]) -> Cluster:
    """The machine that is left; refuses nodes that are not there, and a machine without devices."""
    return changed(cluster, ",".join(f"without={name}" for name in names))


def vanished(before: Plan, names: Sequence[str], replan: Callable[[Cluster], Planned]) -> Vanished:
    """The answer for a plan; `replan` plans its model for what is left."""
    old = load_cluster(before)
    left = used = machine_without(old, names)
    after = replan(left)
    whole = _whole_nodes(old, left)
    if whole is not None:
        other = replan(whole)
        if other.best is not None and (
            after.best is None or other.best.objective_s < after.best.objective_s
        ):
            used, after = whole, other
    cost = None
    if after.best is not None:
        graph = load_model(before).graph
        cost = moves(before.stages, after.best.simulation.decided, graph, old, used)
    in_use = {device.name for device in used.devices}
    return Vanished(
        tuple(names),
        used,
        tuple(device.name for device in left.devices if device.name not in in_use),
        old.num_devices,
        before.prediction.step_s,
        after,
        cost,
    )


def _whole_nodes(old: Cluster, left: Cluster) -> Cluster | None:
    """What is left without nodes that lost some devices; None where all or none are whole."""
    before, now = (Counter(device.node for device in each.devices) for each in (old, left))
    parted = [node for node in now if node and now[node] < before[node]]
    if not parted or len(parted) == len(now):
        return None
    return machine_without(left, parted)
