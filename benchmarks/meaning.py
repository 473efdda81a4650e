"""Do plans mean what they say? Random plans and wrong programs, judged twice.

    python benchmarks/meaning.py [--plans 200] [--mutants 500] [--seed 0] [--models gpt,graphs]
                                 [--seconds 0] [--shared] [--json]

Random plans of small models of every family and of random graphs are lowered; the verifier follows
the program (layouts, partial sums, messages), the local runtime executes it on all ranks and
compares with the whole model. Both must be content. Then one communication of a right program is
removed, reordered or retargeted: where that changes numbers, the verifier must refuse it. Run it
from the root of the repository, whose tests it shares models, plans and mutants with.
"""

import argparse
import collections
import json
import platform
import random
import sys
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from partita.errors import PlanError
from partita.graph.record import Graph
from tests.lower.mutants import mutant
from tests.lower.random_graphs import random_graph, random_training
from tests.lower.random_plans import random_plan
from tests.run.local.plans import TOLERANCE, Trial, trial
from tests.run.local.small_models import LARGE_MODELS, MODELS

GRAPHS = "graphs"  # stands for a graph that is drawn anew
INFERENCE = 0.15  # of plans
MUTANTS_PER_PLAN = 6
# Lion takes the sign of a gradient: of one that cancels out it is a matter of rounding.
OPTIMIZERS = ("adamw", "sgd", "momentum", "rmsprop")


@dataclass
class Table:
    """What was counted; `findings` are sentences, with the seed that makes each again."""

    shared: bool = False  # are some stages on the devices of several others?
    plans: int = 0
    refused: int = 0
    wrong: int = 0
    crashed: int = 0
    impossible: int = 0  # no plan: the lowering says why
    mutants: collections.Counter[str] = field(default_factory=collections.Counter)
    changed: collections.Counter[str] = field(default_factory=collections.Counter)
    caught: collections.Counter[str] = field(default_factory=collections.Counter)
    findings: list[str] = field(default_factory=list)

    def note(self, what: str) -> None:
        """Keep a finding, and show it at once."""
        self.findings.append(what)
        print(what, file=sys.stderr, flush=True)


def model(name: str, draw: random.Random) -> Graph:
    """A forward or training graph."""
    forward = random_graph(draw) if name == GRAPHS else {**MODELS, **LARGE_MODELS}[name]()
    if draw.random() < INFERENCE:
        return forward
    return random_training(draw, forward, draw.choice(OPTIMIZERS))


def one_plan(name: str, seed: str, table: Table) -> tuple[Trial, random.Random] | None:
    """A random plan, judged; None if it cannot be trusted with mutants."""
    draw = random.Random(seed)
    table.plans += 1
    try:
        tried = trial(random_plan(draw, model(name, draw), shared=table.shared))
        refused, error = tried.refused(), tried.error()
    except PlanError as error:  # no plan, and lowering says why
        table.plans -= 1
        table.impossible += 1
        if "gives it no gradient" not in str(error):  # a parameter that one stage only reads
            table.crashed += 1
            table.note(f"{seed}: {error}")
        return None
    except Exception:
        table.crashed += 1
        table.note(f"{seed}: crash\n{traceback.format_exc(limit=-4)}")
        return None
    if refused:
        table.refused += 1
        table.note(f"{seed}: refused: {refused[0]}")
    if error > TOLERANCE:
        table.wrong += 1
        table.note(f"{seed}: numbers are {error:g} off")
    return None if refused or error > TOLERANCE else (tried, draw)


def one_mutant(right: Trial, draw: random.Random, seed: str, table: Table) -> None:
    """One communication made wrong: does it show, and who notices?"""
    made = mutant(draw, right.lowered.program)
    if made is None:
        return
    what, program = made
    kind = what.split()[0]
    table.mutants[kind] += 1
    if right.error(program) <= TOLERANCE:
        return
    table.changed[kind] += 1
    try:
        refused = right.refused(program)
    except Exception:  # caught, but not in words
        table.crashed += 1
        table.note(f"{seed}: {what}: the verifier crashes\n{traceback.format_exc(limit=-4)}")
        return
    if refused:
        table.caught[kind] += 1
    else:
        table.note(f"{seed}: mutant passes the verifier: {what}")


def run(args: argparse.Namespace) -> Table:
    """Plans of all models in turn, with some mutants of each, until there are enough of both."""
    names = (
        args.models.split(",") if args.models else [*MODELS, *[GRAPHS] * 8] * 3 + [*LARGE_MODELS]
    )
    table, number = Table(shared=args.shared), 0
    begun = time.monotonic()
    while table.plans < args.plans or table.changed.total() < args.mutants:
        if args.seconds and time.monotonic() - begun > args.seconds:
            break
        name = names[number % len(names)]
        seed = f"{name}/{args.seed}/{number}"
        number += 1
        judged = one_plan(name, seed, table)
        if judged is None or name in LARGE_MODELS:
            continue
        for _ in range(MUTANTS_PER_PLAN):
            if table.changed.total() < args.mutants:
                one_mutant(*judged, seed, table)
    return table


def show(table: Table, seconds: float, seed: int) -> None:
    """The table as text."""
    print(
        f"plans {table.plans}: refused wrongly {table.refused}, numbers wrong {table.wrong}, "
        f"crashes {table.crashed} ({table.impossible} more were no plans, and told why)"
    )
    if table.mutants:
        _show_mutants(table)
    print(f"{seconds:.0f} s of CPU, seed {seed}, {platform.processor() or platform.machine()}")


def _show_mutants(table: Table) -> None:
    print(f"{'mutants':10} {'tried':>7} {'changed':>8} {'refused':>8} {'runtime only':>13}")
    for kind in sorted(table.mutants):
        changed, caught = table.changed[kind], table.caught[kind]
        print(f"{kind:10} {table.mutants[kind]:7} {changed:8} {caught:8} {changed - caught:13}")
    changed, caught = table.changed.total(), table.caught.total()
    print(
        f"{'all':10} {table.mutants.total():7} {changed:8} {caught:8} {changed - caught:13}   "
        f"{caught / max(changed, 1):.2%} refused by the verifier"
    )


def main() -> None:
    """Run and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--plans", type=int, default=200)
    parser.add_argument("--mutants", type=int, default=500, help="that change numbers")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--models", default="", help="names; 'graphs' are random ones")
    parser.add_argument("--seconds", type=float, default=0.0, help="stop after so long")
    parser.add_argument("--shared", action="store_true", help="stages on devices of several others")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    args = parser.parse_args()
    torch.set_num_threads(1)  # the tensors are tiny, and threads that wait use CPU
    started = time.process_time()
    table = run(args)
    seconds = time.process_time() - started
    if args.json:
        counts = {
            "plans": table.plans, "refused": table.refused, "wrong": table.wrong,
            "crashed": table.crashed, "mutants": table.mutants, "changed": table.changed,
            "caught": table.caught, "cpu_s": seconds, "seed": args.seed,
        }  # fmt: skip
        print(json.dumps(counts))
    else:
        show(table, seconds, args.seed)


if __name__ == "__main__":
    main()
