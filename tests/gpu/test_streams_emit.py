import ast
from functools import cache

import pytest
import torch
from streams_modules import made

from partita.errors import InputError
from partita.gpu.flow.export import flow_of
from partita.gpu.flow.fold import fold_norms
from partita.gpu.flow.place import place
from partita.gpu.sequential import SequentialGraph
from partita.gpu.streams import order
from partita.gpu.streams.api import Streamed
from partita.gpu.streams.bound import Bound
from partita.gpu.streams.candidates import variants
from partita.gpu.streams.emit import emit
from partita.gpu.streams.record import StreamSchedule, fingerprint
from partita.gpu.streams.replay import Replay


@cache
def exported():
    module, image = made("branches")
    return module, image, flow_of(module, (image,))


def streamed():
    """A model scheduled by hand, as the GPU would."""
    module, image, read = exported()
    with torch.no_grad():
        flow, placement = place(variants(read)["merge"])
        bound = Bound(flow, placement, torch.device("cpu"))
        plan = order.listed(flow, 3, dict.fromkeys(order.launched(flow), 1.0))
        call = Replay(bound, plan, {})
    streamed = Streamed(module, (image,))
    schedule = StreamSchedule(
        (tuple(image.shape),), "float32", "a GPU", "streams", "merge", fingerprint(flow), plan,
        (), (("merge, 3 streams", 5.0),), 0.0, 0.0, 1.0,
    )  # fmt: skip
    streamed.add(schedule, call)
    return streamed, call, image


def test_emitted_source_says_the_same_steps_and_waits(tmp_path):
    outcome, call, _ = streamed()
    text = emit(outcome, str(tmp_path / "weights.pt"))
    tree = ast.parse(text)
    table = next(
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and node.targets[0].id == "STEPS"
    )
    names = {}
    exec(
        "from partita.gpu.flow.steps import *\nfrom partita.gpu.flow.read import Held\n"
        "from partita.gpu.flow.steps import Ref, Step, Window\n",
        names,
    )
    assert eval(ast.unparse(table), names) == call.bound.flow.steps
    launches = call.plan.launches
    assert text.count(".wait_event(") == sum(len(launch.waits) for launch in launches)
    assert text.count("self.run('") == len(launches)
    saved = torch.load(tmp_path / "weights.pt", weights_only=True)
    used = {step.weight for step in call.bound.flow.steps if step.weight}
    assert used <= saved.keys()
    assert max(map(len, text.splitlines())) < 400


def test_what_is_not_ours_is_not_emitted(tmp_path):
    outcome, _, image = streamed()
    plain = SequentialGraph(fold_norms(exported()[2]), (image,))
    outcome.calls[outcome.schedules[0].shapes] = plain
    with pytest.raises(InputError, match="which is PyTorch's own"):
        emit(outcome, str(tmp_path / "weights.pt"))


def test_a_batch_with_a_schedule_is_picked_and_another_runs_as_it_is():
    outcome, _, image = streamed()
    wanted = outcome.module(image)
    torch.testing.assert_close(outcome(image), wanted, rtol=1e-4, atol=1e-5)
    with pytest.warns(UserWarning, match=r"no schedule for inputs of \[\[1, 3, 12, 10\]\]"):
        one = outcome(image[:1])
    torch.testing.assert_close(one, wanted[:1], rtol=1e-4, atol=1e-5)
    outcome(image[:1])  # said once


def test_another_dtype_is_refused():
    outcome, _, image = streamed()
    with pytest.raises(InputError, match=r"an input is torch.float64; give torch.float32"):
        outcome(image.double())


def test_a_schedule_of_another_gpu_warns(tmp_path):
    outcome, _, image = streamed()
    path = tmp_path / "schedule.json"
    outcome.save(path)
    again = Streamed(outcome.module, (image,))
    with pytest.warns(UserWarning, match="was measured on a GPU"):
        again.load(path)
    assert again.schedules == outcome.schedules
    torch.testing.assert_close(again(image), outcome(image))
