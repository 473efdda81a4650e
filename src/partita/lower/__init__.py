"""From a plan to the program that runs it: `lower_plan` lowers any plan and decides nothing.

context    what is known of a stage and never changes
writer     tasks while they are written: lanes, waits, values, memory from first use to last; the
           order of a stage's collectives, as the plan lists it
ops        every op on every representative rank, collectives between; a stage that runs once
parameters how a stage's parameters are gathered, their gradients reduced and updated
pieces     the part of a graph that a stage runs, with what enters and leaves it
blocks     what a stage's forward and backward of one micro-batch take and hold
known      the same in short for many plans: equal stages once, deep ones by two shorter ones
sends      all that passes between stages
orders     which block a group of devices runs next, also where several groups run some together
pipeline   any plan; with many stages and micro-batches a task per block and micro-batch
"""

from partita.lower.context import MAX_REPRESENTATIVES, first_of_kinds, representative_devices
from partita.lower.known import WRITTEN, Memo
from partita.lower.pipeline import Lowered, lower_plan

__all__ = [
    "MAX_REPRESENTATIVES",
    "WRITTEN",
    "Lowered",
    "Memo",
    "first_of_kinds",
    "lower_plan",
    "representative_devices",
]
