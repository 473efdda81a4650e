"""Fused and quantised operators in ONNX files: kinds, shapes, and the numbers of other engines."""

from types import SimpleNamespace

import pytest

np = pytest.importorskip("numpy")
onnx = pytest.importorskip("onnx")
torch = pytest.importorskip("torch")
from onnx import TensorProto, helper, numpy_helper  # noqa: E402
from onnx.reference import ReferenceEvaluator  # noqa: E402

from partita.capture.eager import RULES  # noqa: E402
from partita.capture.onnx_file import onnx_graph  # noqa: E402
from partita.errors import FileError  # noqa: E402
from partita.graph.files import check_graph  # noqa: E402
from partita.graph.shapes import unknown_kinds  # noqa: E402
from partita.graph.work import flops  # noqa: E402

MICROSOFT = "com.microsoft"
TYPES = {
    "float32": TensorProto.FLOAT, "int64": TensorProto.INT64, "int32": TensorProto.INT32,
    "int8": TensorProto.INT8, "uint8": TensorProto.UINT8,
}  # fmt: skip
CHANCE = np.random.default_rng(0)
B, S, H, KV, D = 2, 6, 4, 2, 16


def normal(*shape):
    return CHANCE.standard_normal(shape, dtype=np.float32)


def bytes_of(kind, *shape):
    return CHANCE.integers(0, 100, shape).astype(kind)


def angles(size, count=16):
    """cos and sin of rotary positions, one for each pair."""
    frequencies = 10000.0 ** (-2 * np.arange(size // 2) / size)
    angle = np.arange(count)[:, None] * frequencies
    return np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)


def model_of(nodes, given, weights, outputs=("y",), opset=23):
    """A model; `given` are arguments and `weights` what the file holds, by name."""
    inputs = [
        helper.make_tensor_value_info(n, TYPES[v.dtype.name], v.shape) for n, v in given.items()
    ]
    wanted = [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in outputs]
    held = [numpy_helper.from_array(value, name) for name, value in weights.items()]
    graph = helper.make_graph(nodes, "g", inputs, wanted, held)
    domains = [helper.make_opsetid("", opset), helper.make_opsetid(MICROSOFT, 1)]
    return helper.make_model(graph, opset_imports=domains, ir_version=10)


def read(tmp_path, model):
    path = tmp_path / "model.onnx"
    path.write_bytes(model.SerializeToString())
    graph = onnx_graph(str(path))
    check_graph(graph)
    return graph


def computed(graph, known):
    """The graph's outputs, op by op by the rules of their kinds."""
    values = {name: torch.from_numpy(value) for name, value in known.items()}
    for op in graph.ops:
        if op.kind == "constant":
            assert op.outputs[0] in values
            continue
        inputs = [values[name] for name in op.inputs]
        if op.attr("fn") == "cast":
            values[op.outputs[0]] = inputs[0].bool()
            continue
        made = RULES[op.kind](SimpleNamespace(training=False), graph.call(op), *inputs)
        made = made if isinstance(made, tuple) else (made,)
        for name, value in zip(op.outputs, made, strict=True):
            assert tuple(value.shape) == graph.tensor(name).shape
            values[name] = value
    return [values[name].numpy() for name in graph.outputs]


def microsoft(kind, inputs, outputs=("y",), **attributes):
    return helper.make_node(kind, inputs, list(outputs), "op", domain=MICROSOFT, **attributes)


def kinds(graph):
    return [op.kind for op in graph.ops]


COS, SIN = angles(D)
STANDARD = {
    "attention": (
        [helper.make_node("Attention", ["q", "k", "v"], ["y"], is_causal=1, scale=0.3)],
        {"q": normal(B, H, S, D), "k": normal(B, KV, S, D), "v": normal(B, KV, S, D)}, {},
    ),
    "attention of packed heads with a mask": (
        [helper.make_node("Attention", ["q", "k", "v", "m"], ["y"], q_num_heads=H,
                          kv_num_heads=KV)],
        {"q": normal(B, S, H * D), "k": normal(B, S, KV * D), "v": normal(B, S, KV * D),
         "m": normal(B, 1, S, S)}, {},
    ),
    "rotary positions": (
        [helper.make_node("RotaryEmbedding", ["x", "c", "s"], ["y"], num_heads=H)],
        {"x": normal(B, S, H * D)},
        {"c": np.stack([COS[:S]] * B), "s": np.stack([SIN[:S]] * B)},
    ),
    "root mean square": (
        [helper.make_node("RMSNormalization", ["x", "g"], ["y"])],
        {"x": normal(B, S, D)}, {"g": normal(D)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", STANDARD)
def test_numbers_are_those_of_onnxs_own_evaluator(tmp_path, case):
    nodes, given, weights = STANDARD[case]
    model = model_of(nodes, given, weights)
    (wanted,) = ReferenceEvaluator(model).run(None, given)
    graph = read(tmp_path, model)
    assert not unknown_kinds(graph)
    (made,) = computed(graph, given | weights)
    assert made == pytest.approx(wanted, abs=1e-5)


X, NAMES = normal(B, S, H * D), ("y", "", "", "z")
FUSED = {
    "packed attention": (
        [microsoft("Attention", ["x", "w", "b"], num_heads=H, unidirectional=1)],
        {"x": X}, {"w": normal(H * D, 3 * H * D), "b": normal(3 * H * D)}, ("y",),
        ["matmul", "elementwise", "slice", "slice", "slice", "attention"],
    ),
    "packed attention with padding": (
        [microsoft("Attention", ["x", "w", "b", "m"], num_heads=H)],
        {"x": X, "m": np.array([[1] * 6, [1] * 4 + [0] * 2], np.int32)},
        {"w": normal(H * D, 3 * H * D), "b": normal(3 * H * D)}, ("y",),
        ["matmul", "elementwise", "slice", "slice", "slice", "elementwise", "reshape", "attention"],
    ),
    "heads beside each other": (
        [microsoft("MultiHeadAttention", ["q", "k", "v", "b"], num_heads=H)],
        {"q": X, "k": normal(B, 9, H * D), "v": normal(B, 9, H * D)}, {"b": normal(3 * H * D)},
        ("y",), ["slice"] * 3 + ["elementwise"] * 3 + ["attention"],
    ),
    "a norm of a sum": (
        [microsoft("SkipLayerNormalization", ["x", "s", "g", "b", "c"], NAMES, epsilon=1e-5)],
        {"x": X, "s": normal(B, S, H * D)}, {n: normal(H * D) for n in "gbc"}, ("y", "z"),
        ["elementwise", "layer_norm"],
    ),
    "a simple norm of a sum": (
        [microsoft("SkipSimplifiedLayerNormalization", ["x", "s", "g"], NAMES, epsilon=1e-5)],
        {"x": X, "s": normal(B, S, H * D)}, {"g": normal(H * D)}, ("y", "z"),
        ["elementwise", "rms_norm"],
    ),
    "rotary positions": (
        [microsoft("RotaryEmbedding", ["x", "p", "c", "s"], num_heads=H)],
        {"x": X, "p": np.stack([np.arange(S)] * B)}, {"c": COS, "s": SIN}, ("y",),
        ["elementwise"],
    ),
    "grouped heads": (
        [microsoft("GroupQueryAttention", ["q", "k", "v", "", "", "l", "t"], ("y", "pk", "pv"),
                   num_heads=H, kv_num_heads=KV)],
        {"q": X, "k": normal(B, S, KV * D), "v": normal(B, S, KV * D)},
        {"l": np.full(B, S - 1, np.int32), "t": np.array(S, np.int32)}, ("y", "pk", "pv"),
        ["reshape", "transpose"] * 3 + ["attention", "transpose", "reshape"],
    ),
    "grouped heads, turned": (
        [microsoft("GroupQueryAttention", ["q", "k", "v", "", "", "l", "t", "c", "s"],
                   ("y", "pk", "pv"), num_heads=H, kv_num_heads=KV, do_rotary=1)],
        {"q": X, "k": normal(B, S, KV * D), "v": normal(B, S, KV * D)},
        {"l": np.full(B, S - 1, np.int32), "t": np.array(S, np.int32), "c": COS, "s": SIN},
        ("y", "pk", "pv"),
        ["elementwise"] * 2 + ["reshape", "transpose"] * 3 + ["attention", "transpose", "reshape"],
    ),
    "a product that is transposed": (
        [microsoft("FusedMatMul", ["x", "w"], transB=1)],
        {"x": X}, {"w": normal(12, H * D)}, ("y",), ["matmul"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", FUSED)
def test_a_fused_operator_is_what_it_is_made_of(tmp_path, case):
    nodes, given, weights, outputs, wanted = FUSED[case]
    graph = read(tmp_path, model_of(nodes, given, weights, outputs, opset=17))
    assert kinds(graph) == wanted
    assert not unknown_kinds(graph)


@pytest.mark.parametrize("case", FUSED)
def test_numbers_are_those_of_onnxruntime(tmp_path, case):
    runtime = pytest.importorskip("onnxruntime")
    nodes, given, weights, outputs, _ = FUSED[case]
    model = model_of(nodes, given, weights, outputs, opset=17)
    session = runtime.InferenceSession(model.SerializeToString())
    wanted = session.run(list(outputs), given)
    made = computed(read(tmp_path, model), given | weights)
    for own, other in zip(made, wanted, strict=True):
        assert own == pytest.approx(other, rel=1e-4, abs=1e-4)


def test_keys_of_earlier_calls_come_first(tmp_path):
    nodes = [microsoft("GroupQueryAttention", ["q", "k", "v", "a", "b", "l", "t"],
                       ("y", "pk", "pv"), num_heads=H, kv_num_heads=KV)]  # fmt: skip
    given = {
        "q": normal(B, 1, H * D), "k": normal(B, 1, KV * D), "v": normal(B, 1, KV * D),
        "a": normal(B, KV, 9, D), "b": normal(B, KV, 9, D),
    }  # fmt: skip
    weights = {"l": np.full(B, 9, np.int32), "t": np.array(10, np.int32)}
    graph = read(tmp_path, model_of(nodes, given, weights, ("y", "pk", "pv"), opset=17))
    assert [graph.tensor(name).shape for name in graph.outputs] == [
        (B, 1, H * D), (B, KV, 10, D), (B, KV, 10, D),
    ]  # fmt: skip


QUANTISED = {
    "QLinearMatMul": (["x", "xs", "xz", "w", "ws", "wz", "ys", "yz"], "uint8", "u8"),
    "MatMulInteger": (["x", "w", "xz", "wz"], "uint8", "i32"),
}


@pytest.mark.parametrize("kind", QUANTISED)
def test_a_quantised_product_is_a_product_of_bytes(tmp_path, kind):
    names, dtype, out = QUANTISED[kind]
    scales = {name: np.array(0.1, np.float32) for name in ("xs", "ws", "ys")}
    zeros = {name: np.array(3, dtype) for name in ("xz", "wz", "yz")}
    held = {"w": bytes_of(dtype, 16, 8), **scales, **zeros}
    nodes = [helper.make_node(kind, names, ["y"], "op")]
    graph = read(tmp_path, model_of(nodes, {"x": bytes_of(dtype, 4, 16)}, held, opset=17))
    (product,) = [op for op in graph.ops if op.kind == "matmul"]
    assert graph.tensor(graph.outputs[0]).dtype == out
    assert (graph.tensor("w").role, graph.tensor("w").dtype) == ("state", "u8")
    assert flops(graph.call(product)) == 2 * 4 * 16 * 8
    assert not unknown_kinds(graph)


def test_weights_of_few_bits_are_unpacked_and_multiplied(tmp_path):
    nodes = [microsoft("MatMulNBits", ["x", "w", "s"], K=H * D, N=12, bits=4, block_size=16)]
    held = {"w": bytes_of("uint8", 12, 4, 8), "s": normal(12 * 4)}
    graph = read(tmp_path, model_of(nodes, {"x": X}, held, opset=17))
    assert kinds(graph) == ["unpack_bits", "linear"]
    assert graph.tensor(graph.outputs[0]).shape == (B, S, 12)


def test_a_quantised_layer_as_tools_write_it_keeps_its_product(tmp_path):
    nodes = [
        helper.make_node("DynamicQuantizeLinear", ["x"], ["xq", "xs", "xz"]),
        helper.make_node("MatMulInteger", ["xq", "w", "xz", "wz"], ["p"]),
        helper.make_node("Cast", ["p"], ["f"], to=TensorProto.FLOAT),
        helper.make_node("Mul", ["xs", "ws"], ["s"]),
        helper.make_node("Mul", ["f", "s"], ["m"]),
        helper.make_node("DequantizeLinear", ["bq", "ws"], ["b"]),
        helper.make_node("Add", ["m", "b"], ["y"]),
    ]
    held = {
        "w": bytes_of("uint8", H * D, 12), "wz": np.array(3, np.uint8),
        "ws": np.array(0.1, np.float32), "bq": bytes_of("int32", 12),
    }  # fmt: skip
    graph = read(tmp_path, model_of(nodes, {"x": X}, held, opset=17))
    assert "matmul" in kinds(graph)
    assert graph.tensor(graph.outputs[0]).shape == (B, S, 12)
    assert graph.tensor(graph.outputs[0]).dtype == "f32"


def test_a_loop_is_refused_by_its_name(tmp_path):
    body = helper.make_graph(
        [helper.make_node("Identity", ["c"], ["d"]), helper.make_node("Relu", ["s"], ["r"])], "b",
        [helper.make_tensor_value_info("i", TensorProto.INT64, []),
         helper.make_tensor_value_info("c", TensorProto.BOOL, []),
         helper.make_tensor_value_info("s", TensorProto.FLOAT, [2])],
        [helper.make_tensor_value_info("d", TensorProto.BOOL, []),
         helper.make_tensor_value_info("r", TensorProto.FLOAT, [2])],
    )  # fmt: skip
    nodes = [helper.make_node("Loop", ["n", "", "x"], ["y"], "while", body=body)]
    given = {"n": np.array(3), "x": normal(2)}
    with pytest.raises(FileError, match=r"node 'while' \(Loop\).*is a Loop.*unrolled"):
        read(tmp_path, model_of(nodes, given, {}, opset=17))


@pytest.mark.parametrize("eps", [1e-5, 1e-3])
def test_a_norm_adds_to_the_variance_what_the_file_says(tmp_path, eps):
    given, weights = {"x": 1e-2 * normal(2, 8)}, {"w": normal(8), "b": normal(8)}
    node = helper.make_node("LayerNormalization", ["x", "w", "b"], ["y"], epsilon=eps)
    model = model_of([node], given, weights)
    (wanted,) = ReferenceEvaluator(model).run(None, given)
    graph = read(tmp_path, model)
    np.testing.assert_allclose(computed(graph, {**given, **weights})[0], wanted, atol=1e-5)
    assert (graph.ops[0].attr("eps") is None) == (eps == 1e-5)
