"""Graphs in files: `.json` and `.txt` both ways, `.dot` and `.svg` to look at."""

from collections.abc import Callable
from pathlib import Path

from partita.errors import FileError
from partita.files import decode_json, encode_json, read_bytes, write_atomically
from partita.graph.draw import to_dot, to_svg
from partita.graph.json import from_json, to_json
from partita.graph.record import Graph
from partita.graph.shapes import unknown_kinds
from partita.graph.text import from_text, to_text

__all__ = ["WRITERS", "read_graph", "unknown_kinds", "write_graph"]

WRITERS: dict[str, Callable[[Graph], bytes | str]] = {
    ".json": lambda graph: encode_json(to_json(graph)),
    ".txt": to_text,
    ".dot": to_dot,
    ".svg": to_svg,
}


def read_graph(path: str | Path) -> Graph:
    """A graph from its JSON or text form, told apart by the name's ending or by the content."""
    file, data = str(path), read_bytes(path)
    ending = Path(path).suffix.lower()
    if ending == ".json" or (ending != ".txt" and data.lstrip()[:1] == b"{"):
        return from_json(decode_json(data, file), file)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise FileError(
            f"is not text (byte {error.start} is no UTF-8)",
            fix="give a graph as JSON or in its text form",
            file=file,
        ) from None
    return from_text(text, file)


def write_graph(path: str | Path, graph: Graph, overwrite: bool = False) -> Path:
    """Write a graph in the form that the name's ending says."""
    writer = WRITERS.get(Path(path).suffix.lower())
    if writer is None:
        raise FileError(
            f"the ending {Path(path).suffix!r} says no form of a graph",
            fix=f"end the name in {', '.join(WRITERS)}",
            file=str(path),
        )
    return write_atomically(path, writer(graph), overwrite=overwrite)
