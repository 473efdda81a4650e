"""One call from a module to a pipeline: capture, partition, emit, and stages that run in turn.

    piped = partita.pipe(module, args=(x,), devices=4)
    piped(x).sum().backward()                  # gradients are in module.parameters(), too

The stages run one after the other in this process, on whatever device the module is; the plan says
what a pipeline of the devices asked for would take.
"""

import functools
from typing import TYPE_CHECKING, Any

from partita.errors import CaptureError, PlanError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from partita.capture.exported import Captured
    from partita.cluster import Cluster
    from partita.emit.stages import Emitted
    from partita.emit.symbolic import Recaptured
    from partita.jobs.partition import Partitioned
    from partita.run.piped import Piped
    from partita.run.programs import PipedMode, Programs
    from partita.search.base import Stop


def pipe(
    module: Any,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    devices: int | None = None,
    cluster: "str | Cluster | None" = None,
    method: str | None = None,
    cut: str = "modules",
    stages: int | None = None,
    straight: bool = False,
    memory: float | None = None,
    recompute: bool = False,
    checkpointing: str = "refuse",
    stop: "Stop | None" = None,
    seed: int = 0,
) -> "Piped":
    """A PyTorch module cut into stages for some devices; called as the module is.

    Without a cluster `devices` A100s are planned for, four if nothing is said. Stages begin and end
    at the borders of modules; with `cut="anywhere"` wherever the busiest device is done first, and
    a device may hold several. Parameters and buffers are shared with the module, not copied. What
    cannot be captured raises CaptureError, what fits nowhere PlanError. The plan is for the sizes
    of these arguments; called with other sizes, its stages are captured for those (`sizes.py`).

    Where the module checkpoints activations itself, `checkpointing` says what becomes of it:
    "refuse", "keep" (these regions run again in the backward, in whatever stage they are), or
    "inline" (`recompute` alone decides).
    """
    from partita.capture.installed import need_torch

    need_torch()
    from partita.jobs.partition import QUICKLY
    from partita.run.piped import Piped

    if checkpointing == "keep" and recompute:
        raise CaptureError(
            "the model's own checkpointing is to be kept and the plan's to be used",
            fix="pass checkpointing=\"inline\" for the plan's, or recompute=False for the model's",
        )
    if devices is None and cluster is None:
        devices = 4
    options = {
        "devices": devices, "cluster": cluster, "method": method, "cut": cut, "stages": stages,
        "straight": straight, "memory": memory, "recompute": recompute,
        "stop": stop or QUICKLY, "seed": seed,
    }  # fmt: skip

    module = module.original if isinstance(module, Piped) else module
    cut_module = functools.partial(_program, checkpointing=checkpointing, options=options)
    return Piped(module, cut_module, args, kwargs or {})


def _program(
    module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], programs: "Programs | None",
    checkpointing: str, options: dict[str, Any],
) -> "PipedMode":  # fmt: skip
    """The module as it is now, captured: in the stages there are, or partitioned and emitted."""
    from partita.capture import export_module
    from partita.run.programs import PipedMode, resized_program
    from partita.run.sequential import SequentialStages
    from partita.run.sizes import Served, shapes_of

    learns = module.training and any(p.requires_grad for p in module.parameters())

    def capture(given: Any) -> "Captured":
        return export_module(module, *given, checkpointing=checkpointing)

    def emitted(
        captured: "Captured", partitioned: "Partitioned", others: "Mapping[str, Recaptured]"
    ) -> "Emitted":
        return _emitted(captured, partitioned, learns, others)

    captured = capture((args, kwargs))
    if programs is not None:
        resized = resized_program(programs, captured, capture, emitted, checkpointing)
        if resized is not None:
            return resized
    partitioned = _partitioned(captured, learns, options)
    run = SequentialStages(captured, emitted(captured, partitioned, {}))
    return PipedMode(run, partitioned, Served(shapes_of(captured.program.example_inputs)))


def _partitioned(captured: "Captured", learns: bool, options: dict[str, Any]) -> "Partitioned":
    from partita.graph.backward import is_learned, learned_first
    from partita.jobs.partition import partition
    from partita.search.base import Status

    graph = learned_first(captured.graph) if learns else captured.graph
    partitioned = partition(
        graph, training=learns and is_learned(graph), in_order=captured.random_ops(), **options
    )
    if partitioned.plan is None:
        more = "use more or larger devices"
        if partitioned.status is not Status.INFEASIBLE:
            more = "give the search longer: stop=partita.Stop(time_s=60)"
        raise PlanError(partitioned.result.why, fix=more, field=captured.graph.name)
    return partitioned


def _emitted(
    captured: "Captured", partitioned: "Partitioned", learns: bool,
    others: "Mapping[str, Recaptured]",
) -> "Emitted":  # fmt: skip
    from partita.emit.plans import recomputed_of
    from partita.emit.recompute import RecomputedNodes
    from partita.emit.stages import emit

    assert partitioned.plan is not None, "what has no plan is not piped"
    nodes = {op: [captured.node_of(op)] for op in partitioned.stage_of}
    again = recomputed_of(partitioned.plan, nodes)
    if learns and (regions := captured.checkpointed()):
        everything = {node for own in nodes.values() for node in own}
        kept = RecomputedNodes(nodes=regions, others=frozenset(everything - regions))
        again = dict.fromkeys(again, kept)
    return emit(captured, partitioned.stage_of, again=again, others=others)
