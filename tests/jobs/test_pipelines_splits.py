"""Pipelines built by hand split every op as its micro-batch allows."""

import pytest

from partita.cluster import resolve
from partita.costs.sharding import dims_of
from partita.graph.chain import chain_of
from partita.graph.rebatch import rebatch
from partita.jobs.strategies import PIPELINES
from partita.jobs.workload import load


@pytest.mark.parametrize("name", PIPELINES)
def test_every_split_is_legal_for_a_micro_batch(name):
    cluster = resolve("8xA100")
    work = load("vit-b16", batch=32)
    graph = work.graph
    plans = PIPELINES[name].plans(graph, chain_of(graph), cluster, work.batch)
    assert plans
    for stages, schedule in plans:
        micro = rebatch(graph, work.batch // schedule.num_microbatches)
        for stage in stages:
            for split in stage.splits:
                legal = dims_of(micro.call(micro.op(split.op)), stage.mesh.axes)
                assert split.dims in legal, (split, schedule)
