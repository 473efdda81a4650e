"""Nothing is read off a name: plans of models with misleading names mean the same."""

from dataclasses import replace
from random import Random

import pytest

from partita.graph import Graph, training_graph
from partita.program import Program
from tests.lower.random_plans import random_plan

torch = pytest.importorskip("torch")
from tests.run.local.plans import TOLERANCE, trial  # noqa: E402
from tests.run.local.small_models import MODELS  # noqa: E402

# What lowering, ZeRO, checkpointing and pipelines call things, and once meant something by.
ENDINGS = (
    ".next", ".again", ".grad", ".dgrad", ".wgrad", ".grad.from1", ".grad.sent", ".grad.sum",
    ".more", ".update", " (recompute)", " all_reduce",
)  # fmt: skip


def misnamed(graph: Graph) -> Graph:
    """The same model; every op and tensor ends like something that it is not."""
    names: dict[str, str] = {}

    def new(name: str) -> str:
        return names.setdefault(name, f"n{len(names)}{ENDINGS[len(names) % len(ENDINGS)]}")

    ops = tuple(
        replace(
            op, name=new(op.name), inputs=tuple(map(new, op.inputs)),
            outputs=tuple(map(new, op.outputs)), scope="",
        )
        for op in graph.ops
    )  # fmt: skip
    tensors = tuple(replace(tensor, name=new(tensor.name)) for tensor in graph.tensors)
    return Graph(graph.name, tensors, ops, tuple(map(new, graph.outputs)))


def gradients(program):
    """The tensor of every value that is a gradient, by the value's own name."""
    programs = (program, *(body.program for body in program.bodies))
    return {v.tensor: v.gradient_of for each in programs for v in each.values if v.gradient_of}


@pytest.mark.parametrize("model", ["perceptron", "gpt", "convolutions", "lstm", "moe"])
def test_a_model_with_misleading_names_has_the_same_plans(model):
    plain = MODELS[model]()
    other = misnamed(plain)
    for seed in range(2):
        right = trial(random_plan(Random(seed), training_graph(plain)))
        wrong = trial(random_plan(Random(seed), training_graph(other)))
        assert wrong.refused() == ()
        assert wrong.error() < TOLERANCE
        assert wrong.timeline.makespan == right.timeline.makespan
        assert wrong.lowered.program.num_tasks == right.lowered.program.num_tasks


@pytest.mark.parametrize("model", ["perceptron", "gpt", "lstm"])
def test_every_gradient_says_whose_it_is(model):
    """By its size, and by the tensors that a backward op differentiates."""
    graph = training_graph(MODELS[model]())
    given = {
        name: graph.op(op.forward).inputs[i]
        for op in graph.ops
        if op.forward
        for name, i in zip(op.outputs, graph.call(op).wrt, strict=True)
    }
    for seed in range(4):
        program = trial(random_plan(Random(seed), graph)).lowered.program
        assert Program.from_json(program.to_json()) == program
        told = gradients(program)
        assert told.keys() >= given.keys()
        assert {name: told[name] for name in given} == given
        for name, tensor in told.items():
            if name not in given:  # a sum, or what another stage sends
                assert name.startswith(f"{tensor}.grad")
