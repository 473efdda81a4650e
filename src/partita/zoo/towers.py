"""Models of several stacks, or of images: BART, Whisper and ViT, as `transformers` has them.

Their layers are those of `decoder.py`; here stand what goes into the stacks and what comes out.
"""

from dataclasses import dataclass

from partita.errors import ModelError
from partita.graph.build import GraphBuilder
from partita.graph.record import Graph, Tensor
from partita.zoo.decoder import DecoderSizes, Stack
from partita.zoo.ending import finish


@dataclass(frozen=True, slots=True)
class Seq2SeqSizes:
    """An encoder and a decoder that looks at what it gives (BART, Whisper).

    `mels` are the bins of a spectrum that two convolutions turn into positions; 0: words are read.
    """

    encoder: DecoderSizes
    decoder: DecoderSizes
    mels: int = 0
    norm_embedding: bool = True  # of BART, whose stacks end without a norm
    logits_bias: bool = True


@dataclass(frozen=True, slots=True)
class ImageSizes:
    """Images in patches."""

    size: int
    patch: int
    channels: int = 3

    @property
    def positions(self) -> int:
        """Patches and the class token."""
        return (self.size // self.patch) ** 2 + 1


@dataclass(frozen=True, slots=True)
class VitClassifier:
    """A vision transformer that tells classes apart."""

    stack: DecoderSizes
    image: ImageSizes
    classes: int


Towers = Seq2SeqSizes | VitClassifier


def towers(
    name: str, sizes: Towers, batch: int, seq: int, dtype: str, loss: bool, fused: bool
) -> Graph:
    """The graph of any of them; `seq` is the length of texts."""
    g = GraphBuilder(name, dtype)
    if isinstance(sizes, Seq2SeqSizes):
        return _seq2seq(g, sizes, batch, seq, loss, fused)
    return _vit(g, sizes, batch, loss, fused)


def _seq2seq(
    g: GraphBuilder, sizes: Seq2SeqSizes, batch: int, seq: int, loss: bool, fused: bool
) -> Graph:
    encoder, decoder = (Stack(g, part, fused) for part in (sizes.encoder, sizes.decoder))
    width, vocab = sizes.decoder.width, sizes.decoder.vocab
    for part in (sizes.encoder, sizes.decoder) if not sizes.mels else (sizes.decoder,):
        if seq > part.positions:
            raise ModelError(
                f"{seq} positions, and the model has learned {part.positions}",
                fix=f"choose at most {part.positions}",
                field=g.name,
            )
    if sizes.mels:
        table = g.parameter("model.decoder.embed_tokens.weight", (vocab, width))
        x = _heard(g, sizes, batch)
    else:
        table = g.parameter("model.shared.weight", (vocab, width))
        with g.scope("model.encoder"):
            x = encoder.embedded(g.input("input_ids", (batch, seq), "i64"), table)
            x = encoder.norm(x, "layernorm_embedding") if sizes.norm_embedding else x
    with g.scope("model.encoder"):
        x = encoder.blocks(x)
        x = encoder.norm(x, "layer_norm") if sizes.encoder.final_norm else x
    ids = g.input("decoder_input_ids", (batch, seq), "i64")
    with g.scope("model.decoder"):
        y = decoder.embedded(ids, table)
        y = decoder.norm(y, "layernorm_embedding") if sizes.norm_embedding else y
        y = decoder.blocks(y, x)
        y = decoder.norm(y, "layer_norm") if sizes.decoder.final_norm else y
    logits = decoder.logits(y, table)
    if sizes.logits_bias:
        logits = g.add(logits, g.parameter("final_logits_bias", (1, vocab)), name="logits")
    return finish(g, logits, loss)


def _heard(g: GraphBuilder, sizes: Seq2SeqSizes, batch: int) -> Tensor:
    """A spectrum through two convolutions, the second of which halves its length."""
    positions, width = sizes.encoder.positions, sizes.encoder.width
    with g.scope("model.encoder"):
        x = g.input("input_features", (batch, sizes.mels, 2 * positions))
        x = g.elementwise("gelu", g.conv(x, width, 3, padding=1, name="conv1"))
        x = g.elementwise("gelu", g.conv(x, width, 3, stride=2, padding=1, name="conv2"))
        x = g.transpose(x, (0, 2, 1), "frames")
        return g.add(x, g.parameter("embed_positions.weight", (positions, width)), name="embedding")


def _vit(g: GraphBuilder, sizes: VitClassifier, batch: int, loss: bool, fused: bool) -> Graph:
    stack, image, width = Stack(g, sizes.stack, fused), sizes.image, sizes.stack.width
    x = g.input("pixel_values", (batch, image.channels, image.size, image.size))
    with g.scope("vit"):
        with g.scope("embeddings"):
            with g.scope("patch_embeddings"):
                x = g.conv(x, width, image.patch, stride=image.patch, name="projection")
            x = _patches(g, x, batch, width)
            token = g.parameter("cls_token", (1, 1, width))
            token = g.one("expand", token, name="cls_tokens", shape=(batch, 1, width))
            places = g.parameter("position_embeddings", (1, image.positions, width))
            x = g.add(g.concat([token, x]), places, name="embedding")
        x = stack.norm(stack.blocks(x), "layernorm")
    first = g.one("slice", x, name="class_output", axis=1, start=0, stop=1)
    first = g.reshape(first, (batch, width), "features")
    return finish(g, g.linear(first, sizes.classes, "classifier"), loss)


def _patches(g: GraphBuilder, x: Tensor, batch: int, width: int) -> Tensor:
    return g.transpose(g.reshape(x, (batch, width, -1), "patches"), (0, 2, 1), "patches_first")
