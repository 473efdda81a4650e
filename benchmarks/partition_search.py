"""How good and how fast are the partition searches, against recorded planners and their bound?

    python benchmarks/partition_search.py [FOLDER] [--method auto] [--time-limit 10] [--cpu]
                                          [--straight] [--slower 1,10,100] [--json]

FOLDER holds partition problems as JSON and `recorded.json`, whose keys ("gpt2 devices=4") say what
is solved and whose least objective is the one to meet. Recorded objectives are rounded to
0.01 ms at worst, so "met" allows half of that. Without FOLDER, and after its instances, problems
made here are solved: decoders and encoder-decoders of about 2,000 nodes, and a ResNet-50 whose
communication takes longer than its work. One run each, one seed; the code is compiled before.
With --slower the models of FOLDER are solved for 4 and 8 devices over links that are so many times
slower than 12 GB/s; nothing is recorded for these, so the methods of FTPipe as they are here
(`--method mpipe`, `pipedream`, `metis`, `acyclic`) are what to compare with.
With --straight every device has one stage and communication is free: the compute optimum, which
the research prototypes proved in 0.1 to 60 s. With --cpu the limit counts seconds of CPU, for
machines that are shared.
"""

import argparse
import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from partita.problems.partition import (
    PartitionEdge,
    PartitionNode,
    PartitionProblem,
    evaluate,
    read,
)
from partita.search import base
from partita.search.base import Stop
from partita.search.partition import SEARCHES

ROUNDED_MS = 0.005


@dataclass
class Builder:
    """A model in the making; every node's backward pass takes twice its forward pass."""

    nodes: list[PartitionNode] = field(default_factory=list)
    edges: list[PartitionEdge] = field(default_factory=list)

    def add(self, ms: float, *inputs: tuple[int, int]) -> int:
        """A node with its forward time and (producer, bytes) pairs."""
        id = len(self.nodes)
        self.nodes.append(PartitionNode(id, "OP", ms, 2 * ms))
        self.edges += [PartitionEdge(src, id, size, size) for src, size in inputs]
        return id

    def problem(self, num_devices: int) -> PartitionProblem:
        """The model so far, for that many devices."""
        return PartitionProblem(tuple(self.nodes), tuple(self.edges), num_devices)


@dataclass(frozen=True)
class Transformer:
    """Layers of a transformer in single ops, timed by a crude roofline."""

    build: Builder
    hidden: int
    seq: int
    heads: int
    batch: int

    @property
    def act(self) -> int:
        """Bytes of one activation."""
        return 4 * self.batch * self.seq * self.hidden

    @property
    def scores(self) -> int:
        """Bytes of the attention scores."""
        return 4 * self.batch * self.heads * self.seq**2

    def linear(self, x: int, wide_in: int = 1, wide_out: int = 1) -> int:
        """A matmul between widths given in units of `hidden`."""
        flops = 2 * self.batch * self.seq * self.hidden**2 * wide_in * wide_out
        return self.build.add(
            flops / 10e9 + (wide_in + wide_out) * self.act / 6e8, (x, wide_in * self.act)
        )

    def attention(self, x: int, memory: int | None, bias: int) -> int:
        """Self-attention, or attention to `memory`, with its residual."""
        add, act, scores = self.build.add, self.act, self.scores
        bias_size = 4 * self.seq**2 if self.batch == 1 else scores // self.batch
        normed = add(act / 3e8, (x, act))
        source = normed if memory is None else memory
        heads = []
        for each in (normed, source, source):
            split = add(0.0, (self.linear(each), act))
            heads.append(add(act / 3e8, (split, act)))
        matmul_ms = 2 * self.batch * self.seq**2 * self.hidden / 10e9
        score = add(matmul_ms, (heads[0], act), (heads[1], act))
        score = add(scores / 3e8, (score, scores), (bias, bias_size))
        for _ in range(3):
            score = add(scores / 3e8, (score, scores))
        mixed = add(matmul_ms, (score, scores), (heads[2], act))
        merged = add(0.0, (add(act / 3e8, (mixed, act)), act))
        dropped = add(act / 3e8, (self.linear(merged), act))
        return add(act / 2e8, (x, act), (dropped, act))

    def feed_forward(self, x: int, elementwise: int = 2) -> int:
        """Two matmuls with an activation of several ops between, and the residual."""
        add, act = self.build.add, self.act
        wide = first = self.linear(add(act / 3e8, (x, act)), 1, 4)
        for index in range(elementwise):
            skip = ((first, 4 * act),) if index % 4 == 3 else ()
            wide = add(act / 75e6, (wide, 4 * act), *skip)
        dropped = add(act / 3e8, (self.linear(wide, 4, 1), act))
        return add(act / 2e8, (x, act), (dropped, act))


def decoder(num_devices: int) -> PartitionProblem:
    """48 layers, as GPT-2 XL."""
    build = Builder()
    model = Transformer(build, hidden=1600, seq=1024, heads=25, batch=1)
    bias, x = build.add(0.01), build.add(0.05)
    for _ in range(48):
        x = model.feed_forward(model.attention(x, None, bias), elementwise=8)
    build.add(2 * 1024 * 1600 * 50257 / 10e9, (x, model.act))
    return build.problem(num_devices)


def encoder_decoder(num_devices: int) -> PartitionProblem:
    """24 + 24 layers, as a large T5."""
    build = Builder()
    model = Transformer(build, hidden=1024, seq=512, heads=16, batch=8)
    bias, x = build.add(0.1), build.add(0.2)
    for _ in range(24):
        x = model.feed_forward(model.attention(x, None, bias))
    biases, y = (build.add(0.1), build.add(0.1)), build.add(0.2)
    for _ in range(24):
        y = model.feed_forward(model.attention(model.attention(y, None, biases[0]), x, biases[1]))
    build.add(60.0, (y, model.act))
    return build.problem(num_devices)


def big_resnet50(num_devices: int, batch: int = 64) -> PartitionProblem:
    """ResNet-50 on fast devices: its early activations take longer to send than to compute."""
    build = Builder()

    def size(channels: int, pixels: int) -> int:
        return 4 * batch * channels * pixels**2

    def conv(x: int, wide: tuple[int, int], kernel: int, pixels: tuple[int, int]) -> int:
        flops = 2 * batch * wide[0] * wide[1] * (kernel * pixels[1]) ** 2
        read, written = size(wide[0], pixels[0]), size(wide[1], pixels[1])
        out = build.add(flops / 12e9 + (read + written) / 9e8, (x, read))
        return build.add(written / 4.5e8, (out, written))

    def relu(x: int, channels: int, pixels: int) -> int:
        return build.add(size(channels, pixels) / 4.5e8, (x, size(channels, pixels)))

    x = relu(relu(build.add(1.3), 64, 112), 64, 112)
    width, pixels = 64, 56
    for stage, (repeats, inner) in enumerate(((3, 64), (4, 128), (6, 256), (3, 512))):
        for repeat in range(repeats):
            after = pixels // 2 if stage and repeat == 0 else pixels
            y = relu(conv(x, (width, inner), 1, (pixels, pixels)), inner, pixels)
            y = relu(conv(y, (inner, inner), 3, (pixels, after)), inner, after)
            y = conv(y, (inner, 4 * inner), 1, (after, after))
            wide = 4 * inner
            skip = conv(x, (width, wide), 1, (pixels, after)) if repeat == 0 else x
            out = size(wide, after)
            x = relu(build.add(out / 3e8, (y, out), (skip, out)), wide, after)
            width, pixels = wide, after
    build.add(0.1, (build.add(0.1, (x, size(2048, 7))), size(2048, 1)))
    return build.problem(num_devices)


def instances(folder: Path | None) -> Iterator[tuple[str, PartitionProblem, float | None]]:
    """Name, problem and the best recorded objective, if any."""
    if folder is not None:
        for case, methods in sorted(json.loads((folder / "recorded.json").read_bytes()).items()):
            model, _, devices = case.partition(" devices=")
            known = [each["objective_ms"] for each in methods.values() if "objective_ms" in each]
            problem = read(folder / f"{model}.json", num_devices=int(devices))
            yield model, problem, min(known, default=None)
    yield from made()


def slower(
    folder: Path, factors: list[float]
) -> Iterator[tuple[str, PartitionProblem, float | None]]:
    """The models of a folder over slower links, and a ResNet-50 whose links are slow as it is."""
    for path in sorted(folder.glob("*.json")):
        for count in (4, 8) if path.stem != "recorded" else ():
            for factor in factors:
                problem = read(path, num_devices=count, bandwidth=12e9 / factor)
                yield f"{path.stem} /{factor:g}", problem, None
    yield "big resnet50", big_resnet50(4), None
    yield "big resnet50", big_resnet50(8), None


def made() -> Iterator[tuple[str, PartitionProblem, float | None]]:
    """The problems that are made here."""
    yield "decoder", decoder(8), None
    yield "encoder-decoder", encoder_decoder(8), None
    yield "big resnet50", big_resnet50(4), None
    yield "big resnet50", big_resnet50(8), None


def main() -> None:
    """Solve every instance once and print a row for each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--method", default="auto", choices=list(SEARCHES))
    parser.add_argument("--time-limit", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="only instances whose name begins like this")
    parser.add_argument("--cpu", action="store_true", help="count CPU seconds")
    parser.add_argument("--slower", default="", help="factors on the links, with commas")
    parser.add_argument("--straight", action="store_true", help="compute of straight pipelines")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.cpu:
        base.work_clock = time.process_time  # the searches' clock
    search = SEARCHES[args.method]
    nodes = tuple(PartitionNode(id, "OP", 1.0 + id % 7, 0.0) for id in range(60))
    edges = tuple(PartitionEdge(id, id + 1, 10**7, 0) for id in range(59))
    for straight in (False, True):  # compiles
        search(PartitionProblem(nodes, edges, 3, straight=straight), Stop(evaluations=400_000))
    rows = []
    factors = [float(each) for each in args.slower.split(",") if each]
    cases = slower(args.folder, factors) if factors else instances(args.folder)
    for name, problem, recorded in cases:
        if not name.startswith(args.only):
            continue
        if args.straight:
            problem = replace(problem, straight=True, bandwidth_bytes_per_s=1e99)
            recorded = None
        begun = time.process_time() if args.cpu else time.perf_counter()
        result = search(problem, Stop(time_s=args.time_limit), args.seed)
        seconds = (time.process_time() if args.cpu else time.perf_counter()) - begun
        objective = result.objective
        assert result.solution is not None, "every problem has an answer"
        assert objective is not None
        assert math.isclose(evaluate(problem, result.solution), objective)
        met = None if recorded is None else objective <= recorded + ROUNDED_MS
        row = {
            "instance": name,
            "nodes": len(problem.placed),
            "devices": problem.num_devices,
            "objective_ms": objective,
            "recorded_ms": recorded,
            "met": met,
            "bound_ms": result.lower_bound,
            "gap": result.gap,
            "stages": len(result.solution.device_of),
            "status": str(result.status),
            "evaluations": result.evaluations,
            "seconds": seconds,
        }
        rows.append(row)
        if not args.json:
            known = "-" if recorded is None else f"{recorded:.4f}"
            verdict = {None: "", True: "met", False: "MISSED"}[met]
            print(
                f"{name:16} nodes {row['nodes']:5} devices {problem.num_devices:2}  "
                f"{objective:10.4f} ms  recorded {known:>9} {verdict:6} "
                f"bound {result.lower_bound:9.4f}  gap {result.gap:7.3%}  "
                f"stages {row['stages']:4}  {seconds:5.1f} s  {result.status}",
                flush=True,
            )
    if args.json:
        print(json.dumps({"method": args.method, "seed": args.seed, "rows": rows}))


if __name__ == "__main__":
    main()
