"""A Kineto trace beside a prediction, as text and for programs."""

from dataclasses import asdict
from typing import Any

from partita import units
from partita.jobs.kineto import CATEGORIES, KinetoComparison


def kineto_text(compared: KinetoComparison) -> str:
    """A table of categories, and the one that differs most."""
    where = "kernels of the device" if compared.on_device else "ops of the CPU"
    rows = [
        (
            name, units.seconds(compared.predicted[name]), units.seconds(compared.measured[name]),
            _times(compared.measured[name], compared.predicted[name]),
        )
        for name in CATEGORIES
    ]  # fmt: skip
    rows.append((
        "step", units.seconds(compared.predicted_step_s), units.seconds(compared.measured_step_s),
        _times(compared.measured_step_s, compared.predicted_step_s),
    ))  # fmt: skip
    worst = most_wrong(compared)
    return "\n".join((
        f"{compared.file}: {where} in {compared.num_steps} steps, per step",
        "",
        units.table(("category", "predicted", "measured", "ratio"), rows, (1, 2, 3)),
        "",
        f"the largest difference: {worst}, {units.seconds(compared.measured[worst])} measured "
        f"for {units.seconds(compared.predicted[worst])} predicted",
    ))  # fmt: skip


def most_wrong(compared: KinetoComparison) -> str:
    """The category whose seconds differ most."""
    return max(CATEGORIES, key=lambda c: abs(compared.measured[c] - compared.predicted[c]))


def _times(measured_s: float, predicted_s: float) -> str:
    return f"{measured_s / predicted_s:.3g}x" if predicted_s > 0 else "-"


def kineto_json(compared: KinetoComparison) -> dict[str, Any]:
    """The same for programs."""
    return {
        "format": "partita/kineto-comparison@1", **asdict(compared), "wrong": most_wrong(compared),
    }  # fmt: skip
