import functools
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from contract import SearchContract
from hypothesis import strategies as st

from partita.problems import streams
from partita.problems.streams import (
    Conv,
    StreamsConstants,
    StreamsOp,
    StreamsProblem,
    StreamStage,
    stage_us,
)
from partita.search.base import Status, Stop
from partita.search.streams import SEARCHES
from partita.search.streams.brute import MAX_PART_OPS, BruteStreams, last_stages, schedules
from partita.search.streams.sequential import Sequential

DATA = Path(__file__).parent.parent / "data" / "streams"
RECORDED = json.loads((DATA / "recorded.json").read_bytes())
GPU = StreamsConstants(
    num_sms=80,
    peak_flop_per_us=1000.0,
    efficiency=0.5,
    bytes_per_us=500.0,
    launch_us=4.0,
    sync_us=3.0,
    alpha=0.01,
)


@st.composite
def tiny_problems(draw: st.DrawFn) -> StreamsProblem:
    """Up to six ops in one or two parts, convs that may be merged among them."""
    count = draw(st.integers(1, 5))
    ops = [StreamsOp("input", (), 0.0, 0.0)]
    times = st.sampled_from([0.0, 1.0, 5.0, 500.0]) | st.floats(0, 50)
    sizes = st.sampled_from([1, 2, 64, 70])
    for index in range(1, count + 1):
        preds = tuple(sorted(draw(st.sets(st.integers(0, index - 1), max_size=2))))
        if draw(st.booleans()):
            shape = Conv(3, 4, 4, draw(sizes), 4, 4, draw(sizes), 1, draw(st.sampled_from([1, 3])))
            ops.append(StreamsOp("conv", preds, draw(times), draw(times), "", (), '"k"', shape))
        else:
            ops.append(StreamsOp("op", preds, draw(times), draw(times)))
    split = draw(st.integers(0, count))
    everything = tuple(range(1, count + 1))
    return StreamsProblem(
        tuple(ops),
        tuple(part for part in (everything[:split], everything[split:]) if part),
        GPU,
        r=draw(st.none() | st.integers(1, 3)),
        s=draw(st.none() | st.integers(1, 3)),
    )


@pytest.mark.parametrize("search", SEARCHES.values(), ids=SEARCHES.keys())
class TestEverySearch(SearchContract):
    kind = streams
    oracle = BruteStreams()
    problems = tiny_problems()


def independent(*times: float) -> StreamsProblem:
    ops = tuple(StreamsOp("op", (), t_us, t_us / 10) for t_us in times)
    return StreamsProblem(ops, (tuple(range(len(ops))),), GPU)


def test_three_independent_ops_have_thirteen_schedules() -> None:
    problem = independent(10, 20, 30)
    items = list(schedules(problem, frozenset((0, 1, 2))))
    assert len(items) == len(set(items)) == 13  # the ways to rank three with ties


def test_a_chain_is_cut_in_every_way() -> None:
    ops = tuple(StreamsOp("op", (i - 1,) if i else (), 1.0, 0.1) for i in range(4))
    problem = StreamsProblem(ops, ((0, 1, 2, 3),), GPU)
    assert BruteStreams()(problem).evaluations == 2**3


def test_independent_ops_run_together() -> None:
    result = BruteStreams()(independent(10, 20, 30))
    assert result.status is Status.OPTIMAL
    assert result.objective == pytest.approx(30 * 1.02 + 3)
    assert result.solution is not None
    assert result.solution.parts == ((StreamStage(groups=((0,), (1,), (2,))),),)


def test_company_that_does_not_pay_is_avoided() -> None:
    result = BruteStreams()(independent(2, 2))
    assert result.objective == 4  # together: 2 * 1.01 + 3


@pytest.mark.parametrize(("pruning", "r", "s"), [("r=3 s=8", 3, 8), ("unpruned", None, None)])
def test_brute_force_reaches_the_recorded_optimum_of_squeezenet(
    pruning: str, r: int | None, s: int | None
) -> None:
    problem = streams.read(DATA / "squeezenet.json", r=r, s=s)
    result = BruteStreams()(problem)
    assert result.status is Status.OPTIMAL
    recorded = RECORDED["squeezenet"][pruning]["objective_us"]
    assert result.objective == pytest.approx(recorded, rel=1e-12)


def remembering(problem: StreamsProblem) -> Callable[[frozenset[int]], float]:
    """The best time for what is left, each set of ops gone through once."""

    @functools.cache
    def best(left: frozenset[int]) -> float:
        if not left:
            return 0.0
        return min(
            best(left.difference(last.ops)) + stage_us(problem, last)
            for last in last_stages(problem, left)
        )

    return best


@pytest.mark.parametrize(("pruning", "r", "s"), [("r=3 s=8", 3, 8), ("unpruned", None, None)])
def test_the_stages_tried_contain_the_recorded_optimum_of_inception(
    pruning: str, r: int | None, s: int | None
) -> None:
    problem = streams.read(DATA / "inception_v3.json", r=r, s=s)
    best = remembering(problem)
    total = sum(best(frozenset(part)) for part in problem.parts)
    recorded = RECORDED["inception_v3"][pruning]["objective_us"]
    assert total == pytest.approx(recorded, rel=1e-12)


@pytest.mark.parametrize(("part", "count"), [(0, 44), (4, 229), (9, 3488), (12, 1)])
def test_every_schedule_of_a_small_part_of_inception_is_tried_once(part: int, count: int) -> None:
    problem = streams.read(DATA / "inception_v3.json", r=3, s=8)
    left = frozenset(problem.parts[part])
    items = list(schedules(problem, left))
    assert len(items) == len(set(items)) == count
    shortest = min(sum(stage_us(problem, stage) for stage in stages) for stages in items)
    assert shortest == pytest.approx(remembering(problem)(left), rel=1e-12)


def test_brute_force_cut_short_completes_the_rest_one_by_one() -> None:
    problem = streams.read(DATA / "squeezenet.json", r=3, s=8)
    part, full = BruteStreams()(problem, Stop(evaluations=160)), BruteStreams()(problem)
    assert part.status is Status.STOPPED
    assert part.solution is not None
    assert full.solution is not None
    assert part.solution.parts[0] == full.solution.parts[0]
    assert all(len(stage.ops) == 1 for stage in part.solution.parts[-2])


def test_a_part_too_long_for_brute_force_is_said_to_be() -> None:
    ops = tuple(StreamsOp("op", (), 1.0, 0.1) for _ in range(MAX_PART_OPS + 1))
    problem = StreamsProblem(ops, (tuple(range(len(ops))),), GPU)
    result = BruteStreams()(problem)
    assert result.status is Status.STOPPED
    assert result.why == "a part has 201 ops; schedules of at most 200 are tried"


def test_the_longest_part_is_not_too_deep() -> None:
    part = tuple(range(MAX_PART_OPS))
    free = tuple(StreamsOp("op", (), 1.0, 0.1) for _ in part)
    result = BruteStreams()(StreamsProblem(free, (part,), GPU), Stop(evaluations=50))
    assert result.status is Status.STOPPED
    linked = tuple(StreamsOp("op", (i - 1,) if i else (), 1.0, 0.1) for i in part)
    result = BruteStreams()(StreamsProblem(linked, (part,), GPU, r=1))
    assert (result.status, result.evaluations, result.objective) == (Status.OPTIMAL, 1, 200)


def test_many_ops_that_cannot_be_merged_do_not_hang() -> None:
    ops = tuple(StreamsOp("op", (), 1.0, 0.1) for _ in range(60))
    problem = StreamsProblem(ops, (tuple(range(60)),), GPU, r=1, s=1)
    result = BruteStreams()(problem, Stop(evaluations=1000))
    assert result.evaluations == 1000


def test_sequential_takes_the_sum_of_all_times() -> None:
    problem = streams.read(DATA / "squeezenet.json")
    result = Sequential()(problem)
    assert result.status is Status.FEASIBLE
    assert result.objective == pytest.approx(sum(op.t_us for op in problem.ops))
