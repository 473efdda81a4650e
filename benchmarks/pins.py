"""Is every pin and every ban of `partita plan` obeyed, or refused in words?

    python benchmarks/pins.py                      # schedules x pp x vpp, degrees, pairs, bans
    python benchmarks/pins.py --model gpt2@128 --machine 8xV100 --batch 16 --time-limit 2

An answer is `obeyed` (the file has what was pinned and nothing that was forbidden), `refused` (an
error that says what to change, or no plan that fits), or `wrong`. Exit code 1 if any is wrong.
The file is read as JSON, by other code than what makes or checks plans.
"""

import argparse
import itertools
import json
import sys
import time
from collections import Counter
from typing import Any

import partita
from partita.errors import PartitaError
from partita.schedules.named import NAMED
from partita.search.base import Stop

Plan = dict[str, Any]


def decided(plan: Plan) -> dict[str, set[str]]:
    """What a plan's file says of each decision: one value, or several where stages differ."""
    stages = plan["stages"]
    groups = [tuple(stage["mesh"]["devices"]) for stage in stages]
    schedule = plan["schedule"]
    micro = schedule["num_microbatches"]
    zero = {str(split["zero"]) for stage in stages for split in stage["splits"]}
    recompute = {stage["checkpointing"] for stage in stages}
    if "selective" in recompute:  # a stage may have nothing that is cheap to run again
        recompute.discard("none")
    return {
        "pp": {str(len(set(groups)))},
        "vpp": {str(groups.count(group)) for group in groups},
        "micro-batches": {str(micro)},
        "schedule": {schedule["name"] if len(set(groups)) > 1 else "of one stage"},
        "recompute": recompute,
        "zero": zero - {"0"} or {"0"},
        "mesh": {"x".join(str(axis["size"]) for axis in s["mesh"]["axes"]) for s in stages},
        "execution": {plan["model"].get("execution", "graph")},
    }


def faults(plan: Plan, pins: list[str], bans: list[str]) -> list[str]:
    """What was asked of a plan and is not so."""
    said = decided(plan)
    wrong = []
    for text in pins:
        key, _, value = text.partition("=")
        if key in said and said[key] != {value}:
            wrong.append(f"pinned {text}, and it is {' and '.join(sorted(said[key]))}")
    for text in bans:
        key, _, value = text.partition("=")
        if key in said and value in said[key]:
            wrong.append(f"forbidden {text}, and it is so")
    return wrong


def questions() -> list[tuple[list[str], list[str]]]:
    """Pins and bans: every schedule with stages, alone and in pairs that may contradict."""
    asked: list[tuple[list[str], list[str]]] = []
    for name, pp, vpp in itertools.product(NAMED, (None, 1, 2, 4, 8), (None, 1, 2, 3, 4)):
        pins = [f"schedule={name}"]
        pins += [f"pp={pp}"] if pp else []
        pins += [f"vpp={vpp}"] if vpp else []
        asked.append((pins, []))
    values = {
        "pp": (2, 3), "vpp": (2,), "dp": (2, 8), "tp": (2, 4), "cp": (2,), "ep": (2,),
        "sp": ("yes", "no"), "micro-batches": (1, 4), "recompute": ("none", "selective", "full"),
        "mesh": ("2", "2x2", "8"), "zero": (0, 1, 3), "hsdp": (2,), "execution": ("eager",),
        "schedule": ("1f1b", "gpipe"), "grad-dtype": ("f32",), "shape": ("m", "line"),
    }  # fmt: skip
    single = [f"{key}={value}" for key, some in values.items() for value in some]
    asked += [([text], []) for text in single]
    asked += [([], [text]) for text in single]
    asked += [([a, b], []) for a, b in itertools.combinations(single, 2)]
    asked += [([a], [b]) for a, b in itertools.product(("pp=2", "schedule=1f1b"), single)]
    asked += [([], [f"schedule={name}" for name in (*NAMED, "searched")])]
    asked += [(["pp=2"], [f"schedule={name}"]) for name in (*NAMED, "searched")]
    return asked


def answered(given: argparse.Namespace, pins: list[str], bans: list[str]) -> tuple[str, str]:
    """What became of a question, and the words for it."""
    stop = Stop(time_s=given.time_limit, gap=0.9)
    try:
        answer = partita.plan(
            given.model, given.machine, batch=given.batch, pin=pins, forbid=bans, stop=stop
        )
    except PartitaError as error:
        return "refused", str(error)
    except Exception as error:
        return "wrong", repr(error)
    if answer.plan is None:
        return "refused", "no plan fits"
    made = json.loads(answer.plan.to_json())
    wrong = faults(made, pins, bans)
    return ("wrong", "; ".join(wrong)) if wrong else ("obeyed", str(answer.plan))


def main() -> int:
    """Ask everything; print what is wrong, and counts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="gpt2@64")
    parser.add_argument("--machine", default="8xV100")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--time-limit", type=float, default=1.0)
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("--every", type=int, default=1, help="ask one of so many")
    given = parser.parse_args()
    counts: Counter[str] = Counter()
    for pins, bans in questions()[:: given.every]:
        kind, why = answered(given, pins, bans)
        counts[kind] += 1
        if kind == "wrong" or given.verbose:
            print(f"{kind:8} pin {' '.join(pins)} forbid {' '.join(bans)}: {why}", flush=True)
    print(f"{given.model} on {given.machine}, batch {given.batch}: {dict(counts)}, "
          f"{time.process_time():.0f} s of CPU")  # fmt: skip
    return int(counts["wrong"] > 0)


if __name__ == "__main__":
    sys.exit(main())
