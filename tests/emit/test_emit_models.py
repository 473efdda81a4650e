"""Whole models in stages: the zoo's reference modules, and modules as people write them."""

import functools
import random
import re

import pytest
import torch

from partita.capture import export_module
from partita.capture.reference_module import example_inputs, reference_module
from partita.zoo import build
from partita.zoo.bert import BertSizes, encoder
from partita.zoo.gpt import GptSizes, gpt
from partita.zoo.t5 import T5Sizes, encoder_decoder
from tests.emit import models
from tests.emit.source import emit_stages
from tests.emit.transparency import Model, any_order, assert_ruff_has_nothing_to_say

ZOO = {
    "resnet50": lambda: build("resnet50@32", batch=2, loss=True),
    "inception_v3": lambda: build("inception_v3@75", batch=2),
    "gpt2": lambda: gpt("gpt2", GptSizes(3, 32, 4, 32, 97), 2, 16, "f32", True, True),
    "bert": lambda: encoder("bert", BertSizes(3, 32, 4, 64, 32, 97), 2, 16, "f32", True),
    "t5": lambda: encoder_decoder("t5", T5Sizes(2, 32, 64, 4, 8, vocab=97), 2, 12, 8, "f32", True),
    "rnnlm": lambda: build("rnnlm@8", batch=2, hidden=32, vocab=97),
    "unet": lambda: build("unet@188", batch=1),
}
WRITTEN = {
    "gpt": (models.Gpt, lambda: (models.ids(97, 2, 16), models.ids(97, 2, 16))),
    "resnet": (models.ResNet, lambda: (torch.randn(2, 3, 32, 32),)),
    "unet": (models.UNet, lambda: (torch.randn(1, 1, 32, 32),)),
    "lstm": (models.LanguageModel, lambda: (models.ids(97, 2, 7),)),
}


@functools.cache
def zoo_model(name: str) -> Model:
    graph = ZOO[name]()
    module, args = reference_module(graph).eval(), example_inputs(graph)
    return Model(export_module(module, args), args, {})


@functools.cache
def written_model(name: str, training: bool = False) -> Model:
    make, arguments = WRITTEN[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module, args = make().train(training), arguments()
    return Model(export_module(module, args), args, {})


def equal_parts(it: Model, num_stages: int) -> dict[str, int]:
    return {op: i * num_stages // len(it.ops) for i, op in enumerate(it.ops)}


@pytest.mark.parametrize("name", ZOO)
def test_a_reference_module_of_the_zoo_in_four_stages_gives_the_same_numbers(name):
    it = zoo_model(name)
    it.assert_same(equal_parts(it, 4))


@pytest.mark.parametrize("name", ["gpt2", "bert", "t5", "rnnlm"])
def test_a_reference_module_in_stages_that_are_no_chain_gives_the_same_numbers(name):
    it = zoo_model(name)
    generator = random.Random(1)
    for _ in range(3):
        order = any_order(it, generator)
        cuts = sorted(generator.sample(range(1, len(order)), min(5, len(order) - 1)))
        stage_of = {op: sum(i >= cut for cut in cuts) for i, op in enumerate(order)}
        it.assert_same(stage_of, exact_gradients=False)


def test_constants_are_made_where_they_are_used_and_never_sent():
    it = written_model("gpt")
    for place in range(0, len(it.ops), 5):
        source = emit_stages(it.captured, {op: int(i >= place) for i, op in enumerate(it.ops)})
        assert "arange" not in "".join(re.findall(r"gives = .*", source))


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", WRITTEN)
def test_a_written_model_in_stages_gives_the_same_numbers(name, training):
    it = written_model(name, training)
    generator = random.Random(0)
    it.assert_same(equal_parts(it, 1))
    for num_stages in (2, 5, len(it.ops)):
        it.assert_same(equal_parts(it, num_stages))
    for _ in range(2):
        cuts = sorted(generator.sample(range(1, len(it.ops)), 3))
        it.assert_same({op: sum(i >= cut for cut in cuts) for i, op in enumerate(it.ops)})


def test_the_code_of_models_is_formatted_and_clean(tmp_path):
    for name in ("resnet50", "gpt2", "t5"):
        it = zoo_model(name)
        text = emit_stages(it.captured, equal_parts(it, 4), title=name)
        (tmp_path / f"zoo_{name}.py").write_text(text)
    for name in WRITTEN:
        for training in (False, True):
            it = written_model(name, training)
            for num_stages in (1, 3, 7):
                text = emit_stages(it.captured, equal_parts(it, num_stages), title=name)
                (tmp_path / f"{name}_{training}_{num_stages}.py".lower()).write_text(text)
    assert_ruff_has_nothing_to_say(tmp_path)


def test_equal_blocks_are_written_once():
    source = emit_stages(written_model("gpt").captured, equal_parts(written_model("gpt"), 1))
    assert source.count("class Block(") == 1
    assert source.count("class Attention(") == 1
    assert "self.h = nn.ModuleList([Block() for _ in range(3)])" in source


def test_blocks_that_differ_in_sizes_are_one_class_with_sizes():
    it = written_model("resnet")
    source = emit_stages(it.captured, equal_parts(it, 1))
    assert "def __init__(self, in_channels: int, out_channels: int) -> None:" in source
    assert "self.conv1 = nn.Conv2d(in_channels, out_channels, 1, bias=False)" in source
    made = "nn.Sequential(Bottleneck(), Bottleneck2(16, 4))"
    assert made in source
    assert "Bottleneck2(32, 8)" in source
