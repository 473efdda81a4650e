"""Parts of a model, or all of it, through a compiler of PyTorch: what runs inside our CUDA graph.

The steps are traced to operators and handed to the compiler directly (Inductor, or another backend
of torch.compile). Constants and the places of results are arguments, so equal pieces share what was
compiled, and nothing is copied afterwards. Examples of the arguments are fresh memory: values that
lie side by side in one buffer are not mistaken for one that is changed.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from partita.gpu.choose import said
from partita.gpu.flow import eager
from partita.gpu.flow.steps import Flow, Step, T
from partita.gpu.streams.pieces import alike, constants_of

BACKEND = "inductor"
Function = Callable[..., tuple[T, ...]]


class NotCompiledError(RuntimeError):
    """The compiler does not take it; whoever asked goes on without."""


class Compiler:
    """Compiles, once what is equal; remembers what failed."""

    def __init__(self, backend: str = "") -> None:
        self.backend = backend or BACKEND
        self.done: dict[str, Function | NotCompiledError] = {}

    def piece(
        self, piece: Step, values: Mapping[str, T], constants: Mapping[str, T],
        homes: Mapping[str, T],
    ) -> dict[str, T]:  # fmt: skip
        """Run a piece; results without a home are returned, the others are written there."""
        held = constants_of(piece)
        homes = {name: homes[name] for name in piece.makes if name in homes}
        flat = [
            *(values[name] for name in piece.inputs), *(constants[name] for name in held),
            *homes.values(),
        ]  # fmt: skip
        key = self.key(piece, flat, tuple(homes))
        if key not in self.done:
            self.done[key] = self.attempt(_piece_function(piece, held, tuple(homes)), flat)
        made = self.done[key]
        if isinstance(made, NotCompiledError):
            raise made
        free = [name for name in piece.makes if name not in homes]
        return dict(zip(free, made(*flat), strict=True))

    def key(self, piece: Step, flat: Sequence[T], placed: Sequence[str]) -> str:
        """Equal for pieces that one function can run."""
        at = [piece.makes.index(name) for name in placed]
        memory = [(tuple(each.shape), each.stride(), each.dtype) for each in flat]
        return f"{self.backend} {alike(piece)} {at} {memory}"

    def whole(self, flow: Flow, inputs: Sequence[T], constants: Mapping[str, T]) -> Function:
        """All steps of a flow as one function of its inputs."""
        held = tuple(constants)
        made = self.attempt(_flow_function(flow, held), [*inputs, *constants.values()])
        if isinstance(made, NotCompiledError):
            raise made
        function: Function = made  # which the type checker knows inside `run` as well

        def run(*now: T) -> tuple[T, ...]:
            return function(*now, *constants.values())

        return run

    def attempt(self, function: Function, flat: Sequence[T]) -> Function | NotCompiledError:
        """What the compiler makes of a function of tensors, or why it makes nothing of it."""
        fresh = [_fresh(each) for each in flat]
        try:
            return _compiled(function, fresh, self.backend)
        except Exception as error:  # compilers fail in many ways, none of them ours to mend
            return NotCompiledError(f"{self.backend}: {said(error)}")


def _compiled(function: Function, example: list[T], backend: str) -> Function:
    from torch._dynamo.backends.registry import lookup_backend
    from torch._inductor import config

    traced = make_fx(function, tracing_mode="fake")(*example)
    with torch.no_grad(), config.patch({"triton.cudagraphs": False}):
        made: Any = lookup_backend(backend)(traced, example)
    return lambda *now: tuple(made(*now))


def _fresh(value: T) -> T:
    """Zeros of the same shape and strides, in memory of their own."""
    reach = 1 + sum(
        (size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True)
    )
    room = value.new_zeros(max(reach, 1) if value.numel() else 0)
    return room.as_strided(value.shape, value.stride())


def _piece_function(piece: Step, held: Sequence[str], placed: Sequence[str]) -> Function:
    def run(*flat: T) -> tuple[T, ...]:
        names = (*piece.inputs, *held, *((name, "home") for name in placed))
        given: dict[Any, T] = dict(zip(names, flat, strict=True))
        values = {name: given[name] for name in piece.inputs}
        constants = {name: given[name] for name in held}
        for step in piece.members:
            values[step.name] = eager.compute(step, values, constants)
        for name in placed:
            given[name, "home"].copy_(values[name])
        return tuple(values[name] for name in piece.makes if name not in placed)

    return run


def _flow_function(flow: Flow, held: Sequence[str]) -> Function:
    def run(*flat: T) -> tuple[T, ...]:
        inputs, rest = flat[: len(flow.inputs)], flat[len(flow.inputs) :]
        values: dict[str, Any] = dict(zip(flow.inputs, inputs, strict=True))
        constants = dict(zip(held, rest, strict=True))
        for step in flow.steps:
            values[step.name] = eager.compute(step, values, constants)
        return tuple(values[name] for name in flow.outputs)

    return run


def warm_up(call: Function, inputs: Sequence[T]) -> None:
    """Call what torch.compile made without its CUDA graph, which is recorded in a later call."""
    from torch._inductor import config

    with config.patch({"triton.force_cudagraphs_warmup": True}):
        call(*inputs)


def stop_workers() -> None:
    """End the processes in which Inductor compiles; it starts new ones when it needs them."""
    if "torch._inductor.async_compile" in sys.modules:
        from torch._inductor.async_compile import shutdown_compile_workers

        shutdown_compile_workers()
