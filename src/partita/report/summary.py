"""A simulation in words: time, what bounds it, memory against capacity, the slowest ops."""

from collections.abc import Sequence
from typing import Any

from partita import units
from partita.degrees import num_tokens
from partita.graph.record import Graph
from partita.graph.work import appended_positions, cached_inputs, positions_read_before
from partita.jobs.shard import Sharding, SimulatedSharding
from partita.jobs.simulate import OpGroup, OpReport, Simulation, slowest_groups
from partita.jobs.strategies import STRATEGIES
from partita.jobs.workload import Workload

SLOWEST = 10
MOST_CANDIDATES = 8
INTERVAL = "80 % interval"  # over the column of `likely_range`
MEMORY_ERROR = "±6 %"  # every figure of it: `costs/physics.py`
MEMORY_HEADER = f"memory {MEMORY_ERROR}"
KEPT = {
    0: "replicated",
    1: "sharded states (ZeRO 1)",
    2: "sharded gradients (ZeRO 2)",
    3: "sharded (ZeRO 3)",
}  # how a split keeps parameters, in words
CHECKPOINTED = {
    "full": "full activation checkpointing",
    "selective": "selective activation checkpointing",
}  # what of a stage runs again, in words
OP_HEADER = ("slowest ops", "kind", "split", "count", "time", "share", "bound by", "speed")


def simulation_text(simulation: Simulation, slowest: int = SLOWEST) -> str:
    """What to know of a simulation, in a screenful."""
    return "\n".join((*headline(simulation), "", *slowest_ops(simulation.ops, slowest)))


def headline(simulation: Simulation) -> tuple[str, ...]:
    """What it is, how long it takes, what bounds it, whether it fits."""
    parts = ", ".join(f"{name} {share:.0%}" for name, share in bound_shares(simulation))
    _, capacity = simulation.fullest
    verdict = "" if simulation.fits else "   DOES NOT FIT"
    machine = simulation.cluster.name
    return (
        job_line(simulation),
        f"{machine}: {simulation.num_devices} devices as {arrangement(simulation)}",
        "",
        step_line(simulation),
        _busy_text(simulation),
        f"bound by   {parts}",
        f"memory     {likely_memory(simulation)} of {units.size(capacity)} per device{verdict}",
        f"           whole model: {_memory_text(simulation)}",
        *_doubt(simulation),
    )


def _doubt(simulation: Simulation) -> tuple[str, ...]:
    """A word where a prediction is better than what anyone has measured on such devices."""
    several = len({device.node for device in simulation.cluster.devices}) > 1
    best = min(
        (record.physics.best_mfu_nodes if several else record.physics.best_mfu)
        for record in simulation.physics_sets
    )
    if not simulation.workload.training or simulation.mfu <= best:
        return ()
    where = "several nodes of such devices" if several else "such devices"
    return (f"doubt      no run that was published of {where} reached more than {best:.0%} MFU",)


def job_line(simulation: Simulation) -> str:
    """The model and what is done with it."""
    workload = simulation.workload
    tokens = (num_tokens(workload.graph) or 0) // max(workload.batch, 1)
    job = f"training with {workload.optimizer}" if workload.training else "inference"
    if tokens and not workload.training:
        job += f", {phase_of_inference(workload.graph)}"
    if workload.execution != "graph":
        job += f" ({workload.execution})"
    return (
        f"{workload.spec}: {units.count(workload.graph.num_parameters)} parameters, "
        f"{ops_text(workload.graph)}, {job}, {batch_text(workload)}, {types_text(workload)}"
    )


def batch_text(workload: Workload) -> str:
    """The global batch, and how long its samples are where they have tokens."""
    tokens = (num_tokens(workload.graph) or 0) // max(workload.batch, 1)
    each = f" of {units.counted(tokens, 'token')}" if tokens else ""
    return f"global batch {workload.batch}{each}"


def types_text(workload: Workload) -> str:
    """The type of a model, and those of sums and products where they are others."""
    sums = f", gradients summed in {workload.grad_dtype}" if workload.grad_dtype else ""
    products = f", products in {workload.matmul_dtype}" if workload.matmul_dtype else ""
    return f"{workload.dtype}{sums}{products}"


def phase_of_inference(graph: Graph) -> str:
    """What a language model does: reads a prompt, or adds tokens to what it has read."""
    kept = cached_inputs(graph)
    if not kept:
        return "prefill"
    size = sum(graph.tensor(name).size_bytes for name in kept)
    cached, read = appended_positions(graph), positions_read_before(graph)
    if 0 in kept.values():  # a state is as large after any number of tokens
        return f"decode from a recurrent state ({units.size(size)})"
    more = f" and {read:,} of the encoder" if read else ""
    return f"decode behind a KV cache of {cached:,} tokens{more} a sample ({units.size(size)})"


def ops_text(graph: Graph) -> str:
    """How many ops a model has: those that are split and cut, and all that run."""
    forward = sum(op.phase == "forward" for op in graph.ops)
    if forward == len(graph.ops):
        return f"{forward:,} ops"
    return f"{forward:,} ops ({len(graph.ops):,} with backward and updates)"


def step_line(simulation: Simulation) -> str:
    """How long a step takes, and what that makes."""
    step = simulation.step_s
    rate = throughput(simulation, step, digits=1)
    low, high = simulation.likely_mfu
    mfu = f"MFU {simulation.mfu:.0%}, {low:.0%} to {min(high, 1.0):.0%}"
    return f"step       {likely_seconds(simulation)}   ({rate}, {mfu})"


def likely_range(simulation: Simulation) -> str:
    """The 80 % interval of a step, for a column."""
    return interval_words(simulation.likely_step_s)


def interval_words(interval_s: tuple[float, float]) -> str:
    """From when to when."""
    low, high = map(units.seconds, interval_s)
    return f"{low} to {high}"


def likely_seconds(simulation: Simulation) -> str:
    """A predicted step with its 80 % interval."""
    return predicted_words(simulation.step_s, simulation.likely_step_s)


def predicted_words(seconds: float, interval_s: tuple[float, float]) -> str:
    """A predicted time with its 80 % interval."""
    between = interval_words(interval_s)
    return f"{units.seconds(seconds)}, predicted; {INTERVAL} {between}"


def likely_memory(simulation: Simulation) -> str:
    """The predicted peak of the fullest device with its 80 % interval."""
    low, high = map(units.size, simulation.likely_peak_bytes)
    return f"{units.size(simulation.fullest[0])} ({low} to {high})"


def throughput(simulation: Simulation, seconds: float, digits: int = 0) -> str:
    """Samples per second where a batch takes so many; tokens too, where the model has tokens."""
    each = 1 / seconds if seconds else 0.0
    words = f"{simulation.workload.batch * each:,.{digits}f} samples/s"
    tokens = (num_tokens(simulation.workload.graph) or 0) * each
    if not tokens:
        return words
    devices = simulation.num_devices
    alone = f", {tokens / devices:,.0f} tokens/s/device" if devices > 1 else ""
    return f"{words}, {tokens:,.0f} tokens/s{alone}"


def bound_shares(simulation: Simulation) -> list[tuple[str, float]]:
    """What bounds a step: the share of each, in words."""
    bounds = simulation.bounds()
    total = sum(bounds.values()) or 1.0
    waiting = _waits_for(simulation)
    return [(waiting if name == "waiting" else name, s / total) for name, s in bounds.items()]


def _busy_text(simulation: Simulation) -> str:
    """What the busiest device does; a stage's block of a pipeline holds its own collectives.

    What blocks wait for inside and the bubble between them add up to what bounds the step beside
    work (`bound_shares`).
    """
    idle_s, waits = max(0.0, simulation.exposed_s), _waits_for(simulation)
    sent = units.seconds(simulation.communication_s)
    if not simulation.is_pipelined:
        busy = units.seconds(simulation.compute_s)
        return f"compute    {busy}   communication {sent}; {waits} {units.seconds(idle_s)}"
    waiting_s = simulation.bounds()["waiting"]
    if simulation.num_stages == 1:
        busy = units.seconds(simulation.step_s - waiting_s)
        return f"compute    {busy}   {waits} {units.seconds(waiting_s)}"
    inside, busy = units.seconds(max(0.0, waiting_s - idle_s)), units.seconds(simulation.compute_s)
    mine = f"{busy} on the busiest device, {inside} of it {waits.removeprefix('bubble and ')}"
    return f"stages     {mine}; bubble {units.seconds(idle_s)}   sends between stages {sent}"


def _waits_for(simulation: Simulation) -> str:
    """What a device waits for while it does not compute."""
    by_host = simulation.workload.execution != "graph"
    if by_host and simulation.num_devices == 1:
        return "waiting for the host"
    waits = "exposed communication"
    if simulation.num_stages > 1:
        waits = f"bubble and {waits}"
    return f"{waits}, host" if by_host else waits


def arrangement(simulation: Simulation) -> str:
    """The mesh; of a pipeline, how many stages on which meshes, the schedule and the bubble."""
    bubble = f", bubble {simulation.bubble:.0%}" if simulation.num_stages > 1 else ""
    count = simulation.schedule.num_microbatches
    each = f" of {simulation.workload.batch // count}" if count > 1 else ""
    return f"{simulation.arrangement}{each}{bubble}"


def slowest_ops(ops: Sequence[OpReport], most: int) -> tuple[str, ...]:
    """A table of the ops that take longest on one device."""
    total = sum(report.cost.seconds for report in ops) or 1.0
    rows = [op_row(group, total) for group in slowest_groups(ops, most)]
    return tuple(units.table(OP_HEADER, rows, numbers=(3, 4, 5, 7)).split("\n"))


def op_row(group: OpGroup, total_s: float) -> tuple[str, ...]:
    """One row of the table of slowest ops."""
    report = group.first
    speed = report.cost.flops / report.cost.seconds if report.cost.seconds else 0.0
    return (
        group.name,
        f"{report.kind} {report.phase}",
        " ".join(f"{dim}/{ways:g}" for dim, ways in report.split) or "-",
        f"x{group.count}",
        units.seconds(group.seconds),
        f"{group.seconds / total_s:.1%}",
        report.cost.bound,
        units.rate(speed, "FLOP"),
    )


def simulation_json(simulation: Simulation) -> dict[str, Any]:
    """The same for programs; with every op."""
    memory = simulation.memory
    return {
        "format": "partita/simulation@1",
        "model": simulation.workload.spec,
        "cluster": simulation.cluster.name,
        "batch": simulation.workload.batch,
        "dtype": simulation.workload.dtype,
        "training": simulation.workload.training,
        "execution": simulation.workload.execution,
        "grad_dtype": simulation.workload.grad_dtype or simulation.workload.dtype,
        "matmul_dtype": simulation.workload.matmul_dtype or simulation.workload.dtype,
        "mesh": str(simulation.stage.mesh),
        "stages": [
            {
                "name": stage.name,
                "mesh": str(stage.mesh),
                "devices": list(stage.mesh.devices),
                "num_ops": len(stage.splits),
                "recompute": (stage.checkpointing == "full"),
                "again": len(stage.recomputed),
            }
            for stage in (simulation.decided or simulation.stages)
        ],
        "schedule": simulation.schedule.name,
        "num_microbatches": simulation.schedule.num_microbatches,
        "bubble": simulation.bubble,
        "step_s": simulation.step_s,
        "compute_s": simulation.compute_s,
        "communication_s": simulation.communication_s,
        "exposed_s": max(0.0, simulation.exposed_s),
        "mfu": simulation.mfu,
        "interval_80": {
            "step_s": list(simulation.likely_step_s),
            "mfu": list(simulation.likely_mfu),
            "peak_memory_bytes": list(simulation.likely_peak_bytes),
        },
        "tokens": num_tokens(simulation.workload.graph) or 0,
        "bounds_s": simulation.bounds(),
        "fits": simulation.fits,
        "peak_memory_bytes": list(simulation.peak_bytes),
        "capacity_bytes": list(simulation.capacity_bytes),
        "model_memory_bytes": {
            "parameters": memory.parameters,
            "gradients": memory.gradients,
            "states": memory.states,
            "saved_activations": memory.saved_activations,
        },
        "ops": [
            {
                "name": report.name,
                "kind": report.kind,
                "phase": report.phase,
                "split": dict(report.split),
                "seconds": report.cost.seconds,
                "bound": report.cost.bound,
                "flops": report.cost.flops,
                "traffic_bytes": report.cost.traffic_bytes,
            }
            for report in simulation.ops
        ],
    }


def comparison_text(sharding: Sharding) -> str:
    """The best of each named strategy beside the best plan."""
    best: dict[str, SimulatedSharding] = {}
    for candidate in sharding.tried:  # fastest first, those that fit before those that do not
        best.setdefault(candidate.name, candidate)
    rows = []
    for name, candidate in best.items():
        simulation = candidate.simulation
        ratio = candidate.step_s / sharding.best.step_s if sharding.best else 1.0
        what = STRATEGIES[name].summary if name in STRATEGIES else "the search's best"
        rows.append(
            (
                name,
                what,
                candidate.simulation.arrangement,
                units.seconds(candidate.step_s),
                likely_range(simulation),
                f"x{ratio:.2f}",
                units.seconds(simulation.communication_s),
                units.size(max(simulation.peak_bytes)),
                "" if simulation.fits else "does not fit",
            )
        )
    header = (
        "strategy", "what it is", "plan", "step", INTERVAL, "", "communication", MEMORY_HEADER, "",
    )  # fmt: skip
    return "\n".join((units.table(header, rows, numbers=(3, 4, 5, 6, 7)), "", *_verdict(sharding)))


def sharding_text(sharding: Sharding) -> str:
    """What was tried and what won."""
    rows = [
        (
            ("-> " if candidate is sharding.best else "   ") + candidate.name,
            candidate.simulation.arrangement,
            units.seconds(candidate.step_s),
            likely_range(candidate.simulation),
            units.seconds(candidate.simulation.communication_s),
            units.size(max(candidate.simulation.peak_bytes)),
            "yes" if candidate.simulation.fits else "no",
        )
        for candidate in sharding.tried[:MOST_CANDIDATES]
    ]
    header = ("   candidate", "plan", "step", INTERVAL, "communication", MEMORY_HEADER, "fits")
    return "\n".join((units.table(header, rows, numbers=(2, 3, 4, 5)), "", *_verdict(sharding)))


def _verdict(sharding: Sharding) -> list[str]:
    lines = [f"{sharding.status}: {sharding.why}"]
    if sharding.best is not None:
        gap = 1 - sharding.lower_bound_s / sharding.best.step_s
        lines.append(
            "on this cost model no split of these meshes is below "
            f"{units.seconds(sharding.lower_bound_s)}, so at most {gap:.1%} from optimal; "
            f"{split_words(sharding.best.simulation)}"
        )
    return lines


def split_words(simulation: Simulation) -> str:
    """Which dims are split how often, in one phrase."""
    counts: dict[str, int] = {}
    for split in simulation.stage.splits:
        name = " x ".join(dim or "none" for dim in split.dims)
        counts[name] = counts.get(name, 0) + 1
    ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return "ops by split: " + ", ".join(f"{name} {count}" for name, count in ranked[:6])


def _memory_text(simulation: Simulation) -> str:
    memory = simulation.memory
    parts = {
        "parameters": memory.parameters,
        "gradients": memory.gradients,
        "optimizer states": memory.states,
        "saved activations": memory.saved_activations,
    }
    return ", ".join(f"{name} {units.size(value)}" for name, value in parts.items() if value)
