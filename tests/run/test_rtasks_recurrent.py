"""The persistent LSTM kernel, as far as it can be tested without a GPU; the numbers with one."""

import pytest

from partita.errors import ProblemError

torch = pytest.importorskip("torch")

from partita.run.rtasks.recurrent import Shape, Stack, _plausible, shapes  # noqa: E402

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
    large = Shape(32, 8, 4, True)
    assert not _plausible(large, 256, 256, 10, torch.float32, 132)
    assert _plausible(Shape(16, 4, 8, True), 256, 256, 10, torch.float32, 132)


@pytest.mark.parametrize(
    ("module", "said"),
    [
        (torch.nn.LSTM(4, 4, bidirectional=True), "two directions"),
        (torch.nn.LSTM(4, 4, proj_size=2), "a projection"),
        (torch.nn.LSTM(4, 4, 2, dropout=0.5).train(), "dropout between layers"),
    ],
)
def test_what_has_no_persistent_form_is_refused(module, said):
    with pytest.raises(ProblemError, match=said):
        Stack(module, CPU, Shape(4, 0, 4, True))


def test_weights_are_packed_layer_by_layer_with_zeros_beyond_their_width():
    module = torch.nn.LSTM(5, 6, 2)
    stack = Stack(module, CPU, Shape(4, 0, 4, True))
    assert stack.w_x.shape == (2, 24, 8)
    assert torch.equal(stack.w_x[0, :, :5], module.weight_ih_l0)
    assert not stack.w_x[0, :, 5:].any()
    assert torch.equal(stack.w_h[1, :, :6], module.weight_hh_l1)
    torch.testing.assert_close(stack.bias[1], module.bias_ih_l1 + module.bias_hh_l1)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
class TestOnAGpu:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
    def test_outputs_and_states_are_those_of_the_module_at_any_length(self, dtype):
        torch.manual_seed(0)
        device = torch.device("cuda")
        module = torch.nn.LSTM(40, 48, 3).to(device, dtype).eval()
        stack = Stack(module, device, shapes(40, 48, 3, dtype, device)[0])
        state = tuple(torch.randn(3, 1, 48, device=device, dtype=dtype) for _ in range(2))
        for steps in (1, 7, 30, 7):
            x = torch.randn(steps, 1, 40, device=device, dtype=dtype)
            for given in (None, state):
                with torch.no_grad():
                    wanted, (h, c) = module(x, given)
                found, (ours_h, ours_c) = stack(x, given)
                close = {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.float16 else {}
                torch.testing.assert_close(found, wanted, **close)
                torch.testing.assert_close(ours_h, h, **close)
                torch.testing.assert_close(ours_c, c, **close)

    def test_thousands_of_launches_agree(self):
        device = torch.device("cuda")
        module = torch.nn.LSTM(64, 64, 4).to(device).eval()
        stack = Stack(module, device, shapes(64, 64, 4, torch.float32, device)[0])
        x = torch.randn(20, 1, 64, device=device)
        first = stack(x)[0]
        for _ in range(2000):
            assert torch.equal(stack(x)[0], first)
