"""Partita plans, proves and runs the parallel execution of deep-learning models.

The public names are loaded when they are first used, so that importing costs next to nothing.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from partita.capture import capture as capture
    from partita.cluster import Cluster as Cluster
    from partita.cluster import resolve as cluster_from
    from partita.errors import CaptureError as CaptureError
    from partita.errors import InputError as InputError
    from partita.errors import PartitaError as PartitaError
    from partita.errors import VerificationError as VerificationError
    from partita.forecast import Forecast as Forecast
    from partita.forecast import Strategy as Strategy
    from partita.forecast import Transformer as Transformer
    from partita.gpu.accelerate.api import accelerate as accelerate
    from partita.gpu.decode.generate import generate as generate
    from partita.gpu.decode.step import decode_step as decode_step
    from partita.gpu.recurrent.api import persistent as persistent
    from partita.gpu.recurrent.decode import GreedyDecoder as GreedyDecoder
    from partita.gpu.rtasks.api import rtasks as rtasks
    from partita.gpu.streams.api import streams as streams
    from partita.graph import Graph as Graph
    from partita.graph import GraphBuilder as GraphBuilder
    from partita.graph import training_graph as training_graph
    from partita.graph.files import read_graph as read_graph
    from partita.jobs.check_plan import check_plan as check_plan
    from partita.jobs.compare import compare as compare
    from partita.jobs.partition import partition as partition
    from partita.jobs.place import place as place
    from partita.jobs.plan import plan as plan
    from partita.jobs.schedule import schedule as schedule
    from partita.jobs.shard import shard as shard
    from partita.jobs.simulate import simulate as simulate
    from partita.plans import Plan as Plan
    from partita.plans import read_plan as read_plan
    from partita.program import Program as Program
    from partita.program import ProgramBuilder as ProgramBuilder
    from partita.run.distributed.engine import execute as execute
    from partita.run.distributed.loss import with_loss as with_loss
    from partita.run.pipe import pipe as pipe
    from partita.run.placed import placed_draws as placed_draws
    from partita.schedules.placement import Block as Block
    from partita.schedules.placement import Placement as Placement
    from partita.search.base import Result as Result
    from partita.search.base import Stop as Stop
    from partita.timeline import Timeline as Timeline
    from partita.zoo import build as model

__version__ = "0.1.0"

# public name -> where it lives (and its name there, where that differs)
_PUBLIC = {
    "Block": "partita.schedules.placement",
    "CaptureError": "partita.errors",
    "Cluster": "partita.cluster",
    "Forecast": "partita.forecast",
    "Graph": "partita.graph",
    "GraphBuilder": "partita.graph",
    "GreedyDecoder": "partita.gpu.recurrent.decode",
    "InputError": "partita.errors",
    "PartitaError": "partita.errors",
    "Placement": "partita.schedules.placement",
    "Plan": "partita.plans",
    "Program": "partita.program",
    "ProgramBuilder": "partita.program",
    "Result": "partita.search.base",
    "Stop": "partita.search.base",
    "Strategy": "partita.forecast",
    "Timeline": "partita.timeline",
    "Transformer": "partita.forecast",
    "VerificationError": "partita.errors",
    "accelerate": "partita.gpu.accelerate.api",
    "capture": "partita.capture",
    "check_plan": "partita.jobs.check_plan",
    "cluster_from": "partita.cluster:resolve",
    "compare": "partita.jobs.compare",
    "decode_step": "partita.gpu.decode.step",
    "execute": "partita.run.distributed.engine",
    "generate": "partita.gpu.decode.generate",
    "model": "partita.zoo:build",
    "partition": "partita.jobs.partition",
    "persistent": "partita.gpu.recurrent.api",
    "pipe": "partita.run.pipe",
    "place": "partita.jobs.place",
    "placed_draws": "partita.run.placed",
    "plan": "partita.jobs.plan",
    "read_graph": "partita.graph.files",
    "read_plan": "partita.plans",
    "rtasks": "partita.gpu.rtasks.api",
    "schedule": "partita.jobs.schedule",
    "shard": "partita.jobs.shard",
    "simulate": "partita.jobs.simulate",
    "streams": "partita.gpu.streams.api",
    "training_graph": "partita.graph",
    "with_loss": "partita.run.distributed.loss",
}

__all__ = [
    "Block", "CaptureError", "Cluster", "Forecast", "Graph", "GraphBuilder", "GreedyDecoder",
    "InputError", "PartitaError", "Placement", "Plan", "Program", "ProgramBuilder", "Result",
    "Stop", "Strategy", "Timeline", "Transformer", "VerificationError", "accelerate", "capture",
    "check_plan", "cluster_from", "compare", "decode_step", "execute", "generate", "model",
    "partition", "persistent", "pipe", "place", "placed_draws", "plan", "read_graph", "read_plan",
    "rtasks", "schedule", "shard", "simulate", "streams", "training_graph", "with_loss",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'partita' has no attribute {name!r}")
    module, _, original = _PUBLIC[name].partition(":")
    return getattr(importlib.import_module(module), original or name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
