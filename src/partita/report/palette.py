"""The colours of pages, and patterns that tell the same apart without colour.

Every colour that carries white text has a contrast of at least 4.5 with it (WCAG AA), every colour
that means something one of at least 3 with the grounds of light and dark pages; a test computes
both. A pattern is a direction of lines over the colour: the same in style sheets (`hatch`), in
pictures (`svg_patterns`) and on a canvas, which reads the number.
"""

from partita.jobs.idle import CAUSES
from partita.jobs.memory_parts import PARTS

LIGHT = {"ground": "#ffffff", "card": "#f6f8fa", "ink": "#1f2328", "soft": "#59636e",
         "line": "#d0d7de", "focus": "#0b57d0"}  # fmt: skip
DARK = {"ground": "#0d1117", "card": "#161b22", "ink": "#e6edf3", "soft": "#9198a1",
        "line": "#3d444d", "focus": "#7ab7ff"}  # fmt: skip
CATEGORY_COLORS = (
    "#2f74d0", "#2b8453", "#1d8082", "#a5650f", "#9a4fb0", "#c4473f", "#857020", "#687a18",
    "#6b7683", "#646bc4", "#b8478d", "#bd5820", "#c0454f", "#95684a",
)  # fmt: skip  # of tasks; each reads with white text, on light and on dark ground
CATEGORY_PATTERNS = (0, 1, 1, 2, 3, 4, 5, 6, 0, 4, 3, 2, 5, 6)
CAUSE_COLORS = dict(zip(CAUSES, ("#6b7683", "#c4473f", "#9a4fb0", "#a5650f", "#1d8082"),
                        strict=True))  # fmt: skip
CAUSE_PATTERNS = dict(zip(CAUSES, (1, 2, 5, 3, 4), strict=True))
BUSY_COLOR, WORK_COLOR = "#2f74d0", "#646bc4"
PART_COLORS = dict(zip(PARTS, ("#2f74d0", "#646bc4", "#6b7683", "#2b8453", "#a5650f", "#b8478d"),
                       strict=True))  # fmt: skip
PART_PATTERNS = dict(zip(PARTS, (0, 1, 4, 2, 3, 5), strict=True))
ANGLES = {1: 45, 2: 135, 3: 90, 4: 0}  # of a pattern's lines; 5 has two directions, 6 has dots
NUM_PATTERNS = 7
_LINES = "rgba(255,255,255,.42)"


def hatch(color: str, pattern: int) -> str:
    """The background of a style sheet: a colour with the lines of a pattern over it."""
    if pattern == 6:
        return f"radial-gradient({_LINES} 1.2px,transparent 1.4px) 0 0/5px 5px,{color}"
    angles = (45, 135) if pattern == 5 else (ANGLES[pattern],) if pattern in ANGLES else ()
    lines = [
        f"repeating-linear-gradient({angle}deg,{_LINES} 0 1.5px,transparent 1.5px 6px)"
        for angle in angles
    ]
    return ",".join([*lines, color])


def svg_patterns(colors: dict[str, str], patterns: dict[str, int], prefix: str) -> str:
    """Definitions of fills `url(#prefix0)`, ... for named colours in their order."""
    defined = []
    for place, (name, color) in enumerate(colors.items()):
        number = patterns[name]
        lines = ""
        if number in (1, 5):
            lines += '<path d="M-2 2L2-2M0 8L8 0M6 10L10 6" stroke="#fff" stroke-opacity=".42"/>'
        if number in (2, 5):
            lines += '<path d="M-2 6L2 10M0 0L8 8M6-2L10 2" stroke="#fff" stroke-opacity=".42"/>'
        if number == 3:
            lines += '<path d="M4 0V8" stroke="#fff" stroke-opacity=".42" stroke-width="1.5"/>'
        if number == 4:
            lines += '<path d="M0 4H8" stroke="#fff" stroke-opacity=".42" stroke-width="1.5"/>'
        if number == 6:
            lines += '<circle cx="4" cy="4" r="1.2" fill="#fff" fill-opacity=".5"/>'
        defined.append(
            f'<pattern id="{prefix}{place}" width="8" height="8" patternUnits="userSpaceOnUse">'
            f'<rect width="8" height="8" fill="{color}"/>{lines}</pattern>'
        )
    return f"<defs>{''.join(defined)}</defs>"
