"""Rows of published measurements: what was run, on what, how, and what it took.

A row file is `partita/measured-runs@1`: model, hardware, parallelism, batch, options, measured. A
row that lacks something, or says something that no strategy here can express, is skipped with the
reason. What a source does not print is filled in by what its framework does (Megatron of 2021 had no
fused attention, FSDP gathers and reduces every micro-batch, ...), never by row.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from partita.cluster import resolve
from partita.cluster.presets import catalogue
from partita.errors import FileError, PartitaError
from partita.forecast import (
    Experts,
    Latent,
    Machine,
    Strategy,
    Transformer,
    check_strategy,
    machine_of,
)

FORMAT = "partita/measured-runs@1"

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
SCHEDULES = {
    "none": "1f1b", "1f1b": "1f1b", "1f1b-i": "interleaved", "interleaved-1f1b": "interleaved",
    "interleaved": "interleaved", "gpipe": "gpipe", "zb-1p": "zb-h1", "zb-2p": "zb-h2",
    "zb-h1": "zb-h1", "zb-h2": "zb-h2", "zb-v": "zb-v", "zbv": "zb-v", "dualpipe": "dualpipe-v",
    "dualpipe-v": "dualpipe-v",
}  # fmt: skip
PRECISIONS = {
    "mxfp8": "f8", "fp8": "f8", "fp8-cs": "f8", "fp8-mx": "f8", "fp8-sc": "f8", "amp_fp8": "f8",
    "nvfp4": "f4", "fp4": "f4", "fp8-ds": "f8", "fp8-blockwise": "f8",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Row:
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


@dataclass(frozen=True, slots=True)
class Skipped:
    """One that cannot, and why."""

    id: str
    group: str
    reason: str


class _NotModelled(Exception):
    """Why a row cannot be forecast."""


def read_rows(path: Path | str) -> tuple[tuple[Row, ...], tuple[Skipped, ...]]:
    """The rows of a file."""
    file = str(path)
    try:
        document = json.loads(Path(path).read_bytes())
    except OSError as error:
        raise FileError(
            f"cannot be read ({error.strerror})", fix="give a file", file=file
        ) from None
    except ValueError as error:
        raise FileError(f"is not JSON ({error})", fix="give a row file", file=file) from None
    rows = document.get("rows") if isinstance(document, dict) else document
    if not isinstance(rows, list):
        raise FileError("has no list of rows", fix=f"give a file of {FORMAT}", file=file)
    return parse_rows(rows)


def parse_rows(rows: Iterable[Any]) -> tuple[tuple[Row, ...], tuple[Skipped, ...]]:
    """Rows as records; what cannot be forecast beside them with its reason."""
    kept: list[Row] = []
    skipped: list[Skipped] = []
    rows = list(rows)
    chunks = _stated_chunks(rows)
    for index, raw in enumerate(rows):
        if not isinstance(raw, dict):
            skipped.append(Skipped(f"row {index}", "", "is not a table"))
            continue
        name, group = str(raw.get("id", f"row {index}")), str(raw.get("group", ""))
        try:
            kept.append(_row(raw, name, group, chunks))
        except _NotModelled as error:
            skipped.append(Skipped(name, group, str(error)))
        except PartitaError as error:
            skipped.append(Skipped(name, group, str(error)))
        except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
            skipped.append(Skipped(name, group, f"cannot be read: {type(error).__name__} {error}"))
    return tuple(kept), tuple(skipped)


def _table(raw: dict[str, Any], name: str) -> dict[str, Any]:
    value = raw.get(name)
    if not isinstance(value, dict):
        raise _NotModelled(f"has no {name}")
    return value


def _same_pipeline(raw: dict[str, Any]) -> tuple[object, ...]:
    model, degrees = raw["model"], raw["parallelism"]
    sizes = tuple(model.get(key) for key in ("layers", "hidden", "seq_len"))
    return (raw.get("group"), *sizes, degrees.get("tp"), degrees.get("pp"))


def _stated_chunks(rows: list[Any]) -> dict[tuple[object, ...], int]:
    """Interleaving that a source states for one run of a pipeline and leaves out for another."""
    chunks: dict[tuple[object, ...], int] = {}
    for raw in rows:
        try:
            stated = raw["parallelism"].get("vpp")
            if isinstance(stated, int) and stated > 1 and "schedule" not in raw["parallelism"]:
                chunks[_same_pipeline(raw)] = stated
        except (KeyError, TypeError, AttributeError):
            continue
    return chunks


def _row(raw: dict[str, Any], name: str, group: str, chunks: dict[tuple[object, ...], int]) -> Row:
    options = raw.get("options") if isinstance(raw.get("options"), dict) else {}
    assert isinstance(options, dict)
    model = _model(_table(raw, "model"), options)
    machine = _machine(_table(raw, "hardware"))
    measured = _table(raw, "measured")
    text = json.dumps(raw).lower()
    strategy = _strategy(raw, model, machine, options, text)
    stated = chunks.get(_same_pipeline(raw), 1)
    if stated > 1 and "vpp" not in raw["parallelism"] and "schedule" not in raw["parallelism"]:
        strategy = replace(strategy, vpp=stated, schedule="interleaved")
    check_strategy(model, strategy, machine.num_devices)
    layer_only = "layer_total_ms" in measured
    seconds = _seconds(measured, model, strategy, machine)
    memory, with_workspace = _memory(measured)
    oom = bool(measured.get("oom")) or str(measured.get("status", "")).lower() == "oom"
    if seconds is None and memory is None and not oom:
        raise _NotModelled("has no time and no memory that is compared")
    return Row(
        name, group, model, machine, strategy, seconds, memory, with_workspace, oom, layer_only
    )  # fmt: skip


def _plain(name: object) -> str:
    return "".join(c for c in str(name).lower() if c.isalnum())


def _model(table: dict[str, Any], options: dict[str, Any]) -> Transformer:
    name = _plain(table.get("name", ""))
    if any(word in name for word in ("mamba", "nemotron3", "nemotronh", "ssm")):
        raise _NotModelled("the model has state-space layers")
    if any(name.startswith(word) for word in ("vit", "bert", "t5", "wan", "flux")) or "vl" in name:
        raise _NotModelled("the model is no decoder of equal layers")
    known = next((KNOWN[key] for key in KNOWN if name.startswith(key)), {})
    sizes = {**known, **{key: value for key, value in table.items() if value is not None}}
    for key in ("layers", "hidden", "heads"):
        if key not in sizes:
            raise _NotModelled(f"the model's {key} are not given")
    if "seq_len" not in sizes:
        raise _NotModelled("the sequence length is not given")
    hidden, heads = int(sizes["hidden"]), int(sizes["heads"])
    family = any(
        word in name for word in ("llama", "deepseek", "qwen", "mixtral", "mistral", "oss", "kimi")
    )
    gated = bool(sizes.get("gated_mlp", family))
    experts = None
    layers = int(sizes["layers"])
    if sizes.get("experts"):
        dense = min(int(sizes.get("dense_layers", 0)), max(0, layers - 1))
        experts = Experts(
            int(sizes["experts"]), int(sizes["topk"]), int(sizes["moe_ffn"]),
            int(sizes.get("shared", 0)), dense if layers > 8 else min(dense, 1),
        )  # fmt: skip
    latent = next((LATENT[key] for key in LATENT if name.startswith(key)), None)
    return Transformer(
        str(table.get("name", "transformer")), layers, hidden, heads,
        int(sizes.get("ffn") or 4 * hidden), int(sizes.get("vocab") or 51200),
        int(sizes["seq_len"]), int(sizes.get("kv_heads") or 0), int(sizes.get("head_size") or 0),
        gated=gated, biases=not family, tied=not family, positions=not family,
        experts=experts, latent=latent, window=int(sizes.get("window", 0)),
        windowed_share=float(sizes.get("windowed_share", 0.0)),
    )  # fmt: skip


def _machine(table: dict[str, Any]) -> Machine:
    gpu = table.get("gpu")
    kinds = table.get("gpus_by_kind")
    if isinstance(kinds, dict) and len(kinds) > 1:
        raise _NotModelled("the devices are of several kinds")
    kind = _kind(str(gpu or next(iter(kinds or {}), "")))
    count = int(table.get("n_gpus") or sum((kinds or {"": 0}).values()))
    if count < 1:
        raise _NotModelled("the number of devices is not given")
    preset = catalogue().kind(kind)
    assert preset is not None
    near = (
        preset.node_size
        if preset.node_size > 8
        else int(table.get("gpus_per_node") or preset.node_size)
    )
    # A cluster of two nodes tells the bandwidths; the number of devices is the row's.
    small = machine_of(resolve(f"2x{near}x{kind}"))
    across = small.across_bytes_per_s
    text = str(table.get("inter_node", "")).lower()
    if "4x infiniband" in text:
        across = 100e9 / near  # 800 Gbit/s a node
    return replace(small, num_devices=count, node_size=near, across_bytes_per_s=across)


def _kind(text: str) -> str:
    name = text.split("(")[0].strip().replace("_", "-")
    words = _plain(name)
    preset = catalogue().kind(name)
    if preset is None:
        for start in ("gb300", "gb200", "gh200", "b300", "b200", "h200", "h100", "a10040gb", "a100",
                      "v10016gb", "v100", "gh96", "mi300x", "mi250x", "l40s", "l4", "a10", "t4",
                      "p100", "titanrtx", "rtx2080ti", "rtx3090", "rtx4090", "rtx"):  # fmt: skip
            if words.startswith(start):
                preset = catalogue().kind("gh200" if start == "gh96" else start)
                break
    if preset is None:
        raise _NotModelled(f"no device kind is called {text!r}")
    return preset.kind.name


def _strategy(
    raw: dict[str, Any], model: Transformer, machine: Machine, options: dict[str, Any], text: str
) -> Strategy:
    degrees, batch = _table(raw, "parallelism"), _table(raw, "batch")
    task = str(options.get("task", "")).lower()
    if "lora" in task or "lora" in str(options.get("finetune", "")).lower():
        raise _NotModelled("low-rank adapters are not modelled")
    tp, pp, cp = (int(degrees.get(key) or 1) for key in ("tp", "pp", "cp"))
    dp = int(degrees.get("dp") or machine.num_devices // (tp * pp * cp))
    if tp * pp * cp * dp != machine.num_devices and dp % cp == 0:
        dp = dp // cp  # some count the ranks of context parallelism as data parallel
    if "global" not in batch:
        raise _NotModelled("the global batch is not given")
    whole = int(batch["global"])
    micro = int(batch.get("micro") or 0)
    if not micro:
        if pp > 1:
            raise _NotModelled("the micro-batch is not given")
        micro = max(1, whole // dp)
    fsdp = degrees.get("fsdp")
    sharded = bool(fsdp) and str(fsdp) not in ("0", "NO_SHARD", "1")
    zero = int(degrees.get("zero") or (0 if not sharded else 2 if "GRAD" in str(fsdp) else 3))
    framework = _framework(raw, options, text, sharded=sharded)
    precision = str(options.get("precision", "")).lower()
    dtype = "f16" if ("fp16" in precision or "f16" == precision) else "bf16"
    if precision in ("fp32", "f32", "float32"):
        dtype = "f32"
    matmul = PRECISIONS.get(precision.split()[0] if precision else "", "")
    if not precision and framework == "bridge":
        matmul = "f8"
    vpp = _vpp(degrees, options, model, pp)
    schedule = SCHEDULES.get(str(degrees.get("schedule", "1f1b")).lower().split(" ")[0], "1f1b")
    if vpp > 1 and schedule == "1f1b":
        schedule = "interleaved"
    ends = 1 if "fewer" in str(options.get("first_and_last_stage", "")) else 0
    strategy = Strategy(
        batch=whole, micro_batch=micro, tp=tp, pp=pp, vpp=vpp, dp=dp, cp=cp,
        ep=int(degrees.get("ep") or 1), zero=zero, recompute=_recompute(options, framework),
        schedule=schedule, dtype=dtype, matmul_dtype=matmul, ends=ends,
        sp=_sequence_parallel(degrees, options, framework, tp),
    )  # fmt: skip
    return _as_framework(strategy, framework, degrees, raw)


def _framework(raw: dict[str, Any], options: dict[str, Any], text: str, *, sharded: bool) -> str:
    """Which family of training code a row comes from; it says what the row does not print."""
    source = str(raw.get("source", "")).lower() + str(options.get("framework", "")).lower()
    if "bridge" in source or "nemo" in source:
        return "bridge"
    if "simumax" in source or "megatron-lm 0.1" in source:
        return "megatron-core"
    if "deepspeed" in source or "vtrain" in source:
        return "megatron-deepspeed"
    if "sailor" in source:
        return "sailor"
    if "llm-foundry" in source or (sharded and "flash" in str(options.get("attention", ""))):
        return "fsdp"
    if "zero bubble" in source:
        return "zero-bubble"
    if sharded or "torchtitan" in source:
        return "fsdp"
    if False:
        return "megatron-2021"
    return "megatron"


def _as_framework(
    s: Strategy, framework: str, degrees: dict[str, Any], raw: dict[str, Any]
) -> Strategy:
    """What a family of training code does without saying."""
    if framework in ("megatron", "megatron-2021"):
        early = framework == "megatron-2021" or s.zero == 3
        return replace(
            s, attention="fused-softmax", dropout=True, overlap_dp=False, overlap_pp=False,
            grad_dtype=s.dtype if early else "f32", gathers=12 if s.zero == 3 else 1,
        )  # fmt: skip
    if framework == "megatron-deepspeed":
        return replace(
            s, attention="fused-softmax", dropout=True, overlap_dp=False, overlap_pp=False,
            grad_dtype=s.dtype,
        )  # fmt: skip
    if framework == "zero-bubble":
        return replace(s, attention="fused-softmax", dropout=True, overlap_pp=True)
    if framework == "sailor":
        return replace(
            s, attention="eager", dropout=True, overlap_dp=False, overlap_pp=False, dtype="f16"
        )
    if framework == "fsdp":
        pure = str(degrees.get("mp_mode", "")).upper() == "PURE"
        attention = "flash-2" if "llm-foundry" in str(raw.get("source", "")) else "flash"
        return replace(
            s, grad_dtype="bf16" if pure else "f32", master=not pure, attention=attention
        )
    whole = framework == "bridge" and s.ep > 1 and _container(raw) >= (26, 6)
    execution = "graph" if whole else "compiled" if framework == "bridge" else "eager"
    return replace(
        s, zero=s.zero or 1, execution=execution, fused_loss=True,
        overlap_tp=framework == "bridge", overlap_ep=whole,
    )  # fmt: skip


def _container(raw: dict[str, Any]) -> tuple[int, int]:
    """Year and month of the software; from 26.06 on layers with experts run in whole graphs."""
    text = str(raw.get("options", {}).get("container", "")).split(" ")[0]
    parts = text.split(".")
    if len(parts) < 2 or not all(part.isdigit() for part in parts[:2]):
        return (0, 0)
    return int(parts[0]), int(parts[1])


def _vpp(degrees: dict[str, Any], options: dict[str, Any], model: Transformer, pp: int) -> int:
    if pp == 1:
        return 1
    stated = degrees.get("vpp")
    if isinstance(stated, int) and stated > 1:
        return stated
    text = str(options.get("vpp", ""))
    if "1 layer per chunk" in text:
        return max(1, (model.layers + 2) // pp)
    per = degrees.get("layers_per_virtual_stage")
    if isinstance(per, int) and per and model.layers % (pp * per) == 0:
        return model.layers // (pp * per)
    return 1


def _recompute(options: dict[str, Any], framework: str) -> str:
    text = str(options.get("recompute", "")).lower()
    if text.startswith("none") or "no recompute" in text:
        return "none"
    if "selective" in text:
        return "selective"
    if "full" in text:
        return "full"
    return "none"


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


def _seconds(
    measured: dict[str, Any], model: Transformer, s: Strategy, machine: Machine
) -> float | None:
    for key in ("iter_time_s", "iter_time_s_derived"):
        if measured.get(key):
            return float(measured[key])
    if measured.get("layer_total_ms"):
        return float(measured["layer_total_ms"]) / 1e3
    if measured.get("tokens_per_s_per_gpu"):
        return s.batch * model.seq / float(measured["tokens_per_s_per_gpu"]) / machine.num_devices
    if measured.get("samples_per_s_per_gpu"):
        return s.batch / float(measured["samples_per_s_per_gpu"]) / machine.num_devices
    return None


def _memory(measured: dict[str, Any]) -> tuple[float | None, bool]:
    """Bytes of the fullest rank; frameworks report what they allocated, devices all of it."""
    for key, unit in (("mem_alloc_gib", 2**30), ("mem_gb", 1e9), ("peak_memory_bytes", 1)):
        if measured.get(key):
            return float(measured[key]) * unit, key == "peak_memory_bytes"
    return None, False
