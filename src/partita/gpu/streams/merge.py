"""Convolutions of one input as one convolution, and averages moved behind 1x1 convolutions.

merge     convolutions with the same input, window and everything before it, each with a weight
          of its own: one, with all output channels; what follows reads parts of it
reorder   conv1x1(average(x)) + b = average(conv1x1(x)) + b: the average then runs over fewer
          channels, and the convolution can be merged with its neighbours
"""

from collections import defaultdict
from dataclasses import replace

import torch

from partita.gpu.flow.place import EIGHT
from partita.gpu.flow.steps import Flow, Step, T, sorted_steps, used_steps


def reorder(flow: Flow) -> Flow:
    """Averages (of stride 1) before 1x1 convolutions that make fewer channels go behind them."""
    users, steps = flow.users(), flow.maker()
    shapes, dtypes = dict(flow.shapes), dict(flow.dtypes)
    for step in flow.steps:
        if not _goes_behind(step, users, steps, flow):
            continue
        pool = steps.pop(step.inputs[0])
        first = f"{step.name}.before_pool"
        shapes[first] = (
            shapes[pool.inputs[0]][0],
            shapes[step.name][1],
            *shapes[pool.inputs[0]][2:],
        )
        dtypes[first] = dtypes[step.name]
        steps[first] = replace(
            step, name=first, inputs=pool.inputs, bias="", relu=False, residual="", pre=pool.pre
        )
        steps[step.name] = replace(
            pool, name=step.name, inputs=(first,), pre="", bias=step.bias, relu=step.relu,
            residual=step.residual,
        )  # fmt: skip
    return replace(flow.with_steps(sorted_steps(steps.values())), shapes=shapes, dtypes=dtypes)


def _goes_behind(
    step: Step, users: dict[str, list[Step]], steps: dict[str, Step], flow: Flow
) -> bool:
    if step.kind != "conv" or step.window is None or not step.window.is_pixel or step.pre:
        return False
    if step.groups != 1:
        return False
    pool = steps.get(step.inputs[0])
    if pool is None or pool.kind != "avgpool" or len(users[pool.name]) != 1:
        return False
    plain = not (pool.relu or pool.residual or pool.bias) and pool.name not in flow.outputs
    fewer = flow.shapes[step.name][1] <= flow.shapes[pool.name][1]
    return plain and pool.include_pad and fewer


def merge(flow: Flow) -> Flow:
    """Convolutions of one input that may be one become one."""
    groups: dict[object, list[Step]] = defaultdict(list)
    for step in flow.steps:
        dense = step.kind == "conv" and step.groups == 1 and not step.residual
        if dense and flow.shapes[step.name][1] % EIGHT == 0:
            key = (step.inputs, step.window, step.pre, step.pre_scale, step.pre_shift)
            groups[key].append(step)
    flow = replace(flow, shapes=dict(flow.shapes), dtypes=dict(flow.dtypes))
    for group in groups.values():
        if len(group) > 1:
            flow = _merged(flow, group)
    return used_steps(flow)


def _merged(flow: Flow, group: list[Step]) -> Flow:
    # Those with a ReLU stand together, so that one range of channels has it; the one that begins a
    # concatenation comes last, so that the rest of that can follow it in memory.
    leads = {step.inputs[0] for step in flow.steps if step.kind == "cat"}
    group = sorted(group, key=lambda step: (step.relu, step.name in leads))
    name = "+".join(step.name for step in group)
    widths = [flow.shapes[step.name][1] for step in group]
    plain = sum(w for w, step in zip(widths, group, strict=True) if not step.relu)
    weight = torch.cat([flow.constants[step.weight] for step in group])
    bias = torch.cat([_bias(flow, step, width) for step, width in zip(group, widths, strict=True)])
    constants: dict[str, T] = {f"{name}.weight": weight, f"{name}.bias": bias}
    one = replace(
        group[0], name=name, weight=f"{name}.weight", bias=f"{name}.bias",
        relu=any(step.relu for step in group), relu_from=plain,
    )  # fmt: skip
    batch, _, height, width = flow.shapes[group[0].name]
    flow.shapes[name] = (batch, sum(widths), height, width)
    flow.dtypes[name] = flow.dtypes[group[0].name]
    steps = {step.name: step for step in flow.steps}
    begin = 0
    for step, wide in zip(group, widths, strict=True):
        steps[step.name] = Step(step.name, "part", (name,), begin=begin, end=begin + wide)
        begin += wide
    return flow.with_steps(sorted_steps([*steps.values(), one]), **constants)


def _bias(flow: Flow, step: Step, width: int) -> T:
    if step.bias:
        return flow.constants[step.bias]
    return torch.zeros(
        width, dtype=flow.dtypes[step.name], device=flow.constants[step.weight].device
    )
