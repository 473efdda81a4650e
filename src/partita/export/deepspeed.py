"""DeepSpeed: its configuration in JSON, as version 0.19 reads it.

ZeRO 1 to 3 over the replicas; with a pipeline at most ZeRO 1, 1F1B, and as many layers on each
stage. `PipelineModule` takes its stages from your code, as `num_stages` and `partition_method`:
give it what stands in the section `pipeline`. Tensor parallelism is AutoTP.
"""

import json
from typing import Any

from partita.errors import FileError
from partita.export.scope import ExportScope
from partita.jobs.frameworks import FrameworkStrategy, even_layers

VERSION = "DeepSpeed 0.19"
OPTIMIZERS = {"adam": "Adam", "adamw": "AdamW", "sgd": "SGD", "adagrad": "Adagrad"}


def refusal(s: FrameworkStrategy, scope: ExportScope) -> str:
    """Why DeepSpeed cannot be told a strategy; nothing if it can."""
    if s.cp > 1:
        return "its sequence parallelism (Ulysses) shares heads out, not keys and values"
    if s.sp:
        return "its tensor parallelism (AutoTP) leaves norms whole"
    if s.hsdp:
        return "its ZeRO shards over all replicas (MiCS groups them, by code of the user's)"
    if s.pp > 1 and s.zero > 1:
        return f"its pipeline goes with ZeRO 0 or 1, not {s.zero}"
    if s.pp > 1 and s.tp > 1:
        return "its pipeline goes without AutoTP"
    if s.pp > 1 and (s.schedule != "1f1b" or s.vpp > 1):
        return f"its pipeline runs 1F1B with one stage on a rank, not {s.schedule}"
    if s.pp > 1 and scope.stack is None:
        return "its pipeline takes one stack of equal layers, which the model is not"
    if s.pp > 1 and len(set(s.layers)) > 1:
        return "its pipeline gives every stage as many layers"
    if s.recompute not in ("none", "full"):
        return f"it recomputes whole layers, not {s.recompute}"
    return ""


def write(s: FrameworkStrategy, scope: ExportScope) -> str:
    """The configuration; what is code in DeepSpeed stands in the section `pipeline`."""
    value: dict[str, Any] = {
        "train_batch_size": s.batch,
        "train_micro_batch_size_per_gpu": s.micro_batch,
        "gradient_accumulation_steps": s.num_microbatches,
        "zero_optimization": {"stage": s.zero, "overlap_comm": True, "contiguous_gradients": True},
    }
    if scope.dtype in ("bf16", "f16"):
        value["bf16" if scope.dtype == "bf16" else "fp16"] = {"enabled": True}
    if scope.optimizer in OPTIMIZERS:
        value["optimizer"] = {"type": OPTIMIZERS[scope.optimizer], "params": {"lr": 1e-4}}
    if s.tp > 1:
        value["tensor_parallel"] = {"autotp_size": s.tp}
    if s.pp > 1:
        value["pipeline"] = {
            "stages": s.pp,
            "partition": "type:layer",
            "activation_checkpoint_interval": int(s.recompute == "full"),
        }
    elif s.recompute == "full":
        value["activation_checkpointing"] = {"number_checkpoints": _num_layers(scope)}
    return json.dumps(value, indent=2) + "\n"


def _num_layers(scope: ExportScope) -> int:
    return 1 if scope.stack is None else scope.stack.num_layers


def read(text: str, scope: ExportScope) -> FrameworkStrategy:
    """The strategy that a configuration says, for a model on so many devices."""
    try:
        given = json.loads(text)
    except ValueError as error:
        raise FileError(f"is no JSON: {error}", fix="mend it") from None
    if not isinstance(given, dict):
        raise FileError("is no object", fix="give a configuration in braces")
    pipeline = _table(given, "pipeline")
    pp = _whole(pipeline, "stages", 1)
    tp = _whole(_table(given, "tensor_parallel"), "autotp_size", 1)
    dp = scope.num_devices // (tp * pp)
    micro = _whole(given, "train_micro_batch_size_per_gpu", 1)
    count = _whole(given, "gradient_accumulation_steps", 1)
    batch = _whole(given, "train_batch_size", micro * count * dp)
    if tp * pp * dp != scope.num_devices or batch != micro * count * dp:
        raise FileError(
            f"a batch of {batch} is not {micro} x {count} x dp={dp} on {scope.num_devices} devices",
            fix="make train_batch_size the product of micro-batch, accumulation steps and replicas",
            field="train_batch_size",
        )
    again = _table(given, "activation_checkpointing").get("number_checkpoints")
    full = bool(pipeline.get("activation_checkpoint_interval", 0)) or bool(again)
    return FrameworkStrategy(
        tp=tp, dp=dp, zero=_whole(_table(given, "zero_optimization"), "stage", 0, 0),
        micro_batch=micro, num_microbatches=count, recompute="full" if full else "none",
        pp=pp, layers=even_layers(_num_layers(scope), pp) if pp > 1 else (),
    )  # fmt: skip


def _table(given: dict[str, Any], name: str) -> dict[str, Any]:
    value = given.get(name, {})
    if not isinstance(value, dict):
        raise FileError(f"found {value!r}", fix="make it an object", field=name)
    return value


def _whole(table: dict[str, Any], name: str, default: int, least: int = 1) -> int:
    value = table.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise FileError(
            f"found {value!r}", fix=f"give a whole number of at least {least}", field=name
        )
    return value
