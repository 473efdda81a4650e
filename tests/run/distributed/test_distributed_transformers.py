"""Models of `transformers` as they come run under a plan with the numbers of one process."""

from unittest import mock

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from distributed_plans import (  # noqa: E402
    adamw,
    apart,
    exported_once,
    graph_of,
    in_one_process,
    pipeline,
)
from distributed_ranks import run_on_ranks  # noqa: E402

from partita.run.distributed import engine as engines  # noqa: E402

CLOSE = 1e-5
STEPS = 2
MODELS = ("gpt2", "llama")
PLANS = {
    "ZB-H1": {"groups": 2, "name": "zb-h1", "count": 2},
    "ZeRO 3": {"groups": 1, "name": "1f1b", "count": 1, "data_parallel": 2, "zero": 3},
}


class WithLoss(torch.nn.Module):
    """A language model whose labels are the next tokens of its own input."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids):
        return self.model(input_ids=ids, labels=ids, use_cache=False).loss


def make(name):
    """A small model from its configuration, always with the same random weights."""
    torch.manual_seed(0)
    if name == "gpt2":
        settings = transformers.GPT2Config(
            vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2, resid_pdrop=0.0,
            embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
        )  # fmt: skip
        model = transformers.GPT2LMHeadModel(settings)
    else:
        settings = transformers.LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=16,
        )  # fmt: skip
        model = transformers.LlamaForCausalLM(settings)
    return WithLoss(model), (torch.randint(64, (8, 8)),)


def run_plans(rank, model):
    graph = graph_of(*make(model))
    errors = {}
    for name, settings in PLANS.items():
        module, args = make(model)
        plan = pipeline(graph, **settings)
        with mock.patch.object(engines, "RunModel", exported_once):
            engine = engines.execute(
                plan, module, optimizer=adamw, device="cpu", keep_gradients=True, example=args
            )
        losses = [engine.step(*args) for _ in range(STEPS)]
        state, gradients = engine.full_state_dict(), engine.full_gradients()
        engine.board.close()
        if rank:
            continue
        count = plan.schedule.num_microbatches
        wanted, grads, after = in_one_process(make(model)[0], args, count, STEPS, adamw)
        errors[name] = {
            "loss": max(abs(a - b) / abs(b) for a, b in zip(losses, wanted, strict=True)),
            "gradients": apart(gradients, grads),
            "state": apart(state, after),
        }
    return errors


def run_models(rank):
    return {model: run_plans(rank, model) for model in MODELS}


@pytest.fixture(scope="module")
def on_two_ranks(tmp_path_factory):
    ends = run_on_ranks(2, run_models, folder=tmp_path_factory.mktemp("transformers"))
    assert [end.code for end in ends] == [0, 0], "\n".join(end.stderr for end in ends)
    return ends[0].result


@pytest.mark.parametrize("model", MODELS)
def test_a_model_of_transformers_has_the_numbers_of_one_process(on_two_ranks, model):
    assert list(on_two_ranks[model]) == list(PLANS)
    for name, errors in on_two_ranks[model].items():
        assert max(errors.values()) <= CLOSE, (name, errors)
