"""Passes over steps that leave the result as it is and launch less.

    once        equal steps become one
    norms       a norm after a convolution goes into its weights
    sums        sums of sums become one sum with factors
    relus       a ReLU goes into what makes its input, or else into all that read it
    residuals   a sum of two goes into the convolution or pool that makes one of them
    pixels      a strided average over single pixels goes into the 1x1 convolution after it
    cats        concatenations of concatenations become one

Each takes a flow and gives one; a pass that finds nothing gives the same flow.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace

import torch

from partita.gpu.flow.steps import (
    CONVS,
    WINDOWS,
    Flow,
    Step,
    T,
    Window,
    sorted_steps,
    used_steps,
)

Pass = Callable[[Flow], Flow]


def fold_norms(flow: Flow) -> Flow:
    """What every baseline has: norms in the weights, nothing else changed."""
    return norms(flow)


def fold(flow: Flow) -> Flow:
    """All passes, in the order in which they help each other."""
    for each in PASSES:
        flow = used_steps(each(flow))
    return flow


def once(flow: Flow) -> Flow:
    """Equal steps become one; random ones stay apart."""
    seen: dict[Step, str] = {}
    instead: dict[str, str] = {}
    steps = []
    for step in flow.steps:
        for old in step.uses:
            if old in instead:
                step = step.renamed(old, instead[old])
        random = step.target in flow.random_ops
        try:
            first = step.name if random else seen.setdefault(replace(step, name=""), step.name)
        except TypeError:  # an argument of a call that cannot be compared
            first = step.name
        if first == step.name or step.name in flow.outputs:
            steps.append(step)
        else:
            instead[step.name] = first
    return flow.with_steps(steps)


def norms(flow: Flow) -> Flow:
    """Scale and shift after a convolution (or a concatenation of some) go into the weights."""
    users, made = flow.users(), flow.maker()
    steps: dict[str, Step] = {step.name: step for step in flow.steps}
    constants: dict[str, T] = dict(flow.constants)
    instead: dict[str, str] = {}
    for step in flow.steps:
        if not _is_norm(step):
            continue
        source = step.inputs[0]
        scale, shift = constants[step.scale], constants[step.shift]
        targets = _scalable(source, made, users, flow)
        if targets is None:
            continue
        begin = 0
        for target in targets:
            width = flow.shapes[target.name][1]
            some = slice(begin, begin + width)
            steps[target.name] = _scaled(steps[target.name], scale[some], shift[some], constants)
            begin += width
        if step.relu:
            steps[step.name] = replace(step, scale="", shift="")
        else:
            del steps[step.name]
            instead[step.name] = source
    return _redirected(replace(flow, constants=constants), steps.values(), instead)


def _is_norm(step: Step) -> bool:
    return step.kind == "combine" and bool(step.scale) and step.factors == (1.0,)


def _scalable(
    name: str, made: dict[str, Step], users: dict[str, list[Step]], flow: Flow
) -> list[Step] | None:
    """The convolutions whose outputs these channels are, if nobody else reads them."""
    step = made.get(name)
    if step is None or len(users[name]) != 1 or name in flow.outputs or step.relu or step.residual:
        return None
    if step.kind in CONVS:
        return [step]
    if step.kind == "cat" and len(set(step.inputs)) == len(step.inputs):
        parts = [_scalable(each, made, users, flow) for each in step.inputs]
        if all(part is not None for part in parts):
            return [each for part in parts for each in part or ()]
    return None


def _scaled(step: Step, scale: T, shift: T, constants: dict[str, T]) -> Step:
    weight = constants[step.weight]
    wide = weight.double() * scale.double().view(-1, 1, 1, 1)
    bias = constants[step.bias].double() if step.bias else torch.zeros_like(scale).double()
    name_w, name_b = f"{step.name}.folded_weight", f"{step.name}.folded_bias"
    constants[name_w] = wide.to(weight.dtype)
    constants[name_b] = (bias * scale.double() + shift.double()).to(weight.dtype)
    return replace(step, weight=name_w, bias=name_b)


def sums(flow: Flow) -> Flow:
    """A sum of sums is one sum, the factors multiplied; equal terms are added up."""
    users = flow.users()
    steps: dict[str, Step] = {}
    for step in flow.steps:
        if step.kind == "combine":
            step = _flattened(step, steps, users, flow)
        steps[step.name] = step
    return flow.with_steps(steps.values())


MOST_TERMS = 6  # what the kernel takes


def _flattened(
    step: Step, steps: dict[str, Step], users: dict[str, list[Step]], flow: Flow
) -> Step:
    terms: dict[str, float] = {}
    for name, factor in zip(step.inputs, step.factors, strict=True):
        inner = steps.get(name)
        opened = inner is not None and _is_plain_sum(inner) and len(users[name]) == 1
        if inner is None or not opened or name in flow.outputs:
            terms[name] = terms.get(name, 0.0) + factor
            continue
        for each, part in zip(inner.inputs, inner.factors, strict=True):
            terms[each] = terms.get(each, 0.0) + factor * part
    if len(terms) > MOST_TERMS:
        return step
    return replace(step, inputs=tuple(terms), factors=tuple(terms.values()))


def _is_plain_sum(step: Step) -> bool:
    return step.kind == "combine" and not step.relu and not step.scale and not step.residual


def pool_factors(flow: Flow) -> Flow:
    """A factor after an average goes into the average."""
    users, steps = flow.users(), flow.maker()
    instead = {}
    for step in flow.steps:
        if not _is_plain_sum(step) or len(step.inputs) != 1:
            continue
        source = steps.get(step.inputs[0])
        if source is None or source.name in flow.outputs or len(users[source.name]) != 1:
            continue
        if source.kind == "avgpool" and not (source.relu or source.residual or source.bias):
            steps[source.name] = replace(source, factor=source.factor * step.factors[0])
            del steps[step.name]
            instead[step.name] = source.name
    return _redirected(flow, steps.values(), instead)


def relus_after(flow: Flow) -> Flow:
    """A ReLU goes into the step that makes its input, if nobody else reads that."""
    users, steps = flow.users(), flow.maker()
    instead: dict[str, str] = {}
    for step in flow.steps:
        if not _is_relu(step):
            continue
        source = steps.get(instead.get(step.inputs[0], step.inputs[0]))
        if source is None or source.kind not in (*WINDOWS, "combine") or source.relu:
            continue
        if len(users[step.inputs[0]]) != 1 or source.name in flow.outputs:
            continue
        steps[source.name] = replace(source, relu=True)
        del steps[step.name]
        instead[step.name] = source.name
    return _redirected(flow, steps.values(), instead)


def _is_relu(step: Step) -> bool:
    return _is_one(step) and step.relu and not step.scale


def _is_one(step: Step) -> bool:
    return step.kind == "combine" and step.factors == (1.0,) and not step.residual


def pre_ops(flow: Flow) -> Flow:
    """A ReLU, or a norm with or without one, goes into all windows that read it."""
    users, steps = flow.users(), flow.maker()
    instead: dict[str, str] = {}
    for step in flow.steps:
        if not _is_one(step) or step.name in flow.outputs or not (step.relu or step.scale):
            continue
        readers = [steps[user.name] for user in users[step.name]]
        kinds = ("conv",) if step.scale else (*CONVS, "avgpool")
        if not readers or any(
            reader.kind not in kinds or reader.pre or reader.residual == step.name
            for reader in readers
        ):
            continue
        if step.scale and len(readers) > 2:
            continue  # better worked out once
        what = ("affine_relu" if step.relu else "affine") if step.scale else "relu"
        for reader in readers:
            steps[reader.name] = replace(
                reader, pre=what, pre_scale=step.scale, pre_shift=step.shift
            )
        del steps[step.name]
        instead[step.name] = step.inputs[0]
    return _redirected(flow, steps.values(), instead)


def residuals(flow: Flow) -> Flow:
    """A sum of two goes into the window that makes one of them, if nobody else reads that."""
    users, steps = flow.users(), flow.maker()
    instead: dict[str, str] = {}
    for step in flow.steps:
        if step.kind != "combine" or step.factors != (1.0, 1.0) or step.scale or step.residual:
            continue
        names = [instead.get(name, name) for name in step.inputs]
        for mine, other in ((names[1], names[0]), (names[0], names[1])):
            source = steps.get(mine)
            if source is None or source.kind not in WINDOWS or source.relu or source.residual:
                continue
            if len(users[mine]) != 1 or mine in flow.outputs or mine == other:
                continue
            steps[mine] = replace(source, residual=other, relu=step.relu)
            del steps[step.name]
            instead[step.name] = mine
            users[mine] = users[step.name]
            break
    return _redirected(flow, steps.values(), instead)


def pixels(flow: Flow) -> Flow:
    """An average over single pixels with a stride is a stride of the 1x1 convolution after it."""
    users, steps = flow.users(), flow.maker()
    for step in flow.steps:
        if step.kind != "avgpool" or step.window is None or step.window.kernel != (1, 1):
            continue
        plain = not (step.relu or step.residual or step.bias) and step.factor == 1.0
        readers = [steps[user.name] for user in users[step.name]]
        if not plain or step.window.padding != (0, 0) or step.name in flow.outputs:
            continue
        if not all(_takes_stride(reader) for reader in readers):
            continue
        for reader in readers:
            window = Window((1, 1), step.window.stride)
            steps[reader.name] = replace(
                reader.renamed(step.name, step.inputs[0]), window=window, pre=reader.pre or step.pre
            )
        del steps[step.name]
    return flow.with_steps(steps.values())


def _takes_stride(step: Step) -> bool:
    return step.kind == "conv" and step.window is not None and step.window.is_pixel


def cats(flow: Flow) -> Flow:
    """A concatenation among the members of one gives way to its members."""
    steps: dict[str, Step] = {}
    for step in flow.steps:
        if step.kind == "cat":
            members: list[str] = []
            for name in step.inputs:
                inner = steps.get(name)
                members += inner.inputs if inner is not None and inner.kind == "cat" else (name,)
            step = replace(step, inputs=tuple(members))
        steps[step.name] = step
    return flow.with_steps(steps.values())


def _redirected(flow: Flow, steps: Iterable[Step], instead: dict[str, str]) -> Flow:
    """The flow with these steps, every use of a gone value replaced."""

    def final(name: str) -> str:
        while name in instead:
            name = instead[name]
        return name

    renamed = []
    for step in list(steps):
        for old in dict.fromkeys(step.uses):
            if old in instead:
                step = step.renamed(old, final(old))
        renamed.append(step)
    outputs = tuple(final(name) for name in flow.outputs)
    return replace(flow.with_steps(sorted_steps(renamed)), outputs=outputs)


PASSES: tuple[Pass, ...] = (
    once, norms, sums, pool_factors, relus_after, residuals, pre_ops, pixels, cats, once,
)  # fmt: skip
