"""The record of an exported program: what is given, what is done, what is given back."""

import logging
import operator
import warnings

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from partita.capture.torch_program import (  # noqa: E402
    Ref,
    TensorSpec,
    read_torch_program,
    refs_in,
    replaced,
)

aten = torch.ops.aten


class Model(nn.Module):
    """A parameter, both kinds of buffers, a constant, an item of several results, a view."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 6)
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("mask", torch.ones(6), persistent=False)
        self.table = torch.arange(6.0)

    def forward(self, x, *, scale=2):
        y = self.inner(x) * self.mask + self.mean + self.table
        left, right = y.chunk(2, 1)
        return {"left": left.reshape(-1), "scaled": right * scale}


def exported(module, *args, **kwargs):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # export's, for its developers
        return torch.export.export(module, args, kwargs, strict=False)


def record(module, *args, **kwargs):
    return read_torch_program(exported(module, *args, **kwargs))


@pytest.fixture(scope="module")
def read():
    return record(Model(), torch.zeros(2, 4), scale=3)


def test_what_is_given_has_its_kind_its_name_in_the_module_and_its_data(read):
    given = {each.target: each for each in read.inputs}
    assert {name: each.kind for name, each in given.items()} == {
        "inner.weight": "parameter", "inner.bias": "parameter", "mean": "buffer",
        "mask": "buffer", "table": "constant", "x": "input", "scale": "input",
    }  # fmt: skip
    assert [name for name, each in given.items() if each.persistent] == [
        "inner.weight", "inner.bias", "mean"
    ]  # fmt: skip
    assert torch.equal(given["table"].data, torch.arange(6.0))
    assert given["x"].data is None
    assert given["scale"].is_fixed
    assert given["scale"].value == 3


def test_a_tensor_is_described_without_its_numbers(read):
    (given,) = (each for each in read.inputs if each.target == "x")
    spec = given.value
    assert isinstance(spec, TensorSpec)
    assert (spec.shape, spec.stride, spec.dtype) == ((2, 4), (4, 1), torch.float32)


def test_nodes_come_in_order_and_name_what_they_read(read):
    linear = read.nodes[0]
    assert linear.target is aten.linear.default
    assert linear.operation == "linear"
    assert linear.scope == "inner"
    assert linear.line.code == "y = self.inner(x) * self.mask + self.mean + self.table"
    assert [Ref(name) for name in linear.reads] == list(linear.args)
    assert linear.arguments == dict(zip(("input", "weight", "bias"), linear.args, strict=True))
    seen = {each.name for each in read.inputs}
    for node in read.nodes:
        assert set(node.reads) <= seen
        assert {ref.name for ref in refs_in((node.args, dict(node.kwargs)))} == set(node.reads)
        seen.add(node.name)
        assert all(name in {"output", *read.node} for name in node.users)


def test_items_of_several_results_are_told_apart(read):
    (chunk,) = (node for node in read.nodes if node.gives_several)
    assert [number for number, _ in read.items(chunk)] == [0, 1]
    assert all(item.target is operator.getitem for _, item in read.items(chunk))
    assert [value.shape for value in chunk.results] == [(2, 3), (2, 3)]


def test_views_share_a_storage_and_results_do_not():
    class Views(nn.Module):
        def forward(self, x):
            return x.view(-1), x + 1

    outcome = record(Views(), torch.zeros(2, 3))
    (given,) = outcome.inputs
    view, new = outcome.nodes
    assert view.value.storage == given.value.storage != new.value.storage


def test_outputs_are_flat_and_their_nesting_is_kept(read):
    assert [output.kind for output in read.outputs] == ["output", "output"]
    assert all(isinstance(output.value, Ref) for output in read.outputs)
    assert read.changed() == ()
    assert torch.utils._pytree.tree_unflatten([1, 2], read.out_spec) == {"left": 1, "scaled": 2}


def test_a_constant_that_is_given_back_is_itself():
    class Pair(nn.Module):
        def forward(self, x):
            return x + 1, 7

    first, second = record(Pair(), torch.zeros(2)).outputs
    assert isinstance(first.value, Ref)
    assert second.value == 7


def test_a_changed_buffer_is_named_once_the_program_is_functional():
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x):
            self.calls.add_(1)
            return x + self.calls

    program = exported(Counts(), torch.zeros(2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch_program = read_torch_program(program.run_decompositions({}))
    assert torch_program.changed() == ("calls",)
    assert [output.kind for output in torch_program.outputs] == ["buffer mutation", "output"]


def test_the_body_of_a_branch_is_told_from_calls():
    class Branch(nn.Module):
        def forward(self, x):
            return torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x,))

    outcome = record(Branch(), torch.zeros(2))
    assert sum(node.is_body for node in outcome.nodes) == 2
    (cond,) = (node for node in outcome.nodes if "cond" in str(node.target))
    assert not cond.is_operator


def test_refs_are_replaced_wherever_they_stand():
    nested = (Ref("a"), [Ref("b"), 2], {"c": slice(Ref("a"), None)})
    known = {"a": 1, "b": 5}
    assert replaced(nested, Ref, lambda ref: known[ref.name]) == (1, [5, 2], {"c": slice(1, None)})
    assert [ref.name for ref in refs_in(nested[:2])] == ["a", "b"]


def test_lists_stay_the_kind_of_list_they_are():
    class Some(list):
        pass

    assert type(replaced((Some([Ref("a")]),), Ref, lambda ref: ref.name)[0]) is Some


def test_pytorch_writes_no_traces_into_the_logs_of_tests():
    """With a handler of pytest's it would, pages for every export (`tests/conftest.py`)."""
    handlers = logging.getLogger("torch.__trace").handlers
    assert not [each for each in handlers if type(each).__module__ == "_pytest.logging"]
