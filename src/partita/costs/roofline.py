"""Seconds of an op on a device kind: the roofline with launch, cache and tile effects.

    time = launches * launch_s + max(compute, memory)

Compute. A contraction is seen as `batch` matrix products of m x n x k (read off its loop nest). It
is cut into tiles; a device of U units runs them in ceil(tiles / U) waves, so a last wave that is
nearly empty costs as much as a full one (tile and wave quantisation). Large tiles reach a larger
part of the peak; the best tile shape is taken, splitting k over units where tiles are few.
Everything else computes at the f32 rate of the plain arithmetic units.

Memory. Weights and states come from device memory. Of the activations, what fits the cache is
taken to be there: with working set s and cache c, min(s, c * c / s) bytes move at cache speed.

The constants below are fractions of the vendor's peak that well-tuned libraries reach; they hold
for all devices and models alike. Measured profiles replace all of this where they exist.
"""

import functools
import math
from dataclasses import dataclass

from partita.cluster import DeviceKind
from partita.graph.flops import flops
from partita.graph.loops import Nest, loop_nest
from partita.graph.record import Call, Graph, Op
from partita.graph.shapes import gates
from partita.graph.splits import Factors, part
from partita.graph.traffic import Elements, Traffic, elements, traffic

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
K_STEP = 32  # k is consumed in steps; a shorter k wastes the rest
MAX_K_SPLITS = 16
WGRAD_K_SPLITS = 256  # a weight gradient contracts the batch: few tiles, long k
TILE_OVERHEAD_K = 96  # prologue and epilogue of a tile, as extra k
VECTOR_EFFICIENCY = 0.7
CONV_EFFICIENCY = 0.85  # of what a plain matrix product of the same size reaches
# Matrix units read 16 bytes at a time; rows of another length go through plain loads instead,
# which feed a unit this many FLOP/s per element that lies together.
UNALIGNED_FLOPS_PER_S = 0.73e12
HALF = frozenset({"f16", "bf16"})
ATTENTION_EFFICIENCY = {"forward": 0.52, "dgrad": 0.42}  # for heads of 128; narrower ones less
ATTENTION_ROWS = 128
MEMORY_EFFICIENCY = 0.88
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

    def scaled(self, part: float) -> "OpCost":
        """A part of the work, started by somebody else's launch."""
        seconds = (self.seconds - self.launch_s) * part
        return OpCost(
            seconds, self.flops * part, self.traffic_bytes * part, self.compute_s * part,
            self.memory_s * part, 0.0,
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


def op_cost(graph: Graph, op: Op, device: DeviceKind, split: Split = ()) -> OpCost:
    """The cost of one device's share of an op under a split (pairs of dim and factor)."""
    costs: dict[tuple[DeviceKind, Split], OpCost] = graph.memo.setdefault(("costs", op.name), {})
    key = (device, split)
    if key not in costs:
        costs[key] = _cost(graph.call(op), graph.dtype(op), *elements(graph, op), device, split)
    return costs[key]


@functools.lru_cache(maxsize=262144)
def _cost(
    call: Call, dtype: str, reads: Elements, writes: Elements, device: DeviceKind, split: Split
) -> OpCost:
    nest = loop_nest(call)
    factors = dict(split)
    work = flops(call) / math.prod(factors.values())
    moved = traffic(call, reads, writes, factors)
    if work == 0 and moved.total == 0:
        return OpCost(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    compute_s = _compute_seconds(call, nest, dtype, device, factors, work)
    memory_s = _memory_seconds(moved, device) / ROW_EFFICIENCY.get(call.kind, 1.0)
    factor, launch_each_s = measured_scale(device, call)
    compute_s, memory_s = compute_s * factor, memory_s * factor
    launch_s = _launches(call) * launch_each_s
    seconds = launch_s + max(compute_s, memory_s)
    return OpCost(seconds, work, moved.total, compute_s, memory_s, launch_s)


def op_class(call: Call) -> str:
    """What a calibration tells apart: products, attention, and everything else."""
    if call.kind in CONTRACTIONS or call.kind in RECURRENT:
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


def _launches(call: Call) -> int:
    """Kernels started one after the other: a recurrent layer starts one per position."""
    return call.inputs[0][1] + 1 if call.kind in RECURRENT else 1


def _memory_seconds(moved: Traffic, device: DeviceKind) -> float:
    cache, warm = float(device.cache_bytes), moved.computed
    cached = min(warm, cache * cache / warm) if warm > 0 and cache > 0 else 0.0
    memory = (moved.total - cached) / (device.memory_bytes_per_s * MEMORY_EFFICIENCY)
    if cached and device.cache_bytes_per_s > 0:
        memory += cached / device.cache_bytes_per_s
    return memory


def _compute_seconds(
    call: Call, nest: Nest, dtype: str, device: DeviceKind, factors: Factors, work: float
) -> float:
    if work == 0:
        return 0.0
    if call.kind in CONTRACTIONS:
        product = as_product(nest, factors)
        if min(product.m, product.n, product.k) >= 4:
            splits = _k_splits(call)
            one = product_seconds(product, device.peak(dtype), device.num_units, splits)
            # Several gradients are several products of the same size.
            times = max(1.0, work / (2.0 * product.batch * product.m * product.n * product.k))
            slow = 1 / CONV_EFFICIENCY if call.kind == "conv" else 1.0
            floor = _unaligned_seconds(call, work, device) if dtype in HALF else 0.0
            return max(one * times * slow, floor)
    if call.kind == "attention":
        return _attention_seconds(call, nest, dtype, device, factors, work)
    if call.kind in RECURRENT:
        return _recurrent_seconds(call, dtype, device, factors, work)
    return work / (device.peak("f32") * VECTOR_EFFICIENCY)


def as_product(nest: Nest, factors: Factors) -> Product:
    """The matrix product that a contraction is: which dims make m, n, k and the batch.

    A dim of the output that indexes both inputs is batch, only the first m, only the second n;
    what does not index the output is k. Kernel positions of a convolution, which index only the
    weights, count to k forward and to n in the weight gradient, as in an image-to-column product.
    """
    first, second, out = nest.inputs[0], nest.inputs[1], nest.outputs[0]
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
    return work / (UNALIGNED_FLOPS_PER_S * together * device.num_units)


@functools.lru_cache(maxsize=65536)
def product_seconds(
    product: Product, peak_flops_per_s: float, num_units: int, max_splits: int = MAX_K_SPLITS
) -> float:
    """Compute time of a batched matrix product with the best tile shape and split of k."""
    unit_peak = peak_flops_per_s / max(1, num_units)
    best = math.inf
    for (rows, columns), efficiency in TILES.items():
        tiles = product.batch * -(-product.m // rows) * -(-product.n // columns)
        splits = 1
        while splits <= max_splits:
            k = -(-product.k // splits)
            steps = -(-k // K_STEP) * K_STEP + TILE_OVERHEAD_K * (1 + splits // 4)
            waves = -(-tiles * splits // max(1, num_units))
            best = min(best, waves * 2.0 * rows * columns * steps / (unit_peak * efficiency))
            if tiles * splits >= 2 * num_units:
                break
            splits *= 2
    return best


def _attention_seconds(
    call: Call, nest: Nest, dtype: str, device: DeviceKind, factors: Factors, work: float
) -> float:
    """Fused attention: one tile is a block of queries of one head."""
    extents = {d.name: part(d.extent, factors.get(d.name, 1)) for d in nest.dims}
    heads = math.prod(extents.get(name, 1) for name in ("b", "h", "g"))
    blocks = heads * -(-extents.get("s", 1) // ATTENTION_ROWS)
    waves = -(-blocks // max(1, device.num_units))
    full = waves * device.num_units / blocks if blocks < 4 * device.num_units else 1.0
    efficiency = ATTENTION_EFFICIENCY["forward" if call.phase == "forward" else "dgrad"]
    efficiency *= min(1.0, math.pow(extents.get("d", 1) / 128, 0.6))
    return work * full / (device.peak(dtype) * efficiency)


def _recurrent_seconds(
    call: Call, dtype: str, device: DeviceKind, factors: Factors, work: float
) -> float:
    """One product per position for the state, one large product for all inputs."""
    x, _, w_rec = call.inputs[:3]
    batch = part(x[0], factors.get("b", 1))
    rows = part(w_rec[0], factors.get("h", 1) * factors.get("z", 1))
    peak = device.peak(dtype)
    step = Product(1, batch, rows, w_rec[1])
    inputs = Product(1, batch * x[1], rows, part(x[2], factors.get("i", 1)))
    once = x[1] * product_seconds(step, peak, device.num_units)
    once += product_seconds(inputs, peak, device.num_units)
    return max(once, work / peak) + x[1] * batch * gates(call.kind) * w_rec[1] * 8.0 / (
        device.peak("f32") * VECTOR_EFFICIENCY
    )
