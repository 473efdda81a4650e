"""Placement: a device for every layer of a network on a machine of heterogeneous devices.

The record holds what the simulation needs and nothing else: milliseconds of every layer on every
device, of every tensor on every channel, bytes, and which channel joins which devices. The
objective is `score_ms`: the simulated makespan plus a penalty for memory over a device's limit.

The simulation follows Exprimo (Eivind Lie Andreassen, 2020). Every device and every channel is a
*slot* that does one thing at a time, first come first served; events are handled in the order of
their end times, ties in the order in which CPython's `heapq` gives them out. `simulate_exprimo` is
the plain reference: one event costs O(log slots) and O(neighbours of the layer).
"""

import heapq
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from partita import files
from partita.errors import FileError, InputError, ProblemError

KIND = "placement-problem"
MAX_BATCHES = 1_000_000
_LARGEST = 1e30  # more milliseconds or bytes than this is a mistake, and sums of them overflow
_NO_CHANNEL = -1


@dataclass(frozen=True, slots=True)
class PlacementDevice:
    """A device that runs one layer at a time; memory over the limit is penalised."""

    memory_limit_bytes: float
    model: str = ""
    type: str = ""


@dataclass(frozen=True, slots=True)
class Channel:
    """A link that carries one transfer at a time; one or more routes use it."""

    bandwidth_gbps: float
    type: str = ""


@dataclass(frozen=True, slots=True)
class PlacementLayer:
    """One layer: neighbours in the order in which they are served, sizes, times per slot."""

    name: str
    parents: tuple[int, ...]
    children: tuple[int, ...]
    output_bytes: float
    weight_bytes: float
    fwd_ms: tuple[float, ...]  # one per device
    bwd_ms: tuple[float, ...]  # one per device
    transfer_ms: tuple[float, ...]  # of its output, one per channel
    type: str = ""


@dataclass(frozen=True, slots=True)
class RecordConstraints:
    """What a placement must keep to, besides using routes that exist."""

    colocated: tuple[tuple[int, ...], ...] = ()  # the layers of a group share a device
    pinned: tuple[tuple[int, int], ...] = ()  # (layer, device): on this device
    forbidden: tuple[tuple[int, int], ...] = ()  # (layer, device): on any but this device
    max_devices: int | None = None  # how many may be used


@dataclass(frozen=True, slots=True)
class PlacementProblem:
    """Layers in topological order, devices, channels, and `route[source][target]` between them."""

    name: str
    devices: tuple[PlacementDevice, ...]
    channels: tuple[Channel, ...]
    route: tuple[tuple[int, ...], ...]  # channel index, -1 where there is none
    layers: tuple[PlacementLayer, ...]
    batches: int = 1
    pipeline_batches: int = 1  # how many may be in flight at once
    memory_penalization_ms_per_byte: float = 1.0
    constraints: RecordConstraints = RecordConstraints()

    def __post_init__(self) -> None:
        _check_settings(self)
        _check_machine(self)
        for index, layer in enumerate(self.layers):
            _check_layer(self, index, layer)
        _check_children(self)
        _check_constraints(self)

    def to_json(self) -> dict[str, Any]:
        """The problem as the JSON object that `from_json` reads."""
        constraints = msgspec.to_builtins(self.constraints)
        return {
            "format": f"partita/{KIND}@1",
            "name": self.name,
            "settings": {
                "batches": self.batches,
                "pipeline_batches": self.pipeline_batches,
                "include_backward": True,
                "memory_penalization_ms_per_byte": self.memory_penalization_ms_per_byte,
                "device_memory_utilization": 1.0,
            },
            "devices": [
                {"id": index, **msgspec.to_builtins(device)}
                for index, device in enumerate(self.devices)
            ],
            "channels": [
                {"id": index, "type": channel.type, "bandwidth_Gbps": channel.bandwidth_gbps}
                for index, channel in enumerate(self.channels)
            ],
            "route": [list(row) for row in self.route],
            "layers": [
                {"id": index, **msgspec.to_builtins(layer)}
                for index, layer in enumerate(self.layers)
            ],
        } | ({"constraints": constraints} if self.constraints != RecordConstraints() else {})


@dataclass(frozen=True, slots=True)
class PlacementSolution:
    """A device for every layer."""

    placement: tuple[int, ...]

    @classmethod
    def from_json(cls, value: object, file: str = "") -> "PlacementSolution":
        """The solution in the `solution` object of a result."""
        try:
            return files.convert(value, cls, file)
        except FileError as error:
            raise ProblemError(error.found, fix=error.fix, field=error.field, file=file) from None

    def to_json(self) -> dict[str, Any]:
        """The `solution` object of a result."""
        return {"placement": list(self.placement)}


class PlacementEvaluation(NamedTuple):
    """What the simulation of one placement found."""

    makespan_ms: float
    peak_memory_bytes: tuple[float, ...]  # per device
    score_ms: float
    events: int


def read(path: str | Path) -> PlacementProblem:
    """Read a problem file."""
    return from_json(files.decode_json(files.read_bytes(path), str(path)), str(path))


def from_json(value: dict[str, Any], file: str = "") -> PlacementProblem:
    """The problem in a decoded `partita/placement-problem@1` file."""
    files.check_format(value, KIND, file=file)
    try:
        return _from_raw(files.convert(value, _PlacementProblemFile, file))
    except InputError as error:
        raise ProblemError(error.found, fix=error.fix, field=error.field, file=file) from None


def check(problem: PlacementProblem, solution: PlacementSolution) -> tuple[str, ...]:
    """Why this is not a placement of this problem, in words; empty if it is one."""
    placement, num_layers = solution.placement, len(problem.layers)
    if len(placement) != num_layers:
        return (f"the placement has {len(placement)} devices for {num_layers} layers",)
    last = len(problem.devices) - 1
    unknown = tuple(
        f"layer {index} ({layer.name}) is on device {device}, and devices are 0 to {last}"
        for index, (layer, device) in enumerate(zip(problem.layers, placement, strict=True))
        if not 0 <= device <= last
    )
    return unknown or (*_missing_routes(problem, placement), *_violated(problem, placement))


def evaluate(problem: PlacementProblem, solution: PlacementSolution) -> float:
    """The objective, in milliseconds: makespan plus memory penalty."""
    return simulate_exprimo(problem, solution.placement).score_ms


def lower_bound(problem: PlacementProblem) -> float:
    """No placement scores less than this; in milliseconds.

    One batch takes at least a longest path there and back, each layer on the device where it is
    fastest; with k batches in flight at most, ceil(batches / k) of them follow one another. All
    work at its fastest, shared evenly by all devices, takes that long too. On top comes the
    penalty for weights that no distribution over the devices can hold.
    """
    layers = problem.layers
    both = [min(map(sum, zip(layer.fwd_ms, layer.bwd_ms, strict=True))) for layer in layers]
    forward = _longest_paths(problem, [min(layer.fwd_ms) for layer in layers])
    backward = _longest_paths(problem, [min(layer.bwd_ms) for layer in layers])
    there_and_back = (
        there + back
        for layer, there, back in zip(layers, forward, backward, strict=True)
        if not layer.children
    )
    one_batch = max(*_longest_paths(problem, both), *there_and_back)
    in_a_row = math.ceil(problem.batches / problem.pipeline_batches)
    work = problem.batches * sum(both) / len(problem.devices)
    weights = sum(layer.weight_bytes for layer in layers)
    over = weights - sum(device.memory_limit_bytes for device in problem.devices)
    penalty = problem.memory_penalization_ms_per_byte * max(0.0, over)
    # The simulation adds the same numbers in another order: leave room for its rounding.
    return (max(in_a_row * one_batch, work) + penalty) * (1 - 1e-10)


def simulate_exprimo(problem: PlacementProblem, placement: Sequence[int]) -> PlacementEvaluation:
    """Time and memory of one placement, event by event."""
    violations = check(problem, PlacementSolution(tuple(placement)))
    if violations:
        raise ProblemError(violations[0], fix="give a valid placement", field="placement")
    return _Simulation(problem, placement).run()


class _LayerRun(NamedTuple):
    """A layer's forward or backward of one batch, to run on the layer's device."""

    batch: int
    layer: int
    backward: bool


class _Transfer(NamedTuple):
    """What one finished job sends to one other device: its output, or a gradient per target."""

    batch: int
    layer: int
    backward: bool
    source: int  # device
    target: int  # device
    layers: tuple[int, ...]  # the layers on the target device that wait for it


class _Slot:
    """A device or a channel: serves its queue in order, one item at a time."""

    def __init__(self) -> None:
        self.queue: deque[Any] = deque()
        self.current: Any = None
        self.idle = True  # nothing running and no wakeup on its way


class _Event:
    """The end of what a slot does, or its wakeup. Ordered by time alone: `heapq` breaks ties."""

    __slots__ = ("end_ms", "kind", "slot")

    def __init__(self, end_ms: float, kind: str, slot: _Slot) -> None:
        self.end_ms = end_ms
        self.kind = kind  # "wakeup", "op_done" or "transfer_done"
        self.slot = slot

    def __lt__(self, other: "_Event") -> bool:
        return self.end_ms < other.end_ms


class _Memory:
    """Bytes in use and their peak, per device; forward tensors with counted references."""

    def __init__(self, problem: PlacementProblem, placement: Sequence[int]) -> None:
        self.used = [0.0] * len(problem.devices)
        for layer, device in zip(problem.layers, placement, strict=True):
            self.used[device] += layer.weight_bytes
        self.peak = list(self.used)
        self.references: dict[tuple[int, int, int], int] = {}  # (batch, layer, device)
        self.layers = problem.layers

    def hold(self, batch: int, layer: int, device: int, references: int) -> None:
        """A forward tensor appears on a device."""
        if references:
            self.references[batch, layer, device] = references
            self.used[device] += self.layers[layer].output_bytes

    def drop(self, batch: int, layer: int, device: int) -> None:
        """One reference to a forward tensor is gone; the last one frees it."""
        key = (batch, layer, device)
        self.references[key] -= 1
        if self.references[key] == 0:
            del self.references[key]
            self.used[device] -= self.layers[layer].output_bytes

    def gradients(self, layer: int, device: int, count: int) -> None:
        """`count` gradients of the layer's output appear on a device, or go if negative."""
        self.used[device] += count * self.layers[layer].output_bytes

    def note_peak(self) -> None:
        """Called after each event."""
        for device, used in enumerate(self.used):
            self.peak[device] = max(self.peak[device], used)


class _Simulation:
    """One placement being simulated."""

    def __init__(self, problem: PlacementProblem, placement: Sequence[int]) -> None:
        self.problem = problem
        self.layers = problem.layers
        self.placement = placement
        self.devices = [_Slot() for _ in problem.devices]
        self.channels = [_Slot() for _ in problem.channels]
        self.memory = _Memory(problem, placement)
        self.events: list[_Event] = []
        self.now_ms = 0.0
        self.admitted = 0
        self.outstanding: dict[int, int] = {}  # batch -> things queued or running
        self.present: dict[_LayerRun, int] = {}  # inputs that a waiting job has
        self.inputs = [index for index, layer in enumerate(self.layers) if not layer.parents]

    def run(self) -> PlacementEvaluation:
        """Handle events until there are none."""
        handlers = {
            "wakeup": self.start_next,
            "op_done": self.finish_job,
            "transfer_done": self.finish_transfer,
        }
        handled = 0
        self.admit_batch()
        while self.events:
            event = heapq.heappop(self.events)
            self.now_ms = event.end_ms
            handlers[event.kind](event.slot)
            self.memory.note_peak()
            handled += 1
            self.admit_batch()
        over = sum(
            max(0.0, peak - device.memory_limit_bytes)
            for peak, device in zip(self.memory.peak, self.problem.devices, strict=True)
        )
        score = self.now_ms + self.problem.memory_penalization_ms_per_byte * over
        return PlacementEvaluation(self.now_ms, tuple(self.memory.peak), score, handled)

    def admit_batch(self) -> None:
        """Queue the input layers of the next batch, if there is room and their devices wait."""
        if self.admitted == self.problem.batches:
            return
        if len(self.outstanding) >= self.problem.pipeline_batches:
            return
        if not all(self.devices[self.placement[layer]].idle for layer in self.inputs):
            return
        batch, self.admitted = self.admitted, self.admitted + 1
        for layer in sorted(self.inputs, key=lambda index: (self.placement[index], index)):
            job = _LayerRun(batch, layer, backward=False)
            self.enqueue(self.devices[self.placement[layer]], job)

    def enqueue(self, slot: _Slot, item: _LayerRun | _Transfer) -> None:
        """Append to a slot's queue; wake it if it is idle."""
        self.outstanding[item.batch] = self.outstanding.get(item.batch, 0) + 1
        slot.queue.append(item)
        if slot.idle:
            slot.idle = False
            heapq.heappush(self.events, _Event(self.now_ms, "wakeup", slot))

    def start_next(self, slot: _Slot) -> None:
        """Start what heads the queue; without one the slot becomes idle."""
        if not slot.queue:
            slot.idle, slot.current = True, None
            return
        slot.current = slot.queue.popleft()
        if isinstance(slot.current, _LayerRun):
            end = self.now_ms + self.job_ms(slot.current)
            heapq.heappush(self.events, _Event(end, "op_done", slot))
        else:
            end = self.now_ms + self.transfer_ms(slot.current)
            heapq.heappush(self.events, _Event(end, "transfer_done", slot))

    def job_ms(self, job: _LayerRun) -> float:
        layer, device = self.layers[job.layer], self.placement[job.layer]
        return layer.bwd_ms[device] if job.backward else layer.fwd_ms[device]

    def transfer_ms(self, transfer: _Transfer) -> float:
        channel = self.problem.route[transfer.source][transfer.target]
        if not transfer.backward:
            return self.layers[transfer.layer].transfer_ms[channel]
        return sum(self.layers[parent].transfer_ms[channel] for parent in transfer.layers)

    def finish_job(self, slot: _Slot) -> None:
        """Serve who waits for the job here, send to who waits elsewhere, start the next."""
        job: _LayerRun = slot.current
        layer, device = self.layers[job.layer], self.placement[job.layer]
        neighbours = layer.parents if job.backward else layer.children
        here = [index for index in neighbours if self.placement[index] == device]
        elsewhere: dict[int, list[int]] = {}  # target device -> layers, in order of the first
        for index in neighbours:
            if self.placement[index] != device:
                elsewhere.setdefault(self.placement[index], []).append(index)
        if job.backward:
            self.account_backward(job, device)
        else:
            self.memory.hold(job.batch, job.layer, device, len(here) + len(elsewhere))
        for index in here:
            self.mark_present(_LayerRun(job.batch, index, job.backward))
        for target, waiting in elsewhere.items():
            channel = self.channels[self.problem.route[device][target]]
            self.enqueue(channel, _Transfer(*job, device, target, tuple(waiting)))
        if not job.backward and not layer.children:
            self.enqueue(slot, _LayerRun(job.batch, job.layer, backward=True))
        self.settle(job.batch)
        self.start_next(slot)

    def account_backward(self, job: _LayerRun, device: int) -> None:
        """What the backward needed goes, and the gradients it made appear."""
        layer = self.layers[job.layer]
        for parent in layer.parents:
            self.memory.drop(job.batch, parent, device)
            self.memory.gradients(parent, device, 1)
        self.memory.gradients(job.layer, device, -len(layer.children))

    def finish_transfer(self, slot: _Slot) -> None:
        """Move the tensors to the target, serve who waits for them, start the next."""
        transfer: _Transfer = slot.current
        if transfer.backward:
            for parent in transfer.layers:
                self.memory.gradients(parent, transfer.source, -1)
                self.memory.gradients(parent, transfer.target, 1)
        else:
            self.memory.drop(transfer.batch, transfer.layer, transfer.source)
            self.memory.hold(transfer.batch, transfer.layer, transfer.target, len(transfer.layers))
        for index in transfer.layers:
            self.mark_present(_LayerRun(transfer.batch, index, transfer.backward))
        self.settle(transfer.batch)
        self.start_next(slot)

    def mark_present(self, job: _LayerRun) -> None:
        """One more input of a job is on its device; with the last one it is queued."""
        layer = self.layers[job.layer]
        needed = len(layer.children if job.backward else layer.parents)
        present = self.present.pop(job, 0) + 1
        if present < needed:
            self.present[job] = present
        else:
            self.enqueue(self.devices[self.placement[job.layer]], job)

    def settle(self, batch: int) -> None:
        """One thing of the batch is no longer outstanding."""
        self.outstanding[batch] -= 1
        if not self.outstanding[batch]:
            del self.outstanding[batch]


def _missing_routes(problem: PlacementProblem, placement: Sequence[int]) -> list[str]:
    missing_routes = []
    for index, layer in enumerate(problem.layers):
        for child in layer.children:
            here, there = placement[index], placement[child]
            # The output goes from here to there, its gradient comes back.
            for source, target in ((here, there), (there, here)):
                if here != there and problem.route[source][target] == _NO_CHANNEL:
                    missing_routes.append(
                        f"layers {index} ({layer.name}) and {child} are on devices {here} and "
                        f"{there}, and there is no route from {source} to {target}"
                    )
    return missing_routes


def _violated(problem: PlacementProblem, placement: Sequence[int]) -> list[str]:
    """Which constraints the placement breaks, in words."""
    constraints, names = problem.constraints, [layer.name for layer in problem.layers]
    violations = [
        f"layers {group[0]} ({names[group[0]]}) and {other} ({names[other]}) are colocated, and "
        f"are on devices {placement[group[0]]} and {placement[other]}"
        for group in constraints.colocated
        for other in group[1:]
        if placement[other] != placement[group[0]]
    ]
    violations += [
        f"layer {layer} ({names[layer]}) is pinned to device {device}, and is on {placement[layer]}"
        for layer, device in constraints.pinned
        if placement[layer] != device
    ]
    violations += [
        f"layer {layer} ({names[layer]}) is on device {device}, which is forbidden for it"
        for layer, device in constraints.forbidden
        if placement[layer] == device
    ]
    used, most = len(set(placement)), constraints.max_devices
    if most is not None and used > most:
        violations.append(f"{used} devices are used, and at most {most} may be")
    return violations


def _longest_paths(problem: PlacementProblem, weights: Sequence[float]) -> list[float]:
    """For each layer the heaviest path that ends with it."""
    longest: list[float] = []
    for layer, weight in zip(problem.layers, weights, strict=True):
        longest.append(weight + max((longest[parent] for parent in layer.parents), default=0.0))
    return longest


def _check_settings(problem: PlacementProblem) -> None:
    for name, most in (("batches", MAX_BATCHES), ("pipeline_batches", MAX_BATCHES)):
        value = getattr(problem, name)
        if not 1 <= value <= most:
            raise ProblemError(
                f"found {value}",
                fix=f"give a whole number from 1 to {most:,}",
                field=f"settings.{name}",
            )
    _check_amount(
        problem.memory_penalization_ms_per_byte, "settings.memory_penalization_ms_per_byte"
    )


def _check_machine(problem: PlacementProblem) -> None:
    if not problem.devices:
        raise ProblemError("is empty", fix="give at least one device", field="devices")
    if not problem.layers:
        raise ProblemError("is empty", fix="give at least one layer", field="layers")
    for index, device in enumerate(problem.devices):
        _check_amount(device.memory_limit_bytes, f"devices[{index}].memory_limit_bytes")
    for index, channel in enumerate(problem.channels):
        field = f"channels[{index}].bandwidth_Gbps"
        _check_amount(channel.bandwidth_gbps, field)
        if channel.bandwidth_gbps == 0:
            raise ProblemError("found 0", fix="give a bandwidth above zero", field=field)
    _check_length(problem.route, len(problem.devices), "route", "row per device")
    for source, row in enumerate(problem.route):
        _check_length(row, len(problem.devices), f"route[{source}]", "channel per device")
        for target, channel_index in enumerate(row):
            if not _NO_CHANNEL <= channel_index < len(problem.channels):
                raise ProblemError(
                    f"found channel {channel_index}",
                    fix=f"channels are 0 to {len(problem.channels) - 1}, -1 for none",
                    field=f"route[{source}][{target}]",
                )


def _check_layer(problem: PlacementProblem, index: int, layer: PlacementLayer) -> None:
    where = f"layers[{index}]"
    _check_amount(layer.output_bytes, f"{where}.output_bytes")
    _check_amount(layer.weight_bytes, f"{where}.weight_bytes")
    for name, slots in (
        ("fwd_ms", problem.devices),
        ("bwd_ms", problem.devices),
        ("transfer_ms", problem.channels),
    ):
        times = getattr(layer, name)
        what = "channel" if name == "transfer_ms" else "device"
        _check_length(times, len(slots), f"{where}.{name}", f"number per {what}")
        for slot, value in enumerate(times):
            _check_amount(value, f"{where}.{name}[{slot}]")
    for name, neighbours in (("parents", layer.parents), ("children", layer.children)):
        if len(set(neighbours)) != len(neighbours):
            raise ProblemError(
                "names a layer twice", fix="name each layer once", field=f"{where}.{name}"
            )
    for position, parent in enumerate(layer.parents):
        if not 0 <= parent < index:
            raise ProblemError(
                f"found layer {parent}",
                fix=f"a parent comes before its child: 0 to {index - 1} here"
                if index
                else "the first layer has no parents",
                field=f"{where}.parents[{position}]",
            )


def _check_children(problem: PlacementProblem) -> None:
    """Parents and children both have an order that matters, so both are stored: they must agree."""
    expected: list[set[int]] = [set() for _ in problem.layers]
    for index, layer in enumerate(problem.layers):
        for parent in layer.parents:
            expected[parent].add(index)
    for index, layer in enumerate(problem.layers):
        wrong = sorted(expected[index] ^ set(layer.children))
        if wrong:
            raise ProblemError(
                f"disagrees with the parents of layer {wrong[0]}",
                fix="list exactly the layers that name this one as a parent",
                field=f"layers[{index}].children",
            )


def _check_constraints(problem: PlacementProblem) -> None:
    """Indices exist; whether the constraints can be met is for a search to say."""
    constraints = problem.constraints
    last_layer, last_device = len(problem.layers) - 1, len(problem.devices) - 1
    for number, group in enumerate(constraints.colocated):
        for position, layer in enumerate(group):
            field = f"constraints.colocated[{number}][{position}]"
            _check_index(layer, last_layer, "layers", field)
        if len(set(group)) != len(group) or len(group) < 2:
            raise ProblemError(
                f"found {list(group)}",
                fix="a group names two or more layers, each once",
                field=f"constraints.colocated[{number}]",
            )
    for name in ("pinned", "forbidden"):
        for number, (layer, device) in enumerate(getattr(constraints, name)):
            field = f"constraints.{name}[{number}]"
            _check_index(layer, last_layer, "layers", f"{field}[0]")
            _check_index(device, last_device, "devices", f"{field}[1]")
    if constraints.max_devices is not None and constraints.max_devices < 1:
        raise ProblemError(
            f"found {constraints.max_devices}",
            fix="let a placement use at least one device",
            field="constraints.max_devices",
        )


def _check_index(value: int, last: int, what: str, field: str) -> None:
    if not 0 <= value <= last:
        raise ProblemError(f"found {value}", fix=f"{what} are 0 to {last}", field=field)


def _check_amount(value: float, field: str) -> None:
    if not 0 <= value <= _LARGEST:  # also refuses NaN
        raise ProblemError(
            f"found {value!r}", fix=f"give a number from 0 to {_LARGEST:g}", field=field
        )


def _check_length(values: Sequence[object], needed: int, field: str, what: str) -> None:
    if len(values) != needed:
        raise ProblemError(
            f"has {len(values)} entries", fix=f"give one {what}: {needed}", field=field
        )


# The file, field by field; what no field here names is refused. `Ignored` fields say where the
# numbers came from (inputs of the profilers); the problem is complete without them.

Ignored = Any


class _FileSettings(msgspec.Struct, forbid_unknown_fields=True):
    batches: int = 1
    pipeline_batches: int = 1
    memory_penalization_ms_per_byte: float = 1.0
    include_backward: bool = True
    device_memory_utilization: float = 1.0
    batch_size: Ignored = None
    comp_penalization: Ignored = None
    comm_penalization: Ignored = None


class _FileDevice(msgspec.Struct, forbid_unknown_fields=True):
    id: int
    memory_limit_bytes: float
    model: str = ""
    type: str = ""
    clock_mhz: Ignored = None
    peak_gflops: Ignored = None
    mem_bandwidth_GBps: Ignored = None  # noqa: N815 - the file's own spelling


class _FileChannel(msgspec.Struct, forbid_unknown_fields=True):
    id: int
    bandwidth_Gbps: float  # noqa: N815 - the file's own spelling
    type: str = ""


class _FileLayer(msgspec.Struct, forbid_unknown_fields=True):
    id: int
    name: str
    parents: tuple[int, ...]
    children: tuple[int, ...]
    output_bytes: float
    weight_bytes: float
    fwd_ms: tuple[float, ...]
    bwd_ms: tuple[float, ...]
    transfer_ms: tuple[float, ...]
    type: str = ""
    output_shape: Ignored = None
    fwd_flops: Ignored = None
    bwd_flops: Ignored = None
    fwd_mem_traffic_bytes: Ignored = None
    bwd_mem_traffic_bytes: Ignored = None


class _FileConstraints(msgspec.Struct, forbid_unknown_fields=True):
    colocated: tuple[tuple[int, ...], ...] = ()
    pinned: tuple[tuple[int, int], ...] = ()
    forbidden: tuple[tuple[int, int], ...] = ()
    max_devices: int | None = None


class _PlacementProblemFile(msgspec.Struct, forbid_unknown_fields=True):
    format: str
    devices: tuple[_FileDevice, ...]
    channels: tuple[_FileChannel, ...]
    route: tuple[tuple[int, ...], ...]
    layers: tuple[_FileLayer, ...]
    settings: _FileSettings = msgspec.field(default_factory=_FileSettings)
    constraints: _FileConstraints = msgspec.field(default_factory=_FileConstraints)
    name: str = ""
    net: Ignored = None
    device_graph: Ignored = None
    reference_evaluations: Ignored = None


def _from_raw(raw: _PlacementProblemFile) -> PlacementProblem:
    settings = raw.settings
    if not settings.include_backward:
        raise ProblemError(
            "found false",
            fix="placements are simulated forward and backward; set it to true",
            field="settings.include_backward",
        )
    if settings.device_memory_utilization != 1.0:
        raise ProblemError(
            f"found {settings.device_memory_utilization!r}",
            fix="set it to 1.0 and lower each device's memory_limit_bytes instead",
            field="settings.device_memory_utilization",
        )
    numbered: tuple[tuple[str, Sequence[_FileDevice | _FileChannel | _FileLayer]], ...] = (
        ("devices", raw.devices),
        ("channels", raw.channels),
        ("layers", raw.layers),
    )
    for what, entries in numbered:
        for index, entry in enumerate(entries):
            if entry.id != index:
                raise ProblemError(
                    f"found {entry.id}",
                    fix=f"ids count from 0 in the order of the list: {index} here",
                    field=f"{what}[{index}].id",
                )
    return PlacementProblem(
        name=raw.name,
        devices=tuple(PlacementDevice(d.memory_limit_bytes, d.model, d.type) for d in raw.devices),
        channels=tuple(Channel(c.bandwidth_Gbps, c.type) for c in raw.channels),
        route=raw.route,
        layers=tuple(
            PlacementLayer(
                **{name: getattr(layer, name) for name in PlacementLayer.__dataclass_fields__}
            )
            for layer in raw.layers
        ),
        batches=settings.batches,
        pipeline_batches=settings.pipeline_batches,
        memory_penalization_ms_per_byte=settings.memory_penalization_ms_per_byte,
        constraints=RecordConstraints(**msgspec.structs.asdict(raw.constraints)),
    )
