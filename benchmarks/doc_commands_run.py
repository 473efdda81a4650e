"""Do the commands of the documents run as pasted, large ones too?

    python benchmarks/doc_commands_run.py [PAGE ...] [--limit-s 240]

Tests run the short ones (fences of `sh`) and read the others (`tests/doc_commands.py`). This runs
those others, page by page, each page in a folder of its own with the repository's files beside
`ROWS.json` and `prices.toml`, and prints exit code and seconds. Left out are a GPU's, `serve`, and
files that stand for the reader's own.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

import doc_commands  # noqa: E402

NEEDS_GPU = ("accelerate", "run")
OWN_FILES = ("file.py:function", "rows.json", "ROWS.json", "problem.json", "other.json", "trace",
             "resnet50.json", "timeline.json", "config.json")  # fmt: skip


def is_left_out(words: list[str]) -> str:
    """Why a command is not run here; empty if it is."""
    if words[0] == "serve":
        return "serves until it is ended"
    if words[0] in NEEDS_GPU or (words[0] == "streams" and "analytic" not in words):
        return "needs a GPU or torchrun"
    own = [word for word in words if word in OWN_FILES]
    return f"{own[0]} is the reader's own" if own else ""


def main() -> None:
    """Run the pages and print a line for every command."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("pages", nargs="*")
    parser.add_argument("--limit-s", type=float, default=240.0)
    options = parser.parse_args()
    codes: list[int] = []
    for page in doc_commands.PAGES:
        if options.pages and page.name not in options.pages:
            continue
        with tempfile.TemporaryDirectory() as folder:
            for name in doc_commands.LINKED:
                Path(folder, name).symlink_to(ROOT / name)
            Path(folder, "prices.toml").write_text("[per_hour]\nA100 = 2.0\nH100 = 3.5\n")
            for words in doc_commands.other_commands(page):
                why = is_left_out(words)
                text = f"{page.name}: partita {' '.join(words)}"
                if why:
                    print(f"{text}: left out, {why}", flush=True)
                    continue
                codes.append(run(words, Path(folder), options.limit_s, text))
    print(f"{len(codes)} commands run, {sum(code != 0 for code in codes)} with an exit code but 0")


def run(words: list[str], folder: Path, limit_s: float, text: str) -> int:
    """One command; its exit code, 124 where it takes too long."""
    began = time.perf_counter()
    try:
        done = subprocess.run(
            [sys.executable, "-m", "partita", *words],
            cwd=folder, capture_output=True, text=True, timeout=limit_s,
            env=os.environ | {"PYTHONPATH": str(ROOT / "src")}, check=False,
        )  # fmt: skip
        code, said = done.returncode, done.stderr.strip().splitlines()[-1:]
    except subprocess.TimeoutExpired:
        code, said = 124, ["the time is up"]
    words_of_error = f": {said[0]}" if code and said else ""
    print(f"{text}: {code}, {time.perf_counter() - began:.1f} s{words_of_error}", flush=True)
    return code


if __name__ == "__main__":
    main()
