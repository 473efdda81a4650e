"""rPrograms run tile by tile in random turns: the model's numbers, and missing waits found."""

from dataclasses import replace

import pytest

from partita.cluster import resolve
from partita.errors import ProblemError
from partita.graph import GraphBuilder
from partita.problems.rprogram import rprogram
from partita.search import searches
from partita.zoo import build

torch = pytest.importorskip("torch")

from graph_tiles import GraphTiles  # noqa: E402

from partita.capture.reference_module import example_inputs, reference_module  # noqa: E402
from partita.costs.rtasks import rtasks_model  # noqa: E402
from partita.gpu.rtasks.interpret import interpret  # noqa: E402

SMALL = replace(resolve("H200").kinds[0], num_units=6)


def mlp():
    g = GraphBuilder("mlp")
    x = g.input("x", (2, 24))
    for index in range(3):
        x = g.relu(g.linear(x, 24, name=f"l{index}"), name=f"r{index}")
    return g.finish(g.softmax(g.linear(x, 7, name="head")))


GRAPHS = {
    "mlp": mlp,
    "lstm": lambda: build("lstm@3", batch=1, loss=False, layers=2, hidden=16),
    "seq2seq": lambda: build(
        "seq2seq@3", batch=1, loss=False, hidden=8, target_seq=2, encoder_layers=2, decoder_layers=1
    ),
}


def planned(graph, method):
    model = rtasks_model(graph, SMALL)
    return rprogram(model.problem, searches("rtasks")[method](model.problem).solution)


@pytest.mark.parametrize("method", ["wavefront", "list", "search"])
@pytest.mark.parametrize("name", GRAPHS)
def test_every_order_that_the_waits_allow_gives_the_models_numbers(name, method):
    graph = GRAPHS[name]()
    module, inputs = reference_module(graph).eval(), example_inputs(graph)
    with torch.no_grad():
        wanted = module(*inputs)
    program = planned(graph, method)
    for seed in range(4):
        tiles = GraphTiles(graph, module, inputs, program)
        interpret(program, tiles, seed)
        torch.testing.assert_close(tiles.outputs()[0], wanted)


def test_a_program_without_its_waits_is_found_out():
    graph = GRAPHS["mlp"]()
    module, inputs = reference_module(graph).eval(), example_inputs(graph)
    program = planned(graph, "list")
    hasty = replace(
        program,
        veus=tuple(tuple(s for s in steps if s.action != "wait") for steps in program.veus),
    )
    spoilt = []
    for seed in range(10):
        tiles = GraphTiles(graph, module, inputs, hasty)
        interpret(hasty, tiles, seed)
        spoilt.append(bool(torch.isnan(tiles.outputs()[0]).any()))
    assert any(spoilt)


def test_programs_that_all_wait_are_named():
    program = planned(GRAPHS["mlp"](), "list")
    silent = replace(
        program,
        veus=tuple(tuple(s for s in steps if s.action != "signal") for steps in program.veus),
    )
    with pytest.raises(ProblemError, match="all programs wait"):
        interpret(silent, lambda operator, tile: None)
