"""Shard a model: the best split of every op over the devices that the searches here can find.

Candidates are the plain strategies by name (data parallel, the same with optimizer states,
gradients or parameters in shares) and, for every mesh of one or two axes, the optimum of the
sharding problem. Each is lowered and simulated; the fastest that fits the memory wins. The lower
bound is the compute that no split can avoid: every op at its best split, nothing communicated.
"""

import math
import time
from dataclasses import dataclass, replace

from partita import __version__
from partita.cluster import Cluster, resolve
from partita.costs.sharding import sharding_model
from partita.errors import InputError
from partita.graph.record import Graph
from partita.jobs.simulate import Simulation, data_splits, simulate_stage
from partita.jobs.workload import Workload, load
from partita.plans import Axis, ClusterRef, Mesh, Origin, Plan, Prediction, Stage
from partita.search import searches
from partita.search.base import UNTIL_DONE, Improvement, Status, Stop

AXIS_NAMES = ("x", "y")


@dataclass(frozen=True)
class Candidate:
    """One way that was tried."""

    name: str
    mesh: str
    simulation: Simulation

    @property
    def step_s(self) -> float:
        """Seconds of one step."""
        return self.simulation.step_s


@dataclass(frozen=True)
class Sharding:
    """The best plan found and all that were tried, fastest first."""

    status: Status
    why: str
    plan: Plan | None
    best: Candidate | None
    tried: tuple[Candidate, ...]
    lower_bound_s: float
    seconds: float
    seed: int
    history: tuple[Improvement, ...]


def shard(
    model: str | Graph,
    cluster: str | Cluster,
    *,
    batch: int | None = None,
    dtype: str | None = None,
    training: bool = True,
    optimizer: str = "adamw",
    method: str | None = None,
    stop: Stop = UNTIL_DONE,
    seed: int = 0,
) -> Sharding:
    """Find the fastest split of every op of a model over the devices of a cluster."""
    machine = resolve(cluster) if isinstance(cluster, str) else cluster
    workload = load(model, batch=batch, dtype=dtype, training=training, optimizer=optimizer)
    spec = cluster if isinstance(cluster, str) else machine.name
    return _Job(workload, machine, spec, method, stop, seed).run()


def meshes(num_devices: int) -> tuple[Mesh, ...]:
    """All devices in one line, and in every rectangle; rows stay together in the cluster."""
    devices = tuple(range(num_devices))
    found = [Mesh((Axis(AXIS_NAMES[0], num_devices),), devices)]
    for outer in range(2, num_devices // 2 + 1):
        if num_devices % outer == 0:
            axes = (Axis(AXIS_NAMES[0], outer), Axis(AXIS_NAMES[1], num_devices // outer))
            found.append(Mesh(axes, devices))
    return tuple(found)


class _Job:
    def __init__(
        self, workload: Workload, cluster: Cluster, spec: str, method: str | None, stop: Stop,
        seed: int,
    ) -> None:  # fmt: skip
        self.workload, self.cluster, self.spec = workload, cluster, spec
        known = searches("sharding")
        self.method = method or next(iter(known))
        if self.method not in known:
            raise InputError(
                f"unknown method {self.method!r}",
                fix=f"use one of {', '.join(known)}",
                field="method",
            )
        self.search = known[self.method]
        self.stop, self.seed = stop, seed
        self.started = time.perf_counter()
        self.tried: list[Candidate] = []
        self.history: list[Improvement] = []
        self.bound = math.inf
        self.stopped = False

    def run(self) -> Sharding:
        for mesh in meshes(self.cluster.num_devices):
            self._search(mesh)
            if len(mesh.axes) == 1:
                self._strategies(mesh)
            if self._out_of_time():
                self.stopped = True
                break
        return self._result()

    def _search(self, mesh: Mesh) -> None:
        model = sharding_model(self.workload.graph, self.cluster, mesh)
        self.bound = min(self.bound, model.compute_bound_s)
        left = None if self.stop.time_s is None else max(0.1, self.stop.time_s - self._seconds())
        inner = replace(self.stop, time_s=left, progress=None, gap=0.0, target=None)
        result = self.search(model.problem, inner, self.seed)
        if result.solution is None:
            return
        splits = model.splits(result.solution.assignment)
        self._offer(self.method, Stage("model", mesh, splits))
        if self.workload.training:
            self._offer(f"{self.method}, states sharded", Stage("model", mesh, splits, "states"))
            if not self.tried[-1].simulation.fits:
                self._offer(
                    f"{self.method}, parameters sharded", Stage("model", mesh, splits, "parameters")
                )

    def _strategies(self, mesh: Mesh) -> None:
        sizes = tuple(axis.size for axis in mesh.axes)
        splits = data_splits(self.workload.graph, sizes)
        names = {"none": "data parallel", "states": "data parallel, states sharded (ZeRO-1)"}
        names["parameters"] = "fully sharded (FSDP)"
        for level, name in names.items():
            if level == "none" or self.workload.training:
                self._offer(name, Stage("model", mesh, splits, level))

    def _offer(self, name: str, stage: Stage) -> None:
        # Devices of a kind do the same: one of each is enough to compare candidates.
        simulation = simulate_stage(self.workload, self.cluster, stage, most_devices=1)
        candidate = Candidate(name, str(stage.mesh), simulation)
        best = self._best()
        self.tried.append(candidate)
        if simulation.fits and (best is None or candidate.step_s < best.step_s):
            step = Improvement(self._seconds(), candidate.step_s, None, len(self.tried))
            self.history.append(step)
            if self.stop.progress is not None:
                self.stop.progress(step)

    def _best(self) -> Candidate | None:
        fitting = [candidate for candidate in self.tried if candidate.simulation.fits]
        return min(fitting, key=lambda candidate: candidate.step_s, default=None)

    def _drawn(self, best: Candidate | None) -> Candidate | None:
        """The winner again with all its devices."""
        if best is None:
            return None
        whole = simulate_stage(self.workload, self.cluster, best.simulation.stage)
        drawn = replace(best, simulation=whole)
        self.tried[self.tried.index(best)] = drawn
        return drawn

    def _out_of_time(self) -> bool:
        late = self.stop.time_s is not None and self._seconds() >= self.stop.time_s
        return late or self.stop.interrupted()

    def _seconds(self) -> float:
        return time.perf_counter() - self.started

    def _result(self) -> Sharding:
        best = self._drawn(self._best())
        tried = tuple(sorted(self.tried, key=lambda c: (not c.simulation.fits, c.step_s)))
        if best is None:
            status, why = Status.INFEASIBLE, self._why_not()
        elif best.step_s <= self.bound * (1 + 1e-9):
            status, why = Status.OPTIMAL, "no split can compute faster"
        elif self.stopped:
            status, why = Status.STOPPED, "stopped before every mesh was tried"
        else:
            status, why = Status.FEASIBLE, f"the fastest of {len(tried)} candidates that fits"
        return Sharding(
            status, why, None if best is None else self._plan(best, status, why), best, tried,
            self.bound, self._seconds(), self.seed, tuple(self.history),
        )  # fmt: skip

    def _why_not(self) -> str:
        least = min(self.tried, key=lambda c: max(c.simulation.peak_bytes))
        need, have = max(least.simulation.peak_bytes), min(least.simulation.capacity_bytes)
        return (
            f"needs {need / 1e9:.1f} GB on a device of {have / 1e9:.1f} GB even when it is "
            f"{least.name}; use more or larger devices, or a smaller batch"
        )

    def _plan(self, best: Candidate, status: Status, why: str) -> Plan:
        simulation = best.simulation
        prediction = Prediction(
            step_s=simulation.step_s,
            lower_bound_s=self.bound,
            compute_s=simulation.compute_s,
            communication_s=simulation.communication_s,
            peak_memory_bytes=simulation.peak_bytes,
            capacity_bytes=simulation.capacity_bytes,
        )
        cluster = ClusterRef(self.spec, self.cluster.num_devices, self.cluster.fingerprint())
        origin = Origin(best.name, str(status), why, self.seed, self._seconds(), __version__)
        return Plan(self.workload.ref(), cluster, (simulation.stage,), prediction, origin)
