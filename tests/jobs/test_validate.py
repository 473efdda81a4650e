"""Predictions against measured runs: the numbers follow their definitions."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partita.forecast import forecast
from partita.jobs.published import PublishedRun, parse_rows, read_rows
from partita.jobs.validate import Checked, Validation, regret_of, spearman, validate
from partita.report.validation import validation_json, validation_text
from partita.report.validation_page import validation_page

FILE = Path(__file__).parents[1] / "data" / "validate" / "rows.json"


@pytest.fixture(scope="module")
def rows() -> dict[str, PublishedRun]:
    return {row.id: row for row in read_rows(FILE)[0]}


@pytest.fixture(scope="module")
def validation() -> Validation:
    return validate(*read_rows(FILE))


def measured(row: PublishedRun, seconds: float | None, **fields: object) -> PublishedRun:
    return replace(row, measured_s=seconds, **fields)


def predicted_s(row: PublishedRun) -> float:
    return forecast(row.model, row.machine, row.strategy).step_s


def fitted(row: PublishedRun) -> PublishedRun:
    """The row under an id that the fit looks at."""
    return replace(row, id="fitted-0")


# errors


def test_error_is_predicted_over_measured_minus_1(rows):
    row = rows["vtrain-single-000"]
    right_s = predicted_s(row)
    group = validate([measured(row, right_s / 1.2), measured(row, right_s / 0.9)]).groups[0]
    assert group.both.n == 2
    assert group.both.mape == pytest.approx(15)
    assert group.both.bias == pytest.approx(5)


def test_fitted_and_left_out_rows_are_told_apart(validation):
    total = validation.total
    assert total.fitted.n + total.left_out.n == total.both.n == 23
    both = total.fitted.n * total.fitted.mape + total.left_out.n * total.left_out.mape
    assert both / total.both.n == pytest.approx(total.both.mape)


def test_every_row_is_compared_or_skipped_with_a_reason(validation):
    assert len(validation.checked) + len(validation.skipped) == 33
    assert sum(count for _, count in validation.reasons) == len(validation.skipped) == 9
    assert sum(group.skipped for group in validation.groups) == 9
    assert validation.reasons[0] == ("has no time and no memory that is compared", 2)


def test_a_group_of_skipped_rows_alone_has_no_error(validation):
    group = next(group for group in validation.groups if group.name == "megatron-2020")
    assert (group.both.n, group.both.mape, group.skipped) == (0, None, 1)


def test_nothing_to_compare_is_an_answer():
    empty = validate([])
    assert empty.total.both.n == 0
    assert empty.coverage == ()
    assert "all" in validation_text(empty, 3)
    assert validation_json(empty, 3)["memory"]["verdicts"]["right"] is None
    assert "<h1>" in validation_page(empty, "none.json", 3)


def test_the_worst_rows_come_first(validation):
    worst = validation.worst(2)
    assert all(len(some) <= 2 for some in worst.values())
    for some in worst.values():
        sizes = [abs(one.error) for one in some]
        assert sizes == sorted(sizes, reverse=True)
    largest = max(validation.checked, key=lambda one: abs(one.error or 0))
    assert largest in worst[largest.row.group]


@given(st.lists(st.integers(0, 6), min_size=2, max_size=8), st.randoms())
def test_spearman_of_ranks_is_that_of_any_rising_function(values, random):
    first = [float(value) for value in values]
    second = [math.exp(value) for value in values]
    if len(set(values)) < 2:
        assert spearman(first, second) is None
        return
    assert spearman(first, second) == pytest.approx(1)
    assert spearman(first, [-value for value in second]) == pytest.approx(-1)
    random.shuffle(second)
    assert -1 - 1e-9 <= (spearman(first, second) or 0) <= 1 + 1e-9


def test_spearman_without_ties_is_the_formula_of_squared_distances():
    first, second = [1.0, 2.0, 3.0, 4.0, 5.0], [2.0, 1.0, 4.0, 3.0, 5.0]
    squares = sum((a - b) ** 2 for a, b in zip(first, second, strict=True))
    assert spearman(first, second) == pytest.approx(1 - 6 * squares / (5 * 24))


# regret


choices = st.lists(
    st.tuples(st.sampled_from([1.0, 2.0, 3.0]), st.floats(0.1, 10)), min_size=1, max_size=5
)


@given(choices)
def test_regret_is_never_below_zero_and_none_where_predictions_rank_right(pairs):
    assert regret_of(pairs) >= -1e-9
    assert regret_of([(seconds, seconds) for _, seconds in pairs]) == pytest.approx(0)


def test_regret_is_the_picked_time_over_the_best():
    assert regret_of([(1.0, 12.0), (2.0, 10.0)]) == pytest.approx(20)
    assert regret_of([(2.0, 12.0), (1.0, 10.0)]) == 0
    assert regret_of([(1.0, 12.0), (1.0, 10.0)]) == pytest.approx(10)  # as good as a coin


def test_regret_counts_choices_among_strategies_of_one_model_machine_and_batch(rows):
    row = rows["vtrain-single-000"]
    other = replace(row, strategy=replace(row.strategy, micro_batch=1))
    better, worse = sorted((row, other), key=predicted_s)
    regret = validate([measured(better, 3.0), measured(worse, 2.0)]).regret
    assert [(one.name, one.groups) for one in regret] == [("vtrain-single", 1)]
    assert (regret[0].mean, regret[0].worst) == (pytest.approx(50), pytest.approx(50))
    assert regret[0].random == pytest.approx(25)
    elsewhere = replace(other, model=replace(row.model, layers=12))
    assert validate([row, elsewhere]).regret == ()


def test_one_strategy_that_was_measured_twice_is_no_choice(rows):
    row = rows["vtrain-single-000"]
    assert validate([measured(row, 1.0), measured(row, 2.0)]).regret == ()


def test_zero_3_meets_tensor_and_pipeline_parallelism_per_device_and_sequence(validation):
    (duel,) = validation.duels
    assert (duel.sharded.row.id, duel.split.row.id) == (
        "megatron-sc21-t2-003", "megatron-sc21-t2-009",
    )  # fmt: skip
    assert duel.sharded.device_seconds[1] == pytest.approx(255.5319 * 640 / 2560)
    assert duel.picked is duel.better is duel.split
    assert duel.regret == 0


def test_a_machine_of_another_size_is_no_duel(rows):
    sharded, split = rows["megatron-sc21-t2-003"], rows["megatron-sc21-t2-009"]
    larger = replace(split, machine=replace(split.machine, num_devices=2240),
                     strategy=replace(split.strategy, dp=8))  # fmt: skip
    assert validate([sharded, larger]).duels == ()


# intervals


def test_coverage_is_the_part_of_measured_times_inside_the_interval(rows):
    row = fitted(rows["vtrain-single-000"])
    low, high = forecast(row.model, row.machine, row.strategy).interval_s
    inside = [measured(row, seconds) for seconds in (low * 1.01, high * 0.99)]
    outside = [measured(row, seconds) for seconds in (low * 0.99, high * 1.01)]
    coverage = validate([*inside, *outside]).coverage
    assert [one.name for one in coverage] == ["all", "A100-80GB-SXM"]
    assert (coverage[0].fitted_inside, coverage[0].fitted, coverage[0].left_out) == (2, 4, 0)


def test_one_layer_has_no_interval_and_no_verdict_on_memory(rows):
    alone = validate([rows["megatron-seqsel-t4-layer-000"]])
    assert alone.total.both.n == 1
    assert alone.coverage == ()
    assert alone.memory.ran == 0


# memory


def test_memory_errors_leave_the_workspace_out_where_frameworks_report(rows):
    row = rows["simumax-b200-000"]
    parts = forecast(row.model, row.machine, row.strategy).memory
    exact = validate([replace(row, memory_bytes=parts.allocated)]).memory.total
    assert exact.mape == pytest.approx(0)
    whole = replace(row, memory_bytes=parts.total, with_workspace=True)
    assert validate([whole]).memory.total.mape == pytest.approx(0)
    twice = validate([replace(row, memory_bytes=parts.allocated / 1.5)]).memory.total
    assert twice.bias == pytest.approx(50)


def test_what_ran_must_fit_and_what_ended_out_of_memory_must_not(rows):
    fits, large = rows["vtrain-single-000"], rows["own-oom"]
    memory = validate([fits, large]).memory
    assert (memory.ran, memory.ran_right) == (1, 1)
    assert (memory.out_of_memory, memory.out_of_memory_right) == (1, 1)
    assert memory.share_right == 100
    swapped = [replace(fits, out_of_memory=True), replace(large, out_of_memory=False)]
    memory = validate(swapped).memory
    assert (memory.ran_right, memory.out_of_memory_right) == (0, 0)
    assert memory.wrong == ("own-oom", "vtrain-single-000")
    assert memory.share_right == 0


def test_a_verdict_stays_open_where_what_is_not_printed_decides_it(validation, rows):
    assert validation.memory.open == (
        ("the source does not print the micro-batch", 1),
        ("the source does not print what is recomputed", 1),
    )
    row = rows["nvidia-megatron-bridge-001"]  # fits with recomputing alone
    stated = validate([replace(row, assumed=())]).memory
    assert (stated.ran, stated.ran_right) == (1, 0)
    hopeless = replace(row, strategy=replace(row.strategy, micro_batch=64))
    assert validate([hopeless]).memory.wrong == (row.id,)


def test_runs_of_mosaic_on_small_devices_fit(rows):
    """The loss of llm-foundry never holds logits in f32: 11 GB less in this run."""
    row = rows["mosaic-mpt-200"]
    assert validate([row]).memory.ran_right == 1
    plain = replace(row, strategy=replace(row.strategy, fused_loss=False))
    assert validate([plain]).memory.ran_right == 0


# text, JSON


def test_the_text_has_all_sections(validation):
    text = validation_text(validation, 1)
    for words in (
        "rank corr.", "Regret", "ZeRO-3 against tensor and pipeline parallelism", "Memory",
        "1 of 1 that ended out of memory are predicted not to", "80 % interval",
        "Largest errors by group", "skipped because",
    ):  # fmt: skip
        assert words in text


def test_json_says_groups_regret_memory_and_coverage_in_per_cent(validation):
    answer = validation_json(validation, 1)
    json.dumps(answer, allow_nan=False)
    assert answer["format"] == "partita/validation@1"
    group = answer["groups"]["zero-bubble-t4"]
    assert {"n", "mape", "bias", "spearman", "skipped"} <= set(group)
    assert set(answer["regret"]["vtrain-single"]) == {"mean", "worst", "groups", "random"}
    assert answer["memory"]["n"] == 8
    assert answer["memory"]["verdicts"]["right"] == 100
    assert answer["coverage"]["interval"] == 80
    assert answer["coverage"]["kinds"]["B200"]["n"] == 3
    assert answer["zero3_against_tp_pp"][0]["picked"] == "tp_pp"
    assert answer["skipped"]["is not a table"] == 1


def test_rows_that_no_forecast_ends_for_are_skipped(rows, monkeypatch):
    from partita.jobs import validate as module

    row = rows["vtrain-single-000"]
    endless = replace(forecast(row.model, row.machine, row.strategy), step_s=math.inf)
    monkeypatch.setattr(module, "forecast", lambda *_: endless)
    answer = validate([row])
    assert answer.checked == ()
    assert answer.reasons == (("the forecast is no finite time", 1),)


def test_a_row_without_a_time_has_no_error(rows):
    checked = validate([rows["own-oom"]]).checked[0]
    assert isinstance(checked, Checked)
    assert checked.error is None
    assert checked.covered is None


def test_what_one_row_says_does_not_hang_on_the_others():
    raw = json.loads(FILE.read_text())["rows"]
    together = {one.row.id: one.predicted_s for one in validate(*parse_rows(raw)).checked}
    for part in raw:
        for one in validate(*parse_rows([part])).checked:
            assert together[one.row.id] == one.predicted_s
