"""Steps that together are one operator PyTorch has: written out in a model, recognised here.

    x rsqrt(mean(x^2) + eps)   rms_norm, as many language models write it

Values in between must be read by nobody else.
"""

from dataclasses import replace

from partita.capture.torch_program import Ref
from partita.gpu.flow.steps import Flow, Step, used_steps

SQUARES = ("aten.pow.Tensor_Scalar", "aten.square.default", "aten.mul.Tensor")


def recognised(flow: Flow) -> Flow:
    """The flow with such steps as one."""
    made, users = flow.maker(), flow.users()
    steps = []
    for step in flow.steps:
        rms_norm = _rms_norm(flow, step, made, users)
        steps.append(step if rms_norm is None else rms_norm)
    return used_steps(flow.with_steps(steps))


def _rms_norm(
    flow: Flow, step: Step, made: dict[str, Step], users: dict[str, list[Step]]
) -> Step | None:
    if step.target != "aten.mul.Tensor" or len(step.inputs) != 2:
        return None
    for x, scale in (step.inputs, step.inputs[::-1]):
        root = made.get(scale)
        if root is None or root.target != "aten.rsqrt.default":
            continue
        total = made.get(root.inputs[0])
        if total is None or total.target != "aten.add.Tensor" or len(total.inputs) != 1:
            continue
        mean = made.get(total.inputs[0])
        square = None if mean is None else made.get(mean.inputs[0])
        if mean is None or square is None or not _is_square(square, x):
            continue
        eps = total.arguments[1]
        inner = (root, total, mean, square)
        alone = all(len(users[each.name]) == 1 and each.name not in flow.outputs for each in inner)
        if alone and isinstance(eps, float) and _is_of_rows(flow, mean, x):
            arguments = (Ref(x), [flow.shapes[x][-1]], None, eps)
            name = "aten.rms_norm.default"
            return replace(step, inputs=(x,), target=name, arguments=arguments, keywords=())
    return None


def _is_square(step: Step, x: str) -> bool:
    if step.target not in SQUARES or step.inputs != (x,):
        return False
    return step.target != "aten.pow.Tensor_Scalar" or step.arguments[1] == 2


def _is_of_rows(flow: Flow, mean: Step, x: str) -> bool:
    """Is it the mean over the last dim, which stays?"""
    shape = flow.shapes[x]
    kept = len(mean.arguments) > 2 and mean.arguments[2] is True
    dims = [dim % len(shape) for dim in mean.arguments[1]] if mean.target == "aten.mean.dim" else []
    return kept and dims == [len(shape) - 1]
