"""Names of what passes between emitted stages: the model's words, or the block before."""

import pytest

pytest.importorskip("torch")

import torch
from torch import nn

from partita.capture import export_module
from partita.emit.stages import emit
from partita.run.sequential import load_source


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


class Listed(nn.Module):
    """Sums between its blocks are of no module."""

    def __init__(self):
        super().__init__()
        self.l = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x):
        for block in self.l:
            x = x + block(x)
        return x


class Numbered(nn.Module):
    """The same with names of its own."""

    def __init__(self):
        super().__init__()
        self.block1, self.block2, self.block3 = Block(), Block(), Block()

    def forward(self, x):
        x = x + self.block1(x)
        x = x + self.block2(x)
        return x + self.block3(x)


class Turns(nn.Module):
    def forward(self, x):
        cos = x.mean(-1, keepdim=True).cos()
        sin = x.mean(-1, keepdim=True).sin()
        return cos, sin


class Turned(nn.Module):
    def __init__(self):
        super().__init__()
        self.rotary, self.up, self.down = Turns(), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        cos, sin = self.rotary(x)
        return self.down(self.up(x * cos) * sin) * cos


@pytest.mark.parametrize(
    ("kind", "cuts", "lines"),
    [
        (Listed, (4, 8, 12), ("after_l_0 = stages[0](x)", "after_l_1 = stages[1](after_l_0)")),
        (Numbered, (4, 8), ("after_block1 = stages[0](x)", "stages[2](after_block2)")),
        (Turned, (4,), ("cos, sin = stages[0](x)", "return stages[1](x, cos, sin)")),
    ],
)  # fmt: skip
def test_wires_are_named_by_the_model(kind, cuts, lines):
    module, x = kind().eval(), torch.randn(2, 4)
    captured = export_module(module, (x,), {})
    names = [op.name for op in captured.graph.ops]
    source = emit(
        captured, {name: sum(i >= cut for cut in cuts) for i, name in enumerate(names)}
    ).source
    for line in lines:
        assert line in source
    code = load_source(source)
    stages = code.build_stages(module.state_dict())
    assert torch.equal(code.run_stages(stages, x), module(x))
