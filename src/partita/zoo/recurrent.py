"""Recurrent models: a language model, and the stacks that schedulers of small kernels are tried on.

`rnnlm` is the two-layer LSTM language model of PaSE (Elango, IPDPS 2021): vocabulary 100,000,
2,048 units, 256 positions. `lstm` (10 layers, 100 steps, 256 units) and `seq2seq` (encoder of 8
layers and 100 steps, decoder of 4 layers and 30 steps, 128 units) are those of Rammer (Ma et al.,
OSDI 2020), one op per cell and step as a scheduler of cells needs it; `unrolled=False` gives one op
per layer. Parameters of an LSTM layer, with torch's two biases: 4 h (i + h + 2).
"""

from dataclasses import dataclass

from partita.errors import ModelError
from partita.graph.build import GraphBuilder
from partita.graph.record import Graph, Tensor
from partita.zoo.parts import finish, finish_regression

MAX_CELLS = 100_000  # every step of an unrolled model is an op per layer


def rnnlm(
    batch: int = 64, seq: int = 256, dtype: str = "f32", loss: bool = True,
    hidden: int = 2048, layers: int = 2, vocab: int = 100_000,
) -> Graph:  # fmt: skip
    """Embedding, LSTM layers, and a linear layer over the vocabulary."""
    g = GraphBuilder("rnnlm", dtype)
    ids = g.input("input_ids", (batch, seq), "i64")
    x = g.embedding(ids, vocab, hidden, "embedding")
    x = _layers(g, x, hidden, layers, "lstm")
    return finish(g, g.linear(x, vocab, "decoder"), loss)


def lstm(
    batch: int = 1, seq: int = 100, dtype: str = "f32", loss: bool = True,
    hidden: int = 256, layers: int = 10, unrolled: bool = True,
) -> Graph:  # fmt: skip
    """A stack of LSTM layers; the last step of the top layer is what it gives."""
    g = GraphBuilder("lstm", dtype)
    if not unrolled:
        x = _layers(g, g.input("x", (batch, seq, hidden)), hidden, layers, "lstm")
        last = g.one("slice", x, name="last", axis=1, start=seq - 1)
        return finish_regression(g, g.reshape(last, (batch, hidden), "output"), loss)
    _check_cells(g, seq * layers)
    steps = _steps(g, "x", batch, seq, hidden)
    outputs, _ = _unrolled(g, steps, _weights(g, "lstm", hidden, layers), ())
    return finish_regression(g, outputs[-1], loss)


def seq2seq(
    batch: int = 1, seq: int = 100, dtype: str = "f32", loss: bool = True, hidden: int = 128,
    target_seq: int = 30, encoder_layers: int = 8, decoder_layers: int = 4, unrolled: bool = True,
) -> Graph:  # fmt: skip
    """An encoder whose last states start a decoder (layer by layer, from the top)."""
    if decoder_layers > encoder_layers:
        raise ModelError(
            f"{decoder_layers} decoder layers take their states from {encoder_layers}",
            fix="give the encoder at least as many layers",
            field="decoder_layers",
        )
    g = GraphBuilder("seq2seq", dtype)
    if not unrolled:
        x = _layers(g, g.input("source", (batch, seq, hidden)), hidden, encoder_layers, "encoder")
        y = g.input("target", (batch, target_seq, hidden))
        y = _layers(g, _started(g, x, y), hidden, decoder_layers, "decoder")
        return finish_regression(g, g.reshape(y, (batch, -1), "outputs"), loss)
    _check_cells(g, seq * encoder_layers + target_seq * decoder_layers)
    sources = _steps(g, "source", batch, seq, hidden)
    inputs = _steps(g, "target", batch, target_seq, hidden)
    encoder = _weights(g, "encoder", hidden, encoder_layers)
    _, states = _unrolled(g, sources, encoder, ())
    decoder = _weights(g, "decoder", hidden, decoder_layers)
    outputs, _ = _unrolled(g, inputs, decoder, states[encoder_layers - decoder_layers :])
    return finish_regression(g, g.concat(outputs, name="outputs"), loss)


def _started(g: GraphBuilder, memory: Tensor, inputs: Tensor) -> Tensor:
    """A layer op has no state to start from, so the encoder's last output joins every input."""
    last = g.one("slice", memory, name="state", axis=1, start=memory.shape[1] - 1)
    return g.add(inputs, last, name="start")


@dataclass(frozen=True, slots=True)
class _Cell:
    """The tensors of one layer; all its steps read the same."""

    name: str
    weights: tuple[Tensor, ...]
    hidden: int


State = tuple[Tensor, Tensor]


def _weights(g: GraphBuilder, name: str, hidden: int, layers: int) -> list[_Cell]:
    cells = []
    for layer in range(layers):
        with g.scope(f"{name}.{layer}"):
            rows = 4 * hidden
            weights = (
                g.parameter("weight_ih", (rows, hidden)),
                g.parameter("weight_hh", (rows, hidden)),
                g.parameter("bias_ih", (rows,)),
                g.parameter("bias_hh", (rows,)),
            )
        cells.append(_Cell(f"{name}.{layer}", weights, hidden))
    return cells


def _check_cells(g: GraphBuilder, cells: int) -> None:
    if cells > MAX_CELLS:
        raise ModelError(
            f"{cells} cells of steps and layers",
            fix=f"unroll at most {MAX_CELLS}, or give unrolled=False",
            field=g.name,
        )


def _steps(g: GraphBuilder, name: str, batch: int, steps: int, hidden: int) -> list[Tensor]:
    return [g.input(f"{name}.{step}", (batch, hidden)) for step in range(steps)]


def _unrolled(
    g: GraphBuilder, steps: list[Tensor], cells: list[_Cell], states: tuple[State, ...]
) -> tuple[list[Tensor], tuple[State, ...]]:
    """Outputs of the top layer per step, and the last states; without states, from zeros."""
    if not states:
        zeros = g.one("constant", name="zeros", shape=(steps[0].shape[0], cells[0].hidden))
        states = ((zeros, zeros),) * len(cells)
    outputs = []
    current = list(states)
    for number, x in enumerate(steps):
        for layer, cell in enumerate(cells):
            with g.scope(cell.name):
                h, c = current[layer]
                x, c = g.op("lstm_cell", x, h, c, *cell.weights, name=f"step{number}")
                current[layer] = (x, c)
        outputs.append(x)
    return outputs, tuple(current)


def _layers(g: GraphBuilder, x: Tensor, hidden: int, layers: int, name: str) -> Tensor:
    for layer in range(layers):
        with g.scope(name):
            x = g.recurrent(x, hidden, name=str(layer))
    return x
