"""A lower bound from what one device can hold at most: it knows what cutting a model costs.

Let every node v have a price pi_v (of either sign). In a labelling whose device times are all at
most T, the nodes of device d are some set S with time_d(S) <= T, and every node is on one device:

    sum over devices of  max { pi(S) : time_d(S) <= T }  >=  pi(V)

so prices for which this fails prove that every answer takes longer than T. With pi = work it says
that every device also pays for the cheapest cut around the work it does; prices that rise where
cuts are dear make it the bound of the linear program over all sets (the dual of its column
generation). Tolls on messages let producers pay for every device that reads them.
`cover_program` finds the dearest set, `prices` better prices.

Prices of nodes that lie together are tied: one factor on their work for each group, and a price
more for every producer of a shared net. That leaves some hundred numbers to find. One filling
of the program says for every time up to T whether it is excluded; T is chosen between the bound and
the best answer, higher where that was proven quickly.

Where it falls short of the answer, the answer may be far off, or sets that fit T cover the model
only in fractions.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from partita.search.partition.coarsen import levels
from partita.search.partition.cover_program import cover_programs, fill
from partita.search.partition.network import F64, I64, PartitionNetwork
from partita.search.partition.prices import Bundle
from partita.search.partition.walk import LabelWalk

_SLACK = 1e-9  # of T: rounding may not make a set too dear
_LEAST_STEP = 0.25  # nets that cost less than so much of a step are left out
_HIGH, _LOW = 0.35, 0.4  # the next T: so far from the bound to the answer, or to the last T


@dataclass(frozen=True, slots=True)
class CoverBound:
    """Settings of the bound: how fine time is counted, how many states, how many price steps."""

    steps: int = 800
    first_steps: int = 160  # until that proves no more
    most_cells: int = 60_000_000  # nodes * keys * steps: fewer steps beyond
    most_keys: int = 256
    most_shared: int = 24  # nets of which every message counts
    groups: int = 120  # of nodes whose prices are tied
    largest_group: float = 0.02  # of the work
    price_steps: int = 150  # for one T
    patience: int = 25  # price steps without progress
    most_price_steps: int = 240  # in all, where there is no time limit
    bisections: int = 12
    near: float = 0.003  # of the answer: no more is worth proving


class CoverProof:
    """The bound of one network: prices are kept from one T to the next."""

    def __init__(self, net: PartitionNetwork, settings: CoverBound, about_ms: float) -> None:
        self.settings = settings
        work: F64 = net.work_ms.min(axis=1)
        self.total = float(work.sum()) or 1.0
        least_ms = _LEAST_STEP * about_ms / settings.steps
        self.programs, self.shared = cover_programs(
            net, settings.most_keys, settings.most_shared, least_ms
        )
        keys = max(program.num_keys for _, program in self.programs)
        layers = max(len(program.node) for _, program in self.programs)
        affordable = settings.most_cells // (layers * keys)
        self.fine = max(50, min(settings.steps, affordable))
        self.steps = min(settings.first_steps, self.fine)
        self.origin = np.zeros((layers, keys * (self.fine + 2)), np.uint16)
        self.member = np.zeros(net.num_nodes, np.int64)
        self.messages = np.zeros(len(self.shared.src))
        self.most = np.zeros(self.steps + 2)
        self.group: I64 = levels(net, settings.groups, settings.largest_group * self.total, 0)[-1][
            1
        ]
        self.base = work + 1e-4 * self.total / net.num_nodes
        factors = int(self.group.max()) + 1
        messages = self.shared.message_ms
        sizes: F64 = np.concatenate(
            (np.bincount(self.group, self.base), messages, np.zeros(len(messages)))
        )
        self.bundle = Bundle(np.concatenate((np.ones(factors), np.zeros(2 * len(messages)))), sizes)
        self.proven_ms = 0.0
        self.num_steps = 0  # price steps so far

    def refine(self) -> bool:
        """Count time in the finest steps from now on; False if that is so already."""
        if self.steps == self.fine:
            return False
        self.steps = self.fine
        self.most = np.zeros(self.steps + 2)
        self.bundle.planes.clear()
        return True

    def prices(self, point: F64) -> tuple[F64, F64]:
        """The prices of nodes and the tolls that a point of the bundle stands for."""
        factors, tolls = len(point) - 2 * len(self.shared.src), len(self.shared.src)
        prices = self.base * point[:factors][self.group]
        np.add.at(
            prices, self.shared.src, point[factors : factors + tolls] * self.shared.message_ms
        )
        return prices, point[factors + tolls :] * self.shared.message_ms

    def excludes(self, within_ms: float, done: Callable[[], bool]) -> bool:
        """Is it proven that no labelling keeps every device within that time?

        `proven_ms` is what was proven on the way: every labelling has a device that takes so long.
        """
        bundle, idle = self.bundle, 0
        bundle.begin(within_ms)
        for _ in range(self.settings.price_steps):
            if done() or idle > self.settings.patience:
                break
            self.num_steps += 1
            point = bundle.next_point()
            if bundle.hopeless:
                break
            excess, slope, used_ms = self.excess(point, within_ms)
            if excess < -_SLACK * float(np.abs(self.prices(point)[0]).sum()):
                bundle.add(excess / self.total, slope / self.total, used_ms)
                return True
            progress = bundle.add(excess / self.total, slope / self.total, used_ms)
            idle = 0 if progress else idle + 1
        return False

    def excess(self, point: F64, within_ms: float) -> tuple[float, F64, float]:
        """What the devices can hold beyond all prices, how it changes, and in what time."""
        prices, tolls = self.prices(point)
        whole = float(prices.sum())
        by_node, by_net = np.full(len(prices), -1.0), np.zeros(len(tolls))
        most = np.full(self.steps + 2, -whole)
        for count, program in self.programs:
            fill(
                program,
                prices,
                tolls,
                within_ms * (1 + _SLACK),
                self.steps,
                self.origin,
                self.member,
                self.messages,
                self.most,
            )
            by_node += count * self.member
            by_net += count * self.messages
            most += count * self.most
        enough = int(np.searchsorted(most, -_SLACK * float(np.abs(prices).sum())))
        # A set that takes t ms has at most t / step + 1 steps.
        step_ms = within_ms / self.steps
        self.proven_ms = max(self.proven_ms, min(enough - 1, self.steps) * step_ms * (1 - _SLACK))
        used_ms = int(np.searchsorted(most, most[-1])) * step_ms
        message_ms = self.shared.message_ms
        slope: F64 = np.concatenate(
            (
                np.bincount(self.group, self.base * by_node),
                by_node[self.shared.src] * message_ms,
                by_net * message_ms,
            )
        )
        return float(most[-1]), slope, used_ms


def prove_by_covers(walk: LabelWalk, settings: CoverBound, share: float = 1.0) -> None:
    """Raise the run's bound towards its answer, in a share of the time left."""
    run, net = walk.run, walk.net
    if net.num_devices == 1 or run.objective is None or run.lower_bound is None:
        return
    limited = walk.done_after(share)

    def done() -> bool:
        steps = 0 if walk.proof is None or run.stop.time_s is not None else walk.proof.num_steps
        return limited() or steps >= settings.most_price_steps

    high = run.objective
    for _ in range(settings.bisections):
        low = run.lower_bound
        if done() or high - low <= settings.near * high:
            return
        if walk.proof is None:
            walk.proof = CoverProof(net, settings, run.objective)
        within_ms = low + (_HIGH if high == run.objective else _LOW) * (high - low)
        if not walk.proof.excludes(within_ms, done) and not walk.proof.refine():
            high = within_ms
        run.bound(min(walk.proof.proven_ms, run.objective))
