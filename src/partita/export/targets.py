"""The formats that plans are exported to, each with a writer, a reader and what it cannot say."""

from collections.abc import Callable
from dataclasses import dataclass

from partita.export import deepspeed, fsdp2, megatron, torchtitan
from partita.export.scope import ExportScope
from partita.jobs.frameworks import FrameworkStrategy

TORCH_SCHEDULE = "torch-schedule"  # an order of micro-batches, without splits: see `job.py`


@dataclass(frozen=True)
class ExportTarget:
    """A framework's own format; `refusal` says why it cannot be told a strategy."""

    name: str
    what: str
    version: str
    refusal: Callable[[FrameworkStrategy, ExportScope], str]
    write: Callable[[FrameworkStrategy, ExportScope], str]
    read: Callable[[str, ExportScope], FrameworkStrategy]


def _target(name: str, what: str, module: object) -> ExportTarget:
    parts = (getattr(module, part) for part in ("VERSION", "refusal", "write", "read"))
    return ExportTarget(name, what, *parts)


TARGETS: dict[str, ExportTarget] = {
    "torchtitan": _target("torchtitan", "a job configuration in TOML", torchtitan),
    "megatron": _target("megatron", "arguments of pretrain_gpt.py", megatron),
    "deepspeed": _target("deepspeed", "a configuration in JSON", deepspeed),
    "fsdp2": _target("fsdp2", "fully_shard and parallelize_module as Python", fsdp2),
}
NAMES = (*TARGETS, TORCH_SCHEDULE)
