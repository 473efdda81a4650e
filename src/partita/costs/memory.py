"""Bytes a device holds: parameters, gradients, optimizer states, activations, workspace.

parameters   n * bytes(dtype)
gradients    n * bytes(dtype), from the weight gradient until the update
states       n * 4 per optimizer state (Adam two, momentum one, SGD none), and 4 more for the
             full-precision copy where parameters are narrower
activations  what the backward reads of the forward, plus what is live at the moment
workspace    what the driver, libraries and communication buffers keep for themselves
"""

from dataclasses import dataclass

from partita.cluster import DeviceKind
from partita.costs.physics import physics_of
from partita.graph.backward import OPTIMIZER_STATES
from partita.graph.record import Graph, dtype_bytes

GPU_WORKSPACE_BYTES = 1024**3  # context, library workspaces, communication buffers
# The part of the workspace that libraries take from PyTorch's allocator (32 MiB for cuBLAS in each
# thread, of which training has two): what `torch.cuda.max_memory_allocated` counts beside tensors.
LIBRARY_BYTES = 64 * 1024**2


@dataclass(frozen=True, slots=True)
class ModelMemory:
    """What a whole model holds, undivided."""

    parameters: int
    gradients: int
    states: int
    saved_activations: int

    @property
    def total(self) -> int:
        """All of it together."""
        return self.parameters + self.gradients + self.states + self.saved_activations


def workspace_bytes(kind: DeviceKind) -> float:
    """Memory of a device that no tensor of ours can have."""
    if kind.type == "cpu":
        return 0.0
    record = physics_of(kind.name)
    known = record.own and "workspace_bytes" in dict(record.parameters)
    size = record.physics.workspace_bytes if known else GPU_WORKSPACE_BYTES
    return float(min(size, kind.memory_bytes // 8))


def state_bytes(num_parameters: int, dtype: str, optimizer: str, state_dtype: str = "f32") -> int:
    """Bytes of optimizer state for parameters of one dtype."""
    copies = OPTIMIZER_STATES[optimizer] + (dtype != state_dtype)
    return num_parameters * copies * dtype_bytes(state_dtype)


def model_memory(training: Graph) -> ModelMemory:
    """Totals of a training graph (of a forward graph: parameters only); added up once."""
    key = ("model memory", "")
    if key not in training.memo:
        training.memo[key] = _totals(training)
    model_memory = training.memo[key]
    assert isinstance(model_memory, ModelMemory)
    return model_memory


def _totals(training: Graph) -> ModelMemory:
    forward = [op for op in training.ops if op.phase == "forward"]
    seen = {name for op in forward for name in (*op.inputs, *op.outputs)}
    saved = {
        name
        for op in training.ops
        if op.phase in ("dgrad", "wgrad")
        for name in op.inputs
        if name in seen and training.tensor(name).role in ("activation", "input")
    }
    updates = [op for op in training.ops if op.phase == "update"]
    return ModelMemory(
        parameters=sum(tensor.size_bytes for tensor in training.parameters),
        gradients=sum(training.tensor(op.inputs[1]).size_bytes for op in updates),
        states=sum(training.tensor(n).size_bytes for op in updates for n in op.inputs[2:]),
        saved_activations=sum(training.tensor(n).size_bytes for n in saved),
    )
