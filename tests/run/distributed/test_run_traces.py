"""What `--trace` records, how it is laid over the prediction, and what a calibration changes."""

import copy
import json
import statistics
from dataclasses import replace
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from distributed_plans import graph_of, in_one_process, pipeline, sgd  # noqa: E402
from distributed_ranks import run_on_ranks  # noqa: E402

from partita.cluster import resolve  # noqa: E402
from partita.cluster.calibration import (  # noqa: E402
    ISSUE,
    PART,
    PER_BYTE,
    TAKEN_APART,
    Calibration,
    KindCalibration,
    OpScale,
    calibrated,
    read_calibration,
)
from partita.engine import run as run_program  # noqa: E402
from partita.errors import ClusterError, FileError, PlanError  # noqa: E402
from partita.jobs import calibrate  # noqa: E402
from partita.jobs.calibrate import Observation, OpSum, fit_scales, nonnegative  # noqa: E402
from partita.jobs.compare_trace import compare_trace, interference  # noqa: E402
from partita.jobs.run_trace import Probe, TaskTime, read_traces, trace_path  # noqa: E402
from partita.jobs.simulate import simulate  # noqa: E402
from partita.jobs.trace_match import TaskMatch, _collective_s  # noqa: E402
from partita.lower import lower_plan  # noqa: E402
from partita.meaning import Purpose  # noqa: E402
from partita.plans import Schedule  # noqa: E402
from partita.run.distributed.engine import execute  # noqa: E402
from partita.run.distributed.record import TraceRecorder  # noqa: E402

MODEL = """
import torch
from torch import nn

class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(384, 384) for _ in range(4))

    def forward(self, x, y):
        for layer in self.layers[:-1]:
            x = torch.relu(layer(x))
        return nn.functional.cross_entropy(self.layers[-1](x), y)

def make(batch=64):
    torch.manual_seed(0)
    return MLP(), (torch.randn(batch, 384), torch.randint(384, (batch,)))
"""
STEPS, WARMUP = 8, 4
BATCH = 64


def _steps(rank, plans, folders, model):
    """Two plans one after the other in one world: a pipeline, and ZeRO 3 op by op."""
    from partita.capture.python_file import read_module

    module, args, _ = read_module(model, BATCH)
    engines = []
    for plan, folder in zip(plans, folders, strict=True):
        recorder = TraceRecorder(plan, folder, rank, steps=STEPS, warmup=WARMUP)
        engine = execute(plan, module, optimizer=sgd, device="cpu", example=args, recorder=recorder)
        engines.append(engine)
        count = plan.schedule.num_microbatches
        alone = in_one_process(copy.deepcopy(module), args, count, STEPS + WARMUP + 1, sgd)[0]
        for wanted in alone:  # however a step of the warm-up is taken
            assert engine.step(*args) == pytest.approx(wanted, rel=1e-5)
    for engine in reversed(engines):
        engine.close()


@pytest.fixture(scope="module")
def traced(tmp_path_factory):
    """Plans and the folders of their traces; the only processes that are started here."""
    folder = tmp_path_factory.mktemp("traces")
    (folder / "model.py").write_text(MODEL)
    spec = f"{folder}/model.py:make"
    space = {}
    exec(MODEL, space)
    graph = graph_of(*space["make"](BATCH))
    plans = []
    for settings in (
        {"groups": 2, "name": "1f1b", "count": 4},
        {"groups": 1, "name": "1f1b", "count": 1, "data_parallel": 2, "zero": 3},
    ):
        plan = pipeline(graph, **settings)
        own = replace(plan.model, spec=spec, batch=BATCH)
        uncapped = replace(plan.prediction, capacity_bytes=(0.0,))
        plans.append(replace(plan, model=own, prediction=uncapped))
    folders = [folder / "pipeline", folder / "zero"]
    ends = run_on_ranks(2, _steps, plans, folders, spec, folder=folder)
    assert [end.code for end in ends] == [0, 0], "".join(end.stderr for end in ends)
    return dict(zip(("pipeline", "zero"), zip(plans, folders, strict=True), strict=True))


@pytest.fixture(scope="module")
def compared(traced):
    return {
        name: compare_trace(plan, read_traces(folder)) for name, (plan, folder) in traced.items()
    }


def test_every_task_of_a_rank_is_recorded_in_every_step(traced, compared):
    program = compared["pipeline"].matched.lowered.program
    for trace in read_traces(traced["pipeline"][1]):
        assert [step.number for step in trace.steps] == list(range(WARMUP, WARMUP + STEPS))
        for step in trace.steps:
            names = [task.name for task in step.tasks if task.work < 0]
            blocks = [name for name in names if name[0] in "FB"]
            assert sorted(blocks) == sorted(
                f"{kind}{m}@stage{trace.rank}" for kind in "FB" for m in range(4)
            )
            assert all(program.task_name(t.task) == t.name for t in step.tasks)
            assert all(step.start <= t.start <= t.end <= step.end for t in step.tasks)


def test_clocks_of_ranks_are_one_clock(traced):
    first, second = read_traces(traced["pipeline"][1])
    for a, b in zip(first.steps, second.steps, strict=True):
        sent = {t.microbatch: t.start for t in a.tasks if t.name.startswith("S")}
        came = {t.microbatch: t.end for t in b.tasks if t.purpose == "receive"}
        assert sent.keys() == came.keys()
        assert all(sent[m] < came[m] for m in sent)


def test_one_stage_that_runs_once_is_recorded_op_by_op(compared):
    matched = compared["zero"].matched
    recorded = {task.work.op for task in matched.tasks if task.work.op}
    wanted = {work.op for work in matched.lowered.program.works if work.op}
    assert recorded == wanted
    assert {task.work.purpose.words for task in matched.tasks} >= {
        "compute", "parameter gather", "gradient reduction", "update",
    }  # fmt: skip


@pytest.mark.parametrize("name", ["pipeline", "zero"])
def test_parts_of_a_rank_add_up_to_its_step(compared, name):
    for rank in compared[name].matched.ranks:
        parts = rank.compute_s + rank.issue_s + rank.wait_s + rank.host_s
        assert parts == pytest.approx(rank.busy_s + rank.wait_s, rel=0.05)
        if not compared[name].matched.is_shared:
            assert parts == pytest.approx(rank.step_s, rel=0.05)


def test_collectives_are_tried_and_a_step_runs_op_by_op_before_the_traced_ones(traced):
    first, second = read_traces(traced["pipeline"][1])
    names = {probe.collective for probe in first.probes}
    assert names == {"all_reduce", "all_gather", "reduce_scatter", "send", "update of a tensor"}
    assert {probe.collective for probe in second.probes} == names - {"send"}
    assert all(0 < probe.seconds < 1 for probe in first.probes)
    between = [p.between_s for p in first.probes if p.collective in ("all_reduce", "all_gather")]
    assert all(seconds is not None and 0 <= seconds < 1 for seconds in between)
    host = [p.host_s for p in first.probes if p.collective in ("all_reduce", "reduce_scatter")]
    assert all(seconds is not None and 0 < seconds < 1 for seconds in host)
    (step,) = first.by_op
    assert step.number == WARMUP - 1
    assert any(task.work >= 0 for task in step.tasks)
    assert not any(task.work >= 0 and task.purpose == "compute" for task in first.steps[0].tasks)
    assert read_traces(traced["zero"][1])[0].by_op == ()  # all of it runs op by op


def test_a_step_takes_weight_gradients_apart_from_data_gradients(traced, compared):
    """They take as long as both in one, but for what they cost more; each is told by itself."""
    matched = compared["pipeline"].matched
    for trace in matched.traces:
        (step,) = trace.apart
        assert step.number == WARMUP - 3
        parts = [(t.microbatch, t.phase) for t in step.tasks if t.op == "apart"]
        assert [m for m, phase in parts if phase == "weight"] == list(range(4))
        for m in range(4):
            assert parts.index((m, "backward")) < parts.index((m, "weight"))
        blocks = [t.name for t in step.tasks if t.op != "apart" and t.name[0] in "FB"]
        later = [t for t in step.tasks if (t.op, t.microbatch, t.phase) == ("apart", 0, "weight")]
        inside = [t for t in step.tasks if t.start < later[0].start < t.end and t.op != "apart"]
        assert blocks.index(inside[0].name) == blocks.index(f"B0@stage{trace.rank}") + 1
    assert read_traces(traced["zero"][1])[0].apart == ()
    cluster = calibrate.base_cluster(matched)
    known, more_s = calibrate._taken_apart(matched, matched.lowered, cluster)
    assert [sorted({name.split()[0] for name in own.parts}) for own in known] == [
        ["dgrad"], ["wgrad"], ["dgrad"], ["wgrad"],
    ]  # fmt: skip
    for stage, (one, other) in enumerate(zip(known[::2], known[1::2], strict=True)):
        both = [
            statistics.fmean(match.by_rank.values())
            for match in matched.tasks
            if match.work.stage == stage and match.name.startswith("B")
        ]
        assert one.seconds + other.seconds == pytest.approx(statistics.median(both))
    assert 0 <= more_s < 1e-2


def test_weight_gradients_that_wait_cost_what_was_measured_besides(compared):
    matched = compared["pipeline"].matched
    cluster = calibrate.base_cluster(matched)
    (kind,) = {each.name for each in cluster.kinds}
    stages, graph = matched.lowered.stages, matched.workload.graph

    def blocks(name, more_s):
        entries = (OpScale(TAKEN_APART, 1.0, more_s), OpScale("nothing", 1.0, 0.0))
        machine = calibrated(cluster, Calibration("", (KindCalibration(kind, entries),)))
        lowered = lower_plan(stages, Schedule(name, 4), graph, machine, run_program)
        program = lowered.program
        return sum(
            float(program.duration[k])
            for k in range(program.num_tasks)
            if (w := program.work_of(k)) is not None and w.purpose is Purpose.COMPUTE
        )

    assert blocks("1f1b", 1e-3) == pytest.approx(blocks("1f1b", 0.0))
    count = sum(op.phase == "wgrad" for op in graph.ops) * 4
    assert blocks("zb-h1", 1e-3) - blocks("zb-h1", 0.0) == pytest.approx(1e-3 * count)


def updated_s(matched, calibration):
    """Seconds of all updates as a calibration has them, and how many tensors those are of."""
    cluster = calibrated(calibrate.base_cluster(matched), calibration)
    stages, graph = matched.lowered.stages, matched.workload.graph
    program = lower_plan(stages, matched.plan.schedule, graph, cluster, run_program).program
    own = [n for n, work in enumerate(program.works) if work.purpose is Purpose.UPDATE]
    durations = [program.duration[program.work == n].max() for n in own]
    return sum(durations), sum(len(program.works[n].writes) for n in own)


def test_the_number_of_tensors_that_are_updated_has_a_price_of_its_own(compared):
    matched = compared["zero"].matched
    (kind,) = compared["zero"].calibration.kinds
    (each,) = [own.launch_s for own in kind.ops if own.ops == PART]
    tried = [p.seconds for t in matched.traces for p in t.probes if "update" in p.collective]
    assert 0 < each <= 2 * max(tried)
    usual, count = updated_s(matched, Calibration("", (kind,)))
    without = replace(kind, ops=tuple(own for own in kind.ops if own.ops != PART))
    less, _ = updated_s(matched, Calibration("", (without,)))
    assert count == 8  # weights and biases of four layers
    assert usual - less == pytest.approx(count * each, rel=1e-6)


def test_collectives_between_computing_count_where_ranks_had_their_cores(compared):
    matched, cluster = compared["pipeline"].matched, resolve("2xA100")
    longer = tuple(
        replace(t, probes=tuple(replace(p, between_s=2 * p.seconds) for p in t.probes))
        for t in matched.traces
    )
    free, shared = (
        calibrate._probed(replace(matched, traces=longer, had=had), cluster) for had in (1.0, 0.5)
    )
    assert [took for _, took in free] == pytest.approx([2 * took for _, took in shared])


def test_what_collectives_take_of_a_rank_is_found_again():
    once_s, byte_s = 1e-4, 3e-10
    probes = tuple(
        Probe(name, size, 1.0, 1e-5, None, once_s + byte_s * size)
        for name in ("all_reduce", "all_gather")
        for size in (4096.0, 131072.0, 1048576.0, 4194304.0)
    )
    matched = SimpleNamespace(traces=(SimpleNamespace(probes=(*probes, Probe("send", 4.0, 1.0))),))
    assert calibrate._starts(matched) == pytest.approx((once_s, byte_s), rel=1e-3)
    assert calibrate._starts(SimpleNamespace(traces=(SimpleNamespace(probes=()),))) == ()


def test_computing_pays_for_the_collective_before_it(compared):
    """The op that comes next does, at once and by the bytes."""
    matched = compared["zero"].matched
    cluster = calibrate.base_cluster(matched)
    stages, graph = matched.lowered.stages, matched.workload.graph

    def computing(*entries):
        (kind,) = {each.name for each in cluster.kinds}
        machine = calibrated(cluster, Calibration("", (KindCalibration(kind, entries),)))
        program = lower_plan(stages, matched.plan.schedule, graph, machine, run_program).program
        first = next(
            k
            for k in range(program.num_tasks)
            if (work := program.work_of(k)) is not None and work.purpose is Purpose.COMPUTE
        )
        before = [
            work
            for k in range(first)
            if (work := program.work_of(k)) is not None and work.purpose is Purpose.PARAMETER_GATHER
        ]
        return float(program.duration[first]), [work.size_bytes for work in before]

    free, sizes = computing(OpScale("nothing", 1.0, 0.0))
    assert sizes
    once_s, byte_s = 1e-3, 1e-6
    entries = OpScale(ISSUE, 1.0, once_s), OpScale(f"{ISSUE} {PER_BYTE}", 1.0, byte_s)
    once, both = computing(entries[0])[0], computing(*entries)[0]
    assert once - free == pytest.approx(once_s * len(sizes))
    assert both - once == pytest.approx(byte_s * sum(sizes))


def test_ranks_that_meet_wait_for_the_slowest_of_them_not_for_each_of_its_ops():
    work = SimpleNamespace(purpose=Purpose.COMPUTE)

    def match(number, *by_rank):
        own = dict(enumerate(by_rank))
        return TaskMatch((0, -1, number), "", work, 0, 0.0, 0.0, own)

    together = [match(0, 1.0, 2.0), match(1, 4.0, 1.0), match(2, 1.0, 1.0)]
    spread = {0: 1.5, 1: 1.0}
    assert [s for _, s in calibrate._slowest(together, spread)] == [1.5, 6.0, 1.5]
    assert calibrate._slowest([], spread) == []


def stretched(traces, times):
    """What the clock says where ranks have a part of their cores."""
    made = []
    for trace in traces:
        steps = []
        for step in trace.steps:
            tasks = tuple(
                replace(
                    t, start=t.start * times, end=t.end * times, wait_s=t.wait_s * times,
                    done=None if t.done is None else t.done * times, exposed_s=t.exposed_s * times,
                    # The two clocks tick apart: the shortest tasks show more of the processor's.
                    cpu_s=None if t.cpu_s is None else min(t.cpu_s, t.clock_s),
                )
                for t in step.tasks
            )  # fmt: skip
            start, end, wait_s = (s * times for s in (step.start, step.end, step.wait_s))
            steps.append(replace(step, start=start, end=end, wait_s=wait_s, tasks=tasks))
        made.append(replace(trace, steps=tuple(steps)))
    return tuple(made)


@pytest.mark.parametrize("name", ["pipeline", "zero"])
def test_where_cores_are_shared_the_step_is_replayed_with_processor_time(traced, name):
    plan, folder = traced[name]
    traces = read_traces(folder)
    slow, slower = (compare_trace(plan, stretched(traces, times)) for times in (3.0, 9.0))
    assert slower.matched.is_shared
    assert slower.matched.had == pytest.approx(slow.matched.had / 3)
    assert slower.matched.clock_s == pytest.approx(3 * slow.matched.clock_s)
    assert slower.measured_s == pytest.approx(slow.measured_s)
    busiest = max(rank.busy_s for rank in slow.matched.ranks)
    assert busiest * 0.9 <= slow.measured_s < slow.matched.clock_s
    host = next(cause for cause in slower.causes if cause.name == "host")
    assert "of their cores, so all is told by processor time" in host.sentence


@pytest.mark.parametrize("name", ["pipeline", "zero"])
def test_a_calibrated_plan_is_predicted_as_it_was_measured(traced, compared, name, tmp_path):
    plan, _ = traced[name]
    own = compared[name]
    file = tmp_path / "measured.json"
    file.write_bytes(own.calibration.to_json())
    before = simulate(plan).step_s
    after = simulate(plan, calibration=read_calibration(file)).step_s
    assert before < 0.5 * own.measured_s  # the plan is for another machine
    assert after == pytest.approx(own.measured_s, rel=0.15)


def test_every_cause_has_a_sentence_with_numbers(compared):
    own = compared["pipeline"]
    assert [cause.name for cause in own.causes] == ["products", "host", "link", "interference"]
    products = own.causes[0]
    assert products.is_wrong
    assert "times what was predicted" in products.sentence
    assert own.worst is not None


def test_interference_compares_equal_tasks_only(compared):
    matched = compared["pipeline"].matched
    trace = matched.traces[0]
    first = next(t for t in trace.steps[0].tasks if t.purpose == "compute")
    first = replace(first, cpu_s=None)
    second = 2 * (first.end - first.start)
    sent = replace(
        first, purpose="send", start=first.start + 100, end=first.start + 100 + second, work=-1
    )
    slow = replace(first, start=first.start + 100, end=first.start + 100 + second, wait_s=0.0)
    plain = replace(first, wait_s=0.0)
    step = replace(trace.steps[0], tasks=(plain, sent, slow))
    both = replace(matched, traces=(replace(trace, steps=(step,)),))
    assert interference(both) == pytest.approx(2.0)
    alone = replace(matched, traces=(replace(trace, steps=(replace(step, tasks=(plain,)),)),))
    assert interference(alone) is None


def test_a_trace_is_not_overwritten(traced):
    plan, folder = traced["pipeline"]
    with pytest.raises(FileError, match="exists already; choose another folder"):
        TraceRecorder(plan, folder, 0)


def test_fewer_steps_than_are_traced_are_refused(traced, tmp_path):
    from click.testing import CliRunner

    from partita.cli import partita

    (tmp_path / "plan.json").write_bytes(traced["pipeline"][0].to_json())
    words = ["run", str(tmp_path / "plan.json"), "--steps", "4", "--trace", str(tmp_path / "t")]
    result = CliRunner().invoke(partita, words)
    assert result.exit_code == 2
    assert "4 steps are fewer than 2 of warm-up and 3 that are traced" in result.output


def test_a_trace_of_another_plan_is_refused(traced):
    with pytest.raises(PlanError, match="the trace is of another plan"):
        compare_trace(traced["zero"][0], read_traces(traced["pipeline"][1]))


def test_a_missing_rank_is_named(traced, tmp_path):
    text = trace_path(traced["pipeline"][1], 0).read_text()
    trace_path(tmp_path, 0).write_text(text)
    with pytest.raises(FileError, match="has no trace of rank 1 of 2"):
        read_traces(tmp_path)
    with pytest.raises(FileError, match=r"has no rank0\.json"):
        read_traces(tmp_path / "nothing")


def test_a_malformed_trace_is_refused_with_its_field(traced, tmp_path):
    value = json.loads(trace_path(traced["pipeline"][1], 0).read_text())
    value["steps"][0]["tasks"][2]["start"] = "soon"
    trace_path(tmp_path, 0).write_text(json.dumps(value))
    with pytest.raises(FileError, match=r"rank0\.json: steps\[0\]\.tasks\[2\]\.start"):
        read_traces(tmp_path)
    value["steps"][0]["tasks"][2]["start"] = 1e12
    trace_path(tmp_path, 0).write_text(json.dumps(value))
    with pytest.raises(FileError, match=r"steps\[0\]\.tasks\[2\]: ends at .* before it starts"):
        read_traces(tmp_path)


def test_the_command_writes_a_calibration_that_plan_and_simulate_take(traced, tmp_path):
    from click.testing import CliRunner

    from partita.cli import partita

    plan, folder = traced["pipeline"]
    (tmp_path / "plan.json").write_bytes(plan.to_json())
    measured, both = tmp_path / "measured.json", tmp_path / "both.json"

    def run(*words):
        result = CliRunner().invoke(partita, [str(word) for word in words])
        assert result.exit_code == 0, result.output
        return result.stdout

    words = ("compare-trace", tmp_path / "plan.json", folder)
    text = run(*words, "--calibration", measured, "--trace-out", both)
    assert "the assumption that was most wrong" in text
    differences = text.split("largest differences")[1].split("\n\n")[0]
    assert "@stage" in differences  # which tasks these are hangs on the machine's load
    events = json.loads(both.read_text())["traceEvents"]
    assert "measured, rank 1" in [e["args"].get("name") for e in events if e["ph"] == "M"]
    again = CliRunner().invoke(partita, [str(w) for w in (*words, "--calibration", measured)])
    assert again.exit_code == 2
    assert "exists already" in again.output
    answer = json.loads(run(*words, "--json"))
    assert answer["format"] == "partita/trace-comparison@1"
    assert len(answer["tasks"]) == 26  # 16 blocks, 8 messages, 2 updates
    slow = json.loads(run("simulate", tmp_path / "plan.json", "--calibration", measured, "--json"))
    assert slow["step_s"] == pytest.approx(answer["measured_step_s"], rel=0.15)
    machine = resolve(f"8xA100+{measured}")
    assert machine == calibrated(resolve("8xA100"), read_calibration(measured))
    assert machine.fingerprint() != resolve("8xA100").fingerprint()


def test_a_calibration_of_another_kind_is_refused(compared):
    with pytest.raises(ClusterError, match="calibrate on a device of this kind"):
        calibrated(resolve("2xH100"), compared["pipeline"].calibration)


def test_what_links_take_is_found_again(monkeypatch):
    """Messages of the run, one of them late, and everything that was tried, of known figures."""
    known = (20.0, 9.0, 0.5, 28.0, 130.0)  # latency, collectives, messages, bandwidth of both
    shapes = [(1.2e-6, 0.0, 1e-4, 2e-6, 0.0)] * 100
    tried = [(8e-6 * k, 1e-4, 0.0, 0.0, 1e-8 * size) for k in (1, 2) for size in (1, 30, 1000)]
    tried += [(1.2e-6, 0.0, 1e-4, 2e-9 * size, 0.0) for size in (1, 30, 1000)]

    def rows(parts):
        return [(own, sum(a * b for a, b in zip(own, known, strict=True))) for own in parts]

    late = [(shapes[0], 0.1)]
    monkeypatch.setattr(calibrate, "_waited_for", lambda *given: [*rows(shapes), *late])
    monkeypatch.setattr(calibrate, "_probed", lambda *given: rows(tried))
    cluster = resolve("2xA100")
    fit = calibrate.link_fit(None, None, cluster)
    message = fit.message_s / calibrate.reached(cluster).inside_s
    found = (fit.latency, fit.fixed, message, fit.per_byte, fit.collective)
    assert found == pytest.approx(known, rel=0.1)
    inside, across, own = calibrate._fixed(cluster, fit)
    assert inside.factor == across.factor == pytest.approx(28 / 130, rel=0.1)
    assert own.launch_s == fit.message_s


def test_who_is_early_for_a_tied_gradient_does_not_make_it_long():
    def task(start, end, wait_s):
        return TaskTime(7, -1, -1, 0, start, end, wait_s, purpose="gradient reduction")

    early, late = task(0.0, 0.101, 0.1), task(0.1, 0.101, 0.0005)
    assert _collective_s({0: [[early]], 1: [[late]]}, [], is_tie=True) == [pytest.approx(0.001)]


def test_factors_and_launches_are_found_again():
    factors = {"forward product": (3.0, 1e-4), "dgrad product": (4.0, 2e-4)}
    known = []
    for name, (factor, launch) in factors.items():
        for size, count in ((1e-3, 3), (2e-3, 1), (5e-3, 9), (1e-4, 20)):
            own = {name: OpSum(size, count)}
            known.append(Observation(factor * size + launch * count, own))
    scales = fit_scales(known)
    for name, (factor, launch) in factors.items():
        assert scales[name][0] == pytest.approx(factor, rel=0.15)
        assert scales[name][1] == pytest.approx(launch, rel=0.15)
    # What no block holds stays with the rest.
    assert scales["forward attention"][0] == pytest.approx(
        statistics.fmean(scales[name][0] for name in factors), rel=0.3
    )


def test_ops_one_by_one_tell_work_from_launches():
    flop_s, launch_s, own_launch_s = 1e-11, 1e-4, 4e-4
    sizes = ((1.0e-5, 1e6), (1.2e-5, 1e7), (2.0e-5, 5e7), (3.0e-5, 2e8))  # the curve is too flat
    ops = [OpSum(roofline_s, 1, flops, flops**0.5) for roofline_s, flops in sizes]
    alone = [
        Observation(flop_s * op.flops + own_launch_s, {"forward product": op}, by_op=True)
        for op in ops
    ]
    block = OpSum(*(sum(column) for column in zip(*ops, strict=True)))
    whole = Observation(flop_s * block.flops + 4 * launch_s, {"forward product": block})
    scale = fit_scales([whole, *alone])["forward product"]
    larger = OpSum(3.5e-5, 1, 4e8, 2e4)
    assert scale.seconds(larger) == pytest.approx(flop_s * larger.flops + launch_s, rel=0.05)
    assert scale.apart_s == pytest.approx(own_launch_s - launch_s, rel=0.4)
    curve = fit_scales([whole])["forward product"]  # a block tells nothing of sizes
    assert curve.seconds(larger) < 0.7 * flop_s * larger.flops


def test_views_tell_what_an_op_costs_that_is_started_by_itself():
    """They compute nothing; on a host work is told by work, not by the curve of a GPU."""
    flop_s, own_s = 1e-11, 3e-5
    view = Observation(own_s, {"forward elementwise": OpSum(launches=1.0)}, by_op=True)
    op = OpSum(1e-6, 1, 1e7, 4e4)
    product = Observation(flop_s * op.flops + own_s, {"forward product": op}, by_op=True)
    scales = fit_scales([product, view, product, view], on_host=True)
    assert scales["forward product"].apart_s == pytest.approx(own_s, rel=0.05)
    larger = OpSum(1.2e-6, 1, 8e7, 3.2e5)  # the curve hardly sees it
    took = scales["forward product"].seconds(larger)
    assert took == pytest.approx(8 * flop_s * op.flops, rel=0.1)


def test_least_squares_never_go_below_zero():
    import numpy as np

    fit = nonnegative(np.array([[1.0, 1.0], [1.0, 2.0]]), np.array([2.0, 1.0]), np.zeros(2), 0.0)
    assert fit[1] == 0.0
    assert fit[0] == pytest.approx(1.5)
