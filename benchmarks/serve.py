"""How quick the live page is: first paint, and a what-if for GPT-2 on 8 devices, as a user waits.

    .venv/bin/python benchmarks/serve.py [--rounds 20]

Starts `partita serve`, asks as a browser does (HTTP, answer and view), and opens the page in
headless Chromium where there is one: first contentful paint as the browser reports it, and the time
from a moved slider to the new timeline on the page. The last lines are the CPU seconds of an answer
in this process: what a quiet machine takes.
"""

import argparse
import contextlib
import http.client
import json
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
from tests.report.browser import CHROMIUM, Browser

BATCHES = (8, 16, 32, 64, 128, 256)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    rounds = parser.parse_args().rounds
    command = [sys.executable, "-m", "partita", "serve", "-q"]
    begun = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        address = server.stdout.readline().strip()
        print(f"address printed after        {time.perf_counter() - begun:.2f} s")
        try:
            measure(address, begun, rounds)
            if CHROMIUM is not None:
                in_browser(address, rounds)
        finally:
            server.send_signal(signal.SIGINT)
    in_process(rounds)


def measure(address: str, begun: float, rounds: int) -> None:
    """Questions over HTTP."""
    host, token = address.split("/")[2:4]
    strategy = {"model": "gpt2", "cluster": "8xA100", "tp": 2, "pp": 2}
    took(host, token, "strategy", {**strategy, "batch": 8})
    print(f"first answer after           {time.perf_counter() - begun:.2f} s (workers load)")
    plain = {"model": "gpt2", "cluster": "8xA100"}
    took(host, token, "simulate", {**plain, "batch": 4})
    for kind, ask, words in (
        ("strategy", strategy, "strategy by name"),
        ("simulate", plain, "op by op        "),
    ):
        each = [
            took(
                host, token, kind, {**ask, "batch": BATCHES[i % len(BATCHES)], "links": 1 + i / 64}
            )
            for i in range(rounds)
        ]
        middle, most = statistics.median(each), max(each)
        print(f"what-if, {words}    median {middle:.3f} s, most {most:.3f} s ({rounds} rounds)")


def took(host: str, token: str, kind: str, ask: dict[str, object]) -> float:
    """Seconds of a question: the answer and its view."""
    begun = time.perf_counter()
    connection = http.client.HTTPConnection(host, timeout=120)
    connection.request("POST", f"/{token}/ask", json.dumps({"kind": kind, "ask": ask}))
    answer = json.loads(connection.getresponse().read())
    connection.request("GET", f"/{token}/views/{answer['view']}")
    connection.getresponse().read()
    connection.close()
    return time.perf_counter() - begun


def in_browser(address: str, rounds: int) -> None:
    """First paint, and from a moved slider to the timeline that follows."""
    with contextlib.closing(Browser()) as browser:
        tab = browser.open(address)
        paint = tab.until(
            "(performance.getEntriesByName('first-contentful-paint')[0] || {}).startTime"
        )
        print(f"first contentful paint       {paint / 1e3:.3f} s")
        tab.until("document.documentElement.dataset.viewed")
        for how, words in (("strategy", "strategy by name"), ("simulate", "op by op        ")):
            each = [tab.run(MOVE % (how, 3 + i % 6)) for i in range(rounds)]
            middle, most = statistics.median(each) / 1e3, max(each) / 1e3
            print(f"slider to view, {words} median {middle:.3f} s, most {most:.3f} s")


def in_process(rounds: int) -> None:
    """CPU seconds of answers, without server and browser."""
    from partita.search.base import Stop
    from partita.serve.answers import answer, warm_up
    from partita.serve.asks import SimulateAsk, StrategyAsk

    warm_up()
    for kind, words in ((StrategyAsk, "strategy by name"), (SimulateAsk, "op by op        ")):
        answer(kind("gpt2", "8xA100", 512), Stop())
        each = []
        for i in range(rounds):
            begun = time.process_time()
            answer(kind("gpt2", "8xA100", BATCHES[i % len(BATCHES)], links=1 + i / 64), Stop())
            each.append(time.process_time() - begun)
        print(f"answer, {words}     median {statistics.median(each):.3f} s of CPU")


MOVE = """
new Promise((yes) => {
  const fields = document.querySelector("#whatif").elements;
  const page = document.documentElement.dataset;
  const before = page.viewed, begun = performance.now();
  fields.how.value = %r;
  fields.batch.value = %d;
  fields.batch.dispatchEvent(new Event("input", { bubbles: true }));
  const done = () => yes(performance.now() - begun);
  const look = () => (page.viewed === before ? setTimeout(look, 5) : done());
  look();
})
"""

if __name__ == "__main__":
    main()
