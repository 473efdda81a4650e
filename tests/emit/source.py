"""The source alone of what is emitted."""

from partita.emit.stages import emit


def emit_stages(captured, stage_of, *, title=""):
    """The source of one Python module with a class per stage."""
    return emit(captured, stage_of, title=title).source
