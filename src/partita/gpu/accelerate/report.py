"""What `partita.accelerate` tried, what it kept and why; as text, as JSON."""

from dataclasses import asdict, dataclass
from typing import Any

from partita.showing import plot_of, repr_html, table_of
from partita.units import seconds

OURS = ("streams", "rtasks")  # forms that are not PyTorch's own


@dataclass(frozen=True, slots=True)
class AcceleratedReport:
    """Every candidate with the time of a whole call, the one that is called, and what was said."""

    model: str
    device: str
    kept: str  # the label of what is called
    form: str  # streams, rtasks, sequential, compiled, compile or module
    times_us: tuple[tuple[str, float], ...]  # whole calls with the example's tensors, in turns
    error: float  # against float64
    model_error: float  # the model's own
    seconds: float
    notes: tuple[str, ...] = ()

    _repr_html_, table, plot = repr_html, table_of, plot_of  # in a notebook

    @property
    def used_us(self) -> float:
        """What a whole call takes."""
        return dict(self.times_us).get(self.kept, 0.0)

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        times = [{"name": name, "time_us": round(time, 3)} for name, time in self.times_us]
        return {**asdict(self), "times_us": times}

    def __str__(self) -> str:
        lines = [
            f"{self.model} on {self.device}: {self.kept}, {seconds(self.used_us / 1e6)} a call"
        ]
        for name, time_us in sorted(self.times_us, key=lambda pair: pair[1]):
            mark = "  <- kept" if name == self.kept else ""
            lines.append(f"  {name:32}{seconds(time_us / 1e6):>10}{mark}")
        if self.form not in OURS:
            lines.append("  nothing of ours was faster: what is called is PyTorch's own")
        lines.append(
            f"  error {self.error:.1e} against float64, the model's own {self.model_error:.1e}; "
            f"found in {self.seconds:.0f} s"
        )
        return "\n".join([*lines, *(f"  {note}" for note in self.notes)])
