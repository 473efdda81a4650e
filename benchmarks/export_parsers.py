"""Exports read by their owners' own parsers: what they take each degree for.

    python benchmarks/export_parsers.py [--megatron-lm FOLDER]

Parsers that cannot be imported are named and left out. Put packages on PYTHONPATH as docs/export.md
says; `--megatron-lm` is a clone of Megatron-LM, whose arguments are not part of megatron-core.
"""

import argparse
import json
import shlex
import sys
import tempfile
import typing
import warnings
from pathlib import Path

from partita.cluster import resolve
from partita.export.scope import ExportScope
from partita.export.targets import TARGETS
from partita.jobs.frameworks import FrameworkStrategy, even_layers
from partita.jobs.workload import load

MODEL, MACHINE, DEVICES = "llama-3-8b", "8x8xH100", 64


def scope_of(batch: int) -> ExportScope:
    """The model on the machine."""
    work = load(MODEL, batch=batch)
    nodes = len({device.node for device in resolve(MACHINE).devices})
    return ExportScope(MODEL, work.graph, batch, work.dtype, work.optimizer, DEVICES, nodes)


def torchtitan() -> dict[str, object]:
    """torchtitan's ConfigManager."""
    from torchtitan.config import ConfigManager

    strategy = FrameworkStrategy(
        tp=2, sp=True, cp=2, pp=4, vpp=2, dp=4, zero=1, num_microbatches=8, recompute="selective",
        schedule="interleaved", layers=even_layers(32, 8),
    )  # fmt: skip
    text = TARGETS["torchtitan"].write(strategy, scope_of(strategy.batch))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "job.toml"
        file.write_text(text)
        config = ConfigManager().parse_args([f"--job.config_file={file}"])
    parallel = config.parallelism
    return {
        "model": f"{config.model.name} {config.model.flavor}",
        "tp": parallel.tensor_parallel_degree,
        "cp": parallel.context_parallel_degree,
        "pp": parallel.pipeline_parallel_degree,
        "dp_shard": parallel.data_parallel_shard_degree,
        "schedule": parallel.pipeline_parallel_schedule,
        "stages": len(parallel.module_fqns_per_model_part or ()),
        "recompute": config.activation_checkpoint.mode,
    }


def deepspeed() -> dict[str, object]:
    """DeepSpeedConfig; its world is one process here, so the batch is that of one replica."""
    from deepspeed.runtime.config import DeepSpeedConfig

    strategy = FrameworkStrategy(dp=64, zero=3, micro_batch=2, num_microbatches=2, recompute="full")
    value = json.loads(TARGETS["deepspeed"].write(strategy, scope_of(strategy.batch)))
    value["train_batch_size"] //= strategy.dp
    config = DeepSpeedConfig(value)
    return {
        "zero": int(config.zero_optimization_stage),
        "micro-batch": config.train_micro_batch_size_per_gpu,
        "accumulation": config.gradient_accumulation_steps,
        "bf16": config.bfloat16_config.enabled,
    }


def megatron_arguments() -> tuple[FrameworkStrategy, str]:
    """What is read by both of Megatron's parsers."""
    strategy = FrameworkStrategy(
        tp=4, sp=True, cp=2, pp=4, vpp=2, dp=2, zero=1, num_microbatches=16, recompute="norms",
        schedule="interleaved", layers=(3, 4, 4, 5, 4, 4, 4, 4),
    )  # fmt: skip
    return strategy, TARGETS["megatron"].write(strategy, scope_of(strategy.batch))


def megatron_core() -> dict[str, object]:
    """The layout of the pipeline, as megatron-core reads it."""
    from megatron.core.transformer.enums import LayerType
    from megatron.core.transformer.pipeline_parallel_layer_layout import (
        PipelineParallelLayerLayout,
    )

    strategy, text = megatron_arguments()
    words = shlex.split(text, comments=True)
    layout = words[words.index("--pipeline-model-parallel-layout") + 1]
    theirs = PipelineParallelLayerLayout(layout, strategy.pp)
    theirs.validate_layer_layout(sum(strategy.layers), 0)
    counts = [
        sum(one == LayerType.decoder for one in theirs.layout[rank][chunk])
        for chunk in range(strategy.vpp)
        for rank in range(strategy.pp)
    ]
    assert tuple(counts) == strategy.layers, counts
    return {"layout": layout, "layers": counts}


def megatron_lm() -> dict[str, object]:
    """All arguments, as Megatron-LM's own parser takes them."""
    if not hasattr(typing, "override"):  # Python 3.11: the name it imports is newer
        typing.override = lambda method: method  # type: ignore[attr-defined]
    from megatron.training.arguments import parse_args

    _, text = megatron_arguments()
    sys.argv = ["pretrain_gpt.py", *shlex.split(text, comments=True)]
    given = parse_args()
    names = (
        "tensor_model_parallel_size", "context_parallel_size", "cp_comm_type",
        "pipeline_model_parallel_size", "sequence_parallel",
        "micro_batch_size", "global_batch_size", "use_distributed_optimizer",
        "recompute_granularity", "recompute_modules", "num_layers", "hidden_size",
        "num_query_groups", "ffn_hidden_size", "normalization", "vocab_size",
    )  # fmt: skip
    return {name: getattr(given, name) for name in names}


def main() -> None:
    """Print what each parser took."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megatron-lm", metavar="FOLDER")
    folder = parser.parse_args().megatron_lm
    readers = {"torchtitan": torchtitan, "deepspeed": deepspeed, "megatron-core": megatron_core}
    if folder is not None:
        sys.path.insert(0, folder)
        readers["megatron-lm"] = megatron_lm
    warnings.simplefilter("ignore")
    for name, read in readers.items():
        try:
            print(name, json.dumps(read(), default=str))
        except ImportError as error:
            print(name, f"not installed: {error}")


if __name__ == "__main__":
    main()
