"""ONNX files: layers keep their kinds, sizes are worked out, and what is wrong is named."""

import warnings
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

np = pytest.importorskip("numpy")
onnx = pytest.importorskip("onnx")
from onnx import TensorProto, helper  # noqa: E402

from partita.capture.onnx_file import onnx_graph  # noqa: E402
from partita.errors import FileError, InputError, ModelError  # noqa: E402
from partita.graph import training_graph  # noqa: E402
from partita.graph.files import check_graph  # noqa: E402
from partita.graph.shapes import unknown_kinds  # noqa: E402
from partita.graph.work import flops  # noqa: E402

FLOAT, INT = TensorProto.FLOAT, TensorProto.INT64


def floats(name, *shape):
    return helper.make_tensor(name, FLOAT, shape, np.zeros(shape, np.float32).tobytes(), raw=True)


def ints(name, *values):
    return helper.make_tensor(name, INT, (len(values),), values)


def saved(tmp_path, nodes, inputs, outputs=("y",), weights=(), opset=17, name="model.onnx"):
    """A file with these nodes; inputs are name -> (shape, type)."""
    given = [helper.make_tensor_value_info(n, kind, shape) for n, (shape, kind) in inputs.items()]
    wanted = [helper.make_tensor_value_info(n, FLOAT, None) for n in outputs]
    graph = helper.make_graph(nodes, "g", given, wanted, list(weights))
    domains = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=domains)
    path = tmp_path / name
    path.write_bytes(model.SerializeToString())
    return str(path)


def read(tmp_path, nodes, inputs, outputs=("y",), weights=(), opset=17, **options):
    graph = onnx_graph(saved(tmp_path, nodes, inputs, outputs, weights, opset), **options)
    check_graph(graph)
    return graph


def shape_of(graph, output=0):
    return graph.tensor(graph.outputs[output]).shape


def total(graph):
    return sum(flops(graph.call(op)) for op in graph.ops)


IMAGE = {"x": ((2, 3, 32, 32), FLOAT)}


def test_a_small_network_has_its_kinds_parameters_and_batch(tmp_path):
    nodes = [
        helper.make_node("Conv", ["x", "w", "b"], ["c"], "/features/0/Conv", strides=[2, 2],
                         pads=[1, 1, 1, 1]),
        helper.make_node("BatchNormalization", ["c", "g", "s", "m", "v"], ["n"], "/features/1/BN"),
        helper.make_node("Relu", ["n"], ["r"]),
        helper.make_node("MaxPool", ["r"], ["p"], kernel_shape=[2, 2], strides=[2, 2]),
        helper.make_node("GlobalAveragePool", ["p"], ["a"]),
        helper.make_node("Flatten", ["a"], ["f"]),
        helper.make_node("Gemm", ["f", "fw", "fb"], ["y"], "/fc/Gemm", transB=1),
    ]  # fmt: skip
    weights = [floats("w", 16, 3, 3, 3), *(floats(n, 16) for n in "bgsmv"),
               floats("fw", 10, 16), floats("fb", 10)]  # fmt: skip
    graph = read(tmp_path, nodes, {"x": (("N", 3, 32, 32), FLOAT)}, weights=weights, batch=8)
    kinds = [op.kind for op in graph.ops]
    assert kinds == ["conv", "batch_norm", "elementwise", "pool", "pool", "reshape", "linear"]
    assert graph.inputs[0].shape == (8, 3, 32, 32)
    assert shape_of(graph) == (8, 10)
    assert graph.num_parameters == 16 * 27 + 16 * 3 + 10 * 16 + 10  # running statistics are none
    assert graph.ops[0].scope == "features.0"
    assert training_graph(graph).is_training


def test_arithmetic_on_shapes_is_done_here_and_leaves_no_op(tmp_path):
    nodes = [
        helper.make_node("Shape", ["x"], ["s"]),
        helper.make_node("Gather", ["s", "zero"], ["b"], axis=0),
        helper.make_node("Gather", ["s", "one"], ["t"], axis=0),
        helper.make_node("Mul", ["b", "t"], ["bt"]),
        helper.make_node("Concat", ["bt", "rest"], ["to"], axis=0),
        helper.make_node("Reshape", ["x", "to"], ["y"]),
    ]
    weights = [ints("zero", 0), ints("one", 1), ints("rest", -1)]
    graph = read(tmp_path, nodes, {"x": (("n", 5, 4, 6), FLOAT)}, weights=weights, batch=3)
    assert [op.kind for op in graph.ops] == ["reshape"]
    assert shape_of(graph) == (15, 24)


CASES = {
    "Gemm of another orientation": (
        [helper.make_node("Gemm", ["x", "w", "b"], ["y"])],
        {"x": ((4, 6), FLOAT)}, [floats("w", 6, 8), floats("b", 8)], (4, 8), "matmul",
    ),
    "MatMul": (
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        {"x": ((2, 4, 6), FLOAT)}, [floats("w", 6, 8)], (2, 4, 8), "matmul",
    ),
    "MatMul with a vector": (
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        {"x": ((2, 4, 6), FLOAT)}, [floats("w", 6)], (2, 4), "einsum",
    ),
    "Conv padded unevenly": (
        [helper.make_node("Conv", ["x", "w"], ["y"], auto_pad="SAME_UPPER", strides=[2, 2])],
        IMAGE, [floats("w", 8, 3, 3, 3)], (2, 8, 16, 16), "conv",
    ),
    "ConvTranspose": (
        [helper.make_node("ConvTranspose", ["x", "w"], ["y"], strides=[2, 2])],
        IMAGE, [floats("w", 3, 8, 2, 2)], (2, 8, 64, 64), "conv",
    ),
    "AveragePool with ceil": (
        [helper.make_node("AveragePool", ["x"], ["y"], kernel_shape=[3, 3], strides=[2, 2],
                          ceil_mode=1)],
        IMAGE, [], (2, 3, 16, 16), "pool",
    ),
    "LayerNormalization": (
        [helper.make_node("LayerNormalization", ["x", "g", "b"], ["y"], axis=-1)],
        {"x": ((2, 4, 6), FLOAT)}, [floats("g", 6), floats("b", 6)], (2, 4, 6), "layer_norm",
    ),
    "Gather of rows": (
        [helper.make_node("Gather", ["w", "x"], ["y"])],
        {"x": ((2, 4), INT)}, [floats("w", 50, 8)], (2, 4, 8), "embedding",
    ),
    "Gather of one row": (
        [helper.make_node("Gather", ["x", "i"], ["y"], axis=1)],
        {"x": ((2, 4, 6), FLOAT)}, [helper.make_tensor("i", INT, (), [-1])], (2, 6), "reshape",
    ),
    "Slice along two axes": (
        [helper.make_node("Slice", ["x", "s", "e", "a", "t"], ["y"])],
        {"x": ((2, 8, 6), FLOAT)},
        [ints("s", 1, -4), ints("e", 2**62, 6), ints("a", 1, 2), ints("t", 2, 1)], (2, 4, 4),
        "slice",
    ),
    "Transpose": (
        [helper.make_node("Transpose", ["x"], ["y"], perm=[2, 0, 1])],
        {"x": ((2, 4, 6), FLOAT)}, [], (6, 2, 4), "transpose",
    ),
    "Unsqueeze": (
        [helper.make_node("Unsqueeze", ["x", "a"], ["y"])],
        {"x": ((2, 4), FLOAT)}, [ints("a", 0, -1)], (1, 2, 4, 1), "reshape",
    ),
    "Expand": (
        [helper.make_node("Expand", ["x", "s"], ["y"])],
        {"x": ((4, 1), FLOAT)}, [ints("s", 3, 1, 6)], (3, 4, 6), "expand",
    ),
    "Pad": (
        [helper.make_node("Pad", ["x", "p"], ["y"])],
        {"x": ((4, 5), FLOAT)}, [ints("p", 1, 0, 0, 2)], (5, 7), "pad",
    ),
    "Resize": (
        [helper.make_node("Resize", ["x", "", "k"], ["y"], mode="nearest")],
        IMAGE, [helper.make_tensor("k", FLOAT, (4,), [1, 1, 2, 2])], (2, 3, 64, 64), "resize",
    ),
    "ReduceMean": (
        [helper.make_node("ReduceMean", ["x"], ["y"], axes=[1, 2], keepdims=0)],
        {"x": ((2, 4, 6), FLOAT)}, [], (2,), "reduce",
    ),
    "Softmax": (
        [helper.make_node("Softmax", ["x"], ["y"], axis=1)],
        {"x": ((2, 4), FLOAT)}, [], (2, 4), "softmax",
    ),
    "Add of a number": (
        [helper.make_node("Add", ["x", "c"], ["y"])],
        {"x": ((2, 4), FLOAT)}, [helper.make_tensor("c", FLOAT, (), [1.0])], (2, 4), "elementwise",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_an_operator_has_its_kind_and_shape(tmp_path, case):
    nodes, inputs, weights, shape, kind = CASES[case]
    graph = read(tmp_path, nodes, inputs, weights=weights)
    assert shape_of(graph) == shape
    assert kind in [op.kind for op in graph.ops]
    assert not unknown_kinds(graph)


def test_pieces_of_a_split_keep_their_order(tmp_path):
    nodes = [helper.make_node("Split", ["x", "s"], ["a", "b"], axis=1)]
    graph = read(tmp_path, nodes, {"x": ((2, 7), FLOAT)}, ("b", "a"), [ints("s", 3, 4)])
    assert [shape_of(graph, 0), shape_of(graph, 1)] == [(2, 4), (2, 3)]


@pytest.mark.parametrize(("kind", "gates"), [("LSTM", 4), ("GRU", 3)])
def test_recurrent_layers_count_what_pytorch_counts(tmp_path, kind, gates):
    t, b, i, h = 5, 2, 6, 8
    nodes = [
        helper.make_node(kind, ["x", "w", "r", "c"], ["y", "h"], hidden_size=h,
                         direction="bidirectional")
    ]  # fmt: skip
    weights = [floats("w", 2, gates * h, i), floats("r", 2, gates * h, h),
               floats("c", 2, 2 * gates * h)]  # fmt: skip
    graph = read(tmp_path, nodes, {"x": ((t, b, i), FLOAT)}, ("y", "h"), weights)
    assert shape_of(graph) == (t, 2, b, h)
    assert shape_of(graph, 1) == (2, b, h)
    layer = next(op for op in graph.ops if op.kind == kind.lower())
    rows = 2 * gates * h
    assert flops(graph.call(layer)) == t * b * (2 * rows * (i + h) + 8 * rows)
    assert graph.num_parameters == rows * (i + h + 2)


def test_an_unknown_operator_is_carried_with_the_shape_that_onnx_infers(tmp_path):
    nodes = [helper.make_node("DepthToSpace", ["x"], ["y"], blocksize=2)]
    graph = read(tmp_path, nodes, {"x": ((1, 8, 4, 4), FLOAT)})
    assert unknown_kinds(graph) == ("depthtospace",)
    assert shape_of(graph) == (1, 2, 8, 8)


def test_weights_kept_elsewhere_need_not_be_there(tmp_path):
    weight = TensorProto(name="w", data_type=FLOAT, dims=[4096, 4096])
    weight.data_location = TensorProto.EXTERNAL
    weight.external_data.add(key="location", value="missing.bin")
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"])]
    graph = read(tmp_path, nodes, {"x": ((4, 4096), FLOAT)}, weights=[weight])
    assert graph.num_parameters == 4096**2
    assert total(graph) == 2 * 4 * 4096**2


def test_a_dtype_asked_for_replaces_the_files(tmp_path):
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"])]
    graph = read(tmp_path, nodes, {"x": ((4, 6), FLOAT)}, weights=[floats("w", 6, 6)], dtype="bf16")
    assert {tensor.dtype for tensor in graph.tensors} == {"bf16"}


RELU = [helper.make_node("Relu", ["x"], ["y"], "act")]


def test_open_sizes_are_given_after_an_at(tmp_path):
    path = saved(tmp_path, RELU, {"x": (("n", "seq", 8), FLOAT)})
    assert onnx_graph(f"{path}@12", batch=4).inputs[0].shape == (4, 12, 8)
    with pytest.raises(FileError, match=r"input 'x': leaves the size 'seq' open; .*@128"):
        onnx_graph(path)
    with pytest.raises(ModelError, match="a whole number is needed"):
        onnx_graph(f"{path}@many")


def test_where_only_the_batch_is_open_the_number_after_an_at_is_the_batch(tmp_path):
    path = saved(tmp_path, RELU, {"x": (("batch", 8), FLOAT)})
    assert onnx_graph(f"{path}@32").inputs[0].shape == (32, 8)
    assert onnx_graph(f"{path}@32", batch=32).inputs[0].shape == (32, 8)
    with pytest.raises(FileError, match="is given two: 32 after the @, and 4; leave one out"):
        onnx_graph(f"{path}@32", batch=4)
    fixed = saved(tmp_path, RELU, {"x": ((4, 8), FLOAT)}, name="fixed.onnx")
    with pytest.raises(FileError, match="leaves no size open, and 32 is given after the @"):
        onnx_graph(f"{fixed}@32")


DECODER = {
    "x": (("batch", "seq", 8), FLOAT),
    "past": (("batch", "past", 8), FLOAT),
    "mask": (("batch", "past + seq"), INT),
}
GROWN = [
    helper.make_node("Concat", ["past", "x"], ["grown"], axis=1),
    helper.make_node("Relu", ["grown"], ["y"]),
]


@pytest.mark.parametrize(("sizes", "shapes"), [
    ("seq=3,past=5", [(2, 3, 8), (2, 5, 8), (2, 8)]),
    ("past=5,3", [(2, 3, 8), (2, 5, 8), (2, 8)]),
    ("4", [(2, 4, 8), (2, 4, 8), (2, 8)]),
    ("seq=3,past=0", [(2, 3, 8), (2, 3)]),
])  # fmt: skip
def test_open_sizes_are_given_by_their_names_and_sums_follow(tmp_path, sizes, shapes):
    path = saved(tmp_path, GROWN, DECODER)
    graph = onnx_graph(f"{path}@{sizes}", batch=2)
    check_graph(graph)
    assert [tensor.shape for tensor in graph.inputs] == shapes
    assert shape_of(graph) == (2, shapes[-1][1], 8)
    assert [op.kind for op in graph.ops] == ["concat"] * (len(shapes) - 2) + ["elementwise"]


@pytest.mark.parametrize(("sizes", "says"), [
    ("", r"leaves the sizes 'seq', 'past', 'past \+ seq' open; .*@seq=128,past=128"),
    ("@seq=3", r"leaves the size 'past' open|leaves the sizes 'past', 'past \+ seq' open"),
    ("@seq=3,pasd=4", "leaves no size 'pasd' open; did you mean past"),
    ("@seq=3,seq=4", "'seq=4' after the @ is said twice"),
    ("@3,4", "'4' after the @ is said twice"),
    ("@seq=-3", "'seq=-3' after the @; a whole number is needed, or NAME=NUMBER"),
    ("@0", "'0' after the @; a whole number is needed"),
    ("@seq=3,past=1,batch=5", "is given two batches: 5 after the @, and 2"),
])  # fmt: skip
def test_sizes_that_do_not_fit_the_file_are_refused(tmp_path, sizes, says):
    path = saved(tmp_path, GROWN, DECODER)
    with pytest.raises(InputError, match=says):
        onnx_graph(f"{path}{sizes}", batch=2)


def test_one_number_for_channels_and_pixels_is_refused(tmp_path):
    nodes = [helper.make_node("Conv", ["x", "w"], ["y"], "conv")]
    image = {"x": (("batch", "channels", "height", "width"), FLOAT)}
    path = saved(tmp_path, nodes, image, weights=[floats("w", 8, 3, 3, 3)])
    with pytest.raises(FileError, match=r"\(Conv\): reads 32 channels, and .* for 3; .* names"):
        onnx_graph(f"{path}@32")
    assert shape_of(onnx_graph(f"{path}@32,channels=3", batch=2)) == (2, 8, 30, 30)


def test_what_is_scattered_into_keeps_its_shape(tmp_path):
    """Also where ONNX does not know the shape of what it is given: here behind a fused operator."""
    nodes = [
        helper.make_node("FusedMatMul", ["x", "w"], ["product"], "op", domain="com.microsoft"),
        helper.make_node("ScatterND", ["product", "places", "rows"], ["y"], "scatter"),
    ]
    given = {"x": ((4, 6), FLOAT), "places": ((2, 1), INT), "rows": ((2, 6), FLOAT)}
    graph = read(tmp_path, nodes, given, weights=[floats("w", 6, 6)])
    assert (graph.ops[-1].kind, shape_of(graph)) == ("scatternd", (4, 6))


def test_the_batch_has_a_name_too(tmp_path):
    path = saved(tmp_path, GROWN, DECODER)
    assert onnx_graph(f"{path}@1,batch=5").inputs[0].shape == (5, 1, 8)


def test_what_is_wrong_is_named_with_file_and_node(tmp_path):
    with pytest.raises(FileError, match=r"none.onnx: there is no such file"):
        onnx_graph(str(tmp_path / "none.onnx"))
    (tmp_path / "text.onnx").write_text("not a model at all")
    with pytest.raises(FileError, match=r"text.onnx: (is not an ONNX model|graph: holds no nodes)"):
        onnx_graph(str(tmp_path / "text.onnx"))
    path = saved(tmp_path, [helper.make_node("Relu", ["lost"], ["y"], "act")], IMAGE)
    with pytest.raises(FileError, match=r"model.onnx: node 'act' \(Relu\): reads 'lost'"):
        onnx_graph(path)
    mixed = [helper.make_node("MatMul", ["x", "w"], ["y"], "mul")]
    path = saved(tmp_path, mixed, {"x": ((4, 6), FLOAT)}, weights=[floats("w", 7, 8)])
    with pytest.raises(FileError, match=r"model.onnx.*mul"):
        onnx_graph(path)
    outcome = [helper.make_node("NonZero", ["x"], ["y"], "found")]
    with pytest.raises(FileError, match=r"node 'found' \(NonZero\): gives 'y', whose shape"):
        onnx_graph(saved(tmp_path, outcome, IMAGE))


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_a_damaged_file_gives_an_error_of_ours_or_a_graph(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("damaged")
    nodes, inputs, weights, *_ = CASES[data.draw(st.sampled_from(sorted(CASES)))]
    path = Path(saved(folder, nodes, inputs, weights=weights))
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content)
    try:
        onnx_graph(str(path))
    except InputError as error:
        assert "model.onnx" in str(error)


def test_a_file_exported_by_pytorch_agrees_with_the_captured_module(tmp_path):
    torch = pytest.importorskip("torch")
    from partita.capture import capture

    nn = torch.nn
    module = nn.Sequential(
        nn.Conv2d(3, 16, 3, 2, 1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, groups=2),
        nn.GELU(), nn.Flatten(), nn.Linear(32 * 36, 64), nn.LayerNorm(64), nn.Linear(64, 10),
    ).eval()  # fmt: skip
    image = torch.zeros(2, 3, 32, 32)
    path = tmp_path / "net.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(module, (image,), str(path), dynamo=False, opset_version=17)
    graph, own = onnx_graph(str(path)), capture(module, (image,))
    assert graph.num_parameters == own.num_parameters
    assert total(graph) == pytest.approx(total(own), rel=0.01)
