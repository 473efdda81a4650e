"""Greedy decoding as one persistent kernel: in Triton's interpreter, and on a GPU if any."""

import faulthandler
from dataclasses import replace

import pytest
from counted_turns import too_early
from in_interpreter import in_interpreter

from partita.errors import ProblemError
from partita.gpu.recurrent.program import decoder_rprogram
from partita.problems.rprogram import check_rprogram

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from partita.gpu.recurrent.decode import GreedyDecoder, compile_decoder  # noqa: E402
from partita.gpu.recurrent.decode_spec import decoder_refusal, decoder_shapes  # noqa: E402
from partita.gpu.recurrent.spec import DTYPES, Recurrent  # noqa: E402

CPU = torch.device("cpu")


def decoder(rnn, vocabulary=20, eos=3):
    embedding = nn.Embedding(vocabulary, rnn.input_size)
    return GreedyDecoder(embedding, rnn, nn.Linear(rnn.hidden_size, vocabulary), eos).eval()


def test_the_module_stops_at_the_end_of_sequence_and_fills_up_with_it():
    torch.manual_seed(0)
    module = decoder(nn.LSTM(5, 6, 2))
    with torch.no_grad():
        module.head.bias[3] = 50.0
        h = torch.randn(2, 1, 6)
        outputs = module(h, h, torch.tensor([0]), 7)
        all_steps = module(h, h, torch.tensor([0]), 7, stop_early=False)
    assert outputs.tokens.tolist() == [3] * 7
    assert (int(outputs.num_steps), int(all_steps.num_steps)) == (1, 7)
    assert not torch.equal(outputs.h, all_steps.h)


@pytest.mark.parametrize(
    ("spec", "vocabulary", "said"),
    [
        (Recurrent("lstm", 8, 8, batch=2), 10, "a batch of 2"),
        (Recurrent("gru", 8, 8, bidirectional=True), 10, "two directions"),
        (Recurrent("lstm", 8, 1024), 100_000, "take 1,638.4 MB, more than 1,073.7 MB"),
        (Recurrent("lstm", 8, 1024, 4), 100, "its layers take 134.2 MB"),
        (Recurrent("lstm", 8, 8, dtype=torch.float64), 10, "float64 has no persistent form"),
    ],
)
def test_what_has_no_persistent_form_is_refused_with_numbers(spec, vocabulary, said):
    assert said in decoder_refusal(spec, vocabulary)


def test_a_decoder_that_is_refused_is_not_compiled():
    with pytest.raises(ProblemError, match="two directions"):
        compile_decoder(decoder(nn.LSTM(5, 6, bidirectional=True)), CPU)
    module = decoder(nn.LSTM(5, 6))
    module.embedding = nn.Embedding(19, 5)
    with pytest.raises(ProblemError, match="a head over 20 tokens, an embedding of 19"):
        compile_decoder(module, CPU)


@pytest.mark.parametrize(
    ("h", "c", "steps", "said"),
    [
        (torch.zeros(1, 1, 6), None, 3, "c is None"),
        (torch.zeros(1, 2, 6), torch.zeros(1, 1, 6), 3, r"h is \(\(1, 2, 6\)"),
        (torch.zeros(1, 1, 6), torch.zeros(1, 1, 6), 0, "max_steps is 0"),
    ],
)
def test_states_of_other_sizes_are_refused(h, c, steps, said):
    run = compile_decoder(decoder(nn.LSTM(5, 6)), CPU)
    with pytest.raises(ProblemError, match=said):
        run(h, c, torch.tensor([0]), steps)


@pytest.mark.parametrize("vocabulary", [3, 1000, 32000])
@pytest.mark.parametrize("size", [6, 128, 300])
def test_every_row_of_layers_and_head_has_a_program(size, vocabulary):
    spec = Recurrent("lstm", 8, size, 2, dtype=torch.float16)
    all_decoder_shapes = decoder_shapes(spec, vocabulary)
    assert all_decoder_shapes
    for shape in all_decoder_shapes:
        assert shape.rows * (shape.num_programs // 2) >= size
        assert shape.num_programs * shape.head_rows * shape.chunks >= vocabulary
        assert shape.num_programs <= 132


class TestTheProgram:
    @pytest.mark.parametrize(("layers", "blocks", "programs"), [(1, 1, 1), (3, 2, 6), (2, 3, 9)])
    def test_it_misses_no_wait_and_never_waits_for_ever(self, layers, blocks, programs):
        problem, program = decoder_rprogram(layers, blocks, 4, programs)
        assert check_rprogram(problem, program, programs) == ()
        assert "are resident at once" in check_rprogram(problem, program, programs - 1)[0]

    @pytest.mark.parametrize("seed", range(5))
    def test_counters_that_add_up_all_programs_are_enough(self, seed):
        problem, program = decoder_rprogram(3, 3, 8, 11)
        assert not too_early(problem, program, 4, lambda step: (0, step), seed)

    def test_without_the_wait_for_the_layer_below_it_is_refused(self):
        problem, program = decoder_rprogram(2, 2, 3)
        layer = program.names.index("cell.1.1")
        below = program.names.index("cell.0.1")
        veu = next(
            index
            for index, steps in enumerate(program.veus)
            if any(step.action == "run" and step.operator == layer for step in steps)
        )
        less = tuple(
            step for step in program.veus[veu] if (step.action, step.operator) != ("wait", below)
        )
        veus = (*program.veus[:veu], less, *program.veus[veu + 1 :])
        rprogram = check_rprogram(problem, replace(program, veus=veus), 4)
        assert "needs tile 0 of 'cell.0.1' and does not wait for it" in rprogram[0]


CASES = """
import torch
from torch import nn
from partita.gpu.recurrent.decode import GreedyDecoder, compile_decoder
from partita.gpu.recurrent.decode_spec import DecoderShape
from partita.gpu.rtasks.interpret import interpret
from partita.gpu.recurrent.program import decoder_rprogram

torch.manual_seed(0)
CPU = torch.device("cpu")


def turns(run, max_steps, seed):
    # any order that the waits allow: random turns of the rProgram
    layers, programs, order = run.spec.num_layers, run.shape.num_programs, []
    cells = layers * run.num_blocks
    _, program = decoder_rprogram(layers, run.num_blocks, max_steps, programs)

    def take(operator, tile):
        step, group = divmod(operator, layers + 1)
        order.append(step * (cells + programs) + group * run.num_blocks + tile)

    interpret(program, take, seed)
    return torch.tensor(order, dtype=torch.int32)


def check(rnn, shape=None, vocabulary=20, shuffled=False, likely=0.0, dtype=torch.float32):
    embedding = nn.Embedding(vocabulary, rnn.input_size)
    head = nn.Linear(rnn.hidden_size, vocabulary)
    module = GreedyDecoder(embedding, rnn, head, 3).to(dtype).eval()
    with torch.no_grad():
        head.weight[1::2] = head.weight[::2]  # equal logits: the first wins
        head.bias[1::2] = head.bias[::2]
        head.weight[3] *= 1 + likely
    run = compile_decoder(module, CPU, shape)
    lstm, stopped = isinstance(rnn, nn.LSTM), 0
    for max_steps in (4, 1, 6):
        h = 2 * torch.randn(rnn.num_layers, 1, rnn.hidden_size, dtype=dtype)
        c = torch.randn_like(h) if lstm else None
        first = torch.randint(vocabulary, (1,))
        with torch.no_grad():
            wanted = module(h, c, first, max_steps)
        if shuffled:
            run.turns = turns(run, max_steps, max_steps)
        for scratch in run._scratch.values():
            scratch.hidden[:, :, : rnn.hidden_size] = float("nan")
            scratch.best.fill_(float("nan"))
        found = run(h, c, first, max_steps)
        assert torch.equal(found.tokens, wanted.tokens), (found, wanted)
        assert int(found.num_steps) == int(wanted.num_steps)
        stopped += int(found.num_steps) < max_steps
        close = {} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
        torch.testing.assert_close(found.h, wanted.h, **close)
        if lstm:
            torch.testing.assert_close(found.c, wanted.c, **close)
        assert run.faults == 0
    return stopped


assert check(nn.LSTM(5, 6, 2), shuffled=True, likely=9.0) > 0
check(nn.LSTM(5, 6, 2), DecoderShape(4, 4, 5, 4, 1), shuffled=True)  # one has no cell
check(nn.GRU(5, 6, 2), DecoderShape(8, 4, 2, 4, 3, False, False), shuffled=True)
check(nn.RNN(5, 9, 1), DecoderShape(8, 4, 2, 16, 1))
# one program alone runs the loop of the GPU, whatever is kept in registers
for kept in ((True, True), (False, True)):
    check(nn.LSTM(5, 6), DecoderShape(8, 4, 1, 32, 1, *kept))
    check(nn.GRU(5, 6), DecoderShape(8, 4, 1, 32, 1, *kept), likely=9.0)
check(nn.LSTM(5, 6), DecoderShape(8, 4, 1, 8, 3, True, False), likely=9.0)
print("all right")
"""


def test_interpreted_kernels_choose_the_tokens_of_the_module_in_any_order_that_waits_allow():
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

    @pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_tokens_and_states_are_those_of_the_module(self, kind, dtype):
        torch.manual_seed(0)
        device = torch.device("cuda")
        module = decoder(getattr(nn, kind)(40, 48, 3), 300, eos=7).to(device, dtype)
        with torch.no_grad():
            module.head.weight *= 4  # far apart, so that rounding does not choose
        run = compile_decoder(module, device)
        for max_steps in (1, 9, 30, 9):
            h = torch.randn(3, 1, 48, device=device, dtype=dtype)
            c = torch.randn_like(h) if kind == "LSTM" else None
            first = torch.randint(300, (1,), device=device)
            with torch.no_grad():
                wanted = module(h, c, first, max_steps)
            decoded = run(h, c, first, max_steps)
            if dtype == torch.float32:
                assert torch.equal(decoded.tokens, wanted.tokens)
                assert int(decoded.num_steps) == int(wanted.num_steps)
                torch.testing.assert_close(decoded.h, wanted.h, rtol=1e-4, atol=1e-4)
            else:
                assert decoded.tokens[0] == wanted.tokens[0]

    def test_a_captured_call_still_stops_early(self):
        torch.manual_seed(0)
        device = torch.device("cuda")
        module = decoder(nn.LSTM(16, 32, 2), 50).to(device)
        run = compile_decoder(module, device)
        h = torch.randn(2, 1, 32, device=device)
        first = torch.zeros(1, dtype=torch.int64, device=device)
        run(h, h, first, 20)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            decoded = run(h, h, first, 20)
        counted = []
        for scale in (1.0, -3.0, 5.0):
            h.copy_(scale * torch.randn(2, 1, 32, device=device))
            graph.replay()
            with torch.no_grad():
                wanted = module(h, h, first, 20)
            assert torch.equal(decoded.tokens, wanted.tokens)
            assert int(decoded.num_steps) == int(wanted.num_steps)
            counted.append(int(decoded.num_steps))
        assert counted
