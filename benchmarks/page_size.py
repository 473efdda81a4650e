"""How large pages are, how soon they can be used, how smoothly they zoom: headless Chromium.

    python benchmarks/page_size.py             # pages of 1,000 to 1,000,000 tasks

The page of a plan is a pipeline of SqueezeNet on 16 devices; a million tasks are a bare timeline.
`ready` is the script's own time until every timeline can be used, `load` from opening the file to
its load event. Frames are those of 90 steps of zooming in and out, drawn as fast as they come;
`cpu` is what one of them takes of the page's main thread, whatever else the machine does.
"""

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from partita.jobs.simulate import simulate
from partita.program import Kind, ProgramBuilder
from partita.report.page import plan_page
from partita.report.timeline_page import TimelineStory, timeline_page
from partita.timeline import Timeline
from tests.report.browser import CHROMIUM, Browser, Tab
from tests.report.plans import line

ZOOM = """
new Promise((done) => {
  const view = partitaTimelines[0], begun = performance.now();
  let steps = 0, longest = 0, last = begun;
  function step() {
    const now = performance.now();
    longest = Math.max(longest, now - last);
    last = now;
    if (steps++ === 90) return done([90000 / (now - begun), longest]);
    view.zoom(steps % 60 < 30 ? 1 / 1.15 : 1.15, 400);
    requestAnimationFrame(step);
  }
  requestAnimationFrame(step);
})
"""


def bare(num_tasks: int, num_lanes: int) -> Timeline:
    """Lanes with tasks of two kinds, a tenth of the time idle."""
    b = ProgramBuilder()
    each = num_tasks // num_lanes
    for lane in range(num_lanes):
        b.lane(f"gpu{lane}")
    start = np.empty(each * num_lanes)
    for lane in range(num_lanes):
        for i in range(each):
            start[lane * each + i] = i * 1.1e-5
            kind = Kind.FORWARD if i % 3 == 0 else Kind.BACKWARD
            b.add(f"block{i % 200}", lane, 1e-5, kind=kind, microbatch=i)
    program = b.build()
    return Timeline(program, start, start + program.duration)


def pages(most: int) -> Iterator[tuple[str, int, float, str]]:
    """(name, tasks, seconds of this process to make it, the page)."""
    for microbatches in (10, 96, 560):
        plan = line("squeezenet1_1@64", "16xA100", microbatches, batch=2 * microbatches)
        simulation = simulate(plan)
        begun = time.process_time()
        page = plan_page(plan, simulation)
        count = simulation.timeline.program.num_tasks
        yield "plan, 16 stages", count, time.process_time() - begun, page
    for count, lanes in ((1_000_000, 64), (1_000_000, 1024)):
        if count <= most:
            timeline = bare(count, lanes)
            begun = time.process_time()
            page = timeline_page(TimelineStory("a timeline", "", timeline))
            yield f"timeline, {lanes} lanes", count, time.process_time() - begun, page


def busy_s(tab: Tab) -> float:
    """Seconds of processor time that the page's main thread has spent on tasks."""
    metrics = tab.ask("Performance.getMetrics")["metrics"]
    return next(entry["value"] for entry in metrics if entry["name"] == "TaskDuration")


def main() -> None:
    """Print a row for each page."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--most", type=int, default=1_000_000, help="tasks at most")
    options = parser.parse_args()
    if CHROMIUM is None:
        sys.exit("no Chromium was found; install it (Debian, Ubuntu: apt install chromium)")
    browser = Browser()
    header = ("tasks", "size", "made in", "load", "ready", "cpu", "frames/s", "longest frame")
    print("page                     " + "   ".join(header))
    try:
        for name, count, made_s, page in pages(options.most):
            begun = time.perf_counter()
            tab = browser.open(page)
            load_s = time.perf_counter() - begun
            tab.ask("Performance.enable", timeDomain="threadTicks")
            tab.frames()
            ready = int(tab.run("document.documentElement.dataset.ready"))
            before_s = busy_s(tab)
            frames, longest = tab.run(ZOOM)
            each_ms = (busy_s(tab) - before_s) / 90 * 1e3
            print(
                f"{name:20} {count:9,} {len(page.encode()) / 1e6:5.1f} MB {made_s:6.1f} s "
                f"{load_s:5.1f} s {ready:3} ms {each_ms:5.1f} ms {frames:8.0f} {longest:11.0f} ms",
                flush=True,
            )
            assert tab.console == []
            tab.close()
    finally:
        browser.close()


if __name__ == "__main__":
    main()
