"""What users hold: steps on parts of a batch, a loss beside the module, a recorder, dropout."""

import random

import pytest

torch = pytest.importorskip("torch")

from distributed_models import make  # noqa: E402
from distributed_plans import graph_by_name, graph_of, pipeline, sgd  # noqa: E402
from distributed_ranks import run_on_ranks  # noqa: E402

from partita.cluster import resolve  # noqa: E402
from partita.engine import run as run_program  # noqa: E402
from partita.errors import PartitaError  # noqa: E402
from partita.graph.loops import loop_nest  # noqa: E402
from partita.lower import lower_plan  # noqa: E402
from partita.meaning import Purpose  # noqa: E402
from partita.plans import Axis, Mesh, OpSplit, Schedule, Stage  # noqa: E402
from partita.run.distributed.engine import execute  # noqa: E402
from partita.run.distributed.loss import with_loss  # noqa: E402
from partita.run.distributed.opwise import _exchanges, _started_early  # noqa: E402

ROWS = {0: [0, 1, 2, 6, 7, 8], 1: [3, 4, 5, 9, 10, 11]}


class Seen:
    """A recorder that remembers what it was told."""

    def __init__(self):
        self.events = []

    def start(self, task, name):
        self.events.append(("start", name))

    def end(self, task, name):
        self.events.append(("end", name))


def on_parts(rank):
    """Losses of the whole batch and of a rank's own rows of both micro-batches."""
    module, (x, y) = make("mlp")
    args = torch.cat([x, x[:4] + 1]), torch.cat([y, y[:4]])
    graph = graph_of(module, args)
    plan = pipeline(graph, 1, "1f1b", 2, data_parallel=2, batch=12)
    whole = execute(plan, make("mlp")[0], optimizer=sgd, device="cpu", example=args)
    wanted = [whole.step(*args) for _ in range(2)]
    whole.board.close()
    parts = execute(plan, make("mlp")[0], optimizer=sgd, device="cpu", example=args)
    own = tuple(arg[ROWS[rank]] for arg in args)
    losses = [parts.step(*own, local=True) for _ in range(2)]
    try:
        parts.step(own[0][:5], own[1][:5], local=True)
    except PartitaError as error:
        refusal = str(error)
    parts.board.close()
    return wanted, losses, refusal


def with_a_loss(rank):
    """The names in the state dict, and the tasks that were recorded."""
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    args = torch.randn(8, 4), torch.randn(8, 2)
    loss = torch.nn.functional.mse_loss
    plan = pipeline(graph_of(with_loss(module, loss), args), 2, "1f1b", 2)
    seen = Seen()
    with execute(
        plan, module, optimizer=sgd, loss=loss, device="cpu", recorder=seen
    ) as engine:  # the world stays open: this one opened it not
        first, second = engine.step(*args), engine.step(*args)
        state = engine.full_state_dict()
        count = len(engine.optimizers)
        engine.owns_world = False
    return first > second, None if state is None else list(state), seen.events, count


def with_dropout(rank):
    """Losses of one model under two plans."""
    graph = graph_by_name("gpt-dropout")
    losses = []
    for plan in (
        pipeline(graph, 2, "1f1b", 2, checkpointing="full"),
        pipeline(graph, 1, "1f1b", 2, data_parallel=2),
    ):
        module, args = make("gpt-dropout")
        engine = execute(plan, module, optimizer=sgd, device="cpu", seed=7)
        losses.append([engine.step(*args) for _ in range(2)])
        engine.board.close()
    return losses


def with_shards(rank):
    """Where gradients are laid together in each of two steps of ZeRO 2."""
    module, args = make("mlp")
    plan = pipeline(graph_by_name("mlp"), 1, "1f1b", 2, data_parallel=2, zero=2)
    engine = execute(plan, module, optimizer=sgd, device="cpu")
    spots = []
    for _ in range(2):
        engine.step(*args)
        kept = engine.walk.run.comm.spare.values()
        spots.append(sorted(tensor.data_ptr() for each in kept for tensor in each))
    engine.board.close()
    return spots


def everything(rank):
    return on_parts(rank), with_a_loss(rank), with_dropout(rank), with_shards(rank)


@pytest.fixture(scope="module")
def ends(tmp_path_factory):
    ends = run_on_ranks(2, everything, folder=tmp_path_factory.mktemp("engine"))
    assert [end.code for end in ends] == [0, 0], ends[0].stderr + ends[1].stderr
    return ends


def test_a_rank_may_give_its_own_rows_only(ends):
    for end in ends:
        wanted, losses, refusal = end.result[0]
        assert losses == pytest.approx(wanted, rel=1e-6)
        assert "gives 5 rows of x, and 6 rows are this rank's part" in refusal


def test_a_loss_beside_the_module_leaves_its_names(ends):
    improves, names, _, _ = ends[0].result[1]
    assert improves
    assert names == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert ends[1].result[1][1] is None


def test_a_recorder_is_told_of_every_task(ends):
    for rank, end in enumerate(ends):
        _, _, events, optimizers = end.result[1]
        assert optimizers == 1
        going = set()
        for what, name in events:  # a message may be under way while others compute
            assert (name in going) == (what == "end")
            going.symmetric_difference_update([name])
        assert not going
        names = [name for what, name in events if what == "start"]
        assert names.count(f"F0@stage{rank}") == names.count(f"B1@stage{rank}") == 2


def test_dropout_is_the_same_under_every_plan(ends):
    pipelined, parallel = ends[0].result[2]
    assert parallel == pytest.approx(pipelined, rel=1e-5)


def test_gradients_are_laid_together_in_the_same_memory_in_every_step(ends):
    for end in ends:
        first, second = end.result[3]
        assert first
        assert first == second


def works_of(program):
    """A program's works in the order that ranks walk, as lowered and as started early."""
    order = range(program.num_tasks) if program.order is None else program.order.tolist()
    given = tuple(dict.fromkeys(n for k in order if (n := int(program.work[k])) >= 0))
    exchanged = _exchanges(program, given)
    return given, _started_early(program, given, exchanged), exchanged


def split_program(dims_of, name="gpt"):
    """One stage on two devices, its ops split as said."""
    graph = graph_by_name(name)
    ops = [op for op in graph.ops if op.phase == "forward"]
    splits = tuple(OpSplit(op.name, (dims_of(op, graph.call(op)),)) for op in ops)
    stage = Stage("model", Mesh((Axis("tp", 2),), (0, 1)), splits)
    return lower_plan((stage,), Schedule(), graph, resolve("2xA100"), run_program).program


def test_the_sum_of_a_data_gradient_starts_before_the_weight_gradient():
    program = split_program(lambda op, call: "n" if op.kind == "linear" else "")
    given, early, _ = works_of(program)
    moved = 0
    for before, sums, after in zip(early, early[1:], early[2:], strict=False):
        one, conversion, other = (program.works[n] for n in (before, sums, after))
        if conversion.purpose is Purpose.CONVERSION and other.op.endswith(".wgrad"):
            assert one.op.removesuffix(".dgrad") == other.op.removesuffix(".wgrad")
            assert set(conversion.reads) & set(one.writes)
            assert given.index(sums) > given.index(after)
            moved += 1
    assert moved > 3


@pytest.mark.parametrize("seed", range(6))
def test_whatever_is_sent_keeps_its_order_and_nothing_is_read_before_it_is_made(seed):
    rng = random.Random(seed)

    def dims_of(op, call):
        free = [dim.name for dim in loop_nest(call).dims if not dim.whole and not dim.extent % 2]
        return rng.choice(["", *free])

    program = split_program(dims_of)
    given, early, exchanged = works_of(program)
    works = program.works
    sent = [n for n in given if works[n].collective or exchanged.get(n)]
    assert sorted(given) == sorted(early)
    assert [n for n in early if works[n].collective or exchanged.get(n)] == sent
    at = {n: k for k, n in enumerate(early)}
    maker = {value: n for n in given for value in works[n].writes}
    for n in given:
        for value in works[n].reads:
            while value >= 0:
                if value in maker and given.index(maker[value]) < given.index(n):
                    assert at[maker[value]] < at[n]
                value = program.values[value].of
