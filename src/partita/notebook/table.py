"""A table of plain values, and the same for pandas and polars where they are installed."""

from dataclasses import dataclass
from typing import Any

from partita.capture.installed import need
from partita.report.html_parts import table as html_table

Value = str | int | float | bool | None
MOST_SHOWN = 50


@dataclass(frozen=True, slots=True)
class ResultTable:
    """Columns with names (units in them) and rows of plain values."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Value, ...], ...]

    def __len__(self) -> int:
        return len(self.rows)

    def to_dicts(self) -> list[dict[str, Value]]:
        """A dictionary for each row."""
        return [dict(zip(self.columns, row, strict=True)) for row in self.rows]

    def to_pandas(self) -> Any:
        """As a `pandas.DataFrame`."""
        need("pandas", "notebook", "a table for pandas")
        import pandas

        return pandas.DataFrame.from_records(list(self.rows), columns=list(self.columns))

    def to_polars(self) -> Any:
        """As a `polars.DataFrame`."""
        need("polars", "notebook", "a table for polars")
        import polars

        return polars.DataFrame(
            list(self.rows), schema=list(self.columns), orient="row", infer_schema_length=None
        )

    def _repr_html_(self) -> str:
        numbers = [
            place
            for place in range(len(self.columns))
            if any(isinstance(row[place], int | float) for row in self.rows)
        ]
        rows = [tuple(map(_shown, row)) for row in self.rows[:MOST_SHOWN]]
        left = len(self.rows) - len(rows)
        more = f"<p>{left:,} more rows</p>" if left > 0 else ""
        return html_table(self.columns, rows, numbers) + more


def _shown(value: Value) -> str:
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else str(value)
