"""What the tests of emitted stages share: the same numbers as the model, bit for bit."""

import random
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from partita.emit.recompute import RecomputedNodes
from partita.emit.stages import CapturedModule, emit
from partita.run.sequential import SequentialStages

T = torch.Tensor


def random_weights(leaves: list[Any]) -> T:
    """A scalar in which every floating output has a say of its own."""
    generator = torch.Generator().manual_seed(1)
    total = torch.zeros((), dtype=torch.float64)
    for leaf in leaves:
        if isinstance(leaf, T) and leaf.is_floating_point() and leaf.requires_grad:
            total = total + (leaf.double() * torch.randn(leaf.shape, generator=generator)).sum()
    return total


class Model:
    """A captured model and what it gives: outputs, gradients, buffers after one call."""

    def __init__(
        self, captured: CapturedModule, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self.captured = captured
        self.args, self.kwargs = args, kwargs
        self.before = {k: v.clone() for k, v in captured.module.named_buffers()}
        self.wanted = self.observe(captured.module)

    def observe(self, call: Any, then: Any = None) -> tuple[Any, ...]:
        """(structure, outputs, gradients, buffers) of one call; buffers are put back after."""
        module: nn.Module = self.captured.module
        torch.manual_seed(0)
        module.zero_grad(set_to_none=True)
        result = call(*self.args, **self.kwargs)
        leaves, spec = pytree.tree_flatten(result)
        loss = random_weights(leaves)
        if loss.requires_grad:
            loss.backward()
        if then is not None:
            then()
        gradients = {name: p.grad for name, p in module.named_parameters()}
        buffers = {name: b.clone() for name, b in module.named_buffers()}
        with torch.no_grad():
            for name, tensor in module.named_buffers():
                tensor.copy_(self.before[name])
        outputs = [leaf.detach().clone() if isinstance(leaf, T) else leaf for leaf in leaves]
        return spec, outputs, gradients, buffers

    def observe_apart(self, stage_of: Mapping[str, int]) -> tuple[Any, ...]:
        """The same, with stages that share no history: each runs its own backward."""
        apart = Apart(self.stages(stage_of))
        return self.observe(apart, then=apart.backward)

    def stages(
        self, stage_of: Mapping[str, int], again: Mapping[int, RecomputedNodes] | None = None
    ) -> SequentialStages:
        """The stages of an assignment, with the model's own weights."""
        return SequentialStages(self.captured, emit(self.captured, stage_of, again=again))

    def assert_same(
        self,
        stage_of: Mapping[str, int],
        exact_gradients: bool = True,
        again: Mapping[int, RecomputedNodes] | None = None,
    ) -> None:
        """Stages give the model's structure, outputs, gradients and buffers."""
        spec, outputs, gradients, buffers = self.observe(self.stages(stage_of, again))
        assert spec == self.wanted[0]
        for mine, theirs in zip(outputs, self.wanted[1], strict=True):
            assert same(mine, theirs)
        assert gradients.keys() == self.wanted[2].keys()
        for name, mine in gradients.items():
            theirs = self.wanted[2][name]
            if exact_gradients or mine is None or theirs is None:
                assert same(mine, theirs), name
            else:  # several sums of the same numbers, in another order
                torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
        for name, mine in buffers.items():
            assert same(mine, self.wanted[3][name]), name

    @property
    def ops(self) -> list[str]:
        """The names of the graph's ops, in order."""
        return [op.name for op in self.captured.graph.ops]  # type: ignore[attr-defined]


def any_order(it: Model, generator: random.Random) -> list[str]:
    """The ops in a random order in which they can run."""
    graph = it.captured.graph
    left = {op.name: {p.name for p in graph.predecessors(op)} for op in graph.ops}
    any_order: list[str] = []
    while left:
        ready = [name for name, before in left.items() if not before & left.keys()]
        any_order.append(generator.choice(ready))
        del left[any_order[-1]]
    return any_order


class Apart:
    """Stages as a pipeline runs them: what is sent is cut off from its history and not shared."""

    def __init__(self, stages: SequentialStages) -> None:
        self.stages = stages
        self.runs: list[tuple[list[tuple[str, T]], list[tuple[str, T]]]] = []
        self.gradients: dict[str, T] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        known = self.stages.given(args, kwargs)
        self.made: set[str] = set()
        for stage in self.stages.stages:
            taken = [(name, self._received(name, known[name])) for name in stage.takes]
            result = stage(*(value for _, value in taken))
            given = (result,) if len(stage.gives) == 1 else result or ()
            sent = list(zip(stage.gives, given, strict=True))
            self.runs.append((taken, sent))
            self.made.update(stage.gives)
            known.update(sent)
        self.ends = {n: self._received(n, known[n]) for n in dict.fromkeys(self._outputs())}
        outputs = self.stages.emitted.outputs
        flat = [self.ends[out] if isinstance(out, str) else out[0] for out in outputs]
        return pytree.tree_unflatten(flat, self.stages.captured.program.call_spec.out_spec)

    def _outputs(self) -> list[str]:
        return [out for out in self.stages.emitted.outputs if isinstance(out, str)]

    def _received(self, name: str, value: Any) -> Any:
        if name not in self.made or not isinstance(value, T):
            return value
        return value.detach().clone().requires_grad_(value.requires_grad)

    def backward(self) -> None:
        """Backward of every stage, last first, fed with what came back to it."""
        for name, end in self.ends.items():
            self._add(name, end)
        for taken, sent in reversed(self.runs):
            roots = [(v, self.gradients[n]) for n, v in sent if n in self.gradients]
            roots = [(value, grad) for value, grad in roots if value.requires_grad]
            if roots:
                torch.autograd.backward([v for v, _ in roots], [g for _, g in roots])
            for name, value in taken:
                self._add(name, value)

    def _add(self, name: str, value: Any) -> None:
        if name in self.made and isinstance(value, T) and value.grad is not None:
            known = self.gradients.get(name)
            self.gradients[name] = value.grad if known is None else known + value.grad


def assert_ruff_has_nothing_to_say(path: Path) -> None:
    """Neither the formatter nor the linter, by the project's settings and the linter's own."""
    ruff = Path(sys.executable).with_name("ruff")
    settings = Path(__file__).parents[2] / "pyproject.toml"
    own = ["--config", str(settings)]
    for command in (["format", "--diff", *own], ["check", *own], ["check", "--isolated"]):
        options = ["--no-cache", str(path)]
        process = subprocess.run([ruff, *command, *options], capture_output=True, text=True)
        assert process.returncode == 0, process.stdout


def same(a: Any, b: Any) -> bool:
    """Equal bit for bit, NaN included."""
    if isinstance(a, T) and isinstance(b, T):
        alike = a.dtype == b.dtype and a.shape == b.shape
        return alike and torch.equal(_bits(a), _bits(b))
    return type(a) is type(b) and bool(a == b)


def _bits(tensor: T) -> T:
    flat = tensor.detach().contiguous().flatten()
    return flat.view(torch.uint8) if flat.numel() else flat
