"""Pieces: which steps become one launch, that they compute the same, compiled once."""

import graphlib
import random
from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from interleave import interleaved
from streams_modules import made
from torch import nn
from torch.nn import functional as nnf

from partita.costs.measured import Environment
from partita.errors import PlanError
from partita.gpu.flow.export import flow_of
from partita.gpu.flow.fold import fold, fold_norms
from partita.gpu.flow.place import place
from partita.gpu.flow.steps import Flow, Step, used_steps
from partita.gpu.reference_output import relative
from partita.gpu.sequential import SequentialGraph
from partita.gpu.step_times import StepTimes
from partita.gpu.streams import choose, compiled, fuse, order
from partita.gpu.streams.api import Streamed, built
from partita.gpu.streams.bound import Bound
from partita.gpu.streams.candidates import Options, variants
from partita.gpu.streams.choose import Chooser
from partita.gpu.streams.compiled import Compiler, NotCompiledError
from partita.gpu.streams.emit import source
from partita.gpu.streams.pieces import alike, contracted, groups
from partita.gpu.streams.replay import Replay
from partita.gpu.streams.ways import COMPILED, EAGER

HERE = Environment("here", "2.11.0", False, "none")
ROUNDING = 1e-5
CPU = torch.device("cpu")


class Mixed(nn.Module):
    """Pools and sums beside a convolution in one concatenation, of which one is read again."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 1)
        self.end = nn.Linear(32, 6)

    def forward(self, x):
        x = self.one(x)
        y = nnf.max_pool2d(nnf.avg_pool2d(x, 3, 1, 1) + 0.5 * x, 3, 1, 1)
        z = torch.cat([self.two(x), y], 1)
        return torch.softmax(self.end(z.mean((2, 3)) + y.amax((2, 3)).repeat(1, 2)), 1)


class Encoder(nn.Module):
    """Two equal layers: sums, norms and views between products."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x):
        return self.layers(x)


@cache
def model(name):
    torch.manual_seed(1)
    if name == "separable":
        return made(name)
    module = {"mixed": Mixed, "encoder": Encoder}[name]().eval()
    return module, torch.randn(1, 3, 12, 10) if name == "mixed" else torch.randn(1, 3, 8)


@cache
def flows(name):
    """The module's steps, read and placed; its input and output."""
    module, inputs = model(name)
    with torch.no_grad():
        read = flow_of(module, (inputs,))
        return read, *place(fold(read)), inputs, module(inputs)


@st.composite
def wirings(draw):
    """Steps that read some earlier ones: sums, products, views."""
    count = draw(st.integers(2, 16))
    steps = []
    for index in range(count):
        names = ["x", *(step.name for step in steps)]
        chosen = tuple(draw(st.lists(st.sampled_from(names), min_size=1, max_size=3, unique=True)))
        kind = draw(st.sampled_from(["combine", "combine", "conv", "cat"]))
        steps.append(Step(f"s{index}", kind, chosen))
    shapes = dict.fromkeys(("x", *(step.name for step in steps)), (1, 8, 1, 1))
    return used_steps(Flow(tuple(steps), ("x",), (steps[-1].name,), shapes, {}, {}))


def circle(flow, joined):
    """Would these groups, each one step, wait for each other?"""
    owner = {name: f"group {number}" for number, group in enumerate(joined) for name in group}
    waits = {}
    for step in flow.steps:
        mine = owner.get(step.name, step.name)
        needs = {owner.get(name, name) for name in step.uses} - {mine}
        waits.setdefault(mine, set()).update(needs)
    try:
        graphlib.TopologicalSorter(waits).prepare()
    except graphlib.CycleError:
        return True
    return False


@given(flow=wirings())
def test_groups_are_as_large_as_they_can_be_without_waiting_for_themselves(flow):
    op_groups = groups(flow)
    assert not circle(flow, op_groups)
    sums = {step.name for step in flow.steps if step.kind == "combine"}
    members = [name for group in op_groups for name in group]
    assert len(members) == len(set(members))
    assert set(members) <= sums
    alone = [(name,) for name in sorted(sums - set(members))]
    makers = flow.maker()
    for one in (*op_groups, *alone):
        for two in (*op_groups, *alone):
            read = any(name in two for member in one for name in makers[member].uses)
            if one != two and read:
                rest = [group for group in op_groups if group not in (one, two)]
                assert circle(flow, [*rest, (*one, *two)])


@given(flow=wirings())
def test_a_flow_with_pieces_is_in_order_and_makes_all_that_is_read(flow):
    this_flow = contracted(flow, groups(flow))
    known = {"x"}
    for step in this_flow.steps:
        assert set(step.uses) <= known
        known |= {step.name}
    inside = [member for step in this_flow.steps for member in step.members]
    rest = [step for step in this_flow.steps if step.kind not in ("piece", "made")]
    assert sorted(step.name for step in (*inside, *rest)) == sorted(s.name for s in flow.steps)
    assert set(flow.outputs) <= known
    for step in this_flow.steps:
        for name in step.makes:
            assert this_flow.maker()[name].inputs == (step.name,)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", ["mixed", "encoder", "separable"])
def test_pieces_in_any_order_that_waits_allow_give_the_same(name, backend):
    _, placed, placement, inputs, wanted = flows(name)
    flow = contracted(placed, groups(placed))
    assert any(step.kind == "piece" for step in flow.steps)
    plan = order.listed(flow, 3, dict.fromkeys(order.launched(flow), 1.0))
    assert order.uncovered(plan, order.depends(flow)) == []
    for seed in range(3):
        bound = Bound(flow, placement, CPU, Compiler(backend))
        bound.set_inputs((inputs,))
        for index in interleaved(plan, random.Random(seed)):
            step = flow.steps[index]
            bound.run(step, COMPILED if step.kind == "piece" else EAGER)
        assert relative(bound.outputs()[0], wanted) < ROUNDING


def test_a_piece_writes_into_the_concatenation_itself():
    _, placed, placement, inputs, _ = flows("mixed")
    flow = contracted(placed, groups(placed))
    bound = Bound(flow, placement, CPU, Compiler("aot_eager"))
    bound.set_inputs((inputs,))
    for step in flow.steps:
        bound.run(step, COMPILED if step.kind == "piece" else EAGER)
    cat = next(step for step in flow.steps if step.kind == "cat")
    member = next(name for name in cat.inputs if flow.maker()[name].kind == "made")
    assert bound.values[member] is bound.homes[member]
    assert bound.values[member].data_ptr() != bound.values[cat.name].data_ptr()
    whole = bound.buffers[placement.places[cat.name].buffer]
    assert bound.values[member].untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()


def test_values_that_only_operators_of_pytorch_touch_are_no_images():
    _, placed, placement, _, _ = flows("encoder")
    heads = [name for name, shape in placed.shapes.items() if len(shape) == 4]
    assert heads
    assert not placement.places


def test_equal_pieces_are_compiled_once():
    _, placed, placement, inputs, _ = flows("encoder")
    flow = contracted(placed, groups(placed))
    pieces = [step for step in flow.steps if step.kind == "piece"]
    different = {alike(step) for step in pieces}
    assert len(different) < len(pieces)
    compiler = Compiler("aot_eager")
    ways = {step.name: COMPILED for step in pieces}
    run = Replay(Bound(flow, placement, CPU, compiler), order.sequential(flow), ways)
    run(inputs)
    assert len(compiler.done) == len(different)


def test_products_stay_by_themselves_and_one_launch_is_no_piece():
    _, placed, _, _, _ = flows("encoder")
    flow = contracted(placed, groups(placed))
    inside = {member.target for step in flow.steps for member in step.members}
    assert "aten.layer_norm.default" in inside
    assert not any(word in target for target in inside for word in ("linear", "mm", "attention"))
    lonely = place(fold(flow_of(*made_alone())))[0]
    assert groups(lonely) == ()


def made_alone():
    module = nn.Sequential(nn.Conv2d(3, 8, 1), nn.MaxPool2d(2), nn.Conv2d(8, 8, 1)).eval()
    return module, (torch.randn(1, 3, 8, 8),)


def test_random_operators_are_in_no_piece():
    class Noisy(nn.Module):
        def forward(self, x):
            return torch.softmax(x + torch.rand_like(x), 1)

    flow = flow_of(Noisy(), (torch.randn(2, 3),))
    members = [name for group in groups(flow) for name in group]
    assert "rand_like" not in members


@pytest.mark.parametrize("name", ["mixed", "encoder"])
def test_a_whole_model_is_compiled_for_a_graph_of_ours(name):
    read, _, _, inputs, wanted = flows(name)
    plain = SequentialGraph(
        fold_norms(read), (torch.zeros_like(inputs),), Compiler("aot_eager").whole
    )
    assert relative(plain(inputs)[0], wanted) < ROUNDING


def chooser(name, backend="aot_eager", profile=None):
    module, inputs = model(name)
    options = Options(time_s=100.0, streams=(2,), stages=False, improve=False, backend=backend)
    return Chooser(module, (inputs,), options, profile or StepTimes(on=HERE), lambda text: None)


def test_pieces_and_compiled_models_are_candidates(monkeypatch, tmp_path):
    monkeypatch.setattr(fuse, "MARGIN", -1e9)  # the host's clock is no judge
    profile = StepTimes(tmp_path / "times.jsonl", on=HERE)
    mine = chooser("encoder", profile=profile)
    best, schedule = mine.choose()
    module, inputs = model("encoder")
    with torch.no_grad():
        assert relative(best.call(inputs)[0], module(inputs)) < ROUNDING
    labels = {label.removesuffix(" (replay)") for label, _ in schedule.times_us}
    assert {"torch.compile", "compiled graph", "sequential graph"} <= labels
    assert {"fold, sequential", "fold with pieces, sequential"} <= labels
    whole = [time for label, time in schedule.times_us if "(" not in label]
    assert schedule.time_us == min(whole)
    assert any(key.startswith("piece ") for key, _ in profile.times)


def test_a_piece_that_is_slower_stays_apart(monkeypatch):
    monkeypatch.setattr(fuse, "MARGIN", 1.0)
    _, schedule = chooser("encoder").choose()
    assert not any("pieces" in label for label, _ in schedule.times_us)


def test_what_the_compiler_does_not_take_is_left_out_and_said():
    _, schedule = chooser("encoder", backend="nonesuch").choose()
    assert any("a piece of" in note and "nonesuch" in note for note in schedule.notes)
    assert any(note.startswith("compiled graph: left out") for note in schedule.notes)
    assert schedule.form in ("streams", "sequential")


def test_a_compiled_graph_that_takes_too_long_is_left_out(monkeypatch):
    monkeypatch.setattr(choose, "PIECES_S", 0.0)
    mine = chooser("encoder")
    mine.options = Options(time_s=0.0, streams=(2,), backend="aot_eager")
    _, schedule = mine.choose()
    assert "compiled graph: left out (no time)" in schedule.notes


def test_what_was_prepared_is_not_made_again():
    mine = chooser("encoder")
    mine.prepare()
    made, plain = len(mine.compiler.done), mine.compiled_plain
    assert made > 0
    assert mine.candidates == []
    _, schedule = mine.choose()
    assert (len(mine.compiler.done), mine.compiled_plain) == (made, plain)
    assert schedule.seconds > mine.prepared_s > 0


def scheduled(monkeypatch):
    """A schedule with pieces, and the flow it is for."""
    monkeypatch.setattr(fuse, "MARGIN", -1e9)
    mine = chooser("encoder")
    mine.choose()
    best = next(each for each in mine.candidates if each.tuned and each.tuned.pieces)
    schedule = mine.schedule(best, ((best.label, 1.0),), 0.0)
    return schedule, best.tuned.bound.flow, best


def test_a_schedule_with_pieces_is_saved_and_loaded(monkeypatch, tmp_path):
    monkeypatch.setattr(compiled, "BACKEND", "aot_eager")
    schedule, _, best = scheduled(monkeypatch)
    assert schedule.label == best.label
    module, inputs = model("encoder")
    streamed = Streamed(module, (inputs,))
    streamed.add(schedule, best.call)
    streamed.save(tmp_path / "schedule.json")
    again = Streamed(module, (inputs,))
    with pytest.warns(UserWarning, match="was measured on here"):
        again.load(tmp_path / "schedule.json")
    assert again.schedules[0].pieces == schedule.pieces
    assert again.schedules[0].ways == schedule.ways
    torch.testing.assert_close(again(inputs), streamed(inputs))
    other, image = model("mixed")
    with pytest.raises(PlanError, match="whose pieces are other ones"):
        built(other, (image,), schedule)
    with pytest.raises(PlanError, match="here without 'merge'"):
        built(module, (inputs,), replace(schedule, variant="merge"))


def test_emitted_source_has_the_steps_of_pieces(monkeypatch):
    schedule, flow, _ = scheduled(monkeypatch)
    text = source(flow, schedule, "Encoder", "weights.pt")
    names = {}
    exec(
        "from partita.gpu.flow.read import Held\n"
        "from partita.gpu.flow.steps import Ref, Step, Window\n",
        names,
    )
    table = text[text.index("STEPS = (") : text.index("SHAPES = {")]
    exec(table, names)
    assert names["STEPS"] == flow.steps
    assert "steps as one, compiled when first launched" in text
    again, placement = place(flow)  # as the emitted source does
    assert again.steps == flow.steps
    assert not placement.places


def test_variants_without_merges_are_one():
    assert list(variants(flows("encoder")[0])) == ["fold"]


def test_a_piece_that_failed_is_not_tried_again():
    _, placed, placement, inputs, _ = flows("encoder")
    flow = contracted(placed, groups(placed))
    compiler = Compiler("nonesuch")
    bound = Bound(flow, placement, CPU, compiler)
    bound.set_inputs((inputs,))
    piece = next(step for step in flow.steps if step.kind == "piece")
    errors = []
    for _ in range(2):
        with pytest.raises(NotCompiledError) as caught:
            bound.run(piece, COMPILED)
        errors.append(caught.value)
    assert errors[0] is errors[1]
