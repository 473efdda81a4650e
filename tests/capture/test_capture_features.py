"""Every feature is captured exactly, or refused with the line that is to blame."""

import builtins
import contextlib
import copy
import functools
import random
import socket

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import partita  # noqa: E402
from partita.capture import capture, export_module  # noqa: E402
from partita.cluster import resolve  # noqa: E402
from partita.costs.roofline import op_cost  # noqa: E402
from partita.errors import CaptureError  # noqa: E402
from partita.graph import training_graph  # noqa: E402
from partita.graph.files import check_graph  # noqa: E402
from partita.graph.shapes import unknown_kinds  # noqa: E402
from partita.graph.work import flops  # noqa: E402
from tests.capture import features  # noqa: E402
from tests.capture.compare import differences, ran  # noqa: E402
from tests.capture.features import FEATURES  # noqa: E402

CAPTURED = [name for name, feature in FEATURES.items() if feature.expected == "captured"]
REFUSED = [name for name, feature in FEATURES.items() if feature.expected == "refused"]
X = torch.ones(4, 6)


@functools.cache
def captured(name):
    feature = FEATURES[name]
    return export_module(*feature.make(), **feature.options)


def test_of_42_features_39_are_captured():
    assert (len(FEATURES), len(CAPTURED), len(REFUSED)) == (42, 39, 3)


@pytest.mark.parametrize("name", CAPTURED)
def test_a_captured_program_computes_what_the_module_does_bit_for_bit(name):
    feature = FEATURES[name]
    module, args, kwargs = feature.make()
    program = captured(name).program.module()
    wanted = ran(module, args, kwargs)
    _, args, kwargs = feature.make()  # what is changed in place is changed once
    assert differences(ran(program, args, kwargs), wanted) == []


@pytest.mark.parametrize("name", CAPTURED)
def test_a_captured_graph_has_the_modules_parameters_and_the_programs_nodes(name):
    capture = captured(name)
    module = capture.module
    check_graph(capture.graph)
    wanted = {n: tuple(p.shape) for n, p in module.named_parameters()}
    assert {t.name: t.shape for t in capture.graph.parameters} == wanted
    assert set(capture.graph.outputs) <= {t.name for t in capture.graph.tensors}
    nodes = {node.name for node in capture.program.graph.nodes if node.op == "call_function"}
    assert {capture.node_of(op) for op in capture.graph.ops} <= nodes
    modules = {n for n, _ in module.named_modules()}
    assert {op.scope for op in capture.graph.ops} <= modules
    assert training_graph(capture.graph).is_training


@pytest.mark.parametrize("name", CAPTURED)
def test_nothing_but_buffers_is_changed_in_place(name):
    program = captured(name).program
    buffers = set(program.graph_signature.inputs_to_buffers)
    for node in program.graph.nodes:
        schema = getattr(node.target, "_schema", None)
        for i, argument in enumerate(schema.arguments if schema else ()):
            if argument.alias_info is not None and argument.alias_info.is_write:
                assert node.args[i].name in buffers


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_names_the_line_and_what_to_do(name):
    with pytest.raises(CaptureError) as caught:
        export_module(*FEATURES[name].make())
    assert FEATURES[name].says in caught.value.found
    assert caught.value.file.startswith(f"{features.__file__}:")
    assert caught.value.fix


def test_capturing_leaves_the_module_as_it_was():
    module, args, kwargs = FEATURES["BatchNorm"].make()
    before = copy.deepcopy(module.state_dict())
    capture(module, args, kwargs)
    assert all(torch.equal(value, before[n]) for n, value in module.state_dict().items())
    assert module.training


def test_train_and_eval_are_captured_as_they_are():
    module, args, _ = FEATURES["Dropout"].make()
    active = [op for op in capture(module, args).ops if op.attr("fn") == "dropout"]
    assert len(active) == 2
    assert not [op for op in capture(module.eval(), args).ops if op.attr("fn") == "dropout"]
    assert torch.equal(export_module(module, args).program.module()(*args), module(*args))


def wrapped(function, *parts):
    """A module that calls a function, with layers to be called in it."""

    class Wrapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleList(parts or [nn.Linear(6, 6)])

        def forward(self, x):
            return function(self.parts, x)

    return Wrapped()


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_is_refused_or_inlined_on_request(reentrant):
    module = wrapped(lambda m, x: checkpoint(m[0], m[1](x), use_reentrant=reentrant).sum(),
                     nn.Linear(6, 6), nn.Linear(6, 6))  # fmt: skip
    with pytest.raises(CaptureError, match="checkpointing, which would be dropped") as caught:
        capture(module, (X,))
    assert caught.value.file.startswith(f"{__file__}:")
    program = export_module(module, (X,), checkpointing="inline").program.module()
    module(X).backward()
    program(X).backward()
    program_gradients = dict(program.named_parameters())
    for name, parameter in module.named_parameters():
        assert torch.equal(parameter.grad, program_gradients[name].grad)


APPLY = features._StraightThrough.apply  # bound before anything is watched


def test_a_custom_function_keeps_its_backward():
    module = wrapped(lambda m, x: APPLY(m[0](x)))
    captured = export_module(module, (X,))
    kinds = [op.kind for op in captured.graph.ops]
    assert [kind.partition("_StraightThrough_")[0] for kind in kinds[1:]] == ["partita_functions."]
    program = captured.program.module()
    APPLY(module.parts[0](X)).sum().backward()
    program(X).sum().backward()
    gradients = dict(program.named_parameters())
    assert module.parts[0].weight.grad.abs().sum() > 0  # that of sign(x) would be 0
    assert torch.equal(gradients["parts.0.weight"].grad, module.parts[0].weight.grad)


def test_two_captures_of_a_custom_function_are_the_same_program():
    graphs = [capture(wrapped(lambda m, x: APPLY(m[0](x))), (X,)) for _ in range(2)]
    assert graphs[0].fingerprint() == graphs[1].fingerprint()


class Scaled(torch.autograd.Function):
    """Two results, and an argument that is no tensor."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x * factor, x + 1

    @staticmethod
    def backward(ctx, grad, other):
        return 7 * ctx.factor * grad + other, None


@pytest.mark.parametrize("cut", ["modules", "anywhere"])
def test_a_piped_model_runs_a_custom_function_with_its_own_backward(cut):
    def forward(m, x):
        a, b = Scaled.apply(m[0](x), 3.0)
        return m[1](a * b)

    torch.manual_seed(0)
    module = wrapped(forward, nn.Linear(6, 6), nn.Linear(6, 6))
    piped = partita.pipe(module, (X,), devices=2, cut=cut)
    out = piped(X)
    out.sum().backward()
    gradients = [p.grad.clone() for p in module.parameters()]
    module.zero_grad()
    plain = module(X)
    plain.sum().backward()
    assert torch.equal(out, plain)
    assert all(torch.equal(a, p.grad) for a, p in zip(gradients, module.parameters(), strict=True))


class InPlace(torch.autograd.Function):
    """Changes what it is given."""

    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


def test_a_custom_function_that_cannot_be_an_operator_is_refused():
    with pytest.raises(CaptureError, match="InPlace, whose backward would be lost: it changes its"):
        capture(wrapped(lambda m, x: InPlace.apply(m[0](x) + 1)), (X,))


def test_what_the_model_catches_is_refused_all_the_same():
    def careful(m, x):
        try:
            return InPlace.apply(m[0](x) + 1)
        except Exception:
            return m[0](x)

    with pytest.raises(CaptureError, match=r"custom autograd.Function"):
        capture(wrapped(careful), (X,))


class Checked(nn.Module):
    """Non-strict export hands over no plain tensors, and fails; strict export does not see it."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        assert type(x) is torch.Tensor
        return self.function(self, x)


def test_where_non_strict_export_fails_strict_export_is_tried():
    def make():
        torch.manual_seed(0)
        return Checked(lambda m, x: m.b(torch.relu(m.a(x)))), (torch.randn(4, 6),), {}

    captured = export_module(*make())
    assert [(op.kind, op.scope) for op in captured.graph.ops] == [
        ("linear", "a"), ("elementwise", ""), ("linear", "b"),
    ]  # fmt: skip
    assert {t.name for t in captured.graph.parameters} == {
        "a.weight",
        "a.bias",
        "b.weight",
        "b.bias",
    }
    _, args, kwargs = make()
    assert differences(ran(captured.program.module(), args, kwargs), ran(*make())) == []


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (lambda m, x: m.b(APPLY(m.a(x))), "_StraightThrough"),
        (lambda m, x: checkpoint(m.a, x, use_reentrant=False), "checkpointing"),
        (lambda m, x: m.a(x) * random.random(), "random"),
    ],
)
def test_strict_export_does_not_lose_what_non_strict_would_not(function, says):
    with pytest.raises(CaptureError, match=says):
        capture(Checked(function), (X,))


def test_where_both_fail_the_first_says_why():
    with pytest.raises(CaptureError, match=r"type\(x\) is torch.Tensor` cannot be captured"):
        capture(Checked(lambda m, x: m.a(x) if x.sum() > 0 else x), (X,))


def test_hooks_on_gradients_are_refused():
    def hooked(m, x):
        y = m[0](x)
        y.register_hook(lambda grad: grad * 2)
        return y

    with pytest.raises(CaptureError, match="registers a hook on a tensor's gradient"):
        capture(wrapped(hooked), (X,))
    module = wrapped(lambda m, x: m[0](x))
    module.parts[0].register_full_backward_hook(lambda *_: None)
    with pytest.raises(CaptureError, match=r"parts.0.*has a backward hook"):
        capture(module, (X,))


def test_python_random_numbers_are_refused():
    with pytest.raises(CaptureError, match="draws random numbers with Python's random") as caught:
        capture(wrapped(lambda m, x: m[0](x) * random.random()), (X,))
    assert caught.value.file.startswith(f"{__file__}:")
    assert "random.random()" in caught.value.found


class Keeps(nn.Module):
    def __init__(self, what):
        super().__init__()
        self.what = what
        self.a = nn.Linear(6, 6)
        self.state, self.calls, self.seen = torch.zeros(4, 6), 0, None

    def forward(self, x):
        if self.what == "state":
            self.state = self.state * 0.5 + self.a(x)
        elif self.what == "calls":
            self.calls += 1
        else:
            self.seen = self.new = self.a(x)
        return self.a(x) + self.state


def test_a_tensor_kept_from_call_to_call_is_refused():
    with pytest.raises(CaptureError, match=r"keeps a tensor for the next call.* buffer") as caught:
        capture(Keeps("state"), (X,))
    assert caught.value.file.startswith(f"{__file__}:")


class HooksOnce(nn.Module):
    """Puts a hook on its module in its first call and notes that it has, as transformers does."""

    def __init__(self, notes):
        super().__init__()
        self.a, self.notes = nn.Linear(6, 6), notes
        self.seen, self.is_hooked = [], False

    def forward(self, x):
        noted = self.is_hooked if self.notes == "flag" else hasattr(self, "hooked")
        if not noted:
            self.a.register_forward_hook(lambda module, args, out: self.seen.append(out))
            if self.notes == "flag":
                self.is_hooked = True
            else:
                self.hooked = True
        self.seen.clear()
        self.a(x)
        return torch.stack(self.seen).sum(0)


@pytest.mark.parametrize("notes", ["flag", "attribute"])
def test_a_capture_leaves_the_module_as_it_was(notes):
    module = HooksOnce(notes)
    wanted = module.a(X)
    for _ in range(2):
        program = export_module(module, (X,)).program.module()
        assert torch.equal(program(X), wanted)
        assert not module.a._forward_hooks
        assert module.seen == []
    assert torch.equal(module(X), wanted)


class Replaces(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Dropout(0.5)

    def forward(self, x):
        if isinstance(self.inner, nn.Dropout):
            self.inner = nn.Identity()
        return self.inner(x) + 1


def test_a_module_that_is_replaced_by_a_call_is_refused_until_it_is():
    module = Replaces()
    with pytest.raises(
        CaptureError, match=r"nn.Identity.*puts another module in the place of"
    ) as e:
        capture(module, (X,))
    assert "call the model once" in e.value.fix
    assert e.value.file.startswith(f"{__file__}:")
    module(X)
    assert torch.equal(export_module(module, (X,)).program.module()(X), X + 1)


def test_a_number_kept_from_call_to_call_gets_a_warning(caplog):
    capture(Keeps("calls"), (X,))
    assert "`self.calls += 1` changes calls from call to call" in caplog.text


def test_what_a_model_shows_of_itself_is_no_state():
    module = Keeps("seen")
    capture(module, (X,))
    assert module.seen is None
    assert not hasattr(module, "new")


def test_sizes_that_depend_on_data_are_refused_with_the_line():
    class Chosen(nn.Module):
        def forward(self, x):
            return x[x > 0].sum()

    with pytest.raises(CaptureError, match=r"x\[x > 0\].* size depends on the data") as caught:
        capture(Chosen(), (X,))
    assert caught.value.file.startswith(f"{__file__}:")


def test_a_parameter_changed_in_place_is_refused():
    def change(m, x):
        with torch.no_grad():
            m[0].weight.mul_(0.9)
        return m[0](x)

    with pytest.raises(CaptureError, match=r"changes the parameter parts.0.weight in place"):
        capture(wrapped(change), (X,))


def test_arguments_that_do_not_fit_are_named():
    module, args, kwargs = FEATURES["Kwargs"].make()
    with pytest.raises(CaptureError, match=r"do not fit Kwargs.forward: missing .* 'other'"):
        capture(module, args)
    with pytest.raises(CaptureError, match="args is a Tensor"):
        capture(module, args[0], kwargs)
    with pytest.raises(CaptureError, match=r"function is no torch.nn.Module"):
        capture(ran, args, kwargs)


def test_a_frozen_parameter_is_not_learned():
    module = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    module[0].requires_grad_(False)
    graph = capture(module, (X,))
    assert {t.name for t in graph.parameters} == {"1.weight", "1.bias"}
    assert graph.tensor("0.weight").role == "state"
    assert len([op for op in training_graph(graph).ops if op.phase == "wgrad"]) == 1


def test_a_parameter_may_have_the_name_of_an_argument_or_an_op():
    class Clash(nn.Module):
        def __init__(self):
            super().__init__()
            self.x = nn.Parameter(torch.ones(6))
            self.add = nn.Parameter(torch.ones(6))

        def forward(self, x):
            return self.x * x + self.add

    graph = capture(Clash(), (X,))
    assert {t.name for t in graph.parameters} == {"x", "add"}
    assert graph.tensor(graph.outputs[0]).shape == (4, 6)
    assert [op.name for op in graph.ops] == ["mul", "add"]


def test_fake_tensors_do_and_the_mode_of_the_caller_does_not_matter():
    from torch._subclasses.fake_tensor import FakeTensorMode

    graph = capture(nn.Sequential(nn.Linear(6, 6), nn.ReLU()), (X,))
    with FakeTensorMode():
        module, x = nn.Sequential(nn.Linear(6, 6), nn.ReLU()), torch.ones(4, 6)
    assert capture(module, (x,)) == graph
    with torch.no_grad():
        assert capture(nn.Sequential(nn.Linear(6, 6), nn.ReLU()), (X,)) == graph


def test_watching_leaves_torch_as_it_was():
    capture(*FEATURES["CustomFn"].make())
    module, args, _ = FEATURES["CustomFn"].make()
    module(*args).sum().backward()
    assert module.a.weight.grad.abs().sum() > 0
    module, args, _ = FEATURES["Checkpointed"].make()
    module(*args).sum().backward()
    assert module.b.weight.grad is not None


class Boxed:
    def __init__(self, inside):
        self.inside = inside


class Boxing(torch.nn.Module):
    def forward(self, x):
        return {"box": Boxed(x + 1), "plain": x}


def test_an_output_that_cannot_be_taken_apart_is_named_with_what_to_do():
    with pytest.raises(CaptureError, match=r"Boxing takes or returns a .*Boxed.* use_cache=False"):
        capture(Boxing(), (torch.zeros(2),))


class LayerDrop(nn.Module):
    """Leaves layers out at random, as several libraries write it."""

    def __init__(self, rate):
        super().__init__()
        self.rate = rate
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            skipped = self.training and torch.rand([]) < self.rate
            if not skipped:
                x = layer(x)
        return nn.functional.dropout(x, 0.5)


@pytest.mark.parametrize("rate", [0.0, 1.0])
def test_a_choice_by_chance_that_is_none_is_decided_and_the_number_drawn(rate):
    module = LayerDrop(rate)
    program = export_module(module, (X,)).program.module()
    assert differences(ran(program, (X,), {}), ran(module, (X,), {})) == []


def test_a_choice_by_chance_is_refused_with_its_line():
    with pytest.raises(CaptureError, match=r"skipped:` chooses by chance.* torch\.where") as caught:
        capture(LayerDrop(0.5), (X,))
    assert caught.value.file.startswith(f"{__file__}:")


class ChosenLayers(LayerDrop):
    """The change that the refusal names."""

    def forward(self, x):
        for layer in self.layers:
            x = torch.where(torch.rand([], device=x.device) < self.rate, x, layer(x))
        return nn.functional.dropout(x, 0.5)


def test_a_choice_by_chance_may_be_made_of_results():
    module = ChosenLayers(0.5)
    dropped = LayerDrop(0.5)
    dropped.load_state_dict(module.state_dict())
    program = export_module(module, (X,)).program.module()
    assert differences(ran(program, (X,), {}), ran(module, (X,), {})) == []
    torch.manual_seed(3)
    wanted = dropped(X)
    torch.manual_seed(3)
    assert torch.equal(program(X), wanted)


def test_one_tensor_may_be_two_arguments():
    class Product(nn.Module):
        def forward(self, x, y):
            return x * y

    x, y = torch.randn(2, 3), torch.randn(2, 3)
    same, other = capture(Product(), (x, x)), capture(Product(), (x, y))
    assert same.fingerprint() == other.fingerprint()
    assert [tensor.name for tensor in same.inputs] == ["x", "y"]


def test_emitted_code_imports_a_custom_function():
    from partita.emit.stages import emit

    captured = export_module(*FEATURES["CustomFn"].make())
    source = emit(captured, {op.name: i // 2 for i, op in enumerate(captured.graph.ops)}).source
    assert "from tests.capture.features import _StraightThrough\n" in source
    assert "_StraightThrough.apply(" in source


class Experts(nn.Module):
    """Tokens sorted by expert, one grouped product, as transformers writes it."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(8, 4)
        self.weight = nn.Parameter(torch.zeros(4, 8, 16))

    def forward(self, x):
        expert = self.router(x).argmax(-1)
        ends = torch.cumsum(torch.nn.functional.one_hot(expert, 4).sum(0), 0).to(torch.int32)
        return torch._grouped_mm(x[torch.argsort(expert)], self.weight, ends)


def test_products_of_experts_cost_their_products():
    graph = training_graph(capture(Experts().bfloat16(), (torch.zeros(32, 8).bfloat16(),)))
    products = [op for op in graph.ops if op.kind == "grouped_mm"]
    assert [op.phase for op in products] == ["forward", "wgrad"]
    a100 = resolve("1xA100").kind_of(0)
    for op in products:
        assert flops(graph.call(op)) == 2 * 32 * 8 * 16
        assert op_cost(graph, op, a100).compute_s > 0
    assert "grouped_mm" not in unknown_kinds(graph)


def _checked(m, x):
    assert torch.isfinite(x).all() and (x < 1e9).all(), "finite"  # noqa: PT018
    assert not (x > 1e6).any().item()
    if (x < -1e6).any():
        raise ValueError("too small")
    return m[0](x)


def test_checks_of_values_are_left_out_and_said(caplog):
    captured = export_module(wrapped(_checked), (X,))
    assert [op.kind for op in captured.graph.ops][-1] == "linear"
    said = [record.getMessage() for record in caplog.records if "left out" in record.getMessage()]
    assert len(said) == 3
    assert said[0].startswith(f"{__file__}:")
    assert torch.equal(captured.program.module()(X), captured.module(X))


def _branching(m, x):
    if x.sum() > 0:
        x = x + 1
    return m[0](x)


def test_a_branch_that_does_more_than_raise_is_no_check():
    with pytest.raises(CaptureError, match="depends on the values of a tensor"):
        capture(wrapped(_branching), (X,))


def _counting(m, x):
    expert = m[0](x).argmax(-1)
    return torch.bincount(expert, minlength=6) + expert.bincount(minlength=6)


def test_numbers_of_tokens_per_expert_are_counted():
    module = wrapped(_counting)
    program = export_module(module, (X,)).program.module()
    given = torch.randn(4, 6)
    assert torch.equal(program(given), module(given))


def _sorted_by_expert(m, x):
    counts = torch.bincount(m[0](x).argmax(-1), minlength=6)
    return torch.cat([part * 2 for part in x.split(counts.tolist())])


def test_pieces_as_long_as_the_data_says_are_refused_with_the_line():
    with pytest.raises(CaptureError, match="depends on the data") as caught:
        capture(wrapped(_sorted_by_expert), (X,))
    assert caught.value.file.startswith(f"{__file__}:")


def _other_when_exported(m, x):
    mask = None if torch.compiler.is_exporting() else torch.ones(6)
    return m[0](x) * mask[None]


def test_a_model_that_fails_only_where_it_is_exported_is_captured_as_it_runs():
    module = wrapped(_other_when_exported)
    assert torch.equal(export_module(module, (X,)).program.module()(X), module(X))


class Recalls(nn.Module):
    """Keeps something from call to call that was None, or not there at all, before the first."""

    def __init__(self, what):
        super().__init__()
        self.what = what
        self.a = nn.Linear(6, 6)
        self.state = self.index = None
        self.shown = torch.zeros(2, 2)

    def forward(self, x):
        if self.what == "none":
            start = torch.zeros_like(x) if self.state is None else self.state
            self.state = self.a(x) + start
            return self.state
        if self.what == "missing":
            self.fresh = self.fresh + x if hasattr(self, "fresh") else x
            return self.fresh
        if self.what == "index":
            if self.index is None or self.index.shape[0] != x.shape[0]:
                self.index = torch.arange(x.shape[0]).flip(0)
            return self.a(x)[self.index]
        self.shown = self.a(x)  # shown to others, and read by no call
        return self.shown


@pytest.mark.parametrize("what", ["none", "missing"])
def test_what_is_kept_for_the_next_call_is_refused_though_it_was_not_there_before(what):
    with pytest.raises(CaptureError, match=r"keeps a tensor for the next call.* buffer"):
        capture(Recalls(what), (X,))


@pytest.mark.parametrize("what", ["index", "shown"])
def test_what_every_call_would_make_the_same_is_captured(what):
    module = Recalls(what)
    for _ in range(2):  # before and after a call of the model itself
        program = export_module(module, (X,)).program.module()
        given = torch.randn(4, 6)
        assert all(torch.equal(program(given), module(given)) for _ in range(2))


class Resizes(nn.Module):
    """Makes a buffer for the sizes at hand, as ConViT does: of constants, or of its argument."""

    def __init__(self, given=False):
        super().__init__()
        self.given = given
        self.register_buffer("index", torch.zeros(1, 2), persistent=False)

    def forward(self, x):
        if self.index.shape[0] != x.shape[0]:
            table = torch.zeros(x.shape[0], 2)
            table[:, 0] = torch.arange(x.shape[0])
            table[:, 1] = x[:, 0] if self.given else table[:, 0] * 2
            self.index = table
        return x + self.index.sum(1, keepdim=True)


@pytest.mark.parametrize("sizes", [(4,), (4, 3, 4)])
def test_a_buffer_made_of_constants_for_the_sizes_at_hand_is_made_before(sizes):
    model, plain = Resizes(), Resizes()
    piped = partita.pipe(model, (torch.randn(4, 6),), devices=2)
    for size in sizes:
        given = torch.randn(size, 6)
        assert torch.equal(piped(given), plain(given))
        assert torch.equal(model.index, plain.index) or len(sizes) > 1


def test_a_buffer_made_of_what_a_call_is_given_is_refused_until_it_is_there():
    module = Resizes(given=True)
    with pytest.raises(CaptureError, match="another shape in the place of the buffer 'index'") as e:
        capture(module, (X,))
    assert e.value.file.startswith(f"{__file__}:")
    assert "call the model once" in e.value.fix
    module(X)
    given = torch.randn(4, 6)
    assert torch.equal(export_module(module, (X,)).program.module()(given), module(given))


class Table(nn.Module):
    """Keeps what it was given in a tensor that began as a constant."""

    seen = None

    def forward(self, x):
        if self.seen is None:
            self.seen = torch.zeros_like(torch.ones(4, 6))
        y = x + self.seen
        seen = torch.zeros(4, 6)
        seen.copy_(x)
        self.seen = seen
        return y


def test_what_is_written_into_a_constant_is_of_the_call():
    module = Table()
    module.seen = torch.zeros(4, 6)
    with pytest.raises(CaptureError, match="keeps a tensor for the next call"):
        capture(module, (X,))


def test_a_file_or_a_connection_opened_in_forward_is_said(tmp_path, caplog):
    path = tmp_path / "factor.txt"
    path.write_text("3")

    def opens(m, x):
        with open(path) as file:
            return m[0](x) * float(file.read())

    def asks(m, x):
        with contextlib.suppress(OSError):
            socket.create_connection(("localhost", 1), timeout=1)
        return m[0](x)

    for function, says in ((opens, "opens a file"), (asks, "opens a connection")):
        caplog.clear()
        program = export_module(wrapped(function), (X,)).program
        assert says in caplog.text
        assert f"{__file__}:" in caplog.text
        assert program.module()(X).shape == (4, 6)
    caplog.clear()
    capture(wrapped(lambda m, x: m[0](x)), (X,))
    assert "opens" not in caplog.text
    assert builtins.open is open


class Masks(nn.Module):
    """Asks for the values of a mask, which it makes of ones where none is given."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(6, 6)

    def forward(self, x, mask=None):
        if mask is None:
            mask = torch.ones(x.shape[0])
            mask[1] = 0
        hidden = 1 - mask
        if (hidden > 0).any():
            x = x * 2
        return self.a(x) * int(mask.sum()) * (2 if hidden.flatten().bool().any().item() else 3)


def test_what_constants_decide_is_decided():
    model = Masks()
    program = export_module(model, (X,)).program.module()
    given = torch.randn(4, 6)
    assert torch.equal(program(given), model(given))


def test_what_an_argument_or_chance_decides_is_refused():
    with pytest.raises(CaptureError, match=r"hidden > 0\).any.* depends on the values of a tensor"):
        capture(Masks(), (X, torch.ones(4)))

    def by_chance(m, x):
        return m[0](x) if torch.rand(3).sum() > 1 else x

    def by_what_is_written(m, x):
        mask = torch.zeros(4)
        mask[:2] = x[:2, 0]
        return m[0](x) if mask.any() else x

    def by_a_weight(m, x):
        return m[0](x) if m[0].bias.sum() > 0 else x

    for function in (by_chance, by_what_is_written, by_a_weight):
        with pytest.raises(CaptureError, match="depends on the values of a tensor"):
            capture(wrapped(function), (X,))


def test_numbers_that_only_checks_compare_are_left_out():
    def checked(m, x):
        longest = x.sum(-1).long().max().item()
        torch._check(longest <= 100)
        return m[0](x)

    module = wrapped(checked)
    piped = partita.pipe(module, (X,), devices=2)
    assert torch.equal(piped(X), module(X))


@pytest.mark.parametrize(
    ("norm", "eps"),
    [
        (nn.LayerNorm(4), None),
        (nn.LayerNorm(4, eps=1e-3), 1e-3),
        (nn.RMSNorm(4), torch.finfo(torch.float32).eps),
    ],
)
def test_a_norm_is_captured_with_what_it_adds_to_the_variance(norm, eps):
    assert partita.capture(norm, (torch.randn(2, 4),)).ops[0].attr("eps") == eps
