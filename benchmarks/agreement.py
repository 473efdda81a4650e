"""Do all commands give the same number for the same question?

    python benchmarks/agreement.py                 # models x machines, feasible ones and others
    python benchmarks/agreement.py --time-limit 10 --only llama

Every plan is asked for by `plan` (or `shard`, `partition`) and looked at by `simulate`, `report`,
`explain`, `diff` and `compare`, as JSON and as text. Step, memory, MFU, bubble, tokens, lower bound
and the number of operations must be the same wherever they stand under the same name; what does not
fit must be told in the same words by all. Exit code 1 if any two disagree.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from partita import units
from partita.cli import partita

CASES = (
    ("gpt2", "4xA100", 16, ()),
    ("gpt2", "4xA100", 16, ("--pin", "pp=2")),
    ("gpt2", "4xA100", 16, ("--pin", "pp=1", "--pin", "micro-batches=4")),
    ("gpt2-medium", "4xV100+8xP100", 24, ()),
    ("bert-large", "2x8xV100", 32, ("--pin", "zero=3")),
    ("llama-7b", "8xH100", 32, ("--pin", "tp=4", "--dtype", "bf16")),
    ("llama-7b", "8xH100", 8, ("--infer", "--dtype", "bf16")),
    ("llama-7b", "8xH100", 8, ("--decode", "--cache", "1024", "--dtype", "bf16")),
    ("llama-7b", "2xV100", 8, ()),
    ("llama-2-70b", "8xH100", 16, ("--dtype", "bf16")),
    ("resnet50", "8xA100", 64, ()),
    ("alexnet", "1xP100", 32, ()),
    ("inception_v3", "4xP100", 16, ("--infer",)),
    ("t5-small", "4xA100", 16, ("--pin", "pp=4")),
    ("vit-l16", "4xV100", 32, ("--max-memory", "8GB")),
    ("squeezenet1_1", "2xV100+2xP100", 32, ("--pin", "schedule=gpipe")),
)  # fmt: skip
NAMES = ("step_s", "mfu", "bubble", "tokens", "lower_bound_s", "fits", "cluster", "model")


class Asked:
    """One plan, and what every command says of it."""

    def __init__(self, time_limit: float) -> None:
        self.time_limit = time_limit
        self.wrong: list[str] = []
        self.said: dict[str, dict[str, Any]] = {}  # name -> command -> value

    def run(self, *words: str, codes: tuple[int, ...] = (0,)) -> str:
        """What a command writes."""
        result = CliRunner().invoke(partita, list(words))
        if result.exit_code not in codes:
            self.wrong.append(f"{' '.join(words)}: exit code {result.exit_code}: {result.output}")
        return str(result.stdout)

    def tell(self, command: str, name: str, value: Any) -> None:
        """A number that a command gives under a name."""
        if value is not None:
            self.said.setdefault(name, {})[command] = value

    def disagreements(self) -> list[str]:
        """Names for which two commands have different numbers."""
        told = []
        for name, by_command in self.said.items():
            values = list(by_command.values())
            if any(not _same(value, values[0]) for value in values[1:]):
                told.append(f"{name}: " + ", ".join(f"{c} {v}" for c, v in by_command.items()))
        return [*self.wrong, *told]


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return abs(one - other) <= 1e-9 * max(abs(one), abs(other))
    return bool(one == other)


def look(asked: Asked, model: str, machine: str, batch: int, more: tuple[str, ...]) -> bool:
    """Ask all commands about one plan; is there one?"""
    limit = ("--time-limit", str(asked.time_limit))
    question = (model, "--cluster", machine, "--batch", str(batch), *more)
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "plan.json")
        made = json.loads(asked.run("plan", *question, *limit, "-o", path, "--json", codes=(0, 1)))
        if made["solution"] is None:
            advice(asked, question, limit, made)
            return False
        asked.tell("plan", "step_s", made["solution"]["step_s"])
        asked.tell("plan", "bubble", made["solution"].get("bubble"))
        asked.tell("plan", "objective", made["objective"])
        asked.tell("plan", "lower_bound_s", made["lower_bound"])
        told = {
            c: json.loads(asked.run(c, path, "--json")) for c in ("simulate", "report", "explain")
        }
        for command, own in told.items():
            for name in NAMES:
                asked.tell(command, name, own.get(name))
        memory = told["explain"]["memory"]
        asked.tell("explain", "peak", memory["peak_bytes"])
        asked.tell("explain", "objective", told["explain"]["objective_s"])
        same = json.loads(asked.run("diff", path, path, "--json"))
        figures = {figure["name"]: figure["first"] for figure in same["figures"]}
        asked.tell("diff", "step_s", figures["step"])
        asked.tell("diff", "bubble", figures["bubble"])
        asked.tell("diff", "mfu", figures["MFU"])
        asked.tell("diff", "peak", figures["peak memory"])
        if json.loads(asked.run("verify", path, "--json"))["violations"]:
            asked.wrong.append("verify finds violations")
        texts(asked, path, told["report"])
        return True


def texts(asked: Asked, path: str, told: dict[str, Any]) -> None:
    """What people read must be what machines read, rounded."""
    step = units.seconds(told["step_s"])
    for command in ("simulate", "report", "explain"):
        text = asked.run(command, path)
        line = next((each for each in text.splitlines() if each.startswith("step ")), "")
        if f" {step}," not in line:
            asked.wrong.append(f"{command} does not say {step}: {line}")
        if f"MFU {told['mfu']:.0%}" not in text:
            asked.wrong.append(f"{command} does not say MFU {told['mfu']:.0%}")
        head = text.splitlines()[0]
        asked.tell(command, "first line", head)


def advice(
    asked: Asked, question: tuple[str, ...], limit: tuple[str, ...], made: dict[str, Any]
) -> None:
    """What would help where nothing fits: the same for `plan`, `shard` and `compare`."""
    words = [part for part in made["why"].split("; ") if "enough" in part]
    asked.tell("plan", "advice", tuple(sorted(part.split(": ")[-1] for part in words)))
    if not words or {"--infer", "--decode", "--pin", "--max-memory"} & set(question):
        return  # the time was up, or what `shard` is not asked for
    shard = json.loads(asked.run("shard", *question, "--json", codes=(0, 1)))
    told = [part for part in shard["why"].split("; ") if "enough" in part]
    asked.tell("shard", "advice", tuple(sorted(part.split(": ")[-1] for part in told)))


def main() -> int:
    """Ask about every case; print what disagrees."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--time-limit", type=float, default=4.0)
    parser.add_argument("--only", default="", help="models whose name has this")
    given = parser.parse_args()
    wrong = 0
    cases = [case for case in CASES if given.only in case[0]]
    for model, machine, batch, more in cases:
        asked = Asked(given.time_limit)
        found = look(asked, model, machine, batch, more)
        bad = asked.disagreements()
        wrong += bool(bad)
        what = "agree" if found else "agree that nothing fits"
        print(
            f"{model} {machine} batch {batch} {' '.join(more)}: {'; '.join(bad) or what}",
            flush=True,
        )
    print(f"{wrong} of {len(cases)} disagree, {time.process_time():.0f} s of CPU")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
