"""Graphs of configurations compute what `transformers` computes, with its own state dict.

Models are tiny and their weights random, so no checkpoint is needed.
"""

import logging

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from transformers import CONFIG_MAPPING

from partita.capture.reference_module import reference_module
from partita.emit.plans import capture_reference
from partita.emit.stages import emit
from partita.files import decode_config
from partita.run.sequential import load_source
from partita.zoo.fields import COMMON, FIXED, NEUTRAL
from partita.zoo.hf import FAMILIES, build_config
from tests.zoo.hf_theirs import GIVES, inputs, theirs
from tests.zoo.hf_tiny import CASES, TINY, tiny

SEQ = 12
TOLERANCE = 1e-5


@pytest.fixture(autouse=True)
def quiet():
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize(("family", "variant"), CASES)
def test_logits_are_those_of_transformers(family, variant, tmp_path):
    config = tiny(family, variant)
    model = theirs(config)
    for fused in (True, False):
        settings = {"batch": 2, "seq": SEQ, "dtype": "f32", "loss": False, "fused_attention": fused}
        graph = build_config(config, **settings)
        given = inputs(graph, config.get("pad_token_id"))
        module = reference_module(graph).eval()
        assert not module.load_state_dict(model.state_dict(), strict=False).missing_keys
        with torch.no_grad():
            wanted = getattr(model(**given), GIVES.get(family, "logits"))
            computed = module(*given.values())
        assert wanted.abs().max() > 0.1
        assert (computed - wanted).abs().max() < TOLERANCE
    model.config.save_pretrained(tmp_path)
    written = decode_config((tmp_path / "config.json").read_bytes())
    if (family, variant) != ("t5", 1):  # there the output layer is tied from then on
        assert build_config(written, **settings).ops == graph.ops


@pytest.mark.parametrize("family", ["gpt2", "gpt_neox", "mixtral", "gpt_oss", "t5"])
def test_emitted_stages_take_the_state_dict_as_it_is(family):
    config = tiny(family, 0)
    model = theirs(config)
    graph = build_config(config, batch=2, seq=SEQ, dtype="f32", loss=False)
    captured, op_of = capture_reference(graph, training=False)
    half = {op.name: int(i > len(graph.ops) // 2) for i, op in enumerate(graph.ops)}
    emitted = emit(
        captured, {node: half[op] for node, op in op_of.items()}, title=graph.name,
        input_names=[tensor.name for tensor in graph.inputs],
    )  # fmt: skip
    module = load_source(emitted.source)
    with torch.no_grad():
        stages = module.build_stages(model.state_dict())
        given = inputs(graph)
        computed = module.run_stages(stages, *given.values())
        assert (computed - model(**given).logits).abs().max() < TOLERANCE


@pytest.mark.parametrize("family", TINY)
def test_every_field_of_the_configuration_class_is_known(family):
    known = {*FAMILIES[family].fields, *FAMILIES[family].neutral, *NEUTRAL, *FIXED, *COMMON}
    assert set(CONFIG_MAPPING[family]().to_dict()) <= known
