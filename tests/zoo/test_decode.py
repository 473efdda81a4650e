"""A token behind a cache gets the logits that it has in the whole text; the cache is held."""

import json
import math
from dataclasses import replace

import pytest

from partita.cluster import resolve
from partita.errors import ModelError
from partita.graph.work import cached_inputs, elements, traffic
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
        computed = one(ids[:, LENGTH - new :], *caches)
    assert logits.abs().max() > 0.1
    assert (computed - logits[:, -new:]).abs().max() < 1e-5


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


@pytest.mark.parametrize("family", ["bert", "vit", "clip"])
def test_models_that_write_no_text_have_no_cache(family):
    with pytest.raises(ModelError, match="writes no text and has no cache"):
        build_config(tiny(family), seq=1, cache=4, loss=False)


def test_a_kept_encoding_needs_fused_attention():
    with pytest.raises(ModelError, match="keeps what its encoder gave"):
        build_config(tiny("t5"), seq=1, cache=4, loss=False, fused_attention=False)


OTHERS = ["deepseek_v2", "deepseek_v3", "mamba2", "t5", "bart", "whisper"]


@pytest.mark.parametrize("new", [1, 3])
@pytest.mark.parametrize("family", OTHERS)
def test_a_step_gives_the_logits_of_transformers(family, new):
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from partita.capture.reference_module import reference_module
    from tests.zoo.hf_theirs import theirs

    config, settings = tiny(family), {"batch": 2, "dtype": "f32", "loss": False}
    before = LENGTH - new
    whole = build_config(config, seq=LENGTH, **settings)
    step = build_config(config, seq=new, cache=before, **settings)
    model = theirs(config)
    torch.manual_seed(0)
    given = {
        tensor.name.rpartition(".")[2]: torch.randint(2, 40, tensor.shape)
        if tensor.dtype == "i64"
        else torch.randn(tensor.shape)
        for tensor in whole.inputs
    }
    ids = given["decoder_input_ids" if "decoder_input_ids" in given else "input_ids"]
    wanted = [name for tensor in step.inputs[1:] for name in kept_as(whole, tensor.name)]
    told = replace(whole, outputs=(*whole.outputs, *wanted))
    full, one = reference_module(told).eval(), reference_module(step).eval()
    with torch.no_grad():
        expected = decoded(torch, model, given, before)
        for module in (full, one):
            module.load_state_dict(model.state_dict(), strict=False)
        prefill, *values = full(*given.values())
        found = dict(zip(wanted, values, strict=True))
        found |= model.state_dict()
        caches = [cache_of(torch, whole, found, tensor, before) for tensor in step.inputs[1:]]
        logits = one(ids[:, before:], *caches)
    scale = expected.abs().max()
    assert scale > 0.1
    assert (prefill[:, before:] - expected).abs().max() < 1e-5 * max(1, scale)
    assert (logits - expected).abs().max() < 1e-5 * max(1, scale)


def decoded(torch, model, given, before):
    """The logits of `transformers` for what follows the first tokens, one call after the other."""
    key = "decoder_input_ids" if "decoder_input_ids" in given else "input_ids"
    first = model(**given | {key: given[key][:, :before]}, use_cache=True)
    parts, memory = [], {}
    if key == "decoder_input_ids":
        memory = {"encoder_outputs": (first.encoder_last_hidden_state,)}
    kept = first.get("past_key_values") or first.get("cache_params")
    name = "past_key_values" if first.get("past_key_values") is not None else "cache_params"
    for place in range(before, given[key].shape[1]):
        more = {name: kept, key: given[key][:, place : place + 1], "use_cache": True}
        answer = model(**more, **memory)
        parts.append(answer.logits)
    return torch.cat(parts, 1)


def kept_as(graph, name):
    """The tensors of the whole text that an input of the step keeps."""
    scope, _, part = name.rpartition(".")
    inside = {op.name.removeprefix(f"{scope}."): op for op in graph.ops if op.scope == scope}
    if part == "latent_cache":
        return [inside["kv_a_layernorm"].outputs[0], inside["k_rope"].outputs[0]]
    if part == "state":
        x, steps, _, b, *_ = inside["scan"].inputs
        return [x, steps, b]
    if "attention" in inside:
        return [inside["attention"].inputs[1 if part == "k_cache" else 2]]
    return [inside[f"in_proj.{part.removesuffix('_cache')}"].outputs[0]]


def cache_of(torch, graph, values, tensor, before):
    """What a step is given of the tokens before it."""
    parts = [values[name] for name in kept_as(graph, tensor.name)]
    if tensor.name.endswith(".state"):
        scope = tensor.name.removesuffix("state")
        own = [values[f"{scope}{name}"] for name in ("A_log", "dt_bias")]
        return state_after(torch, tensor, *parts, *own, before)
    whole = torch.cat(parts, -1)
    read = whole if ".EncDecAttention." in tensor.name or "encoder_attn" in tensor.name else (
        whole[:, :before]
    )  # fmt: skip
    return read[:, -tensor.shape[1] :]


def state_after(torch, tensor, x, steps, b, decay, bias, before):
    """The state of Mamba-2, position by position."""
    _, heads, size, state = tensor.shape
    x, b = x.unflatten(-1, (heads, size)), b.unflatten(-1, (-1, state))
    b = b.repeat_interleave(heads // b.shape[2], 2)
    steps = torch.nn.functional.softplus(steps + bias)
    held = torch.zeros(tensor.shape)
    for t in range(before):
        made = (steps[:, t, :, None] * x[:, t])[..., None] * b[:, t, :, None]
        held = held * torch.exp(-decay.exp() * steps[:, t])[..., None, None] + made
    return held


def test_a_latent_cache_is_narrow_and_read_once():
    settings = {"batch": 2, "dtype": "f32", "loss": False}
    graph = build_config(tiny("deepseek_v3"), seq=1, cache=8, **settings)
    kept = cached_inputs(graph)
    assert {graph.tensor(name).shape for name in kept} == {(2, 8, 10)}  # rank 6 and 4 turned
    op = next(op for op in graph.ops if op.kind == "attention")
    reads, writes = elements(graph, op)
    sizes = [math.prod(each.shape) for each in (*reads[:2], *writes)]
    assert traffic(graph.call(op), reads, writes, {}).total == 4 * sum(sizes)


def test_a_step_of_mamba_does_not_hang_on_what_was_read(tmp_path):
    path = tmp_path / "mamba2.json"
    path.write_text(json.dumps(tiny("mamba2")))
    lines = [
        job_line(simulate(f"{path}@1+{cache}", "A100", training=False)) for cache in (16, 4096)
    ]
    assert "decode from a recurrent state (" in lines[0]
    assert lines[0].partition(": ")[2] == lines[1].partition(": ")[2]


@pytest.mark.parametrize("model", ["t5-small@1+64", "t5-small@4+16"])
def test_an_encoder_is_not_run_again(model):
    graph = build(model, batch=2, loss=False)
    assert not [op for op in graph.ops if op.scope.startswith("encoder")]
    assert max(cached_inputs(graph).values()) == 512
    line = job_line(simulate(model, "2xA100", batch=2, training=False))
    cache = model.partition("+")[2]
    assert f"decode behind a KV cache of {cache} tokens and 512 of the encoder a sample" in line
