"""Rates of what a GPU multiplies: matrix products, batched products, attention, convolutions.

Every function measures one group of cases and adds them to the results. FLOP are 2 m n k of each
product; causal attention counts the half that is needed; backward passes of attention 2.5 times the
forward's.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from gpu_timing import Clock, Results, free_memory

T = torch.Tensor
DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "tf32": torch.float32, "f32": torch.float32}
SUSTAINED_FLOP = 2e11  # a product of this size or more is run for a second, too


def tensor(clock: Clock, dtype: str, *shape: int) -> T:
    """Random numbers: a GPU multiplies zeros faster than it multiplies numbers."""
    return torch.randn(shape, device=clock.device, dtype=DTYPES[dtype])


@contextlib.contextmanager
def precision(dtype: str) -> Any:
    """TF32 for f32 products where asked for."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = dtype == "tf32"
    torch.backends.cudnn.allow_tf32 = dtype == "tf32"
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def product_case(
    results: Results, clock: Clock, kind: str, make: Callable[[], Callable[[], object]],
    flop: float, moved_bytes: float, sustained: bool = False, **about: Any,
) -> None:  # fmt: skip
    """One product: in a burst, and sustained where it is large and that was asked for."""

    def measure() -> dict[str, Any]:
        run = make()
        record = clock.burst(run)
        record["flop_per_s"] = flop / record["seconds"]
        record["bytes_per_s"] = moved_bytes / record["seconds"]
        if sustained:
            record.update(clock.sustained(run))
            record["sustained_flop_per_s"] = flop / record["sustained_s"]
        return record

    with precision(about.get("dtype", "bf16")), torch.no_grad():
        results.case(kind, measure, **about, flop=flop, bytes=moved_bytes)
    free_memory()


def matmul(
    results: Results, clock: Clock, m: int, n: int, k: int, dtype: str, form: str = "NT",
    sustained: bool = False, kind: str = "matmul",
) -> None:  # fmt: skip
    """x (m x k) times w (k x n). NT: a linear layer's forward; NN its dgrad; TN its wgrad."""

    def make() -> Callable[[], object]:
        if dtype == "fp8":
            return _fp8(clock, m, n, k)
        first = tensor(clock, dtype, k, m).t() if form[0] == "T" else tensor(clock, dtype, m, k)
        second = tensor(clock, dtype, n, k).t() if form[1] == "T" else tensor(clock, dtype, k, n)
        out = torch.empty(m, n, device=clock.device, dtype=DTYPES[dtype])
        return lambda: torch.mm(first, second, out=out)

    width = {"bf16": 2, "f16": 2, "fp8": 1}.get(dtype, 4)
    out_width = 2 if dtype == "fp8" else width
    product_case(
        results, clock, kind, make, 2.0 * m * n * k, width * (m * k + k * n) + out_width * m * n,
        sustained, m=m, n=n, k=k, dtype=dtype, form=form,
    )  # fmt: skip


def _fp8(clock: Clock, m: int, n: int, k: int) -> Callable[[], object]:
    """e4m3 with one scale per tensor: rows first, columns second, as cuBLAS wants them."""
    first = torch.randn(m, k, device=clock.device).to(torch.float8_e4m3fn)
    second = torch.randn(n, k, device=clock.device).to(torch.float8_e4m3fn).t()
    one = torch.ones((), device=clock.device)

    def run() -> object:
        return torch._scaled_mm(
            first, second, scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True
        )

    return run


def squares(results: Results, clock: Clock) -> None:
    """Square products of every type, from 512 to 16384."""
    sizes = (64,) if clock.quick else (512, 1024, 2048, 4096, 8192, 16384)
    for dtype in ("bf16", "f16", "fp8", "tf32", "f32"):
        for size in sizes:
            large = 2.0 * size**3 >= SUSTAINED_FLOP and (dtype != "f32" or size == 8192)
            if dtype == "f32" and size == 16384:
                continue  # 0.2 s each: nothing new
            matmul(results, clock, size, size, size, dtype, sustained=large or clock.quick)


def layers(results: Results, clock: Clock) -> None:
    """The three products of linear layers of transformers: forward, dgrad, wgrad."""
    widths = [
        (768, 768), (768, 3072), (3072, 768), (1024, 1024), (1024, 4096), (4096, 1024),
        (1280, 5120), (2048, 2048), (2048, 8192), (8192, 2048), (4096, 4096), (4096, 11008),
        (11008, 4096), (4096, 14336), (768, 50257), (768, 50304), (2048, 50257), (4096, 32000),
    ]  # fmt: skip
    tokens = (512, 2048, 8192, 32768)
    if clock.quick:
        widths, tokens = [(16, 32)], (8,)
    for inner, outer in widths:
        for rows in tokens:
            if rows == 512 and outer > 20000:
                continue
            lasting = rows == 8192 and (inner, outer) in (
                (768, 3072), (1024, 4096), (2048, 8192), (4096, 4096), (4096, 11008), (768, 50257),
            )  # fmt: skip
            matmul(results, clock, rows, outer, inner, "bf16", "NT", lasting, "linear forward")
            matmul(results, clock, rows, inner, outer, "bf16", "NN", False, "linear dgrad")
            matmul(results, clock, outer, inner, rows, "bf16", "TN", lasting, "linear wgrad")


def skinny(results: Results, clock: Clock) -> None:
    """Few rows against large weights, as in decoding: bound by the weights' bytes."""
    rows = (1, 2) if clock.quick else (1, 2, 4, 8, 16, 32, 64, 128, 256)
    shapes = ((32, 16),) if clock.quick else ((4096, 4096), (14336, 4096), (4096, 14336))
    for n, k in shapes:
        for m in rows:
            matmul(results, clock, m, n, k, "bf16", kind="skinny")
            if m >= 16 and (n, k) == (14336, 4096):
                matmul(results, clock, m, n, k, "fp8", kind="skinny")


def batched(results: Results, clock: Clock) -> None:
    """The products of attention that is written out, forward and gradients."""
    shapes = ((2, 8, 8, 4),)
    if not clock.quick:
        shapes = (
            (96, 512, 512, 64), (384, 512, 512, 64), (96, 1024, 1024, 64), (128, 2048, 2048, 64),
            (32, 2048, 2048, 128), (64, 4096, 4096, 128), (768, 197, 197, 64),
        )  # fmt: skip
    for batch, queries, keys, size in shapes:
        q = (batch, queries, size)
        k = (batch, keys, size)
        scores = (batch, queries, keys)
        forms: list[tuple[str, tuple[int, ...], tuple[int, ...], str]] = [
            ("scores = q k'", q, k, "NT"), ("mix = p v", scores, k, "NN"),
            ("dp = dy v'", q, k, "NT"), ("dv = p' dy", scores, q, "TN"),
            ("dk = ds' q", scores, q, "TN"),
        ]  # fmt: skip
        for name, first, second, form in forms[:2] + forms[3:4]:
            _batched_case(results, clock, name, first, second, form)


def _batched_case(
    results: Results, clock: Clock, name: str, first: tuple[int, ...], second: tuple[int, ...],
    form: str,
) -> None:  # fmt: skip
    def make() -> Callable[[], object]:
        a, b = tensor(clock, "bf16", *first), tensor(clock, "bf16", *second)
        a = a.mT if form[0] == "T" else a
        b = b.mT if form[1] == "T" else b
        return lambda: torch.bmm(a, b)

    batch, m, k = first if form[0] == "N" else (first[0], first[2], first[1])
    n = second[1] if form[1] == "T" else second[2]
    flop = 2.0 * batch * m * n * k
    product_case(
        results, clock, "bmm", make, flop, 2.0 * batch * (m * k + k * n + m * n),
        name=name, batch=batch, m=m, n=n, k=k, dtype="bf16", form=form,
    )  # fmt: skip


def attention(results: Results, clock: Clock) -> None:
    """Fused attention: flash, cuDNN's, what PyTorch picks by itself, and with a bias."""
    cases: list[tuple[int, int, int, int, int, bool]] = []
    lengths = (8,) if clock.quick else (512, 1024, 2048, 4096, 8192, 16384)
    for length in lengths:
        for size, heads in ((64, 16), (128, 16)):
            batch = max(1, 16384 // length) if not clock.quick else 1
            cases += [(batch, heads, heads, length, size, causal) for causal in (True, False)]
    if not clock.quick:
        cases += [(8, 32, 8, 2048, 128, True), (2, 32, 8, 8192, 128, True)]
        cases += [(64, 12, 12, 197, 64, False), (32, 12, 12, 1024, 64, True)]
        cases += [(1, 12, 12, 1024, 64, True), (1, 16, 16, 512, 64, False)]
    for case in cases:
        backends = ["flash", "default"]
        if case[3] in (1024, 4096):
            backends.append("cudnn")
        for backend in backends:
            _attention_case(results, clock, backend, *case)
    for case in ((4, 12, 12, 512, 64, False), (16, 12, 12, 512, 64, False)):
        shape = (1, 2, 2, 8, 8, False) if clock.quick else case
        _attention_case(results, clock, "bias", *shape)


def _attention_case(
    results: Results, clock: Clock, backend: str, batch: int, heads: int, kv_heads: int,
    length: int, size: int, causal: bool,
) -> None:  # fmt: skip
    from torch.nn.attention import SDPBackend, sdpa_kernel

    chosen = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
    flop = 4.0 * batch * heads * length * length * size * (0.5 if causal else 1.0)

    def context() -> Any:
        plain = backend not in chosen or not clock.cuda
        return contextlib.nullcontext() if plain else sdpa_kernel(chosen[backend])

    def measure() -> dict[str, Any]:
        q = tensor(clock, "bf16", batch, heads, length, size).requires_grad_()
        k, v = (
            tensor(clock, "bf16", batch, kv_heads, length, size).requires_grad_() for _ in range(2)
        )
        out_grad = tensor(clock, "bf16", batch, heads, length, size)
        wanted = [q, k, v]
        extra: dict[str, Any] = {"is_causal": causal}
        if backend == "bias":
            bias = tensor(clock, "bf16", heads, length, length).requires_grad_()
            extra = {"attn_mask": bias}
            wanted.append(bias)
        if kv_heads != heads:
            extra["enable_gqa"] = True

        def forward() -> T:
            return F.scaled_dot_product_attention(q, k, v, **extra)

        def both() -> object:
            return torch.autograd.grad(forward(), wanted, out_grad)

        with context():
            with torch.no_grad():
                record = clock.burst(forward)
            whole = clock.burst(both)
        back_s = max(whole["seconds"] - record["seconds"], 1e-9)
        return {
            **record,
            "backward_s": back_s,
            "backward_how": whole["how"],
            "flop_per_s": flop / record["seconds"],
            "backward_flop_per_s": 2.5 * flop / back_s,
        }

    results.case(
        "attention", measure, backend=backend, batch=batch, heads=heads, kv_heads=kv_heads,
        length=length, size=size, causal=causal, dtype="bf16", flop=flop,
    )  # fmt: skip
    free_memory()


RESNET = (
    # channels in, pixels, channels out, kernel, stride, groups
    (3, 224, 64, 7, 2, 1), (64, 56, 64, 1, 1, 1), (64, 56, 64, 3, 1, 1), (64, 56, 256, 1, 1, 1),
    (256, 56, 64, 1, 1, 1), (256, 56, 128, 1, 1, 1), (128, 56, 128, 3, 2, 1),
    (128, 28, 128, 3, 1, 1), (128, 28, 512, 1, 1, 1), (256, 14, 256, 3, 1, 1),
    (256, 14, 1024, 1, 1, 1), (1024, 14, 256, 1, 1, 1), (512, 7, 512, 3, 1, 1),
    (512, 7, 2048, 1, 1, 1), (2048, 7, 512, 1, 1, 1), (128, 56, 128, 3, 1, 32),
    (128, 28, 32, 3, 1, 1), (64, 388, 64, 3, 1, 1),
)  # fmt: skip


def convolutions(results: Results, clock: Clock) -> None:
    """Convolutions of ResNet-50 (and one of ResNeXt, DenseNet, U-Net), channels last."""
    shapes = ((8, 8, 8, 3, 1, 1),) if clock.quick else RESNET
    for benchmark in (False, True):
        for batch in (1,) if clock.quick else (16, 64, 256):
            if benchmark and batch not in (1, 64):
                continue  # cuDNN's own choice is tried at one batch size
            torch.backends.cudnn.benchmark = benchmark
            for shape in shapes:
                rows = max(1, batch // 16) if shape[1] > 300 else batch
                _conv_case(results, clock, benchmark, rows, *shape)
    torch.backends.cudnn.benchmark = False


def _conv_case(
    results: Results, clock: Clock, benchmark: bool, batch: int, inward: int, pixels: int,
    outward: int, kernel: int, stride: int, groups: int,
) -> None:  # fmt: skip
    side = (pixels + 2 * (kernel // 2) - kernel) // stride + 1
    flop = 2.0 * batch * outward * side * side * inward // groups * kernel * kernel

    def measure() -> dict[str, Any]:
        last = {"memory_format": torch.channels_last}
        x = tensor(clock, "bf16", batch, inward, pixels, pixels).to(**last)
        w = tensor(clock, "bf16", outward, inward // groups, kernel, kernel).to(**last)
        dy = tensor(clock, "bf16", batch, outward, side, side).to(**last)
        settings = ([stride] * 2, [kernel // 2] * 2, [1, 1], False, [0, 0], groups)

        def backward(mask: list[bool]) -> object:
            return torch.ops.aten.convolution_backward(dy, x, w, None, *settings, mask)

        forward = clock.burst(lambda: torch.ops.aten.convolution(x, w, None, *settings))
        record = {**forward, "flop_per_s": flop / forward["seconds"]}
        for name, mask in (("dgrad", [True, False, False]), ("wgrad", [False, True, False])):
            if name == "dgrad" and inward == 3:
                continue  # nobody wants the gradient of an image
            seconds = clock.burst(lambda mask=mask: backward(mask))["seconds"]
            record[f"{name}_s"] = seconds
            record[f"{name}_flop_per_s"] = flop / seconds
        return record

    with torch.no_grad():
        results.case(
            "conv", measure, batch=batch, inward=inward, pixels=pixels, outward=outward,
            kernel=kernel, stride=stride, groups=groups, dtype="bf16", flop=flop,
            cudnn_benchmark=benchmark,
        )  # fmt: skip
    free_memory()
