"""What came of fusing a model: regions, fallbacks, planned and measured times; as text, as JSON."""

from dataclasses import asdict, dataclass
from typing import Any

from partita.showing import plot_of, repr_html, table_of
from partita.units import seconds


@dataclass(frozen=True, slots=True)
class RegionOutcome:
    """One fused region: what was planned, what was measured, whether it is used."""

    name: str
    num_ops: int
    num_tiles: int
    num_programs: int
    planned_us: float
    bound_us: float
    planned_unfused_us: float
    plan_s: float
    compile_s: float = 0.0
    fused_us: float | None = None
    unfused_us: float | None = None
    kept: bool = True
    about: str = ""

    @property
    def gap(self) -> float:
        """How far the plan is from optimal at most, by its own costs."""
        return max(0.0, 1.0 - self.bound_us / self.planned_us)

    def __str__(self) -> str:
        text = (
            f"{self.name}: {self.num_ops} ops, {self.num_tiles:,} tiles on {self.num_programs} "
            f"programs; planned {_us(self.planned_us)} (gap {self.gap:.0%}, unfused "
            f"{_us(self.planned_unfused_us)})"
        )
        if self.fused_us is not None and self.unfused_us is not None:
            text += (
                f", measured {_us(self.fused_us)} (unfused {_us(self.unfused_us)}, "
                f"x{self.unfused_us / self.fused_us:.2f})"
            )
        return text + ("" if self.kept else "; left unfused") + f" [{self.about}]"


@dataclass(frozen=True, slots=True)
class Outcome:
    """The whole model."""

    model: str
    device: str
    dtype: str
    kept: str  # "fused", "sequential" or "interpreted"
    regions: tuple[RegionOutcome, ...]
    fallbacks: tuple[tuple[str, str], ...]  # what PyTorch runs, and why
    lower_s: float
    plan_s: float
    compile_s: float
    error: float  # against float64
    model_error: float  # the model's own
    fused_us: float | None = None
    sequential_us: float | None = None
    alone_us: tuple[float, ...] = ()  # of several models: each by itself, fused
    notes: tuple[str, ...] = ()

    _repr_html_, table, plot = repr_html, table_of, plot_of  # in a notebook

    @property
    def used_us(self) -> float | None:
        """What a whole call of the answer takes, copies of inputs and outputs included."""
        return self.sequential_us if self.kept == "sequential" else self.fused_us

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        fields = asdict(self)
        fields["regions"] = [{**asdict(each), "gap": each.gap} for each in self.regions]
        fields["fallbacks"] = [{"name": name, "reason": reason} for name, reason in self.fallbacks]
        return {"format": "partita/rtasks-report@1", **fields}

    def __str__(self) -> str:
        lines = [f"{self.model} on {self.device}, {self.dtype}: {self._headline()}"]
        lines += [f"  {each}" for each in self.regions]
        lines += [f"  fallback {name}: {reason}" for name, reason in self.fallbacks]
        if len(self.alone_us) > 1:
            total, together = sum(self.alone_us), self.used_us or self.planned_us
            each = ", ".join(map(_us, self.alone_us))
            how = "measured" if self.used_us is not None else "by the costs"
            lines.append(
                f"  together {_us(together)}, one after the other {_us(total)} ({each}), {how}: "
                f"x{total / together:.2f}"
            )
        lines.append(
            f"  error {self.error:.1e} against float64, the model's own {self.model_error:.1e}; "
            f"captured in {self.lower_s:.1f} s, planned in {self.plan_s:.1f} s, compiled in "
            f"{self.compile_s:.1f} s"
        )
        return "\n".join([*lines, *(f"  {note}" for note in self.notes)])

    @property
    def planned_us(self) -> float:
        """What the costs say of all regions."""
        return sum(each.planned_us for each in self.regions)

    def _headline(self) -> str:
        regions = sum(each.kept for each in self.regions)
        what = f"{_many(regions, 'fused region')}, {_many(len(self.fallbacks), 'fallback')}"
        if self.fused_us is None or self.sequential_us is None:
            return f"{what}; run tile by tile without a GPU, slowly"
        ratio = self.sequential_us / self.fused_us
        times = f"{_us(self.fused_us)} against {_us(self.sequential_us)} of the sequential graph"
        if self.kept == "sequential":
            return f"{what}, {times}: the sequential graph is kept"
        return f"{what}, {times}: x{ratio:.2f}"


def _many(count: int, word: str) -> str:
    return f"{count} {word}" if count == 1 else f"{count} {word}s"


def _us(value: float) -> str:
    return seconds(value * 1e-6)
