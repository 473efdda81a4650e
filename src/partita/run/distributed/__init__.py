"""Running a plan on torch.distributed: every rank walks its part of the program that was simulated.

launch       the world, one rank per device of the plan
preflight    what is refused before the first step
comm         process groups, messages, collectives
boxes        which part of a tensor a rank holds, and what it sends to whom
model        the user's module as functions of single ops and of segments
held         parameters, buffers and gradients of a rank
opwise       a block op by op, with the collectives between ops
segments     a block as one or several segments under autograd, where nothing is sent inside
walk         the tasks of a rank, in the order of the program
engine       what users hold: step, full_state_dict, save, load
checkpoints  what is written and read
faults       one message that names rank, task and cause
"""
