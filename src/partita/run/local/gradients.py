"""The gradients of one op at its full size, from what its backward reads of the forward.

A gradient is the vector-Jacobian product of the forward at its inputs. The gradient should not
depend on an input that is not read; if it does, the result is not a number, and that shows. Where
the backward reads only the output (ReLU, sigmoid, tanh) an input is chosen that gives it; softmax
and the router of experts have the formula written out:

    d logits = p (g - sum_e p_e g_e)      with p the output and g its gradient
"""

import math
from collections.abc import Callable, Mapping

import torch

from partita.errors import GraphError
from partita.graph.record import Call
from partita.run.local.compute import Site, compute

T = torch.Tensor

# Inputs that give the output of an elementwise function, where the backward reads that.
INVERSES: dict[str, Callable[[T], T]] = {
    "relu": lambda output: output,
    "sigmoid": torch.logit,
    "tanh": torch.atanh,
    "exp": torch.log,
    "dropout": lambda output: output,  # linear: the mask is known
}


def gradients(call: Call, reads: Mapping[str, T], ties: tuple[int, ...], site: Site) -> list[T]:
    """The gradients of the inputs `call.wrt`, of full-size tensors by code (`g0`, `i1`, `o0`).

    `ties` says for every input which is the first that is the same tensor: the gradient of a
    tensor that stands twice is the sum of both, unless each is read by itself.
    """
    if call.kind in WRITTEN_OUT and call.attr("score") is None:
        return WRITTEN_OUT[call.kind](call, reads)
    forward = Call(call.kind, call.attrs, call.inputs, call.outputs)
    leaves = [_input(call, reads, i, ties).detach() for i in range(len(call.inputs))]
    wanted = {i: leaves[i].clone().requires_grad_() for i in call.wrt}
    with torch.enable_grad():
        outputs = compute(forward, [wanted.get(t, leaves[t]) for t in ties], site)
        pairs = [(out, reads[f"g{i}"]) for i, out in enumerate(outputs) if f"g{i}" in reads]
        pairs = [(out, given) for out, given in pairs if out.requires_grad]
        if not pairs:  # such as the gates of a dispatch, which only choose
            return [torch.zeros_like(leaf) for leaf in wanted.values()]
        results = torch.autograd.grad(
            [out for out, _ in pairs],
            list(wanted.values()),
            [given for _, given in pairs],
            materialize_grads=True,
        )
    return list(results)


def _input(call: Call, reads: Mapping[str, T], position: int, ties: tuple[int, ...]) -> T:
    code = f"i{ties[position]}"
    if code in reads:
        return reads[code]
    if call.kind == "elementwise" and "o0" in reads:
        fn = call.text("fn")
        if fn not in INVERSES:
            raise GraphError(
                f"the gradient of {fn!r} is known from its input only",
                fix="let its backward read the input",
            )
        return INVERSES[fn](reads["o0"])
    return _unread(call, position)


def _unread(call: Call, position: int) -> T:
    return torch.full(call.inputs[position], math.nan, dtype=torch.float64)


def _through_softmax(output: T, given: T, dim: int) -> T:
    return output * (given - (output * given).sum(dim, keepdim=True))


def _softmax(call: Call, reads: Mapping[str, T]) -> list[T]:
    return [_through_softmax(reads["o0"], reads["g0"], call.whole("axis", -1))]


def _router(call: Call, reads: Mapping[str, T]) -> list[T]:
    logits = _through_softmax(reads["o0"], reads["g0"], -1)
    results = []
    for i in call.wrt:
        if i == 0:
            results.append(logits @ reads.get("i1", _unread(call, 1)))
        else:
            x = reads.get("i0", _unread(call, 0))
            results.append(logits.reshape(-1, logits.shape[-1]).T @ x.reshape(-1, x.shape[-1]))
    return results


WRITTEN_OUT: dict[str, Callable[[Call, Mapping[str, T]], list[T]]] = {
    "softmax": _softmax,
    "moe_router": _router,
}
