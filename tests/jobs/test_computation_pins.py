"""How a model is computed, as a plan carries it: f32 gradients, execution, products in fp8."""

import functools
import json
from dataclasses import replace

import pytest

from partita.cluster import resolve
from partita.costs.roofline import op_cost, work_bound_s
from partita.emit.plans import emit_plan, emit_plan_rank
from partita.engine import run
from partita.errors import InputError
from partita.graph import training_graph
from partita.jobs.check_plan import check_plan
from partita.jobs.launch_command import run_refusal
from partita.jobs.plan import plan
from partita.jobs.simulate import data_parallel, simulate_plan, simulate_stage
from partita.jobs.workload import load
from partita.lower import lower_plan
from partita.meaning import Purpose
from partita.plans import EXECUTIONS, Schedule, plan_from_json
from partita.search.base import Stop
from partita.verify import verify_meaning
from partita.zoo.gpt import GptSizes, gpt

QUICK = Stop(time_s=20.0, gap=0.3)
SIZES = GptSizes(1, 256, 4, 64, 512)


@functools.cache
def forward():
    return gpt("tiny", SIZES, 8, 64, "bf16", loss=True, fused_attention=True)


@functools.cache
def planned(*pins):
    return plan(forward(), "2xH100", pin=["dp=2", "micro-batches=1", *pins], stop=QUICK)


def reduced_bytes(graph, zero):
    """Bytes of all gradient reductions of a data-parallel step."""
    stage = data_parallel(graph, resolve("2xH100"), zero)
    program = lower_plan((stage,), Schedule(), graph, resolve("2xH100"), run).program
    assert not verify_meaning(program, graph, (stage,), Schedule())
    works = [work for work in program.works if work.purpose is Purpose.GRADIENT_REDUCTION]
    return program, sum(work.size_bytes for work in works)


@pytest.mark.parametrize("zero", range(4))
def test_f32_gradients_are_twice_as_many_bytes_on_the_network(zero):
    narrow, wide = training_graph(forward()), training_graph(forward(), grad_dtype="f32")
    assert reduced_bytes(wide, zero)[1] == pytest.approx(2 * reduced_bytes(narrow, zero)[1])


def test_f32_gradients_are_twice_as_many_bytes_in_memory():
    narrow, wide = load(forward()), load(forward(), grad_dtype="f32")
    sizes = [simulate_stage(w, resolve("2xH100"), data_parallel(w.graph, resolve("2xH100")))
             for w in (narrow, wide)]  # fmt: skip
    parameters = sum(tensor.size_bytes for tensor in narrow.graph.parameters)
    assert sizes[1].memory.gradients == 2 * sizes[0].memory.gradients == 2 * parameters


def test_products_of_weight_gradients_stay_in_the_type_of_the_model():
    graph = training_graph(forward(), grad_dtype="f32")
    for op in graph.ops:
        if op.phase == "wgrad" and op.forward:
            assert graph.dtype(op) == "bf16"
            assert all(graph.tensor(name).dtype == "f32" for name in op.outputs)


def test_a_reduction_of_other_bytes_than_its_gradients_have_is_refused():
    graph = training_graph(forward(), grad_dtype="f32")
    program, _ = reduced_bytes(graph, 1)
    works = tuple(
        replace(work, size_bytes=work.size_bytes / 2)
        if work.purpose is Purpose.GRADIENT_REDUCTION
        else work
        for work in program.works
    )
    stage = data_parallel(graph, resolve("2xH100"), 1)
    wrong = verify_meaning(replace(program, works=works), graph, (stage,), Schedule())
    assert any("is said to move" in text for text in wrong)


@pytest.mark.parametrize("pin", ["grad-dtype=f32", "execution=eager", "matmul-dtype=fp8"])
def test_a_plan_carries_how_it_is_computed(pin):
    answer = planned(pin)
    again = plan_from_json(json.loads(answer.plan.to_json()))
    assert again == answer.plan
    key, value = pin.replace("fp8", "f8").replace("-", "_").split("=")
    assert getattr(again.model, key) == value
    simulation = simulate_plan(again, resolve("2xH100"))
    assert simulation.step_s == pytest.approx(answer.best.step_s)
    assert simulation.workload.execution == again.model.execution
    assert answer.lower_bound_s <= answer.best.step_s
    assert check_plan(again) == ()
    assert pin.replace("fp8", "f8") in answer.space


def test_what_is_forbidden_is_not_how_a_plan_is_computed():
    answer = plan(
        forward(), "2xH100", pin=["dp=2", "micro-batches=1"],
        forbid=["execution=graph", "grad-dtype=bf16"], stop=QUICK,
    )  # fmt: skip
    assert answer.plan.model.execution == "compiled"
    assert answer.plan.model.grad_dtype == "f32"


def test_an_eager_host_makes_the_step_longer():
    assert planned("execution=eager").best.step_s > planned().best.step_s


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_the_bound_of_all_work_holds_however_kernels_are_started(execution):
    for name in ("gpt2@128", "squeezenet1_1"):
        workload = load(name, batch=4, dtype="bf16", execution=execution)
        cluster = resolve("2xH100")
        answer = simulate_stage(workload, cluster, data_parallel(workload.graph, cluster))
        assert work_bound_s(workload.graph, cluster, execution) <= answer.step_s


def test_large_linear_layers_are_faster_in_fp8_and_attention_is_not():
    kind = resolve("8xH100").kinds[0]
    half, narrow = (load("llama-7b", batch=1, dtype="bf16", matmul_dtype=t) for t in ("", "f8"))
    for op in half.graph.ops[:60]:
        seconds = [op_cost(w.graph, w.graph.op(op.name), kind).seconds for w in (half, narrow)]
        if op.kind == "linear":
            assert seconds[1] < seconds[0]
        elif op.phase == "forward":
            assert seconds[1] == seconds[0]


@pytest.mark.parametrize(
    ("cluster", "dtype", "pin", "words"),
    [
        ("2xA100", "bf16", "matmul-dtype=fp8", "A100-80GB-SXM has no fp8 products; leave it out"),
        ("2xH100", "f32", "matmul-dtype=fp8", "products in f8 of a model in f32"),
        ("2xH100", "f32", "grad-dtype=bf16", "gradients in bf16 of a model in f32; give f32"),
        ("2xH100", "bf16", "grad-dtype=f16", "gradients in f16 of a model in bf16; give bf16 or"),
        ("2xH100", "bf16", "execution=jit", "did you mean|known are"),
        ("2xH100", "bf16", "grad-dtype=fp64x", "did you mean f64"),
    ],
)
def test_what_cannot_be_computed_so_is_refused_with_what_can(cluster, dtype, pin, words):
    with pytest.raises(InputError, match=words):
        plan("gpt2@64", cluster, batch=2, dtype=dtype, pin=[pin])


def test_inference_has_no_gradients_to_add_up():
    with pytest.raises(InputError, match="inference has none"):
        plan("gpt2@64", "2xH100", batch=2, dtype="bf16", training=False, pin=["grad-dtype=f32"])


def test_products_in_fp8_are_not_emitted_or_launched_as_others():
    made = planned("matmul-dtype=fp8").plan
    assert "partita run --matmul-dtype bf16" in run_refusal(made, load(forward()).graph)
    for emit in (emit_plan, lambda it: emit_plan_rank(it, 0)):
        with pytest.raises(InputError, match="multiply in f8, and a run multiplies in the model's"):
            emit(made)


def test_a_rank_is_not_emitted_with_other_sums_of_gradients():
    with pytest.raises(InputError, match="adds gradients up in f32, and the code of a rank in bf1"):
        emit_plan_rank(planned("grad-dtype=f32").plan, 0)
