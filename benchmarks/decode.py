"""One token of a Llama-shaped decoder (random weights): our step against PyTorch, in one run.

    python benchmarks/decode.py                          Llama-3.2-1B, bf16, a cache of 512
    python benchmarks/decode.py --shape 8b --no-compile --json out.json
    python benchmarks/decode.py --warm                   compile the peers into PyTorch's caches

Times are replays of CUDA graphs with the cache full, in turns, medians. `weights` is what reading
all weights once (and the cache, where it is larger than 512 rows) takes at 4.8 TB/s, and a sum over
as many bytes measured here. Before anything is
timed every way is compared with the model in float64, over some tokens with the cache they make.
"""

import argparse
import copy
import json
import time

import torch

from partita.gpu.decode.plain import PlainDecoder
from partita.gpu.decode.spec import DecoderSpec, StepOptions
from partita.gpu.decode.step import DecodeStep
from partita.gpu.decode.tune import tuned
from partita.gpu.decode.weights import decoder_weights
from partita.gpu.graphs import capture
from partita.gpu.measure import compare_us
from partita.gpu.reference_output import relative

SHAPES = {
    "1b": (16, 2048, 32, 8, 64, 8192, 128256),
    "8b": (32, 4096, 32, 8, 128, 14336, 128256),
    "tiny": (2, 256, 8, 2, 64, 512, 1000),
}
BANDWIDTH = 4.8e12
TOKENS = 4


class Peer:
    """The plain model with static buffers, as one CUDA graph; `compile` goes before."""

    def __init__(self, model, keys, values, compile=None):
        self.model = model if compile is None else torch.compile(model, mode=compile, dynamic=False)
        self.keys, self.values = keys.clone(), values.clone()
        self.token = torch.zeros(keys.shape[1], dtype=torch.int64, device="cuda")
        self.position = torch.zeros(1, dtype=torch.int64, device="cuda")
        self.graph = capture(self.launch, warm_up=3)
        self.keys.copy_(keys)  # the first row was written meanwhile
        self.values.copy_(values)

    def launch(self):
        """One token."""
        self.logits = self.model(self.token, self.position, self.keys, self.values)

    def __call__(self, token, position):
        """The logits of a token."""
        self.token.copy_(token)
        self.position.fill_(position)
        self.graph.replay()
        return self.logits


def exact_logits(model, keys, values, tokens, first):
    """The logits of some tokens in float64."""
    wide = copy.deepcopy(model).double()
    keys, values = keys.double(), values.double()
    logits = []
    for number, token in enumerate(tokens):
        at = torch.tensor([first + number], device="cuda")
        logits.append(wide(token, at, keys, values).clone())
    return logits


def error_of(run, exact, tokens, first):
    """The largest relative error over the tokens."""
    return max(
        relative(run(token, first + number).clone().double(), exact[number])
        for number, token in enumerate(tokens)
    )


def sum_us(count):
    """What a plain sum over as many bytes takes: the memory, without any product."""
    some = torch.ones(count // 2, dtype=torch.bfloat16, device="cuda").view(torch.int32)
    return compare_us([capture(lambda: some.sum(dtype=torch.int32)).replay], rounds=3)[0]


def main(arguments):
    """Build, check, time, print."""
    began = time.perf_counter()
    spec = DecoderSpec(
        *SHAPES[arguments.shape], arguments.length, theta=500000.0, batch=arguments.batch
    )
    dtype = getattr(torch, arguments.dtype)
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = PlainDecoder(spec).to(dtype).eval()
        for weight in model.parameters():
            if weight.dim() == 2:
                torch.nn.init.normal_(weight, std=0.02)
        shape = (spec.layers, spec.batch, spec.kv_heads, spec.length, spec.head_size)
        keys, values = (torch.randn(shape, dtype=dtype) for _ in range(2))
    tokens = torch.randint(spec.vocab, (TOKENS, spec.batch), device="cuda")
    first = spec.length - TOKENS
    with torch.no_grad():
        if arguments.warm:
            Peer(model, keys, values, "default")
            return
        weights = decoder_weights(model, spec.length, spec.batch)
        options, _ = tuned(weights, time_s=arguments.tune) if arguments.tune else (StepOptions(), 0)
        step = DecodeStep(weights, options)
        step.keys.copy_(keys)
        step.values.copy_(values)
        exact = exact_logits(model, keys, values, tokens, first)
        runs = {"partita": step, "sequential CUDA graph": Peer(model, keys, values)}
        nbytes = sum(weight.numel() * weight.element_size() for weight in model.parameters())
        nbytes += 2 * keys.numel() * keys.element_size() if spec.batch * spec.length > 512 else 0
        result = {
            "shape": arguments.shape, "length": spec.length, "batch": spec.batch,
            "dtype": arguments.dtype,
            "device": torch.cuda.get_device_name(), "torch": torch.__version__, "bytes": nbytes,
            "weights_us": nbytes / BANDWIDTH * 1e6, "sum_us": sum_us(nbytes),
            "options": str(options),
        }  # fmt: skip
        errors = {label: error_of(run, exact, tokens, first) for label, run in runs.items()}
        show(runs, errors, result, arguments, began)
        if not arguments.no_compile:
            label = "torch.compile in a CUDA graph"
            runs[label] = Peer(model, keys, values, "default")
            errors[label] = error_of(runs[label], exact, tokens, first)
            show(runs, errors, result, arguments, began)
    if errors["partita"] > 2 * errors["sequential CUDA graph"]:
        raise SystemExit("partita is further from float64 than twice PyTorch")


def show(runs, errors, result, arguments, began):
    """Time all in turns, print, and write what is known so far."""
    times = compare_us([run.graph.replay for run in runs.values()])
    result = {
        **result, "times_us": dict(zip(runs, times, strict=True)), "errors": errors,
        "seconds": time.perf_counter() - began,
    }  # fmt: skip
    for label, time_us in result["times_us"].items():
        share = result["weights_us"] / time_us
        print(f"{label:32}{time_us:9.1f} us  {share:4.0%} of 4.8 TB/s  error {errors[label]:.1e}")
    print(f"weights once: {result['weights_us']:.1f} us, a plain sum {result['sum_us']:.1f} us")
    print(f"{result['options']}, after {result['seconds']:.0f} s", flush=True)
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(result, file, indent=1)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="1b")
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--tune", type=float, default=20.0, help="seconds")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--warm", action="store_true")
    parser.add_argument("--json")
    main(parser.parse_args())
