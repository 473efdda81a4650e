"""Models of several stacks, or of images: BART, Whisper, ViT, CLIP, as `transformers` has them.

Their layers are those of `decoder.py`; here stand what goes into the stacks and what comes out.
"""

from dataclasses import dataclass

from partita.errors import ModelError
from partita.graph.build import GraphBuilder
from partita.graph.record import Graph, Tensor
from partita.zoo.decoder import DecoderSizes, ReadBefore, Stack, check_cache, check_fused
from partita.zoo.parts import finish, finish_regression


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


@dataclass(frozen=True, slots=True)
class ClipText:
    """CLIP's tower for texts; what it gives of one is what it has at the id `ending`.

    Without an `ending` that is at the largest id.
    """

    stack: DecoderSizes
    ending: int | None


@dataclass(frozen=True, slots=True)
class ClipImages:
    """CLIP's tower for images; what it gives of one is what it has at the class token."""

    stack: DecoderSizes
    image: ImageSizes


@dataclass(frozen=True, slots=True)
class ClipSizes:
    """CLIP, or one of its towers: both map into a space of `projection` dims."""

    text: ClipText | None
    images: ClipImages | None
    projection: int


Towers = Seq2SeqSizes | VitClassifier | ClipSizes


def towers(
    name: str, sizes: Towers, batch: int, seq: int, dtype: str, loss: bool, fused: bool,
    cache: int = 0,
) -> Graph:  # fmt: skip
    """The graph of any of them; `seq` is the length of texts.

    With a `cache` of tokens written before, a decoder alone that writes `seq` more.
    """
    g = GraphBuilder(name, dtype)
    if isinstance(sizes, Seq2SeqSizes):
        return _seq2seq(g, sizes, batch, seq, loss, fused, cache)
    if isinstance(sizes, ClipSizes):
        return _clip(g, sizes, batch, seq, loss, fused)
    return _vit(g, sizes, batch, loss, fused)


def _seq2seq(
    g: GraphBuilder, sizes: Seq2SeqSizes, batch: int, seq: int, loss: bool, fused: bool, cache: int
) -> Graph:
    check_cache(g.name, seq, cache, 0, loss)
    encoder, decoder = Stack(g, sizes.encoder, fused), Stack(g, sizes.decoder, fused, cache)
    width, vocab = sizes.decoder.width, sizes.decoder.vocab
    for part in (sizes.encoder, sizes.decoder) if not sizes.mels else (sizes.decoder,):
        if seq + cache > part.positions:
            raise ModelError(
                f"{seq + cache} positions, and the model has learned {part.positions}",
                fix=f"choose at most {part.positions}",
                field=g.name,
            )
    shared = not sizes.mels and sizes.decoder.tied
    name = "model.shared.weight" if shared else "model.decoder.embed_tokens.weight"
    table = g.parameter(name, (vocab, width))
    if cache:
        check_fused(g.name, fused)
        x: Tensor | ReadBefore = ReadBefore(sizes.encoder.positions if sizes.mels else seq + cache)
    else:
        x = _encoded(g, encoder, sizes, table if shared else None, (batch, seq))
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


def _encoded(
    g: GraphBuilder, encoder: Stack, sizes: Seq2SeqSizes, table: Tensor | None, ids: tuple[int, int]
) -> Tensor:
    """What the encoder gives for a text of that many ids, or for a spectrum.

    Where no `table` of words is shared with it, it has its own.
    """
    if sizes.mels:
        x = _heard(g, sizes, ids[0])
    with g.scope("model.encoder"):
        if not sizes.mels:
            if table is None:
                shape = (sizes.encoder.vocab, sizes.encoder.width)
                table = g.parameter("embed_tokens.weight", shape)
            x = encoder.embedded(g.input("input_ids", ids, "i64"), table)
            x = encoder.norm(x, "layernorm_embedding") if sizes.norm_embedding else x
        x = encoder.blocks(x)
        return encoder.norm(x, "layer_norm") if sizes.encoder.final_norm else x


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


def _clip(
    g: GraphBuilder, sizes: ClipSizes, batch: int, seq: int, loss: bool, fused: bool
) -> Graph:
    """How well texts and images go together; of one tower, where it maps its inputs."""
    text = image = None
    if sizes.text is not None:
        text = _clip_text(g, sizes.text, sizes.projection, batch, seq, fused)
    if sizes.images is not None:
        image = _clip_image(g, sizes.images, sizes.projection, batch, fused)
    if text is None or image is None:
        embeds = image if text is None else text
        assert embeds is not None
        return finish_regression(g, embeds, loss)
    text, image = (_unit(g, x, name) for x, name in ((text, "text"), (image, "image")))
    scores = g.one("matmul", image, text, name="similarity", transpose_b=True)
    scale = g.elementwise("exp", g.parameter("logit_scale", ()), name="temperature")
    logits = g.elementwise("mul", scores, scale, name="logits_per_image")
    if not loss:
        return g.finish(logits)
    targets = g.input("targets", (batch,), "i64")
    turned = g.transpose(logits, (1, 0), "logits_per_text")
    both = [
        g.one("cross_entropy", each, targets, name=f"{name}_loss")
        for each, name in ((logits, "image"), (turned, "text"))
    ]
    return g.finish(g.elementwise("scale", g.add(*both, name="losses"), name="loss", factor=0.5))


def _unit(g: GraphBuilder, x: Tensor, name: str) -> Tensor:
    """Vectors of length 1."""
    x = g.norm(x, "rms_norm", f"{name}_norm", affine=False, eps=0.0)
    return g.elementwise("scale", x, name=f"{name}_unit", factor=x.shape[-1] ** -0.5)


def _clip_text(
    g: GraphBuilder, sizes: ClipText, projection: int, batch: int, seq: int, fused: bool
) -> Tensor:
    stack, width = Stack(g, sizes.stack, fused), sizes.stack.width
    if seq > sizes.stack.positions:
        raise ModelError(
            f"{seq} positions, and the model has learned {sizes.stack.positions}",
            fix=f"choose at most {sizes.stack.positions}",
            field=g.name,
        )
    ids = g.input("input_ids", (batch, seq), "i64")
    with g.scope("text_model"):
        with g.scope("embeddings"):
            table = g.parameter("token_embedding.weight", (sizes.stack.vocab, width))
            x = stack.embedded(ids, table)
        with g.scope("encoder"):
            x = stack.blocks(x)
        x = stack.norm(x, "final_layer_norm")
        marks = g.reshape(ids, (batch, seq, 1), "marks")
        value = -1 if sizes.ending is None else sizes.ending
        x = g.elementwise("marked", x, marks, name="at_ending", value=value)
        x = g.one("reduce", x, name="pooled", axes=(1,), fn="sum")
    return g.linear(x, projection, "text_projection", bias=False)


def _clip_image(
    g: GraphBuilder, sizes: ClipImages, projection: int, batch: int, fused: bool
) -> Tensor:
    stack, image, width = Stack(g, sizes.stack, fused), sizes.image, sizes.stack.width
    x = g.input("pixel_values", (batch, image.channels, image.size, image.size))
    with g.scope("vision_model"):
        with g.scope("embeddings"):
            x = g.conv(
                x, width, image.patch, stride=image.patch, bias=False, name="patch_embedding"
            )
            x = _patches(g, x, batch, width)
            token = g.parameter("class_embedding", (width,))
            token = g.one("expand", token, name="class_tokens", shape=(batch, 1, width))
            places = g.parameter("position_embedding.weight", (image.positions, width))
            x = g.add(g.concat([token, x], 1), places, name="embedding")
        x = stack.norm(x, "pre_layrnorm")
        with g.scope("encoder"):
            x = stack.blocks(x)
        x = g.one("slice", x, name="class_output", axis=1, start=0, stop=1)
        x = stack.norm(g.reshape(x, (batch, width), "features"), "post_layernorm")
    return g.linear(x, projection, "visual_projection", bias=False)


def _patches(g: GraphBuilder, x: Tensor, batch: int, width: int) -> Tensor:
    return g.transpose(g.reshape(x, (batch, width, -1), "patches"), (0, 2, 1), "patches_first")
