"""The part of a plan's page on the model: what costs how much, how ops are split, the roofline."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from partita import units
from partita.jobs.cost_tree import CostNode, OpChip
from partita.jobs.simulate import Simulation, slowest_groups
from partita.report.charts import ChartAxis, cut
from partita.report.figures import WIDTH, Mark, figure, log_axes, scatter
from partita.report.palette import CATEGORY_COLORS

TREEMAP_HEIGHT = 330.0
LEAST_SHARE = 0.0015  # of the model: smaller boxes are left to the tree
MOST_POINTS = 150
TERA = 1e12
MOST_LINES = 3000  # of the tree
COLORS = CATEGORY_COLORS[:8]
SHAPES = {"compute": "circle", "memory": "square", "launch": "diamond"}
MIXED = CATEGORY_COLORS[8]  # what has no colour of its own
MOST_NAMED = 6  # marks of the roofline
BOUND_COLORS = {"compute": "#2f74d0", "memory": "#a5650f", "launch": "#6b7683"}


@dataclass(frozen=True)
class Box:
    """A place in the treemap."""

    x: float
    y: float
    wide: float
    tall: float


def model_section(tree: CostNode) -> str:
    """The model as boxes by cost, and as a tree with chips."""
    total = tree.total_s or 1.0
    colors = box_colors(tree)
    boxes = _boxes(tree, Box(0, 0, WIDTH, TREEMAP_HEIGHT), total, colors, 0)
    chips = "".join(
        f'<span class="chip" style="background:{color}">{escape(group)}</span> '
        for group, color in list(colors.by_group.items())[:16]
    )
    what = "the stage" if colors.by_stage else "how an op is split"
    left = [MOST_LINES]
    lines = _lines(tree, total, colors, left, depth=0)
    return (
        "<h2>The model by cost</h2>"
        '<p class="soft">Boxes are as large as what ops and their gradients take on all devices of '
        f"their stage together; repeated layers are one box. Colours tell {what}: {chips}</p>"
        f"{figure('the model by cost', boxes, TREEMAP_HEIGHT)}"
        '<p class="screen"><input type="search" data-filter="tree" placeholder="find a module" '
        'aria-label="find a module"> <output></output></p>'
        f'<div class="tree" data-filtered="tree">{lines}</div>'
    )


@dataclass(frozen=True)
class BoxColors:
    """A colour for each stage; of a model in one stage, for each way that its ops are split."""

    by_group: dict[str, str]
    by_stage: bool

    def group(self, chip: OpChip) -> str:
        """What the colour of an op stands for."""
        return chip.stage if self.by_stage else chip.words

    def of(self, node: CostNode) -> tuple[str, str]:
        """(what the ops below a node have in common, its colour); `mixed` where they differ."""
        groups = {self.group(chip) for chip in _chips(node)}
        if len(groups) != 1:
            return "mixed", MIXED
        (group,) = groups
        return group, self.by_group[group]


def box_colors(tree: CostNode) -> BoxColors:
    """Stages in their order; splits by what they cost, the dearest first."""
    chips = _chips(tree)
    stages = sorted({chip.stage for chip in chips}, key=lambda name: (len(name), name))
    if len(stages) > 1:  # stage2 before stage10
        return BoxColors({name: COLORS[n % len(COLORS)] for n, name in enumerate(stages)}, True)
    spent: dict[str, float] = {}
    for leaf in _leaves(tree):
        assert leaf.chip is not None
        spent[leaf.chip.words] = spent.get(leaf.chip.words, 0.0) + leaf.total_s
    ranked = sorted(spent, key=lambda words: (-spent[words], words))
    most = len(COLORS) - 1
    return BoxColors(
        {words: COLORS[place] if place < most else MIXED for place, words in enumerate(ranked)},
        False,
    )


def _leaves(node: CostNode) -> list[CostNode]:
    own = [node] if node.chip else []
    return own + [leaf for child in node.children for leaf in _leaves(child)]


def _chips(node: CostNode) -> list[OpChip]:
    return [leaf.chip for leaf in _leaves(node) if leaf.chip]


def title_of(node: CostNode) -> str:
    """The name of a node, and how many it stands for."""
    if node.count == 1:
        return node.name
    return (
        f"{node.name} … {node.last} ({node.count})" if node.last else f"{node.name} ({node.count})"
    )


def _boxes(node: CostNode, box: Box, total: float, colors: BoxColors, depth: int) -> list[str]:
    """Boxes of the children, larger ones first, each as square as can be."""
    children = sorted(
        (child for child in node.children if child.total_s > LEAST_SHARE * total),
        key=lambda child: -child.total_s,
    )
    boxes: list[str] = []
    for child, place in zip(children, squarified([c.total_s for c in children], box), strict=True):
        has_room = place.wide > 40 and place.tall > 40
        boxes.append(_box(child, place, total, colors, is_frame=bool(child.children) and has_room))
        if child.children and has_room:
            inner = Box(place.x + 3, place.y + 18, place.wide - 6, place.tall - 21)
            boxes += _boxes(child, inner, total, colors, depth + 1)
    return boxes


def _box(
    node: CostNode, place: Box, total: float, colors: BoxColors, *, is_frame: bool
) -> str:  # fmt: skip
    """A frame around the boxes of a module; where they have no room, or of an op, a full box."""
    name = title_of(node)
    share = f"{units.seconds(node.total_s)} of devices, {node.total_s / total:.1%}"
    about = [name, share]
    group, color = colors.of(node)
    fill, shade = ("var(--card)", "") if is_frame else (color, "w")
    if node.chip:
        chip = node.chip
        about += [
            f"{chip.kind} of {chip.stage}, split: {chip.words}",
            f"makes {chip.output}, {units.size(chip.output_bytes)} on a device",
        ]
        if chip.parameter_bytes:
            about.append(f"parameters {units.size(chip.parameter_bytes)}")
    room = int((place.wide - 8) / 6.6)
    text = ""
    if room >= 3 and place.tall > 15:
        text = (
            f'<text class="{shade}" x="{place.x + 4:.1f}" y="{place.y + 13:.1f}" '
            f'style="pointer-events:none">{escape(cut(name, room))}</text>'
        )
    fits = 5.6 * len(group) <= place.wide - 8 and place.tall > 34
    if shade and len(colors.by_group) > 1 and fits:  # not by colour alone
        text += (
            f'<text class="{shade}" x="{place.x + 4:.1f}" y="{place.y + 27:.1f}" '
            f'style="pointer-events:none;font-size:10px">{escape(group)}</text>'
        )
    return (
        f'<g><rect x="{place.x:.1f}" y="{place.y:.1f}" width="{max(0.0, place.wide - 1):.1f}" '
        f'height="{max(0.0, place.tall - 1):.1f}" rx="2" fill="{fill}" stroke="var(--line)"/>'
        f"<title>{escape(chr(10).join(about))}</title>{text}</g>"
    )


def squarified(sizes: Sequence[float], box: Box) -> list[Box]:
    """Places in a box, as large as the sizes and as square as rows allow; sizes descend.

    After Bruls, Huizing and van Wijk: a row takes the next size as long as its worst side ratio
    does not get worse.
    """
    total = math.fsum(sizes)
    if not total > 0 or box.wide <= 0 or box.tall <= 0:
        return [Box(box.x, box.y, 0.0, 0.0) for _ in sizes]
    areas = [size * box.wide * box.tall / total for size in sizes]
    places: list[Box] = []
    start = 0
    while start < len(areas):
        short_side = max(1e-9, min(box.wide, box.tall))
        end = start + 1
        while end < len(areas) and _worst(areas[start : end + 1], short_side) <= _worst(
            areas[start:end], short_side
        ):
            end += 1
        row, box = _row(areas[start:end], box)
        places += row
        start = end
    return places


def _worst(areas: Sequence[float], side: float) -> float:
    """The largest side ratio of a row along a side."""
    thick = math.fsum(areas) / side
    return max(max(thick * thick / area, area / (thick * thick)) for area in areas if area > 0)


def _row(areas: Sequence[float], box: Box) -> tuple[list[Box], Box]:
    """A row along the shorter side, and what is left of the box."""
    along_y = box.tall <= box.wide
    side = max(1e-9, box.tall if along_y else box.wide)
    thick = math.fsum(areas) / side
    places, at = [], 0.0
    for area in areas:
        long = area / thick if thick > 0 else 0.0
        if along_y:
            places.append(Box(box.x, box.y + at, thick, long))
        else:
            places.append(Box(box.x + at, box.y, long, thick))
        at += long
    if along_y:
        return places, Box(box.x + thick, box.y, max(0.0, box.wide - thick), box.tall)
    return places, Box(box.x, box.y + thick, box.wide, max(0.0, box.tall - thick))


def _lines(node: CostNode, total: float, colors: BoxColors, left: list[int], depth: int) -> str:
    """The tree as nested folds; ops have a chip that says how they are split."""
    lines = []
    for child in node.children:
        left[0] -= 1
        if left[0] < 0:
            lines.append('<p class="soft">more modules are in the plan file</p>')
            break
        share = child.total_s / total
        figures = f'<span class="n">{units.seconds(child.total_s)} · {share:.1%}</span>'
        bar = f'<i class="share" style="width:{share * 8:.2f}rem"></i>'
        name = escape(title_of(child))
        if child.children:
            inner = _lines(child, total, colors, left, depth + 1)
            opened = " open" if depth < 1 else ""
            lines.append(
                f'<details{opened} data-name="{name}"><summary><span class="line">{name} '
                f'<span class="soft">{child.num_ops:,} ops</span>{bar}{figures}</span></summary>'
                f"{inner}</details>"
            )
            continue
        lines.append(_leaf_line(child, name, bar + figures, colors))
    return "".join(lines)


def _leaf_line(node: CostNode, name: str, figures: str, colors: BoxColors) -> str:
    chip = node.chip
    assert chip is not None
    about = f"{chip.stage}: makes {chip.output}, {units.size(chip.output_bytes)} on a device"
    if chip.parameter_bytes:
        about += f"; parameters {units.size(chip.parameter_bytes)}"
    zero = (
        f'<span class="chip plain">ZeRO {chip.zero}</span>'
        if chip.zero and (chip.parameter_bytes)
        else ""
    )
    return (
        f'<p data-name="{name}" title="{escape(about)}"><span class="line">{name} '
        f'<span class="soft">{escape(chip.kind)}</span> '
        f'<span class="chip" style="background:{colors.of(node)[1]}">{escape(chip.words)}</span>'
        f"{zero}{figures}</span></p>"
    )


def roofline_section(simulation: Simulation) -> str:
    """TFLOP/s that ops reach against their FLOPs per byte, under the roof of their device."""
    groups = [
        group
        for group in slowest_groups(simulation.ops, MOST_POINTS)
        if group.first.cost.flops > 0
        and group.first.cost.traffic_bytes > 0
        and group.first.cost.seconds > 0
    ]
    if not groups:
        return ""
    longest = max(group.seconds for group in groups)
    marks = [
        Mark(
            group.first.cost.flops / group.first.cost.traffic_bytes,
            group.first.cost.flops / group.first.cost.seconds / TERA,
            BOUND_COLORS.get(group.first.cost.bound, "#6b7683"),
            f"{group.name} ({group.first.kind} {group.first.phase}), x{group.count}: "
            f"{units.rate(group.first.cost.flops / group.first.cost.seconds, 'FLOP')}, "
            f"{units.seconds(group.seconds)}, bound by {group.first.cost.bound}",
            3.5 + 9 * math.sqrt(group.seconds / longest),
            SHAPES.get(group.first.cost.bound, "circle"),
            label=_last_words(group.name) if place < MOST_NAMED else "",
        )
        for place, group in enumerate(groups)
    ]
    busiest = max(simulation.stages, key=lambda stage: len(_own_ops(simulation, stage.name)))
    kind = simulation.cluster.kind_of(busiest.mesh.devices[0])
    peak = kind.peak(simulation.workload.dtype)
    bandwidth = kind.memory_bytes_per_s
    knee = peak / bandwidth
    x, y = log_axes([*(mark.x for mark in marks), knee], [*(mark.y for mark in marks), peak / TERA])
    words = (
        f"{kind.name}: {units.rate(peak, 'FLOP')} in {simulation.workload.dtype}, "
        f"{units.rate(bandwidth, 'B')} of memory bandwidth; larger marks take longer"
    )
    roofs = [_roof(x, y, peak, bandwidth)]
    if kind.cache_bytes_per_s > bandwidth:
        roofs.append(_roof(x, y, peak, kind.cache_bytes_per_s, is_cache=True))
        words += (
            f"; dotted, {units.rate(kind.cache_bytes_per_s, 'B')} of its cache: what an op reads "
            "that was just written comes from there"
        )
    return (
        "<h2>How near the roof ops are</h2>"
        + scatter(
            "FLOP/s against FLOPs per byte", marks, "FLOPs per byte of memory traffic",
            "TFLOP/s on one device", roofs, (x, y),
        )
        + f'<p class="soft">{escape(words)}. ● bound by compute, ■ by memory, ◆ by launches.</p>'
    )  # fmt: skip


def _last_words(name: str) -> str:
    """The end of a name says most: `mlp.c_fc.wgrad` of `h.*.mlp.c_fc.wgrad`."""
    return ".".join(name.split(".")[-3:])


def _own_ops(simulation: Simulation, name: str) -> set[str]:
    """The ops of a stage that are among those of the busiest devices."""
    known = {report.name for report in simulation.ops}
    stage = next(stage for stage in simulation.stages if stage.name == name)
    return {split.op for split in stage.splits} & known


def _roof(
    x: ChartAxis, y: ChartAxis, peak: float, bandwidth: float, *, is_cache: bool = False
) -> str:  # fmt: skip
    """The slope of a bandwidth and the peak it leads up to; of a cache, the slope alone."""
    knee, left = peak / bandwidth, max(x.low, y.low * TERA / bandwidth)
    if left >= knee:
        return ""
    level = "" if is_cache else f"L{x.at(x.high):.1f} {y.at(peak / TERA):.1f}"
    what, dashes = ("cache", "2 3") if is_cache else ("memory and arithmetic", "6 3")
    return (
        f'<path d="M{x.at(left):.1f} {y.at(left * bandwidth / TERA):.1f}L{x.at(knee):.1f} '
        f'{y.at(peak / TERA):.1f}{level}" fill="none" stroke="var(--ink)" '
        f'stroke-dasharray="{dashes}"><title>roof of {what}</title></path>'
    )
