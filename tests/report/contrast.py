"""Contrast of every text of a page as a browser shows it, by the formula of WCAG 2.

What lies under a text is read from the page: backgrounds of the elements around it, and in pictures
the shapes that are drawn below its middle, each with its opacity (`contrast.js`).
"""

from pathlib import Path

from tests.report.browser import Tab

AUDIT = Path(__file__).with_name("contrast.js")
UNFOLD = """
for (const fold of document.querySelectorAll("details")) fold.open = true;
for (const box of document.querySelectorAll("div, figure"))
  if (["auto", "scroll"].includes(getComputedStyle(box).overflowY)) {
    box.style.maxHeight = "none";
    box.style.overflow = "visible";
    box.dataset.unfolded = "";
  }
"""
FOLD = """
for (const box of document.querySelectorAll("[data-unfolded]"))
  box.style.maxHeight = box.style.overflow = "";
"""
SIZE = "(({scrollWidth, scrollHeight}) => [scrollWidth, scrollHeight])(document.documentElement)"


def poor_texts(tab: Tab) -> tuple[int, list[str]]:
    """How many texts were seen, and those that do not stand out from what is below them."""
    tab.run(UNFOLD)
    wide, tall = tab.run(SIZE)
    tab.size(max(1160, wide), max(900, tall))
    tab.frames()
    told = tab.run(AUDIT.read_text())
    tab.run(FOLD)
    return told["seen"], told["poor"]
