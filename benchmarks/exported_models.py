"""The small models of `run_random.py`, exported when this is imported.

A server that forks ranks imports it once: ranks then start with the exports at hand. Nothing here
differentiates, so that forking is safe.
"""

import sys
from pathlib import Path

import torch

TESTS = Path(__file__).resolve().parents[1] / "tests"
sys.path[:0] = [str(TESTS.parent), str(TESTS / "run" / "distributed")]

from distributed_models import make  # noqa: E402

from partita.run.distributed.model import RunModel  # noqa: E402

MODELS = ("mlp", "gpt", "resnet", "unet", "lstm", "moe", "t5")
EXPORTS: dict[str, RunModel] = {}


def exported_once(module, args, kwargs, device):
    """Exports of a model are made once in a process: every make() of a name is the same."""
    shapes = [tuple(arg.shape) for arg in args]
    key = f"{module} of {next(module.parameters()).dtype} and {shapes}"
    if key not in EXPORTS:
        EXPORTS[key] = RunModel(module, args, kwargs, device)
    return EXPORTS[key]


torch.set_num_threads(1)
if __name__ == "exported_models":  # not where a rank imports its main module again
    for name in MODELS:
        exported = exported_once(*make(name), {}, torch.device("cpu"))
        for rows in (1, 2, 4):  # of micro-batches, and of replicas' parts of them
            exported.at(rows)
