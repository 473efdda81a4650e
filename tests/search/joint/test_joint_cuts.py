"""Cuts meet brute force; meshes and groupings hold every device once."""

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from partita.cluster import resolve
from partita.costs.collectives import Patterns
from partita.problems.joint import stage_costs
from partita.search.joint.brute import solutions
from partita.search.joint.candidates import Interleaved, round_ends
from partita.search.joint.cells import (
    device_groupings,
    divisors,
    mesh_of,
    mesh_shapes,
    weighted_meshes,
)
from partita.search.joint.cuts import (
    LayerRanges,
    best_cuts,
    cuts_at,
    joined,
    range_peaks,
    range_sums,
)
from tests.search.joint.joint_problems import tiny_problems


def table(seconds, held, saved):
    nothing = np.zeros((1, len(seconds) + 1, len(seconds) + 1))
    return LayerRanges(
        range_sums(np.array(seconds))[None],
        range_sums(np.array(held))[None],
        range_sums(np.array(saved))[None],
        nothing,
        nothing,
    )


numbers = st.integers(1, 9).map(float)


@st.composite
def problems(draw):
    count = draw(st.integers(2, 6))
    stages = draw(st.integers(1, min(3, count)))
    row = st.lists(numbers, min_size=count, max_size=count)
    ways = [[table(draw(row), draw(row), draw(row)) for _ in range(2)] for _ in range(stages)]
    sends = np.array(draw(row))
    return ways, sends, draw(st.integers(1, 8)), draw(st.integers(10, 60))


def brute(ways, sends, m, room):
    """The least step with the least bottleneck's slack ignored: all cuts, all ways."""
    count, stages = len(sends), len(ways)
    best = np.inf
    for cuts in itertools.combinations(range(1, count), stages - 1):
        ends = (0, *cuts, count)
        times = []
        for s, (a, b) in enumerate(itertools.pairwise(ends)):
            flight = min(m, stages - s)
            fitting = [
                float(w.seconds[0, a, b])
                for w in ways[s]
                if w.static[0, a, b] + flight * w.saved[0, a, b] <= room
            ]
            times.append(min(fitting, default=np.inf))
        moved = 2 * sum(float(sends[a]) for a in ends[1:-1])
        if np.isfinite(max(times)):
            # The first stage receives nothing, but its cut is priced like any other.
            best = min(best, (m - 1) * max(times) + sum(times) + moved + 2 * float(sends[0]))
    return best


@settings(max_examples=150, deadline=None)
@given(problems())
def test_cuts_are_as_good_as_trying_all_within_the_bottlenecks_tried(problem):
    ways, sends, m, room = problem
    stages = [joined(parts) for parts in ways]
    flight = [min(m, len(stages) - s) for s in range(len(stages))]
    cuts = best_cuts(stages, flight, [float(room)] * len(stages), sends, m)
    best = brute(ways, sends, m, room)
    if not np.isfinite(best):
        assert cuts is None
        return
    assert cuts is not None
    assert cuts.step_s >= best - 1e-9
    ends = [0, *(end for _, end, _ in cuts.stages)]
    assert ends[-1] == len(sends)
    assert all(start == before for (start, _, _), before in zip(cuts.stages, ends, strict=False))
    # The least bottleneck is exact; beyond it only a few are tried.
    assert cuts.step_s <= 2 * best


@settings(max_examples=60, deadline=None)
@given(st.lists(numbers, min_size=5, max_size=14), st.integers(2, 3), st.integers(1, 6))
def test_groups_with_virtual_stages_are_evened_out(seconds, groups, m):
    count = 2 * groups if len(seconds) >= 2 * groups else groups
    stages = [table(seconds, [0.0] * len(seconds), [0.0] * len(seconds))] * count
    sends = np.zeros(len(seconds))
    turns = [stage % groups for stage in range(count)]
    plain = best_cuts(stages, [1] * count, [1.0] * count, sends, m)
    this_cuts = Interleaved(
        stages, [1] * count, turns, [1.0] * groups, sends, m, looped=False
    ).best()

    def busiest(cuts):
        own = [0.0] * groups
        for stage, (a, b, _) in enumerate(cuts.stages):
            assert a < b
            own[turns[stage]] += sum(seconds[a:b])
        return max(own)

    assert [a for a, _, _ in this_cuts.stages] == [0, *(b for _, b, _ in this_cuts.stages)][:-1]
    assert this_cuts.stages[-1][1] == len(seconds)
    assert busiest(this_cuts) <= busiest(plain)
    assert this_cuts.bottleneck_s * count / groups == pytest.approx(busiest(this_cuts))


def test_a_head_moves_a_layer_to_another_group():
    seconds = [1.0] * 8 + [1.0]  # eight layers and a head: two stages on each of two groups
    stages = [table(seconds, [0.0] * 9, [0.0] * 9)] * 4
    cuts = Interleaved(
        stages, [1] * 4, [0, 1, 1, 0], [1.0] * 2, np.zeros(9), 4, looped=False
    ).best()
    assert cuts.bottleneck_s == pytest.approx(2.5)


def brute_rounds(seconds, p, rounds):
    """The least sum of the rounds' longest stages, over all cuts."""
    size, best = len(seconds), np.inf
    for cuts in itertools.combinations(range(1, size), p * rounds - 1):
        ends = (0, *cuts, size)
        times = [sum(seconds[a:b]) for a, b in itertools.pairwise(ends)]
        best = min(best, sum(max(times[k : k + p]) for k in range(0, p * rounds, p)))
    return best


@settings(max_examples=60, deadline=None)
@given(st.lists(numbers, min_size=4, max_size=9), st.integers(2, 3), st.integers(1, 2))
def test_rounds_have_longest_stages_that_add_up_to_about_the_least(seconds, p, rounds):
    ends = round_ends([range_sums(np.array(seconds))] * p, rounds, len(seconds))
    best = brute_rounds(seconds, p, rounds)
    if not np.isfinite(best):
        assert ends is None
        return
    assert (ends[0], ends[-1], len(ends)) == (0, len(seconds), p * rounds + 1)
    times = [sum(seconds[a:b]) for a, b in itertools.pairwise(ends)]
    total = sum(max(times[k : k + p]) for k in range(0, p * rounds, p))
    assert best - 1e-9 <= total <= 1.25 * best  # even rounds are worth a little
    if rounds == 1:
        assert total == pytest.approx(best)


def test_one_round_runs_thriftier_where_groups_would_not_fit():
    layers = [1.0] * 8
    quick, thrifty = table(layers, layers, layers), table([1.5] * 8, [0.0] * 8, [0.0] * 8)
    stages = [joined([quick, thrifty])] * 8
    turns = [0, 1] * 4
    cuts = Interleaved(stages, [2.0] * 8, turns, [9.0, 9.0], np.zeros(8), 8, looped=True).best()
    again = [k for k, (_, _, way) in enumerate(cuts.stages) if way == 1]
    assert len(again) == 2
    assert again[0] // 2 == again[1] // 2  # both groups in the same round: nobody waits
    none = Interleaved(stages, [2.0] * 8, turns, [12.0, 12.0], np.zeros(8), 8, looped=True).best()
    assert all(way == 0 for _, _, way in none.stages)


def test_a_longer_end_of_the_step_can_decide_between_ways():
    once = range_sums(np.array([1.0, 1.0]))
    nothing = np.zeros_like(once)[None]
    quick = LayerRanges(once[None], nothing, nothing, nothing, nothing + 4.0)
    calm = LayerRanges(once[None] * 1.2, nothing, nothing, nothing, nothing)
    few = best_cuts([joined([quick, calm])], [1], [1.0], np.zeros(2), 2)
    many = best_cuts([joined([quick, calm])], [1], [1.0], np.zeros(2), 20)
    assert few.stages[0][2] == 1
    assert many.stages[0][2] == 0


def test_peaks_are_the_largest_of_each_range():
    peaks = range_peaks(np.array([3.0, 1.0, 2.0]))
    assert peaks[0, 3] == 3
    assert peaks[1, 3] == 2
    assert peaks[2, 2] == 0


@pytest.mark.parametrize("spec", ["8xA100", "2x8xA100", "12xV100"])
def test_equal_devices_are_given_to_every_number_of_stages_that_divides_them(spec):
    cluster = resolve(spec)
    outcome = device_groupings(cluster, 100)
    assert [len(groups) for groups in outcome] == divisors(cluster.num_devices)
    for groups in outcome:
        devices = [device for group in groups for device in group]
        assert devices == list(range(cluster.num_devices))


def test_stages_of_heterogeneous_devices_hold_one_kind_each():
    cluster = resolve("4xV100+8xP100")
    outcome = [groups for groups in device_groupings(cluster, 12) if len(groups) > 1]
    for groups in outcome:
        for group in groups:
            assert len({cluster.devices[device].kind for device in group}) == 1
    assert any(sum(map(len, groups)) == 12 for groups in outcome)
    assert any(cluster.devices[groups[0][0]].kind.startswith("P100") for groups in outcome)


def test_meshes_are_lines_and_rectangles_with_a_short_inner_axis():
    assert mesh_shapes(8, 8) == [(8,), (4, 2), (2, 4)]
    assert mesh_shapes(1, 8) == [(1,)]
    assert max(shape[-1] for shape in mesh_shapes(256, 8) if len(shape) == 2) == 8
    assert mesh_of((2, 4), range(8)).groups(1) == ((0, 1, 2, 3), (4, 5, 6, 7))


def test_groups_that_lie_alike_have_one_pattern():
    patterns = Patterns.of(resolve("4x8xA100"))
    assert patterns.inner_size == 8
    assert patterns.pattern(range(8)) == patterns.pattern(range(8, 16))
    assert patterns.pattern(range(8)) != patterns.pattern(range(4, 12))


def test_weights_follow_speed_and_divide_the_batch():
    cluster = resolve("4xV100+8xP100")
    kinds = [kind.name for kind in cluster.kinds]
    speed = dict(zip(kinds, (4.0, 1.0), strict=True))
    meshes = weighted_meshes(cluster, speed, 96)
    best = meshes[0].axes[0]
    assert set(best.weights[:4]) == {4}
    assert set(best.weights[4:]) == {1}
    for mesh in meshes:
        assert 96 % mesh.axes[0].parts == 0
    assert weighted_meshes(resolve("4xA100"), {}, 96) == []
    assert weighted_meshes(cluster, speed, 7) == []


@settings(max_examples=60, deadline=None)
@given(tiny_problems(most_segments=5), st.data())
def test_stages_moved_to_some_borders_keep_what_they_are_and_the_least_bottleneck(problem, data):
    solution = data.draw(st.sampled_from(list(itertools.islice(solutions(problem), 200)) or [None]))
    assume(solution is not None)
    n = problem.num_segments
    borders = data.draw(st.sets(st.integers(1, n - 1))) if n > 1 else set()
    moved = cuts_at(problem, solution, borders)
    inner = [stage.first for stage in moved.stages[1:]] if moved else []
    if len(solution.stages) - 1 > len(borders):
        assert moved is None  # too few borders for so many stages
        return
    assert moved is not None
    assert set(inner) <= borders
    kept = [(s.mesh, s.strategy, s.checkpointing) for s in moved.stages]
    assert kept == [(s.mesh, s.strategy, s.checkpointing) for s in solution.stages]
    chosen = itertools.combinations(sorted(borders), len(solution.stages) - 1)
    assert bottleneck(problem, moved) <= 1.4 * (1 + 1e-9) * min(
        bottleneck(problem, with_cuts(solution, (0, *cuts, n))) for cuts in chosen
    )


def with_cuts(solution, ends):
    """The same stages between other ends."""
    pairs = zip(solution.stages, itertools.pairwise(ends), strict=True)
    stages = tuple(stage._replace(first=a, end=b) for stage, (a, b) in pairs)
    return dataclasses.replace(solution, stages=stages)


def bottleneck(problem, solution):
    """The longest stage, with its part of what is done once."""
    schedule = problem.schedules[solution.schedule]
    times = solution.cell.num_microbatches * schedule.virtual_stages
    return max(cost.seconds + cost.tail / times for cost in stage_costs(problem, solution))
