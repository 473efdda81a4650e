"""A schedule as Python source: streams, events and launches one can read, in one CUDA graph.

The source names every step with what it computes; weights (folded, merged) are in a file of
tensors beside it. Kernels are this package's; everything else is plain torch.cuda.
"""

from dataclasses import MISSING, fields

import torch

from partita.errors import InputError
from partita.gpu.flow.steps import Flow, Step
from partita.gpu.streams.api import Streamed
from partita.gpu.streams.order import Launch
from partita.gpu.streams.record import StreamSchedule
from partita.gpu.streams.replay import Replay

HEAD = '''"""{name} for inputs of {shapes} ({dtype}), as one CUDA graph.

{launches} launches on {streams} streams. Measured on {on}:
{times}

    model = Model("{weights}")
    outputs = model(*inputs)  # a tuple; inputs on the GPU
"""

import torch
from torch import device  # in arguments of operators

from partita.capture.torch_program import Ref
from partita.gpu.flow.place import place
from partita.gpu.flow.read import Held
from partita.gpu.flow.steps import Flow, Step, Window
from partita.gpu.streams.bound import Bound
from partita.gpu.streams.ways import Way

INPUTS = {inputs}
OUTPUTS = {outputs}

# What is computed. A step is one launch, or a view (cat, part) that costs nothing.
STEPS = (
{steps}
)

SHAPES = {{
{value_shapes}
}}


class Model:
    """The steps in memory, captured once."""

    def __init__(self, weights: str) -> None:
        constants = torch.load(weights, map_location="cuda", weights_only=True)
        dtypes = {{**dict.fromkeys(SHAPES, torch.{dtype}){others}}}
        flow = Flow(STEPS, INPUTS, OUTPUTS, SHAPES, dtypes, constants)
        flow, placement = place(flow)
        self.bound = Bound(flow, placement, torch.device("cuda"))
        self.steps = flow.maker()
        self.streams = [torch.cuda.Stream() for _ in range({streams})]
        self.launch()  # compiles the kernels
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.launch()
        self.results = self.bound.outputs()

    def __call__(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Copies in, one replay, copies out."""
        self.bound.set_inputs(inputs)
        self.graph.replay()
        return tuple(result.clone() for result in self.results)

    def run(self, step: str, way: str) -> None:
        """One launch on the current stream."""
        self.bound.run(self.steps[step], Way.parse(way))

    def launch(self) -> None:
        """Everything once: fork from the current stream, join it at the end."""
        main = torch.cuda.current_stream()
        on = torch.cuda.stream
        {names} = self.streams
        for stream in self.streams:
            stream.wait_stream(main)
{body}
        for stream in self.streams:
            main.wait_stream(stream)
'''


def emit(streamed: Streamed, weights: str, number: int = 0) -> str:
    """The source of one schedule; its weights are written to the file `weights`."""
    schedule = streamed.schedules[number]
    call = streamed.calls[schedule.shapes]
    if not isinstance(call, Replay):
        raise InputError(
            f"what was kept is {schedule.label}, which is PyTorch's own",
            fix="call torch.compile yourself, or save the schedule as .json",
        )
    torch.save(_used_constants(call.bound.flow, call.bound.constants), weights)
    return source(call.bound.flow, schedule, type(streamed.module).__name__, weights)


def source(flow: Flow, schedule: StreamSchedule, name: str, weights: str) -> str:
    """The text alone."""
    streams = sorted({launch.stream for launch in schedule.plan.launches})
    labels = {stream: f"s{at}" for at, stream in enumerate(streams)}
    best = [f"    {label}: {time:.1f} us" for label, time in schedule.times_us if "(" not in label]
    return HEAD.format(
        name=name,
        shapes=", ".join(map(str, schedule.shapes)),
        dtype=schedule.dtype,
        others=_other_dtypes(flow, schedule.dtype),
        launches=len(schedule.plan.launches),
        streams=len(streams),
        on=schedule.on,
        times="\n".join(best),
        weights=weights,
        inputs=repr(flow.inputs),
        outputs=repr(flow.outputs),
        steps="\n".join(f"    {shown(step)}," for step in flow.steps),
        value_shapes="\n".join(
            f"    {value!r}: {shape}," for value, shape in _used_shapes(flow).items()
        ),
        names=", ".join(labels.values()) + ("," if len(labels) == 1 else ""),
        body=_body(flow, schedule, labels),
    )


def shown(step: Step) -> str:
    """A step as the expression that makes it, defaults left out; members of a piece on lines."""
    parts = [repr(step.name), repr(step.kind), repr(step.inputs)]
    for each in fields(step)[3:]:
        value = getattr(step, each.name)
        if each.name == "members":
            lines = "".join(f"        {shown(member)},\n" for member in value)
            parts += [f"members=(\n{lines}    )"] if value else []
        elif each.default is MISSING or value != each.default:
            parts.append(f"{each.name}={value!r}")
    return f"Step({', '.join(parts)})"


def _body(flow: Flow, schedule: StreamSchedule, labels: dict[int, str]) -> str:
    needed = {step for launch in schedule.plan.launches for step in launch.waits}
    event = {step: f"e{at}" for at, step in enumerate(sorted(needed))}
    ways = dict(schedule.ways)
    lines = []
    for launch in schedule.plan.launches:
        lines += _launch(flow, launch, labels[launch.stream], event, ways)
    return "\n".join(f"        {line}" for line in lines)


def _launch(
    flow: Flow, launch: Launch, stream: str, event: dict[int, str], ways: dict[str, str]
) -> list[str]:
    step = flow.steps[launch.step]
    lines = [f"{stream}.wait_event({event[wait]})" for wait in launch.waits]
    lines.append(f"with on({stream}):  # {_words(flow, step)}")
    lines.append(f"    self.run({step.name!r}, {ways.get(step.name, 'eager')!r})")
    if launch.step in event:
        lines.append(f"{event[launch.step]} = {stream}.record_event()")
    return lines


def _words(flow: Flow, step: Step) -> str:
    """What a step computes, for people."""
    if step.kind == "call":
        return step.target
    if step.kind == "piece":
        return f"{len(step.members)} steps as one, compiled when first launched"
    size = "x".join(map(str, flow.shapes[step.name]))
    kernel = "" if step.window is None else "x".join(map(str, step.window.kernel)) + " "
    after = " + residual" if step.residual else ""
    return f"{kernel}{step.kind} to {size}{after}{', ReLU' if step.relu else ''}"


def _other_dtypes(flow: Flow, dtype: str) -> str:
    """Values of another type than the inputs."""
    others = {
        name: flow.dtypes[name]
        for name in _used_shapes(flow)
        if str(flow.dtypes[name]) != f"torch.{dtype}"
    }
    return "".join(f", {name!r}: {kind}" for name, kind in others.items())


def _used_shapes(flow: Flow) -> dict[str, tuple[int, ...]]:
    names = {*flow.inputs, *(step.name for step in flow.steps)}
    return {name: shape for name, shape in flow.shapes.items() if name in names}


def _used_constants(flow: Flow, constants: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    text = repr(flow.steps)
    return {name: value for name, value in constants.items() if repr(str(name)) in text}
