"""The model on the page of a plan: boxes, their colours, the roofline."""

import re

import pytest

from partita.cluster import resolve
from partita.jobs.cost_tree import CostNode, OpChip, cost_tree
from partita.jobs.simulate import simulate
from partita.report.page_model import MIXED, box_colors, model_section, roofline_section
from tests.report.plans import line


def op(name: str, seconds: float, words: str, stage: str = "stage0") -> CostNode:
    cuts = () if words == "whole" else (words,)
    chip = OpChip("linear", stage, cuts, 0, "4x4 f32", 64.0, 0.0)
    return CostNode(name, seconds, seconds, chip=chip)


def module(name: str, *children: CostNode) -> CostNode:
    total = sum(child.total_s for child in children)
    return CostNode(name, total, total, children=children)


def boxes(section: str) -> dict[str, str]:
    """Name -> fill of every box of the treemap."""
    picture = section.split("</svg>")[0]
    return {
        title: fill
        for fill, title in re.findall(r'fill="([^"]+)" stroke[^>]*/><title>([^\n<]+)', picture)
    }


def test_one_stage_is_coloured_by_how_ops_are_split_the_dearest_first():
    tree = module("model", op("a", 1.0, "tp: n / 2"), op("b", 3.0, "dp: b / 2"))
    section = model_section(tree)
    assert "Colours tell how an op is split" in section
    assert list(box_colors(tree).by_group) == ["dp: b / 2", "tp: n / 2"]
    fills = boxes(section)
    assert fills["a"] != fills["b"]
    assert ">dp: b / 2</text>" in section  # not by colour alone


def test_several_stages_are_coloured_by_stage_in_their_order():
    stages = [op(f"op{n}", 1.0, "whole", f"stage{n}") for n in range(11)]
    colors = box_colors(module("model", *stages))
    assert colors.by_stage
    assert list(colors.by_group)[-1] == "stage10"


def test_a_module_too_small_for_its_ops_is_a_full_box():
    small = module("small", op("x", 0.004, "dp: b / 2"), op("y", 0.004, "dp: b / 2"))
    both = module("both", op("x", 0.004, "dp: b / 2"), op("y", 0.004, "tp: n / 2"))
    tree = module("model", op("large", 1.0, "dp: b / 2"), small, both)
    fills = boxes(model_section(tree))
    assert fills["small"] == fills["large"]
    assert fills["both"] == MIXED


def test_more_ways_to_split_than_colours_share_the_last_one():
    tree = module("model", *(op(f"op{n}", 20.0 - n, f"x: d{n} / 2") for n in range(12)))
    shades = list(box_colors(tree).by_group.values())
    assert len(set(shades[:7])) == 7
    assert set(shades[7:]) == {MIXED}


@pytest.fixture(scope="module")
def pipeline():
    return simulate(line("squeezenet1_1@64", "2xA100", 2, batch=4))


def test_no_op_is_above_the_roofs_that_are_drawn(pipeline):
    kind = resolve("2xA100").kind_of(0)
    section = roofline_section(pipeline)
    assert "roof of memory and arithmetic" in section
    assert "roof of cache" in section
    assert "of its cache" in section
    for report in pipeline.ops:
        cost = report.cost
        if cost.flops > 0 and cost.traffic_bytes > 0:
            reached = cost.flops / cost.seconds
            assert reached <= kind.cache_bytes_per_s * cost.flops / cost.traffic_bytes * 1.01


def test_the_slowest_ops_are_named_beside_their_marks(pipeline):
    section = roofline_section(pipeline)
    named = re.findall(r'textLength="[0-9]+"[^>]*>([^<]+)</text>', section)
    assert named
    assert all(len(name) <= 34 for name in named)


def test_every_line_of_the_tree_keeps_its_figures(pipeline):
    section = model_section(cost_tree(pipeline))
    lines = section.count('<span class="line">')
    assert lines == section.count('<span class="n">') > 20
