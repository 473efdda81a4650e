"""Contrast of the colours, by the formula of WCAG 2; patterns tell the same apart without them."""

from itertools import combinations

import pytest

from partita.jobs.idle import CAUSES
from partita.program import Kind
from partita.report import palette
from partita.report.live_timeline import LETTERS
from partita.report.tasks import CATEGORIES

GROUNDS = [scheme[name] for scheme in (palette.LIGHT, palette.DARK) for name in ("ground", "card")]
MEANT = {
    *palette.CATEGORY_COLORS, *palette.CAUSE_COLORS.values(), *palette.PART_COLORS.values(),
    palette.BUSY_COLOR, palette.WORK_COLOR,
}  # fmt: skip


def luminance(color: str) -> float:
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    r, g, b = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


def contrast(a: str, b: str) -> float:
    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


def test_the_formula():
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)


@pytest.mark.parametrize("scheme", [palette.LIGHT, palette.DARK], ids=["light", "dark"])
@pytest.mark.parametrize("text", ["ink", "soft", "focus"])
@pytest.mark.parametrize("ground", ["ground", "card"])
def test_text_reads_on_its_ground(scheme, text, ground):
    assert contrast(scheme[text], scheme[ground]) >= 4.5


@pytest.mark.parametrize("color", sorted(MEANT))
def test_a_colour_carries_white_text_and_stands_out_from_every_ground(color):
    assert contrast(color, "#ffffff") >= 4.5
    assert min(contrast(color, ground) for ground in GROUNDS) >= 3


def test_every_category_has_a_colour_a_pattern_and_a_place_for_its_letter():
    assert len(CATEGORIES) == len(palette.CATEGORY_COLORS) == len(palette.CATEGORY_PATTERNS)
    assert len(LETTERS) == len(CATEGORIES)
    assert LETTERS.strip() == "".join(kind.letter for kind in list(Kind)[:5])
    assert set(palette.CATEGORY_PATTERNS) <= set(range(palette.NUM_PATTERNS))


def test_what_stands_beside_each_other_differs_in_more_than_colour():
    assert len(set(palette.CAUSE_PATTERNS.values())) == len(CAUSES)
    assert len(set(palette.PART_PATTERNS.values())) == len(palette.PART_PATTERNS)
    pairs = list(zip(palette.CATEGORY_COLORS, palette.CATEGORY_PATTERNS, strict=True))
    assert all(a != b for a, b in combinations(pairs, 2))


def test_a_pattern_is_drawn_alike_in_styles_and_pictures():
    for number in range(palette.NUM_PATTERNS):
        style = palette.hatch("#123456", number)
        picture = palette.svg_patterns({"x": "#123456"}, {"x": number}, "p")
        assert style.endswith("#123456")
        assert ("gradient" in style) == (number > 0) == ("#fff" in picture)
