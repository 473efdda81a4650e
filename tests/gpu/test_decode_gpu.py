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


def family(name):
    """A small model of `transformers` with random weights, biases and norms included."""
    transformers = pytest.importorskip("transformers")
    sizes = {
        "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "vocab_size": 1000,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    }  # fmt: skip
    if name == "gpt2":
        config = transformers.GPT2Config(
            n_embd=256, n_layer=2, n_head=4, vocab_size=1000, n_positions=128
        )
        model = transformers.GPT2LMHeadModel(config)
    elif name == "qwen2":
        model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**sizes))
    else:
        model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**sizes))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.05 * torch.randn(parameter.shape))
    return model.cuda().eval()


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("name", ["gpt2", "qwen2", "qwen3"])
def test_a_family_of_transformers_has_its_logits_token_by_token(name, batch):
    from partita.gpu.decode.step import decode_step
    from partita.gpu.reference_output import relative

    torch.manual_seed(0)
    model = family(name)
    tokens = torch.randint(1000, (batch, 100), device="cuda")
    step = decode_step(model, 100, batch=batch)
    with torch.no_grad():
        wanted = model(tokens).logits.float()
        exact = model.double()(tokens).logits
        for position in range(100):
            logits = step(tokens[:, position], position)
            own = relative(wanted[:, position], exact[:, position])
            assert relative(logits, exact[:, position]) <= max(10 * own, 1e-5), position
