"""A placement as one HTML page that needs nothing else: figures, timeline, archive, the graph.

Every name is escaped. The graph has a colour per device; a large one is folded by modules.
"""

import itertools
from collections.abc import Mapping, Sequence
from html import escape

from partita import units
from partita.graph.backward import forward_part
from partita.graph.draw import to_svg
from partita.graph.record import Graph
from partita.jobs.pareto import pareto_front
from partita.jobs.place_result import Placed
from partita.report.charts import cut
from partita.report.figures import WIDTH, Mark, figure, scatter
from partita.report.html_parts import folded, table
from partita.report.palette import CATEGORY_COLORS
from partita.report.placement import archive_rows
from partita.report.summary import INTERVAL, interval_words
from partita.report.timeline_page import TimelineStory, timeline_page

MAX_DRAWN_OPS = 400
MOST_TRIED = 400  # placements that are drawn
STRIP_LEFT = 110.0  # where the rows of devices begin
HEADER = ("device", "kind", "layers", "memory", "of")
_STYLE = """
.model{overflow:auto;max-height:900px;border:1px solid var(--line);border-radius:8px}
.model svg{display:block;margin:auto}
@media print{.model{max-height:none;overflow:visible}
.model svg{max-width:100%;max-height:240mm;height:auto;width:auto}}
""".strip()


def placement_page(placed: Placed) -> str:
    """The page of a placement that was found."""
    best, timeline = placed.best, placed.timeline
    assert best is not None
    assert timeline is not None
    workload, cluster = placed.subject.workload, placed.model.cluster
    gap = placed.gap or 0.0
    about = (
        f"{units.count(workload.graph.num_parameters)} parameters, "
        f"{'training' if workload.training else 'inference'}, batch {workload.batch} x "
        f"{placed.problem.batches}; rules: {placed.semantics}; method: {placed.method}, "
        f"seed {placed.seed}; {placed.status}: {placed.why}"
    )
    fullest = max(range(len(best.peak_bytes)), key=lambda device: best.peak_bytes[device])
    figures = (
        ("step (predicted)", units.seconds(best.step_s), _step_note(placed)),
        ("from optimal", f"≤ {gap:.1%}",
         f"no placement is below {units.seconds(placed.lower_bound_s)}"),
        ("devices", f"{best.num_devices}", f"of {cluster.num_devices}"),
        ("memory", units.size(best.peak_bytes[fullest]),
         f"of {units.size(cluster.kind_of(fullest).memory_bytes)} on "
         f"{cluster.devices[fullest].name}"),
    )  # fmt: skip
    names = [device.name for device in cluster.devices]
    groups = {op: names[device] for op, device in placed.devices().items()}
    picture = f'<div class="model">{forward_svg(workload.graph, groups)}</div>'
    return timeline_page(
        TimelineStory(
            f"{workload.spec} on {cluster.name}", about, timeline, figures, placed.lower_bound_s,
            sections=(
                _devices(placed), _tried(placed), _archive(placed), "<h2>Where every op is</h2>",
                placement_strip(
                    names, [(op.name, groups[op.name]) for op in workload.graph.ops
                            if op.phase == "forward" and op.name in groups],
                ),
                picture,
            ),
            style=_STYLE, among="placement",
        )
    )  # fmt: skip


def _step_note(placed: Placed) -> str:
    """How sure the step is, and the rule by which ops were run."""
    interval_s = placed.likely_step_s
    likely = "" if interval_s is None else f"{INTERVAL} {interval_words(interval_s)}; "
    return f"{likely}dispatch: {placed.dispatch}"


def forward_svg(graph: Graph, groups: Mapping[str, str]) -> str:
    """The forward ops of a graph, those of one group in one colour."""
    return to_svg(forward_part(graph), groups, groups, max_nodes=MAX_DRAWN_OPS)


def placement_strip(devices: Sequence[str], ops: Sequence[tuple[str, str]]) -> str:
    """A row for each device that has ops: runs of them from left to right."""
    used = [name for name in devices if any(place == name for _, place in ops)]
    if not ops:
        return ""
    wide = (WIDTH - STRIP_LEFT) / len(ops)
    parts = [
        f'<text class="e" x="{STRIP_LEFT - 8}" y="{16 + 24 * row}">{escape(cut(name, 20))}</text>'
        f'<rect x="{STRIP_LEFT}" y="{2 + 24 * row}" width="{WIDTH - STRIP_LEFT}" height="20" '
        'fill="var(--card)"/>'
        for row, name in enumerate(used)
    ]
    begin = 0
    for name, run in itertools.groupby(ops, key=lambda pair: pair[1]):
        names = [op for op, _ in run]
        row, end = used.index(name), begin + len(names)
        what = names[0] if len(names) == 1 else f"{names[0]} … {names[-1]} ({len(names)} ops)"
        parts.append(
            f'<rect x="{STRIP_LEFT + begin * wide:.1f}" y="{2 + 24 * row}" '
            f'width="{max(0.6, len(names) * wide - 0.6):.1f}" height="20" rx="2" '
            f'fill="{CATEGORY_COLORS[row % 8]}">'
            f"<title>{escape(name)}: {escape(what)}</title></rect>"
        )
        begin = end
    return (
        figure("ops by device, in the order of the model", parts, 6 + 24 * len(used))
        + '<p class="soft">From left to right the ops in the order of the model.</p>'
    )


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
    return "<h2>The devices</h2>" + table(HEADER, rows, (2, 3, 4))


def _tried(placed: Placed) -> str:
    """Everything that was simulated, by time and memory."""
    tried = [one for one in placed.tried if one.step_s > 0][:MOST_TRIED]
    if len(tried) < 2:
        return ""
    front = pareto_front([(one.step_s, max(one.peak_bytes)) for one in tried])
    marks = [
        Mark(
            one.step_s * 1e3, max(one.peak_bytes) / 2**30,
            "#2f74d0" if one is placed.best else "#2b8453" if n in front else "#6b7683",
            f"{one.name}: {units.seconds(one.step_s)}, {units.size(max(one.peak_bytes))}, "
            f"{one.num_devices} devices{'' if one.fits else ', does not fit'}",
            8 if one is placed.best else 5,
            "diamond" if one is placed.best else "square" if n in front else "circle",
            str(n),
        )
        for n, one in enumerate(tried)
    ]  # fmt: skip
    told = "".join(
        f'<li data-picked="{n}"{"" if one is placed.best else " hidden"}><b>{escape(one.name)}</b>'
        f"<br>{units.seconds(one.step_s)}, {units.size(max(one.peak_bytes))} on the fullest of "
        f"{one.num_devices} devices{'' if one.fits else '; does not fit'}"
        f"{' · on the front' if n in front else ''}</li>"
        for n, one in enumerate(tried)
    )
    marks.sort(key=lambda mark: mark.shape)  # circles first: no other is hidden by them
    return (
        "<h2>What else was simulated</h2>"
        + scatter("placements by time and memory", marks, "step, ms", "fullest device, GiB")
        + '<p class="soft">◆ this placement, ■ others that none beats in both, ● the rest. Choose '
        f'a mark to read of it.</p><ul class="picked">{told}</ul>'
    )  # fmt: skip


def _archive(placed: Placed) -> str:
    """What a method that keeps an archive has kept, by devices and bytes sent."""
    if placed.archive is None or not placed.archive.elites:
        return ""
    header, rows = archive_rows(placed)
    shown = table(header, rows, range(1, len(header)))
    note = (
        '<p class="soft">The best step by devices used and bytes sent, as the search estimates it; '
        "what is chosen in the end is simulated, and may differ from that.</p>"
    )
    return folded(f"the archive: {len(placed.archive.elites):,} elites", note + shown, is_open=True)
