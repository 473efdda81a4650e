"""Emitted code takes another batch and another length where the model does."""

from dataclasses import replace

import pytest

pytest.importorskip("torch")

import torch
from torch import nn

from partita.capture import export_module
from partita.emit.plans import capture_reference, recaptured_module, written_alike
from partita.emit.size import Size
from partita.emit.stages import emit, same_code
from partita.emit.symbolic import Recaptured, planned_for, symbolic
from partita.emit.text import docstring
from partita.run.sequential import load_source
from partita.zoo import build
from tests.emit.transparency import assert_ruff_has_nothing_to_say


class Attends(nn.Module):
    """Texts of any length; positions are made in each block anew."""

    def __init__(self, blocks=2):
        super().__init__()
        self.words = nn.Embedding(20, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 24) for _ in range(blocks))

    def forward(self, ids):
        x = self.words(ids)
        batch, length = ids.shape
        for block in self.blocks:
            place = torch.arange(length).float().cos()[:, None]
            q, k, v = (block(x) * place).view(batch, length, 2, 12).transpose(1, 2).chunk(3, -1)
            y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + y.transpose(1, 2).reshape(batch * length, 8).view(batch, length, 8)
        return x


class Averages(Attends):
    """The same, divided by the batch: a number that no size tells."""

    def forward(self, ids):
        return super().forward(ids) / float(len(ids)) ** 0.5


def emitted(module, given, cut=None):
    captured = export_module(module, given, {})
    names = [op.name for op in captured.graph.ops]
    cut = len(names) // 2 if cut is None else cut % len(names)
    stage_of = {name: int(i >= cut) for i, name in enumerate(names)}
    others = recaptured_module(module, captured.record, given, {}, given[0].shape[0])

    def write(own, followed):
        return emit(own, stage_of, others=followed)

    return write(captured, written_alike(captured, others, write)).source


def test_batch_and_length_are_those_of_what_is_given():
    module = Attends().eval()
    source = emitted(module, (torch.randint(0, 20, (4, 6)),))
    assert (
        "Planned for batch 4 and length 6; it takes a batch from 2 up and a length from 2 up."
        in source
    )
    code = load_source(source)
    stages = code.build_stages(module.state_dict())
    for shape in ((4, 6), (1, 6), (3, 9)):
        ids = torch.randint(0, 20, shape)
        assert torch.equal(code.run_stages(stages, ids), module(ids))


class Routes(nn.Module):
    """A part that gets all tokens as one row, and needs how many there are; `split`: of each."""

    def __init__(self, split):
        super().__init__()
        self.split = split

    def forward(self, rows, counts):
        turned = torch.zeros(2 * rows.shape[0], 4)
        turned = torch.cat([rows, rows]) + turned
        if self.split:  # what of the rows is batch and what length nobody tells here
            turned = turned.view(2, counts[0], counts[1], 4).flip(2)
        return turned.view(2, rows.shape[0], 4).sum(0).clamp(max=1e30)


class Routed(nn.Module):
    def __init__(self, split):
        super().__init__()
        self.words = nn.Embedding(20, 4)
        self.parts = nn.ModuleList(Routes(split) for _ in range(2))

    def forward(self, ids):
        x = self.words(ids).reshape(-1, 4)
        for part in self.parts:
            x = part(x, ids.shape)
        return x.view(*ids.shape, 4)


@pytest.mark.parametrize(("split", "cut"), [(False, 1), (True, 1), (True, None)])
def test_parts_that_see_tokens_alone_are_written_with_their_number(split, cut, tmp_path):
    """What needs batch and length is written where both are known; else it is not promised."""
    module = Routed(split).eval()
    source = emitted(module, (torch.randint(0, 20, (4, 6)),), cut)
    assert ("tokens = rows.shape[0]" in source) == (not split)
    assert ("class Routes" in source) == (not (split and cut))
    promised = "it takes a batch from 2 up and a length from 2 up" in source
    assert promised == (cut == 1)
    assert ("It is for length 6 alone." in source) == (cut is None)
    code = load_source(source)
    stages = code.build_stages(module.state_dict())
    for shape in ((4, 6), (3, 6), (2, 6), *(((2, 5), (3, 9)) if promised else ())):
        ids = torch.randint(0, 20, shape)
        assert torch.equal(code.run_stages(stages, ids), module(ids))
    (tmp_path / "stages.py").write_text(source)
    assert_ruff_has_nothing_to_say(tmp_path)


class Numbered(nn.Module):
    """Positions by a part that is given ids for their shape alone, as BART's are."""

    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(20, 4), Numbers()

    def forward(self, ids):
        return self.words(ids) + self.places(ids)


class Numbers(nn.Embedding):
    def __init__(self):
        super().__init__(12, 4)

    def forward(self, ids):
        return super().forward(torch.arange(ids.shape[1]).expand(ids.shape[0], -1))


def test_a_part_that_reads_nothing_but_sizes_is_written_where_these_are_known():
    module = Numbered().eval()
    source = emitted(module, (torch.randint(0, 20, (4, 6)),), cut=0)
    assert "it takes a batch from 2 up and a length from 2 to 12" in source
    code = load_source(source)
    stages = code.build_stages(module.state_dict())
    for shape in ((4, 6), (3, 5), (2, 12)):
        ids = torch.randint(0, 20, shape)
        assert torch.equal(code.run_stages(stages, ids), module(ids))


def test_a_table_is_made_once_in_a_stage():
    source = emitted(Attends(4).eval(), (torch.randint(0, 20, (4, 6)),))
    assert source.count("torch.cos(") == 2  # four blocks in two stages


class Counts(Attends):
    """The same, with a table that follows the batch beside those that follow the length."""

    def forward(self, ids):
        by_sample = torch.arange(ids.shape[0]).float().cos()[:, None, None]
        return super().forward(ids) * by_sample


@pytest.mark.parametrize("shape", [(4, 8), (6, 6), (6, 12)])  # half of the length is 4, 3, 6
def test_tables_of_batch_and_length_are_two_though_their_sizes_are_equal(shape):
    module = Counts().eval()
    source = emitted(module, (torch.randint(0, 20, shape),))
    assert f"Planned for batch {shape[0]} and length {shape[1]}" in source
    code = load_source(source)
    stages = code.build_stages(module.state_dict())
    for other in (shape, (3, 9), (8, 5)):
        ids = torch.randint(0, 20, other)
        assert torch.equal(code.run_stages(stages, ids), module(ids))


class Shifted(Attends):
    """What begins as zeros of another tensor's shape, and is read in one row."""

    def forward(self, ids, labels):
        before = ids.new_zeros(ids.shape)
        before[..., 1:] = ids[..., :-1].clone()
        return super().forward(before).view(-1, 8)[labels.view(-1) % 8]


def test_tensors_of_a_shape_and_views_of_what_is_given_take_other_sizes():
    module = Shifted().eval()
    given = (torch.randint(0, 20, (4, 6)), torch.randint(0, 20, (4, 6)))
    source = emitted(module, given)
    assert "Planned for batch 4 and length 6" in source
    code = load_source(source)
    stages = code.build_stages(module.state_dict())
    for shape in ((4, 6), (3, 9), (8, 5)):
        ids, labels = torch.randint(0, 20, shape), torch.randint(0, 20, shape)
        assert torch.equal(code.run_stages(stages, ids, labels), module(ids, labels))


class Tables(nn.Module):
    """Two blocks that make the same of a longer and longer chain of constants."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x):
        mask = torch.ones(x.shape[1]).cumsum(0).unsqueeze(0).unsqueeze(2)
        for block in self.blocks:
            scale = torch.sqrt(1 - mask.neg())
            x = torch.relu(block(x)) * scale
        return x


def test_what_shared_constants_are_made_of_is_made_before_them():
    module, x = Tables().eval(), torch.randn(4, 6, 8)
    code = load_source(emitted(module, (x,)))
    assert torch.equal(code.run_stages(code.build_stages(module.state_dict()), x), module(x))


def test_a_number_that_sizes_do_not_tell_keeps_the_batch():
    module = Averages().eval()
    source = emitted(module, (torch.randint(0, 20, (4, 6)),))
    assert "Planned for length 6; it takes a length from 2 up." in source
    code = load_source(source)
    ids = torch.randint(0, 20, (4, 9))
    assert torch.equal(code.run_stages(code.build_stages(module.state_dict()), ids), module(ids))


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (Size(8, ("batch",), 1), "batch"),
        (Size(32, ("batch",), 4), "4 * batch"),
        (Size(64, ("batch", "length"), 2), "2 * batch * length"),
        (Size(9, ("length",), 1, 1), "length + 1"),
        (Size(7, ("length",), 1, -1), "length - 1"),
    ],
)
def test_sizes_read_as_products(size, text):
    assert size.text == text
    assert size == int(size)


class Table(Attends):
    """Positions of a table of sixteen."""

    def __init__(self):
        super().__init__()
        self.places = nn.Parameter(torch.arange(16.0))

    def forward(self, ids):
        length = ids.shape[1]
        if length > 16:
            raise ValueError("too long")
        return super().forward(ids) + self.places[:length, None]


def test_ends_of_slices_follow_the_length_and_the_head_says_how_long_texts_may_be():
    module = Table().eval()
    source = emitted(module, (torch.randint(0, 20, (4, 6)),))
    assert "it takes a batch from 2 up and a length from 2 to 16." in source
    code = load_source(source)
    for shape in ((4, 6), (3, 16), (2, 7)):
        ids = torch.randint(0, 20, shape)
        stages = code.build_stages(module.state_dict())
        assert torch.equal(code.run_stages(stages, ids), module(ids))


class Filled(Attends):
    """Filled with as many again."""

    def forward(self, ids):
        return super().forward(nn.functional.pad(ids, (0, ids.shape[1]), value=3))


def test_what_is_filled_up_follows_the_length():
    module, ids = Filled().eval(), torch.randint(0, 20, (3, 5))
    code = load_source(emitted(module, (torch.randint(0, 20, (4, 6)),)))
    assert torch.equal(code.run_stages(code.build_stages(module.state_dict()), ids), module(ids))


class Long(Attends):
    """Longer texts than both that are tried go another way."""

    def forward(self, ids):
        x = super().forward(ids)
        return x if ids.shape[1] < 9 else x.cumsum(1)


class Padded(Attends):
    """Filled up to windows of three, which 6 and 3 are."""

    def forward(self, ids):
        x = super().forward(nn.functional.pad(ids, (0, -ids.shape[1] % 3)))
        return x - x.mean(1, keepdim=True)


class Pooled(Attends):
    """The last stage makes a table of the length, which nothing that it takes tells."""

    def forward(self, ids):
        x = super().forward(ids).mean(1)
        return torch.tanh(torch.tanh(x * torch.arange(ids.shape[1]).sum()))


class Lifted(Attends):
    """A constant made of the length."""

    def forward(self, ids):
        return super().forward(ids) * torch.tensor(float(ids.shape[1]))


@pytest.mark.parametrize(
    ("kind", "head"),
    [
        (Long, "it takes a batch from 2 up and a length from 2 to 8."),
        (Padded, "Planned for batch 4; it takes a batch from 2 up.\nIt is for length 6 alone."),
        (Pooled, "Planned for batch 4; it takes a batch from 2 up.\nIt is for length 6 alone."),
        (Lifted, "Planned for batch 4; it takes a batch from 2 up."),
    ],
)
def test_sizes_that_take_other_steps_are_not_promised(kind, head):
    assert head in emitted(kind().eval(), (torch.randint(0, 20, (4, 6)),), cut=-3)


class Placed(Attends):
    """Rows of a table for each place, none of which says how long texts may be."""

    def __init__(self):
        super().__init__()
        self.places = nn.Embedding(16, 8)

    def rows(self, ids):
        return torch.arange(ids.shape[1])[None]

    def forward(self, ids):
        return super().forward(ids) + self.places(self.rows(ids))


class Offset(Placed):
    """Two rows are for something else."""

    def rows(self, ids):
        return torch.arange(ids.shape[1]).expand(ids.shape) + 2


class Kept(Placed):
    """Numbers of rows that the module holds."""

    def __init__(self):
        super().__init__()
        self.register_buffer("numbers", torch.arange(12)[None], persistent=False)

    def rows(self, ids):
        return self.numbers[:, : ids.shape[1]]


class Summed(Placed):
    """Places are counted: as many as there are words."""

    def rows(self, ids):
        return (ids > 0).long().cumsum(1)


@pytest.mark.parametrize(
    ("kind", "head", "most"),
    [
        (Placed, "and a length from 2 to 16.", 16),
        (Offset, "and a length from 2 to 14.", 14),
        (Kept, "and a length from 2 to 12.", 12),
        (Summed, "a length from 2 up.\nIts tables may reach less far in length.", None),
    ],
)
def test_tables_of_positions_say_how_long_texts_may_be(kind, head, most):
    module = kind().eval()
    source = emitted(module, (torch.randint(0, 20, (4, 6)),))
    assert head in source
    if most is None:
        return
    code = load_source(source)
    stages = code.build_stages(module.state_dict())
    ids = torch.randint(0, 20, (3, most))
    assert torch.equal(code.run_stages(stages, ids), module(ids))
    with pytest.raises((IndexError, RuntimeError)):
        code.run_stages(stages, torch.randint(0, 20, (3, most + 1)))


def test_the_code_of_a_zoos_model_says_how_long_its_texts_may_be():
    def recorded(batch, length):
        return capture_reference(build(f"gpt2@{length}", batch=batch, loss=False), False)[0].record

    others = {
        "batch": Recaptured(recorded(4, 8), 2, 4),
        "length": Recaptured(recorded(2, 4), 8, 4),
    }
    limited = symbolic(recorded(2, 8), others)[1]
    assert (limited["length"].most, limited["batch"].most) == (1024, None)


def test_code_is_the_same_whatever_it_was_planned_for_though_that_takes_two_lines():
    module, ids = Placed().eval(), torch.randint(0, 20, (4, 6))
    captured = export_module(module, (ids,), {})
    others = recaptured_module(module, captured.record, (ids,), {}, 4)
    stage_of = {op.name: 0 for op in captured.graph.ops}
    one = emit(captured, stage_of, others=others)
    longer = {name: replace(each, before=10**20) for name, each in one.sizes.items()}
    said = [planned_for(sizes) for sizes in (one.sizes, longer)]
    source = one.source.replace(said[0], "\n".join(docstring(["", said[1]], 0)[1:-1]))
    assert said[1] not in source  # it was wrapped
    assert same_code(one, replace(one, source=source, sizes=longer))
