"""A limit on time ends drafting early enough for named strategies, also inside a step."""

import time
from dataclasses import replace

from partita.cluster import resolve
from partita.costs.collectives import Collectives
from partita.jobs.plan import plan
from partita.jobs.plan_tried import Clock
from partita.jobs.workload import load
from partita.search.base import Stop
from partita.search.joint.drafts import Drafting, wanted_count
from partita.search.joint.meshes import arrangements


def drafting(interrupted=lambda: False, batch=32):
    cluster = resolve("4xA100")
    return Drafting(
        load("gpt2", batch=batch).graph, "adamw", cluster, Collectives(cluster), lambda *_: True,
        interrupted=interrupted,
    ), {a.num_stages: a for a in arrangements(cluster, 4)}  # fmt: skip


def test_the_last_part_of_the_time_is_for_named_strategies():
    begun = time.perf_counter()
    assert Clock(Stop(time_s=100.0), begun - 80).is_late()
    assert not Clock(Stop(time_s=100.0), begun - 50).is_late()
    assert not Clock(Stop(), begun - 1e6).must_end()
    assert Clock(Stop(interrupted=lambda: True), begun).must_end()


def test_an_interrupted_draft_ends_inside_its_searches():
    asked = []

    def interrupted():
        asked.append(1)
        return True

    made, known = drafting(interrupted)
    begun = time.process_time()
    made.draft(known[2], 4)
    assert asked
    assert time.process_time() - begun < 10


def test_micro_batches_are_some_for_each_stage():
    made, known = drafting()
    assert wanted_count(1) == 1
    assert wanted_count(4) == 16
    counts = made.counts(known[2])
    assert {4, 8} <= set(counts)


def test_small_micro_batches_are_tried_before_it_is_said_that_nothing_fits():
    usual = resolve("2xA100-40GB-SXM")
    kind = replace(usual.kinds[0], memory_bytes=int(1.6 * 1024**3))
    found = plan("gpt2", replace(usual, kinds=(kind,)), batch=64)
    assert found.best is not None
    assert found.best.simulation.schedule.num_microbatches >= 32
