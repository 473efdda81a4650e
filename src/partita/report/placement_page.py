"""A placement as one HTML page that needs nothing else: figures, devices, timeline, the graph.

Every name is escaped. The graph has a colour per device; a large one is folded by modules.
"""

from collections.abc import Mapping
from html import escape

from partita import units
from partita.graph.backward import forward_part
from partita.graph.draw import to_svg
from partita.graph.record import Graph
from partita.jobs.place_result import Placed
from partita.report.placement import shown_lanes
from partita.report.svg_timeline import timeline_svg

MAX_DRAWN_OPS = 400
_STYLE = """
body{font:15px/1.5 system-ui,-apple-system,"Segoe UI",Helvetica,Arial,sans-serif;color:#1f2328;
max-width:1180px;margin:2rem auto;padding:0 1rem;background:#fff}
@media(prefers-color-scheme:dark){body{background:#0d1117;color:#e6edf3}}
h1{font-size:1.4rem;margin:0}h2{font-size:1.1rem;margin:2rem 0 .5rem}
table{border-collapse:collapse;font-size:.9rem}
th,td{text-align:right;padding:.25rem .8rem;border-bottom:1px solid #d0d7de;white-space:nowrap}
td:first-child,th:first-child,td:nth-child(2),th:nth-child(2){text-align:left}
.scroll{overflow:auto;max-height:900px;border:1px solid #d0d7de;border-radius:8px;padding:.6rem}
b.big{font-size:1.6rem}
iframe{width:100%;height:900px;border:1px solid #d0d7de;border-radius:8px}
""".strip()
HEADER = ("device", "kind", "layers", "memory", "of")


def placement_page(placed: Placed) -> str:
    """The page of a placement that was found."""
    best, timeline = placed.best, placed.timeline
    assert best is not None
    assert timeline is not None
    workload, cluster = placed.subject.workload, placed.model.cluster
    title = f"{workload.spec} on {cluster.name}"
    gap = "" if placed.gap is None else f", at most {placed.gap:.1%} from optimal"
    about = (
        f"{units.count(workload.graph.num_parameters)} parameters, "
        f"{'training' if workload.training else 'inference'}, batch {workload.batch} x "
        f"{placed.problem.batches}; rules: {placed.semantics}; method: {placed.method}, "
        f"seed {placed.seed}; {placed.status}: {placed.why}"
    )
    names = [device.name for device in cluster.devices]
    groups = {op: names[device] for op, device in placed.devices().items()}
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)} · partita</title><style>{_STYLE}</style></head><body>"
        f"<h1>{escape(title)}</h1><p>{escape(about)}</p>"
        f'<p><b class="big">{units.seconds(best.step_s)}</b> a step; no placement is below '
        f"{units.seconds(placed.lower_bound_s)}{gap}</p>{_devices(placed)}"
        "<h2>Timeline of a step</h2>"
        f'<div class="scroll">{timeline_svg(timeline, width=1100, lanes=shown_lanes(timeline))}'
        "</div><h2>Where every op is</h2>"
        f"{_framed(forward_svg(workload.graph, groups))}</body></html>\n"
    )


def forward_svg(graph: Graph, groups: Mapping[str, str]) -> str:
    """The forward ops of a graph, those of one group in one colour."""
    return to_svg(forward_part(graph), groups, max_nodes=MAX_DRAWN_OPS)


def _framed(picture: str) -> str:
    """A picture in a frame of its own: its styles would hold for the whole page otherwise."""
    return f'<iframe title="graph" srcdoc="{escape(picture)}"></iframe>'


def _devices(placed: Placed) -> str:
    best, cluster = placed.best, placed.model.cluster
    assert best is not None
    rows = [
        (
            f"{index} {device.name}",
            device.kind,
            f"{best.placement.count(index)}",
            units.size(best.peak_bytes[index]),
            units.size(cluster.kind_of(index).memory_bytes),
        )
        for index, device in enumerate(cluster.devices)
    ]
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    head = "".join(f"<th>{name}</th>" for name in HEADER)
    return f"<table><tr>{head}</tr>{body}</table>"
