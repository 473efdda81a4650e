"""Paleo's times of layers, as Exprimo uses them: a network and a device graph -> a problem.

    ms = FLOPs / (peak * 0.9) + sum over tensors of bytes / 2^30 / (GB/s * 0.9),  each >= one clock

Convolution: 2 kh kw Cin Hout Wout Cout N FLOPs; its padded input, filters and output move. Its data
gradient is a convolution at the input's full size (zeros put between the rows of a strided one's
gradient are not left out, and putting its elements apart costs 2 FLOPs each); of a layer that
reads the data it is not needed. Dense layer 2 N in out; pooling 2 kh kw C Hout Wout N; dropout one
FLOP per element; everything else is free. The gradient of weights and the update are not counted.
A transfer takes bytes / 2^30 / (Gbit/s / 8 * 0.25). Source: Qi, Sparks, Talwalkar (ICLR 2017); the
numbers agree with problem files exported from Exprimo.
"""

import math
from collections.abc import Sequence

from partita.capture.exprimo_devices import GB, DeviceGraph, ExprimoDevice
from partita.capture.exprimo_net import ExprimoNetwork, NetLayer
from partita.problems.placement import (
    Channel,
    PlacementDevice,
    PlacementLayer,
    PlacementProblem,
    RecordConstraints,
)

OF_PEAK = 0.9
OF_BANDWIDTH = 0.25
FLOAT_BYTES = 4
GIB = 2**30

Work = tuple[float, tuple[float, ...]]  # FLOPs, bytes of each tensor that moves
NOTHING: Work = (0.0, ())


def exprimo_problem(
    network: ExprimoNetwork,
    machine: DeviceGraph,
    batches: int = 1,
    in_flight: int = 1,
    constraints: RecordConstraints = RecordConstraints(),  # noqa: B008 - frozen
) -> PlacementProblem:
    """The problem that Exprimo solves for these two files."""
    number = {layer.name: index for index, layer in enumerate(network.layers)}
    return PlacementProblem(
        name=f"{network.name} on {machine.name}",
        devices=tuple(
            PlacementDevice(device.memory_gb * GB, device.model, device.type)
            for device in machine.devices
        ),
        channels=tuple(Channel(gbps, kind) for kind, gbps in machine.channels),
        route=machine.route,
        layers=tuple(
            _layer(layer, machine, number, network.children.get(layer.name, ()))
            for layer in network.layers
        ),
        batches=batches,
        pipeline_batches=in_flight,
        constraints=constraints,
    )


def _layer(
    layer: NetLayer, machine: DeviceGraph, number: dict[str, int], children: Sequence[str]
) -> PlacementLayer:
    size = FLOAT_BYTES * math.prod(layer.shape)
    forward, backward = work(layer)
    return PlacementLayer(
        name=layer.name,
        parents=tuple(number[name] for name in layer.parents),
        children=tuple(number[name] for name in children),
        output_bytes=float(size),
        weight_bytes=float(FLOAT_BYTES * layer.num_weights),
        fwd_ms=tuple(_ms(forward, device) for device in machine.devices),
        bwd_ms=tuple(_ms(backward, device) for device in machine.devices),
        transfer_ms=tuple(
            size / GIB / (gbps / 8) * 1e3 / OF_BANDWIDTH for _, gbps in machine.channels
        ),
        type=layer.type,
    )


def work(layer: NetLayer) -> tuple[Work, Work]:
    """What the forward and the data gradient of a layer compute and move."""
    size = FLOAT_BYTES * math.prod(layer.shape)
    if layer.type in ("Convolution", "Deconvolution"):
        transposed = layer.type == "Deconvolution"
        source, target = layer.inputs[0], layer.shape
        small, large = (source, target) if transposed else (target, source)
        plain = _conv(layer, large, small)
        gradient = _data_gradient(layer, large, small)
        first = "data" in layer.parents
        if transposed:
            return gradient, NOTHING if first else plain
        return plain, NOTHING if first else gradient
    given = FLOAT_BYTES * math.prod(layer.inputs[0]) if layer.inputs else 0
    if layer.type == "InnerProduct":
        inside = math.prod(layer.inputs[0][1:])
        flops = 2.0 * math.prod(layer.shape) * inside
        weights = FLOAT_BYTES * inside * layer.shape[1]
        both: Work = (flops, (given, weights, size))
        return both, both
    if layer.type in ("Pooling", "AvgPool"):
        both = (2.0 * math.prod(layer.kernel) * math.prod(layer.shape), (given, size))
        return both, both
    if layer.type == "Dropout":
        both = (float(math.prod(layer.shape)), (size, size))
        return both, both
    return NOTHING, NOTHING


def _filter_bytes(layer: NetLayer) -> float:
    channels = layer.inputs[0][3] * layer.shape[3]
    return float(FLOAT_BYTES * math.prod(layer.kernel) * channels)


def _conv(layer: NetLayer, source: Sequence[int], target: Sequence[int]) -> Work:
    flops = 2.0 * math.prod(layer.kernel) * source[3] * math.prod(target)
    rows, columns = (source[1 + i] + 2 * layer.padding[i][0] for i in range(2))
    padded = source[0] * rows * columns * source[3]
    return flops, (FLOAT_BYTES * padded, _filter_bytes(layer), FLOAT_BYTES * math.prod(target))


def _data_gradient(layer: NetLayer, source: Sequence[int], target: Sequence[int]) -> Work:
    """Of a convolution from source to target: the gradient of the source."""
    flops = 2.0 * math.prod(layer.kernel) * target[3] * math.prod(source)
    spread = [_spread(layer, source, target, i) for i in range(2)]
    if math.prod(spread) > target[1] * target[2]:
        flops += 2.0 * math.prod(target)
    rows, columns = (source[1 + i] + layer.kernel[i] - 1 for i in range(2))
    padded = target[0] * rows * columns * target[3]
    return flops, (FLOAT_BYTES * padded, _filter_bytes(layer), FLOAT_BYTES * math.prod(source))


def _spread(layer: NetLayer, source: Sequence[int], target: Sequence[int], i: int) -> int:
    """Rows (or columns) of the gradient with zeros between; one more where padding is odd."""
    rows = (target[1 + i] - 1) * layer.stride[i] + 1
    before = layer.kernel[i] - 1 - layer.padding[i][0]
    after = source[1 + i] + layer.kernel[i] - 1 - rows - before
    return rows + (abs(before - after) == 1)


def _ms(done: Work, device: ExprimoDevice) -> float:
    flops, moved = done
    clock_ms = 1 / device.clock_mhz / 1e3
    total = 0.0
    for size in moved:
        total += max(clock_ms, size / GIB / device.mem_bandwidth_gb_per_s * 1e3 / OF_PEAK)
    if flops:
        total += max(clock_ms, flops / 1e9 / device.peak_gflops * 1e3 / OF_PEAK)
    return total
