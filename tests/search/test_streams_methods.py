import dataclasses
import itertools
import json
import random
import time
from pathlib import Path

import numpy as np
import pytest
from contract import SearchContract, close, not_above
from hypothesis import given, settings
from hypothesis import strategies as st

from partita.problems import streams
from partita.problems.streams import (
    Conv,
    StreamsConstants,
    StreamsOp,
    StreamsProblem,
    StreamStage,
    check,
    evaluate,
    stage_us,
)
from partita.search.base import Status, Stop
from partita.search.streams import units as units_module
from partita.search.streams.brute import BruteStreams, schedules
from partita.search.streams.chains import fewest_chains, reachable
from partita.search.streams.exact import ExactStreams
from partita.search.streams.greedy import GreedyStreams, by_level
from partita.search.streams.ios import Ios
from partita.search.streams.lazy import Lazy
from partita.search.streams.piece import SweepPiece, build, edges
from partita.search.streams.sweep import listed, rules, solve
from partita.search.streams.units import cuts
from partita.search.streams.windows import shorter
from tests.quickness import least_cpu_s

DATA = Path(__file__).parent.parent / "data" / "streams"
RECORDED = json.loads((DATA / "recorded.json").read_bytes())
PRUNINGS = [("r=3 s=8", 3, 8), ("unpruned", None, None)]
MODELS = ["squeezenet", "inception_v3"]
GPU = StreamsConstants(80, 1000.0, 0.5, 500.0, 4.0, 3.0, 0.01)
few = settings(max_examples=40, deadline=None)


@st.composite
def problems(draw: st.DrawFn, largest: int = 8, sensible: bool = False) -> StreamsProblem:
    """Ops with up to three producers in up to three parts; w <= t where `sensible`."""
    count = draw(st.integers(1, largest))
    times = st.sampled_from([0.0, 1.0, 5.0, 500.0]) | st.floats(0, 50)
    sizes = st.sampled_from([1, 2, 64, 70])
    ops = [StreamsOp("input", (), 0.0, 0.0)]
    for index in range(1, count + 1):
        preds = tuple(sorted(draw(st.sets(st.integers(0, index - 1), max_size=3))))
        t_us, w_us = draw(times), draw(times)
        if sensible:
            t_us, w_us = max(t_us, w_us), min(t_us, w_us)
        conv, key = None, None
        if draw(st.booleans()):
            conv, key = Conv(3, 4, 4, draw(sizes), 4, 4, draw(sizes), 1), '"k"'
        ops.append(StreamsOp("op", preds, t_us, w_us, "", (), key, conv))
    ends = sorted({*draw(st.sets(st.integers(1, count), max_size=2)), count})
    parts = [tuple(range(a + 1, b + 1)) for a, b in itertools.pairwise([0, *ends])]
    limits = st.none() | st.integers(1, 4)
    return StreamsProblem(tuple(ops), tuple(parts), GPU, r=draw(limits), s=draw(limits))


def random_wiring(count: int, width: int, seed: int = 0) -> StreamsProblem:
    """Ops that take from a few of the last `width` ops, like a randomly wired network."""
    rng = random.Random(seed)
    ops = [StreamsOp("input", (), 0.0, 0.0)]
    for index in range(1, count + 1):
        near = range(max(0, index - width), max(1, index - 1))
        preds = tuple(sorted(set(rng.choices(near, k=2))))
        t_us = rng.uniform(5, 30)
        ops.append(StreamsOp("op", preds, t_us, t_us * rng.uniform(0.05, 0.5)))
    return StreamsProblem(tuple(ops), (tuple(range(1, count + 1)),), GPU, r=3, s=8)


def chain_of(*times: float) -> StreamsProblem:
    ops = tuple(StreamsOp("op", (i - 1,) if i else (), t, t / 10) for i, t in enumerate(times))
    return StreamsProblem(ops, (tuple(range(len(ops))),), GPU)


def in_one_part(problem: StreamsProblem) -> StreamsProblem:
    everything = tuple(sorted(op for part in problem.parts for op in part))
    return dataclasses.replace(problem, parts=(everything,))


def piece_of(problem: StreamsProblem) -> SweepPiece:
    piece = build(problem, tuple(sorted(problem.parts[0])))
    assert piece is not None
    return piece


@pytest.mark.parametrize(
    "search",
    [ExactStreams(), Ios(), Lazy(), Lazy(overhead=1.0)],
    ids=["exact", "ios", "lazy", "knowing"],
)
class TestEveryProof:
    @few
    @given(problem=problems(largest=6))
    def test_it_meets_brute_force(
        self, search: ExactStreams | Ios | Lazy, problem: StreamsProblem
    ) -> None:
        result, expected = search(problem), BruteStreams()(problem)
        assert result.status is expected.status is Status.OPTIMAL
        assert result.objective is not None
        assert expected.objective is not None
        assert close(result.objective, expected.objective)

    @pytest.mark.parametrize("model", MODELS)
    @pytest.mark.parametrize(("pruning", "r", "s"), PRUNINGS)
    def test_it_reaches_the_recorded_optimum(
        self,
        search: ExactStreams | Ios | Lazy,
        model: str,
        pruning: str,
        r: int | None,
        s: int | None,
    ) -> None:
        problem = streams.read(DATA / f"{model}.json", r=r, s=s)
        result = search(problem)
        assert result.status is Status.OPTIMAL
        assert result.objective == pytest.approx(
            RECORDED[model][pruning]["objective_us"], rel=1e-13
        )
        assert result.solution is not None
        assert check(problem, result.solution) == ()


@pytest.mark.parametrize("search", [Lazy(overhead=1.0)], ids=["knowing"])
class TestLazyThatKnowsTheFormula(SearchContract):
    kind = streams
    oracle = BruteStreams()
    problems = problems(largest=5)


@few
@given(problem=problems(largest=9))
def test_exact_meets_the_published_search(problem: StreamsProblem) -> None:
    exact, ios = ExactStreams()(problem), Ios()(problem)
    assert exact.objective is not None
    assert ios.objective is not None
    assert close(exact.objective, ios.objective)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("pruning", "r", "s"), PRUNINGS)
def test_states_and_transitions_are_those_recorded(
    model: str, pruning: str, r: int | None, s: int | None
) -> None:
    problem = streams.read(DATA / f"{model}.json", r=r, s=s)
    states = transitions = 0
    for part in problem.parts:
        piece = build(problem, tuple(sorted(part)))
        assert piece is not None
        answer = solve(piece, rules(problem.constants, r, s), lambda: False)
        assert answer is not None
        states += answer.states
        transitions += answer.transitions + answer.singles  # a merge of one op is recorded too
    recorded = RECORDED[model][pruning]
    assert (states, transitions) == (recorded["states"], recorded["transitions"])


@few
@given(problem=problems(largest=9))
def test_a_list_of_sets_gives_what_the_table_gives(problem: StreamsProblem) -> None:
    piece = build(problem, problem.parts[0])
    assert piece is not None
    given_rules = rules(problem.constants, problem.r, problem.s)
    states = listed(piece, lambda: False, 1024)
    assert states is not None
    dense = solve(piece, given_rules, lambda: False)
    sparse = solve(piece, given_rules, lambda: False, states=states)
    assert dense == sparse


def test_more_sets_than_may_be_listed_are_refused() -> None:
    ops = tuple(StreamsOp("op", (), 1.0, 0.1) for _ in range(12))
    piece = piece_of(StreamsProblem(ops, (tuple(range(12)),), GPU))
    assert listed(piece, lambda: False, 4095) is None
    outcome = listed(piece, lambda: False, 4096)
    assert outcome is not None
    assert outcome[0].tolist() == list(range(4096))


@few
@given(problem=problems(largest=10))
def test_chains_hold_every_op_once_and_are_as_many_as_the_widest_set(
    problem: StreamsProblem,
) -> None:
    ops = tuple(op for part in problem.parts for op in part)
    reach = reachable(*edges(problem, ops))
    chain = fewest_chains(reach)
    for one, other in itertools.combinations(range(len(ops)), 2):
        if chain[one] == chain[other]:
            assert reach[one, other]
    widest = max(
        size
        for size in range(1, len(ops) + 1)
        for chosen in itertools.combinations(range(len(ops)), size)
        if not any(reach[a, b] for a, b in itertools.combinations(chosen, 2))
    )
    assert len(set(chain.tolist())) == widest


@few
@given(problem=problems(largest=10))
def test_a_cut_is_where_everything_later_follows_from_everything_earlier(
    problem: StreamsProblem,
) -> None:
    ops = tuple(op for part in problem.parts for op in part)
    reach = reachable(*edges(problem, ops))
    expected = [k for k in range(1, len(ops)) if np.all(reach[:k, k:])]
    assert cuts(problem, ops) == expected


@few
@given(problem=problems(largest=7, sensible=True))
def test_cutting_loses_nothing_where_no_op_has_more_work_than_time(
    problem: StreamsProblem,
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(units_module, "WORTH_CUTTING", 0)
        cut = ExactStreams()(problem)
    expected = Ios()(problem)
    assert cut.status is Status.OPTIMAL
    assert cut.objective is not None
    assert expected.objective is not None
    assert close(cut.objective, expected.objective)
    assert cut.solution is not None
    assert check(problem, cut.solution) == ()


@few
@given(problem=problems(largest=7))
def test_ops_with_more_work_than_time_are_not_cut_apart(problem: StreamsProblem) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(units_module, "WORTH_CUTTING", 0)
        cut = ExactStreams()(problem)
    expected = Ios()(problem)
    assert cut.objective is not None
    assert expected.objective is not None
    assert close(cut.objective, expected.objective)


@pytest.mark.parametrize(("pruning", "r", "s"), PRUNINGS)
def test_a_model_without_parts_is_cut_into_some(pruning: str, r: int | None, s: int | None) -> None:
    problem = in_one_part(streams.read(DATA / "inception_v3.json", r=r, s=s))
    assert len(units_module.units(problem)) > 10
    result = ExactStreams()(problem)
    assert result.status is Status.OPTIMAL
    recorded = RECORDED["inception_v3"][pruning]["objective_us"]
    assert result.objective == pytest.approx(recorded, rel=1e-13)


@few
@given(problem=problems(largest=9, sensible=True))
def test_windows_make_nothing_worse(problem: StreamsProblem) -> None:
    problem = in_one_part(problem)
    before = by_level(problem, problem.parts[0])
    after = shorter(problem, before, lambda: False)
    solution = streams.StreamsSolution((after,))
    least = Ios()(problem).objective
    assert least is not None
    assert not_above(evaluate(problem, solution), sum(stage_us(problem, each) for each in before))
    assert not_above(least, evaluate(problem, solution))


@pytest.mark.parametrize("search", [ExactStreams(), Lazy(overhead=1.0)], ids=["exact", "lazy"])
def test_what_is_too_large_to_prove_gets_a_good_schedule_and_a_bound(
    search: ExactStreams | Lazy,
) -> None:
    problem = random_wiring(300, 40)
    result = search(problem)
    greedy = GreedyStreams()(problem)
    assert result.status is Status.FEASIBLE
    assert "too many schedules to prove one" in result.why
    assert result.solution is not None
    assert check(problem, result.solution) == ()
    assert result.objective is not None
    assert greedy.objective is not None
    assert result.lower_bound is not None
    assert result.lower_bound < result.objective < greedy.objective


def test_a_randomly_wired_block_is_solved_in_half_a_second() -> None:
    problem = random_wiring(33, 10)
    result = ExactStreams()(problem)
    assert least_cpu_s(lambda: ExactStreams()(problem), 0.5) < 0.5
    assert result.status is Status.OPTIMAL


def test_many_independent_ops_stop_in_time_with_a_good_schedule() -> None:
    ops = tuple(StreamsOp("op", (), 10.0 + i, 1.0) for i in range(20))
    problem = StreamsProblem(ops, (tuple(range(20)),), GPU)
    ExactStreams()(chain_of(1, 2))  # compiled
    begin = time.process_time()
    result = ExactStreams()(problem, Stop(time_s=0.3))
    assert time.process_time() - begin < 2
    assert result.status is Status.STOPPED
    assert result.objective == pytest.approx(29 * 1.19 + 3)


def test_a_level_has_no_more_groups_than_allowed() -> None:
    ops = tuple(StreamsOp("op", (), 10.0, 1.0) for _ in range(5))
    problem = StreamsProblem(ops, (tuple(range(5)),), GPU, s=2)
    result = GreedyStreams()(problem)
    assert result.solution is not None
    assert [len(stage.groups) for stage in result.solution.parts[0]] == [2, 2, 1]
    assert result.status is Status.FEASIBLE


def test_levels_follow_the_last_producer() -> None:
    ops = (
        StreamsOp("op", (), 1.0, 0.1),
        StreamsOp("op", (0,), 1.0, 0.1),
        StreamsOp("op", (0,), 1.0, 0.1),
        StreamsOp("op", (0, 1), 1.0, 0.1),
    )
    problem = StreamsProblem(ops, ((0, 1, 2, 3),), GPU)
    assert by_level(problem, (0, 1, 2, 3)) == (
        StreamStage(groups=((0,),)),
        StreamStage(groups=((1,), (2,))),
        StreamStage(groups=((3,),)),
    )


def test_equal_parts_are_swept_once_and_named_apart() -> None:
    times = (10.0, 20.0, 30.0)
    ops = tuple(StreamsOp("op", (), t, t / 10) for t in times * 2)
    problem = StreamsProblem(ops, ((0, 1, 2), (3, 4, 5)), GPU)
    first, second = (build(problem, part) for part in problem.parts)
    assert first is not None
    assert second is not None
    assert first.key == second.key
    result = ExactStreams()(problem)
    assert result.solution is not None
    assert result.solution.parts == (
        (StreamStage(groups=((0,), (1,), (2,))),),
        (StreamStage(groups=((3,), (4,), (5,))),),
    )


def test_lazy_measures_each_kind_of_stage_once() -> None:
    ops = tuple(StreamsOp("op", (), 10.0, 1.0) for _ in range(6))
    problem = StreamsProblem(ops, ((0, 1), (2, 3), (4, 5)), GPU)
    asked: list[StreamStage] = []

    def measure(problem: StreamsProblem, stage: StreamStage) -> float:
        asked.append(stage)
        return stage_us(problem, stage)

    result = Lazy(measure)(problem)
    assert result.status is Status.OPTIMAL
    assert asked == [StreamStage(groups=((0,),)), StreamStage(groups=((0,), (1,)))]
    assert result.evaluations == 2


def test_lazy_finds_the_optimum_of_what_it_measures() -> None:
    def measure(problem: StreamsProblem, stage: StreamStage) -> float:
        """Company costs far more than the problem says."""
        return stage_us(problem, stage) * (1.5 if len(stage.groups) > 1 else 1.0)

    ops = tuple(StreamsOp("op", (), t, t / 10) for t in (10.0, 10.5, 30.0, 31.0))
    problem = StreamsProblem(ops, ((0, 1, 2, 3),), GPU)
    result = Lazy(measure)(problem)
    everything = schedules(problem, frozenset(problem.parts[0]))
    times = [sum(measure(problem, stage) for stage in stages) for stages in everything]
    assert result.objective == pytest.approx(min(times))


def test_lazy_measures_a_fraction_of_the_stages_of_inception() -> None:
    problem = streams.read(DATA / "inception_v3.json", r=3, s=8)
    all_stages = Ios()(problem).evaluations
    assert 3 * Lazy()(problem).evaluations < all_stages
    assert 30 * Lazy(overhead=1.0)(problem).evaluations < all_stages


def test_exact_cut_short_still_has_every_op() -> None:
    problem = streams.read(DATA / "inception_v3.json", r=3, s=8)
    full, part = ExactStreams()(problem), ExactStreams()(problem, Stop(evaluations=4))
    assert part.status is Status.STOPPED
    assert part.solution is not None
    assert check(problem, part.solution) == ()
    assert full.objective is not None
    assert part.objective is not None
    assert part.lower_bound is not None
    assert part.lower_bound < full.objective < part.objective


def test_two_long_chains_fit_one_table() -> None:
    ops = tuple(StreamsOp("op", (i - 2,) if i > 1 else (), 10.0, 1.0) for i in range(200))
    problem = StreamsProblem(ops, (tuple(range(200)),), GPU, r=3)
    result = ExactStreams()(problem)
    assert result.status is Status.OPTIMAL
    stages = 34  # 100 ops of a chain, at most three in a group
    assert result.objective == pytest.approx(1000 * 1.01 + 3 * stages)


def test_the_published_search_stops_in_time_in_a_long_part() -> None:
    ops = tuple(StreamsOp("op", (i - 2,) if i > 1 else (), 10.0, 1.0) for i in range(600))
    problem = StreamsProblem(ops, (tuple(range(600)),), GPU)
    begin = time.process_time()
    result = Ios()(problem, Stop(time_s=0.2))
    assert time.process_time() - begin < 2
    assert result.status is Status.STOPPED
    assert result.objective == pytest.approx(6000)
    assert result.lower_bound == pytest.approx(3000)
