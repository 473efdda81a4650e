"""Is every pin and every ban of `partita plan` obeyed, or refused in words?

    python benchmarks/pins.py                      # schedules x pp x vpp, degrees, pairs, bans
    python benchmarks/pins.py --degrees            # dp, tp, cp, ep, sp alone, in pairs, with others
    python benchmarks/pins.py --model gpt2@128 --machine 8xV100 --batch 16 --time-limit 2

An answer is `obeyed` (the file has what was pinned and nothing that was forbidden), `refused` (an
error that says what to change, or no plan that fits), or `wrong`. Exit code 1 if any is wrong.
The file is read as JSON, by other code than what makes or checks plans. Degrees (dp, tp, cp, ep,
sp) are read off what the model's products split along each axis: the letters of docs/kinds.md.
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
Kinds = dict[str, str]  # op -> kind
# What a letter of a product's loops stands for, read in docs/kinds.md.
LETTERS = {
    "linear": {"b": "dp", "s": "cp", "t": "cp", "n": "tp", "k": "tp"},
    "attention": {"b": "dp", "s": "cp", "t": "cp", "h": "tp", "g": "tp"},
    "matmul": {"b": "dp", "h": "tp", "g": "tp"},
    "expert_linear": {"c": "dp", "e": "ep", "n": "tp", "k": "tp"},
}
NORMS = ("layer_norm", "rms_norm")
ODD = 1 / 6  # of the products along an axis: the output layer may split something else


def degrees(stage: Plan, kinds: Kinds) -> dict[str, str]:
    """How far one stage is split for what, and whether its norms are split along tp by sequence.

    Of a stage without products (a loss alone) nothing is said.
    """
    if not any(kinds.get(split["op"]) in LETTERS for split in stage["splits"]):
        return {}
    sizes = dict.fromkeys(("dp", "tp", "cp", "ep"), 1)
    norms: set[bool] = set()
    for place, axis in enumerate(stage["mesh"]["axes"]):
        if axis["size"] == 1:
            continue
        used: Counter[str] = Counter()
        for split in stage["splits"]:
            letters = LETTERS.get(kinds.get(split["op"], ""), {})
            used[letters.get(split["dims"][place], "")] += 1
        del used[""]
        most = {name for name, count in used.items() if count > ODD * used.total()}
        if used["ep"] and most <= {"ep", "dp"}:
            most = {"ep"}
        if len(most) == 1 or most == {"tp", "ep"}:  # heads and experts over the same devices
            for name in most:
                sizes[name] *= axis["size"]
            if used["tp"] > used.total() / 2:
                norms |= {
                    split["dims"][place] in ("s", "t")
                    for split in stage["splits"]
                    if kinds.get(split["op"]) in NORMS
                }
    sp = "several" if len(norms) > 1 else "yes" if True in norms else "no"
    return {**{name: str(size) for name, size in sizes.items()}, "sp": sp}


def decided(plan: Plan, kinds: Kinds) -> dict[str, set[str]]:
    """What a plan's file says of each decision: one value, or several where stages differ."""
    stages = plan["stages"]
    groups = [tuple(stage["mesh"]["devices"]) for stage in stages]
    schedule = plan["schedule"]
    micro = schedule["num_microbatches"]
    zero = {str(split["zero"]) for stage in stages for split in stage["splits"]}
    recompute = {stage["checkpointing"] for stage in stages}
    split = [degrees(stage, kinds) for stage in stages]
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
        **{key: {own[key] for own in split if own} for key in ("dp", "tp", "cp", "ep", "sp")},
    }


def faults(plan: Plan, pins: list[str], bans: list[str], kinds: Kinds) -> list[str]:
    """What was asked of a plan and is not so."""
    said = decided(plan, kinds)
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


def degree_questions() -> list[tuple[list[str], list[str]]]:
    """Degrees alone, in pairs, with stages and schedules, and forbidden."""
    values = {"dp": (1, 2, 4, 8), "tp": (1, 2, 4, 8), "cp": (1, 2, 4), "ep": (1, 2, 4),
              "sp": ("yes", "no")}  # fmt: skip
    single = [f"{key}={value}" for key, some in values.items() for value in some]
    others = ("pp=2", "pp=1", "micro-batches=4", "zero=3", "schedule=1f1b", "recompute=full")
    pairs = itertools.combinations(single, 2)
    asked = [([text], list[str]()) for text in single]
    asked += [([a, b], []) for a, b in pairs if a[:2] != b[:2]]
    asked += [([a, b], []) for a, b in itertools.product(single, others)]
    asked += [([], [text]) for text in single]
    asked += [([a], [b]) for a, b in itertools.product(("pp=2", "tp=2", "zero=1"), single)]
    return asked


def answered(
    given: argparse.Namespace, pins: list[str], bans: list[str], kinds: Kinds
) -> tuple[str, str]:
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
    wrong = faults(made, pins, bans, kinds)
    plan = str(answer.plan)
    return ("wrong", f"{'; '.join(wrong)} ({plan})") if wrong else ("obeyed", plan)


def main() -> int:
    """Ask everything; print what is wrong, and counts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="gpt2@64")
    parser.add_argument("--machine", default="8xV100")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--time-limit", type=float, default=1.0)
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("--degrees", action="store_true", help="ask for dp, tp, cp, ep, sp")
    parser.add_argument("--every", type=int, default=1, help="ask one of so many")
    given = parser.parse_args()
    counts: Counter[str] = Counter()
    asked = degree_questions() if given.degrees else questions()
    graph = partita.model(given.model, batch=given.batch)
    kinds = {op.name: op.kind for op in graph.ops}
    for pins, bans in asked[:: given.every]:
        kind, why = answered(given, pins, bans, kinds)
        counts[kind] += 1
        if kind == "wrong" or given.verbose:
            print(f"{kind:8} pin {' '.join(pins)} forbid {' '.join(bans)}: {why}", flush=True)
    print(f"{given.model} on {given.machine}, batch {given.batch}: {dict(counts)}, "
          f"{time.process_time():.0f} s of CPU")  # fmt: skip
    return int(counts["wrong"] > 0)


if __name__ == "__main__":
    sys.exit(main())
