"""Rates of what a GPU moves: norms, losses, embeddings, elementwise ops, optimizers, copies.

Bytes are those of each input read once and each output written once. Sizes are one that the cache
holds, one of its size and one far larger.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from device_products import DTYPES, tensor
from gpu_timing import Clock, Results, free_memory

T = torch.Tensor
WIDTHS = {"bf16": 2, "f16": 2, "f32": 4}
# rows x width: 4 MB, 32 MB and 512 MB of bf16
ROWS = ((2048, 1024), (16384, 1024), (262144, 1024), (65536, 4096), (8192, 768))


def rows_of(clock: Clock) -> Sequence[tuple[int, int]]:
    """The sizes to measure."""
    return ((8, 16),) if clock.quick else ROWS


def bytes_case(
    results: Results, clock: Clock, kind: str, dtype: str, shape: tuple[int, ...],
    make: Callable[[], tuple[Callable[[], T], list[T]]], forward_passes: float,
    backward_passes: float = 0.0, graph: bool = True, **about: Any,
) -> None:  # fmt: skip
    """One op: its forward, and its backward as the difference of both and the forward alone.

    `make` gives the forward and what to differentiate by. Passes are over a tensor of `shape`.
    """
    size = WIDTHS[dtype]
    for extent in shape:
        size *= extent

    def measure() -> dict[str, Any]:
        forward, wanted = make()
        with torch.no_grad():
            record = clock.burst(forward)
        record["bytes_per_s"] = forward_passes * size / record["seconds"]
        if backward_passes:
            out = forward()
            gradient = torch.randn_like(out)
            del out
            whole = clock.burst(lambda: torch.autograd.grad(forward(), wanted, gradient), graph)
            back_s = max(whole["seconds"] - record["seconds"], 1e-9)
            record["backward_s"] = back_s
            record["backward_bytes_per_s"] = backward_passes * size / back_s
        return record

    results.case(
        kind, measure, dtype=dtype, shape=shape, bytes=forward_passes * size,
        backward_bytes=backward_passes * size, **about,
    )  # fmt: skip
    free_memory()


def norms(results: Results, clock: Clock) -> None:
    """Layer, RMS and batch norms, softmax."""
    for dtype in ("bf16", "f32"):
        for rows, width in rows_of(clock):

            def parts(rows: int = rows, width: int = width, dtype: str = dtype) -> list[T]:
                x = tensor(clock, dtype, rows, width).requires_grad_()
                return [x, *(tensor(clock, dtype, width).requires_grad_() for _ in range(2))]

            def layer() -> tuple[Callable[[], T], list[T]]:
                x, w, b = parts()
                return lambda: F.layer_norm(x, w.shape, w, b), [x, w, b]

            def rms() -> tuple[Callable[[], T], list[T]]:
                x, w, _ = parts()
                return lambda: F.rms_norm(x, w.shape, w, 1e-5), [x, w]

            def softmax() -> tuple[Callable[[], T], list[T]]:
                x = parts()[0]
                return lambda: torch.softmax(x, -1), [x]

            shape = (rows, width)
            bytes_case(results, clock, "layer_norm", dtype, shape, layer, 2, 3)
            bytes_case(results, clock, "rms_norm", dtype, shape, rms, 2, 3)
            bytes_case(results, clock, "softmax", dtype, shape, softmax, 2, 3)
    for batch, channels, pixels in (
        ((1, 4, 4),)
        if clock.quick
        else ((16, 64, 56), (64, 256, 14), (64, 256, 56), (256, 64, 112))
    ):
        for weights in ("bf16", "f32"):
            _batch_norm(results, clock, (batch, channels, pixels, pixels), weights)


def _batch_norm(
    results: Results, clock: Clock, shape: tuple[int, int, int, int], weights: str
) -> None:
    def make() -> tuple[Callable[[], T], list[T]]:
        x = tensor(clock, "bf16", *shape).to(memory_format=torch.channels_last).requires_grad_()
        kind = DTYPES[weights]
        w, b = (
            torch.ones(shape[1], device=clock.device, dtype=kind, requires_grad=True)
            for _ in range(2)
        )
        return lambda: F.batch_norm(x, None, None, w, b, training=True), [x, w, b]

    bytes_case(
        results, clock, "batch_norm", "bf16", shape, make, 3, 5, weights=weights,
        memory_format="channels_last",
    )  # fmt: skip


def elementwise(results: Results, clock: Clock) -> None:
    """Ops on every element: how near plain kernels come to the memory's rate."""
    unary: dict[str, tuple[Callable[[T], T], float, float]] = {
        "relu": (F.relu, 2, 3),
        "gelu": (F.gelu, 2, 3),
        "silu": (F.silu, 2, 3),
        "dropout": (lambda x: F.dropout(x, 0.1, True), 2.5, 2.5),
        "scale": (lambda x: x * 0.5, 2, 2),
        "sum of rows": (lambda x: x.sum(-1), 1, 1),
        "transpose": (lambda x: x.t().contiguous(), 2, 2),
    }
    for dtype in ("bf16", "f32"):
        for rows, width in rows_of(clock):
            shape = (rows, width)
            for name, (function, there, back) in unary.items():

                def make(
                    function: Callable[[T], T] = function, dtype: str = dtype,
                    shape: tuple[int, int] = shape,
                ) -> tuple[Callable[[], T], list[T]]:  # fmt: skip
                    x = tensor(clock, dtype, *shape).requires_grad_()
                    return lambda: function(x), [x]

                bytes_case(results, clock, name, dtype, shape, make, there, back)

            def add(
                dtype: str = dtype, shape: tuple[int, int] = shape
            ) -> tuple[Callable[[], T], list[T]]:
                x, y = (tensor(clock, dtype, *shape) for _ in range(2))
                return lambda: x + y, []

            def concat(
                dtype: str = dtype, shape: tuple[int, int] = shape
            ) -> tuple[Callable[[], T], list[T]]:
                x, y = (tensor(clock, dtype, shape[0], shape[1] // 2) for _ in range(2))
                return lambda: torch.cat((x, y), -1), []

            bytes_case(results, clock, "add", dtype, shape, add, 3)
            bytes_case(results, clock, "concat", dtype, shape, concat, 2)
            if dtype == "bf16":
                _cast(results, clock, shape)


def _cast(results: Results, clock: Clock, shape: tuple[int, int]) -> None:
    def widen() -> tuple[Callable[[], T], list[T]]:
        x = tensor(clock, "bf16", *shape)
        return lambda: x.float(), []

    def narrow() -> tuple[Callable[[], T], list[T]]:
        x = tensor(clock, "f32", *shape)
        return lambda: x.bfloat16(), []

    bytes_case(results, clock, "cast bf16 to f32", "bf16", shape, widen, 3)
    bytes_case(results, clock, "cast f32 to bf16", "bf16", shape, narrow, 3)


def losses(results: Results, clock: Clock) -> None:
    """Cross entropy of a vocabulary, embeddings of it."""
    shapes = (
        ((4, 16),) if clock.quick else ((8192, 50257), (2048, 32000), (8192, 32128), (256, 1000))
    )
    for rows, classes in shapes:
        for dtype in ("bf16", "f32"):

            def make(
                rows: int = rows, classes: int = classes, dtype: str = dtype
            ) -> tuple[Callable[[], T], list[T]]:
                x = tensor(clock, dtype, rows, classes).requires_grad_()
                targets = torch.randint(classes, (rows,), device=clock.device)
                return lambda: F.cross_entropy(x, targets), [x]

            bytes_case(results, clock, "cross_entropy", dtype, (rows, classes), make, 3, 3)
    tables = ((4, 16, 8),) if clock.quick else (
        (8192, 50257, 768), (32768, 50257, 768), (8192, 50257, 2048), (4096, 32000, 4096),
    )  # fmt: skip
    for rows, entries, width in tables:

        def lookup(
            rows: int = rows, entries: int = entries, width: int = width
        ) -> tuple[Callable[[], T], list[T]]:
            table = tensor(clock, "bf16", entries, width).requires_grad_()
            ids = torch.randint(entries, (rows,), device=clock.device)
            return lambda: F.embedding(ids, table), [table]

        bytes_case(
            results, clock, "embedding", "bf16", (rows, width), lookup, 2, 2 + entries / rows,
            graph=False, entries=entries,
        )  # fmt: skip


def optimizers(results: Results, clock: Clock) -> None:
    """Optimizer steps: per byte of parameters, and per tensor on the host."""
    sets = ((2, 8),) if clock.quick else (
        (1, 2**28), (100, 2**20), (300, 2**18), (300, 64), (1000, 64), (100, 64),
    )  # fmt: skip
    kinds: dict[str, Callable[[list[T]], torch.optim.Optimizer]] = {
        "adamw fused": lambda p: torch.optim.AdamW(p, lr=1e-6, fused=True),
        "adamw foreach": lambda p: torch.optim.AdamW(p, lr=1e-6, foreach=True),
        "adamw loop": lambda p: torch.optim.AdamW(p, lr=1e-6, foreach=False, fused=False),
        "sgd momentum foreach": lambda p: torch.optim.SGD(p, lr=1e-6, momentum=0.9, foreach=True),
        "sgd fused": lambda p: torch.optim.SGD(p, lr=1e-6, fused=True),
    }
    for count, size in sets:
        for dtype in ("bf16", "f32"):
            for name, maker in kinds.items():
                if "loop" in name and count * size > 2**27:
                    continue

                def measure(
                    count: int = count, size: int = size, dtype: str = dtype,
                    maker: Callable[[list[T]], torch.optim.Optimizer] = maker,
                ) -> dict[str, Any]:  # fmt: skip
                    parameters = [tensor(clock, dtype, size) for _ in range(count)]
                    for parameter in parameters:
                        parameter.grad = torch.randn_like(parameter)
                    optimizer = maker(parameters)
                    optimizer.step()
                    host_s = clock.host(optimizer.step)
                    wall_s = clock.wall(optimizer.step, 5)
                    span_s = clock.span(optimizer.step, 3) / 3
                    stored = WIDTHS[dtype] * count * size
                    return {"seconds": span_s, "host_s": host_s, "wall_s": wall_s,
                            "parameter_bytes_per_s": stored / span_s,
                            "host_s_per_tensor": host_s / count}  # fmt: skip

                results.case("optimizer", measure, name=name, dtype=dtype, tensors=count, size=size)
                free_memory()


def copies(results: Results, clock: Clock) -> None:
    """Memory's own rate, and the host's link."""
    sizes = (2**10,) if clock.quick else (2**22, 2**24, 2**25, 2**27, 2**30, 2**32)
    for size in sizes:

        def make_copy(size: int = size) -> dict[str, Any]:
            a, b = (torch.randn(size // 4, device=clock.device) for _ in range(2))
            record = clock.burst(lambda: a.copy_(b))
            return {**record, "bytes_per_s": 2 * size / record["seconds"]}

        def make_triad(size: int = size) -> dict[str, Any]:
            a, b, c = (torch.randn(size // 4, device=clock.device) for _ in range(3))
            record = clock.burst(lambda: torch.add(b, c, alpha=3.0, out=a))
            if size >= 2**30:
                record.update(clock.sustained(lambda: torch.add(b, c, alpha=3.0, out=a)))
                record["sustained_bytes_per_s"] = 3 * size / record["sustained_s"]
            return {**record, "bytes_per_s": 3 * size / record["seconds"]}

        def make_read(size: int = size) -> dict[str, Any]:
            a = torch.randn(size // 4, device=clock.device)
            record = clock.burst(lambda: a.sum())
            return {**record, "bytes_per_s": size / record["seconds"]}

        def make_fill(size: int = size) -> dict[str, Any]:
            a = torch.randn(size // 4, device=clock.device)
            record = clock.burst(lambda: a.zero_())
            return {**record, "bytes_per_s": size / record["seconds"]}

        for name, make in (
            ("copy", make_copy), ("triad", make_triad), ("read", make_read), ("fill", make_fill)
        ):  # fmt: skip
            results.case("memory", make, name=name, size=size)
            free_memory()
    for size in (2**10,) if clock.quick else (2**12, 2**20, 2**26, 2**30):
        for name in ("H2D pinned", "H2D pageable", "D2H pinned"):
            results.case("link", lambda n=name, s=size: _link(clock, n, s), name=name, size=size)
            free_memory()


def _link(clock: Clock, name: str, size: int) -> dict[str, Any]:
    host = torch.empty(size, dtype=torch.uint8, pin_memory=clock.cuda and "pinned" in name)
    device = torch.zeros(size, dtype=torch.uint8, device=clock.device)

    def run() -> object:
        if name.startswith("H2D"):
            return device.copy_(host, non_blocking=True)
        return host.copy_(device, non_blocking=True)

    clock.warm(run)
    times = 2 if clock.quick else max(2, min(50, 2**31 // size))
    seconds = clock.span(run, times) / times
    return {"seconds": seconds, "bytes_per_s": size / seconds, "host_s": clock.host(run)}


def overlaps(results: Results, clock: Clock) -> None:
    """Two things side by side on two streams: how much longer than the longer of them alone.

    `factor` is lambda of: together = max(a, b) + lambda min(a, b).
    """
    size, rows = (64, 2**12) if clock.quick else (8192, 2**28)
    a, b = (tensor(clock, "bf16", size, size) for _ in range(2))
    out = torch.empty_like(a)
    x, y = (torch.randn(rows, device=clock.device) for _ in range(2))
    host = torch.empty(rows // 8, pin_memory=clock.cuda)

    def product() -> object:
        return torch.mm(a, b, out=out)

    others: dict[str, Callable[[], object]] = {
        "D2D copy": lambda: x.copy_(y),
        "H2D copy": lambda: x[: rows // 8].copy_(host, non_blocking=True),
        "D2H copy": lambda: host.copy_(x[: rows // 8], non_blocking=True),
        "another product": lambda: torch.mm(b, a),
    }
    for name, other in others.items():
        results.case(
            "overlap", lambda other=other: _together(clock, product, other),
            of=f"product of {size}", with_=name,
        )  # fmt: skip


def _together(
    clock: Clock, product: Callable[[], object], other: Callable[[], object]
) -> dict[str, Any]:
    other_once = clock.warm(other)
    products = max(1, round(20 * other_once / clock.warm(product))) if not clock.quick else 1
    others = 20 if not clock.quick else 1
    alone = [clock.span(product, products), clock.span(other, others)]
    if not clock.cuda:
        together = sum(alone)
    else:
        streams = [torch.cuda.Stream() for _ in range(2)]
        current = torch.cuda.current_stream()

        # The second stream must not wait for the first: both wait for what came before.
        def side_by_side() -> None:
            for stream in streams:
                stream.wait_stream(current)
            for stream, run, times in zip(
                streams, (product, other), (products, others), strict=True
            ):
                with torch.cuda.stream(stream):
                    for _ in range(times):
                        run()
            for stream in streams:
                current.wait_stream(stream)

        clock.warm(side_by_side, 2)
        together = min(clock.span(side_by_side, 1) for _ in range(3))
    factor = (together - max(alone)) / min(alone)
    return {"seconds": together, "product_s": alone[0], "other_s": alone[1], "factor": factor}
