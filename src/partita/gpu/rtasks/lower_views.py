"""Columns side by side, some of the columns, the same matrix in another shape: places, no work."""

from partita.capture.torch_program import Ref
from partita.gpu.flow.place import EIGHT
from partita.gpu.flow.steps import Step
from partita.gpu.rtasks.drafts import Draft
from partita.gpu.rtasks.lower_chain import UnfitError
from partita.gpu.rtasks.reading import Reading, source_of


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
    source = source_of(step)
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
    source = source_of(step)
    shape = r.values.shapes.get(source, ())
    dim = step.arguments[2] if len(step.arguments) > 2 else 0
    if dim not in (-1, len(shape) - 1):
        raise UnfitError("some of the rows of a matrix are no matrix in eights")
    r.need(source)
    size = step.arguments[1]
    if step.target == "aten.chunk.default":
        size = -(shape[-1] // -size)
    drafts = []
    for index, name in sorted(r.items.get(step.name, {}).items()):
        begin = index * size if isinstance(size, int) else sum(size[:index])
        r.need(name)
        part = _part_draft(r, r.maker[name], source, begin)
        drafts.append(Draft(name, "part", (source,), (step.name, name), begin=part.begin))
    return drafts


def _alias(r: Reading, step: Step) -> list[Draft]:
    """The same matrix under another shape."""
    source = source_of(step)
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


RULES = {"cat": _image_cat, "part": _image_part}
CALLS = {
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
