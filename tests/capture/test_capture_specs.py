"""`file.py:name` and `.onnx` as a MODEL: what is loaded, and what is said when it cannot be."""

import os
import py_compile
import sys

import pytest

from partita.capture.python_file import is_python_spec, python_graph, read_module
from partita.errors import CaptureError, FileError, MissingExtraError, ModelError
from partita.graph.files import write_graph
from partita.jobs.workload import load, load_ref
from partita.zoo import build

pytest.importorskip("torch")

FILE = """
import torch
from sizes import WIDTH

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a = torch.nn.Linear(WIDTH, 16)
        self.drop = torch.nn.Dropout()

    def forward(self, x, scale=None):
        y = self.drop(self.a(x))
        return (y if scale is None else y * scale).sum()

class Branches(Net):
    def forward(self, x):
        return x if x.sum() > 0 else -x

def make(batch=32):
    return Net(), (torch.randn(batch, WIDTH),)

def scaled():
    return Net(), (torch.randn(4, WIDTH),), {"scale": torch.ones(16)}

def one():
    return Net(), torch.randn(4, WIDTH)

def alone():
    return Net()

def broken():
    return Net(), (torch.randn(4, WIDTH) @ torch.randn(3, 3),)

def branches():
    return Branches(), (torch.randn(4, WIDTH),)

class Bags(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.bag = torch.nn.EmbeddingBag(20, WIDTH)

    def forward(self, ids, offsets=None):
        return self.bag(ids, offsets).sum()

class OffsetsFirst(Bags):
    def forward(self, offsets, ids):
        return super().forward(ids, offsets)

def bags(batch=4):
    return Bags(), (torch.zeros(3 * batch).long(), torch.arange(0, 3 * batch, 3))

def offsets_first(batch=4):
    return OffsetsFirst(), bags(batch)[1][::-1]

def rows_of_bags(batch=4):
    return Bags(), (torch.zeros(batch, 3).long(),)

example_inputs = (torch.zeros(8, WIDTH),)
number = 3
"""


@pytest.fixture
def file(tmp_path):
    (tmp_path / "sizes.py").write_text("WIDTH = 8\n")
    (tmp_path / "net.py").write_text(FILE)
    yield str(tmp_path / "net.py")
    sys.modules.pop("sizes", None)


def test_a_python_file_is_told_by_its_name():
    assert is_python_spec("net.py:make")
    assert is_python_spec("folder/net.py")
    assert not is_python_spec("gpt2@512")
    assert not is_python_spec("graph.json")


def test_a_function_may_take_the_batch(file):
    assert load(f"{file}:make").batch == 32
    assert load(f"{file}:make", batch=6).graph.inputs[0].shape == (6, 8)
    assert load(f"{file}:scaled").batch == 4
    assert load(f"{file}:one").batch == 4


def test_a_class_is_called_with_the_example_inputs(file):
    assert load(f"{file}:Net").batch == 8


def test_keyword_arguments_are_inputs(file):
    names = [tensor.name for tensor in python_graph(f"{file}:scaled").inputs]
    assert names == ["x", "scale"]
    assert set(read_module(f"{file}:scaled")[2]) == {"scale"}


def test_inference_is_captured_in_eval_mode(file):
    assert "dropout" in {op.attr("fn") for op in load(f"{file}:make").graph.ops}
    graph = load(f"{file}:make", training=False).graph
    assert not graph.is_training
    assert "dropout" not in {op.attr("fn") for op in graph.ops}


def test_a_dtype_can_be_chosen(file):
    assert {t.dtype for t in load(f"{file}:make", dtype="bf16").graph.parameters} == {"bf16"}


def test_a_plan_finds_its_model_again(file):
    workload = load(f"{file}:scaled")
    assert load_ref(workload.ref()).graph == workload.graph
    workload = load(f"{file}:make", batch=6, dtype="bf16")
    assert load_ref(workload.ref()).graph == workload.graph


@pytest.mark.parametrize("name", ["graph.json", "graph.txt"])
def test_a_plan_finds_a_saved_graph_again(tmp_path, name):
    write_graph(tmp_path / name, build("alexnet", batch=3))
    workload = load(str(tmp_path / name))
    assert load_ref(workload.ref()).graph == workload.graph


def test_a_batch_that_the_model_does_not_have_is_refused(file):
    with pytest.raises(ModelError, match="has a batch of 4, not 8; let the function take `batch`"):
        load(f"{file}:scaled", batch=8)


def test_bags_of_a_flat_list_have_the_batch_of_their_offsets_where_these_come_first(file):
    with pytest.raises(ModelError, match=r"batch of 24, not 8; .*EmbeddingBag: the offsets, or"):
        load(f"{file}:bags", batch=8)
    for name in ("offsets_first", "rows_of_bags"):
        assert load(f"{file}:{name}", batch=8).ref().batch == 8


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("", r"does not say which function makes the model; write .*NAME; known are .*make"),
        (":mak", r"has no 'mak'; did you mean make"),
        (":number", r"'number' is a int; name a function"),
        (":alone", r"gives a Net; give \(module, args\)"),
        (":broken", r"net.py:\d+: broken: RuntimeError: "),
    ],
)
def test_a_file_that_gives_no_model_is_refused(file, name, says):
    with pytest.raises(ModelError, match=says):
        load(f"{file}{name}")


def test_a_model_that_cannot_be_captured_names_the_users_line(file):
    with pytest.raises(CaptureError, match=r"net.py:17: `return x if x.sum\(\) > 0 else -x`"):
        load(f"{file}:branches")


def test_a_file_that_is_no_python_names_the_line(tmp_path):
    (tmp_path / "bad.py").write_text("x = 1\ndef f(:\n")
    with pytest.raises(ModelError, match=r"bad.py:2: SyntaxError"):
        load(f"{tmp_path}/bad.py:f")
    with pytest.raises(FileError, match=r"none.py: there is no such file"):
        load(f"{tmp_path}/none.py:f")


def test_a_missing_package_names_the_pip_command(file, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'partita\[torch\]'"):
        load(f"{file}:make")
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'partita\[onnx\]'"):
        load("model.onnx")


def test_an_onnx_file_is_a_model_for_every_command(tmp_path):
    onnx = pytest.importorskip("onnx")
    make = onnx.helper
    weight = make.make_tensor("w", onnx.TensorProto.FLOAT, (8, 4), [0.0] * 32)
    info = make.make_tensor_value_info
    graph = make.make_graph(
        [make.make_node("MatMul", ["x", "w"], ["y"])], "g",
        [info("x", onnx.TensorProto.FLOAT, ("n", 8))], [info("y", onnx.TensorProto.FLOAT, None)],
        [weight],
    )  # fmt: skip
    path = tmp_path / "net.onnx"
    onnx.save(make.make_model(graph), str(path))
    workload = load(str(path), batch=16)
    assert workload.batch == 16
    assert workload.graph.is_training
    assert load_ref(workload.ref()).graph == workload.graph


def test_what_a_file_prints_is_no_output(tmp_path, capsys):
    path = tmp_path / "net.py"
    path.write_text(
        "import torch\nprint('imported')\n\n\ndef make():\n    print('made')\n"
        "    return torch.nn.Linear(4, 4), (torch.randn(2, 4),)\n"
    )
    python_graph(f"{path}:make")
    said = capsys.readouterr()
    assert said.out == ""
    assert "imported\nmade\n" in said.err


def test_a_file_that_ends_the_program_is_refused(tmp_path):
    path = tmp_path / "net.py"
    path.write_text("import sys\n\nsys.exit(3)\n")
    with pytest.raises(ModelError, match=r"net\.py:3: SystemExit: 3"):
        python_graph(f"{path}:make")


@pytest.mark.parametrize("mode", list(py_compile.PycInvalidationMode))
def test_compiled_code_beside_a_file_is_never_run_in_its_place(tmp_path, mode):
    """The hash in a plan is of the text; a stranger may send both."""
    path = tmp_path / "net.py"
    text = "import torch\ndef make():\n    return torch.nn.Linear(4, 4), (torch.ones(2, 4),)\n"
    path.write_text(text.replace("Linear(4, 4)", "Linear(4, 9)"))
    py_compile.compile(str(path), invalidation_mode=mode)
    status = path.stat()
    path.write_text(text)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    module, _, _ = read_module(f"{path}:make")
    assert module.out_features == 4
