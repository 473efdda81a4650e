"""Megatron-LM: arguments of `pretrain_gpt.py`, one in a line, with the layout of its pipeline.

    Et*3|(tt|)*29,t|L      embedding and three layers, 29 stages of two, one layer, the loss

Stages follow one another over the ranks of the pipeline, round after round. The names are those of
Megatron-LM with megatron-core 0.16; `--recompute-modules layernorm` needs at least 0.12, the layout
0.13. The distributed optimizer is ZeRO 1.
"""

import re
import shlex
from itertools import groupby

from partita.errors import FileError
from partita.export.scope import ExportScope
from partita.jobs.frameworks import FrameworkStrategy, StackSizes, even_layers

VERSION = "Megatron-LM with megatron-core 0.16"
MODULES = {"norms": "layernorm", "attention": "core_attn"}
RECOMPUTE = ("none", *MODULES, "full")
FLAGS = frozenset(
    {
        "--sequence-parallel", "--use-distributed-optimizer", "--overlap-grad-reduce",
        "--overlap-param-gather", "--bf16", "--fp16", "--swiglu", "--group-query-attention",
        "--untie-embeddings-and-output-weights", "--disable-bias-linear", "--mock-data",
        "--use-mcore-models",
    }
)  # fmt: skip
DTYPES = {"bf16": ("--bf16",), "f16": ("--fp16",)}


def refusal(s: FrameworkStrategy, scope: ExportScope) -> str:
    """Why Megatron cannot be told a strategy; nothing if it can."""
    if scope.stack is None:
        return "it takes one stack of equal layers, which the model is not"
    if s.zero > 1:
        return f"its distributed optimizer is ZeRO 1, not {s.zero}"
    if s.recompute not in RECOMPUTE:
        return "it recomputes whole layers, norms or the core of attention, not activations alone"
    if s.pp > 1 and s.schedule not in ("1f1b", "interleaved"):
        return f"it runs 1F1B, plain or interleaved, not {s.schedule}"
    if s.pp > 1 and (s.vpp > 1) != (s.schedule == "interleaved"):
        return "it interleaves where a rank has several stages, and only there"
    if s.vpp > 1 and s.num_microbatches % s.pp:
        return f"interleaving takes micro-batches in multiples of pp={s.pp}"
    return ""


def write(s: FrameworkStrategy, scope: ExportScope) -> str:
    """The arguments, after comments that say how to start."""
    sizes = scope.sizes
    if sizes is not None and sizes.experts:  # routing has options of its own
        sizes = None
    lines = [
        f"# {scope.spec}: {s}",
        f"# {VERSION}; start with:",
        f'#   {scope.launcher()} pretrain_gpt.py $(grep -v "^#" THIS_FILE)',
    ]
    if sizes is None:
        lines.append("# add the arguments of your model: these are those of the strategy")
    lines += _strategy_lines(s, scope)
    lines += _model_lines(sizes, scope) if sizes is not None else []
    return "\n".join(lines) + "\n"


def _strategy_lines(s: FrameworkStrategy, scope: ExportScope) -> list[str]:
    lines = [
        f"--tensor-model-parallel-size {s.tp}",
        *[f"--context-parallel-size {s.cp}", "--cp-comm-type all_gather"] * (s.cp > 1),
        f"--pipeline-model-parallel-size {s.pp}",
        f"--micro-batch-size {s.micro_batch}",
        f"--global-batch-size {s.batch}",
    ]
    lines += ["--sequence-parallel"] * s.sp
    if s.pp > 1:
        lines.append(f"--pipeline-model-parallel-layout {layout(s.layers)}")
    lines += ["--use-distributed-optimizer"] * (s.zero > 0)
    if s.hsdp:
        lines.append(f"--num-distributed-optimizer-instances {s.dp // s.hsdp}")
    if s.dp * s.cp > 1:
        lines += ["--overlap-grad-reduce", *["--overlap-param-gather"] * (s.zero > 0)]
    if s.recompute == "full":
        lines += ["--recompute-granularity full", "--recompute-method uniform"]
        lines.append("--recompute-num-layers 1")
    elif s.recompute != "none":
        lines.append("--recompute-granularity selective")
        lines.append(f"--recompute-modules {MODULES[s.recompute]}")
    return [*lines, *DTYPES.get(scope.dtype, ())]


def _model_lines(sizes: StackSizes, scope: ExportScope) -> list[str]:
    lines = [
        "--use-mcore-models",
        f"--num-layers {sizes.num_layers}",
        f"--hidden-size {sizes.hidden}",
        f"--ffn-hidden-size {sizes.ffn}",
        f"--num-attention-heads {sizes.heads}",
        f"--kv-channels {sizes.head_size}",
        f"--seq-length {sizes.seq}",
        f"--max-position-embeddings {sizes.seq}",
        f"--position-embedding-type {'learned_absolute' if sizes.learned_positions else 'rope'}",
        f"--normalization {'RMSNorm' if sizes.rms_norm else 'LayerNorm'}",
    ]
    if sizes.kv_heads < sizes.heads:
        lines += ["--group-query-attention", f"--num-query-groups {sizes.kv_heads}"]
    lines += ["--swiglu"] * sizes.gated
    lines += ["--disable-bias-linear"] * (not sizes.biases)
    lines += ["--untie-embeddings-and-output-weights"] * (not sizes.tied)
    lines += [f"--optimizer {'sgd' if scope.optimizer in ('sgd', 'momentum') else 'adam'}"]
    lines += ["--lr 1e-4", "--train-iters 100", "--mock-data", "--tokenizer-type NullTokenizer"]
    return [*lines, f"--vocab-size {sizes.vocab}"]


def layout(layers: tuple[int, ...]) -> str:
    """The layout string of layers on virtual stages, equal neighbours written once."""
    texts = ["t" * count for count in layers]
    texts[0] = "E" + _times("t", layers[0])
    texts[-1] = _times("t", layers[-1]) + "L" if len(layers) > 1 else texts[0] + "L"
    middle = []
    for text, same in groupby(texts[1:-1]):
        count = len(list(same))
        stage = f"{_times('t', len(text))}|"
        middle.append(f"({stage})*{count}" if count > 1 else stage)
    return f"{texts[0]}|{','.join(middle)}{texts[-1]}" if len(layers) > 1 else texts[0]


def _times(letter: str, count: int) -> str:
    return letter * count if count < 4 else f"{letter}*{count}"


def layers_of(text: str) -> tuple[int, ...]:
    """The layers of each virtual stage of a layout string."""
    plain = text.replace(",", "").replace(" ", "")
    if not re.fullmatch(r"[EtLm|()*0-9]+", plain):
        raise FileError(
            f"layout {text!r}", fix="use E, t, L, |, (...)*n and t*n",
            field="--pipeline-model-parallel-layout",
        )  # fmt: skip
    for pattern in (r"\(([^()]*)\)\*([0-9]+)", r"([EtLm])\*([0-9]+)"):
        plain = re.sub(pattern, lambda m: m[1] * min(int(m[2]), 10_000), plain)
    return tuple(stage.count("t") for stage in plain.split("|"))


def read(text: str, scope: ExportScope) -> FrameworkStrategy:
    """The strategy that arguments say, for a model on so many devices."""
    given = _arguments(text)

    def whole(name: str, default: int) -> int:
        value = given.get(name, str(default))
        if not value.isdecimal():
            raise FileError(f"found {value!r}", fix="give a whole number", field=name)
        return int(value)

    tp = whole("--tensor-model-parallel-size", 1)
    pp = whole("--pipeline-model-parallel-size", 1)
    cp = whole("--context-parallel-size", 1)
    dp = max(1, scope.num_devices // max(1, tp * cp * pp))
    micro = whole("--micro-batch-size", 1)
    batch = whole("--global-batch-size", micro * dp)
    if tp * cp * pp * dp != scope.num_devices or batch % (micro * dp):
        raise FileError(
            f"tp={tp} x cp={cp} x pp={pp} on {scope.num_devices} devices with micro-batches of "
            f"{micro} and a batch of {batch}",
            fix="choose degrees that divide the devices, and replicas that divide the batch",
            field="--global-batch-size",
        )
    copies = whole("--num-distributed-optimizer-instances", 1)
    if dp % copies or (copies > 1 and "--use-distributed-optimizer" not in given):
        raise FileError(
            f"found {copies} with dp={dp}",
            fix="give a divisor of the replicas, with --use-distributed-optimizer",
            field="--num-distributed-optimizer-instances",
        )
    layers = _layers(given, pp, scope)
    vpp = len(layers) // pp if layers else 1
    granularity = given.get("--recompute-granularity", "none")
    modules = given.get("--recompute-modules", "core_attn").split()
    names = {module: name for name, module in MODULES.items()}
    return FrameworkStrategy(
        tp=tp, sp="--sequence-parallel" in given, pp=pp, vpp=vpp, dp=dp,
        zero=int("--use-distributed-optimizer" in given), hsdp=dp // copies if copies > 1 else 0,
        micro_batch=micro,
        num_microbatches=batch // (micro * dp),
        recompute=names.get(modules[0], "") if granularity == "selective" else granularity,
        schedule="interleaved" if vpp > 1 else "1f1b", layers=layers, cp=cp,
    )  # fmt: skip


def _layers(given: dict[str, str], pp: int, scope: ExportScope) -> tuple[int, ...]:
    """Of each virtual stage; without a layout they are even."""
    if pp == 1:
        return ()
    if "--pipeline-model-parallel-layout" in given:
        return layers_of(given["--pipeline-model-parallel-layout"])
    stack = scope.stack
    total = 0 if stack is None else stack.num_layers
    each = given.get("--num-layers-per-virtual-pipeline-stage")
    stages = pp if each is None else max(1, total // max(1, int(each)))
    return even_layers(total, stages)


def _arguments(text: str) -> dict[str, str]:
    """Options with their values, several values of one with a blank between them."""
    try:
        words = shlex.split(text, comments=True)
    except ValueError as error:
        raise FileError(f"cannot be split: {error}", fix="close quotes") from None
    given: dict[str, str] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            given[name] = value if equals else ""
        elif name and name not in FLAGS:
            given[name] = f"{given[name]} {word}".strip()
        else:
            raise FileError(
                f"found {word!r}", fix="begin with an option such as --micro-batch-size"
            )
    return given
