"""Quantised and fused operators of onnxruntime: kinds, shapes and types, those of its own runs."""

import pytest

np = pytest.importorskip("numpy")
onnx = pytest.importorskip("onnx")
from onnx import TensorProto, helper, numpy_helper  # noqa: E402

from partita.capture.onnx_file import onnx_graph  # noqa: E402
from partita.capture.onnx_kinds import RULES  # noqa: E402
from partita.capture.onnx_quantized import QUANTIZED_CONTRIB  # noqa: E402
from partita.graph.files import check_graph  # noqa: E402
from partita.graph.record import FLOATS  # noqa: E402
from partita.graph.shapes import unknown_kinds  # noqa: E402
from partita.graph.work import flops  # noqa: E402

MICROSOFT = "com.microsoft"
CHANCE = np.random.default_rng(0)
SCALE, ZERO = np.array(0.1, np.float32), np.array(3, np.uint8)


def floats(*shape):
    return CHANCE.standard_normal(shape, dtype=np.float32)


def whole(*shape, kind="uint8"):
    return CHANCE.integers(0, 100, shape).astype(kind)


X, Y, PICTURE = whole(2, 6, 8), whole(2, 6, 8), whole(2, 8, 6, 6)
LSTM = {"x": floats(5, 2, 6)}
IDS = CHANCE.integers(0, 9, (2, 6)).astype(np.int32)
# Inputs in order, by name: arrays given to the model, or `held` in it (a name that begins with _).
CASES = {
    "QLinearAdd": ([X, SCALE, ZERO, Y, SCALE, ZERO, SCALE, ZERO], {}, ["elementwise"]),
    "QLinearMul": ([X, SCALE, ZERO, Y, SCALE, ZERO, SCALE, ZERO], {}, ["elementwise"]),
    "QLinearSigmoid": ([X, SCALE, ZERO, SCALE, ZERO], {}, ["elementwise"]),
    "QLinearLeakyRelu": ([X, SCALE, ZERO, SCALE, ZERO], {"alpha": 0.1}, ["elementwise"]),
    "QLinearSoftmax": ([X, SCALE, ZERO, SCALE, ZERO], {"axis": -1, "opset": 17}, ["softmax"]),
    "QLinearAveragePool": (
        [PICTURE, SCALE, ZERO, SCALE, ZERO], {"kernel_shape": [2, 2], "strides": [2, 2]}, ["pool"],
    ),
    "QLinearGlobalAveragePool": ([PICTURE, SCALE, ZERO, SCALE, ZERO], {}, ["pool"]),
    "QLinearConcat": ([SCALE, ZERO, X, SCALE, ZERO, Y, SCALE, ZERO], {"axis": 1}, ["concat"]),
    "QLinearWhere": (
        [Y > 50, X, SCALE, ZERO, Y, SCALE, ZERO, SCALE, ZERO], {}, ["elementwise"],
    ),
    "QGemm": (
        [whole(4, 8), SCALE, ZERO, whole(12, 8), SCALE, ZERO, whole(12, kind="int32"), SCALE, ZERO],
        {"transB": 1}, ["matmul", "elementwise"],
    ),
    "QAttention": (
        [X, whole(8, 24), floats(24), SCALE, SCALE, np.ones((2, 6), np.int32), ZERO, ZERO],
        {"num_heads": 2},
        ["matmul", "elementwise", "slice", "slice", "slice", "elementwise", "reshape", "attention"],
    ),
    "DynamicQuantizeMatMul": (
        [floats(2, 6, 8), whole(8, 12), SCALE, ZERO, floats(12)], {},
        ["elementwise", "matmul", "elementwise"],
    ),
    "DynamicQuantizeLSTM": (
        [floats(5, 2, 6), whole(1, 6, 16), whole(1, 4, 16), floats(1, 32), None, None, None, None,
         floats(1), whole(1), floats(1), whole(1)], {"hidden_size": 4},
        ["transpose", "transpose", "transpose", "reshape", "reshape", "slice", "reshape", "slice",
         "reshape", "lstm", "reshape", "transpose"],
    ),
    "EmbedLayerNormalization": (
        [IDS, IDS, floats(9, 8), floats(16, 8), floats(9, 8), floats(8), floats(8)], {},
        ["embedding", "slice", "embedding", "elementwise", "layer_norm", "mask_lengths"],
    ),
    "GatherBlockQuantized": (
        [whole(9, 16), IDS, floats(9, 2)],
        {"gather_axis": 0, "quantize_axis": 1, "block_size": 16, "bits": 4},
        ["embedding", "unpack_bits"],
    ),
    "FusedConv": (
        [floats(2, 3, 8, 8), floats(4, 3, 3, 3), floats(4)],
        {"activation": "Relu", "pads": [1, 1, 1, 1], "kernel_shape": [3, 3]},
        ["conv", "elementwise"],
    ),
    "FusedGemm": (
        [floats(4, 8), floats(12, 8), floats(12)], {"transB": 1, "activation": "Relu"},
        ["linear", "elementwise"],
    ),
    "BiasDropout": ([floats(2, 6, 8), floats(8), floats(2, 6, 8)], {}, ["elementwise"]),
}  # fmt: skip
NOT_TRIED = ("QLinearReduceMean",)  # an operator that no tool writes any more
NOT_ON_CPU = ("BiasDropout",)  # by onnxruntime


def model_of(kind):
    """A model of one operator: its first input is an argument, the others are held."""
    arrays, attributes, _ = CASES[kind]
    names = [f"a{i}" if array is not None else "" for i, array in enumerate(arrays)]
    outputs = ["y", "lengths"] if kind == "EmbedLayerNormalization" else ["y"]
    node = helper.make_node(kind, names, outputs, "op", domain=MICROSOFT, **attributes)
    first = next(i for i, array in enumerate(arrays) if array is not None and array.ndim > 0)
    given = helper.make_tensor_value_info(
        names[first], helper.np_dtype_to_tensor_dtype(arrays[first].dtype), arrays[first].shape
    )
    held = [
        numpy_helper.from_array(array, name)
        for i, (array, name) in enumerate(zip(arrays, names, strict=True))
        if array is not None and i != first
    ]
    wanted = [helper.make_empty_tensor_value_info("y")]
    graph = helper.make_graph([node], "g", [given], wanted, held)
    domains = [helper.make_opsetid("", 17), helper.make_opsetid(MICROSOFT, 1)]
    return helper.make_model(graph, opset_imports=domains, ir_version=10), {
        names[first]: arrays[first]
    }


def read(tmp_path, model):
    path = tmp_path / "model.onnx"
    path.write_bytes(model.SerializeToString())
    graph = onnx_graph(str(path))
    check_graph(graph)
    return graph


def test_every_operator_is_tried():
    assert QUANTIZED_CONTRIB.keys() == {*CASES, *NOT_TRIED}
    assert not QUANTIZED_CONTRIB.keys() & RULES.keys()


@pytest.mark.parametrize("kind", CASES)
def test_an_operator_of_onnxruntime_is_what_it_stands_for(tmp_path, kind):
    model, _ = model_of(kind)
    graph = read(tmp_path, model)
    assert [op.kind for op in graph.ops if op.kind != "constant"] == CASES[kind][2]
    assert unknown_kinds(graph) in ((), ("mask_lengths",), ("unpack_bits",))


@pytest.mark.parametrize("kind", [kind for kind in CASES if kind not in NOT_ON_CPU])
def test_shapes_and_types_are_those_of_onnxruntime(tmp_path, kind):
    runtime = pytest.importorskip("onnxruntime")
    model, given = model_of(kind)
    graph = read(tmp_path, model)
    session = runtime.InferenceSession(model.SerializeToString())
    (wanted,) = session.run(["y"], given)
    out = graph.tensor(graph.outputs[0])
    assert out.shape == wanted.shape
    assert (out.dtype in FLOATS) == (wanted.dtype.kind == "f")


def test_a_quantised_product_with_a_bias_costs_its_product(tmp_path):
    graph = read(tmp_path, model_of("QGemm")[0])
    assert flops(graph.call(graph.ops[-2])) == 2 * 4 * 8 * 12


def test_small_quantised_weights_are_held_as_they_are(tmp_path):
    node = helper.make_node("DequantizeLinear", ["w", "s"], ["f"])
    product = helper.make_node("MatMul", ["x", "f"], ["y"])
    given = [helper.make_tensor_value_info("x", TensorProto.FLOAT, (4, 8))]
    wanted = [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)]
    held = [numpy_helper.from_array(whole(8, 6), "w"), numpy_helper.from_array(SCALE, "s")]
    graph = helper.make_graph([node, product], "g", given, wanted, held)
    made = read(tmp_path, helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]))
    assert (made.tensor("w").role, made.tensor("w").dtype) == ("state", "u8")
