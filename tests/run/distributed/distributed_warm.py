"""What every rank would do first, done once: the server that forks ranks imports this.

A first export imports half of PyTorch's compiler, a first program loads what numba compiled, and
each rank would export the same models. Nothing is differentiated here, so it may still be forked.
"""

import torch
from distributed_models import BATCH, make
from distributed_plans import exported_once, graph_by_name, pipeline

from partita.cluster import resolve
from partita.engine import run
from partita.lower import lower_plan
from partita.verify import check_meaning

for name in ("mlp", "gpt", "resnet", "unet", "lstm", "moe", "t5"):
    graph_by_name(name)
    exported = exported_once(*make(name), {}, torch.device("cpu"))
    for share in (2, 4):
        exported.at(BATCH // share)

graph = graph_by_name("mlp")
plan = pipeline(graph, 2, "1f1b", 2)
lowered = lower_plan(plan.stages, plan.schedule, graph, resolve("2xA100"), run)
check_meaning(lowered.program, graph, lowered.stages, plan.schedule)
