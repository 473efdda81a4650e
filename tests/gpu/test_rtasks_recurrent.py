"""Recurrent layers as persistent kernels: in Triton's interpreter, and on a GPU if any."""

import faulthandler
from dataclasses import replace

import pytest
from counted_turns import too_early
from hypothesis import given, settings
from hypothesis import strategies as st
from in_interpreter import in_interpreter

from partita.errors import ProblemError
from partita.gpu.recurrent.program import recurrent_rprogram
from partita.problems.rprogram import check_rprogram

torch = pytest.importorskip("torch")

from partita.gpu.recurrent.layers import (  # noqa: E402
    Persistent,
    compile_module,
    compile_recurrent,
    spec_of,
)
from partita.gpu.recurrent.spec import (  # noqa: E402
    DTYPES,
    GATES,
    Recurrent,
    Shape,
    fits,
    held_registers,
    num_groups,
    recurrent_refusal,
    shapes,
)

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("rows", "extra", "size", "blocks"),
    [(16, 0, 256, 16), (16, 4, 256, 13), (32, 0, 256, 8), (8, 0, 3, 1), (4, 1, 11, 3)],
)
def test_blocks_cover_every_row_once(rows, extra, size, blocks):
    shape = Shape(rows, extra, 8, True)
    assert shape.num_blocks(size) == blocks
    assert (blocks - 1) * (rows + extra) < size <= blocks * (rows + extra)


def test_weights_beyond_the_registers_are_not_tried():
    spec = Recurrent("lstm", 256, 256, 10)
    assert not fits(spec, Shape(32, 8, 4, True, 10))
    assert fits(spec, Shape(16, 4, 16, True, 10))


MEASURED = [
    (Recurrent("lstm", 256, 256, 10), Shape(16, 4, 8, True, 10)),
    (Recurrent("lstm", 128, 128, 8), Shape(8, 0, 4, True, 8)),
    (Recurrent("gru", 1312, 512, 5, True), Shape(8, 0, 4, True, 1)),
]


@pytest.mark.parametrize(("spec", "shape"), MEASURED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_first_shape_is_the_one_that_was_measured_fastest(spec, shape, dtype):
    assert shapes(replace(spec, dtype=dtype))[0] == shape


@given(
    cell=st.sampled_from(sorted(GATES)),
    sizes=st.tuples(st.integers(1, 1500), st.integers(1, 1500)),
    num_layers=st.integers(1, 12),
    both=st.booleans(),
    batch=st.integers(1, 4),
    dtype=st.sampled_from(DTYPES),
    units=st.sampled_from([20, 108, 132]),
)
@settings(max_examples=60, deadline=None)
def test_every_shape_has_a_unit_per_program_and_room_in_its_registers(
    cell, sizes, num_layers, both, batch, dtype, units
):
    spec = Recurrent(cell, *sizes, num_layers, both, batch=batch, dtype=dtype)
    all_shapes = shapes(spec, units)
    assert bool(all_shapes) == (recurrent_refusal(spec, units) is None)
    for shape in all_shapes:
        assert num_groups(spec, shape) * shape.num_blocks(spec.hidden_size) <= units
        assert held_registers(spec, shape) * 32 * shape.num_warps < 65536
        assert 1 <= shape.layers <= num_layers


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (Recurrent("lstm", 8, 4096), "268.4 MB, more than the registers of 132 units"),
        (Recurrent("lstm", 8, 8, batch=5), "a batch of 5"),
        (Recurrent("gru", 8, 8, dtype=torch.float64), "float64 has no persistent form"),
    ],
)
def test_what_has_no_persistent_form_is_refused_with_numbers(spec, said):
    assert said in recurrent_refusal(spec)
    with pytest.raises(ProblemError, match=said):
        compile_recurrent(spec, [], CPU)


@pytest.mark.parametrize(
    ("module", "said"),
    [
        (torch.nn.LSTM(4, 4, proj_size=2), "a projection"),
        (torch.nn.LSTM(4, 4, 2, dropout=0.5).train(), "dropout in training"),
    ],
)
def test_modules_that_do_something_else_are_refused(module, said):
    with pytest.raises(ProblemError, match=said):
        spec_of(module)


@pytest.mark.parametrize(
    ("changed", "said"),
    [({"cell": "peephole"}, "no cell 'peephole'"), ({"hidden_size": 0}, "hidden_size is 0")],
)
def test_a_spec_that_makes_no_sense_is_refused(changed, said):
    with pytest.raises(ProblemError, match=said):
        replace(Recurrent("lstm", 4, 4), **changed)


def test_a_list_of_weights_that_is_not_that_of_the_layers_is_refused():
    spec = Recurrent("gru", 4, 5, 2)
    weights = torch.nn.GRU(4, 5, 2)._flat_weights
    with pytest.raises(ProblemError, match=r"7 weights, but .* has 8"):
        compile_recurrent(spec, weights[:-1], CPU)
    with pytest.raises(ProblemError, match=r"layer 1 is \(15, 6\) .*it must be \(15, 5\)"):
        compile_recurrent(spec, [*weights[:4], torch.zeros(15, 6), *weights[5:]], CPU)


def test_a_shape_that_does_not_fit_is_refused():
    module = torch.nn.LSTM(256, 256, 10)
    with pytest.raises(ProblemError, match="does not fit as 4\\+0 rows"):
        compile_module(module, CPU, Shape(4, 0, 4, True, 10))


def test_an_input_of_other_sizes_is_refused():
    layers = compile_module(torch.nn.LSTM(4, 5), CPU)
    for wrong in (torch.zeros(3, 1, 5), torch.zeros(3, 2, 4), torch.zeros(0, 1, 4), torch.zeros(4)):
        with pytest.raises(ProblemError, match=r"give \(steps, 1, 4\) torch.float32"):
            layers(wrong)


def test_weights_are_packed_launch_by_launch_with_zeros_beyond_their_width():
    module = torch.nn.LSTM(5, 6, 3)
    layers = Persistent(spec_of(module), module._flat_weights, CPU, Shape(4, 0, 4, True, 2))
    first, last = layers.launches
    assert first.w_pre is None
    assert first.w_x.shape == (2, 24, 8)
    assert torch.equal(first.w_x[0, :, :5], module.weight_ih_l0)
    assert not first.w_x[0, :, 5:].any()
    assert torch.equal(last.w_h[0, :, :6], module.weight_hh_l2)
    wanted = (module.bias_ih_l1 + module.bias_hh_l1).reshape(4, 6)
    torch.testing.assert_close(first.bias[1], wanted)


def test_a_grus_candidate_keeps_its_two_biases_apart():
    module = torch.nn.GRU(5, 6)
    (packed,) = Persistent(
        spec_of(module), module._flat_weights, CPU, Shape(4, 0, 4, True)
    ).launches
    given, past = module.bias_ih_l0.reshape(3, 6), module.bias_hh_l0.reshape(3, 6)
    wanted = torch.stack([given[0] + past[0], given[1] + past[1], given[2], past[2]])
    torch.testing.assert_close(packed.bias[0], wanted)


class TestTheProgram:
    CASES = ((4, 3, 5, 1, False), (2, 4, 5, 1, True), (1, 3, 6, 2, False), (3, 2, 6, 3, False))

    @pytest.mark.parametrize(("groups", "blocks", "steps", "batch", "both"), CASES)
    def test_it_misses_no_wait_and_never_waits_for_ever(self, groups, blocks, steps, batch, both):
        problem, program = recurrent_rprogram(groups, blocks, steps, batch, both)
        assert check_rprogram(problem, program, groups * blocks) == ()

    @pytest.mark.parametrize(("groups", "blocks", "steps", "batch", "both"), CASES)
    def test_no_wait_of_it_is_too_many(self, groups, blocks, steps, batch, both):
        problem, program = recurrent_rprogram(groups, blocks, steps, batch, both)
        for veu, instructions in enumerate(program.veus):
            for at, instruction in enumerate(instructions):
                if instruction.action == "wait":
                    less = (*instructions[:at], *instructions[at + 1 :])
                    veus = (*program.veus[:veu], less, *program.veus[veu + 1 :])
                    rprogram = check_rprogram(problem, replace(program, veus=veus), groups * blocks)
                    assert "does not wait for it" in rprogram[0]

    @pytest.mark.parametrize("seed", range(5))
    @pytest.mark.parametrize(("groups", "blocks", "steps", "batch", "both"), CASES)
    def test_counters_that_add_up_all_programs_of_a_group_are_enough(
        self, groups, blocks, steps, batch, both, seed
    ):
        problem, program = recurrent_rprogram(groups, blocks, 4 * steps, batch, both)
        early = too_early(
            problem, program, groups, lambda step: (step % batch, step // batch), seed
        )
        assert not early

    def test_one_counter_for_all_sequences_would_not_be(self):
        problem, program = recurrent_rprogram(1, 3, 20, 2)
        outcome = [too_early(problem, program, 1, lambda step: (0, step), s) for s in range(5)]
        assert any(outcome)

    def test_more_programs_than_are_resident_are_refused(self):
        problem, program = recurrent_rprogram(4, 3, 2)
        assert "12 programs, but only 11" in check_rprogram(problem, program, 11)[0]


CASES = """
import torch
from torch import nn
from partita.gpu.rtasks.interpret import interpret
from partita.gpu.recurrent.layers import compile_module
from partita.gpu.recurrent.program import recurrent_rprogram
from partita.gpu.recurrent.spec import Shape

torch.manual_seed(0)
CPU = torch.device("cpu")


def turns(layers, num_steps, seed):
    # any order that the waits allow: random turns of the rProgram
    both, programs = layers.spec.bidirectional, layers.num_groups * layers.num_blocks
    batch, order = layers.spec.batch, []
    _, program = recurrent_rprogram(
        layers.num_groups, layers.num_blocks, num_steps * batch, batch, both
    )

    def run(operator, tile):
        step, group = divmod(operator, layers.num_groups)
        order.append(step * programs + group * layers.num_blocks + tile)

    interpret(program, run, seed)
    return torch.tensor(order, dtype=torch.int32)


def check(module, shape, steps=3, batch=1, shuffled=False):
    module.eval()
    layers = compile_module(module, CPU, shape, batch)
    first = [batch, steps] if module.batch_first else [steps, batch]
    x = torch.randn(*first, module.input_size, dtype=module.weight_ih_l0.dtype)
    size = (layers._start.shape[0], batch, module.hidden_size)
    state = [torch.randn(size, dtype=x.dtype) for _ in range(2)]
    for given in (None, state):
        if shuffled:
            layers.turns = turns(layers, steps, 1 if given is None else 2)
        for scratch in layers._scratch.values():
            scratch.hidden[:, :, : module.hidden_size] = float("nan")
            scratch.carry.fill_(float("nan"))
        lstm = isinstance(module, nn.LSTM)
        theirs = None if given is None else tuple(given) if lstm else given[0]
        with torch.no_grad():
            output, last = module(x, theirs)
        h, c = last if lstm else (last, None)
        found = layers(x, *(given or ()))
        close = {} if x.dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
        for ours, wanted in zip(found, (output, h, c)):
            if wanted is not None:
                torch.testing.assert_close(ours, wanted, **close)
        assert layers.faults == 0
    return layers, x


check(nn.LSTM(5, 6, 3), Shape(4, 1, 4, True, 3), shuffled=True)
check(nn.LSTM(5, 6, 3), Shape(4, 1, 4, False, 2))
check(nn.LSTM(9, 6, 3), Shape(8, 0, 4, True, 3))  # a group of one program, fed before
check(nn.LSTM(4, 6, 2, bidirectional=True, batch_first=True), Shape(4, 2, 4, True), batch=3)
check(nn.GRU(5, 6, 2), Shape(4, 2, 4, True, 2), shuffled=True)
check(nn.GRU(20, 6, 2, bidirectional=True, bias=False), Shape(4, 0, 4, True), shuffled=False)
check(nn.GRU(4, 6, 2), Shape(4, 0, 4, True, 2), batch=2, shuffled=True)
check(nn.GRU(4, 6, 1).half(), Shape(4, 0, 4, True, 1))
check(nn.RNN(4, 11, 2).bfloat16(), Shape(8, 2, 4, True, 2))
check(nn.RNN(4, 11, 1, "relu", bidirectional=True), Shape(8, 2, 4, True))

layers, x = check(nn.LSTM(4, 6, 2), Shape(4, 0, 4, True, 2))
layers._counters[0][2] = 2**30  # times done before: counters that will run over
layers._counters[0][:2] = (2**30 * layers.num_blocks + 2**31) % 2**32 - 2**31
wanted = layers(x)[0]
torch.testing.assert_close(layers(x)[0], wanted)
assert layers.faults == 0
layers.turns = torch.arange(3 * 4, dtype=torch.int32).flip(0)
layers(x)
assert layers.faults > 0, "a reversed order was not noticed"
print("all right")
"""


def test_interpreted_kernels_agree_with_pytorch_in_any_order_that_waits_allow():
    pytest.importorskip("triton")
    assert in_interpreter(CASES) == "all right\n"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
@pytest.mark.filterwarnings("ignore:RNN module weights are not part of single contiguous chunk")
class TestOnAGpu:
    @pytest.fixture(autouse=True)
    def _watched(self, monkeypatch):
        monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # to compare with exact sums
        faulthandler.dump_traceback_later(120, exit=True)  # a kernel that hangs: says in which test
        yield
        faulthandler.cancel_dump_traceback_later()

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("batch", [1, 3])
    @pytest.mark.parametrize("both", [False, True])
    @pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
    def test_outputs_and_states_are_those_of_the_module_at_any_length(
        self, dtype, batch, both, kind
    ):
        torch.manual_seed(0)
        device = torch.device("cuda")
        module = getattr(torch.nn, kind)(40, 48, 3, bidirectional=both).to(device, dtype).eval()
        layers = compile_module(module, device, batch=batch)
        size = (6 if both else 3, batch, 48)
        for steps in (1, 7, 30, 7):
            x = torch.randn(steps, batch, 40, device=device, dtype=dtype)
            state = [torch.randn(size, device=device, dtype=dtype) for _ in range(2)]
            for start in (None, state):
                lstm = kind == "LSTM"
                theirs = None if start is None else tuple(start) if lstm else start[0]
                with torch.no_grad():
                    wanted, last = module(x, theirs)
                outputs = layers(x, *(start or ()))
                exact = dtype == torch.float32
                close = dict.fromkeys(("rtol", "atol"), 1e-4 if exact else 4e-2)
                states = last if lstm else (last,)
                for ours, theirs in zip(outputs, (wanted, *states), strict=False):
                    torch.testing.assert_close(ours, theirs, **close)

    def test_thousands_of_launches_agree(self):
        device = torch.device("cuda")
        module = torch.nn.LSTM(64, 64, 4).to(device).eval()
        layers = compile_module(module, device)
        x = torch.randn(20, 1, 64, device=device)
        first = layers(x)[0]
        for _ in range(2000):
            assert torch.equal(layers(x)[0], first)
