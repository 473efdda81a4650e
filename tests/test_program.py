"""Programs: what they hold, what they refuse, and that text and files go both ways."""

import dataclasses
import json
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partita.errors import InputError, ProgramError
from partita.program import (
    KINDS,
    Kind,
    Lane,
    Memory,
    Program,
    ProgramBuilder,
    TaskName,
    parse_task_name,
    read_program,
)
from tests.quickness import least_cpu_s


def small() -> Program:
    """Forward and backward of two microbatches on one device, and a message over a link."""
    b = ProgramBuilder(time_unit="")
    gpu, other = b.lane("gpu0"), b.lane("gpu1")
    link = b.lane("0>1", "link")
    memory = b.memory("gpu0", 2.0)
    for i in range(2):
        f = b.add("stage0", gpu, 1, (), [(memory, 1.0, 0.0)], Kind.FORWARD, i)
        b.add("stage0", gpu, 2, [f], [(memory, 0.0, -1.0)], Kind.BACKWARD, i)
        send = b.add("act", [gpu, link], 0.5, [(f, 0.25)], (), Kind.SEND, i, priority=1.5)
        receive = b.add("act", other, 0.5, [send], (), Kind.RECEIVE, i)
        b.pair(send, receive)
    b.add("end", (), 0.0, [1, 5])
    return b.build()


def test_the_builder_fills_the_columns():
    program = small()
    assert program.num_tasks == 9
    assert program.duration.tolist() == [1, 2, 0.5, 0.5, 1, 2, 0.5, 0.5, 0]
    assert program.lanes_of(2) == (0, 2)
    assert program.lanes_of(8) == ()
    assert program.waits_of(2) == ((0, 0.25),)
    assert program.waits_of(8) == ((1, 0.0), (5, 0.0))
    assert program.pairs.tolist() == [[2, 3], [6, 7]]
    assert program.priority is not None
    assert program.priority.tolist() == [0, 0, 1.5, 0, 0, 0, 1.5, 0, 0]
    assert program.effect_memory.tolist() == [0, 0, 0, 0]
    assert program.blocks == ("stage0", "act", "end")
    assert [program.task_name(i) for i in (0, 5, 6, 8)] == [
        "F0@stage0",
        "B1@stage0",
        "S1@act",
        "X@end",
    ]


def test_tasks_are_found_by_name():
    program = small()
    assert program.tasks_named("B1@stage0") == (5,)
    assert program.tasks_named("X@end") == (8,)
    assert program.tasks_named("F7@stage0") == ()
    assert program.tasks_named("F0@nowhere") == ()


def test_left_out_columns_mean_nothing_special():
    program = Program(
        lanes=(Lane("a"),),
        duration=np.array([1.0, 2.0]),
        lane_start=np.array([0, 1, 2], np.int32),
        lane_of=np.array([0, 0], np.int32),
        wait_start=np.array([0, 0, 1], np.int32),
        wait_on=np.array([0], np.int32),
    )
    assert program.wait_delay.tolist() == [0.0]
    assert program.effect_start.tolist() == [0, 0, 0]
    assert program.task_name(1) == "X@"
    assert program.pairs.shape == (0, 2)


def test_columns_cannot_be_written():
    program = small()
    for name in ("duration", "lane_of", "wait_on", "kind", "pairs", "priority"):
        with pytest.raises(ValueError, match="read-only"):
            getattr(program, name)[0] = 0
    with pytest.raises(dataclasses.FrozenInstanceError):
        program.order = None  # type: ignore[misc]


def test_a_program_does_not_change_with_the_arrays_it_was_made_of():
    durations = np.array([1.0, 2.0])
    shared = durations[:]  # a view with the right type
    program = dataclasses.replace(one_lane(2), duration=shared)
    durations[0] = 9.0
    assert program.duration.tolist() == [1.0, 2.0]


def one_lane(tasks: int) -> Program:
    b = ProgramBuilder()
    gpu = b.lane("gpu")
    for i in range(tasks):
        b.add("x", gpu, 1.0, kind=Kind.FORWARD, microbatch=i)
    return b.build()


def test_a_task_takes_at_most_97_bytes_with_its_timeline():
    b = ProgramBuilder()
    gpu, memory = b.lane("gpu"), b.memory("gpu")
    for i in range(1000):
        b.add("x", gpu, 1.0, [max(0, i - 1), max(0, i - 2)] if i else [], [(memory, 1.0, -1.0)])
    program = b.build()
    times = 2 * 8
    assert program.nbytes / 1000 + times <= 97


def build_many(tasks: int) -> None:
    b = ProgramBuilder()
    lanes = [b.lane(f"gpu{i}") for i in range(8)]
    memory = b.memory("m")
    for i in range(tasks):
        b.add("x", lanes[i % 8], 1.0, [i - 1] if i else (), [(memory, 1.0, -1.0)], Kind.FORWARD, i)
    b.build()


def test_a_hundred_thousand_tasks_are_built_in_a_second_or_two():
    assert least_cpu_s(lambda: build_many(100_000), 2.0) < 2.0


def test_numbers_from_numpy_serve_as_lanes():
    b = ProgramBuilder()
    b.lane("a")
    b.add("x", np.int64(0), 1.0)
    b.add("y", np.array([0]), 1.0)
    assert b.build().lane_of.tolist() == [0, 0]


def test_programs_are_equal_when_all_they_hold_is():
    assert small() == small()
    assert small() != one_lane(9)
    assert small() != dataclasses.replace(small(), priority=None)
    assert small() != dataclasses.replace(small(), time_unit="s")
    assert small() != "a program"


def test_a_program_prints_as_one_line():
    assert str(small()) == (
        "program of 9 tasks on 3 lanes (2 device, 1 link), 8 waits, 1 memories, 8 of work"
    )
    assert repr(ProgramBuilder().build()) == (
        "program of 0 tasks on 0 lanes (none), 0 waits, 0 memories, 0 s of work"
    )


# --- names --------------------------------------------------------------------------------------


@given(
    kind=st.sampled_from(Kind),
    microbatch=st.integers(-1, 2**31 - 1),
    block=st.text(max_size=20),
)
def test_task_names_go_both_ways(kind, microbatch, block):
    label = TaskName(kind, microbatch, block)
    assert parse_task_name(str(label)) == label


def test_a_name_reads_as_kind_microbatch_block():
    assert parse_task_name("F3@stage2") == TaskName(Kind.FORWARD, 3, "stage2")
    assert parse_task_name("U@a@b") == TaskName(Kind.UPDATE, -1, "a@b")
    assert "".join(KINDS) == "FBDWUCSRX"


@pytest.mark.parametrize(
    "text", ["", "F3", "Z3@a", "f3@a", "F03@a", "F-1@a", "F99999999999@a", "@a"]
)
def test_what_is_no_name_is_refused(text):
    with pytest.raises(ProgramError, match="does not name a task; write one of FBDWUCSRX"):
        parse_task_name(text)


# --- refusals -----------------------------------------------------------------------------------


def broken(**changes: object) -> Program:
    return dataclasses.replace(small(), **changes)


def changed(name: str, index: object, value: float) -> dict[str, object]:
    column = getattr(small(), name).copy()
    column[index] = value
    return {name: column}


REFUSED = {
    "nan": (changed("duration", 1, np.nan), "duration: B0@stage0 lasts nan; a duration is"),
    "negative": (changed("duration", 4, -1), "duration: F1@stage0 lasts -1; a duration is"),
    "endless": (changed("duration", 0, np.inf), "duration: F0@stage0 lasts inf; a duration is"),
    "no lane": (changed("duration", 8, 2), "lane_of: X@end is on no lane but lasts 2; give it"),
    "unknown lane": (changed("lane_of", 0, 3), "lane_of: F0@stage0 names lane 3; there are 3"),
    "negative lane": (changed("lane_of", 0, -1), "lane_of: F0@stage0 names lane -1; there are 3"),
    "lane twice": (changed("lane_of", 2, 2), "lane_of: S0@act names lane 0>1 twice; name it once"),
    "unknown task": (changed("wait_on", 0, 9), "wait_on: B0@stage0 names task 9; there are 9"),
    "itself": (changed("wait_on", 0, 1), "wait_on: B0@stage0 waits for itself; remove"),
    "delay": (changed("wait_delay", 1, -1), "wait_delay: S0@act waits -1 after F0@stage0; a delay"),
    "memory": (
        changed("effect_memory", 0, 1),
        "effect_memory: F0@stage0 names memory 1; there are",
    ),
    "amount": (
        changed("effect_at_start", 0, np.nan),
        "effect_at_start: F0@stage0 takes nan of gpu0",
    ),
    "kind": (changed("kind", 3, 9), "kind: task 3 has kind 9; 0 to 8 is there"),
    "block": (changed("block", 3, 3), "block: task 3 has block 3; 0 to 2 is there"),
    "microbatch": (changed("microbatch", 3, -2), "microbatch: task 3 has microbatch -2; -1 to"),
    "pair": (changed("pairs", (1, 0), 9), r"pairs: pair 1 names tasks \[9, 7\]; there are 9"),
    "priority": (
        changed("priority", 0, np.inf),
        "priority: F0@stage0 has priority inf; a priority",
    ),
    "start column": (
        changed("lane_start", 0, 1),
        "lane_start: does not rise from 0 to the 10 entries",
    ),
    "falling": (changed("wait_start", 2, 3), "wait_start: does not rise from 0 to the 8 entries"),
    "order": ({"order": [0] * 9}, "order: does not name every task once; give a permutation"),
    "short order": ({"order": [0, 1]}, "order: has 2 entries; one per task is needed, 9 in all"),
    "short labels": ({"kind": [0, 1]}, "kind: has 2 entries; one per task is needed, 9 in all"),
    "short delays": ({"wait_delay": [1.0]}, "wait_delay: has 1 entries; one per wait is needed"),
    "short starts": ({"wait_start": [0]}, "wait_start: has 1 entries; one per task and one at"),
    "square": ({"duration": np.ones((3, 3))}, "duration: is not a flat list; one number per task"),
    "square lanes": ({"lane_of": np.ones((3, 3), int)}, "lane_of: is not a flat list"),
    "pair of three": ({"pairs": np.zeros((1, 3), int)}, r"pairs: has shape \(1, 3\); two tasks"),
    "half a lane": ({"lane_of": np.full(9, 0.5)}, "lane_of: holds values of type float64; whole"),
    "huge": ({"order": [2**40] * 9}, "order: holds 1099511627776; -2147483648 to 2147483647"),
    "words": ({"duration": ["a"] * 9}, "duration: cannot be read as numbers"),
    "ragged": ({"duration": [[1], [1, 2]]}, "duration: cannot be read as numbers"),
    "lanes alike": ({"lanes": (Lane("a"), Lane("b"), Lane("a"))}, "lanes: 'a' is there twice"),
    "blocks alike": ({"blocks": ("a", "a", "b")}, "blocks: 'a' is there twice; give each its own"),
    "unit": ({"time_unit": "minutes"}, 'time_unit: found \'minutes\'; "s" or "" is needed'),
}


@pytest.mark.parametrize(("changes", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_run_is_refused_by_name(changes, message):
    with pytest.raises(ProgramError, match=message):
        broken(**changes)


def test_lanes_and_memories_need_names_and_sensible_capacities():
    with pytest.raises(ProgramError, match="lanes: a lane has no name"):
        Lane("")
    with pytest.raises(ProgramError, match="memories: a memory has no name"):
        Memory("")
    for capacity in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ProgramError, match="memories: m has capacity"):
            Memory("m", capacity)


# --- files --------------------------------------------------------------------------------------


@st.composite
def programs(draw):
    b = ProgramBuilder(draw(st.sampled_from(["s", ""])))
    lanes = [b.lane(f"lane{i}", draw(st.text(max_size=4))) for i in range(draw(st.integers(1, 3)))]
    b.memory("m", draw(st.none() | st.floats(0, 1e12)))
    number = st.floats(0, 1e6)
    for i in range(draw(st.integers(0, 6))):
        on = draw(st.sets(st.sampled_from(lanes), min_size=1))
        waits = draw(st.lists(st.tuples(st.integers(0, i - 1), number), max_size=3)) if i else []
        effects = draw(st.lists(st.tuples(st.just(0), st.floats(-9, 9), number), max_size=2))
        b.add(
            draw(st.text(max_size=3)),
            sorted(on),
            draw(number),
            waits,
            effects,
            draw(st.sampled_from(Kind)),
            draw(st.integers(-1, 5)),
            draw(st.floats(-5, 5)),
        )
    b.order = draw(st.none() | st.permutations(range(len(b))))
    return b.build()


@given(programs())
def test_a_program_is_the_same_after_a_file(program):
    assert Program.from_json(program.to_json()) == program


def test_a_program_is_read_from_disk(tmp_path):
    path = tmp_path / "program.json"
    path.write_bytes(small().to_json())
    assert read_program(path) == small()


def test_a_wrong_file_is_named_with_the_field(tmp_path):
    path = tmp_path / "program.json"
    plain = small().to_plain()
    path.write_text(json.dumps({**plain, "duration": [-1.0] * 9}))
    with pytest.raises(ProgramError, match=r"program.json: duration: F0@stage0 lasts -1"):
        read_program(path)
    path.write_text(json.dumps({**plain, "wait_on": ["x"]}))
    with pytest.raises(InputError, match=r"program.json: wait_on\[0\]: Expected `int`"):
        read_program(path)
    path.write_text(json.dumps({**plain, "format": "partita/program@3"}))
    with pytest.raises(InputError, match=r"program.json: format: .*newer partita"):
        read_program(path)


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-3, 12),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=5),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=10) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=12,
)


@settings(max_examples=400)
@given(data=st.data())
def test_any_value_in_any_field_is_read_or_refused(data):
    plain = small().to_plain()
    field = data.draw(st.sampled_from(sorted(plain)))
    kept = plain.pop(field)
    if not data.draw(st.booleans(), "left out"):
        plain[field] = data.draw(VALUES)
        if isinstance(kept, list) and kept and data.draw(st.booleans(), "one entry"):
            kept[data.draw(st.integers(0, len(kept) - 1))] = data.draw(SCALARS)
            plain[field] = kept
    try:
        program = Program.from_json(json.dumps(plain).encode(), "p.json")
    except InputError as refusal:
        assert str(refusal).startswith("p.json: ")
    else:
        assert Program.from_json(program.to_json()) == program


def test_records_reports_and_the_verifier_start_without_a_compiler():
    reports = ["report.terminal", "report.trace", "report.svg_timeline"]
    modules = ["program", "timeline", "verify", *reports]
    code = "import sys\n" + "".join(f"import partita.{name}\n" for name in modules)
    code += "sys.exit(any(heavy in sys.modules for heavy in ('numba', 'torch', 'ortools')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
