"""One model at one batch size on this machine: steps of training and inference, timed.

Parameters, gradients, activations and the states of fused AdamW are bf16; images lie channels last;
cuDNN chooses by its rules (`cudnn.benchmark` is off, as it is by default). A training step is
forward, loss, backward, `optimizer.step()` and `zero_grad(set_to_none=True)`.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from gpu_timing import Clock
from kernel_counts import phases_of
from model_source import straight_module

from partita.capture.reference_module import example_inputs
from partita.graph import Graph, training_graph
from partita.zoo import build
from partita.zoo.llama import DecoderSizes, decoder

DTYPE = "bf16"
# A small model of the Llama family with grouped heads: the sizes of TinyLlama 1.1B.
LLAMA_1B = DecoderSizes(22, 2048, 5632, 32, 4)
LONGEST_WARM_UP_S = 0.3
SYNCED_S, QUEUED_S = 0.4, 0.8  # of training; inference has less
INFERENCE = 0.4


def graph_of(model: str, batch: int, training: bool) -> Graph:
    """The forward graph: of the zoo, or the small Llama."""
    if model == "llama-1.1b":
        return decoder(model, LLAMA_1B, batch, 2048, DTYPE, training)
    return build(model, batch=batch, dtype=DTYPE, loss=training)


class Steps:
    """A model ready to run; `phases` are the parts of a step, in order."""

    def __init__(
        self, model: str, batch: int, training: bool, clock: Clock, backend: str = ""
    ) -> None:
        graph = graph_of(model, batch, training)
        device = str(clock.device)
        module: Any = straight_module(graph, device)
        module.train(training).requires_grad_(training)
        inputs = example_inputs(graph, device=device)
        if any(x.ndim == 4 for x in inputs):
            module = module.to(memory_format=torch.channels_last)
            inputs = tuple(
                x.contiguous(memory_format=torch.channels_last) if x.ndim == 4 else x
                for x in inputs
            )
        self.clock, self.training, self.inputs = clock, training, inputs
        self.num_ops = len(graph.ops)
        self.num_tensors = sum(1 for _ in module.parameters())
        self.num_parameters = sum(p.numel() for p in module.parameters())
        self.call = torch.compile(module, dynamic=False, backend=backend) if backend else module
        self.loss: Any = None
        self.phases: dict[str, Callable[[], object]] = {"forward": self.forward}
        if training:
            self.optimizer = torch.optim.AdamW(module.parameters(), lr=1e-5, fused=True)
            self.phases |= {"backward": self.backward, "update": self.update}

    def forward(self) -> None:
        """To the loss; in inference to the logits, which are dropped as soon as they are there."""
        if self.training:
            self.loss = self.call(*self.inputs)
        else:
            with torch.no_grad():
                self.call(*self.inputs)

    def backward(self) -> None:
        """Gradients of all parameters."""
        self.loss.backward()
        self.loss = self.loss.detach()

    def update(self) -> None:
        """The optimizer's step; gradients are given back."""
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def step(self) -> None:
        """All phases."""
        for phase in self.phases.values():
            phase()


def measured(steps: Steps) -> dict[str, Any]:
    """Times of a step, its memory, and what it starts on the GPU."""
    clock = steps.clock
    once = _warm_up(steps)
    if clock.cuda:
        torch.cuda.reset_peak_memory_stats()
    scale = 0.0 if clock.quick else 1.0 if steps.training else INFERENCE
    synced = []
    for _ in range(_times(scale * SYNCED_S / once, 4, 40)):
        began = time.perf_counter()
        steps.step()
        clock.sync()
        synced.append(time.perf_counter() - began)
    queued = _times(scale * QUEUED_S / once, 4, 60)
    began = time.perf_counter()
    for _ in range(queued):
        steps.step()
    clock.sync()
    queued_s = (time.perf_counter() - began) / queued
    record: dict[str, Any] = {
        "step_s": statistics.median(synced),
        "step_least_s": min(synced),
        "queued_step_s": queued_s,
        "steps": len(synced) + queued,
        "ended_unix_s": round(time.time(), 2),
        "num_parameters": steps.num_parameters,
        "num_tensors": steps.num_tensors,
        "num_ops": steps.num_ops,
        **_memory(clock),
        **_host(steps),
    }
    try:
        record["phases"] = phases_of(steps.phases, clock)
        counts = record["phases"].values()
        record["kernels"] = sum(count["kernels"] for count in counts)
        record["gpu_busy_s"] = sum(count["busy_s"] for count in counts)
    except Exception as error:  # the profiler is not what is measured
        record["profiler_error"] = f"{type(error).__name__}: {error}"[:300]
    if steps.training:
        record["loss"] = float(steps.loss)
    return record


def _times(wanted: float, least: int, most: int) -> int:
    return max(least, min(most, int(wanted)))


def _warm_up(steps: Steps) -> float:
    """Run until libraries have chosen and clocks are up; seconds of one step."""
    steps.step()
    steps.clock.sync()
    began = time.perf_counter()
    shortest = float("inf")
    for _ in range(2 if steps.clock.quick else 12):
        start = time.perf_counter()
        steps.step()
        steps.clock.sync()
        shortest = min(shortest, time.perf_counter() - start)
        if time.perf_counter() - began > LONGEST_WARM_UP_S:
            break
    return max(shortest, 1e-6)


def _memory(clock: Clock) -> dict[str, int]:
    if not clock.cuda:
        return {"max_allocated_bytes": 0, "max_reserved_bytes": 0, "held_bytes": 0}
    free, total = torch.cuda.mem_get_info()
    return {
        "max_allocated_bytes": torch.cuda.max_memory_allocated(),
        "max_reserved_bytes": torch.cuda.max_memory_reserved(),
        "held_bytes": torch.cuda.memory_allocated(),
        "used_of_device_bytes": total - free,
    }


def _host(steps: Steps) -> dict[str, float]:
    """Seconds until each phase returns with nothing queued, and until the device is done.

    A queue holds about a thousand kernels: a phase of more waits for the device.
    """
    host: dict[str, list[float]] = {name: [] for name in steps.phases}
    wall: dict[str, list[float]] = {name: [] for name in steps.phases}
    whole = []
    clock = steps.clock
    for _ in range(2 if clock.quick else 4):
        for name, phase in steps.phases.items():
            clock.sync()
            began = time.perf_counter()
            phase()
            host[name].append(time.perf_counter() - began)
            clock.sync()
            wall[name].append(time.perf_counter() - began)
        clock.sync()
        began = time.perf_counter()
        steps.step()
        whole.append(time.perf_counter() - began)
        clock.sync()
    record = {f"{name}_host_s": statistics.median(times) for name, times in host.items()}
    record |= {f"{name}_wall_s": statistics.median(times) for name, times in wall.items()}
    return {**record, "host_step_s": statistics.median(whole)}


def predicted(
    model: str, batch: int, training: bool, cluster: str, execution: str = "eager"
) -> dict[str, Any]:
    """What partita says of the same step; allocated bytes are those that PyTorch would count."""
    from partita.costs.memory import LIBRARY_BYTES, workspace_bytes
    from partita.jobs.simulate import simulate

    forward = graph_of(model, batch, training)
    graph = training_graph(forward, "adamw", DTYPE) if training else forward
    simulation = simulate(graph, cluster, training=training, execution=execution)
    workspace = workspace_bytes(simulation.cluster.kind_of(0))
    # Eager inference is measured after training in one process, which has both workspaces by then.
    library = LIBRARY_BYTES if training or execution == "eager" else LIBRARY_BYTES / 2
    phases: dict[str, float] = {}
    counts: dict[str, int] = {}
    for op in simulation.ops:
        phases[op.phase] = phases.get(op.phase, 0.0) + op.cost.seconds
        if op.cost.seconds > 0:
            key = f"{op.phase} {op.kind}"
            counts[key] = counts.get(key, 0) + 1
    return {
        "step_s": simulation.step_s,
        "device_s": simulation.compute_s,
        "host_s": sum(op.cost.host_s for op in simulation.ops),
        "peak_bytes": simulation.peak_bytes[0],
        "workspace_bytes": workspace,
        "allocated_bytes": simulation.peak_bytes[0] - workspace + library,
        "flops": simulation.flops,
        "bounds_s": simulation.bounds(),
        "phases_s": phases,
        "ops": sum(counts.values()),
        "ops_by_kind": counts,
    }
