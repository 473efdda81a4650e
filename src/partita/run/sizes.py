"""Stages for arguments of other sizes than those that were captured.

A program is captured for the sizes at hand. Called with others, a piped module is captured again,
and its stages are those of the plan that there is, if the model does the same steps. Where
`torch.export` can show which sizes these steps are right for (`capture/open_sizes.py`), they are
written with the batch and the length read from what is given, and serve all of those sizes. That
the code has no number left that follows a size is checked by writing it from both captures: it must
be the same text.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from partita.capture.exported import Captured
from partita.capture.open_sizes import OpenSizes, Place, Shape
from partita.emit.stages import Emitted, same_code
from partita.emit.symbolic import BATCH, LENGTH, Recaptured

Shapes = tuple[Shape, ...]
Groups = Mapping[str, tuple[Place, ...]]  # where the batch stands in the arguments, and the length
LEAST = 2  # an open size; `torch.export` takes one sample for another program


@dataclass(frozen=True)
class Served:
    """The shapes of arguments that stages are right for.

    They are those captured and, where `sizes` says for which, those in which the sizes of every
    group are others, but one number.
    """

    shapes: Shapes
    groups: Groups = field(default_factory=dict)
    sizes: OpenSizes | None = None

    def __contains__(self, shapes: Shapes) -> bool:
        if shapes == self.shapes:
            return True
        if self.sizes is None or not _same_ranks(shapes, self.shapes):
            return False
        one_each = all(
            len({shapes[leaf][dim] for leaf, dim in places}) == 1 for places in self.groups.values()
        )
        return one_each and self.sizes.hold(shapes)


def shapes_of(given: Any) -> Shapes:
    """The shapes of flat arguments; what is no tensor has none."""
    leaves = pytree.tree_leaves(given)
    return tuple(tuple(x.shape) if isinstance(x, torch.Tensor) else () for x in leaves)


def groups_of(before: Shapes, after: Shapes) -> Groups:
    """Places of the sizes that differ, if those are one batch or one length or both; or none."""
    if not _same_ranks(before, after):
        return {}
    changes: dict[tuple[str, int, int], list[Place]] = {}
    for leaf, (old, new) in enumerate(zip(before, after, strict=True)):
        for dim, (one, other) in enumerate(zip(old, new, strict=True)):
            if one != other:
                if min(one, other) < LEAST:
                    return {}
                key = LENGTH if dim else BATCH, one, other
                changes.setdefault(key, []).append((leaf, dim))
    groups = {name: tuple(places) for (name, _, _), places in changes.items()}
    return groups if len(groups) == len(changes) else {}


def _same_ranks(before: Shapes, after: Shapes) -> bool:
    return [len(shape) for shape in before] == [len(shape) for shape in after]


def resized(given: Any, places: Sequence[Place], wanted: Shapes) -> Any:
    """Arguments whose sizes at some places are those of the wanted shapes; no numbers of use."""
    leaves, spec = pytree.tree_flatten(given)
    for leaf in {leaf for leaf, _ in places}:
        shape = list(leaves[leaf].shape)
        for _, dim in (place for place in places if place[0] == leaf):
            shape[dim] = wanted[leaf][dim]
        zeros = torch.zeros(shape, dtype=leaves[leaf].dtype, device=leaves[leaf].device)
        leaves[leaf] = zeros.requires_grad_(leaves[leaf].requires_grad)
    return pytree.tree_unflatten(leaves, spec)


def emit_open(
    first: Captured, second: Captured, groups: Groups, capture: Callable[[Any], Captured],
    emit: Callable[[Captured, Mapping[str, Recaptured]], Emitted],
) -> Emitted | None:  # fmt: skip
    """Code that reads the sizes of the groups from what it is given; None where that fails.

    `first` and `second` are captures in which all of these sizes differ. With two groups the model
    is captured with one of them changed, too.
    """
    before, after = (shapes_of(each.program.example_inputs) for each in (first, second))
    every = frozenset(groups)
    corners = {frozenset(): first, every: second}
    for name in groups if len(groups) > 1 else ():
        args = resized(first.program.example_inputs, groups[name], after)
        corners[frozenset([name])] = capture(args)
    written = []
    for own in (frozenset[str](), every):
        sizes = {name: _size(groups, name, after if own else before) for name in groups}
        swapped = {name: _size(groups, name, before if own else after) for name in groups}
        others = {
            name: Recaptured(corners[own ^ {name}].record, sizes[name], swapped[name])
            for name in groups
        }
        written.append(emit(corners[own], others))
    is_open = written[0].sizes.keys() == every and same_code(*written)
    specs = [each.program.call_spec.out_spec for each in (first, second)]
    return written[0] if is_open and specs[0] == specs[1] else None


def _size(groups: Groups, name: str, shapes: Shapes) -> int:
    leaf, dim = groups[name][0]
    return shapes[leaf][dim]
