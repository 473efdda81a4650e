"""Deep Speech 2: Amodei et al., 2015 (arXiv:1512.02595), in the sizes of the widely used PyTorch
implementation (deepspeech.pytorch): two 2-d convolutions over 161 frequencies, five bidirectional
LSTM layers of 1,024 units whose directions are added, 29 characters.

Its training loss is CTC; here every frame is given a character instead, since the loss is a
negligible part of the work.
"""

from partita.errors import ModelError
from partita.graph.build import GraphBuilder
from partita.graph.record import Graph, Tensor
from partita.zoo.parts import finish

FREQUENCIES = 161
CHANNELS = 32


def deepspeech2(
    batch: int = 16, seq: int = 201, dtype: str = "f32", loss: bool = True, hidden: int = 1024,
    layers: int = 5, cell: str = "lstm", bidirectional: bool = True, characters: int = 29,
) -> Graph:  # fmt: skip
    """Spectrograms of `seq` frames to character scores per second frame."""
    if cell not in ("lstm", "gru"):
        raise ModelError(f"cell {cell!r}", fix="use lstm or gru", field="deepspeech2")
    g = GraphBuilder("deepspeech2", dtype)
    x = g.input("spectrogram", (batch, 1, FREQUENCIES, seq))
    with g.scope("conv"):
        x = g.conv(x, CHANNELS, (41, 11), stride=2, padding=(20, 5), name="0")
        x = g.elementwise("clip", g.norm(x, "batch_norm", "1", training=loss), name="2")
        x = g.conv(x, CHANNELS, (21, 11), stride=(2, 1), padding=(10, 5), name="3")
        x = g.elementwise("clip", g.norm(x, "batch_norm", "4", training=loss), name="5")
    x = g.reshape(x, (batch, x.shape[1] * x.shape[2], x.shape[3]), "frames")
    x = g.transpose(x, (0, 2, 1), "time_first")
    for layer in range(layers):
        with g.scope(f"rnns.{layer}"):
            x = _norm(g, x, loss) if layer else x
            x = g.recurrent(x, hidden, cell, "rnn", bidirectional=bidirectional)
            if bidirectional:
                x = g.add(*g.split(x, (hidden, hidden), name="directions"), name="both")
    with g.scope("fc"):
        x = g.linear(_norm(g, x, loss), characters, "linear", bias=False)
    return finish(g, x, loss)


def _norm(g: GraphBuilder, x: Tensor, training: bool) -> Tensor:
    """Batch norm over all frames of all sequences."""
    flat = g.reshape(x, (x.shape[0] * x.shape[1], x.shape[2]), "flat")
    flat = g.norm(flat, "batch_norm", "batch_norm", training=training)
    return g.reshape(flat, x.shape, "sequences")
