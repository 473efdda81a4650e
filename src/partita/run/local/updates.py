"""Optimizer rules, one formula each, elementwise on any shard or flat part of a parameter.

With w the parameter, g its gradient, t the number of the step (from 1):

    sgd       w - lr g
    momentum  m' = mu m + g                     w - lr m'
    adagrad   s' = s + g^2                      w - lr g / (sqrt(s') + eps)
    rmsprop   s' = rho s + (1 - rho) g^2        w - lr g / (sqrt(s') + eps)
    lion      w - lr (sign(b1 m + (1 - b1) g) + decay w)        m' = b2 m + (1 - b2) g
    adam      m' = b1 m + (1 - b1) g,  s' = b2 s + (1 - b2) g^2
              w - lr (m' / (1 - b1^t)) / (sqrt(s' / (1 - b2^t)) + eps)
    adamw     as adam, of w (1 - lr decay)

States begin as zeros. `EPSILON` is large on purpose: with the usual one, the first step of most of
these rules has the same size whatever the size of the gradient, and would hide a wrong one.
"""

from collections.abc import Callable, Sequence

import torch

from partita.graph.backward import OPTIMIZER_STATES

T = torch.Tensor
States = tuple[T, ...]

RATE = 0.05  # lr
MOMENTUM = 0.9  # mu
SMOOTHING = 0.95  # rho of rmsprop
BETAS = (0.9, 0.99)  # b1, b2 of adam, adamw and lion
DECAY = 0.02  # of adamw and lion
EPSILON = 0.1


def _sgd(w: T, g: T, states: States, step: int) -> tuple[T, States]:
    return w - RATE * g, ()


def _momentum(w: T, g: T, states: States, step: int) -> tuple[T, States]:
    mean = MOMENTUM * states[0] + g
    return w - RATE * mean, (mean,)


def _adagrad(w: T, g: T, states: States, step: int) -> tuple[T, States]:
    total = states[0] + g * g
    return w - RATE * g / (total.sqrt() + EPSILON), (total,)


def _rmsprop(w: T, g: T, states: States, step: int) -> tuple[T, States]:
    square = SMOOTHING * states[0] + (1 - SMOOTHING) * g * g
    return w - RATE * g / (square.sqrt() + EPSILON), (square,)


def _lion(w: T, g: T, states: States, step: int) -> tuple[T, States]:
    direction = (BETAS[0] * states[0] + (1 - BETAS[0]) * g).sign()
    mean = BETAS[1] * states[0] + (1 - BETAS[1]) * g
    return w - RATE * (direction + DECAY * w), (mean,)


def _adam(w: T, g: T, states: States, step: int) -> tuple[T, States]:
    mean = BETAS[0] * states[0] + (1 - BETAS[0]) * g
    square = BETAS[1] * states[1] + (1 - BETAS[1]) * g * g
    scale = (square / (1 - BETAS[1] ** step)).sqrt() + EPSILON
    return w - RATE * (mean / (1 - BETAS[0] ** step)) / scale, (mean, square)


def _adamw(w: T, g: T, states: States, step: int) -> tuple[T, States]:
    return _adam(w * (1 - RATE * DECAY), g, states, step)


UPDATES: dict[str, Callable[[T, T, States, int], tuple[T, States]]] = {
    "sgd": _sgd,
    "momentum": _momentum,
    "adagrad": _adagrad,
    "rmsprop": _rmsprop,
    "lion": _lion,
    "adam": _adam,
    "adamw": _adamw,
}


def update(
    rule: str, parameter: T, gradient: T, states: Sequence[T], *, step: int = 1
) -> tuple[T, States]:
    """The new parameter and states, all of one shape.

    A master copy may follow the rule's states, as in graphs of mixed precision: then it is what is
    updated, and its new value is both the parameter and the last state.
    """
    count = OPTIMIZER_STATES[rule]
    given, master = tuple(states[:count]), states[count:]
    new, changed = UPDATES[rule](master[0] if master else parameter, gradient, given, step)
    return new, (*changed, new.clone()) if master else changed
