"""The whole problem as integers for CP-SAT: every field of it, with or without the objective.

    y[v, d]      node v is on device d; exactly one d for every v
    x[v, s]      node v is in stage s, where stages are asked for; never before its producers
    z[s, d]      stage s is on device d; x[v, s] and z[s, d] imply y[v, d]
    m[e, h, d]   net e goes from device h to device d: its producer is on h, a consumer on d

Times are rounded down to integers, all of them together at most 2^55, so that what is proven is a
bound of the true objective, at most (nodes + messages) / 2^55 of that below it. About
nodes * devices^2 variables: for small problems, and to find any answer where memory is short.
"""

from typing import TYPE_CHECKING

import numpy as np

from partita.problems.partition import (
    PartitionSolution,
    solution_of_stages,
    stages_from_devices,
)
from partita.search.partition.walk import LabelWalk
from partita.search.schedule.solver import SolverOutcome, solve

if TYPE_CHECKING:
    from ortools.sat.python import cp_model

_LARGEST = 2.0**55


class PartitionCpModel:
    """The problem of a walk as a CP-SAT model; solutions go to the walk's run."""

    def __init__(self, walk: LabelWalk, timed: bool = False) -> None:
        from ortools.sat.python import cp_model

        self.walk = walk
        self.cp = cp_model.CpModel()
        self.net = walk.net
        nodes, devices = range(walk.net.num_nodes), range(walk.net.num_devices)
        self.y = {(v, d): self.cp.new_bool_var("") for v in nodes for d in devices}
        for v in nodes:
            self.cp.add_exactly_one(self.y[v, d] for d in devices)
        self.stages: range | None = None
        self.x: dict[tuple[int, int], cp_model.IntVar] = {}
        if walk.in_order:
            self._add_stages()
        self.sent: dict[tuple[int, int, int, int], cp_model.IntVar] = {}
        self._add_memory()
        self.scale = 1.0
        self.largest: list[cp_model.IntVar] = []
        if timed:
            self._add_times()

    def solve(self, effort: float) -> SolverOutcome:
        """Look for answers; each goes to the run, and so does every bound of a timed model."""
        flat = [*self.y.values(), *self.x.values(), *self.largest]

        def on_solution(values: tuple[int, ...]) -> None:
            self.walk.offer_solution(self._solution(values))

        def on_bound(bound: float) -> None:
            self.walk.run.bound(bound / self.scale)

        timed = self.cp.has_objective()
        answer = solve(
            self.cp,
            flat,
            self.walk.run,
            effort=effort,
            on_solution=on_solution,
            on_bound=on_bound if timed else None,
        )
        if timed and answer.outcome is SolverOutcome.SOLVED and answer.values is not None:
            on_bound(answer.values[-1])
        return answer.outcome

    def _add_stages(self) -> None:
        problem, net, cp = self.walk.problem, self.net, self.cp
        count = problem.num_stages or min(net.num_devices, net.num_nodes)
        nodes, devices = range(net.num_nodes), range(net.num_devices)
        self.stages = range(count)
        self.x = {(v, s): cp.new_bool_var("") for v in nodes for s in self.stages}
        z = {(s, d): cp.new_bool_var("") for s in self.stages for d in devices}
        for v in nodes:
            cp.add_exactly_one(self.x[v, s] for s in self.stages)
        for s in self.stages:
            cp.add_exactly_one(z[s, d] for d in devices)
            if problem.num_stages is not None:
                cp.add_bool_or(self.x[v, s] for v in nodes)
        if problem.straight:
            for d in devices:
                cp.add_at_most_one(z[s, d] for s in self.stages)
        for v in nodes:
            for s in self.stages:
                for d in devices:
                    cp.add_bool_or(~self.x[v, s], ~z[s, d], self.y[v, d])
        for each, src in enumerate(net.net_src.tolist()):
            for dst in net.pin_node[net.pin_start[each] : net.pin_start[each + 1]].tolist():
                for s in self.stages:  # not in stage s or before if the producer comes after
                    later = [self.x[src, t] for t in range(s)]
                    cp.add_bool_or(~self.x[dst, s], self.x[src, s], *later)

    def _message(self, each: int, home: int, there: int, rank: int, pins: list[int]) -> None:
        """m = 1 where the producer is at home and one of these consumers there."""
        variable = self.cp.new_bool_var("")
        self.sent[each, home, there, rank] = variable
        src = int(self.net.net_src[each])
        for pin in pins:
            self.cp.add_bool_or(~self.y[src, home], ~self.y[pin, there], variable)

    def _steps(self, each: int, sizes: list[float]) -> list[tuple[int, float, list[int]]]:
        """The largest of some sizes as a sum: (rank, more bytes, the consumers that need them)."""
        first = int(self.net.pin_start[each])
        pins = self.net.pin_node[first : int(self.net.pin_start[each + 1])].tolist()
        steps, before = [], 0.0
        for rank, size in enumerate(sorted({each for each in sizes if each > 0})):
            needing = [pin for pin, own in zip(pins, sizes, strict=True) if own >= size]
            steps.append((rank, size - before, needing))
            before = size
        return steps

    def _add_memory(self) -> None:
        net, cp = self.net, self.cp
        if not np.isfinite(net.caps_bytes).any():
            return
        held = net.held_bytes.astype(np.int64).tolist()
        received: dict[int, list[tuple[int, cp_model.IntVar]]] = {}
        if net.kept_received:
            received = self._received()
        for d in range(net.num_devices):
            terms = [held[v] * self.y[v, d] for v in range(net.num_nodes)]
            terms += [size * variable for size, variable in received.get(d, [])]
            cp.add(sum(terms) <= int(net.caps_bytes[d]))

    def _received(self) -> "dict[int, list[tuple[int, cp_model.IntVar]]]":
        net, cp = self.net, self.cp
        received: dict[int, list[tuple[int, cp_model.IntVar]]] = {}
        for each, src in enumerate(net.net_src.tolist()):
            sizes = net.pin_fwd[net.pin_start[each] : net.pin_start[each + 1]].tolist()
            for _, more, pins in self._steps(each, sizes):
                for d in range(net.num_devices):
                    variable = cp.new_bool_var("")
                    for pin in pins:
                        cp.add_bool_or(self.y[src, d], ~self.y[pin, d], variable)
                    received.setdefault(d, []).append((int(more * net.kept_received), variable))
        return received

    def _add_times(self) -> None:
        net, cp = self.net, self.cp
        moved_ms = (net.pin_fwd + net.pin_bwd).sum() * net.per_byte_ms.max()
        moved_ms += net.net_messages.sum() * net.latency_ms.max()
        total = float(net.work_ms.max(axis=1).sum() + moved_ms)
        self.scale = _LARGEST / max(total, 1e-200)
        devices = range(net.num_devices)
        terms: list[list[cp_model.LinearExprT]] = [
            [int(net.work_ms[v, d] * self.scale) * self.y[v, d] for v in range(net.num_nodes)]
            for d in devices
        ]
        for each in range(len(net.net_src)):
            window = slice(int(net.pin_start[each]), int(net.pin_start[each + 1]))
            for way, sizes in enumerate((net.pin_fwd[window], net.pin_bwd[window])):
                for rank, more, pins in self._steps(each, sizes.tolist()):
                    for home in devices:
                        for there in devices:
                            if home == there:
                                continue
                            ends = (home, there) if way == 0 else (there, home)
                            ms = more * net.per_byte_ms[ends]
                            if rank == 0:
                                ms += net.net_messages[each, way] * net.latency_ms[ends]
                            self._message(each, home, there, 2 * rank + way, pins)
                            sent = self.sent[each, home, there, 2 * rank + way]
                            for end in (home, there):
                                terms[end].append(int(ms * self.scale) * sent)
        largest = cp.new_int_var(0, 2**62, "")
        for d in devices:
            cp.add(sum(terms[d]) <= largest)
        cp.minimize(largest)
        self.largest = [largest]

    def _solution(self, values: tuple[int, ...]) -> PartitionSolution:
        problem = self.walk.problem
        keys = [*self.y, *(("x", *key) for key in self.x)]
        chosen = dict(zip(keys, values, strict=False))  # the largest time comes after them
        ids = [node.id for node in problem.placed]
        devices = range(self.net.num_devices)
        device_of = {id: next(d for d in devices if chosen[v, d]) for v, id in enumerate(ids)}
        if self.stages is None:
            return stages_from_devices(problem, device_of)
        stage_of = {
            id: next(s for s in self.stages if chosen["x", v, s]) for v, id in enumerate(ids)
        }
        return solution_of_stages(problem, stage_of, device_of)
