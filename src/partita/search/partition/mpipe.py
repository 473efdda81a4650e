"""Mixed-Pipe: several stages per device, in FTPipe's three steps, for several numbers of blocks.

1. Coarsen the model to about L blocks, none longer than a device's share of the work times P / L.
2. Give the blocks to devices, the longest first, each to the device that is done first.
3. Back in the full model, move border nodes while that helps: annealing at almost no heat.

After Eliad et al., FTPipe (USENIX ATC 2021). There, the blocks are given out shortest first, and
refinement counts communication only where it exceeds the computation.
"""

from dataclasses import dataclass

import numpy as np

from partita.problems.partition import PartitionProblem, PartitionSolution
from partita.search.base import UNTIL_DONE, Result, Run, Stop
from partita.search.partition.coarsen import levels
from partita.search.partition.ending import answered, ending
from partita.search.partition.network import F64, I64
from partita.search.partition.stage_walk import InOrder, anneal_in_order
from partita.search.partition.walk import AnnealingSchedule, LabelWalk, proven


@dataclass(frozen=True, slots=True)
class MixedPipe:
    """Blocks, longest first to the freest device, then border moves; for several block counts."""

    blocks_per_device: tuple[int, ...] = (1, 2, 3, 4, 6, 8, 16)
    steps_per_node: int = 200
    most_steps: int = 200_000

    def __call__(
        self, problem: PartitionProblem, stop: Stop = UNTIL_DONE, seed: int = 0
    ) -> Result[PartitionSolution]:
        """Search until every number of blocks was tried."""
        run: Run[PartitionSolution] = Run(stop, "mpipe", seed)
        walk = LabelWalk(problem, run)
        if not answered(walk):
            return ending(walk)
        if walk.in_order:
            anneal_in_order(walk, InOrder(restarts=2), seed)
            return ending(walk)
        net, everything = walk.net, np.arange(walk.net.num_nodes)
        steps = min(self.most_steps, self.steps_per_node * net.num_nodes)
        for index, per_device in enumerate(self.blocks_per_device):
            if run.done() or proven(run):
                break
            num_blocks = per_device * net.num_devices
            most_ms = 1.5 * float(net.mean_ms.sum()) / num_blocks
            blocks, block_of = levels(net, num_blocks, most_ms, seed + index)[-1]
            labels = longest_first(blocks.mean_ms, net.num_devices)[block_of]
            walk.count_and_offer(labels)
            walk.anneal(net, everything, labels, AnnealingSchedule(steps, 1e-4), seed + index)
        return ending(walk)


def longest_first(work_ms: F64, num_devices: int) -> I64:
    """A device for every block: the longest block first, to the device with the least work."""
    device = np.zeros(len(work_ms), np.int64)
    load = np.zeros(num_devices)
    for block in np.argsort(-work_ms, kind="stable").tolist():
        device[block] = load.argmin()
        load[device[block]] += work_ms[block]
    return device
