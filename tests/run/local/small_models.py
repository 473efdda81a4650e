"""Models of a few dozen numbers per tensor, one of each family."""

from partita.graph import GraphBuilder
from partita.zoo.gpt import GptSizes, gpt
from partita.zoo.llama import DecoderSizes, Experts, decoder
from partita.zoo.recurrent import lstm, rnnlm
from partita.zoo.t5 import T5Sizes, encoder_decoder


def convolutions():
    g = GraphBuilder("convolutions")
    x = g.input("x", (4, 3, 8, 8))
    x = g.relu(g.norm(g.conv(x, 4, 3, padding=1, bias=False), "batch_norm"))
    y = g.conv(g.pool(x, 3, stride=2, padding=1), 4, 3, padding=1, groups=2, name="conv2")
    y = g.norm(y, "group_norm", "norm2", groups=2)
    y = g.one("resize", y, output=(8, 8))
    x = g.concat([g.add(x, y), g.conv(x, 2, 1, name="side")])
    x = g.dropout(g.flatten(g.global_pool(x, 2)))
    logits = g.linear(x, 6, "head")
    return g.finish(g.cross_entropy(logits, g.input("targets", (4,), "i64")))


def perceptron():
    """Its output is no number, so the gradient is given with the batch."""
    g = GraphBuilder("perceptron")
    x = g.elementwise("tanh", g.linear(g.input("x", (4, 6)), 8, "up"))
    return g.finish(g.linear(x, 4, "down"))


MODELS = {
    "convolutions": convolutions,
    "perceptron": perceptron,
    "gpt": lambda: gpt("gpt", GptSizes(2, 8, 2, 8, 12), 4, 4, "f32", True, True),
    "spelled": lambda: gpt("gpt", GptSizes(1, 8, 2, 8, 12), 4, 4, "f32", True, False),
    "llama": lambda: decoder(
        "llama", DecoderSizes(1, 8, 12, 4, 2, 12, query_norm=True, windows=(2,)), 4, 4, "f32", True
    ),
    "mixtral": lambda: decoder(
        "mixtral", DecoderSizes(1, 8, 12, 2, vocab=12, experts=Experts(4, 2, 6, 4)),
        4, 4, "bf16", True,
    ),
    "t5": lambda: encoder_decoder(
        "t5", T5Sizes(1, 8, 12, 2, 4, vocab=12, buckets=4), 4, 4, 4, "f32", True
    ),
    "rnnlm": lambda: rnnlm(4, 3, hidden=4, layers=2, vocab=12),
    "lstm": lambda: lstm(4, 3, hidden=4, layers=2),
}  # fmt: skip
