"""torchtitan: a job configuration in TOML, as read up to version 0.2.2 (0.3 takes Python instead).

Tensor parallelism there always splits norms by their sequence; replicas share parameters and
gradients (FSDP: ZeRO 3, or 2 where parameters stay gathered from forward to backward), all of them
or those of a shard group (HSDP), or hold all (DDP, alone). With a pipeline all micro-batches of a
replica pass through it in one step, for which parameters are gathered once and gradients reduced
once: what ZeRO 1 holds and sends.
"""

import re
import tomllib
from typing import Any

from partita.errors import FileError
from partita.export.scope import ExportScope
from partita.jobs.frameworks import SEVERAL, FrameworkStrategy, StackSizes

VERSION = "torchtitan 0.2.2"
SCHEDULES = {
    "1f1b": "1F1B", "gpipe": "GPipe", "interleaved": "Interleaved1F1B", "zb-v": "ZBVZeroBubble",
}  # fmt: skip
RESHARD = {1: "never", 2: "never", 3: "always"}
# Its models by layers, hidden size, heads and heads of keys and values.
FLAVORS = {
    (32, 4096, 32, 8): ("llama3", "8B"),
    (80, 8192, 64, 8): ("llama3", "70B"),
    (126, 16384, 128, 8): ("llama3", "405B"),
    (28, 1024, 16, 8): ("qwen3", "0.6B"),
    (28, 2048, 16, 8): ("qwen3", "1.7B"),
    (36, 2560, 32, 8): ("qwen3", "4B"),
    (64, 5120, 64, 8): ("qwen3", "32B"),
}
LAYER = re.compile(r"layers\.[0-9]+")


def refusal(s: FrameworkStrategy, scope: ExportScope) -> str:
    """Why torchtitan cannot be told a strategy; nothing if it can."""
    if scope.stack is None:
        return "it takes one stack of equal layers, which the model is not"
    if s.tp > 1 and not s.sp:
        return "its tensor parallelism always splits norms by their sequence"
    if s.cp > 1 and s.zero == 0:
        return "with context parallelism its ranks always share parameters (FSDP)"
    if s.pp == 1 and s.zero == 1:
        return "its replicas share gradients too (ZeRO 2 or 3), not optimizer states alone"
    if s.pp > 1 and s.zero > 1:
        return "in a pipeline it gathers and reduces once a step, as ZeRO 1 does"
    if s.dp > 1 and s.zero == 0 and s.tp * s.pp > 1:
        return "it replicates parameters (DDP) only without tensor and pipeline parallelism"
    if s.recompute in ("norms", "attention"):
        return f"it recomputes layers, or all but products, not {s.recompute} alone"
    if s.pp > 1 and s.schedule not in SCHEDULES:
        return f"it has no schedule {s.schedule}"
    if s.pp > 1 and (s.vpp > 1) != (s.schedule in SEVERAL):
        return f"{SCHEDULES[s.schedule]} does not run {s.vpp} stages on a rank"
    if s.pp > 1 and s.num_microbatches < s.pp * s.vpp:
        return f"it wants at least as many micro-batches as stages ({s.pp * s.vpp})"
    return ""


def write(s: FrameworkStrategy, scope: ExportScope) -> str:
    """The file; comments say how to start."""
    sizes = scope.sizes
    lines = [
        f"# {scope.spec}: {s}",
        f"# {VERSION}; start with:",
        f"#   {scope.launcher()} -m torchtitan.train --job.config_file THIS_FILE",
        *_model_lines(sizes),
        "",
        "[optimizer]",
        f'name = "{"Adam" if scope.optimizer == "adam" else "AdamW"}"',
        "",
        "[training]",
        f"local_batch_size = {s.micro_batch * (s.num_microbatches if s.pp > 1 else 1)}",
        f"global_batch_size = {s.batch}",
        *([] if sizes is None else [f"seq_len = {sizes.seq}"]),
        f'mixed_precision_param = "{"float32" if scope.dtype == "f32" else "bfloat16"}"',
        "",
        *_parallelism(s, scope),
        "",
        "[activation_checkpoint]",
        f'mode = "{s.recompute}"',
        'selective_ac_option = "op"',
    ]
    return "\n".join(lines) + "\n"


def _model_lines(sizes: StackSizes | None) -> list[str]:
    if sizes is not None:
        key = (sizes.num_layers, sizes.hidden, sizes.heads, sizes.kv_heads)
        if key in FLAVORS:
            name, flavor = FLAVORS[key]
            return ["", "[model]", f'name = "{name}"', f'flavor = "{flavor}"']
    return ["# name your model's train spec: torchtitan has none of these sizes", "", "[model]"]


def _parallelism(s: FrameworkStrategy, scope: ExportScope) -> list[str]:
    sharded = s.zero > 0
    shards = (s.hsdp or s.dp) if sharded else 1
    lines = [
        "[parallelism]",
        f"data_parallel_replicate_degree = {s.dp // shards}",
        f"data_parallel_shard_degree = {shards}",
        f"tensor_parallel_degree = {s.tp}",
        *[f"context_parallel_degree = {s.cp}"] * (s.cp > 1),
        f"pipeline_parallel_degree = {s.pp}",
    ]
    if sharded:
        lines.append(f'fsdp_reshard_after_forward = "{RESHARD[s.zero]}"')
    if s.pp > 1:
        lines += [
            f'pipeline_parallel_schedule = "{SCHEDULES[s.schedule]}"',
            f"pipeline_parallel_microbatch_size = {s.micro_batch}",
            "module_fqns_per_model_part = [",
            *(f"    [{', '.join(map(_quoted, part))}]," for part in model_parts(s.layers)),
            "]",
        ]
    return lines


def _quoted(name: str) -> str:
    return f'"{name}"'


def model_parts(layers: tuple[int, ...]) -> list[list[str]]:
    """The modules of each virtual stage, by their names in torchtitan's models."""
    parts, first = [], 0
    for count in layers:
        parts.append([f"layers.{i}" for i in range(first, first + count)])
        first += count
    parts[0].insert(0, "tok_embeddings")
    parts[-1] += ["norm", "output"]
    return parts


def read(text: str, scope: ExportScope) -> FrameworkStrategy:
    """The strategy that a file says, for a model on so many devices."""
    try:
        given = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise FileError(f"is no TOML: {error}", fix="mend it") from None
    parallel, training = _table(given, "parallelism"), _table(given, "training")
    tp = _whole(parallel, "tensor_parallel_degree", 1)
    cp = _whole(parallel, "context_parallel_degree", 1)
    pp = _whole(parallel, "pipeline_parallel_degree", 1)
    copies = _whole(parallel, "data_parallel_replicate_degree", 1)
    shards = _whole(parallel, "data_parallel_shard_degree", -1)
    if shards == -1:
        shards = scope.num_devices // (tp * cp * pp * copies)
    dp = copies * shards
    local = _whole(training, "local_batch_size", 8)
    batch = _whole(training, "global_batch_size", local * dp)
    micro = _whole(parallel, "pipeline_parallel_microbatch_size", 1) if pp > 1 else local
    if tp * cp * pp * dp != scope.num_devices or batch % (micro * dp):
        raise FileError(
            f"tp={tp} x cp={cp} x pp={pp} x dp={dp} on {scope.num_devices} devices with a batch of "
            f"{batch} in micro-batches of {micro}",
            fix="choose degrees whose product is the devices, and replicas that divide the batch",
            field="[parallelism]",
        )
    layers = _layers(parallel) if pp > 1 else ()
    name = str(parallel.get("pipeline_parallel_schedule", "1F1B"))
    schedules = {title.lower(): own for own, title in SCHEDULES.items()}
    if pp > 1 and name.lower() not in schedules:
        raise FileError(
            f"found {name!r}", fix=f"use one of {', '.join(SCHEDULES.values())}",
            field="pipeline_parallel_schedule",
        )  # fmt: skip
    keeps = parallel.get("fsdp_reshard_after_forward", "default")
    level = 1 if pp > 1 else 2 if keeps == "never" else 3
    return FrameworkStrategy(
        tp=tp, sp=tp > 1, pp=pp, vpp=len(layers) // pp if layers else 1, dp=dp,
        zero=0 if shards * cp == 1 else level, hsdp=shards if 1 < shards < dp else 0,
        micro_batch=micro,
        num_microbatches=batch // (micro * dp),
        recompute=str(_table(given, "activation_checkpoint").get("mode", "selective")),
        schedule=schedules[name.lower()] if pp > 1 else "1f1b", layers=layers, cp=cp,
    )  # fmt: skip


def _layers(parallel: dict[str, Any]) -> tuple[int, ...]:
    parts = parallel.get("module_fqns_per_model_part")
    if not isinstance(parts, list) or not all(isinstance(part, list) for part in parts):
        raise FileError(
            "is not there", fix="list the modules of each stage", field="module_fqns_per_model_part"
        )
    return tuple(sum(bool(LAYER.fullmatch(str(name))) for name in part) for part in parts)


def _table(given: dict[str, Any], name: str) -> dict[str, Any]:
    value = given.get(name, {})
    if not isinstance(value, dict):
        raise FileError(f"found {value!r}", fix="make it a table", field=f"[{name}]")
    return value


def _whole(table: dict[str, Any], name: str, default: int) -> int:
    value = table.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool) or (value < 1 and value != -1):
        raise FileError(f"found {value!r}", fix="give a whole number of at least 1", field=name)
    return value
