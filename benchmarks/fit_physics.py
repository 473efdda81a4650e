"""Fit the parameter sets of `costs/physics.toml` to published runs.

    pip install scipy
    python benchmarks/fit_physics.py ROWS.json [--kinds A100 H100] [--write]

One set per kind of device; rows whose id hashes into the left-out third are never looked at while
fitting and are reported apart. A parameter stays near what it is expected to be (a prior with its
width) where the rows do not tell: least squares of log(forecast / measured) with a soft loss, every
group of rows weighing the same, plus (log value - log expected) / width.
"""

import argparse
import math
import statistics
from dataclasses import replace

import numpy as np
from scipy.optimize import least_squares

from partita.costs.physics import DATA, Physics, PhysicsSet, physics_of
from partita.forecast import forecast
from partita.forecast.predict import layer_seconds
from partita.jobs.published import PublishedRun, left_out, read_rows

# kind -> the presets whose rows it is fitted to
FAMILIES = {
    "A100": ("A100-80GB-SXM", "A100-40GB-SXM"),
    "H100": ("H100-SXM",),
    "GH200": ("GH200",),
    "B200": ("B200",),
    "B300": ("B300",),
    "GB200": ("GB200",),
    "GB300": ("GB300",),
}
# kinds whose parameters are expected to be near those of another
LIKE = {"GH200": "H100", "B300": "B200", "GB200": "B200", "GB300": "B200"}
# what a kind has not, or what its kernel of 2023 was tuned for
FIXED = {"A100": ("products_f8", "products_f4", "flash_2"), "H100": ("products_f4",)}
# parameter: expected value, relative width of the prior, least, most
PRIOR = {
    "products": (0.75, 0.15, 0.3, 0.98),
    "half": (68, 0.7, 5, 400),
    "attention_forward": (0.5, 0.3, 0.1, 0.9),
    "attention_backward": (0.4, 0.3, 0.1, 0.9),
    "flash_2": (0.7, 0.3, 0.3, 1.0),
    "memory": (0.85, 0.1, 0.5, 0.98),
    "eager_traffic": (2.0, 0.5, 1, 8),
    "host_s": (30e-6, 0.6, 1e-6, 200e-6),
    "host_compiled_s": (8e-6, 0.6, 1e-6, 100e-6),
    "gap_s": (3e-6, 0.7, 0.2e-6, 30e-6),
    "inside": (0.75, 0.2, 0.2, 0.98),
    "inside_s": (40e-6, 0.5, 3e-6, 300e-6),
    "across": (0.8, 0.2, 0.2, 0.98),
    "across_s": (60e-6, 0.7, 3e-6, 500e-6),
    "hop_s": (3e-6, 0.7, 0.05e-6, 50e-6),
    "interference": (0.5, 0.4, 0.02, 1.0),
    "action_s": (200e-6, 2.0, 1e-6, 2e-2),
    "optimizer": (1.5, 0.4, 0.5, 6),
    "step_s": (5e-3, 1.0, 1e-5, 0.1),
    "products_f8": (0.6, 0.2, 0.2, 0.95),
    "products_f4": (0.45, 0.3, 0.1, 0.95),
}
# Measured on an H200 (2026-11-16, benchmarks/device_kind.py), the chip of an H100: expected values
# that the rows may move a little only. Products and attention as sustained, flash_2 as the ratio of
# PyTorch's flash kernel to the one that it takes by default.
MEASURED = {
    "products": (0.67, 0.01), "products_f8": (0.64, 0.015), "half": (60, 0.06),
    "attention_forward": (0.48, 0.03), "attention_backward": (0.40, 0.03), "flash_2": (0.57, 0.03),
    "memory": (0.86, 0.01),
}  # fmt: skip
MEASURED_SOURCE = (
    "measured on an H200 (2026-11-16, benchmarks/device_kind.py), moved a little by published runs"
)
NEAR_MEASURED = ("H100", "GH200")
MARK = "# ---- fitted to published runs (written by benchmarks/fit_physics.py)"
END = "# ---- end of fitted sets"
WORKSPACE = {
    "GH200": (4.5e9, "what published peaks of devices (sailor-gh200-opt) have more than tensors"),
}
ENOUGH = 25  # rows, to speak of the best that anyone reached
WEIGHT = 20.0  # how much a whole group of rows outweighs one prior of unit width


def with_physics(row: PublishedRun, physics: Physics) -> PublishedRun:
    """The row on a machine with other parameters."""
    own = PhysicsSet(row.machine.kind.name, physics, ())
    return replace(row, machine=replace(row.machine, physics_set=own))


def log_error(row: PublishedRun) -> float:
    """log(forecast / measured)."""
    assert row.measured_s is not None
    if row.layer_only:
        predicted = layer_seconds(row.model, row.machine, row.strategy)
    else:
        predicted = forecast(row.model, row.machine, row.strategy).step_s
    return math.log(predicted / row.measured_s)


def fit(
    rows: list[PublishedRun],
    start: Physics,
    free: list[str],
    near: Physics | None,
    *,
    measured: bool,
) -> tuple[Physics, dict[str, tuple[float, bool]]]:
    """The parameters that explain the rows best, their relative errors, whether rows told them.

    `near` are those of a kind like it.
    """
    sizes: dict[str, int] = {}
    for row in rows:
        sizes[row.group] = sizes.get(row.group, 0) + 1
    weights = np.array([WEIGHT / math.sqrt(max(sizes[row.group], 5)) for row in rows])
    expected = {name: getattr(near, name) if near else PRIOR[name][0] for name in free}
    centre = np.array([math.log(expected[name]) for name in free])
    width = np.array([PRIOR[name][1] for name in free])
    if measured:
        centre = np.array([math.log(MEASURED[n][0]) if n in MEASURED else c
                           for n, c in zip(free, centre, strict=True)])  # fmt: skip
        width = np.array([MEASURED[n][1] if n in MEASURED else w
                          for n, w in zip(free, width, strict=True)])  # fmt: skip
    low = np.array([math.log(PRIOR[name][2]) for name in free])
    high = np.array([math.log(PRIOR[name][3]) for name in free])

    def residuals(x: np.ndarray) -> np.ndarray:
        values = {name: math.exp(v) for name, v in zip(free, x, strict=True)}
        physics = replace(start, **values)
        errors = np.array([log_error(with_physics(row, physics)) for row in rows])
        soft = np.sign(errors) * np.sqrt(2 * (np.sqrt(1 + (errors / 0.1) ** 2) - 1)) * 0.1
        return np.concatenate([soft * weights, 0.2 * (x - centre) / width])

    x = np.clip([math.log(getattr(start, name)) for name in free], low + 1e-6, high - 1e-6)
    best = least_squares(residuals, x, bounds=(low, high), max_nfev=40, diff_step=1e-4)
    physics = replace(start, **{n: math.exp(v) for n, v in zip(free, best.x, strict=True)})
    freedom = max(1, len(rows) - len(free))
    inverse = np.linalg.pinv(best.jac.T @ best.jac)
    scale = math.sqrt(2 * best.cost / freedom)
    errors = np.sqrt(np.maximum(np.diag(inverse), 0.0)) * scale
    untold = width / 0.2 * scale  # what the prior alone would leave
    return physics, {
        n: (max(0.01, float(e)), bool(e < 0.7 * u))
        for n, e, u in zip(free, errors, untold, strict=True)
    }


def base_spread(rows: list[PublishedRun], physics: Physics) -> float:
    """The spread that makes 80 % of the fitted rows lie in their intervals."""
    low, high = 0.03, 0.15
    while high - low > 1e-4:
        middle = (low + high) / 2
        inside = sum(_covered(row, replace(physics, spread=middle)) for row in rows)
        low, high = (low, middle) if inside >= 0.8 * len(rows) else (middle, high)
    return high


def _covered(row: PublishedRun, physics: Physics) -> bool:
    row = with_physics(row, physics)
    assert row.measured_s is not None
    if row.layer_only:
        return True
    least, most = forecast(row.model, row.machine, row.strategy).interval_s
    return least <= row.measured_s <= most


def report(rows: list[PublishedRun], physics: Physics, title: str) -> None:
    """Errors by group, of fitted and left-out rows."""
    print(title)
    groups = sorted({row.group for row in rows})
    for group in groups:
        texts = []
        for out in (False, True):
            errors = [
                math.exp(log_error(with_physics(row, physics))) - 1
                for row in rows
                if row.group == group and left_out(row) == out
            ]
            if errors:
                mape = 100 * statistics.mean(abs(e) for e in errors)
                bias = 100 * statistics.mean(errors)
                texts.append(f"{'left out' if out else 'fitted'} {len(errors):4d} "
                             f"MAPE {mape:5.1f} bias {bias:+5.1f}")  # fmt: skip
        print(f"  {group:26s} {'   '.join(texts)}")


def table(
    kind: str, physics: Physics, errors: dict[str, tuple[float, bool]], rows: list[PublishedRun]
) -> str:
    """A parameter set as text for the data file."""
    groups = ", ".join(sorted({row.group for row in rows}))
    lines = ["[[kinds]]", f'name = "{kind}"', f"kinds = {list(FAMILIES[kind])}".replace("'", '"')]
    kept = [row for row in rows if not left_out(row)]
    fitted = f"fitted to {len(kept)} published runs ({groups}) by benchmarks/fit_physics.py"
    expected = "expected; the rows of this kind do not tell"
    for name in errors:
        error, told = errors[name]
        source = fitted if told else expected
        if kind in NEAR_MEASURED and name in MEASURED:
            source = MEASURED_SOURCE
        value, sure = f"{getattr(physics, name):.4g}", f"{min(error, 1.0):.2f}"
        lines.append(f'{name} = {{ value = {value}, sure = {sure}, source = "{source}" }}')
    spread = "80 % of the fitted rows lie within 1.28 of it, times 1.1"
    lines.append(f'spread = {{ value = {physics.spread:.3g}, sure = 0.2, source = "{spread}" }}')
    if kind in WORKSPACE:
        value, source = WORKSPACE[kind]
        lines.append(f'workspace_bytes = {{ value = {value}, sure = 0.2, source = "{source}" }}')
    most = max(row.machine.num_devices for row in rows)
    text = "the largest machine among the rows"
    lines.append(f'most_devices = {{ value = {most}, sure = 0.0, source = "{text}" }}')
    for name, several in (("best_mfu", False), ("best_mfu_nodes", True)):
        best = highest_mfu(rows, several=several)
        if best is not None:
            value, row = best
            text = f"{row.model.name} on {row.machine.num_devices} ({row.group})"
            lines.append(f'{name} = {{ value = {value:.3f}, sure = 0.0, source = "{text}" }}')
    return "\n".join(lines) + "\n"


def highest_mfu(rows: list[PublishedRun], *, several: bool) -> tuple[float, PublishedRun] | None:
    """The highest measured MFU with products in 16 bits, on several nodes or on any."""
    rates: list[tuple[float, PublishedRun]] = []
    for row in rows:
        machine, s = row.machine, row.strategy
        many = machine.num_devices > machine.node_size
        counts = not row.layer_only and s.product_dtype in ("bf16", "f16")
        if row.measured_s and counts and (many or not several):
            rate = row.model.step_flops(s.batch) / row.measured_s / machine.num_devices
            rates.append((rate / machine.kind.peak(s.dtype), row))
    if len(rates) < ENOUGH:
        return None
    return max(rates, key=lambda pair: pair[0])


def write(tables: list[str]) -> None:
    """Replace the fitted sets, leave the others."""
    text = DATA.read_text(encoding="utf-8")
    head, _, rest = text.partition(MARK)
    _, _, tail = rest.partition(END)
    DATA.write_text(head + MARK + "\n\n" + "\n".join(tables) + "\n" + END + tail, encoding="utf-8")


def main() -> None:
    """Fit and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows")
    parser.add_argument("--kinds", nargs="*", default=list(FAMILIES))
    parser.add_argument("--write", action="store_true", help="replace the sets in physics.toml")
    options = parser.parse_args()
    rows, _ = read_rows(options.rows)
    timed = [row for row in rows if row.measured_s is not None]
    sets: dict[str, Physics] = {}
    tables: list[str] = []
    for kind in options.kinds:
        mine = [row for row in timed if row.machine.kind.name in FAMILIES[kind]]
        fitted = [row for row in mine if not left_out(row)]
        free = [n for n in PRIOR if n not in FIXED.get(kind, ())]
        near = sets.get(LIKE.get(kind, ""))
        start = near or physics_of(kind).physics
        physics, errors = fit(fitted, start, free, near, measured=kind in NEAR_MEASURED)
        physics = sets[kind] = replace(physics, spread=1.1 * base_spread(fitted, physics))
        tables.append(table(kind, physics, errors, mine))
        report(mine, physics, f"{kind}: {len(fitted)} rows fitted of {len(mine)}")
        for name in free:
            print(f"    {name:20s} {getattr(physics, name):.6g} +- {100 * errors[name][0]:.0f} %")
        print(f"    {'spread':20s} {physics.spread:.3g}", flush=True)
    if options.write:
        write(tables)


if __name__ == "__main__":
    main()
