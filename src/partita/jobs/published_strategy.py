"""Strategy of a published row: what it prints, and what its training code does without saying.

Rows say degrees of parallelism and batches; few say whether attention was fused, whether gradients
were reduced beside computing, or in which dtype they were summed up. That follows from the training
code, of which there are seven families here (`FRAMEWORKS`), never from the single row.
"""

from dataclasses import dataclass, replace
from typing import Any

from partita.forecast import Machine, Strategy, Transformer
from partita.jobs.published_sizes import MOST, NotModelledError, whole

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
