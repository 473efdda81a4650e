"""Graph: a model as operators over named tensors, with one table per concern.

`shapes` output shapes, `loops` loop nests, `work` operations and bytes moved, `backward` training
graphs, `splits` legal splits and their communication, `files` text and JSON forms both ways, `draw`
pictures. A new concern is a new table keyed by kind, not an edit to the record.
"""

from partita.graph.backward import training_graph
from partita.graph.build import GraphBuilder
from partita.graph.record import Call, Graph, Op, Tensor

__all__ = ["Call", "Graph", "GraphBuilder", "Op", "Tensor", "training_graph"]
