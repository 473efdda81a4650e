"""How many bytes one gather brings."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partita.cluster import resolve
from partita.costs.collectives import Collectives
from partita.costs.layouts import MEMORY_SHARE, best_bundle, gather_start
from partita.plans import Axis, Mesh


@given(
    total=st.floats(1e6, 1e12), start_s=st.floats(1e-6, 1e-2), byte_s=st.floats(1e-12, 1e-9),
    other=st.floats(0.01, 100.0),
)  # fmt: skip
def test_no_other_size_exposes_less_and_starts_less_together(total, start_s, byte_s, other):
    def seconds(size: float) -> float:
        return size * byte_s + start_s * total / size

    best = best_bundle(total, start_s, byte_s, 1e30)
    assert seconds(max(best, 1)) <= seconds(max(best, 1) * other) * (1 + 1e-6) + start_s * 1e-6


def test_a_bundle_takes_a_part_of_the_memory_at_the_most():
    assert best_bundle(1e15, 1.0, 1e-12, 80e9) == int(MEMORY_SHARE * 80e9)


def test_nothing_to_send_needs_no_bundle():
    assert best_bundle(1e9, 1e-4, 0.0, 80e9) == 0


def test_a_start_and_bytes_add_up_to_the_time_of_a_gather():
    cluster = resolve("2x8xA100")
    collectives = Collectives(cluster)
    mesh = Mesh((Axis("dp", 2), Axis("tp", 8)), tuple(range(16)))
    for axes in ((0,), (1,), (0, 1)):
        start, each = gather_start(collectives, mesh, axes)
        for size in (1e8, 1e9):
            whole = sum(collectives.seconds("all_gather", size, mesh.groups(a)) for a in axes)
            assert start + size * each == pytest.approx(whole, rel=0.02)
