"""One rule per kind of step: the tile op it becomes, or the reason why it stays outside.

A rule gives the drafts of a step, or raises `UnfitError` with the sentence that the report shows.
"""

from collections.abc import Callable
from typing import Any

import torch

from partita.run.rtasks.drafts import DTYPES, Draft, Values, Weight
from partita.run.rtasks.lower_chain import Expression, UnfitError, chain_rule
from partita.run.rtasks.tileops import MOST_ROWS, MOST_TERMS
from partita.run.streams.place import EIGHT
from partita.run.streams.read import Held
from partita.run.streams.steps import Flow, Ref, Step, Window

T = torch.Tensor
MOST_ROW = 16384  # columns of a softmax or norm
MOST_GROUPS = 8  # of a convolution that is cut into its groups
MOST_TAPS = 128  # of a window: its code is written out tap by tap
MOST_DENSE = 1 << 20  # elements of a grouped convolution's weight, spelled out with its zeros
# Operators that only look at memory in another way, as long as strides allow.
VIEW_TARGETS = frozenset(
    f"aten.{name}"
    for name in (
        "view.default", "reshape.default", "_unsafe_view.default", "flatten.using_ints",
        "squeeze.dim", "squeeze.dims", "squeeze.default", "unsqueeze.default", "transpose.int",
        "permute.default", "t.default", "select.int", "slice.Tensor", "expand.default",
        "split.Tensor", "split_with_sizes.default", "chunk.default", "unbind.int",
        "numpy_T.default", "unflatten.int",
    )
) | {"getitem"}  # fmt: skip


class Reading:
    """A flow, the layout of its values, and which results of an operator have which name."""

    def __init__(self, flow: Flow) -> None:
        self.flow = flow
        self.values = Values(flow)
        self.items: dict[str, dict[int, str]] = {}
        for step in flow.steps:
            if step.target == "getitem" and isinstance(step.arguments[1], int):
                self.items.setdefault(step.inputs[0], {})[step.arguments[1]] = step.name
        self.tf32_conv = bool(torch.backends.cudnn.allow_tf32)
        self.tf32_product = bool(torch.backends.cuda.matmul.allow_tf32)

    def held(self, value: Any) -> T | None:
        """A constant among the arguments of a call, if it is one."""
        return self.flow.constants[value] if isinstance(value, Held) else None

    def constant(self, name: str) -> T | None:
        """A constant of a step, in f32; None where the step has none."""
        return self.flow.constants[name].float() if name else None

    def need(self, name: str, *, image: bool = False) -> None:
        """Read or make a value in this layout, or say why not."""
        if name not in self.values.shapes:
            raise UnfitError(f"{name} is several values")
        if not self.values.is_tensor(name):
            raise UnfitError(
                f"{name} is {list(self.values.shapes[name])} of {self.values.dtypes[name]}"
            )
        if not self.values.take(name, image=image):
            raise UnfitError(f"{name} lies otherwise in memory")


def read_drafts(reading: Reading) -> list[Draft]:
    """Every step as drafts, in order."""
    found: list[Draft] = []
    done: set[str] = set()
    for step in reading.flow.steps:
        if step.name in done:
            continue
        drafts = _drafts_of(reading, step)
        for draft in drafts:
            done |= set(draft.steps)
        found += drafts
    return found


def _drafts_of(reading: Reading, step: Step) -> list[Draft]:
    if reading.values.dtype not in DTYPES:
        return [_outside(step, f"there are no tiles of {reading.values.dtype}")]
    rule = KINDS.get(step.kind) or CALLS.get(step.target)
    before = dict(reading.values.images)
    try:
        if rule is not None:
            return rule(reading, step)
        lines = chain_rule(step.target)
        if lines is None:
            raise UnfitError(f"{step.target} has no tile form")
        expression = Expression(reading.flow, reading.values, step)
        lines(expression, step.arguments, dict(step.keywords))
        return [expression.draft()]
    except UnfitError as reason:
        reading.values.images = before
        return [_outside(step, str(reason))]


def _outside(step: Step, reason: str) -> Draft:
    if step.target in VIEW_TARGETS:
        return Draft(step.name, "view", step.uses, (step.name,), reason=reason)
    return Draft(step.name, "island", step.uses, (step.name,), reason=reason)


def _conv(r: Reading, step: Step) -> list[Draft]:
    _windowed(r, step)
    weight = r.flow.constants[step.weight]
    if step.groups > 1:
        return _grouped(r, step, weight)
    ordered = weight.permute(0, 2, 3, 1).reshape(weight.shape[0], -1, weight.shape[1])
    return [_conv_draft(r, step, step.name, step.inputs[0], step.residual, ordered)]


def _conv_draft(
    r: Reading, step: Step, name: str, x: str, residual: str, weight: T,
    rows: slice = slice(None), cols: slice = slice(None),
) -> Draft:  # fmt: skip
    bias, scale, shift = map(r.constant, (step.bias, step.pre_scale, step.pre_shift))
    wide = tuple(
        None if value is None else value[some]
        for value, some in ((bias, rows), (scale, cols), (shift, cols))
    )
    return Draft(
        name, "conv", (x, residual) if residual else (x,), (step.name,),
        {**_window_attrs(r, step), "pre": step.pre, "tf32": r.tf32_conv},
        weights=(Weight(weight[rows]),), wide=wide,
    )  # fmt: skip


def _grouped(r: Reading, step: Step, weight: T) -> list[Draft]:
    """Wide groups as convolutions of their own, side by side; narrow ones with zeros between."""
    cout, width, kh, kw = weight.shape
    each = cout // step.groups
    ordered = weight.permute(0, 2, 3, 1).reshape(cout, kh * kw, width)
    if width % EIGHT == 0 and each % EIGHT == 0 and step.groups <= MOST_GROUPS:
        return _apart(r, step, ordered, each)
    if weight.numel() * step.groups > MOST_DENSE:
        raise UnfitError(f"a convolution of {step.groups} narrow groups has no tile form")
    dense = ordered.new_zeros(cout, kh * kw, width * step.groups)
    for group in range(step.groups):
        rows, cols = _slice(group, each), _slice(group, width)
        dense[rows, :, cols] = ordered[rows]
    return [_conv_draft(r, step, step.name, step.inputs[0], step.residual, dense)]


def _apart(r: Reading, step: Step, weight: T, each: int) -> list[Draft]:
    width = weight.shape[2]
    found: list[Draft] = []
    names: list[str] = []
    for group in range(step.groups):
        rows, cols = _slice(group, each), _slice(group, width)
        x = _part(r, step, step.inputs[0], group, width, found)
        residual = _part(r, step, step.residual, group, each, found) if step.residual else ""
        name = f"{step.name}.group{group}"
        r.values.add(name, step.name, each)
        found.append(_conv_draft(r, step, name, x, residual, weight, rows, cols))
        names.append(name)
    found.append(Draft(step.name, "cat", tuple(names), (step.name,)))
    return found


def _part(r: Reading, step: Step, source: str, group: int, width: int, found: list[Draft]) -> str:
    name = f"{step.name}.{source}.{group}"
    r.values.add(name, source, width)
    found.append(Draft(name, "part", (source,), (), begin=group * width))
    return name


def _slice(group: int, width: int) -> slice:
    return slice(group * width, (group + 1) * width)


def _windowed(r: Reading, step: Step) -> None:
    for name in (*step.uses, step.name):
        r.need(name, image=True)


def _window_attrs(r: Reading, step: Step) -> dict[str, Any]:
    window, shapes = step.window or Window((1, 1)), r.values.shapes
    return {
        "act": "relu" if step.relu else "",
        "image": shapes[step.inputs[0]][2:],
        "out": shapes[step.name][2:],
        "kernel": window.kernel,
        "stride": window.stride,
        "padding": window.padding,
        "dilation": window.dilation,
    }


def _window(r: Reading, step: Step) -> list[Draft]:
    _windowed(r, step)
    weights: tuple[Weight, ...] = ()
    if step.kind == "depthwise":
        weight = r.flow.constants[step.weight]
        weights = (Weight(weight.reshape(len(weight), -1).t()),)
    if step.pre not in ("", "relu"):
        raise UnfitError("a norm before a pool has no tile form")
    if step.window is not None and step.window.kernel[0] * step.window.kernel[1] > MOST_TAPS:
        raise UnfitError(f"a window of {step.window.kernel} has no tile form")
    attrs = {
        **_window_attrs(r, step), "pre": step.pre, "mode": step.kind, "factor": step.factor,
        "include_pad": step.include_pad,
    }  # fmt: skip
    wide = (r.constant(step.bias),)
    return [Draft(step.name, "window", step.uses, (step.name,), attrs, weights, wide)]


def _combine(r: Reading, step: Step) -> list[Draft]:
    known = [r.values.images[name] for name in step.inputs if name in r.values.images]
    image = bool(step.scale) or not known or known[0]
    for name in (*step.inputs, step.name):
        r.need(name, image=image)
    if len(step.inputs) > MOST_TERMS or step.residual:
        raise UnfitError(f"a sum of {len(step.uses)} terms has no tile form")
    attrs = {"act": "relu" if step.relu else "", "factors": step.factors}
    wide = (r.constant(step.scale), r.constant(step.shift))
    return [Draft(step.name, "combine", step.inputs, (step.name,), attrs, wide=wide)]


def _image_cat(r: Reading, step: Step) -> list[Draft]:
    for name in (*step.inputs, step.name):
        r.need(name, image=True)
    return [_cat_draft(r, step)]


def _cat_draft(r: Reading, step: Step) -> Draft:
    widths = [r.values.matrix(name).cols for name in step.inputs]
    if any(width % EIGHT for width in widths):
        raise UnfitError(f"parts of {widths} columns are not in eights")
    return Draft(step.name, "cat", step.inputs, (step.name,))


def _cat(r: Reading, step: Step) -> list[Draft]:
    shape = r.values.shapes[step.name]
    dim = step.arguments[1] if len(step.arguments) > 1 else 0
    if dim not in (-1, len(shape) - 1):
        raise UnfitError("a concatenation of rows has no tile form")
    if len(step.arguments[0]) != len(step.inputs) or not all(
        isinstance(each, Ref) for each in step.arguments[0]
    ):
        raise UnfitError(
            "a concatenation with a constant, or of a value with itself, has no tile form"
        )
    for name in (*step.inputs, step.name):
        r.need(name)
    return [_cat_draft(r, step)]


def _image_part(r: Reading, step: Step) -> list[Draft]:
    r.need(step.inputs[0], image=True)
    r.need(step.name, image=True)
    return [_part_draft(r, step, step.inputs[0], step.begin)]


def _part_draft(r: Reading, step: Step, source: str, begin: int) -> Draft:
    cols, whole = r.values.matrix(step.name).cols, r.values.matrix(source).cols
    if begin % EIGHT or (cols % EIGHT and begin + cols != whole):
        raise UnfitError(f"columns {begin} to {begin + cols} of {whole} are not in eights")
    return Draft(step.name, "part", (source,), (step.name,), begin=begin)


def _slice_call(r: Reading, step: Step) -> list[Draft]:
    source = _source(step)
    shape = r.values.shapes.get(source, ())
    given = step.arguments[1:]
    dim, begin, end, stride = given + (0, None, None, 1)[len(given) :]
    if dim not in (-1, len(shape) - 1) or stride != 1:
        raise UnfitError("some of the rows of a matrix are no matrix in eights")
    r.need(source)
    r.need(step.name)
    first, _, _ = slice(begin, end).indices(shape[-1])
    return [_part_draft(r, step, source, first)]


def _split(r: Reading, step: Step) -> list[Draft]:
    """Columns that were cut apart: a part for each that is read."""
    source = _source(step)
    shape = r.values.shapes.get(source, ())
    dim = step.arguments[2] if len(step.arguments) > 2 else 0
    if dim not in (-1, len(shape) - 1):
        raise UnfitError("some of the rows of a matrix are no matrix in eights")
    r.need(source)
    size = step.arguments[1]
    if step.target == "aten.chunk.default":
        size = -(shape[-1] // -size)
    steps = r.flow.maker()
    found = []
    for index, name in sorted(r.items.get(step.name, {}).items()):
        begin = index * size if isinstance(size, int) else sum(size[:index])
        r.need(name)
        part = _part_draft(r, steps[name], source, begin)
        found.append(Draft(name, "part", (source,), (step.name, name), begin=part.begin))
    return found


def _source(step: Step) -> str:
    value = step.arguments[0]
    if not isinstance(value, Ref):
        raise UnfitError("its first argument is no value")
    return value.name


def _alias(r: Reading, step: Step) -> list[Draft]:
    """The same matrix under another shape."""
    source = _source(step)
    if not r.values.is_tensor(source) or not r.values.is_tensor(step.name):
        raise UnfitError("it is no tensor of the model's type")
    before, after = r.values.shapes[source], r.values.shapes[step.name]
    if step.target in ("aten.transpose.int", "aten.permute.default"):
        image = _same_order(r, source, step, before)
    else:
        image = _same_rows(r, source, after)
    r.need(source, image=r.values.is_image(source))
    r.need(step.name, image=image)
    if r.values.matrix(source) != r.values.matrix(step.name):
        raise UnfitError("other rows and columns")
    return [Draft(step.name, "part", (source,), (step.name,))]


def _same_order(r: Reading, source: str, step: Step, shape: tuple[int, ...]) -> bool:
    """Does a permutation leave rows and columns in their order? Is the result an image?"""
    order = list(range(len(shape)))
    if step.target == "aten.transpose.int":
        a, b = step.arguments[1] % len(shape), step.arguments[2] % len(shape)
        order[a], order[b] = order[b], order[a]
    else:
        order = [dim % len(shape) for dim in step.arguments[1]]
    lies = [0, 2, 3, 1] if r.values.is_image(source) else list(range(len(shape)))
    for image in (False, True) if len(shape) == 4 else (False,):
        kept = [order[dim] for dim in ([0, 2, 3, 1] if image else range(len(shape)))]
        real = [dim for dim in kept[:-1] if shape[dim] > 1]
        if kept[-1] == lies[-1] and real == [dim for dim in lies[:-1] if shape[dim] > 1]:
            return image
    raise UnfitError("other rows and columns")


def _same_rows(r: Reading, source: str, after: tuple[int, ...]) -> bool:
    """Does a reshape leave columns as they are? Is the result an image?"""
    before = r.values.shapes[source]
    if not r.values.is_image(source):
        if after[-1] == before[-1]:
            return False
        if len(after) == 4 and after[1] == before[-1] and after[2:] == (1, 1):
            return True
    elif before[2:] == (1, 1):
        if len(after) == 4 and after[1:] == before[1:]:
            return True
        if after[-1] == before[1]:
            return False
    elif after == before:
        return True
    raise UnfitError("other rows and columns")


def _linear(r: Reading, step: Step) -> list[Draft]:
    x, weight, bias = (*step.arguments, None)[:3]
    return _product(r, step, x, r.held(weight), bias)


def _addmm(r: Reading, step: Step) -> list[Draft]:
    bias, x, weight = step.arguments[:3]
    if step.keywords:
        raise UnfitError("a product with factors has no tile form")
    held = r.held(weight)
    return _product(r, step, x, None if held is None else held.t(), bias)


def _mm(r: Reading, step: Step) -> list[Draft]:
    x, weight = step.arguments[:2]
    held = r.held(weight)
    if held is not None and held.dim() != 2:
        held = None
    return _product(r, step, x, None if held is None else held.t(), None)


def _product(r: Reading, step: Step, x: Any, weight: T | None, bias: Any) -> list[Draft]:
    if not isinstance(x, Ref) or weight is None:
        raise UnfitError("a product of two values that are both computed has no tile form")
    vector = r.held(bias)
    if bias is not None and (vector is None or vector.dim() != 1 or len(vector) != len(weight)):
        raise UnfitError("a bias that is computed, or not a vector, has no tile form")
    if weight.dtype != r.values.dtype:
        raise UnfitError(f"a weight of {weight.dtype} beside values of {r.values.dtype}")
    r.need(x.name)
    r.need(step.name)
    wide = None if vector is None else vector.float()
    rows = r.values.matrix(x.name).rows
    if rows <= MOST_ROWS:
        attrs: dict[str, Any] = {"act": ""}
        return [
            Draft(step.name, "gemv", (x.name,), (step.name,), attrs, (Weight(weight),), (wide,))
        ]
    attrs = {
        "act": "", "pre": "", "image": (rows, 1), "out": (rows, 1), "kernel": (1, 1),
        "stride": (1, 1), "padding": (0, 0), "dilation": (1, 1), "tf32": r.tf32_product,
    }  # fmt: skip
    return [
        Draft(
            step.name, "conv", (x.name,), (step.name,), attrs, (Weight(weight.unsqueeze(1)),),
            (wide, None, None),
        )
    ]  # fmt: skip


def _mean(r: Reading, step: Step) -> list[Draft]:
    """The average of all pixels."""
    source = _source(step)
    dims = step.arguments[1] if len(step.arguments) > 1 else None
    shape = r.values.shapes.get(source, ())
    if step.target == "aten.adaptive_avg_pool2d.default":
        fits = len(shape) == 4 and list(dims or ()) == [1, 1]
    else:
        fits = len(shape) == 4 and sorted(dim % 4 for dim in dims or ()) == [2, 3]
    if not fits:
        raise UnfitError("a mean over anything but all pixels has no tile form")
    if shape[2] * shape[3] > MOST_TAPS:
        raise UnfitError(f"a mean over {shape[2] * shape[3]} pixels has no tile form")
    r.need(source, image=True)
    r.need(step.name, image=len(r.values.shapes[step.name]) == 4)
    attrs = {
        "act": "", "pre": "", "image": shape[2:], "out": (1, 1), "kernel": shape[2:],
        "stride": (1, 1), "padding": (0, 0), "dilation": (1, 1), "mode": "avgpool", "factor": 1.0,
        "include_pad": True,
    }  # fmt: skip
    return [Draft(step.name, "window", (source,), (step.name,), attrs, wide=(None,))]


def _softmax(r: Reading, step: Step) -> list[Draft]:
    source, shape = _source(step), r.values.shapes[step.name]
    dim = step.arguments[1] % len(shape)
    image = len(shape) == 4 and dim == 1
    if dim != len(shape) - 1 and not image:
        raise UnfitError("a softmax over another dim than the columns has no tile form")
    return [_rows(r, step, step.name, source, "softmax", 0.0, (None, None), image=image)]


def _rows(
    r: Reading, step: Step, name: str, source: str, fn: str, eps: float,
    wide: tuple[T | None, T | None], *, image: bool = False, steps: tuple[str, ...] = (),
) -> Draft:  # fmt: skip
    r.need(source, image=image)
    r.need(name, image=image)
    if r.values.matrix(source).cols > MOST_ROW:
        raise UnfitError(f"rows of more than {MOST_ROW} elements have no tile form")
    attrs = {"fn": fn, "eps": eps}
    return Draft(name, "rows", (source,), (step.name, *steps), attrs, wide=wide)


def _norm(r: Reading, step: Step) -> list[Draft]:
    """Layer norm and RMS norm over the last dim."""
    source, shape = _source(step), step.arguments[1]
    rms = "rms" in step.target
    if len(shape) != 1:
        raise UnfitError(f"a norm over {len(shape)} dims has no tile form")
    arguments = (*step.arguments[2:], None, None, None)
    weight, bias, eps = (arguments[0], None, arguments[1]) if rms else arguments[:3]
    if any(isinstance(each, Ref) for each in (weight, bias)):
        raise UnfitError("a norm with computed weights has no tile form")
    if eps is None:
        eps = torch.finfo(r.values.dtype).eps if rms else 1e-5
    wide = tuple(None if value is None else value.float() for value in map(r.held, (weight, bias)))
    name, steps = _first_item(r, step)
    fn = "rmsnorm" if rms else "layernorm"
    return [_rows(r, step, name, source, fn, float(eps), (wide[0], wide[1]), steps=steps)]


def _first_item(r: Reading, step: Step) -> tuple[str, tuple[str, ...]]:
    """The only result of several that is read, and the step that takes it."""
    items = r.items.get(step.name)
    if step.name in r.values.shapes or items is None:
        return step.name, ()
    if set(items) != {0}:
        raise UnfitError("more of its results than the first are read")
    return items[0], (items[0],)


def _vector_norm(r: Reading, step: Step) -> list[Draft]:
    """A batch norm of vectors: scale and shift per column."""
    source, held = _source(step), [r.held(each) for each in step.arguments[1:5]]
    weight, bias, mean, var = held
    name, steps = _first_item(r, step)
    if len(r.values.shapes.get(source, ())) != 2 or mean is None or var is None:
        raise UnfitError("this norm has no tile form")
    if step.arguments[5] is True:
        raise UnfitError("a norm that learns has no tile form")
    eps = step.arguments[7] if len(step.arguments) > 7 else step.arguments[6]
    scale = (var.double() + eps).rsqrt()
    scale = scale if weight is None else scale * weight.double()
    shift = -mean.double() * scale
    shift = shift if bias is None else shift + bias.double()
    r.need(source)
    r.need(name)
    lines = (("mul", "r0", "w0"), ("add", "s0", "w1"))
    return [
        Draft(
            name, "chain", (source,), (step.name, *steps), {"steps": lines},
            wide=(scale.float(), shift.float()),
        )
    ]  # fmt: skip


def _lstm_cell(r: Reading, step: Step) -> list[Draft]:
    x, (h, c), w_ih, w_hh, *biases = step.arguments
    items = r.items.get(step.name, {})
    names = [items.get(index, f"{step.name}.{index}") for index in (0, 1)]
    for name in names:
        r.values.shapes.setdefault(name, r.values.shapes[h.name])
        r.values.dtypes.setdefault(name, r.values.dtypes[h.name])
    held = _cell(r, names, (x, h, c), (w_ih, w_hh, *biases))
    added = [each.float() for each in held[2:] if each is not None]
    bias = sum(added[1:], added[0]) if added else None
    weights = (Weight(_must(held[0])), Weight(_must(held[1])))
    reads, steps = (x.name, h.name, c.name), (step.name, *items.values())
    return [Draft(names[0], "lstm_cell", reads, steps, {}, weights, (bias,), also=names[1])]


def _gru_cell(r: Reading, step: Step) -> list[Draft]:
    x, h, w_ih, w_hh, *biases = step.arguments
    held = _cell(r, [step.name], (x, h), (w_ih, w_hh, *biases))
    wide = tuple(None if each is None else each.float() for each in (*held[2:], None, None)[:2])
    weights = (Weight(_must(held[0])), Weight(_must(held[1])))
    return [
        Draft(step.name, "gru_cell", (x.name, h.name), (step.name,), {}, weights, wide)
    ]  # fmt: skip


def _cell(
    r: Reading, names: list[str], reads: tuple[Any, ...], constants: tuple[Any, ...]
) -> list[T | None]:
    if not all(isinstance(each, Ref) for each in reads):
        raise UnfitError("a cell with a constant state has no tile form")
    if any(isinstance(each, Ref) for each in constants) or r.held(constants[0]) is None:
        raise UnfitError("a cell with computed weights has no tile form")
    for name in (*(each.name for each in reads), *names):
        r.need(name)
        if r.values.matrix(name).rows != 1:
            raise UnfitError(f"a cell with {r.values.matrix(name).rows} rows has no tile form")
    return [r.held(each) for each in constants]


def _must(value: T | None) -> T:
    assert value is not None
    return value


Rule = Callable[[Reading, Step], list[Draft]]
KINDS: dict[str, Rule] = {
    "conv": _conv,
    "depthwise": _window,
    "maxpool": _window,
    "avgpool": _window,
    "combine": _combine,
    "cat": _image_cat,
    "part": _image_part,
}
CALLS: dict[str, Rule] = {
    "aten.linear.default": _linear,
    "aten.addmm.default": _addmm,
    "aten.mm.default": _mm,
    "aten.matmul.default": _mm,
    "aten.adaptive_avg_pool2d.default": _mean,
    "aten.mean.dim": _mean,
    "aten.softmax.int": _softmax,
    "aten._softmax.default": _softmax,
    "aten.layer_norm.default": _norm,
    "aten.native_layer_norm.default": _norm,
    "aten.rms_norm.default": _norm,
    "aten.batch_norm.default": _vector_norm,
    "aten._native_batch_norm_legit_no_training.default": _vector_norm,
    "aten.lstm_cell.default": _lstm_cell,
    "aten.gru_cell.default": _gru_cell,
    "aten.cat.default": _cat,
    "aten.slice.Tensor": _slice_call,
    "aten.split.Tensor": _split,
    "aten.split_with_sizes.default": _split,
    "aten.chunk.default": _split,
    **{
        f"aten.{name}": _alias
        for name in (
            "view.default", "reshape.default", "_unsafe_view.default", "flatten.using_ints",
            "squeeze.dim", "squeeze.dims", "squeeze.default", "unsqueeze.default",
            "transpose.int", "permute.default",
        )
    },
}  # fmt: skip
