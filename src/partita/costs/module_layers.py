"""Layers for cuts that people would make: a model's modules, whole where that is possible.

Modules are opened from the top: one that takes more than a device's share of the step is taken as
what is in it, a mere list of modules (no ops of its own) as soon as it takes half of that. A
numbered module that holds no numbered ones is no list but a block. So the blocks of a transformer
stay whole unless one alone is too much for a device. What an opened module
computes itself, and what costs next to nothing, goes with what runs before it.

A layer is a range of the model's own order, so that no two wait for each other, whatever is cut.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence

from partita.costs.placement import JOINING, PlacementModel
from partita.graph.record import Op

LIST_SHARE = 0.5  # of a device's share: a list of modules that takes more is opened
LITTLE_SHARE = 0.02  # what takes less goes with what runs before it
_ROUNDING = 1 + 1e-6


def module_layers(model: PlacementModel, num_devices: int) -> tuple[tuple[str, ...], ...]:
    """Names of forward ops, layer by layer, in the order of the graph."""
    graph = model.graph
    seconds = _forward_seconds(model)
    share_s = sum(seconds.values()) / num_devices
    forward = [op for op in graph.ops if op.phase == "forward"]
    opened = _opened(forward, seconds, share_s)
    layers: list[list[str]] = []
    here: str | None = None
    for module, ops in _runs(forward, opened):
        little = sum(seconds[op.name] for op in ops) < LITTLE_SHARE * share_s
        joins = bool(layers) and (little or all(_is_cheap(model, op) for op in ops))
        if joins or (layers and module is not None and module == here):
            layers[-1] += [op.name for op in ops]
        else:
            here = module
            layers.append([op.name for op in ops])
    return tuple(map(tuple, layers))


def _forward_seconds(model: PlacementModel) -> dict[str, float]:
    """What each forward op takes with its gradients, on an average device."""
    seconds: dict[str, float] = defaultdict(float)
    mean = model.seconds.mean(axis=1)
    for op, each in zip(model.graph.ops, mean.tolist(), strict=True):
        if op.phase == "forward":
            seconds[op.name] += each
        elif op.forward:
            seconds[op.forward] += each
    return seconds


def _opened(forward: Sequence[Op], seconds: dict[str, float], share_s: float) -> set[str]:
    """The modules that are taken as what is in them; the model itself (``) always is."""
    within: dict[str, float] = defaultdict(float)
    whole = {op.scope for op in forward}
    paths = {module for op in forward for module in _path(op.scope)}
    lists = {module.rpartition(".")[0] for module in paths if _is_numbered(module)}
    whole.update(module for module in paths - lists if _is_numbered(module))
    for op in forward:
        for module in _path(op.scope):
            within[module] += seconds[op.name]
    opened = {""}
    for module in sorted(within):  # each after those that it is in
        limit = (1.0 if module in whole else LIST_SHARE) * share_s
        if within[module] > limit * _ROUNDING and module.rpartition(".")[0] in opened:
            opened.add(module)
    return opened


def _is_numbered(module: str) -> bool:
    return module.rpartition(".")[2].isdecimal()


def _path(scope: str) -> Iterator[str]:
    """`h.0.attn`: h, h.0, h.0.attn."""
    parts = scope.split(".") if scope else []
    return (".".join(parts[:depth]) for depth in range(1, len(parts) + 1))


def _runs(forward: Sequence[Op], opened: set[str]) -> Iterator[tuple[str | None, list[Op]]]:
    """Ops of one module that follow one another; an opened module's own ops each by itself."""
    run: list[Op] = []
    here: str | None = None
    for op in forward:
        module = next((each for each in _path(op.scope) if each not in opened), None)
        if run and (module is None or module != here):
            yield here, run
            run = []
        here = module
        run.append(op)
    if run:
        yield here, run


def _is_cheap(model: PlacementModel, op: Op) -> bool:
    return op.kind in JOINING or op.kind == "constant" or op.name in model.free
