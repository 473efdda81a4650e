"""Every number of stages and micro-batches of a plan: drafted, or ruled out by a bound.

Likely numbers come first, and one stage before all. One whose bound is above the best plan is left
out, and where a draft is far behind the best its kin are. Single stages, and drafts that are much
better than anything so far, are simulated at once.
"""

import math

from partita.costs.memory import model_memory
from partita.costs.roofline import op_cost
from partita.jobs.plan_tried import Tried
from partita.search.joint.bounds import Bound
from partita.search.joint.drafts import Draft, wanted_count
from partita.search.joint.meshes import Arrangement, arrangements, divisors, weighted_meshes

MOST_STAGES = 32
IN_REACH = 1.04  # of the best estimate: drafts beyond are not simulated
BEHIND = 1.08  # times the best estimate, and the best without waiting
BEHIND_UNLIKE = 1.3  # the same on unlike devices, whose estimates differ more
EARLY = 0.7  # times the best plan so far: an estimate so much better is simulated at once
FAR = 2.0  # doublings of the likely number of stages
MOST_WEIGHTED = 4  # micro-batches of one stage over unlike devices


class Drafts:
    """Drafts of one question; knows what bounds them."""

    def __init__(self, tried: Tried) -> None:
        self.tried = tried
        self.workload, self.cluster = tried.workload, tried.cluster
        self.wishes, self.drafting = tried.wishes, tried.drafting
        self.drafts: list[Draft] = []
        self.num_drafted = 0
        self.bounds: list[Bound] = []  # of all that was looked at, on equal devices
        self.floors: list[float] = []  # on unlike ones
        self.ruled_out: list[tuple[float, Arrangement, int]] = []  # by bounds
        self.complete = True  # did the time last for all drafts?
        self.passed_over = False  # was a number of micro-batches left out?

    def draft_all(self) -> None:
        """Every number of stages with every number of micro-batches, likely ones first."""
        for arrangement in self._arrangements():
            counts = self.drafting.counts(arrangement)
            wanted = wanted_count(arrangement.num_stages)
            counts.sort(key=lambda c: (abs(math.log2(c / wanted)), c))
            if self._is_far(arrangement):
                self.passed_over |= len(counts) > 1
                del counts[1:]
            few, many = 0.0, math.inf  # numbers beyond these need not be tried
            for count in counts:
                if self.tried.pressed():
                    self.complete = False
                    return
                if not few < count < many:
                    self.passed_over = True
                elif self._cannot_win(arrangement, count):
                    many = count  # smaller shares are no quicker
                else:
                    draft = self._draft(arrangement, count)
                    if draft is None or not self._is_behind(draft):
                        continue
                    again = any(stage.recomputed != "no" for stage in draft.stages)
                    if again or not self.cluster.is_homogeneous:
                        few = count  # larger shares would hold even more
                    if not again or not self.cluster.is_homogeneous:
                        many = count
        if not self.drafts:
            self._thriftiest()
        if not self.cluster.is_homogeneous and self.wishes.allow("stages", 1):
            self._weighted()
        self.tried.raise_bound(self.bound_s(quick=True))

    def _thriftiest(self) -> None:
        """Nothing fits yet: the smallest micro-batches that may be, and larger ones while they fit.

        They take the least memory. Numbers of stages that are tried first are likely ones.
        """
        for arrangement in self._arrangements():
            for count in reversed(self.drafting.every_count(arrangement.num_stages)):
                if self.tried.pressed():
                    self.complete = False
                    return
                self.passed_over = True
                bound = self.drafting.bound(arrangement, count)
                if bound is None or self._draft(arrangement, count) is None:
                    break
                self.bounds.append(bound)
            if self.tried.best() is not None:
                return

    def _arrangements(self) -> list[Arrangement]:
        most = min(MOST_STAGES, self.drafting.chain.num_segments)
        wanted = self.wishes.pinned_to("stages")
        if wanted is not None:
            most = min(int(wanted), self.drafting.chain.num_segments)
        found = [
            arrangement
            for arrangement in arrangements(self.cluster, most)
            if self.wishes.allow("stages", arrangement.num_stages)
        ]
        likely = self._likely_stages()
        if self.cluster.is_homogeneous:  # one stage first: nothing waits there, if it fits
            found.sort(
                key=lambda a: (
                    a.num_stages > 1,
                    abs(math.log2(a.num_stages / likely)),
                    a.num_stages,
                )
            )
        else:  # few stages first: all devices, then those of each kind alone, are soon compared
            found.sort(key=lambda a: a.num_stages)
        return found

    def _is_far(self, arrangement: Arrangement) -> bool:
        """Is the number of stages so unlikely that one number of micro-batches will do?"""
        if not self.cluster.is_homogeneous or self.wishes.pinned_to("stages") is not None:
            return False
        return abs(math.log2(arrangement.num_stages / self._likely_stages())) > FAR

    def _is_behind(self, draft: Draft) -> bool:
        """Is a draft so slow, waiting or not, that its kin need not be drafted?"""
        if draft.arrangement.num_stages == 1:
            return False
        behind = BEHIND if self.cluster.is_homogeneous else BEHIND_UNLIKE
        pipelines = [d for d in self.drafts if d.arrangement.num_stages > 1]
        estimate = min(d.estimate_s for d in pipelines)
        ideal = min(d.ideal_s for d in pipelines)
        return draft.estimate_s > behind * estimate and draft.ideal_s > behind * ideal

    def _likely_stages(self) -> int:
        """As many as it takes for parameters and states to fill half of a node's memory."""
        memory = model_memory(self.workload.graph)
        held = memory.parameters + memory.gradients + memory.states
        inner = self.drafting.patterns.inner_size
        room = min(kind.memory_bytes for kind in self.cluster.kinds)
        wanted = max(1.0, held / (0.5 * room * inner))
        return int(min(1 << math.ceil(math.log2(wanted)), self.cluster.num_devices))

    def _cannot_win(self, arrangement: Arrangement, count: int) -> bool:
        """Is everything with these stages and micro-batches slower than the best, by its bound?"""
        best, alike = self.tried.best(), self.cluster.is_homogeneous
        floor = 0.0
        if best is not None or not alike:
            floor = self.drafting.least_compute_s(arrangement, count)
        if not alike:
            self.floors.append(floor)
        if best is not None and floor >= best.objective_s:
            self.ruled_out.append((floor, arrangement, count))
            return True
        if not alike:
            return False
        bound = self.drafting.bound(arrangement, count)
        if bound is None:
            return False  # there is no such plan, which says nothing of other numbers
        self.bounds.append(bound)
        if best is None or not best.objective_s <= bound.quick_s < math.inf:
            return False
        self.ruled_out.append((bound.quick_s, arrangement, count))
        return True

    def _draft(self, arrangement: Arrangement, count: int) -> Draft | None:
        self.num_drafted += 1
        if arrangement.num_stages == 1:
            return self._alone(arrangement, count)
        draft = self.drafting.draft(arrangement, count)
        if draft is None:
            return None
        self.drafts.append(draft)
        best = self.tried.best()
        if best is None or draft.estimate_s < EARLY * best.objective_s:  # something to show early
            self.tried.add_draft(draft)
        return draft

    def _alone(self, arrangement: Arrangement, count: int) -> Draft | None:
        """A single stage on the mesh that is best for it, or on others that are nearly as good."""
        found: list[Draft] = []
        for draft in self.drafting.on_each_mesh(arrangement, count):
            found.append(draft)
            if self.tried.best() is None:
                self.tried.add_draft(draft)  # something to show early
            if self.tried.pressed():
                break
        found.sort(key=lambda draft: draft.estimate_s)
        for draft in found:
            best = self.tried.best()
            near = draft.estimate_s <= found[0].estimate_s * IN_REACH
            hopeless = best is not None and draft.estimate_s >= best.objective_s * IN_REACH
            if near and not hopeless and not self.tried.pressed():
                self.tried.add_draft(draft)
        self.drafts += found[:1]
        return found[0] if found else None

    def _weighted(self) -> None:
        """One stage over unlike devices, each with a share as large as it is fast."""
        graph = self.drafting.micro(1)
        speed = {
            kind.name: 1 / (sum(op_cost(graph, op, kind).seconds for op in graph.ops) or 1.0)
            for kind in self.cluster.kinds
        }
        everything = Arrangement((tuple(range(self.cluster.num_devices)),))
        found: list[Draft] = []
        for count in (d for d in divisors(self.workload.batch) if d <= MOST_WEIGHTED):
            if self.wishes.allow("microbatches", count) and not self.tried.pressed():
                meshes = weighted_meshes(self.cluster, speed, self.workload.batch // count)
                found += self.drafting.on_each_mesh(everything, count, meshes)
                ways = (self.drafting.ways(mesh, count, 1) for mesh in meshes)
                self.floors += [float(way.least_compute.sum()) for way in ways]
        found.sort(key=lambda draft: draft.estimate_s)
        for draft in found:
            best = self.tried.best()
            if self.tried.pressed() or draft.estimate_s > BEHIND * found[0].estimate_s:
                return
            if best is None or draft.estimate_s < BEHIND * best.objective_s:
                self.tried.add("search", draft.stages, draft.schedule)

    def bound_s(self, *, quick: bool = False) -> float:
        """What no plan takes less than, of those looked at; `quick`, without a walk over prices.

        Named plans outside the family are simulated themselves: none will be below the best.
        """
        best, work_s = self.tried.best(), self.tried.work_s
        if not self.complete or best is None:
            return work_s
        if not self.cluster.is_homogeneous:
            return max(work_s, min(best.objective_s, *self.floors)) if self.floors else work_s
        if not self.bounds:
            return work_s
        least = best.objective_s
        for bound in sorted(self.bounds, key=lambda bound: bound.quick_s):
            if bound.quick_s >= least:
                break
            least = min(least, bound.quick_s if quick else bound.climbed_s(least))
        return max(work_s, least)
