"""Models of a few dozen numbers per tensor, at least one of each family of the zoo.

Where a family's function takes sizes they are given. Image classifiers have their channels written
into them: `Narrow` builds them with a fraction of each.
"""

import importlib
from unittest import mock

from partita.graph import GraphBuilder
from partita.zoo import transformer as transformers
from partita.zoo import vit as vits
from partita.zoo.bert import BertSizes, encoder
from partita.zoo.deepspeech2 import deepspeech2
from partita.zoo.densenet import densenet121
from partita.zoo.gpt import GptSizes, gpt
from partita.zoo.llama import DecoderSizes, Experts, decoder
from partita.zoo.randwire import randwire_small
from partita.zoo.recurrent import lstm, rnnlm, seq2seq
from partita.zoo.resnet import resnet
from partita.zoo.t5 import T5Sizes, encoder_decoder
from partita.zoo.unet import unet

CLASSES = 6


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


class Narrow(GraphBuilder):
    """Builds convolutional models with a fraction of their channels."""

    divisor = 32

    def conv(self, x, channels, kernel, *, groups=1, **others):
        if groups == x.shape[1] == channels:  # depthwise: as wide as what it reads
            return super().conv(x, channels, kernel, groups=groups, **others)
        few = -(-channels // self.divisor)
        pairs = 2 if groups > 1 else 1
        few += few % pairs
        return super().conv(x, few, kernel, groups=pairs, **others)

    def linear(self, x, features, name="linear", bias=True):
        return super().linear(x, CLASSES, name, bias)


def narrow(module, build, divisor=32, **constants):
    """A model of the zoo built narrow, with other constants in its module."""
    zoo = importlib.import_module(f"partita.zoo.{module}")

    def make():
        builder = type("Narrow", (Narrow,), {"divisor": divisor})
        with mock.patch.multiple(zoo, GraphBuilder=builder, **constants):
            return build(zoo)

    return make


def transformer():
    sizes = {"small": transformers.TransformerSizes(1, 8, 12, 2, vocab=12)}
    with mock.patch.dict(transformers.TRANSFORMER, sizes):
        return transformers.transformer("small", 4, 4)


def vit():
    with (
        mock.patch.dict(vits.VIT, {"small": vits.VitSizes(4, 1, 8, 12, 2)}),
        mock.patch.object(vits, "GraphBuilder", Narrow),
        mock.patch.object(Narrow, "linear", GraphBuilder.linear),
        mock.patch.object(Narrow, "divisor", 1),
    ):
        return vits.vit("small", 4, 8)


def deepspeech():
    with mock.patch.multiple("partita.zoo.deepspeech2", FREQUENCIES=9, CHANNELS=2):
        return deepspeech2(4, 7, hidden=4, layers=2, characters=5)


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
    "moe": lambda: encoder_decoder(
        "moe", T5Sizes(2, 8, 12, 2, 4, vocab=12, buckets=4, experts=4), 4, 4, 4, "bf16", True
    ),
    "rnnlm": lambda: rnnlm(4, 3, hidden=4, layers=2, vocab=12),
    "lstm": lambda: lstm(4, 3, hidden=4, layers=2),
    "layers": lambda: lstm(4, 3, hidden=4, layers=2, unrolled=False),
    "seq2seq": lambda: seq2seq(
        4, 3, hidden=4, target_seq=2, encoder_layers=2, decoder_layers=1
    ),
    "deepspeech2": deepspeech,
    "bert": lambda: encoder("bert", BertSizes(1, 8, 2, 12, 4, 12), 4, 4, "bf16", True),
    "transformer": transformer,
    "vit": vit,
    "alexnet": narrow("alexnet", lambda zoo: zoo.alexnet(4, 63), 64),
    "vgg": narrow("vgg", lambda zoo: zoo.vgg16(4, 8), 32, BLOCKS=((64, 2), (128, 1))),
    "resnet": narrow("resnet", lambda zoo: resnet("resnet", (1, 2), 4, 16, "f32", True), 16),
    "resnext": narrow(
        "resnet",
        lambda zoo: resnet("resnext", (1, 1), 4, 16, "f32", True, groups=32, group_width=4), 16,
    ),
    "densenet": narrow("densenet", lambda zoo: densenet121(4, 16, blocks=(2, 2))),
    "squeezenet": narrow(
        "squeezenet", lambda zoo: zoo.squeezenet("1.1", 4, 23, "f32", True), 8,
        FIRES=((16, 64), (16, 64), (32, 128)),
    ),
    "randwire": narrow(
        "randwire", lambda zoo: randwire_small(4, 64, channels=4, nodes=5), 1, HEAD=4
    ),
    "unet": lambda: unet(2, 20, widths=(2, 4)),
}  # fmt: skip

# Of many ops: tried by the benchmark, and once each by the tests.
LARGE_MODELS = {
    "inception": narrow("inception", lambda zoo: zoo.inception_v3(2, 107)),
    "nasnet": narrow("nasnet", lambda zoo: zoo.nasnet_large(2, 64), 21, REPEATS=1),
}
