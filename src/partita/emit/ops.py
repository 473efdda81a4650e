"""How each operator is written: `x + y`, `x.view(2, 3)`, `F.linear(x, w)`, `x[:, 0]`.

A table keyed by the operator's name gives the forms a person would choose. What is not in it is
written as the function of that name in `torch` or `torch.nn.functional`, and what is not there
either as `torch.ops.aten...`, which is always right.
"""

import types

import torch
from torch.nn import functional

from partita.capture.functions import function_of, source_of
from partita.emit.arguments import Env, Written
from partita.emit.forms import FORMS, method
from partita.emit.steps import OpStep
from partita.emit.text import Expr, call, literal

_ONLY_IN_SCHEMA = ("aten.bernoulli.Tensor",)  # in Python it takes a number


def written(step: OpStep, env: Env) -> Expr:
    """The expression of one step."""
    it = Written(step, env)
    form = FORMS.get(it.packet)
    if step.target.namespace == "aten":
        written = form(it) if form is not None else None
        return written if written is not None else _plain(it)
    function = function_of(step.target)
    if function is not None and source_of(function) is not None:
        tensors = [it.expr(value) for value in step.args]
        fixed = [
            None if i in function.tensors else literal(v) for i, v in enumerate(function.fixed)
        ]
        arguments = [tensors.pop(0) if each is None else each for each in fixed]
        return call(f"{function.cls.__name__}.apply", arguments)
    return _by_schema(it)


def _plain(it: Written) -> Expr:
    name = it.packet
    if name.endswith("_") and hasattr(torch.Tensor, name):
        return method(it)
    if str(it.step.target) in _ONLY_IN_SCHEMA:
        return _by_schema(it)
    # What `reduction` is by default differs between the schema and Python's bindings.
    if not name.startswith("_") and not any(a.name == "reduction" for a in it.schema):
        for prefix, home in (("torch", torch), ("F", functional)):
            if isinstance(getattr(home, name, None), types.BuiltinFunctionType):
                args, kwargs = it.rest()
                return call(f"{prefix}.{name}", args, kwargs)
    return _by_schema(it)


def _by_schema(it: Written) -> Expr:
    target = it.step.target
    overload = target._overloadname
    args = [it.expr(value) for value in it.step.args]
    kwargs = {name: it.expr(value) for name, value in it.step.kwargs.items()}
    return call(f"torch.ops.{target.namespace}.{it.packet}.{overload}", args, kwargs)
