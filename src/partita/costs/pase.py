"""PaSE's own cost model: what it charges for an op with a split, and for a tensor between two.

V. Elango, "PaSE: Parallelization Strategies for Efficient DNN Training", IPDPS 2021. Written anew
from its formulas, for those who come from PaSE and want the numbers they know; `costs.sharding` is
the model to plan with. The unit is FLOP (a multiply-add is one); a word of 8 bytes that is sent
costs

    r = peak FLOP/s of a device / words per second of a link        5000 by default

with no latency, one bandwidth for all, no overlap, no memory. Below x' is a device's share of x,
q_x how many ways x is split, and E the elements of a device.

    AR(w, q)   2 r w (q - 1) / q                          ring all-reduce of w words over q devices
    product    B' (3 m'n'k' + 3 pw m'n' + AR(m'n', q_k) + AR(m'k', q_n) + AR(n'k', q_m))
               forward and two backward products with pw pointwise operations on the result, and
               the sums of the result, of the input's gradient and of the weights' gradient.
               Conv: m = b h w, k = c r s. LSTM: B = layers, m = s b, n = 4 units, k = 2 units, and
               in every layer and step the state goes from its place as result to that as input
    norm       16 E + 4 AR(E / x', q_x) + 4 AR(x', other splits), x the axis
    softmax    4 E + E x + 2 AR(E / x', q_x) + AR(E / x' x, q_x)
    loss       4 E + 2 E / x' (1 + r if the classes are split)
    pooling    E + r b'c' ((h' + R)(w' + S) - h'w'), of the input; R only if h is split, S if w is
    mean       AR(E, splits of what is reduced); it computes nothing
    others     elementwise (1 + pw) E; what only moves or renames is free
    edge       2 r max(0, share(t) - I) from producer layout s to consumer layout t, there and back;
               I is what both shares have in common, 0 if t splits more than s

Choices of an op: every dim by any divisor that leaves at least `cutoff` of it on a device, in all
at most `procs` ways. Rows are in ascending order (PaSE's are in that of Python sets).

Tables are made once per distinct op and once per distinct pair of layouts of a tensor.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from partita.errors import ProblemError
from partita.problems.sharding import ShardingProblem, ShardingSolution
from partita.suggest import suggest
from partita.zoo.pase_graphs import pase_graph
from partita.zoo.pase_ops import Access, PaseDim, PaseGraph, PaseOp, PaseTensor

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

WORD_BYTES = 8  # PaSE's numbers are doubles, whatever the model computes in
MOST_CELLS = 100_000_000  # of all edge matrices together: 800 MB
LARGEST_WORD = 1e30  # FLOP per word; beyond it sums of costs leave what a problem may hold
GATES = 4  # of an LSTM cell: all are columns of one product
CELL_INPUTS = 2  # what comes from below and what was before: its rows


def pase_problem(
    graph: str, procs: int, batch: int = 128, tflops: float = 10.0, gbps: float = 16.0
) -> tuple[ShardingProblem, tuple[PaseOp, ...]]:
    """What PaSE solves for one of its graphs, and the ops whose splits are chosen.

    Row x of `problem.splits[v]` is choice x of op v; `ops[v].describe(row)` says it in words.
    """
    model = pase_graph(graph, batch)
    meta = {"batch": batch, "flops_T": tflops, "bw_GBs": gbps}
    return graph_problem(model, procs, flop_per_word(tflops, gbps), meta), model.ops


def graph_problem(
    graph: PaseGraph, procs: int, word: float = 5000.0, meta: Mapping[str, object] | None = None
) -> ShardingProblem:
    """The problem of a graph written by hand, `word` FLOP for every word that is sent."""
    if procs < 1:
        raise ProblemError(f"is {procs}", fix="give at least one device", field="procs")
    if not 0 < word <= LARGEST_WORD:
        fix = f"it lies above 0 and up to {LARGEST_WORD:g}"
        raise ProblemError(f"found {word:g} FLOP per word that is sent", fix=fix)
    about = {"costs": "pase", "graph": graph.name, "p": procs, "flop_per_word": word}
    return _PaseBuilder(graph, procs, word).problem({**about, **(meta or {})})


def flop_per_word(tflops: float, gbps: float) -> float:
    """What a device computes while a link of `gbps` gigabytes per second sends one word."""
    for field, value in (("tflops", tflops), ("gbps", gbps)):
        if not (math.isfinite(value) and value > 0):
            raise ProblemError(f"is {value}", fix="give a positive number", field=field)
    return tflops * 1000 / (gbps / WORD_BYTES)


def describe(
    problem: ShardingProblem, ops: Sequence[PaseOp], solution: ShardingSolution
) -> tuple[str, ...]:
    """A strategy as text, a line per op: `conv1: b/4 n/2`."""
    return tuple(
        op.describe(splits[choice].tolist())
        for op, splits, choice in zip(ops, problem.splits, solution.assignment, strict=True)
    )


def choices(op: PaseOp, procs: int, cutoff: int) -> Ints:
    """Every split of an op that PaSE considers: a row of factors each, in ascending order."""
    rows = np.ones((1, 0), dtype=np.int64)
    used = np.ones(1, dtype=np.int64)
    for dim in op.dims:
        factors = np.array(_factors(dim, procs, cutoff), dtype=np.int64)
        before, factor = np.nonzero(used[:, None] * factors <= procs)
        rows = np.column_stack([rows[before], factors[factor]])
        used = used[before] * factors[factor]
    return rows[_contiguous(rows, op.dims)] if op.kind in ("Ravel", "Unravel") else rows


def _factors(dim: PaseDim, procs: int, cutoff: int) -> list[int]:
    """Divisors that leave enough of the dim; where none does, it stays whole."""
    most = min(procs, dim.extent // cutoff) if dim.splits else 1
    return [factor for factor in range(1, most + 1) if dim.extent % factor == 0] or [1]


def _contiguous(rows: Ints, dims: Sequence[PaseDim]) -> npt.NDArray[np.bool_]:
    """Where every share is one run of the flat tensor.

    Some dim is split in any way, those before it into single elements, those after it not at all.
    """
    single = rows == np.array([dim.extent for dim in dims])
    whole = rows == 1
    contiguous = np.zeros(len(rows), dtype=np.bool_)
    for at in range(len(dims)):
        contiguous |= single[:, :at].all(axis=1) & whole[:, at + 1 :].all(axis=1)
    return contiguous


def layouts(op: PaseOp, splits: Ints, access: Access) -> Ints:
    """How many ways each dim of a tensor is divided, choice by choice."""
    column = {dim.name: index for index, dim in enumerate(op.dims)}
    ways: Ints = np.ones((len(splits), len(access)), dtype=np.int64)
    for dim, letters in enumerate(access):
        ways[:, dim] = splits[:, [column[letter] for letter in letters]].prod(axis=1)
    return ways


def op_flop(op: PaseOp, splits: Ints, word: float) -> Floats:
    """What an op costs with each of these splits."""
    if op.kind not in COSTS:
        raise ProblemError(f"is a {op.kind}", fix=suggest(op.kind, list(COSTS)), field=op.name)
    return COSTS[op.kind](op, _OpShards(op, splits), word)


def edge_flop(shape: tuple[int, ...], made: Ints, read: Ints, word: float) -> Floats:
    """What a tensor costs between the producer's layouts (rows) and the consumer's (columns)."""
    needed = (np.array(shape, dtype=np.float64) / read).prod(axis=1)
    common: Floats = np.ones((len(made), len(read)))
    for dim, extent in enumerate(shape):  # one at a time, so that no array has three dims
        common *= np.minimum((extent / made[:, dim])[:, None], extent / read[:, dim])
    # PaSE expects nothing in place where the consumer has more shares than the producer.
    common[read.prod(axis=1) > made.prod(axis=1)[:, None]] = 0
    words: Floats = np.maximum(0, needed - common)
    return 2 * word * words


class _PaseBuilder:
    """Makes each table once: per distinct op, and per distinct pair of layouts of a tensor."""

    def __init__(self, graph: PaseGraph, procs: int, word: float) -> None:
        self._graph = graph
        self._procs = procs
        self._word = word
        self._tables: dict[object, _Table] = {}
        self._layouts: dict[tuple[int, Access], _Layouts] = {}
        self._numbers: dict[bytes, int] = {}
        self._matrix_of: dict[object, int] = {}
        self._matrices: list[Floats] = []

    def problem(self, meta: dict[str, object]) -> ShardingProblem:
        """All costs."""
        ops = self._graph.ops
        tables = [self._table(op) for op in ops]
        self._check_size(tables)
        edges, matrix_of = [], []
        for index, op in enumerate(ops):
            # PaSE's graph holds one edge between two ops: of several tensors only the last counts.
            for source, tensor in {tensor.source: tensor for tensor in op.inputs}.items():
                made = self._layout(ops[source], tables[source], ops[source].output.access)
                read = self._layout(op, tables[index], tensor.access)
                edges.append((source, index))
                matrix_of.append(self._matrix(tensor, made, read))
        return ShardingProblem(
            costs=tuple(table.costs for table in tables),
            edges=tuple(edges),
            matrix_of=tuple(matrix_of),
            matrices=tuple(self._matrices),
            names=tuple(op.name for op in ops),
            splits=tuple(table.splits for table in tables),
            meta=msgspec.json.encode(meta).decode(),
        )

    def _table(self, op: PaseOp) -> "_Table":
        """Choices and costs; ops that differ in their names only share them."""
        shapes = tuple(tensor.shape for tensor in op.inputs)
        key = (op.kind, op.dims, op.pointwise, op.window, shapes)
        if key not in self._tables:
            splits = choices(op, self._procs, self._graph.cutoff)
            costs = op_flop(op, splits, self._word)
            self._tables[key] = _Table(len(self._tables), splits, costs)
        return self._tables[key]

    def _layout(self, op: PaseOp, table: "_Table", access: Access) -> "_Layouts":
        """Choices lay a tensor out in few distinct ways, and only those need a price."""
        key = (table.number, access)
        if key not in self._layouts:
            ways = layouts(op, table.splits, access)
            number = self._numbers.setdefault(ways.tobytes(), len(self._numbers))
            distinct, of_choice = np.unique(ways, axis=0, return_inverse=True)
            self._layouts[key] = _Layouts(number, distinct, of_choice)
        return self._layouts[key]

    def _matrix(self, tensor: PaseTensor, made: "_Layouts", read: "_Layouts") -> int:
        key = (tensor.shape, made.number, read.number)
        if key not in self._matrix_of:
            costs = edge_flop(tensor.shape, made.distinct, read.distinct, self._word)
            self._matrix_of[key] = len(self._matrices)
            self._matrices.append(costs[made.of_choice][:, read.of_choice])
        return self._matrix_of[key]

    def _check_size(self, tables: Sequence["_Table"]) -> None:
        """Refuse before any matrix is made what would not fit."""
        joined = {
            (tables[tensor.source].number, tables[index].number)
            for index, op in enumerate(self._graph.ops)
            for tensor in op.inputs
        }
        count = {table.number: len(table.costs) for table in tables}
        cells = sum(count[producer] * count[consumer] for producer, consumer in joined)
        if cells > MOST_CELLS:
            raise ProblemError(
                f"is {self._procs}, which leaves so many choices that the costs of tensors would "
                f"fill {cells:.1e} cells",
                fix=f"give fewer devices: {MOST_CELLS:.0e} cells are the most",
                field="procs",
            )


@dataclass(frozen=True, slots=True, eq=False)
class _Table:
    """Choices of an op and their costs."""

    number: int
    splits: Ints
    costs: Floats


@dataclass(frozen=True, slots=True, eq=False)
class _Layouts:
    """The distinct layouts of a tensor, and which of them each choice gives."""

    number: int  # equal where the layouts of all choices are
    distinct: Ints
    of_choice: Ints


class _OpShards:
    """Shares and split factors of an op's dims, one entry per choice."""

    def __init__(self, op: PaseOp, splits: Ints) -> None:
        self._dims = op.dims
        self._ways = splits.astype(np.float64)
        self._shares = np.array([dim.extent for dim in op.dims]) / self._ways

    def share(self, letters: str) -> Floats:
        """How many elements of these dims together a device has."""
        share: Floats = self._shares[:, self._columns(letters)].prod(axis=1)
        return share

    def ways(self, letters: str) -> Floats:
        """How many ways these dims together are split."""
        ways: Floats = self._ways[:, self._columns(letters)].prod(axis=1)
        return ways

    def _columns(self, letters: str) -> list[int]:
        return [index for index, dim in enumerate(self._dims) if dim.name in letters]


def _letters(op: PaseOp, role: str) -> str:
    return "".join(dim.name for dim in op.dims if dim.role == role)


def _extent(op: PaseOp, letters: str) -> int:
    return math.prod(dim.extent for dim in op.dims if dim.name in letters)


def _all_reduce(size: Floats, ways: Floats, word: float) -> Floats:
    return 2 * word * size / ways * (ways - 1)


def _product(op: PaseOp, split: _OpShards, word: float) -> Floats:
    return _products(op, split, word, 1, 1)


def _products(op: PaseOp, split: _OpShards, word: float, columns: int, rows: int) -> Floats:
    """A batch of matrix products, n `columns` times and k `rows` times their dims."""
    over = {role: _letters(op, role) for role in "BMNK"}
    m = split.share(over["M"])
    n = split.share(over["N"]) * columns
    k = split.share(over["K"]) * rows
    return split.share(over["B"]) * (
        3 * m * n * k
        + 3 * op.pointwise * m * n
        + _all_reduce(m * n, split.ways(over["K"]), word)
        + _all_reduce(m * k, split.ways(over["N"]), word)
        + _all_reduce(n * k, split.ways(over["M"]), word)
    )


def _lstm(op: PaseOp, split: _OpShards, word: float) -> Floats:
    """Products of all gates, and the state's way from n to k in every layer and step."""
    b, n, k = split.share("b"), split.share("n"), split.share("k")
    kept = np.where(split.ways("bk") > split.ways("bn"), 0, b * np.minimum(n, k))
    moves = _extent(op, "ls")  # of all layers, because they wait for each other however split
    return _products(op, split, word, GATES, CELL_INPUTS) + moves * word * (b * k - kept)


def _pooling(op: PaseOp, split: _OpShards, word: float) -> Floats:
    """One operation per element of the result, and the halo that a split h or w needs."""
    _, _, height, width = op.inputs[0].shape
    down, across = split.ways("h"), split.ways("w")
    h, w = height / down, width / across
    halo = (h + op.window[0] * (down > 1)) * (w + op.window[1] * (across > 1)) - h * w
    return split.share("bchw") + word * split.share("bc") * halo


def _elementwise(op: PaseOp, split: _OpShards, word: float) -> Floats:
    return (1 + op.pointwise) * split.share(_letters(op, ""))


def _norm(op: PaseOp, split: _OpShards, word: float) -> Floats:
    """Statistics are added up over the shares of the axis, scale and bias over all others."""
    axis, others = _letters(op, "X"), _letters(op, "")
    statistics = _all_reduce(split.share(others), split.ways(axis), word)
    parameters = _all_reduce(split.share(axis), split.ways(others), word)
    return 16 * split.share(axis + others) + 4 * statistics + 4 * parameters


def _softmax(op: PaseOp, split: _OpShards, word: float) -> Floats:
    """Backward is charged as a product with the square matrix of derivatives of every row."""
    axis, others = _letters(op, "X"), _letters(op, "")
    rows, ways, extent = split.share(others), split.ways(axis), _extent(op, axis)
    sums = 2 * _all_reduce(rows, ways, word) + _all_reduce(rows * extent, ways, word)
    return split.share(axis + others) * (4 + extent) + sums


def _loss(op: PaseOp, split: _OpShards, word: float) -> Floats:
    axis, others = _letters(op, "X"), _letters(op, "")
    rows = split.share(others)
    return 4 * split.share(axis + others) + 2 * rows * (1 + word * (split.ways(axis) > 1))


def _mean(op: PaseOp, split: _OpShards, word: float) -> Floats:
    axes, others = _letters(op, "X"), _letters(op, "")
    return _all_reduce(split.share(axes + others), split.ways(axes), word)


def _nothing(op: PaseOp, split: _OpShards, word: float) -> Floats:
    return np.zeros_like(split.share(""))


COSTS: dict[str, Callable[[PaseOp, _OpShards, float], Floats]] = {
    "Conv": _product,
    "FC": _product,
    "Einsum": _product,
    "LSTM": _lstm,
    "Pooling": _pooling,
    "Elementwise": _elementwise,
    "Norm": _norm,
    "Softmax": _softmax,
    "SoftmaxCrossEntropy": _loss,
    "ReduceMean": _mean,
    "Concat": _nothing,
    "Stack": _nothing,
    "Unstack": _nothing,
    "Ravel": _nothing,
    "Unravel": _nothing,
}
