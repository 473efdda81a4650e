"""Rows of published measurements: what was run, on what, how, and what it took.

A row file is `partita/measured-runs@1`: model, hardware, parallelism, batch, options, measured. A
row that lacks something, or says something that no strategy here can express, is skipped with the
reason; a malformed one is, too. What a source does not print is filled in by what its training
code does, never by row.

Model and machine: some sizes must be there, others follow from the model's name. Sources often
print a name alone ("DeepSeekV3"): its sizes come from the published configuration. Whatever else is
missing is said, never guessed. A number that cannot be one (text, a negative or endless value) is
refused with the field's name.

Strategy: what a row prints, and what its training code does without saying. Rows say degrees of
parallelism and batches; few say whether attention was fused, whether gradients were reduced beside
computing, or in which dtype they were summed up. That follows from the training code, of which
there are seven families here (`FRAMEWORKS`), never from the single row.
"""

import json
import math
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from partita.cluster import resolve
from partita.cluster.presets import catalogue
from partita.errors import FileError, PartitaError
from partita.forecast import (
    ExpertLayers,
    Latent,
    Machine,
    Strategy,
    Transformer,
    check_strategy,
    machine_of,
)

# Models that sources call by name alone; sizes from their published configurations.
KNOWN: dict[str, dict[str, Any]] = {
    "deepseekv3": {
        "layers": 61, "hidden": 7168, "heads": 128, "ffn": 18432, "vocab": 129280,
        "experts": 256, "topk": 8, "moe_ffn": 2048, "shared": 2048, "dense_layers": 3,
    },
    "deepseekv2": {
        "layers": 60, "hidden": 5120, "heads": 128, "ffn": 12288, "vocab": 102400,
        "experts": 160, "topk": 6, "moe_ffn": 1536, "shared": 3072, "dense_layers": 1,
    },
    "kimik2": {
        "layers": 61, "hidden": 7168, "heads": 64, "ffn": 18432, "vocab": 163840,
        "experts": 384, "topk": 8, "moe_ffn": 2048, "shared": 2048, "dense_layers": 1,
    },
    "qwen3235ba22b": {
        "layers": 94, "hidden": 4096, "heads": 64, "kv_heads": 4, "head_size": 128, "ffn": 12288,
        "vocab": 151936, "experts": 128, "topk": 8, "moe_ffn": 1536,
    },
    "qwen330ba3b": {
        "layers": 48, "hidden": 2048, "heads": 32, "kv_heads": 4, "head_size": 128, "ffn": 6144,
        "vocab": 151936, "experts": 128, "topk": 8, "moe_ffn": 768,
    },
    "gptoss120b": {
        "layers": 36, "hidden": 2880, "heads": 64, "kv_heads": 8, "head_size": 64, "ffn": 2880,
        "vocab": 201088, "experts": 128, "topk": 4, "moe_ffn": 2880, "window": 128,
        "windowed_share": 0.5,
    },
    "mixtral8x7b": {
        "layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "ffn": 14336, "vocab": 32000,
        "experts": 8, "topk": 2, "moe_ffn": 14336,
    },
    "mixtral8x22b": {
        "layers": 56, "hidden": 6144, "heads": 48, "kv_heads": 8, "ffn": 16384, "vocab": 32768,
        "experts": 8, "topk": 2, "moe_ffn": 16384,
    },
}  # fmt: skip
LATENT = {
    "deepseekv3": Latent(1536, 512),
    "deepseekv2": Latent(1536, 512),
    "kimik2": Latent(1536, 512),
}
# Families without biases and learned positions, with gated feed-forward parts.
GATED = ("llama", "deepseek", "qwen", "mixtral", "mistral", "oss", "kimi")
STATE_SPACE = ("mamba", "nemotron3", "nemotronh", "ssm")
NO_DECODER = ("vit", "bert", "t5", "wan", "flux")
# Beginnings of what sources call a device, the longer before the shorter, and the preset's name.
DEVICES = {
    name: name
    for name in (
        "gb300", "gb200", "gh200", "b300", "b200", "h200", "h100", "a10040gb", "a100", "v10016gb",
        "v100", "mi300x", "mi250x", "l40s", "l4", "a10", "t4", "p100", "titanrtx", "rtx2080ti",
        "rtx3090", "rtx4090", "rtx",
    )
} | {"gh96": "gh200"}  # fmt: skip
VOCAB = 51200  # of GPT-2 as Megatron pads it, where a source gives none
MOST = 10**9  # of any count in a row
MOST_LAYERS = 100_000
MOST_IN_NODE = 256
FORMAT = "partita/measured-runs@1"
MOST_BYTES = 200_000_000  # of a row file
NO_GROUP = "(no group)"


class NotModelledError(Exception):
    """Why a row cannot be forecast."""


def plain(name: object) -> str:
    """A name as it is compared: small letters and digits."""
    return "".join(c for c in str(name).lower() if c.isalnum())


def shown(name: object) -> str:
    """A name as it can be printed anywhere: on one line, of a sensible length."""
    text = " ".join(str(name).split())[:120]
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def whole(table: dict[str, Any], key: str, default: int | None = None, most: int = MOST) -> int:
    """A count of at least 1 (0 or nothing: the default); what is no number is refused by name."""
    value = table.get(key)
    if value is None or (value == 0 and default is not None):
        if default is None:
            raise NotModelledError(f"{key} is not given")
        return default
    number = positive(table, key)
    if number != int(number) or number > most:
        raise NotModelledError(f"{key} is {_quoted(value)}, a whole number up to {most} is needed")
    return int(number)


def positive(table: dict[str, Any], key: str) -> float:
    """A number above zero; what is none is refused by name."""
    value = table[key]
    number: float = math.nan
    if isinstance(value, int | float | str) and not isinstance(value, bool):
        try:
            number = float(value)
        except (ValueError, OverflowError):
            number = math.nan
    if not (math.isfinite(number) and number > 0):
        raise NotModelledError(f"{key} is {_quoted(value)}, a number above 0 is needed")
    return number


def _quoted(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:39] + "…"


def model_of(table: dict[str, Any]) -> Transformer:
    """The transformer that a row's model is."""
    name = plain(table.get("name", ""))
    if any(word in name for word in STATE_SPACE):
        raise NotModelledError("the model has state-space layers")
    if any(name.startswith(word) for word in NO_DECODER) or "vl" in name:
        raise NotModelledError("the model is no decoder of equal layers")
    known = next((KNOWN[key] for key in KNOWN if name.startswith(key)), {})
    sizes = {**known, **{key: value for key, value in table.items() if value is not None}}
    for key, words in (("layers", "number of layers"), ("hidden", "hidden size"),
                       ("heads", "number of heads"), ("seq_len", "sequence length")):  # fmt: skip
        if key not in sizes:
            raise NotModelledError(f"the {words} is not given")
    layers = whole(sizes, "layers", most=MOST_LAYERS)
    hidden, heads = whole(sizes, "hidden"), whole(sizes, "heads")
    if heads > hidden:
        raise NotModelledError(f"{heads} heads are more than the hidden size of {hidden}")
    family = any(word in name for word in GATED)
    latent = next((LATENT[key] for key in LATENT if name.startswith(key)), None)
    return Transformer(
        shown(table.get("name") or "transformer"), layers, hidden, heads,
        whole(sizes, "ffn", 4 * hidden), whole(sizes, "vocab", VOCAB), whole(sizes, "seq_len"),
        whole(sizes, "kv_heads", 0), whole(sizes, "head_size", 0),
        gated=bool(sizes.get("gated_mlp", family)), biases=not family, tied=not family,
        positions=not family, experts=_experts(sizes, layers), latent=latent,
        window=whole(sizes, "window", 0),
        windowed_share=min(1.0, positive(sizes, "windowed_share"))
        if sizes.get("windowed_share") else 0.0,
    )  # fmt: skip


def _experts(sizes: dict[str, Any], layers: int) -> ExpertLayers | None:
    if not sizes.get("experts"):
        return None
    dense = min(whole(sizes, "dense_layers", 0), max(0, layers - 1))
    return ExpertLayers(
        whole(sizes, "experts"), whole(sizes, "topk"), whole(sizes, "moe_ffn"),
        # A model cut down to a few layers for a test keeps one dense layer at the most.
        whole(sizes, "shared", 0), dense if layers > 8 else min(dense, 1),
    )  # fmt: skip


def machine_of_row(table: dict[str, Any]) -> Machine:
    """The machine that a row's hardware is; bandwidths are those of the kind's preset."""
    kinds = table.get("gpus_by_kind")
    kinds = kinds if isinstance(kinds, dict) else {}
    if len(kinds) > 1:
        raise NotModelledError("the devices are of several kinds")
    name = table.get("gpu") or next(iter(kinds), None)
    if not name:
        raise NotModelledError("the kind of device is not given")
    kind = _kind(str(name))
    if table.get("n_gpus") is not None:
        count = whole(table, "n_gpus")
    elif kinds:
        count = whole(kinds, next(iter(kinds)))
    else:
        raise NotModelledError("the number of devices is not given")
    preset = catalogue().kind(kind)
    assert preset is not None
    near = preset.node_size
    if near <= 8:  # a rack is one node whatever the row calls a node
        near = whole(table, "gpus_per_node", preset.node_size, MOST_IN_NODE)
    small = _two_nodes(near, kind)
    across = small.across_bytes_per_s
    if "4x infiniband" in str(table.get("inter_node", "")).lower():
        across = 100e9 / near  # 800 Gbit/s a node
    return replace(small, num_devices=count, node_size=near, across_bytes_per_s=across)


@cache
def _two_nodes(near: int, kind: str) -> Machine:
    """Two nodes tell the bandwidths; the number of devices is the row's."""
    return machine_of(resolve(f"2x{near}x{kind}"))


@cache
def _kind(text: str) -> str:
    name = text.split("(")[0].strip().replace("_", "-")
    preset = catalogue().kind(name)
    if preset is None:
        words = plain(name)
        near = next((DEVICES[start] for start in DEVICES if words.startswith(start)), "")
        preset = catalogue().kind(near) if near else None
    if preset is None:
        raise NotModelledError(f"no device kind is called {_quoted(text)}")
    return preset.kind.name


SCHEDULES = {
    "none": "1f1b", "1f1b": "1f1b", "1f1b-i": "interleaved", "interleaved-1f1b": "interleaved",
    "interleaved": "interleaved", "gpipe": "gpipe", "zb-1p": "zb-h1", "zb-2p": "zb-h2",
    "zb-h1": "zb-h1", "zb-h2": "zb-h2", "zb-v": "zb-v", "zbv": "zb-v", "dualpipe": "dualpipe-v",
    "dualpipe-v": "dualpipe-v", "pipedream-flush": "1f1b", "1f1b-interleaved": "interleaved",
}  # fmt: skip
PRECISIONS = {
    "mxfp8": "f8", "fp8": "f8", "fp8-cs": "f8", "fp8-mx": "f8", "fp8-sc": "f8", "amp_fp8": "f8",
    "nvfp4": "f4", "fp4": "f4", "fp8-ds": "f8", "fp8-blockwise": "f8",
}  # fmt: skip
# Families of training code, and what they do without saying.
FRAMEWORKS = {
    "megatron": "Megatron-LM of 2020 to 2022: attention with a fused softmax, dropout, gradients "
    "reduced after the last backward, blocking sends; ZeRO-3 beside it is DeepSpeed's",
    "megatron-deepspeed": "as megatron, gradients in the dtype of the parameters",
    "zero-bubble": "as megatron, sends beside computing",
    "megatron-core": "Megatron-Core, eager: fused attention, fused loss, ZeRO-1, sequence "
    "parallelism with tensor parallelism",
    "bridge": "Megatron-Bridge: as megatron-core, compiled, products in f8 where nothing is said, "
    "tensor-parallel collectives in pieces; from 26.06 layers with experts in CUDA graphs",
    "fsdp": "FSDP: fused attention, gathered forward and backward in every micro-batch",
    "sailor": "every op of attention a kernel of its own, f16, nothing overlapped",
}


@dataclass(frozen=True, slots=True)
class Inferred:
    """A strategy, the family of code it is run by, and what had to be assumed for memory."""

    strategy: Strategy
    framework: str
    assumed: tuple[str, ...]


def strategy_of(
    raw: dict[str, Any], options: dict[str, Any], model: Transformer, machine: Machine,
    interleaved: int = 1,
) -> Inferred:  # fmt: skip
    """What a row ran; `interleaved` chunks a rank where the row says nothing about them."""
    degrees, batch = table_of(raw, "parallelism"), table_of(raw, "batch")
    if any("lora" in str(options.get(key, "")).lower() for key in ("task", "finetune")):
        raise NotModelledError("low-rank adapters are not modelled")
    tp, pp, cp = (whole(degrees, key, 1) for key in ("tp", "pp", "cp"))
    dp = whole(degrees, "dp", max(1, machine.num_devices // (tp * pp * cp)))
    if tp * pp * cp * dp != machine.num_devices and dp % cp == 0:
        dp = dp // cp  # some count the ranks of context parallelism as data parallel
    if batch.get("global") is None:
        raise NotModelledError("the global batch is not given")
    sequences = whole(batch, "global")
    micro = whole(batch, "micro", 0)
    assumed: tuple[str, ...] = ()
    if not micro:
        if pp > 1:
            raise NotModelledError("the micro-batch is not given")
        micro, assumed = max(1, sequences // dp), ("micro-batch",)
    sharded = _is_sharded(degrees)
    framework = framework_of(raw, options, sharded=sharded)
    if framework == "bridge" and "recompute" not in options:
        assumed += ("recompute",)
    dtype, matmul = _dtypes(options, framework)
    vpp = _vpp(degrees, options, model, pp)
    schedule = _schedule(degrees)
    if interleaved > 1 and "vpp" not in degrees and "schedule" not in degrees:
        vpp = interleaved
    if vpp > 1 and schedule == "1f1b":
        schedule = "interleaved"
    strategy = Strategy(
        batch=sequences, micro_batch=micro, tp=tp, pp=pp, vpp=vpp, dp=dp, cp=cp,
        ep=whole(degrees, "ep", 1), zero=_zero(degrees, sharded=sharded),
        recompute=_recompute(options), schedule=schedule, dtype=dtype, matmul_dtype=matmul,
        ends=1 if "fewer" in str(options.get("first_and_last_stage", "")) else 0,
        sp=_sequence_parallel(degrees, options, framework, tp),
    )  # fmt: skip
    strategy = _as_framework(strategy, framework, degrees, raw, options)
    if strategy.attention == "fused-softmax" and not _is_softmax_fused(model, strategy):
        strategy = replace(strategy, attention="eager")
    return Inferred(strategy, framework, assumed)


def table_of(raw: dict[str, Any], name: str) -> dict[str, Any]:
    """A part of a row."""
    value = raw.get(name)
    if not isinstance(value, dict):
        raise NotModelledError(f"has no {name}")
    return value


def framework_of(raw: dict[str, Any], options: dict[str, Any], *, sharded: bool) -> str:
    """Which family of training code a row comes from."""
    source = str(raw.get("source", "")).lower() + str(options.get("framework", "")).lower()
    for words, framework in (
        (("bridge", "nemo"), "bridge"),
        (("simumax", "megatron-lm 0.1"), "megatron-core"),
        (("deepspeed", "vtrain"), "megatron-deepspeed"),
        (("sailor",), "sailor"),
        (("llm-foundry",), "fsdp"),
        (("zero bubble",), "zero-bubble"),
        (("torchtitan",), "fsdp"),
    ):
        if any(word in source for word in words):
            return framework
    return "fsdp" if sharded else "megatron"


def _as_framework(
    s: Strategy, framework: str, degrees: dict[str, Any], raw: dict[str, Any],
    options: dict[str, Any],
) -> Strategy:  # fmt: skip
    """What a family of training code does without saying; see `FRAMEWORKS`."""
    if framework in ("megatron", "megatron-deepspeed"):
        plain_sums = framework == "megatron-deepspeed" or s.zero == 3
        return replace(
            s, attention="fused-softmax", dropout=True, overlap_dp=False, overlap_pp=False,
            grad_dtype=s.dtype if plain_sums else "f32",
            gathers=12 if framework == "megatron" and s.zero == 3 else 1,
        )  # fmt: skip
    if framework == "zero-bubble":
        return replace(s, attention="fused-softmax", dropout=True, overlap_pp=True)
    if framework == "sailor":
        return replace(
            s, attention="eager", dropout=True, overlap_dp=False, overlap_pp=False, dtype="f16"
        )
    if framework == "fsdp":
        pure = str(degrees.get("mp_mode", "")).upper() == "PURE"
        foundry = "llm-foundry" in str(raw.get("source", ""))  # its loss reads logits as they are
        return replace(
            s, grad_dtype="bf16" if pure else "f32", master=not pure, fused_loss=foundry,
            attention="flash-2" if foundry else "flash",
        )  # fmt: skip
    whole_layers = framework == "bridge" and s.ep > 1 and _container(options) >= (26, 6)
    execution = "graph" if whole_layers else "compiled" if framework == "bridge" else "eager"
    return replace(
        s, zero=s.zero or 1, execution=execution, fused_loss=True,
        overlap_tp=framework == "bridge", overlap_ep=whole_layers,
    )  # fmt: skip


def _is_softmax_fused(model: Transformer, s: Strategy) -> bool:
    """Megatron's kernel takes certain shapes; the softmax of others goes op by op, in f32."""
    batches = s.micro_batch * (model.heads // s.tp)
    return 16 < model.seq <= 4096 and model.seq % 4 == 0 and batches % 4 == 0


def _container(options: dict[str, Any]) -> tuple[int, int]:
    """Year and month of the software; from 26.06 on layers with experts run in whole graphs."""
    parts = str(options.get("container", "")).split(" ")[0].split(".")
    if len(parts) < 2 or not all(part.isdecimal() and len(part) < 5 for part in parts[:2]):
        return (0, 0)
    return int(parts[0]), int(parts[1])


def _is_sharded(degrees: dict[str, Any]) -> bool:
    fsdp = degrees.get("fsdp")
    return bool(fsdp) and str(fsdp) not in ("0", "NO_SHARD", "1")


def _zero(degrees: dict[str, Any], *, sharded: bool) -> int:
    default = 0
    if sharded:  # SHARD_GRAD_OP keeps parameters whole
        default = 2 if "GRAD" in str(degrees.get("fsdp")) else 3
    return whole(degrees, "zero", default, 3)


def _dtypes(options: dict[str, Any], framework: str) -> tuple[str, str]:
    """Of parameters and activations; of products where they differ."""
    precision = str(options.get("precision", "")).lower()
    dtype = "f16" if "fp16" in precision or precision == "f16" else "bf16"
    if precision in ("fp32", "f32", "float32"):
        dtype = "f32"
    matmul = PRECISIONS.get(precision.split()[0] if precision.split() else "", "")
    return dtype, "f8" if not precision and framework == "bridge" else matmul


def _schedule(degrees: dict[str, Any]) -> str:
    """By the first word of what is printed; one of another name is refused."""
    words = str(degrees.get("schedule") or "1f1b").lower().replace("_", "-").split()
    name = words[0] if words else "1f1b"
    if name not in SCHEDULES:
        raise NotModelledError(f"no schedule is called {name[:40]!r}")
    return SCHEDULES[name]


def _vpp(degrees: dict[str, Any], options: dict[str, Any], model: Transformer, pp: int) -> int:
    if pp == 1:
        return 1
    if degrees.get("vpp"):
        return whole(degrees, "vpp", 1)
    if "1 layer per chunk" in str(options.get("vpp", "")):
        return max(1, (model.layers + 2) // pp)
    layers = whole(degrees, "layers_per_virtual_stage", 0, MOST)
    if layers and model.layers % (pp * layers) == 0:
        return model.layers // (pp * layers)
    return 1


def _recompute(options: dict[str, Any]) -> str:
    text = str(options.get("recompute", "")).lower()
    if text.startswith("none") or "no recompute" in text:
        return "none"
    return next((name for name in ("selective", "full") if name in text), "none")


def _sequence_parallel(
    degrees: dict[str, Any], options: dict[str, Any], framework: str, tp: int
) -> bool:
    if tp == 1:
        return False
    for stated in (degrees.get("sp"), options.get("sequence_parallel")):
        if isinstance(stated, bool):
            return stated
    text = str(options.get("recompute", "")).lower()
    if "sequence" in text and "no sp" not in text:
        return True
    return framework in ("bridge", "megatron-core")


@dataclass(frozen=True, slots=True)
class PublishedRun:
    """One measured run that can be forecast."""

    id: str
    group: str
    model: Transformer
    machine: Machine
    strategy: Strategy
    measured_s: float | None
    memory_bytes: float | None = None  # of the fullest rank
    with_workspace: bool = False  # is what drivers and libraries keep a part of that?
    out_of_memory: bool = False
    layer_only: bool = False  # one layer was timed, not a step
    framework: str = "megatron"
    assumed: tuple[str, ...] = ()  # what bears on memory and was not printed


@dataclass(frozen=True, slots=True)
class Skipped:
    """One that cannot, and why."""

    id: str
    group: str
    reason: str


def left_out(row: PublishedRun) -> bool:
    """Is the row kept from the fit of the parameter sets? A third is, by its id."""
    return zlib.crc32(row.id.encode()) % 3 == 0


def read_rows(path: Path | str) -> tuple[tuple[PublishedRun, ...], tuple[Skipped, ...]]:
    """The rows of a file."""
    file = str(path)
    try:
        if Path(path).stat().st_size > MOST_BYTES:
            raise FileError("is too large for a row file", fix="give fewer rows", file=file)
        document = json.loads(Path(path).read_bytes())
    except OSError as error:
        fix = f"give a row file ({FORMAT})"
        raise FileError(f"cannot be read ({error.strerror})", fix=fix, file=file) from None
    except (ValueError, RecursionError) as error:
        raise FileError(f"is not JSON ({error})", fix="give a row file", file=file) from None
    rows = document.get("rows") if isinstance(document, dict) else document
    if not isinstance(rows, list):
        raise FileError("has no list of rows", fix=f"give a file of {FORMAT}", file=file)
    return parse_rows(rows)


def parse_rows(rows: Iterable[Any]) -> tuple[tuple[PublishedRun, ...], tuple[Skipped, ...]]:
    """Rows as records; what cannot be forecast beside them with its reason."""
    kept: list[PublishedRun] = []
    skipped: list[Skipped] = []
    rows = list(rows)
    chunks = _stated_chunks(rows)
    for index, raw in enumerate(rows):
        if not isinstance(raw, dict):
            skipped.append(Skipped(f"row {index}", NO_GROUP, "is not a table"))
            continue
        name, group = shown(raw.get("id") or f"row {index}"), shown(raw.get("group") or NO_GROUP)
        try:
            kept.append(_row(raw, name, group, chunks))
        except (NotModelledError, PartitaError) as error:
            skipped.append(Skipped(name, group, str(error)))
        except RecursionError:
            skipped.append(Skipped(name, group, "is nested too deeply"))
    return tuple(kept), tuple(skipped)


def _row(raw: dict[str, Any], name: str, group: str, chunks: dict[str, int]) -> PublishedRun:
    stated = raw.get("options")
    options: dict[str, Any] = stated if isinstance(stated, dict) else {}
    model = model_of(table_of(raw, "model"))
    machine = machine_of_row(table_of(raw, "hardware"))
    measured = table_of(raw, "measured")
    inferred = strategy_of(raw, options, model, machine, chunks.get(_same_pipeline(raw), 1))
    strategy = inferred.strategy
    check_strategy(model, strategy, machine.num_devices)
    seconds = _seconds(measured, model, strategy, machine)
    memory, with_workspace = _memory(measured)
    oom = bool(measured.get("oom")) or str(measured.get("status", "")).lower() == "oom"
    if seconds is None and memory is None and not oom:
        raise NotModelledError("has no time and no memory that is compared")
    return PublishedRun(
        name, group, model, machine, strategy, seconds, memory, with_workspace, oom,
        bool(measured.get("layer_total_ms")), inferred.framework, inferred.assumed,
    )  # fmt: skip


def _same_pipeline(raw: dict[str, Any]) -> str:
    model, degrees = table_of(raw, "model"), table_of(raw, "parallelism")
    sizes = tuple(model.get(key) for key in ("layers", "hidden", "seq_len"))
    return repr((raw.get("group"), *sizes, degrees.get("tp"), degrees.get("pp")))


def _stated_chunks(rows: list[Any]) -> dict[str, int]:
    """Interleaving that a source states for one run of a pipeline and leaves out for another."""
    chunks: dict[str, int] = {}
    for raw in rows:
        try:
            stated = raw["parallelism"].get("vpp")
            if isinstance(stated, int) and stated > 1 and "schedule" not in raw["parallelism"]:
                chunks[_same_pipeline(raw)] = stated
        except (KeyError, TypeError, AttributeError, NotModelledError):
            continue  # the row itself is skipped with its reason
    return chunks


def _seconds(
    measured: dict[str, Any], model: Transformer, s: Strategy, machine: Machine
) -> float | None:
    for key in ("iter_time_s", "iter_time_s_derived"):
        if measured.get(key):
            return positive(measured, key)
    for key in ("layer_total_ms", "iter_time_ms"):
        if measured.get(key):
            return positive(measured, key) / 1e3
    for key, each, devices in (
        ("tokens_per_s_per_gpu", model.seq, machine.num_devices),
        ("tokens_per_s", model.seq, 1),
        ("samples_per_s_per_gpu", 1, machine.num_devices),
        ("samples_per_s", 1, 1),
    ):
        if measured.get(key):
            return s.batch * each / positive(measured, key) / devices
    return None


def _memory(measured: dict[str, Any]) -> tuple[float | None, bool]:
    """Bytes of the fullest rank; frameworks report what they allocated, devices all of it."""
    for key, unit in (("mem_alloc_gib", 2.0**30), ("mem_gb", 1e9), ("peak_memory_bytes", 1.0)):
        if measured.get(key):
            return positive(measured, key) * unit, key == "peak_memory_bytes"
    return None, False
