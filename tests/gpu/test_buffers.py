"""Inputs and outputs of whole calls: copied together, or not at all where they lie already."""

import pytest
import torch
from decoder_modules import decoder
from torch.utils._python_dispatch import TorchDispatchMode

from partita.gpu import buffers
from partita.gpu.flow.export import flow_of
from partita.gpu.flow.fold import fold, fold_norms
from partita.gpu.flow.place import place
from partita.gpu.sequential import SequentialGraph
from partita.gpu.streams import order
from partita.gpu.streams.bound import Bound
from partita.gpu.streams.replay import Replay


class Calls(TorchDispatchMode):
    """Counts operators by name."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))

    def copies(self):
        return [name for name in self.names if "copy" in name or "clone" in name]


def test_several_values_are_put_by_one_operator():
    places = [torch.zeros(3), torch.zeros(2, 4), torch.zeros(5)]
    values = [torch.randn_like(each) for each in places]
    with Calls() as calls:
        buffers.put(places, values)
    assert calls.copies() == ["aten._foreach_copy_.default"]
    assert all(map(torch.equal, places, values))


def test_what_lies_where_it_is_read_is_not_copied():
    places = [torch.randn(3), torch.randn(4, 4)]
    with Calls() as calls:
        buffers.put(places, places)
    assert calls.names == []


def test_a_place_given_for_another_one_is_read_before_it_is_overwritten():
    places = [torch.randn(4, 4), torch.randn(4, 4)]
    first, second = (each.clone() for each in places)
    buffers.put(places, places[::-1])
    assert torch.equal(places[0], second)
    assert torch.equal(places[1], first)
    buffers.put(places, [places[0].t(), places[1]])  # the same memory in another order
    assert torch.equal(places[0], second.t())


def test_results_are_copies_of_any_type_and_shape():
    results = [torch.randn(3), torch.arange(4), torch.randn(2, 8, 3, 3)[:, :5]]
    fresh = buffers.copies(results)
    assert all(map(torch.equal, fresh, results))
    results[0].zero_()
    assert fresh[0].any()
    assert buffers.copies(()) == ()


def test_other_shapes_are_not_broadcast_into_a_place():
    with pytest.raises(RuntimeError):
        buffers.put([torch.zeros(2, 3), torch.zeros(2)], [torch.ones(3, 3), torch.ones(2)])


@pytest.mark.parametrize("kind", ["sequential", "streams"])
def test_a_call_with_the_places_themselves_copies_no_input(kind):
    module, inputs = decoder(layers=1)
    with torch.no_grad():
        flow = flow_of(module, inputs)
        if kind == "sequential":
            call = SequentialGraph(fold_norms(flow), inputs)
        else:
            placed, placement = place(fold(flow))
            bound = Bound(placed, placement, torch.device("cpu"))
            call = Replay(bound, order.sequential(placed), {})
        wanted = module(*inputs)
        for mine, given in zip(call.inputs, inputs, strict=True):
            mine.copy_(given)
        with Calls() as calls:
            results = call(*call.inputs)
        assert all(map(torch.allclose, results, wanted))
        assert calls.copies().count("aten._foreach_copy_.default") == 1  # the outputs
        with Calls() as calls:
            call(*inputs)
        assert calls.copies().count("aten._foreach_copy_.default") == 2
