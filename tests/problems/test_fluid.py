import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partita.errors import ProblemError
from partita.problems.streams import (
    Load,
    StreamsConstants,
    StreamsOp,
    StreamsProblem,
    StreamsSolution,
    check,
    evaluate,
    free_bound,
    run_streams,
)
from partita.search.streams.barrier_free import BarrierFree

GPU = StreamsConstants(10, 100.0, 0.5, 10.0, 4.0, 3.0, 0.0)


def problem(*ops, s=None, alpha=0.0):
    constants = dataclasses.replace(GPU, alpha=alpha)
    made = tuple(StreamsOp("op", preds, t, w) for t, w, preds in ops)
    return StreamsProblem(made, (tuple(range(len(ops))),), constants, s=s)


def end_us(loads, streams, sync_us=0.0, alpha=0.0):
    end_us = run_streams(dict(enumerate(loads)), streams, sync_us, alpha)
    return max(end for _, end in end_us.values())


def test_two_small_ops_run_in_the_time_of_the_longer():
    pair = [Load(10, 1, ()), Load(20, 2, ())]
    assert end_us(pair, [[0], [1]]) == 20
    assert end_us(pair, [[0, 1]]) == 30


def test_two_ops_that_fill_the_gpu_share_it():
    pair = [Load(10, 10, ()), Load(10, 10, ())]
    assert end_us(pair, [[0], [1]]) == 20


def test_what_is_left_runs_alone_at_full_speed():
    # together until both have done 10 of solo time, at half speed; then 20 more by itself
    assert end_us([Load(10, 10, ()), Load(30, 30, ())], [[0], [1]]) == pytest.approx(40)


def test_company_costs_alpha_for_each_further_op():
    assert end_us([Load(10, 1, ()), Load(10, 1, ())], [[0], [1]], alpha=0.1) == pytest.approx(11)


def test_waiting_for_another_stream_takes_a_pause():
    chain = [Load(10, 1, ()), Load(5, 1, (0,))]
    assert end_us(chain, [[0], [1]], sync_us=3) == 18
    assert end_us(chain, [[0, 1]], sync_us=3) == 15


def test_an_op_with_more_work_than_time_takes_its_work():
    assert end_us([Load(1, 8, ())], [[0]]) == 8
    assert end_us([Load(0, 0, ())], [[0]]) == 0


def test_streams_that_wait_for_each_other_never_end():
    outcome = problem((1, 1, ()), (1, 1, (0,)), (1, 1, ()), (1, 1, (2,)))
    circle = StreamsSolution(streams=((1, 2), (3, 0)))
    assert check(outcome, circle) == tuple(f"op {op} waits for itself" for op in range(4))
    with pytest.raises(ProblemError, match="op 0 waits for itself"):
        evaluate(outcome, circle)


def test_every_op_runs_once_on_no_more_streams_than_allowed():
    two = problem((1, 1, ()), (1, 1, ()), s=1)
    assert check(two, StreamsSolution(streams=((0, 0),))) == (
        "op 1 is not scheduled",
        "op 0 is scheduled 2 times",
    )
    assert check(two, StreamsSolution(streams=((0,), (1,)))) == (
        "there are 2 streams, more than s = 1",
    )


def test_the_form_without_barriers_goes_both_ways():
    answer = StreamsSolution(streams=((0, 2), (1,)))
    assert answer.to_json() == {"streams": [[0, 2], [1]]}
    assert StreamsSolution.from_json(answer.to_json()) == answer


@st.composite
def problems(draw):
    ops = []
    times = st.floats(0.1, 50)
    for index in range(draw(st.integers(1, 9))):
        preds = draw(st.sets(st.integers(0, index - 1), max_size=3)) if index else set()
        ops.append((draw(times), draw(times), tuple(sorted(preds))))
    return problem(*ops, s=draw(st.none() | st.integers(1, 3)), alpha=draw(st.floats(0, 0.1)))


@given(case=problems())
def test_no_schedule_without_barriers_is_below_its_bound(case):
    answer = BarrierFree(tries=5)(case)
    assert answer.objective >= free_bound(case) * (1 - 1e-9)
    alone = StreamsSolution(streams=(tuple(range(len(case.ops))),))
    assert answer.objective <= evaluate(case, alone) * (1 + 1e-9)


def test_a_wide_graph_is_spread_over_streams():
    wide = problem(*((10, 1, ()) for _ in range(8)))
    result = BarrierFree()(wide)
    assert result.objective == pytest.approx(10)
    assert len(result.solution.streams) == 8
