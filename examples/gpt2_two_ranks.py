"""GPT-2 small's shapes on synthetic text, trained by two processes on this machine's CPU.

    partita plan examples/gpt2_two_ranks.py:make --cluster 2xA100 --pin pp=2 -o plan.json
    torchrun --standalone --nproc-per-node 2 -m partita run plan.json \
        --data examples/gpt2_two_ranks.py:text --steps 20

The plan is made for two A100s and runs on two CPU ranks: what is planned is which rank computes
what in which order. `make(tiny=True)` is the same model with small sizes.
"""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

VOCABULARY, WIDTH, HEADS, LAYERS, POSITIONS = 50257, 768, 12, 12, 64


class Layer(nn.Module):
    """Attention and a feed-forward part, each behind a norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, positions, width] in and out."""
        batch, positions, width = x.shape
        parts = self.qkv(self.norm1(x)).chunk(3, -1)
        q, k, v = (p.view(batch, positions, self.heads, -1).transpose(1, 2) for p in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, positions, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT2(nn.Module):
    """The model with its loss; the embedding and the last layer share a weight."""

    def __init__(self, vocabulary: int, width: int, heads: int, layers: int, positions: int):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.places = nn.Embedding(positions, width)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        nn.init.normal_(self.tokens.weight, std=0.02)
        self.head.weight = self.tokens.weight

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The loss of one batch."""
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def make(batch: int = 4, tiny: bool = False) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """The model, and the arguments of one call."""
    torch.manual_seed(0)
    sizes = (64, 32, 4, 2, 16) if tiny else (VOCABULARY, WIDTH, HEADS, LAYERS, POSITIONS)
    return GPT2(*sizes), text(0, batch, tiny)


def make_tiny(batch: int = 4) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """A small model of the same form."""
    return make(batch, tiny=True)


def text(step: int, batch: int = 4, tiny: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids that follow a rule, and what comes next: text that can be learned."""
    generator = torch.Generator().manual_seed(step)
    limit, positions = (64, 16) if tiny else (1000, POSITIONS)
    start = torch.randint(limit, (batch, 1), generator=generator)
    ids = (start + 3 * torch.arange(positions + 1)) % limit
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def text_tiny(step: int, batch: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    """The same for the small model."""
    return text(step, batch, tiny=True)
