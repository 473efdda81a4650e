"""Greedy and sampled decoding against `model.generate`, with kernels in Triton's interpreter."""

import warnings

import pytest
from in_interpreter import in_interpreter

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
transformers = pytest.importorskip("transformers")

from partita.errors import InputError  # noqa: E402
from partita.gpu.decode.generate import Sampling, generate  # noqa: E402
from partita.gpu.decode.weights import decoder_weights  # noqa: E402

SAME = """
import torch, transformers
from partita.gpu.decode.generate import generate
from partita.gpu.decode.spec import KINDS, ProductBlock, StepOptions
from partita.gpu.decode.step import DecodeStep
from partita.gpu.decode.weights import decoder_weights

transformers.logging.set_verbosity_error()
blocks = dict.fromkeys(KINDS, ProductBlock(16, 64))
options = StepOptions(blocks, blocks, chunk=32)


def step(model, length, batch):
    return DecodeStep(decoder_weights(model, length, batch), options)


llama3 = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
          "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
for rope in (llama3,):  # the default is that of the steps' own tests
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, vocab_size=61, rope_parameters=rope,
        initializer_range=0.5,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    for samples, choice in (
        (1, {}),
        (1, {"do_sample": True, "top_k": 7, "top_p": 0.8, "temperature": 0.9}),
        (3, {"do_sample": True, "top_k": 7, "top_p": 0.8, "temperature": 0.9}),
    ):
        tokens = torch.randint(61, (samples, 5))
        torch.manual_seed(3)
        mine = generate(model, tokens, max_new_tokens=4, make_step=step, **choice)
        after = torch.rand(1)
        torch.manual_seed(3)
        given = {"do_sample": False, **({"top_k": 0, "top_p": 1.0, **choice} if choice else {})}
        theirs = model.generate(
            tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=4, eos_token_id=None,
            pad_token_id=0, **given,
        )
        assert torch.equal(mine, theirs), (choice, mine, theirs)
        assert torch.equal(after, torch.rand(1)), "as many numbers were drawn"
        for end in (int(mine[0, 6]), int(mine[-1, 5])):
            torch.manual_seed(3)
            ended = generate(
                model, tokens, max_new_tokens=4, make_step=step, eos_token_id=end, **choice
            )
            torch.manual_seed(3)
            wanted = model.generate(
                tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=4,
                eos_token_id=end, pad_token_id=end, **given,
            )
            assert torch.equal(ended, wanted), (end, ended, wanted)
print("all right")
"""


def test_tokens_are_those_of_transformers_greedy_and_sampled():
    assert in_interpreter(SAME) == "all right\n"


FAMILIES = """
import torch, transformers
from transformers import (
    GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM,
    Qwen3Config, Qwen3ForCausalLM,
)
from partita.gpu.decode.generate import generate
from partita.gpu.decode.spec import KINDS, ProductBlock, StepOptions
from partita.gpu.decode.step import DecodeStep
from partita.gpu.decode.weights import decoder_weights

transformers.logging.set_verbosity_error()
options = StepOptions(
    dict.fromkeys(KINDS, ProductBlock(32, 64, 4, 1)),
    {**dict.fromkeys(KINDS, ProductBlock(64, 32, split=2)), "gate": ProductBlock(64, 32)}, chunk=16,
)


def step(model, length, batch):
    return DecodeStep(decoder_weights(model, length, batch), options)


small = dict(hidden_size=48, intermediate_size=40, num_hidden_layers=1, num_attention_heads=4,
             num_key_value_heads=2, head_dim=16, vocab_size=37)
gpt2 = dict(n_embd=48, n_layer=1, n_head=3, vocab_size=37, n_positions=24)
torch.manual_seed(0)
for model in (
    GPT2LMHeadModel(GPT2Config(**gpt2)),
    GPT2LMHeadModel(GPT2Config(**gpt2, n_inner=40, activation_function="relu")),
    Qwen2ForCausalLM(Qwen2Config(**small)),
    Qwen3ForCausalLM(Qwen3Config(**small)),
    LlamaForCausalLM(LlamaConfig(**small, attention_bias=True, mlp_bias=True, hidden_act="gelu")),
):
    model = model.eval()
    with torch.no_grad():
        for parameter in model.parameters():  # biases and norms too
            parameter.copy_(0.3 * torch.randn(parameter.shape))
        for batch, positions in ((1, (19,)), (3, (3,))):
            tokens = torch.randint(37, (batch, 20))
            whole = model(tokens, use_cache=True)
            mine = step(model, 20, batch)
            for number, layer in enumerate(whole.past_key_values.layers):
                mine.keys[number].copy_(layer.keys)
                mine.values[number].copy_(layer.values)
            for position in positions:
                row = [each[:, :, :, position].clone() for each in (mine.keys, mine.values)]
                mine.keys[:, :, :, position:], mine.values[:, :, :, position:] = 7.0, 7.0
                mine.logits.fill_(float("nan"))
                found, wanted = mine(tokens[:, position], position), whole.logits[:, position]
                error = (found - wanted).norm() / wanted.norm()
                assert error < 1e-5, (type(model), model.config, batch, position, error)
                for cache, kept in zip((mine.keys, mine.values), row, strict=True):
                    assert torch.allclose(cache[:, :, :, position], kept, atol=1e-5)
    asked = dict(max_new_tokens=2, eos_token_id=None, do_sample=False, pad_token_id=0)
    theirs = model.generate(tokens[:, :5], attention_mask=torch.ones(3, 5), **asked)
    assert torch.equal(generate(model, tokens[:, :5], max_new_tokens=2, make_step=step), theirs)
print("all right")
"""


def test_every_family_has_the_logits_and_tokens_of_transformers():
    assert in_interpreter(FAMILIES) == "all right\n"


def tiny(**changes):
    sizes = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "vocab_size": 61,
        "num_attention_heads": 2, "num_key_value_heads": 2,
    }  # fmt: skip
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**(sizes | changes))).eval()


def test_a_model_without_a_step_is_left_to_its_own_generate():
    model, tokens = tiny(), torch.randint(61, (17, 4))
    with pytest.warns(UserWarning, match=r"a batch of 17; .*; model.generate runs instead"):
        mine = generate(model, tokens, max_new_tokens=3)
    wanted = model.generate(
        tokens, attention_mask=torch.ones_like(tokens), do_sample=False, max_new_tokens=3,
        eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    assert torch.equal(mine, wanted)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden_act": "tanh"}, "hidden_act: the activation 'tanh'; one of silu, swish, gelu_new"),
        ({"head_dim": 24}, "heads of 24"),
    ],
)
def test_configurations_that_a_step_would_get_wrong_are_refused(changes, said):
    with pytest.raises(InputError, match=said):
        decoder_weights(tiny(**changes), 8)


def test_models_with_other_parts_are_refused_by_name():
    sizes = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "vocab_size": 61,
        "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16,
    }  # fmt: skip
    granite = transformers.GraniteForCausalLM(transformers.GraniteConfig(**sizes))
    with pytest.raises(InputError, match=r"type .granite.; one of llama, mistral, .*gpt2"):
        decoder_weights(granite, 8)
    mistral = transformers.MistralForCausalLM(
        transformers.MistralConfig(**sizes, sliding_window=16)
    )
    with pytest.raises(InputError, match="sliding_window: attention over a window of 16"):
        decoder_weights(mistral, 8)
    llama = tiny()
    llama.model.layers[0].self_attn.sinks = torch.nn.Parameter(torch.zeros(2))
    with pytest.raises(InputError, match=r"has self_attn.sinks, which a step does not read"):
        decoder_weights(llama, 8)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx: found True"),
        ({"scale_attn_weights": False}, "scale_attn_weights: found False; models with True"),
        ({"n_positions": 7}, "a cache of 8 rows, and positions up to 7; give a length"),
        ({"activation_function": "tanh"}, "activation_function: the activation 'tanh'"),
    ],
)
def test_a_gpt2_that_a_step_would_get_wrong_is_refused(change, said):
    sizes = {"n_embd": 32, "n_layer": 1, "n_head": 2, "vocab_size": 37, "n_positions": 16}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**(sizes | change)))
    with pytest.raises(InputError, match=said):
        decoder_weights(model, 8)


@pytest.mark.parametrize(
    ("choice", "said"),
    [
        ({"temperature": 0.0}, "temperature: found 0.0; give more than 0"),
        ({"top_k": -1}, "top_k: found -1; give 0"),
        ({"top_p": 0.0}, "top_p: found 0.0; give more than 0 and at most 1"),
        ({"max_new_tokens": 0}, "max_new_tokens: found 0; give 1 or more"),
    ],
)
def test_bad_choices_are_refused(choice, said):
    with pytest.raises(InputError, match=said):
        generate(tiny(), torch.ones(1, 3, dtype=torch.int64), **choice)


@pytest.mark.parametrize("tokens", [torch.ones(3), torch.ones(1, 0), torch.ones(1, 3)])
def test_tokens_are_rows_of_integers(tokens):
    with pytest.raises(InputError, match=r"tokens are .*; give integers, \(samples, length\)"):
        generate(tiny(), tokens)


def test_scores_are_cut_as_transformers_cuts_them():
    processors = transformers.generation.logits_process
    torch.manual_seed(0)
    scores = torch.randn(4, 50)
    for temperature, top_k, top_p in (
        (0.5, 3, 0.9),
        (2.0, 0, 0.3),
        (1.0, 50, 1.0),
        (1.3, 60, 0.01),
    ):
        wanted = processors.TemperatureLogitsWarper(temperature)(None, scores)
        if top_k:
            wanted = processors.TopKLogitsWarper(top_k)(None, wanted)
        if top_p < 1:
            wanted = processors.TopPLogitsWarper(top_p)(None, wanted)
        mine = Sampling(True, temperature, top_k, top_p).kept(scores)
        assert torch.equal(mine, wanted)


def test_a_step_made_before_must_have_room():
    class Short:
        class spec:  # noqa: N801
            length, batch = 4, 1

    with (
        warnings.catch_warnings(),
        pytest.raises(InputError, match=r"the step has 4 rows; make one of 6"),
    ):
        generate(
            tiny(), torch.ones(1, 3, dtype=torch.int64), max_new_tokens=4,
            make_step=lambda model, length, batch: Short,
        )  # fmt: skip
