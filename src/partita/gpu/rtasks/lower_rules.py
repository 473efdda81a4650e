"""Every step as drafts: by the rule of its kind or operator, or outside with the reason why.

A rule gives the drafts of a step, or raises `UnfitError` with the sentence that the report shows.
"""

from collections.abc import Callable, Sequence

from partita.gpu.flow.steps import Step
from partita.gpu.rtasks import lower_images, lower_matrices, lower_views
from partita.gpu.rtasks.drafts import DTYPES, Draft
from partita.gpu.rtasks.lower_chain import Expression, UnfitError, chain_rule
from partita.gpu.rtasks.reading import Reading

Rule = Callable[[Reading, Step], list[Draft]]
KINDS: dict[str, Rule] = {**lower_images.RULES, **lower_views.RULES}
CALLS: dict[str, Rule] = {**lower_images.CALLS, **lower_matrices.CALLS, **lower_views.CALLS}
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


def read_drafts(reading: Reading) -> list[Draft]:
    """Every step as drafts, in order."""
    new_drafts: list[Draft] = []
    done: set[str] = set()
    for step in reading.flow.steps:
        if step.name in done:
            continue
        drafts = _drafts_of(reading, step)
        for draft in drafts:
            done |= set(draft.steps)
        new_drafts += drafts
    return _without_unread_views(new_drafts, reading.flow.outputs)


def _without_unread_views(drafts: list[Draft], outputs: Sequence[str]) -> list[Draft]:
    """Who needed them reads what they are a view of."""
    read = set(outputs)
    kept = []
    for draft in reversed(drafts):
        if draft.kind != "view" or draft.name in read:
            kept.append(draft)
            read |= set(draft.reads)
    return kept[::-1]


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
    return Draft(step.name, "fallback", step.uses, (step.name,), reason=reason)
