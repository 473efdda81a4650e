"""Small models at batch 1 on a GPU: fused regions against CUDA graphs and torch.compile.

Every row runs in a process of its own with a time limit: a kernel that hangs costs that row, not
the run. The sequential graph is PyTorch's operators with norms folded, captured once. torch.compile
is timed in mode "reduce-overhead" as it is called, and in its default mode captured in a graph of
our own; the better of all that counts. Medians in turns; errors are relative to float64.
"""

import argparse
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as nnf

MLP_LAYERS = 6
DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
Size = tuple[int, ...]
Row = tuple[nn.Module, tuple[Size, ...]]  # a model and the sizes of its inputs


def mlp(hidden: int) -> Row:
    """Six layers with ReLU."""
    layers = [each for _ in range(MLP_LAYERS) for each in (nn.Linear(hidden, hidden), nn.ReLU())]
    return nn.Sequential(*layers), ((1, hidden),)


class Separable(nn.Module):
    """ReLU, depthwise, pointwise, norm; twice, as NASNet has it."""

    def __init__(self, width: int, kernel: int) -> None:
        super().__init__()
        parts: list[nn.Module] = []
        for _ in range(2):
            parts += [
                nn.ReLU(),
                nn.Conv2d(width, width, kernel, padding=kernel // 2, groups=width, bias=False),
                nn.Conv2d(width, width, 1, bias=False),
                nn.BatchNorm2d(width),
            ]
        self.parts = nn.Sequential(*parts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One branch."""
        return self.parts(x)


class Squeeze(nn.Module):
    """ReLU, 1x1 convolution, norm: an input brought to the width of the cell."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The narrow image."""
        return self.norm(self.conv(nnf.relu(x)))


class NasnetCell(nn.Module):
    """The normal cell of NASNet-A: five pairs over this input and the one before."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.here, self.before = Squeeze(6 * width, width), Squeeze(6 * width, width)
        kernels = (5, 3, 5, 3, 3)
        self.branches = nn.ModuleList(Separable(width, kernel) for kernel in kernels)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Six images of the cell's width, side by side."""
        h, p = self.here(x), self.before(y)
        b = self.branches
        pooled = nnf.avg_pool2d(p, 3, 1, 1, count_include_pad=False)
        pairs = (
            p,
            b[0](h) + b[1](p),
            b[2](p) + b[3](p),
            nnf.avg_pool2d(h, 3, 1, 1, count_include_pad=False) + p,
            pooled + pooled,
            b[4](h) + h,
        )
        return torch.cat(pairs, 1)


def cell(width: int, size: int) -> Row:
    """A cell for images of `size` pixels a side."""
    return NasnetCell(width), ((1, 6 * width, size, size),) * 2


class Residual(nn.Module):
    """Two basic blocks of a ResNet."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.convs = nn.ModuleList(
            nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(4)
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The last image."""
        for first in (0, 2):
            y = nnf.relu(self.norms[first](self.convs[first](x)))
            x = nnf.relu(self.norms[first + 1](self.convs[first + 1](y)) + x)
        return x


def residual(width: int, size: int) -> Row:
    """Blocks for images of `size` pixels a side."""
    return Residual(width), ((1, width, size, size),)


class Decoder(nn.Module):
    """The products of a transformer layer for one token, without its attention."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.one, self.two = nn.LayerNorm(width), nn.LayerNorm(width)
        self.value, self.mix = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The token, changed."""
        x = x + self.mix(self.value(self.one(x)))
        return x + self.down(nnf.gelu(self.up(self.two(x))))


class Layers(nn.Module):
    """Recurrent layers between two products, over a sequence of 100 steps."""

    def __init__(self, kind: str, hidden: int, layers: int, both: bool = False) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(64, hidden), nn.Linear((1 + both) * hidden, 64)
        self.layers = getattr(nn, kind)(hidden, hidden, layers, bidirectional=both)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The sequence, changed."""
        return self.two(self.layers(torch.relu(self.one(x)))[0])


class Translate(nn.Module):
    """An encoder, and a decoder that is given the tokens it should have chosen."""

    def __init__(self, hidden: int, vocabulary: int) -> None:
        super().__init__()
        self.read, self.write = nn.LSTM(hidden, hidden, 4), nn.LSTM(hidden, hidden, 4)
        self.head = nn.Linear(hidden, vocabulary)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Logits for every token of the second sequence."""
        return self.head(self.write(y, self.read(x)[1])[0])


class Mixed(nn.Module):
    """A small layer that cuDNN keeps on one unit, and layers that it does not."""

    def __init__(self) -> None:
        super().__init__()
        self.small, self.mix, self.large = nn.LSTM(64, 64), nn.Linear(64, 256), nn.LSTM(256, 256, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The sequence, changed."""
        return self.large(self.mix(self.small(x)[0]))[0]


def layers(kind: str, hidden: int, count: int, both: bool = False) -> Row:
    """Layers for a sequence of 100 steps."""
    return Layers(kind, hidden, count, both), ((100, 1, 64),)


def translate(hidden: int) -> Row:
    """100 tokens read, 30 written out of 1,000."""
    return Translate(hidden, 1000), ((100, 1, hidden), (30, 1, hidden))


def speech(hidden: int) -> Row:
    """Deep Speech 2: convolutions, five layers in two directions, a head."""
    from rtasks_recurrent import Speech

    return Speech(hidden), ((1, 1, 161, 400),)


ROWS: dict[str, Callable[[], Row]] = {
    **{f"mlp-{size}": (lambda size=size: mlp(size)) for size in (512, 1024, 2048, 4096)},
    "nasnet-cifar-32": lambda: cell(32, 32),  # NASNet-A (6 @ 768): the first cells, 32 x 32
    "nasnet-cifar-8": lambda: cell(128, 8),  # its last cells, 8 x 8
    "nasnet-large-11": lambda: cell(672, 11),  # NASNet-A-large (331 x 331): its last cells
    "resnet-14": lambda: residual(256, 14),  # the third stage of ResNet-18
    "decoder-768": lambda: (Decoder(768), ((1, 768),)),
    "lstm-4x256": lambda: layers("LSTM", 256, 4),
    "lstm-both-2x256": lambda: layers("LSTM", 256, 2, both=True),
    "gru-3x200": lambda: layers("GRU", 200, 3),
    "rnn-2x512": lambda: layers("RNN", 512, 2),
    "lstm-64-and-4x256": lambda: (Mixed(), ((100, 1, 64),)),
    "translate-128": lambda: translate(128),
    "speech-512": lambda: speech(512),
}
ZOO = ("seq2seq", "deepspeech2")  # unrolled cells; convolutions and bidirectional layers
PAIRS = {
    "mlp-1024 + mlp-1024": ("mlp-1024", "mlp-1024"),
    "mlp-512 + nasnet-cifar-8": ("mlp-512", "nasnet-cifar-8"),
}


def made(name: str, dtype: torch.dtype, seed: int) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """A model of a row on the GPU, with what it is called with."""
    torch.manual_seed(seed)
    if name in ZOO:
        from partita.run.load import load_module

        word = next(word for word, each in DTYPES.items() if each == dtype)
        loaded = load_module(name, batch=1, dtype=word, training=False)
        return loaded.module.cuda().eval(), tuple(each.cuda() for each in loaded.args)
    module, sizes = ROWS[name]()
    for part in module.modules():
        if isinstance(part, nn.BatchNorm2d):
            nn.init.uniform_(part.running_var, 0.5, 2.0)
    inputs = tuple(torch.randn(size, device="cuda", dtype=dtype) for size in sizes)
    module = module.cuda().to(dtype).eval()
    if len(sizes[0]) == 4:
        module = module.to(memory_format=torch.channels_last)
        inputs = tuple(each.contiguous(memory_format=torch.channels_last) for each in inputs)
    return module, inputs


def row(chosen: argparse.Namespace) -> dict[str, Any]:
    """One row, measured here."""
    import partita

    names = PAIRS.get(chosen.row, (chosen.row,))
    dtype = DTYPES[chosen.dtype]
    pairs = [made(name, dtype, seed) for seed, name in enumerate(names)]
    modules, examples = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    began = time.perf_counter()
    fused = partita.rtasks(modules, examples, per_unit=chosen.per_unit, num_warps=chosen.warps)
    seconds = time.perf_counter() - began
    report = fused.report()
    row = report.to_json()
    row["seconds"] = seconds
    if len(pairs) == 1 and not chosen.no_compile:
        row["compiled_us"], row["compiled_error"] = compiled(*pairs[0], fused)
    return row


def compiled(module: nn.Module, inputs: Any, fused: Any) -> tuple[dict[str, float], float]:
    """torch.compile in two ways, each in turns with the fused model; without what does not run."""
    from partita.gpu.graphs import capture
    from partita.gpu.measure import compare_us
    from partita.gpu.reference_output import as_tuple, reference_output

    reference = reference_output(module, inputs)
    compiled, error = {}, math.nan
    with torch.no_grad():
        try:
            low = torch.compile(module, mode="reduce-overhead")
            for _ in range(5):
                error = reference.error(as_tuple(low(*inputs)))
            times = compare_us([fused.replay, lambda: low(*inputs)])
            compiled["reduce-overhead"] = times[1]
            plain = torch.compile(module)
            held = [plain(*inputs) for _ in range(3)]
            graph = capture(lambda: held.append(plain(*inputs)), warm_up=3)
            times = compare_us([fused.replay, graph.replay])
            compiled["in a graph"] = times[1]
        except RuntimeError as failure:
            print(f"torch.compile: {str(failure)[:200]}", file=sys.stderr)
    return compiled, error


def launch(name: str, dtype: str, chosen: argparse.Namespace) -> None:
    """A row in a process of its own, printed."""
    words = [sys.executable, __file__, "--row", name, "--dtype", dtype]
    words += ["--per-unit", str(chosen.per_unit), "--warps", str(chosen.warps)]
    words += ["--no-compile"] if chosen.no_compile else []
    label = f"{name:26} {dtype:4}"
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=chosen.limit)
    except subprocess.TimeoutExpired:
        print(
            f"{label} no answer within {chosen.limit:.0f} s: a hang or too slow; ended", flush=True
        )
        return
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["nothing said"])[-1]
        print(f"{label} failed: {last[:300]}", flush=True)
        return
    data = json.loads(done.stdout.strip().splitlines()[-1])
    print(f"{label} {line(data)}", flush=True)
    if chosen.verbose:
        for region in data["regions"]:
            print(f"    {json.dumps(region)}", flush=True)
        for text in (*data["notes"], *(str(each) for each in data["fallbacks"])):
            print(f"    {text}", flush=True)


def line(row: dict[str, Any]) -> str:
    """What a row says."""
    fused, sequential = row["fused_us"], row["sequential_us"]
    planned = sum(region["planned_us"] for region in row["regions"])
    words = [f"fused {fused:7.1f} us (planned {planned:.1f}), graph {sequential:7.1f} us"]
    best = sequential
    for way, taken in row.get("compiled_us", {}).items():
        words.append(f"compiled, {way} {taken:.1f} us (error {row['compiled_error']:.1e})")
        best = min(best, taken)
    words.append(f"x{best / fused:.2f} the better")
    if row["alone_us"]:
        total = sum(row["alone_us"])
        words.append(f"one after the other {total:.1f} us, x{total / fused:.2f}")
    kept = sum(region["kept"] for region in row["regions"])
    words.append(
        f"{kept}/{len(row['regions'])} regions, {len(row['fallbacks'])} fallbacks, "
        f"{row['kept']} kept; error {row['error']:.1e} (model {row['model_error']:.1e}); "
        f"planned in {row['plan_s']:.1f} s, compiled in {row['compile_s']:.1f} s"
    )
    return ", ".join(words)


def main() -> None:
    """Print a row per model and element type."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--row", help="only this one, here, as JSON")
    parser.add_argument("--rows", default="", help="only rows whose name has one of these, a,b,c")
    parser.add_argument("--dtype", default="", help="f32, f16 or bf16; f32 and f16 if not given")
    parser.add_argument("--limit", type=float, default=180.0, help="seconds per row")
    parser.add_argument("--per-unit", type=int, default=2, help="programs per execution unit")
    parser.add_argument("--warps", type=int, default=4, help="warps per program")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    parser.add_argument("--verbose", action="store_true", help="regions, fallbacks and notes too")
    chosen = parser.parse_args()
    if chosen.row:
        print(json.dumps(row(chosen)))
        return
    print(torch.cuda.get_device_name(), torch.__version__, vars(chosen), flush=True)
    wanted = chosen.rows.split(",")
    for name in (*ROWS, *PAIRS, *ZOO):
        if any(word in name for word in wanted):
            for dtype in [chosen.dtype] if chosen.dtype else ["f32", "f16"]:
                launch(name, dtype, chosen)


if __name__ == "__main__":
    main()
