"""What can wait on the network does: parameters come early, gradient all-reduces hold up nobody."""

import numpy as np
import pytest

from partita.cluster import resolve
from partita.costs.collectives import Collectives
from partita.engine import run
from partita.graph import GraphBuilder, training_graph
from partita.lower.ops import lower_stage
from partita.meaning import Purpose
from partita.plans import PREFETCH, Axis, Mesh, OpSplit, Stage
from partita.program import Kind
from partita.verify import verify_program, verify_timeline

CLUSTER = resolve("2x4xA100")
MESH = Mesh((Axis("x", 2), Axis("y", 4)), tuple(range(8)))
LAYERS = 12


def towers(batch=4096, width=4096):
    """Pairs of layers, split as columns and rows along y."""
    g = GraphBuilder("towers")
    x = g.input("x", (batch, width))
    for i in range(LAYERS // 2):
        x = g.linear(g.relu(g.linear(x, 4 * width, f"up{i}")), width, f"down{i}")
    return training_graph(g.finish(x))


def program_of(zero, columns="n", rows="k"):
    graph = towers()
    dims = {"up": ("b", columns), "do": ("b", rows), "re": ("b", "c")}
    forward = [op.name for op in graph.ops if op.phase == "forward"]
    splits = tuple(OpSplit(op, dims[op[:2]], zero) for op in forward)
    return lower_stage(Stage("model", MESH, splits), graph, CLUSTER, 1).program


def times(program):
    timeline = run(program)
    assert verify_program(program) == ()
    assert verify_timeline(program, timeline) == ()
    return timeline


def gathers(program, parameter):
    """The gathers of a parameter, in their order."""
    return [
        task
        for task in program.tasks_of(Purpose.PARAMETER_GATHER)
        if parameter in {program.values[v].tensor for v in program.work_of(task).reads}
    ]


def reductions(program):
    return program.tasks_of(Purpose.GRADIENT_REDUCTION)


@pytest.fixture(scope="module")
def shared():
    program = program_of(3)
    return program, times(program)


class TestGathering:
    def test_parameters_of_an_op_that_lie_alike_come_together(self, shared):
        program, _ = shared
        weights = [i for k in range(LAYERS // 2) for i in gathers(program, f"up{k}.weight")]
        weights += [i for k in range(LAYERS // 2) for i in gathers(program, f"down{k}.weight")]
        assert len(weights) == 2 * LAYERS - 1  # the first layer has no data gradient to give
        for k in range(LAYERS // 2):
            assert set(gathers(program, f"up{k}.bias")) <= set(gathers(program, f"up{k}.weight"))
        # the bias of a layer split into rows is replicated everywhere, its weight is not
        apart = set(gathers(program, "down0.bias")) - set(gathers(program, "down0.weight"))
        assert apart

    def test_nothing_is_gathered_more_than_a_few_ops_ahead(self, shared):
        program, timeline = shared
        ops = [f"{part}{i}" for i in range(LAYERS // 2) for part in ("up", "down")]
        begins = {op: timeline.start[gathers(program, f"{op}.weight")[0]] for op in ops}
        ends = {op: timeline.end[_compute(program, op)] for op in ops}
        for k in range(PREFETCH, LAYERS):
            assert begins[ops[k]] >= ends[ops[k - PREFETCH]]

    def test_what_is_gathered_is_there_in_time(self, shared):
        """Without the first, no layer waits for parameters but for what the network lane lacks."""
        program, timeline = shared
        copies = program_of(0)
        waited = timeline.makespan - times(copies).makespan
        first = timeline.end[gathers(program, "up0.weight")[0]]
        beside = program.tasks_of(Purpose.PARAMETER_GATHER)
        slowed = sum(float(timeline.end[i] - timeline.start[i]) for i in beside)
        assert waited < 2 * first + Collectives(CLUSTER).interference * slowed

    def test_a_device_never_holds_more_than_those(self, shared):
        """At most so many ops' parameters are whole beside what the copies' plan holds."""
        _, timeline = shared
        width, element = 4096, 4
        one = 4 * width * width * element / 4  # a weight's columns of one device
        other = times(program_of(0)).peaks()[0]
        states_and_copies = LAYERS * one  # that a plan with copies holds more, at the least
        assert timeline.peaks()[0] < other - states_and_copies + PREFETCH * 1.01 * one


class TestSums:
    def test_sums_of_gradients_do_not_hold_up_what_is_waited_for(self):
        """A conversion that is ready begins at once, unless the lane is in the midst of a sum."""
        program = program_of(0)
        timeline = times(program)
        sums = reductions(program)
        longest = max(float(timeline.end[i] - timeline.start[i]) for i in sums)
        late = []
        for i in program.tasks_of(Purpose.CONVERSION):
            (value,) = program.work_of(i).reads
            if not program.values[value].tensor.endswith(".grad"):
                continue  # of the forward, or what the model returns
            ready = max(float(timeline.end[w]) for w, *_ in program.waits_of(i))
            late.append(float(timeline.start[i]) - ready)
        assert len(late) == LAYERS // 2 - 1
        assert max(late) <= 0.5 * longest * (1 + 1e-9)

    def test_all_gradients_are_summed_before_their_update(self):
        program = program_of(0)
        timeline = times(program)
        updates = [i for i in range(program.num_tasks) if program.kind[i] == Kind.UPDATE]
        assert len(updates) == len(reductions(program))
        first = min(timeline.start[i] for i in updates)
        assert first >= timeline.end[reductions(program)[0]]

    def test_only_a_few_are_put_off(self):
        """When a weight gradient runs, all sums but the last few have begun."""
        program = program_of(3)
        timeline = times(program)
        starts = np.array([timeline.start[i] for i in reductions(program)])
        wgrads = [i for i in range(program.num_tasks) if program.kind[i] == Kind.WGRAD]
        ends = np.sort([timeline.end[i] for i in wgrads])
        order = np.sort(starts)
        assert len(order) > 6
        for k in range(len(order) - 6):
            assert order[k] <= ends[min(len(ends) - 1, 2 * (k + 6))]


def _compute(program, op):
    return next(
        i
        for i in range(program.num_tasks)
        if program.work_of(i).op == op and program.kind[i] == Kind.FORWARD
    )
