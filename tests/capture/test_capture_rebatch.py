"""A captured graph for another batch is the graph captured with that batch, or is refused."""

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

import partita  # noqa: E402
from partita.capture import capture  # noqa: E402
from partita.errors import GraphError, PartitaError  # noqa: E402
from partita.graph import training_graph  # noqa: E402
from partita.graph.rebatch import batch_dims, rebatch  # noqa: E402

T = torch.Tensor


class EncoderLayer(nn.Module):
    """PyTorch's own layer with a mask: positions are around the batch in its inner tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)

    def forward(self, x: T) -> T:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.layer(x, src_mask=mask, is_causal=True).sum()


class Sorted(nn.Module):
    """Rows in another order, as experts see them: positions made of nothing, opaque ops."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: T) -> T:
        rows = self.a(x).flatten(0, 1)
        order = rows.sum(-1).argsort()
        rows = self.b(rows[order])
        return rows.view_as(x) + (torch.arange(len(x)) & 3)[:, None, None]


class Contrast(nn.Module):
    """Every sample against every other: half the batch is another function."""

    def forward(self, x: T) -> T:
        rows = x.flatten(1)
        return (rows @ rows.T).logsumexp(1)


def captured(module: nn.Module, batch: int):
    return capture(module, (torch.randn(batch, 6, 8),))


@pytest.mark.parametrize("make", [EncoderLayer, Sorted])
@pytest.mark.parametrize("batch", [2, 4, 16])
def test_the_graph_for_another_batch_is_the_one_captured_with_it(make, batch):
    other = rebatch(captured(make(), 8), batch)
    wanted = captured(make(), batch)
    assert [(t.name, t.shape) for t in other.tensors] == [(t.name, t.shape) for t in wanted.tensors]


def test_a_dim_in_which_positions_are_around_the_batch_is_no_batch_dim():
    graph = captured(EncoderLayer(), 4)
    dims = batch_dims(graph)
    merged = [t for t in graph.tensors if t.shape[:1] == (24,) and t.role == "activation"]
    assert merged
    assert not {t.name for t in merged} & dims.keys()
    assert all(graph.tensor(name).shape[dim] % 4 == 0 for name, dim in dims.items())


def test_a_model_that_mixes_samples_is_refused():
    with pytest.raises(GraphError, match=r"mixes samples of the batch.*cannot be cut into micro"):
        rebatch(captured(Contrast(), 8), 4)


def test_such_a_model_is_planned_with_one_micro_batch(caplog):
    graph = captured(Contrast(), 4)
    planned = partita.plan(graph, "2xA100", training=False, stop=partita.Stop(evaluations=20))
    assert planned.plan.schedule.num_microbatches == 1
    assert "mixes samples of the batch" in caplog.text
    with pytest.raises(PartitaError, match="mixes samples of the batch"):
        partita.plan(graph, "2xA100", training=False, pin=("micro-batches=2",))


class Bags(nn.Module):
    """Bags of a flat list that offsets cut, or of rows that are as long, padded."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(9, 8, padding_idx=0)

    def forward(self, ids: T, offsets: T | None = None) -> T:
        return self.bag(ids, offsets)


class OffsetsFirst(Bags):
    def forward(self, offsets: T, ids: T) -> T:
        return self.bag(ids, offsets)


def test_bags_that_offsets_cut_have_no_parts_and_the_rows_that_are_advised_have():
    flat, offsets = torch.tensor([1, 2, 3, 4, 5, 6]), torch.tensor([0, 1, 3, 5])
    for module, args in ((Bags(), (flat, offsets)), (OffsetsFirst(), (offsets, flat))):
        graph = capture(module, args)
        with pytest.raises(GraphError, match="ids with a row for each bag, padded"):
            rebatch(graph, len(args[0]) // 2)
    rows = torch.tensor([[1, 0], [2, 3], [4, 5], [6, 0]])
    module = Bags()
    torch.testing.assert_close(module(rows), module(flat, offsets))
    wanted = capture(module, (rows[:2],))
    for graph in (capture(module, (rows,)), training_graph(capture(module, (rows,)))):
        half = {tensor.name: tensor.shape for tensor in rebatch(graph, 2).tensors}
        assert all(half[tensor.name] == tensor.shape for tensor in wanted.tensors)


def test_bags_across_samples_mix_them():
    class Across(Bags):
        def forward(self, ids: T) -> T:
            return self.bag(ids.T)

    with pytest.raises(GraphError, match="mixes samples of the batch"):
        rebatch(capture(Across(), (torch.ones(4, 3).long(),)), 2)
