"""`partita rtasks --run` and `--interpret`: the model itself, fused and called."""

from pathlib import Path
from typing import Any

from partita.cli.base import Output, OutputFile
from partita.errors import FileError
from partita.files import encode_json

FORMATS = (".json", ".txt")


def run_it(model: str, output: OutputFile | None, out: Output, **options: Any) -> int:
    """Fuse a model, show the report, write what was asked for."""
    from partita.capture.installed import need_torch

    need_torch("running a model (without --run and --interpret it is only planned)")
    from partita.run.rtasks.model import rtasks_of

    if output is not None:
        _check_ending(output.path)
    found = rtasks_of(model, seed=out.seed, note=out.note, **options)
    report = found.report()
    data = {**report.to_json(), "problem": model, "seed": out.seed}
    if output is not None and output.path.suffix == ".txt":
        output.write("\n\n".join(map(str, found.programs)) + "\n")
    elif output is not None:
        output.write(encode_json(data))
    out.show(str(report))
    if output is not None:
        out.show(f"written: {output.path}")
    out.result(data)
    return 0


def _check_ending(path: Path) -> None:
    if path.suffix not in FORMATS:
        raise FileError(
            f"has an ending that says nothing: {path.suffix or 'none'}",
            fix=f"end the name in one of {', '.join(FORMATS)}",
            file=str(path),
        )
