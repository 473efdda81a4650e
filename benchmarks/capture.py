"""How long does capturing take, and do captured models count what the zoo's graphs count?

    python benchmarks/capture.py [MODEL ...] [--batch N]

Each model of the zoo becomes a PyTorch module on the meta device (its reference module), which is
captured. Seconds are CPU time of the capture alone; memory is the process's peak so far, so the
models are taken from small to large. FLOPs are compared forward and for a training step.
"""

import argparse
import resource
import time

from partita.capture import capture
from partita.capture.reference_module import example_inputs, reference_module
from partita.graph import Graph, training_graph
from partita.graph.work import flops
from partita.zoo import build

MODELS = ("resnet50", "gpt2", "inception_v3", "nasnet_large", "t5-3b", "gpt2-xl", "llama-7b")


def total(graph: Graph) -> float:
    """Operations of a whole graph."""
    return sum(flops(graph.call(op)) for op in graph.ops)


def main() -> None:
    """Print one row per model."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("models", nargs="*", default=MODELS)
    parser.add_argument("--batch", type=int, default=4)
    options = parser.parse_args()
    print("| model | ops | captured ops | s | peak MB | parameters | FLOPs | training FLOPs |")
    print("|---|---|---|---|---|---|---|---|")
    for name in options.models:
        graph = build(name, batch=options.batch)
        module, inputs = (
            reference_module(graph, device="meta"),
            example_inputs(graph, device="meta"),
        )
        start = time.process_time()
        this_graph = capture(module, inputs)
        seconds = time.process_time() - start
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        same = "equal" if this_graph.num_parameters == graph.num_parameters else "differ"
        forward = total(this_graph) / total(graph) - 1
        trained = total(training_graph(this_graph)) / total(training_graph(graph)) - 1
        print(
            f"| {name} | {len(graph.ops)} | {len(this_graph.ops)} | {seconds:.1f} | {peak:.0f} | "
            f"{same} "
            f"| {forward:+.1e} | {trained:+.1e} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
