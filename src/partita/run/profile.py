"""Profiling a model: every node of its captured program run alone, on the device, and timed.

The program is followed node by node with real values, so that ids are ids and masks are masks; what
no later node needs is freed. A node whose call was measured before in the same environment is not
measured again; when every call is known, nothing is run at all. Backward times are measured where
the model trains: for inputs that depend on something learned.
"""

import contextlib
import logging
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map

from partita.capture.exported import Captured
from partita.capture.torch_program import Ref, TorchNode, replaced
from partita.costs.measured import (
    Database,
    Environment,
    Measurement,
    append,
    call_text,
    open_database,
)
from partita.costs.profiles import ModelProfile, OpTime
from partita.errors import InputError
from partita.graph.record import Op
from partita.run.meter import Meter, Metered, Timing

log = logging.getLogger("partita")
T = torch.Tensor
Progress = Callable[[int, int, str], bool]  # done, of how many, what; False stops


def environment_of(device: torch.device, training: bool) -> Environment:
    """Where measurements are taken, in the words they are filed under."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        name = f"{_processor()}, {torch.get_num_threads()} threads"
    return Environment(name, str(torch.__version__), training)


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def profile(
    captured: Captured,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    device: str = "cpu",
    training: bool = True,
    timing: Timing | None = None,
    database: str | Path | None = None,
    fresh: bool = False,
    progress: Progress | None = None,
) -> ModelProfile:
    """Times and bytes of every op of a captured model, called with these arguments.

    Measurements are read from and appended to `database`; `fresh` measures all of them again.
    When `progress` returns False the profile is stopped: what was measured is in the database.
    """
    target = _device(device)
    known = Database() if database is None else open_database(database)
    environment = environment_of(target, training)
    if known.changed(environment):
        log.warning("%s: %s; everything is measured again", database, known.changed(environment))
    calls = _calls(captured)
    measurements = {} if fresh else _from(known, calls, environment)
    wanted = {text for text in calls.values() if text not in measurements}
    for count, entry in enumerate(
        _measured(captured, args, kwargs or {}, target, calls, wanted, environment, timing)
    ):
        measurements[entry.call] = entry
        if database is not None:
            append(database, entry)
        if progress is not None and not progress(count + 1, len(wanted), entry.call):
            raise ProfilingStopped(count + 1, len(wanted))
    return ModelProfile(
        captured.graph.name,
        captured.graph.fingerprint(),
        environment,
        tuple(_times(captured, calls, measurements)),
    )


class ProfilingStopped(Exception):  # noqa: N818
    """Profiling was stopped; what is in the database will not be measured again."""

    def __init__(self, done: int, total: int) -> None:
        self.done, self.total = done, total
        super().__init__(f"stopped after {done} of {total} measurements")


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError:
        raise InputError(
            f"there is no device {name!r}", fix="use cpu or cuda", field="device"
        ) from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InputError("there is no CUDA GPU here", fix="use --device cpu", field="device")
    if device.type not in ("cpu", "cuda"):
        raise InputError(f"cannot time on {name!r}", fix="use cpu or cuda", field="device")
    return device


def _ops(captured: Captured) -> dict[str, list[Op]]:
    """The ops of every node; plumbing such as getitem has none."""
    ops: dict[str, list[Op]] = {}
    for op in captured.graph.ops:
        ops.setdefault(captured.node_of(op), []).append(op)
    return ops


def _calls(captured: Captured) -> dict[str, str]:
    """What every node computes, in the words of its ops."""
    return {
        node: " + ".join(call_text(captured.graph, op) for op in ops)
        for node, ops in _ops(captured).items()
    }


def _from(
    known: Database, calls: Mapping[str, str], environment: Environment
) -> dict[str, Measurement]:
    entries = {text: known.find(text, environment) for text in calls.values()}
    return {text: entry for text, entry in entries.items() if entry is not None}


def _times(
    captured: Captured, calls: Mapping[str, str], measurements: Mapping[str, Measurement]
) -> Iterator[OpTime]:
    """The time of a node goes to its first op; the others of the same node are free."""
    paid: set[str] = set()
    for op in captured.graph.ops:
        node = captured.node_of(op)
        first = node not in paid
        paid.add(node)
        yield _time(op, measurements[calls[node]], first)


def _time(op: Op, entry: Measurement, pays: bool) -> OpTime:
    values = {key: value for key, value in asdict(entry).items() if key in OpTime.MEASURED}
    if not pays:
        values = dict.fromkeys(values, 0)
    return OpTime(op.name, op.kind, op.scope, **values)


def _measured(
    captured: Captured,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    device: torch.device,
    calls: Mapping[str, str],
    wanted: set[str],
    environment: Environment,
    timing: Timing | None,
) -> Iterator[Measurement]:
    """Follow the program and measure each wanted call where it first occurs."""
    if not wanted:
        return
    meter = Meter(device, timing)
    values, learned, own = _given(captured, args, kwargs, device)
    last_use, ops = _last_uses(captured), _ops(captured)
    open_calls = set(wanted)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(0)
        for node in captured.record.nodes:
            if node.is_body:
                continue
            text = calls.get(node.name)
            if text in open_calls:
                open_calls.discard(text)
                metered = _meter_node(meter, node, values, learned, own, environment.training)
                yield _entry(text, environment, metered, captured, ops[node.name])
            if not open_calls:
                return
            with torch.no_grad():
                values[node.name] = _run_node(node, values)
            if any(source in learned for source in node.reads):
                learned.add(node.name)
            for done in last_use.get(node.name, ()):
                values.pop(done, None)


def _run_node(node: TorchNode, values: Mapping[str, Any]) -> Any:
    args, kwargs = replaced((node.args, dict(node.kwargs)), Ref, lambda ref: values[ref.name])
    return node.target(*args, **kwargs)


def _meter_node(
    meter: Meter,
    node: TorchNode,
    values: Mapping[str, Any],
    learned: set[str],
    own: set[str],
    training: bool,
) -> Metered:
    def operation(*inputs: Any) -> Any:
        with torch.set_grad_enabled(training):
            return _run_node(node, dict(zip(node.reads, inputs, strict=True)))

    return meter.run(
        operation,
        [values[source] for source in node.reads],
        [training and source in learned for source in node.reads],
        [isinstance(values[source], T) and source in own for source in node.reads],
    )


def _entry(
    text: str, environment: Environment, metered: Metered, captured: Captured, ops: list[Op]
) -> Measurement:
    graph = captured.graph
    made = {name for op in ops for name in op.outputs}
    read = {name for op in ops for name in op.inputs} - made
    parameters = [graph.tensor(name) for name in read if graph.tensor(name).role == "parameter"]
    others = [graph.tensor(name) for name in read if graph.tensor(name).role != "parameter"]
    return Measurement(
        text,
        environment,
        metered.forward.median_s,
        metered.backward.median_s,
        metered.forward.spread_s,
        metered.backward.spread_s,
        metered.forward.repeats,
        metered.peak_bytes,
        metered.resident_bytes,
        sum(tensor.size_bytes for tensor in parameters),
        sum(tensor.size_bytes for tensor in others),
        metered.output_bytes,
    )


def _given(
    captured: Captured, args: Sequence[Any], kwargs: Mapping[str, Any], device: torch.device
) -> tuple[dict[str, Any], set[str], set[str]]:
    """Values of the inputs; which of them are learned; which are parameters or buffers."""
    user = iter(tree_flatten((tuple(args), dict(kwargs)))[0])
    values: dict[str, Any] = {}
    learned, own = set(), set()
    for given in captured.record.inputs:
        if given.kind == "input":
            values[given.name] = next(user)
            continue
        values[given.name] = given.data
        own.add(given.name)
        if given.kind == "parameter" and given.data is not None and given.data.requires_grad:
            learned.add(given.name)
    moved = {name: tree_map(lambda v: _moved(v, device), value) for name, value in values.items()}
    return moved, learned, own


def _moved(value: Any, device: torch.device) -> Any:
    """On the device; buffers and inputs are copied, for the program may change them."""
    if not isinstance(value, T):
        return value
    if value.device.type == "meta":
        raise InputError(
            "the model has no values (it is on the meta device)",
            fix="profile a model with real parameters and inputs",
        )
    return value.detach().to(device, copy=not isinstance(value, torch.nn.Parameter))


def _last_uses(captured: Captured) -> dict[str, list[str]]:
    """By node: the values that no later node reads."""
    last: dict[str, str] = {}
    for node in captured.record.nodes:
        last.update(dict.fromkeys(node.reads, node.name))
    done: dict[str, list[str]] = {}
    for source, name in last.items():
        done.setdefault(name, []).append(source)
    return done
