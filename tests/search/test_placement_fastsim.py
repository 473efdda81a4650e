"""The compiled placement simulation gives what the plain oracle gives, number for number."""

import json
from pathlib import Path

import numpy as np
import pytest

from partita.problems.placement import read, simulate_exprimo
from partita.search.placement.fastsim import PlacementSimulator

DATA = Path(__file__).parent.parent / "data" / "placement"
FILES = sorted(DATA.glob("*malvik*.json"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_reference_evaluations_are_reproduced(path):
    simulator = PlacementSimulator(read(path))
    for entry in json.loads(path.read_text())["reference_evaluations"]:
        evaluation = simulator.evaluate(entry["placement"])
        assert evaluation.makespan_ms == pytest.approx(entry["makespan_ms"], rel=1e-9)
        assert evaluation.score_ms == pytest.approx(entry["score_ms"], rel=1e-9)
        assert list(evaluation.peak_memory_bytes) == pytest.approx(entry["peak_memory_bytes"])
        assert evaluation.events == entry["events"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_random_placements_agree_with_the_referee(path):
    problem = read(path)
    simulator = PlacementSimulator(problem)
    generator = np.random.default_rng(1)
    placements = generator.integers(0, len(problem.devices), (10, len(problem.layers)))
    scores = simulator.scores(placements)
    for placement, score in zip(placements.tolist(), scores, strict=True):
        expected = simulate_exprimo(problem, placement)
        assert simulator.evaluate(placement) == expected
        assert score == expected.score_ms


def test_there_are_files_to_compare():
    assert len(FILES) >= 3
