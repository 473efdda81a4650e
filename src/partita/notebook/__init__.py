"""Results in notebooks: HTML, tables and charts, each a table of functions keyed by class name.

    rows.py      what a result holds, row by row       result.table().to_pandas()
    charts.py    which of its columns are drawn how    result.plot()
    html.py      figures, the table, the timeline      the result as the last line of a cell

Class names are unique in partita, so that a name says which result is meant without importing it.
"""
