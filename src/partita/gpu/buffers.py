"""Inputs and outputs of a captured graph: fixed places that are written before and read after.

A graph reads its inputs where they lay when it was captured. A call copies the caller's tensors
there, all of one kind in one launch; a tensor that is that place (one of `fast.inputs`, which the
caller may write into) is not copied at all. Results are copied out in the same way, so that they
stay as they are when the next call overwrites the places.
"""

from collections.abc import Sequence

import torch

T = torch.Tensor


def put(places: Sequence[T], values: Sequence[T]) -> None:
    """Write values to where they are read, but for those that lie there already."""
    pairs = [
        (place, value)
        for place, value in zip(places, values, strict=True)
        if value.data_ptr() != place.data_ptr() or value.stride() != place.stride()
    ]
    if not pairs:
        return
    memory = {place.untyped_storage().data_ptr() for place in places}
    sources = [  # one place's tensor may be meant for another: it is read before it is overwritten
        value.clone() if value.untyped_storage().data_ptr() in memory else value
        for _, value in pairs
    ]
    if len(pairs) == 1:
        pairs[0][0].copy_(sources[0])
    else:
        torch._foreach_copy_([place for place, _ in pairs], sources)


def copies(results: Sequence[T]) -> tuple[T, ...]:
    """Results in memory of their own."""
    if len(results) < 2:
        return tuple(each.clone() for each in results)
    fresh = [torch.empty_like(each) for each in results]
    torch._foreach_copy_(fresh, list(results))
    return tuple(fresh)
