"""The parameters of a stage: how they are kept, how gradients are added up, the optimizer.

A parameter is kept in copies, in copies with its states in shares, or in shares itself. What is
kept in shares is gathered a few ops ahead of its use. Gradients are synchronised in buckets while
the backward goes on, then one fused optimizer step runs for each bucket. Both can wait until the
network has nothing to do that is waited for (`background`).
"""

import functools
import math
from abc import abstractmethod
from collections.abc import Sequence

from partita.cluster import Cluster
from partita.costs.collectives import Collectives
from partita.costs.layouts import Layout, copied_axes, num_shards
from partita.costs.memory import workspace_bytes
from partita.costs.roofline import OpCost, Split, op_cost
from partita.graph.record import Graph, Op
from partita.graph.splits import PARTIAL, REPLICATE
from partita.lower.background import BackgroundWriter, Later
from partita.lower.tasks import Buffer, Made, Ready, after, last_of
from partita.plans import Stage
from partita.program import Kind

BUCKET_BYTES = 25 * 1024 * 1024
PREFETCH = 4  # ops whose parameters are gathered: the one that runs, and those after it


class ParameterWriter(BackgroundWriter):
    """Writes what a stage's parameters need: gathering, sums of gradients, updates."""

    def __init__(
        self, stage: Stage, graph: Graph, cluster: Cluster, devices: tuple[int, ...],
        collectives: Collectives,
    ) -> None:  # fmt: skip
        super().__init__(stage, graph, cluster, devices, collectives)
        self.axes = stage.mesh.axes
        self.ways = [axis.ways() for axis in self.axes]
        self.levels = _levels(stage, graph)
        self.buffers: dict[str, Buffer] = {}
        self.gathered: dict[tuple[str, bool], Buffer] = {}
        self.update_of = {op.inputs[1]: op for op in graph.ops if op.phase == "update"}
        self.buckets: dict[tuple[str, Layout], list[Buffer]] = {}
        self.num_buckets = 0
        self.synced: list[tuple[list[Buffer], Made]] = []
        self.used: dict[str, Split] = {}
        self.costs: dict[str, OpCost] = {}
        self.last_compute: Made = {}  # the latest of an op with parameters in shares

    # Parameters in shares.

    def _ask_for(self, op: Op, needed: Sequence[Layout]) -> None:
        """Gather an op's parameters that are kept in shares, those that lie alike together."""
        together: dict[tuple[int, ...], list[Buffer]] = {}
        for name, layout in zip(op.inputs, needed, strict=True):
            if self.levels.get(name) != "parameters":
                continue
            if name not in self.buffers:  # laid out as its first user wants it
                self.buffers[name] = Buffer(name, layout, self._held_bytes(name, layout))
            key = (name, op.phase == "forward")
            axes = self._copied_axes(self.buffers[name].layout)
            if not axes:  # one share is all there is
                self.gathered[key] = self.buffers[name]
            elif key not in self.gathered and not self._is_asked_for(key):
                together.setdefault(axes, []).append(self.buffers[name])
        last = self.last_compute
        ready: Ready = {device: [last[device]] if last else [] for device in self.devices}
        for axes, buffers in together.items():
            size = sum(buffer.size_bytes for buffer in buffers)
            seconds = sum(
                self.collectives.seconds("all_gather", size, self.groups[axis]) for axis in axes
            )
            keys = tuple((buffer.name, op.phase == "forward") for buffer in buffers)
            write = functools.partial(self._gather, keys, buffers, axes, ready)
            self.ahead.append(Later(ready, seconds, write, keys))

    def _gather(
        self, keys: Sequence[tuple[str, bool]], buffers: Sequence[Buffer], axes: Sequence[int],
        ready: Ready,
    ) -> None:  # fmt: skip
        size = sum(buffer.size_bytes for buffer in buffers)
        made: Made = {}
        for axis in axes:
            label = f"{buffers[0].name} all_gather"
            made = self._group_tasks(label, "all_gather", size, axis, ready)
            ready = after(made)
        for key, buffer in zip(keys, buffers, strict=True):
            whole = Buffer(buffer.name, buffer.layout, buffer.size_bytes, made)
            self._take(whole, made)
            self.gathered[key] = whole

    def _gathered(self, name: str, user: Op) -> Buffer:
        """A parameter kept in shares, whole again for the forward or the backward."""
        key = (name, user.phase == "forward")
        self._needed(key)
        return self.gathered[key]

    # Parameter gradients and the optimizer.

    def _collect(self, gradient: Buffer) -> None:
        """Gradients that are synchronised alike wait for each other until they are worth it."""
        level = self.levels[self.update_of[gradient.name].inputs[0]]
        sums = tuple(p if p == PARTIAL else REPLICATE for p in gradient.layout)
        key = (level, sums)
        bucket = self.buckets.setdefault(key, [])
        bucket.append(gradient)
        if sum(item.size_bytes for item in bucket) >= BUCKET_BYTES:
            self._flush(key)

    def _flush(self, key: tuple[str, Layout]) -> None:
        """Synchronise the gradients collected so far; each ends as its parameter lies."""
        bucket = self.buckets.pop(key)
        level, sums = key
        number = self.num_buckets
        self.num_buckets += 1
        name = "all_reduce" if level == "none" else "reduce_scatter"
        size = sum(gradient.size_bytes for gradient in bucket)
        axes = [i for i, p in enumerate(sums) if p == PARTIAL and self.axes[i].size > 1]
        seconds = sum(self.collectives.seconds(name, size, self.groups[axis]) for axis in axes)
        write = functools.partial(self._synchronise, bucket, level, f"gradients.{number}", axes)
        self._put_off(Later(self._ready(bucket), seconds, write))

    def _flush_all(self) -> None:
        """Synchronise all gradients that are left."""
        for bucket in list(self.buckets):
            self._flush(bucket)
        self._drain()

    def _synchronise(
        self, bucket: list[Buffer], level: str, label: str, axes: Sequence[int]
    ) -> None:
        name = "all_reduce" if level == "none" else "reduce_scatter"
        size = sum(gradient.size_bytes for gradient in bucket)
        ready = self._ready(bucket)
        for axis in axes:
            ready = after(self._group_tasks(f"{label} {name}", name, size, axis, ready))
        last = last_of(ready)
        if level in ("gradients", "parameters"):
            for gradient in bucket:
                shard = Buffer(gradient.name, gradient.layout, self._sharded_bytes(gradient))
                self._take(shard, last)
                self._use([gradient], last)
                self.buffers[gradient.name] = shard
        self.synced.append((bucket, last))

    def _update(self, number: int, gradients: list[Buffer], ready: Made) -> None:
        """One fused optimizer step for a bucket."""
        made = {}
        for device in self.devices:
            kind = self.kinds[device]
            seconds = kind.launch_s
            for gradient in gradients:
                op = self.update_of[gradient.name]
                cost = op_cost(self.graph, op, kind).scaled(self._update_share(op))
                self._note(op, device, (), cost)
                seconds += cost.seconds
            made[device] = self._task(
                f"update.{number}", (self._lane(device),), seconds, [ready[device]], Kind.UPDATE
            )
        self._use([self.buffers[gradient.name] for gradient in gradients], made)
        for axis in range(len(self.axes)):
            copied = sum(
                self.buffers[op.inputs[0]].size_bytes
                for op in (self.update_of[gradient.name] for gradient in gradients)
                if self.levels[op.inputs[0]] in ("states", "gradients")
                and axis in self._copied_axes(self._stored_layout(op))
            )
            if copied:
                made = self._group_tasks(
                    f"parameters.{number} all_gather", "all_gather", copied, axis, after(made)
                )

    def _update_share(self, op: Op) -> float:
        """The part of a parameter that one device updates."""
        layout = self._stored_layout(op)
        share = 1 / num_shards(layout, self.ways)
        return share if self.levels[op.inputs[0]] == "none" else share / self._copies(layout)

    def _copies(self, layout: Layout) -> int:
        return math.prod(self.axes[axis].size for axis in self._copied_axes(layout))

    def _stored_layout(self, op: Op) -> Layout:
        return self.buffers[op.inputs[0]].layout

    def _sharded_bytes(self, gradient: Buffer) -> float:
        layout = self._stored_layout(self.update_of[gradient.name])
        return gradient.size_bytes / self._copies(layout)

    # Memory.

    @abstractmethod
    def _held_bytes(self, name: str, layout: Layout) -> float:
        """What a device holds of a tensor."""

    def _static_bytes(self, device: int) -> float:
        total = workspace_bytes(self.kinds[device])
        updates = {op.inputs[0]: op for op in self.graph.ops if op.phase == "update"}
        for tensor in self.graph.parameters:
            buffer = self.buffers.get(tensor.name)
            layout = buffer.layout if buffer else (REPLICATE,) * len(self.axes)
            level = self.levels.get(tensor.name, "none")
            shards, copies = num_shards(layout, self.ways), self._copies(layout)
            total += tensor.size_bytes / shards / (copies if level == "parameters" else 1)
            op = updates.get(tensor.name)
            states = [self.graph.tensor(name) for name in op.inputs[2:]] if op else []
            split = 1 if level == "none" else copies
            total += sum(state.size_bytes for state in states) / shards / split
        return total

    def _copied_axes(self, layout: Layout) -> tuple[int, ...]:
        return copied_axes(layout, self.axes)

    def _note(self, op: Op, device: int, split: Split, cost: OpCost) -> None:
        if device == self.devices[0]:
            self.used[op.name] = split
            self.costs[op.name] = cost


def _levels(stage: Stage, graph: Graph) -> dict[str, str]:
    """How each parameter is kept: as the first op that reads it says."""
    sharded = {split.op: split.sharded for split in stage.splits}
    found: dict[str, str] = {}
    for op in graph.ops:
        if op.phase == "forward":
            for name in op.inputs:
                if graph.tensor(name).role == "parameter":
                    found.setdefault(name, sharded.get(op.name, "none"))
    return found
