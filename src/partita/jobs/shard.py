"""Shard a model: the best split of every op over the devices, under the memory they have.

1. For every mesh (all devices in a line, in every rectangle; with heterogeneous devices also
sharded by
   their speed) the choices of all ops are costed once.
2. Each mesh's problem is solved with hidden communication counted in part; where the answer needs
   more memory than there is, bytes get a price that rises until it fits (a Lagrangian).
3. The meshes with the best estimates are looked at closely: other weights of communication, each
   answer lowered and simulated. The named strategies are simulated too.
4. The fastest that fits wins. The lower bound holds for all splits on all meshes tried.
"""

import functools
import math
from dataclasses import dataclass, field, replace

from partita import __version__, units
from partita.cluster import Cluster, resolve
from partita.compiled import work_clock
from partita.costs.collectives import Collectives
from partita.costs.memory import workspace_bytes
from partita.costs.roofline import op_cost
from partita.costs.sharding import ShardingModel, Weights, sharding_model
from partita.errors import InputError
from partita.graph.record import Graph
from partita.jobs.advice import NO_ADVICE, what_would_fit_beyond_splits
from partita.jobs.simulate import Attempts, Simulation, alternatives, rejection, simulate_stage
from partita.jobs.strategies import MOST_INNER, STRATEGIES
from partita.jobs.workload import Workload, cluster_ref, load
from partita.plans import Axis, Mesh, Origin, Plan, Progress, Stage
from partita.problems.sharding import ShardingSolution
from partita.search import searches
from partita.search.base import UNTIL_DONE, Improvement, Result, Status, Stop
from partita.search.joint.model import JointModel
from partita.showing import plot_of, repr_html, table_of

AXIS_NAMES = ("x", "y")


@dataclass(frozen=True, slots=True)
class ShardSettings:
    """What `shard` decides: how communication counts, how many meshes it looks at closely."""

    # Most of the hidden communication is hidden.
    first: Weights = field(default_factory=lambda: Weights(hidden=0.2))
    closer: tuple[Weights, ...] = (Weights(hidden=1.0), Weights(blocking=0.6, hidden=0.05))
    bound_mix: float = 0.35  # the weight of communication in the mixed lower bound
    looked_at_closely: int = 3  # meshes, those with the best estimates
    clearly: float = 1.2  # a mesh whose estimate is so many times the best is not made to fit
    strategy_stages: int = 2  # meshes on which the strategy `tensor` is simulated
    next_best: int = 10  # others that are listed

    # How a cap on memory is kept to.
    multiplier_steps: int = 7  # until the multiplier on bytes is large enough, 8 times each
    bisections: int = 5  # between too small and large enough
    transient: float = 0.93  # of the memory, before what is live only for a moment is known
    repairs: int = 3  # answers made again with less, where a simulation says too much is held
    margin: float = 1.02  # how much less than that simulation asks for


USUAL = ShardSettings()


@dataclass(frozen=True)
class SimulatedSharding:
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

    method: str
    status: Status
    why: str
    plan: Plan | None
    best: SimulatedSharding | None
    tried: tuple[SimulatedSharding, ...]
    lower_bound_s: float
    seconds: float
    seed: int
    history: tuple[Improvement, ...]

    _repr_html_, table, plot = repr_html, table_of, plot_of  # in a notebook


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
    settings: ShardSettings = USUAL,
) -> Sharding:
    """Find the fastest split of every op of a model over the devices of a cluster."""
    machine = resolve(cluster) if isinstance(cluster, str) else cluster
    workload = load(model, batch=batch, dtype=dtype, training=training, optimizer=optimizer)
    spec = cluster if isinstance(cluster, str) else machine.name
    return _ShardJob(workload, machine, spec, method, stop, seed, settings).run()


def meshes(cluster: Cluster, graph: Graph) -> tuple[Mesh, ...]:
    """All devices in one line, and in every rectangle; rows stay together in the cluster."""
    count = cluster.num_devices
    devices = tuple(range(count))
    meshes = [Mesh((Axis(AXIS_NAMES[0], count),), devices)]
    for outer in range(2, count // 2 + 1):
        if count % outer == 0 and count // outer <= MOST_INNER:
            axes = (Axis(AXIS_NAMES[0], outer), Axis(AXIS_NAMES[1], count // outer))
            meshes.append(Mesh(axes, devices))
    meshes.extend(_weighted(cluster, graph))
    return tuple(meshes)


def _weighted(cluster: Cluster, graph: Graph) -> list[Mesh]:
    """A line in which each device's share follows its speed, in small whole numbers."""
    if cluster.is_homogeneous or cluster.num_devices < 2:
        return []
    speed = {}
    for kind in cluster.kinds:
        seconds = sum(op_cost(graph, op, kind).seconds for op in graph.ops)
        speed[kind.name] = 1 / seconds if seconds else 1.0
    slowest = min(speed.values())
    meshes: dict[tuple[int, ...], Mesh] = {}
    for unit in (1, 2, 3, 4):
        weights = tuple(
            max(1, round(unit * speed[device.kind] / slowest)) for device in cluster.devices
        )
        divisor = math.gcd(*weights)
        small = tuple(weight // divisor for weight in weights)
        if len(set(small)) > 1:
            axis = Axis(AXIS_NAMES[0], cluster.num_devices, small)
            meshes[small] = Mesh((axis,), tuple(range(cluster.num_devices)))
    return list(meshes.values())


def _shape(mesh: Mesh) -> tuple[int, ...]:
    return tuple(axis.size for axis in mesh.axes)


@dataclass
class _Look:
    """One mesh's model with its first answer."""

    model: ShardingModel
    assignment: tuple[int, ...] | None
    estimate_s: float


class _ShardJob:
    def __init__(
        self, workload: Workload, cluster: Cluster, spec: str, method: str | None, stop: Stop,
        seed: int, settings: ShardSettings,
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
        self.stop, self.seed, self.settings = stop, seed, settings
        self.started = work_clock()
        self.collectives = Collectives(cluster)
        self.tried: list[SimulatedSharding] = []
        self.seen: dict[tuple[object, ...], Simulation | None] = {}
        self.history: list[Improvement] = []
        self.bound = math.inf
        self.is_bounded = False  # only when every mesh was looked at
        self.least_estimate = math.inf
        self.stopped = False
        self.attempt = Attempts()
        kinds = {cluster.devices[d].kind: cluster.kind_of(d) for d in range(cluster.num_devices)}
        self.room = min(kind.memory_bytes - workspace_bytes(kind) for kind in kinds.values())

    def run(self) -> Sharding:
        self._strategies("data", "zero1", "fsdp")
        looks = []
        for mesh in meshes(self.cluster, self.workload.graph):
            if self._out_of_time():
                break
            look = self.attempt(f"the mesh {mesh}", functools.partial(self._look, mesh))
            looks += [look] if look is not None else []
        else:
            self.is_bounded = math.isfinite(self.bound)
            self._tell()
        looks.sort(key=lambda look: look.estimate_s)
        for look in looks[: self.settings.looked_at_closely]:
            self._look_closely(look)
        if any(op.kind == "conv" for op in self.workload.graph.ops):
            self._strategies("one-weird-trick", "spatial")
        even = [look.model for look in looks if not any(a.weights for a in look.model.mesh.axes)]
        self._tensor_parallel({_shape(model.mesh): model for model in even})
        self._other_levels()
        return self._result()

    def _other_levels(self) -> None:
        """The best splits with all parameters kept alike: copies, or states sharded."""
        best = self._best()
        if best is None or not self.workload.training:
            return
        stage = best.simulation.stage
        for level in (0, 1):
            splits = tuple(replace(split, zero=level) for split in stage.splits)
            if splits != stage.splits and not self._out_of_time():
                self._simulate(best.name, replace(stage, splits=splits))

    # One mesh.

    def _look(self, mesh: Mesh) -> _Look:
        model = sharding_model(
            self.workload.graph, self.cluster, mesh, collectives=self.collectives
        )
        self.bound = min(self.bound, self._lower_bound(model))
        for part in (self.settings.transient, 1.0):
            room, first = self.room * part, self.settings.first
            assignment = self._solve_within(model, first, room, self.least_estimate)
            if assignment is not None:
                self.least_estimate = min(self.least_estimate, assignment[1])
                return _Look(model, *assignment)
        return _Look(model, None, math.inf)

    def _lower_bound(self, model: ShardingModel) -> float:
        """Compute alone, or a mix of compute and communication: both are below any step."""
        w = self.settings.bound_mix
        mix = Weights(compute=1 - w, blocking=w, hidden=w, shared=0.0)
        mixed = self._solve(model, mix).lower_bound or 0.0
        return max(model.compute_bound_s(), mixed if self.cluster.is_homogeneous else 0.0)

    def _look_closely(self, look: _Look) -> None:
        if look.assignment is None:
            return
        settings = self.settings
        room = self.room * settings.transient
        simulation = self._offer(self.method, look.model, look.assignment)
        # What is live only for a moment is known now: leave room for it.
        for _ in range(settings.repairs if simulation is not None else 0):
            assert simulation is not None, "else there is nothing to repair"
            over = max(simulation.peak_bytes) / min(simulation.capacity_bytes)
            if over <= 1 or self._out_of_time():
                break
            room /= over * settings.margin
            again = self._solve_within(look.model, settings.first, room)
            if again is None:
                break
            repaired = self._offer(self.method, look.model, again[0])
            if repaired is None:
                break
            simulation = repaired
        for weights in settings.closer:
            if self._out_of_time():
                return
            assignment = self._solve_within(look.model, weights, room)
            if assignment is not None and assignment[0] != look.assignment:
                self._offer(self.method, look.model, assignment[0])

    def _solve_within(
        self, model: ShardingModel, weights: Weights, room: float, hopeless: float = math.inf
    ) -> tuple[tuple[int, ...], float] | None:
        """The best assignment by weights that holds at most `room` bytes, and its cost.

        Where even without the limit it costs more than `clearly` times `hopeless`, no answer.
        """
        best = self._priced(model, weights, 0.0)
        if best is None or model.memory_bound_bytes() > room:
            return None
        cost = self._cost(model, weights, best)
        if model.memory_bytes(best) <= room:
            return best, cost
        if cost > self.settings.clearly * hopeless:
            return None
        low, high = 0.0, cost / room
        feasible = None
        for _ in range(self.settings.multiplier_steps):
            priced = self._priced(model, weights, high)
            if priced is not None and model.memory_bytes(priced) <= room:
                feasible = priced
                break
            low, high = high, high * 8
        if feasible is None:
            return None
        for _ in range(self.settings.bisections):
            middle = (low + high) / 2 if low == 0 else math.sqrt(low * high)
            priced = self._priced(model, weights, middle)
            if priced is not None and model.memory_bytes(priced) <= room:
                feasible, high = priced, middle
            else:
                low = middle
        return feasible, self._cost(model, weights, feasible)

    def _priced(
        self, model: ShardingModel, weights: Weights, s_per_byte: float
    ) -> tuple[int, ...] | None:
        solution = self._solve(model, replace(weights, s_per_byte=s_per_byte)).solution
        return None if solution is None else tuple(solution.assignment)

    def _solve(self, model: ShardingModel, weights: Weights) -> Result[ShardingSolution]:
        left = None if self.stop.time_s is None else max(0.1, self.stop.time_s - self._seconds())
        stop = Stop(time_s=left, interrupted=self.stop.interrupted)
        return self.search(model.problem(weights), stop, self.seed)

    def _cost(self, model: ShardingModel, weights: Weights, assignment: tuple[int, ...]) -> float:
        own = sum(
            float(table.cost(weights)[x]) for table, x in zip(model.tables, assignment, strict=True)
        )
        moved = sum(
            float(model.matrices[m][assignment[u], assignment[v]])
            for (u, v), m in zip(model.edges, model.matrix_of, strict=True)
        )
        return own + weights.blocking * moved

    # Candidates.

    def _strategies(self, *names: str) -> None:
        for name in names:
            if self._out_of_time() and self.tried:
                return
            if not self.workload.training and name in ("zero1", "fsdp"):
                continue
            for stage in self._stages(name):
                self._simulate(name, stage)

    def _stages(self, name: str) -> tuple[Stage, ...]:
        graph, count = self.workload.graph, self.cluster.num_devices
        return self.attempt(name, lambda: STRATEGIES[name].stages(graph, count)) or ()

    def _tensor_parallel(self, models: dict[tuple[int, ...], ShardingModel]) -> None:
        """Megatron's way on the meshes where the estimate likes it best."""
        ranked: list[tuple[bool, float, int, Stage]] = []
        for stage in self._stages("tensor"):
            model = models.get(_shape(stage.mesh))
            if model is not None:
                chosen = model.assignment(stage.splits)
                over = model.memory_bytes(chosen) > self.room
                cost = self._cost(model, self.settings.first, chosen)
                ranked.append((over, cost, len(ranked), stage))
        ranked.sort(key=lambda item: item[:3])
        for *_, stage in ranked[: self.settings.strategy_stages]:
            if not self._out_of_time():
                self._simulate("tensor", stage)

    def _offer(
        self, name: str, model: ShardingModel, assignment: tuple[int, ...]
    ) -> Simulation | None:
        return self._simulate(name, Stage("model", model.mesh, model.splits(assignment)))

    def _simulate(self, name: str, stage: Stage) -> Simulation | None:
        """Try a stage; one that was tried before under another name is not tried again."""
        key = (_shape(stage.mesh), stage.mesh.axes[0].weights, stage.splits)
        if key in self.seen:
            return self.seen[key]
        # Devices of a kind do the same: one of each is enough to compare candidates.
        simulation = self.attempt(
            f"{name} on {stage.mesh}",
            lambda: simulate_stage(self.workload, self.cluster, stage, 1, self.collectives),
        )
        self.seen[key] = simulation
        if simulation is None:
            return None
        candidate = SimulatedSharding(name, str(stage.mesh), simulation)
        best = self._best()
        self.tried.append(candidate)
        if simulation.fits and (best is None or candidate.step_s < best.step_s):
            self._tell()
        return simulation

    def _tell(self) -> None:
        """The best so far, and the bound where it is known."""
        best, bound = self._best(), self.bound if self.is_bounded else None
        step = Improvement(
            self._seconds(), None if best is None else best.step_s, bound, len(self.tried)
        )
        self.history.append(step)
        if self.stop.progress is not None:
            self.stop.progress(step)

    def _best(self) -> SimulatedSharding | None:
        fitting = [candidate for candidate in self.tried if candidate.simulation.fits]
        return min(fitting, key=lambda candidate: candidate.step_s, default=None)

    def _representatives(self, best: SimulatedSharding | None) -> SimulatedSharding | None:
        """The winner again with all its devices."""
        if best is None:
            return None
        whole = simulate_stage(self.workload, self.cluster, best.simulation.stage)
        drawn = replace(best, simulation=whole)
        self.tried[self.tried.index(best)] = drawn
        return drawn

    def _out_of_time(self) -> bool:
        late = self.stop.time_s is not None and self._seconds() >= self.stop.time_s
        self.stopped = self.stopped or late or self.stop.interrupted()
        return self.stopped

    def _seconds(self) -> float:
        return work_clock() - self.started

    def _result(self) -> Sharding:
        best = self._representatives(self._best())
        tried = tuple(sorted(self.tried, key=lambda c: (not c.simulation.fits, c.step_s)))
        bound = self.bound if math.isfinite(self.bound) else 0.0
        if best is None:
            status, why = Status.INFEASIBLE, self._why_not()
        elif best.step_s <= bound * (1 + 1e-9):
            status, why = Status.OPTIMAL, "no split can be faster"
        elif self.stopped:
            status, why = Status.STOPPED, "stopped before every mesh was tried"
        else:
            status, why = Status.FEASIBLE, f"the fastest of {len(tried)} candidates that fits"
        plan = None if best is None else self._plan(best, status, why, bound)
        return Sharding(
            self.method, status, why, plan, best, tried, bound, self._seconds(), self.seed,
            tuple(self.history),
        )  # fmt: skip

    def _why_not(self) -> str:
        self.attempt.refuse_if_all_failed(self.tried)
        least = min(self.tried, key=lambda c: max(c.simulation.peak_bytes))
        need, have = least.simulation.fullest
        needs = (
            f"even the thriftiest split of all ops over all devices ({least.name}) needs "
            f"{units.size(need)} on a device of {units.size(have)}"
        )
        advice = self.attempt("advice on what would fit", self._advice)
        return f"{needs}; {advice or NO_ADVICE}"

    def _advice(self) -> str:
        """What `partita plan` would say: stages and checkpointing make more fit than splits do."""
        model = JointModel(
            self.workload.graph, self.workload.optimizer, self.cluster, self.collectives
        )
        return what_would_fit_beyond_splits(model)

    def _plan(self, best: SimulatedSharding, status: Status, why: str, bound: float) -> Plan:
        simulation = best.simulation
        prediction = simulation.prediction(bound)
        cluster = cluster_ref(self.spec, self.cluster)
        others = [
            (one.name, one.simulation, rejection(one.simulation, simulation), None)
            for one in sorted(self.tried, key=lambda one: one.step_s)
        ]
        origin = Origin(
            best.name, str(status), why, self.seed, self._seconds(), __version__,
            tuple(Progress(s.seconds, s.objective, s.lower_bound) for s in self.history),
            alternatives(others, simulation, self.settings.next_best),
        )  # fmt: skip
        return Plan(self.workload.ref(), cluster, simulation.decided, prediction, origin)
