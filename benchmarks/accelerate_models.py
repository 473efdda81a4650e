"""`partita.accelerate` of models that nobody here wrote (random weights, f16), beside its peers.

    python benchmarks/accelerate_models.py --seconds 60 --lines out.jsonl
    python benchmarks/accelerate_models.py efficientnet_b0 gpt2 --batch 8 --lines out.jsonl

Every model in a process of its own, which may not take the others with it; a line of JSON for
each. Peers are the sequential CUDA graph and torch.compile (mode reduce-overhead), timed in the
same run as whole calls with the example's tensors, in turns. Models that stand in the lines already
are left out. The last line says how much faster than the best peer, as a geometric mean.
"""

import argparse
import json
import math
import subprocess
import sys
import time
from pathlib import Path

TIMM = (
    "efficientnet_b0", "vit_tiny_patch16_224", "mobilenetv3_small_100", "convnext_atto",
    "densenet121", "resnet50", "regnety_008", "inception_v3", "ghostnet_100", "mixnet_s",
    "hrnet_w18_small", "repvgg_a0", "dla34", "rexnet_100", "tf_efficientnetv2_b0", "mobilevit_s",
    "res2net50_14w_8s", "dpn68", "selecsls42b", "skresnet18", "poolformer_s12",
    "swin_tiny_patch4_window7_224",
)  # fmt: skip
TRANSFORMERS = {
    "gpt2": ("GPT2Config", {"n_layer": 6}, 64),
    "bert": ("BertConfig", {"num_hidden_layers": 6}, 128),
    "t5_encoder": ("T5Config", {}, 128),
    "llama": ("LlamaConfig", {"num_hidden_layers": 4, "hidden_size": 1024, "vocab_size": 32000,
                              "num_attention_heads": 16, "intermediate_size": 2816}, 64),
    "distilbert": ("DistilBertConfig", {}, 128),
    "albert": ("AlbertConfig", {"hidden_size": 768, "num_attention_heads": 12,
                                "intermediate_size": 3072}, 64),
    "opt": ("OPTConfig", {"num_hidden_layers": 6}, 64),
    "electra": ("ElectraConfig", {}, 128),
}  # fmt: skip
NAMES = (*TIMM[:1], "gpt2", *TIMM[1:3], "bert", *TIMM[3:], *list(TRANSFORMERS)[2:])


def made(name, batch):
    """A model in f16 on the GPU and its inputs."""
    import torch

    torch.manual_seed(0)
    if name in TRANSFORMERS:
        import transformers

        kind, sizes, length = TRANSFORMERS[name]
        config = getattr(transformers, kind)(**sizes, use_cache=False)
        if name == "t5_encoder":
            inner = transformers.T5EncoderModel(config)
        else:
            inner = transformers.AutoModel.from_config(config)

        class Hidden(torch.nn.Module):
            """The last hidden state alone."""

            def __init__(self):
                super().__init__()
                self.inner = inner

            def forward(self, tokens):
                """Of some tokens."""
                return self.inner(input_ids=tokens)[0]

        vocab = config.vocab_size
        return Hidden().cuda().half().eval(), (torch.randint(vocab, (batch, length)).cuda(),)
    import timm

    module = timm.create_model(name, pretrained=False)
    size = module.default_cfg["input_size"]
    return module.cuda().half().eval(), (torch.randn(batch, *size).cuda().half(),)


def one(name, arguments):
    """Accelerate one model here, call it with other inputs, print a line."""
    import torch

    import partita

    module, inputs = made(name, arguments.batch)
    began = time.perf_counter()
    fast = partita.accelerate(module, inputs, time_s=arguments.seconds)
    seconds = time.perf_counter() - began
    other = tuple(
        each.flip(-1) if each.is_floating_point() else each.roll(1, -1) for each in inputs
    )
    with torch.no_grad():
        wanted, mine = module(*other).double(), fast(*other).double()
        exact = module.double()(*(e.double() if e.is_floating_point() else e for e in other))
    own = float((wanted - exact).norm() / exact.norm())
    off = float((mine - exact).norm() / exact.norm())
    report = fast.report()
    row = {
        "name": name, "batch": arguments.batch, "kept": report.kept, "form": report.form,
        "times_us": dict(report.times_us), "seconds": seconds, "error": off, "own_error": own,
        "right": off <= max(2.5 * own, 2e-3), "notes": report.notes,
    }  # fmt: skip
    print("LINE " + json.dumps(row), flush=True)


def gain(row):
    """The best peer's time over ours, or nothing where no peer could be timed."""
    peers = [
        us for label, us in row["times_us"].items()
        if not label.startswith(("streams", "rtasks")) and label != "module as it is"
    ]  # fmt: skip
    return min(peers) / row["times_us"][row["kept"]] if peers else None


def main(arguments):
    """Every model in a process; then the summary."""
    lines = Path(arguments.lines)
    rows = [json.loads(line) for line in lines.read_text().splitlines()] if lines.exists() else []
    done = {(row["name"], row["batch"]) for row in rows}
    end = time.perf_counter() + arguments.total
    for name in arguments.models or NAMES:
        if (name, arguments.batch) in done:
            continue
        if time.perf_counter() + arguments.seconds > end:
            break
        command = [sys.executable, __file__, name, "--one", "--batch", str(arguments.batch),
                   "--seconds", str(arguments.seconds)]  # fmt: skip
        try:
            ended = subprocess.run(
                command, capture_output=True, text=True, timeout=2 * arguments.seconds + 60
            )
            told = [line[5:] for line in ended.stdout.splitlines() if line.startswith("LINE ")]
            failure = (ended.stderr.strip().splitlines() or ["no line"])[-1][:300]
        except subprocess.TimeoutExpired:
            told, failure = [], "did not end"
        row = json.loads(told[0]) if told else {"name": name, "batch": arguments.batch,
                                                "failure": failure}  # fmt: skip
        rows.append(row)
        with lines.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(line_of(row), flush=True)
    gains = [each for row in rows if "failure" not in row and (each := gain(row))]
    if gains:
        mean = math.exp(sum(map(math.log, gains)) / len(gains))
        slower = sum(each < 0.98 for each in gains)
        wrong = sum(not row["right"] for row in rows if "failure" not in row)
        failed = sum("failure" in row for row in rows)
        print(
            f"{len(gains)} models: {mean:.2f}x the best peer as a geometric mean, {slower} slower "
            f"by more than 2 %, {wrong} wrong, {failed} failed"
        )


def line_of(row):
    """A row in words."""
    if "failure" in row:
        return f"{row['name']}: {row['failure']}"
    times = ", ".join(f"{label} {us:.0f}" for label, us in row["times_us"].items())
    ratio = gain(row)
    return (
        f"{row['name']} batch {row['batch']}: kept {row['kept']}; {times} us; "
        f"{'-' if ratio is None else f'{ratio:.2f}x'}; error {row['error']:.1e} "
        f"(own {row['own_error']:.1e}){'' if row['right'] else ' WRONG'}; {row['seconds']:.0f} s"
        + "".join(f"\n    {note}" for note in row["notes"])
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=60.0, help="for each model")
    parser.add_argument("--total", type=float, default=1e9, help="seconds in all")
    parser.add_argument("--lines", default="accelerate_models.jsonl")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        one(arguments.models[0], arguments)
    else:
        main(arguments)
