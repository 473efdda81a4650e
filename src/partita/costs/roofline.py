"""Seconds of an op on a device kind: the roofline with launch, cache and tile effects.

    time = launches * launch_s + max(compute, memory)

Compute. A contraction is seen as `batch` matrix products of m x n x k (read off its loop nest). It
is cut into tiles; a device of U units runs them in ceil(tiles / U) waves, so a last wave that is
nearly empty costs as much as a full one (tile and wave quantisation). Large tiles reach a larger
part of the peak; the best tile shape is taken, splitting k over units where tiles are few.
Everything else computes at the f32 rate of the plain arithmetic units.

Memory. Weights and states come from device memory. Of the activations, what fits the cache is
taken to be there: with working set s and cache c, min(s, c * c / s) bytes move at cache speed.

The constants below are fractions of the vendor's peak that well-tuned libraries reach. Kinds of
devices with a parameter set of their own (`physics.py`) have their own rates of products, attention
and memory. Measured profiles replace all of this where they exist.

Execution. `graph`: the kernels lie in a CUDA graph, each op is one well-tuned kernel, and the host
costs nothing. `eager`: the kernels that PyTorch starts op by op (`kernels.py`). `compiled`: chains
of cheap ops are one kernel, and what is made inside a chain is not written (`fusion.py`).

The bound, `work_bound_s`: the least seconds of device time that a model can take, however it is
split, cut or ordered. Each op is given the best that the roofline ever grants: a contraction the
largest tile's part of the peak with all of its k in one piece, everything else the vector units'
rate; weights and states come from memory once, activations from the cache at best. No share of an
op and no micro-batch can be below its part of that. With w_op,k for device kind k, n_k devices of
it and any weights y_k >= 0 that add up to 1,

    step >= sum over ops of min_k (y_k w_op,k / n_k)

because a device computes no longer than a step. For one kind this is all work over all devices.
"""

import functools
import math
from dataclasses import dataclass, replace
from typing import NamedTuple

from partita.cluster import Cluster, DeviceKind
from partita.cluster.calibration import ISSUE, OP_BY_OP, PART, PER_BYTE, PER_FLOP, TAKEN_APART
from partita.costs.fusion import FUSED, fused_elements, starts_kernel
from partita.costs.kernels import HOST_S, Kernels, kernels
from partita.costs.physics import Physics, physics_of
from partita.graph.loops import ADDED_FROM, Access, Nest, loop_nest
from partita.graph.record import Call, Graph, Op, dtype_bytes, product_dtype
from partita.graph.shapes import gates
from partita.graph.splits import Factors, part
from partita.graph.work import Elements, Traffic, attended_pairs, elements, flops, traffic

# Tile (rows, columns) -> fraction of peak its inner loop reaches.
TILES: dict[tuple[int, int], float] = {
    (256, 128): 0.82,
    (128, 256): 0.82,
    (128, 128): 0.76,
    (128, 64): 0.62,
    (64, 128): 0.62,
    (64, 64): 0.48,
    (32, 32): 0.22,
    (16, 16): 0.08,
}
# Libraries for kinds with tensor memory access have tiles of many more shapes.
FINE_TILES: dict[tuple[int, int], float] = {
    **TILES,
    (320, 128): 0.82, (128, 320): 0.82, (192, 192): 0.82, (192, 128): 0.82, (128, 192): 0.82,
    (64, 256): 0.71, (256, 64): 0.71, (128, 96): 0.71, (96, 128): 0.71,
}  # fmt: skip
BEST_TILE = max(TILES.values())  # what the tiles are when nothing is known of a kind
K_STEP = 32  # k is consumed in steps; a shorter k wastes the rest
MAX_K_SPLITS = 16
WGRAD_K_SPLITS = 256  # a weight gradient contracts the batch: few tiles, long k
TILE_OVERHEAD_K = 96  # prologue and epilogue of a tile, as extra k
VECTOR_EFFICIENCY = 0.7
FUSED_SHARE = 0.55  # of the bandwidth, of kernels that a compiler writes
# Matrix units read 16 bytes at a time; rows of another length go through plain loads instead,
# which feed a unit this many FLOP/s per element that lies together.
UNALIGNED_FLOPS_PER_S = 0.73e12
HALF = frozenset({"f16", "bf16"})
UNALIGNED_GRADIENT = 1.5  # times as many in a gradient, which contracts the unaligned dim
FEW_CHANNELS_FLOPS_PER_S = 0.25e12  # the same of a convolution of images of a few colours
ATTENTION_ROWS = 128
SCANNED = 0.5  # of what fused attention reaches; assumed, nobody here has measured it
F32_PRODUCTS = 0.5  # of the peak of plain f32 arithmetic
# Reductions over rows wait for their sums: a part of the bandwidth that plain kernels reach.
ROW_EFFICIENCY = dict.fromkeys(
    ("layer_norm", "rms_norm", "group_norm", "batch_norm", "softmax", "cross_entropy"), 0.6
)
CONTRACTIONS = frozenset({"linear", "matmul", "einsum", "conv", "expert_linear", "moe_router"})
RECURRENT = frozenset({"lstm", "gru"})

Split = tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True)
class OpCost:
    """What one execution of an op (or of one device's share of it) costs, and what bounds it."""

    seconds: float
    flops: float
    traffic_bytes: float
    compute_s: float
    memory_s: float
    launch_s: float
    host_s: float = 0.0  # until the host has started it

    def scaled(self, part: float) -> "OpCost":
        """A part of the work, started by somebody else's launch."""
        seconds = (self.seconds - self.launch_s) * part
        return OpCost(
            seconds, self.flops * part, self.traffic_bytes * part, self.compute_s * part,
            self.memory_s * part, 0.0, self.host_s,
        )  # fmt: skip

    @property
    def bound(self) -> str:
        """The largest part: compute, memory or launch; `nothing` for a free op."""
        parts = {"compute": self.compute_s, "memory": self.memory_s, "launch": self.launch_s}
        largest = max(parts, key=lambda name: parts[name])
        return largest if parts[largest] > 0 else "nothing"


@dataclass(frozen=True, slots=True)
class Product:
    """`batch` matrix products of m x n x k."""

    batch: int
    m: int
    n: int
    k: int


@dataclass(frozen=True, slots=True)
class Rates:
    """The parts of its datasheet that a kind of device reaches op by op."""

    products: float = 0.82
    conv: float = 0.85  # of what a plain matrix product of the same size reaches
    attention_forward: float = 0.52  # for heads of 128; narrower ones less
    attention_backward: float = 0.42
    attention_narrow: float = 0.6  # the power of width / 128
    attention_start: float = 0.0  # a block of queries begins and ends as if it had more keys
    memory: float = 0.88
    fine_tiles: bool = False
    host: float = 1.0  # times the host that `kernels.py` was measured on
    host_compiled_s: float = 8e-6
    products_f8: float = 0.63  # of the peak of f8

    def of_products(self, dtype: str) -> float:
        """The part of a type's peak that large products reach."""
        return self.products_f8 if dtype == "f8" else self.products


@functools.cache
def rates_of(kind: str) -> Rates:
    """The rates of a kind with a parameter set of its own; else what is typical."""
    record = physics_of(kind)
    if not record.own:
        part = record.physics.products_f8 / record.physics.products
        return Rates(host=record.physics.host_s / HOST_S, products_f8=part * Rates().products)
    physics: Physics = record.physics
    return Rates(
        physics.products, physics.conv, physics.attention_forward, physics.attention_backward,
        physics.attention_narrow, physics.attention_start, physics.memory, physics.fine_tiles > 0,
        physics.host_s / HOST_S, physics.host_compiled_s, physics.products_f8,
    )  # fmt: skip


def op_cost(
    graph: Graph, op: Op, device: DeviceKind, split: Split = (), execution: str = "graph"
) -> OpCost:
    """The cost of one device's share of an op under a split (pairs of dim and factor)."""
    costs: dict[tuple[int, Split, str], OpCost] | None
    costs = graph.memo.get(("costs", op.name))
    if costs is None:
        costs = graph.memo["costs", op.name] = {}
    key = (id(device), split, execution)  # kinds are slow to hash: known by identity, kept for that
    cost = costs.get(key)
    if cost is None:
        graph.memo.setdefault(("kinds", ""), {})[id(device)] = device
        mode = GRAPH if execution == "graph" else _mode(graph, op, execution)
        tensors = (fused_elements if execution == "compiled" else elements)(graph, op)
        cost = _cost(graph.call(op), graph.dtype(op), *tensors, device, split, mode)
        costs[key] = cost
    return cost


class Mode(NamedTuple):
    """What decides the kernels of an op beside itself."""

    execution: str = "graph"
    training: bool = False
    inside: bool = False  # of a fused kernel, with nothing to write


GRAPH = Mode()


def _mode(graph: Graph, op: Op, execution: str) -> Mode:
    inside = execution == "compiled" and not starts_kernel(graph, op)
    return Mode(execution, graph.is_training, inside)


@functools.lru_cache(maxsize=262144)
def _cost(
    call: Call, dtype: str, reads: Elements, writes: Elements, device: DeviceKind, split: Split,
    mode: Mode,
) -> OpCost:  # fmt: skip
    nest = loop_nest(call)
    factors = dict(split)
    share = 1 / math.prod(factors.values())
    work = flops(call) * share
    moved = traffic(call, reads, writes, factors)
    rates = rates_of(device.name)
    started = _started(call, dtype, mode, rates)
    if product_dtype(call, dtype) != dtype and started.count:  # the casts are kernels, too
        more = 1 + 1 / started.count
        started = replace(started, count=started.count * more, host_s=started.host_s * more)
    host_s = started.host_s
    if work == 0 and moved.total == 0:
        return OpCost(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, host_s)
    aligned = mode.execution == "compiled"  # a compiler pads what is not
    compute_s = _compute_seconds(call, nest, dtype, device, factors, work, aligned=aligned)
    compute_s *= started.compute
    if started.of_peak:
        compute_s = work / (device.peak(dtype) * started.of_peak)
    if started.unfused:
        again = 1.0 if call.phase == "forward" else 0.8  # scores are not computed again
        compute_s = work * again / (device.peak("f32") * F32_PRODUCTS)
    memory_s = _memory_seconds(moved, device, rates.memory) / started.share
    more_s = started.more_bytes * share / (device.memory_bytes_per_s * rates.memory)
    more_s += started.more_s * share
    more_s += _cast_seconds(call, nest, dtype, device, factors)
    factor, launch_each_s = measured_scale(device, call)
    compute_s, memory_s, more_s = compute_s * factor, memory_s * factor, more_s * factor
    launch_s = started.count * launch_each_s
    seconds = launch_s + max(compute_s, memory_s) + more_s
    if device.measured:
        flop_s, byte_s = measured_work(device, call)
        seconds += work * flop_s + moved.total * byte_s
        compute_s, more_s = compute_s + work * flop_s, more_s + moved.total * byte_s
    return OpCost(seconds, work, moved.total, compute_s, memory_s + more_s, launch_s, host_s)


def _started(call: Call, dtype: str, mode: Mode, rates: Rates) -> Kernels:
    """The kernels of an op: one well-tuned one, those of a framework, or a part of a fused one."""
    if mode.execution == "graph":
        return Kernels(_launches(call), 0.0, ROW_EFFICIENCY.get(call.kind, 1.0))
    eager = kernels(call, dtype, mode.training)
    if mode.execution == "eager":
        return replace(eager, host_s=eager.host_s * rates.host)
    return _compiled(call, dtype, eager, rates, mode)


def _compiled(call: Call, dtype: str, eager: Kernels, rates: Rates, mode: Mode) -> Kernels:
    """A fused kernel, a part of one, or a library's kernel between them."""
    size = float(math.prod(call.inputs[0]) * dtype_bytes(dtype)) if call.inputs else 0.0
    slower = 1.0 if not mode.training else 1.6 if call.phase == "forward" else 1.4
    each = rates.host_compiled_s * slower
    if call.kind == "batch_norm" and mode.training and call.phase != "dgrad":
        # Statistics need kernels of their own, two for a long reduction.
        more = size / FUSED_SHARE if call.phase == "forward" else 0.0
        return Kernels(2.0 + (not mode.inside), (2 + (not mode.inside)) * each, FUSED_SHARE, more)
    if mode.inside or eager.count == 0:
        return Kernels(0.0, 0.0, FUSED_SHARE)
    if call.phase == "update" or call.kind in RECURRENT or call.kind.endswith("_cell"):
        return replace(eager, host_s=eager.host_s * rates.host)
    if call.kind in FUSED:
        return Kernels(1.0, each, FUSED_SHARE)
    if eager.unfused:
        return Kernels(6.0, 6 * each, more_bytes=eager.more_bytes / 3, unfused=True)
    if call.kind == "pool":
        return Kernels(1.0, each, 0.5)
    count = min(eager.count, 2.0)
    more = eager.more_bytes / 2 if call.phase == "wgrad" else 0.0  # the gradient of a bias
    if call.kind == "linear" and dtype in HALF and any(n % 8 for n in call.inputs[1]):
        padded = math.prod(call.inputs[1]) + math.prod(call.outputs[0])
        more += 2.0 * dtype_bytes(dtype) * padded
    return replace(eager, count=count, host_s=each * count, more_bytes=more)


def op_class(call: Call) -> str:
    """What a calibration tells apart: products, attention, and everything else."""
    if call.kind in CONTRACTIONS or call.kind in RECURRENT or call.kind == "grouped_mm":
        return "product"
    return "attention" if call.kind == "attention" else "elementwise"


def measured_scale(device: DeviceKind, call: Call) -> tuple[float, float]:
    """The factor on the roofline's seconds and the seconds of a launch, as far as measured."""
    if device.measured:
        name = f"{call.phase} {op_class(call)}"
        for ops, factor, launch_s in device.measured:
            if ops == name:
                return factor, launch_s
    return 1.0, device.launch_s


def measured_work(device: DeviceKind, call: Call) -> tuple[float, float]:
    """What every FLOP and byte costs besides, as far as measured."""
    name = f"{call.phase} {op_class(call)}"
    known = {ops: seconds for ops, _, seconds in device.measured}
    return known.get(f"{name} {PER_FLOP}", 0.0), known.get(f"{name} {PER_BYTE}", 0.0)


def op_by_op_s(device: DeviceKind, phase: str) -> float:
    """What an op costs besides where each is started by itself, as far as measured."""
    return _measured_s(device, f"{phase} {OP_BY_OP}")


def apart_s(device: DeviceKind) -> float:
    """What a weight gradient costs besides in a block of its own, as far as measured."""
    return _measured_s(device, TAKEN_APART)


def issue_s(device: DeviceKind, size_bytes: float = 0.0) -> float:
    """What a collective costs computing: to lay together, start, take apart, as far as measured."""
    return _measured_s(device, ISSUE) + size_bytes * _measured_s(device, f"{ISSUE} {PER_BYTE}")


def part_s(device: DeviceKind) -> float:
    """What the optimizer takes for each tensor besides, as far as measured."""
    return _measured_s(device, PART)


def _measured_s(device: DeviceKind, name: str) -> float:
    return next((seconds for ops, _, seconds in device.measured if ops == name), 0.0)


def _launches(call: Call) -> int:
    """Kernels started one after the other: a recurrent layer starts one per position."""
    return call.inputs[0][1] + 1 if call.kind in RECURRENT else 1


def _memory_seconds(moved: Traffic, device: DeviceKind, part: float) -> float:
    cache, warm = float(device.cache_bytes), moved.computed
    cached = min(warm, cache * cache / warm) if warm > 0 and cache > 0 else 0.0
    memory = (moved.total - cached) / (device.memory_bytes_per_s * part)
    if cached and device.cache_bytes_per_s > 0:
        memory += cached / device.cache_bytes_per_s
    return memory


def _compute_seconds(
    call: Call, nest: Nest, dtype: str, device: DeviceKind, factors: Factors, work: float, *,
    aligned: bool,
) -> float:  # fmt: skip
    if work == 0:
        return 0.0
    rates = rates_of(device.name)
    if call.kind in CONTRACTIONS:
        products = as_products(call, nest, factors)
        if products and min(min(p.m, p.n, p.k) for p in products) >= 4:
            splits, peak = _k_splits(call), _products_peak(call, dtype, device)
            once = sum(
                product_seconds(p, peak, device.num_units, splits, fine=rates.fine_tiles)
                for p in products
            )
            # A router computes a little more than its product.
            points = sum(float(p.batch * p.m) * p.n * p.k for p in products)
            once *= max(1.0, work / (2.0 * points))
            slow = 1 / rates.conv if call.kind == "conv" else 1.0
            halves = dtype in HALF and not (aligned and call.kind != "conv")
            floor = _unaligned_seconds(call, work, device) if halves else 0.0
            return max(once * slow, floor)
    if call.kind == "grouped_mm":
        product = _grouped_product(call)
        peak = _products_peak(call, dtype, device)
        once = product_seconds(product, peak, device.num_units, fine=rates.fine_tiles)
        return once * max(1, sum(position < 2 for position in call.wrt))
    if call.kind == "attention":
        return _attention_seconds(call, nest, dtype, device, factors, work)
    if call.kind == "state_space":
        return work / (device.peak(dtype) * scan_rate(call, rates))
    if call.kind in RECURRENT:
        return _recurrent_seconds(call, dtype, device, factors, work)
    return work / (device.peak("f32") * VECTOR_EFFICIENCY)


def _products_peak(call: Call, dtype: str, device: DeviceKind) -> float:
    """FLOP/s of an op's products, of which tiles of each shape reach a part."""
    narrow = product_dtype(call, dtype)
    return device.peak(narrow) * rates_of(device.name).of_products(narrow) / BEST_TILE


def _cast_seconds(
    call: Call, nest: Nest, dtype: str, device: DeviceKind, factors: Factors
) -> float:
    """Seconds to cast the operands of products in a narrower type: read once, written once."""
    narrow = product_dtype(call, dtype)
    if narrow == dtype:
        return 0.0
    if call.kind == "grouped_mm":
        products = (_grouped_product(call),) * max(1, sum(i < 2 for i in call.wrt))
    else:
        products = as_products(call, nest, factors)
    elements = sum(float(p.batch) * p.k * (p.m + p.n) for p in products)
    moved = elements * (dtype_bytes(dtype) + dtype_bytes(narrow))
    return moved / (device.memory_bytes_per_s * rates_of(device.name).memory)


def _grouped_product(call: Call) -> Product:
    """On average every group has as many rows as the others."""
    (rows, k), (groups, _, n) = call.inputs[:2]
    return Product(groups, -(-rows // groups), n, k)


def scan_rate(call: Call, rates: Rates) -> float:
    """The part of the peak that a scan in chunks reaches: its products are small ones."""
    forward = call.phase == "forward"
    return SCANNED * (rates.attention_forward if forward else rates.attention_backward)


def as_products(call: Call, nest: Nest, factors: Factors) -> tuple[Product, ...]:
    """The matrix products of a contraction: one forward, one per gradient of a factor.

    The gradient of one factor is the product of the result's gradient with the other factor. (A
    gradient of both reads both: which two make which output is told by what the op reads.)
    """
    if not call.wrt:
        return (_product(nest, nest.inputs[0], nest.inputs[1], nest.outputs[0], factors),)
    products = []
    for position, out in zip(call.wrt, nest.outputs, strict=True):
        if position >= ADDED_FROM.get(call.kind, len(call.inputs)):
            continue  # a bias
        codes = dict(zip(call.reads, nest.inputs, strict=True))
        others = [access for code, access in codes.items() if code not in ("g0", f"i{position}")]
        if "g0" in codes and others:
            products.append(_product(nest, codes["g0"], others[0], out, factors))
    return tuple(products)


def _product(nest: Nest, first: Access, second: Access, out: Access, factors: Factors) -> Product:
    """Which dims make m, n, k and the batch.

    A dim of the output that indexes both inputs is batch, only the first m, only the second n;
    what does not index the output is k. Kernel positions of a convolution, which index only the
    weights, count to k forward and to n in the weight gradient, as in an image-to-column product.
    """
    sizes = {"batch": 1, "m": 1, "n": 1, "k": 1}
    for dim in nest.dims:
        extent = part(dim.extent, factors.get(dim.name, 1))
        in_first = first.position(dim.name) is not None
        in_second = second.position(dim.name) is not None
        if out.position(dim.name) is None:
            role = "k"
        elif in_first:
            role = "batch" if in_second else "m"
        else:
            role = "n"
        sizes[role] *= extent
    return Product(**sizes)


def _k_splits(call: Call) -> int:
    """Over how many units a library spreads one tile's k: convolutions only in the gradient."""
    if call.phase == "wgrad":
        return WGRAD_K_SPLITS
    return 1 if call.kind == "conv" else MAX_K_SPLITS


def _unaligned_seconds(call: Call, work: float, device: DeviceKind) -> float:
    """The least time of a half-precision product whose rows do not lie on 16 bytes; else 0."""
    channel = 1 if call.kind == "conv" else -1  # images lie channels last
    rows = [shape[channel] for shape in (call.inputs[0], *call.outputs) if len(shape) > 1]
    together = min((math.gcd(size, 8) for size in rows), default=8)
    if together == 8:
        return 0.0
    rate = UNALIGNED_FLOPS_PER_S
    if call.kind == "conv" and call.inputs[0][1] < 8:
        rate = FEW_CHANNELS_FLOPS_PER_S
    if call.phase != "forward":
        rate *= UNALIGNED_GRADIENT
    return work / (rate * together * device.num_units)


@functools.lru_cache(maxsize=65536)
def product_seconds(
    product: Product, peak_flops_per_s: float, num_units: int, max_splits: int = MAX_K_SPLITS,
    *, fine: bool = False,
) -> float:  # fmt: skip
    """Compute time of a batched matrix product with the best tile shape and split of k.

    `fine`: more shapes of tiles, and k in as many splits as fill a wave.
    """
    unit_peak = peak_flops_per_s / max(1, num_units)
    best = math.inf
    for (rows, columns), efficiency in (FINE_TILES if fine else TILES).items():
        tiles = product.batch * -(-product.m // rows) * -(-product.n // columns)
        for splits in _splits(tiles, num_units, max_splits, fine=fine):
            k = -(-product.k // splits)
            steps = -(-k // K_STEP) * K_STEP + TILE_OVERHEAD_K * (1 + splits // 4)
            waves = -(-tiles * splits // max(1, num_units))
            best = min(best, waves * 2.0 * rows * columns * steps / (unit_peak * efficiency))
    return best


def _splits(tiles: int, num_units: int, max_splits: int, *, fine: bool) -> list[int]:
    """In how many parts k may be cut: powers of two until there are two waves."""
    splits = [1]
    while tiles * splits[-1] < 2 * num_units and splits[-1] * 2 <= max_splits:
        splits.append(splits[-1] * 2)
    if fine:
        filling = (waves * num_units // tiles for waves in (1, 2))
        splits += [count for count in filling if 1 < count <= max_splits]
    return splits


def _attention_seconds(
    call: Call, nest: Nest, dtype: str, device: DeviceKind, factors: Factors, work: float
) -> float:
    """Fused attention: one tile is a block of queries of one head."""
    extents = {d.name: part(d.extent, factors.get(d.name, 1)) for d in nest.dims}
    heads = math.prod(extents.get(name, 1) for name in ("b", "h", "g"))
    blocks = heads * -(-extents.get("s", 1) // ATTENTION_ROWS)
    waves = -(-blocks // max(1, device.num_units))
    full = waves * device.num_units / blocks if blocks < 4 * device.num_units else 1.0
    rates = rates_of(device.name)
    forward = call.phase == "forward"
    efficiency = rates.attention_forward if forward else rates.attention_backward
    narrow = rates.attention_narrow
    if rates.attention_start:
        start, narrow = rates.attention_start, narrow if forward else narrow / 2
        full *= _attention_blocks(call, start if forward else 2.5 * start)
    efficiency *= min(1.0, math.pow(extents.get("d", 1) / 128, narrow))
    return work * full / (device.peak(dtype) * efficiency)


def _attention_blocks(call: Call, start: float) -> float:
    """How much longer attention takes for being computed in blocks of queries and keys."""
    queries, keys = call.inputs[0][-2], call.inputs[1][-2]
    rows = -(-queries // ATTENTION_ROWS) * ATTENTION_ROWS / queries
    causal = call.flag("causal")
    window, chunk = call.whole("window", 0), call.whole("chunk", 0)
    pairs = attended_pairs(queries, keys, causal, window, chunk)
    seen = pairs / queries
    whole = seen + ATTENTION_ROWS / 2 if causal else -(-keys // ATTENTION_ROWS) * ATTENTION_ROWS
    return rows * (whole + start) / seen


def _recurrent_seconds(
    call: Call, dtype: str, device: DeviceKind, factors: Factors, work: float
) -> float:
    """One product per position for the state, one large product for all inputs."""
    x, _, w_rec = call.inputs[:3]
    batch = part(x[0], factors.get("b", 1))
    rows = part(w_rec[0], factors.get("h", 1) * factors.get("z", 1))
    peak = device.peak(dtype) * rates_of(device.name).products / BEST_TILE
    step = Product(1, batch, rows, w_rec[1])
    inputs = Product(1, batch * x[1], rows, part(x[2], factors.get("i", 1)))
    if call.phase == "wgrad":  # all positions at once
        sizes = {(rows, x[2]), (rows, w_rec[1])}
        products = [Product(1, m, n, batch * x[1]) for m, n in sizes]
        seconds = sum(product_seconds(p, peak, device.num_units, WGRAD_K_SPLITS) for p in products)
        return seconds * 2 / len(sizes)
    once = x[1] * product_seconds(step, peak, device.num_units)
    once += product_seconds(inputs, peak, device.num_units)
    return max(once, work / device.peak(dtype)) + x[1] * batch * gates(call.kind) * w_rec[
        1
    ] * 8.0 / (device.peak("f32") * VECTOR_EFFICIENCY)


def work_bound_s(graph: Graph, cluster: Cluster, execution: str = "graph") -> float:
    """No plan of this graph on this cluster takes less.

    Kernels that a compiler fuses do not move what they make inside: where not every op is a kernel
    of its own, only parameters, states and inputs count as moved.
    """
    fused = execution != "graph"
    counts: dict[str, int] = {}
    for device in cluster.devices:
        counts[device.kind] = counts.get(device.kind, 0) + 1
    kinds = [kind for kind in cluster.kinds if kind.name in counts]
    known: dict[object, list[float]] = {}
    rows: list[list[float]] = []
    for op in graph.ops:
        key = (graph.call(op), graph.dtype(op), *elements(graph, op))
        if key not in known:
            known[key] = [op_lower_bound_s(graph, op, kind, fused=fused) for kind in kinds]
        rows.append(known[key])
    totals = [math.fsum(column) or 1e-30 for column in zip(*rows, strict=True)]
    # The speed of all devices of a kind: with these weights, equal work in proportion to speed.
    speed = [counts[kind.name] / total for kind, total in zip(kinds, totals, strict=True)]
    share = [own / sum(speed) for own in speed]
    return math.fsum(
        min(y * w / counts[kind.name] for y, w, kind in zip(share, row, kinds, strict=True))
        for row in rows
    )


def op_lower_bound_s(graph: Graph, op: Op, kind: DeviceKind, *, fused: bool = False) -> float:
    """Device seconds that an op takes at the very least on devices of a kind."""
    call = graph.call(op)
    compute = _compute(call, graph.dtype(op), kind)
    moved = traffic(call, *elements(graph, op), {})
    bandwidth = kind.memory_bytes_per_s * rates_of(kind.name).memory
    memory = moved.given / bandwidth
    if fused:
        pass
    elif kind.cache_bytes == 0:
        memory += moved.computed / bandwidth
    elif kind.cache_bytes_per_s > 0:
        fastest = max(kind.cache_bytes_per_s, bandwidth)
        memory += moved.computed / fastest
    return max(compute, memory) * measured_scale(kind, call)[0]


def _compute(call: Call, dtype: str, kind: DeviceKind) -> float:
    work = flops(call)
    if not work:
        return 0.0
    rates = rates_of(kind.name)
    if call.kind in CONTRACTIONS:
        products = as_products(call, loop_nest(call), {})
        if products and min(min(p.m, p.n, p.k) for p in products) >= 4:
            multiplied = product_dtype(call, dtype)
            longer = min((p.k + TILE_OVERHEAD_K) / p.k for p in products)
            slow = 1 / rates.conv if call.kind == "conv" else 1.0
            return min(
                work * longer * slow / (kind.peak(multiplied) * rates.of_products(multiplied)),
                work / (kind.peak("f32") * VECTOR_EFFICIENCY),  # shares too small for a product
            )
    if call.kind == "attention":
        nest = loop_nest(call)
        width = next((dim.extent for dim in nest.dims if dim.name == "d"), 128)
        forward = call.phase == "forward"
        best = rates.attention_forward if forward else rates.attention_backward
        narrow = rates.attention_narrow
        if rates.attention_start and not forward:
            narrow /= 2
        best *= min(1.0, math.pow(width / 128, narrow))
        return work / (kind.peak(dtype) * best)
    if call.kind == "state_space":
        return work / (kind.peak(dtype) * scan_rate(call, rates))
    fastest = max(kind.peak(dtype), kind.peak("f32") * VECTOR_EFFICIENCY)
    return (
        work / fastest
        if call.kind in ("lstm", "gru")
        else work / (kind.peak("f32") * VECTOR_EFFICIENCY)
    )
