"""Vision Transformers: Dosovitskiy et al., "An image is worth 16x16 words", 2020
(arXiv:2010.11929), modules named as in torchvision's `vit_*`.
"""

from dataclasses import dataclass

from partita.errors import ModelError
from partita.graph.build import GraphBuilder
from partita.graph.record import Graph, Tensor
from partita.zoo.parts import finish, sizes_of


@dataclass(frozen=True, slots=True)
class VitSizes:
    """What distinguishes one vision transformer from another."""

    patch: int
    layers: int
    width: int
    inner: int
    heads: int


VIT = {
    "b16": VitSizes(16, 12, 768, 3072, 12),
    "l16": VitSizes(16, 24, 1024, 4096, 16),
    "h14": VitSizes(14, 32, 1280, 5120, 16),
}


def vit(
    variant: str = "b16", batch: int = 32, size: int = 224, dtype: str = "f32",
    loss: bool = True, fused_attention: bool = True,
) -> Graph:  # fmt: skip
    """ViT-B/16, ViT-L/16 or ViT-H/14 on images of `size`, with 1,000 classes."""
    sizes = sizes_of("vit", variant, VIT)
    if size % sizes.patch:
        raise ModelError(
            f"size {size}, which patches of {sizes.patch} do not divide",
            fix=f"choose a multiple of {sizes.patch}",
            field=f"vit-{variant}",
        )
    g = GraphBuilder(f"vit-{variant}", dtype)
    x = g.input("image", (batch, 3, size, size))
    x = g.conv(x, sizes.width, sizes.patch, stride=sizes.patch, name="conv_proj")
    x = g.reshape(x, (batch, sizes.width, -1), "patches")
    x = g.transpose(x, (0, 2, 1), "patches_first")
    token = g.parameter("class_token", (1, 1, sizes.width))
    token = g.one("expand", token, name="class_tokens", shape=(batch, 1, sizes.width))
    x = g.concat([token, x])
    with g.scope("encoder"):
        x = g.add(x, g.parameter("pos_embedding", (1, *x.shape[1:])))
        for layer in range(sizes.layers):
            with g.scope(f"layers.encoder_layer_{layer}"):
                x = _block(g, x, sizes, fused_attention)
        x = g.norm(x, name="ln")
    first = g.one("slice", x, name="class_output", axis=1, start=0, stop=1)
    first = g.reshape(first, (batch, sizes.width), "features")
    return finish(g, g.linear(first, 1000, "heads.head"), loss)


def _block(g: GraphBuilder, x: Tensor, sizes: VitSizes, fused: bool) -> Tensor:
    y = g.norm(x, name="ln_1")
    with g.scope("self_attention"):
        q, k, v = (g.linear(y, sizes.width, name) for name in ("q", "k", "v"))
        y = g.attention(q, k, v, sizes.heads, fused=fused)
        y = g.linear(y, sizes.width, "out_proj")
    x = g.add(x, y, name="attn_residual")
    y = g.norm(x, name="ln_2")
    with g.scope("mlp"):
        y = g.elementwise("gelu", g.linear(y, sizes.inner, "0"), name="1")
        y = g.linear(y, sizes.width, "3")
    return g.add(x, y, name="mlp_residual")
