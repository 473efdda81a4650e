"""Predicted against measured time of single ops on the GPU of this machine.

    python benchmarks/roofline_gpu.py [--kind H200] [--json]

Each op is captured in a CUDA graph that runs it several times on the same buffers (so that the
cache holds what it can, as after a neighbouring op) and timed by events; the median of the replays
counts. The prediction is `partita.costs.roofline.op_cost` for the preset of that GPU.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812

from partita.cluster import resolve
from partita.costs.roofline import op_cost
from partita.graph import Graph, GraphBuilder

DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
FIELDS = ("op", "dtype", "measured_s", "predicted_s", "bound")
REPEATS = 20  # ops in one graph
REPLAYS = 30

Case = tuple[str, Graph, Callable[[], object]]


def cases(dtype: str) -> list[Case]:
    """Ops of the sizes that transformers and CNNs have."""
    cases: list[Case] = []
    made = DTYPES[dtype]

    def tensor(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", dtype=made) * 0.1

    for m, n, k in (
        (8192, 8192, 8192), (4096, 4096, 4096), (16384, 1024, 4096), (2048, 2048, 2048),
        (8192, 768, 768), (8192, 3072, 768), (1024, 1024, 1024), (512, 4096, 1024),
        (128, 4096, 4096), (32, 4096, 4096), (256, 256, 4096), (8192, 50257, 768),
        (8192, 50258, 768), (8192, 50260, 768), (8192, 50264, 768), (8192, 1001, 2048),
    ):  # fmt: skip
        g = GraphBuilder("linear", dtype)
        graph = g.finish(g.linear(g.input("x", (m, k)), n, bias=False))
        x, w = tensor(m, k), tensor(n, k)
        cases.append((f"linear {m}x{n}x{k}", graph, lambda x=x, w=w: F.linear(x, w)))
    for b, c, size, n, kernel, stride in (
        (32, 64, 56, 64, 3, 1), (32, 256, 14, 256, 3, 1), (32, 256, 56, 64, 1, 1),
        (32, 3, 224, 64, 7, 2), (1, 64, 56, 64, 3, 1), (1, 512, 7, 512, 3, 1),
        (128, 512, 7, 512, 3, 1),
    ):  # fmt: skip
        g = GraphBuilder("conv", dtype)
        pad = kernel // 2
        graph = g.finish(
            g.conv(
                g.input("x", (b, c, size, size)), n, kernel, stride=stride, padding=pad, bias=False
            )
        )
        x = tensor(b, c, size, size).to(memory_format=torch.channels_last)
        w = tensor(n, c, kernel, kernel).to(memory_format=torch.channels_last)
        cases.append(
            (
                f"conv b{b} {c}->{n} {size}px k{kernel}s{stride}",
                graph,
                lambda x=x, w=w, s=stride, p=pad: F.conv2d(x, w, stride=s, padding=p),
            )
        )
    if dtype != "f32":
        for b, h, s, d in (
            (8, 16, 1024, 64),
            (2, 32, 4096, 128),
            (32, 12, 512, 64),
            (1, 16, 2048, 64),
        ):
            g = GraphBuilder("attention", dtype)
            q, k, v = (g.input(name, (b, h, s, d)) for name in "qkv")
            graph = g.finish(g.attention(q, k, v, causal=True))
            data = [tensor(b, h, s, d) for _ in range(3)]
            cases.append(
                (
                    f"attention b{b} h{h} s{s} d{d} causal",
                    graph,
                    lambda t=data: F.scaled_dot_product_attention(*t, is_causal=True),
                )
            )
    for rows, width in ((8192, 4096), (65536, 1024), (512, 768)):
        x, y = tensor(rows, width), tensor(rows, width)
        weight, bias = tensor(width), tensor(width)
        g = GraphBuilder("norm", dtype)
        graph = g.finish(g.norm(g.input("x", (rows, width))))
        cases.append(
            (
                f"layer_norm {rows}x{width}",
                graph,
                lambda x=x, w=weight, b=bias: F.layer_norm(x, w.shape, w, b),
            )
        )
        g = GraphBuilder("gelu", dtype)
        graph = g.finish(g.elementwise("gelu", g.input("x", (rows, width))))
        cases.append((f"gelu {rows}x{width}", graph, lambda x=x: F.gelu(x)))
        g = GraphBuilder("add", dtype)
        graph = g.finish(g.add(g.input("x", (rows, width)), g.input("y", (rows, width))))
        cases.append((f"add {rows}x{width}", graph, lambda x=x, y=y: x + y))
        g = GraphBuilder("softmax", dtype)
        graph = g.finish(g.softmax(g.input("x", (rows, width))))
        cases.append((f"softmax {rows}x{width}", graph, lambda x=x: torch.softmax(x, -1)))
    return cases


def measure(run: Callable[[], object]) -> float:
    """Median seconds of one execution inside a CUDA graph."""
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(REPEATS):
            run()
    times = []
    for _ in range(REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / REPEATS)
    return statistics.median(times)


def main() -> None:
    """Measure all cases and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kind", default="H200", help="the preset to predict with")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("no GPU here: nothing to measure")
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.benchmark = True
    kind = resolve(f"1x{args.kind}").kind_of(0)
    rows = []
    with torch.inference_mode():
        for dtype in DTYPES:
            for name, graph, run in cases(dtype):
                cost = op_cost(graph, graph.ops[0], kind)
                rows.append((name, dtype, measure(run), cost.seconds, cost.bound))
                torch.cuda.empty_cache()
    errors = [abs(predicted / measured - 1) for _, _, measured, predicted, _ in rows]
    result = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "median_error": statistics.median(errors),
        "mean_error": statistics.fmean(errors),
        "rows": [dict(zip(FIELDS, row, strict=True)) for row in rows],
    }
    if args.json:
        print(json.dumps(result))
        return
    for name, dtype, measured, predicted, bound in rows:
        print(f"{name:38} {dtype:5} {measured * 1e6:10.1f} us  predicted {predicted * 1e6:10.1f} us"
              f"  x{predicted / measured:5.2f}  {bound}")  # fmt: skip
    print(f"{result['gpu']}, torch {result['torch']}: median error {result['median_error']:.1%}, "
          f"mean {result['mean_error']:.1%}")  # fmt: skip


if __name__ == "__main__":
    main()
