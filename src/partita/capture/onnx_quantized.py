"""Quantised and fused operators of onnxruntime (`com.microsoft`) that stand for one of ONNX's own.

    QLinearAdd(a, a_scale, a_zero, b, b_scale, b_zero, y_scale, y_zero)  is  Add(a, b)

What onnxruntime.quantization writes around the products of `onnx_contrib.py`, and what its own
optimisations fuse: a layer with the function behind it, a lookup of embeddings with its norm.
"""

from typing import Any

from partita.capture.onnx_contrib import packed_attention
from partita.capture.onnx_kinds import FUNCTIONS, RULES, Rule, recurrent_layer
from partita.capture.onnx_site import OnnxSite, OnnxUnfit
from partita.graph.record import Tensor


def function_of(fn: str, *places: int) -> Rule:
    """A function of whole numbers; it gives them as they come."""

    def rule(site: OnnxSite) -> None:
        inputs = [site.tensor(place) for place in places]
        site.give("elementwise", *inputs, fn=fn, dtype=inputs[-1].dtype)

    return rule


def as_plain(kind: str, *places: int) -> Rule:
    """The rule of ONNX's own operator, which reads only these of the inputs."""

    def rule(site: OnnxSite) -> None:
        if site.attr("channels_last", 0):
            raise OnnxUnfit
        site.inputs = [site.inputs[place] for place in places]
        RULES[kind](site)

    return rule


def concat(site: OnnxSite) -> None:
    """y_scale, y_zero, then each part with its scale and zero."""
    parts = [site.tensor(place) for place in range(2, len(site.inputs), 3)]
    site.give("concat", *parts, axis=site.attr("axis"), dtype=parts[0].dtype)


def gemm(site: OnnxSite) -> None:
    """a, a_scale, a_zero, b, b_scale, b_zero, c, y_scale, y_zero."""
    a, b = site.tensor(0), site.tensor(3)
    dtype = site.tensor(8).dtype if site.has(8) else "f32"
    product = {
        "transpose_a": bool(site.attr("transA", 0)),
        "transpose_b": bool(site.attr("transB", 0)),
    }
    if not site.has(6):
        site.give("matmul", a, b, dtype=dtype, **product)
        return
    made = site.part("product", "matmul", a, b, dtype="i32", **product)
    site.give("elementwise", made, site.tensor(6), fn="add", dtype=dtype)


def dynamic_matmul(site: OnnxSite) -> None:
    """a, whole numbers b, their scale and zero, bias: a is rounded on the way."""
    a, b = site.tensor(0), site.tensor(1)
    rounded = site.part("rounded", "elementwise", a, fn="round", dtype="u8")
    if not site.has(4):
        site.give("matmul", rounded, b, dtype=a.dtype)
        return
    made = site.part("product", "matmul", rounded, b, dtype="i32")
    site.give("elementwise", made, site.tensor(4), fn="add", dtype=a.dtype)


def dynamic_lstm(site: OnnxSite) -> None:
    """An LSTM whose weights lie [directions, inputs, gates], with scales and zeros behind."""
    x = site.tensor(0)
    weights = [
        site.part(part, "transpose", site.tensor(place), perm=(0, 2, 1), dtype=x.dtype)
        for part, place in (("w", 1), ("r", 2))
    ]
    recurrent_layer(site, "lstm", x, *weights)


def quantized_attention(site: OnnxSite) -> None:
    """input, weights, bias, their scales, mask, zeros, past."""
    if site.holds(8):
        raise OnnxUnfit
    dtype = site.tensor(3).dtype
    site.inputs = [site.inputs[place] if site.has(place) else "" for place in (0, 1, 2, 5)]
    packed_attention(site, dtype)


def embeddings(site: OnnxSite) -> None:
    """ids, segments, words, positions, segments, scale, shift of the norm, mask, positions."""
    ids = site.tensor(0)
    total = site.part("words", "embedding", ids, site.tensor(2), dtype=site.tensor(2).dtype)
    positions = site.tensor(3)
    length = ids.shape[-1]
    if site.has(8):
        rows = site.part("places", "embedding", site.tensor(8), positions, dtype=positions.dtype)
    else:
        rows = site.part("places", "slice", positions, axis=0, start=0, stop=length)
    added: list[Tensor] = [rows]
    if site.has(1) and site.has(4):
        segments = site.tensor(4)
        added.append(
            site.part("segments", "embedding", site.tensor(1), segments, dtype=segments.dtype)
        )
    total = site.part("sum", "elementwise", total, *added, fn="add")
    site.give(
        "layer_norm", total, site.tensor(5), site.tensor(6), dims=1,
        eps=site.attr("epsilon", 1e-12),
    )  # fmt: skip
    if len(site.node.output) > 1 and site.node.output[1]:
        site.also(1, site.opaque("lengths", "mask_lengths", (ids,), ids.shape[:1], "i32"))
    site.also(2, total)


def packed_rows(site: OnnxSite) -> None:
    """Rows of a table of few bits [rows, bytes], with scales: looked up, then unpacked."""
    table, ids, scales = (site.tensor(place) for place in range(3))
    whole = len(table.shape) == 2 and table.dtype == "u8"
    if not whole or site.attr("gather_axis", 0) or site.attr("quantize_axis", 1) not in (1, -1):
        raise OnnxUnfit
    rows = site.part("rows", "embedding", ids, table, dtype=table.dtype)
    width = table.shape[1] * 8 // site.attr("bits", 4)
    shape = (*ids.shape, width)
    site.same(site.opaque("unpacked", "unpack_bits", (rows, scales), shape, scales.dtype))


def followed(kind: str) -> Rule:
    """A layer and the function that is applied to what it gives."""

    def rule(site: OnnxSite) -> None:
        fn = FUNCTIONS.get(site.attr("activation", ""))
        if fn is None or site.has(3):
            raise OnnxUnfit
        RULES[kind](site)
        site.same(site.part("function", "elementwise", site.main(), fn=fn))

    return rule


def dropout_of_sum(site: OnnxSite) -> None:
    """data, bias, what else is added: dropout, which is off where a file is run."""
    more: list[Any] = [site.tensor(place) for place in (1, 2) if site.has(place)]
    site.give("elementwise", site.tensor(0), *more, fn="add")


QUANTIZED_CONTRIB: dict[str, Rule] = {
    "QLinearAdd": function_of("add", 0, 3),
    "QLinearMul": function_of("mul", 0, 3),
    "QLinearSigmoid": function_of("sigmoid", 0),
    "QLinearLeakyRelu": function_of("leaky_relu", 0),
    "QLinearWhere": function_of("where", 0, 1, 4),
    "QLinearSoftmax": as_plain("Softmax", 0),
    "QLinearAveragePool": as_plain("AveragePool", 0),
    "QLinearGlobalAveragePool": as_plain("GlobalAveragePool", 0),
    "QLinearReduceMean": as_plain("ReduceMean", 0),
    "QLinearConcat": concat,
    "QGemm": gemm,
    "QAttention": quantized_attention,
    "DynamicQuantizeMatMul": dynamic_matmul,
    "DynamicQuantizeLSTM": dynamic_lstm,
    "EmbedLayerNormalization": embeddings,
    "GatherBlockQuantized": packed_rows,
    "FusedConv": followed("Conv"),
    "FusedGemm": followed("Gemm"),
    "BiasDropout": dropout_of_sum,
}
