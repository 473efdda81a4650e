"""`partita rtasks --run` and `--interpret`: the model itself, fused and called."""

from functools import partial
from typing import Any

from partita.cli.base import Output, OutputFile
from partita.files import encode_json

FORMATS = (".json", ".txt", ".svg", ".trace.json")


def run_it(model: str, output: OutputFile | None, out: Output, **options: Any) -> int:
    """Fuse a model, show the report, write what was asked for."""
    from partita.capture.installed import need_torch

    need_torch("running a model (without --run and --interpret it is only planned)")
    from partita.gpu.model import rtasks_of

    if output is not None:
        output.ending(FORMATS)
    fused = rtasks_of(model, seed=out.seed, note=out.note, **options)
    report = fused.report()
    data = {**report.to_json(), "problem": model, "seed": out.seed}
    written = None
    if output is not None:
        written = out.save(output, partial(_content, output.path.name, fused, data))
    out.show(str(report))
    if written is not None:
        out.show(f"written: {written}")
    out.result(data)
    return 0


def _content(name: str, fused: Any, data: dict[str, Any]) -> bytes | str:
    """The report, the programs of all regions, or the timeline of the first."""
    if name.endswith(".txt"):
        return "\n\n".join(map(str, fused.programs)) + "\n"
    if name.endswith(".svg"):
        from partita.report.svg_timeline import timeline_svg

        return timeline_svg(fused.timeline(), title=fused.report().model)
    if name.endswith(".trace.json"):
        from partita.report.trace import chrome_trace

        return chrome_trace(fused.timeline())
    return encode_json(data)
