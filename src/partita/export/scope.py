"""What an export knows of the plan it is made from: model, devices, sizes read off the graph."""

from dataclasses import dataclass

from partita.graph.record import Graph
from partita.jobs.frameworks import LayerStack, StackSizes, layer_stack, stack_sizes


@dataclass(frozen=True)
class ExportScope:
    """A model on devices: what all targets need beside the strategy."""

    spec: str
    graph: Graph
    batch: int
    dtype: str
    optimizer: str
    num_devices: int
    num_nodes: int
    training: bool = True

    @property
    def stack(self) -> LayerStack | None:
        """Its repeated layers."""
        return layer_stack(self.graph)

    @property
    def sizes(self) -> StackSizes | None:
        """Its sizes; None where it is not a stack of transformer layers."""
        return stack_sizes(self.graph)

    def launcher(self) -> str:
        """The beginning of a command that starts a process on every device."""
        each = self.num_devices // self.num_nodes
        if self.num_nodes == 1:
            return f"torchrun --standalone --nproc-per-node {each}"
        return (
            f"torchrun --nnodes {self.num_nodes} --nproc-per-node {each} "
            "--rdzv-backend c10d --rdzv-endpoint HOST:29500"
        )
