"""What the model is fed with: the parts of a batch that a rank's blocks read.

A batch is cut along its first dim into micro-batches of equal size, in order; a rank takes its
share of each. With `local` a rank gives its own share only: those rows of every micro-batch, one
micro-batch after the other. The gradient of the loss is 1 over the number of micro-batches, so a
step's gradients are those of the mean of the micro-batches' losses.
"""

import torch

from partita.capture.translate import DTYPES
from partita.errors import PlanError
from partita.graph.record import Graph
from partita.meaning import Value
from partita.run.distributed.held import StageState
from partita.run.local.shards import interval, shard_index

T = torch.Tensor


class Feed:
    """The inputs of one step."""

    def __init__(self, small: Graph, count: int, batch: int, device: torch.device) -> None:
        self.small, self.count, self.batch, self.device = small, count, batch, device
        self.seed = f"{small.outputs[0]}.grad" if small.is_training else ""
        self.wanted = {tensor.name: tensor for tensor in small.inputs if tensor.name != self.seed}
        self.given: dict[str, T] = {}
        self.is_local = False

    def take(self, given: dict[str, T], *, local: bool) -> None:
        """The tensors of a step; sizes and types must be those of the plan."""
        self.given, self.is_local = given, local
        for name, value in given.items():
            self._check_dtype(name, value)
        if local:
            return
        for name, tensor in self.wanted.items():
            if name not in given:
                raise PlanError(f"the step lacks {name}", fix="call it as the module", field="step")
            value, shape = given[name], tensor.shape
            if tuple(value.shape) == shape and self.count == 1:
                continue
            whole = (shape[0] * self.count, *shape[1:]) if shape else shape
            if tuple(value.shape) not in (whole, shape):
                rows = value.shape[0] if value.ndim else 1
                raise PlanError(
                    f"is {list(value.shape)}, and {list(whole)} was planned",
                    fix=f"give batches of {self.batch} samples: drop or fill up a last batch of "
                    f"{rows}, or plan for that size",
                    field=f"argument {name}",
                )

    def _check_dtype(self, name: str, value: T) -> None:
        wanted = self.wanted.get(name)
        if wanted is not None and DTYPES.get(value.dtype) != wanted.dtype:
            planned = next(key for key, word in DTYPES.items() if word == wanted.dtype)
            raise PlanError(
                f"is of {value.dtype}, and {planned} was planned",
                fix=f"cast it with .to({planned}), or plan with what the step gives",
                field=f"argument {name}",
            )

    def __call__(self, name: str, value: Value, state: StageState, m: int) -> T:
        """A rank's part of an input in one micro-batch."""
        if name == self.seed:
            shape = self.small.tensor(name).shape
            dtype = torch.get_default_dtype()
            loss = self.small.tensor(self.small.outputs[0]).dtype
            from partita.run.distributed.opwise import TORCH_DTYPES

            dtype = TORCH_DTYPES.get(loss, dtype)
            whole = torch.full(shape, 1.0 / self.count, dtype=dtype, device=self.device)
            return whole[shard_index(shape, value.layout, state.axes, state.place)]
        return self._own(name, value, state, m).to(self.device)

    def _own(self, name: str, value: Value, state: StageState, m: int) -> T:
        shape = self.small.tensor(name).shape
        if self.is_local:
            return self._local(name, value, state, m)
        whole = self.given[name]
        if tuple(whole.shape) != shape:
            whole = whole[m * shape[0] : (m + 1) * shape[0]]
        return whole[shard_index(shape, value.layout, state.axes, state.place)]

    def _local(self, name: str, value: Value, state: StageState, m: int) -> T:
        shape = self.small.tensor(name).shape
        cuts = [
            (state.axes[i], state.place[i])
            for i, p in enumerate(value.layout)
            if p.kind == "shard" and p.dim == 0
        ]
        start, stop = interval(shape[0], cuts) if shape else (0, 0)
        own = self.given.get(name)
        share = stop - start
        if own is None or (shape and own.shape[0] != share * self.count):
            rows = "nothing" if own is None else f"{own.shape[0]} rows"
            raise PlanError(
                f"gives {rows} of {name}, and {share * self.count} rows are this rank's part",
                fix=f"give {share} rows of each of the {self.count} micro-batches, or the whole "
                "batch without local=True",
                field="step",
            )
        if not shape:
            return own
        rest = tuple(p if p.dim != 0 else type(p)("replicate") for p in value.layout)
        own = own[m * share : (m + 1) * share]
        return own[(slice(None), *shard_index(shape, rest, state.axes, state.place)[1:])]
