"""Modules become regions and fallbacks: which ops, which reasons, and the model's own numbers."""

import itertools
from dataclasses import replace
from functools import cache

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from rtasks_modules import (  # noqa: E402
    Block,
    Mlp,
    examples,
    interpreted,
    lower_module,
    planned,
)
from torch import nn  # noqa: E402

from partita.errors import CaptureError, GraphError, InputError, ProblemError  # noqa: E402
from partita.gpu.flow.fold import fold  # noqa: E402
from partita.gpu.reference_output import as_tuple, relative  # noqa: E402
from partita.gpu.rtasks import arena  # noqa: E402
from partita.gpu.rtasks.lower import captured, lower_flow, side_by_side  # noqa: E402
from partita.gpu.rtasks.regroup import (  # noqa: E402
    REGION_US,
    branches,
    runs_by_cost,
    split_by_branches,
    split_piece,
)
from partita.gpu.rtasks.tileops import num_tiles, rectangle, tiles  # noqa: E402

EXAMPLES = examples()


@cache
def lowered_example(name):
    return lower_module(*EXAMPLES[name])


def wanted(module, inputs):
    with torch.no_grad():
        return as_tuple(module(*inputs))


def kinds(lowered):
    return [[op.kind for op in region.ops] for region in lowered.regions if region is not None]


@pytest.mark.parametrize("name", EXAMPLES)
def test_tiles_in_any_order_the_waits_allow_give_the_models_numbers(name):
    module, inputs = EXAMPLES[name]
    lowered = lowered_example(name)
    assert any(kinds(lowered))
    plans = planned(lowered)
    for seed in range(2):
        outcome = interpreted(lowered, plans, seed)(*inputs)
        for mine, theirs in zip(outcome, wanted(module, inputs), strict=True):
            assert relative(mine, theirs.double()) < 2e-6


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_rounded_once_per_op(dtype):
    torch.manual_seed(1)
    module, x = Mlp(dtype).eval(), torch.randn(2, 24, dtype=dtype)
    lowered = lower_module(module, (x,))
    outcome = interpreted(lowered, planned(lowered), 0)(x)[0]
    exact = wanted(module.double(), (x.double(),))[0]
    assert outcome.dtype == dtype
    assert relative(outcome, exact) < 4 * torch.finfo(dtype).eps


@pytest.mark.parametrize("name", ["mlp, 20 rows", "nasnet", "wide", "branches"])
def test_a_program_without_its_waits_is_found_out(name):
    _module, inputs = EXAMPLES[name]
    lowered = lowered_example(name)
    plans = planned(lowered)

    def hasty(program):
        veus = (tuple(s for s in steps if s.action != "wait") for steps in program.veus)
        return replace(program, veus=tuple(veus))

    spoilt = [
        any(torch.isnan(each).any() for each in interpreted(lowered, plans, seed, hasty)(*inputs))
        for seed in range(6)
    ]
    assert any(spoilt)


def test_norms_activations_and_residuals_go_into_what_makes_their_input():
    op_kinds = kinds(lowered_example("mlp"))
    assert op_kinds == [["gemv", "gemv", "gemv", "chain", "gemv", "rows"]]
    assert kinds(lowered_example("resnet")) == [["conv", "conv", "conv", "window", "gemv"]]


def test_a_chain_of_elementwise_ops_is_one_op():
    lowered = lowered_example("mlp")
    chain = next(op for op in lowered.regions[0].ops if op.kind == "chain")
    functions = [line[0] for line in chain.attr("steps")]
    assert functions[0] == "add"
    assert functions[-1] == "sub"
    assert len(chain.reads) == 2


def test_attention_is_a_fallback_between_two_regions_and_named():
    lowered = lowered_example("block")
    assert kinds(lowered) == [["chain", "rows", "gemv"], ["gemv", "rows", "gemv", "gemv"]]
    fallbacks = [draft for piece in lowered.pieces for draft in piece.fallbacks]
    assert [fallback.name for fallback in fallbacks] == ["scaled_dot_product_attention"]
    assert fallbacks[0].reason == "aten.scaled_dot_product_attention.default has no tile form"


def test_more_than_eight_rows_are_a_product_of_matrices():
    outcome = lower_module(Mlp().eval(), (torch.randn(9, 24),))
    assert "gemv" not in kinds(outcome)[0]
    assert kinds(outcome)[0].count("conv") == 4


def test_equal_weights_are_kept_once():
    lowered = lowered_example("cells")
    ops = lowered.regions[0].ops
    assert [op.kind for op in ops] == ["lstm_cell", "gru_cell"] * 3
    assert len({op.weights for op in ops}) == 2


def test_concatenations_parts_and_groups_are_places_in_the_arena():
    lowered = lowered_example("wide")
    places = lowered.arena.places
    drafts = {draft.name: draft for piece in lowered.pieces for draft in piece.drafts}
    conv, cat = drafts["conv2d"], drafts["cat"]
    assert conv.kind == cat.kind == "cat"
    begins = [places[name].at - places["cat"].at for name in cat.reads]
    assert begins == [0, 8]
    assert [places[name].at - places["conv2d"].at for name in conv.reads] == [0, 16]


def test_edges_are_what_is_read_and_nothing_else():
    region = lowered_example("nasnet").regions[0]
    for before, after in region.edges:
        assert before < after
    written = [op.writes[0] for op in region.ops]
    for index, op in enumerate(region.ops):
        direct = {at for at, place in enumerate(written) if place in op.reads}
        assert direct <= {before for before, after in region.edges if after == index}


def test_every_element_is_written_by_one_tile():
    for name in EXAMPLES:
        for region in lowered_example(name).regions:
            for op in region.ops if region is not None else ():
                for tile in tiles(op):
                    out = op.writes[0]
                    seen = torch.zeros(out.rows, out.cols)
                    for index in range(num_tiles(op, tile)):
                        rows, cols = rectangle(op, tile, index)
                        seen[rows.start : rows.stop, cols.start : cols.stop] += 1
                    assert torch.equal(seen, torch.ones_like(seen))


def test_written_values_do_not_overlap():
    for name in EXAMPLES:
        lowered = lowered_example(name)
        count = torch.zeros(lowered.arena.data.numel(), dtype=torch.int32)
        for region in lowered.regions:
            for op in region.ops if region is not None else ():
                for place in op.writes:
                    count.as_strided((place.rows, place.cols), (place.stride, 1), place.at).add_(1)
        assert int(count.max()) == 1


def test_two_models_side_by_side_give_what_each_gives():
    (a, xs), (b, ys) = EXAMPLES["mlp"], EXAMPLES["resnet"]
    both = side_by_side([fold(captured(a, xs)), fold(captured(b, ys))])
    lowered = lower_flow(both, torch.device("cpu"))
    outcome = interpreted(lowered, planned(lowered), 0)(*xs, *ys)
    for mine, theirs in zip(outcome, (*wanted(a, xs), *wanted(b, ys)), strict=True):
        assert relative(mine, theirs.double()) < 2e-6
    names = [op.name for op in lowered.regions[0].ops]
    assert names[0].startswith("0:")
    assert names[-1].startswith("1:")


class Odd(nn.Module):
    """What has no tile form stays outside with a reason."""

    def __init__(self):
        super().__init__()
        self.words, self.one = nn.Embedding(11, 16), nn.Linear(16, 16)

    def forward(self, x):
        y = self.one(self.words(x))
        return self.one(torch.cumsum(y, -1) + y @ y.transpose(-1, -2) @ y)


def test_every_fallback_has_a_reason():
    x = torch.tensor([[1, 2, 3]])
    lowered = lower_module(Odd().eval(), (x,))
    reasons = {
        draft.name: draft.reason for piece in lowered.pieces for draft in piece.fallbacks
    }  # fmt: skip
    assert reasons == {
        "embedding": "aten.embedding.default has no tile form",
        "cumsum": "aten.cumsum.default has no tile form",
        "matmul": "a product of two values that are both computed has no tile form",
        "matmul_1": "a product of two values that are both computed has no tile form",
    }
    module = Odd().eval()
    lowered = lower_module(module, (x,))
    outcome = interpreted(lowered, planned(lowered), 1)(x)[0]
    assert relative(outcome, wanted(module, (x,))[0].double()) < 2e-6


def test_float64_has_no_tiles():
    module = Mlp().double().eval()
    lowered = lower_module(module, (torch.randn(1, 24, dtype=torch.float64),))
    assert kinds(lowered) == []
    assert all("no tiles of torch.float64" in d.reason for d in lowered.pieces[0].fallbacks)


def test_random_numbers_are_refused():
    class Noisy(nn.Module):
        def forward(self, x):
            return x + torch.rand_like(x)

    with pytest.raises(InputError, match=r"draws random numbers \(aten.rand_like"):
        lower_module(Noisy(), (torch.randn(1, 8),))


def test_shapes_that_depend_on_data_are_refused():
    class Picky(nn.Module):
        def forward(self, x):
            return x[x > 0] * 2

    with pytest.raises((CaptureError, GraphError), match=r"cannot be captured|dynamic shape"):
        lower_module(Picky(), (torch.randn(4, 8),))


def test_an_arena_too_large_for_the_table_is_refused_with_numbers(monkeypatch):
    monkeypatch.setattr(arena, "MOST_ELEMENTS", 1000)
    with pytest.raises(ProblemError, match=r"[\d,]+ elements, but .* 1,000 at most"):
        lower_module(Block().eval(), (torch.randn(1, 5, 16),))


def test_a_cat_of_odd_widths_is_a_fallback():
    class Cat(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = nn.Linear(8, 5), nn.Linear(8, 6), nn.Linear(11, 8)

        def forward(self, x):
            return self.c(torch.cat([self.a(x), self.b(x)], -1))

    lowered = lower_module(Cat().eval(), (torch.randn(1, 8),))
    assert [d.reason for p in lowered.pieces for d in p.fallbacks] == [
        "parts of [5, 6] columns are not in eights"
    ]


def test_an_unfused_piece_gives_the_same():
    for name in ("block", "wide", "cells"):
        module, inputs = EXAMPLES[name]
        lowered = lowered_example(name)
        whole = interpreted(lowered, planned(lowered), 0)
        for left in [i for i, piece in enumerate(lowered.pieces) if piece.fused]:
            launches = list(whole.launches)
            launches[left] = None
            outcome = type(whole)(lowered, launches)(*inputs)
            for mine, theirs in zip(outcome, wanted(module, inputs), strict=True):
                assert relative(mine, theirs.double()) < 2e-6


def test_channels_last_products_read_the_image_where_it_is():
    lowered = lowered_example("wide")
    assert [op.kind for op in lowered.regions[0].ops][:4] == ["conv", "conv", "rows", "conv"]
    image, norm = lowered.arena.places["conv2d"], lowered.regions[0].ops[2]
    assert norm.reads == (image,)


@settings(max_examples=20, deadline=None)
@given(name=st.sampled_from(sorted(EXAMPLES)), data=st.data())
def test_any_cut_of_a_region_gives_the_same(name, data):
    module, inputs = EXAMPLES[name]
    lowered = lowered_example(name)
    index = data.draw(st.sampled_from([i for i, r in enumerate(lowered.regions) if r is not None]))
    count = len(lowered.regions[index].ops)
    marks = data.draw(st.lists(st.booleans(), min_size=count, max_size=count))
    runs = [(mark, (op,)) for op, mark in enumerate(marks)]
    parts = split_piece(lowered, index, runs)
    kept = sum(len(region.ops) for region in parts.regions if region is not None)
    assert kept <= sum(len(region.ops) for region in lowered.regions if region is not None)
    outcome = interpreted(parts, planned(parts), 0)(*inputs)
    for mine, theirs in zip(outcome, wanted(module, inputs), strict=True):
        assert relative(mine, theirs.double()) < 2e-6


@settings(deadline=None)
@given(times=st.lists(st.tuples(st.floats(0.1, 20), st.floats(0.1, 20)), min_size=1, max_size=8))
def test_runs_by_cost_are_the_cheapest(times):
    fused, unfused = zip(*times, strict=True)

    def cost(states):
        total, before = 0.0, False
        for state, f, u in zip(states, fused, unfused, strict=True):
            total += f if state else u
            total += REGION_US if state and not before else 0.0
            before = state
        return total

    runs = runs_by_cost(fused, unfused)
    assert [op for _, ops in runs for op in ops] == list(range(len(times)))
    outcome = [state for state, ops in runs for _ in ops]
    every = itertools.product([False, True], repeat=len(times))
    assert cost(outcome) == pytest.approx(min(map(cost, every)))


def test_a_region_of_many_kinds_is_cut_where_its_code_gets_long():
    ops = lowered_example("nasnet").regions[0].ops
    runs = split_by_branches(ops, most=3)
    assert len(runs) > 1
    assert [op for _, some in runs for op in some] == list(range(len(ops)))
    assert all(branches([ops[op] for op in some]) <= 3 for _, some in runs)
    assert split_by_branches(ops, most=99) == [(True, range(len(ops)))]


def test_states_that_begin_as_zeros_are_constants():
    class Steps(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell, self.layers = nn.LSTMCell(8, 8), nn.GRU(8, 8)

        def forward(self, x):
            h = x.new_zeros(1, 8)
            h, c = self.cell(x, (h, torch.ones_like(h)))
            return self.layers(h[None], x.new_zeros(1, 1, 8))[0] + c

    module, x = Steps().eval(), torch.randn(1, 8)
    lowered = lower_module(module, (x,))
    assert [draft.name for piece in lowered.pieces for draft in piece.fallbacks] == ["gru"]
    outcome = interpreted(lowered, planned(lowered), 0)(x)[0]
    assert relative(outcome, wanted(module, (x,))[0].double()) < 2e-6


def test_a_product_with_a_flattened_image_is_a_convolution():
    lowered = lowered_example("lenet")
    assert kinds(lowered) == [["conv", "window", "conv", "window", "conv", "gemv"]]
    assert not any(piece.fallbacks for piece in lowered.pieces)
    assert lowered.regions[0].ops[4].attr("kernel") == (3, 2)


@pytest.mark.parametrize("square", [lambda x: x**2, lambda x: x * x, torch.square])
def test_a_norm_that_is_written_out_is_recognised(square):
    class Written(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale, self.out = nn.Parameter(torch.rand(24)), nn.Linear(24, 8)

        def forward(self, x):
            mean = square(x).mean(-1, keepdim=True)
            return self.out(self.scale * (x * torch.rsqrt(mean + 1e-5)))

    module, x = Written().eval(), torch.randn(1, 3, 24)
    lowered = lower_module(module, (x,))
    assert kinds(lowered) == [["rows", "gemv"]]
    outcome = interpreted(lowered, planned(lowered), 0)(x)[0]
    assert relative(outcome, wanted(module, (x,))[0].double()) < 2e-6


def test_a_norm_whose_insides_are_read_is_left_as_it_is():
    class Read(nn.Module):
        def forward(self, x):
            scale = torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-5)
            return x * scale, scale

    module, x = Read(), torch.randn(3, 24)
    lowered = lower_module(module, (x,))
    assert [draft.name for piece in lowered.pieces for draft in piece.fallbacks] == ["mean"]
    outcome = interpreted(lowered, planned(lowered), 0)(x)
    for mine, theirs in zip(outcome, wanted(module, (x,)), strict=True):
        assert relative(mine, theirs.double()) < 2e-6
