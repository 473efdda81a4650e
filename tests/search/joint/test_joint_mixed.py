"""Bounds of pipelines over groups that differ are below every cut of every order."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from order_runs import chain, seconds_of, simulated

from partita.schedules.named import NAMED
from partita.search.joint.bound_mixed import Border, MixedPipeline
from partita.search.joint.bound_segments import BoundSegments, Freed, Multipliers
from partita.search.joint.bound_whole import WholeChain
from partita.search.joint.orders import joint_schedule, refused

ORDERS = [("1f1b", 1), ("zb-h1", 1), ("zb-h2", 1), ("gpipe", 1), ("zb-v", 2), ("interleaved", 2)]


class Mixed:
    """Groups, a chain and borders drawn at random."""

    def __init__(self, rng, p, n, m, untrained=0):
        self.p, self.n, self.m, self.untrained = p, n, m, untrained
        self.seconds = []
        for _ in range(p):
            speed = rng.choice([0.5, 1.0, 3.0])
            forward, backward, weights = speed * rng.choice([0.5, 1.0, 1.7], (3, n))
            backward[:untrained], weights[:untrained] = 0.0, 0.0
            self.seconds.append(seconds_of(forward, backward, weights))
        there = rng.choice([0.0, 1.0, 2.0], n - 1)
        back = np.where(np.arange(n - 1) < untrained, 0.0, there)
        self.sent = np.array([there, back])
        self.borders = tuple(
            Border(*((rng.choice([0.0, 0.3]), rng.choice([0.0, 0.2, 1.0])) for _ in range(2)))
            for _ in range(p)
        )
        self.back = tuple((k - 1,) if k > untrained else () for k in range(n))

    def pipeline(self):
        return MixedPipeline(
            tuple(self.seconds), self.m, True, chain(self.n), self.back, self.sent, self.borders,
            True, untrained=self.untrained,
        )  # fmt: skip

    def step(self, name, v, ends):
        """What an order takes with these cuts, block by block."""
        schedule = joint_schedule(name, v)

        def send_s(one, two):
            a, b = (schedule.group_of(min(one, two) + k, self.p) for k in (0, 1))
            ways = self.borders[a].there, self.borders[a].back
            if (a + 1) % self.p != b:  # a wave on its way back
                ways = self.borders[b].back, self.borders[b].there
            start, each = ways[one > two]
            size = self.sent[int(one > two), ends[max(one, two)] - 1]
            return start + each * size if size > 0 else 0.0

        row = NAMED[name].order(self.p, v, self.m)
        return simulated(
            row, ends, self.seconds, chain(self.n), fused=not NAMED[name].split, send_s=send_s
        )

    def bound(self, v, name):
        pipeline = self.pipeline()
        return pipeline.line_s() if v == 1 else pipeline.order_s(joint_schedule(name, v))


@settings(max_examples=80, deadline=None)
@given(st.sampled_from(ORDERS), st.integers(2, 4), st.integers(1, 6), st.integers(0, 10**6))
def test_no_order_of_groups_that_differ_is_below_its_bound(order, p, m, seed):
    name, v = order
    if refused(name, p, v, m) or NAMED[name].refuses(p, v, m):
        return
    rng = np.random.default_rng(seed)
    n = p * v + int(rng.integers(0, 4))
    mixed = Mixed(rng, p, n, m)
    bound = mixed.bound(v, name)
    for _ in range(4):
        inner = sorted(rng.permutation(np.arange(1, n))[: p * v - 1].tolist())
        assert bound <= mixed.step(name, v, (0, *inner, n)) * (1 + 1e-9)


@pytest.mark.parametrize(("name", "v"), [("zb-v", 2), ("interleaved", 2), ("zb-h1", 1)])
def test_the_bound_of_groups_that_differ_is_near_the_best_cuts(name, v):
    n = 14
    mixed = Mixed(np.random.default_rng(5), 2, n, 4)
    mixed.seconds = [seconds_of(*(speed * np.ones((3, n)))) for speed in (1.0, 2.0)]
    mixed.sent, mixed.borders = np.ones((2, n - 1)), (Border((0.5, 0.5), (0.5, 0.5)),) * 2
    cuts = itertools.combinations(range(1, n), 2 * v - 1)
    least = min(mixed.step(name, v, (0, *inner, n)) for inner in cuts)
    assert 0.9 * least < mixed.bound(v, name) <= least * (1 + 1e-9)


def test_a_dear_border_and_one_slow_group_raise_the_bound():
    mixed = Mixed(np.random.default_rng(1), 3, 9, 3)
    known, schedule = mixed.pipeline(), joint_schedule("zb-v", 2)
    free = replace(known, borders=(Border((0.0, 0.0), (0.0, 0.0)),) * 3)
    dear = replace(known, borders=(Border((4.0, 1.0), (4.0, 1.0)),) * 3)
    assert free.line_s() + 4 < dear.line_s()
    assert free.order_s(schedule) + 4 < dear.order_s(schedule)
    fast = min(known.seconds, key=lambda own: own.total.sum())
    alike = replace(known, seconds=(fast,) * 3)
    assert alike.line_s() < known.line_s()
    assert alike.order_s(schedule) < known.order_s(schedule)


def test_less_is_proven_where_less_is_enough():
    mixed = Mixed(np.random.default_rng(2), 3, 14, 3)
    schedule = joint_schedule("interleaved", 3)
    whole = mixed.pipeline().order_s(schedule)
    some = mixed.pipeline().order_s(schedule, enough=0.3 * whole)
    assert 0.25 * whole < some <= whole * (1 + 1e-9)


def test_first_segments_without_gradients_wait_for_none():
    for seed in range(10):
        rng = np.random.default_rng(seed)
        mixed = Mixed(rng, 3, 7, 3, untrained=2)
        inner = sorted(rng.permutation(np.arange(1, 7))[:2].tolist())
        for name in ("1f1b", "zb-h2"):
            reads = chain(7)
            row = NAMED[name].order(3, 1, 3)
            step = simulated(
                row, (0, *inner, 7), mixed.seconds, reads, fused=not NAMED[name].split, send_s=0.0
            )
            free = replace(mixed.pipeline(), borders=(Border((0.0, 0.0), (0.0, 0.0)),) * 3)
            assert free.line_s() <= step * (1 + 1e-9)


def tables(rng, segments):
    """Choices of two ops in each segment, edges between neighbours, and some further on."""
    count, choices = 2 * segments, 3
    pairs = [(i, i + 1) for i in range(count - 1)] + [(i, i + 3) for i in range(count - 3)]
    none = np.zeros(count * choices)
    compute = rng.choice([0.5, 1.0, 2.0], count * choices)
    waits = tuple(rng.choice([0.0, 0.4, 3.0], (choices, choices)) for _ in pairs)

    def solve(problem):
        options = itertools.product(*(range(len(cost)) for cost in problem.costs))
        return min(options, key=lambda chosen: value(problem, chosen))

    bounds = BoundSegments(
        solve, 1, choices * np.arange(count), compute, *(none,) * 11, tuple(pairs), waits,
        tuple(0 * w for w in waits), tuple(0 * w for w in waits), np.arange(count) // 2,
        np.arange(segments), lambda: Freed(np.zeros(0, int), *(np.zeros(0),) * 3),
    )  # fmt: skip
    return bounds, compute.reshape(count, choices)


def value(problem, chosen):
    own = sum(cost[x] for cost, x in zip(problem.costs, chosen, strict=True))
    return own + sum(
        problem.matrices[m][chosen[u], chosen[v]]
        for (u, v), m in zip(problem.edges, problem.matrix_of, strict=True)
    )


@pytest.mark.parametrize("seed", range(6))
def test_no_splits_of_a_range_are_below_its_bound(seed):
    segments = 3
    bounds, compute = tables(np.random.default_rng(seed), segments)
    costs = WholeChain(bounds).range_costs
    for i, j in itertools.combinations(range(segments + 1), 2):
        ops = range(2 * i, 2 * j)
        least = min(
            sum(compute[op, x] for op, x in zip(ops, chosen, strict=True))
            + sum(
                wait[chosen[u - 2 * i], chosen[v - 2 * i]]
                for (u, v), wait in zip(bounds.edges, bounds.waits, strict=True)
                if u in ops and v in ops
            )
            for chosen in itertools.product(range(3), repeat=len(ops))
        )
        assert costs[i, j] <= least * (1 + 1e-9)
        if j - i == segments:
            assert costs[i, j] == pytest.approx(least)
    apart = bounds.least(Multipliers()).sum()
    assert costs[0, segments] >= apart  # where segments begin as they like
