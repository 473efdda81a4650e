"""Which random numbers an op draws.

In one process (`partita.pipe`, the module itself) all ops draw from PyTorch's generator, in the
order of the program: the seed that the user sets decides, and stages draw what the module draws.

On ranks (`partita.execute`) there is no order that all plans share. There every draw has a place:
the seed of the run, the step, and its number among the draws of the model's program. What is drawn
for a sample is seeded by the place and the sample's number in the batch, so that it does not hang
on how a plan cuts the batch into micro-batches and replicas, splits ops or puts them into stages;
what runs again draws the same again. A draw that belongs to no sample (a mask for all of them) has
its place alone.

`PlacedDraws` does that below autograd, where every draw is one call of an operator: `F.dropout`
arrives as `bernoulli_`, an attention's dropout too. The place that comes next is kept as the seed
of PyTorch's CPU generator, which `torch.utils.checkpoint` saves and restores around what it runs
again.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from partita.errors import CaptureError

T = torch.Tensor
NUMBERS = 20  # bits for the number of a draw; the rest tell runs and steps apart
MASK = (1 << 63) - 1
RATES = ("dropout_p", "dropout")  # arguments that are 0 where an operator draws nothing
FLAGS = ("train", "training")


def place_seed(op: str, seed: int, step: int, microbatch: int) -> int:
    """The seed of what an op of the local runtime draws for one micro-batch of one step."""
    return zlib.crc32(f"{op}/{seed}/{step}/{microbatch}".encode())


def first_place(seed: int, step: int) -> int:
    """The place of the first draw of a step; the others follow one by one."""
    return _mixed(_mixed(seed) + step) >> (NUMBERS + 1) << NUMBERS


def sample_seed(place: int, sample: int) -> int:
    """The seed of what is drawn at a place for one sample of the batch."""
    return _mixed(_mixed(place) + sample + 1)


def _mixed(number: int) -> int:
    """Numbers that follow one another made unlike (the finalizer of SplitMix64), below 2^63."""
    number = (number + 0x9E3779B97F4A7C15) & (1 << 64) - 1
    number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9 & (1 << 64) - 1
    number = (number ^ number >> 27) * 0x94D049BB133111EB & (1 << 64) - 1
    return (number ^ number >> 31) & MASK


@dataclass(frozen=True)
class Draw:
    """One draw of a model: how what is drawn belongs to samples.

    Along `dim` each sample has `each` elements. A draw without such a dim is one for all samples,
    or (`varies`) of a size that depends on the batch in some other way. `depth` says how many dims
    lie around it in memory, where that is known: stages keep how a tensor lies, also where they
    write a recurrent layer out and have its dims in another order than PyTorch has inside.
    """

    dim: int | None = None
    each: int = 0
    varies: bool = False
    depth: int = -1

    def dim_in(self, tensor: T) -> int | None:
        """The dim of the samples in what is drawn."""
        if self.dim is None or self.depth < 0 or depths(tensor)[self.dim] == self.depth:
            return self.dim
        return depths(tensor).index(self.depth)


def depths(tensor: T) -> list[int]:
    """For each dim of a tensor, how many lie around it in memory."""
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda dim: (-strides[dim], dim))
    return [order.index(dim) for dim in range(tensor.dim())]


def is_draw(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Does this call of an operator draw from PyTorch's own generator?"""
    if torch.Tag.nondeterministic_seeded not in func.tags or kwargs.get("generator") is not None:
        return False
    for position, argument in enumerate(func._schema.arguments):
        value = kwargs.get(argument.name, args[position] if position < len(args) else None)
        if (argument.name in RATES and value == 0) or (argument.name in FLAGS and value is False):
            return False
    return True


def drawn_tensor(func: Any, args: Sequence[Any], made: Any) -> T:
    """What a call has drawn."""
    drawn: T = args[0] if _is_in_place(func) else made
    return drawn[0] if isinstance(drawn, list | tuple) else drawn


class PlacedDraws(TorchDispatchMode):
    """While it is on, draws are those of their places; `first` is the number of the first sample.

    `draws` are those of the model in the order of its program. `start` is the first place of the
    step, and the CPU generator's seed the place that comes next.
    """

    def __init__(self, draws: Sequence[Draw], start: int, first: int = 0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.draws, self.start, self.first = draws, start, first

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operator, at its place if it draws."""
        kwargs = kwargs or {}
        if not is_draw(func, args, kwargs):
            return func(*args, **kwargs)
        place = torch.default_generator.initial_seed()
        number = place - self.start
        if not 0 <= number < len(self.draws):
            raise CaptureError(
                f"{func} draws random numbers where none were captured: draw {number + 1} of "
                f"{len(self.draws)}",
                fix="call the model once in each step, as it was captured, and seed nothing in it",
            )
        made = self._drawn(func, args, kwargs, self.draws[number], place)
        torch.default_generator.manual_seed(place + 1)
        return made

    def _drawn(self, func: Any, args: Any, kwargs: Any, draw: Draw, place: int) -> Any:
        if draw.dim is None:
            seed = sample_seed(place, self.first) if draw.varies else place
            return _fresh(func, args, kwargs, seed)
        in_place = _is_in_place(func)
        whole = args[0] if in_place else func(*args, **kwargs)
        like = drawn_tensor(func, args, whole)
        dim = draw.dim_in(like)
        assert dim is not None, "a draw with a dim has one"
        for row in range(like.shape[dim] // draw.each):
            span = (dim, row * draw.each, draw.each)
            own_args, own_kwargs = _of_sample((args, kwargs), like.shape, span)
            made = _fresh(func, own_args, own_kwargs, sample_seed(place, self.first + row))
            if not in_place:
                _copy(whole, made, span)
        return whole


def _is_in_place(func: Any) -> bool:
    first = func._schema.arguments[0].alias_info if func._schema.arguments else None
    return first is not None and first.is_write


def _fresh(func: Any, args: Any, kwargs: Any, seed: int) -> Any:
    """A call after seeding; what is drawn in place is drawn in order, whatever its strides are."""
    tensor = next((arg for arg in args if isinstance(arg, torch.Tensor)), None)
    _seed(seed, tensor.device if tensor is not None else kwargs.get("device"))
    if not _is_in_place(func) or args[0].is_contiguous():
        return func(*args, **kwargs)
    args[0].copy_(func(args[0].contiguous(), *args[1:], **kwargs))
    return args[0]


def _seed(seed: int, device: torch.device | None) -> None:
    """Seed one generator; torch.manual_seed would queue a call for every other device."""
    if device is not None and device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


def _of_sample(value: Any, shape: Sequence[int], span: tuple[int, int, int]) -> Any:
    """Arguments cut down to one sample: tensors as large as what is drawn, and sizes of it."""
    dim, start, count = span
    if isinstance(value, torch.Tensor):
        cut = value.dim() > dim and value.shape[dim] == shape[dim]
        return value.narrow(dim, start, count) if cut else value
    if isinstance(value, dict):
        return {key: _of_sample(each, shape, span) for key, each in value.items()}
    if isinstance(value, list | tuple):
        if all(isinstance(each, int) for each in value) and list(value) == list(shape):
            # the size that is asked for
            return [*value[:dim], count, *value[dim + 1 :]]
        return type(value)(_of_sample(each, shape, span) for each in value)
    return value


def _copy(whole: Any, made: Any, span: tuple[int, int, int]) -> None:
    if isinstance(whole, list | tuple):
        for left, right in zip(whole, made, strict=True):
            _copy(left, right, span)
    elif isinstance(whole, torch.Tensor):
        whole.narrow(*span).copy_(made)
