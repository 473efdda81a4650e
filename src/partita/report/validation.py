"""A validation as tables for the terminal and the page, and as JSON."""

import statistics
from collections.abc import Sequence

from partita import units
from partita.jobs.validate import Checked, Coverage, Duel, Errors, GroupErrors, Validation

GROUPS = (
    "group", "rows", "MAPE %", "bias %", "rank corr.", "fitted", "MAPE %", "left out", "MAPE %",
    "skipped",
)  # fmt: skip
REGRETS = ("group", "choices", "mean %", "worst %", "blind %")
DUELS = (
    "model", "strategy", "devices", "predicted s", "80 % interval", "measured s", "pick",
)  # fmt: skip
MEMORY = ("group", "rows", "MAPE %", "bias %")
COVERAGE = ("kind", "fitted", "inside", "left out", "inside")
WORST = (
    "group", "row", "error", "predicted", "measured", "devices", "model", "strategy",
)  # fmt: skip
REASONS = ("rows", "skipped because")
SECTIONS = {
    "regret": "Regret: of runs that share model, machine and batch, how much slower the picked one "
    "was than the best",
    "duels": "ZeRO-3 against tensor and pipeline parallelism: seconds of one device per sequence",
    "memory": "Memory of the fullest rank, where it is published",
    "coverage": "Measured times inside the 80 % interval",
    "worst": "Largest errors by group",
    "reasons": "What could not be compared",
}


def number(value: float | None, digits: int = 1, sign: str = "") -> str:
    """A number with its digits; a dash where there is none."""
    return "–" if value is None else f"{value:{sign}.{digits}f}"


def group_rows(validation: Validation) -> list[tuple[str, ...]]:
    """A row per group, and one for all."""
    return [_group_row(group) for group in (*validation.groups, validation.total)]


def _group_row(group: GroupErrors) -> tuple[str, ...]:
    both, fitted, apart = group.both, group.fitted, group.left_out
    return (
        group.name, f"{both.n:,}", number(both.mape), number(both.bias, sign="+"),
        number(both.spearman, 3), f"{fitted.n:,}", number(fitted.mape), f"{apart.n:,}",
        number(apart.mape), f"{group.skipped:,}",
    )  # fmt: skip


def regret_rows(validation: Validation) -> list[tuple[str, ...]]:
    """A row per group with choices."""
    return [
        (one.name, f"{one.groups}", number(one.mean), number(one.worst), number(one.random))
        for one in validation.regret
    ]


def duel_rows(validation: Validation) -> list[tuple[str, ...]]:
    """Two rows per duel, the sharded run first."""
    return [_duelist(duel, one) for duel in validation.duels for one in (duel.sharded, duel.split)]


def _duelist(duel: Duel, one: Checked) -> tuple[str, ...]:
    predicted, measured = one.device_seconds
    assert one.interval_s is not None
    low, high = (predicted * edge / one.predicted_s for edge in one.interval_s)
    pick = "" if one is not duel.picked else "right" if one is duel.better else "wrong"
    return (
        one.row.model.name, str(one.row.strategy), f"{one.row.machine.num_devices:,}",
        f"{predicted:.3g}", f"{low:.3g} to {high:.3g}", f"{measured:.3g}", pick,
    )  # fmt: skip


def memory_rows(validation: Validation) -> list[tuple[str, ...]]:
    """A row per group with published bytes."""
    memory = validation.memory
    every = (*memory.groups, *((memory.total,) if memory.total else ()))
    return [(e.name, f"{e.n}", number(e.mape), number(e.bias, sign="+")) for e in every]


def verdict_text(validation: Validation) -> str:
    """Whether what ran was predicted to fit, in one sentence."""
    memory = validation.memory
    said = f"{memory.ran_right:,} of {memory.ran:,} runs that ran are predicted to fit"
    if memory.out_of_memory:
        said += (
            f", {memory.out_of_memory_right:,} of {memory.out_of_memory:,} that ended out of "
            "memory are predicted not to"
        )
    for reason, count in memory.open:
        said += f"; {count:,} not judged: {reason}"
    return said


def coverage_rows(validation: Validation) -> list[tuple[str, ...]]:
    """A row for all and one per kind of device."""
    return [
        (
            one.name, f"{one.fitted:,}", _percent(one.fitted_inside, one.fitted),
            f"{one.left_out:,}", _percent(one.left_out_inside, one.left_out),
        )
        for one in validation.coverage
    ]  # fmt: skip


def worst_rows(validation: Validation, most: int) -> list[tuple[str, ...]]:
    """The runs with the largest errors, by group."""
    return [
        (
            name, one.row.id, f"{number(100 * (one.error or 0.0), sign='+')} %",
            units.seconds(one.predicted_s), units.seconds(one.row.measured_s or 0.0),
            f"{one.row.machine.num_devices:,} {one.row.machine.kind.name}",
            one.row.model.name, str(one.row.strategy),
        )
        for name, some in validation.worst(most).items()
        for one in some
    ]  # fmt: skip


def reason_rows(validation: Validation) -> list[tuple[str, ...]]:
    """Why rows were skipped."""
    return [(f"{count:,}", reason) for reason, count in validation.reasons]


def _share(part: int, whole: int) -> float | None:
    return 100 * part / whole if whole else None


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.0f} %" if whole else "–"


def validation_text(validation: Validation, worst: int) -> str:
    """All tables, one after the other."""
    parts = [units.table(GROUPS, group_rows(validation), numbers=range(1, 10))]
    tables: tuple[tuple[str, tuple[str, ...], list[tuple[str, ...]], Sequence[int]], ...] = (
        ("regret", REGRETS, regret_rows(validation), range(1, 5)),
        ("duels", DUELS, duel_rows(validation), (2, 3, 4, 5)),
        ("memory", MEMORY, memory_rows(validation), range(1, 4)),
        ("coverage", COVERAGE, coverage_rows(validation), range(1, 5)),
        ("worst", WORST, worst_rows(validation, worst), (2, 3, 4)),
        ("reasons", REASONS, reason_rows(validation), (0,)),
    )
    for name, header, rows, numbers in tables:
        if rows:
            parts.append(f"{SECTIONS[name]}\n{units.table(header, rows, numbers=numbers)}")
        if name == "memory" and validation.memory.ran + validation.memory.out_of_memory:
            parts.append(verdict_text(validation))
    return "\n\n".join(parts)


def validation_json(validation: Validation, worst: int) -> dict[str, object]:
    """The same for programs; errors, regret and shares in per cent."""
    return {
        "format": "partita/validation@1",
        "unit": "per cent",
        "all": _group_json(validation.total),
        "groups": {group.name: _group_json(group) for group in validation.groups},
        "regret": {
            one.name: {
                "mean": one.mean, "worst": one.worst, "groups": one.groups, "random": one.random,
            }
            for one in validation.regret
        },
        "zero3_against_tp_pp": [_duel_json(duel) for duel in validation.duels],
        "memory": _memory_json(validation),
        "coverage": _coverages_json(validation.coverage),
        "worst": {
            name: [_checked_json(one) for one in some]
            for name, some in validation.worst(worst).items()
        },
        "skipped": dict(validation.reasons),
    }  # fmt: skip


def _group_json(group: GroupErrors) -> dict[str, object]:
    return {
        **_errors_json(group.both),
        "skipped": group.skipped,
        "fitted": _errors_json(group.fitted),
        "left_out": _errors_json(group.left_out),
    }


def _errors_json(errors: Errors) -> dict[str, object]:
    return {
        "n": errors.n,
        "mape": errors.mape,
        "bias": errors.bias,
        "spearman": errors.spearman,
    }


def _duel_json(duel: Duel) -> dict[str, object]:
    return {
        "zero3": _checked_json(duel.sharded),
        "tp_pp": _checked_json(duel.split),
        "picked": "zero3" if duel.picked is duel.sharded else "tp_pp",
        "better": "zero3" if duel.better is duel.sharded else "tp_pp",
        "regret": duel.regret,
    }


def _checked_json(one: Checked) -> dict[str, object]:
    row = one.row
    return {
        "id": row.id,
        "model": row.model.name,
        "strategy": str(row.strategy),
        "devices": row.machine.num_devices,
        "kind": row.machine.kind.name,
        "predicted_s": one.predicted_s,
        "interval_s": None if one.interval_s is None else list(one.interval_s),
        "measured_s": row.measured_s,
        "error": None if one.error is None else 100 * one.error,
    }


def _memory_json(validation: Validation) -> dict[str, object]:
    memory = validation.memory
    total = memory.total
    return {
        "n": total.n if total else 0,
        "mape": total.mape if total else None,
        "bias": total.bias if total else None,
        "groups": {e.name: {"n": e.n, "mape": e.mape, "bias": e.bias} for e in memory.groups},
        "verdicts": {
            "right": memory.share_right,
            "ran": memory.ran,
            "ran_right": memory.ran_right,
            "out_of_memory": memory.out_of_memory,
            "out_of_memory_right": memory.out_of_memory_right,
            "wrong": list(memory.wrong),
            "not_judged": dict(memory.open),
        },
    }


def _coverages_json(coverage: Sequence[Coverage]) -> dict[str, object]:
    every = {one.name: _coverage_json(one) for one in coverage}
    return {"interval": 80, **every.pop("all", {}), "kinds": every}


def _coverage_json(one: Coverage) -> dict[str, object]:
    return {
        "n": one.fitted + one.left_out,
        "all": _share(one.fitted_inside + one.left_out_inside, one.fitted + one.left_out),
        "fitted": _share(one.fitted_inside, one.fitted),
        "left_out": _share(one.left_out_inside, one.left_out),
    }


def median_factor(validation: Validation) -> float | None:
    """How far up and down the interval of the run in the middle reaches."""
    reaches = [one.interval_s[1] / one.predicted_s for one in validation.checked if one.interval_s]
    return statistics.median(reaches) if reaches else None
