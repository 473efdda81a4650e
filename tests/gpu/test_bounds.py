"""What a kernel reaches: what is predicted from sizes is what Triton's interpreter sees touched."""

from dataclasses import replace

import pytest
from in_interpreter import in_interpreter

torch = pytest.importorskip("torch")

from rtasks_cases import CASES, Arena, program_of, region_of  # noqa: E402

from partita.errors import VerificationError  # noqa: E402
from partita.gpu.bounds import Reach, check_inside, matrix_end, outside  # noqa: E402
from partita.gpu.flow.place import place  # noqa: E402
from partita.gpu.flow.steps import Flow, Step, Window  # noqa: E402
from partita.gpu.rtasks.bounds import region_reaches  # noqa: E402
from partita.gpu.rtasks.region import Region  # noqa: E402
from partita.gpu.rtasks.tileops import tiles  # noqa: E402
from partita.gpu.streams.bound import Bound  # noqa: E402
from partita.gpu.streams.bounds import step_reaches  # noqa: E402
from partita.gpu.streams.ways import ways  # noqa: E402

TOUCHED = """
from triton.runtime.interpreter import InterpreterBuilder

addresses = []
load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store


def loaded(self, ptrs, mask, *rest):
    addresses.append(ptrs.data[mask.data.astype(bool)])
    return load(self, ptrs, mask, *rest)


def stored(self, ptrs, value, mask, *rest):
    addresses.append(ptrs.data[mask.data.astype(bool)])
    return store(self, ptrs, value, mask, *rest)


InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store = loaded, stored


def touched(tensor):
    '''The elements of a tensor's memory that were touched.'''
    import numpy
    every = numpy.concatenate([each.reshape(-1) for each in addresses])
    every = numpy.unique(every.astype("int64"))
    begin = tensor.untyped_storage().data_ptr()
    inside = every[(every >= begin) & (every < begin + tensor.untyped_storage().nbytes())]
    return (inside - begin) // tensor.element_size()
"""

REGIONS = (
    TOUCHED
    + """
import torch
from rtasks_cases import CASES, Arena, program_of, region_of
from partita.gpu.rtasks.bounds import region_reaches
from partita.gpu.rtasks.region import Region
from partita.gpu.rtasks.tileops import tiles

for case in CASES:
    torch.manual_seed(0)
    arena = Arena()
    ops, edges, _ = case(arena)
    chosen = [tiles(op)[0] for op in ops]
    data, wide = arena.build(torch.float32, "cpu")
    addresses.clear()
    Region(region_of(ops), chosen, program_of(ops, chosen, edges), data, wide)()
    reaches = region_reaches(ops, data.numel(), wide.numel())
    for tensor, mine in ((data, [r for r in reaches if "vector" not in r.operand]),
                         (wide, [r for r in reaches if "vector" in r.operand])):
        seen = set(touched(tensor).tolist())
        assert {reach.begin + reach.needs - 1 for reach in mine} <= seen, case.__name__
        for reach in mine:
            seen -= set(range(reach.begin, reach.begin + reach.needs))
        assert not seen, (case.__name__, sorted(seen)[:5])
print("all right")
"""
)


def test_tiles_touch_what_is_predicted_up_to_the_last_element():
    pytest.importorskip("triton")
    assert in_interpreter(REGIONS) == "all right\n"


IMAGES = (
    TOUCHED
    + """
import torch
from test_bounds import STEPS, bound_of
from partita.gpu.streams.bounds import room, step_reaches
from partita.gpu.streams.ways import ways

for step, shapes, constants in STEPS:
    bound = bound_of(step, shapes, constants)
    for way in ways(bound.flow, step)[:-1]:
        addresses.clear()
        bound.run(step, way)
        for reach in step_reaches(bound, step, way):
            if reach.operand not in bound.values:
                continue
            tensor = bound.values[reach.operand]
            seen = touched(tensor) - tensor.storage_offset()
            assert seen.max() == reach.needs - 1 < room(tensor), (step, way, reach, seen.max())
print("all right")
"""
)


def randn(*shape):
    return torch.randn(shape)


def window(kernel, stride=1, padding=0):
    return Window((kernel, kernel), (stride, stride), (padding, padding))


STEPS = (
    (Step("y", "conv", ("x",), window=window(3, 2, 1), weight="w", residual="r"),
     {"x": (2, 20, 7, 7), "r": (2, 40, 4, 4)}, {"w": (40, 20, 3, 3)}),
    (Step("y", "conv", ("x",), window=window(1), weight="w", bias="b"),
     {"x": (1, 200, 5, 5)}, {"w": (24, 200, 1, 1), "b": (24,)}),
    (Step("y", "conv", ("x",), window=window(3, 1, 1), weight="w", groups=16),
     {"x": (1, 64, 5, 5)}, {"w": (64, 4, 3, 3)}),
    (Step("y", "depthwise", ("x",), window=window(3, 1, 1), weight="w", groups=21),
     {"x": (1, 21, 5, 5)}, {"w": (21, 1, 3, 3)}),
    (Step("y", "maxpool", ("x",), window=window(3, 2)), {"x": (1, 13, 9, 9)}, {}),
    (Step("y", "combine", ("x", "z"), factors=(1.0, 2.0), scale="s", shift="s"),
     {"x": (1, 21, 5, 5), "z": (1, 21, 5, 5)}, {"s": (21,)}),
)  # fmt: skip


def bound_of(step, shapes, constants):
    """One step in memory, its input a few channels into a wider buffer of its own."""
    from partita.gpu.flow.eager import compute

    held = {name: torch.randn(shape) for name, shape in constants.items()}
    values = {name: torch.randn(shape) for name, shape in shapes.items()}
    everything = {**shapes, "y": tuple(compute(step, values, held).shape)}
    dtypes = dict.fromkeys(everything, torch.float32)
    flow, placement = place(Flow((step,), tuple(shapes), ("y",), everything, dtypes, held))
    bound = Bound(flow, placement, torch.device("cpu"))
    bound.set_inputs(tuple(values.values()))
    return bound


def test_kernels_over_images_touch_their_images_up_to_what_is_predicted():
    pytest.importorskip("triton")
    assert in_interpreter(IMAGES) == "all right\n"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_a_region_in_an_arena_that_is_too_short_is_refused(case):
    arena = Arena()
    ops, edges, _ = case(arena)
    chosen = [tiles(op)[0] for op in ops]
    data, wide = arena.build(torch.float32, "cpu")
    program = program_of(ops, chosen, edges)
    reaches = region_reaches(ops, data.numel(), wide.numel())
    end = max(each.begin + each.needs for each in reaches if "vector" not in each.operand)
    Region(region_of(ops), chosen, program, data[:end], wide)
    with pytest.raises(VerificationError, match=f"element {end - 1:,} of|is reached"):
        Region(region_of(ops), chosen, program, data[: end - 1], wide)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_an_operand_that_is_moved_past_the_end_is_refused(case):
    arena = Arena()
    ops, _, _ = case(arena)
    size = -(-arena.size // 8) * 8
    for number, op in enumerate(ops):
        for field in ("reads", "writes", "weights"):
            for index, where in enumerate(getattr(op, field)):
                moved = list(getattr(op, field))
                moved[index] = replace(where, at=size - 8 * (where.rows * where.stride <= 8))
                bad = [*ops[:number], replace(op, **{field: tuple(moved)}), *ops[number + 1 :]]
                inside = where.rows * where.stride <= 8
                assert bool(outside(region_reaches(bad, size, arena.wide_size))) != inside


def test_a_step_whose_buffer_is_too_short_is_refused_before_its_launch():
    step, shapes, constants = STEPS[0]
    bound = bound_of(step, shapes, constants)
    way = ways(bound.flow, step)[0]
    assert not outside(step_reaches(bound, step, way))
    whole = bound.values["x"]
    bound.values["x"] = torch.empty(whole.numel() - 1).as_strided((1,), (1,)).expand(whole.shape)
    with pytest.raises(VerificationError, match=r"y as conv .* would leave its memory: x: element"):
        bound.run(step, way)


def test_offsets_are_checked_to_be_32_bit_numbers():
    assert outside([Reach("x", 2**31 - 1, 2**40)]) == []
    with pytest.raises(VerificationError, match="x: offset 2,147,483,647 is no 32-bit number"):
        check_inside("a kernel", [Reach("x", 2**31, 2**40)])
    assert matrix_end(0, 8, 3) == 0
    assert matrix_end(2, 8, 3) == 11
