"""An op on a mesh gives what it gives in one piece, and does not where an exchange is missing."""

import math

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from partita.errors import GraphError
from partita.graph.loops import loop_nest
from partita.plans import Axis
from tests.graph.calls import KINDS, calls, make_call

torch = pytest.importorskip("torch")
from partita.run.local.ops import needs_exchange  # noqa: E402
from tests.run.local.whole_ops import make_case, ops_of, run_on_mesh  # noqa: E402

COMPUTED = [kind for kind in KINDS if kind not in ("constant", "optimizer")]
AXES = [
    Axis("x", 2), Axis("x", 3), Axis("x", 2, (1, 2)), Axis("x", 2, (3, 1)), Axis("x", 3, (1, 2, 1)),
]  # fmt: skip
tried = settings(max_examples=25, deadline=None)


def legal_dims(call, axes):
    """Every way to give each axis a dim that it cuts into whole elements, or none."""
    dims = [dim for dim in loop_nest(call).dims if not dim.whole]
    ways = [()]
    for axis in axes:
        longer = [(*way, "") for way in ways]
        for way in ways:
            for dim in dims:
                cut = [a.parts for a, d in zip(axes, way, strict=False) if d == dim.name]
                if dim.extent % (math.prod(cut) * axis.parts) == 0:
                    longer.append((*way, dim.name))
        ways = longer
    return ways


def case_or_skip(call, dims, axes):
    """Values for a call; those that PyTorch does not compute are left out."""
    try:
        return make_case(call, dims, axes)
    except (ValueError, IndexError, RuntimeError, GraphError):
        return None


def check(call, dims, axes):
    case = case_or_skip(call, dims, axes)
    if case is None:
        return
    everywhere = tuple(range(len(axes)))
    for name in ops_of(case):
        found, error = run_on_mesh(case, name, dims, axes, everywhere)
        assert error < 1e-9, f"replicas of {name} differ along {dims}"
        for tensor, value in found.items():
            right = case.values[tensor]
            torch.testing.assert_close(value, right, msg=lambda m: f"{tensor} {dims}: {m}")  # noqa: B023


@pytest.mark.parametrize("kind", COMPUTED)
@tried
@given(data=st.data())
def test_an_op_on_one_axis_gives_what_the_whole_op_gives(kind, data):
    call = data.draw(calls(kind))
    axes = (data.draw(st.sampled_from(AXES)),)
    for dims in legal_dims(call, axes):
        check(call, dims, axes)


@pytest.mark.parametrize("kind", COMPUTED)
@tried
@given(data=st.data())
def test_an_op_on_two_axes_gives_what_the_whole_op_gives(kind, data):
    call = data.draw(calls(kind))
    first, second = data.draw(st.sampled_from(AXES)), data.draw(st.sampled_from(AXES))
    axes = (first, Axis("y", second.size, second.weights))
    ways = [way for way in legal_dims(call, axes) if all(way)]
    assume(ways)
    check(call, data.draw(st.sampled_from(ways)), axes)
