"""Pictures of a graph: Graphviz dot, and SVG with a layout of our own.

Ops are boxes coloured by family of kinds (or by a group given for each, such as its device),
inputs and outputs of the model are pills, parameters are not drawn. Gradients have dashed borders;
that they also read tensors of the forward is told on hover but not drawn as arrows, except where
the backward begins. Hovering tells kind, shapes, loop nest and FLOPs. The SVG of a graph with more
than `max_nodes` ops shows modules instead: all ops of a scope, cut at the greatest depth that fits,
are one box.
"""

import html
import itertools
import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass

from partita.graph.layout import DrawnLayout, layered
from partita.graph.loops import loop_nest
from partita.graph.record import Graph, Op, Tensor
from partita.graph.work import flops

Groups = Mapping[str, object]
Labels = Mapping[str, str]

MAX_NODES = 300
MANY = 3  # more inputs or outputs of one box than this are drawn together
_FAMILIES = {
    "matrix": ("linear", "matmul", "einsum", "expert_linear"),
    "convolution": ("conv",),
    "attention": ("attention",),
    "recurrent": ("lstm", "gru", "lstm_cell", "gru_cell", "state_space"),
    "norm": ("batch_norm", "group_norm", "layer_norm", "rms_norm", "softmax"),
    "pool, reduce": ("pool", "reduce", "resize"),
    "elementwise": ("elementwise",),
    "move": (
        "concat", "split", "slice", "reshape", "transpose", "pad", "expand", "constant",
    ),
    "lookup": ("embedding",),
    "experts": ("moe_router", "moe_dispatch", "moe_combine"),
    "loss": ("cross_entropy", "mse_loss"),
    "optimizer": ("optimizer",),
}  # fmt: skip
_FAMILY = {kind: family for family, kinds in _FAMILIES.items() for kind in kinds}
_COLORS = {
    "matrix": "#a9c8f0",
    "convolution": "#9bd4cf",
    "attention": "#c5b3ec",
    "recurrent": "#d9b8dd",
    "norm": "#f4d58a",
    "pool, reduce": "#f2b98f",
    "elementwise": "#cfe3b0",
    "move": "#e2e2e2",
    "lookup": "#b6dcf2",
    "experts": "#f3b7c6",
    "loss": "#ee9f96",
    "optimizer": "#d8c7b0",
    "modules": "#dfe6f0",
}
_OTHER = "#f7f7f7"
_PALETTE = (
    "#a9c8f0", "#f4d58a", "#9bd4cf", "#ee9f96", "#c5b3ec", "#cfe3b0", "#f2b98f", "#b6dcf2",
    "#f3b7c6", "#d8c7b0", "#d9b8dd", "#c3c9d4",
)  # fmt: skip
_LETTER, _LINE = 6.6, 15.0  # pixels of a letter and a line, about
_MARGIN = 16.0
_LONGEST = 34  # letters of a name that are shown; the end says most
# What XML cannot hold, and what would break a line of a label.
_UNSHOWN = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ufffe\uffff]")


@dataclass(frozen=True, slots=True)
class _Box:
    """A node of the picture: an op, a module of ops, or a tensor at the border."""

    lines: tuple[str, ...]
    title: str
    color: str
    shape: str = "op"  # op, module, tensor
    dashed: bool = False


@dataclass(frozen=True, slots=True)
class _Scene:
    """What is to be drawn; boxes in topological order, arrows between their numbers."""

    boxes: tuple[_Box, ...]
    arrows: tuple[tuple[int, int, str], ...]
    legend: tuple[tuple[str, str], ...]


def to_dot(
    graph: Graph,
    color_by: Groups | None = None,
    labels: Labels | None = None,
    *,
    clusters: bool = True,
) -> str:
    """The graph in Graphviz' language, every op a node; modules are framed if `clusters`.

    `color_by` maps names of ops to groups that share a colour, `labels` to a line of text.
    """
    colors = _Colors(graph, color_by)
    lines = [
        f"digraph {_dot(graph.name)} {{",
        '  node [shape=box, style="filled,rounded", fontname="Helvetica", fontsize=11];',
        '  edge [color="#777777", arrowsize=0.7];',
        '  compound=true; rankdir=TB; fontname="Helvetica"; fontsize=11;',
    ]
    number = {op.name: i for i, op in enumerate(graph.ops)}
    nodes = {
        op.name: _dot_node(f"n{number[op.name]}", _op_box(graph, [op], "", colors, labels or {}))
        for op in graph.ops
    }
    lines += _dot_modules(graph, nodes) if clusters else [f"  {node}" for node in nodes.values()]
    for i, tensor in enumerate(graph.inputs):
        lines.append(f"  {_dot_node(f'i{i}', _tensors_box([tensor], 'input'))}")
        for user in graph.consumers(tensor.name):
            lines.append(f"  i{i} -> n{number[user.name]};")
    for a, b, tensor in graph.edges():
        kept = "" if tensor.name in _drawn_inputs(graph, b) else ", style=dotted, constraint=false"
        tip = _dot(_about_tensor(tensor))
        lines.append(f"  n{number[a.name]} -> n{number[b.name]} [tooltip={tip}{kept}];")
    for i, name in enumerate(dict.fromkeys(graph.outputs)):
        lines.append(f"  {_dot_node(f'o{i}', _tensors_box([graph.tensor(name)], 'output'))}")
        source = graph.producer(name)
        if source is not None:
            lines.append(f"  n{number[source.name]} -> o{i};")
    return "\n".join([*lines, "}"]) + "\n"


def to_svg(
    graph: Graph,
    color_by: Groups | None = None,
    labels: Labels | None = None,
    *,
    max_nodes: int = MAX_NODES,
) -> str:
    """The graph as a picture that stands by itself, folded by modules where it is large."""
    scene = _scene(graph, color_by, labels, max(1, max_nodes))
    layout = layered([_size(box) for box in scene.boxes], [(a, b) for a, b, _ in scene.arrows])
    return _svg(graph, scene, layout)


class _Colors:
    """The colour of an op: of its group if groups are given, else of its family of kinds."""

    def __init__(self, graph: Graph, groups: Groups | None) -> None:
        self.groups = groups
        known = [groups[op.name] for op in graph.ops if op.name in groups] if groups else []
        self.palette = dict(zip(dict.fromkeys(known), itertools.cycle(_PALETTE), strict=False))

    def of(self, op: Op) -> tuple[str, str]:
        """Its name in the legend, and the colour."""
        if self.groups is None:
            family = _FAMILY.get(op.kind, "")
            return (family, _COLORS[family]) if family else ("unknown kind", _OTHER)
        if op.name not in self.groups:
            return "no group", _OTHER
        group = self.groups[op.name]
        return str(group), self.palette[group]


def _scene(graph: Graph, color_by: Groups | None, labels: Labels | None, most: int) -> _Scene:
    colors = _Colors(graph, color_by)
    modules = _modules(graph, most)
    module_of = {op.name: i for i, (_, ops) in enumerate(modules) for op in ops}
    given = _alike(
        graph.inputs, lambda t: frozenset(module_of[op.name] for op in graph.consumers(t.name))
    )
    results = _alike(
        (graph.tensor(name) for name in dict.fromkeys(graph.outputs)),
        lambda t: module_of[p.name] if (p := graph.producer(t.name)) is not None else t.name,
    )
    boxes = [_tensors_box(tensors, "input") for tensors in given]
    source = {tensor.name: i for i, tensors in enumerate(given) for tensor in tensors}
    home = {name: i + len(boxes) for name, i in module_of.items()}
    shown: dict[str, str] = {}
    for label, ops in modules:
        source.update((name, len(boxes)) for op in ops for name in op.outputs)
        shown.update(dict(map(colors.of, ops)) if color_by or not label else {})
        box = _module_box if label else _op_box
        boxes.append(box(graph, ops, label, colors, labels or {}))
    arrows: dict[tuple[int, int], list[Tensor]] = {}
    for op in graph.ops:
        for name in _drawn_inputs(graph, op):
            if name in source and source[name] != home[op.name]:
                ends = (source[name], home[op.name])
                arrows.setdefault(ends, []).append(graph.tensor(name))
    for tensors in results:
        if tensors[0].name in source:
            arrows[source[tensors[0].name], len(boxes)] = tensors
        boxes.append(_tensors_box(tensors, "output"))
    return _Scene(
        tuple(boxes),
        tuple((a, b, _about_tensors(tensors)) for (a, b), tensors in arrows.items()),
        tuple(shown.items()),
    )


def _alike(tensors: Iterable[Tensor], ends: Callable[[Tensor], Hashable]) -> list[list[Tensor]]:
    """Tensors one by one, but many that go to or come from the same boxes together."""
    groups: dict[Hashable, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(ends(tensor), []).append(tensor)
    return [
        part
        for group in groups.values()
        for part in ([group] if len(group) > MANY else [[tensor] for tensor in group])
    ]


def _drawn_inputs(graph: Graph, op: Op) -> list[str]:
    """What an op reads, less what a gradient in the midst of the backward reads of the forward."""
    names = list(dict.fromkeys(op.inputs))
    computed = [n for n in names if (p := graph.producer(n)) is not None and p.phase != "forward"]
    return computed if computed and op.phase != "forward" else names


def _modules(graph: Graph, most: int) -> list[tuple[str, list[Op]]]:
    """Ops one by one if they are few, else by scope to the greatest depth that is few enough."""
    deepest = max((op.scope.count(".") + 1 for op in graph.ops), default=1)
    for depth in range(deepest + 1, 0, -1):
        folded: dict[tuple[str, str], list[Op]] = {}
        for op in graph.ops:
            key = _module_of(op, depth) if depth <= deepest else _single(graph, op)
            folded.setdefault(key, []).append(op)
        if len(folded) <= most:
            return [(label if len(ops) > 1 else "", ops) for (label, _), ops in folded.items()]
    step = -(-len(graph.ops) // most)  # no modules to fold by: consecutive ops
    chunks = (list(graph.ops[i : i + step]) for i in range(0, len(graph.ops), step))
    return [(f"{ops[0].name} … {ops[-1].name}", ops) for ops in chunks]


def _single(graph: Graph, op: Op) -> tuple[str, str]:
    """Each op by itself, but the updates of one op's parameters together."""
    source = graph.producer(op.inputs[1]) if op.phase == "update" and len(op.inputs) > 1 else None
    return ("", op.name) if source is None else (f"update after {source.name}", "update")


def _module_of(op: Op, depth: int) -> tuple[str, str]:
    """The module at this depth that an op is in; what lies above stays by itself, or it would
    stand both before and after the modules it joins."""
    if op.phase == "update":
        return "optimizer", "update"
    path = op.scope.split(".") if op.scope else []
    if len(path) < depth:
        return "", op.name
    return ".".join(path[:depth]) + ("" if op.phase == "forward" else " backward"), "module"


def _op_box(graph: Graph, ops: list[Op], label: str, colors: _Colors, labels: Labels) -> _Box:
    (op,) = ops
    kind = str(op.attr("fn", op.kind)) if op.kind == "elementwise" else op.kind
    phase = "" if op.phase == "forward" else f" {op.phase}"
    lines = [_short(op.name), f"{kind}{phase} {_times(graph.tensor(op.outputs[0]))}"]
    extra = labels.get(op.name)
    if extra:
        lines.append(_short(extra))
    _, color = colors.of(op)
    return _Box(tuple(lines), _about_op(graph, op), color, dashed=op.phase != "forward")


def _module_box(graph: Graph, ops: list[Op], label: str, colors: _Colors, labels: Labels) -> _Box:
    op_colors = {colors.of(op) for op in ops}
    same = colors.groups is not None and len(op_colors) == 1
    color = next(iter(op_colors))[1] if same else _COLORS["modules"]
    kinds = ", ".join(f"{n} {kind}" for kind, n in Counter(op.kind for op in ops).most_common())
    work = sum(flops(graph.call(op)) for op in ops)
    title = f"{label}: {len(ops)} ops\n{kinds}\n{work:,.0f} FLOPs"
    dashed = ops[0].phase != "forward"
    return _Box((_short(label), f"{len(ops)} ops"), title, color, "module", dashed)


def _tensors_box(tensors: list[Tensor], role: str) -> _Box:
    first, last = tensors[0], tensors[-1]
    lines = (_short(first.name), f"{role} {_times(first)}")
    if len(tensors) > 1:
        lines = (_short(f"{first.name} … {last.name}"), f"{len(tensors)} {role}s")
    return _Box(lines, _about_tensors(tensors), "#ffffff", "tensor")


def _about_op(graph: Graph, op: Op) -> str:
    attrs = ", ".join(f"{key}={value}" for key, value in op.attrs)
    call = graph.call(op)
    lines = [
        op.name + (f" in {op.scope}" if op.scope else ""),
        op.kind + (f" ({op.phase} of {op.forward})" if op.forward else "") + f" {attrs}".rstrip(),
        *(f"reads {_about_tensor(graph.tensor(name))}" for name in op.inputs),
        *(f"gives {_about_tensor(graph.tensor(name))}" for name in op.outputs),
        f"loops {loop_nest(call)}",
        f"{flops(call):,.0f} FLOPs",
    ]
    return "\n".join(lines)


def _about_tensor(tensor: Tensor) -> str:
    return f"{tensor.name}: {tensor.dtype}{list(tensor.shape)}, {tensor.size_bytes:,} bytes"


def _about_tensors(tensors: list[Tensor]) -> str:
    lines = [_about_tensor(tensor) for tensor in tensors[:20]]
    more = len(tensors) - len(lines)
    return "\n".join([*lines, f"and {more} more"] if more else lines)


def _times(tensor: Tensor) -> str:
    return "×".join(map(str, tensor.shape)) or "scalar"


def _short(name: str) -> str:
    return name if len(name) <= _LONGEST else "…" + name[1 - _LONGEST :]


def _dot(text: str) -> str:
    """A quoted string of Graphviz: its backslashes are its own escapes, so they are doubled."""
    parts = text.replace("\\", "\\\\").replace('"', '\\"').split("\n")
    return '"' + "\\n".join(_UNSHOWN.sub("\ufffd", part) for part in parts) + '"'


def _dot_node(name: str, box: _Box) -> str:
    style = {"tensor": ", shape=ellipse", "module": "", "op": ""}[box.shape]
    if box.dashed:
        style += ', style="filled,rounded,dashed"'
    label, tip = _dot("\n".join(box.lines)), _dot(box.title)
    return f'{name} [label={label}, tooltip={tip}, fillcolor="{box.color}"{style}];'


def _dot_modules(graph: Graph, nodes: dict[str, str]) -> list[str]:
    """Nodes inside nested frames, one per module scope."""
    inside: dict[tuple[str, ...], list[str]] = {(): []}
    children: dict[tuple[str, ...], list[tuple[str, ...]]] = {(): []}
    for op in graph.ops:
        path = tuple(op.scope.split(".")) if op.scope else ()
        for depth in range(1, len(path) + 1):
            if path[:depth] not in inside:
                inside[path[:depth]], children[path[:depth]] = [], []
                children[path[: depth - 1]].append(path[:depth])
        inside[path].append(nodes[op.name])
    lines: list[str] = []
    stack: list[tuple[tuple[str, ...], bool]] = [((), False)]
    number = itertools.count()
    while stack:
        path, leaving = stack.pop()
        pad = "  " * (len(path) + 1)
        if leaving:
            lines.append(f"{pad[2:]}}}")
            continue
        if path:
            lines.append(f"{pad[2:]}subgraph cluster_{next(number)} {{")
            lines.append(f'{pad}label={_dot(".".join(path))}; color="#bbbbbb"; style=rounded;')
            stack.append((path, True))
        lines += [f"{pad}{node}" for node in inside[path]]
        stack += [(child, False) for child in reversed(children[path])]
    return lines


def _size(box: _Box) -> tuple[float, float]:
    width = max(len(line) for line in box.lines) * _LETTER + 20
    return max(64.0, width), len(box.lines) * _LINE + 10


def _xml(text: str) -> str:
    lines = text.split("\n")
    return html.escape("\n".join(_UNSHOWN.sub("\ufffd", line) for line in lines))


# Every rule is of this picture alone: it may stand inside a page, beside others.
_STYLE = """
.ops text{font:11px ui-sans-serif,system-ui,Helvetica,Arial,sans-serif;fill:#222;text-anchor:middle}
.ops .name{font-weight:600} .ops .soft{fill:#333} .ops .left{text-anchor:start}
.ops .box{stroke:#55606e;stroke-width:1} .ops .dashed{stroke-dasharray:4 2}
.ops .edge{fill:none;stroke:#8a93a0;stroke-width:1.2}
.ops g.e:hover .edge{stroke:#d2452d;stroke-width:2.4}
.ops g.n:hover .box{stroke:#d2452d;stroke-width:2} .ops .ground{fill:#fff}
@media screen and (prefers-color-scheme:dark){.ops .left{fill:#e6edf3}.ops .ground{fill:#0d1117}}
""".strip()


def _svg(graph: Graph, scene: _Scene, layout: DrawnLayout) -> str:
    legend, top = _legend(scene.legend, max(layout.width, 420.0))
    about = f"{graph.name}: {len(graph.ops)} ops, {graph.num_parameters:,} parameters"
    width = max(layout.width, 420.0, len(about) * (_LETTER + 1)) + 2 * _MARGIN
    height = layout.height + top + 2 * _MARGIN
    shift = (width - 2 * _MARGIN - layout.width) / 2
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="ops" viewBox="0 0 {width:.0f} '
        f'{height:.0f}" width="{width:.0f}" height="{height:.0f}" role="img">',
        f"<title>{_xml(about)}</title>",
        f"<style>{_STYLE}</style>",
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
        'markerHeight="7" orient="auto-start-reverse"><path d="M0 0.8L8 4L0 7.2z" '
        'fill="#8a93a0"/></marker></defs>',
        f'<rect width="{width:.0f}" height="{height:.0f}" class="ground"/>',
        f'<g transform="translate({_MARGIN:g} {_MARGIN:g})">',
        f'<text class="left name" x="0" y="11">{_xml(about)}</text>',
        *legend,
        f'</g><g transform="translate({_MARGIN + shift:.1f} {_MARGIN + top:.1f})">',
    ]
    for (a, b, title), points in zip(scene.arrows, layout.edges, strict=True):
        end = "marker-start" if b < a else "marker-end"
        path = f'<path class="edge" d="{_curve(points)}" {end}="url(#tip)"/>'
        parts.append(f'<g class="e">{path}<title>{_xml(title)}</title></g>')
    for box, x, y in zip(scene.boxes, layout.x, layout.y, strict=True):
        parts.append(_svg_box(box, x, y))
    return "\n".join([*parts, "</g></svg>"]) + "\n"


def _svg_box(box: _Box, x: float, y: float) -> str:
    width, height = _size(box)
    round_by = {"tensor": height / 2, "module": 3.0, "op": 6.0}[box.shape]
    frame = (
        f'<rect class="box{" dashed" if box.dashed else ""}" width="{width:.1f}" '
        f'height="{height:.1f}" rx="{round_by:g}" fill="{box.color}"/>'
    )
    if box.shape == "module":  # a second sheet behind the first
        frame = f'<g transform="translate(3 3)">{frame}</g>{frame}'
    lines = [
        f'<text class="{"soft" if i else "name"}" x="{width / 2:.1f}" y="{16 + i * _LINE:g}">'
        f"{_xml(line)}</text>"
        for i, line in enumerate(_UNSHOWN.sub("\ufffd", line) for line in box.lines)
    ]
    return (
        f'<g class="n" transform="translate({x - width / 2:.1f} {y - height / 2:.1f})">'
        f"{frame}{''.join(lines)}<title>{_xml(box.title)}</title></g>"
    )


def _curve(points: tuple[tuple[float, float], ...]) -> str:
    """Straight where two points share an x, else a curve that leaves and arrives vertically."""
    x, y = points[0]
    parts = [f"M{x:.1f} {y:.1f}"]
    for right, below in points[1:]:
        if abs(right - x) < 0.5:
            parts.append(f"L{right:.1f} {below:.1f}")
        else:
            half = (y + below) / 2
            parts.append(f"C{x:.1f} {half:.1f} {right:.1f} {half:.1f} {right:.1f} {below:.1f}")
        x, y = right, below
    return "".join(parts)


def _legend(entries: tuple[tuple[str, str], ...], width: float) -> tuple[list[str], float]:
    """A patch and a name per colour, in rows; and the height that they and the heading take."""
    parts: list[str] = []
    x, y = 0.0, 30.0
    for name, color in entries[:24]:
        room = len(_short(name)) * _LETTER + 30
        if x and x + room > width:
            x, y = 0.0, y + 18
        parts.append(
            f'<rect class="box" x="{x:.0f}" y="{y - 10:.0f}" width="12" height="12" rx="3" '
            f'fill="{color}"/><text class="left soft" x="{x + 17:.0f}" y="{y:.0f}">'
            f"{_xml(_short(name))}</text>"
        )
        x += room
    return parts, y + (16 if entries else 0)
