"""Small joint problems: by hand, and at random for Hypothesis."""

import numpy as np
from hypothesis import strategies as st

from partita.problems.joint import (
    COLUMNS,
    Cell,
    FlightKey,
    Grouping,
    JointProblem,
    JointSchedule,
    JointStrategy,
    MeshShape,
    TableKey,
    TiedBytes,
    rounded_in_flight,
)
from partita.search.joint.orders import in_flight, refused

SCHEDULES = (
    JointSchedule("1f1b"),
    JointSchedule("zb-h1", deferred=True),
    JointSchedule("zb-v", 2, "wave", deferred=True),
    JointSchedule("interleaved", 2, "looped"),
    JointSchedule("gpipe"),
)


def strategy(kinds: int = 1, **columns) -> JointStrategy:
    """A strategy whose columns are 0 where they are not given."""
    values = {name: np.broadcast_to(columns.get(name, 0.0), kinds) * 1.0 for name in COLUMNS}
    return JointStrategy(**values)


def flights_of(schedules, groups, counts):
    """What every order has in flight; nothing where it refuses."""
    flights = {}
    for k, schedule in enumerate(schedules):
        for p in groups:
            for m in counts:
                key = FlightKey(k, p, m)
                name, v = schedule.name, schedule.virtual_stages
                flights[key] = () if refused(name, p, v, m) else in_flight(name, p, v, m)
    return flights


def chain(*seconds, budgets=(100.0, 100.0), saved=0.0, checkpointing=("none",), m=4):
    """Two groups of one device, one strategy that computes; segments in seconds."""
    kinds = len(seconds)
    grouping = Grouping(((0,), (1,)), (0, 0), budgets)
    schedules = (SCHEDULES[0], SCHEDULES[3])
    shape = MeshShape((1,))
    own = strategy(kinds, compute=np.array(seconds), forward=np.array(seconds) / 3, saved=saved)
    return JointProblem(
        4, True, tuple(range(kinds)), (0.0,) * kinds, (grouping,), (Cell(0, m),), schedules,
        {(0, m): (shape,)}, {TableKey(0, shape, m, min(m, 2)): (own,)},
        flights_of(schedules, (2,), (m,)), checkpointing,
    )  # fmt: skip


@st.composite
def tiny_problems(draw, most_segments: int = 4) -> JointProblem:
    """Up to two groups, four segments, two strategies: small enough to try everything."""
    n = draw(st.integers(1, most_segments))
    kinds = draw(st.integers(1, n))
    segment_kind = tuple(draw(st.integers(0, kinds - 1)) for _ in range(n))
    training = draw(st.booleans())
    amount = st.sampled_from([0.0, 1.0, 2.0, 5.0]) | st.floats(0, 8)
    budgets = st.sampled_from([3.0, 12.0, 30.0, 1e6])
    groupings = [Grouping(((0, 1),), (0,), (draw(budgets),))]
    if draw(st.booleans()):
        patterns = draw(st.sampled_from([(1, 1), (1, 2)]))
        caps = (draw(budgets), draw(budgets))
        groupings.append(Grouping(((0,), (1,)), patterns, caps, draw(amount), draw(amount)))
    counts = draw(st.lists(st.sampled_from([1, 2, 4]), min_size=1, max_size=2, unique=True))
    cells = tuple(Cell(g, m) for g in range(len(groupings)) for m in sorted(counts))
    schedules = tuple(
        draw(st.lists(st.sampled_from(SCHEDULES), min_size=1, max_size=3, unique=True))
    )
    tables, meshes = {}, {}
    for cell in cells:
        grouping = groupings[cell.grouping]
        flight = rounded_in_flight(min(cell.num_microbatches, grouping.num_groups))
        for pattern in sorted(set(grouping.patterns)):
            shapes = (MeshShape((2,)),) if pattern == 0 else (MeshShape((1,)),)
            meshes[pattern, cell.num_microbatches] = shapes
            for shape in shapes:
                own = tuple(draw(strategies(kinds, n)) for _ in range(draw(st.integers(1, 2))))
                tables[TableKey(pattern, shape, cell.num_microbatches, flight)] = own
    allowed = st.lists(
        st.sampled_from(["none", "selective", "full"]), min_size=1, max_size=2, unique=True
    )
    return JointProblem(
        batch=4, training=training, segment_kind=segment_kind,
        crossing_bytes=tuple(draw(amount) for _ in range(n)), groupings=tuple(groupings),
        cells=cells, schedules=schedules, meshes=meshes, strategies=tables,
        in_flight=flights_of(schedules, (1, 2), (1, 2, 4)),
        checkpointing=tuple(draw(allowed)), likely_stages=draw(st.integers(1, 2)),
    )  # fmt: skip


@st.composite
def strategies(draw, kinds: int, n: int) -> JointStrategy:
    """Columns with small figures; what is saved with selective checkpointing is no more."""
    amount = st.sampled_from([0.0, 1.0, 2.0, 5.0]) | st.floats(0, 8)
    columns = {name: np.array([draw(amount) for _ in range(kinds)]) for name in COLUMNS}
    columns["again_saved"] = np.minimum(columns["again_saved"], columns["saved"])
    tied = ()
    if n > 1 and draw(st.booleans()):
        tied = (TiedBytes(0, n - 1, draw(amount)),)
    return JointStrategy(**columns, tied=tied, selective=draw(st.booleans()))
