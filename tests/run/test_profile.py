"""Profiling a small model on the CPU: every op measured once, reused, stopped, aggregated."""

import pytest

from partita.costs.measured import read_database
from partita.costs.profiles import read_profile
from partita.errors import FileError, InputError

torch = pytest.importorskip("torch")

from partita.capture import export_module  # noqa: E402
from partita.run.meter import Meter, Timing  # noqa: E402
from partita.run.profile import ProfilingStopped, profile  # noqa: E402

QUICK = Timing(warmup=1, repeats=3, most_s=0.1)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU())
        self.second = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU())
        self.norm = torch.nn.BatchNorm1d(64)

    def forward(self, x):
        return self.norm(self.second(self.first(x))).sum()


@pytest.fixture(scope="module")
def inputs():
    return (torch.randn(32, 64, generator=torch.Generator().manual_seed(0)),)


@pytest.fixture(scope="module")
def captured(inputs):
    torch.manual_seed(0)
    return export_module(Model(), inputs)


def test_every_op_is_measured_with_a_forward_and_where_it_learns_a_backward(captured, inputs):
    model_profile = profile(captured, inputs, timing=QUICK)
    assert [op.op for op in model_profile.ops] == [op.name for op in captured.graph.ops]
    linear = next(op for op in model_profile.ops if op.kind == "linear")
    assert linear.forward_s > 0
    assert linear.backward_s > 0
    assert linear.parameter_bytes == (64 * 64 + 64) * 4
    assert linear.output_bytes == 32 * 64 * 4
    assert linear.peak_bytes >= linear.output_bytes


def test_for_inference_there_is_no_backward(captured, inputs):
    model_profile = profile(captured, inputs, timing=QUICK, training=False)
    assert model_profile.backward_s == 0
    assert model_profile.forward_s > 0


def test_equal_calls_are_measured_once_and_never_again(captured, inputs, tmp_path):
    path, steps = tmp_path / "db.jsonl", []
    first = profile(
        captured, inputs, timing=QUICK, database=path, progress=lambda *s: steps.append(s) or True
    )
    assert len(read_database(path).entries) == len(steps) < len(first.ops)
    assert [done for done, _, _ in steps] == list(range(1, len(steps) + 1))
    steps.clear()
    again = profile(
        captured, inputs, timing=QUICK, database=path, progress=lambda *s: steps.append(s) or True
    )
    assert again == first
    assert not steps


def test_measurements_of_another_torch_do_not_count_and_that_is_said(
    captured, inputs, tmp_path, caplog
):
    path = tmp_path / "db.jsonl"
    profile(captured, inputs, timing=QUICK, database=path)
    before = len(read_database(path).entries)
    path.write_text(path.read_text().replace(f'"{torch.__version__}"', '"1.0.0"'))
    profile(captured, inputs, timing=QUICK, database=path)
    assert "measured with torch 1.0.0" in caplog.text
    assert len(read_database(path).entries) == 2 * before


def test_stopping_keeps_what_was_measured(captured, inputs, tmp_path):
    path = tmp_path / "db.jsonl"
    with pytest.raises(ProfilingStopped, match="after 2 of"):
        profile(captured, inputs, timing=QUICK, database=path, progress=lambda d, *_: d < 2)
    assert len(read_database(path).entries) == 2
    profile(captured, inputs, timing=QUICK, database=path)


def test_measuring_changes_neither_the_model_nor_the_random_state(captured, inputs):
    weights = {name: value.clone() for name, value in captured.module.state_dict().items()}
    random = torch.random.get_rng_state()
    profile(captured, inputs, timing=QUICK)
    assert torch.equal(random, torch.random.get_rng_state())
    for name, value in captured.module.state_dict().items():
        assert torch.equal(weights[name], value), name


def test_modules_are_the_sums_of_their_ops(captured, inputs):
    model_profile = profile(captured, inputs, timing=QUICK)
    modules = model_profile.modules(1)
    assert {"first", "second", "norm"} <= {module.scope for module in modules}
    assert sum(module.forward_s for module in modules) == pytest.approx(model_profile.forward_s)
    assert sum(module.num_ops for module in modules) == len(model_profile.ops)
    (whole,) = model_profile.modules(0)
    assert whole.parameter_bytes == sum(module.parameter_bytes for module in modules)
    assert whole.peak_bytes >= max(module.peak_bytes for module in modules)


def test_a_profile_is_saved_and_read(captured, inputs, tmp_path):
    model_profile = profile(captured, inputs, timing=QUICK)
    path = tmp_path / "profile.json"
    path.write_bytes(model_profile.to_json())
    assert read_profile(path) == model_profile
    path.write_bytes(model_profile.to_json().replace(b'"forward_s"', b'"forward"', 1))
    with pytest.raises(FileError, match="forward"):
        read_profile(path)


def test_the_profile_of_another_model_is_refused(captured, inputs):
    model_profile = profile(captured, inputs, timing=QUICK)
    assert set(model_profile.of(captured.graph)) == {op.name for op in captured.graph.ops}
    other = export_module(torch.nn.Linear(64, 2), inputs).graph
    with pytest.raises(InputError, match="profile of another"):
        model_profile.of(other)


def test_a_model_without_values_cannot_be_timed():
    with torch.device("meta"):
        module, x = torch.nn.Linear(4, 4), torch.empty(2, 4)
    with pytest.raises(InputError, match="meta device"):
        profile(export_module(module, (x,)), (x,), timing=QUICK)


@pytest.mark.parametrize(
    ("device", "said"), [("tpu", "no device"), ("meta", "cannot time"), ("cuda", "no CUDA GPU")]
)
def test_devices_that_are_not_there_are_refused(captured, inputs, device, said):
    if device == "cuda" and torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(InputError, match=said):
        profile(captured, inputs, device=device)


def test_a_slower_operation_takes_longer():
    meter = Meter(torch.device("cpu"), Timing(warmup=1, repeats=5))
    small, large = (torch.randn(n, n) for n in (16, 512))
    times = [
        meter.run(torch.matmul, [x, x], [False, False], [False, False]).forward.median_s
        for x in (small, large)
    ]
    assert times[0] < times[1]


def test_temporaries_count_towards_the_peak():
    def operation(x):
        return (x * 2 + 1).sum()

    x = torch.randn(1000)
    with torch.no_grad():
        metered = Meter(torch.device("cpu"), QUICK).run(operation, [x], [False], [False])
    assert 8000 <= metered.peak_bytes <= 8100
    assert metered.output_bytes == 4
