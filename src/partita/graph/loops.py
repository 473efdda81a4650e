"""The loop nest of an op: named dims, and which of them index which dim of which tensor.

Written like an einsum. `b s k, n k -> b s n` is a linear layer: dim `k` does not index the output,
so it is a reduction, and splitting it leaves partial sums. `(h d)` are several loop dims inside one
tensor dim, outermost first; `h+2` reads 2 more elements than its share when h is split (a halo);
`_` is read whole. A `Stat` is a quantity that must be exchanged when its dim is split although the
output is not a plain sum over it (a softmax's maximum and sum, a norm's mean and variance).

What the splits assume of the op, beyond slicing its tensors:
- a term that is only added to a sum (a bias) is added by one device of a split reduction;
- a mean divides by the size of the whole op, so that the devices' values still add up to it;
- masks, lookups and random numbers are those of the share's place in the whole op;
- the rows of recurrent weights are shared out gate by gate: a share of h has its rows of each.

The backward ops of a call run over the same dims with inputs and outputs exchanged, so one table
serves all phases: `LOOPS[kind](call)`.
"""

import functools
import itertools
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from partita.graph.record import Call, Shape
from partita.graph.shapes import attention_heads, axis_of, einsum_terms, gates, per_space

# Inputs from this position on are added to the result, not multiplied into it (biases).
ADDED_FROM = {"linear": 2, "conv": 2, "expert_linear": 2}
LEADING = ("b", "s", "t", "u", "w", "x", "y", "z")
PLAIN = {
    0: (),
    1: ("b",),
    2: ("b", "c"),
    3: ("b", "s", "c"),
    4: ("b", "c", "h", "w"),
    5: ("b", "c", "d", "h", "w"),
}
# Kinds that add up terms: a reduction belongs to one product, and the other terms do not have it.
SUMS = frozenset({*ADDED_FROM, "lstm", "gru", "lstm_cell", "gru_cell"})
# Kinds whose weight gradient follows from what the data gradient has exchanged: the gradients of
# the gates of every step, of the logits before the softmax.
FROM_DATA_GRADIENT = frozenset({"lstm", "gru", "moe_router"})


@dataclass(frozen=True, slots=True)
class Dim:
    """One loop. `whole` loops are never split."""

    name: str
    extent: int
    whole: bool = False


@dataclass(frozen=True, slots=True)
class Access:
    """How a tensor is indexed: per tensor dim its loop dims, outermost first, and its halo.

    Splitting a dim in `repeats` leaves the tensor whole on every device although it is an output
    that the dim does not index: an exchange of statistics completes it, or it is a gradient that
    does not depend on the dim (a bias gradient does not sum over what the weights contract).
    """

    dims: tuple[tuple[str, ...], ...]
    halo: tuple[int, ...]
    repeats: tuple[str, ...] = ()
    _position: dict[str, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        last_first = reversed(list(enumerate(self.dims)))
        known = {name: position for position, names in last_first for name in names}
        object.__setattr__(self, "_position", known)

    def position(self, dim: str) -> int | None:
        """The tensor dim that a loop dim indexes; None if it does not."""
        return self._position.get(dim)  # asked for each split of each op: millions of times

    def __str__(self) -> str:
        parts = []
        for names, halo in zip(self.dims, self.halo, strict=True):
            text = names[0] if len(names) == 1 else f"({' '.join(names)})" if names else "_"
            parts.append(f"{text}+{halo}" if halo else text)
        return " ".join(parts) or "."


@dataclass(frozen=True, slots=True)
class Stat:
    """`values` numbers per point of the dims `over` cross devices if `dim` is split."""

    dim: str
    over: tuple[str, ...]
    values: int
    collective: str = "all_reduce"


@dataclass(frozen=True, slots=True)
class Nest:
    """The loops of an op and how they index its tensors."""

    dims: tuple[Dim, ...]
    inputs: tuple[Access, ...]
    outputs: tuple[Access, ...]
    stats: tuple[Stat, ...] = ()

    def extent(self, name: str) -> int:
        """How many iterations the loop has."""
        return next(dim.extent for dim in self.dims if dim.name == name)

    def points(self) -> int:
        """Iterations of the whole nest."""
        total = 1
        for dim in self.dims:
            total *= dim.extent
        return total

    def is_reduction(self, name: str) -> bool:
        """True if no output is indexed by the dim."""
        return all(access.position(name) is None for access in self.outputs)

    def __str__(self) -> str:
        left = ", ".join(map(str, self.inputs))
        right = ", ".join(map(str, self.outputs))
        sizes = " ".join(f"{dim.name}={dim.extent}" for dim in self.dims)
        return f"{left} -> {right} | {sizes}"


@functools.lru_cache(maxsize=65536)
def loop_nest(call: Call) -> Nest:
    """The nest of an op in its phase; an unknown kind has one without dims to split."""
    rule = LOOPS.get(call.kind)
    nest = _opaque(call) if rule is None else rule(call)
    return _backward(call, nest) if call.wrt else nest


def _backward(call: Call, nest: Nest) -> Nest:
    """The nest of a gradient: the forward's dims, with what is read and written exchanged.

    Sums and statistics of the forward are kept for the backward. What a data gradient exchanges
    are the matching sums of the gradient, along the dims that index the forward's output; a weight
    gradient that follows from them exchanges them itself where there is no data gradient.
    The gradient of a term that is only added does not depend on the dims of the other terms.
    """
    sides = {"g": nest.outputs, "o": nest.outputs, "i": nest.inputs}
    reads = tuple(replace(sides[code[0]][int(code[1:])], repeats=()) for code in call.reads)
    summed = [dim.name for dim in nest.dims if nest.is_reduction(dim.name)]
    added = summed if call.kind in SUMS else []
    outputs = tuple(
        replace(access, repeats=tuple(n for n in added if access.position(n) is None))
        for access in (nest.inputs[i] for i in call.wrt)
    )
    exchanges = call.phase == "dgrad" or (call.alone and call.kind in FROM_DATA_GRADIENT)
    stats = nest.stats if exchanges else ()
    return Nest(nest.dims, reads, outputs, tuple(s for s in stats if s.dim not in summed))


_TOKEN = re.compile(r"\([^()]*\)(?:\+\d+)?|[^\s()]+")


@functools.cache
def _parse_access(text: str) -> Access:
    dims: list[tuple[str, ...]] = []
    halo: list[int] = []
    for token in [] if text.strip() == "." else _TOKEN.findall(text):
        body, _, extra = token.partition("+")
        names = body.strip("()").split()
        dims.append(() if names == ["_"] else tuple(names))
        halo.append(int(extra or 0))
    return Access(tuple(dims), tuple(halo))


def nest_from(
    text: str, sizes: dict[str, int], whole: Iterable[str] = (), stats: Iterable[Stat] = ()
) -> Nest:
    """A nest from its text; dims of extent 1 disappear, and inner dims of a group become whole.

    An inner dim of `(h d)` cannot be split while h has several values: its share would not be
    contiguous in memory.
    """
    left, right = (side.split(",") if side.strip() else [] for side in text.split("->"))
    alone = {name for name, size in sizes.items() if size == 1}
    kept = tuple(s for s in stats if s.dim not in alone)
    inputs = tuple(_without(_parse_access(part), alone) for part in left)
    outputs = tuple(_completed(_without(_parse_access(part), alone), kept) for part in right)
    inner = {name for access in (*inputs, *outputs) for names in access.dims for name in names[1:]}
    fixed = inner | set(whole)
    dims = tuple(Dim(name, size, name in fixed) for name, size in sizes.items() if size > 1)
    return Nest(dims, inputs, outputs, kept)


def _without(access: Access, alone: set[str]) -> Access:
    dims = tuple(tuple(name for name in names if name not in alone) for names in access.dims)
    halo = tuple(extra if names else 0 for extra, names in zip(access.halo, dims, strict=True))
    return Access(dims, halo)


def _completed(access: Access, stats: tuple[Stat, ...]) -> Access:
    return replace(access, repeats=tuple(s.dim for s in stats if access.position(s.dim) is None))


def _numbered(num_dims: int, first: tuple[str, ...] = ()) -> tuple[str, ...]:
    """The first names where they suffice, else d0, d1, ..."""
    return first[:num_dims] if num_dims <= len(first) else tuple(f"d{i}" for i in range(num_dims))


def _named(shape: Shape) -> dict[str, int]:
    """A tensor's dims by their usual names."""
    return dict(zip(_numbered(len(shape), PLAIN.get(len(shape), ())), shape, strict=True))


def _leading(shape: Shape) -> dict[str, int]:
    """The dims before the ones that an op works on."""
    return dict(zip(_numbered(len(shape), LEADING), shape, strict=True))


def _space(shape: Shape) -> dict[str, int]:
    """The dims after batch and channel: d, h, w, the last ones first."""
    return dict(zip(_numbered(len(shape), ("d", "h", "w")[3 - len(shape) :]), shape, strict=True))


def _opaque(call: Call) -> Nest:
    def read(shapes: tuple[Shape, ...]) -> tuple[Access, ...]:
        return tuple(Access(((),) * len(s), (0,) * len(s)) for s in shapes)

    return Nest((), read(call.inputs), read(call.outputs))


def _linear(call: Call) -> Nest:
    x, w, *bias = call.inputs
    lead = _leading(x[:-1])
    head = " ".join(lead)
    text = f"{head} k, n k" + ", n" * len(bias) + f" -> {head} n"
    return nest_from(text, {**lead, "n": w[0], "k": w[1]})


def _matmul(call: Call) -> Nest:
    a, b = call.inputs
    (out,) = call.outputs
    batch = _numbered(len(out) - 2, ("b", "h", "g", "u", "v", "w"))
    sizes = dict(zip(batch, out[:-2], strict=True))
    k = a[-2] if call.flag("transpose_a") else a[-1]

    def lead(shape: Shape) -> str:
        own = shape[:-2]
        names = batch[len(batch) - len(own) :]
        return " ".join("_" if s == 1 else n for n, s in zip(names, own, strict=True))

    left = "k m" if call.flag("transpose_a") else "m k"
    right = "n k" if call.flag("transpose_b") else "k n"
    text = f"{lead(a)} {left}, {lead(b)} {right} -> {' '.join(batch)} m n"
    return nest_from(text, {**sizes, "m": out[-2], "n": out[-1], "k": k})


def _einsum(call: Call) -> Nest:
    terms, right = einsum_terms(call)
    sizes: dict[str, int] = {}
    for term, shape in zip(terms, call.inputs, strict=True):
        sizes.update(zip(term, shape, strict=True))
    ordered = {letter: sizes[letter] for letter in right} | sizes
    text = ", ".join(" ".join(term) or "." for term in terms) + f" -> {' '.join(right) or '.'}"
    # A letter that stands twice in a term walks along a diagonal, which no share holds.
    diagonal = {letter for term in terms for letter in term if term.count(letter) > 1}
    return nest_from(text, ordered, whole=diagonal)


def _conv(call: Call) -> Nest:
    x, w, *bias = call.inputs
    (out,) = call.outputs
    rank = len(x) - 2
    space = ("d", "h", "w")[3 - rank :]
    kernel = ("q", "r", "s")[3 - rank :]
    groups = call.whole("groups", 1)
    stride = per_space(call, "stride", rank, 1)
    padding = per_space(call, "padding", rank, 0, least=0)
    dilation = per_space(call, "dilation", rank, 1)
    reach = [dilation[i] * (w[2 + i] - 1) for i in range(rank)]
    # The window slides over the input, or over the output if transposed: that side has the halo.
    fine, coarse = (out, x) if call.flag("transposed") else (x, out)
    halo = [
        _border(reach[i] + 1, stride[i], padding[i], fine[2 + i], coarse[2 + i])
        for i in range(rank)
    ]
    sizes = dict(zip(space, coarse[2:], strict=True))
    bordered, even = " ".join(f"{s}+{h}" for s, h in zip(space, halo, strict=True)), " ".join(space)
    if call.flag("transposed"):
        read, wide, weight = even, bordered, f"(g c) n {' '.join(kernel)}"
    else:
        read, wide, weight = bordered, even, f"(g n) c {' '.join(kernel)}"
    text = f"b (g c) {read}, {weight}" + ", (g n)" * len(bias) + f" -> b (g n) {wide}"
    sizes = {
        "b": x[0],
        "g": groups,
        "n": out[1] // groups,
        "c": x[1] // groups,
        **sizes,
        **dict(zip(kernel, w[2:], strict=True)),
    }
    return nest_from(text, sizes, whole=kernel)


def _border(window: int, stride: int, padding: int, fine: int, coarse: int) -> int:
    """The halo of a window that slides over `fine` positions, one step per `coarse` position.

    Usually window - stride. Shares of the two sides drift apart if `fine` is not `coarse` strides,
    and padding shifts them; a drift of one position only stands for sizes that do not divide.
    """
    drift = fine - coarse * stride
    drift = drift if abs(drift) > 1 else 0
    return max(0, window - stride, padding + max(0, drift)) + max(0, -drift) // 2


def _pool(call: Call) -> Nest:
    (x,), (out,) = call.inputs, call.outputs
    rank = len(x) - 2
    space = ("d", "h", "w")[3 - rank :]
    if call.attr("output") is not None:
        # The windows of an adaptive pooling are shares of the input only if they divide it.
        even = [o > 1 and i % o == 0 for i, o in zip(x[2:], out[2:], strict=True)]
        read = " ".join(s if e else "_" for s, e in zip(space, even, strict=True))
    else:
        kernel = per_space(call, "kernel", rank, 1)
        stride = per_space(call, "stride", rank, kernel)
        padding = per_space(call, "padding", rank, 0, least=0)
        halo = [
            _border(kernel[i], stride[i], padding[i], x[2 + i], out[2 + i]) for i in range(rank)
        ]
        read = " ".join(f"{s}+{h}" for s, h in zip(space, halo, strict=True))
    text = f"b c {read} -> b c {' '.join(space)}"
    return nest_from(text, {"b": x[0], "c": x[1], **dict(zip(space, out[2:], strict=True))})


def _batch_norm(call: Call) -> Nest:
    x, *weights = call.inputs
    space = _space(x[2:])
    image = f"b c {' '.join(space)}"
    text = image + ", c" * len(weights) + f" -> {image}"
    over = ("b", *space) if call.flag("training", True) else ()
    stats = [Stat(name, ("c",), 2) for name in over]
    return nest_from(text, {"b": x[0], "c": x[1], **space}, stats=stats)


def _group_norm(call: Call) -> Nest:
    x, *weights = call.inputs
    groups = call.whole("groups", 1)
    space = _space(x[2:])
    sizes = {"b": x[0], "g": groups, "c": x[1] // groups, **space}
    tail = f"(g c) {' '.join(space)}"
    text = f"b {tail}" + ", (g c)" * len(weights) + f" -> b {tail}"
    return nest_from(text, sizes, stats=[Stat(n, ("b", "g"), 2) for n in ("c", *space)])


def _last_norm(call: Call) -> Nest:
    x, *weights = call.inputs
    rank = call.whole("dims", 1)
    lead = _leading(x[:-rank])
    names = _numbered(rank, ("c", "d", "e", "f"))
    if rank > 4:
        names = tuple(f"c{i}" for i in range(rank))  # d0, d1, ... may be leading dims
    tail = dict(zip(names, x[len(x) - rank :], strict=True))
    values = 1 if call.kind == "rms_norm" else 2
    text = f"{' '.join((*lead, *tail))}" + f", {' '.join(tail)}" * len(weights)
    text += f" -> {' '.join((*lead, *tail))}"
    return nest_from(text, {**lead, **tail}, stats=[Stat(n, tuple(lead), values) for n in tail])


def _softmax(call: Call) -> Nest:
    (x,) = call.inputs
    sizes = _named(x)
    names = tuple(sizes)
    axis = names[axis_of(call, len(x))]
    rows = tuple(n for n in names if n != axis)
    text = f"{' '.join(names)} -> {' '.join(names)}"
    return nest_from(text, sizes, stats=[Stat(axis, rows, 2)])


def _attention(call: Call) -> Nest:
    q, k, v, *mask = call.inputs
    heads, groups = attention_heads(call)
    if len(q) == 4:
        text = "b (h g) s d, b h t d, b h t e"
        out = "b (h g) s e"
        positions, keys, size, value = q[2], k[2], q[3], v[3]
    else:
        text = "b s (h g d), b t (h d), b t (h e)"
        out = "b s (h g e)"
        positions, keys, size, value = q[1], k[1], q[2] // heads, v[2] // groups
    sizes = {
        "b": q[0], "h": groups, "g": heads // groups, "s": positions, "t": keys,
        "d": size, "e": value,
    }  # fmt: skip
    sinks = mask[-1:] if call.flag("sinks") else []
    for shape in mask[: len(mask) - len(sinks)]:  # broadcasts to [b, heads, s, t]
        names = ("b", "(h g)", "s", "t")[4 - len(shape) :]
        own = ("_" if size == 1 else name for size, name in zip(shape, names, strict=True))
        text += f", {' '.join(own) or '.'}"
    text += ", (h g)" * len(sinks)
    text += f" -> {out}"
    # Splitting the keys merges partial outputs with their maxima and sums (flash decoding).
    merge = Stat("t", ("b", "h", "g", "s"), value + 2)
    return nest_from(text, sizes, whole=("d", "e"), stats=[merge])


def _embedding(call: Call) -> Nest:
    ids, table = call.inputs
    lead = _leading(ids)
    head = " ".join(lead) or "."
    return nest_from(f"{head}, v e -> {' '.join(lead)} e", {**lead, "v": table[0], "e": table[1]})


def _elementwise(call: Call) -> Nest:
    fn = call.text("fn", "add")
    if fn == "rope":
        return _rope(call)
    # A local response norm mixes channels, and where a sequence ends all of it decides.
    mixes = fn in ("lrn", "marked")
    return _broadcast(call, whole=tuple(_named(call.outputs[0]))[1:2] if mixes else ())


def _broadcast(call: Call, whole: tuple[str, ...] = ()) -> Nest:
    sizes = _named(call.outputs[0])
    names = tuple(sizes)

    def read(shape: Shape) -> str:
        own = names[len(names) - len(shape) :]
        return " ".join("_" if s == 1 else n for n, s in zip(own, shape, strict=True)) or "."

    text = ", ".join(read(shape) for shape in call.inputs)
    return nest_from(f"{text} -> {' '.join(names) or '.'}", sizes, whole=whole)


def _rope(call: Call) -> Nest:
    """Rotary positions mix the features of a head, which stay together.

    Of [b, s, features] without the attribute `heads`, shares are taken to end between heads.
    """
    (x,) = call.inputs
    if call.attr("heads") is None and len(x) == 3:
        return _broadcast(call)
    heads = call.whole("heads", 1)
    lead = _leading(x[:-1])
    text = f"{' '.join(lead)} (h d)"
    sizes = {**lead, "h": heads, "d": x[-1] // heads}
    return nest_from(f"{text} -> {text}", sizes, whole=("d",))


def _reduce(call: Call) -> Nest:
    (x,) = call.inputs
    sizes = _named(x)
    names = tuple(sizes)
    gone = {axis % len(x) for axis in call.ints("axes", tuple(range(len(x))))}
    if call.flag("keepdim"):
        right = ["_" if i in gone else name for i, name in enumerate(names)]
    else:
        right = [name for i, name in enumerate(names) if i not in gone]
    # Sums and means add up over shares; a maximum or a product is completed by an exchange.
    plain = call.text("fn", "sum") in ("sum", "mean")
    kept = tuple(name for i, name in enumerate(names) if i not in gone)
    stats = [] if plain else [Stat(names[i], kept, 1) for i in sorted(gone)]
    return nest_from(f"{' '.join(names) or '.'} -> {' '.join(right) or '.'}", sizes, stats=stats)


def _along_axis(call: Call) -> Nest:
    """Concat, split, slice and pad move data along axes that stay whole; the rest is parallel."""
    big = call.outputs[0] if call.kind in ("concat", "pad") else call.inputs[0]
    sizes = _named(big)
    names = tuple(sizes)
    if call.kind == "pad":
        moved = {
            i
            for i, p in enumerate(zip(call.ints("before"), call.ints("after"), strict=True))
            if any(p)
        }
    else:
        moved = {axis_of(call, len(big))}
    text = " ".join("_" if i in moved else name for i, name in enumerate(names)) or "."
    left, right = ", ".join([text] * len(call.inputs)), ", ".join([text] * len(call.outputs))
    kept = {name: size for i, (name, size) in enumerate(sizes.items()) if i not in moved}
    return nest_from(f"{left} -> {right}", kept)


def _reshape(call: Call) -> Nest:
    """The finest loops that both shapes are made of, where their factors line up."""
    (x,), (y,) = call.inputs, call.outputs
    sizes: dict[str, int] = {}
    left: list[str] = []
    right: list[str] = []
    i = j = 0
    while i < len(x) or j < len(y):
        a, b = [x[i]] if i < len(x) else [1], [y[j]] if j < len(y) else [1]
        i, j = i + 1, j + 1
        while _product(a) != _product(b):  # grow the shorter side until the groups match
            if _product(a) < _product(b):
                a.append(x[i])
                i += 1
            else:
                b.append(y[j])
                j += 1
        cuts = sorted({*_suffixes(a), *_suffixes(b)}, reverse=True)
        if any(big % small for big, small in itertools.pairwise(cuts)):
            left += ["_"] * min(len(a), len(x))
            right += ["_"] * min(len(b), len(y))
            continue
        loops = {}
        for big, small in itertools.pairwise(cuts):
            loops[big] = f"d{len(sizes)}"
            sizes[loops[big]] = big // small
        left += _grouped(a, loops) if len(x) else []
        right += _grouped(b, loops) if len(y) else []
    left, right = left[: len(x)], right[: len(y)]
    return nest_from(f"{' '.join(left) or '.'} -> {' '.join(right) or '.'}", sizes)


def _product(values: list[int]) -> int:
    total = 1
    for value in values:
        total *= value
    return total


def _suffixes(values: list[int]) -> list[int]:
    return [_product(values[i:]) for i in range(len(values) + 1)]


def _grouped(values: list[int], loops: dict[int, str]) -> list[str]:
    """The text of each tensor dim: the loops whose range lies between its suffix products."""
    grouped = []
    for i in range(len(values)):
        high, low = _product(values[i:]), _product(values[i + 1 :])
        names = [name for top, name in loops.items() if low < top <= high]
        grouped.append(f"({' '.join(names)})" if names else "_")
    return grouped


def _transpose(call: Call) -> Nest:
    (x,) = call.inputs
    sizes = _named(x)
    names = tuple(sizes)
    right = " ".join(names[i] for i in call.ints("perm"))
    return nest_from(f"{' '.join(names) or '.'} -> {right or '.'}", sizes)


def _expand(call: Call) -> Nest:
    return _broadcast(call)


def _resize(call: Call) -> Nest:
    (x,), (out,) = call.inputs, call.outputs
    space = _space(out[2:])
    read = " ".join(f"{name}+2" for name in space)  # interpolation looks one beyond on each side
    return nest_from(f"b c {read} -> b c {' '.join(space)}", {"b": x[0], "c": x[1], **space})


def _recurrent(call: Call) -> Nest:
    x, _, w_rec, *bias = call.inputs
    z = 2 if call.flag("bidirectional") else 1
    hidden = w_rec[1]
    text = "b t i, (z h) i, (z h) k" + ", (z h)" * len(bias) + " -> b t (z h)"
    sizes = {"b": x[0], "t": x[1], "z": z, "h": hidden, "i": x[2], "k": hidden}
    stats = [
        Stat("h", ("b", "t"), hidden, "all_gather"),  # the next step reads the whole state
        Stat("i", ("b", "t", "z", "h"), gates(call.kind)),  # gates before their non-linearity
    ]
    return nest_from(text, sizes, whole=("t", "k"), stats=stats)


def _cell(call: Call) -> Nest:
    x, state = call.inputs[:2]
    states = len(call.outputs)
    bias = len(call.inputs) - 3 - states
    text = "b i" + ", b k" + ", b h" * (states - 1) + ", h i, h k" + ", h" * bias + " ->"
    text += ",".join([" b h"] * states)
    sizes = {"b": x[0], "h": state[1], "i": x[1], "k": state[1]}
    stats = [Stat(name, ("b", "h"), gates(call.kind)) for name in ("i", "k")]
    # A GRU also mixes its state in unit by unit, so a share of it does not do.
    return nest_from(text, sizes, whole=("k",) if call.kind == "gru_cell" else (), stats=stats)


def _state_space(call: Call) -> Nest:
    """A scan over positions, which stay together; heads of a group share what they read."""
    x, b = call.inputs[0], call.inputs[3]
    heads, groups = call.whole("heads", 1), call.whole("groups", 1)
    text = "b t (g r p), b t (g r), (g r), b t (g n), b t (g n), (g r), (g r)"
    text += ", b (g r) p n" * (len(call.inputs) - 7) + " -> b t (g r p)"
    sizes = {
        "b": x[0], "t": x[1], "g": groups, "r": heads // groups, "p": x[2] // heads,
        "n": b[2] // groups,
    }  # fmt: skip
    return nest_from(text, sizes, whole=("t", "p", "n"))


def _router(call: Call) -> Nest:
    x, w, *more = call.inputs
    lead = _leading(x[:-1])
    head = " ".join(lead)
    sizes = {**lead, "e": w[0], "k": w[1]}
    # The softmax needs whole logits, and their maximum and sum over all experts; who chooses the
    # best experts of a token, the scores and numbers of those.
    values = 2 * (call.whole("top_k", 1) if call.attr("score") is not None else 1)
    stats = [Stat("k", (*lead, "e"), 1), Stat("e", tuple(lead), values)]
    text = f"{head} k, e k" + ", e" * len(more) + f" -> {head} e"
    return nest_from(text, sizes, stats=stats)


def _token_exchange(call: Call) -> Nest:
    """Dispatch and combine. A share of the batch fills the same share of every expert's places."""
    tokens, router = call.inputs
    lead = _leading(router[:-1])
    head = " ".join(lead)
    places = f"({head})" if head else "_"
    if call.kind == "moe_dispatch":
        text = f"{head} k, {head} e -> e {places} k"
        size = tokens[-1]
    else:
        text = f"e {places} k, {head} e -> {head} k"
        size = tokens[2]
    return nest_from(text, {**lead, "e": router[-1], "k": size})


def _expert_linear(call: Call) -> Nest:
    x, w, *bias = call.inputs
    text = "e c k, e n k" + ", e n" * len(bias) + " -> e c n"
    return nest_from(text, {"e": x[0], "c": x[1], "n": w[1], "k": x[2]})


def _class_loss(call: Call) -> Nest:
    logits = call.inputs[0]
    lead = _leading(logits[:-1])
    head = " ".join(lead)
    stats = [Stat("v", tuple(lead), 3)]
    return nest_from(f"{head} v, {head or '.'} -> .", {**lead, "v": logits[-1]}, stats=stats)


def _pair_loss(call: Call) -> Nest:
    sizes = _named(call.inputs[0])
    names = " ".join(sizes) or "."
    return nest_from(f"{names}, {names} -> .", sizes)


def _optimizer(call: Call) -> Nest:
    sizes = _named(call.inputs[0])
    names = " ".join(sizes) or "."
    return nest_from(f"{', '.join([names] * len(call.inputs))} -> {names}", sizes)


def _constant(call: Call) -> Nest:
    sizes = _named(call.outputs[0])
    return nest_from(f"-> {' '.join(sizes) or '.'}", sizes)


LOOPS: dict[str, Callable[[Call], Nest]] = {
    "linear": _linear,
    "matmul": _matmul,
    "einsum": _einsum,
    "conv": _conv,
    "pool": _pool,
    "batch_norm": _batch_norm,
    "group_norm": _group_norm,
    "layer_norm": _last_norm,
    "rms_norm": _last_norm,
    "softmax": _softmax,
    "attention": _attention,
    "embedding": _embedding,
    "elementwise": _elementwise,
    "reduce": _reduce,
    "concat": _along_axis,
    "split": _along_axis,
    "slice": _along_axis,
    "reshape": _reshape,
    "transpose": _transpose,
    "pad": _along_axis,
    "resize": _resize,
    "expand": _expand,
    "constant": _constant,
    "lstm": _recurrent,
    "gru": _recurrent,
    "lstm_cell": _cell,
    "gru_cell": _cell,
    "state_space": _state_space,
    "moe_router": _router,
    "moe_dispatch": _token_exchange,
    "moe_combine": _token_exchange,
    "expert_linear": _expert_linear,
    "cross_entropy": _class_loss,
    "mse_loss": _pair_loss,
    "optimizer": _optimizer,
}
