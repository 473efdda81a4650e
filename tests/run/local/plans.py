"""A plan lowered, verified and executed, and how far its numbers are from the whole model's."""

import functools
from dataclasses import dataclass, replace
from unittest import mock

from partita.capture.eager import RULES
from partita.engine import run
from partita.errors import ProgramError
from partita.lower import lower_plan
from partita.run.local.execute import execute, plan_routing, relative_error
from partita.run.local.reference import example, reference
from partita.timeline import Timeline
from partita.verify import verify_meaning, verify_program, verify_timeline

TOLERANCE = 1e-9
TRIES = 50
DISPATCH = RULES["moe_dispatch"]


@dataclass(frozen=True)
class Trial:
    """A lowered plan with the numbers of the whole model, against which its programs are held."""

    plan: object
    lowered: object
    timeline: Timeline
    example: object
    expected: object

    def refused(self, program=None):
        """What the verifier says against the program, or another one in its place."""
        program = program or self.lowered.program
        timeline = Timeline(program, self.timeline.start, self.timeline.end)
        return (
            *verify_meaning(program, self.plan.graph, self.lowered.stages, self.plan.schedule),
            *verify_program(program),
            *verify_timeline(_without_caps(program), timeline),
        )

    def error(self, program=None):
        """How far outputs, gradients and updated parameters are off; inf where it cannot run."""
        try:
            outcome = execute(
                program or self.lowered.program, self.plan.graph, self.lowered.stages,
                self.plan.schedule.num_microbatches, self.example,
            )  # fmt: skip
        except ProgramError:
            return float("inf")
        pairs = list(zip(outcome.outputs, self.expected.outputs, strict=True))
        pairs += [
            (outcome.gradients, self.expected.gradients),
            (outcome.updated, self.expected.updated),
        ]
        return max(outcome.replicas, *(relative_error(a, b) for a, b in pairs))


def _without_caps(program):
    return replace(program, memories=tuple(replace(m, capacity=None) for m in program.memories))


def trial(plan, seed=0):
    """Lower a plan, and run the whole model."""
    lowered = lower_plan(plan.stages, plan.schedule, plan.graph, plan.cluster, run)
    given, expected = _smooth_example(plan, seed)
    return Trial(plan, lowered, run(lowered.program), given, expected)


def _smooth_example(plan, seed):
    """Inputs and parameters, and what the whole model makes of them.

    Where two tokens want an expert equally (they are the same word), rounding decides which of
    them it takes: such an example says nothing, and the next is drawn.
    """
    for number in range(seed, seed + TRIES):
        given, ties = example(plan.graph, number), []
        dispatch = functools.partial(_dispatch, ties)
        with mock.patch.dict(RULES, {"moe_dispatch": dispatch}):
            expected = _whole_model(plan, given)
        if not ties:
            return given, expected
    raise AssertionError(f"{TRIES} examples with ties between tokens")


def _dispatch(ties, module, call, x, gates):
    """The rule for dispatch; notes where the last token taken is no better than the next."""
    flat, room = gates.flatten(0, -2), call.outputs[0][1]
    if 0 < room < len(flat):
        best = flat.detach().topk(room + 1, dim=0).values
        last, following = best[room - 1], best[room]
        if bool(((last > 0) & (last - following < TOLERANCE)).any()):
            ties.append(call)
    return DISPATCH(module, call, x, gates)


def _whole_model(plan, given):
    count = plan.schedule.num_microbatches
    groups = plan_routing(plan.graph, plan.stages, count)
    return reference(plan.graph, given.inputs, given.parameters, count, groups=groups)
