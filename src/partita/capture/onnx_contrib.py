"""Operators as Optimum and onnxruntime write them (`com.microsoft`), and quantised ones.

Fused attention becomes what it is made of: a product with the packed weights, rotary positions,
keys and values of earlier calls put in front, the attention itself. A norm with what is added
before it becomes a sum and a norm. A quantised product is a product of its whole numbers.

Padding is a mask for each key. Where a file gives lengths instead, the mask is made of them by an
op that no table knows.
"""

from typing import Any

from partita.capture.onnx_site import OnnxSite, OnnxUnfit
from partita.graph.record import Tensor


def _summed(site: OnnxSite, name: str, x: Tensor, *others: Tensor) -> Tensor:
    return site.part(name, "elementwise", x, *others, fn="add") if others else x


def skip_norm(kind: str) -> Any:
    """A norm of a sum: input, skip, scale, shift of a layer norm, bias."""

    def rule(site: OnnxSite) -> None:
        shifts = kind == "layer_norm"
        bias = [site.tensor(3 + shifts)] if site.has(3 + shifts) else []
        total = _summed(site, "sum", site.tensor(0), site.tensor(1), *bias)
        weights = [site.tensor(2), *([site.tensor(3)] if shifts and site.has(3) else [])]
        site.give(kind, total, *weights, dims=1, eps=site.attr("epsilon", 1e-5))
        site.also(3, total)

    return rule


def bias_gelu(site: OnnxSite) -> None:
    """A gelu of a sum, where there is something to add."""
    more = [site.tensor(1)] if site.has(1) else []
    site.give("elementwise", _summed(site, "sum", site.tensor(0), *more), fn="gelu")


def fused_matmul(site: OnnxSite) -> None:
    """A product of two, each as it is or transposed."""
    product = {
        "transpose_a": bool(site.attr("transA", 0)),
        "transpose_b": bool(site.attr("transB", 0)),
    }
    site.give("matmul", site.tensor(0), site.tensor(1), **product)


def rotary(site: OnnxSite) -> None:
    """[b, heads, s, d] or [b, s, heads * d] turned by its positions."""
    x = site.tensor(0)
    heads = site.attr("num_heads", 0)
    if len(x.shape) == 3 and not heads:
        raise OnnxUnfit
    site.give("elementwise", x, fn="rope", **_turned(site, x, heads))


def _turned(site: OnnxSite, x: Tensor, heads: int) -> dict[str, Any]:
    turned: dict[str, Any] = {"heads": heads} if len(x.shape) == 3 else {}
    if site.attr("rotary_embedding_dim", 0):
        turned["size"] = site.attr("rotary_embedding_dim")
    if site.attr("interleaved", site.attr("rotary_interleaved", 0)):
        turned["interleaved"] = True
    return turned


def _scale(site: OnnxSite) -> dict[str, Any]:
    return {"scale": site.attr("scale")} if site.attr("scale", 0.0) else {}


def _cut(site: OnnxSite, x: Tensor, sizes: tuple[int, ...]) -> list[Tensor]:
    """Parts of the last dim."""
    parts, start = [], 0
    for name, size in zip("qkv", sizes, strict=True):
        parts.append(
            site.part(f"{name}", "slice", x, axis=len(x.shape) - 1, start=start, stop=start + size)
        )
        start += size
    return parts


def _key_mask(site: OnnxSite, position: int, batch: int, keys: int) -> list[Tensor]:
    """Which keys may be looked at, for all heads and queries; made of lengths where need be."""
    if not site.has(position):
        return []
    mask = site.tensor(position)
    if mask.shape == (batch, keys):
        allowed = site.part("allowed", "elementwise", mask, fn="cast", dtype="bool")
        return [site.part("mask", "reshape", allowed, shape=(batch, 1, 1, keys))]
    if len(mask.shape) == 3:
        allowed = site.part("allowed", "elementwise", mask, fn="cast", dtype="bool")
        return [site.part("mask", "reshape", allowed, shape=(batch, 1, *mask.shape[1:]))]
    return [site.opaque("mask", "length_mask", (mask,), (batch, 1, 1, keys))]


def packed_attention(site: OnnxSite, dtype: str | None = None) -> None:
    """input [b, s, i], weights [i, q + k + v], bias, mask, past, attention bias."""
    x, weights = site.tensor(0), site.tensor(1)
    if site.holds(4):
        raise OnnxUnfit
    bias = [site.tensor(2)] if site.has(2) else []
    made = _summed(site, "sum", site.part("product", "matmul", x, weights, dtype=dtype), *bias)
    width = weights.shape[1]
    sizes = tuple(site.attr("qkv_hidden_sizes", (width // 3,) * 3))
    q, k, v = _cut(site, made, sizes)
    heads = site.attr("num_heads")
    mask = _key_mask(site, 3, x.shape[0], x.shape[1])
    mask = [_summed(site, "bias", site.tensor(5), *mask)] if site.has(5) else mask
    site.give(
        "attention", q, k, v, *mask, heads=heads, kv_heads=heads,
        causal=bool(site.attr("unidirectional", 0)), **_scale(site),
    )  # fmt: skip


def multi_head_attention(site: OnnxSite) -> None:
    """query [b, s, h * d], key, value, bias [3 * h * d], padding, attention bias, past."""
    if not site.has(2) or len(site.tensor(0).shape) != 3 or len(site.tensor(1).shape) != 3:
        raise OnnxUnfit  # packed in another way
    given = [site.tensor(i) for i in range(3)]
    heads = site.attr("num_heads")
    if site.has(3):
        parts = _cut(site, site.tensor(3), tuple(x.shape[-1] for x in given))
        given = [
            _summed(site, f"{name}.sum", x, part)
            for name, x, part in zip("qkv", given, parts, strict=True)
        ]
    mask = _key_mask(site, 4, given[1].shape[0], given[1].shape[1])
    mask = [_summed(site, "bias", site.tensor(5), *mask)] if site.has(5) else mask
    past = [site.tensor(i) for i in (6, 7) if site.holds(i)]
    _attend(site, given, heads, heads, past, mask, bool(site.attr("unidirectional", 0)))


def group_query_attention(site: OnnxSite) -> None:
    """query [b, s, h * d], or it with keys and values; key, value, past, lengths, angles."""
    heads, groups = site.attr("num_heads"), site.attr("kv_num_heads")
    q = site.tensor(0)
    if site.has(1):
        given = [q, site.tensor(1), site.tensor(2)]
    else:
        size = q.shape[-1] // (heads + 2 * groups)
        given = _cut(site, q, (heads * size, groups * size, groups * size))
    if site.attr("do_rotary", 0):
        for i, count in ((0, heads), (1, groups)):
            turned = _turned(site, given[i], count)
            given[i] = site.part(f"{'qk'[i]}.rope", "elementwise", given[i], fn="rope", **turned)
    window = site.attr("local_window_size", -1)
    past = [site.tensor(i) for i in (3, 4) if site.holds(i)]
    more = {"window": window} if window > 0 else {}
    if site.attr("softcap", 0.0):
        more["softcap"] = site.attr("softcap")
    _attend(site, given, heads, groups, past, [], True, **more)


def _attend(
    site: OnnxSite, given: list[Tensor], heads: int, groups: int, past: list[Tensor],
    mask: list[Tensor], causal: bool, **more: Any,
) -> None:  # fmt: skip
    """Attention of [b, s, heads * d], behind keys and values of earlier calls if there are any."""
    settings = {"causal": causal, **_scale(site), **more}
    asked = [place for place in (1, 2) if place < len(site.node.output) and site.node.output[place]]
    if not past and not asked:
        site.give("attention", *given, *mask, heads=heads, kv_heads=groups, **settings)
        return
    batch, queries, _ = given[0].shape
    apart = []
    for name, x, count in zip("qkv", given, (heads, groups, groups), strict=True):
        shape = (batch, x.shape[1], count, x.shape[2] // count)
        split = site.part(f"{name}.heads", "reshape", x, shape=shape)
        apart.append(site.part(f"{name}.first", "transpose", split, perm=(0, 2, 1, 3)))
    if past:
        for i, name in ((1, "k"), (2, "v")):
            apart[i] = site.part(f"{name}.all", "concat", past[i - 1], apart[i], axis=2)
    mixed = site.part("attention", "attention", *apart, *mask, **settings)
    back = site.part("last", "transpose", mixed, perm=(0, 2, 1, 3))
    site.give("reshape", back, shape=(batch, queries, heads * mixed.shape[-1]))
    for place in asked:
        site.also(place, apart[place])


# Quantised.


def dequantize(site: OnnxSite) -> None:
    """Whole numbers times a scale."""
    x, scale = site.tensor(0), site.tensor(1)
    site.give("elementwise", x, fn="scale", dtype=site.out_dtype() or scale.dtype)


def quantize(site: OnnxSite) -> None:
    """Numbers rounded to whole ones; the type is the zero point's."""
    zero = site.tensor(2).dtype if site.has(2) else "u8"
    site.give("elementwise", site.tensor(0), fn="round", dtype=zero)


def dynamic_quantize(site: OnnxSite) -> None:
    """The same with scale and zero point found from the numbers."""
    site.give("elementwise", site.tensor(0), fn="round", dtype="u8")


def quantized_product(second: int, out: str) -> Any:
    """A product of whole numbers; scales and zero points lie beside them."""

    def rule(site: OnnxSite) -> None:
        dtype = out or site.tensor(7).dtype
        site.give("matmul", site.tensor(0), site.tensor(second), dtype=dtype)

    return rule


def quantized_conv(second: int, out: str) -> Any:
    """A convolution of whole numbers."""

    def rule(site: OnnxSite) -> None:
        x, w = site.tensor(0), site.tensor(second)
        rank = len(w.shape) - 2
        pads = list(site.attr("pads", [0] * 2 * rank))
        if pads[:rank] != pads[rank:] or site.attr("auto_pad", "NOTSET") not in ("NOTSET", "VALID"):
            raise OnnxUnfit
        site.give(
            "conv", x, w, stride=tuple(site.attr("strides", [1] * rank)),
            padding=tuple(pads[:rank]), dilation=tuple(site.attr("dilations", [1] * rank)),
            groups=site.attr("group", 1), dtype=out or site.tensor(7).dtype,
        )  # fmt: skip

    return rule


def matmul_integer_to_float(site: OnnxSite) -> None:
    """a, b, their scales, zero points, bias."""
    bias = [site.tensor(6)] if site.has(6) else []
    dtype = site.tensor(2).dtype
    if not bias:
        site.give("matmul", site.tensor(0), site.tensor(1), dtype=dtype)
        return
    made = site.part("product", "matmul", site.tensor(0), site.tensor(1))
    site.give("elementwise", made, *bias, fn="add", dtype=dtype)


def matmul_bits(site: OnnxSite) -> None:
    """x [.., K] and weights of few bits [N, K], packed, with scales of blocks: unpacked first."""
    x, packed, scales = (site.tensor(i) for i in range(3))
    shape = (site.attr("N"), site.attr("K"))
    weight = site.opaque("weight", "unpack_bits", (packed, scales), shape, dtype=x.dtype)
    bias = [site.tensor(5)] if site.has(5) else []
    site.give("linear", x, weight, *bias)


CONTRIB = {
    "Attention": packed_attention,
    "MultiHeadAttention": multi_head_attention,
    "GroupQueryAttention": group_query_attention,
    "RotaryEmbedding": rotary,
    "SkipLayerNormalization": skip_norm("layer_norm"),
    "SkipSimplifiedLayerNormalization": skip_norm("rms_norm"),
    "BiasGelu": bias_gelu,
    "FastGelu": bias_gelu,
    "Gelu": bias_gelu,
    "QuickGelu": bias_gelu,
    "FusedMatMul": fused_matmul,
    "MatMulNBits": matmul_bits,
    "MatMulIntegerToFloat": matmul_integer_to_float,
    "DequantizeLinear": dequantize,
    "QuantizeLinear": quantize,
}
QUANTIZED = {
    "DequantizeLinear": dequantize,
    "QuantizeLinear": quantize,
    "DynamicQuantizeLinear": dynamic_quantize,
    "QLinearMatMul": quantized_product(3, ""),
    "MatMulInteger": quantized_product(1, "i32"),
    "QLinearConv": quantized_conv(3, ""),
    "ConvInteger": quantized_conv(1, "i32"),
}
