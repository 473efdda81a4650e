"""From a plan to the program that runs it.

tasks      tasks while they are written: lanes, waits, memory from first use to last
parameters how a stage's parameters are kept, added up and updated
stage      one stage that holds the whole model: every op on every device, collectives between
pieces     the part of a graph that a stage runs, with what enters and leaves it
blocks     what a stage's forward and backward of one micro-batch take and hold
known      the same for many plans: each kind of stage once, deep ones by two shorter ones
transfer   from one stage's devices to another's
sends      all that passes between stages
orders     which block a group of devices runs next
pipeline   many stages, many micro-batches: a task per block and micro-batch
"""

from partita.lower.known import Memo
from partita.lower.pipeline import Pipelined, lower_plan
from partita.lower.stage import MAX_DRAWN, Lowered, drawn_devices, lower_stage

__all__ = [
    "MAX_DRAWN",
    "Lowered",
    "Memo",
    "Pipelined",
    "drawn_devices",
    "lower_plan",
    "lower_stage",
]
