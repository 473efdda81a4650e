"""The scripts that measure a GPU run to their end on the CPU, at tiny sizes."""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from partita.capture.reference_module import example_inputs, reference_module
from partita.graph import Graph
from partita.zoo import build
from partita.zoo.llama import DecoderSizes, decoder
from partita.zoo.t5 import T5Sizes, encoder_decoder

ROOT = Path(__file__).parents[2]


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    torch._dynamo.reset()


def measure(main: Callable[[list[str]], None], out: Path, *extra: str) -> dict[str, Any]:
    main(["--out", str(out), "--device", "cpu", "--quick", *extra])
    value: dict[str, Any] = json.loads(out.read_text())
    assert value["finished"]
    return value


@pytest.mark.usefixtures("scripts")
def test_a_device_kind_is_measured_case_by_case(tmp_path: Path) -> None:
    from device_kind import main

    value = measure(main, tmp_path / "kind.json")
    assert [r for r in value["records"] if "error" in r] == []
    assert value["skipped"] == []
    kinds = {record["kind"] for record in value["records"]}
    assert {"matmul", "attention", "conv", "optimizer", "host per op", "compiled"} <= kinds
    assert all(record.get("seconds", 0.0) >= 0 for record in value["records"])


@pytest.mark.usefixtures("scripts")
def test_a_run_that_is_out_of_time_says_what_is_missing(tmp_path: Path) -> None:
    from device_kind import main

    value = measure(main, tmp_path / "kind.json", "--seconds", "0")
    assert value["records"] == []
    assert value["skipped"][0]["what"] == "fixed_memory"
    assert value["skipped"][-1]["what"] == "convolutions"


@pytest.mark.usefixtures("scripts")
def test_models_are_measured_eager_and_compiled_beside_what_is_predicted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from h200_models import main

    paths = [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]  # of the processes it starts
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    value = measure(main, tmp_path / "models.json", "--seconds", "110")
    records = value["records"]
    assert [r for r in records if "error" in r] == []
    assert [(r["kind"], r["mode"]) for r in records] == [
        *[("train", "eager"), ("infer", "eager")] * 2, ("train", "compiled"),
    ]  # fmt: skip
    for record in records:
        assert record["step_s"] > 0
        assert record["host_step_s"] > 0
        assert "profiler_error" not in record
        assert set(record["phases"]) <= {"forward", "backward", "update"}
    assert set(value["predicted"]) == {"squeezenet1_1@64:1", "lstm@2:1"}
    assert len(value["summary"]["rows"]) == len(records)


def tiny_models() -> list[Graph]:
    sizes = DecoderSizes(2, 32, 48, 4, 2, vocab=50)
    return [
        decoder("llama", sizes, 2, 8, "f32", True),
        encoder_decoder("t5", T5Sizes(1, 16, 32, 2, 8, vocab=40), 2, 8, 6, "f32", True),
        build("squeezenet1_1@64", batch=2, dtype="f32"),
        build("lstm@2", batch=2, dtype="f32"),
    ]


@pytest.mark.parametrize("graph", tiny_models(), ids=lambda graph: graph.name)
@pytest.mark.usefixtures("scripts")
def test_straight_line_code_computes_what_the_reference_module_does(graph: Graph) -> None:
    from model_source import straight_module

    inputs = example_inputs(graph)
    with torch.no_grad():
        wanted = reference_module(graph).eval()(*inputs)
        got = straight_module(graph).eval()(*inputs)
    torch.testing.assert_close(got, wanted)


@pytest.mark.usefixtures("scripts")
def test_the_halves_of_the_models_are_halves() -> None:
    from h200_models import COMPILED, PAIRS, half_of

    reported = [pair for pair in PAIRS if half_of(pair) == "report"]
    assert abs(2 * len(reported) - len(PAIRS)) <= 2
    assert len({model for model, _ in PAIRS}) >= 12
    assert set(COMPILED) <= set(PAIRS)
    assert len(set(PAIRS)) == len(PAIRS)


@pytest.mark.usefixtures("scripts")
def test_errors_are_means_by_mode_kind_and_half() -> None:
    from h200_models import errors_of, row_of

    record = {"model": "m", "batch": 1, "kind": "train", "mode": "eager", "half": "report",
              "step_s": 2.0, "max_allocated_bytes": 100}  # fmt: skip
    table = [
        row_of(record, {"step_s": 1.0, "allocated_bytes": 110}),
        row_of(record, {"step_s": 2.2, "allocated_bytes": 100}),
    ]
    (error,) = errors_of(table).values()
    assert error["pairs"] == 2
    assert error["time"] == pytest.approx(0.3)
    assert error["memory"] == pytest.approx(0.05)


@pytest.mark.usefixtures("scripts")
def test_a_fit_finds_the_host_that_made_the_times() -> None:
    from fit_device import Case, fitted_host

    host_s = [2e-5] * 100
    cases = [
        Case((s,) * 100, tuple(host_s), 1.5 * 100 * 2e-5 + s) for s in (1e-6, 2e-6, 3e-6)
    ]  # fmt: skip
    assert fitted_host(cases) == pytest.approx(1.5, rel=0.02)
