"""A placement in words: how long a step takes, what each device does, what else was tried."""

from collections.abc import Sequence

from partita import units
from partita.jobs.place_result import Placed, SimulatedPlacement
from partita.report.summary import MEMORY_HEADER, predicted_words
from partita.report.terminal import gantt
from partita.search.base import Status
from partita.timeline import Timeline

MOST_CANDIDATES = 6
MOST_LINKS, LEAST_BUSY = 8, 0.002
ENDINGS = {
    Status.OPTIMAL: "proven optimal",
    Status.FEASIBLE: "found",
    Status.STOPPED: "stopped",
    Status.INFEASIBLE: "infeasible",
}


def placement_text(placed: Placed, width: int = 80, color: bool = False) -> str:
    """What to know of a placement: headline, devices, chart, what else was tried."""
    lines = [*_headline(placed), ""]
    if placed.best is None or placed.timeline is None:
        return "\n".join([*lines, f"{ENDINGS[placed.status]}: {placed.why}"])
    lines += [*_result(placed, placed.best), "", *device_table(placed)]
    lanes = shown_lanes(placed.timeline)
    lines += ["", gantt(placed.timeline, width=width, color=color, lanes=lanes)]
    left = len(placed.timeline.program.lanes) - len(lanes)
    lines += [f"{left} links that do less are not drawn"] if left else []
    if len(placed.tried) > 1:
        lines += ["", *_candidates(placed.tried)]
    if placed.archive is not None and placed.archive.elites:
        lines += ["", archive_text(placed)]
    return "\n".join(lines)


def shown_lanes(timeline: Timeline) -> list[int]:
    """All devices, and of the links the few that do most."""
    used = timeline.utilisation().tolist()
    lanes = timeline.program.lanes
    devices = [index for index, lane in enumerate(lanes) if lane.kind == "device"]
    links = [index for index, lane in enumerate(lanes) if lane.kind != "device"]
    busiest = sorted(links, key=lambda index: -used[index])[:MOST_LINKS]
    return devices + sorted(index for index in busiest if used[index] >= LEAST_BUSY)


def front_text(candidates: Sequence[SimulatedPlacement]) -> str:
    """The front of time, memory and devices as a table."""
    rows = [
        (
            units.seconds(item.step_s),
            units.size(max(item.peak_bytes)),
            f"{item.num_devices}",
            item.name,
        )
        for item in candidates
    ]
    header = ("step", f"largest {MEMORY_HEADER}", "devices", "placement")
    said = "no other placement tried is better in all of time, memory and devices:"
    return f"{said}\n{units.table(header, rows, numbers=(0, 1, 2))}"


def archive_rows(placed: Placed) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """(header, rows) of what a method keeps: the best step by devices used and bytes sent."""
    archive = placed.archive
    used = sorted({elite.devices_used for elite in archive.elites})
    kinds = sorted({elite.communication_class for elite in archive.elites})
    cells = {
        (elite.devices_used, elite.communication_class): units.seconds(elite.makespan_ms / 1e3)
        if elite.score_ms <= elite.makespan_ms
        else "no room"
        for elite in archive.elites
    }
    header = (
        "devices",
        *(units.size(archive.class_bytes[kind]) if kind else "none" for kind in kinds),
    )
    return header, [
        (f"{count}", *(cells.get((count, kind), "") for kind in kinds)) for count in used
    ]


def archive_text(placed: Placed) -> str:
    """What a method that keeps an archive has kept: the best step by devices and bytes sent."""
    header, rows = archive_rows(placed)
    said = "archive: best step of the search by devices used and bytes sent a batch, at most"
    return f"{said}\n{units.table(header, rows, numbers=range(1, len(header)))}"


def device_table(placed: Placed) -> list[str]:
    """A row per device: what is on it, how busy it is, what it holds and sends."""
    best, timeline = placed.best, placed.timeline
    assert best is not None
    assert timeline is not None
    cluster, model = placed.model.cluster, placed.model
    lanes = [lane for lane in timeline.program.lanes if lane.kind == "device"]
    busy = dict(zip(range(len(lanes)), timeline.utilisation().tolist(), strict=False))
    used = sorted(set(best.placement))
    order = used if placed.semantics == "partita" else range(cluster.num_devices)
    share = {number: busy[row] for row, number in enumerate(order)}
    sends = [0.0] * cluster.num_devices
    for layer, place in enumerate(best.placement):
        targets = {best.placement[child] for child in model.children[layer]} - {place}
        sends[place] += len(targets) * model.sent_bytes[layer]
    rows = []
    for index, device in enumerate(cluster.devices):
        layers = [i for i, at in enumerate(best.placement) if at == index]
        ops = sum(len(model.layers[i]) for i in layers)
        capacity = cluster.kind_of(index).memory_bytes
        rows.append(
            (
                f"{index} {device.name}",
                device.kind,
                f"{len(layers)}",
                f"{ops}",
                f"{share.get(index, 0.0):.0%}",
                units.size(best.peak_bytes[index]),
                units.size(capacity),
                units.size(sends[index]),
            )
        )
    header = ("device", "kind", "layers", "ops", "busy", MEMORY_HEADER, "of", "sends a batch")
    return units.table(header, rows, numbers=(2, 3, 4, 5, 6, 7)).split("\n")


def _headline(placed: Placed) -> list[str]:
    workload, cluster = placed.subject.workload, placed.model.cluster
    job = f"training with {workload.optimizer}" if workload.training else "inference"
    batches = placed.problem.batches
    many = "" if batches == 1 else f" x {batches}, {placed.problem.pipeline_batches} at once"
    return [
        f"{workload.spec}: {units.count(workload.graph.num_parameters)} parameters, "
        f"{len(placed.model.layers):,} layers, {job}, batch {workload.batch}{many}, "
        f"{workload.dtype}",
        f"{cluster.name}: {cluster.num_devices} devices; rules: {placed.semantics}; "
        f"method: {placed.method}",
    ]


def _result(placed: Placed, best: SimulatedPlacement) -> list[str]:
    samples = placed.subject.workload.batch * placed.problem.batches
    rate = samples / best.step_s if best.step_s else 0.0
    away = "" if not placed.gap else f": at most {placed.gap:.1%} from optimal"
    rule = f"   ({placed.dispatch})" if placed.dispatch else ""
    tried = f", {placed.evaluations:,} evaluations" if placed.evaluations else ""
    bound = units.seconds(placed.lower_bound_s)
    return [
        f"step         {step_words(placed)}   ({rate:,.1f} samples/s){rule}",
        f"lower bound  {bound} on this cost model, over all placements{away}",
        f"{ENDINGS[placed.status]}: {placed.why}",
        f"{units.seconds(placed.seconds)}{tried}",
    ]


def step_words(placed: Placed) -> str:
    """The predicted step of the best placement, with its interval where one is known."""
    assert placed.best is not None
    step_s, interval_s = placed.best.step_s, placed.likely_step_s
    if interval_s is None:
        return f"{units.seconds(step_s)}, predicted by Exprimo's rules"
    return predicted_words(step_s, interval_s)


def _candidates(tried: Sequence[SimulatedPlacement], most: int = MOST_CANDIDATES) -> list[str]:
    """The best of each sort that was tried."""
    first = list({item.name: item for item in reversed(tried)}.values())[::-1]
    rows = [
        (
            item.name,
            units.seconds(item.step_s),
            f"{item.num_devices}",
            units.size(max(item.peak_bytes)),
            "" if item.fits else "does not fit",
        )
        for item in sorted(first, key=lambda item: (not item.fits, item.step_s))[:most]
    ]
    header = ("best of each sort", "step", "devices", f"largest {MEMORY_HEADER}", "")
    candidates = units.table(header, rows, numbers=(1, 2, 3)).split("\n")
    left = len(tried) - len(rows)
    return [*candidates, *([f"... and {left:,} others"] if left > 0 else [])]
