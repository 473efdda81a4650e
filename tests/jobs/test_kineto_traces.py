"""Kineto traces: what torch.profiler writes, by category, beside the prediction of a plan."""

import gzip
import json

import pytest
from click.testing import CliRunner

from partita.cli import partita
from partita.cluster import resolve
from partita.errors import FileError
from partita.graph import GraphBuilder
from partita.jobs.kineto import (
    CATEGORIES,
    compare_kineto,
    kind_of_event,
    measured_categories,
    predicted_categories,
    read_kineto,
)
from partita.jobs.simulate import simulate
from partita.jobs.workload import load
from partita.plans import (
    ClusterRef,
    Mesh,
    OpSplit,
    Origin,
    Plan,
    Prediction,
    Schedule,
    Stage,
)


@pytest.fixture
def plan(tmp_path):
    """Two linear layers on one device, in two micro-batches."""
    g = GraphBuilder("small")
    hidden = g.relu(g.linear(g.input("x", (8, 64)), 64, "up"))
    forward = g.finish(g.linear(hidden, 64, "down"))
    machine = resolve("1xA100")
    splits = tuple(OpSplit(op.name, ()) for op in forward.ops)
    return Plan(
        load(forward, optimizer="sgd").ref(),
        ClusterRef("1xA100", 1, machine.fingerprint()),
        (Stage("model", Mesh((), (0,)), splits),),
        Prediction(1.0, 1.0, 1.0, 1.0, (1.0,), (0.0,)),
        Origin("test", "feasible", "", 0, 0.0, ""),
        Schedule("1f1b", 2),
    )


def write(path, *events):
    slices = [
        {"ph": "X", "name": name, "cat": cat, "pid": 0, "tid": tid, "ts": ts, "dur": dur}
        for name, cat, tid, ts, dur in events
    ]
    path.write_text(json.dumps({"traceEvents": [{"ph": "M", "name": "process_name"}, *slices]}))
    return path


def test_kernels_are_told_apart_by_their_names():
    assert kind_of_event("ampere_sgemm_128x64_tn") == "products"
    assert kind_of_event("aten::addmm") == "products"
    assert kind_of_event("pytorch_flash::flash_fwd_kernel") == "attention"
    assert kind_of_event("ncclDevKernel_AllReduce_Sum_f32_RING_LL") == "communication"
    assert kind_of_event("gloo:all_reduce") == "communication"
    assert kind_of_event("vectorized_elementwise_kernel") == "elementwise"


def test_kernels_count_where_there_are_any(tmp_path):
    file = write(
        tmp_path / "gpu.json",
        ("ProfilerStep#1", "user_annotation", 1, 0, 100),
        ("ProfilerStep#2", "user_annotation", 1, 100, 100),
        ("aten::mm", "cpu_op", 1, 0, 90),
        ("sgemm", "kernel", 7, 10, 40),
        ("add_kernel", "kernel", 7, 50, 10),
        ("ncclDevKernel_AllReduce", "kernel", 8, 55, 25),
        ("sgemm", "kernel", 7, 110, 20),
    )
    seconds, on_device = measured_categories(read_kineto(file))
    assert on_device
    assert seconds["products"] == pytest.approx(30e-6)  # per step
    assert seconds["communication"] == pytest.approx(12.5e-6)
    assert seconds["elementwise"] == pytest.approx(5e-6)
    # 10 to 80 and 110 to 130 are busy, of 200
    assert seconds["host gaps"] == pytest.approx(55e-6)


def test_what_an_op_of_the_cpu_calls_is_part_of_it(tmp_path):
    file = write(
        tmp_path / "cpu.json",
        ("aten::linear", "cpu_op", 1, 0, 50),
        ("aten::t", "cpu_op", 1, 5, 10),
        ("aten::addmm", "cpu_op", 1, 20, 25),
        ("aten::relu", "cpu_op", 1, 60, 20),
        ("aten::clamp_min", "cpu_op", 1, 62, 10),
    )
    seconds, on_device = measured_categories(read_kineto(file))
    assert not on_device
    assert seconds["products"] == pytest.approx(50e-6)
    assert seconds["elementwise"] == pytest.approx(20e-6)
    assert seconds["host gaps"] == pytest.approx(10e-6)


def test_predicted_categories_are_the_time_of_the_device(plan):
    simulation = simulate(plan)
    seconds = predicted_categories(simulation)
    assert seconds["communication"] == 0
    assert seconds["products"] > 0
    assert sum(seconds.values()) == pytest.approx(simulation.compute_s, rel=0.01)


def test_a_trace_of_the_profiler_is_compared(plan, tmp_path):
    torch = pytest.importorskip("torch")
    layers = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64))
    cpu = torch.profiler.ProfilerActivity.CPU
    settings = torch.profiler.schedule(wait=0, warmup=1, active=2, repeat=1)
    traces = tmp_path / "profile.json"
    with torch.profiler.profile(
        activities=[cpu], schedule=settings,
        on_trace_ready=lambda p: p.export_chrome_trace(str(traces)),
    ) as profiler:  # fmt: skip
        for _ in range(3):
            layers(torch.randn(8, 64)).sum().backward()
            profiler.step()
    compared = compare_kineto(plan, read_kineto(traces))
    assert compared.num_steps == 2
    assert not compared.on_device
    assert compared.measured["products"] > 0
    assert compared.measured["elementwise"] > 0
    assert sum(compared.measured.values()) == pytest.approx(compared.measured_step_s, rel=0.3)
    (tmp_path / "plan.json").write_bytes(plan.to_json())
    words = ["compare-trace", str(tmp_path / "plan.json"), str(traces)]
    shown = CliRunner().invoke(partita, words)
    assert shown.exit_code == 0, shown.output
    assert "ops of the CPU in 2 steps" in shown.stdout
    assert all(name in shown.stdout for name in CATEGORIES)
    answer = json.loads(CliRunner().invoke(partita, [*words, "--json"]).stdout)
    assert answer["format"] == "partita/kineto-comparison@1"
    assert answer["wrong"] in CATEGORIES
    refused = CliRunner().invoke(partita, [*words, "--calibration", str(tmp_path / "c.json")])
    assert refused.exit_code == 2
    assert "does not say which task" in refused.output


def test_gzipped_traces_are_read(tmp_path):
    file = write(tmp_path / "t.json", ("aten::mm", "cpu_op", 1, 0, 5))
    packed = tmp_path / "t.json.gz"
    packed.write_bytes(gzip.compress(file.read_bytes()))
    assert read_kineto(packed).events == read_kineto(file).events
    packed.write_bytes(packed.read_bytes()[:20])
    with pytest.raises(FileError, match=r"t\.json\.gz: cannot be unpacked"):
        read_kineto(packed)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[]", "holds a JSON list"),
        ("{}", "traceEvents: is missing; give a trace of torch.profiler"),
        ('{"traceEvents": 3}', "traceEvents: is no list"),
        ('{"traceEvents": [3]}', r"traceEvents\[0\]: is no object"),
        ('{"traceEvents": []}', "traceEvents: has no slices"),
        (
            '{"traceEvents": [{"ph": "X", "name": "a", "ts": 0, "dur": -1}]}',
            r"traceEvents\[0\]\.dur: is -1; a number of microseconds",
        ),
        (
            '{"traceEvents": [{"ph": "X", "name": "a", "ts": "now", "dur": 1}]}',
            r"traceEvents\[0\]\.ts: is 'now'",
        ),
        (
            '{"traceEvents": [{"ph": "X", "name": 7, "ts": 0, "dur": 1}]}',
            r"traceEvents\[0\]\.name: is 7; text is needed",
        ),
        (
            '{"traceEvents": [{"ph": "X", "name": "a", "cat": "x", "ts": 0, "dur": 1}]}',
            "has neither kernels nor ops of the CPU",
        ),
    ],
)
def test_a_malformed_trace_names_file_and_field(tmp_path, content, message):
    file = tmp_path / "broken.json"
    file.write_text(content)
    with pytest.raises(FileError, match=message) as caught:
        read_kineto(file)
    assert str(file) in str(caught.value)
