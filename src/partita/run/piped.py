"""A module run by its stages, with the module's own tensors.

What is piped *is* the module as far as its tensors go: the stages use the very Parameters and
buffers of the original, under the original names. An optimizer made before or after works on both,
and so do `state_dict`, `load_state_dict`, `zero_grad`, `train`, `eval` and `to`.

A module in training and the same in eval mode are two programs: dropout, statistics, branches by
`self.training`, even what is given back may differ. So every combination of modes of the module and
those in it is captured by itself, when it is first called; none runs for another. The same goes for
anything else that somebody changes in the module (`state.py`), and for other sizes of the arguments
unless one program is known to serve them (`programs.py`).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from partita.errors import CaptureError
from partita.jobs.partition import Partitioned
from partita.plans import Plan, Prediction
from partita.run.programs import PipedMode, Programs
from partita.run.sequential import held_tensors, link
from partita.run.sizes import Shapes, shapes_of
from partita.run.state import CapturedState

MOST_STATES = 16  # of the module that are remembered; the one called longest ago is captured again

Cut = Callable[[nn.Module, tuple[Any, ...], dict[str, Any], Programs | None], PipedMode]


class Piped(nn.Module):
    """A module run by its stages: called as the module is, it gives what the module gives.

    `cut` captures the module in the mode it is in, for some arguments, and cuts it into stages:
    those of the programs that there are for the mode, if it can. A copy is made of a copy of the
    module, and captured again; so is what was saved.
    """

    def __init__(
        self, original: nn.Module, cut: Cut, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        super().__init__()
        first = cut(original, args, kwargs, None)
        self._cut = cut
        self._known = [(CapturedState(first.run.captured, (args, kwargs)), Programs(first))]
        self._now = first
        # The tensors are the original's, so their tables are, too.
        self._parameters = original._parameters
        self._buffers = original._buffers
        self._modules = original._modules
        self.training = original.training

    @property
    def original(self) -> nn.Module:
        """The module that was piped."""
        return self._now.run.captured.module

    @property
    def partitioned(self) -> Partitioned:
        """How the stages were found."""
        return self._now.partitioned

    @property
    def stages(self) -> list[nn.Module]:
        """One module per stage, in the order in which they run, of the mode that ran last."""
        return self._now.run.stages

    @property
    def source(self) -> str:
        """The emitted code of the stages."""
        return self._now.run.emitted.source

    @property
    def plan(self) -> Plan:
        """Which op runs in which stage on which device, as a plan that can be saved."""
        assert self.partitioned.plan is not None, "what has no plan is not piped"
        return self.partitioned.plan

    @property
    def prediction(self) -> Prediction:
        """What the simulator says of the plan."""
        return self.plan.prediction

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the original gives for these arguments, in the same structure."""
        arranged = self._now.run.arranged(args, kwargs)
        shapes = shapes_of(arranged)
        programs = self._programs(arranged)
        program = programs.find(shapes) if programs is not None else None
        if program is None:
            program = self._captured(arranged, programs)
            if programs is None:
                state = CapturedState(program.run.captured, arranged)
                self._known.insert(0, (state, Programs(program)))
                del self._known[MOST_STATES:]
            else:
                self._known[0][0].look(program.run.captured)
                programs.add(shapes, program)
        program.run.follow()
        self._now = program
        return program.run(*args, **kwargs)

    def _programs(self, arranged: Any) -> Programs | None:
        """Those captured from the module as it is now, put first."""
        for place, (state, programs) in enumerate(self._known):
            if state.holds(arranged):
                self._known.insert(0, self._known.pop(place))
                return programs
        return None

    def _captured(
        self, arranged: tuple[tuple[Any, ...], dict[str, Any]], programs: Programs | None
    ) -> PipedMode:
        """The module in the mode it is in now; no random number is drawn on the way."""
        state = torch.get_rng_state()
        try:
            args, kwargs = pytree.tree_map_only(torch.Tensor, _without_history, arranged)
            return self._cut(self.original, args, kwargs, programs)
        except CaptureError as error:
            if programs is None:
                raise
            raise _of_sizes(error, shapes_of(arranged), programs.first.served.shapes) from error
        finally:
            torch.set_rng_state(state)

    def train(self, mode: bool = True) -> "Piped":
        """Set the mode of the original; it is captured in it when it is next called."""
        self.original.train(mode)
        self.training = mode
        return self

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> "Piped":
        """Move or cast the tensors of the original, and let the stages use what they became."""
        self.original._apply(fn, recurse)
        programs = [each for _, known in self._known for each in known.every()]
        for captured in {id(p.run.captured): p.run.captured for p in programs}.values():
            constants = captured.program.constants
            constants.update({name: fn(value) for name, value in constants.items()})
        for program in programs:
            link(program.run.stages, held_tensors(program.run.captured))
        return self

    def __reduce__(self) -> Any:
        example = pytree.tree_map_only(
            torch.Tensor, _without_history, self._now.run.captured.program.example_inputs
        )
        own = {name: value for name, value in vars(self).items() if name.endswith("_hooks")}
        return Piped, (self.original, self._cut, *example), own

    def extra_repr(self) -> str:
        """How many stages there are."""
        return f"{len(self.stages)} stages"


def _of_sizes(error: CaptureError, given: Shapes, captured: Shapes) -> CaptureError:
    """What the model says to sizes that it does not take."""
    now, before = (", ".join(str(shape) for shape in shapes) for shapes in (given, captured))
    return CaptureError(
        f"{error.found} (called with sizes {now})",
        fix=f"give it sizes that it takes, as those captured: {before}; or {error.fix}",
        file=error.file,
        field=error.field,
    )


def _without_history(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)
