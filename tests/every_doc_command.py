"""Every command of the documents, run as it would be pasted; `scripts/doc-commands` calls this.

    scripts/doc-commands                  all pages, some minutes on two cores
    scripts/doc-commands -k plan.md

Each page has a folder of its own with the repository's files beside those that stand for the
reader's own (`rows.json`, `config.json`, `model.py`), and `plan.json` with the trace of a run of it
on two ranks. What differs from pasting: searches that say no time limit get a short one, a file
that an earlier line of the page wrote is removed before a line writes it anew, and

- `partita serve` is asked for its page, then ended by Ctrl-C;
- what needs a GPU must be refused in the sentence that says so, where there is none;
- what runs on several machines must be refused with the command that would start it.
"""

import functools
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import doc_commands
import pytest

ROOT = doc_commands.ROOT
TIME_LIMIT_S = 3
LONGEST_S = 600
OUTPUTS = ("-o", "--output", "--page", "--svg", "--csv", "--trace-out", "--calibration", "--trace")
STAND_INS = {"MODEL": "alexnet", "MACHINE": "2xA100", "N": "8", "KIND": "plan"}
EXAMPLE = "examples/gpt2_two_ranks.py"
TINY = {f"{EXAMPLE}:{name}": f"{EXAMPLE}:{name}_tiny" for name in ("make", "text")}
NEEDS_GPU = "there is no CUDA device here"
PAGES = [page for page in doc_commands.PAGES if doc_commands.other_commands(page)]

CELL = """
import torch
from examples_gpt2 import make_tiny as make, text_tiny as text

class Cell(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = torch.nn.LSTM(16, 16, 1)
    def forward(self, x):
        return self.lstm(x)[0]

def function():
    return Cell().eval(), (torch.randn(2, 1, 16),)
"""


@functools.cache
def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def environment() -> dict[str, str]:
    plain = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST", "COLUMNS"))}
    # Other processes run beside these: a rank that takes all cores waits for itself.
    return plain | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}


def shell(words: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """A command in a process of its own."""
    module = {"partita": ["partita"], "torchrun": ["torch.distributed.run"]}[words[0]]
    return subprocess.run(
        [sys.executable, "-m", *module, *words[1:]], cwd=folder, env=environment(), text=True,
        capture_output=True, timeout=LONGEST_S, check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip


@functools.cache
def readers_own() -> Path:
    """A folder with the files that pages take for granted; made once."""
    folder = Path(tempfile.mkdtemp(prefix="partita-docs-"))
    data, placement = ROOT / "tests" / "data", ROOT / "examples" / "placement"
    for name, source in {
        "rows.json": data / "validate" / "rows.json",
        "ROWS.json": data / "validate" / "rows.json",
        "problem.json": data / "placement" / "alexnet-malvik.json",
        "FILE.toml": placement / "tiny.toml",
        "joint.json": data / "joint" / "alexnet.json",
        "config.json": data / "hf" / "qwen2.5-0.5b.json",
        "resnet50.json": placement / "resnet50.json",
        "malvik4.json": placement / "malvik4.json",
        "alexnet.json": placement / "alexnet.json",  # FILE.toml names these two
        "malvik.json": placement / "malvik.json",
        "examples_gpt2.py": ROOT / "examples" / "gpt2_two_ranks.py",
    }.items():
        shutil.copy(source, folder / name)
    (folder / "prices.toml").write_text("[per_hour]\nA100 = 2.0\nH100 = 3.5\n")
    for name in ("file.py", "model.py"):
        (folder / name).write_text(CELL)
    for line in (
        "partita plan examples_gpt2.py:make_tiny --cluster 2xA100 --pin pp=2 -o plan.json",
        "torchrun --standalone --nproc-per-node 2 -m partita run plan.json"
        " --data examples_gpt2.py:text_tiny --steps 5 --device cpu --trace trace",
        "partita compare-trace plan.json trace --calibration measured.json",
        "partita plan examples_gpt2.py:make_tiny --cluster 2xA100 --pin pp=1 --pin micro-batches=1"
        " -o other.json",
        "partita place alexnet --cluster malvik --time-limit 1 -o placement.json",
        "partita schedule 1f1b --devices 2 --microbatches 4 --csv FILE.csv",
    ):
        made = shell(line.split(), folder)
        assert made.returncode == 0, f"{line}\n{made.stderr}"
    toml = shell(["partita", "clusters", "2xA100", "--toml"], folder).stdout
    (folder / "lab.toml").write_text(toml)
    shutil.copy(folder / "plan.json", folder / "PLAN.json")
    (folder / "timeline.json").write_text(_timeline())
    (folder / "profile.json").write_text(json.dumps({"traceEvents": _events()}))
    return folder


def _timeline() -> str:
    import partita

    return partita.simulate("alexnet", "2xA100", batch=8).timeline.to_json().decode()


def _events() -> list[dict[str, object]]:
    """What torch.profiler writes of two steps with one kernel each."""
    rows = [
        ("ProfilerStep#1", "user_annotation", 0, 100),
        ("sgemm", "kernel", 10, 60),
        ("ProfilerStep#2", "user_annotation", 100, 100),
        ("sgemm", "kernel", 110, 60),
    ]
    return [
        {"ph": "X", "name": name, "cat": cat, "ts": ts, "dur": dur, "pid": 0, "tid": 0}
        for name, cat, ts, dur in rows
    ]


SAVED = {"flow.md": "placement/alexnet-malvik.json", "partition.md": "partition/mlp.json"}


def prepare(folder: Path, page: Path) -> None:
    shutil.copytree(readers_own(), folder, dirs_exist_ok=True)
    if page.name in SAVED:  # the problem that the page has been speaking of
        shutil.copy(ROOT / "tests" / "data" / SAVED[page.name], folder / "FILE")
    for name in doc_commands.LINKED:
        (folder / name).symlink_to(ROOT / name)


def adapted(words: tuple[str, ...], folder: Path, page: str = "") -> list[str]:
    """The words with what a reader would put for MODEL, a short search, and room for its files.

    The README's run is taken at its word: GPT-2 small. Elsewhere the example's tiny model is run.
    """
    usual = STAND_INS if page == "README.md" else STAND_INS | TINY
    asked = [usual.get(word, word) for word in words]
    asks = asked[asked.index("partita") + 1 :]
    has = {name for p in doc_commands.command_of(tuple(asks)).params for name in p.opts}
    if "--time-limit" in has and "--time-limit" not in asked and "--help" not in asked:
        asked += ["--time-limit", str(TIME_LIMIT_S)]
    if asks[0] == "run" and "--help" not in asked:
        asked = few_steps(asked)
    for option, name in itertools.pairwise(asked):
        written = folder / name
        if option not in OUTPUTS or not written.exists():
            continue
        if option == "--calibration" and asks[0] != "compare-trace":
            continue  # read, not written
        if written.is_dir():
            shutil.rmtree(written)
        else:
            written.unlink()
    return asked


def few_steps(words: list[str]) -> list[str]:
    """As many steps as a trace of a run needs, or two."""
    if "--steps" in words:
        words[words.index("--steps") + 1] = "5"
        return words
    return [*words, "--steps", "2"]


def other_plan(folder: Path) -> None:
    """`other.json` for the model and machine of the `plan.json` that the page has made."""
    plan = json.loads((folder / "plan.json").read_text())
    model, cluster = plan["model"], plan["cluster"]["spec"]
    line = f"shard {model['spec']} --cluster {cluster} --batch {model['batch']}"
    done = shell(["partita", *line.split(), "-o", "other.json", "--force"], folder)
    assert done.returncode == 0, done.stderr


def run_one(command: doc_commands.Written, folder: Path, page: str) -> None:
    words = adapted(command.words, folder, page)
    asks = words[words.index("partita") + 1 :]
    if asks[0] == "diff":
        other_plan(folder)
    if asks[0] == "compare-trace" and command.is_spoken:  # of the run that its page speaks of
        shutil.copy(readers_own() / "plan.json", folder)
        shutil.copytree(readers_own() / "trace", folder / "trace", dirs_exist_ok=True)
    if asks[0] == "emit" and "--rank" in asks:  # for plans of one stage, of ops that it writes
        (folder / "plan.json").unlink()
        line = "partita shard gpt2@64 --cluster 2xA100 --batch 4 -o plan.json"
        made = shell(line.split(), folder)
        assert made.returncode == 0, made.stderr
    if asks[0] == "serve":
        serve(asks, folder)
        return
    if "--nnodes" in words:  # several machines
        done = shell(["partita", *asks], folder)
        assert done.returncode == 2, command.text
        assert re.search(r"start it with: torchrun --nproc-per-node \d+", done.stderr)
        return
    at = folder / asks[asks.index("--dask") + 1] if "--dask" in asks else None
    with nullcontext() if at is None else dask_cluster(at):
        done = shell(words, folder)
    if needs_gpu(asks) and not has_gpu():
        assert done.returncode == 2, f"{command.text}\n{done.stdout}"
        assert NEEDS_GPU in done.stderr, f"{command.text}\n{done.stderr}"
        return
    assert done.returncode == 0, f"{command.text}: {done.returncode}\n{done.stderr[-3000:]}"
    assert "Traceback" not in done.stderr, done.stderr[-3000:]
    assert done.stdout, command.text
    for option, name in itertools.pairwise(words):
        if option in OUTPUTS:
            assert (folder / name).exists(), f"{command.text}: no {name}"


@contextmanager
def dask_cluster(path: Path) -> Iterator[None]:
    """A scheduler with a worker, and the file that tells where it is."""
    from distributed import LocalCluster

    with LocalCluster(n_workers=1, threads_per_worker=1, dashboard_address=None) as cluster:
        path.write_text(json.dumps({"type": "Scheduler", "address": cluster.scheduler_address}))
        yield


def needs_gpu(asks: list[str]) -> bool:
    return (
        asks[0] == "accelerate"
        or (asks[0] == "streams" and "analytic" not in asks)
        or (asks[0] == "rtasks" and "--run" in asks)
    )


def serve(asks: list[str], folder: Path) -> None:
    """Started, asked for its page by the address it prints, ended by Ctrl-C."""
    if "--port" not in asks:  # pages are tested side by side
        asks = [*asks, "--port", "0"]
    process = subprocess.Popen(
        [sys.executable, "-m", "partita", *asks], cwd=folder, env=environment(), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        address = ""
        while not address:
            line = process.stdout.readline()
            assert line, process.stderr and process.stderr.read()
            address = next(iter(re.findall(r"http://127\.0\.0\.1:\d+/\S+", line)), "")
        with urllib.request.urlopen(address, timeout=30) as answer:
            assert b"<title>partita</title>" in answer.read()
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_of_a_page_runs(page, tmp_path):
    prepare(tmp_path, page)
    for line in doc_commands.commands(page):
        if not line.startswith("torchrun") and page.name != "tutorial.md":
            done = shell(adapted(tuple(line.split(" #")[0].split()), tmp_path), tmp_path)
            assert done.returncode == 0, f"{line}\n{done.stderr}"
    failed = []
    for command in doc_commands.other_commands(page):
        if command.is_whole:
            try:
                run_one(command, tmp_path, page.name)
            except (AssertionError, subprocess.TimeoutExpired, OSError) as error:
                failed.append(str(error))
    assert not failed, "\n\n".join(failed)
