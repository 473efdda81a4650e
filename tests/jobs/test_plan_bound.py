"""The bound of a number of stages and micro-batches is below every plan that has them."""

import functools
import math
import random
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from partita.cluster import resolve
from partita.costs.collectives import Collectives
from partita.costs.roofline import work_bound_s
from partita.costs.sharding import LEVELS, sharding_model
from partita.graph import GraphBuilder
from partita.graph.backward import CHEAP_KINDS
from partita.graph.chain import chain_of
from partita.graph.rebatch import rebatch
from partita.jobs.plan import plan
from partita.jobs.simulate import simulate_stages
from partita.jobs.strategies import STRATEGIES, by_kind, unequal
from partita.jobs.workload import load
from partita.lower import Memo
from partita.lower.orders import refusal
from partita.plans import Axis, Mesh, OpSplit, Schedule, Stage, device_groups
from partita.problems.joint import Cell
from partita.search.base import Stop
from partita.search.joint.bound_segments import Multipliers
from partita.search.joint.bounds import PlanBounds, fewest_in_flight
from partita.search.joint.cells import divisors, mesh_of, mesh_shapes
from partita.search.joint.model import JointModel
from partita.search.joint.orders import refused
from tests.shallow import GPT2

QUICK = Stop(gap=0.0)
ROUNDING = 1e-9


def bounds(workload, cluster, max_memory=math.inf):
    joint = JointModel(
        workload.graph, "adamw", cluster, Collectives(cluster), max_memory=max_memory
    )
    known = {g.num_groups: k for k, g in enumerate(joint.problem.groupings)}
    plan_bounds = PlanBounds(joint)
    return lambda stages, count: plan_bounds.cell_bound(Cell(known[stages], count)).climbed_s()


@pytest.mark.parametrize(
    ("model", "spec", "batch", "memory", "forbid"),
    [
        ("alexnet", "4xA100", 32, math.inf, []),
        ("rnnlm", "2x2xA100", 16, math.inf, ["pp=1"]),
        ("gpt2", "2xA100", 16, math.inf, ["pp=1"]),
        ("gpt2", "2xA100", 16, 5e9, []),
    ],
)
def test_no_simulated_plan_is_below_the_bound_of_its_kind(model, spec, batch, memory, forbid):
    cluster = resolve(spec)
    limit = None if memory == math.inf else memory
    planned = plan(model, cluster, batch=batch, max_memory=limit, forbid=forbid, stop=QUICK)
    bound = bounds(planned.best.simulation.workload, cluster, memory)
    for candidate in (planned.best, *planned.others):
        simulation = candidate.simulation
        groups = len(device_groups(simulation.stages))
        count = simulation.schedule.num_microbatches
        assert groups > 1 or not forbid
        assert bound(groups, count) <= candidate.step_s * (1 + ROUNDING), simulation.arrangement


class Maker:
    """Plans at random: groups, micro-batches, order, cuts, meshes, splits, recompute."""

    def __init__(self, model, spec, batch, memory):
        self.work, self.cluster, self.memory = load(model, batch=batch), resolve(spec), memory
        self.memo = Memo(Collectives(self.cluster))
        self.joint = JointModel(
            self.work.graph, "adamw", self.cluster, self.memo.collectives, max_memory=memory
        )
        self.bounds = PlanBounds(self.joint)
        self.models = {}

    def plan(self, rng):
        """(cell, stages, schedule) that an order can run, or None."""
        chain = self.joint.chain
        number = rng.randrange(len(self.joint.problem.groupings))
        groups = self.joint.problem.groupings[number].devices
        p = len(groups)
        m = rng.choice([d for d in divisors(self.work.batch) if d <= 8])
        name, chunks = rng.choice(
            [("1f1b", 1)]
            if p == 1
            else [
                ("1f1b", 1),
                ("zb-h1", 1),
                ("zb-h2", 1),
                ("zb-v", 2),
                ("interleaved", 2),
                ("interleaved", 3),
            ]
        )
        if p * chunks > chain.num_segments or refused(name, p, chunks, m):
            return None  # not in the space
        inner = sorted(rng.sample(range(1, chain.num_segments), p * chunks - 1))
        ends = [0, *inner, chain.num_segments]
        stages = []
        for s in range(p * chunks):
            chunk, rank = divmod(s, p)
            group = groups[p - 1 - rank if name == "zb-v" and chunk % 2 else rank]
            segments = chain.segments[ends[s] : ends[s + 1]]
            ops = [op for segment in segments for op in segment.ops]
            mesh, splits = self.splits(rng, m, group, ops)
            again = rng.random() < 0.25
            kept = tuple(segment.ops[0] for segment in segments[1:]) if again else ()
            part = 0.0 if again else rng.choice([0.0, 0.5, 1.0])
            kinds = {op.name: op.kind for op in self.work.graph.ops}
            light = tuple(op for op in ops if kinds[op] in CHEAP_KINDS and rng.random() < part)
            mesh = Mesh(mesh.axes, tuple(group))
            stages.append(
                Stage(
                    f"stage{s}",
                    mesh,
                    splits,
                    "full" if again else "selective" if light else "none",
                    kept,
                    light,
                )
            )
        if refusal(name, device_groups(tuple(stages)), m):
            return None
        return Cell(number, m), tuple(stages), Schedule(name, m)

    def splits(self, rng, m, group, ops):
        shape = rng.choice(mesh_shapes(len(group), self.joint.patterns.inner_size))
        mesh = mesh_of(shape, group)
        if rng.random() < 0.5:
            split = rng.choice(self.joint.on_mesh(mesh, m, 1).strategies)
            return mesh, split.splits(ops, self.joint.fold)
        key = (m, shape, tuple(group))
        if key not in self.models:
            micro = rebatch(self.work.graph, self.work.batch // m)
            self.models[key] = sharding_model(
                micro, self.cluster, mesh, LEVELS, self.memo.collectives, m
            )
        model = self.models[key]
        number = {op: i for i, op in enumerate(model.ops)}
        splits = []
        for op in ops:
            choices, table = model.choices[number[op]], model.tables[number[op]]
            quick = int((table.compute.max(axis=1) + table.blocking).argmin())
            choice = rng.choice(choices) if rng.random() < 0.3 else choices[quick]
            splits.append(OpSplit(op, choice.dims, choice.zero))
        return mesh, tuple(splits)

    def fits(self, simulation):
        pairs = zip(simulation.peak_bytes, simulation.capacity_bytes, strict=True)
        return all(peak <= min(room, self.memory) for peak, room in pairs)


maker = functools.cache(Maker)


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)
@given(
    st.sampled_from([
        ("alexnet", "4xA100", 8, math.inf),
        ("squeezenet1_1", "4xV100", 12, math.inf),
        ("rnnlm", "2x2xA100", 12, math.inf),
        ("gpt2", "4xA100", 8, 4.2e9),
    ]),
    st.integers(0, 10**6),
)  # fmt: skip
def test_no_plan_at_random_is_below_the_bound_of_its_kind(case, seed):
    made = maker(*case)
    planned = made.plan(random.Random(seed))
    if planned is None:
        return
    cell, stages, schedule = planned
    bound = made.bounds.cell_bound(cell)
    simulation = simulate_stages(made.work, made.cluster, stages, schedule, made.memo)
    computing = max(made.bounds.bound(cell, level, math.inf) for level in (0, 1))
    assert 0 < computing <= simulation.step_s * (1 + ROUNDING)
    assert bound.first_s <= simulation.step_s * (1 + ROUNDING)
    if made.fits(simulation):
        assert bound.climbed_s() <= simulation.step_s * (1 + ROUNDING)
        assert bound.whole_s(math.inf) <= simulation.step_s * (1 + ROUNDING)
    elif (
        math.isfinite(bound.quick_s)
        and len(made.joint.problem.groupings[cell.grouping].devices) > 1
    ):
        # Without prices memory does not enter, except that meshes where one stage cannot fit go.
        assert bound.quick_s <= simulation.step_s * (1 + ROUNDING)


@settings(
    max_examples=24, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)
@given(
    st.sampled_from([
        ("alexnet", "2xV100+2xP100", 8, math.inf),
        ("squeezenet1_1", "1xA100+2xV100+1xP100", 12, math.inf),
        ("rnnlm", "2xA100+2xH100", 12, math.inf),
        ("gpt2@64", "2xV100+2xP100@links=0.05", 8, math.inf),
    ]),
    st.integers(0, 10**6),
)  # fmt: skip
def test_no_plan_at_random_is_below_what_groups_of_mixed_machines_take(case, seed):
    made = maker(*case)
    planned = made.plan(random.Random(seed))
    if planned is None:
        return
    cell, stages, schedule = planned
    levels = range(made.bounds.num_levels)
    known = [made.bounds.bound(cell, level, math.inf) for level in levels]
    simulation = simulate_stages(made.work, made.cluster, stages, schedule, made.memo)
    assert 0 < max(known) <= simulation.step_s * (1 + ROUNDING)


@functools.cache
def bounds_of(model, spec, batch):
    cluster = resolve(spec)
    work = load(model, batch=batch)
    return PlanBounds(JointModel(work.graph, "adamw", cluster, Collectives(cluster)))


def test_slow_links_raise_the_bound_of_one_stage_over_two_kinds():
    fast, slow = (bounds_of("gpt2@64", f"2xV100+2xP100@links={x}", 8) for x in (1, 0.01))
    cell = Cell(0, 1)
    assert len(fast.model.problem.groupings[0].devices) == 1
    assert fast.bound(cell, 0, math.inf) == slow.bound(cell, 0, math.inf)  # of computing
    assert 1.05 * fast.bound(cell, 3, math.inf) < slow.bound(cell, 3, math.inf)


def test_virtual_stages_on_two_kinds_have_bubbles_and_wait_for_sends():
    fast, slow = (bounds_of("gpt2@64", f"2xV100+2xP100@links={x}", 8) for x in (1, 0.01))
    groupings = fast.model.problem.groupings
    cell = Cell(next(k for k, own in enumerate(groupings) if own.num_groups == 4), 4)
    assert fast.computing.has_virtual_stages(cell)
    assert 1.02 * fast.bound(cell, 0, math.inf) < fast.bound(cell, 2, math.inf)
    assert fast.bound(cell, 2, math.inf) <= slow.bound(cell, 2, math.inf) * (1 + 1e-3)


def test_conversions_between_segments_raise_the_bound_of_a_single_stage():
    known = bounds_of("alexnet", "4xA100", 32)
    cell, last = Cell(0, 1), known.num_levels - 1
    apart, whole = (known.bound(cell, level, math.inf) for level in (last - 1, last))
    planned = plan("alexnet", "4xA100", batch=32, pin=["pp=1"], stop=QUICK)
    assert 1.1 * apart < whole <= planned.best.step_s


@pytest.mark.parametrize("weights", [(2, 1), (1, 3), (5, 1)])
def test_unlike_shares_take_at_least_what_the_busiest_device_computes(weights):
    made = maker("gpt2@64", "1xA100+1xV100", 24, math.inf)
    mesh = Mesh((Axis("x", 2, weights),), (0, 1))
    for m in (1, 2):
        known = made.joint.on_mesh(mesh, m, 1)
        ops = [op for segment in made.joint.chain.segments for op in segment.ops]
        for split in known.strategies:
            stage = Stage("stage0", mesh, split.splits(ops, made.joint.fold))
            schedule = Schedule("1f1b", m)
            simulation = simulate_stages(made.work, made.cluster, (stage,), schedule, made.memo)
            assert known.compute_bound.sum() <= simulation.step_s * (1 + ROUNDING)
            assert m > 1 or known.compute_bound.sum() > 0.7 * simulation.compute_s


def test_the_bound_of_heterogeneous_devices_is_above_all_work_over_all_devices():
    planned = plan("alexnet", "2xV100+2xP100", batch=16, stop=QUICK)
    work_s = work_bound_s(planned.best.simulation.workload.graph, resolve("2xV100+2xP100"))
    assert 1.1 * work_s < planned.lower_bound_s <= planned.best.step_s


@pytest.mark.parametrize("level", LEVELS)
def test_the_gradient_of_a_tied_parameter_is_reduced_once(level):
    g = GraphBuilder("tied")
    x, weight = g.input("x", (2048, 2048)), g.parameter("w", (2048, 2048))
    for k in range(6):
        x = g.one("linear", x, weight, name=f"linear{k}")
    work, cluster = load(g.finish(x)), resolve("4xA100")
    joint = JointModel(work.graph, "adamw", cluster, Collectives(cluster))
    mesh = mesh_of((4,), range(4))
    splits = tuple(OpSplit(f"linear{k}", ("b",), level) for k in range(6))
    simulation = simulate_stages(work, cluster, (Stage("", mesh, splits),), Schedule("1f1b", 1))
    only = replace(
        joint.on_mesh(mesh, 1, 1), levels=(level,), keep=lambda call, dims: dims == ("b",)
    )
    for network in (0.0, 0.3, 0.9):
        at = Multipliers(network, sync=True, gradients=False)
        assert only.bounds.least(at).sum() <= simulation.step_s * (1 + ROUNDING)


def test_less_memory_raises_the_bound_until_nothing_fits():
    cluster = resolve("2xA100")
    workload = load("gpt2", batch=16)
    outcome = [bounds(workload, cluster, memory)(1, 1) for memory in (80e9, 3.5e9, 3e9, 1.5e9)]
    assert outcome == sorted(outcome)
    assert outcome[0] < outcome[-2] < math.inf
    assert outcome[-1] == math.inf


def test_more_ranks_wait_longer_for_their_first_forward():
    cluster = resolve("8xA100")
    joint = JointModel(load("gpt2", batch=16).graph, "adamw", cluster, Collectives(cluster))
    known = {g.num_groups: k for k, g in enumerate(joint.problem.groupings)}
    for stages in (2, 4):
        bound = PlanBounds(joint).cell_bound(Cell(known[stages], 8))
        virtual_s = min(bound._looped(0.0, 0.0), bound._wave(0.0, 0.0))
        assert bound._one_stage(0.0, 0.0) > virtual_s


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (4, 7)])
def test_what_ranks_hold_interleaved_is_at_most_what_the_orders_have_in_flight(p, m):
    flights = fewest_in_flight(p, m)
    assert len(flights) == p
    assert all(1 <= flight <= 2 * p for flight in flights)


@pytest.mark.parametrize("spec", ["1xV100+2xP100", "4xA100"])
def test_given_stages_are_bounded_by_their_slowest_device(spec):
    cluster, work = resolve(spec), load(f"{GPT2}@64", batch=8)
    graph = work.graph
    joint = JointModel(graph, "adamw", cluster, Collectives(cluster))
    named = [STRATEGIES[name].stages(graph, cluster.num_devices) for name in ("data", "zero1")]
    plans = [((stage,), Schedule()) for stages in named for stage in stages]
    plans += unequal(graph, cluster, 8)
    plans += by_kind(graph, chain_of(graph), cluster, 8)[:3]
    assert len(plans) > (6 if len(cluster.kinds) > 1 else 1)
    for stages, schedule in plans:
        least, over = joint.stage_bound(stages, schedule.num_microbatches)
        simulation = simulate_stages(work, cluster, stages, schedule)
        assert least <= simulation.step_s * (1 + ROUNDING)
        assert over <= 0
        if len(stages) == 1:  # what the first device computes counts in full, and slower ones more
            own = [
                op.cost.seconds
                for op in simulation.ops
                if op.phase == "forward" or graph.op(op.name).forward
            ]
            slower = 1.2 if len(cluster.kinds) > 1 and not stages[0].mesh.axes[0].weights else 1.0
            assert least >= slower * sum(own) * (1 - ROUNDING)
