"""A plan explained as a whole: every second and byte is accounted for, every gain simulated.

What a plan hangs on: assumptions made worse, and the named strategies that win then.
"""

from dataclasses import replace

import pytest

from partita.cluster import Cluster, resolve
from partita.costs.collectives import Collectives, reached
from partita.costs.roofline import op_cost
from partita.engine import run
from partita.errors import PlanError
from partita.graph.chain import chain_of
from partita.graph.rebatch import rebatch
from partita.graph.splits import REPLICATE
from partita.jobs.explain import memory_account
from partita.jobs.explain_account import (
    BLOCK_PHASES,
    UPDATE,
    Links,
    OpMeaning,
    TimeItem,
    TimelineWalk,
    account,
    parts_of,
    phases_of,
)
from partita.jobs.explain_plan import (
    ODD,
    again,
    assumptions,
    bounds_of,
    changes,
    explain_plan,
    more_memory,
    rivals,
    sensitivity,
    unaligned_rows,
    what_if,
    what_ifs,
)
from partita.jobs.shard import shard
from partita.jobs.simulate import data_parallel, simulate_stages
from partita.jobs.strategies import PIPELINES, STRATEGIES
from partita.jobs.workload import load
from partita.lower import Memo
from partita.meaning import Purpose, Value, Work
from partita.plans import Alternative, Schedule, Stage
from partita.program import Kind, ProgramBuilder
from tests.shallow import GPT2

ARRANGED = (  # model, cluster, batch, strategy, schedule instead of the strategy's
    (GPT2, "4xA100", 16, "1f1b", ""),
    (GPT2, "4xA100", 16, "gpipe", ""),
    (GPT2, "4xA100", 16, "interleaved", ""),
    (GPT2, "2x2xA100", 16, "megatron", ""),
    (GPT2, "4xA100", 16, "1f1b", "zb-h1"),
    ("alexnet", "2x2xA100", 32, "fsdp", ""),
    ("alexnet", "2xV100+2xP100", 32, "zero1", ""),
    ("alexnet", "4x1xV100", 32, "data", ""),
)


def arranged(model, cluster, batch, strategy, schedule=""):
    """A workload with a named strategy's stages (the deepest pipeline) on a cluster."""
    machine, workload = resolve(cluster), load(model, batch=batch)
    if strategy in STRATEGIES:
        stages = STRATEGIES[strategy].stages(workload.graph, machine.num_devices)
        return workload, machine, stages[:1], Schedule()
    chain = chain_of(workload.graph)
    stages, order = PIPELINES[strategy].plans(workload.graph, chain, machine, batch)[-1]
    return workload, machine, stages, replace(order, name=schedule or order.name)


@pytest.fixture(
    scope="module", params=ARRANGED, ids=lambda row: "-".join(filter(None, map(str, row)))
)
def told(request):
    return account(*arranged(*request.param))


@pytest.fixture(scope="module")
def zero():
    return shard("alexnet", "4xV100", batch=64).plan


class TestTime:
    def test_the_seconds_of_every_group_add_up_to_the_step(self, told):
        for group in told.groups:
            assert sum(group.shares.values()) == pytest.approx(told.simulation.step_s, rel=1e-6)
            assert all(seconds >= 0 for seconds in group.shares.values())
        parts = parts_of(told.busiest.shares)
        assert sum(part.share for part in parts) == pytest.approx(1)
        assert [part.seconds for part in parts] == sorted((p.seconds for p in parts), reverse=True)

    def test_the_step_is_the_simulators(self, told):
        outcome = told.simulation
        plain = simulate_stages(outcome.workload, outcome.cluster, outcome.stages, outcome.schedule)
        assert outcome.step_s == pytest.approx(plain.step_s, rel=1e-12)

    def test_what_bounds_it_adds_up_to_the_step_too(self, told):
        bounds = bounds_of(told)
        assert sum(bound.seconds for bound in bounds) == pytest.approx(told.simulation.step_s)

    def test_communication_names_the_links_it_crosses(self, told):
        names = {i.where for g in told.groups for i in g.shares if i.kind == "communication"}
        assert names
        assert names <= set(told.links.names)

    def test_a_group_has_nothing_to_do_but_its_work_and_waits(self, told):
        for group in told.groups:
            work = group.seconds("compute") + group.seconds("update")
            assert work <= group.busy_s * (1 + 1e-9)
            assert group.busy_s <= told.simulation.step_s * (1 + 1e-9)

    def test_computing_is_what_the_ops_of_a_lone_stage_cost(self):
        """Two micro-batches of a deep stage on one device; every block of it is in its body."""
        workload, machine = load(GPT2, batch=8), resolve("1xA100")
        stage = data_parallel(workload.graph, machine)
        cost = dict.fromkeys(("forward", "dgrad", "wgrad", "update"), 0.0)
        half = rebatch(workload.graph, 4)
        for op in half.ops:
            cost[op.phase] += 2 * op_cost(half, op, machine.kind_of(0)).seconds
        for recompute in (False, True):
            lone = replace(stage, checkpointing="full" if recompute else "none")
            this_account = account(workload, machine, (lone,), Schedule("1f1b", 2))
            shares = this_account.busiest.shares
            again_s = shares.get(TimeItem("compute", "recompute"), 0.0)
            forward = shares[TimeItem("compute", "forward")]
            assert (again_s > 0) == recompute
            assert forward == pytest.approx(cost["forward"], rel=1e-6)
            assert again_s == pytest.approx(forward if recompute else 0.0, rel=0.05)
            data, weight = "data gradient", "weight gradient"
            assert shares[TimeItem("compute", data)] == pytest.approx(cost["dgrad"], rel=1e-6)
            assert shares[TimeItem("compute", weight)] == pytest.approx(cost["wgrad"], rel=1e-6)
            assert shares[UPDATE] > 0
            assert not this_account.busiest.seconds("communication")

    def test_what_light_recompute_runs_again_is_told_apart(self):
        workload, machine = load(GPT2, batch=8), resolve("1xA100")
        stage = data_parallel(workload.graph, machine)
        light = tuple(op for op in stage.dims() if op.endswith(("gelu", "ln_2")))
        half = rebatch(workload.graph, 4)
        cost = sum(2 * op_cost(half, half.op(op), machine.kind_of(0)).seconds for op in light)
        lone = replace(stage, checkpointing="selective" if light else "none", recomputed=light)
        this_account = account(workload, machine, (lone,), Schedule("1f1b", 2))
        again_s = this_account.busiest.shares[TimeItem("compute", "recompute")]
        assert again_s == pytest.approx(cost, rel=1e-6)

    def test_a_pipeline_waits_for_other_stages_and_says_which(self):
        this_account = account(*arranged(GPT2, "4xA100", 16, "gpipe"))
        first = this_account.groups[0]
        waits = {item.where: s for item, s in first.shares.items() if item.kind == "idle"}
        assert set(waits) <= {"stage1", "stage2", "stage3", ""}
        assert sum(waits.values()) > 0.1 * this_account.simulation.step_s

    def test_a_walk_by_hand(self):
        builder = ProgramBuilder()
        a, b = builder.lane("a"), builder.lane("b")
        net = builder.lane("net", "link")
        first = builder.add("one", a, 1.0, kind=Kind.FORWARD)
        slow = builder.add("slow", b, 5.0, kind=Kind.FORWARD)
        sent = builder.add("x all_reduce", net, 2.0, [first], kind=Kind.COLLECTIVE)
        builder.add("two", a, 0.5, [sent], kind=Kind.FORWARD)
        last = builder.add("three", a, 1.0, [(slow, 0.25)], kind=Kind.FORWARD)
        builder.add("end", b, 2.0, [last], kind=Kind.FORWARD)
        timeline = run(builder.build())

        def name(task, seconds, own):
            block = timeline.program.blocks[timeline.program.block[task]]
            return {TimeItem("compute" if own else "idle", block): seconds}

        # a: one [0, 1), waits for x [1, 3), two [3, 3.5), waits for slow to 5, a delay to 5.25,
        # three [5.25, 6.25), waits for the end [6.25, 8.25)
        lane = TimelineWalk(timeline, name).lane(a)
        seconds = {(item.kind, item.what): s for item, s in lane.items()}
        assert seconds == pytest.approx(
            {
                ("compute", "one"): 1.0,
                ("idle", "x all_reduce"): 2.0,
                ("compute", "two"): 0.5,
                ("idle", "slow"): 1.5,
                ("idle", "latency and gaps"): 0.25,
                ("compute", "three"): 1.0,
                ("idle", "end"): 2.0,
            }
        )
        half = TimelineWalk(timeline, name).lane(a, 0.5, 3.25)
        assert sum(half.values()) == pytest.approx(2.75)

    def test_names_of_stages_may_be_anything(self):
        workload, machine, stages, schedule = arranged(GPT2, "4xA100", 16, "1f1b")
        odd = ("a > b", "a > b gradients", "\x1b[31m", "x update")
        renamed = tuple(replace(s, name=n) for s, n in zip(stages, odd, strict=True))
        plain, this_account = (account(workload, machine, s, schedule) for s in (stages, renamed))
        for one, other in zip(plain.groups, this_account.groups, strict=True):
            for kind in ("compute", "communication", "idle", "update"):
                assert other.seconds(kind) == pytest.approx(one.seconds(kind))


class TestPurposes:
    """What tasks are comes from their works; names and labels say nothing."""

    @pytest.mark.parametrize(
        ("work", "what"),
        [
            (Work(Purpose.PARAMETER_GATHER, collective="all_gather"), "all-gather of parameters"),
            (
                Work(Purpose.GRADIENT_REDUCTION, collective="reduce_scatter"),
                "reduce-scatter of gradients",
            ),
            (
                Work(Purpose.CONVERSION, collective="all_reduce", reads=(0,)),
                "all-reduce of activations",
            ),
            (
                Work(Purpose.CONVERSION, collective="all_to_all", reads=(1,)),
                "all-to-all of parameters",
            ),
            (
                Work(Purpose.CONVERSION, collective="all_gather", reads=(2,)),
                "all-gather of gradients",
            ),
            (Work(Purpose.EXCHANGE, op="bn", collective="all_reduce"), "all-reduce of statistics"),
            (Work(Purpose.EXCHANGE, op="conv", collective="halo"), "exchange of borders"),
        ],
        ids=lambda value: value if isinstance(value, str) else "",
    )
    def test_collectives_are_named_by_what_they_are_for(self, work, what):
        builder = ProgramBuilder()
        net = builder.lane("gradients.0 all_reduce", "link")
        builder.value(Value("gradients.0", (REPLICATE,)))
        builder.value(Value("parameters.0.again", (REPLICATE,), "parameter"))
        builder.value(Value("x.next", (REPLICATE,), "gradient"))
        across = replace(work, group=builder.group(((0, 2), (1, 3))))
        task = builder.add(across, net, 1.0, kind=Kind.COLLECTIVE)
        links = Links(resolve("2x2xA100"))
        meaning = OpMeaning(builder.build(), links)
        for own in (True, False):
            assert meaning(task, 1.0, own) == {TimeItem("communication", what, links.names[1]): 1.0}

    def test_a_fully_sharded_plan_gathers_parameters_and_scatters_gradients(self):
        this_account = account(*arranged("alexnet", "2x2xA100", 32, "fsdp"))
        whats = {item.what for item in this_account.busiest.shares if item.kind == "communication"}
        assert {"all-gather of parameters", "reduce-scatter of gradients"} <= whats

    def test_stages_send_activations_forward_and_gradients_back(self):
        this_account = account(*arranged(GPT2, "4xA100", 16, "1f1b"))
        sent = {i.what for g in this_account.groups for i in g.shares if i.kind == "communication"}
        assert sent == {
            "send of activations",
            "send of gradients",
            "all-reduce of gradients that stages share",
        }

    def test_the_end_of_a_step_is_read_off_the_body_that_ends_it(self):
        """Two micro-batches, data parallel: only what outlasts the last backward is exposed."""
        workload, machine = load("alexnet", batch=32), resolve("2x1xV100")
        stage = data_parallel(workload.graph, machine)
        this_account = account(workload, machine, (stage,), Schedule("1f1b", 2))
        program = this_account.simulation.timeline.program
        (reduction,) = program.tasks_of(Purpose.GRADIENT_REDUCTION)
        item = TimeItem("communication", "all-reduce of gradients", this_account.links.names[-1])
        exposed = this_account.busiest.shares[item]
        assert exposed == pytest.approx(float(program.duration[reduction]), rel=1e-6)

    def test_the_phases_of_a_body_take_what_its_blocks_take(self):
        this_account = account(*arranged(GPT2, "4xA100", 16, "1f1b", "zb-h1"))
        program = this_account.simulation.timeline.program
        for task in program.tasks_of(Purpose.COMPUTE):
            work = program.work_of(task)
            phases = phases_of(program.bodies[work.body], this_account.links)
            kinds = BLOCK_PHASES[Kind(int(program.kind[task]))]
            seconds = sum(sum(phases[phase].values()) for phase in kinds)
            assert seconds == pytest.approx(float(program.duration[task]))


class TestBounds:
    def test_a_plan_bound_by_computing_says_so(self):
        bottlenecks = bounds_of(account(*arranged(GPT2, "4xA100", 64, "data")))
        assert bottlenecks[0].name == "arithmetic"
        assert bottlenecks[0].share > 0.5

    def test_a_plan_bound_by_a_link_names_it(self):
        slow = replace(
            resolve("2x1xA100"),
            links=tuple(
                replace(link, bytes_per_s=125e6, latency_s=1.5e-5)
                for link in resolve("2x1xA100").links
            ),
        )
        workload = load("alexnet", batch=32)
        stage = data_parallel(workload.graph, slow)
        this_account = account(workload, slow, (stage,), Schedule())
        assert bounds_of(this_account)[0].name == "ethernet-1 between nodes (125 MB/s)"
        whats = {part.item.what for part in parts_of(this_account.busiest.shares)[:1]}
        assert whats == {"all-reduce of gradients"}

    def test_rows_off_16_bytes_are_told_apart_with_the_size_that_helps(self):
        simulation = account(*arranged(GPT2, "2xA100", 8, "data")).simulation
        (rows,) = unaligned_rows(simulation)
        assert (rows.op, rows.size, rows.padded) == ("lm_head", 50257, 50264)
        mine = [op for op in simulation.ops if op.name.startswith("lm_head")]
        assert rows.seconds == pytest.approx(sum(op.cost.seconds for op in mine))

    def test_what_more_arithmetic_cannot_help_is_not_called_arithmetic(self):
        told = account(*arranged(GPT2, "2xA100", 8, "data"))
        odd = unaligned_rows(told.simulation)
        before = {bound.name: bound.seconds for bound in bounds_of(told)}
        after = {bound.name: bound.seconds for bound in bounds_of(told, odd)}
        assert after[ODD] == pytest.approx(before["arithmetic"] - after["arithmetic"])
        assert sum(after.values()) == pytest.approx(sum(before.values()))

    def test_single_precision_and_even_rows_lie_as_they_should(self):
        assert not unaligned_rows(account(*arranged("alexnet", "2xV100", 8, "data")).simulation)
        assert not unaligned_rows(account(*arranged("llama-7b@64", "8xA100", 8, "fsdp")).simulation)

    def test_one_device_has_no_links(self):
        workload, machine = load("alexnet", batch=4), resolve("1xA100")
        this_account = account(
            workload, machine, (data_parallel(workload.graph, machine),), Schedule()
        )
        assert this_account.links.names == ()
        assert not this_account.busiest.seconds("communication")


class TestLinks:
    def test_levels_have_the_names_of_their_cables(self):
        assert Links(resolve("2x8xA100")).names == (
            "nvlink3 inside nodes (300 GB/s)",
            "infiniband-200 between nodes (25.0 GB/s)",
        )

    def test_unknown_cables_are_links(self):
        machine = resolve("2xA100")
        odd = replace(machine, links=tuple(replace(x, bytes_per_s=7e9) for x in machine.links))
        assert Links(odd).names == ("links inside nodes (7.00 GB/s)",)

    def test_a_collective_crosses_the_innermost_level_that_holds_it(self):
        links = Links(resolve("2x2xA100"))
        inside, between = links.names
        assert links.crossed(((0, 1), (2, 3))) == inside
        assert links.crossed(((0, 2), (1, 3))) == between
        assert links.crossed(((0, 1, 2, 3),)) == between

    def test_only_the_links_of_one_level_become_faster(self):
        machine = resolve("2x2xA100")
        links = Links(machine)
        for level in range(2):
            changed = links.faster(level, 2)
            for old, new in zip(machine.links, changed.links, strict=True):
                times = 2 if links.level_of(old) == level else 1
                assert new.bytes_per_s == old.bytes_per_s * times
                assert new.latency_s == old.latency_s / times
        assert {links.level_of(link) for link in machine.links} == {0, 1}


class TestMemory:
    def test_the_parts_add_up_to_the_peak(self, told):
        this_memory_account = memory_account(told.simulation)
        assert sum(this_memory_account.parts().values()) == pytest.approx(
            this_memory_account.peak_bytes
        )
        assert this_memory_account.peak_bytes == pytest.approx(
            max(told.simulation.peak_bytes), rel=0.2
        )

    def test_what_always_lies_there_is_what_the_program_takes_first(self, told):
        this_memory_account, program = (
            memory_account(told.simulation),
            told.simulation.timeline.program,
        )
        names = [memory.name for memory in program.memories]
        first = slice(program.effect_start[0], program.effect_start[1])
        taken = dict(
            zip(program.effect_memory[first], program.effect_at_start[first], strict=True)
        )[names.index(this_memory_account.name)]
        always = (
            this_memory_account.parameters_bytes
            + this_memory_account.states_bytes
            + this_memory_account.workspace_bytes
        )
        if told.simulation.is_pipelined:
            always += this_memory_account.gradients_bytes
        assert always == pytest.approx(taken)

    def test_gradients_of_a_recomputed_stage_are_those_that_are_made_by_the_peak(self):
        workload, machine = load(f"{GPT2}@64", batch=8), resolve("1xA100")
        stage = data_parallel(workload.graph, machine)
        plain, recomputed = (
            memory_account(account(workload, machine, (one,), Schedule()).simulation)
            for one in (stage, replace(stage, checkpointing="full"))
        )
        assert plain.gradients_bytes > 0
        assert recomputed.gradients_bytes > 0
        whole = workload.graph.num_parameters * 2
        assert max(plain.gradients_bytes, recomputed.gradients_bytes) <= whole
        assert recomputed.activations_bytes <= plain.activations_bytes


class TestWhatIf:
    def test_nothing_changed_changes_nothing(self, told):
        outcome = told.simulation
        nothing = what_if(outcome, "nothing", again)
        assert nothing.step_s == pytest.approx(outcome.step_s, rel=1e-12)
        assert nothing.gain == pytest.approx(0, abs=1e-12)
        assert nothing.peak_memory_bytes == pytest.approx(max(outcome.peak_bytes))
        assert nothing.fits == outcome.fits

    def test_faster_links_and_devices_never_slow_these_plans_down(self, told):
        for name, change in changes(told.simulation, told.links):
            if "fast" in name or "doubled" in name or "half the time" in name:
                assert what_if(told.simulation, name, change).gain >= -1e-9, name

    def test_everything_twice_as_fast_halves_the_step(self):
        simulation = account(*arranged("alexnet", "4xV100", 32, "data")).simulation
        old = simulation.cluster
        kinds = tuple(
            replace(
                kind,
                flops_per_s=tuple((d, 2 * rate) for d, rate in kind.flops_per_s),
                memory_bytes_per_s=2 * kind.memory_bytes_per_s,
                cache_bytes_per_s=2 * kind.cache_bytes_per_s,
                launch_s=kind.launch_s / 2,
            )
            for kind in old.kinds
        )
        quick: Cluster = replace(Links(old).faster(0, 2), kinds=kinds)
        twice = what_if(simulation, "all", lambda s: again(s, cluster=quick))
        assert twice.step_s == pytest.approx(simulation.step_s / 2)
        assert twice.gain == pytest.approx(0.5)

    def test_recompute_is_offered_to_be_dropped_with_what_it_would_hold(self):
        this_account = account(*arranged(GPT2, "4xA100", 16, "gpipe"))
        name, change = list(changes(this_account.simulation, this_account.links))[-1]
        assert name == "nothing recomputed"
        told = what_if(this_account.simulation, name, change)
        assert told.gain > 0.1
        assert told.peak_memory_bytes > max(this_account.simulation.peak_bytes)

    def test_another_number_of_micro_batches_has_another_order_of_collectives(self):
        workload, machine, stages, schedule = arranged(GPT2, "2x2xA100", 16, "megatron")
        decided = account(workload, machine, stages, schedule).simulation.decided
        assert all(stage.overlap is not None for stage in decided)
        simulation = account(workload, machine, decided, schedule).simulation
        for name, change in changes(simulation, Links(machine)):
            assert what_if(simulation, name, change).step_s > 0, name

    def test_what_does_not_fit_says_so(self):
        simulation = account(*arranged(GPT2, "4xA100", 16, "gpipe")).simulation
        capped = replace(simulation, cap_bytes=max(simulation.peak_bytes))
        told = what_if(capped, "nothing recomputed", lambda s: again(s, recompute=False))
        assert not told.fits
        assert told.note.startswith("does not fit: ")

    def test_of_unlike_devices_the_one_that_lacks_most_is_told(self):
        simulation = account(*arranged("alexnet", "2xV100+2xP100", 32, "data")).simulation
        small = simulation.cluster.kinds[1]
        kinds = (simulation.cluster.kinds[0], replace(small, memory_bytes=2**30))
        assert small.name == "P100-SXM2"
        tight = replace(simulation.cluster, kinds=kinds)
        told = what_if(simulation, "small", lambda s: again(s, cluster=tight))
        assert not told.fits
        assert told.note.endswith("of 1.00 GiB per device")

    def test_a_searched_order_is_for_its_number_of_micro_batches(self, zero):
        workload, machine, stages, _ = arranged("alexnet", "2xA100", 8, "1f1b")
        order = ("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1")
        listed = Schedule("exact", 2, order)
        this_account = account(workload, machine, stages, listed)
        _, untried = what_ifs(this_account.simulation, zero, this_account.links, 60.0)
        assert {left.change for left in untried} == {
            "4 micro-batches instead of 2",
            "1 micro-batches instead of 2",
        }
        assert "searched for exactly 2" in untried[0].why

    def test_out_of_time_is_said(self, zero):
        told = explain_plan(zero, budget_s=-1.0)
        assert told.what_ifs == ()
        assert all("used up" in left.why for left in told.untried)


class TestPlan:
    def test_a_plan_is_explained_in_full(self, zero):
        told = explain_plan(zero)
        assert told.step_s == pytest.approx(zero.prediction.step_s)
        assert sum(part.seconds for part in told.parts) == pytest.approx(told.step_s)
        assert 0 < told.lower_bound_s <= told.step_s
        gains = [what.gain for what in told.what_ifs]
        assert gains == sorted(gains, reverse=True)
        assert told.helpful[0].gain > 0
        assert told.alternatives == zero.origin.alternatives

    def test_more_memory_is_worth_the_faster_plan_it_lacks_for(self, zero):
        simulation = explain_plan(zero, budget_s=0.0).simulation
        room, step = min(simulation.capacity_bytes), simulation.step_s
        others = (
            Alternative("fsdp", "data=4", step * 0.75, room + 3 * 2**30, "needs more"),
            Alternative("slow", "data=4", step * 1.5, room + 2**30, "needs more"),
            Alternative("small", "data=4", step * 2, 1.0, "longer"),
        )
        plan = replace(zero, origin=replace(zero.origin, alternatives=others))
        (told,) = more_memory(simulation, plan)
        assert told.change == "3.00 GiB more memory per device"
        assert told.gain == pytest.approx(0.25)
        assert "fsdp fits" in told.note
        assert more_memory(simulation, zero) == []

    def test_a_plan_for_batches_in_a_row_is_measured_by_them(self, zero):
        plain = explain_plan(zero, budget_s=0)
        assert plain.objective_s == plain.step_s
        steady = replace(zero.prediction, interval_s=1.0)
        told = explain_plan(replace(zero, prediction=steady), budget_s=0)
        assert told.objective_s == told.simulation.interval_s < told.step_s

    def test_the_users_cap_on_memory_stays(self, zero):
        tight = replace(zero.prediction, capacity_bytes=(2.0**30,))
        told = explain_plan(replace(zero, prediction=tight), budget_s=0.0)
        assert told.memory.capacity_bytes == 2.0**30

    def test_senseless_predictions_do_no_harm(self, zero):
        odd = replace(zero.prediction, lower_bound_s=-3.0, capacity_bytes=(), peak_memory_bytes=())
        told = explain_plan(replace(zero, prediction=odd), budget_s=0.0)
        assert told.lower_bound_s == 0.0
        assert told.memory.capacity_bytes == told.simulation.cluster.kinds[0].memory_bytes

    def test_a_plan_for_another_machine_is_refused(self, zero):
        with pytest.raises(PlanError, match=r"the plan is for 4xV100 .*plan again"):
            explain_plan(zero, resolve("2xA100"))


def test_stages_are_what_the_strategies_say():
    """The pipelines above are pipelines, with the schedules asked for."""
    _, _, stages, schedule = arranged(GPT2, "4xA100", 16, "1f1b", "zb-h1")
    assert len(stages) > 1
    assert isinstance(stages[0], Stage)
    assert schedule.name == "zb-h1"


NEVER = 60.0


@pytest.fixture(scope="module")
def work():
    return load("alexnet", batch=64)


def simulated(work, name, cluster="4xA100"):
    machine = resolve(cluster)
    stage = next(iter(STRATEGIES[name].stages(work.graph, machine.num_devices)))
    return simulate_stages(work, machine, (stage,), Schedule())


def test_every_assumption_makes_the_step_longer_or_leaves_it(work):
    simulation = simulated(work, "data")
    told = sensitivity(simulation, NEVER)
    assert len(told.shifts) == 6
    assert not told.untried
    for shift in told.shifts:
        assert shift.step_s >= simulation.step_s * (1 - 1e-9), shift.assumption
        assert shift.winner_s <= shift.step_s
        assert bool(shift.winner) == (shift.winner_s < shift.step_s)
    products = told.shifts[-1]
    assert simulation.step_s < products.step_s < simulation.step_s / 0.85 * (1 + 1e-9)


def test_dearer_collectives_are_those_of_a_changed_machine(work):
    simulation = simulated(work, "data")
    dearer = sensitivity(simulation, NEVER).shifts[1]
    known = reached(simulation.cluster)
    assumed = replace(
        known, inside_s=2 * known.inside_s + 1e-5, across_s=2 * known.across_s + 1e-5,
        hop_s=2 * known.hop_s,
    )  # fmt: skip
    memo = Memo(Collectives(simulation.cluster, assumed))
    again = simulate_stages(work, simulation.cluster, simulation.stages, simulation.schedule, memo)
    assert "fixed cost" in dearer.assumption
    assert dearer.step_s == pytest.approx(again.step_s)


def test_a_plan_that_a_named_one_beats_is_told_so(work):
    slow = simulated(work, "fsdp", "4x1xV100")
    told = sensitivity(slow, NEVER)
    name, _, step_s = told.rivals[0]
    assert step_s < slow.step_s
    assert [shift.winner for shift in told.flips][:1] == [name]


def test_the_plan_itself_is_no_rival(work):
    simulation = simulated(work, "data")
    names = [rival.name for rival in rivals(simulation, lambda: False)]
    assert "data" not in names
    assert 1 <= len(names) <= 4


def test_one_device_has_no_communication_to_doubt(work):
    alone = simulated(work, "data", "1xA100")
    named = [assumption for assumption, _ in assumptions(alone)]
    assert not any("collective" in one or "links" in one for one in named)
    assert "products reach 85% of what is assumed" in named


def test_without_time_nothing_is_begun_and_it_says_so(work):
    told = sensitivity(simulated(work, "data"), 0.0)
    assert not told.shifts
    assert len(told.untried) == 6
