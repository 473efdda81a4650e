"""A curve over numbers of devices, in words and for programs."""

from typing import Any

from partita import units
from partita.jobs.curve import Curve, CurvePoint
from partita.jobs.prices import Prices
from partita.report.summary import INTERVAL, MEMORY_HEADER

HEADER = (
    "devices", "step", INTERVAL, "speed-up", "efficiency", MEMORY_HEADER, "plan", "front",
)  # fmt: skip


def curve_text(curve: Curve, batch: int | None, prices: Prices | None) -> str:
    """A row for each point of the curve or its front."""
    best, front = curve.best, set(curve.front)
    shown = [point for point in curve.points if point.is_best or point in front]
    shown.sort(key=lambda point: (point.num_devices, point.objective_s))
    money = ("per hour", "per step") if prices is not None else ()
    rows = [_row(point, best[0], point in front, prices) for point in shown]
    lines = []
    if rows:
        header = (*HEADER[:6], *money, *HEADER[6:])
        lines.append(units.table(header, rows, numbers=range(6 + len(money))))
    for number, why in curve.missing:
        lines.append(f"{number} devices: {why}")
    return "\n".join(lines)


def _row(
    point: CurvePoint, first: CurvePoint, on_front: bool, prices: Prices | None
) -> tuple[str, ...]:
    faster = first.objective_s / point.objective_s
    efficiency = faster * first.num_devices / point.num_devices
    money: tuple[str, ...] = ()
    if prices is not None and point.price_per_hour is not None:
        money = (prices.words(point.price_per_hour), prices.words(point.price_per_step or 0.0))
    low, high = point.step_interval_s
    return (
        str(point.num_devices),
        units.seconds(point.objective_s),
        f"{units.seconds(low)} to {units.seconds(high)}",
        f"x{faster:.2f}",
        f"{efficiency:.0%}",
        units.size(point.peak_memory_bytes),
        *money,
        point.arrangement,
        "*" if on_front else "",
    )


def choice_text(
    choice: CurvePoint | None, steps: int, deadline_s: float | None, budget: float | None,
    prices: Prices | None,
) -> str:  # fmt: skip
    """What to take for a deadline, a budget, or both."""
    limits = [] if deadline_s is None else [f"{steps:,} steps in {units.seconds(deadline_s)}"]
    limits += [] if budget is None else [f"{steps:,} steps for {_money(budget, prices)}"]
    asked = " and ".join(limits)
    if choice is None:
        return f"{asked}: no point keeps that"
    total = steps * choice.objective_s
    price = choice.price_per_step
    spent = "" if price is None else f" for {_money(steps * price, prices)}"
    return (
        f"{asked}: {choice.num_devices} devices ({choice.cluster}), "
        f"{choice.arrangement}: {units.seconds(total)}{spent}"
    )


def _money(amount: float, prices: Prices | None) -> str:
    return f"{amount:,.2f}" if prices is None else prices.words(amount)


def curve_json(curve: Curve, model: str, cluster: str, choice: CurvePoint | None) -> dict[str, Any]:
    """The same for programs."""
    front = set(curve.front)
    return {
        "format": "partita/curve@1",
        "model": model,
        "cluster": cluster,
        "points": [point_json(point, point in front) for point in curve.points],
        "missing": [{"num_devices": number, "why": why} for number, why in curve.missing],
        "lower_bounds_s": [
            {"num_devices": number, "lower_bound_s": bound}
            for number, bound in curve.bounds.items()
        ],
        "choice": None if choice is None else point_json(choice, choice in front),
    }


def point_json(point: CurvePoint, on_front: bool) -> dict[str, Any]:
    """One point."""
    return {
        "num_devices": point.num_devices,
        "cluster": point.cluster,
        "plan": point.arrangement,
        "found_by": point.found_by,
        "step_s": point.step_s,
        "step_interval_s": list(point.step_interval_s),
        "objective_s": point.objective_s,
        "peak_memory_bytes": point.peak_memory_bytes,
        "price_per_hour": point.price_per_hour,
        "price_per_step": point.price_per_step,
        "is_best": point.is_best,
        "on_front": on_front,
    }
