"""Strategies that cannot be are refused: what was found, what to change."""

import pytest

from partita.errors import PlanError
from partita.forecast import Strategy, check_divisions, check_strategy
from partita.forecast.models import transformer_of

GPT3 = transformer_of("gpt3")
LLAMA = transformer_of("llama-3-70b")  # 80 layers, 64 heads, 8 for keys and values
MIXTRAL = transformer_of("mixtral")


@pytest.mark.parametrize(
    ("model", "keys", "devices", "words"),
    [
        (GPT3, {"dp": 3}, 8, "dp: tp=1 x cp=1 x dp=3 x pp=1 are 3 devices, the cluster has 8; "
         "use dp=8"),
        (GPT3, {"tp": 3}, 8, "dp: tp=3 x cp=1 x dp=1 x pp=1 are 3 devices, the cluster has 8; "
         "choose tp, cp and pp whose product divides 8"),
        (GPT3, {"batch": 4, "micro_batch": 8}, 1, "micro-batch: 8 x dp=1 is more than the batch of "
         "4; use a micro-batch of at most 4 or a larger batch"),
        (GPT3, {"batch": 10, "dp": 4}, 4, "batch: a batch of 10 is not a whole number of "
         "micro-batches of 1 for each of dp=4 replicas; use a multiple of 4"),
        (GPT3, {"tp": 5}, 5, "tp: tp=5 does not divide 96 heads; use a divisor of 96"),
        (LLAMA, {"tp": 64}, 64, ""),
        (GPT3, {"sp": True}, 1, "sp: sequence parallelism splits what tensor parallelism repeats, "
         "and tp is 1; use tp of at least 2 or leave sp out"),
        (GPT3, {"cp": 3}, 3, "cp: 3 ranks do not divide a sequence of 2048; "
         "choose cp and tp that divide it"),
        (GPT3, {"ep": 2, "dp": 2}, 2, "ep: ep=2 and the model has no experts; leave it out"),
        (MIXTRAL, {"ep": 3, "dp": 3, "batch": 66}, 3,
         "ep: ep=3 does not divide 8 experts; choose a divisor"),
        (MIXTRAL, {"ep": 8, "dp": 12, "batch": 24}, 12,
         "ep: ep=8 does not divide the 12 ranks of one stage; choose a divisor of 4"),
        (GPT3, {"vpp": 2}, 1, "vpp: vpp=2 without a pipeline; use pp of at least 2"),
        (GPT3, {"pp": 128}, 128, "pp: pp=128 x vpp=1 are 128 chunks, the model has 96 layers; "
         "use pp x vpp of at most 96"),
        (GPT3, {"pp": 8, "vpp": 2, "schedule": "interleaved", "batch": 12}, 8,
         "batch: 12 micro-batches are not a multiple of pp=8, as interleaving needs; "
         "use a batch that gives a multiple of 8"),
        (GPT3, {"pp": 2, "layers": (50, 50)}, 2, "layers: 50,50 are 100 layers in 2 stages, the "
         "model has 96 and pp is 2; give 2 numbers that add up to 96"),
        (GPT3, {"pp": 2, "layers": (96,)}, 2, "layers: 96 are 96 layers in 1 stages"),
        (GPT3, {"zero": 4}, 1, "zero: is 4; use 0, 1, 2 or 3"),
        (GPT3, {"hsdp": 3, "dp": 4, "zero": 3}, 4,
         "hsdp: 3 does not divide dp=4; choose a divisor"),
        (GPT3, {"schedule": "best"}, 1, "schedule: is 'best'; use one of gpipe, 1f1b"),
        (GPT3, {"recompute": "some"}, 1, "recompute: is 'some'; use one of none, selective, full"),
        (GPT3, {"execution": "lazy"}, 1, "execution: is 'lazy'; use one of eager, compiled, graph"),
        (GPT3, {"attention": "slow"}, 1, "attention: is 'slow'; use one of flash"),
        (GPT3, {"dtype": "i8"}, 1, "dtype: is 'i8'; use one of f32, bf16, f16"),
        (GPT3, {"matmul_dtype": "i8"}, 1, "matmul-dtype: is 'i8'; use one of f32, tf32"),
        (GPT3, {"grad_dtype": "f8"}, 1, "grad-dtype: is 'f8'; use one of f32, bf16, f16"),
        (GPT3, {"tp": 0}, 1, "tp: is 0; use at least 1"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(model, keys, devices, words):
    strategy = Strategy(**{"batch": 64, **keys})
    if not words:  # heads of keys and values may be repeated
        check_strategy(model, strategy, devices)
        return
    with pytest.raises(PlanError) as refusal:
        check_strategy(model, strategy, devices)
    assert str(refusal.value).startswith(words)


def test_heads_of_keys_and_values_are_not_torn():
    from dataclasses import replace

    model = replace(LLAMA, kv_heads=6, heads=48)
    with pytest.raises(PlanError, match="tp=4 neither divides 6 heads of keys and values nor is"):
        check_strategy(model, Strategy(batch=4, tp=4), 4)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"pp": 8, "vpp": 5, "schedule": "interleaved"},
         "vpp: 96 layers are not divided by pp=8 x vpp=5 = 40 chunks; use vpp of 2, 3, 4, 6 or 12"),
        ({"pp": 5, "vpp": 2, "schedule": "interleaved"},
         "vpp: 96 layers are not divided by pp=5 x vpp=2 = 10 chunks; "
         "use pp x vpp that divides 96, or leave vpp out"),
        ({"pp": 8, "vpp": 2}, "vpp: vpp=2, and 1f1b does not interleave chunks; "
         "use schedule interleaved, or leave vpp out"),
        ({"pp": 8, "schedule": "interleaved"}, "schedule: interleaving needs several chunks on "
         "each rank; use vpp of at least 2, or schedule 1f1b"),
        ({"dp": 8, "hsdp": 4}, "hsdp: hsdp=4 says over how many ranks a copy is sharded, and "
         "zero=0 shards nothing; use zero=3 (or 1, 2), or leave hsdp out"),
    ],
)  # fmt: skip
def test_what_frameworks_refuse_is_refused(keys, words):
    with pytest.raises(PlanError) as refusal:
        check_divisions(GPT3, Strategy(batch=64, **keys))
    assert str(refusal.value) == words


def test_the_embedding_and_the_output_layer_may_count_as_layers():
    from dataclasses import replace

    model = replace(GPT3, layers=94)
    check_divisions(model, Strategy(batch=64, pp=8, vpp=2, schedule="interleaved"))
