import json
from pathlib import Path

import pytest

from partita.errors import InputError, ProblemError
from partita.problems import schedule as problems
from partita.problems.schedule import memory_per_microbatch, work_per_device
from partita.schedules.pipeline import held, pipeline_of
from partita.schedules.shapes import SHAPES, ShapeOptions, shape

DATA = Path(__file__).parents[1] / "data" / "schedule"
FILES = sorted([*DATA.glob("*.nd4.json"), *DATA.glob("shapes/*.json")])


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_the_published_placements_are_reproduced(file):
    name, mode, devices = file.stem.split(".")
    options = ShapeOptions(training=mode == "train")
    schedule_problem = shape(name, int(devices.removeprefix("nd")), options).problem()
    assert schedule_problem.to_json() == json.loads(file.read_bytes())


@pytest.mark.parametrize("name", SHAPES)
class TestEveryShape:
    @pytest.mark.parametrize("devices", [1, 2, 3, 5, 16])
    def test_it_gives_back_all_the_memory_it_takes(self, name, devices):
        count = max(devices, SHAPES[name].min_devices)
        for options in (
            ShapeOptions(memory=3, shared_memory=2),
            ShapeOptions(weight_span=0.5, memory=3, weight_memory=1),
        ):
            problem = shape(name, count, options).problem()
            assert memory_per_microbatch(problem) == [0] * count

    def test_every_device_has_work(self, name):
        problem = shape(name, 5).problem()
        assert min(work_per_device(problem)) > 0

    def test_inference_is_the_forward_blocks_without_memory(self, name):
        train = shape(name, 4).problem()
        infer = shape(name, 4, ShapeOptions(training=False)).problem()
        forward = [block for block in train.blocks if block.kind == "forward"]
        assert [b.devices for b in infer.blocks] == [b.devices for b in forward]
        assert {b.memory for b in infer.blocks} == {0}
        count = len(infer.blocks)
        assert infer.deps == tuple(d for d in train.deps if max(d) < count)

    def test_a_split_backward_takes_as_long_as_a_whole_one(self, name):
        options = ShapeOptions(weight_span=0.5)
        split, whole = shape(name, 4, options).problem(), shape(name, 4).problem()
        assert work_per_device(split) == work_per_device(whole)

    def test_spans_are_options(self, name):
        options = ShapeOptions(
            forward_span=2, backward_span=5, shared_forward_span=7, shared_backward_span=11
        )
        problem = shape(name, 3, options).problem()
        spans = {(b.kind, len(b.devices) > 1): b.span for b in problem.blocks}
        assert spans["forward", False] == 2
        assert spans["backward", False] == 5
        assert spans.get(("forward", True), 7) == 7
        assert spans.get(("backward", True), 11) == 11

    def test_its_name_says_what_it_is(self, name):
        assert shape(name, 4).name == f"{name}.train.nd4"
        assert shape(name, 4, ShapeOptions(training=False)).name == f"{name}.infer.nd4"
        assert SHAPES[name].about


class TestPublishedBounds:
    """What a device works at least on a micro-batch, as published for four devices."""

    @pytest.mark.parametrize(
        ("name", "work"),
        [("vshape", 4), ("xshape", 8), ("kshape", 6), ("mshape", 6), ("nnshape", 8), ("mllm", 8),
         ("alphafold", 4), ("finetune", 4)],
    )  # fmt: skip
    def test_work(self, name, work):
        assert max(work_per_device(shape(name, 4).problem())) == work
        assert problems.lower_bound(shape(name, 4).problem()) == work


class TestChunks:
    @pytest.mark.parametrize("chunks", [1, 2, 3, 4])
    def test_looped_and_wave_are_the_layouts_they_are_named_for(self, chunks):
        looped = held(pipeline_of(shape("looped", 4, ShapeOptions(chunks=chunks)).problem()))
        wave = held(pipeline_of(shape("wave", 4, ShapeOptions(chunks=chunks)).problem()))
        assert looped.layout == ("looped" if chunks > 1 else "line")
        assert wave.layout == ("wave" if chunks > 1 else "line")
        assert looped.chunks == wave.chunks == chunks
        assert looped.ranks == wave.ranks == (0, 1, 2, 3)

    def test_a_delay_is_between_devices(self):
        problem = shape("wave", 2, ShapeOptions(delay=3)).problem()
        late = dict(zip(problem.deps, problem.delays, strict=True))
        assert late[0, 1] == 3
        assert late[1, 2] == 0  # the wave turns: the same device


class TestBadInput:
    def test_an_unknown_name_is_answered_with_the_nearest(self):
        with pytest.raises(InputError, match=r"shape: found 'vshap'; did you mean vshape"):
            shape("vshap", 4)

    @pytest.mark.parametrize(
        ("build", "message"),
        [
            (lambda: shape("xshape", 1), "devices: found 1; xshape needs 2 or more"),
            (lambda: shape("vshape", 0), "devices: found 0; vshape needs 1 or more"),
            (lambda: shape("vshape", 2.5), "devices: found 2.5; give a whole number"),
            (lambda: ShapeOptions(forward_span=0), "forward_span: found 0; give a number above"),
            (lambda: ShapeOptions(weight_span=-1), "weight_span: found -1; give a number above"),
            (lambda: ShapeOptions(memory=-1), "memory: found -1; give a number of at least zero"),
            (lambda: ShapeOptions(chunks=0), "chunks: found 0; give 1 or more"),
            (
                lambda: shape("wave", 4, ShapeOptions(chunks=10**9)),
                "chunks: found 1000000000 on each of 4 devices; at most 100,000 stages are made",
            ),
            (lambda: shape("vshape", 10**9), "num_devices: found 1000000000; give a whole number"),
            (lambda: ShapeOptions(chunks=1.5), "chunks: found 1.5; give a whole number"),
            (
                lambda: shape("vshape", 2, ShapeOptions(weight_span=3)),
                "weight_span: found 3, and the whole backward takes 3; give the span of the rest",
            ),
        ],
    )
    def test_it_is_refused_with_a_sentence(self, build, message):
        with pytest.raises(ProblemError) as refused:
            build()
        assert str(refused.value).startswith(message)
