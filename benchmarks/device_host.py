"""What the host costs: seconds per op and kernel in eager mode, compiled, in a graph; fixed memory.

Chains of tiny ops keep the GPU faster than the host, so the time until a call returns, over the
number of ops, is what one op costs the host. The number of kernels comes from the profiler.
"""

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from device_products import tensor
from gpu_timing import Clock, Results, free_memory
from kernel_counts import kernels_of
from torch import nn

T = torch.Tensor
CHAIN = 100
WIDTH = 64


def fixed_memory(results: Results, clock: Clock) -> None:
    """Memory of the context, of libraries' workspaces, and how the allocator rounds."""
    if not clock.cuda:
        results.case("memory used", lambda: {"used_bytes": 0}, after="nothing: no GPU")
        return
    device = clock.device

    def used() -> dict[str, Any]:
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        return {
            "used_bytes": total - free,
            "allocated_bytes": torch.cuda.memory_allocated(),
            "reserved_bytes": torch.cuda.memory_reserved(),
        }

    def product(dtype: torch.dtype) -> None:
        a = torch.randn(4096, 4096, device=device, dtype=dtype)
        torch.mm(a, a)

    def linear() -> None:
        layer = nn.Linear(1024, 1024, device=device, dtype=torch.bfloat16)
        x = torch.randn(4096, 1024, device=device, dtype=torch.bfloat16)
        layer(x).sum().backward()

    def convolution() -> None:
        layer = nn.Conv2d(64, 64, 3, padding=1, device=device, dtype=torch.bfloat16)
        layer = layer.to(memory_format=torch.channels_last)
        x = torch.randn(32, 64, 56, 56, device=device, dtype=torch.bfloat16)
        layer(x.to(memory_format=torch.channels_last)).sum().backward()

    def attention() -> None:
        q = torch.randn(8, 16, 1024, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
        F.scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward()

    def lstm() -> None:
        layer = nn.LSTM(256, 256, batch_first=True, device=device, dtype=torch.bfloat16)
        x = torch.randn(16, 64, 256, device=device, dtype=torch.bfloat16)
        layer(x)[0].sum().backward()

    steps: dict[str, Callable[[], object]] = {
        "context": torch.cuda.init,
        "one number": lambda: torch.zeros((), device=device),
        "product bf16": lambda: product(torch.bfloat16),
        "product f32": lambda: product(torch.float32),
        "linear with backward": linear,
        "convolution with backward": convolution,
        "attention with backward": attention,
        "lstm with backward": lstm,
    }
    for name, step in steps.items():

        def measure(step: Callable[[], object] = step) -> dict[str, Any]:
            step()
            before = used()
            free_memory()
            after = {f"{key}_when_emptied": value for key, value in used().items()}
            return {**before, **after}

        results.case("memory used", measure, after=name)
    for size in (
        1,
        513,
        100_000,
        2**20,
        2**20 + 1,
        3_000_000,
        10 * 2**20,
        10 * 2**20 + 1,
        50_000_001,
    ):
        results.case("allocation", lambda size=size: _allocation(clock, size), size=size)


def _allocation(clock: Clock, size: int) -> dict[str, Any]:
    free_memory()
    allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    block = torch.empty(size, dtype=torch.uint8, device=clock.device)
    record = {
        "allocated_bytes": torch.cuda.memory_allocated() - allocated,
        "reserved_bytes": torch.cuda.memory_reserved() - reserved,
    }
    del block
    return record


def chains(clock: Clock) -> dict[str, Callable[[], tuple[Callable[[], T], list[T]]]]:
    """Makers of chains of tiny ops: what to call, and what has gradients."""
    count = 3 if clock.quick else CHAIN

    def leaf(*shape: int) -> T:
        return tensor(clock, "bf16", *shape).mul_(0.1).requires_grad_()

    def repeated(step: Callable[[T], T], *extra: T) -> tuple[Callable[[], T], list[T]]:
        x = leaf(WIDTH, WIDTH)

        def run() -> T:
            y = x
            for _ in range(count):
                y = step(y)
            return y

        return run, [x, *extra]

    def module(layer: nn.Module) -> tuple[Callable[[], T], list[T]]:
        layer = layer.to(clock.device, torch.bfloat16)
        return repeated(layer, *layer.parameters())

    def linear() -> tuple[Callable[[], T], list[T]]:
        w, b = leaf(WIDTH, WIDTH), leaf(WIDTH)
        return repeated(lambda y: F.linear(y, w, b), w, b)

    def norm() -> tuple[Callable[[], T], list[T]]:
        w, b = leaf(WIDTH), leaf(WIDTH)
        return repeated(lambda y: F.layer_norm(y, (WIDTH,), w, b), w, b)

    def image(layer: nn.Module) -> tuple[Callable[[], T], list[T]]:
        layer = layer.to(clock.device, torch.bfloat16)
        x = leaf(1, 16, 8, 8)

        def run() -> T:
            y = x
            for _ in range(count):
                y = layer(y)
            return y

        return run, [x, *layer.parameters()]

    def attended() -> tuple[Callable[[], T], list[T]]:
        x = leaf(1, 1, WIDTH, WIDTH)

        def run() -> T:
            y = x
            for _ in range(count):
                y = F.scaled_dot_product_attention(y, y, y, is_causal=True)
            return y

        return run, [x]

    return {
        "add a number": lambda: repeated(lambda y: y + 1.0),
        "add itself": lambda: repeated(lambda y: y + y),
        "gelu": lambda: repeated(F.gelu),
        "softmax": lambda: repeated(lambda y: torch.softmax(y, -1)),
        "view, no kernel": lambda: repeated(lambda y: y.view(-1).view(WIDTH, WIDTH)),
        "matmul": lambda: repeated(lambda y: torch.matmul(y, y)),
        "linear": linear,
        "linear module": lambda: module(nn.Linear(WIDTH, WIDTH)),
        "layer_norm": norm,
        "layer_norm module": lambda: module(nn.LayerNorm(WIDTH)),
        "conv module": lambda: image(nn.Conv2d(16, 16, 3, padding=1)),
        "batch_norm module": lambda: image(nn.BatchNorm2d(16)),
        "attention": attended,
    }


def launches(results: Results, clock: Clock) -> None:
    """Host seconds per op: forward alone, forward with gradients, backward; kernels per op."""
    count = 3 if clock.quick else CHAIN
    for name, maker in chains(clock).items():

        def measure(maker: Callable[[], tuple[Callable[[], T], list[T]]] = maker) -> dict[str, Any]:
            run, wanted = maker()
            with torch.no_grad():
                plain_s = clock.host(run, count)
                plain_wall_s = clock.wall(run) / count
                kernels = kernels_of(run, clock)
            forward_s = clock.host(run, count)
            out = run()
            gradient = torch.ones_like(out)

            def backward() -> object:
                return torch.autograd.grad(out, wanted, gradient, retain_graph=True)

            backward_s = clock.host(backward, count)
            backward_wall_s = clock.wall(backward) / count
            behind = kernels_of(backward, clock)
            return {
                "ops": count,
                "forward_no_grad_s": plain_s,
                "forward_no_grad_wall_s": plain_wall_s,
                "forward_s": forward_s,
                "backward_s": backward_s,
                "backward_wall_s": backward_wall_s,
                "kernels_per_op": kernels["kernels"] / count,
                "backward_kernels_per_op": behind["kernels"] / count,
                "gpu_s_per_op": kernels["busy_s"] / count,
                "backward_gpu_s_per_op": behind["busy_s"] / count,
            }

        results.case("host per op", measure, name=name)
    _waits(results, clock)


def _waits(results: Results, clock: Clock) -> None:
    """Waiting for the device, reading one number, emptying gradients."""
    one = torch.ones((), device=clock.device)
    small = torch.ones(16, device=clock.device)

    def event() -> None:
        if clock.cuda:
            mark = torch.cuda.Event()
            mark.record()
            mark.synchronize()

    calls: dict[str, Callable[[], object]] = {
        "synchronize, nothing to do": clock.sync,
        "event recorded and waited for": event,
        "item()": one.item,
        "one tiny kernel": lambda: small.add_(1.0),
        "empty(16)": lambda: torch.empty(16, device=clock.device),
    }
    for name, call in calls.items():
        results.case(
            "host call", lambda call=call: {"host_s": clock.host(call, tries=50),
                                            "wall_s": clock.wall(call, tries=50)}, name=name,
        )  # fmt: skip


def graphs(results: Results, clock: Clock) -> None:
    """Kernels inside a CUDA graph: seconds per kernel that has next to nothing to do."""

    def measure(chain: str) -> dict[str, Any]:
        if not clock.cuda:
            return {"seconds": 0.0}
        run, _ = chains(clock)[chain]()
        with torch.no_grad():
            kernels = kernels_of(run, clock)
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                run()
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for _ in range(5):
                    run()
        clock.warm(graph.replay)
        seconds = clock.span(graph.replay, 10) / 10
        number = max(1, 5 * kernels["kernels"])
        return {
            "kernels": number,
            "seconds_per_kernel": seconds / number,
            "gpu_s_per_kernel": kernels["busy_s"] / max(1, kernels["kernels"]),
            "replay_host_s": clock.host(graph.replay),
            "replay_host_s_per_kernel": clock.host(graph.replay) / number,
        }

    for name in ("add a number", "softmax", "linear", "layer_norm", "matmul"):
        results.case("graph", lambda name=name: measure(name), name=name)


class Tower(nn.Module):
    """Linear layers, with an activation between them or without."""

    def __init__(self, depth: int, activation: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(depth))
        self.activation = activation

    def forward(self, x: T) -> T:
        """One after the other."""
        for layer in self.layers:
            x = layer(x)
            if self.activation:
                x = torch.softmax(x, -1)
        return x


def compiled(results: Results, clock: Clock) -> None:
    """Host seconds per kernel under torch.compile: library calls, and its own kernels."""
    depth = 2 if clock.quick else 50
    backend = "inductor" if clock.cuda else "eager"
    for activation in (False, True):

        def measure(activation: bool = activation) -> dict[str, Any]:
            torch._dynamo.reset()
            net = Tower(depth, activation).to(clock.device, torch.bfloat16)
            x = tensor(clock, "bf16", WIDTH, WIDTH)
            call = torch.compile(net, dynamic=False, backend=backend)
            with torch.no_grad():
                call(x)
                host_s, wall_s = clock.host(lambda: call(x)), clock.wall(lambda: call(x))
                inference = kernels_of(lambda: call(x), clock)
            loss = call(x).sum()
            loss.backward()
            forward_s = clock.host(lambda: call(x))
            trained = kernels_of(lambda: call(x), clock)
            out = call(x).sum()

            def backward() -> None:
                out.backward()

            backward_times = []
            for _ in range(2 if clock.quick else 7):
                net.zero_grad(set_to_none=True)
                out = call(x).sum()
                clock.sync()
                began = time.perf_counter()
                backward()
                backward_times.append(time.perf_counter() - began)
                clock.sync()
            net.zero_grad(set_to_none=True)
            out = call(x).sum()
            behind = kernels_of(backward, clock)
            backward_s = sorted(backward_times)[len(backward_times) // 2]
            return {
                "layers": depth,
                "inference_host_s": host_s,
                "inference_wall_s": wall_s,
                "inference_kernels": inference["kernels"],
                "inference_gpu_s": inference["busy_s"],
                "host_s_per_kernel": host_s / max(1, inference["kernels"]),
                "forward_host_s": forward_s,
                "forward_kernels": trained["kernels"],
                "backward_host_s": backward_s,
                "backward_kernels": behind["kernels"],
                "backward_gpu_s": behind["busy_s"],
            }

        results.case("compiled", measure, activation=activation)
