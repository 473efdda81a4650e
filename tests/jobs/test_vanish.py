"""Without a node: the machine left, the plan for it, and what must move, element by element."""

import functools
import itertools
import json

import numpy as np
import pytest
from click.testing import CliRunner

from partita.cli import partita
from partita.cluster import resolve
from partita.errors import ClusterError
from partita.graph import GraphBuilder
from partita.graph.files import to_text
from partita.jobs.explain import lying_parameters
from partita.jobs.plan import plan
from partita.jobs.vanish import machine_without, moves, vanished
from partita.run.local.shards import places, shard_index
from partita.search.base import Stop

MACHINE = "2x4xA100"


@functools.cache
def model(batch=64):
    g = GraphBuilder("small")
    x = g.input("x", (batch, 128))
    for layer in range(4):
        x = g.relu(g.linear(x, 256 if layer % 2 else 128, f"l{layer}"))
    return g.finish(g.linear(x, 32, "last"))


@functools.cache
def planned(machine, *pins):
    return plan(model(), machine, pin=pins, stop=Stop(gap=0.5))


def held_elements(stages, graph, part):
    """(device, parameter) to a mask of the elements of it, or of its states, that it holds."""
    masks = {}
    for stage in stages:
        axes = stage.mesh.axes
        for name, layout, level in lying_parameters(stage, graph):
            shape = graph.tensor(name).shape
            flat = level == 3 if part == "parameters" else level > 0
            for place, device in zip(places(axes), stage.mesh.devices, strict=True):
                mask = masks.setdefault((device, name), np.zeros(shape, bool))
                own = np.zeros(shape, bool)
                own[shard_index(shape, layout, axes, place)] = True
                for axis, placement in enumerate(layout):
                    if flat and placement.kind == "replicate" and axes[axis].size > 1:
                        where = np.argwhere(own)
                        cut = np.array_split(where, axes[axis].size)[place[axis]]
                        own = np.zeros(shape, bool)
                        own[tuple(cut.T)] = True
                mask |= own
    return masks


def counted(before, after, graph, old, new):
    """Bytes needed, moved and lost, by looking at every element on every device."""
    number = {device.name: i for i, device in enumerate(new.devices)}
    states = {op.inputs[0]: op.inputs[2:] for op in graph.ops if op.phase == "update"}
    needed = moved = lost = 0.0
    for part in ("parameters", "states"):
        had = {
            (number[old.devices[device].name], name): mask
            for (device, name), mask in held_elements(before, graph, part).items()
            if old.devices[device].name in number
        }
        for (device, name), wants in held_elements(after, graph, part).items():
            tensors = [name] if part == "parameters" else states[name]
            each = sum(graph.tensor(t).size_bytes for t in tensors) / wants.size
            others = [mask for (_, which), mask in had.items() if which == name]
            somewhere = functools.reduce(np.logical_or, others, np.zeros(wants.shape, bool))
            own = had.get((device, name), np.zeros(wants.shape, bool))
            needed += each * wants.sum()
            moved += each * (wants & ~own & somewhere).sum()
            lost += each * (wants & ~somewhere).sum()
    return needed, moved, lost


PINS = [("zero=0", "pp=1"), ("zero=1", "pp=1"), ("zero=3", "pp=1"), ("pp=2",), ("tp=2", "pp=1")]


@pytest.mark.parametrize(("first", "second"), list(itertools.product(PINS, PINS[1:4])))
def test_what_moves_is_what_no_element_could_do_without(first, second):
    old = resolve(MACHINE)
    new = machine_without(old, ["n1"])
    before, after = planned(MACHINE, *first), planned("4xA100", *second)
    graph = before.best.simulation.workload.graph
    stages = before.plan.stages, after.plan.stages
    cost = moves(*stages, graph, old, new)
    assert (cost.needed_bytes, cost.moved_bytes, cost.lost_bytes) == pytest.approx(
        counted(*stages, graph, old, new)
    )
    assert sum(size for *_, size in cost.pairs) == pytest.approx(cost.moved_bytes)


def test_the_same_plan_on_the_same_machine_moves_nothing():
    cluster = resolve(MACHINE)
    before = planned(MACHINE, "zero=1", "pp=1")
    graph, stages = before.best.simulation.workload.graph, before.plan.stages
    cost = moves(stages, stages, graph, cluster, cluster)
    assert cost.moved_bytes == cost.lost_bytes == cost.seconds == 0
    assert cost.kept_bytes == cost.needed_bytes > 0


def test_what_the_gone_node_alone_held_is_lost():
    """ZeRO 1 over eight: half of the states; ZeRO 0: nothing."""
    graph = planned(MACHINE, "zero=1", "pp=1").best.simulation.workload.graph
    old = resolve(MACHINE)
    new = machine_without(old, ["n1"])
    after = planned("4xA100", "zero=1", "pp=1").plan.stages
    states = sum(t.size_bytes for t in graph.tensors if t.role == "state")
    for pins, share in ((("zero=1", "pp=1"), 0.5), (("zero=0", "pp=1"), 0.0)):
        cost = moves(planned(MACHINE, *pins).plan.stages, after, graph, old, new)
        assert cost.lost_bytes == pytest.approx(share * states, rel=0.01)


def test_the_busiest_link_sets_the_time():
    old = resolve(MACHINE)
    new = machine_without(old, ["n0.gpu0"])
    graph = planned(MACHINE, "zero=1", "pp=1").best.simulation.workload.graph
    before = planned(MACHINE, "zero=1", "pp=1").plan.stages
    cost = moves(before, planned("4xA100", "zero=0", "pp=1").plan.stages, graph, old, new)
    slowest = max(load.seconds for load in cost.links)
    assert slowest <= cost.seconds <= slowest + 1e-4
    assert cost.links[0].seconds == slowest


def test_a_node_that_lost_devices_may_stay_idle():
    """Seven devices of which nothing divides the batch: three stay idle if that is faster."""
    before = planned(MACHINE, "zero=1", "pp=1").plan
    machines = []

    def replan(left):
        machines.append(left.num_devices)
        return planned("4xA100", "zero=1", "pp=1") if left.num_devices == 4 else slow

    slow = planned("1xA100")
    answer = vanished(before, ["n0.gpu0"], replan)
    assert machines == [7, 4]
    assert (answer.cluster.num_devices, len(answer.idle)) in ((4, 3), (7, 0))
    faster = planned("4xA100", "zero=1", "pp=1").best.objective_s < slow.best.objective_s
    assert (len(answer.idle) == 3) == faster


@pytest.mark.parametrize(
    ("spec", "fix"),
    [("2x4xA100@without=n7", "its nodes are n0, n1"), ("4xA100@without=n0", "name a part of it")],
)
def test_a_node_that_is_not_there_is_refused(spec, fix):
    with pytest.raises(ClusterError, match="without") as caught:
        resolve(spec)
    assert fix in str(caught.value)


def test_a_machine_without_a_node_is_a_machine_by_name():
    assert resolve("2x4xA100@without=n1").num_devices == 4
    assert [d.name for d in resolve("2x2xA100@without=n0.gpu1").devices] == [
        "n0.gpu0", "n1.gpu0", "n1.gpu1",
    ]  # fmt: skip


def test_the_command_line_says_it_and_writes_both_plans(tmp_path):
    runner = CliRunner()
    graph = tmp_path / "model.txt"
    graph.write_text(to_text(model()))
    path = tmp_path / "plan.json"
    made = runner.invoke(
        partita, ["plan", str(graph), "-c", "2x2xA100", "--gap", "0.5", "--without", "n1", "-q",
               "-o", str(path)],
    )  # fmt: skip
    assert made.exit_code == 0, made.output
    assert "without n1: 2 of 4 gone, 2 devices left" in made.output
    assert (tmp_path / "plan.without-n1.json").exists()
    again = runner.invoke(
        partita, ["plan", str(path), "--without", "n1", "--gap", "0.5", "-q", "--json"]
    )
    answer = json.loads(again.output)
    assert answer["num_devices"] == 2
    assert answer["moving"]["needed_bytes"] == pytest.approx(
        sum(answer["moving"][part] for part in ("kept_bytes", "moved_bytes", "lost_bytes"))
    )
    missing = runner.invoke(partita, ["plan", str(path)])
    assert missing.exit_code == 2
    assert "--cluster" in missing.output
