"""Pipelines and their schedules as people describe them: blocks on devices, shapes, known orders.

placement   what runs where: blocks of one micro-batch, their devices and dependencies
shapes      placements by name: vshape, xshape, mshape, ...
stages      a placement from the measured times and bytes of pipeline stages
pipeline    which blocks of a problem are the stages of a pipeline, and how devices hold them
actions     what a device does next, `3F2`: the forward of stage 3, micro-batch 2
named       the orders of published schedules: GPipe, 1F1B, zero bubble, DualPipe, ...
programs    a schedule problem, with times or an order, as a program
"""

from partita.schedules.placement import Block, Placement
from partita.schedules.shapes import SHAPES, ShapeOptions, shape
from partita.schedules.stages import StageCost, StageLink, placement_from_stages

__all__ = [
    "SHAPES",
    "Block",
    "Placement",
    "ShapeOptions",
    "StageCost",
    "StageLink",
    "placement_from_stages",
    "shape",
]
