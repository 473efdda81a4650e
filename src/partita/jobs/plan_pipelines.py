"""The pipelines of a plan, from drafts to what is simulated.

1. Numbers of stages and micro-batches are drafted, or ruled out (`plan_drafts`).
2. The drafts that would be the fastest if nobody had to wait are drafted again with several stages
   on each group of devices.
3. The best estimates are simulated; what does not fit after all is drafted again with less room.
4. Around the leaders other orders are tried under the memory that is left.
"""

from collections.abc import Sequence
from dataclasses import replace

from partita.jobs.plan_drafts import IN_REACH, Drafts
from partita.jobs.plan_schedule import searched_schedule
from partita.jobs.plan_tried import Candidate, Tried
from partita.jobs.simulate import Simulation
from partita.lower.orders import refusal
from partita.plans import device_groups
from partita.schedules.named import NAMED
from partita.search.joint.drafts import Draft
from partita.timeline import Timeline

SIMULATED = 3  # drafts that are simulated, at least one for each number of stages in reach
LEADERS = 2  # plain pipelines for which other orders are tried
PROMISING = 4  # drafts that are tried with several stages on each group of devices
TURNS = (("zb-v", (2,)), ("interleaved", (2, 3, 4, 6, 8, 12, 16, 24, 32, 48)))
WORSE = 1.01  # times the best estimate: more stages on a group will not help any more
KEPT_TURNS = 2  # numbers of stages on a group that may be simulated
CLOSE = 1.01  # times the best plan: estimates beyond are not simulated


class Pipelines(Drafts):
    """Drafts and simulates pipelines for one question."""

    def __init__(self, tried: Tried, seed: int) -> None:
        super().__init__(tried)
        self.seed = seed
        self.turned: list[Draft] = []  # with several stages on each group of devices

    def take_turns(self) -> None:
        """Drafts with several stages on each group, for the pipelines that may gain by it."""
        if not self.workload.training:
            return
        for draft in self._promising():
            for name, all_chunks in TURNS:
                if self.tried.pressed():
                    return
                if self.wishes.allow("schedule", name):
                    self.turned += self._turned(draft, name, all_chunks)

    def _turned(self, draft: Draft, name: str, all_chunks: Sequence[int]) -> list[Draft]:
        """More and more stages on each group, as long as the estimate does not grow."""
        found: list[Draft] = []
        p, count = draft.arrangement.num_stages, draft.schedule.num_microbatches
        for chunks in all_chunks:
            if p * chunks > self.drafting.chain.num_segments:
                break
            if NAMED[name].refuses(p, chunks, count):
                continue
            other = self.drafting.draft(
                draft.arrangement, count, room=draft.room, chunks=chunks, schedule=name
            )
            if other is None:
                continue
            found.append(other)
            if other.estimate_s > WORSE * min(d.estimate_s for d in found):
                break
        return sorted(found, key=lambda d: d.estimate_s)[:KEPT_TURNS]

    def one_to_show(self) -> None:
        """A pipeline where all were ruled out, so that it can be told what one would take."""
        pipelines = [out for out in self.ruled_out if out[1].num_stages > 1]
        if self.drafts[1:] or not pipelines or not self.workload.training:
            return
        _, arrangement, count = min(pipelines, key=lambda out: float(f"{out[0]:.3g}"))
        draft = self.drafting.draft(arrangement, count)
        if draft is None or self.tried.pressed():
            return
        if self.wishes.allow("schedule", "interleaved"):
            found = [draft, *self._turned(draft, "interleaved", self._likely_chunks(draft))]
            draft = min(found, key=lambda d: d.estimate_s)
        self.tried.add_draft(draft)

    def _likely_chunks(self, draft: Draft) -> list[int]:
        """A number of stages on each group of devices: as many as blocks, often of two segments."""
        p, count = draft.arrangement.num_stages, draft.schedule.num_microbatches
        wanted = self.drafting.chain.num_segments / (2 * p)
        refuses = NAMED["interleaved"].refuses
        known = [c for c in dict(TURNS)["interleaved"] if not refuses(p, c, count)]
        return sorted(known, key=lambda c: abs(c - wanted))[:1]

    def simulate_leaders(self) -> None:
        """The drafts with the best estimates; plain ones also if they would win without waiting."""
        for draft in sorted(self.turned, key=lambda d: d.estimate_s):
            best = self.tried.best()
            if self.tried.pressed():
                return
            if best is None or draft.estimate_s < best.objective_s * CLOSE:
                self._simulate(draft)
        ranked = sorted(self.drafts, key=lambda d: d.estimate_s)
        if not ranked:
            return
        reach = ranked[0].estimate_s * IN_REACH
        firsts: dict[int, Draft] = {}
        for draft in ranked:
            firsts.setdefault(len(draft.stages), draft)
        for draft in (*ranked[:SIMULATED], *firsts.values()):
            best = self.tried.best()
            if self.tried.pressed():
                return
            near = draft.estimate_s <= reach or draft in ranked[:SIMULATED]
            if near and (best is None or draft.ideal_s < best.objective_s):
                self._simulate(draft)

    def _simulate(self, draft: Draft) -> None:
        """A draft, and what light recompute was chosen over where that is close."""
        self.tried.add_draft(draft)
        if self.tried.pressed() or all(stage.recomputed != "light" for stage in draft.stages):
            return
        other = self.drafting.draft(
            draft.arrangement, draft.schedule.num_microbatches, room=draft.room,
            chunks=draft.chunks, schedule=draft.schedule.name, light=False,
        )  # fmt: skip
        best = self.tried.best()
        if other is not None and (best is None or other.estimate_s < best.objective_s * CLOSE):
            self.tried.add_draft(other)

    def other_orders(self) -> None:
        """Other orders for the best stages found so far."""
        if not self.workload.training:
            return
        for leader in self._leaders():
            simulation = leader.simulation
            if self.tried.pressed():
                return
            for name in self._schedules(simulation):
                if not self.tried.pressed():
                    self.tried.add(
                        "search", simulation.stages, replace(simulation.schedule, name=name)
                    )
            if not self.tried.pressed() and not self.wishes.pinned_to("schedule"):
                self._searched(simulation)

    def _leaders(self) -> list[Candidate]:
        """Pipelines to try other orders for: the best one, and the best with a stage per group.

        Only the latter have orders that fill their bubbles, so they need not be ahead yet; those
        that are behind even if no group waits after its first forward are left out.
        """
        ranked = sorted((c for c in self.tried.candidates if c.fits), key=lambda c: c.objective_s)
        pipelines = [c for c in ranked if len(c.simulation.stages) > 1]
        plain = [
            c
            for c in pipelines
            if len(device_groups(c.simulation.stages)) == len(c.simulation.stages)
            and _least_s(c.simulation.timeline) < ranked[0].objective_s
        ]
        first = [c for c in pipelines[:1] if all(c is not other for other in plain[:LEADERS])]
        return [*first, *plain[:LEADERS]]

    def _promising(self) -> list[Draft]:
        """Pipelines that would be the fastest if no group ever had to wait, one of each kind."""
        kinds: dict[tuple[object, ...], Draft] = {}
        for draft in sorted(self.drafts, key=lambda d: d.ideal_s):
            if draft.arrangement.num_stages > 1 and draft.chunks == 1:
                kinds.setdefault((draft.arrangement, draft.schedule), draft)
        return list(kinds.values())[:PROMISING]

    def _schedules(self, simulation: Simulation) -> list[str]:
        stages, count = simulation.stages, simulation.schedule.num_microbatches
        if len(stages) == 1:
            return []
        groups = device_groups(stages)
        return [
            name
            for name in ("1f1b", "zb-h1", "zb-h2")
            if name != simulation.schedule.name
            and self.wishes.allow("schedule", name)
            and not refusal(name, groups, count)
        ]

    def _searched(self, simulation: Simulation) -> None:
        """An order found for exactly these stages and the memory that is left."""
        if len(simulation.stages) == 1:
            return
        found = searched_schedule(simulation, self.tried.memo, self.tried.left(), self.seed)
        if found is not None:
            self.tried.add("search", simulation.stages, found)


def _least_s(timeline: Timeline) -> float:
    """The longest of a group's work after its first forward, which comes as early in any order."""
    busy, found = timeline.busy(), [0.0]
    for lane, what in enumerate(timeline.program.lanes):
        if what.kind == "device" and busy[lane] > 0:
            found.append(float(timeline.start[timeline.lane_tasks(lane)[0]] + busy[lane]))
    return max(found)
