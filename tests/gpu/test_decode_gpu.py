"""On a GPU: a decode step gives the logits of the model, token after token, in every type."""

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("batch", [1, 5])
@pytest.mark.parametrize(
    "sizes", [(2, 256, 8, 2, 64, 512, 1000, 200), (1, 320, 5, 5, 32, 96, 77, 33)]
)
def test_a_step_gives_the_logits_of_the_model(sizes, batch, dtype, overlap):
    from partita.gpu.decode.plain import PlainDecoder
    from partita.gpu.decode.spec import DecoderSpec, StepOptions
    from partita.gpu.decode.step import decode_step
    from partita.gpu.reference_output import relative

    torch.manual_seed(0)
    spec = DecoderSpec(*sizes, batch=batch)
    model = PlainDecoder(spec).cuda().to(dtype).eval()
    wide = PlainDecoder(spec).cuda().double()
    wide.load_state_dict({name: value.double() for name, value in model.state_dict().items()})
    step = decode_step(model, spec.length, StepOptions(overlap=overlap), batch=batch)
    caches = [torch.zeros_like(step.keys) for _ in range(2)]
    exact = [each.double() for each in caches]
    with torch.no_grad():
        for position in range(spec.length):
            token = torch.randint(spec.vocab, (batch,), device="cuda")
            at = torch.tensor([position], device="cuda")
            logits = step(token, at).clone()
            wanted = wide(token, at, *exact)
            own = relative(model(token, at, *caches), wanted)
            assert relative(logits, wanted) <= max(2 * own, 1e-6), position
