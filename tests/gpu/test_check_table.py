"""Tables of regions are proven before a launch: right ones pass, wrong ones do not."""

import random
from dataclasses import fields, replace
from functools import cache

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from rtasks_cases import CASES, Arena, program_of, region_of  # noqa: E402
from rtasks_modules import examples, lower_module, planned  # noqa: E402
from table_mutants import CHANGES, Launch, does_wrong, launch_of  # noqa: E402

from partita.errors import VerificationError  # noqa: E402
from partita.gpu.rtasks.check_table import Rectangle, check_table, why_unsafe  # noqa: E402
from partita.gpu.rtasks.tileops import tiles  # noqa: E402


def parts_of(launch: Launch) -> tuple[object, ...]:
    return tuple(getattr(launch, each.name) for each in fields(launch))


def unsafe(launch: Launch) -> tuple[str, ...]:
    return why_unsafe(*parts_of(launch))


@cache
def launches() -> dict[str, Launch]:
    """Every kind of op with its smallest and largest tiles."""
    made = {}
    for case in CASES:
        for pick in (0, -1):
            torch.manual_seed(0)
            arena = Arena()
            ops, edges, _ = case(arena)
            chosen = [tiles(op)[pick] for op in ops]
            program = program_of(ops, chosen, edges)
            sizes = arena.size, arena.wide_size
            made[f"{case.__name__} {pick}"] = launch_of(region_of(ops), chosen, program, *sizes)
    return made


@cache
def model_launches(name: str) -> tuple[Launch, ...]:
    lowered = lower_module(*examples()[name])
    data, wide = lowered.arena.data.numel(), lowered.arena.wide.numel()
    plans = [plan for plan in planned(lowered) if plan is not None]
    return tuple(launch_of(p.region, p.tiles, p.program, data, wide) for p in plans)


@pytest.mark.parametrize("name", [f"{case.__name__} {pick}" for case in CASES for pick in (0, -1)])
def test_a_right_table_is_safe_and_runs_in_any_turns(name):
    launch = launches()[name]
    assert unsafe(launch) == ()
    assert does_wrong(launch, launch, tries=3) is None


@pytest.mark.parametrize("name", ["mlp, 3 rows", "nasnet", "cells", "wide"])
def test_tables_of_models_are_safe(name):
    for launch in model_launches(name):
        assert unsafe(launch) == ()


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_wrong_table_that_passes_does_nothing_wrong(change):
    rng, refused = random.Random(7), 0
    for launch in (*launches().values(), *model_launches("cells")):
        for _ in range(3):
            mutant = change(launch, rng)
            if mutant is None or mutant == launch:
                continue
            if unsafe(mutant):
                refused += 1
            else:
                assert does_wrong(mutant, launch, tries=6) is None, unsafe(mutant)
    assert refused


def test_a_refusal_says_what_would_happen():
    launch = launches()["two_layers 0"]
    waiting = next(at for at, row in enumerate(launch.table.rows) if row[3])
    rows = list(launch.table.rows)
    rows[waiting] = (*rows[waiting][:3], 0, *rows[waiting][4:])
    hasty = replace(launch, table=replace(launch.table, rows=tuple(rows)))
    assert "'b' reads what 'a' writes and does not wait for it" in unsafe(hasty)[0]
    rows[waiting] = (99, *launch.table.rows[waiting][1:])
    other = replace(launch, table=replace(launch.table, rows=tuple(rows)))
    with pytest.raises(VerificationError, match="has the operands of no op with code 99"):
        check_table(*parts_of(other))


places = st.builds(
    Rectangle, st.integers(0, 30), st.integers(1, 4), st.integers(1, 5), st.integers(5, 9)
)


@given(one=places, other=places)
def test_rectangles_meet_exactly_where_they_share_an_element(one, other):
    def elements(r: Rectangle) -> set[int]:
        return {r.at + row * r.stride + col for row in range(r.rows) for col in range(r.cols)}

    assert one.meets(other) == bool(elements(one) & elements(other))
    assert one.end == max(elements(one)) + 1
