"""Every feature of real models passes through every cut: outputs, gradients, buffers."""

import functools
import random

import pytest
import torch

from partita.capture import export_module
from tests.capture.features import FEATURES
from tests.emit.source import emit_stages
from tests.emit.transparency import Model, any_order, assert_ruff_has_nothing_to_say, same

CAPTURED = [name for name, feature in FEATURES.items() if feature.expected == "captured"]


@functools.cache
def model(name: str) -> Model:
    module, args, kwargs = FEATURES[name].make()
    return Model(export_module(module, args, kwargs, **FEATURES[name].options), args, kwargs)


@pytest.mark.parametrize("name", CAPTURED)
def test_every_cut_in_two_gives_the_same_numbers(name):
    it = model(name)
    for place in range(len(it.ops) + 1):
        it.assert_same({op: int(i >= place) for i, op in enumerate(it.ops)})


@pytest.mark.parametrize("name", CAPTURED)
def test_cuts_into_many_stages_give_the_same_numbers(name):
    it = model(name)
    generator = random.Random(0)
    for _ in range(3):
        cuts = sorted(generator.sample(range(len(it.ops) + 1), min(3, len(it.ops))))
        it.assert_same({op: sum(i >= cut for cut in cuts) for i, op in enumerate(it.ops)})
    it.assert_same({op: i for i, op in enumerate(it.ops)})


@pytest.mark.parametrize("name", [n for n in CAPTURED if not FEATURES[n].random])
def test_stages_that_are_no_chain_give_the_same_numbers(name):
    it = model(name)
    generator = random.Random(0)
    for _ in range(3):
        order = any_order(it, generator)
        cuts = sorted(generator.sample(range(len(order) + 1), min(3, len(order))))
        stage_of = {op: sum(i >= cut for cut in cuts) for i, op in enumerate(order)}
        it.assert_same(stage_of, exact_gradients=False)


@pytest.mark.parametrize("name", CAPTURED)
def test_stages_need_nothing_of_each_other_but_what_they_send(name):
    it = model(name)
    third = max(1, len(it.ops) // 3)
    stage_of = {op: min(2, i // third) for i, op in enumerate(it.ops)}
    spec, outputs, gradients, _ = it.observe_apart(stage_of)
    assert spec == it.wanted[0]
    assert all(same(a, b) for a, b in zip(outputs, it.wanted[1], strict=True))
    for key, mine in gradients.items():
        theirs = it.wanted[2][key]
        assert (mine is None) == (theirs is None)
        if mine is not None:
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


def test_emitted_code_is_formatted_and_clean(tmp_path):
    for name in CAPTURED:
        it = model(name)
        half = len(it.ops) // 2
        source = emit_stages(it.captured, {op: int(i >= half) for i, op in enumerate(it.ops)})
        (tmp_path / f"stages_{name.lower()}.py").write_text(source)
    assert_ruff_has_nothing_to_say(tmp_path)
