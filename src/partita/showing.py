"""How a result shows itself in a notebook: it asks `partita.notebook`, when it is asked.

    class Planned:
        _repr_html_, table, plot = repr_html, table_of, plot_of

What each class shows stands there, in tables keyed by its name: results stay records, and nothing
that draws is loaded before something is drawn.
"""

import importlib
from typing import Any


def repr_html(result: object) -> str:
    """The result as HTML, as notebooks show it."""
    text: str = _shown_by("html").result_html(result)
    return text


def table_of(result: object) -> Any:
    """The result as a `ResultTable`: `.to_pandas()`, `.to_polars()`, `.to_dicts()`."""
    return _shown_by("rows").result_table(result)


def plot_of(result: object) -> Any:
    """The result as an Altair chart (`pip install 'partita[notebook]'`)."""
    return _shown_by("charts").result_chart(result)


def _shown_by(module: str) -> Any:
    # By name: `partita.notebook` lies to the right of every result.
    return importlib.import_module(f"partita.notebook.{module}")
