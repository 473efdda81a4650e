"""A token behind a cache gets the logits that it has in the whole text; the cache is held."""

from dataclasses import replace

import pytest

from partita.cluster import resolve
from partita.errors import ModelError
from partita.graph.traffic import cached_inputs, elements, traffic
from partita.jobs.simulate import simulate, simulate_stages
from partita.jobs.workload import load
from partita.plans import Axis, Mesh, OpSplit, Schedule, Stage
from partita.report.summary import job_line
from partita.zoo import build
from partita.zoo.hf import build_config
from tests.zoo.hf_tiny import tiny

FAMILIES = ["llama", "gpt2", "mistral", "llama4_text", "opt", "gemma3_text", "gpt_oss", "phi3"]
LENGTH = 11


@pytest.mark.parametrize("family", FAMILIES)
def test_a_new_token_is_read_as_in_the_whole_text(family):
    torch = pytest.importorskip("torch")
    from partita.capture.reference_module import reference_module

    config = tiny(family, 0)
    settings = {"batch": 2, "dtype": "f32", "loss": False}
    whole = build_config(config, seq=LENGTH, **settings)
    new = 2 if family == "llama" else 1
    step = build_config(config, seq=new, cache=LENGTH - new, **settings)
    assert {tensor.name for tensor in whole.parameters} == {t.name for t in step.parameters}
    attentions = [op for op in whole.ops if op.kind == "attention"]
    kept = [name for op in attentions for name in op.inputs[1:3]]
    told = replace(whole, outputs=(*whole.outputs, *kept))
    torch.manual_seed(0)
    full, one = reference_module(told).eval(), reference_module(step).eval()
    with torch.no_grad():
        for parameter in full.parameters():
            parameter.normal_(0, 0.3)
        one.load_state_dict(full.state_dict())
        ids = torch.randint(0, 40, (2, LENGTH))
        logits, *keys_and_values = full(ids)
        caches = [part[:, : LENGTH - new] for part in keys_and_values]
        found = one(ids[:, LENGTH - new :], *caches)
    assert logits.abs().max() > 0.1
    assert (found - logits[:, -new:]).abs().max() < 1e-5


def test_a_cache_that_grows_is_not_copied():
    graph = build("gpt2@1+511", batch=2, loss=False)
    op = next(op for op in graph.ops if op.kind == "concat")
    moved = traffic(graph.call(op), *elements(graph, op), {}).total
    assert moved == 2 * 2 * 768 * 2  # one token of two samples, read and written in bf16


def test_the_cache_is_held_all_the_time_split_as_its_readers_are():
    cache = 2 * 12 * 4 * 1023 * 768 * 2  # keys and values, layers, samples, tokens, width, bf16
    step = simulate("gpt2@1+1023", "2xA100", batch=4, training=False)
    short = simulate("gpt2@1+1", "2xA100", batch=4, training=False)
    more = max(step.peak_bytes) - max(short.peak_bytes)
    assert more == pytest.approx(cache / 2, rel=0.02)
    assert sum(cached_inputs(step.workload.graph).values()) == 24 * 1023
    assert "decode behind a KV cache of 1,023 tokens a sample (144 MiB)" in job_line(step)
    assert ", inference, prefill, " in job_line(simulate("gpt2@8", "A100", training=False))


def test_every_micro_batch_has_its_cache():
    workload, machine = load("gpt2@1+1023", batch=4, training=False), resolve("A100")
    ops = [op for op in workload.graph.ops if op.phase == "forward"]
    stage = Stage("all", Mesh((Axis("x", 1),), (0,)), tuple(OpSplit(o.name, ("",)) for o in ops))
    peaks = [
        max(simulate_stages(workload, machine, (stage,), Schedule("gpipe", count)).peak_bytes)
        for count in (1, 2)
    ]
    assert peaks[1] == pytest.approx(peaks[0], rel=0.02)


@pytest.mark.parametrize(
    ("spec", "loss", "message"),
    [
        ("gpt2@1+1024", False, "1025 positions, and the model has learned 1024"),
        ("gpt2@1+10", True, "a cache of tokens read before, which training has not"),
        ("gpt2@1+x", False, "cache 'x' after the @"),
        ("bert-base@1+10", False, "has no option 'cache'"),
    ],
)
def test_caches_that_cannot_be_are_refused(spec, loss, message):
    with pytest.raises(ModelError, match=message):
        build(spec, loss=loss)


@pytest.mark.parametrize("family", ["deepseek_v3", "mamba2", "t5", "vit"])
def test_models_without_a_plain_cache_say_so(family):
    with pytest.raises(ModelError, match="of which no cache is built"):
        build_config(tiny(family), seq=1, cache=4, loss=False)
