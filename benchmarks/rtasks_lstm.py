"""An LSTM stack at batch 1 on a GPU: one persistent kernel against cuDNN, alone and in a graph."""

import argparse
import statistics

import torch


def timed(action, repeats: int = 50, inner: int = 10) -> float:
    """Median milliseconds of one call."""
    for _ in range(5):
        action()
    torch.cuda.synchronize()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(inner):
            action()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / inner)
    return statistics.median(times)


def in_graph(action):
    """The action captured once, as a call that replays it."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            action()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        action()
    return graph.replay


def main() -> None:
    """Print a row per element type and tiling."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=10)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--shapes", type=int, default=12, help="how many to try, best guess first")
    chosen = parser.parse_args()
    print(torch.cuda.get_device_name(), torch.__version__, vars(chosen))
    for dtype in (torch.float32, torch.float16):
        compare(chosen, dtype)


def compare(chosen: argparse.Namespace, dtype: torch.dtype) -> None:
    """A line for PyTorch, then one per shape of the persistent kernel."""
    from partita.gpu.recurrent.layers import compile_module, spec_of
    from partita.gpu.recurrent.spec import shapes

    torch.manual_seed(0)
    model = torch.nn.LSTM(chosen.hidden, chosen.hidden, chosen.layers).cuda().to(dtype).eval()
    x = torch.randn(chosen.steps, 1, chosen.hidden, device="cuda", dtype=dtype)
    with torch.no_grad():
        exact = model.double()(x.double())[0].float()
        model = model.to(dtype)
        plain = timed(lambda: model(x), 20)
        graphed = timed(in_graph(lambda: model(x)))
        error = (model(x)[0].float() - exact).abs().max().item()
    print(f"{dtype}: nn.LSTM {plain:.3f} ms, in a graph {graphed:.3f} ms, error {error:.1e}")
    for shape in shapes(spec_of(model))[: chosen.shapes]:
        stack = compile_module(model, x.device, shape)
        try:
            error = (stack(x)[0].float() - exact).abs().max().item()
            ours = timed(in_graph(lambda stack=stack: stack(x)))
        except Exception as failure:
            print(f"  {shape}: {type(failure).__name__} {str(failure)[:150]}", flush=True)
            continue
        about = f"{graphed / ours:.2f}x, error {error:.1e}, {stack.about()}"
        print(f"  {shape}: {ours:.3f} ms, {about}", flush=True)


if __name__ == "__main__":
    main()
