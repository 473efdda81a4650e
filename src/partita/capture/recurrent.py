"""LSTMs and GRUs of several layers, as one node per layer: a pipeline can be cut between them.

PyTorch computes the layers one after the other in any case, with dropout between them in training.
"""

import operator
from typing import Any

import torch
from torch.fx import Graph, Node

aten = torch.ops.aten
RECURRENT = (aten.lstm.input, aten.gru.input)


def split_layers(graph: Graph) -> None:
    """Replace recurrent nodes of several layers by one node per layer."""
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target in RECURRENT and int(node.args[4]) > 1:
            _NodeSplit(graph, node).apply()


class _NodeSplit:
    """One node and the layers that replace it."""

    def __init__(self, graph: Graph, node: Node) -> None:
        self.graph = graph
        self.node = node
        x, states, weights, biases, layers, dropout, train, both, first = node.args
        self.x: Any = x
        self.states: list[Any] = list(states) if isinstance(states, list | tuple) else [states]
        self.weights: list[Any] = list(weights)  # type: ignore[arg-type]
        self.layers = int(layers)  # type: ignore[arg-type]
        self.dropout = float(dropout) if train else 0.0  # type: ignore[arg-type]
        self.directions = 2 if both else 1
        self.rest = (biases, 1, 0.0, train, both, first)

    def apply(self) -> None:
        used = {user.args[1] for user in self.node.users}
        each = len(self.weights) // self.layers
        last: list[list[Node]] = [[] for _ in self.states]
        x = self.x
        with self.graph.inserting_before(self.node):
            for layer in range(self.layers):
                own = [self._layer_state(state, layer) for state in self.states]
                given = own if self.node.target is aten.lstm.input else own[0]
                weights = self.weights[layer * each : (layer + 1) * each]
                made = self._call(self.node.target, (x, given, weights, *self.rest))
                x = self._call(operator.getitem, (made, 0))
                for number, nodes in enumerate(last, 1):
                    if number in used:
                        nodes.append(self._call(operator.getitem, (made, number)))
                if self.dropout and layer < self.layers - 1:
                    x = self._call(aten.dropout.default, (x, self.dropout, True))
            joined = [self._call(aten.cat.default, (nodes, 0)) if nodes else None for nodes in last]
        for user in list(self.node.users):
            position = int(user.args[1])  # type: ignore[arg-type]
            user.replace_all_uses_with(joined[position - 1] if position else x)  # type: ignore[arg-type]
            self.graph.erase_node(user)
        self.graph.erase_node(self.node)

    def _layer_state(self, state: Any, layer: int) -> Node:
        start = layer * self.directions
        return self._call(aten.slice.Tensor, (state, 0, start, start + self.directions))

    def _call(self, target: Any, args: tuple[Any, ...]) -> Node:
        made = self.graph.call_function(target, args)
        values = torch.fx.map_arg(args, lambda node: node.meta["val"])
        with self.node.args[0].meta["val"].fake_mode, torch.no_grad():  # type: ignore[union-attr]
            made.meta = {**self.node.meta, "val": target(*values)}
        return made
